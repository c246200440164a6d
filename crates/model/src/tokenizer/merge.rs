//! Merging of neighbouring symbols, best pair first: the loop that BPE and SentencePiece share.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No neighbour.
const NONE: usize = usize::MAX;

/// The id of a symbol whose text is no token.
pub(super) const UNKNOWN: u32 = u32::MAX;

/// A stretch of the text that is one token so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    /// Token id, or [`UNKNOWN`].
    pub(super) id: u32,
    /// First byte in the text.
    pub(super) start: usize,
    /// One past the last byte; equal to `start` once the left neighbour has swallowed it.
    pub(super) end: usize,
    prev: usize,
    next: usize,
}

/// A pair that could be merged: smallest rank first, then leftmost.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    rank: u32,
    left: usize,
    right: usize,
    end: usize,
    merged: u32,
}

/// Symbols and queue, kept between words so that a word costs no allocation.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Pair>>,
}

impl Merger {
    /// Starts a new word.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends the symbol of the text bytes `start..end`.
    pub(super) fn push(&mut self, id: u32, start: usize, end: usize) {
        let index = self.symbols.len();
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        self.symbols.push(Symbol { id, start, end, prev: index.wrapping_sub(1), next: NONE });
    }

    /// Merges until nothing merges any more, in O(n log n). `find` gives the rank of a pair (smaller goes first)
    /// and the token that it makes.
    pub(super) fn run(&mut self, find: impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        // Made a heap at once, which is linear.
        let mut pairs = std::mem::take(&mut self.queue).into_vec();
        pairs.extend((1..self.symbols.len()).filter_map(|right| self.pair(right - 1, right, &find)));
        self.queue = BinaryHeap::from(pairs);
        while let Some(Reverse(pair)) = self.queue.pop() {
            let (left, right) = (self.symbols[pair.left], self.symbols[pair.right]);
            // Either side may have been merged since the pair was proposed.
            if left.next != pair.right || right.end != pair.end {
                continue;
            }
            self.symbols[pair.right].end = right.start;
            self.symbols[pair.right].next = NONE;
            let merged = &mut self.symbols[pair.left];
            merged.id = pair.merged;
            merged.end = right.end;
            merged.next = right.next;
            if right.next != NONE {
                self.symbols[right.next].prev = pair.left;
            }
            self.queue.extend(self.pair(left.prev, pair.left, &find));
            self.queue.extend(self.pair(pair.left, right.next, &find));
        }
    }

    fn pair(
        &self,
        left: usize,
        right: usize,
        find: &impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>,
    ) -> Option<Reverse<Pair>> {
        if left == NONE || right == NONE {
            return None;
        }
        let (rank, merged) = find(&self.symbols[left], &self.symbols[right])?;
        Some(Reverse(Pair { rank, left, right, end: self.symbols[right].end, merged }))
    }

    /// What is left, in text order.
    pub(super) fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|s| s.start != s.end)
    }
}
