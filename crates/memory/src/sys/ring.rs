//! Many reads of one file in flight at once, by io_uring.
//!
//! Invariants:
//! 1. [`Ring::read`] returns only when every read that it handed to the kernel has completed, so that the buffers, which
//!    it borrows, outlive the reads.
#![allow(unsafe_code)]

use io_uring::{IoUring, opcode, types};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;

/// Reads in flight at most.
const DEPTH: usize = 32;

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
