//! A memory file in huge pages of the pool, with a write view for the loader and read-only mappings for everyone else.
//!
//! Invariants:
//! 1. `base` and `len_bytes` describe the only writable mapping of `file`; it is unmapped by [`HugeFile::seal`] or `Drop`,
//!    whichever comes first (`open` says which).
#![allow(unsafe_code)]

use crate::Error;
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug)]
pub(crate) struct HugeFile {
    file: OwnedFd,
    /// The same file opened for reading: what is mapped through it can never be made writable.
    reader: OwnedFd,
    base: *mut c_void,
    len_bytes: usize,
    open: AtomicBool,
}

impl HugeFile {
    /// A file of `len_bytes`, whole huge pages, which are set aside for it.
    pub(crate) fn new(len_bytes: usize) -> rustix::io::Result<HugeFile> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = rustix::fs::memfd_create("airs-weights", flags)?;
        rustix::fs::ftruncate(&file, len_bytes as u64)?;
        let path = format!("/proc/self/fd/{}", rustix::fd::AsRawFd::as_raw_fd(&file));
        let reader = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        // Mapping it sets the pages aside, or fails: a page that is missing later would be a SIGBUS.
        // SAFETY: a fresh mapping at an address of the system's choice replaces nothing.
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), len_bytes, protection, MapFlags::SHARED, &file, 0)
        }?;
        let file = HugeFile { file, reader, base, len_bytes, open: AtomicBool::new(true) };
        // SAFETY: invariant 1; the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(base, len_bytes, Advice::LinuxDontDump) };
        Ok(file)
    }

    /// The bytes of `place`, to be written.
    ///
    /// # Safety
    /// The caller hands out each byte once, and is done with it before [`HugeFile::seal`].
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn write_view(&self, place: Range<usize>) -> Result<&mut [u8], Error> {
        // A control group may still refuse pages that were set aside; better here than by a signal.
        rustix::fs::fallocate(&self.file, FallocateFlags::empty(), place.start as u64, place.len() as u64)
            .map_err(|e| Error::map(place.len(), e))?;
        // SAFETY: invariant 1, and the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.base.cast::<u8>().add(place.start), place.len()) })
    }

    /// Maps `place` at `to`, read-only.
    ///
    /// # Safety
    /// The caller owns the addresses at `to`, and no one has seen anything there.
    pub(crate) unsafe fn map_read_only(&self, place: Range<usize>, to: *mut c_void) -> Result<(), Error> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
        // SAFETY: the caller's promise.
        unsafe {
            rustix::mm::mmap(to, place.len(), ProtFlags::READ, flags, &self.reader, place.start as u64)
                .map_err(|e| Error::map(place.len(), e))?;
            let _ = rustix::mm::madvise(to, place.len(), Advice::LinuxDontDump);
        }
        Ok(())
    }

    /// Gives the write view up and has the kernel refuse any other.
    ///
    /// # Safety
    /// No borrow from [`HugeFile::write_view`] is left.
    pub(crate) unsafe fn seal(&self) -> Result<(), Error> {
        self.unmap();
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&self.file, seals).map_err(|e| Error::map(self.len_bytes, e))
    }

    fn unmap(&self) {
        if self.open.swap(false, Ordering::AcqRel) {
            // SAFETY: invariant 1.
            let _ = unsafe { rustix::mm::munmap(self.base, self.len_bytes) };
        }
    }

    /// Whether the kernel refuses to write.
    #[cfg(test)]
    pub(crate) fn is_sealed(&self) -> bool {
        rustix::fs::fcntl_get_seals(&self.file).is_ok_and(|seals| seals.contains(SealFlags::WRITE))
    }
}

impl Drop for HugeFile {
    fn drop(&mut self) {
        self.unmap();
    }
}
