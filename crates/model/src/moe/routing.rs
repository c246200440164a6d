//! Which experts a token takes, and how much of each: pure functions of the router's outputs.
//!
//! Source of the order of operations: llama.cpp, `build_moe_ffn` in `src/llama-graph.cpp`.

use std::cell::RefCell;

/// What the router's outputs become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// 1 / (1 + e^-x) of each.
    Sigmoid,
    /// Experts are chosen by the outputs themselves; softmax over the chosen ones gives the weights.
    SoftmaxOfChosen,
}

/// How tokens choose experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts of a token.
    pub used: usize,
    /// What the router's outputs become.
    pub scores: Scores,
    /// Whether the weights are divided by their sum.
    pub normalize: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Groups of neighbouring experts; 1 if there are none.
    pub groups: usize,
    /// Groups that a token may take experts of.
    pub groups_used: usize,
}

/// An expert of a token.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Choice {
    /// Which.
    pub expert: u32,
    /// Factor of its output.
    pub weight: f32,
}

/// The number that a choice has instead of an expert's once it is left out.
pub(crate) const LEFT_OUT: u32 = u32::MAX;

/// Leaves out those of a token's `choices` whose expert is not in memory and that weigh less than `share` of an equal part
/// of all; the others take over their weight. The first choice always stays. Tells how many were looked at because they
/// are not in memory, and how many were left out.
pub(crate) fn drop_cold(choices: &mut [Choice], share: f32, is_there: impl Fn(u32) -> bool) -> (u64, u64) {
    let sum: f32 = choices.iter().map(|choice| choice.weight).sum();
    let limit = share * sum / choices.len() as f32;
    let (mut examined, mut dropped, mut kept) = (0, 0, 0.0);
    for (rank, choice) in choices.iter_mut().enumerate() {
        let is_cold = rank > 0 && choice.expert != LEFT_OUT && !is_there(choice.expert);
        examined += u64::from(is_cold);
        if is_cold && choice.weight < limit {
            *choice = Choice { expert: LEFT_OUT, weight: 0.0 };
            dropped += 1;
        }
        kept += choice.weight;
    }
    if dropped > 0 {
        choices.iter_mut().for_each(|choice| choice.weight *= sum / kept);
    }
    (examined, dropped)
}

/// The sum of weights is at least this before they are divided by it: the smallest normal half.
const SUM_MIN: f32 = 6.103_515_6e-5;

/// How far below the last choice an output of the router still counts as near: a tenth of a use.
const NEAR_LOGITS: f32 = std::f32::consts::LN_10 / 2.0;

impl Routing {
    /// Chooses the best experts, the best first, into `choices`, of which there are [`Routing::used`]. Of equal ones the
    /// lower number comes first. `logits` are the router's outputs; `bias` is added to the scores for choosing only.
    pub fn route(&self, logits: &[f32], bias: Option<&[f32]>, choices: &mut [Choice]) {
        debug_assert!(choices.len() == self.used && self.used <= logits.len());
        ROOM.with_borrow_mut(|room| self.route_in(room, logits, bias, choices));
    }

    fn route_in(&self, room: &mut Room, logits: &[f32], bias: Option<&[f32]>, choices: &mut [Choice]) {
        let Room { scores, ranks, sums, places } = room;
        copy(logits, scores);
        match self.scores {
            Scores::Softmax => softmax(scores),
            Scores::Sigmoid => scores.iter_mut().for_each(|x| *x = sigmoid(*x)),
            Scores::SoftmaxOfChosen => (),
        }
        copy(scores, ranks);
        if let Some(bias) = bias {
            ranks.iter_mut().zip(bias).for_each(|(rank, bias)| *rank += bias);
        }
        if self.groups > 1 {
            self.hide_groups(ranks, sums, places);
        }
        let weights = sums;
        weights.clear();
        weights.extend(best(ranks, self.used, places).iter().map(|&expert| scores[expert]));
        if self.scores == Scores::SoftmaxOfChosen {
            softmax(weights);
        }
        if self.normalize {
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= sum.max(SUM_MIN));
        }
        for ((choice, &expert), &weight) in choices.iter_mut().zip(&*places).zip(&*weights) {
            *choice = Choice { expert: expert as u32, weight: weight * self.scale };
        }
    }

    /// Tells `found` of the experts that come next behind a token's `choices`, each with the square of the quotient of its
    /// probability and the last choice's, as the `logits` have it. On a random model, caches that count these as parts of a use
    /// hit a point more. Nothing where there are groups, whose experts do not compete with all others.
    pub(crate) fn near(&self, logits: &[f32], choices: &[Choice], mut found: impl FnMut(u32, f32)) {
        if self.groups > 1 {
            return;
        }
        let last = choices.iter().map(|choice| logits[choice.expert as usize]).fold(f32::INFINITY, f32::min);
        for (expert, logit) in (0u32..).zip(logits) {
            let share = if *logit > last - NEAR_LOGITS { libm::expf(2.0 * (logit - last)).min(1.0) } else { 0.0 };
            if share > 0.0 && choices.iter().all(|choice| choice.expert != expert) {
                found(expert, share);
            }
        }
    }

    /// Takes the experts out of all groups but the best. A group is as good as its two best experts together.
    fn hide_groups(&self, ranks: &mut [f32], sums: &mut Vec<f32>, places: &mut Vec<usize>) {
        let len = ranks.len() / self.groups;
        sums.clear();
        for group in ranks.chunks_exact(len) {
            sums.push(best(group, 2.min(len), places).iter().map(|&i| group[i]).sum());
        }
        let kept = best(sums, self.groups_used, places);
        for (i, group) in ranks.chunks_exact_mut(len).enumerate() {
            if !kept.contains(&i) {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// What one thread works with; it only grows.
#[derive(Default)]
struct Room {
    /// Of each expert.
    scores: Vec<f32>,
    /// By which experts are chosen.
    ranks: Vec<f32>,
    /// Of the groups, then of the chosen.
    sums: Vec<f32>,
    /// The experts, or groups, that are best.
    places: Vec<usize>,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

fn copy(from: &[f32], to: &mut Vec<f32>) {
    to.clear();
    to.extend_from_slice(from);
}

/// The places of the `count` largest of `x`, the largest first, and of equal ones the first first. What is no number
/// comes last.
fn best<'p>(x: &[f32], count: usize, places: &'p mut Vec<usize>) -> &'p [usize] {
    places.clear();
    places.extend(0..x.len());
    let key = |i: usize| if x[i].is_nan() { f32::NEG_INFINITY } else { x[i] };
    let order = |a: &usize, b: &usize| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
    if count < places.len() {
        places.select_nth_unstable_by(count, order);
        places.truncate(count);
    }
    places.sort_unstable_by(order);
    places
}

fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in x.iter_mut() {
        *x = libm::expf(*x - max);
        sum += *x;
    }
    x.iter_mut().for_each(|x| *x /= sum);
}

/// 1 / (1 + e^-x).
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Routing =
        Routing { used: 2, scores: Scores::Softmax, normalize: false, scale: 1.0, groups: 1, groups_used: 1 };

    fn route(routing: &Routing, logits: &[f32], bias: Option<&[f32]>) -> (Vec<u32>, Vec<f32>) {
        let mut choices = vec![Choice::default(); routing.used];
        routing.route(logits, bias, &mut choices);
        choices.iter().map(|c| (c.expert, c.weight)).unzip()
    }

    fn near(got: &[f32], want: &[f32]) -> bool {
        got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-6)
    }

    #[test]
    fn what_comes_next_is_near_by_the_square_of_its_share_of_the_last_choice() {
        let near = |routing: &Routing, logits: &[f32]| {
            let mut choices = vec![Choice::default(); routing.used];
            routing.route(logits, None, &mut choices);
            let mut found = Vec::new();
            routing.near(logits, &choices, |expert, share| found.push((expert, share)));
            found
        };
        let logits = [1.0 - 2f32.ln(), 3.0, 1.0, 1.0, 1.0 - 4f32.ln(), f32::NAN];
        let found = near(&Routing { scores: Scores::SoftmaxOfChosen, ..PLAIN }, &logits);
        assert_eq!(found.iter().map(|f| f.0).collect::<Vec<_>>(), [0, 3], "a sixteenth is not near");
        assert!((found[0].1 - 0.25).abs() < 1e-6 && found[1].1 == 1.0, "{found:?}");
        assert!(near(&Routing { groups: 2, ..PLAIN }, &logits).is_empty());
    }

    #[test]
    fn the_best_come_first_and_equal_ones_in_their_order() {
        let (experts, weights) = route(&Routing { used: 3, ..PLAIN }, &[0.0, 2f32.ln(), 0.0, 2f32.ln(), 0.0], None);
        assert_eq!(experts, [1, 3, 0]);
        assert!(near(&weights, &[2.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0]), "{weights:?}");
        assert_eq!(route(&PLAIN, &[-0.0, 0.0, f32::NAN, -1.0], None).0, [0, 1], "zeros are equal, NaN is the least");
    }

    #[test]
    fn weights_are_normalized_then_scaled() {
        let routing = Routing { normalize: true, scale: 2.5, ..PLAIN };
        let (experts, weights) = route(&routing, &[1.0, 3f32.ln() + 1.0, -20.0], None);
        assert_eq!(experts, [1, 0]);
        assert!(near(&weights, &[2.5 * 0.75, 2.5 * 0.25]), "{weights:?}");
    }

    #[test]
    fn a_softmax_of_the_chosen_knows_no_others() {
        let routing = Routing { scores: Scores::SoftmaxOfChosen, ..PLAIN };
        let (experts, weights) = route(&routing, &[5.0, 5.0 + 4f32.ln(), 4.9, 4.9], None);
        assert_eq!(experts, [1, 0]);
        assert!(near(&weights, &[0.8, 0.2]), "{weights:?}");
    }

    #[test]
    fn a_bias_chooses_but_does_not_weigh() {
        let routing = Routing { scores: Scores::Sigmoid, ..PLAIN };
        let (experts, weights) = route(&routing, &[0.0, 3f32.ln(), 0.0, 0.0], Some(&[0.0, 0.0, 0.9, 0.3]));
        assert_eq!(experts, [2, 3]);
        assert!(near(&weights, &[0.5, 0.5]), "{weights:?}");
    }

    #[test]
    fn what_is_cold_and_weighs_little_is_left_out_and_the_rest_weigh_as_much_as_all_did() {
        let choices = || [(7, 0.5), (3, 0.3), (5, 0.15), (1, 0.05)].map(|(expert, weight)| Choice { expert, weight });
        let mut some = choices();
        assert_eq!(
            drop_cold(&mut some, 0.7, |expert| expert == 5),
            (2, 1),
            "0.05 is less than 0.175, and 0.15 is there"
        );
        assert_eq!(some.map(|c| c.expert), [7, 3, 5, LEFT_OUT]);
        assert!(near(&some.map(|c| c.weight), &[0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]));
        let mut none = choices();
        assert_eq!(drop_cold(&mut none, 0.0, |_| false), (3, 0), "a threshold of nothing looks and leaves all");
        assert_eq!(none, choices());
        let mut first = [Choice { expert: 2, weight: 0.001 }];
        assert_eq!(drop_cold(&mut first, 1.0, |_| false), (0, 0), "the first choice stays");
        assert_eq!(first[0].expert, 2);
    }

    #[test]
    fn only_the_best_groups_are_chosen_from_and_two_experts_make_a_group_good() {
        let routing = Routing { scores: Scores::Sigmoid, groups: 3, groups_used: 1, ..PLAIN };
        // The best expert is alone in its group; the second group has the best pair.
        let (experts, _) = route(&routing, &[9.0, -9.0, -9.0, 2.0, 3.0, -9.0, 1.0, 1.0, 1.0], None);
        assert_eq!(experts, [4, 3]);
        let two = Routing { groups_used: 2, ..routing };
        assert_eq!(route(&two, &[9.0, -9.0, -9.0, 2.0, 3.0, -9.0, 1.0, 1.0, 1.0], None).0, [4, 3]);
    }
}
