//! Answers to those who ask for room.

use std::fmt;

/// There is no room for a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes that are missing.
    pub wanted_bytes: u64,
    /// Bytes that open sequences hold.
    pub leased_bytes: u64,
    /// Bytes that the request may not displace.
    pub cached_bytes: u64,
    /// The most bytes of keys and values that there can be.
    pub limit_bytes: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage { wanted_bytes, leased_bytes, cached_bytes, limit_bytes } = self;
        write!(
            f,
            "{wanted_bytes} more bytes are wanted; of {limit_bytes} that there can be, open sequences hold {leased_bytes} and \
             {cached_bytes} are kept for others"
        )
    }
}

/// Whether there is room for a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Growth {
    /// There is.
    Ready,
    /// There will be, once other sequences are closed.
    Wait(Shortage),
    /// There never will be.
    Refuse(Shortage),
}
