//! What the system refused, or what a source turned out to be.

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// What the system refused, or what a source turned out to be. Cheap to copy: everyone who waits for a range gets it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No address space or memory for a mapping.
    #[error("cannot map {len_bytes} bytes of memory: {source}")]
    Map {
        /// Bytes asked for.
        len_bytes: usize,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The memory that was asked for by name cannot be had here.
    #[error("--backing {backing} cannot hold {len_bytes} bytes: {reason}; {fix}")]
    Backing {
        /// Its name.
        backing: &'static str,
        /// Bytes asked for.
        len_bytes: usize,
        /// Why not.
        reason: String,
        /// What would change that.
        fix: String,
    },
    /// A file cannot be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// A file ended early: it shrank while it was read.
    #[error("{path}: the file ends before byte {end_bytes}; it was {len_bytes} bytes long when it was opened")]
    Short {
        /// The file.
        path: String,
        /// End of the range that was asked for.
        end_bytes: u64,
        /// Length at opening.
        len_bytes: u64,
    },
    /// A file was written to after it was opened: what has been read of it belongs to no one version.
    #[error("{path}: the file was changed while it was in use ({was} when it was opened, {is} now)")]
    Changed {
        /// The file.
        path: String,
        /// Length and time of change at opening.
        was: String,
        /// The same now.
        is: String,
    },
    /// A wait for weights was given up because someone asked for that.
    #[error(
        "interrupted while waiting for {wanted_bytes} bytes of weights; no bytes moved for {:.1} s",
        .still.as_secs_f64()
    )]
    Interrupted {
        /// Bytes that were missing.
        wanted_bytes: u64,
        /// For how long none had come.
        still: Duration,
    },
    /// Who reads or gets bytes came to a bug.
    #[error("{path}: a bug at byte {at_bytes}: {what}")]
    Bug {
        /// The file.
        path: String,
        /// Where, in the file.
        at_bytes: u64,
        /// What it said.
        what: String,
    },
    /// A thread of the pager came to a bug.
    #[error("the pager failed at byte {at_bytes} of its region: {what}")]
    Pager {
        /// Where, in the region.
        at_bytes: usize,
        /// What it said.
        what: String,
    },
    /// A thread that reads for someone who waits came to a bug.
    #[error("{path}: reading from byte {at_bytes} on failed: {what}")]
    Fetch {
        /// The file.
        path: String,
        /// Where.
        at_bytes: u64,
        /// What it said.
        what: String,
    },
    /// The thread that serves those who touch missing memory has ended; they are not left waiting.
    #[error("the thread that serves missing weights ended while {waiting} waited for it: {what}")]
    Trap {
        /// Touches that it had not served yet.
        waiting: usize,
        /// What it said.
        what: String,
    },
}

impl Error {
    pub(crate) fn map(len_bytes: usize, source: impl Into<io::Error>) -> Error {
        Error::Map { len_bytes, source: Arc::new(source.into()) }
    }

    pub(crate) fn bug(path: &str, at_bytes: u64, what: String) -> Error {
        Error::Bug { path: path.to_owned(), at_bytes, what }
    }

    /// An input or output error of the file `path`.
    pub fn io(path: &str, source: impl Into<io::Error>) -> Error {
        Error::Io { path: path.to_owned(), source: Arc::new(source.into()) }
    }
}
