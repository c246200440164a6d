//! Which layers share a block.

use crate::config::Config;
use residency::kv::Layout;

/// Layers cut into groups of equally many, of one kind each: so a block, which holds 16 positions of one group, has the same
/// length whatever it holds, and what one kind gives up the other can take.
#[derive(Debug)]
pub(crate) struct LayerGroups {
    /// Groups by kind, and the window.
    pub(crate) layout: Layout,
    /// Layers of a group.
    pub(crate) layers: usize,
    /// Of each layer: its group, and its place there.
    places: Vec<(usize, usize)>,
}

impl LayerGroups {
    pub(crate) fn new(config: &Config) -> LayerGroups {
        let windowed = (0..config.layers).filter(|&layer| config.layer_has_window(layer)).count();
        let layers = greatest_common_divisor(config.layers - windowed, windowed);
        let layout = Layout {
            full_groups: (config.layers - windowed) / layers,
            window_groups: windowed / layers,
            window: config.window.unwrap_or(0),
        };
        // Of each kind, the layers so far.
        let (mut full, mut window) = (0, 0);
        let place = |layer| {
            let (count, first) =
                if config.layer_has_window(layer) { (&mut window, layout.full_groups) } else { (&mut full, 0) };
            *count += 1;
            (first + (*count - 1) / layers, (*count - 1) % layers)
        };
        LayerGroups { layout, layers, places: (0..config.layers).map(place).collect() }
    }

    /// The group of a layer, and its place there.
    pub(crate) fn place(&self, layer: usize) -> (usize, usize) {
        self.places[layer]
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Header;
    use fixtures::tiny_model::{Architecture, TinySpec, write};

    fn groups(architecture: Architecture, layers: usize) -> LayerGroups {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tiny.gguf");
        let spec = TinySpec { layers, ..TinySpec::new(architecture, gguf::TensorType::Q8_0) };
        write(&path, &spec).expect("a small file");
        LayerGroups::new(&Header::read(&path).expect("a header").config().expect("its numbers"))
    }

    #[test]
    fn every_layer_has_a_place_of_its_own_in_a_group_of_its_kind() {
        for (architecture, layers, want) in [
            (Architecture::Llama, 2, (1, 0, 2)),
            (Architecture::Gemma3, 5, (0, 1, 5)),
            (Architecture::Gemma3, 7, (1, 6, 1)),
            (Architecture::Gemma3, 18, (1, 5, 3)),
        ] {
            let g = groups(architecture, layers);
            assert_eq!((g.layout.full_groups, g.layout.window_groups, g.layers), want);
            let mut places: Vec<_> = (0..layers).map(|layer| g.place(layer)).collect();
            assert!(places.iter().enumerate().all(|(layer, &(group, place))| {
                let windowed = architecture == Architecture::Gemma3 && (layer + 1) % 6 != 0;
                place < g.layers && (group >= g.layout.full_groups) == windowed
            }));
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), layers);
        }
    }
}
