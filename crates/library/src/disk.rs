//! Small things about files: digests, locks, durable renames.

use std::fs::{self, File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{Error, Event, Report, tell};

/// Bytes moved at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// `path` with `suffix` behind its file name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Feeds the whole of `path` to `hasher`; gives the number of bytes.
pub(crate) fn hash_into(hasher: &mut Sha256, path: &Path, report: &mut Report<'_>) -> Result<u64, Error> {
    let mut file = File::open(path).map_err(Error::io(path))?;
    let total = file.metadata().map_err(Error::io(path))?.len();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut done = 0;
    loop {
        match file.read(&mut chunk).map_err(Error::io(path))? {
            0 => return Ok(done),
            n => {
                hasher.update(&chunk[..n]);
                done += n as u64;
                tell(report, Event::Bytes { done, total: Some(total) })?;
            }
        }
    }
}

/// The sha256 of a file.
pub(crate) fn sha256(path: &Path, report: &mut Report<'_>) -> Result<String, Error> {
    let mut hasher = Sha256::new();
    hash_into(&mut hasher, path, report)?;
    Ok(hex(&hasher.finalize()))
}

/// Makes the directory of `path`.
pub(crate) fn create_parent(path: &Path) -> Result<(), Error> {
    match path.parent() {
        Some(dir) => fs::create_dir_all(dir).map_err(Error::io(dir)),
        None => Ok(()),
    }
}

/// Removes a file that may not be there.
pub(crate) fn remove_if_there(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path)(e)),
        _ => Ok(()),
    }
}

/// Gives a finished file its name, so that it is there whole or not at all, also after a power cut.
pub(crate) fn publish(partial: &Path, file: &File, dest: &Path) -> Result<(), Error> {
    file.sync_all().map_err(Error::io(partial))?;
    fs::rename(partial, dest).map_err(Error::io(dest))?;
    if let Some(dir) = dest.parent() {
        File::open(dir).and_then(|d| d.sync_all()).map_err(Error::io(dir))?;
    }
    Ok(())
}

/// Waits until no other process works on `dest`. The lock ends when the value is dropped, or with the process.
pub(crate) fn lock(home: &Path, dest: &Path, report: &mut Report<'_>) -> Result<File, Error> {
    let relative = dest.strip_prefix(home).unwrap_or(dest).to_string_lossy().replace(['/', '\\'], "+");
    let path = home.join("locks").join(relative);
    create_parent(&path)?;
    let file = File::options().create(true).append(true).open(&path).map_err(Error::io(&path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            tell(report, Event::Note("another process is fetching this file; waiting for it"))?;
            file.lock().map_err(Error::io(&path))?;
        }
        Err(TryLockError::Error(e)) => return Err(Error::io(&path)(e)),
    }
    Ok(file)
}
