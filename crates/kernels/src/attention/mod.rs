//! Attention over KV blocks of 16 positions.
//!
//! A KV block holds, for each layer and KV head, the keys and then the values of 16 positions (see [`kv`] for their
//! layouts): 16 positions are the lanes of a score, and values of the head those of an output.
//!
//! Definition. Positions are cut into splits of [`SPLIT`], at fixed places. In a split: scores are chains over the head's
//! values; m is their maximum, p = exp(score - m), l the sum of p (16 chains over the blocks, then a tree), and each output
//! o a chain of p · v over the positions. Splits are merged in order: M' = max(M, m), L' = L · exp(M - M') + l · exp(m - M'),
//! O' likewise; the result is O / L. So threads, batches and chunks cannot matter.

pub mod kv;

use crate::activations::{BLOCK_WORDS, quantize_block};
use crate::isa::Level;
use crate::math::{exp, sum16, tanh};
use crate::ops::hadamard;
use crate::quant::{Q4_0, Q8_0};
use crate::simd::{Op, Simd};
use crate::threads::{Cell, GridShape, Pool};
pub use kv::KvType;
use std::cell::RefCell;

/// Positions of a KV block.
pub const KV_BLOCK: usize = 16;
/// Positions of a split.
pub const SPLIT: usize = 256;
/// Query rows (a token and a head) that share the work on a block.
const ROWS: usize = 8;
/// Longest head.
pub const HEAD_LEN_MAX: usize = 256;

/// Shape of attention, the same for all layers that share it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub heads_kv: usize,
    /// Values of a head: a multiple of 16, at most [`HEAD_LEN_MAX`].
    pub head_len: usize,
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

    fn head_bytes(&self) -> usize {
        KV_BLOCK * (self.type_k.bytes(self.head_len) + self.type_v.bytes(self.head_len))
    }
}

/// The KV blocks of one sequence in one layer.
#[derive(Debug, Clone, Copy)]
pub struct KvBlocks<'a> {
    /// Blocks of the sequence in order; each holds all layers.
    pub blocks: &'a [Box<[u8]>],
    /// Where this layer begins in a block, in bytes.
    pub offset_bytes: usize,
}

impl<'a> KvBlocks<'a> {
    /// Keys and values of a head in a block.
    fn head(&self, shape: &Shape, block: usize, head: usize) -> (&'a [u8], &'a [u8]) {
        let len = shape.head_bytes();
        let both = &self.blocks[block][self.offset_bytes + head * len..][..len];
        both.split_at(KV_BLOCK * shape.type_k.bytes(shape.head_len))
    }
}

/// Writes the key and value rows (`heads_kv * head_len` values each) of the position `slot` of a block's layer.
pub fn write_kv(level: Level, shape: &Shape, layer: &mut [u8], slot: usize, key: &[f32], value: &[f32]) {
    level.run(WriteKv { shape, layer, slot, key, value });
}

struct WriteKv<'a> {
    shape: &'a Shape,
    layer: &'a mut [u8],
    slot: usize,
    key: &'a [f32],
    value: &'a [f32],
}

impl Op for WriteKv<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (shape, n) = (self.shape, self.shape.head_len);
        let heads = self.layer.chunks_exact_mut(shape.head_bytes());
        for ((head, key), value) in heads.zip(self.key.chunks_exact(n)).zip(self.value.chunks_exact(n)) {
            let (keys, values) = head.split_at_mut(KV_BLOCK * shape.type_k.bytes(n));
            kv::write_key(s, shape.type_k, keys, self.slot, &kv::rotated(shape.type_k, key)[..n]);
            kv::write_value(s, shape.type_v, values, self.slot, &kv::rotated(shape.type_v, value)[..n]);
        }
    }
}

/// Partial results of one token's heads, for splits that are computed apart.
#[derive(Debug, Default)]
pub struct Scratch {
    /// For each head and split: m, l, then the outputs.
    partial: Vec<f32>,
}

/// Attention of `tokens` consecutive tokens of one sequence, the first at `position`, whose keys and values are in
/// `kv` already. `q` has rows of `q_stride` values with the heads first; `out` has rows of `heads * head_len`.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    pool: &mut Pool,
    level: Level,
    shape: &Shape,
    kv: KvBlocks<'_>,
    position: usize,
    tokens: usize,
    q: &[f32],
    q_stride: usize,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    assert!(
        shape.head_len.is_multiple_of(16)
            && shape.head_len <= HEAD_LEN_MAX
            && shape.heads.is_multiple_of(shape.heads_kv)
    );
    let group = shape.heads / shape.heads_kv;
    let row_len = shape.heads * shape.head_len;
    let first_visible = shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
    let splits = first_visible / SPLIT..(position + tokens).div_ceil(SPLIT);
    let query = Query { shape, kv, position, q, q_stride };
    if tokens == 1 && splits.len() > 1 {
        // Too few heads to share out: splits are tasks too, merged below in the order of the definition.
        let piece = group * (shape.head_len + 2);
        let needed = shape.heads_kv * splits.len() * piece;
        if scratch.partial.len() < needed {
            scratch.partial.resize(needed, 0.0);
        }
        let n = splits.len();
        pool.run_chunks(&mut scratch.partial[..needed], piece, |i, out| {
            let split = splits.start + i % n;
            for (g, out) in (0..group).step_by(ROWS).zip(out.chunks_mut(ROWS * (shape.head_len + 2))) {
                let rows = Rows { head_kv: i / n, token: 0, first: g, tokens: 1, heads: ROWS.min(group - g) };
                WORK.with_borrow_mut(|work| level.run(Partial { query, rows, split, work, out }));
            }
        });
        let partial = &scratch.partial[..needed];
        pool.run_chunks(&mut out[..row_len], shape.head_len, |head, out| {
            let (head_kv, g) = (head / group, head % group);
            level.run(Merge {
                shape,
                partial,
                first: head_kv * n * piece + g * (shape.head_len + 2),
                step: piece,
                splits: n,
                out,
            });
        });
        return;
    }
    // A cell is one KV head's group of heads for as many tokens as fill the rows.
    let cell_tokens = (2 * ROWS / group).clamp(1, 16);
    let grid = GridShape { rows: tokens, row_len, cell_rows: cell_tokens, cell_cols: group * shape.head_len };
    pool.run_grid(out, grid, |token, col, cell| {
        let head_kv = col / (group * shape.head_len);
        let tokens = cell.rows();
        let (step_t, step_g) = if group >= ROWS { (1, ROWS) } else { (ROWS / group, group) };
        for t in (0..tokens).step_by(step_t) {
            for g in (0..group).step_by(step_g) {
                let rows = Rows {
                    head_kv,
                    token: token + t,
                    first: g,
                    tokens: step_t.min(tokens - t),
                    heads: step_g.min(group - g),
                };
                WORK.with_borrow_mut(|work| level.run(Whole { query, rows, work, cell, cell_row: t }));
            }
        }
    });
}

#[derive(Clone, Copy)]
struct Query<'a> {
    shape: &'a Shape,
    kv: KvBlocks<'a>,
    position: usize,
    q: &'a [f32],
    q_stride: usize,
}

/// Up to [`ROWS`] query rows of one KV head: `tokens` tokens, `heads` heads of the group from `first` on.
#[derive(Clone, Copy)]
struct Rows {
    head_kv: usize,
    token: usize,
    first: usize,
    tokens: usize,
    heads: usize,
}

impl Rows {
    fn len(&self) -> usize {
        self.tokens * self.heads
    }
    fn token(&self, r: usize) -> usize {
        self.token + r / self.heads
    }
    fn head(&self, r: usize) -> usize {
        self.first + r % self.heads
    }
}

/// What one thread works with. Rows past those in use hold leftovers, whose results nobody reads.
struct Work {
    /// Scaled queries, rotated if the keys are.
    q: [[f32; HEAD_LEN_MAX]; ROWS],
    /// The same, quantized in double precision, for quantized keys: a group of activations and their rests. (Keys
    /// with outliers turn the error of 8-bit queries into 6 % of perplexity on Qwen2.5.)
    q_quantized: [u32; HEAD_LEN_MAX / 32 * BLOCK_WORDS * ROWS],
    q_rest: [u32; HEAD_LEN_MAX / 32 * BLOCK_WORDS * ROWS],
    /// Scores, then weights, of the positions of a split.
    scores: [[f32; SPLIT]; ROWS],
    /// Results of a split: m, l and o.
    max: [f32; ROWS],
    sum: [f32; ROWS],
    out: [[f32; HEAD_LEN_MAX]; ROWS],
}

thread_local! {
    // Clearing it for every few rows would cost as much as a short context.
    static WORK: RefCell<Work> = const {
        RefCell::new(Work {
            q: [[0.0; HEAD_LEN_MAX]; ROWS],
            q_quantized: [0; HEAD_LEN_MAX / 32 * BLOCK_WORDS * ROWS],
            q_rest: [0; HEAD_LEN_MAX / 32 * BLOCK_WORDS * ROWS],
            scores: [[0.0; SPLIT]; ROWS],
            max: [0.0; ROWS],
            sum: [0.0; ROWS],
            out: [[0.0; HEAD_LEN_MAX]; ROWS],
        })
    };
}

/// One split for some rows. A row that sees none of its positions has a maximum of -infinity.
#[inline(always)]
fn split<S: Simd>(s: S, query: &Query<'_>, rows: Rows, split: usize, work: &mut Work) {
    let shape = query.shape;
    let n = shape.head_len;
    let group = shape.heads / shape.heads_kv;
    // Positions lo..hi are visible to row r; blocks from the first to the last that any row sees.
    let mut visible = [(0, 0); ROWS];
    let (mut first, mut last) = (usize::MAX, 0);
    for r in 0..rows.len() {
        let at = query.position + rows.token(r);
        let lo = shape.window.map_or(0, |w| (at + 1).saturating_sub(w)).max(split * SPLIT);
        let hi = (at + 1).min((split + 1) * SPLIT);
        visible[r] = (lo, hi.max(lo));
        if lo < hi {
            first = first.min(lo / KV_BLOCK);
            last = last.max(hi.div_ceil(KV_BLOCK));
        }
    }
    work.max = [f32::NEG_INFINITY; ROWS];
    work.sum = [0.0; ROWS];
    if first >= last {
        return;
    }
    for r in 0..rows.len() {
        let from = rows.token(r) * query.q_stride + (rows.head_kv * group + rows.head(r)) * n;
        let q = &mut work.q[r][..n];
        for (to, x) in q.iter_mut().zip(&query.q[from..from + n]) {
            *to = x * shape.scale;
        }
        if shape.type_k.is_rotated() {
            hadamard(q);
        }
    }
    // Four rows or eight: the widths of a group of quantized queries.
    let width = if rows.len() <= 4 { 4 } else { ROWS };
    if shape.type_k != KvType::F16 {
        for (r, q) in work.q[..rows.len()].iter().enumerate() {
            let blocks = work.q_quantized.chunks_exact_mut(BLOCK_WORDS * width);
            let rests = work.q_rest.chunks_exact_mut(BLOCK_WORDS * width);
            for ((block, rest), q) in blocks.zip(rests).zip(q[..n].chunks_exact(32)) {
                quantize_block(s, q, None, width, r, block, Some(rest));
            }
        }
    }
    for block in first..last {
        let (keys, _) = query.kv.head(shape, block, rows.head_kv);
        let at = block * KV_BLOCK - split * SPLIT;
        for h in 0..KV_BLOCK / S::LANES {
            if width == 4 {
                score_rows::<S, 4>(s, shape, keys, h, work, at + h * S::LANES);
            } else {
                score_rows::<S, ROWS>(s, shape, keys, h, work, at + h * S::LANES);
            }
        }
    }
    for r in 0..rows.len() {
        let (lo, hi) = visible[r];
        if lo >= hi {
            continue;
        }
        let visible = (lo - split * SPLIT, hi - split * SPLIT);
        (work.max[r], work.sum[r]) = softmax_row(s, &mut work.scores[r], visible, (first, last, split));
    }
    weigh_values(s, query, rows.head_kv, rows.len(), (first, last, split), &work.scores, &mut work.out);
}

/// Scores of the positions of vector `h` for `R` rows.
#[inline(always)]
fn score_rows<S: Simd, const R: usize>(s: S, shape: &Shape, keys: &[u8], h: usize, work: &mut Work, at: usize) {
    let acc = match shape.type_k {
        KvType::F16 => kv::scores_f16::<S, R>(s, keys, h, &work.q, shape.head_len),
        KvType::Q8_0 => kv::scores_quantized::<Q8_0, S, R>(s, keys, h, &work.q_quantized, &work.q_rest),
        KvType::Q4_0 => kv::scores_quantized::<Q4_0, S, R>(s, keys, h, &work.q_quantized, &work.q_rest),
    };
    for r in 0..R {
        let mut score = acc[r];
        if let Some(cap) = shape.soft_cap {
            score = s.f_mul(tanh(s, s.f_div(score, s.f_splat(cap))), s.f_splat(cap));
        }
        s.f_store(score, &mut work.scores[r][at..]);
    }
}

/// Scores to weights in place (0 outside `visible`); returns their maximum and the sum of the weights.
#[inline(always)]
fn softmax_row<S: Simd>(
    s: S,
    scores: &mut [f32; SPLIT],
    (lo, hi): (usize, usize),
    (first, last, split): (usize, usize, usize),
) -> (f32, f32) {
    let blocks = (first * KV_BLOCK - split * SPLIT)..(last * KV_BLOCK - split * SPLIT);
    let mut largest = s.f_splat(f32::NEG_INFINITY);
    for at in blocks.clone().step_by(S::LANES) {
        let x = s.f_load(&scores[at..]);
        let x = s.f_keep(x, lo.saturating_sub(at).min(16), hi.saturating_sub(at).min(16), f32::NEG_INFINITY);
        largest = s.f_max(x, largest);
    }
    let max = s.f_reduce_max(largest);
    let mut sums = [0.0; 16];
    for h in 0..KV_BLOCK / S::LANES {
        let mut sum = s.f_splat(0.0);
        for at in (blocks.start + h * S::LANES..blocks.end).step_by(KV_BLOCK) {
            let x = exp(s, s.f_sub(s.f_load(&scores[at..]), s.f_splat(max)));
            let x = s.f_keep(x, lo.saturating_sub(at).min(16), hi.saturating_sub(at).min(16), 0.0);
            sum = s.f_add(sum, x);
            s.f_store(x, &mut scores[at..]);
        }
        s.f_store(sum, &mut sums[h * S::LANES..]);
    }
    (max, sum16(&sums))
}

/// Sums of weights times values, position by position.
#[inline(always)]
fn weigh_values<S: Simd>(
    s: S,
    query: &Query<'_>,
    head_kv: usize,
    rows: usize,
    span: (usize, usize, usize),
    weights: &[[f32; SPLIT]; ROWS],
    out: &mut [[f32; HEAD_LEN_MAX]; ROWS],
) {
    let n = query.shape.head_len;
    // As many rows at once as the registers hold accumulators for, with two vectors each.
    for at in (0..n).step_by(2 * S::LANES) {
        if at + 2 * S::LANES <= n {
            if rows <= 4 || S::GROUP_MAX < 8 {
                for r in (0..rows).step_by(4) {
                    weigh_piece::<S, 4, 2>(s, query, head_kv, r, at, span, weights, out);
                }
            } else {
                weigh_piece::<S, 8, 2>(s, query, head_kv, 0, at, span, weights, out);
            }
        } else {
            for r in (0..rows).step_by(4) {
                weigh_piece::<S, 4, 1>(s, query, head_kv, r, at, span, weights, out);
            }
        }
    }
}

/// `P` vectors of the outputs of rows `row .. row + R`, from value `at` on.
#[inline(always)]
fn weigh_piece<S: Simd, const R: usize, const P: usize>(
    s: S,
    query: &Query<'_>,
    head_kv: usize,
    row: usize,
    at: usize,
    (first, last, split): (usize, usize, usize),
    weights: &[[f32; SPLIT]; ROWS],
    out: &mut [[f32; HEAD_LEN_MAX]; ROWS],
) {
    let shape = query.shape;
    let mut acc = [[s.f_splat(0.0); P]; R];
    for block in first..last {
        let (_, values) = query.kv.head(shape, block, head_kv);
        let p = block * KV_BLOCK - split * SPLIT;
        let weights = &weights[row..];
        match shape.type_v {
            KvType::F16 => kv::weigh_f16::<S, R, P>(s, values, shape.head_len, at, weights, p, &mut acc),
            KvType::Q8_0 => kv::weigh_q8_0::<S, R, P>(s, values, at, weights, p, &mut acc),
            KvType::Q4_0 => kv::weigh_q4_0::<S, R, P>(s, values, at, weights, p, &mut acc),
        }
    }
    for r in 0..R {
        for k in 0..P {
            s.f_store(acc[r][k], &mut out[row + r][at + k * S::LANES..]);
        }
    }
}

/// Adds a split (m, l, o) to the running (M, L, O).
#[inline(always)]
fn merge<S: Simd>(s: S, (max, sum): (&mut f32, &mut f32), out: &mut [f32], m: f32, l: f32, o: &[f32]) {
    if m == f32::NEG_INFINITY {
        return;
    }
    let both = max.max(m);
    // The first split meets M = -infinity, whose factor is 0 by definition.
    let old = if *max == f32::NEG_INFINITY { 0.0 } else { exp_of(s, *max - both) };
    let new = exp_of(s, m - both);
    *max = both;
    *sum = new.mul_add(l, *sum * old);
    for at in (0..out.len()).step_by(S::LANES) {
        let kept = s.f_mul(s.f_load(&out[at..]), s.f_splat(old));
        s.f_store(s.f_fma(s.f_splat(new), s.f_load(&o[at..]), kept), &mut out[at..]);
    }
}

#[inline(always)]
fn exp_of<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0; 16];
    s.f_store(exp(s, s.f_splat(x)), &mut lanes);
    lanes[0]
}

/// O / L, rotated back if the values were rotated.
#[inline(always)]
fn finish<S: Simd>(s: S, shape: &Shape, out: &mut [f32], sum: f32) {
    for at in (0..out.len()).step_by(S::LANES) {
        s.f_store(s.f_div(s.f_load(&out[at..]), s.f_splat(sum)), &mut out[at..]);
    }
    if shape.type_v.is_rotated() {
        hadamard(out);
    }
}

/// All splits of some rows, merged as they come.
struct Whole<'a, 'c, 'd> {
    query: Query<'a>,
    rows: Rows,
    work: &'c mut Work,
    cell: &'c mut Cell<'d, f32>,
    cell_row: usize,
}

impl Op for Whole<'_, '_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Whole { query, rows, work, cell, cell_row } = self;
        let shape = query.shape;
        let n = shape.head_len;
        let (mut max, mut sum) = ([f32::NEG_INFINITY; ROWS], [0.0; ROWS]);
        let lowest = shape.window.map_or(0, |w| (query.position + rows.token + 1).saturating_sub(w));
        let end = query.position + rows.token + rows.tokens;
        for r in 0..rows.len() {
            cell.row(cell_row + r / rows.heads)[rows.head(r) * n..][..n].fill(0.0);
        }
        for i in lowest / SPLIT..end.div_ceil(SPLIT) {
            split(s, &query, rows, i, work);
            for r in 0..rows.len() {
                let out = &mut cell.row(cell_row + r / rows.heads)[rows.head(r) * n..][..n];
                merge(s, (&mut max[r], &mut sum[r]), out, work.max[r], work.sum[r], &work.out[r]);
            }
        }
        for r in 0..rows.len() {
            let out = &mut cell.row(cell_row + r / rows.heads)[rows.head(r) * n..][..n];
            finish(s, shape, out, sum[r]);
        }
    }
}

/// One split of some rows of one token, left for [`Merge`].
struct Partial<'a, 'o> {
    query: Query<'a>,
    rows: Rows,
    split: usize,
    work: &'o mut Work,
    out: &'o mut [f32],
}

impl Op for Partial<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let work = self.work;
        split(s, &self.query, self.rows, self.split, work);
        let n = self.query.shape.head_len;
        for (r, out) in self.out.chunks_exact_mut(n + 2).enumerate().take(self.rows.len()) {
            out[0] = work.max[r];
            out[1] = work.sum[r];
            out[2..].copy_from_slice(&work.out[r][..n]);
        }
    }
}

/// The splits of one head, in order.
struct Merge<'a, 'o> {
    shape: &'a Shape,
    partial: &'a [f32],
    first: usize,
    step: usize,
    splits: usize,
    out: &'o mut [f32],
}

impl Op for Merge<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        self.out.fill(0.0);
        for i in 0..self.splits {
            let p = &self.partial[self.first + i * self.step..][..self.out.len() + 2];
            merge(s, (&mut max, &mut sum), self.out, p[0], p[1], &p[2..]);
        }
        finish(s, self.shape, self.out, sum);
    }
}
