//! Experts of a mixture, of which only some are in memory: which ones stay.
//!
//! An expert is read from storage when a token is routed to it and it is not in a slot. Layers are visited in a cycle, once
//! for each token, so a cache smaller than what one token takes in all layers (the *token cycle*) never hits if the least
//! recently used expert goes: each one is evicted just before its turn comes again. No policy here has that cliff; see
//! [`policy`].

pub mod budget;
pub mod cache;
pub mod demand;
pub mod guess;
pub mod policy;
pub mod trace;

pub use budget::{Bank, CacheAsk, CacheSize};
pub use cache::{Acquired, Cache, Counts};
pub use guess::{GuessWhen, Guesses};
pub use policy::Policy;
pub use trace::{Trace, Visit};

/// An expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Of the layers that have experts, counted from 0.
    pub layer: u32,
    /// In the layer.
    pub expert: u32,
}
