//! The rows of a step.

use super::{Class, Entry, RequestId, Scheduler, State};
use crate::limits::{GUARDED_STEPS, LIGHT_ROWS, RIDE_ROWS};

/// A request's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Whose.
    pub id: RequestId,
    /// Positions of its history that are computed.
    pub rows: usize,
    /// Positions behind them, of tokens that are only guessed.
    pub drafts: usize,
}

impl Scheduler {
    /// The next step. Every interactive session that decodes takes part. While one does, lower classes ride along with a few
    /// tokens, and only every so many steps take a chunk; else all that decode take part, and prompts share a chunk. `drafts`
    /// is asked how many guesses of a request are to be checked, at most as many as it is told: what is left of a step that
    /// waits for the weights anyway.
    pub fn schedule(&mut self, mut drafts: impl FnMut(RequestId, usize) -> usize) -> Vec<Share> {
        self.steps += 1;
        let guarded = self.entries.iter().any(|e| e.decodes() && e.class == Class::Interactive);
        self.guarded_steps = if guarded { self.guarded_steps + 1 } else { 0 };
        let lowers_turn = !guarded || self.guarded_steps > GUARDED_STEPS;
        let mut shares = self.decoding(guarded, lowers_turn);
        // With the tokens that are decoded a chunk in all, which is computed at once; but every prompt gets on.
        let rows = self.limits.chunk_rows.saturating_sub(shares.len()).max(1);
        let prompts = self.prompts(rows, if lowers_turn { Class::Batch } else { Class::Interactive });
        if guarded && lowers_turn {
            self.guarded_steps = 0;
        }
        if prompts.is_empty() {
            let mut left = LIGHT_ROWS.saturating_sub(shares.len());
            for share in &mut shares {
                share.drafts = if left > 0 { drafts(share.id, left).min(left) } else { 0 };
                left -= share.drafts;
            }
        }
        shares.extend(prompts);
        for share in &shares {
            let step = self.steps;
            self.entry(share.id).into_iter().for_each(|e| e.served = step);
        }
        shares
    }

    /// One row for each that decodes: higher classes first, in a class those that waited longest.
    fn decoding(&self, guarded: bool, lowers_turn: bool) -> Vec<Share> {
        let mut decoding: Vec<&Entry> = self.entries.iter().filter(|e| e.decodes()).collect();
        decoding.sort_by_key(|e| (std::cmp::Reverse(e.class), e.served, e.id));
        let interactive = decoding.iter().filter(|e| e.class == Class::Interactive).count();
        let rows = match (guarded, lowers_turn) {
            (false, _) => decoding.len(),
            (true, true) => interactive + self.limits.chunk_rows - 1,
            (true, false) => interactive.max(RIDE_ROWS),
        };
        decoding.iter().take(rows).map(|e| Share { id: e.id, rows: 1, drafts: 0 }).collect()
    }

    /// Cuts `rows` rows from the prompts of `class` and above. In a class turns go to the oldest and to the one that needs
    /// least: short prompts do not wait for long ones, and long ones get done.
    fn prompts(&self, mut rows: usize, class: Class) -> Vec<Share> {
        let is_prompt = |e: &&Entry| e.state == State::Running && e.pending > 1 && e.class >= class;
        let mut prompts: Vec<&Entry> = self.entries.iter().filter(is_prompt).collect();
        if self.steps % 2 == 1 {
            prompts.sort_by_key(|e| (std::cmp::Reverse(e.class), e.pending, e.id));
        }
        let mut shares = Vec::new();
        for entry in prompts {
            let share = Share { id: entry.id, rows: entry.pending.min(rows), drafts: 0 };
            rows -= share.rows;
            shares.extend(Some(share).filter(|s| s.rows > 0));
        }
        shares
    }
}
