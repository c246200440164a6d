//! Many reads of one file in flight at once, by io_uring.
//!
//! Invariants:
//! 1. [`Ring::read`] returns only when every read that it handed to the kernel has completed, so that the buffers, which
//!    it borrows, outlive the reads.
//! 2. A buffer of [`Flights`] is *flying* from before its read is handed to the kernel until that has completed. It becomes so
//!    under its lock, and who locks it looks first whether it is: so while it is, nobody sees it. It is not unmapped then:
//!    dropping waits.
//! 3. The submission queue of [`Flights`] is used under the lock `submitting`, its completion queue under `reaping`.
#![allow(unsafe_code)]

use crate::Buffer;
use io_uring::{IoUring, opcode, types};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// Reads that go on while their caller does something else, each into a buffer that is kept here. Any thread may begin one.
/// If that thread ends meanwhile, the system gives up what it has not begun itself: such a read ends with `ECANCELED`.
pub(crate) struct Flights {
    ring: IoUring,
    buffers: Vec<Mutex<Buffer>>,
    flying: Vec<AtomicBool>,
    submitting: Mutex<()>,
    reaping: Mutex<()>,
}

/// What the locks here protect is consistent, whatever panicked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Flights {
    /// `buffers` buffers of `len_bytes` each.
    pub(crate) fn new(buffers: usize, len_bytes: usize) -> io::Result<Flights> {
        let ring = IoUring::new(buffers.next_power_of_two() as u32)?;
        let made: Result<_, _> = (0..buffers).map(|_| Buffer::new(len_bytes).map(Mutex::new)).collect();
        let flying = (0..buffers).map(|_| AtomicBool::new(false)).collect();
        let (submitting, reaping) = Default::default();
        Ok(Flights { ring, buffers: made.map_err(io::Error::other)?, flying, submitting, reaping })
    }

    /// Buffers.
    pub(crate) fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Begins to read `range` of `file` into buffer `index`; tells whether it fits there and the buffer is idle.
    pub(crate) fn begin(&self, index: usize, file: BorrowedFd<'_>, range: Range<u64>) -> bool {
        let len = (range.end - range.start) as usize;
        let mut buffer = locked(&self.buffers[index]);
        if self.flying[index].load(Ordering::Acquire) || len > buffer.len() {
            return false;
        }
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer.as_mut_ptr(), len as u32)
            .offset(range.start)
            .build()
            .user_data(index as u64);
        let _submitting = locked(&self.submitting);
        // From here on the buffer is flying.
        self.flying[index].store(true, Ordering::Release);
        // SAFETY: invariants 2 and 3.
        if unsafe { self.ring.submission_shared().push(&entry) }.is_err() {
            self.flying[index].store(false, Ordering::Release);
            return false;
        }
        // An error (a signal, a lack of memory for a moment) leaves the entry in the ring, and who waits for it may sleep by now.
        while self.ring.submitter().submit().is_err() {
            std::thread::yield_now();
        }
        true
    }

    fn any_flying(&self) -> bool {
        self.flying.iter().any(|flying| flying.load(Ordering::Acquire))
    }

    /// Waits for reads that have ended: their buffers, and how many bytes came. Empty if none is under way.
    pub(crate) fn wait(&self) -> Vec<(usize, io::Result<usize>)> {
        let _reaping = locked(&self.reaping);
        let mut done = Vec::new();
        while done.is_empty() && self.any_flying() {
            if self.ring.submitter().submit_and_wait(1).is_err() {
                std::thread::yield_now();
            }
            // SAFETY: invariant 3.
            for entry in unsafe { self.ring.completion_shared() } {
                let index = entry.user_data() as usize;
                self.flying[index].store(false, Ordering::Release);
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
    pub(crate) fn buffer(&self, index: usize) -> MutexGuard<'_, Buffer> {
        let buffer = locked(&self.buffers[index]);
        assert!(!self.flying[index].load(Ordering::Acquire), "buffer {index} is being read into");
        buffer
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        // Invariant 2.
        while self.any_flying() {
            self.wait();
        }
    }
}
