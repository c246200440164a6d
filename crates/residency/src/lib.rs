//! Memory policy: what may be held, which model and which experts stay, what is given back first, what a model will need.
//!
//! Pure: no system calls, no clocks, no threads. Readings and times come in as numbers, decisions go out as values, and
//! somebody else carries them out. So every decision can be tested against a naive model of it.
#![forbid(unsafe_code)]

pub mod budget;
pub mod experts;
pub mod forecast;
pub mod headroom;
pub mod kv;
pub mod models;
pub mod plan;
pub mod pressure;

/// A demand that no waiting can meet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A budget that cannot hold what must not be given back.
    #[error("a maximum of {max_bytes} bytes is below the {floor_bytes} bytes that are protected")]
    BelowFloor {
        /// What was asked for.
        max_bytes: u64,
        /// Bytes of protected models.
        floor_bytes: u64,
    },
    /// A model that does not fit beside the protected ones.
    #[error("a model of {bytes} bytes does not fit: {max_bytes} bytes are the most that can be made free for it")]
    TooLarge {
        /// Bytes of the model.
        bytes: u64,
        /// Bytes that are not protected.
        max_bytes: u64,
    },
    /// More requests wait than the pool holds places for.
    #[error("{waiting} requests wait for a model already; the limit is {max}")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// Places.
        max: usize,
    },
}
