//! A directory of blobs that outlive the process: each written whole or not at all, checked when it is read, all of them
//! together bounded in size, and written no faster than allowed.
//!
//! ```text
//! "airsblob" | version, 4 bytes | 0, 4 bytes | length of the rest, 8 bytes | SHA-256 of the rest, 32 bytes | the rest
//! ```
//!
//! Numbers are little-endian. A blob is written beside its place and moved there, so readers see none or all of it; what a
//! crash of the machine makes of it, the checksum finds, which is why nothing waits for the disk.

use crate::Error;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const MAGIC: [u8; 8] = *b"airsblob";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 56;
/// Names of blobs end with it: other files in the directory are left alone.
const SUFFIX: &str = ".kv";
/// What a blob is called before it is whole.
const PARTIAL: &str = ".partial";
/// What is partial for so long nobody writes any more.
const PARTIAL_AGE: Duration = Duration::from_secs(600);

/// Bounds of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// The most bytes of all blobs together; the ones that were not used for longest go first.
    pub bytes_max: u64,
    /// The most bytes written in a second; a second's worth may come at once.
    pub bytes_per_second: u64,
}

/// What became of a blob that was to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// It is there, with so many bytes.
    Written(u64),
    /// It was there.
    Exists,
    /// Not now: it would be too fast.
    Later {
        /// Wait so long.
        wait_ms: u64,
    },
    /// It is larger than all blobs together may be.
    TooLarge,
}

/// What a name leads to.
#[derive(Debug, PartialEq, Eq)]
pub enum Got {
    /// Its bytes.
    Blob(Vec<u8>),
    /// Nothing.
    Missing,
    /// Something that cannot be used, and why.
    Bad(String),
}

/// An open directory.
#[derive(Debug)]
pub struct BlobDir {
    path: PathBuf,
    bounds: Bounds,
    /// Bytes of all blobs, as far as this process knows.
    bytes: u64,
    /// Bytes that may be written now, and since when.
    allowance: u64,
    allowance_ms: u64,
}

impl BlobDir {
    /// The directory at `path`, which is made if it is not there. Partial blobs of a process that died are removed.
    pub fn open(path: &Path, bounds: Bounds) -> Result<BlobDir, Error> {
        let dir =
            BlobDir { path: path.to_owned(), bounds, bytes: 0, allowance: bounds.bytes_per_second, allowance_ms: 0 };
        let failed = |e: io::Error| Error::io(&path.display().to_string(), e);
        fs::create_dir_all(path).map_err(failed)?;
        for entry in fs::read_dir(path).map_err(failed)?.flatten() {
            let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
            if entry.file_name().to_string_lossy().ends_with(PARTIAL) && age > Some(PARTIAL_AGE) {
                let _ = fs::remove_file(entry.path());
            }
        }
        let bytes = dir.list().iter().map(|(.., len)| len).sum();
        Ok(BlobDir { bytes, ..dir })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of all blobs.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn place(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}{SUFFIX}"))
    }

    /// All blobs: last use, path, length.
    fn list(&self) -> Vec<(SystemTime, PathBuf, u64)> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let blobs = entries.filter(|e| e.file_name().to_string_lossy().ends_with(SUFFIX));
        blobs
            .filter_map(|e| {
                e.metadata().ok().map(|m| (m.modified().unwrap_or(SystemTime::UNIX_EPOCH), e.path(), m.len()))
            })
            .collect()
    }

    /// Whether there is something under this name.
    pub fn contains(&self, name: &str) -> bool {
        self.place(name).exists()
    }

    /// Writes `parts`, one after the other, under `name`, at the time `now_ms` of any clock.
    pub fn put(&mut self, name: &str, parts: &[&[u8]], now_ms: u64) -> Result<Put, Error> {
        if self.contains(name) {
            return Ok(Put::Exists);
        }
        let rest: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let len = rest + HEADER_BYTES as u64;
        if len > self.bounds.bytes_max {
            return Ok(Put::TooLarge);
        }
        if let Some(wait_ms) = self.wait_ms(len, now_ms) {
            return Ok(Put::Later { wait_ms });
        }
        self.make_room(len);
        let partial = self.path.join(format!("{name}.{}{PARTIAL}", std::process::id()));
        let written = write(&partial, parts, rest).and_then(|()| fs::rename(&partial, self.place(name)));
        written.map_err(|e| {
            let _ = fs::remove_file(&partial);
            Error::io(&partial.display().to_string(), e)
        })?;
        self.bytes += len;
        self.allowance = self.allowance.saturating_sub(len);
        Ok(Put::Written(len))
    }

    /// How long to wait before `len` bytes may be written; `None`: not at all.
    fn wait_ms(&mut self, len: u64, now_ms: u64) -> Option<u64> {
        let rate = self.bounds.bytes_per_second;
        let passed_ms = now_ms.saturating_sub(self.allowance_ms);
        self.allowance_ms = now_ms.max(self.allowance_ms);
        let more = u128::from(rate) * u128::from(passed_ms) / 1000;
        self.allowance = u64::try_from(u128::from(self.allowance) + more).unwrap_or(u64::MAX).min(rate);
        // A blob that takes longer than a second by itself waits for the whole second.
        let needed = len.min(rate);
        let lacking = needed.checked_sub(self.allowance).filter(|&lacking| lacking > 0)?;
        Some((lacking * 1000).div_ceil(rate.max(1)))
    }

    /// Removes what was not used for longest until `len` more bytes fit.
    fn make_room(&mut self, len: u64) {
        if self.bytes + len <= self.bounds.bytes_max {
            return;
        }
        // Other processes may have added or removed some.
        let mut blobs = self.list();
        blobs.sort_unstable();
        self.bytes = blobs.iter().map(|(.., len)| len).sum();
        for (_, path, old) in blobs {
            if self.bytes + len <= self.bounds.bytes_max {
                break;
            }
            if fs::remove_file(path).is_ok() {
                self.bytes -= old;
            }
        }
    }

    /// Reads what was written under `name`, and notes that it was used.
    pub fn get(&self, name: &str) -> Got {
        let mut file = match File::open(self.place(name)) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Got::Missing,
            Err(e) => return Got::Bad(e.to_string()),
        };
        let rest = read(&mut file, self.bounds.bytes_max);
        if rest.is_ok() {
            // Where the time cannot be set, blobs go in the order in which they came.
            let _ = file.set_modified(SystemTime::now());
        }
        rest.map_or_else(Got::Bad, Got::Blob)
    }

    /// Removes what is under `name`.
    pub fn remove(&mut self, name: &str) {
        let path = self.place(name);
        let len = fs::metadata(&path).map_or(0, |m| m.len());
        if fs::remove_file(path).is_ok() {
            self.bytes = self.bytes.saturating_sub(len);
        }
    }
}

fn write(path: &Path, parts: &[&[u8]], rest: u64) -> io::Result<()> {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    let mut file = File::create(path)?;
    file.write_all(&MAGIC)?;
    file.write_all(&VERSION.to_le_bytes())?;
    file.write_all(&[0; 4])?;
    file.write_all(&rest.to_le_bytes())?;
    file.write_all(&hash.finalize())?;
    parts.iter().try_for_each(|part| file.write_all(part))
}

/// What is behind a good header, or what is wrong.
fn read(file: &mut File, bytes_max: u64) -> Result<Vec<u8>, String> {
    let len = file.metadata().map_err(|e| e.to_string())?.len();
    let mut header = [0; HEADER_BYTES];
    file.read_exact(&mut header).map_err(|_| format!("it has {len} bytes, and a header has {HEADER_BYTES}"))?;
    let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    if header[..8] != MAGIC {
        return Err("it is not one of our files".to_owned());
    }
    if number(8) != VERSION {
        return Err(format!("it has version {}, and this program reads version {VERSION}", number(8)));
    }
    let rest = u64::from(number(16)) | u64::from(number(20)) << 32;
    // Before memory is taken for it.
    if rest > bytes_max || len != rest + HEADER_BYTES as u64 {
        return Err(format!("it has {len} bytes, and its header speaks of {rest}"));
    }
    let mut bytes = Vec::with_capacity(rest as usize);
    file.read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    if bytes.len() as u64 != rest || Sha256::digest(&bytes)[..] != header[24..HEADER_BYTES] {
        return Err("its checksum is wrong".to_owned());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { bytes_max: 1 << 20, bytes_per_second: 1 << 30 };

    fn dir(bounds: Bounds) -> (tempfile::TempDir, BlobDir) {
        let temporary = tempfile::tempdir().expect("a directory");
        let dir = BlobDir::open(&temporary.path().join("made/anew"), bounds).expect("a directory");
        (temporary, dir)
    }

    #[test]
    fn a_blob_is_there_after_the_process_and_once() {
        let (_keep, mut dir) = dir(BOUNDS);
        assert_eq!(dir.get("a"), Got::Missing);
        assert_eq!(dir.put("a", &[b"one ", b"two"], 0).expect("room"), Put::Written(7 + HEADER_BYTES as u64));
        assert_eq!(dir.put("a", &[b"other"], 0).expect("room"), Put::Exists);
        let partial = File::create(dir.path().join("b.1.partial")).expect("a file");
        partial.set_modified(SystemTime::now() - 2 * PARTIAL_AGE).expect("a time");
        fs::write(dir.path().join("note"), b"not ours").expect("a file");
        let mut again = BlobDir::open(dir.path(), BOUNDS).expect("the same directory");
        assert_eq!((again.get("a"), again.bytes()), (Got::Blob(b"one two".to_vec()), dir.bytes()));
        assert!(!again.path().join("b.1.partial").exists() && again.path().join("note").exists());
        again.remove("a");
        assert_eq!((again.get("a"), again.bytes()), (Got::Missing, 0));
    }

    #[test]
    fn every_changed_byte_and_every_cut_is_found() {
        let (_keep, mut dir) = dir(BOUNDS);
        dir.put("a", &[&[7; 40]], 0).expect("room");
        let path = dir.place("a");
        let good = fs::read(&path).expect("a blob");
        // The four bytes behind the version say nothing.
        for at in (0..good.len()).filter(|at| !(12..16).contains(at)) {
            let mut bad = good.clone();
            bad[at] ^= 0x20;
            fs::write(&path, bad).expect("a file");
            assert!(matches!(dir.get("a"), Got::Bad(_)), "byte {at}");
        }
        for len in 0..good.len() {
            fs::write(&path, &good[..len]).expect("a file");
            assert!(matches!(dir.get("a"), Got::Bad(_)), "{len} bytes");
        }
        fs::write(&path, [&good[..], &[0]].concat()).expect("a file");
        assert!(matches!(dir.get("a"), Got::Bad(_)), "a byte too many");
        let huge = [&good[..16], &u64::MAX.to_le_bytes(), &good[24..]].concat();
        fs::write(&path, huge).expect("a file");
        assert!(matches!(dir.get("a"), Got::Bad(_)), "a length that no memory holds");
    }

    #[test]
    fn what_was_not_used_for_longest_makes_room() {
        let (_keep, mut dir) = dir(Bounds { bytes_max: 3 * 100, ..BOUNDS });
        let blob = [0; 100 - HEADER_BYTES];
        for (age, name) in ["a", "b", "c"].into_iter().enumerate() {
            dir.put(name, &[&blob], 0).expect("room");
            let time = SystemTime::now() - Duration::from_secs(100 - age as u64);
            File::options().write(true).open(dir.place(name)).and_then(|f| f.set_modified(time)).expect("a time");
        }
        assert!(matches!(dir.get("a"), Got::Blob(_)), "used now");
        assert_eq!(dir.put("d", &[&blob], 0).expect("room"), Put::Written(100));
        assert_eq!(["a", "b", "c", "d"].map(|name| dir.contains(name)), [true, false, true, true]);
        assert_eq!(dir.put("e", &[&[0; 400]], 0).expect("an answer"), Put::TooLarge);
        assert_eq!(dir.bytes(), 300);
    }

    #[test]
    fn no_more_is_written_than_a_second_allows() {
        let (_keep, mut dir) = dir(Bounds { bytes_per_second: 250, ..BOUNDS });
        let blob = [0; 100 - HEADER_BYTES];
        let mut written = 0;
        for (at_ms, name) in (0..40).map(|i| (i * 50, format!("{i}"))) {
            match dir.put(&name, &[&blob], at_ms).expect("room") {
                Put::Written(len) => written += len,
                Put::Later { wait_ms } => assert!((1..=400).contains(&wait_ms), "{wait_ms}"),
                other => panic!("{other:?}"),
            }
            assert!(written <= 250 + 250 * at_ms / 1000, "{written} bytes after {at_ms} ms");
        }
        assert!(written >= 600, "{written} bytes in two seconds");
    }
}
