//! Where the scheduler meets the runner: who holds keys and values, and who gets more.

use std::collections::BTreeMap;

use model::{Model, Runner, SequenceId};
use residency::kv::{BLOCK_TOKENS, Growth, Shortage};

use crate::Error;
use crate::account::Account;
use crate::scheduler::{Admission, Memory, RequestId, Share};
use crate::session::Session;

/// The keys and values of sessions, as the scheduler sees them.
pub(crate) struct Books<'a> {
    pub(crate) model: &'a Model,
    pub(crate) runner: &'a mut Runner,
    pub(crate) sessions: &'a mut BTreeMap<RequestId, Session>,
    pub(crate) account: &'a mut Account,
    /// Positions of a prompt that a step computes at most.
    pub(crate) chunk: usize,
    /// Who was refused or failed, and why.
    pub(crate) failed: Vec<(RequestId, Error)>,
}

impl Books<'_> {
    /// Asks for memory; where the buffers of loading are in the way, loading is waited for.
    fn after_loading(&mut self, ask: impl Fn(&mut Self) -> Result<Growth, Error>) -> Result<Growth, Error> {
        let growth = ask(self)?;
        if !matches!(growth, Growth::Ready) && self.account.loaded() {
            self.model.ensure_all(&mut |_, _| ())?;
            return ask(self);
        }
        Ok(growth)
    }

    fn room(&mut self, wants: &[(SequenceId, usize)]) -> Result<Growth, Error> {
        self.after_loading(|books| Ok(books.runner.kv_grow(wants)?))
    }

    /// Whether somebody as urgent is computing more of what `session` begins with than is there.
    fn is_being_computed(&self, id: RequestId, session: &Session) -> bool {
        let there = self.runner.kv_match_len(&session.opening());
        self.sessions.iter().filter(|&(&other_id, _)| other_id != id).any(|(_, other)| {
            let alike = other.request.salt == session.request.salt && other.request.class >= session.request.class;
            let computes = alike && other.sequence.is_some() && other.pending() > 1;
            computes && {
                let common = other.history.iter().zip(&session.history).take_while(|(a, b)| a == b).count();
                let usable = common.min(session.history.len() - 1);
                // Parts of a block are shared only once the other has ended.
                usable >= there + BLOCK_TOKENS && other.computed < usable / BLOCK_TOKENS * BLOCK_TOKENS
            }
        })
    }

    fn join(&mut self, id: RequestId) -> Result<Admission, Error> {
        let Some(session) = self.sessions.get(&id) else { return Ok(Admission::Failed) };
        if self.is_being_computed(id, session) {
            return Ok(Admission::Later);
        }
        let len = session.history.len();
        if let Growth::Refuse(shortage) = self.after_loading(|books| Ok(books.runner.kv_fits(len)))? {
            return Ok(Admission::Refuse(shortage));
        }
        let Some(session) = self.sessions.get(&id) else { return Ok(Admission::Failed) };
        let opened = self.runner.sequence_join(&session.opening())?;
        // The next chunk of everybody's, where the context leaves room for it.
        let chunk = self.chunk;
        let want = |s: &Session, done: usize| (s.history.len() - done).min(chunk).min(s.request.context_max - done);
        let others = self.sessions.values().filter_map(|s| Some((s.sequence?, want(s, s.computed))));
        let wants: Vec<_> = others.chain([(opened.id, want(session, opened.reused))]).collect();
        match self.room(&wants) {
            Ok(Growth::Ready) => {
                let Some(session) = self.sessions.get_mut(&id) else { return Ok(Admission::Failed) };
                session.joined(opened.id, opened.reused);
                Ok(Admission::Run(session.pending()))
            }
            growth => {
                self.runner.sequence_close(opened.id);
                match growth? {
                    Growth::Wait(shortage) | Growth::Refuse(shortage) => Ok(Admission::Wait(shortage)),
                    Growth::Ready => Ok(Admission::Later),
                }
            }
        }
    }
}

impl Memory for Books<'_> {
    fn admit(&mut self, id: RequestId) -> Admission {
        self.join(id).unwrap_or_else(|error| {
            self.failed.push((id, error));
            Admission::Failed
        })
    }

    fn grow(&mut self, shares: &[Share]) -> Growth {
        let want = |s: &Share| Some((self.sessions.get(&s.id)?.sequence?, s.rows + s.drafts));
        let wants: Vec<_> = shares.iter().filter_map(want).collect();
        // Where the system has no memory, the step says so.
        self.room(&wants).unwrap_or(Growth::Ready)
    }

    fn release(&mut self, id: RequestId) {
        let sequence = self.sessions.get_mut(&id).and_then(Session::released);
        sequence.into_iter().for_each(|sequence| self.runner.sequence_close(sequence));
    }

    fn refuse(&mut self, id: RequestId, shortage: Shortage) {
        self.failed.push((id, Error::KvFull(shortage)));
    }
}
