//! Guesses of a smaller model.

use std::sync::Arc;

use model::{Model, Row, Runner, RunnerOptions, SequenceId};
use residency::budget::{Grant, Ledger, Line};

use crate::Error;
use crate::sampler::{Sampler, Sampling};

/// A model that guesses for another one.
pub struct Draft {
    runner: Runner,
    /// Time of a step, in those of the model that it guesses for.
    cost_each: f32,
    held: Vec<Grant>,
}

/// A session's place in the draft model.
pub(crate) struct Follower {
    sequence: SequenceId,
    computed: Vec<u32>,
    /// The draft model failed: there are no more guesses.
    lost: bool,
}

impl Draft {
    /// `model` guesses for `target`. An error if they do not have the same tokens.
    pub fn new(model: Arc<Model>, target: &Model, options: &RunnerOptions) -> Result<Draft, Error> {
        check_vocabulary(&model, target)?;
        let cost_each = model.step_bytes() as f32 / target.step_bytes().max(1) as f32;
        Ok(Draft { runner: Runner::new(model, options)?, cost_each, held: Vec::new() })
    }

    /// Keeps a grant for as long as the draft model exists.
    pub fn hold(&mut self, grant: Grant) {
        self.held.push(grant);
    }

    /// From now on `ledger` grants its keys and values.
    pub fn charge_to(&mut self, ledger: &Ledger, owner: &str) -> Result<(), Error> {
        self.runner.charge_to(ledger, owner).map_err(|full| Error::Full { line: Line::Kv, full })
    }

    pub(crate) fn cost_each(&self) -> f32 {
        self.cost_each
    }

    pub(crate) fn open(&mut self) -> Follower {
        // How long it may get, the session decides.
        Follower { sequence: self.runner.sequence_open(usize::MAX), computed: Vec::new(), lost: false }
    }

    pub(crate) fn close(&mut self, follower: Follower) {
        self.runner.sequence_close(follower.sequence);
    }

    /// The likeliest continuation of `history`. Nothing, if the draft model fails: guesses are no promise.
    pub(crate) fn propose(&mut self, follower: &mut Follower, history: &[u32], len: usize) -> Vec<u32> {
        if follower.lost {
            return Vec::new();
        }
        let common = follower.computed.iter().zip(history).take_while(|(a, b)| a == b).count();
        // The last token's logits are wanted.
        let keep = self.runner.sequence_truncate(follower.sequence, common.min(history.len() - 1));
        follower.computed.truncate(keep);
        let mut guesses = Vec::new();
        let mut next = history[keep..].to_vec();
        while guesses.len() < len {
            let Ok(guess) = self.step(follower, &next) else {
                follower.lost = true;
                break;
            };
            guesses.push(guess);
            next = vec![guess];
        }
        guesses
    }

    fn step(&mut self, follower: &mut Follower, tokens: &[u32]) -> Result<u32, Error> {
        let row = |(i, &token)| Row { sequence: follower.sequence, token, logits: i + 1 == tokens.len() };
        let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
        let logits = self.runner.forward(&rows)?;
        follower.computed.extend_from_slice(tokens);
        Sampler::new(Sampling { temperature: 0.0, ..Sampling::default() }).sample(logits)
    }
}

/// An error unless each id means the same in both.
fn check_vocabulary(draft: &Model, target: &Model) -> Result<(), Error> {
    let (draft_len, target_len) = (draft.config.vocab_len, target.config.vocab_len);
    let differs = |&id: &u32| draft.tokenizer.token_text(id) != target.tokenizer.token_text(id);
    let differs = (0..draft_len.min(target_len) as u32).find(differs);
    if draft_len == target_len && differs.is_none() {
        return Ok(());
    }
    Err(Error::Vocabulary { draft_len, target_len, differs })
}
