//! The handle: a model that computes, and the requests that it is working on.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::{Model, Row, Runner, RunnerOptions};
use residency::budget::{Grant, Ledger, Line, Listener};
use residency::kv::BLOCK_TOKENS;

use crate::Error;
use crate::account::Account;
use crate::bell::Bell;
use crate::limits::{LOGITS_ROWS_MAX, RUNNING_MAX, WAITING_MAX};
use crate::pool::Clock;
use crate::request::{Generated, Progress, Request, StopReason};
use crate::scheduler::{Limits, RequestId, Scheduler, Submission};
use crate::session::Session;
use crate::speculative::Speculate;

/// A model that computes, and the requests that it is working on. Requests are submitted, and each [`Engine::step`] takes all
/// of them a little further; what one request does, how it ends or fails, changes no bit of another's answer.
pub struct Engine {
    pub(crate) model: Arc<Model>,
    pub(crate) runner: Runner,
    pub(crate) scheduler: Scheduler,
    pub(crate) sessions: BTreeMap<RequestId, Session>,
    pub(crate) speculate: Speculate,
    pub(crate) clock: Clock,
    bell: Bell,
    /// Rings it when the ledger has room again.
    hears_room: Arc<Listener>,
    /// Requests that have ended, for whoever asks.
    pub(crate) ended: Vec<Ended>,
    // After what it pays for: fields are dropped in order.
    pub(crate) account: Account,
}

/// A request that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Which.
    pub id: RequestId,
    /// How.
    pub result: Result<Generated, Error>,
}

/// Positions in the KV blocks of running requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fill {
    /// All of them, shared ones with each request.
    pub positions: usize,
    /// Those that hold a token.
    pub used: usize,
}

impl Engine {
    /// An engine for `model`, whose steps hold prompts of a micro-batch at most.
    pub fn new(model: Arc<Model>, options: &RunnerOptions) -> Result<Engine, Error> {
        let runner = Runner::new(Arc::clone(&model), options)?;
        let limits = Limits { chunk_rows: options.micro_batch, running_max: RUNNING_MAX, waiting_max: WAITING_MAX };
        let begin = Instant::now();
        let bell = Bell::default();
        let rung = bell.clone();
        Ok(Engine {
            model,
            runner,
            scheduler: Scheduler::new(limits),
            sessions: BTreeMap::new(),
            speculate: Speculate::Off,
            clock: Box::new(move || begin.elapsed().as_millis() as u64),
            bell,
            hears_room: Arc::new(move || rung.ring()),
            ended: Vec::new(),
            account: Account::default(),
        })
    }

    /// Requests at once: `running_max` that hold keys and values, and `waiting_max` that wait for them.
    pub fn set_limits(&mut self, running_max: usize, waiting_max: usize) {
        let limits = Limits { running_max, waiting_max, ..self.scheduler.limits() };
        self.scheduler.set_limits(limits);
    }

    /// Tells the time from now on, for deadlines and for what is idle.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = clock;
    }

    /// Where guesses come from. The answers do not depend on it; requests that run count their guesses anew.
    pub fn set_speculation(&mut self, speculate: Speculate) {
        self.speculate = speculate;
        self.sessions.values_mut().for_each(|session| session.guesser = self.speculate.guesser());
    }

    /// Keeps a grant for as long as the engine exists: the weights', the scratch buffers'.
    pub fn hold(&mut self, grant: Grant) {
        self.account.hold(grant);
    }

    /// Keeps the grant of the buffers that weights are read into until the first step is done, for which all were needed.
    pub fn hold_while_loading(&mut self, grant: Grant) {
        self.account.hold_while_loading(grant);
    }

    /// From now on `ledger` grants each KV block before it exists.
    pub fn charge_to(&mut self, ledger: &Ledger, owner: &str) -> Result<(), Error> {
        ledger.on_free(&self.hears_room);
        self.runner.charge_to(ledger, owner).map_err(|full| Error::Full { line: Line::Kv, full })
    }

    /// Takes the memory of a sequence of `context_max` positions now and keeps it.
    pub fn reserve(&mut self, context_max: usize) -> Result<(), Error> {
        let sequence = self.runner.sequence_open(context_max);
        Ok(self.runner.sequence_reserve(sequence)?)
    }

    /// Wakes [`Engine::generate`] where it waits, so that `progress` can end it.
    pub fn bell(&self) -> Bell {
        self.bell.clone()
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The runner below, for measurements that need no session.
    pub fn runner(&mut self) -> &mut Runner {
        &mut self.runner
    }

    /// Requests that hold keys and values, and requests that wait for them.
    pub fn load(&self) -> (usize, usize) {
        (self.sessions.len() - self.scheduler.waiting(), self.scheduler.waiting())
    }

    /// How full the blocks of running requests are.
    pub fn fill(&self) -> Fill {
        let open = self.sessions.values().filter(|s| s.sequence.is_some());
        open.fold(Fill::default(), |fill, s| Fill {
            positions: fill.positions + s.computed.next_multiple_of(BLOCK_TOKENS),
            used: fill.used + s.computed,
        })
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Takes a request on, if there is a place for it. An error if its prompt can never be answered.
    pub fn submit(&mut self, request: Request) -> Result<Submission, Error> {
        let class = request.class;
        let session = match Session::new(&self.model, request, self.speculate.guesser()) {
            Ok(session) => session,
            Err(refused) => {
                let (error, guesser) = *refused;
                self.speculate.close(guesser);
                return Err(error);
            }
        };
        let submission = self.scheduler.submit(class);
        match submission {
            Submission::Queued(id) => drop(self.sessions.insert(id, session)),
            Submission::Full { .. } => self.speculate.close(session.guesser),
        }
        Ok(submission)
    }

    /// Ends a request; what it held is free at once.
    pub fn cancel(&mut self, id: RequestId) {
        self.finish(id, Ok(StopReason::Cancelled), &mut |_, _| ControlFlow::Continue(()));
    }

    /// The requests that have ended since the last time.
    pub fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// Answers `request`; others go on meanwhile, without anyone to hear from them. `progress` may `Break`.
    pub fn generate(
        &mut self,
        request: Request,
        progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Generated, Error> {
        let id = match self.submit(request)? {
            Submission::Queued(id) => id,
            Submission::Full { waiting, waiting_max } => return Err(Error::QueueFull { waiting, waiting_max }),
        };
        loop {
            let rings = self.bell.rings();
            let stepped =
                self.step(&mut |who, what| if who == id { progress(what) } else { ControlFlow::Continue(()) });
            if let Some(at) = self.ended.iter().position(|ended| ended.id == id) {
                return self.ended.swap_remove(at).result;
            }
            if stepped.rows == 0 {
                if progress(Progress::Waiting).is_break() {
                    self.cancel(id);
                } else {
                    self.bell.wait(rings, self.next_change());
                }
            }
        }
    }

    /// How long nothing changes unless the bell rings: no deadline passes, and nothing that is kept becomes idle.
    fn next_change(&self) -> Option<Duration> {
        let now_ms = (self.clock)();
        let deadlines = self.sessions.values().filter_map(|session| session.request.deadline_ms);
        let at_ms = deadlines.chain(self.runner.kv_next_idle_ms()).min()?;
        Some(Duration::from_millis(at_ms.saturating_sub(now_ms)))
    }

    /// Computes `prompt` in a sequence of its own and shows the logits from position `from` on: position and logits to
    /// `each`, which may `Break`.
    pub fn logits(
        &mut self,
        prompt: &[u32],
        from: usize,
        each: &mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let sequence = self.runner.sequence_open(prompt.len());
        let (vocab_len, chunk) = (self.model.config.vocab_len, self.scheduler.limits().chunk_rows);
        let mut done = 0;
        let mut result = Ok(());
        while done < prompt.len() && result.is_ok() {
            let len = if done < from { (from - done).min(chunk) } else { LOGITS_ROWS_MAX.min(chunk) };
            let end = (done + len).min(prompt.len());
            let wanted_from = from.saturating_sub(done);
            let row = |(i, &token): (usize, &u32)| Row { sequence, token, logits: i >= wanted_from };
            let rows: Vec<Row> = prompt[done..end].iter().enumerate().map(row).collect();
            result = self.compute(&rows);
            let logits = self.runner.logits().chunks_exact(vocab_len).filter(|_| result.is_ok());
            for (i, row) in logits.enumerate() {
                if each(done + wanted_from + i, row).is_break() {
                    self.runner.sequence_close(sequence);
                    return Ok(());
                }
            }
            done = end;
        }
        self.runner.sequence_close(sequence);
        result
    }

    /// Computes `rows`; where the buffers of loading are in the way of their keys and values, loading is waited for.
    pub(crate) fn compute(&mut self, rows: &[Row]) -> Result<(), Error> {
        let mut result = self.runner.forward(rows).map(drop);
        if matches!(result, Err(model::Error::KvFull(_))) && self.account.loaded() {
            self.model.ensure_all(&mut |_, _| ())?;
            result = self.runner.forward(rows).map(drop);
        }
        if result.is_ok() {
            // A step has been through all of them.
            self.account.loaded();
        }
        Ok(result?)
    }

    /// Ends a request: with a result, or with what went wrong.
    pub(crate) fn finish(
        &mut self,
        id: RequestId,
        how: Result<StopReason, Error>,
        publish: &mut dyn FnMut(RequestId, Progress<'_>) -> ControlFlow<()>,
    ) {
        self.scheduler.remove(id);
        let Some(mut session) = self.sessions.remove(&id) else { return };
        session.released().into_iter().for_each(|sequence| self.runner.sequence_close(sequence));
        let stop = how.as_ref().map_or(StopReason::Cancelled, |&stop| stop);
        let mut quiet = |_: Progress<'_>| ControlFlow::Continue(());
        let mut aloud = |what: Progress<'_>| publish(id, what);
        let (generated, guesser) = session.end(stop, if how.is_ok() { &mut aloud } else { &mut quiet });
        self.speculate.close(guesser);
        self.ended.push(Ended { id, result: how.map(|_| generated) });
    }
}
