//! Anonymous memory for a model's weights.
//!
//! Invariants:
//! 1. `base` and `len` describe one private anonymous mapping of this process, readable and writable, made by
//!    [`Region::new`] and unmapped only by its `Drop`.
#![allow(unsafe_code)]

use crate::Error;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A range of zeroed memory, in huge pages where the system gives them, left out of core dumps. Pages are taken when
/// they are first written.
#[derive(Debug)]
pub struct Region {
    base: *mut std::ffi::c_void,
    len: usize,
}

// SAFETY: the region owns its mapping (invariant 1); access follows the borrow rules of `Deref` and `DerefMut`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Huge pages are asked for in mappings of at least this size.
const HUGE_PAGE_BYTES: usize = 2 << 20;

impl Region {
    /// A region of `len` bytes, aligned to a page.
    pub fn new(len: usize) -> Result<Region, Error> {
        let len = len.max(1).next_multiple_of(if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 4096 });
        // SAFETY: a fresh mapping at an address of the system's choice replaces nothing.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|e| Error::Map { len_bytes: len, source: e.into() })?;
        let region = Region { base, len };
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontDump] {
            // Advice is a wish: a kernel without it works all the same.
            // SAFETY: invariant 1; neither advice changes contents.
            let _ = unsafe { madvise(region.base, region.len, advice) };
        }
        Ok(region)
    }
}

impl std::ops::Deref for Region {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: invariant 1; anonymous memory is initialized to zero.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len) }
    }
}

impl std::ops::DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: invariant 1, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.cast(), self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: invariant 1; no borrow outlives `self`.
        let _ = unsafe { munmap(self.base, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_zero_writable_and_at_least_as_long_as_asked() {
        for len in [0, 1, 4096, 5 << 20] {
            let mut region = Region::new(len).expect("a few MiB of memory");
            assert!(region.len() >= len && region.iter().all(|&b| b == 0));
            let last = region.len() - 1;
            region[last] = 7;
            assert_eq!(region[last], 7);
        }
    }

    #[test]
    fn more_than_the_address_space_is_an_error_with_the_number() {
        let error = Region::new(1 << 60).expect_err("no machine maps 2^60 bytes");
        assert!(error.to_string().contains(&(1usize << 60).to_string()), "{error}");
    }
}
