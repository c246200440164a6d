//! Mappings and byte sources: the only system calls of the project, and all that is specific to Linux.

pub mod pressure;
mod region;
mod source;

pub use region::Region;
pub use source::Source;

/// What the system refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No address space or memory for a region.
    #[error("cannot map {len_bytes} bytes of memory: {source}")]
    Map {
        /// Bytes asked for.
        len_bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file cannot be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file ended early: it shrank or was replaced while it was read.
    #[error("{path}: the file ends before byte {end_bytes}; it was {len_bytes} bytes long when it was opened")]
    Short {
        /// The file.
        path: String,
        /// End of the range that was asked for.
        end_bytes: u64,
        /// Length at opening.
        len_bytes: u64,
    },
}
