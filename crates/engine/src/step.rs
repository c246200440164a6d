//! A step: everyone whose turn it is gets a little further, in one batch.

use std::ops::ControlFlow;

use model::Row;

use crate::books::Books;
use crate::request::{Progress, StopReason};
use crate::scheduler::{RequestId, Scheduler, Share};
use crate::session::Session;
use crate::{Engine, Error};

/// Where what happens goes; `Break` ends the request.
type Publish<'a> = dyn FnMut(RequestId, Progress<'_>) -> ControlFlow<()> + 'a;

/// What a step computed. Nothing, while the first in turn waits for what others keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stepped {
    /// Requests that took part.
    pub requests: usize,
    /// Positions, guessed ones included.
    pub rows: usize,
}

impl Engine {
    /// Takes the requests a step further. `publish` hears what happens and may `Break` a request off, which then holds nothing
    /// when this returns; who has ended is in [`Engine::take_ended`].
    pub fn step(&mut self, publish: &mut Publish<'_>) -> Stepped {
        self.admit(publish);
        let shares = self.schedule();
        let computed = self.forward(&shares);
        self.publish(&shares, computed, publish);
        Stepped { requests: shares.len(), rows: shares.iter().map(|s| s.rows + s.drafts).sum() }
    }

    /// Ends whose time is over, and lets begin whose turn it is.
    fn admit(&mut self, publish: &mut Publish<'_>) {
        let now_ms = (self.clock)();
        self.runner.kv_clock(now_ms);
        let over = |s: &Session| s.request.deadline_ms.is_some_and(|deadline| deadline <= now_ms);
        let over: Vec<RequestId> = self.sessions.iter().filter(|(_, s)| over(s)).map(|(&id, _)| id).collect();
        over.into_iter().for_each(|id| self.finish(id, Ok(StopReason::Deadline), publish));
        self.with_memory(|scheduler, memory| scheduler.admit(memory));
    }

    /// Who computes what, with room for it.
    fn schedule(&mut self) -> Vec<Share> {
        let (sessions, speculate) = (&mut self.sessions, &mut self.speculate);
        let shares = self.scheduler.schedule(|id, guesses_max| {
            let Some(session) = sessions.get_mut(&id) else { return 0 };
            let len = session.guesses_max().min(guesses_max);
            session.guesses = speculate.propose(&mut session.guesser, &session.history, len);
            session.guesses.len()
        });
        self.with_memory(|scheduler, memory| scheduler.grow(shares, memory))
    }

    fn forward(&mut self, shares: &[Share]) -> Result<(), Error> {
        let sessions = &self.sessions;
        let rows = |&share: &Share| sessions.get(&share.id).into_iter().flat_map(move |s| s.rows(share));
        let rows: Vec<Row> = shares.iter().flat_map(rows).collect();
        if rows.is_empty() { Ok(()) } else { self.compute(&rows) }
    }

    /// Passes on what the step gave. One that failed is taken apart, so that who is not at fault goes on.
    fn publish(&mut self, shares: &[Share], computed: Result<(), Error>, publish: &mut Publish<'_>) {
        match (computed, shares) {
            (Ok(()), _) => {}
            (Err(error), [share]) => return self.finish(share.id, Err(error), publish),
            (Err(_), shares) => {
                for &share in shares {
                    let share = [self.after_failure(share)];
                    let computed = self.forward(&share);
                    self.publish(&share, computed, publish);
                }
                return;
            }
        }
        let mut from = 0;
        let mut ends = Vec::new();
        for &share in shares {
            let Some(session) = self.sessions.get_mut(&share.id) else { continue };
            let len = session.rows(share).filter(|row| row.logits).count() * self.model.config.vocab_len;
            let logits = &self.runner.logits()[from..from + len];
            from += len;
            let advanced = session.advance(&self.model, share, logits, &mut |what| publish(share.id, what));
            if let Some(sequence) = session.sequence.filter(|_| share.drafts > 0) {
                // Guesses that were wrong.
                self.runner.sequence_truncate(sequence, session.computed);
            }
            match advanced {
                Ok(None) => {}
                Ok(Some(StopReason::Context)) if session.shift() => {
                    session.released().into_iter().for_each(|sequence| self.runner.sequence_close(sequence));
                    self.scheduler.requeue(share.id);
                }
                Ok(Some(stop)) => ends.push((share.id, Ok(stop))),
                Err(error) => ends.push((share.id, Err(error))),
            }
        }
        for &Share { id, .. } in shares {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            self.scheduler.set_pending(id, session.pending());
            if session.tell_dropped(&mut |what| publish(id, what)).is_break() {
                ends.push((id, Ok(StopReason::Cancelled)));
            }
        }
        ends.into_iter().for_each(|(id, how)| self.finish(id, how, publish));
    }

    /// `share` once more, after a step that failed: where there is a window, the sequence may have to begin anew.
    fn after_failure(&mut self, share: Share) -> Share {
        let Some(session) = self.sessions.get_mut(&share.id) else { return share };
        let before = session.computed;
        session.computed = session.sequence.map_or(0, |sequence| self.runner.sequence_len(sequence));
        if session.computed == before { share } else { Share { drafts: 0, ..share } }
    }

    /// Lets the scheduler work on keys and values, then ends the requests that this refused.
    fn with_memory<T>(&mut self, work: impl FnOnce(&mut Scheduler, &mut Books<'_>) -> T) -> T {
        let mut books = Books {
            model: &self.model,
            runner: &mut self.runner,
            sessions: &mut self.sessions,
            account: &mut self.account,
            chunk: self.scheduler.limits().chunk_rows,
            failed: Vec::new(),
        };
        let result = work(&mut self.scheduler, &mut books);
        let failed = books.failed;
        let quiet = &mut |_: RequestId, _: Progress<'_>| ControlFlow::Continue(());
        failed.into_iter().for_each(|(id, error)| self.finish(id, Err(error), quiet));
        result
    }
}
