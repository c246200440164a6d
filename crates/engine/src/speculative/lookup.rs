//! Guesses out of the text itself: what followed the last time that the same tokens came.

use std::collections::HashMap;

/// Tokens that must be the same. Two are so often the same by chance that checking costs more than it gives.
const GRAM: usize = 3;
/// Earlier places that are looked at, and tokens that are compared to choose among them.
const PLACES_MAX: usize = 16;
const COMPARED_MAX: usize = 32;

/// Where each run of [`GRAM`] tokens of a history ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lookup {
    /// The last place of each, as the position behind it.
    last: HashMap<[u32; GRAM], usize>,
    /// For each position the place of the same tokens before it; 0 for none.
    before: Vec<usize>,
}

impl Lookup {
    /// `len` tokens, or none, that followed the longest run before the end of `history`, as far as the last [`PLACES_MAX`] places of
    /// its end tell. `history` must begin with what was asked about before.
    pub(crate) fn propose(&mut self, history: &[u32], len: usize) -> Vec<u32> {
        self.index(history);
        let mut place = self.before.last().copied().unwrap_or(0);
        let (mut best, mut best_len) = (0, 0);
        for _ in 0..PLACES_MAX {
            if place == 0 {
                break;
            }
            let backwards = history[..place].iter().rev().zip(history.iter().rev());
            let same = backwards.take(COMPARED_MAX).take_while(|(a, b)| a == b).count();
            // Of equal ones the later, which was found first.
            if same > best_len {
                (best, best_len) = (place, same);
            }
            place = self.before[place - 1];
        }
        // A copy may reach into itself, as in a run of one token.
        let period = history.len() - best;
        if best == 0 { Vec::new() } else { (0..len).map(|i| history[best + i % period]).collect() }
    }

    fn index(&mut self, history: &[u32]) {
        for end in self.before.len() + 1..=history.len() {
            let gram: Option<[u32; GRAM]> = end.checked_sub(GRAM).and_then(|from| history[from..end].try_into().ok());
            let before = gram.and_then(|gram| self.last.insert(gram, end));
            self.before.push(before.unwrap_or(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_same_tokens_is_proposed() {
        let mut lookup = Lookup::default();
        assert!(lookup.propose(&[1, 2, 3, 4, 5, 6, 1, 2], 4).is_empty());
        assert_eq!(lookup.propose(&[1, 2, 3, 4, 5, 6, 1, 2, 3], 2), [4, 5]);
        assert_eq!(lookup.propose(&[1, 2, 3, 4, 5, 6, 1, 2, 3], 8), [4, 5, 6, 1, 2, 3, 4, 5]);
        assert!(Lookup::default().propose(&[], 4).is_empty());
    }

    #[test]
    fn the_longest_run_wins_and_of_equal_ones_the_last() {
        let history = [9, 1, 2, 3, 70, 8, 1, 2, 3, 60, 7, 1, 2, 3, 50, 8, 1, 2, 3];
        assert_eq!(Lookup::default().propose(&history, 1), [60], "behind 8 1 2 3");
        assert_eq!(Lookup::default().propose(&history[..14], 1), [60], "behind 1 2 3, the last time");
    }

    #[test]
    fn a_history_that_comes_in_pieces_gives_the_same_as_at_once() {
        let history: Vec<u32> = (0..400).map(|i| (i * i % 11 + i / 7 % 3) as u32).collect();
        let mut pieces = Lookup::default();
        let mut found = 0;
        for end in 0..=history.len() {
            let proposal = pieces.propose(&history[..end], 5);
            assert_eq!(proposal, Lookup::default().propose(&history[..end], 5), "{end}");
            found += usize::from(!proposal.is_empty());
        }
        assert!(found > 100, "{found}");
    }

    #[test]
    fn a_run_of_one_token_is_continued() {
        assert_eq!(Lookup::default().propose(&[5; 10], 3), [5; 3]);
    }
}
