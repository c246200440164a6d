//! Whether guessing pays.

use crate::limits::LIGHT_ROWS;

/// What a step of so many rows costs, in steps of one: measured (docs/measuring.md), with the dearest of the models.
const STEP_COST: [f32; LIGHT_ROWS + 1] = [0.0, 1.0, 1.55, 1.7, 1.8, 1.9, 2.0, 2.05, 2.1];
/// Guesses of a trial: few, because a trial that fails is what guessing costs where it does not pay.
const TRIAL: usize = 3;
/// Tokens without guesses after a trial that failed, first and at most.
const PAUSE_MIN: usize = 32;
const PAUSE_MAX: usize = 512;
/// Gains that may be lost again before guessing stops.
const CREDIT_MAX: f32 = 4.0;

/// Counts what guesses gained and cost, and stops them for a while where they cost more. It knows no clock: the same answer is
/// always computed in the same steps.
#[derive(Debug, Clone)]
pub(crate) struct Gate {
    /// Cost of making a guess, in steps of one row.
    cost_each: f32,
    /// Tokens gained beyond what the time would have given without.
    credit: f32,
    /// Tokens to come without guesses.
    pause: usize,
    next_pause: usize,
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
}

impl Gate {
    /// For guesses that cost `cost_each` steps each.
    pub(crate) fn new(cost_each: f32) -> Gate {
        Gate { cost_each, credit: 0.0, pause: 0, next_pause: PAUSE_MIN, drafted: 0, accepted: 0 }
    }

    /// Guesses that are worth a try now.
    pub(crate) fn wanted(&self) -> usize {
        match self.pause {
            0 if self.credit > 0.0 => LIGHT_ROWS - 1,
            0 => TRIAL,
            _ => 0,
        }
    }

    /// A token came without a guess.
    pub(crate) fn passed(&mut self) {
        self.pause = self.pause.saturating_sub(1);
    }

    /// Of `drafted` guesses `accepted` were right.
    pub(crate) fn checked(&mut self, drafted: usize, accepted: usize) {
        self.drafted += drafted;
        self.accepted += accepted;
        let cost = STEP_COST[(drafted + 1).min(LIGHT_ROWS)] - 1.0 + drafted as f32 * self.cost_each;
        self.credit = (self.credit + accepted as f32 - cost).min(CREDIT_MAX);
        if self.credit > 0.0 {
            self.next_pause = PAUSE_MIN;
        } else if accepted < drafted {
            self.credit = 0.0;
            self.pause = self.next_pause;
            self.next_pause = (2 * self.next_pause).min(PAUSE_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps, in those of one row, that `tokens` tokens take when each guess is right with what `right` says of its number.
    fn cost(cost_each: f32, tokens: usize, right: impl Fn(usize) -> bool) -> f32 {
        let (mut gate, mut done, mut cost) = (Gate::new(cost_each), 0, 0.0);
        while done < tokens {
            let drafted = gate.wanted();
            if drafted == 0 {
                gate.passed();
                (done, cost) = (done + 1, cost + 1.0);
                continue;
            }
            let accepted = (0..drafted).take_while(|i| right(done + i)).count();
            gate.checked(drafted, accepted);
            cost += STEP_COST[drafted + 1] + drafted as f32 * cost_each;
            done += accepted + 1;
        }
        cost
    }

    #[test]
    fn wrong_guesses_cost_less_than_three_percent() {
        for tokens in [100, 300, 2000] {
            let cost = cost(0.0, tokens, |_| false);
            assert!(cost < 1.03 * tokens as f32 + 1e-3, "{cost} for {tokens}");
            assert!(cost > tokens as f32, "some were tried");
        }
    }

    #[test]
    fn right_guesses_gain_what_the_rows_allow() {
        let cost = cost(0.0, 1000, |_| true);
        assert!(cost < 1000.0 / 3.0, "{cost}");
    }

    #[test]
    fn dear_guesses_stop_where_they_do_not_pay() {
        // A draft model of a third of the size: with half of the guesses wrong it does not pay.
        let cost = cost(0.33, 2000, |i| i % 2 == 0);
        assert!(cost < 1.03 * 2000.0, "{cost}");
    }

    #[test]
    fn a_stretch_that_repeats_is_found_again_after_one_that_does_not() {
        let cost = cost(0.0, 3000, |i| i > 1000);
        assert!(cost < 1000.0 * 1.03 + 512.0 + 1500.0 / 3.0, "{cost}");
    }
}
