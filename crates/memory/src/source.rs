//! Files as sources of bytes at offsets.

use crate::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// An open file of known length.
#[derive(Debug)]
pub struct Source {
    file: File,
    path: String,
    len_bytes: u64,
}

impl Source {
    /// Opens a regular file.
    pub fn open(path: &Path) -> Result<Source, Error> {
        let name = path.display().to_string();
        let fail = |source| Error::Io { path: name.clone(), source };
        let file = File::open(path).map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        if !metadata.is_file() {
            return Err(fail(std::io::Error::other("not a regular file")));
        }
        Ok(Source { file, path: name, len_bytes: metadata.len() })
    }

    /// Length at opening, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The path it was opened by.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A reader from the start of the file.
    pub fn reader(&self) -> impl std::io::Read + '_ {
        std::io::BufReader::with_capacity(1 << 20, Cursor { source: self, at: 0 })
    }

    /// Fills `buffer` from `offset_bytes` on.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<(), Error> {
        let end_bytes = offset_bytes.saturating_add(buffer.len() as u64);
        self.file.read_exact_at(buffer, offset_bytes).map_err(|source| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                Error::Short { path: self.path.clone(), end_bytes, len_bytes: self.len_bytes }
            }
            _ => Error::Io { path: self.path.clone(), source },
        })
    }
}

struct Cursor<'a> {
    source: &'a Source,
    at: u64,
}

impl std::io::Read for Cursor<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.source.file.read_at(buffer, self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}
