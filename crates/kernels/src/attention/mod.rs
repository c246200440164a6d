//! Attention over KV blocks of 16 positions.
//!
//! A KV block holds, for each layer and KV head, the keys and then the values of 16 positions (see [`kv`] for their
//! layouts): 16 positions are the lanes of a score, and values of the head those of an output.
//!
//! Values may be the beginnings of their keys, and then have no bytes of their own (see [`Shape::shared`]).
//!
//! Definition. Positions are cut into splits of [`SPLIT`], at fixed places. In a split: scores are chains over the head's
//! values; m is their maximum, p = exp(score - m), l the sum of p (16 chains over the blocks, then a tree), and each output
//! o a chain of p · v over the positions, or, of a shared value, the tree's sum of 16 chains over the blocks. Splits are merged in order: M' = max(M, m), L' = L · exp(M - M') + l · exp(m - M'),
//! O' likewise; the result is O / L, or where the head has a sink O / (L + exp(sink − M)). So threads, batches and chunks
//! cannot matter.
//!
//! Work. A run's tokens are cut into tiles, and a cell is what one KV head does for a tile: `tile` computes it, a few query
//! rows at a time. All cells of all runs are tasks of one parallel region. A cell that is a large part of the whole (few
//! tokens after many positions) is cut at the splits first; then the region merges what they left.

mod bias;
pub mod kv;
mod products;
mod rounding;
mod tile;

use crate::isa::Level;
use crate::simd::{Op, Simd};
use crate::threads::Pool;
pub use bias::{KeyBias, Terms, Turns};
pub use kv::KvType;
use rounding::{QUERIES, Rounding};
use std::ops::Range;
use tile::{Attend, Finish, Merge, Prepare, Query, ROWS, Rows, WORK, Work};

/// Positions of a KV block.
pub const KV_BLOCK: usize = 16;
/// Positions of a split.
pub const SPLIT: usize = 256;
/// Multiply-adds of a task at least: some microseconds of work.
const CELL_PRODUCTS: usize = 200_000;
/// Longest head: the latent of 512 values and the 64 rotated ones of DeepSeek.
pub const HEAD_LEN_MAX: usize = 576;

/// Shape of attention, the same for all layers that share it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub heads_kv: usize,
    /// Values of a head's query or key: a multiple of 16, at most [`HEAD_LEN_MAX`].
    pub head_len: usize,
    /// Values of a head's value, and of its output: likewise.
    pub value_len: usize,
    /// Whether a value is the beginning of its key, which is longer then and has the same type, and is not kept beside it.
    pub shared: bool,
    /// Factor of the scores.
    pub scale: f32,
    /// Positions that a query sees, its own included; `None` sees all.
    pub window: Option<usize>,
    /// `cap · tanh(score / cap)` for scores.
    pub soft_cap: Option<f32>,
    /// Type of the keys in the cache.
    pub type_k: KvType,
    /// Type of the values in the cache.
    pub type_v: KvType,
}

impl Shape {
    /// Bytes of one KV block of one layer.
    pub fn block_bytes(&self) -> usize {
        self.heads_kv * self.head_bytes()
    }

    /// Query heads that share a KV head.
    fn group(&self) -> usize {
        self.heads / self.heads_kv
    }

    /// The first position that a query at `position` sees.
    fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    fn head_bytes(&self) -> usize {
        let values = if self.shared { 0 } else { self.type_v.bytes(self.value_len) };
        KV_BLOCK * (self.type_k.bytes(self.head_len) + values)
    }

    /// Where a key's first piece ends of those that are rotated apart: a shared value must come out alone.
    fn first_piece(&self) -> usize {
        if self.shared { self.value_len } else { self.head_len }
    }

    fn check(&self) {
        let lens = [self.head_len, self.value_len];
        assert!(lens.iter().all(|len| len.is_multiple_of(16) && *len <= HEAD_LEN_MAX), "heads of {lens:?} values");
        assert!(self.heads.is_multiple_of(self.heads_kv), "{} heads on {}", self.heads, self.heads_kv);
        let beginning = self.value_len < self.head_len && self.type_v == self.type_k;
        assert!(!self.shared || beginning, "a value that is no beginning of its key");
    }
}

/// The KV blocks of one sequence in one layer.
#[derive(Debug, Clone, Copy)]
pub struct KvBlocks<'a> {
    /// This layer's part of each block, in order: [`Shape::block_bytes`] long.
    pub blocks: &'a [&'a [u8]],
}

impl<'a> KvBlocks<'a> {
    /// Keys and values of a head in a block; where they are shared, the keys twice.
    #[inline(always)]
    fn head(&self, shape: &Shape, block: usize, head: usize) -> (&'a [u8], &'a [u8]) {
        let len = shape.head_bytes();
        let both = &self.blocks[block][head * len..][..len];
        if shape.shared { (both, both) } else { both.split_at(KV_BLOCK * shape.type_k.bytes(shape.head_len)) }
    }
}

/// Writes the rows of keys (`heads_kv * head_len` values) and values (`heads_kv * value_len`, none where they are shared) of
/// the position `slot` of a block's layer. Keys of 4 bits are rounded for the token's own `queries` (`heads * head_len` values, or
/// none).
pub fn write_kv(
    level: Level,
    shape: &Shape,
    layer: &mut [u8],
    slot: usize,
    queries: &[f32],
    key: &[f32],
    value: &[f32],
) {
    level.run(WriteKv { shape, layer, slot, queries, key, value });
}

struct WriteKv<'a> {
    shape: &'a Shape,
    layer: &'a mut [u8],
    slot: usize,
    queries: &'a [f32],
    key: &'a [f32],
    value: &'a [f32],
}

impl Op for WriteKv<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (shape, first) = (self.shape, self.shape.first_piece());
        let mut values = self.value.chunks_exact(shape.value_len);
        let known = if shape.type_k == KvType::Q4_0 { self.queries } else { &[] };
        let mut queries = known.chunks_exact(shape.group() * shape.head_len);
        let mut queries_room = if known.is_empty() { None } else { Some([[0.0; QUERIES]; HEAD_LEN_MAX]) };
        let heads = self.layer.chunks_exact_mut(shape.head_bytes()).zip(self.key.chunks_exact(shape.head_len));
        for (head, key) in heads {
            let (keys, room) = head.split_at_mut(KV_BLOCK * shape.type_k.bytes(shape.head_len));
            let own = queries_room.as_mut().zip(queries.next());
            let rounding = own.map(|(room, own)| Rounding::new(own, key.len(), first, room));
            let key = &kv::rotated(shape.type_k, key, first)[..key.len()];
            kv::write_key(s, shape.type_k, keys, self.slot, key, rounding);
            if let (false, Some(value)) = (shape.shared, values.next()) {
                let value = &kv::rotated(shape.type_v, value, value.len())[..value.len()];
                kv::write_value(s, shape.type_v, room, self.slot, value);
            }
        }
    }
}

/// Consecutive tokens of one sequence, whose keys and values are in its cache already.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// The sequence's cache, this layer's.
    pub kv: KvBlocks<'a>,
    /// Row of the first token in queries and outputs.
    pub first: usize,
    /// Tokens.
    pub tokens: usize,
    /// Position of the first.
    pub position: usize,
}

/// Buffers between the parts of a step; they only grow.
#[derive(Debug, Default)]
pub struct Scratch {
    tiles: Vec<Tile>,
    /// Rows of each tile in the output.
    bands: Vec<Range<usize>>,
    /// What is computed apart: a tile, a KV head, and the first of some splits, whose queries are prepared once.
    pieces: Vec<(usize, usize, usize)>,
    /// How many splits that are, but for the last of a head.
    piece_splits: usize,
    /// Results of each split of a piece: for each of its rows m, l, then the outputs.
    partial: Vec<f32>,
}

/// Tokens of one run that are computed together.
#[derive(Debug, Clone)]
struct Tile {
    run: usize,
    /// Tokens of the run.
    tokens: Range<usize>,
    /// Positions that they see.
    positions: Range<usize>,
    /// The first of its pieces, if it is cut.
    piece: Option<usize>,
}

impl Tile {
    fn splits(&self) -> Range<usize> {
        self.positions.start / SPLIT..self.positions.end.div_ceil(SPLIT)
    }
}

/// Attention of `runs`, in ascending order of their rows. `q` has rows of `q_stride` values with the heads first; `out` has
/// rows of `heads * value_len`, of which those of the runs are written.
pub fn attention(
    pool: &mut Pool,
    level: Level,
    shape: &Shape,
    runs: &[Run<'_>],
    q: &[f32],
    q_stride: usize,
    terms: Terms<'_>,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    shape.check();
    let (group, n, Terms { sinks, key_bias }) = (shape.group(), shape.value_len, terms);
    let products = scratch.cut(shape, runs, pool.threads()) * group * (shape.head_len + n);
    let Scratch { tiles, bands, pieces, piece_splits, partial } = scratch;
    let prepared = |tile: &Tile, head_kv, rows: Range<usize>, then: &mut dyn FnMut(Query<'_>, Rows, &mut Work)| {
        let Run { kv, first, position, .. } = runs[tile.run];
        let query = Query { shape, kv, position, q: &q[first * q_stride..], q_stride, key_bias };
        let rows = Rows { head_kv, token: tile.tokens.start, group, first: rows.start, len: rows.len() };
        WORK.with_borrow_mut(|work| {
            level.run(Prepare { query, rows, work });
            then(query, rows, work);
        });
    };
    let row_floats = n + 2;
    let split_floats = pieces.iter().map(|p| tiles[p.0].tokens.len()).max().unwrap_or(0) * group * row_floats;
    let needed = pieces.len() * *piece_splits * split_floats;
    if partial.len() < needed {
        partial.resize(needed, 0.0);
    }
    pool.run_chunks(&mut partial[..needed], *piece_splits * split_floats, |i, out| {
        let (t, head_kv, first) = pieces[i];
        let splits = first..tiles[t].splits().end;
        for rows in chunks(tiles[t].tokens.len() * group) {
            prepared(&tiles[t], head_kv, rows, &mut |query, rows, work| {
                for (split, out) in splits.clone().zip(out.chunks_exact_mut(split_floats)) {
                    level.run(Attend { query, rows, splits: split..split + 1, work });
                    work.save(rows, n, &mut out[rows.first * row_floats..]);
                }
            });
        }
    });
    let partial = &partial[..needed];
    // Merging, and heads with a few positions each, are too little to share out.
    let whole = tiles.iter().all(|tile| tile.piece.is_some()) || products < tiles.len() * CELL_PRODUCTS;
    let heads = if whole { shape.heads_kv } else { 1 };
    pool.run_bands(out, shape.heads * n, bands, heads * group * n, |t, col, cell| {
        let (tile, head_kv) = (&tiles[t], col / (group * n));
        if let Some(piece) = tile.piece {
            let splits = tile.splits().len();
            for head in 0..cell.row(0).len() / n {
                let first = (piece + (head_kv + head / group) * splits.div_ceil(*piece_splits)) * *piece_splits;
                for token in 0..cell.rows() {
                    let row = (token * group + head % group) * row_floats;
                    let partial = &partial[first * split_floats + row..];
                    let out = &mut cell.row(token)[head * n..][..n];
                    let sink = sinks.map(|sinks| sinks[head_kv * group + head]);
                    level.run(Merge { shape, partial, step: split_floats, splits, sink, out });
                }
            }
            return;
        }
        for head in 0..cell.row(0).len() / (group * n) {
            for rows in chunks(tile.tokens.len() * group) {
                prepared(tile, head_kv + head, rows, &mut |query, rows, work| {
                    level.run(Attend { query, rows, splits: tile.splits(), work });
                    level.run(Finish { shape, rows, sinks, work, cell, col: head * group * n });
                });
            }
        }
    });
}

/// Rows that are computed at once.
fn chunks(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(ROWS).map(move |first| first..rows.min(first + ROWS))
}

impl Scratch {
    /// Cuts `runs` into tiles, and those that are too much for one thread into pieces. Returns the positions that all tokens
    /// see, for all KV heads.
    fn cut(&mut self, shape: &Shape, runs: &[Run<'_>], threads: usize) -> usize {
        let (tiles, bands, pieces) = (&mut self.tiles, &mut self.bands, &mut self.pieces);
        tiles.clear();
        bands.clear();
        pieces.clear();
        let tokens = tile_tokens(shape.group());
        let cost = |tile: &Tile| tile.tokens.len() * tile.positions.len();
        let mut total = 0;
        for (run, r) in runs.iter().enumerate() {
            for first in (0..r.tokens).step_by(tokens) {
                let last = r.tokens.min(first + tokens);
                let positions = shape.first_visible(r.position + first)..r.position + last;
                let tile = Tile { run, tokens: first..last, positions, piece: None };
                total += cost(&tile) * shape.heads_kv;
                tiles.push(tile);
                bands.push(r.first + first..r.first + last);
            }
        }
        // A cell that is more than a quarter of a thread's share would leave the others waiting.
        let is_cut = |tile: &Tile| threads > 1 && tile.splits().len() > 1 && cost(tile) * 4 * threads > total;
        let cut = || tiles.iter().filter(|tile| is_cut(tile)).map(|tile| tile.splits().len());
        let longest = cut().max().unwrap_or(1);
        let step = (cut().sum::<usize>() * shape.heads_kv / (4 * threads)).clamp(1, longest);
        // As many pieces of one length.
        let step = longest.div_ceil(longest.div_ceil(step));
        self.piece_splits = step;
        for (t, tile) in tiles.iter_mut().enumerate().filter(|(_, tile)| is_cut(tile)) {
            tile.piece = Some(pieces.len());
            let firsts = |head| tile.splits().step_by(step).map(move |first| (t, head, first));
            pieces.extend((0..shape.heads_kv).flat_map(firsts));
        }
        total
    }
}

/// Tokens of a tile: as many as fill the rows, and if possible groups of rows too.
fn tile_tokens(group: usize) -> usize {
    let fit = (ROWS / group).max(1);
    if fit > 8 { fit / 8 * 8 } else { fit }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(window: Option<usize>) -> Shape {
        let (type_k, type_v) = (KvType::F16, KvType::F16);
        Shape {
            heads: 9,
            heads_kv: 3,
            head_len: 64,
            value_len: 64,
            shared: false,
            scale: 0.125,
            window,
            soft_cap: None,
            type_k,
            type_v,
        }
    }

    fn run(position: usize, tokens: usize) -> Run<'static> {
        Run { kv: KvBlocks { blocks: &[] }, first: 0, tokens, position }
    }

    #[test]
    fn only_cells_that_one_thread_would_finish_last_are_cut() {
        let mut scratch = Scratch::default();
        let mut pieces = |runs: &[Run<'_>], threads| {
            scratch.cut(&shape(None), runs, threads);
            scratch.pieces.len()
        };
        assert_eq!(
            pieces(&[run(16 * SPLIT - 1, 1)], 2),
            3 * 3,
            "a head's 16 splits, six a piece, are all there is to share"
        );
        assert_eq!(pieces(&[run(2 * SPLIT - 1, 1)], 2), 3 * 2, "few splits are pieces of their own");
        assert_eq!(pieces(&[run(16 * SPLIT - 1, 1)], 1), 0, "one thread");
        assert_eq!(pieces(&[run(0, 1)], 2), 0, "one split");
        assert_eq!(pieces(&[run(0, 512)], 2), 0, "enough tiles");
        assert_eq!(pieces(&[run(1000, 1); 8], 2), 0, "enough sequences");
        assert_eq!(pieces(&[run(16 * SPLIT - 1, 1), run(10, 1), run(10, 1)], 2), 3 * 3, "the long one of three");
    }

    #[test]
    fn splits_outside_the_window_and_above_the_diagonal_are_no_work() {
        let mut scratch = Scratch::default();
        scratch.cut(&shape(Some(SPLIT)), &[run(4 * SPLIT, 40)], 1);
        let splits: Vec<_> = scratch.tiles.iter().map(|tile| tile.splits()).collect();
        assert_eq!(splits, [3..5, 3..5, 3..5]);
        scratch.cut(&shape(None), &[run(SPLIT - 16, 32)], 1);
        let splits: Vec<_> = scratch.tiles.iter().map(|tile| tile.splits()).collect();
        assert_eq!(splits, [0..1, 0..2]);
    }
}
