//! What can go wrong between a file and its logits.

/// What can go wrong between a file and its logits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The header is bad.
    #[error("{path}: {source}")]
    Gguf {
        /// The file.
        path: String,
        /// What is wrong with it.
        source: gguf::Error,
    },
    /// The file cannot be read, or there is no memory for it.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// The architecture is not in the table.
    #[error("unknown architecture \"{found}\"; known are {known}")]
    Architecture {
        /// `general.architecture`.
        found: String,
        /// Names in the table.
        known: String,
    },
    /// A key that the architecture needs is missing or has another type.
    #[error("the file has no usable \"{0}\"")]
    Key(String),
    /// A number in the header makes no sense.
    #[error("\"{key}\" is {value}: {reason}")]
    Value {
        /// Metadata key.
        key: String,
        /// What it says.
        value: String,
        /// Why that cannot be.
        reason: String,
    },
    /// A tensor that the architecture needs is missing.
    #[error("the file has no tensor \"{0}\"")]
    Tensor(String),
    /// A tensor has another shape than the header says.
    #[error("tensor \"{name}\" is {found:?}, and the header asks for {wanted:?}")]
    Shape {
        /// Tensor name.
        name: String,
        /// Its extents, fastest first.
        found: Vec<u64>,
        /// Extents by the header.
        wanted: Vec<u64>,
    },
    /// There are no kernels for a tensor's type.
    #[error("tensor \"{name}\" has type {ty}, for which there are no kernels yet")]
    Format {
        /// Tensor name.
        name: String,
        /// Its type.
        ty: gguf::TensorType,
    },
    /// The vocabulary cannot be used.
    #[error("tokenizer: {0}")]
    Tokenizer(#[from] crate::tokenizer::Error),
    /// This machine has not got the instruction set that was asked for.
    #[error("this machine has no {0}")]
    Isa(kernels::isa::Isa),
    /// The KV cache cannot have a type.
    #[error("a KV cache of type {ty} needs heads of a multiple of 32 values; this model has {head_len}")]
    KvType {
        /// The type.
        ty: &'static str,
        /// Values of a head.
        head_len: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab_len}")]
    Token {
        /// The id.
        token: u32,
        /// Tokens in the vocabulary.
        vocab_len: usize,
    },
    /// A sequence is as long as it may get.
    #[error("the context is full: {len} positions are taken, {new} more were asked for, {context_max} is the limit")]
    ContextFull {
        /// Positions taken.
        len: usize,
        /// Positions asked for.
        new: usize,
        /// Limit of the sequence.
        context_max: usize,
    },
    /// There is no room for keys and values.
    #[error("no memory for keys and values: {0}")]
    KvFull(residency::kv::Shortage),
}
