//! What is known of a layer's keys before the first is computed. It makes them easier to quantize and changes no score.
//!
//! Biases of keys that are large are taken out (and added to scores by the kernels). Then values that are rotated together
//! are multiplied by √(rms of queries / rms of keys), and those of queries divided by it: so the error of quantization, which
//! a Hadamard transform spreads evenly over the head, costs each of them the same. The norms of queries and keys tell how
//! large they will be, or their biases do.

use super::Layer;
use std::ops::Range;

/// Root mean square of a head's bias from which it is taken out of a layer's keys, which takes as long as a fifth of
/// attention. What depends on the token is about as large in all models that were looked at.
const BIAS_RMS_MIN: f32 = 2.0;

/// Constants of a layer's keys.
#[derive(Debug, Default)]
pub(crate) struct KeyPrior {
    /// Part of all keys before their rotation.
    bias: Option<Vec<f32>>,
    /// Factor of each value of the keys, and what queries are divided by.
    factor: Option<Vec<f32>>,
    /// The part that is taken out, multiplied.
    scaled_bias: Option<Vec<f32>>,
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
        let head_len = heads.head_len;
        let rms = |head: &[f32]| (head.iter().map(|b| b * b).sum::<f32>() / head_len as f32).sqrt();
        let bias = k.chunks_exact(head_len).any(|head| rms(head) >= BIAS_RMS_MIN).then(|| k.to_vec());
        let keys = |kv| match bias {
            Some(_) => vec![1.0; head_len],
            None => with_input(heads.squares(k, kv..kv + 1)),
        };
        // Without a bias nothing is known of queries.
        let factor = q.map(|q| heads.factor(|kv| with_input(heads.queries(q, kv)), keys));
        let mut scaled_bias = bias.clone();
        if let (Some(bias), Some(factor)) = (&mut scaled_bias, &factor) {
            bias.iter_mut().zip(factor).for_each(|(b, f)| *b *= f);
        }
        KeyPrior { bias, factor, scaled_bias }
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

    /// What is missing from keys that it was applied to.
    pub(crate) fn key_bias(&self) -> Option<&[f32]> {
        self.scaled_bias.as_deref()
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
    fn a_large_bias_is_taken_out_of_keys_and_known_as_queries_meet_it() {
        let (heads, k_bias) = (Heads { heads: 2, heads_kv: 1, head_len: 4, pairs: 2 }, [3.0, -8.0, 5.0, 0.5]);
        let q_bias = [1.0, 2.0, 3.0, 4.0, 0.5, 0.25, -1.0, 2.0];
        for q_bias in [None, Some(&q_bias[..])] {
            let prior = KeyPrior::of_biases(&heads, q_bias, &k_bias);
            let (mut q, mut k) = ([1.0; 8], [4.0, -8.0, 5.0, 1.5]);
            prior.apply(&mut q, &mut k, 4);
            let bias = prior.key_bias().expect("a large one");
            let whole: Vec<f32> = k.iter().zip(bias).map(|(k, b)| k + b).collect();
            for q in q.chunks_exact(4) {
                let score: f32 = q.iter().zip(&whole).map(|(q, k)| q * k).sum();
                assert!((score - 2.5).abs() < 1e-5, "{score} with {q_bias:?}");
            }
            assert!(k.iter().zip([1.0, 0.0, 0.0, 1.0]).all(|(k, left)| (*k == 0.0) == (left == 0.0)), "{k:?}");
            assert_eq!(prior.factor.is_some(), q_bias.is_some());
        }
        assert!(KeyPrior::of_biases(&heads, None, &[0.5; 4]).key_bias().is_none(), "a small one stays");
    }
}
