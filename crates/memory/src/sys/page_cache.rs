//! How much of a file is in the page cache.
//!
//! Invariants:
//! 1. The structures have the layout of linux/mman.h, and live until the call returns.
#![allow(unsafe_code)]

use rustix::fd::{AsRawFd, BorrowedFd};
use std::ops::Range;

/// Number of `cachestat` (Linux 6.5), the same on every architecture.
const CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct CacheRange {
    offset: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Whether all of `range` is in the page cache; `None` if the system does not tell.
pub(crate) fn holds(fd: BorrowedFd<'_>, range: Range<u64>) -> Option<bool> {
    let page_bytes = rustix::param::page_size() as u64;
    let first = range.start / page_bytes;
    let pages = range.end.div_ceil(page_bytes) - first;
    let mut asked = CacheRange { offset: first * page_bytes, len: pages * page_bytes };
    let mut told = CacheStat::default();
    // SAFETY: invariant 1.
    let result = unsafe { libc::syscall(CACHESTAT, fd.as_raw_fd(), &mut asked, &mut told, 0u32) };
    (result == 0).then_some(told.cached >= pages)
}
