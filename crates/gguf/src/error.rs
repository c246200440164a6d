//! What can be wrong with a GGUF file.

/// What can be wrong with a GGUF file, with the numbers.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"")]
    Magic {
        /// The bytes found.
        found: [u8; 4],
    },
}
