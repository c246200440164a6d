//! Private memory that one owner reads and writes.
//!
//! Invariants:
//! 1. `base` and `len_bytes` describe one private anonymous mapping of this process, readable and writable, made by
//!    [`Buffer::new`] and unmapped only by its `Drop`, unless [`Buffer::into_raw`] gave it away.
//! 2. A buffer that is cut into parts is seen through them alone; they lie in it, and do not overlap.
#![allow(unsafe_code)]

use crate::Error;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::sync::Arc;

/// What a huge page has on the machines that have one of this kind (x86-64, and AArch64 with pages of 4 KiB).
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A range of zeroed memory, left out of core dumps. Pages are taken when they are first written.
#[derive(Debug)]
pub struct Buffer {
    base: *mut c_void,
    len_bytes: usize,
}

// SAFETY: the buffer owns its mapping (invariant 1); access follows the borrow rules of `Deref` and `DerefMut`.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer of at least `len_bytes`, in huge pages where the system gives them and it is long enough.
    pub fn new(len_bytes: usize) -> Result<Buffer, Error> {
        Buffer::with_pages(len_bytes, true)
    }

    /// A buffer whose length is a multiple of the page, in huge pages or not.
    pub(crate) fn with_pages(len_bytes: usize, huge: bool) -> Result<Buffer, Error> {
        let len_bytes = len_bytes
            .max(1)
            .checked_next_multiple_of(rustix::param::page_size())
            .ok_or_else(|| Error::map(len_bytes, rustix::io::Errno::NOMEM))?;
        let huge = huge && len_bytes >= HUGE_PAGE_BYTES;
        let align_bytes = if huge { HUGE_PAGE_BYTES } else { 1 };
        let base = reserve(len_bytes, align_bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        let buffer = Buffer { base, len_bytes };
        for advice in [if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage }, Advice::LinuxDontDump] {
            // Advice is a wish: a kernel without it works all the same.
            // SAFETY: invariant 1; neither advice changes contents.
            let _ = unsafe { madvise(buffer.base, buffer.len_bytes, advice) };
        }
        Ok(buffer)
    }

    /// Has the system take all pages now.
    pub(crate) fn touched(mut self) -> Buffer {
        let page_bytes = rustix::param::page_size();
        self.iter_mut().step_by(page_bytes).for_each(|byte| *byte = 0);
        self
    }

    /// Cuts the front of the buffer into `count` parts of `len_bytes` each.
    ///
    /// # Panics
    /// If it is not long enough.
    pub(crate) fn cut(self, count: usize, len_bytes: usize) -> Vec<Part> {
        assert!(count.checked_mul(len_bytes).is_some_and(|all| all <= self.len_bytes), "{count} parts of {len_bytes}");
        let whole = Arc::new(self);
        (0..count).map(|i| Part { whole: Arc::clone(&whole), from: i * len_bytes, len_bytes }).collect()
    }

    /// Gives the mapping to the caller, who unmaps it.
    pub(crate) fn into_raw(self) -> (*mut c_void, usize) {
        let buffer = std::mem::ManuallyDrop::new(self);
        (buffer.base, buffer.len_bytes)
    }
}

/// Maps `len_bytes` of private anonymous memory at a multiple of `align_bytes`.
pub(crate) fn reserve(len_bytes: usize, align_bytes: usize, protection: ProtFlags) -> Result<*mut c_void, Error> {
    let slack = if align_bytes > rustix::param::page_size() { align_bytes } else { 0 };
    let all = len_bytes.checked_add(slack).ok_or_else(|| Error::map(len_bytes, rustix::io::Errno::NOMEM))?;
    // SAFETY: a fresh mapping at an address of the system's choice replaces nothing.
    let base =
        unsafe { mmap_anonymous(std::ptr::null_mut(), all, protection, MapFlags::PRIVATE | MapFlags::NORESERVE) }
            .map_err(|e| Error::map(len_bytes, e))?;
    let head = base.addr().next_multiple_of(align_bytes) - base.addr();
    let aligned = base.wrapping_byte_add(head);
    for (from, len) in [(base, head), (aligned.wrapping_byte_add(len_bytes), slack - head.min(slack))] {
        if len > 0 {
            // SAFETY: the ends of the mapping that was just made; no one knows them yet.
            let _ = unsafe { munmap(from, len) };
        }
    }
    Ok(aligned)
}

impl std::ops::Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: invariant 1; anonymous memory is initialized to zero.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len_bytes) }
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: invariant 1, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.cast(), self.len_bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: invariant 1; no borrow outlives `self`.
        let _ = unsafe { munmap(self.base, self.len_bytes) };
    }
}

/// A part of a buffer.
#[derive(Debug)]
pub(crate) struct Part {
    whole: Arc<Buffer>,
    from: usize,
    len_bytes: usize,
}

impl std::ops::Deref for Part {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: invariants 1 and 2.
        unsafe { std::slice::from_raw_parts(self.whole.base.cast::<u8>().add(self.from), self.len_bytes) }
    }
}

impl std::ops::DerefMut for Part {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: invariants 1 and 2, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.whole.base.cast::<u8>().add(self.from), self.len_bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_their_own_and_outlive_each_other() {
        let mut parts = Buffer::new(10_000).expect("a few pages").touched().cut(3, 3000);
        for (i, part) in (1..).zip(&mut parts) {
            assert_eq!(part.len(), 3000);
            part.fill(i);
        }
        let last = parts.pop().expect("three parts");
        assert!(parts[0].iter().all(|&b| b == 1) && parts[1].iter().all(|&b| b == 2));
        drop(parts);
        assert!(last.iter().all(|&b| b == 3));
    }

    #[test]
    #[should_panic(expected = "5 parts of 3000")]
    fn more_parts_than_there_is_room_for_are_a_bug() {
        let _ = Buffer::new(10_000).expect("a few pages").cut(5, 3000);
    }

    #[test]
    fn a_buffer_is_zero_writable_and_at_least_as_long_as_asked() {
        for len in [0, 1, 4096, 5 << 20] {
            let mut buffer = Buffer::new(len).expect("a few MiB of memory");
            assert!(buffer.len() >= len && buffer.iter().all(|&b| b == 0));
            let last = buffer.len() - 1;
            buffer[last] = 7;
            assert_eq!(buffer[last], 7);
        }
    }

    #[test]
    fn more_than_the_address_space_is_an_error_with_the_number() {
        for len in [1 << 60, usize::MAX] {
            let error = Buffer::new(len).expect_err("no machine maps 2^60 bytes");
            assert!(error.to_string().contains(&len.to_string()), "{error}");
        }
    }
}
