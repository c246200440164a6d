//! An arena of equal slots, whose content changes while others are read.
//!
//! A slot has a fixed number of parts, each with room for the largest thing that may come there, so that one part can be
//! read while another is still being filled. Who fills a part holds a [`Filling`], who reads it a [`Lease`].
//!
//! Invariants:
//! 1. `base` and `len_bytes` describe one private anonymous mapping, made by [`Slots::new`] and unmapped only by `Drop`.
//! 2. The state of a part is `EMPTY`, `FILLING`, or `FULL` plus the number of its leases. `FILLING` is entered from `EMPTY`
//!    or `FULL` without leases by one compare-exchange, and left only by the `Filling` (or the shrinking) that entered it:
//!    so there is one writer and no reader, or any number of readers and no writer.
//! 3. Parts do not overlap, and each lies in the mapping.
#![allow(unsafe_code)]

use crate::{Buffer, Error};
use rustix::mm::{Advice, MlockFlags};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

const EMPTY: u32 = 0;
const FULL: u32 = 1;
const FILLING: u32 = u32::MAX;

/// Parts begin at multiples of a cache line.
const PART_ALIGN_BYTES: usize = 64;

/// Equal slots in huge pages, locked where that is allowed.
#[derive(Debug)]
pub struct Slots {
    base: *mut c_void,
    len_bytes: usize,
    slot_bytes: usize,
    /// In a slot.
    parts: Vec<Range<usize>>,
    states: Box<[AtomicU32]>,
    locked: bool,
}

// SAFETY: access to the mapping follows invariant 2.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

/// The right to fill a part. Dropped without being finished, it leaves the part empty.
#[derive(Debug)]
#[must_use]
pub struct Filling<'s> {
    slots: &'s Slots,
    part: (usize, usize),
}

/// The right to read a part.
#[derive(Debug)]
#[must_use]
pub struct Lease<'s> {
    slots: &'s Slots,
    part: (usize, usize),
}

impl Slots {
    /// Bytes of a slot with such parts: what a grant for it must hold.
    pub fn slot_bytes(part_bytes: &[usize]) -> usize {
        let parts: usize = part_bytes.iter().map(|b| b.next_multiple_of(PART_ALIGN_BYTES)).sum();
        parts.next_multiple_of(rustix::param::page_size()).max(1)
    }

    /// An arena of `slots` slots, each with parts of so many bytes. Pages are taken when they are first written; the caller
    /// has been granted all of them before.
    pub fn new(slots: usize, part_bytes: &[usize]) -> Result<Slots, Error> {
        let slot_bytes = Slots::slot_bytes(part_bytes);
        let all = slots.saturating_mul(slot_bytes);
        let (base, len_bytes) = Buffer::new(all)?.into_raw();
        // SAFETY: invariant 1; locking on fault takes no memory.
        let locked = unsafe { rustix::mm::mlock_with(base, len_bytes, MlockFlags::ONFAULT) }.is_ok();
        let mut end = 0;
        let parts: Vec<Range<usize>> = part_bytes
            .iter()
            .map(|&bytes| {
                let start = end;
                end = (start + bytes).next_multiple_of(PART_ALIGN_BYTES);
                start..start + bytes
            })
            .collect();
        let states = (0..slots * parts.len()).map(|_| AtomicU32::new(EMPTY)).collect();
        Ok(Slots { base, len_bytes, slot_bytes, parts, states, locked })
    }

    /// Slots, those given back included.
    pub fn len(&self) -> usize {
        self.states.len() / self.parts.len().max(1)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Whether the system has promised to keep in memory what is written.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    fn state(&self, (slot, part): (usize, usize)) -> &AtomicU32 {
        assert!(part < self.parts.len(), "part {part} of {}", self.parts.len());
        &self.states[slot * self.parts.len() + part]
    }

    fn place(&self, (slot, part): (usize, usize)) -> *mut u8 {
        self.base.cast::<u8>().wrapping_add(slot * self.slot_bytes + self.parts[part].start)
    }

    fn enter(&self, part: (usize, usize)) -> bool {
        let state = self.state(part);
        [EMPTY, FULL]
            .iter()
            .any(|&from| state.compare_exchange(from, FILLING, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// The right to fill `part` of `slot`; `None` while it is read or filled.
    pub fn fill(&self, slot: usize, part: usize) -> Option<Filling<'_>> {
        self.enter((slot, part)).then(|| Filling { slots: self, part: (slot, part) })
    }

    /// The right to read `part` of `slot`; `None` unless it is filled.
    pub fn lease(&self, slot: usize, part: usize) -> Option<Lease<'_>> {
        let more = |state: u32| (state != EMPTY && state < FILLING - 1).then(|| state + 1);
        self.state((slot, part)).fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Lease { slots: self, part: (slot, part) })
    }

    /// Empties `slot`, unless a part of it is read or filled; tells whether it did.
    pub fn clear(&self, slot: usize) -> bool {
        let parts = || (0..self.parts.len()).map(|part| (slot, part));
        let entered: Vec<_> = parts().take_while(|&part| self.enter(part)).collect();
        // What was entered may have been full; a slot is cleared as a whole, and its content worthless without a part.
        entered.iter().for_each(|&part| self.state(part).store(EMPTY, Ordering::Release));
        entered.len() == self.parts.len()
    }

    /// Gives the memory of `slot` back, if nobody reads or fills it; the system takes it when the slot is filled again.
    pub fn give_back(&self, slot: usize) -> bool {
        let entered: Vec<_> = (0..self.parts.len()).map(|part| (slot, part)).take_while(|&p| self.enter(p)).collect();
        let all = entered.len() == self.parts.len();
        if all {
            let at = self.base.wrapping_byte_add(slot * self.slot_bytes);
            // SAFETY: whole pages of the mapping (invariants 1 and 3) that nobody sees (invariant 2). Pages that are locked
            // cannot be given back.
            unsafe {
                if self.locked {
                    let _ = rustix::mm::munlock(at, self.slot_bytes);
                }
                let _ = rustix::mm::madvise(at, self.slot_bytes, Advice::LinuxDontNeed);
            }
        }
        entered.iter().for_each(|&part| self.state(part).store(EMPTY, Ordering::Release));
        all
    }
}

impl Filling<'_> {
    /// The part is filled: it may be read from now on.
    pub fn finish(self) {
        self.slots.state(self.part).store(FULL, Ordering::Release);
        std::mem::forget(self);
    }
}

impl std::ops::Deref for Filling<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: invariants 1 to 3: this is the only writer, and there is no reader.
        unsafe { std::slice::from_raw_parts(self.slots.place(self.part), self.slots.parts[self.part.1].len()) }
    }
}

impl std::ops::DerefMut for Filling<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: invariants 1 to 3, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.slots.place(self.part), self.slots.parts[self.part.1].len()) }
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.slots.state(self.part).store(EMPTY, Ordering::Release);
    }
}

impl<'s> Lease<'s> {
    /// The part's bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: invariants 1 to 3: while this lease lives nobody writes.
        unsafe { std::slice::from_raw_parts(self.slots.place(self.part), self.slots.parts[self.part.1].len()) }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.slots.state(self.part).fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: invariant 1; leases and fillings borrow `self`.
        let _ = unsafe { rustix::mm::munmap(self.base, self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_a_part_has_one_writer_or_readers() {
        let slots = Slots::new(3, &[100, 64, 5000]).expect("a few pages");
        assert_eq!(slots.len(), 3);
        for slot in 0..3 {
            for part in 0..3 {
                assert!(slots.lease(slot, part).is_none(), "nothing is there yet");
                let mut filling = slots.fill(slot, part).expect("it is free");
                assert!(slots.fill(slot, part).is_none() && slots.lease(slot, part).is_none());
                filling.fill((10 * slot + part) as u8);
                filling.finish();
            }
        }
        for slot in 0..3 {
            for (part, len) in [100, 64, 5000].into_iter().enumerate() {
                let lease = slots.lease(slot, part).expect("it was filled");
                assert!(lease.bytes().len() == len && lease.bytes().iter().all(|&b| b == (10 * slot + part) as u8));
                assert_eq!(lease.bytes().as_ptr().addr() % 64, 0);
                let second = slots.lease(slot, part).expect("any number reads");
                drop(lease);
                assert!(slots.fill(slot, part).is_none() && !slots.clear(slot) && !slots.give_back(slot));
                drop(second);
                slots.fill(slot, part).expect("nobody reads it").finish();
            }
        }
    }

    #[test]
    fn a_part_that_was_not_finished_is_empty_again() {
        let slots = Slots::new(1, &[10]).expect("a page");
        slots.fill(0, 0).expect("it is free").finish();
        drop(slots.fill(0, 0).expect("nobody reads it"));
        assert!(slots.lease(0, 0).is_none());
    }

    #[test]
    fn memory_that_is_given_back_reads_as_zero_when_it_is_filled_again() {
        let slots = Slots::new(2, &[8192]).expect("a few pages");
        for slot in 0..2 {
            let mut filling = slots.fill(slot, 0).expect("it is free");
            filling.fill(7);
            filling.finish();
        }
        assert!(slots.give_back(1));
        assert!(slots.lease(1, 0).is_none());
        assert!(slots.fill(1, 0).expect("it is free").iter().all(|&b| b == 0), "the system took the pages");
        assert!(slots.lease(0, 0).expect("the other one stays").bytes().iter().all(|&b| b == 7));
    }
}
