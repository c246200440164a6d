//! What was read and waited for.

use super::Streamed;
use residency::experts::Counts;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What happened to the experts of a model so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertStats {
    /// Hits, misses, evictions, rereads.
    pub cache: Counts,
    /// Choices of tokens.
    pub routed: u64,
    /// Slices read.
    pub slices: u64,
    /// Bytes of slices that misses, guesses and warm starts asked for.
    pub asked_bytes: u64,
    /// Bytes of these that were given up before they were begun.
    pub forgotten_bytes: u64,
    /// Bytes of slices that were read.
    pub read_bytes: u64,
    /// Time in which at least one read was under way.
    pub read: Duration,
    /// Time in which slices were packed, of all lanes.
    pub packed: Duration,
    /// Time in which a forward pass had nothing to compute and waited.
    pub stalled: Duration,
    /// Slots.
    pub slots: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Whether the system keeps them in memory.
    pub locked: bool,
    /// Experts read on a guess.
    pub guesses: GuessCounts,
    /// Choices that were looked at for being left out (`--drop-cold-experts`).
    pub examined: u64,
    /// Choices that were left out.
    pub dropped: u64,
}

/// Experts that were read before their layer's router had spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GuessCounts {
    /// Experts.
    pub reads: u64,
    /// Of these, those that were wanted.
    pub right: u64,
    /// Bytes asked for of those that were not.
    pub wrong_bytes: u64,
}

impl ExpertStats {
    /// What happened after `before`.
    pub(crate) fn since(&self, before: &ExpertStats) -> ExpertStats {
        ExpertStats {
            cache: Counts {
                hits: self.cache.hits - before.cache.hits,
                misses: self.cache.misses - before.cache.misses,
                evictions: self.cache.evictions - before.cache.evictions,
                rereads: self.cache.rereads - before.cache.rereads,
            },
            routed: self.routed - before.routed,
            slices: self.slices - before.slices,
            asked_bytes: self.asked_bytes - before.asked_bytes,
            forgotten_bytes: self.forgotten_bytes - before.forgotten_bytes,
            read_bytes: self.read_bytes - before.read_bytes,
            read: self.read - before.read,
            packed: self.packed - before.packed,
            stalled: self.stalled - before.stalled,
            guesses: GuessCounts {
                reads: self.guesses.reads - before.guesses.reads,
                right: self.guesses.right - before.guesses.right,
                wrong_bytes: self.guesses.wrong_bytes - before.guesses.wrong_bytes,
            },
            examined: self.examined - before.examined,
            dropped: self.dropped - before.dropped,
            ..*self
        }
    }
}

impl Streamed {
    /// What happened so far.
    pub(crate) fn stats(&self) -> ExpertStats {
        let lanes = self.lanes.stats();
        let shared = &*self.shared;
        let state = shared.lock();
        let time = |ns: &std::sync::atomic::AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        ExpertStats {
            cache: state.cache.counts(),
            routed: state.routed,
            slices: lanes.slices,
            asked_bytes: state.asked_bytes,
            forgotten_bytes: state.forgotten_bytes,
            read_bytes: lanes.slice_bytes,
            read: lanes.busy,
            packed: time(&shared.pack_ns),
            stalled: time(&shared.stall_ns),
            slots: state.cache.slots(),
            slot_bytes: shared.slot_bytes,
            locked: shared.slots.is_locked(),
            guesses: state.guess_counts,
            examined: state.examined,
            dropped: state.dropped,
        }
    }
}
