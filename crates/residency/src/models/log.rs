//! What the pool keeps of a model, and what it tells of it.

use std::collections::VecDeque;

use super::Ticket;
use crate::pressure::{Given, Step};

/// Where a model is between coming and going.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Its capacity is charged, nothing is read.
    Reserved,
    /// It is being filled; usable under a lease for what is there.
    Warming,
    /// All is filled.
    Resident,
    /// It takes no new leases and goes when the last one ends.
    Draining,
    /// Its memory is free again. Only events show this state: the pool has forgotten the model.
    Evicted,
}

impl State {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            State::Reserved => "reserved",
            State::Warming => "warming",
            State::Resident => "resident",
            State::Draining => "draining",
            State::Evicted => "evicted",
        }
    }
}

/// Why a model goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The machine is short of memory, or the pool was made smaller.
    Pressure,
    /// Idle models held more than they may.
    Idle,
    /// Nobody used it for the time that models are kept.
    Ttl,
    /// Somebody ordered it.
    Admin,
    /// Another model needs the room.
    Replace,
}

impl Reason {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Pressure => "pressure",
            Reason::Idle => "idle",
            Reason::Ttl => "ttl",
            Reason::Admin => "admin",
            Reason::Replace => "replace",
        }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<K> {
    /// The model came to `state`, when it goes for a reason.
    State {
        /// The new state.
        state: State,
        /// Why it goes.
        reason: Option<Reason>,
    },
    /// The model makes room for this one.
    For {
        /// The model that comes.
        model: K,
    },
    /// The model would have to go, and serves those first who wait for it: the pool thrashes.
    Held,
    /// The model could not be loaded.
    Failed,
    /// The capacity moved, perhaps less far than wanted.
    Resized {
        /// Bytes before.
        from_bytes: u64,
        /// Bytes asked for.
        wanted_bytes: u64,
        /// Bytes now.
        to_bytes: u64,
    },
    /// The machine was short of memory, and this was asked of the pool.
    Asked {
        /// What.
        step: Step,
        /// What it gave.
        given: Given,
    },
}

/// One line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event<K> {
    /// When, by the clock that the caller passes in.
    pub at_ms: u64,
    /// Whose; `None` for the pool itself.
    pub model: Option<K>,
    /// What.
    pub change: Change<K>,
}

/// Events that are kept: enough to see why, and no growth over months.
const EVENTS_MAX: usize = 1024;

#[derive(Debug, Clone)]
pub(super) struct Log<K>(VecDeque<Event<K>>);

impl<K> Default for Log<K> {
    fn default() -> Self {
        Log(VecDeque::new())
    }
}

impl<K: Clone + PartialEq> Log<K> {
    pub(super) fn events(&self) -> impl Iterator<Item = &Event<K>> {
        self.0.iter()
    }

    pub(super) fn push(&mut self, at_ms: u64, model: Option<&K>, change: Change<K>) {
        if self.0.len() == EVENTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Event { at_ms, model: model.cloned(), change });
    }

    /// As [`Log::push`], unless the last event says the same of the model: whoever waits asks often.
    pub(super) fn push_new(&mut self, at_ms: u64, model: &K, change: Change<K>) {
        if self.0.back().is_none_or(|e| e.model.as_ref() != Some(model) || e.change != change) {
            self.push(at_ms, Some(model), change);
        }
    }
}

/// A request in the queue.
#[derive(Debug, Clone)]
pub(super) struct Waiting<K> {
    pub(super) ticket: Ticket,
    pub(super) model: K,
    pub(super) bytes: u64,
}

/// A model in the pool.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) state: State,
    /// Number of this stay, unique in the pool.
    pub(super) stay: u64,
    pub(super) bytes: u64,
    pub(super) leases: u32,
    /// Leases since it came.
    pub(super) served: u32,
    /// When its last lease ended.
    pub(super) used_ms: u64,
    pub(super) protected: bool,
    /// It drains on somebody's order.
    pub(super) ordered: bool,
    /// It came soon after it had been replaced.
    pub(super) came_back: bool,
}

impl Entry {
    /// A model that is to be loaded by the holder of its one lease.
    pub(super) fn reserved(now_ms: u64) -> Entry {
        Entry {
            state: State::Reserved,
            stay: 0,
            bytes: 0,
            leases: 1,
            served: 1,
            used_ms: now_ms,
            protected: false,
            ordered: false,
            came_back: false,
        }
    }

    /// Whether it may be evicted.
    pub(super) fn may_go(&self) -> bool {
        self.state == State::Resident && self.leases == 0 && !self.protected
    }
}
