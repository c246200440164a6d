//! One KV head's work for the query rows of a tile.

use super::bias::{KeyBias, Waves, waves};
use super::products::{scores_f16, scores_quantized, weigh, weigh_columns};
use super::{HEAD_LEN_MAX, KV_BLOCK, KvBlocks, KvType, SPLIT, Shape, kv};
use crate::activations::{BLOCK_WORDS, Factors, quantize_row};
use crate::math::{exp, sum16, tanh};
use crate::ops::hadamard;
use crate::quant::{IQ4_NL, Q8_0};
use crate::simd::{Op, Simd};
use crate::threads::Cell;
use std::cell::RefCell;
use std::ops::Range;

/// Query rows (a token and a head) that are computed at once: their keys and values come out of the cache together.
pub(super) const ROWS: usize = 64;
/// Query rows that share registers, at most: as many chains as keep 512-bit multipliers busy.
pub(super) const PACK: usize = 8;

/// The queries of one run.
#[derive(Clone, Copy)]
pub(super) struct Query<'a> {
    pub(super) shape: &'a Shape,
    pub(super) kv: KvBlocks<'a>,
    /// Position of the first token.
    pub(super) position: usize,
    pub(super) q: &'a [f32],
    pub(super) q_stride: usize,
    pub(super) key_bias: Option<KeyBias<'a>>,
}

impl Query<'_> {
    /// Positions of `split` that `token` sees, counted from its start.
    #[inline(always)]
    fn visible(&self, token: usize, split: usize) -> (usize, usize) {
        let at = self.position + token;
        let within = |position: usize| position.saturating_sub(split * SPLIT).min(SPLIT);
        (within(self.shape.first_visible(at)), within(at + 1))
    }
}

/// Rows of a tile for one KV head: row `r` is a head of the group for a token, tokens first.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) head_kv: usize,
    /// First token of the tile, in its run.
    pub(super) token: usize,
    /// Heads of the group.
    pub(super) group: usize,
    /// First row.
    pub(super) first: usize,
    /// Rows, at most [`ROWS`].
    pub(super) len: usize,
}

impl Rows {
    fn token(&self, r: usize) -> usize {
        self.token + (self.first + r) / self.group
    }
    /// Within the group.
    fn head(&self, r: usize) -> usize {
        (self.first + r) % self.group
    }
}

/// Words of a quantized query.
const QUERY_WORDS: usize = HEAD_LEN_MAX / 32 * BLOCK_WORDS;

/// What one thread works with. Rows past those in use hold leftovers, whose results nobody reads.
pub(super) struct Work {
    /// Scaled queries, rotated if the keys are.
    pub(super) q: [[f32; HEAD_LEN_MAX]; ROWS],
    /// The same for quantized keys, quantized as activations are: each pack is a group of them.
    pub(super) q_quantized: [u32; QUERY_WORDS * ROWS],
    /// What they make of the constant part of keys, and the part of it that is not rotated.
    waves: [Waves; ROWS],
    flat: [f32; ROWS],
    /// The waves of a pack at a block.
    turned: [Waves; PACK],
    /// Scores, then weights, of the positions of a split.
    pub(super) scores: [[f32; SPLIT]; PACK],
    /// Weights times the scales of quantized values.
    pub(super) scaled: [[f32; SPLIT]; PACK],
    /// M, L and O of the splits so far.
    max: [f32; ROWS],
    sum: [f32; ROWS],
    pub(super) out: [[f32; HEAD_LEN_MAX]; ROWS],
}

thread_local! {
    // Clearing it for every tile would cost as much as a short context.
    pub(super) static WORK: RefCell<Work> = const {
        RefCell::new(Work {
            q: [[0.0; HEAD_LEN_MAX]; ROWS],
            q_quantized: [0; QUERY_WORDS * ROWS],
            waves: [[0.0; HEAD_LEN_MAX]; ROWS],
            flat: [0.0; ROWS],
            turned: [[0.0; HEAD_LEN_MAX]; PACK],
            scores: [[0.0; SPLIT]; PACK],
            scaled: [[0.0; SPLIT]; PACK],
            max: [0.0; ROWS],
            sum: [0.0; ROWS],
            out: [[0.0; HEAD_LEN_MAX]; ROWS],
        })
    };
}

impl Work {
    /// M, L and O of each row, one after the other.
    pub(super) fn save(&self, rows: Rows, value_len: usize, out: &mut [f32]) {
        for (r, out) in out.chunks_exact_mut(value_len + 2).take(rows.len).enumerate() {
            (out[0], out[1]) = (self.max[r], self.sum[r]);
            out[2..].copy_from_slice(&self.out[r][..value_len]);
        }
    }
}

/// Makes the queries of some rows ready for [`Attend`].
pub(super) struct Prepare<'a, 'w> {
    pub(super) query: Query<'a>,
    pub(super) rows: Rows,
    pub(super) work: &'w mut Work,
}

impl Op for Prepare<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        prepare(s, &self.query, self.rows, self.work);
    }
}

/// Some splits of some rows that are prepared, merged in order: leaves M, L and O in `work`.
pub(super) struct Attend<'a, 'w> {
    pub(super) query: Query<'a>,
    pub(super) rows: Rows,
    pub(super) splits: Range<usize>,
    pub(super) work: &'w mut Work,
}

impl Op for Attend<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Attend { query, rows, splits, work } = self;
        let pack_len = pack_len::<S>();
        work.max = [f32::NEG_INFINITY; ROWS];
        work.sum = [0.0; ROWS];
        work.out[..rows.len].iter_mut().for_each(|out| out[..query.shape.value_len].fill(0.0));
        for split in splits {
            for first in (0..rows.len).step_by(pack_len) {
                let pack = Pack { query: &query, rows, first, len: pack_len.min(rows.len - first), split };
                match width(pack.len) {
                    1 => pack.run::<S, 1>(s, work),
                    2 => pack.run::<S, 2>(s, work),
                    3 => pack.run::<S, 3>(s, work),
                    4 => pack.run::<S, 4>(s, work),
                    // Registers for eight rows: never asked for elsewhere, nor built.
                    _ if S::LANES == 16 => pack.run::<S, PACK>(s, work),
                    _ => (),
                }
            }
        }
    }
}

/// Rows of a pack.
const fn pack_len<S: Simd>() -> usize {
    if S::LANES == 16 { PACK } else { 4 }
}

/// Rows that the code for `len` rows computes.
fn width(len: usize) -> usize {
    if len <= 4 { len } else { PACK }
}

/// Scales, rotates and quantizes the queries.
#[inline(always)]
fn prepare<S: Simd>(s: S, query: &Query<'_>, rows: Rows, work: &mut Work) {
    let shape = query.shape;
    let n = shape.head_len;
    for r in 0..rows.len {
        let from = rows.token(r) * query.q_stride + (rows.head_kv * rows.group + rows.head(r)) * n;
        let q = &mut work.q[r][..n];
        for (to, x) in q.iter_mut().zip(&query.q[from..from + n]) {
            *to = x * shape.scale;
        }
        if let Some(KeyBias { bias, turns, .. }) = &query.key_bias {
            work.flat[r] = waves(q, &bias[rows.head_kv * n..][..n], turns.pairs, &mut work.waves[r]);
        }
        if shape.type_k.is_rotated() {
            kv::rotate(q, shape.first_piece());
        }
    }
    if shape.type_k == KvType::F16 {
        return;
    }
    for first in (0..rows.len).step_by(pack_len::<S>()) {
        let len = pack_len::<S>().min(rows.len - first);
        let width = width(len);
        let words = first * QUERY_WORDS;
        for (r, q) in work.q[first..first + len].iter().enumerate() {
            quantize_row(s, &q[..n], Factors(None), width, r, &mut work.q_quantized[words..], None);
        }
    }
}

/// Rows `first .. first + len` in one split.
struct Pack<'a> {
    query: &'a Query<'a>,
    rows: Rows,
    first: usize,
    len: usize,
    split: usize,
}

impl Pack<'_> {
    /// Adds the split to M, L and O. `R` rows are computed, at least `len`.
    #[inline(always)]
    fn run<S: Simd, const R: usize>(self, s: S, work: &mut Work) {
        let mut visible = [(0, 0); R];
        let (mut from, mut to) = (SPLIT, 0);
        for (r, visible) in visible.iter_mut().enumerate().take(self.len) {
            *visible = self.query.visible(self.rows.token(self.first + r), self.split);
            if visible.0 < visible.1 {
                (from, to) = (from.min(visible.0), to.max(visible.1));
            }
        }
        let span = from..to;
        if span.is_empty() {
            return;
        }
        self.score::<S, R>(s, span.clone(), work);
        let (mut m, mut l) = ([f32::NEG_INFINITY; 16], [0.0; 16]);
        if R == PACK {
            // The registers hold the exponentials of four rows.
            for first in [0, PACK / 2] {
                softmax_from::<S, { PACK / 2 }>(s, first, work, &visible, &span, &mut m, &mut l);
            }
        } else {
            softmax_from::<S, R>(s, 0, work, &visible, &span, &mut m, &mut l);
        }
        let rows = self.first..self.first + self.len;
        let (mut max, mut sum) = ([f32::NEG_INFINITY; 16], [0.0; 16]);
        max[..self.len].copy_from_slice(&work.max[rows.clone()]);
        sum[..self.len].copy_from_slice(&work.sum[rows.clone()]);
        let factors = merge(s, self.len, &mut max, &mut sum, &m, &l);
        work.max[rows.clone()].copy_from_slice(&max[..self.len]);
        work.sum[rows].copy_from_slice(&sum[..self.len]);
        self.weigh::<S, R>(s, span, &factors, work);
    }

    /// Keys and values of a block of the split.
    #[inline(always)]
    fn block(&self, block: usize) -> (&[u8], &[u8]) {
        self.query.kv.head(self.query.shape, self.split * (SPLIT / KV_BLOCK) + block, self.rows.head_kv)
    }

    /// Scores of the blocks of `span`.
    #[inline(always)]
    fn score<S: Simd, const R: usize>(&self, s: S, span: Range<usize>, work: &mut Work) {
        let shape = self.query.shape;
        let q = work.q[self.first..].first_chunk::<R>().expect("rows in whole packs");
        let q8 = &work.q_quantized[self.first * QUERY_WORDS..];
        let waves = work.waves[self.first..].first_chunk::<R>().expect("rows in whole packs");
        // A head whose pairs have none is spared the turning.
        let key_bias = self.query.key_bias.map(|KeyBias { pairs, turns, .. }| (&pairs[self.rows.head_kv][..], turns));
        for block in span.start / KV_BLOCK..span.end.div_ceil(KV_BLOCK) {
            let (keys, _) = self.block(block);
            if let Some((_, turns)) = key_bias.filter(|(pairs, _)| !pairs.is_empty()) {
                turns.turn(self.split * (SPLIT / KV_BLOCK) + block, waves, &mut work.turned);
            }
            for h in 0..KV_BLOCK / S::LANES {
                let mut acc = match shape.type_k {
                    KvType::F16 => scores_f16::<S, R>(s, keys, h, q, shape.head_len),
                    KvType::Q8_0 => scores_quantized::<Q8_0, S, R>(s, keys, h, q8),
                    KvType::Q4_0 => scores_quantized::<IQ4_NL, S, R>(s, keys, h, q8),
                };
                if let Some((pairs, turns)) = &key_bias {
                    for (acc, flat) in acc.iter_mut().zip(&work.flat[self.first..]) {
                        *acc = s.f_add(*acc, s.f_splat(*flat));
                    }
                    turns.add(s, pairs, h, &work.turned, &mut acc);
                }
                for (score, to) in acc.into_iter().zip(&mut work.scores) {
                    let score = match shape.soft_cap {
                        Some(cap) => s.f_mul(tanh(s, s.f_div(score, s.f_splat(cap))), s.f_splat(cap)),
                        None => score,
                    };
                    s.f_store(score, &mut to[block * KV_BLOCK + h * S::LANES..]);
                }
            }
        }
    }

    /// O = O · factors.0 + o · factors.1, o being the sums of weights times values.
    #[inline(always)]
    fn weigh<S: Simd, const R: usize>(
        &self,
        s: S,
        span: Range<usize>,
        factors: &([f32; 16], [f32; 16]),
        work: &mut Work,
    ) {
        match self.query.shape.type_v {
            KvType::F16 => self.weigh_rows::<kv::F16, S, R>(s, span, factors, work),
            KvType::Q8_0 => self.weigh_rows::<kv::Q8, S, R>(s, span, factors, work),
            KvType::Q4_0 => self.weigh_rows::<kv::Q4, S, R>(s, span, factors, work),
        }
    }

    #[inline(always)]
    fn weigh_rows<V: kv::Values, S: Simd, const R: usize>(
        &self,
        s: S,
        span: Range<usize>,
        factors: &([f32; 16], [f32; 16]),
        work: &mut Work,
    ) {
        let (n, shared) = (self.query.shape.value_len, self.query.shape.shared);
        let Work { scores, scaled, out, .. } = work;
        let out = out[self.first..].first_chunk_mut::<R>().expect("rows in whole packs");
        let mut blocks = [&[][..]; SPLIT / KV_BLOCK];
        let used = span.start / KV_BLOCK..span.end.div_ceil(KV_BLOCK);
        used.clone().for_each(|block| blocks[block] = self.block(block).1);
        let mut at = 0;
        while at < n {
            if V::SCALED && at % 32 == 0 {
                for block in used.clone() {
                    scale_weights::<V, S, R>(s, blocks[block], at, block * KV_BLOCK, &span, scores, scaled);
                }
            }
            let weights = if V::SCALED { &*scaled } else { &*scores };
            // Few rows need more vectors to keep the multipliers busy; many do it with one, and read it once.
            let vectors = if V::SCALED { (32 - at % 32) / S::LANES } else { (n - at) / S::LANES };
            if shared {
                weigh_columns::<V, S, R>(s, &blocks, at, span.clone(), weights, factors, out);
                at += S::LANES;
                continue;
            }
            let values = |block: usize| blocks[block];
            at += S::LANES
                * if (R <= 4 || S::LANES < 16) && vectors >= 4 {
                    weigh::<V, S, R, 4>(s, values, n, at, span.clone(), weights, factors, out)
                } else if (R <= 4 || S::LANES < 16) && vectors >= 2 {
                    weigh::<V, S, R, 2>(s, values, n, at, span.clone(), weights, factors, out)
                } else {
                    weigh::<V, S, R, 1>(s, values, n, at, span.clone(), weights, factors, out)
                };
        }
    }
}

/// Weights of the positions of a block times their scales for values from `at` on; 0 outside `span`.
#[inline(always)]
fn scale_weights<V: kv::Values, S: Simd, const R: usize>(
    s: S,
    values: &[u8],
    at: usize,
    position: usize,
    span: &Range<usize>,
    weights: &[[f32; SPLIT]; PACK],
    scaled: &mut [[f32; SPLIT]; PACK],
) {
    for h in (0..KV_BLOCK).step_by(S::LANES) {
        let (from, to) = [span.start, span.end].map(|end| end.saturating_sub(position + h).min(S::LANES)).into();
        let mut scale = s.f_load_f16(&V::scales(values, at)[2 * h..]);
        if to - from < S::LANES {
            // What was never written may be no number.
            scale = s.f_keep(scale, from, to, 0.0);
        }
        for r in 0..R {
            let w = s.f_load(&weights[r][position + h..]);
            s.f_store(s.f_mul(w, scale), &mut scaled[r][position + h..]);
        }
    }
}

/// [`softmax`] of rows `first .. first + G` of a pack.
#[inline(always)]
fn softmax_from<S: Simd, const G: usize>(
    s: S,
    first: usize,
    work: &mut Work,
    visible: &[(usize, usize)],
    span: &Range<usize>,
    m: &mut [f32; 16],
    l: &mut [f32; 16],
) {
    let (scores, visible) = (work.scores[first..].first_chunk_mut(), visible[first..].first_chunk());
    let (m, l) = (m[first..].first_chunk_mut(), l[first..].first_chunk_mut());
    if let (Some(scores), Some(visible), Some(m), Some(l)) = (scores, visible, m, l) {
        softmax::<S, G>(s, scores, visible, span, m, l);
    }
}

/// Scores of `G` rows to weights in place, 0 where a row does not see a position; m is their maximum, l their sum. All
/// rows go side by side, because one waits long for its maximum, each exponential and its sum.
#[inline(always)]
fn softmax<S: Simd, const G: usize>(
    s: S,
    scores: &mut [[f32; SPLIT]; G],
    visible: &[(usize, usize); G],
    span: &Range<usize>,
    m: &mut [f32; G],
    l: &mut [f32; G],
) {
    let blocks = span.start / KV_BLOCK * KV_BLOCK..span.end.next_multiple_of(KV_BLOCK);
    // Positions that all rows see need no mask.
    let all = visible.iter().fold(0..SPLIT, |all, v| all.start.max(v.0)..all.end.min(v.1));
    let keep = |x: S::F, r: usize, at: usize, fill: f32| {
        let within = |position: usize| position.saturating_sub(at).min(16);
        s.f_keep(x, within(visible[r].0), within(visible[r].1), fill)
    };
    let mut largest = [s.f_splat(f32::NEG_INFINITY); G];
    for at in blocks.clone().step_by(S::LANES) {
        let mask = at < all.start || at + S::LANES > all.end;
        for r in 0..G {
            let x = s.f_load(&scores[r][at..]);
            let x = if mask { keep(x, r, at, f32::NEG_INFINITY) } else { x };
            largest[r] = s.f_max(x, largest[r]);
        }
    }
    for r in 0..G {
        m[r] = s.f_reduce_max(largest[r]);
    }
    let mut sums = [[0.0; 16]; G];
    for h in 0..KV_BLOCK / S::LANES {
        let mut sum = [s.f_splat(0.0); G];
        for at in (blocks.start + h * S::LANES..blocks.end).step_by(KV_BLOCK) {
            let mask = at < all.start || at + S::LANES > all.end;
            for r in 0..G {
                let x = exp(s, s.f_sub(s.f_load(&scores[r][at..]), s.f_splat(m[r])));
                let x = if mask { keep(x, r, at, 0.0) } else { x };
                sum[r] = s.f_add(sum[r], x);
                s.f_store(x, &mut scores[r][at..]);
            }
        }
        for r in 0..G {
            s.f_store(sum[r], &mut sums[r][h * S::LANES..]);
        }
    }
    for r in 0..G {
        l[r] = sum16(&sums[r]);
    }
}

/// Adds m and l of `len` rows to M and L; returns the factors of O and of o. A split of which a row sees nothing (m is
/// -infinity, l and o are 0) changes nothing, and the first replaces the beginning (M is -infinity, L and O are 0): there
/// `exp` of -infinity, and of its difference to itself, is some number that meets a 0.
#[inline(always)]
fn merge<S: Simd>(
    s: S,
    len: usize,
    max: &mut [f32; 16],
    sum: &mut [f32; 16],
    m: &[f32; 16],
    l: &[f32; 16],
) -> ([f32; 16], [f32; 16]) {
    let (mut old, mut new) = ([0.0; 16], [0.0; 16]);
    for at in (0..len).step_by(S::LANES) {
        let (a, b) = (s.f_load(&max[at..]), s.f_load(&m[at..]));
        let both = s.f_max(a, b);
        let (f, g) = (exp(s, s.f_sub(a, both)), exp(s, s.f_sub(b, both)));
        let total = s.f_fma(g, s.f_load(&l[at..]), s.f_mul(s.f_load(&sum[at..]), f));
        s.f_store(both, &mut max[at..]);
        s.f_store(total, &mut sum[at..]);
        s.f_store(f, &mut old[at..]);
        s.f_store(g, &mut new[at..]);
    }
    (old, new)
}

/// O / L, rotated back if the values were rotated. With a sink, e^(sink − M) is added to L first.
#[inline(always)]
fn finish<S: Simd>(s: S, shape: &Shape, (max, sum): (f32, f32), sink: Option<f32>, from: &[f32], out: &mut [f32]) {
    let sum = sink.map_or(s.f_splat(sum), |sink| s.f_add(s.f_splat(sum), exp(s, s.f_splat(sink - max))));
    for at in (0..out.len()).step_by(S::LANES) {
        s.f_store(s.f_div(s.f_load(&from[at..]), sum), &mut out[at..]);
    }
    if shape.type_v.is_rotated() {
        hadamard(out);
    }
}

/// The results of rows that have seen all their splits, into the cell of their tile.
pub(super) struct Finish<'a, 'c, 'd> {
    pub(super) shape: &'a Shape,
    pub(super) rows: Rows,
    /// Of each query head.
    pub(super) sinks: Option<&'a [f32]>,
    pub(super) work: &'a Work,
    pub(super) cell: &'c mut Cell<'d, f32>,
    /// Where the KV head's group begins in the cell.
    pub(super) col: usize,
}

impl Op for Finish<'_, '_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.shape.value_len;
        for r in 0..self.rows.len {
            let token = self.rows.token(r) - self.rows.token;
            let head = self.rows.head_kv * self.rows.group + self.rows.head(r);
            let out = &mut self.cell.row(token)[self.col + self.rows.head(r) * n..][..n];
            let (sums, sink) = ((self.work.max[r], self.work.sum[r]), self.sinks.map(|sinks| sinks[head]));
            finish(s, self.shape, sums, sink, &self.work.out[r], out);
        }
    }
}

/// The saved splits of one row, in order, `step` values apart.
pub(super) struct Merge<'a, 'o> {
    pub(super) shape: &'a Shape,
    pub(super) partial: &'a [f32],
    pub(super) step: usize,
    pub(super) splits: usize,
    pub(super) sink: Option<f32>,
    pub(super) out: &'o mut [f32],
}

impl Op for Merge<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.out.len();
        let (mut max, mut sum, mut o) = ([f32::NEG_INFINITY; 16], [0.0; 16], [0.0; HEAD_LEN_MAX]);
        for i in 0..self.splits {
            let (m, rest) = self.partial[i * self.step..][..n + 2].split_at(1);
            let (l, rest) = rest.split_at(1);
            let (old, new) = merge(s, 1, &mut max, &mut sum, &[m[0]; 16], &[l[0]; 16]);
            for at in (0..n).step_by(S::LANES) {
                let kept = s.f_mul(s.f_load(&o[at..]), s.f_splat(old[0]));
                s.f_store(s.f_fma(s.f_splat(new[0]), s.f_load(&rest[at..]), kept), &mut o[at..]);
            }
        }
        finish(s, self.shape, (max[0], sum[0]), self.sink, &o, self.out);
    }
}
