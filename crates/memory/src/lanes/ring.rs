//! A lane whose reads are in flight beside its work.

use super::{Shared, Slice, buffer, read, room_bytes};
use crate::source::ReadRoom;
use crate::sys::lines;
use crate::sys::ring::Flights;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a buffer is used for.
#[derive(Debug, Default)]
enum Use {
    #[default]
    Idle,
    /// The system fills it.
    Flying(Slice),
    /// The lane has to read it, for the ring cannot.
    Own(Slice),
    /// It is being handed over.
    Landed,
}

/// Any thread begins reads, the lane's own ends them.
pub(super) struct RingLane {
    flights: Flights,
    /// Reads in flight at most; there is one more buffer, for what is handed over.
    depth: usize,
    uses: Mutex<Vec<Use>>,
    /// Reads that are begun and have not ended.
    begun: AtomicUsize,
}

impl RingLane {
    /// A lane for slices of at most `slice_bytes`, if there is a ring for it.
    pub(super) fn new(depth: usize, slice_bytes: usize) -> io::Result<RingLane> {
        let all = buffer(depth + 1, slice_bytes).map_err(io::Error::other)?;
        let flights = Flights::new(all.cut(depth + 1, room_bytes(slice_bytes)))?;
        let uses = Mutex::new((0..flights.len()).map(|_| Use::Idle).collect());
        Ok(RingLane { flights, depth, uses, begun: AtomicUsize::new(0) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Use>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next read, if fewer than enough are in flight; tells whether it did.
    pub(super) fn begin_one(&self, shared: &Shared) -> bool {
        let mut uses = self.lock();
        let idle = uses.iter().position(|u| matches!(u, Use::Idle));
        let (Some(index), true) = (idle, self.begun.load(Ordering::Relaxed) < self.depth) else { return false };
        let Some(slice) = shared.lock().take() else { return false };
        self.begun.fetch_add(1, Ordering::Release);
        uses[index] = if self.begin(index, &slice) { Use::Flying(slice) } else { Use::Own(slice) };
        true
    }

    /// Begins to read `slice` into buffer `index`, if it is read past the page cache and fits.
    fn begin(&self, index: usize, slice: &Slice) -> bool {
        let Some((file, wide)) = slice.source.as_file().and_then(|file| file.begin_direct(&slice.range)) else {
            return false;
        };
        self.flights.begin(index, file, wide)
    }

    /// Works until it is told to stop and what is in flight has come.
    pub(super) fn run(&self, shared: &Shared) {
        let mut room = ReadRoom::new(false);
        while shared.wait(|| self.begun.load(Ordering::Acquire) > 0) {
            while self.begin_one(shared) {}
            if let Some((index, slice)) = self.land(|u| matches!(u, Use::Own(_))) {
                let read = read(&slice, &mut room);
                shared.ended(&slice);
                shared.hand_over(&slice, read.map(|place| &room.bytes()[place]));
                self.lock()[index] = Use::Idle;
                continue;
            }
            let done = self.flights.wait();
            let landed: Vec<_> = done.into_iter().filter_map(|(i, got)| Some((i, self.land_at(i)?, got))).collect();
            landed.iter().for_each(|(_, slice, _)| shared.ended(slice));
            for (index, slice, got) in landed {
                // The device first.
                while self.begin_one(shared) {}
                self.hand_over(shared, index, &slice, got, &mut room);
                self.lock()[index] = Use::Idle;
            }
        }
    }

    /// Takes a slice whose buffer `is_it`.
    fn land(&self, is_it: impl Fn(&Use) -> bool) -> Option<(usize, Slice)> {
        let index = self.lock().iter().position(is_it)?;
        Some((index, self.land_at(index)?))
    }

    fn land_at(&self, index: usize) -> Option<Slice> {
        match std::mem::replace(&mut self.lock()[index], Use::Landed) {
            Use::Flying(slice) | Use::Own(slice) => {
                self.begun.fetch_sub(1, Ordering::Release);
                Some(slice)
            }
            Use::Idle | Use::Landed => None,
        }
    }

    fn hand_over(&self, shared: &Shared, index: usize, slice: &Slice, got: io::Result<usize>, room: &mut ReadRoom) {
        let Some(file) = slice.source.as_file() else { return };
        // The system gives up what a thread has begun when that ends.
        if got.as_ref().is_err_and(|e| e.raw_os_error() == Some(rustix::io::Errno::CANCELED.raw_os_error())) {
            let read = read(slice, room);
            return shared.hand_over(slice, read.map(|place| &room.bytes()[place]));
        }
        let mut buffer = self.flights.buffer(index);
        let read = file.end_direct(&slice.range, &mut buffer, got);
        shared.hand_over(slice, read.map(|place| &buffer[place]));
        if shared.gives_lines_up() {
            lines::give_up(&buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LaneOptions, Receive};
    use super::*;
    use crate::Error;
    use crate::source::{FileSource, ReadOptions};
    use rustix::io::Errno;
    use std::sync::Arc;

    #[derive(Default)]
    struct Received(Mutex<Vec<Result<Vec<u8>, String>>>);

    impl Receive for Received {
        fn receive(&self, _: u64, bytes: Result<&[u8], Error>) {
            self.0.lock().expect("nobody panicked").push(bytes.map(<[u8]>::to_vec).map_err(|e| e.to_string()));
        }
    }

    #[test]
    fn a_read_whose_thread_ended_is_done_by_the_lane_and_one_that_failed_is_told() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let bytes: Vec<u8> = (0..20_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(file.path(), &bytes).expect("it is written");
        let source = Arc::new(FileSource::open(file.path(), ReadOptions::default()).expect("it opens"));
        let slice = Slice { source, range: 5_000..15_000, ticket: 3 };
        let received = Arc::new(Received::default());
        let (receiver, options) = (Arc::clone(&received) as _, LaneOptions::default());
        let shared = Shared { options, receiver, queue: Mutex::default(), work: Default::default() };
        let Ok(lane) = RingLane::new(1, 16_384).inspect_err(|e| eprintln!("not tested: no io_uring here: {e}")) else {
            return;
        };
        let mut room = ReadRoom::new(false);
        for error in [Errno::CANCELED, Errno::IO] {
            lane.hand_over(&shared, 0, &slice, Err(error.into()), &mut room);
        }
        let received = received.0.lock().expect("nobody panicked");
        assert_eq!(received[0].as_deref(), Ok(&bytes[5_000..15_000]));
        assert!(received.len() == 2 && received[1].is_err(), "{:?}", received[1]);
    }
}
