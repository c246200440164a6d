//! Several models under one budget: `residency::models` decides, this carries it out.
//!
//! Decisions are made under one lock; loading and freeing happen outside it, and whoever waits is woken after each. The
//! policy charges a model's capacity before it is loaded and until it is freed, so loads find the ledger with room.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use model::Model;
use residency::budget::Ledger;
use residency::models::{Admission, Event, Lease, Models, Policy, State};
use residency::pressure::{Given, Step};

use crate::{Engine, Error};

/// Where models come from.
pub trait Shelf: Send + Sync {
    /// Bytes that `model` takes with all that belongs to it: what [`Shelf::load`] has granted, and what its sessions may have
    /// granted later.
    fn bytes(&self, model: &str) -> Result<u64, Error>;

    /// Loads `model`, with everything it holds granted by `ledger` before it exists ([`Engine::hold`],
    /// [`Engine::charge_to`]).
    fn load(&self, model: &str, ledger: &Ledger) -> Result<Engine, Error>;
}

/// Milliseconds of a clock that does not go back.
pub type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// A pool of models; clones are the same pool.
#[derive(Clone)]
pub struct Pool(Arc<Shared>);

struct Shared {
    shelf: Box<dyn Shelf>,
    ledger: Ledger,
    clock: Clock,
    state: Mutex<PoolState>,
    changed: Condvar,
}

struct PoolState {
    models: Models<String>,
    engines: BTreeMap<String, Loaded>,
    closed: bool,
}

/// A model that is there.
struct Loaded {
    engine: Arc<Mutex<Engine>>,
    /// The engine's, for what needs no turn at it.
    model: Arc<Model>,
}

impl Pool {
    /// An empty pool over `shelf`. `policy.capacity_bytes` is to be granted by nobody else from `ledger`.
    pub fn new(shelf: Box<dyn Shelf>, ledger: Ledger, policy: Policy, clock: Clock) -> Pool {
        let state = PoolState { models: Models::new(policy), engines: BTreeMap::new(), closed: false };
        Pool(Arc::new(Shared { shelf, ledger, clock, state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// The ledger that the models are charged to.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// The model called `model`, loaded if it is not there; waits in order for room. A model is known by its name: whoever
    /// wants two names of one file to share it resolves them first.
    pub fn acquire(&self, model: &str) -> Result<Held, Error> {
        let bytes = self.0.shelf.bytes(model)?;
        let mut state = self.0.lock();
        let ticket = state.models.ask(&model.to_owned(), bytes)?;
        loop {
            if state.closed {
                state.models.cancel(ticket);
                return Err(Error::Closed);
            }
            let admission = state.models.admit(ticket, self.0.now_ms());
            if !matches!(admission, Ok(Admission::Wait | Admission::Evict(_))) {
                // The next in the queue is the first now.
                self.0.changed.notify_all();
            }
            state = match admission? {
                Admission::Wait => self.0.wait(state),
                Admission::Evict(models) => {
                    drop(state);
                    self.0.free(&models);
                    self.0.lock()
                }
                Admission::Unloading => return Err(Error::Unloading { model: model.to_owned() }),
                Admission::Load(lease) => {
                    drop(state);
                    return self.load(lease);
                }
                Admission::Use(lease) => return self.await_load(state, lease),
            };
        }
    }

    fn load(&self, lease: Lease<String>) -> Result<Held, Error> {
        let mut loading = Loading { shared: &self.0, lease: Some(lease) };
        let Some(lease) = &loading.lease else { unreachable!("it was put there") };
        let engine = self.0.shelf.load(&lease.model, &self.0.ledger)?;
        let model = Arc::clone(engine.model());
        let engine = Arc::new(Mutex::new(engine));
        let mut state = self.0.lock();
        state.engines.insert(lease.model.clone(), Loaded { engine: Arc::clone(&engine), model });
        state.models.advance(lease, State::Resident, self.0.now_ms());
        drop(state);
        self.0.changed.notify_all();
        let lease = loading.lease.take();
        Ok(Held { pool: self.clone(), lease, engine: Some(engine) })
    }

    /// Somebody else loads the model.
    fn await_load(&self, mut state: MutexGuard<'_, PoolState>, lease: Lease<String>) -> Result<Held, Error> {
        loop {
            if state.models.state_under(&lease).is_none() {
                return Err(Error::LoadFailed { model: lease.model });
            }
            if let Some(loaded) = state.engines.get(&lease.model) {
                let engine = Some(Arc::clone(&loaded.engine));
                drop(state);
                return Ok(Held { pool: self.clone(), lease: Some(lease), engine });
            }
            state = self.0.wait(state);
        }
    }

    /// Unloads `model`: at once if nobody uses it, else when the last lease ends. Whether it was there.
    pub fn unload(&self, model: &str) -> bool {
        let mut state = self.0.lock();
        let model = model.to_owned();
        let known = state.models.state(&model).is_some();
        let idle = state.models.unload(&model, self.0.now_ms());
        drop(state);
        if idle {
            self.0.free(&[model]);
        }
        self.0.changed.notify_all();
        known
    }

    /// Frees what its time or the share of idle models ends. To be called now and then; releases do it too.
    pub fn tidy(&self) {
        let due = self.0.lock().models.due(self.0.now_ms());
        self.0.free(&due);
    }

    /// Protects a model from eviction, or ends that.
    pub fn protect(&self, model: &str, protected: bool) {
        self.0.lock().models.protect(&model.to_owned(), protected);
        self.0.changed.notify_all();
    }

    /// Moves the capacity, as far as free bytes and idle models allow.
    pub fn resize(&self, wanted_bytes: u64) -> Result<(), Error> {
        let surplus = self.0.lock().models.resize(wanted_bytes, self.0.now_ms())?;
        self.0.free(&surplus);
        self.0.changed.notify_all();
        Ok(())
    }

    /// Takes one step of the order in which memory is given back, and keeps in the log what it gave.
    pub fn give_back(&self, step: Step) -> Given {
        let given = match step {
            Step::StopPrefetch => {
                let models: Vec<_> = self.0.lock().engines.values().map(|e| Arc::clone(&e.model)).collect();
                Given::bytes(models.iter().map(|model| model.stop_read_ahead()).sum())
            }
            Step::DropIdleModels => {
                let before = self.0.ledger.used_bytes();
                let idle = self.0.lock().models.drop_idle(self.0.now_ms());
                self.0.free(&idle);
                Given::bytes(before.saturating_sub(self.0.ledger.used_bytes()))
            }
            _ => {
                let engines: Vec<_> = self.0.lock().engines.values().map(|e| Arc::clone(&e.engine)).collect();
                // One that computes keeps what it may need next.
                let idle = engines.iter().filter_map(|engine| engine.try_lock().ok());
                let given = idle.map(|mut engine| match engine.give_back(step) {
                    Given::Bytes(bytes) => bytes,
                    Given::Nothing | Given::Busy => 0,
                });
                Given::bytes(given.sum())
            }
        };
        self.0.lock().models.asked(step, given, self.0.now_ms());
        given
    }

    /// Ends the pool: who waits gets [`Error::Closed`], idle models go, the others when their last lease ends.
    pub fn close(&self) {
        let mut state = self.0.lock();
        state.closed = true;
        let all: Vec<String> = state.models.list().map(|(model, ..)| model.clone()).collect();
        let idle: Vec<String> = all.into_iter().filter(|m| state.models.unload(m, self.0.now_ms())).collect();
        drop(state);
        self.0.free(&idle);
        self.0.changed.notify_all();
    }

    /// Models that are there, with state and bytes.
    pub fn list(&self) -> Vec<(String, State, u64)> {
        self.0.lock().models.list().map(|(model, state, bytes)| (model.clone(), state, bytes)).collect()
    }

    /// What happened lately.
    pub fn events(&self) -> Vec<Event<String>> {
        self.0.lock().models.events().cloned().collect()
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.0.lock().models.waiting()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // Nothing that can panic runs under the lock but the policy, whose state no panic leaves half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, PoolState>) -> MutexGuard<'a, PoolState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        (self.clock)()
    }

    /// Frees the memory of `models`, which are draining without a lease, then says so.
    fn free(&self, models: &[String]) {
        if models.is_empty() {
            return;
        }
        let mut state = self.lock();
        let engines: Vec<_> = models.iter().filter_map(|m| state.engines.remove(m)).collect();
        drop(state);
        drop(engines);
        state = self.lock();
        for model in models {
            state.models.evicted(model, self.now_ms());
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// A load under way; one that ends without its engine has failed, by error or by panic.
struct Loading<'a> {
    shared: &'a Shared,
    lease: Option<Lease<String>>,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.shared.lock().models.failed(lease, self.shared.now_ms());
            self.shared.changed.notify_all();
        }
    }
}

/// A model under a lease: it stays while this exists.
pub struct Held {
    pool: Pool,
    lease: Option<Lease<String>>,
    engine: Option<Arc<Mutex<Engine>>>,
}

impl Held {
    /// The engine, alone: who else holds the model waits.
    pub fn engine(&self) -> MutexGuard<'_, Engine> {
        let Some(engine) = &self.engine else { unreachable!("it is taken out by drop alone") };
        // An engine that panicked in a step has dropped that step's sequence; others have theirs.
        engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Before the lease: what is freed then must be the last reference.
        self.engine = None;
        let Some(lease) = self.lease.take() else { return };
        let model = lease.model.clone();
        let now_ms = self.pool.0.now_ms();
        let mut state = self.pool.0.lock();
        let last = state.models.release(lease, now_ms);
        let mut over = state.models.due(now_ms);
        drop(state);
        over.extend(last.then_some(model));
        self.pool.0.free(&over);
        self.pool.0.changed.notify_all();
    }
}
