//! What can go wrong with names, stores and pulls.

use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong with names, stores and pulls.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Text that is no model name.
    #[error("bad model name {name:?}: {reason}")]
    Name {
        /// The text.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A short name that the catalog does not have.
    #[error(
        "no model is called {name:?}; known names: {known}; other forms: hf.co/USER/REPO:QUANT or a path to a .gguf"
    )]
    Unknown {
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// The model is not in the store.
    #[error("{name} is not in the store {home}")]
    Absent {
        /// The model.
        name: String,
        /// The store.
        home: PathBuf,
    },
    /// The file system said no.
    #[error("{path}: {source}")]
    Io {
        /// What it was about.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The disk is full.
    #[error("{path}: the disk is full after {done} of {} bytes", total.map_or("?".to_owned(), |t| t.to_string()))]
    DiskFull {
        /// The file being written.
        path: PathBuf,
        /// Bytes written.
        done: u64,
        /// Bytes in all, if known.
        total: Option<u64>,
    },
    /// No answer, or an answer that is not HTTP.
    #[error("{url}: {reason}")]
    Transfer {
        /// What was asked for.
        url: String,
        /// What happened.
        reason: String,
    },
    /// The server refused.
    #[error("{url}: HTTP status {status}{hint}")]
    Status {
        /// What was asked for.
        url: String,
        /// The status code.
        status: u16,
        /// What usually helps.
        hint: &'static str,
    },
    /// The bytes are not those that were promised.
    #[error("{what}: sha256 is {found} instead of {expected}; the file was deleted")]
    Checksum {
        /// The file.
        what: String,
        /// The digest promised.
        expected: String,
        /// The digest of what came.
        found: String,
    },
    /// There are more or fewer bytes than promised.
    #[error("{what}: {found} bytes instead of {expected}")]
    Size {
        /// The file.
        what: String,
        /// Bytes promised.
        expected: u64,
        /// Bytes that came.
        found: u64,
    },
    /// The repository has no file of that quantization.
    #[error("{repo} has no file for {wanted}; it has: {present}")]
    NoSuchQuant {
        /// The repository.
        repo: String,
        /// What was asked for.
        wanted: String,
        /// What there is.
        present: String,
    },
    /// A file name from outside that could leave the store.
    #[error("refused the file name {name:?}: it would leave the store")]
    HostileName {
        /// The name.
        name: String,
    },
    /// A package could not be fetched or holds something else.
    #[error("package {requirement}: {reason}")]
    Package {
        /// What was asked of pip.
        requirement: String,
        /// What happened.
        reason: String,
    },
    /// Every source failed.
    #[error("cannot pull {name}: {}", join(tried))]
    Sources {
        /// The model.
        name: String,
        /// Each source with its failure.
        tried: Vec<(String, Error)>,
    },
    /// A setting cannot be used.
    #[error("{setting}: {reason}")]
    Setting {
        /// Which one.
        setting: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
}

fn join(tried: &[(String, Error)]) -> String {
    tried.iter().map(|(source, error)| format!("[{source}] {error}")).collect::<Vec<_>>().join("; ")
}

impl Error {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { path: path.to_owned(), source }
    }

    /// A failure to write byte `done`: a full disk is told apart.
    pub(crate) fn write(path: &Path, done: u64, total: Option<u64>) -> impl FnOnce(io::Error) -> Error {
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::DiskFull { path: path.to_owned(), done, total }
            }
            _ => Error::Io { path: path.to_owned(), source },
        }
    }

    /// Whether another source of the same file may do better.
    pub(crate) fn another_source_may_help(&self) -> bool {
        !matches!(self, Error::Cancelled | Error::Io { .. } | Error::DiskFull { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_with_the_numbers() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let error = Error::write(Path::new("m.gguf.partial"), 5, Some(7))(full());
        assert_eq!(error.to_string(), "m.gguf.partial: the disk is full after 5 of 7 bytes");
        let error = Error::write(Path::new("m.gguf.partial"), 5, None)(full());
        assert!(matches!(error, Error::DiskFull { .. }) && !error.another_source_may_help());
    }
}
