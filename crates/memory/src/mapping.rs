//! A file as the page cache has it.
//!
//! Invariants:
//! 1. `base` and `len_bytes` describe one read-only shared mapping of a file, made by [`Mapping::new`] and unmapped only by
//!    its `Drop`.
//! 2. Whoever changes the file changes what is seen here, and touching what was cut off is a SIGBUS. That cannot be
//!    prevented; users check their source before they compute with it, and the default is memory of our own.
#![allow(unsafe_code)]

use crate::Error;
use rustix::fd::AsFd;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::ops::Range;

/// A read-only mapping of a whole file.
#[derive(Debug)]
pub struct Mapping {
    base: *mut c_void,
    len_bytes: usize,
    path: String,
}

// SAFETY: the mapping is only read (invariant 1).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len_bytes` of `file`, which messages call `path`.
    pub(crate) fn new(file: impl AsFd, len_bytes: usize, path: &str) -> Result<Mapping, Error> {
        // SAFETY: a fresh mapping at an address of the system's choice replaces nothing.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len_bytes, ProtFlags::READ, MapFlags::SHARED, file, 0) };
        Ok(Mapping { base: base.map_err(|e| Error::map(len_bytes, e))?, len_bytes, path: path.to_owned() })
    }

    /// Brings `range` into the page cache and maps it. An error where touching it would be a signal. Kernels before 5.14
    /// cannot be asked that; there it does nothing, and the range is read when it is touched.
    pub fn populate(&self, range: Range<usize>) -> Result<(), Error> {
        assert!(range.start <= range.end && range.end <= self.len_bytes, "{range:?} of {} bytes", self.len_bytes);
        let start = range.start / rustix::param::page_size() * rustix::param::page_size();
        // SAFETY: invariant 1; the advice changes no contents.
        let told = unsafe {
            rustix::mm::madvise(self.base.wrapping_byte_add(start), range.end - start, Advice::LinuxPopulateRead)
        };
        match told {
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
            Err(e) => Err(Error::io(&self.path, e)),
        }
    }
}

impl std::ops::Deref for Mapping {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: invariants 1 and 2.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len_bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: invariant 1; no borrow outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base, self.len_bytes) };
    }
}
