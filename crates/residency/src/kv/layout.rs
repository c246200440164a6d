//! How many blocks positions take.

/// Positions of a block.
pub const BLOCK_TOKENS: usize = 16;

/// The layer groups of a model: sets of equally many layers that hold a block each for every 16 positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Groups whose layers see every position.
    pub full_groups: usize,
    /// Groups whose layers see a window.
    pub window_groups: usize,
    /// Positions that they see, the query's own included.
    pub window: usize,
}

impl Layout {
    /// Blocks of one position, and of those that share it.
    pub fn groups(&self) -> usize {
        self.full_groups + self.window_groups
    }

    /// The first of the blocks of 16 positions that the query at `position` sees through the window.
    pub fn first_visible(&self, position: usize) -> usize {
        if self.window_groups == 0 { 0 } else { (position + 1).saturating_sub(self.window) / BLOCK_TOKENS }
    }

    /// The most blocks that a window group holds, when at most `chunk` positions are computed at once: the first query of a
    /// chunk sees window − 1 positions before it, and a row of positions may begin and end inside blocks.
    pub fn window_blocks_max(&self, chunk: usize) -> usize {
        self.window.saturating_add(chunk).saturating_add(2 * BLOCK_TOKENS - 3) / BLOCK_TOKENS
    }

    /// The most blocks that a sequence of up to `len` positions holds, when at most `chunk` are computed at once.
    pub fn blocks_max(&self, len: usize, chunk: usize) -> usize {
        let all = len.div_ceil(BLOCK_TOKENS);
        let seen = all.min(self.window_blocks_max(chunk));
        all.saturating_mul(self.full_groups).saturating_add(seen.saturating_mul(self.window_groups))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_behind_the_window_do_not_count() {
        let layout = Layout { full_groups: 1, window_groups: 5, window: 512 };
        assert_eq!([0, 511, 512, 527, 528].map(|p| layout.first_visible(p)), [0, 0, 0, 1, 1]);
        assert_eq!(layout.blocks_max(100, 64), 7 * 6);
        for chunk in [1, 64, 512] {
            // Whatever the position at which the chunk begins.
            let most = (0..4096usize).map(|at| (at + chunk).div_ceil(BLOCK_TOKENS) - layout.first_visible(at)).max();
            assert_eq!(Some(layout.window_blocks_max(chunk)), most, "chunks of {chunk}");
            assert_eq!(layout.blocks_max(8192, chunk), 512 + 5 * layout.window_blocks_max(chunk));
        }
        assert!(layout.blocks_max(usize::MAX, usize::MAX) > 1 << 60, "no overflow");
        let plain = Layout { full_groups: 1, window_groups: 0, window: 0 };
        assert_eq!((plain.first_visible(5000), plain.blocks_max(5000, 64)), (0, 313));
    }
}
