//! Routing that was recorded elsewhere, forced on a model, so that cache and drive behave as in life. What the model then
//! says means nothing.

use super::routing::{Choice, LEFT_OUT};
use residency::experts::Trace;
use std::collections::HashMap;

/// Recorded choices, by token and layer.
#[derive(Debug, Clone, Default)]
pub struct RouteReplay {
    visits: HashMap<(u64, u32), Vec<u32>>,
    /// The token that the next row is.
    pub(crate) token: u64,
    /// Tokens of the prompt.
    pub prompt: u64,
    /// All tokens.
    pub tokens: u64,
}

impl RouteReplay {
    /// The choices of `trace`, from its first token on.
    pub fn new(trace: &Trace) -> RouteReplay {
        let visits: HashMap<_, _> = trace.visits.iter().map(|v| ((v.token, v.layer), v.experts.clone())).collect();
        let after = |decode: bool| {
            let tokens = trace.visits.iter().filter(|v| decode || !v.decode).map(|v| v.token + 1);
            tokens.max().unwrap_or(0)
        };
        RouteReplay { visits, token: 0, prompt: after(false), tokens: after(true) }
    }

    /// Replaces a token's choices, the `row`th of its batch, by what was recorded, the best by the first. Experts that the
    /// model has not got are others; where fewer were recorded than the model takes, the rest are left out.
    pub(crate) fn force(&self, row: usize, layer: u32, experts: usize, choices: &mut [Choice]) {
        let Some(recorded) = self.visits.get(&(self.token + row as u64, layer)) else { return };
        for (i, choice) in choices.iter_mut().enumerate() {
            match recorded.get(i) {
                Some(&expert) => choice.expert = expert % experts as u32,
                None => *choice = Choice { expert: LEFT_OUT, weight: 0.0 },
            }
        }
    }
}
