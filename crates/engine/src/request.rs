//! What is asked of an engine, and what comes of it.

use residency::kv::Class;

use crate::overflow::Overflow;
use crate::sampler::Sampling;

/// What to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Token ids of the prompt, BOS included where the model wants one.
    pub prompt: Vec<u32>,
    /// Positions that prompt and answer may take together.
    pub context_max: usize,
    /// How urgent it is.
    pub class: Class,
    /// Keys and values are shared among requests of the same salt alone.
    pub salt: Vec<u8>,
    /// Tokens to generate at most; `None` until the model or the context ends it.
    pub tokens_max: Option<usize>,
    /// How to draw.
    pub sampling: Sampling,
    /// The text ends before the first of these.
    pub stop_strings: Vec<String>,
    /// Goes on when the model ends its answer.
    pub ignore_end: bool,
    /// What happens when the context is full.
    pub overflow: Overflow,
    /// Tokens at the beginning of the prompt that an overflow leaves.
    pub keep: usize,
    /// When the engine's clock shows this, it ends.
    pub deadline_ms: Option<u64>,
}

impl Request {
    /// A request of an interactive user with default sampling, which ends with the model's answer.
    pub fn new(prompt: Vec<u32>, context_max: usize) -> Request {
        Request {
            prompt,
            context_max,
            class: Class::Interactive,
            salt: Vec::new(),
            tokens_max: None,
            sampling: Sampling::default(),
            stop_strings: Vec::new(),
            ignore_end: false,
            overflow: Overflow::Refuse,
            keep: 0,
            deadline_ms: None,
        }
    }
}

/// What happens while a request is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress<'a> {
    /// Nothing can be done before others give back room; told whenever that may have changed.
    Waiting,
    /// Tokens of the prompt done, of how many.
    Prompt {
        /// Tokens done, reused ones included.
        done: usize,
        /// Tokens in all.
        total: usize,
    },
    /// Text that is final; comes with every token, also if there is none yet.
    Text(&'a str),
    /// The context was full: so many tokens behind the kept beginning were left out of it.
    Dropped(usize),
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model ended its answer.
    EndOfGeneration,
    /// As many tokens as asked for.
    Length,
    /// A stop string came.
    StopString,
    /// The context is full.
    Context,
    /// The caller wanted no more.
    Cancelled,
    /// Its time was over.
    Deadline,
}

impl StopReason {
    /// The word that scripts see.
    pub fn name(self) -> &'static str {
        match self {
            StopReason::EndOfGeneration => "stop",
            StopReason::Length => "length",
            StopReason::StopString => "stop_string",
            StopReason::Context => "context",
            StopReason::Cancelled => "cancelled",
            StopReason::Deadline => "deadline",
        }
    }
}

/// How long things took. What could not be measured is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timings {
    /// From the request to the first token.
    pub ttft_ms: Option<f64>,
    /// Tokens of the prompt that were computed (not reused).
    pub prompt_n: usize,
    /// Speed of these.
    pub prompt_per_second: Option<f64>,
    /// Tokens generated.
    pub predicted_n: usize,
    /// Speed of the tokens after the first; that one belongs to the prompt's time.
    pub predicted_per_second: Option<f64>,
}

/// A finished generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// Ids in order, the one that ended the generation included.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub stop: StopReason,
    /// Tokens of the prompt whose keys and values were there already.
    pub reused: usize,
    /// Tokens that were left out because the context was full.
    pub dropped: usize,
    /// Tokens that were guessed and checked.
    pub drafted: usize,
    /// Guesses that were right.
    pub accepted: usize,
    /// How long it took.
    pub timings: Timings,
}
