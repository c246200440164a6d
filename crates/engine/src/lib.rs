//! Sessions, sampler, streams, and the pool of models. Synchronous and deterministic; knows neither HTTP nor files.
#![forbid(unsafe_code)]

mod account;
mod answer;
mod bell;
mod books;
mod engine;
mod limits;
mod overflow;
mod pool;
mod relief;
mod request;
mod sampler;
pub mod scheduler;
mod session;
mod speculative;
mod step;
mod stream;

pub use bell::Bell;
pub use engine::{Ended, Engine, Fill};
pub use limits::{LIGHT_ROWS, LOGITS_ROWS_MAX, RUNNING_MAX, WAITING_MAX};
pub use model::RunnerOptions;
pub use overflow::Overflow;
pub use pool::{Clock, Held, Pool, Shelf};
pub use request::{Generated, Progress, Request, StopReason, Timings};
pub use residency::kv::Class;
pub use sampler::{Sampler, Sampling};
pub use scheduler::{RequestId, Submission};
pub use speculative::{Draft, Speculate};
pub use step::Stepped;
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
    /// Keys and values have no room, and nobody's end could be waited for.
    #[error("no memory for keys and values: {0}")]
    KvFull(residency::kv::Shortage),
    /// As many requests wait as may.
    #[error("{waiting} requests wait already; the limit is {waiting_max}")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// Places.
        waiting_max: usize,
    },
    /// A draft model has other tokens than the model that it should guess for.
    #[error(
        "the draft model has another vocabulary: {draft_len} tokens, and the model has {target_len}{}",
        .differs.map_or(String::new(), |id| format!("; the first that differs is {id}"))
    )]
    Vocabulary {
        /// Tokens of the draft model.
        draft_len: usize,
        /// Tokens of the model.
        target_len: usize,
        /// The first id that means something else.
        differs: Option<u32>,
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
