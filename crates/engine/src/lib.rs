//! Sessions, sampler, streams, and the pool of models. Synchronous and deterministic; knows neither HTTP nor files.
#![forbid(unsafe_code)]

mod account;
mod generate;
mod pool;
mod sampler;
mod session;
mod stream;

pub use generate::{Engine, Generated, LOGITS_ROWS_MAX, Progress, Request, StopReason, Timings};
pub use model::RunnerOptions;
pub use pool::{Clock, Held, Pool, Shelf};
pub use sampler::{Sampler, Sampling};
pub use session::Session;
pub use stream::StopStrings;

/// What can go wrong between a prompt and its answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model failed.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt does not fit.
    #[error("the prompt has {prompt} tokens and the context holds {context} (-c)")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the context holds.
        context: usize,
    },
    /// There is no largest logit.
    #[error("none of the {0} logits is a number")]
    NoLogits(usize),
    /// The budget has no room.
    #[error("no memory for {}: {full}", .line.name())]
    Full {
        /// What for.
        line: residency::budget::Line,
        /// The numbers.
        full: residency::budget::Full,
    },
    /// The pool refuses a demand that it can never meet.
    #[error(transparent)]
    Pool(#[from] residency::Error),
    /// The model is being unloaded.
    #[error("{model} is being unloaded")]
    Unloading {
        /// Its name.
        model: String,
    },
    /// The model was being loaded for another request, which failed.
    #[error("{model} could not be loaded for the request that came first")]
    LoadFailed {
        /// Its name.
        model: String,
    },
    /// The pool has ended.
    #[error("the pool of models is closed")]
    Closed,
}
