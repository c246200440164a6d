//! A file, read past the page cache where that gives the same bytes.
//!
//! Weights are read once and kept in memory of our own, so the page cache would hold a second copy of them. Direct reads
//! take an aligned superset; where they do not work, what a buffered read brought into the cache is dropped behind it.

use super::storage::Storage;
use super::{ByteSource, Identity, ReadRoom};
use crate::Error;
use crate::sys::page_cache;
use crate::sys::ring::{Read, Ring};
use rustix::fs::{Advice, Mode, OFlags, StatxFlags, fadvise};
use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadOptions {
    /// Past the page cache, where that is possible and the cache does not have the bytes.
    pub direct: bool,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { direct: true }
    }
}

/// An open regular file.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    path: String,
    identity: Identity,
    storage: Storage,
    direct: Option<Direct>,
    direct_bytes: AtomicU64,
}

/// The file opened for direct reads.
#[derive(Debug)]
struct Direct {
    file: OwnedFd,
    align_bytes: u64,
}

/// Where the system does not tell, what every block device can do.
const ALIGN_BYTES_DEFAULT: u64 = 4096;

impl FileSource {
    /// Opens a regular file. Direct reads are tried out against buffered ones, and given up if anything is not as it should
    /// be.
    pub fn open(path: &Path, options: ReadOptions) -> Result<FileSource, Error> {
        let name = path.display().to_string();
        let fail = |e: std::io::Error| Error::io(&name, e);
        let file = File::open(path).map_err(fail)?;
        let identity = identity(&file).map_err(fail)?;
        if !file.metadata().map_err(fail)?.is_file() {
            return Err(fail(std::io::Error::other("not a regular file")));
        }
        let storage = Storage::of(&file);
        let mut source =
            FileSource { file, path: name, identity, storage, direct: None, direct_bytes: AtomicU64::new(0) };
        if options.direct && storage.likes_direct() {
            source.direct = Direct::open(path, &source.file).filter(|direct| source.agrees(direct));
        }
        Ok(source)
    }

    /// Whether direct reads are used.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Bytes that direct reads brought so far.
    pub fn direct_bytes(&self) -> u64 {
        self.direct_bytes.load(Ordering::Relaxed)
    }

    /// Whether all of `range` is in the page cache, if the system tells (Linux 6.5).
    pub fn is_cached(&self, range: Range<u64>) -> Option<bool> {
        page_cache::holds(self.file.as_fd(), range)
    }

    /// What it is stored on.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// Whether a direct read gives what a buffered one gives, at the start, in the middle and at the end of the file.
    fn agrees(&self, direct: &Direct) -> bool {
        let len = self.identity.len_bytes;
        let mut room = ReadRoom::new(false);
        // Without this, each look would bring a stretch of the file into the page cache.
        self.advise(Advice::Random, 0..len);
        let same = [0, len / 2, len.saturating_sub(1)].into_iter().all(|at| {
            let range = at..(at + direct.align_bytes).min(len);
            let wide = direct.superset(&range);
            let mut wanted = vec![0; (range.end - range.start) as usize];
            let Ok(bytes) = room.of((wide.end - wide.start) as usize) else { return false };
            let bytes = &mut bytes[..(wide.end - wide.start) as usize];
            let needed = (range.end - wide.start) as usize;
            let cached = self.is_cached(range.clone()) == Some(true);
            let read = read_to(&direct.file, bytes, wide.start, needed, 0).is_ok_and(|n| n >= needed)
                && self.file.read_exact_at(&mut wanted, range.start).is_ok();
            if !cached {
                self.advise(Advice::DontNeed, wide.clone());
            }
            read && bytes[(range.start - wide.start) as usize..needed] == wanted[..]
        });
        self.advise(Advice::Normal, 0..len);
        same
    }

    fn advise(&self, advice: Advice, range: Range<u64>) {
        // Advice is a wish.
        let _ = fadvise(&self.file, range.start, NonZeroU64::new(range.end - range.start), advice);
    }

    fn short(&self, end_bytes: u64) -> Error {
        Error::Short { path: self.path.clone(), end_bytes, len_bytes: self.identity.len_bytes }
    }

    /// Reads one range through the page cache, and leaves the cache as it was.
    fn read_buffered(&self, range: &Range<u64>, out: &mut [u8], cached: bool) -> Result<(), Error> {
        self.read_cached(range.start, out)?;
        if !cached {
            self.advise(Advice::DontNeed, range.clone());
        }
        Ok(())
    }

    /// How `range` is read past the page cache, if that is what is to be done with it: by reading an aligned superset.
    pub(crate) fn begin_direct(&self, range: &Range<u64>) -> Option<(BorrowedFd<'_>, Range<u64>)> {
        let direct = self.direct.as_ref().filter(|_| self.is_cached(range.clone()) != Some(true))?;
        Some((direct.file.as_fd(), direct.superset(range)))
    }

    /// What a read begun by [`FileSource::begin_direct`] brought into `buffer`: where `range` is there.
    pub(crate) fn end_direct(
        &self,
        range: &Range<u64>,
        buffer: &mut [u8],
        got: std::io::Result<usize>,
    ) -> Result<Range<usize>, Error> {
        let direct = self.direct.as_ref().ok_or_else(|| self.short(range.end))?;
        let start = direct.superset(range).start;
        let place = (range.start - start) as usize..(range.end - start) as usize;
        self.complete(direct, buffer, start, place.end, got)?;
        self.check()?;
        Ok(place)
    }

    /// Goes on with a direct read that brought `got`, until `needed` bytes are there.
    fn complete(
        &self,
        direct: &Direct,
        buffer: &mut [u8],
        offset_bytes: u64,
        needed: usize,
        got: std::io::Result<usize>,
    ) -> Result<(), Error> {
        let got = got.and_then(|begun| read_to(&direct.file, buffer, offset_bytes, needed, begun));
        let got = got.map_err(|e| Error::io(&self.path, e))?;
        if got < needed {
            return Err(self.short(offset_bytes + needed as u64));
        }
        self.direct_bytes.fetch_add(got as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Reads what `places` say directly: all at once with a ring, one after the other without.
    fn read_direct(&self, direct: &Direct, places: Vec<Place<'_>>, ring: Option<&mut Ring>) -> Result<(), Error> {
        let mut reads: Vec<Read<'_>> = Vec::with_capacity(places.len());
        let mut needed = Vec::with_capacity(places.len());
        for place in places {
            reads.push(Read { buffer: place.buffer, offset_bytes: place.wide.start, got: Ok(0) });
            needed.push((place.range.end - place.wide.start) as usize);
        }
        if let Some(ring) = ring {
            ring.read(direct.file.as_fd(), &mut reads);
        }
        for (read, needed) in reads.iter_mut().zip(needed) {
            let begun = std::mem::replace(&mut read.got, Ok(0));
            self.complete(direct, read.buffer, read.offset_bytes, needed, begun)?;
        }
        Ok(())
    }
}

/// One range of a read: its aligned superset and the room for that.
struct Place<'b> {
    range: &'b Range<u64>,
    wide: Range<u64>,
    buffer: &'b mut [u8],
}

impl ByteSource for FileSource {
    fn name(&self) -> &str {
        &self.path
    }

    fn len_bytes(&self) -> u64 {
        self.identity.len_bytes
    }

    fn identity(&self) -> Option<Identity> {
        Some(self.identity)
    }

    fn read(&self, ranges: &[Range<u64>], room: &mut ReadRoom) -> Result<Vec<Range<usize>>, Error> {
        let align_bytes = self.direct.as_ref().map_or(ALIGN_BYTES_DEFAULT, |d| d.align_bytes);
        let wide = |range: &Range<u64>| match &self.direct {
            Some(direct) => direct.superset(range),
            None => range.clone(),
        };
        let room_of = |range: &Range<u64>| {
            let wide = wide(range);
            (wide.end - wide.start).next_multiple_of(align_bytes) as usize
        };
        let (mut rest, ring) = room.parts(ranges.iter().map(room_of).sum())?;
        let (mut at, mut found, mut direct_places) = (0, Vec::with_capacity(ranges.len()), Vec::new());
        for range in ranges {
            let (buffer, behind) = rest.split_at_mut(room_of(range));
            rest = behind;
            let wide = wide(range);
            let start = at + (range.start - wide.start) as usize;
            found.push(start..start + (range.end - range.start) as usize);
            at += buffer.len();
            let cached = self.is_cached(range.clone()) == Some(true);
            if self.direct.is_some() && !cached {
                direct_places.push(Place { range, wide, buffer });
            } else {
                let len = (range.end - range.start) as usize;
                let from = (range.start - wide.start) as usize;
                self.read_buffered(range, &mut buffer[from..from + len], cached)?;
            }
        }
        if let Some(direct) = &self.direct {
            self.read_direct(direct, direct_places, ring)?;
        }
        self.check()?;
        Ok(found)
    }

    fn check(&self) -> Result<(), Error> {
        let now = identity(&self.file).map_err(|e| Error::io(&self.path, e))?;
        let told = |i: Identity| format!("{} bytes, changed at {} ns", i.len_bytes, i.changed_ns);
        if now != self.identity {
            return Err(Error::Changed { path: self.path.clone(), was: told(self.identity), is: told(now) });
        }
        Ok(())
    }

    fn read_cached(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), Error> {
        self.file.read_exact_at(out, offset_bytes).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => self.short(offset_bytes + out.len() as u64),
            _ => Error::io(&self.path, e),
        })
    }

    fn as_file(&self) -> Option<&FileSource> {
        Some(self)
    }

    fn readers(&self) -> usize {
        self.storage.readers()
    }
}

fn identity(file: &File) -> std::io::Result<Identity> {
    let m = file.metadata()?;
    let changed_ns = i128::from(m.mtime()) * 1_000_000_000 + i128::from(m.mtime_nsec());
    Ok(Identity { device: m.dev(), inode: m.ino(), len_bytes: m.len(), changed_ns })
}

impl Direct {
    fn open(path: &Path, file: &File) -> Option<Direct> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
        let direct = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        // Between the two opens another file may have taken the name.
        let (one, two) = (rustix::fs::fstat(file).ok()?, rustix::fs::fstat(&direct).ok()?);
        let told = rustix::fs::statx(file, c"", rustix::fs::AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
        let align = told.map_or(0, |s| s.stx_dio_offset_align.max(s.stx_dio_mem_align));
        let align_bytes = u64::from(align).max(ALIGN_BYTES_DEFAULT).next_power_of_two();
        ((one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)).then_some(Direct { file: direct, align_bytes })
    }

    /// The aligned range around `range`.
    fn superset(&self, range: &Range<u64>) -> Range<u64> {
        range.start / self.align_bytes * self.align_bytes..range.end.next_multiple_of(self.align_bytes)
    }
}

/// Reads directly into `buffer`, of which `got` bytes are there, until `needed` are or the file ends.
fn read_to(
    file: impl AsFd,
    buffer: &mut [u8],
    offset_bytes: u64,
    needed: usize,
    mut got: usize,
) -> std::io::Result<usize> {
    while got < needed && got.is_multiple_of(512) {
        match rustix::io::pread(&file, &mut buffer[got..], offset_bytes + got as u64) {
            Ok(0) => break,
            // Only the end of a file is not at a whole sector, and direct reads cannot go on from there.
            Ok(n) if !(got + n).is_multiple_of(512) => return Ok(got + n),
            Ok(n) => got += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(got)
}
