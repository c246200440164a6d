//! Many reads of one file in flight at once, by io_uring.
//!
//! Invariants:
//! 1. [`Ring::read`] returns only when every read that it handed to the kernel has completed, so that the buffers, which
//!    it borrows, outlive the reads.
//! 2. A buffer of [`Flights`] is *flying* from before its read is handed to the kernel until that has completed. While it
//!    is, nobody sees it, and it is not unmapped: dropping waits.
#![allow(unsafe_code)]

use crate::Buffer;
use io_uring::{IoUring, opcode, types};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;
use std::ops::Range;

/// Reads in flight at most: embedding rows of a prompt are read beside the large reads of layers, and each turn of them waits as
/// long as all would. Fewer than the requests that a disk's queue takes by default (256).
const DEPTH: usize = 128;

/// One read: fills `buffer` from `offset_bytes` on; `got` says how much the kernel gave.
#[derive(Debug)]
pub(crate) struct Read<'b> {
    pub(crate) buffer: &'b mut [u8],
    pub(crate) offset_bytes: u64,
    pub(crate) got: io::Result<usize>,
}

/// A ring of this process.
pub(crate) struct Ring(IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({DEPTH})")
    }
}

impl Ring {
    /// A ring, where the system allows it: containers and some distributions do not.
    pub(crate) fn new() -> io::Result<Ring> {
        IoUring::new(DEPTH as u32).map(Ring)
    }

    /// Carries out `reads` of `fd`, each once; short ones are the caller's to go on with.
    pub(crate) fn read(&mut self, fd: BorrowedFd<'_>, reads: &mut [Read<'_>]) {
        let (mut next, mut in_flight) = (0, 0);
        while next < reads.len() || in_flight > 0 {
            while next < reads.len() && in_flight < DEPTH {
                let read = &mut reads[next];
                let len = u32::try_from(read.buffer.len()).unwrap_or(u32::MAX);
                let entry = opcode::Read::new(types::Fd(fd.as_raw_fd()), read.buffer.as_mut_ptr(), len)
                    .offset(read.offset_bytes)
                    .build()
                    .user_data(next as u64);
                // SAFETY: invariant 1.
                if unsafe { self.0.submission().push(&entry) }.is_err() {
                    break;
                }
                next += 1;
                in_flight += 1;
            }
            // An error here (a signal, a lack of memory for a moment) leaves the entries in the ring: try again. The kernel
            // may hold buffers already, so there is no way back (invariant 1).
            if self.0.submit_and_wait(1).is_err() {
                std::thread::yield_now();
            }
            for done in self.0.completion() {
                reads[done.user_data() as usize].got = match done.result() {
                    n if n >= 0 => Ok(n as usize),
                    e => Err(io::Error::from_raw_os_error(-e)),
                };
                in_flight -= 1;
            }
        }
    }
}

/// Reads that go on while their caller does something else, each into a buffer that is kept here.
pub(crate) struct Flights {
    ring: IoUring,
    buffers: Vec<Buffer>,
    flying: Vec<bool>,
}

impl Flights {
    /// `buffers` buffers of `len_bytes` each.
    pub(crate) fn new(buffers: usize, len_bytes: usize) -> io::Result<Flights> {
        let ring = IoUring::new(buffers.next_power_of_two() as u32)?;
        let made: Result<Vec<Buffer>, _> = (0..buffers).map(|_| Buffer::new(len_bytes)).collect();
        let buffers = made.map_err(io::Error::other)?;
        Ok(Flights { ring, flying: vec![false; buffers.len()], buffers })
    }

    /// Buffers.
    pub(crate) fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Begins to read `range` of `file` into buffer `index`; tells whether it fits there and the buffer is idle.
    pub(crate) fn begin(&mut self, index: usize, file: BorrowedFd<'_>, range: Range<u64>) -> bool {
        let len = (range.end - range.start) as usize;
        let buffer = &mut self.buffers[index];
        if self.flying[index] || len > buffer.len() {
            return false;
        }
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer.as_mut_ptr(), len as u32)
            .offset(range.start)
            .build()
            .user_data(index as u64);
        // SAFETY: invariant 2: from here on the buffer is flying.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            return false;
        }
        self.flying[index] = true;
        // An error leaves the entry in the ring; `wait` submits it again.
        let _ = self.ring.submit();
        true
    }

    /// Waits for reads that have ended: their buffers, and how many bytes came. Empty if none is under way.
    pub(crate) fn wait(&mut self) -> Vec<(usize, io::Result<usize>)> {
        let mut done = Vec::new();
        while done.is_empty() && self.flying.contains(&true) {
            if self.ring.submit_and_wait(1).is_err() {
                std::thread::yield_now();
            }
            for entry in self.ring.completion() {
                let index = entry.user_data() as usize;
                self.flying[index] = false;
                let got = match entry.result() {
                    n if n >= 0 => Ok(n as usize),
                    e => Err(io::Error::from_raw_os_error(-e)),
                };
                done.push((index, got));
            }
        }
        done
    }

    /// Buffer `index`, which must not be flying.
    pub(crate) fn buffer_mut(&mut self, index: usize) -> &mut [u8] {
        assert!(!self.flying[index], "buffer {index} is being read into");
        &mut self.buffers[index]
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        // Invariant 2.
        while self.flying.contains(&true) {
            self.wait();
        }
    }
}
