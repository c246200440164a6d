//! Architectures, weights, forward pass, tokenizer and chat template.
#![allow(clippy::todo, unused_variables)]

pub mod chat;
pub mod tokenizer;

use std::path::Path;

pub use kernels::isa::Isa;
pub use tokenizer::Tokenizer;

/// What can go wrong between a file and its logits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The header is bad.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
}

/// The numbers of an architecture that its users ask for.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `general.architecture`.
    pub architecture: String,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub embedding_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Values per key head.
    pub head_len: usize,
    /// Width of the feed-forward layer.
    pub feed_forward_len: usize,
    /// Tokens in the vocabulary.
    pub vocab_len: usize,
    /// Positions that the model was trained for.
    pub context_len: usize,
}

/// A model's weights in memory, its tokenizer and its chat template.
pub struct Model {
    /// Numbers from the header.
    pub config: Config,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// The file's own chat template, if it has one.
    pub chat_template: Option<String>,
    /// Bytes of weights in memory.
    pub weights_bytes: u64,
    /// Bytes read from the file or files.
    pub read_bytes: u64,
}

impl Model {
    /// Loads the model at `path` (the first shard of a split file); `progress` gets (bytes done, bytes in all).
    pub fn load(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Model, Error> {
        todo!()
    }

    /// KV cache bytes for one more token of context.
    pub fn kv_bytes_per_token(&self) -> u64 {
        todo!()
    }
}

/// A sequence of a [`Runner`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId(pub usize);

/// One token to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The sequence that it extends; its position is the sequence's length.
    pub sequence: SequenceId,
    /// Token id.
    pub token: u32,
    /// Whether its logits are wanted.
    pub logits: bool,
}

/// How to run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerOptions {
    /// Threads that compute, the caller's included.
    pub threads: usize,
    /// Instruction set; `None` takes the best that is there.
    pub isa: Option<Isa>,
    /// Rows computed at once at most (`-ub`).
    pub micro_batch: usize,
}

/// A model, a thread pool, scratch buffers and the KV caches of its sequences.
pub struct Runner {
    _private: (),
}

impl Runner {
    /// A runner for `model`.
    pub fn new(model: std::sync::Arc<Model>, options: &RunnerOptions) -> Result<Runner, Error> {
        todo!()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        todo!()
    }

    /// Opens an empty sequence of at most `context_max` positions. Memory is taken as it grows.
    pub fn sequence_open(&mut self, context_max: usize) -> SequenceId {
        todo!()
    }

    /// Forgets a sequence.
    pub fn sequence_close(&mut self, id: SequenceId) {
        todo!()
    }

    /// Positions computed so far.
    pub fn sequence_len(&self, id: SequenceId) -> usize {
        todo!()
    }

    /// Forgets all positions from `len` on.
    pub fn sequence_truncate(&mut self, id: SequenceId, len: usize) {
        todo!()
    }

    /// Bytes of KV cache held now.
    pub fn kv_bytes(&self) -> u64 {
        todo!()
    }

    /// Computes `rows` in order (any number; cut into micro-batches inside). Returns the logits of the rows that
    /// asked for them, in order: `[asked, vocab_len]`. Errors: a token id outside the vocabulary, a full context.
    pub fn forward(&mut self, rows: &[Row]) -> Result<&[f32], Error> {
        todo!()
    }
}
