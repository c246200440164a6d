//! Where bytes come from.

mod fetch;
mod file;
mod storage;

pub use fetch::Fetcher;
pub(crate) use fetch::still_for;
pub use file::{FileSource, ReadOptions};
pub use storage::Storage;

use crate::sys::lines;
use crate::sys::ring::Ring;
use crate::{Buffer, Error};
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// What a file is, whatever its name: two opens of the same content have equal identities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device of the file system.
    pub device: u64,
    /// Inode.
    pub inode: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Time of the last change, in ns since 1970.
    pub changed_ns: i128,
}

/// Bytes at offsets. Reading does not change what another read gives, and any thread may read.
pub trait ByteSource: Debug + Send + Sync {
    /// What messages call it.
    fn name(&self) -> &str;

    /// Length in bytes, fixed at opening.
    fn len_bytes(&self) -> u64;

    /// What it is, if it can be told.
    fn identity(&self) -> Option<Identity>;

    /// Reads `ranges`, all of them or none, into `room`; gives for each where its bytes are in there. An error if the
    /// source ends early, fails, or is not what it was when it was opened.
    fn read(&self, ranges: &[Range<u64>], room: &mut ReadRoom) -> Result<Vec<Range<usize>>, Error>;

    /// An error if the source is not what it was when it was opened.
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Fills `out` with the bytes from `offset_bytes` on, through the page cache, which keeps them. An error if the source
    /// ends early or fails; whether it changed is not looked at.
    fn read_cached(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), Error>;

    /// The file that it is, if it is one: such a source may be read by asynchronous reads.
    fn as_file(&self) -> Option<&FileSource> {
        None
    }

    /// Threads that should read at once.
    fn readers(&self) -> usize {
        2
    }
}

/// Where reads go: a buffer that grows, in huge pages, and a ring for many reads at once where the system has one.
#[derive(Debug, Default)]
pub struct ReadRoom {
    buffer: Option<Buffer>,
    ring: Option<Ring>,
}

impl From<Buffer> for ReadRoom {
    /// Room that there is already.
    fn from(buffer: Buffer) -> ReadRoom {
        ReadRoom { buffer: Some(buffer), ring: None }
    }
}

impl ReadRoom {
    /// Room of one reader; with `ring`, io_uring is used where it is allowed.
    pub fn new(ring: bool) -> ReadRoom {
        ReadRoom { buffer: None, ring: if ring { Ring::new().ok() } else { None } }
    }

    /// At least `len_bytes` of room. What was in it is lost.
    pub fn of(&mut self, len_bytes: usize) -> Result<&mut [u8], Error> {
        self.parts(len_bytes).map(|(bytes, _)| bytes)
    }

    fn parts(&mut self, len_bytes: usize) -> Result<(&mut [u8], Option<&mut Ring>), Error> {
        if self.buffer.as_ref().is_none_or(|b| b.len() < len_bytes) {
            self.buffer = None;
            self.buffer = Some(Buffer::new(len_bytes)?);
        }
        Ok((self.buffer.as_mut().map_or(&mut [], |b| &mut b[..]), self.ring.as_mut()))
    }

    /// What was read.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or(&[])
    }

    /// What was read is not looked at any more: the next read may be faster then.
    pub(crate) fn give_up(&self) {
        lines::give_up(self.bytes());
    }
}

/// Reads a source from its start, in pieces.
#[derive(Debug)]
pub struct Reader {
    source: Arc<dyn ByteSource>,
    room: ReadRoom,
    piece: Range<u64>,
    /// Where `piece` is in the room.
    place: Range<usize>,
}

/// Bytes of the first piece, which doubles from piece to piece: headers have some MiB, large reads are faster, and what is
/// read too much is read twice.
const PIECE_BYTES_MIN: u64 = 1 << 20;
const PIECE_BYTES_MAX: u64 = 4 << 20;

impl Reader {
    /// A reader from the start.
    pub fn new(source: Arc<dyn ByteSource>) -> Reader {
        Reader { source, room: ReadRoom::new(false), piece: 0..0, place: 0..0 }
    }
}

impl io::Read for Reader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.place.is_empty() {
            let start = self.piece.end;
            let len = (2 * (self.piece.end - self.piece.start)).clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
            let end = (start + len).min(self.source.len_bytes());
            if start == end {
                return Ok(0);
            }
            let piece = start..end;
            let places = self.source.read(std::slice::from_ref(&piece), &mut self.room).map_err(io::Error::other)?;
            (self.piece, self.place) = (piece, places[0].clone());
        }
        let n = out.len().min(self.place.len());
        out[..n].copy_from_slice(&self.room.bytes()[self.place.start..self.place.start + n]);
        self.place.start += n;
        Ok(n)
    }
}
