//! One conversation's place in the KV cache.

use model::SequenceId;

/// A sequence and the tokens that its KV cache holds.
#[derive(Debug)]
pub struct Session {
    pub(crate) sequence: SequenceId,
    /// One for each computed position.
    pub(crate) tokens: Vec<u32>,
    pub(crate) context_max: usize,
}

impl Session {
    /// Tokens in the KV cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Positions that the session may have.
    pub fn context_max(&self) -> usize {
        self.context_max
    }

    /// How much of `prompt` need not be computed again: the common beginning, but never all of it, because the last
    /// token's logits are wanted.
    pub(crate) fn reusable(&self, prompt: &[u32]) -> usize {
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        common.min(prompt.len().saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_beginning_is_reused_but_the_last_token_is_not() {
        let session = Session { sequence: SequenceId(0), tokens: vec![1, 2, 3, 4], context_max: 10 };
        assert_eq!(session.reusable(&[1, 2, 3, 4, 5, 6]), 4);
        assert_eq!(session.reusable(&[1, 2, 9, 4, 5]), 2);
        assert_eq!(session.reusable(&[1, 2, 3, 4]), 3);
        assert_eq!(session.reusable(&[1, 2]), 1);
        assert_eq!(session.reusable(&[9]), 0);
        assert_eq!(session.reusable(&[]), 0);
    }
}
