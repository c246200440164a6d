//! In which way a drive gives most slices of experts: found the first time, then remembered beside the store.
//!
//! ```text
//! home/lanes.json   for each drive and length of a slice: threads, reads in flight of each, bytes a second
//! ```
//! It may be deleted at any time. What cannot be read counts as absent.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memory::lanes::probe;
use memory::source::{ByteSource, FileSource, ReadOptions};
use model::LaneOptions;
use serde::{Deserialize, Serialize};

use crate::receipts::replace;
use crate::terminal::say;

/// A way that was found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Way {
    device: u64,
    slice_bytes: u64,
    lanes: usize,
    depth: usize,
    pub bytes_per_second: f64,
}

impl Way {
    fn options(&self) -> LaneOptions {
        LaneOptions { lanes: self.lanes, depth: self.depth, ..LaneOptions::default() }
    }
}

/// How experts are read: by as many threads as were asked for, or in the way that `find` finds.
pub(crate) fn choose(io_threads: Option<usize>, find: impl FnOnce() -> Option<Way>) -> LaneOptions {
    let default = LaneOptions::default();
    match io_threads {
        Some(lanes) => LaneOptions { lanes, ..default },
        None => find().map_or(default, |way| way.options()),
    }
}

fn remembered(file: &Path) -> Vec<Way> {
    let text = fs::read_to_string(file).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

fn file(home: &Path) -> PathBuf {
    home.join("lanes.json")
}

/// What is remembered of the drive that holds `model`.
pub(crate) fn known(home: &Path, model: &Path, slice_bytes: u64) -> Option<Way> {
    let device = fs::metadata(model).ok()?.dev();
    let is_it = |way: &Way| way.device == device && way.slice_bytes == slice_bytes && way.lanes > 0 && way.depth > 0;
    remembered(&file(home)).into_iter().find(is_it)
}

/// Tries ways to read slices of `slice_bytes` of `model`; the best of them. `None` if it cannot be read: who needs it will
/// say why.
pub(crate) fn measure(model: &Path, slice_bytes: u64) -> Option<Way> {
    let device = fs::metadata(model).ok()?.dev();
    let source: Arc<dyn ByteSource> = Arc::new(FileSource::open(model, ReadOptions::default()).ok()?);
    let ways = probe(&source, slice_bytes).ok()?;
    let best = LaneOptions::choose(&ways, crate::machine::threads_default())?;
    let bytes_per_second = ways.iter().find(|way| way.options == best)?.bytes_per_second.round();
    Some(Way { device, slice_bytes, lanes: best.lanes, depth: best.depth, bytes_per_second })
}

/// The way to read slices of `slice_bytes` of `model`: the remembered one, or the one that is found now.
pub(crate) fn find(home: &Path, model: &Path, slice_bytes: u64) -> Option<Way> {
    if let Some(way) = known(home, model, slice_bytes) {
        return Some(way);
    }
    say("finding out how this drive reads experts best (once)");
    let way = measure(model, slice_bytes)?;
    let file = file(home);
    let mut ways = remembered(&file);
    ways.retain(|old| (old.device, old.slice_bytes) != (way.device, way.slice_bytes));
    ways.push(way);
    let text = serde_json::to_string(&ways).unwrap_or_default();
    // A store that cannot be written to is no reason to fail an answer.
    if let Err(e) = fs::create_dir_all(home).and_then(|()| replace(&file, &text)) {
        say(&format!("{}: {e}: it will be found out again", file.display()));
    }
    Some(way)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_is_tried_once_and_rubbish_counts_as_absent() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        let model = home.join("model");
        fs::write(&model, vec![1; 1 << 20]).unwrap();
        fs::write(file(home), "rubbish").unwrap();
        assert_eq!(known(home, &model, 4096), None);
        let found = find(home, &model, 4096).unwrap();
        assert!(found.bytes_per_second > 0.0);
        assert_eq!(known(home, &model, 4096), Some(found));
        assert_eq!(known(home, &model, 8192), None, "another length of slices");
        // What is remembered is what is used, and another length does not push it out.
        let told = Way { lanes: 7, ..found };
        fs::write(file(home), serde_json::to_string(&[told]).unwrap()).unwrap();
        find(home, &model, 8192).unwrap();
        assert_eq!(choose(None, || find(home, &model, 4096)).lanes, 7);
        assert_eq!(choose(Some(3), || panic!("what was asked for needs no trial")).lanes, 3);
        assert_eq!(find(home, Path::new("nowhere"), 4096), None);
    }
}
