//! How fast a file can be read: past the page cache where the file system lets us, and what it was if not.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

/// Bytes of one read: large enough that the device, not the system call, is what is measured.
const READ_BYTES: usize = 4 << 20;
/// Addresses and lengths of direct reads are multiples of this: no device has larger blocks.
const ALIGN_BYTES: usize = 4096;
/// A probe ends after so much time or so many bytes, whichever comes first.
const TIME_MAX: Duration = Duration::from_millis(300);
const BYTES_MAX: u64 = 256 << 20;

/// A measured rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Probe {
    pub bytes_per_second: f64,
    /// Bytes that were read to find it.
    pub bytes: u64,
    /// Whether the reads went past the page cache. If not, the rate may be that of memory.
    pub direct: bool,
}

/// Reads of `path` what time allows, past the page cache if that can be.
pub(crate) fn probe(path: &Path) -> io::Result<Probe> {
    match measure(path, true) {
        Ok(probe) => Ok(probe),
        // File systems in memory and some in user space refuse.
        Err(_) => measure(path, false),
    }
}

fn measure(path: &Path, direct: bool) -> io::Result<Probe> {
    let flags = if direct { OFlags::DIRECT.bits() as i32 } else { 0 };
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let len = file.metadata()?.len();
    let mut memory = vec![0; READ_BYTES + ALIGN_BYTES];
    let start = memory.as_ptr().align_offset(ALIGN_BYTES);
    let buffer = &mut memory[start..start + READ_BYTES];
    let begin = Instant::now();
    let mut bytes = 0;
    while bytes < len.min(BYTES_MAX) && begin.elapsed() < TIME_MAX {
        match file.read_at(buffer, bytes)? {
            0 => break,
            n => bytes += n as u64,
        }
        // The end of a file is no multiple of a block.
        if !bytes.is_multiple_of(ALIGN_BYTES as u64) {
            break;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    if bytes == 0 {
        return Err(io::Error::other("an empty file"));
    }
    Ok(Probe { bytes_per_second: bytes as f64 / seconds, bytes, direct })
}

/// Probes the file system of `dir` with a file of its own, which it deletes.
pub(crate) fn probe_dir(dir: &Path) -> io::Result<Probe> {
    fs::create_dir_all(dir)?;
    let path = dir.join(format!(".probe-{}", std::process::id()));
    let result = write_probe(&path).and_then(|()| probe(&path));
    let removed = fs::remove_file(&path);
    let probe = result?;
    removed?;
    Ok(probe)
}

fn write_probe(path: &Path) -> io::Result<()> {
    let file = File::create(path)?;
    // Not zeros: some file systems keep those as holes.
    let piece: Vec<u8> = (0..READ_BYTES as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    for i in 0..16 {
        file.write_all_at(&piece, i * READ_BYTES as u64)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_says_what_it_read_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let probe = probe_dir(dir.path()).unwrap();
        assert!(probe.bytes > 0 && probe.bytes_per_second > 0.0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_is_no_multiple_of_a_block_is_read_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("odd");
        fs::write(&path, vec![1; READ_BYTES + 4097]).unwrap();
        assert_eq!(measure(&path, false).unwrap().bytes, READ_BYTES as u64 + 4097);
        fs::write(&path, "").unwrap();
        assert!(super::probe(&path).is_err());
    }
}
