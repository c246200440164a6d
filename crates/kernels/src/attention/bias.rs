//! The constant part of keys.
//!
//! Keys of models with biases are R(p) (k + b): a part that depends on the token and one that only depends on the position,
//! which in Qwen2.5 is up to fifty times as long. Quantized keys are kept without it, and scores get
//! q · R(p) b = Σ A cos(pf) + B sin(pf) over the pairs of values that are rotated together, f being a pair's frequency:
//! A = q b + q' b' and B = q' b - q b'. At the first position of a KV block A and B are turned to what they are as seen
//! from there, so that the cosines and sines of the 16 positions within are those of any block.

use super::{HEAD_LEN_MAX, KV_BLOCK};
use crate::simd::Simd;

/// What a layer adds to scores.
#[derive(Debug, Clone, Copy, Default)]
pub struct Terms<'a> {
    /// A score for each query head that takes its share of the weights and has no value.
    pub sinks: Option<&'a [f32]>,
    /// A part of all keys that is not in the cache.
    pub key_bias: Option<KeyBias<'a>>,
}

/// A part of all keys before their rotation.
#[derive(Debug, Clone, Copy)]
pub struct KeyBias<'a> {
    /// `heads_kv * head_len` values.
    pub bias: &'a [f32],
    /// For each KV head its pairs that have one, ascending; the others' are 0.
    pub pairs: &'a [Vec<u16>],
    /// How they are rotated.
    pub turns: Turns<'a>,
}

/// Rotary positions. Value `i` of a head is rotated with value `pairs + i`; those from `2 * pairs` on are not rotated.
#[derive(Debug, Clone, Copy)]
pub struct Turns<'a> {
    /// Pairs of a head.
    pub pairs: usize,
    /// For each position `pairs` cosines and as many sines, as keys are multiplied with.
    pub rows: &'a [f32],
    /// For each pair the cosines of positions 0 to 15 and then their sines, of magnitude 1.
    pub within: &'a [f32],
}

/// A query's A, then its B, of each pair.
pub(super) type Waves = [f32; HEAD_LEN_MAX];

/// The waves of a query, and the product of what is not rotated.
#[inline(always)]
pub(super) fn waves(q: &[f32], bias: &[f32], pairs: usize, waves: &mut Waves) -> f32 {
    let (q, q_flat) = q.split_at(2 * pairs);
    let (b, b_flat) = bias.split_at(2 * pairs);
    for i in 0..pairs {
        let (j, k) = (i, pairs + i);
        waves[j] = q[j].mul_add(b[j], q[k] * b[k]);
        waves[k] = q[k].mul_add(b[j], -(q[j] * b[k]));
    }
    q_flat.iter().zip(b_flat).fold(0.0, |sum, (q, b)| q.mul_add(*b, sum))
}

impl Turns<'_> {
    /// The waves of `R` queries as seen from the first position of `block`.
    #[inline(always)]
    pub(super) fn turn<const R: usize>(&self, block: usize, from: &[Waves; R], to: &mut [Waves]) {
        let pairs = self.pairs;
        let (cos, sin) = self.rows[block * KV_BLOCK * 2 * pairs..][..2 * pairs].split_at(pairs);
        for (from, to) in from.iter().zip(to) {
            let (a, b) = from[..2 * pairs].split_at(pairs);
            let (to_a, to_b) = to[..2 * pairs].split_at_mut(pairs);
            for i in 0..pairs {
                to_a[i] = a[i].mul_add(cos[i], b[i] * sin[i]);
                to_b[i] = b[i].mul_add(cos[i], -(a[i] * sin[i]));
            }
        }
    }

    /// Adds the scores of vector `h` of a block for waves, those of `pairs`, that are turned to it.
    #[inline(always)]
    pub(super) fn add<S: Simd, const R: usize>(
        &self,
        s: S,
        pairs: &[u16],
        h: usize,
        waves: &[Waves],
        acc: &mut [S::F; R],
    ) {
        let waves = waves.first_chunk::<R>().expect("waves of a pack");
        for i in pairs.iter().map(|&i| usize::from(i)) {
            let pair = &self.within[2 * KV_BLOCK * i..][..2 * KV_BLOCK];
            let (cos, sin) = (s.f_load(&pair[S::LANES * h..]), s.f_load(&pair[KV_BLOCK + S::LANES * h..]));
            for r in 0..R {
                acc[r] = s.f_fma(cos, s.f_splat(waves[r][i]), acc[r]);
                acc[r] = s.f_fma(sin, s.f_splat(waves[r][self.pairs + i]), acc[r]);
            }
        }
    }
}
