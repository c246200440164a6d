//! The place of a model's weights: an address range that is filled unit by unit and never changes where it is filled.
//!
//! A unit (some MiB, whole pages) is filled in a write view of its own, a [`Staged`], and then put in its place in one
//! step, readable and no more. Until then its addresses have no memory behind them: touching them is a fault, which the
//! pager serves where userfaultfd is there, and which ends the process where it is not. Zeros are never seen.
//!
//! Invariants:
//! 1. `base` and `len_bytes` describe an address range of this process, made by [`Region::reserve`] and unmapped only by
//!    `Drop`; all mappings in it were put there by this module.
//! 2. Each unit is staged once (`staged`) and put in its place at most once, after which nothing writes to it: private
//!    memory is not writable any more and no other mapping of it exists; the write view of a file of huge pages is only
//!    reachable through the unit's `Staged`, which is gone.
//!    After [`Region::close`] nothing is put in place any more, so that a page that stands in for one that will never
//!    come is not replaced either.
//! 3. Memory behind the range that the borrower of [`Region::bytes`] sees is therefore immutable from the first moment at
//!    which it can be seen.
#![allow(unsafe_code)]

use crate::backing::{self, Backing, Choice};
use crate::buffer::{Buffer, HUGE_PAGE_BYTES, reserve};
use crate::sys::uffd::Uffd;
use crate::{Error, hugetlb::HugeFile};
use rustix::mm::{Advice, MlockFlags, MprotectFlags, MremapFlags, ProtFlags};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

/// An address range of a fixed length, filled unit by unit.
#[derive(Debug)]
pub struct Region {
    base: *mut c_void,
    len_bytes: usize,
    unit_bytes: usize,
    backing: Backing,
    huge_file: Option<HugeFile>,
    staged: Box<[AtomicBool]>,
    present: Box<[AtomicBool]>,
    pinned_bytes: AtomicUsize,
    closed: RwLock<bool>,
}

// SAFETY: access to the mapping follows invariants 2 and 3; everything else is atomic.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// The write view of one unit, zero at first. Dropped without being published, it leaves the unit missing for ever.
pub struct Staged<'r> {
    region: &'r Region,
    unit: usize,
    view: View<'r>,
}

enum View<'r> {
    Private(Buffer),
    Huge(&'r mut [u8]),
}

impl Region {
    /// Takes `len_bytes` of addresses, filled in units of `unit_bytes` (rounded up to whole pages), and makes sure of the
    /// memory where the backing knows beforehand. With [`Choice::Best`] the first backing that can hold it.
    pub fn reserve(len_bytes: usize, unit_bytes: usize, choice: Choice) -> Result<Region, Error> {
        let (backing, huge_file) = backing::choose(len_bytes, choice)?;
        let page_bytes = if huge_file.is_some() { HUGE_PAGE_BYTES } else { rustix::param::page_size() };
        let round = |n: usize| {
            n.max(1).checked_next_multiple_of(page_bytes).ok_or_else(|| Error::map(n, rustix::io::Errno::NOMEM))
        };
        let (len_bytes, unit_bytes) = (round(len_bytes)?, round(unit_bytes)?);
        let align_bytes = if len_bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { page_bytes };
        let base = reserve(len_bytes, align_bytes, ProtFlags::empty())?;
        let flags = || (0..len_bytes.div_ceil(unit_bytes)).map(|_| AtomicBool::new(false)).collect();
        Ok(Region {
            base,
            len_bytes,
            unit_bytes,
            backing,
            huge_file,
            staged: flags(),
            present: flags(),
            pinned_bytes: AtomicUsize::new(0),
            closed: RwLock::new(false),
        })
    }

    /// Bytes of the range: whole pages.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Units of the range.
    pub fn units(&self) -> usize {
        self.present.len()
    }

    /// What holds the memory.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Bytes that the system has promised not to take away.
    pub fn pinned_bytes(&self) -> usize {
        self.pinned_bytes.load(Ordering::Relaxed)
    }

    /// The place of `unit` in the range; the last one may be short.
    pub fn unit(&self, unit: usize) -> Range<usize> {
        let start = unit * self.unit_bytes;
        start..(start + self.unit_bytes).min(self.len_bytes)
    }

    /// The units that `range` lies in.
    pub fn units_of(&self, range: &Range<usize>) -> Range<usize> {
        let first = range.start / self.unit_bytes;
        if range.is_empty() { first..first } else { first..range.end.div_ceil(self.unit_bytes) }
    }

    /// Whether `unit` is filled.
    pub fn is_present(&self, unit: usize) -> bool {
        self.present[unit].load(Ordering::Acquire)
    }

    /// The bytes of `range`. Touching one that is missing waits for the pager, or ends the process where there is no
    /// userfaultfd: who does not want that asks the pager before.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len_bytes, "{range:?} of {} bytes", self.len_bytes);
        // SAFETY: invariants 1 and 3. What is missing faults before anything is seen.
        unsafe { std::slice::from_raw_parts(self.base.cast::<u8>().add(range.start), range.len()) }
    }

    /// The write view of `unit`; `None` if it was handed out before.
    pub fn stage(&self, unit: usize) -> Result<Option<Staged<'_>>, Error> {
        if self.staged[unit].swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        let place = self.unit(unit);
        let view = match &self.huge_file {
            // SAFETY: invariant 2: this unit's part of the write view is handed out here, once.
            Some(file) => View::Huge(unsafe { file.write_view(place)? }),
            None => View::Private(Buffer::with_pages(place.len(), self.backing != Backing::Base)?),
        };
        Ok(Some(Staged { region: self, unit, view }))
    }

    /// Nothing more is put in place, whoever still tries.
    pub(crate) fn close(&self) {
        *self.closed.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    fn publish(&self, unit: usize, view: View<'_>) -> Result<(), Error> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Ok(());
        }
        let place = self.unit(unit);
        let to = self.base.wrapping_byte_add(place.start);
        let failed = |e| Error::map(place.len(), e);
        match (view, &self.huge_file) {
            (View::Private(buffer), _) => {
                let (from, len) = buffer.into_raw();
                // SAFETY: `from` is ours alone and gone afterwards; `to` lies in the range (invariant 1) where nothing has
                // been seen yet (invariant 2).
                unsafe {
                    let moved = rustix::mm::mprotect(from, len, MprotectFlags::READ).and_then(|()| {
                        rustix::mm::mremap_fixed(from, len, place.len(), MremapFlags::MAYMOVE, to).map(drop)
                    });
                    if let Err(e) = moved {
                        let _ = rustix::mm::munmap(from, len);
                        return Err(failed(e));
                    }
                }
                self.pin(to, place.len());
            }
            (View::Huge(_), Some(file)) => {
                // SAFETY: `to` lies in the range and has not been seen (invariants 1 and 2).
                unsafe { file.map_read_only(place.clone(), to)? };
                self.pinned_bytes.fetch_add(place.len(), Ordering::Relaxed);
            }
            (View::Huge(_), None) => unreachable!("a huge view comes from a huge file"),
        }
        self.present[unit].store(true, Ordering::Release);
        Ok(())
    }

    /// Bytes of filled units that are in memory now, by the kernel's word. What is not pinned may be swapped or compressed.
    pub fn resident_bytes(&self) -> u64 {
        let page_bytes = rustix::param::page_size();
        let filled = (0..self.units()).filter(|&unit| self.is_present(unit)).map(|unit| self.unit(unit));
        filled.map(|place| self.resident_pages(place, page_bytes) * page_bytes as u64).sum()
    }

    fn resident_pages(&self, place: Range<usize>, page_bytes: usize) -> u64 {
        let mut pages = vec![0u8; place.len().div_ceil(page_bytes)];
        let at = self.base.wrapping_byte_add(place.start);
        // SAFETY: a part of the range (invariant 1), and `pages` has a byte for each page of it.
        let told = unsafe { libc::mincore(at, place.len(), pages.as_mut_ptr()) };
        if told == 0 { pages.iter().map(|&page| u64::from(page & 1)).sum() } else { 0 }
    }

    /// Locks memory where the backing says so. A limit that was there at the beginning may be used up by now; what is not
    /// locked is not counted.
    fn pin(&self, at: *mut c_void, len: usize) {
        // SAFETY: a part of the range that has just been filled (invariant 1).
        if self.backing.is_locked() && unsafe { rustix::mm::mlock_with(at, len, MlockFlags::empty()) }.is_ok() {
            self.pinned_bytes.fetch_add(len, Ordering::Relaxed);
        }
    }

    /// Makes missing pages wait at `uffd` instead of ending the process.
    pub(crate) fn arm(&self, uffd: &Uffd) -> rustix::io::Result<()> {
        uffd.register(self.base.addr(), self.len_bytes)?;
        // SAFETY: invariant 1; nothing is there yet.
        unsafe { rustix::mm::mprotect(self.base, self.len_bytes, MprotectFlags::READ) }
    }

    /// The opposite: whoever touches what is still missing does not live on.
    pub(crate) fn disarm(&self) {
        for unit in (0..self.units()).filter(|&unit| !self.is_present(unit)) {
            let place = self.unit(unit);
            // SAFETY: invariant 1; the unit is missing.
            let _ = unsafe {
                rustix::mm::mprotect(self.base.wrapping_byte_add(place.start), place.len(), MprotectFlags::empty())
            };
        }
    }

    /// First address; for the trap, which gets addresses.
    pub(crate) fn address(&self) -> usize {
        self.base.addr()
    }

    /// Once all is filled: no one can write to a file of huge pages any more, whatever descriptor they have. Private memory
    /// has no second view, and is read-only since it was published. Tells whether everything is in.
    pub fn seal(&self) -> Result<bool, Error> {
        if !(0..self.units()).all(|unit| self.is_present(unit)) {
            return Ok(false);
        }
        if let Some(file) = &self.huge_file {
            // SAFETY: invariant 2: all views are gone with their `Staged`.
            unsafe { file.seal()? };
        }
        Ok(true)
    }
}

impl std::ops::Deref for Staged<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.view {
            View::Private(buffer) => buffer,
            View::Huge(bytes) => bytes,
        }
    }
}

impl std::ops::DerefMut for Staged<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.view {
            View::Private(buffer) => buffer,
            View::Huge(bytes) => bytes,
        }
    }
}

impl Staged<'_> {
    /// Puts the unit in its place, for ever and read-only, unless the region was closed after an error.
    pub fn publish(self) -> Result<(), Error> {
        self.region.publish(self.unit, self.view)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: invariant 1; no borrow outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base, self.len_bytes) };
    }
}

/// Whether `len_bytes` may be locked: asks for it and takes the question back.
pub(crate) fn lockable(len_bytes: usize) -> bool {
    let Ok(base) = reserve(len_bytes.max(1), 1, ProtFlags::empty()) else { return false };
    // SAFETY: a mapping of our own that holds nothing; locking on fault takes no memory.
    unsafe {
        let _ = rustix::mm::madvise(base, len_bytes.max(1), Advice::LinuxDontDump);
        let locked = rustix::mm::mlock_with(base, len_bytes.max(1), MlockFlags::ONFAULT).is_ok();
        let _ = rustix::mm::munmap(base, len_bytes.max(1));
        locked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: usize = 2 << 20;

    /// Rights of the mapping at `address`, as /proc/self/maps has them.
    fn rights(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("our own mappings");
        let holds = |line: &&str| {
            let (start, end) = line.split_once(' ').and_then(|(range, _)| range.split_once('-')).expect("a range");
            let number = |hex| usize::from_str_radix(hex, 16).expect("an address");
            (number(start)..number(end)).contains(&address)
        };
        maps.lines().find(holds).and_then(|line| line.split(' ').nth(1)).expect("a mapping").to_owned()
    }

    #[test]
    fn units_have_no_rights_until_they_are_published_and_none_to_write_afterwards() {
        let mut sealed = 0;
        for found in backing::probe(2 * UNIT).into_iter().filter(|found| found.available) {
            let region = Region::reserve(2 * UNIT, UNIT, Choice::Only(found.backing)).expect("a few MiB");
            assert!(!region.seal().expect("nothing to seal yet"));
            for unit in 0..2 {
                assert!(rights(region.address() + region.unit(unit).start).starts_with("---"), "{found:?}");
                let mut staged = region.stage(unit).expect("memory").expect("the first time");
                assert!(region.stage(unit).expect("no matter").is_none(), "a unit is handed out once");
                staged.fill(7 + unit as u8);
                staged.publish().expect("a place");
                assert!(rights(region.address() + region.unit(unit).start).starts_with("r--"), "{found:?}");
            }
            assert_eq!(region.bytes(UNIT - 1..UNIT + 1), [7, 8]);
            assert!(region.seal().expect("everything is in"));
            assert_eq!(region.resident_bytes(), region.len_bytes() as u64, "{found:?}");
            if let Some(file) = &region.huge_file {
                assert!(file.is_sealed());
                sealed += 1;
            }
        }
        if sealed == 0 {
            eprintln!("skipped: {}", backing::probe(2 * UNIT)[0].reason);
        }
    }

    #[test]
    fn a_closed_region_takes_nothing_more() {
        let region = Region::reserve(2 * UNIT, UNIT, Choice::Only(Backing::Unpinned)).expect("a few MiB");
        let staged = region.stage(0).expect("memory").expect("the first time");
        region.close();
        staged.publish().expect("no error: no one waits for it");
        assert!(!region.is_present(0) && rights(region.address()).starts_with("---"));
    }
}
