//! userfaultfd: the first touch of a missing page becomes a message, and the thread that touched it waits.
//!
//! Source: linux/userfaultfd.h.
//!
//! Invariants:
//! 1. The structures below have the layout of the kernel's, and each request number is used with its own structure.
//! 2. Only memory of an address range that the caller owns is registered, and a page is put only where none is.
#![allow(unsafe_code)]

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, Result};
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

const GROUP: u8 = 0xaa;
const API: u64 = 0xaa;
const REGISTER_MODE_MISSING: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const MESSAGE_BYTES: usize = 32;

#[repr(C)]
struct ApiRequest {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RangeRequest {
    start: u64,
    len: u64,
}

#[repr(C)]
struct RegisterRequest {
    range: RangeRequest,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct CopyRequest {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// A descriptor that gets the faults of the ranges that are registered with it. When it is closed, missing pages read as
/// zeros again: whoever owns the range takes access away before that.
#[derive(Debug)]
pub(crate) struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens a descriptor. Faults from within system calls are not wanted, which is what an unprivileged process may ask
    /// for.
    pub(crate) fn open() -> Result<Uffd> {
        // Without NONBLOCK poll would say ready for ever, and a read would block.
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);
        // SAFETY: a new descriptor, with no range registered.
        let fd = unsafe { userfaultfd(flags | USER_MODE_ONLY).or_else(|_| userfaultfd(flags)) }?;
        let mut request = ApiRequest { api: API, features: 0, ioctls: 0 };
        // SAFETY: invariant 1.
        unsafe { ioctl(&fd, Updater::<{ opcode::read_write::<ApiRequest>(GROUP, 0x3f) }, _>::new(&mut request)) }?;
        Ok(Uffd { fd })
    }

    /// From now on, touching a missing page of `len` bytes at `start` waits. Both are multiples of a page.
    pub(crate) fn register(&self, start: usize, len: usize) -> Result<()> {
        let range = RangeRequest { start: start as u64, len: len as u64 };
        let mut request = RegisterRequest { range, mode: REGISTER_MODE_MISSING, ioctls: 0 };
        // SAFETY: invariants 1 and 2.
        unsafe {
            ioctl(&self.fd, Updater::<{ opcode::read_write::<RegisterRequest>(GROUP, 0x00) }, _>::new(&mut request))
        }
    }

    /// Lets those go on who wait for the page at `start`.
    pub(crate) fn wake(&self, start: usize, len: usize) -> Result<()> {
        let mut request = RangeRequest { start: start as u64, len: len as u64 };
        // SAFETY: invariant 1.
        unsafe { ioctl(&self.fd, Updater::<{ opcode::read::<RangeRequest>(GROUP, 0x02) }, _>::new(&mut request)) }
    }

    /// Puts a copy of `page` at `to`, where no page is, and lets those go on who wait for it.
    pub(crate) fn copy(&self, to: usize, page: &[u8]) -> Result<()> {
        let mut request = CopyRequest {
            to: to as u64,
            from: page.as_ptr().addr() as u64,
            len: page.len() as u64,
            mode: 0,
            copied: 0,
        };
        // SAFETY: invariants 1 and 2; `page` is readable.
        unsafe { ioctl(&self.fd, Updater::<{ opcode::read_write::<CopyRequest>(GROUP, 0x03) }, _>::new(&mut request)) }
    }

    /// Waits for a fault or for `signal`; gives the addresses of the faults.
    pub(crate) fn wait(&self, signal: BorrowedFd<'_>) -> Result<Vec<usize>> {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN), PollFd::from_borrowed_fd(signal, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
        let mut count = [0; 8];
        let _ = rustix::io::read(signal, &mut count);
        let mut addresses = Vec::new();
        let mut messages = [0; 16 * MESSAGE_BYTES];
        loop {
            let n = match rustix::io::read(self.fd.as_fd(), &mut messages) {
                Ok(n) => n,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(addresses),
                Err(e) => return Err(e),
            };
            for message in messages[..n].chunks_exact(MESSAGE_BYTES) {
                if let (EVENT_PAGEFAULT, Some(address)) = (message[0], message[16..].first_chunk()) {
                    addresses.push(u64::from_ne_bytes(*address) as usize);
                }
            }
        }
    }
}
