//! Who computes what in the next step. Pure: no model, no clock, no memory; those are asked through [`Memory`].
//!
//! A request is *waiting* (holds nothing), *running* (holds keys and values, takes part in steps) or *paused* (holds them and
//! takes no part). Requests have an order, their rank: the higher class first, in a class the earlier arrival. It decides who
//! is admitted next, and, from its end, who gives way; so the first in rank always goes on, and in a class nobody starves.

mod share;
#[cfg(test)]
mod tests;

pub use residency::kv::Class;
pub use share::Share;

use residency::kv::{Growth, Shortage};

/// A request of a [`Scheduler`], numbered by arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(crate) u64);

/// What bounds a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows of a step that holds prompts: what a decode step waits for in the worst case.
    pub chunk_rows: usize,
    /// Requests that run at once.
    pub running_max: usize,
    /// Requests that wait.
    pub waiting_max: usize,
}

impl Limits {
    fn at_least_one(self) -> Limits {
        Limits {
            chunk_rows: self.chunk_rows.max(1),
            running_max: self.running_max.max(1),
            waiting_max: self.waiting_max.max(1),
        }
    }
}

/// What became of a request that was submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submission {
    /// It waits for its turn.
    Queued(RequestId),
    /// As many wait as may.
    Full {
        /// Requests that wait.
        waiting: usize,
        /// Places.
        waiting_max: usize,
    },
}

/// Where the scheduler finds out about keys and values, and what it does to those who hold them.
pub trait Memory {
    /// Takes room for all that `id` has to compute and a position more; [`Admission::Run`] tells how many positions are left
    /// to compute.
    fn admit(&mut self, id: RequestId) -> Admission;

    /// Room for `shares`, which run: all of it or nothing.
    fn grow(&mut self, shares: &[Share]) -> Growth;

    /// Takes keys and values away from `id`, which will be admitted again.
    fn release(&mut self, id: RequestId);

    /// `id` can never have what it needs; it is forgotten by the scheduler.
    fn refuse(&mut self, id: RequestId, shortage: Shortage);
}

/// Whether a request may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// With so many positions to compute.
    Run(usize),
    /// Another request computes what this one begins with, and is not done.
    Later,
    /// Not before others have ended or given way.
    Wait(Shortage),
    /// Never.
    Refuse(Shortage),
    /// It failed, for a reason of its own, and is gone.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Paused,
}

#[derive(Debug, Clone)]
struct Entry {
    id: RequestId,
    class: Class,
    state: State,
    /// Positions to compute: one while it decodes.
    pending: usize,
    /// The step that it last took part in.
    served: u64,
}

impl Entry {
    /// Ascending: who comes first.
    fn rank(&self) -> (std::cmp::Reverse<Class>, RequestId) {
        (std::cmp::Reverse(self.class), self.id)
    }

    fn decodes(&self) -> bool {
        self.state == State::Running && self.pending == 1
    }
}

/// All requests, and whose turn it is.
#[derive(Debug, Clone)]
pub struct Scheduler {
    limits: Limits,
    /// By rank.
    entries: Vec<Entry>,
    arrivals: u64,
    steps: u64,
    /// Steps since a lower class had a chunk beside interactive sessions that decode.
    guarded_steps: usize,
}

impl Scheduler {
    /// Without requests. Limits below 1 count as 1.
    pub fn new(limits: Limits) -> Scheduler {
        let limits = limits.at_least_one();
        Scheduler { limits, entries: Vec::new(), arrivals: 0, steps: 0, guarded_steps: 0 }
    }

    /// Changes the bounds; who runs goes on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits.at_least_one();
    }

    /// The bounds.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// A new request.
    pub fn submit(&mut self, class: Class) -> Submission {
        let (waiting, waiting_max) = (self.waiting(), self.limits.waiting_max);
        if waiting >= waiting_max {
            return Submission::Full { waiting, waiting_max };
        }
        let id = RequestId(self.arrivals);
        self.arrivals += 1;
        let entry = Entry { id, class, state: State::Waiting, pending: 0, served: 0 };
        let at = self.entries.partition_point(|e| e.rank() < entry.rank());
        self.entries.insert(at, entry);
        Submission::Queued(id)
    }

    /// Forgets a request: it is done, cancelled or refused.
    pub fn remove(&mut self, id: RequestId) {
        self.entries.retain(|e| e.id != id);
    }

    /// After a step `id` has `pending` positions to compute.
    pub fn set_pending(&mut self, id: RequestId, pending: usize) {
        self.entry(id).into_iter().for_each(|e| e.pending = pending);
    }

    /// `id` gave its keys and values back by itself; it is admitted again in its turn.
    pub fn requeue(&mut self, id: RequestId) {
        self.entry(id).into_iter().for_each(|e| e.state = State::Waiting);
    }

    /// Requests that hold no keys and values.
    pub fn waiting(&self) -> usize {
        self.count(State::Waiting)
    }

    /// Requests that take part in steps.
    pub fn running(&self) -> usize {
        self.count(State::Running)
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.entries.is_empty()
    }

    fn count(&self, state: State) -> usize {
        self.entries.iter().filter(|e| e.state == state).count()
    }

    fn entry(&mut self, id: RequestId) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|e| e.id == id)
    }

    /// Lets those begin whose turn it is and for whom there is room; lower ranks give way. The first that must wait is waited
    /// for: those behind it do not overtake.
    pub fn admit(&mut self, memory: &mut impl Memory) {
        while let Some(next) = self.entries.iter().position(|e| e.state != State::Running) {
            if self.running() >= self.limits.running_max && !self.pause_below(next) {
                return;
            }
            let Entry { id, state, .. } = self.entries[next];
            if state == State::Paused {
                self.entries[next].state = State::Running;
                continue;
            }
            match memory.admit(id) {
                Admission::Run(pending) => {
                    let entry = &mut self.entries[next];
                    (entry.state, entry.pending) = (State::Running, pending);
                }
                Admission::Later => return,
                Admission::Wait(_) if self.release_below(id, memory).is_some() => {}
                Admission::Wait(shortage) if shortage.cached_bytes > 0 || self.any_holds() => return,
                // Nobody is left whose end could be waited for.
                Admission::Wait(shortage) | Admission::Refuse(shortage) => {
                    self.remove(id);
                    memory.refuse(id, shortage);
                }
                Admission::Failed => self.remove(id),
            }
        }
    }

    fn any_holds(&self) -> bool {
        self.entries.iter().any(|e| e.state != State::Waiting)
    }

    /// Pauses the last in rank that runs, if it is of a lower class than entry `at`; its keys and values stay.
    fn pause_below(&mut self, at: usize) -> bool {
        let class = self.entries[at].class;
        let last = self.entries.iter_mut().rfind(|e| e.state == State::Running);
        let lower = last.filter(|e| e.class < class);
        lower.map(|e| e.state = State::Paused).is_some()
    }

    /// Releases the last in rank behind `id` that holds keys and values.
    fn release_below(&mut self, id: RequestId, memory: &mut impl Memory) -> Option<RequestId> {
        let last = self.entries.iter_mut().rfind(|e| e.state != State::Waiting || e.id == id)?;
        if last.id == id {
            return None;
        }
        last.state = State::Waiting;
        memory.release(last.id);
        Some(last.id)
    }

    /// Makes room for `shares`: the last in rank give way, with their shares, until the others have it. A request that lacks
    /// room although nobody is left to give way is refused.
    pub fn grow(&mut self, mut shares: Vec<Share>, memory: &mut impl Memory) -> Vec<Share> {
        loop {
            let shortage = match memory.grow(&shares) {
                Growth::Ready => return shares,
                Growth::Wait(shortage) | Growth::Refuse(shortage) => shortage,
            };
            let ranked = |e: &&Entry| shares.iter().any(|s| s.id == e.id);
            let Some(first) = self.entries.iter().find(ranked).map(|e| e.id) else { return Vec::new() };
            match self.release_below(first, memory) {
                Some(gone) => shares.retain(|s| s.id != gone),
                None => {
                    shares.retain(|s| s.id != first);
                    self.remove(first);
                    memory.refuse(first, shortage);
                }
            }
        }
    }
}
