//! What is known of a layer's keys before the first is computed. It makes them easier to quantize and changes no score.
//!
//! Biases of keys that are large are taken out (and added to scores by the kernels). Then values that are rotated together
//! are multiplied by √(rms of queries / rms of keys), and those of queries divided by it: so the error of quantization, which
//! a Hadamard transform spreads evenly over the head, costs each of them the same. The norms of queries and keys tell how
//! large they will be, or their biases do.

use super::Layer;
use kernels::attention::{KeyBias, Turns};
use std::ops::Range;

/// Root mean square of a head's bias from which it is taken out of its keys. What depends on the token is about as large in all
/// models that were looked at.
const BIAS_RMS_MIN: f32 = 2.0;
/// Length of the part of a pair from which it is taken out then. Each takes as long as sixteen values of the head do; of
/// Qwen2.5-Coder's, a quarter is as long.
const BIAS_PAIR_MIN: f32 = 4.0;

/// Constants of a layer's keys.
#[derive(Debug, Default)]
pub(crate) struct KeyPrior {
    /// Part of all keys before their rotation.
    bias: Option<Vec<f32>>,
    /// Factor of each value of the keys, and what queries are divided by.
    factor: Option<Vec<f32>>,
    /// The part that is taken out, multiplied.
    scaled_bias: Option<Vec<f32>>,
    /// For each KV head the pairs that it has.
    pairs: Vec<Vec<u16>>,
}

/// Values of queries and keys of a layer.
struct Heads {
    heads: usize,
    heads_kv: usize,
    head_len: usize,
    /// Values that are rotated together.
    pairs: usize,
}

impl KeyPrior {
    /// Of `layer`, whose heads are `head_len` long, `rope_len` of it rotated.
    pub(super) fn new(layer: &Layer, heads_kv: usize, head_len: usize, rope_len: usize) -> KeyPrior {
        let heads = Heads { heads: layer.q.rows / head_len, heads_kv, head_len, pairs: rope_len / 2 };
        if let (Some(q), Some(k)) = (&layer.q_norm, &layer.k_norm) {
            // Whatever a bias adds is normalized with the rest.
            // What a norm of queries amplifies is larger than others before: it counts for 3/2 (measured on Gemma 3: a fifth
            // less distance of the attention weights than with 1).
            let queries = |kv| heads.queries(q, kv).into_iter().map(|square| square * square.sqrt()).collect();
            let factor = heads.factor(queries, |kv| heads.squares(k, kv..kv + 1));
            return KeyPrior { factor: Some(factor), ..KeyPrior::default() };
        }
        let Some(k) = &layer.k.bias else { return KeyPrior::default() };
        KeyPrior::of_biases(&heads, layer.q.bias.as_deref(), k)
    }

    /// Of biases of queries, if they have any, and of keys.
    fn of_biases(heads: &Heads, q: Option<&[f32]>, k: &[f32]) -> KeyPrior {
        let Heads { head_len, pairs, .. } = *heads;
        let rms = |head: &[f32]| (head.iter().map(|b| b * b).sum::<f32>() / head_len as f32).sqrt();
        let mut rest = k.to_vec();
        let take_out = |head: &mut [f32]| {
            if rms(head) < BIAS_RMS_MIN {
                return Vec::new();
            }
            let is_long = |&i: &usize| head[i].hypot(head[pairs + i]) >= BIAS_PAIR_MIN;
            let long: Vec<usize> = (0..pairs).filter(is_long).collect();
            long.iter().for_each(|&i| (head[i], head[pairs + i]) = (0.0, 0.0));
            head[2 * pairs..].fill(0.0);
            long.into_iter().map(|i| i as u16).collect()
        };
        let pairs: Vec<Vec<u16>> = rest.chunks_exact_mut(head_len).map(take_out).collect();
        // Without a bias nothing is known of queries.
        let factor = q.map(|q| {
            let keys = |kv: usize| match heads.squares(&rest, kv..kv + 1) {
                squares if pairs[kv].is_empty() => with_input(squares),
                squares => squares.into_iter().map(|square| square + BIAS_RMS_MIN * BIAS_RMS_MIN).collect(),
            };
            heads.factor(|kv| with_input(heads.queries(q, kv)), keys)
        });
        let bias: Vec<f32> = k.iter().zip(&rest).map(|(k, rest)| k - rest).collect();
        let bias = Some(bias).filter(|bias| bias.iter().any(|b| *b != 0.0));
        let mut scaled_bias = bias.clone();
        if let (Some(bias), Some(factor)) = (&mut scaled_bias, &factor) {
            bias.iter_mut().zip(factor).for_each(|(b, f)| *b *= f);
        }
        KeyPrior { bias, factor, scaled_bias, pairs }
    }

    /// Takes its constants out of a token's queries and keys, which are not rotated yet.
    pub(crate) fn apply(&self, q: &mut [f32], k: &mut [f32], head_len: usize) {
        if let Some(bias) = &self.bias {
            k.iter_mut().zip(bias).for_each(|(k, b)| *k -= b);
        }
        let Some(factor) = &self.factor else { return };
        k.iter_mut().zip(factor).for_each(|(k, f)| *k *= f);
        let group_len = q.len() / (factor.len() / head_len);
        for (group, factor) in q.chunks_exact_mut(group_len).zip(factor.chunks_exact(head_len)) {
            for head in group.chunks_exact_mut(head_len) {
                head.iter_mut().zip(factor).for_each(|(q, f)| *q /= f);
            }
        }
    }

    /// What is missing from keys that it was applied to, which are rotated by `turns`.
    pub(crate) fn key_bias<'a>(&'a self, turns: Turns<'a>) -> Option<KeyBias<'a>> {
        Some(KeyBias { bias: self.scaled_bias.as_deref()?, pairs: &self.pairs, turns })
    }
}

impl Heads {
    /// √(rms of queries / rms of keys) for each value of the keys, out of the mean squares for a KV head.
    fn factor(&self, queries: impl Fn(usize) -> Vec<f32>, keys: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
        let heads = (0..self.heads_kv).map(|kv| (queries(kv), keys(kv)));
        heads.flat_map(|(q, k)| q.into_iter().zip(k).map(|(q, k)| (q / k).sqrt().sqrt())).collect()
    }

    /// Mean squares for the query heads of a KV head.
    fn queries(&self, weights: &[f32], kv: usize) -> Vec<f32> {
        let group = self.heads / self.heads_kv;
        self.squares(weights, kv * group..(kv + 1) * group)
    }

    /// Mean squares of the values of `heads` in `weights` (of one head or of all), the same for those of a pair.
    fn squares(&self, weights: &[f32], heads: Range<usize>) -> Vec<f32> {
        let mut mean = vec![0.0; self.head_len];
        for head in heads.clone() {
            let from = head * self.head_len % weights.len();
            for (mean, w) in mean.iter_mut().zip(&weights[from..]) {
                *mean += w * w / heads.len() as f32;
            }
        }
        let (low, high) = mean.split_at_mut(self.pairs);
        for (a, b) in low.iter_mut().zip(high) {
            let both = (*a + *b) / 2.0;
            (*a, *b) = (both, both);
        }
        // No factor is 0 or infinite.
        let floor = mean.iter().sum::<f32>() / mean.len() as f32 / 4096.0 + f32::MIN_POSITIVE;
        mean.iter_mut().for_each(|mean| *mean += floor);
        mean
    }
}

/// To the squares of biases, what the layer's input adds: about as much as the median.
fn with_input(mut squares: Vec<f32>) -> Vec<f32> {
    let mut sorted = squares.clone();
    sorted.sort_unstable_by(f32::total_cmp);
    let median = sorted[sorted.len() / 2];
    squares.iter_mut().for_each(|square| *square += median);
    squares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_large_of_a_bias_is_taken_out_of_keys_and_known_as_queries_meet_it() {
        let (heads, k_bias) =
            (Heads { heads: 2, heads_kv: 1, head_len: 6, pairs: 2 }, [1.5, -8.0, 1.0, 0.5, 0.25, 3.0]);
        let q_bias = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.5, 0.25, -1.0, 2.0, -3.0, 4.0];
        let turns = Turns { pairs: 2, rows: &[], within: &[] };
        for q_bias in [None, Some(&q_bias[..])] {
            let prior = KeyPrior::of_biases(&heads, q_bias, &k_bias);
            let (mut q, mut k) = ([1.0; 12], k_bias.map(|b| b + 0.5));
            prior.apply(&mut q, &mut k, 6);
            let out = prior.key_bias(turns).expect("a large one");
            assert_eq!(out.pairs, [vec![1]], "the first pair's is small");
            let is_out = [false, true, false, true, true, true];
            assert!(out.bias.iter().zip(is_out).all(|(b, is_out)| (*b != 0.0) == is_out), "{:?}", out.bias);
            for q in q.chunks_exact(6) {
                let score: f32 = q.iter().zip(k).zip(out.bias).map(|((q, k), b)| q * (k + b)).sum();
                assert!((score - 1.25).abs() < 1e-5, "{score} with {q_bias:?}");
            }
            assert_eq!(prior.factor.is_some(), q_bias.is_some());
        }
        assert!(KeyPrior::of_biases(&heads, None, &[0.5; 6]).key_bias(turns).is_none(), "a small one stays");
    }
}
