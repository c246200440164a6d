//! Queries times keys, and weights times values: where the time goes.

use super::kv::Values;
use super::tile::PACK;
use super::{HEAD_LEN_MAX, KV_BLOCK, SPLIT};
use crate::activations::BLOCK_WORDS;
use crate::math::sum16;
use crate::matmul::accumulate;
use crate::quant::Quant;
use crate::simd::Simd;
use std::ops::Range;

/// Scores of vector `h` of a block with half-precision keys: chains over the values of the head.
#[inline(always)]
pub(super) fn scores_f16<S: Simd, const R: usize>(
    s: S,
    keys: &[u8],
    h: usize,
    q: &[[f32; HEAD_LEN_MAX]; R],
    head_len: usize,
) -> [S::F; R] {
    let mut acc = [s.f_splat(0.0); R];
    for (i, key) in keys.chunks_exact(2 * KV_BLOCK).take(head_len.min(HEAD_LEN_MAX)).enumerate() {
        let k = s.f_load_f16(&key[2 * S::LANES * h..]);
        for r in 0..R {
            acc[r] = s.f_fma(k, s.f_splat(q[r][i]), acc[r]);
        }
    }
    acc
}

/// Scores with keys in a panel of format `Q`: products as those of weights.
#[inline(always)]
pub(super) fn scores_quantized<Q: Quant, S: Simd, const R: usize>(s: S, keys: &[u8], h: usize, q: &[u32]) -> [S::F; R] {
    let mut acc = [s.f_splat(0.0); R];
    let q = q.as_chunks::<R>().0.chunks_exact(BLOCK_WORDS);
    for (block, q) in keys.chunks_exact(KV_BLOCK * Q::BYTES).zip(q) {
        let head = Q::head(s, block, h);
        let sub = Q::sub(s, block, h, head, 0);
        accumulate::<Q, S, R>(s, &sub, q, &mut acc);
    }
    acc
}

/// `P` vectors of outputs from value `at` on, for the positions of `span` in blocks that `values` finds: chains o of weight
/// times value, then `out = out · factors.0 + o · factors.1`. Returns `P`.
#[inline(always)]
pub(super) fn weigh<'v, V: Values, S: Simd, const R: usize, const P: usize>(
    s: S,
    values: impl Fn(usize) -> &'v [u8],
    value_len: usize,
    at: usize,
    span: Range<usize>,
    weights: &[[f32; SPLIT]; PACK],
    factors: &([f32; 16], [f32; 16]),
    out: &mut [[f32; HEAD_LEN_MAX]; R],
) -> usize {
    let mut acc = [[s.f_splat(0.0); P]; R];
    for block in span.start / KV_BLOCK..span.end.div_ceil(KV_BLOCK) {
        let values = values(block);
        let first = block * KV_BLOCK;
        for position in span.start.max(first)..span.end.min(first + KV_BLOCK) {
            let mut v = [s.f_splat(0.0); P];
            for (k, v) in v.iter_mut().enumerate() {
                *v = V::load(s, values, value_len, position - first, at + k * S::LANES);
            }
            for r in 0..R {
                let w = s.f_splat(weights[r][position]);
                for k in 0..P {
                    acc[r][k] = s.f_fma(w, v[k], acc[r][k]);
                }
            }
        }
    }
    for r in 0..R {
        for k in 0..P {
            // Adding 0 takes the sign off a zero, which weights of 0 for what a row does not see could change.
            let o = s.f_add(acc[r][k], s.f_splat(0.0));
            let to = &mut out[r][at + k * S::LANES..];
            s.f_store(s.f_fma(s.f_splat(factors.1[r]), o, s.f_mul(s.f_load(to), s.f_splat(factors.0[r]))), to);
        }
    }
    P
}

/// As [`weigh`], for one vector of outputs whose values are parts of the keys in `blocks`: of each output 16 chains over the
/// blocks, and the sum of these. Weights of positions outside `span` must be 0.
#[inline(always)]
pub(super) fn weigh_columns<V: Values, S: Simd, const R: usize>(
    s: S,
    blocks: &[&[u8]],
    at: usize,
    span: Range<usize>,
    weights: &[[f32; SPLIT]; PACK],
    factors: &([f32; 16], [f32; 16]),
    out: &mut [[f32; HEAD_LEN_MAX]; R],
) {
    let mut sums = [[0.0; 16]; R];
    for i in 0..S::LANES {
        let mut lanes = [[0.0; KV_BLOCK]; R];
        for h in 0..KV_BLOCK / S::LANES {
            let mut acc = [s.f_splat(0.0); R];
            for (block, keys) in blocks.iter().enumerate().take(span.end.div_ceil(KV_BLOCK)).skip(span.start / KV_BLOCK)
            {
                let first = block * KV_BLOCK + h * S::LANES;
                let (from, to) = [span.start, span.end].map(|end| end.saturating_sub(first).min(S::LANES)).into();
                let mut v = V::column(s, keys, at + i, h);
                if to - from < S::LANES {
                    // What was never written may be no number.
                    v = s.f_keep(v, from, to, 0.0);
                }
                for r in 0..R {
                    acc[r] = s.f_fma(s.f_load(&weights[r][first..]), v, acc[r]);
                }
            }
            for r in 0..R {
                s.f_store(acc[r], &mut lanes[r][h * S::LANES..]);
            }
        }
        for r in 0..R {
            // As above: the sign of a zero.
            sums[r][i] = sum16(&lanes[r]) + 0.0;
        }
    }
    for r in 0..R {
        let to = &mut out[r][at..];
        let o = s.f_load(&sums[r]);
        s.f_store(s.f_fma(s.f_splat(factors.1[r]), o, s.f_mul(s.f_load(to), s.f_splat(factors.0[r]))), to);
    }
}
