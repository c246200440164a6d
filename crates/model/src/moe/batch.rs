//! A batch turned from tokens that choose experts to experts that have tokens.

use super::Choice;
use super::routing::LEFT_OUT;
use std::ops::Range;

/// The row of a choice that was left out.
pub(super) const NO_ROW: usize = usize::MAX;

/// An expert that some tokens of a batch chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Its number in the layer.
    pub(crate) expert: usize,
    /// Its rows in the batch by experts: one for each token that chose it.
    pub(crate) rows: Range<usize>,
}

/// An expert that a token nearly chose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Near {
    pub(crate) expert: u32,
    /// Row of the batch by tokens.
    pub(crate) token: u32,
    /// Of a choice, how much it is worth as a sign of what is to come.
    pub(crate) share: f32,
}

/// The choices of all tokens, expert by expert: rows of one expert lie side by side, in the order of tokens.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// The experts, ascending, each with at least one row.
    pub(crate) wanted: Vec<Wanted>,
    /// The token of each row.
    pub(crate) tokens: Vec<u32>,
    /// The row of each token's choices, in their order; [`NO_ROW`] for those that were left out.
    pub(crate) rows: Vec<usize>,
    /// What was nearly chosen, where that is made use of.
    pub(crate) near: Vec<Near>,
    /// Rows of each expert, then where its next one goes.
    next: Vec<usize>,
}

impl Batch {
    /// Sorts `choices`, `used` for each token, of `experts` experts.
    pub(crate) fn sort(&mut self, choices: &[Choice], used: usize, experts: usize) {
        self.next.clear();
        self.next.resize(experts, 0);
        let kept = || choices.iter().filter(|choice| choice.expert != LEFT_OUT);
        for choice in kept() {
            self.next[choice.expert as usize] += 1;
        }
        self.wanted.clear();
        let mut first = 0;
        for (expert, next) in self.next.iter_mut().enumerate() {
            let len = std::mem::replace(next, first);
            if len > 0 {
                self.wanted.push(Wanted { expert, rows: first..first + len });
            }
            first += len;
        }
        self.tokens.clear();
        self.tokens.resize(kept().count(), 0);
        self.rows.clear();
        for (i, choice) in choices.iter().enumerate() {
            if choice.expert == LEFT_OUT {
                self.rows.push(NO_ROW);
                continue;
            }
            let next = &mut self.next[choice.expert as usize];
            self.tokens[*next] = (i / used) as u32;
            self.rows.push(*next);
            *next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_an_expert_are_side_by_side_and_every_choice_has_one() {
        let choices = [3, 1, 0, 3, 3, 1].map(|expert| Choice { expert, weight: 1.0 });
        let mut batch = Batch::default();
        // Twice: nothing of the batch before may remain.
        batch.sort(&[Choice { expert: 4, weight: 1.0 }], 1, 5);
        batch.sort(&choices, 2, 5);
        let wanted = |expert, rows| Wanted { expert, rows };
        assert_eq!(batch.wanted, [wanted(0, 0..1), wanted(1, 1..3), wanted(3, 3..6)]);
        assert_eq!(batch.tokens, [1, 0, 2, 0, 1, 2]);
        assert_eq!(batch.rows, [3, 1, 0, 4, 5, 2]);
    }
}
