//! What happens when a context is full.

use std::ops::Range;

/// What happens when a context is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Overflow {
    /// A prompt that does not fit is an error, and an answer ends where the context ends.
    #[default]
    Refuse,
    /// Of a prompt that does not fit, the oldest tokens behind the kept ones are left out. An answer ends where the context
    /// ends.
    Truncate,
    /// The same, and when the answer fills the context, half of the tokens behind the kept ones are left out, the oldest, and
    /// it goes on. What is left is computed anew, as if the text had begun with it.
    Shift,
}

impl Overflow {
    /// All of them.
    pub const ALL: [Overflow; 3] = [Overflow::Refuse, Overflow::Truncate, Overflow::Shift];

    /// The word of `--context-overflow`.
    pub fn name(self) -> &'static str {
        match self {
            Overflow::Refuse => "refuse",
            Overflow::Truncate => "truncate",
            Overflow::Shift => "shift",
        }
    }

    /// What a prompt of `len` tokens loses in a context of `context_max`; `None` if it is refused. A prompt may fill the
    /// context: its last position gives a token that needs none. One that is cut leaves a quarter free for the answer.
    pub(crate) fn cut_prompt(self, len: usize, keep: usize, context_max: usize) -> Option<Range<usize>> {
        if len <= context_max {
            return Some(0..0);
        }
        let room = context_max - context_max / 4;
        // Something of the end must stay: it is what is answered.
        let keep = keep.min(room / 2);
        (self != Overflow::Refuse && room > 0).then(|| keep..len - (room - keep))
    }

    /// What a history of `len` tokens loses when the last of them finds its context full; `None` if the answer ends.
    pub(crate) fn cut_history(self, len: usize, keep: usize) -> Option<Range<usize>> {
        let keep = keep.min(len / 2);
        let half = (len - keep) / 2;
        (self == Overflow::Shift && half > 0).then(|| keep..keep + half)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_fits_loses_nothing_whatever_was_asked_for() {
        for overflow in Overflow::ALL {
            assert_eq!(overflow.cut_prompt(16, 4, 16), Some(0..0));
        }
    }

    #[test]
    fn a_prompt_that_does_not_fit_keeps_its_beginning_and_its_end_and_leaves_room() {
        assert_eq!(Overflow::Refuse.cut_prompt(17, 4, 16), None);
        for overflow in [Overflow::Truncate, Overflow::Shift] {
            // 12 of 16 positions are filled: the first 4 tokens and the last 8.
            assert_eq!(overflow.cut_prompt(17, 4, 16), Some(4..9));
            assert_eq!(overflow.cut_prompt(100, 0, 16), Some(0..88));
            assert_eq!(overflow.cut_prompt(100, 99, 16), Some(6..94), "the end is what is answered");
            assert_eq!(overflow.cut_prompt(2, 0, 1), Some(0..1));
            assert_eq!(overflow.cut_prompt(2, 0, 0), None);
        }
    }

    #[test]
    fn a_shift_leaves_out_half_of_what_is_behind_the_kept_tokens() {
        assert_eq!(Overflow::Shift.cut_history(17, 1), Some(1..9));
        assert_eq!(Overflow::Shift.cut_history(17, 17), Some(8..12));
        assert_eq!(Overflow::Shift.cut_history(1, 0), None);
        assert_eq!(Overflow::Refuse.cut_history(17, 1), None);
        assert_eq!(Overflow::Truncate.cut_history(17, 1), None);
    }
}
