//! Many reads of one file in flight at once, by io_uring.
//!
//! Invariants:
//! 1. A [`Ring`] is used by one thread at a time, and [`Ring::read`] returns only when every read that it handed to the kernel has
//!    completed, so that the buffers, which it borrows, outlive the reads.
//! 2. A buffer of [`Flights`] is *flying* from before its read is handed to the kernel until that has completed, or the kernel
//!    has refused it. It becomes so under its lock, and who locks it looks first whether it is: so while it is, nobody sees it.
//!    It is not unmapped then: dropping waits.
//! 3. The submission queue of [`Flights`] is used under the lock `submitting`, its completion queue under `reaping`.
//! 4. A read that the kernel has refused stays in the submission queue, where nothing can take it out. So nothing of that queue is
//!    handed over any more: its ring is given up, and its buffer free.
#![allow(unsafe_code)]

use crate::buffer::Part;
use io_uring::{EnterFlags, IoUring, opcode, types};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Reads in flight at most: embedding rows of a prompt are read beside the large reads of layers, and each turn of them waits as
/// long as all would. Fewer than the requests that a disk's queue takes by default (256).
const DEPTH: usize = 128;

/// How often the system may refuse a submission in a row (for want of memory for a moment) before its ring is given up.
const REFUSALS_MAX: usize = 1000;

/// One read: fills `buffer` from `offset_bytes` on; `got` says how much the kernel gave.
#[derive(Debug)]
pub(crate) struct Read<'b> {
    pub(crate) buffer: &'b mut [u8],
    pub(crate) offset_bytes: u64,
    pub(crate) got: io::Result<usize>,
}

/// Has the system take what is in the submission queue of `ring`, which is the caller's alone meanwhile, and tells how many entries
/// it refused. If it did any, the ring is to be given up (invariant 4).
fn submit(ring: &IoUring) -> usize {
    // SAFETY: invariants 1 and 3: the queue is the caller's.
    let waiting = || unsafe { ring.submission_shared() }.len();
    for _ in 0..REFUSALS_MAX {
        if waiting() == 0 {
            return 0;
        }
        if ring.submitter().submit().is_err() {
            std::thread::yield_now();
        }
    }
    waiting()
}

/// Waits until a read has completed, or something else ends the wait. Submits nothing.
fn wait_for_one(ring: &IoUring) {
    // SAFETY: nothing is submitted (invariant 4), and there are no arguments.
    if unsafe { ring.submitter().enter::<()>(0, 1, EnterFlags::GETEVENTS.bits(), None) }.is_err() {
        std::thread::yield_now();
    }
}

/// What the kernel says of a read.
fn bytes_read(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

/// A ring of this process.
pub(crate) struct Ring {
    ring: IoUring,
    given_up: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({DEPTH})")
    }
}

impl Ring {
    /// A ring, where the system allows it: containers and some distributions do not.
    pub(crate) fn new() -> io::Result<Ring> {
        IoUring::new(DEPTH as u32).map(Ring::of)
    }

    fn of(ring: IoUring) -> Ring {
        Ring { ring, given_up: false }
    }

    /// Carries out `reads` of `fd`, each once; short ones are the caller's to go on with, and so are those that were not begun
    /// because the system refuses to: what they have got stays as it is.
    pub(crate) fn read(&mut self, fd: BorrowedFd<'_>, reads: &mut [Read<'_>]) {
        let (mut next, mut in_flight) = (0, 0);
        while in_flight > 0 || (next < reads.len() && !self.given_up) {
            while next < reads.len() && in_flight < DEPTH && !self.given_up {
                let read = &mut reads[next];
                let len = u32::try_from(read.buffer.len()).unwrap_or(u32::MAX);
                let entry = opcode::Read::new(types::Fd(fd.as_raw_fd()), read.buffer.as_mut_ptr(), len)
                    .offset(read.offset_bytes)
                    .build()
                    .user_data(next as u64);
                // SAFETY: invariant 1.
                if unsafe { self.ring.submission().push(&entry) }.is_err() {
                    break;
                }
                next += 1;
                in_flight += 1;
            }
            if !self.given_up {
                let refused = submit(&self.ring);
                (self.given_up, in_flight) = (refused > 0, in_flight - refused);
            }
            if in_flight > 0 {
                wait_for_one(&self.ring);
            }
            for done in self.ring.completion() {
                reads[done.user_data() as usize].got = bytes_read(done.result());
                in_flight -= 1;
            }
        }
    }
}

/// Reads that go on while their caller does something else, each into a buffer that is kept here. Any thread may begin one.
/// If that thread ends meanwhile, the system gives up what it has not begun itself: such a read ends with `ECANCELED`.
pub(crate) struct Flights {
    ring: IoUring,
    buffers: Vec<Mutex<Part>>,
    flying: Vec<AtomicBool>,
    /// Whether the ring is given up.
    submitting: Mutex<bool>,
    reaping: Mutex<()>,
}

/// What the locks here protect is consistent, whatever panicked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Flights {
    /// Reads into `buffers`.
    pub(crate) fn new(buffers: Vec<Part>) -> io::Result<Flights> {
        Ok(Flights::of(IoUring::new(buffers.len().next_power_of_two() as u32)?, buffers))
    }

    fn of(ring: IoUring, buffers: Vec<Part>) -> Flights {
        let flying = buffers.iter().map(|_| AtomicBool::new(false)).collect();
        let (submitting, reaping) = Default::default();
        Flights { ring, buffers: buffers.into_iter().map(Mutex::new).collect(), flying, submitting, reaping }
    }

    /// Buffers.
    pub(crate) fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Begins to read `range` of `file` into buffer `index`; tells whether it fits there, the buffer is idle, and the system takes
    /// reads.
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
        let mut given_up = locked(&self.submitting);
        if *given_up {
            return false;
        }
        // From here on the buffer is flying.
        self.flying[index].store(true, Ordering::Release);
        // SAFETY: invariants 2 and 3.
        let pushed = unsafe { self.ring.submission_shared().push(&entry) }.is_ok();
        *given_up = pushed && submit(&self.ring) > 0;
        let begun = pushed && !*given_up;
        if !begun {
            self.flying[index].store(false, Ordering::Release);
        }
        begun
    }

    /// Whether a read is under way; not one that may still be refused, since nobody could end a wait for that.
    fn any_flying(&self) -> bool {
        let _nobody_begins = locked(&self.submitting);
        self.flying.iter().any(|flying| flying.load(Ordering::Acquire))
    }

    /// Waits for reads that have ended: their buffers, and how many bytes came. Empty if none is under way.
    pub(crate) fn wait(&self) -> Vec<(usize, io::Result<usize>)> {
        let _reaping = locked(&self.reaping);
        let mut done = Vec::new();
        while done.is_empty() && self.any_flying() {
            wait_for_one(&self.ring);
            // SAFETY: invariant 3.
            for entry in unsafe { self.ring.completion_shared() } {
                let index = entry.user_data() as usize;
                self.flying[index].store(false, Ordering::Release);
                done.push((index, bytes_read(entry.result())));
            }
        }
        done
    }

    /// Buffer `index`, which must not be flying.
    pub(crate) fn buffer(&self, index: usize) -> MutexGuard<'_, Part> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;
    use rustix::fd::AsFd;
    use std::io::{Seek, SeekFrom, Write};

    /// A ring that refuses every submission; `None` where there are no rings.
    fn disabled(entries: u32) -> Option<IoUring> {
        let ring = IoUring::builder().setup_r_disabled().build(entries);
        ring.inspect_err(|e| eprintln!("not tested: no io_uring here: {e}")).ok()
    }

    fn parts(count: usize) -> Vec<Part> {
        Buffer::new(count * 4096).expect("some pages").cut(count, 4096)
    }

    fn file(bytes: &[u8]) -> std::fs::File {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(bytes).and_then(|()| file.seek(SeekFrom::Start(0))).expect("it is written");
        file
    }

    #[test]
    fn a_flight_that_the_system_refuses_is_not_begun_then_or_later() {
        let Some(ring) = disabled(2) else { return };
        let flights = Flights::of(ring, parts(2));
        let file = file(&[7; 4096]);
        assert!(!flights.begin(0, file.as_fd(), 0..4096), "refused");
        assert!(flights.wait().is_empty(), "nothing to wait for");
        flights.ring.submitter().register_enable_rings().expect("the ring is enabled");
        assert!(!flights.begin(1, file.as_fd(), 0..4096), "the ring is given up");
        assert!(flights.wait().is_empty());
        for index in 0..2 {
            assert!(flights.buffer(index).iter().all(|&b| b == 0), "nothing was read into buffer {index}");
        }
    }

    #[test]
    fn reads_that_the_system_refuses_are_left_to_the_caller() {
        let Some(ring) = disabled(4) else { return };
        let (mut ring, file) = (Ring::of(ring), file(&[7; 4096]));
        let mut bytes = [[0; 512]; 6];
        for _ in 0..2 {
            let mut reads: Vec<_> =
                bytes.iter_mut().map(|buffer| Read { buffer, offset_bytes: 0, got: Ok(0) }).collect();
            ring.read(file.as_fd(), &mut reads);
            assert!(reads.iter().all(|read| matches!(read.got, Ok(0))), "{reads:?}");
            drop(reads);
            ring.ring.submitter().register_enable_rings().ok();
        }
        assert_eq!(bytes, [[0; 512]; 6], "nothing was read");
    }

    #[test]
    fn a_flight_whose_thread_ends_is_given_up_by_the_system() {
        let Ok(flights) = Flights::new(parts(1)).inspect_err(|e| eprintln!("not tested: no io_uring here: {e}")) else {
            return;
        };
        let (empty, mut end) = std::io::pipe().expect("a pipe");
        std::thread::scope(|scope| {
            // A scope's end would not wait for the end of the thread itself.
            let begun = scope.spawn(|| flights.begin(0, empty.as_fd(), 0..4096)).join();
            assert!(begun.expect("no panic"));
        });
        end.write_all(b"late").expect("somebody could read it");
        let done = flights.wait();
        match &done[..] {
            [(0, Err(e))] if e.raw_os_error() == Some(rustix::io::Errno::CANCELED.raw_os_error()) => {}
            [(0, Ok(4))] => eprintln!("not tested: this system reads on for a thread that has ended"),
            other => panic!("{other:?}"),
        }
    }
}
