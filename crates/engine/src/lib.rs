//! Sessions, sampler and streams. Synchronous and deterministic; knows neither HTTP nor files.
#![forbid(unsafe_code)]

mod generate;
mod sampler;
mod session;
mod stream;

pub use generate::{Engine, Generated, Progress, Request, StopReason, Timings};
pub use model::RunnerOptions;
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
}
