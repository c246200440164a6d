//! What the cache tells of itself.

use super::Class;
use std::collections::VecDeque;

/// Why something was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A sequence needed the room.
    Room,
    /// The machine is short of memory.
    Pressure,
}

impl Reason {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Room => "room",
            Reason::Pressure => "pressure",
        }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Blocks without a lease were given up, all for one reason at one time.
    Evicted {
        /// Class that had used them.
        class: Class,
        /// Why.
        reason: Reason,
        /// Blocks.
        blocks: u64,
        /// Tokens that would have to be computed again.
        tokens: u64,
    },
    /// There was no room, even after everything was evicted that may be.
    Short {
        /// Class of the request.
        class: Class,
        /// Blocks that were asked for.
        wanted_blocks: u64,
        /// Blocks that leases hold.
        leased_blocks: u64,
    },
    /// Blocks came from files.
    Restored {
        /// Tokens that need not be computed.
        tokens: u64,
    },
    /// Blocks went to files.
    Spilled {
        /// Blocks of 16 positions.
        files: u64,
        /// Their length.
        bytes: u64,
    },
    /// A file was not used.
    Ignored {
        /// Its name.
        file: String,
        /// Why.
        reason: String,
    },
}

/// One line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When, by the clock that is passed in.
    pub at_ms: u64,
    /// What.
    pub change: Change,
}

/// Events that are kept: enough to see why, and no growth over months.
const EVENTS_MAX: usize = 1024;

#[derive(Debug, Clone, Default)]
pub(super) struct Log(VecDeque<Event>);

impl Log {
    pub(super) fn events(&self) -> impl Iterator<Item = &Event> {
        self.0.iter()
    }

    pub(super) fn push(&mut self, at_ms: u64, change: Change) {
        if self.0.len() == EVENTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Event { at_ms, change });
    }
}

/// Counts since the cache exists, but for those of blocks now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Blocks that sequences hold.
    pub leased_blocks: u64,
    /// Blocks that only the tree holds.
    pub cached_blocks: u64,
    /// Blocks that nobody holds.
    pub free_blocks: u64,
    /// The most blocks that sequences held at once.
    pub leased_blocks_peak: u64,
    /// The most blocks that sequences and tree held at once.
    pub held_blocks_peak: u64,
    /// Tokens that were looked up.
    pub looked_up_tokens: u64,
    /// Of these, tokens whose keys and values were there.
    pub reused_tokens: u64,
    /// Of these, tokens that came from files.
    pub restored_tokens: u64,
    /// Blocks evicted, by class in ascending order.
    pub evicted_blocks: [u64; Class::ALL.len()],
    /// Blocks that were copied because someone else holds them too.
    pub copied_blocks: u64,
    /// Blocks that were given up for equal ones.
    pub deduplicated_blocks: u64,
    /// Blocks of 16 positions written to files.
    pub spilled_files: u64,
    /// Files that were not used.
    pub ignored_files: u64,
}
