//! The engine's constants, each with its reason.

/// Positions whose logits are held at once by [`crate::Engine::logits`]: a large vocabulary has a mebibyte of them for each.
pub const LOGITS_ROWS_MAX: usize = 64;

/// Rows up to which a step waits for the weights more than for arithmetic. Drafted tokens are rows, so a step holds no more:
/// the ninth row takes the path of prompts, and a step of nine costs three times one of eight (docs/measuring.md).
pub const LIGHT_ROWS: usize = 8;

/// Rows of a step up to which the tokens of lower classes ride along with those of interactive sessions: four rows cost less
/// than twice one.
pub(crate) const RIDE_ROWS: usize = 4;

/// Steps in which interactive sessions decode undisturbed between two that carry a chunk of a lower class. One step in 25 is
/// below the twentieth that a 95th percentile overlooks, and a chunk takes about as long as so many steps: both sides get
/// half of the machine, whatever the model.
pub(crate) const GUARDED_STEPS: usize = 24;

/// Requests that hold keys and values at once, unless told otherwise. Each has a row of logits.
pub const RUNNING_MAX: usize = 64;

/// Requests that wait, unless told otherwise.
pub const WAITING_MAX: usize = 256;
