//! The model pool: who may use which model, and which goes when another must come.
//!
//! ```text
//! Reserved ──→ Warming ──→ Resident ──→ Draining ──→ Evicted
//!  capacity     filling      filled      no new       gone
//!  charged                               leases
//! ```
//!
//! A request takes a [`Ticket`], and with it a [`Lease`] as soon as its model is there or it is the one who must load it.
//! Tickets are served in order, so that a large model that waits for room is not overtaken for ever. A model under a lease
//! is never evicted; the others go least recently used first, each for a [`Reason`] that the log keeps.
//!
//! Thrash guard: where a model comes back soon after it was replaced, the pool is too small for its users. Then a model
//! that is there serves up to [`HOLD_LEASES`] of the requests that wait for it before it is replaced: fewer loads, and
//! nobody waits for longer than those few.

mod log;

use std::collections::{BTreeMap, VecDeque};

use crate::Error;
use crate::pressure::{Given, Step};
pub use log::{Change, Event, Reason, State};
use log::{Entry, Log, Waiting};

/// Requests a replaced model serves before it goes again.
pub const HOLD_LEASES: u32 = 8;

/// How the pool decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Bytes for models.
    pub capacity_bytes: u64,
    /// Bytes that models without a lease may hold of it.
    pub idle_bytes_max: u64,
    /// How long a model stays without a lease, in milliseconds; `None` is for ever.
    pub keep_alive_ms: Option<u64>,
    /// A model that comes back so soon after it was replaced, in milliseconds, shows a pool that thrashes.
    pub thrash_ms: u64,
    /// Requests that may wait.
    pub waiting_max: usize,
}

/// A place in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// A right to use a model that keeps it from being evicted. To be given back by [`Models::release`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Lease<K> {
    /// The model.
    pub model: K,
    /// Which of its stays: a model that failed and came again is another one.
    stay: u64,
}

/// What a ticket gets now.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Admission<K> {
    /// The model is there, or being loaded ([`Models::state`] tells).
    Use(Lease<K>),
    /// The capacity is charged; the holder loads the model, then calls [`Models::advance`] or [`Models::failed`].
    Load(Lease<K>),
    /// These models must be freed and told to [`Models::evicted`]; then ask again.
    Evict(Vec<K>),
    /// No room yet, or somebody came first.
    Wait,
    /// The model is being unloaded on somebody's order: an answer, so that no one waits without end.
    Unloading,
}

/// The pool of models called `K`.
#[derive(Debug, Clone)]
pub struct Models<K> {
    policy: Policy,
    entries: BTreeMap<K, Entry>,
    /// When each model was replaced last.
    replaced_ms: BTreeMap<K, u64>,
    queue: VecDeque<Waiting<K>>,
    numbers: u64,
    log: Log<K>,
}

impl<K: Ord + Clone> Models<K> {
    /// An empty pool.
    pub fn new(policy: Policy) -> Models<K> {
        Models {
            policy,
            entries: BTreeMap::new(),
            replaced_ms: BTreeMap::new(),
            queue: VecDeque::new(),
            numbers: 0,
            log: Log::default(),
        }
    }

    /// Bytes for models now; it follows [`Models::resize`] as bytes become free.
    pub fn capacity_bytes(&self) -> u64 {
        self.policy.capacity_bytes.max(self.used_bytes())
    }

    /// Bytes of all models that are not evicted.
    pub fn used_bytes(&self) -> u64 {
        self.entries.values().map(|e| e.bytes).sum()
    }

    /// Bytes of protected models: the floor.
    pub fn floor_bytes(&self) -> u64 {
        self.entries.values().filter(|e| e.protected).map(|e| e.bytes).sum()
    }

    /// The state of `model`; `None` if it is not in the pool.
    pub fn state(&self, model: &K) -> Option<State> {
        self.entries.get(model).map(|e| e.state)
    }

    /// Whether the stay that `lease` belongs to goes on, and in which state.
    pub fn state_under(&self, lease: &Lease<K>) -> Option<State> {
        self.entries.get(&lease.model).filter(|e| e.stay == lease.stay).map(|e| e.state)
    }

    /// Leases on `model`.
    pub fn leases(&self, model: &K) -> u32 {
        self.entries.get(model).map_or(0, |e| e.leases)
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Models in the pool, with their states and bytes.
    pub fn list(&self) -> impl Iterator<Item = (&K, State, u64)> {
        self.entries.iter().map(|(model, e)| (model, e.state, e.bytes))
    }

    /// What happened lately, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &Event<K>> {
        self.log.events()
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// A place in the queue for a request of `model`, which takes `bytes` when it is loaded.
    pub fn ask(&mut self, model: &K, bytes: u64) -> Result<Ticket, Error> {
        self.check_size(model, bytes)?;
        if self.queue.len() >= self.policy.waiting_max {
            return Err(Error::QueueFull { waiting: self.queue.len(), max: self.policy.waiting_max });
        }
        let ticket = Ticket(self.number());
        self.queue.push_back(Waiting { ticket, model: model.clone(), bytes });
        Ok(ticket)
    }

    /// The request is not wanted any more.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.queue.retain(|w| w.ticket != ticket);
    }

    fn check_size(&self, model: &K, bytes: u64) -> Result<(), Error> {
        let protected = self.entries.iter().filter(|(m, e)| e.protected && *m != model).map(|(_, e)| e.bytes);
        let max_bytes = self.policy.capacity_bytes.saturating_sub(protected.sum());
        let there = self.entries.contains_key(model);
        if bytes > max_bytes && !there { Err(Error::TooLarge { bytes, max_bytes }) } else { Ok(()) }
    }

    /// What `ticket` gets now. With anything but [`Admission::Evict`] and [`Admission::Wait`] it is used up, as with an
    /// error: the model has become too large for the pool.
    pub fn admit(&mut self, ticket: Ticket, now_ms: u64) -> Result<Admission<K>, Error> {
        let Some(at) = self.queue.iter().position(|w| w.ticket == ticket) else { return Ok(Admission::Wait) };
        let Waiting { model, bytes, .. } = self.queue[at].clone();
        match self.entries.get_mut(&model) {
            Some(entry) if entry.state == State::Draining => {
                if !entry.ordered {
                    return Ok(Admission::Wait);
                }
                self.queue.remove(at);
                return Ok(Admission::Unloading);
            }
            Some(entry) => {
                let held = entry.came_back && entry.served < HOLD_LEASES;
                if at > 0 && !held {
                    return Ok(Admission::Wait);
                }
                self.queue.remove(at);
                (entry.leases, entry.served) = (entry.leases + 1, entry.served + 1);
                return Ok(Admission::Use(Lease { model, stay: entry.stay }));
            }
            None if at > 0 => return Ok(Admission::Wait),
            None => {}
        }
        if let Err(error) = self.check_size(&model, bytes) {
            self.queue.remove(at);
            return Err(error);
        }
        let used_bytes = self.used_bytes();
        let needed_bytes = (used_bytes + bytes).saturating_sub(self.policy.capacity_bytes);
        if needed_bytes > 0 {
            return Ok(self.make_room(&model, needed_bytes, now_ms));
        }
        self.queue.remove(at);
        let stay = self.number();
        let came_back =
            self.replaced_ms.get(&model).is_some_and(|&at| now_ms.saturating_sub(at) <= self.policy.thrash_ms);
        let entry = Entry { stay, bytes, came_back, ..Entry::reserved(now_ms) };
        self.entries.insert(model.clone(), entry);
        self.log.push(now_ms, Some(&model), Change::State { state: State::Reserved, reason: None });
        Ok(Admission::Load(Lease { model, stay }))
    }

    /// What would be evicted for a model of `bytes` if it were asked for now, least recently used first; `None` if that would
    /// not be enough.
    pub fn would_evict(&self, bytes: u64) -> Option<Vec<K>> {
        let needed_bytes = (self.used_bytes() + bytes).saturating_sub(self.policy.capacity_bytes);
        let victims = self.idle_for(needed_bytes);
        let freed: u64 = victims.iter().map(|v| self.entries[v].bytes).sum();
        (freed >= needed_bytes).then_some(victims)
    }

    /// Evicts least recently used models for `model`, if that frees `needed_bytes`.
    fn make_room(&mut self, model: &K, needed_bytes: u64, now_ms: u64) -> Admission<K> {
        // What is being freed already needs no victims.
        let coming = self.entries.values().filter(|e| e.state == State::Draining && e.leases == 0);
        let needed_bytes = needed_bytes.saturating_sub(coming.map(|e| e.bytes).sum());
        if needed_bytes == 0 {
            return Admission::Wait;
        }
        let victims = self.idle_for(needed_bytes);
        let freed: u64 = victims.iter().map(|v| self.entries[v].bytes).sum();
        if freed < needed_bytes {
            return Admission::Wait;
        }
        let waited_for = |v: &K| self.queue.iter().any(|w| w.model == *v);
        let holds = |v: &K| self.entries[v].came_back && self.entries[v].served < HOLD_LEASES && waited_for(v);
        if let Some(held) = victims.iter().find(|v| holds(v)).cloned() {
            self.log.push_new(now_ms, &held, Change::Held);
            return Admission::Wait;
        }
        for victim in &victims {
            self.log.push(now_ms, Some(victim), Change::For { model: model.clone() });
            self.replaced_ms.insert(victim.clone(), now_ms);
            self.start_draining(victim, Reason::Replace, now_ms);
        }
        Admission::Evict(victims)
    }

    /// Idle models, least recently used first, until they hold `bytes`.
    fn idle_for(&self, bytes: u64) -> Vec<K> {
        let mut idle: Vec<(&K, &Entry)> = self.entries.iter().filter(|(_, e)| e.may_go()).collect();
        idle.sort_by_key(|(_, e)| (e.used_ms, e.stay));
        let mut sum = 0;
        let enough = idle.iter().position(|(_, e)| {
            sum += e.bytes;
            sum >= bytes
        });
        idle.truncate(enough.map_or(idle.len(), |i| i + 1));
        if bytes == 0 { Vec::new() } else { idle.into_iter().map(|(model, _)| model.clone()).collect() }
    }

    fn start_draining(&mut self, model: &K, reason: Reason, now_ms: u64) {
        if let Some(entry) = self.entries.get_mut(model) {
            entry.state = State::Draining;
            entry.ordered = reason == Reason::Admin;
            self.log.push(now_ms, Some(model), Change::State { state: State::Draining, reason: Some(reason) });
        }
    }

    /// The load has come as far as `state`: [`State::Warming`] or [`State::Resident`].
    pub fn advance(&mut self, lease: &Lease<K>, state: State, now_ms: u64) {
        if let Some(entry) = self.entries.get_mut(&lease.model).filter(|e| e.stay == lease.stay && e.state < state) {
            // An order to unload that came meanwhile stays in force: Draining is later than both.
            entry.state = state;
            self.log.push(now_ms, Some(&lease.model), Change::State { state, reason: None });
        }
    }

    /// The load failed and its memory is free again. All leases on it end.
    pub fn failed(&mut self, lease: Lease<K>, now_ms: u64) {
        if self.entries.get(&lease.model).is_some_and(|e| e.stay == lease.stay) {
            self.entries.remove(&lease.model);
            self.log.push(now_ms, Some(&lease.model), Change::Failed);
        }
    }

    /// Ends a lease. `true`: it was the last on a model that is being unloaded, which is now to be freed and told to
    /// [`Models::evicted`].
    #[must_use]
    pub fn release(&mut self, lease: Lease<K>, now_ms: u64) -> bool {
        let Some(entry) = self.entries.get_mut(&lease.model).filter(|e| e.stay == lease.stay) else { return false };
        entry.leases -= 1;
        entry.used_ms = now_ms;
        entry.state == State::Draining && entry.leases == 0
    }

    /// The memory of `model`, which was draining without a lease, is free again.
    pub fn evicted(&mut self, model: &K, now_ms: u64) {
        if self.entries.get(model).is_some_and(|e| e.state == State::Draining && e.leases == 0) {
            self.entries.remove(model);
            self.log.push(now_ms, Some(model), Change::State { state: State::Evicted, reason: None });
        }
    }

    /// Unloads `model` on somebody's order, protected or not. `true`: nobody uses it, free it now; else the last
    /// [`Models::release`] says so.
    #[must_use]
    pub fn unload(&mut self, model: &K, now_ms: u64) -> bool {
        let idle = self.entries.get(model).is_some_and(|e| e.leases == 0 && e.state != State::Draining);
        self.start_draining(model, Reason::Admin, now_ms);
        idle
    }

    /// Models to free because their time is over, or because idle ones hold more than they may.
    #[must_use]
    pub fn due(&mut self, now_ms: u64) -> Vec<K> {
        let over = |e: &Entry| self.policy.keep_alive_ms.is_some_and(|ms| now_ms.saturating_sub(e.used_ms) >= ms);
        let old: Vec<K> =
            self.entries.iter().filter(|(_, e)| e.may_go() && over(e)).map(|(model, _)| model.clone()).collect();
        old.iter().for_each(|model| self.start_draining(model, Reason::Ttl, now_ms));
        let idle_bytes: u64 = self.entries.values().filter(|e| e.may_go()).map(|e| e.bytes).sum();
        let surplus = self.idle_for(idle_bytes.saturating_sub(self.policy.idle_bytes_max));
        surplus.iter().for_each(|model| self.start_draining(model, Reason::Idle, now_ms));
        [old, surplus].concat()
    }

    /// When [`Models::due`] has something to do next, if nothing happens before.
    pub fn due_at_ms(&self) -> Option<u64> {
        let keep_alive_ms = self.policy.keep_alive_ms?;
        self.entries.values().filter(|e| e.may_go()).map(|e| e.used_ms.saturating_add(keep_alive_ms)).min()
    }

    /// Memory is short: all idle models that are not protected, to be freed.
    #[must_use]
    pub fn drop_idle(&mut self, now_ms: u64) -> Vec<K> {
        let idle = self.idle_for(u64::MAX);
        idle.iter().for_each(|model| self.start_draining(model, Reason::Pressure, now_ms));
        idle
    }

    /// Keeps in the log what the pool was asked for when memory was short, and what it gave.
    pub fn asked(&mut self, step: Step, given: Given, now_ms: u64) {
        self.log.push(now_ms, None, Change::Asked { step, given });
    }

    /// Protects `model`, or ends that. While protected it is evicted on order only.
    pub fn protect(&mut self, model: &K, protected: bool) {
        if let Some(entry) = self.entries.get_mut(model) {
            entry.protected = protected;
        }
    }

    /// Moves the capacity to `wanted_bytes`, not below the floor. Only free bytes move: the models returned are to be freed,
    /// and what is under a lease is given back when its time comes.
    pub fn resize(&mut self, wanted_bytes: u64, now_ms: u64) -> Result<Vec<K>, Error> {
        let floor_bytes = self.floor_bytes();
        if wanted_bytes < floor_bytes {
            return Err(Error::BelowFloor { max_bytes: wanted_bytes, floor_bytes });
        }
        let from_bytes = self.capacity_bytes();
        self.policy.capacity_bytes = wanted_bytes;
        let surplus = self.idle_for(self.used_bytes().saturating_sub(wanted_bytes));
        surplus.iter().for_each(|model| self.start_draining(model, Reason::Pressure, now_ms));
        let to_bytes = self.capacity_bytes();
        self.log.push(now_ms, None, Change::Resized { from_bytes, wanted_bytes, to_bytes });
        Ok(surplus)
    }
}
