//! From logits to a token, by llama.cpp's documented chain and defaults:
//! repeat penalty → top-k → top-p → min-p → temperature → a draw.

use std::cmp::Ordering;
use std::collections::VecDeque;

use crate::Error;

/// How tokens are drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Flattens (above 1) or sharpens the distribution; 0 takes the largest logit, the lowest id among equals.
    pub temperature: f32,
    /// Only so many of the likeliest tokens; 0 for all.
    pub top_k: usize,
    /// Only the likeliest tokens that together have this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens with at least this share of the likeliest one's probability; 0 for all.
    pub min_p: f32,
    /// Weakens tokens that were seen lately; 1 does not.
    pub repeat_penalty: f32,
    /// How many tokens count as lately.
    pub repeat_last_n: usize,
    /// Start of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            seed: 0,
        }
    }
}

/// Draws tokens; the same settings, seed and logits give the same tokens.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    random: SplitMix64,
    recent: VecDeque<u32>,
    /// Logits after the penalty.
    penalized: Vec<f32>,
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Relative to the likeliest candidate: e^(logit - largest).
    weight: f64,
}

/// Largest logit first, lowest id among equals.
fn order(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

impl Sampler {
    /// A sampler at the start of its random numbers.
    pub fn new(sampling: Sampling) -> Sampler {
        let random = SplitMix64(sampling.seed);
        Sampler { sampling, random, recent: VecDeque::new(), penalized: Vec::new(), candidates: Vec::new() }
    }

    /// Takes note of a token of the prompt or the answer.
    pub fn accept(&mut self, token: u32) {
        if self.sampling.repeat_penalty == 1.0 || self.sampling.repeat_last_n == 0 {
            return;
        }
        if self.recent.len() == self.sampling.repeat_last_n {
            self.recent.pop_front();
        }
        self.recent.push_back(token);
    }

    /// The next token after `logits`.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Error> {
        let mut penalized = std::mem::take(&mut self.penalized);
        let logits = if self.recent.is_empty() {
            logits
        } else {
            penalized.clear();
            penalized.extend_from_slice(logits);
            self.penalize(&mut penalized);
            &penalized
        };
        let token = if self.sampling.temperature <= 0.0 { argmax(logits) } else { self.draw(logits) };
        let none = Error::NoLogits(logits.len());
        self.penalized = penalized;
        token.ok_or(none)
    }

    /// Positive logits are divided, negative ones multiplied, once for each distinct token.
    fn penalize(&self, logits: &mut [f32]) {
        let mut ids: Vec<u32> = self.recent.iter().copied().collect();
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = if *logit > 0.0 {
                    *logit / self.sampling.repeat_penalty
                } else {
                    *logit * self.sampling.repeat_penalty
                };
            }
        }
    }

    fn draw(&mut self, logits: &[f32]) -> Option<u32> {
        let candidates = &mut self.candidates;
        largest(logits, self.sampling.top_k, candidates);
        let top = candidates.first()?.logit;
        for c in candidates.iter_mut() {
            c.weight = exp(f64::from(c.logit) - f64::from(top));
        }
        if self.sampling.top_p < 1.0 {
            let total: f64 = candidates.iter().map(|c| c.weight).sum();
            let wanted = total * f64::from(self.sampling.top_p);
            let mut sum = 0.0;
            let enough = candidates.iter().position(|c| {
                sum += c.weight;
                sum >= wanted
            });
            candidates.truncate(enough.map_or(candidates.len(), |i| i + 1));
        }
        if self.sampling.min_p > 0.0 {
            let least = f64::from(self.sampling.min_p.min(1.0));
            let kept = candidates.partition_point(|c| c.weight >= least);
            candidates.truncate(kept.max(1));
        }
        let temperature = f64::from(self.sampling.temperature);
        let mut total = 0.0;
        for c in candidates.iter_mut() {
            c.weight = exp((f64::from(c.logit) - f64::from(top)) / temperature);
            total += c.weight;
        }
        let mut point = self.random.unit() * total;
        let drawn = candidates.iter().find(|c| {
            point -= c.weight;
            point < 0.0
        });
        // Rounding may leave a crumb behind the last candidate.
        drawn.or(candidates.last()).map(|c| c.id)
    }
}

/// Logits looked at together: most groups are dismissed by comparisons that the compiler turns into vector instructions.
const GROUP: usize = 32;

/// Whether a logit of `group` is larger than `bound`.
fn any_above(group: &[f32], bound: f32) -> bool {
    group.iter().fold(false, |any, &logit| any | (logit > bound))
}

/// The id of the largest logit, the lowest among equals; none if no logit is a number.
fn argmax(logits: &[f32]) -> Option<u32> {
    let first = logits.iter().position(|logit| !logit.is_nan())?;
    let mut best = (first, logits[first]);
    for (i, group) in logits.chunks(GROUP).enumerate() {
        if any_above(group, best.1) {
            for (j, &logit) in group.iter().enumerate() {
                if logit > best.1 {
                    best = (i * GROUP + j, logit);
                }
            }
        }
    }
    Some(best.0 as u32)
}

/// Fills `out` with the `k` largest logits (0: all), in [`order`].
///
/// One pass over the vocabulary: almost every group is dismissed by comparing it with the smallest of the best `k` seen so
/// far, which is brought up to date whenever enough newcomers have gathered.
fn largest(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    let k = if k == 0 { logits.len() } else { k };
    let gather = k.saturating_mul(2).max(256);
    // Before there are k, everything that is a number counts.
    let mut threshold = None;
    for (i, group) in logits.chunks(GROUP).enumerate() {
        if threshold.is_some_and(|t| !any_above(group, t)) {
            continue;
        }
        for (j, &logit) in group.iter().enumerate() {
            // An equal logit with a higher id loses, so `>` is right once there are k.
            if threshold.map_or(!logit.is_nan(), |t| logit > t) {
                out.push(Candidate { id: (i * GROUP + j) as u32, logit, weight: 0.0 });
                if out.len() == gather {
                    out.select_nth_unstable_by(k - 1, order);
                    out.truncate(k);
                    threshold = Some(out[k - 1].logit);
                }
            }
        }
    }
    out.sort_unstable_by(order);
    out.truncate(k);
}

/// e^x for x ≤ 0, from additions and multiplications only: the system's `exp` may give other bits on another processor,
/// and with them another token.
fn exp(x: f64) -> f64 {
    // Smaller than any share that a draw can see.
    if x < -700.0 {
        return 0.0;
    }
    const LN_2_HIGH: f64 = 0.693_147_180_369_123_8; // the last 21 bits are zero: n times it is exact
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut sum = 1.0;
    for k in (1..=14).rev() {
        sum = 1.0 + sum * r / f64::from(k);
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// Steele, Lea and Flood's SplitMix64.
#[derive(Debug, Clone)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random_logits(n: usize, seed: u64) -> Vec<f32> {
        let mut random = SplitMix64(seed);
        (0..n).map(|_| (random.unit() * 40.0 - 20.0).round() as f32 / 2.0).collect()
    }

    fn sampler(change: impl FnOnce(&mut Sampling)) -> Sampler {
        let mut sampling =
            Sampling { top_k: 0, top_p: 1.0, min_p: 0.0, temperature: 1.0, seed: 7, ..Sampling::default() };
        change(&mut sampling);
        Sampler::new(sampling)
    }

    /// Every token that 2000 draws give.
    fn drawn(sampler: &mut Sampler, logits: &[f32]) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..2000).map(|_| sampler.sample(logits).unwrap()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    #[test]
    fn temperature_zero_takes_the_lowest_id_among_the_largest() {
        let mut greedy = sampler(|s| s.temperature = 0.0);
        assert_eq!(greedy.sample(&[1.0, 3.0, f32::NAN, 3.0, 2.0]).unwrap(), 1);
        assert_eq!(greedy.sample(&[f32::NEG_INFINITY, f32::NEG_INFINITY]).unwrap(), 0);
        for (n, seed) in [(31, 1), (32, 2), (33, 3), (5000, 4)] {
            let logits = random_logits(n, seed);
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = logits.iter().position(|&l| l == largest).unwrap();
            assert_eq!(greedy.sample(&logits).unwrap() as usize, first);
        }
        assert!(matches!(greedy.sample(&[f32::NAN; 3]), Err(Error::NoLogits(3))));
        assert!(matches!(sampler(|_| ()).sample(&[f32::NAN; 3]), Err(Error::NoLogits(3))));
    }

    #[test]
    fn selection_equals_sorting_everything() {
        for (n, k) in [(1, 1), (5, 40), (300, 3), (5000, 40), (5000, 1), (5000, 0), (70_000, 500)] {
            let logits = random_logits(n, k as u64);
            let mut all: Vec<Candidate> =
                logits.iter().enumerate().map(|(id, &logit)| Candidate { id: id as u32, logit, weight: 0.0 }).collect();
            all.sort_by(order);
            all.truncate(if k == 0 { n } else { k });
            let mut got = Vec::new();
            largest(&logits, k, &mut got);
            assert_eq!(got, all, "{n} logits, k = {k}");
        }
    }

    #[test]
    fn each_filter_leaves_the_tokens_that_it_should() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits: Vec<f32> = [8.0f32, 4.0, 2.0, 2.0].iter().map(|p| p.ln()).collect();
        assert_eq!(drawn(&mut sampler(|_| ()), &logits), [0, 1, 2, 3]);
        assert_eq!(drawn(&mut sampler(|s| s.top_k = 2), &logits), [0, 1]);
        assert_eq!(drawn(&mut sampler(|s| s.top_k = 3), &logits), [0, 1, 2]);
        assert_eq!(drawn(&mut sampler(|s| s.top_p = 0.7), &logits), [0, 1]);
        assert_eq!(drawn(&mut sampler(|s| s.top_p = 0.0), &logits), [0]);
        assert_eq!(drawn(&mut sampler(|s| s.min_p = 0.4), &logits), [0, 1]);
        assert_eq!(drawn(&mut sampler(|s| s.min_p = 1.0), &logits), [0]);
        assert_eq!(drawn(&mut sampler(|s| s.temperature = 0.01), &logits), [0]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits: Vec<f32> = [8.0f32, 4.0, 2.0, 2.0].iter().map(|p| p.ln()).collect();
        let mut sampler = sampler(|_| ());
        let mut counts = [0; 4];
        for _ in 0..16_000 {
            counts[sampler.sample(&logits).unwrap() as usize] += 1;
        }
        for (count, expected) in counts.into_iter().zip([8000, 4000, 2000, 2000]) {
            assert!((expected - 300..expected + 300).contains(&count), "{counts:?}");
        }
    }

    #[test]
    fn the_seed_decides() {
        let logits = random_logits(1000, 1);
        let draws = |seed| {
            let mut sampler = sampler(|s| s.seed = seed);
            (0..20).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }

    #[test]
    fn the_penalty_weakens_recent_tokens_once_and_forgets_old_ones() {
        let mut greedy = sampler(|s| {
            s.temperature = 0.0;
            s.repeat_penalty = 2.0;
            s.repeat_last_n = 2;
        });
        let logits = [4.0, 3.0, -1.0];
        assert_eq!(greedy.sample(&logits).unwrap(), 0);
        greedy.accept(0);
        greedy.accept(0);
        assert_eq!(greedy.sample(&logits).unwrap(), 1, "4 / 2 < 3");
        assert_eq!(greedy.sample(&[4.0, 1.5, -1.0]).unwrap(), 0, "only once: 4 / 2 > 1.5");
        greedy.accept(1);
        greedy.accept(1);
        assert_eq!(greedy.sample(&logits).unwrap(), 0, "forgotten after two others");
        greedy.accept(2);
        assert_eq!(greedy.sample(&[-3.0, -3.0, -2.0]).unwrap(), 0, "negative logits sink");
    }

    #[test]
    fn exp_is_right_to_a_few_units_in_the_last_place() {
        for i in 0..70_000 {
            let x = -f64::from(i) * 0.01;
            let (got, want) = (exp(x), x.exp());
            assert!((got - want).abs() <= 4.0 * f64::EPSILON * want, "e^{x}: {got} and {want}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
    }

    #[test]
    fn random_numbers_are_those_of_the_reference() {
        // First outputs for seed 1234567, as published with the algorithm.
        let mut random = SplitMix64(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
