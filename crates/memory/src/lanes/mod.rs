//! Many slices of files, read at once and handed over one by one as they come.
//!
//! A lane is a thread that keeps some reads in flight: by io_uring where the source is a file that is read directly and
//! the system has rings, else one read at a time. It begins its next read before it hands over what has come, so that the
//! device does not wait while the receiver works with the bytes; who asks for slices begins the first ones. What someone
//! waits for is read before what is only read ahead.

mod better;
mod probe;
mod ring;

pub use probe::{Probed, probe};

use crate::source::{ByteSource, ReadRoom};
use crate::sys::slice;
use crate::{Buffer, Error, HUGE_PAGE_BYTES};
use better::Better;
use ring::RingLane;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A range of a source that is wanted.
#[derive(Debug, Clone)]
pub struct Slice {
    /// Of what.
    pub source: Arc<dyn ByteSource>,
    /// Which bytes.
    pub range: Range<u64>,
    /// What the receiver knows it by.
    pub ticket: u64,
}

/// Gets what was read, on the lane's thread.
pub trait Receive: Send + Sync {
    /// The bytes of the slice with `ticket`, or why there are none. Called once for each slice.
    fn receive(&self, ticket: u64, bytes: Result<&[u8], Error>);
}

/// How to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LaneOptions {
    /// Threads.
    pub lanes: usize,
    /// Reads that each keeps in flight, where it has a ring.
    pub depth: usize,
    /// Read by io_uring, where the system can.
    pub ring: bool,
}

impl Default for LaneOptions {
    fn default() -> Self {
        Self { lanes: 2, depth: 1, ring: true }
    }
}

impl LaneOptions {
    /// Bytes of buffers for slices of at most `slice_bytes`.
    pub fn buffer_bytes(&self, slice_bytes: usize) -> usize {
        let rooms = if self.ring { self.depth.max(1) + 1 } else { 1 };
        self.lanes.max(1) * all_bytes(rooms, slice_bytes)
    }
}

/// Room for a slice and what a direct read takes around it.
fn room_bytes(slice_bytes: usize) -> usize {
    slice_bytes.next_multiple_of(ALIGN_BYTES) + ALIGN_BYTES
}

/// Bytes of a lane's buffer with room for `rooms` slices: whole huge pages, unless that were sixteen times too much. Reads
/// into small pages have a segment for each: a virtual drive gave 0.5 to 0.6 times as much by them.
fn all_bytes(rooms: usize, slice_bytes: usize) -> usize {
    let all = rooms * room_bytes(slice_bytes);
    if 16 * all >= HUGE_PAGE_BYTES { all.next_multiple_of(HUGE_PAGE_BYTES) } else { all }
}

/// A lane's buffer. Its pages are taken here: a virtual machine may give new ones at half a GB/s, so that the first reads would be
/// slower than the drive, and a probe of it would measure memory.
fn buffer(rooms: usize, slice_bytes: usize) -> Result<Buffer, Error> {
    Ok(Buffer::new(all_bytes(rooms, slice_bytes))?.touched())
}

/// Direct reads begin and end at multiples of this on most devices.
const ALIGN_BYTES: usize = 4096;

/// What was done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LaneStats {
    /// Slices read.
    pub slices: u64,
    /// Their bytes.
    pub slice_bytes: u64,
    /// Time in which at least one read was under way.
    pub busy: Duration,
}

/// Threads that read. Dropping it ends them, once the reads under way have come; what was not begun is forgotten.
pub struct Lanes {
    shared: Arc<Shared>,
    /// Lanes with a ring.
    rings: Vec<Arc<RingLane>>,
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lanes({:?})", self.shared.options)
    }
}

struct Shared {
    options: LaneOptions,
    receiver: Arc<dyn Receive>,
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Someone waits for these.
    wanted: VecDeque<Slice>,
    ahead: VecDeque<Slice>,
    stop: bool,
    in_flight: usize,
    /// When a lane was free first with nothing wanted, since something was.
    spare_since: Option<Instant>,
    busy_since: Option<Instant>,
    stats: LaneStats,
    /// With lines of buffers left in the caches, or given up.
    lines: Better,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.wanted.is_empty() && self.ahead.is_empty()
    }

    fn stats(&self) -> LaneStats {
        let under_way = self.busy_since.map_or(Duration::ZERO, |since| since.elapsed());
        LaneStats { busy: self.stats.busy + under_way, ..self.stats }
    }

    fn want<S: IntoIterator<Item = Slice>>(&mut self, slices: S) {
        self.wanted.extend(slices);
        if !self.wanted.is_empty() {
            self.spare_since = None;
        }
    }

    fn take(&mut self) -> Option<Slice> {
        if self.stop {
            return None;
        }
        let slice = self.wanted.pop_front().or_else(|| self.ahead.pop_front())?;
        self.in_flight += 1;
        self.busy_since.get_or_insert_with(Instant::now);
        Some(slice)
    }
}

impl Lanes {
    /// Begins, with buffers for slices of at most `slice_bytes`; what is longer is read all the same.
    pub fn start(options: LaneOptions, slice_bytes: usize, receiver: Arc<dyn Receive>) -> Result<Lanes, Error> {
        let shared = Arc::new(Shared { options, receiver, queue: Mutex::default(), work: Condvar::new() });
        let mut lanes = Lanes { shared, rings: Vec::new() };
        for index in 0..options.lanes.max(1) {
            let shared = Arc::clone(&lanes.shared);
            let ring = || RingLane::new(options.depth.max(1), slice_bytes).ok().map(Arc::new);
            let ring = options.ring.then(ring).flatten();
            let own = ring.clone();
            let lane = move || {
                // Where all processors compute, a lane would wait for the end of a slice, and the device with it. A wish.
                slice::shorten();
                match own {
                    Some(ring) => ring.run(&shared),
                    None => one_by_one(&shared, slice_bytes),
                }
            };
            let spawned = std::thread::Builder::new().name(format!("airs-lane-{index}")).spawn(lane);
            match spawned {
                Ok(_) => lanes.rings.extend(ring),
                Err(e) if index == 0 => return Err(Error::io("the thread that reads", e)),
                Err(_) => (),
            }
        }
        Ok(lanes)
    }

    /// Has `slices` read, in this order and before all that is only read ahead.
    pub fn want(&self, slices: impl IntoIterator<Item = Slice>) {
        self.shared.lock().want(slices);
        self.begin();
    }

    /// Has `slices` read when nothing else is wanted.
    pub fn read_ahead(&self, slices: impl IntoIterator<Item = Slice>) {
        self.shared.lock().ahead.extend(slices);
        self.begin();
    }

    /// Begins what there are free buffers for, on this thread, and wakes the lanes: they would have to wait for a processor first
    /// where all are computing, and the device with them.
    fn begin(&self) {
        if self.shared.lock().is_empty() {
            return;
        }
        while self.rings.iter().filter(|ring| ring.begin_one(&self.shared)).count() > 0 {}
        // What was begun is seen by a lane that is about to sleep.
        drop(self.shared.lock());
        self.shared.work.notify_all();
    }

    /// Someone waits now for those of the slices read ahead whose ticket `is_wanted`.
    pub fn hurry(&self, mut is_wanted: impl FnMut(u64) -> bool) {
        let mut queue = self.shared.lock();
        let (wanted, ahead) = std::mem::take(&mut queue.ahead).into_iter().partition(|s: &Slice| is_wanted(s.ticket));
        queue.ahead = ahead;
        queue.want::<VecDeque<Slice>>(wanted);
    }

    /// Of the slices read ahead whose ticket is `in_vain`, those that were not begun are not read any more; which these are.
    pub fn forget(&self, mut in_vain: impl FnMut(u64) -> bool) -> Vec<Slice> {
        let mut queue = self.shared.lock();
        let (forgotten, ahead): (Vec<Slice>, Vec<Slice>) =
            std::mem::take(&mut queue.ahead).into_iter().partition(|s| in_vain(s.ticket));
        queue.ahead = ahead.into();
        forgotten
    }

    /// What was done so far.
    pub fn stats(&self) -> LaneStats {
        self.shared.lock().stats()
    }

    /// Since when there has been a free lane and nothing that is wanted, if there has.
    pub fn spare_since(&self) -> Option<Instant> {
        self.shared.lock().spare_since
    }

    /// How it reads.
    pub fn options(&self) -> LaneOptions {
        self.shared.options
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    /// The queue is consistent between its methods, whatever panicked elsewhere.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is something in the queue, or `is_busy`; tells whether it goes on.
    fn wait(&self, is_busy: impl Fn() -> bool) -> bool {
        let idle = |queue: &mut Queue| !queue.stop && queue.is_empty() && !is_busy();
        let queue = self.work.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        !queue.stop || is_busy()
    }

    /// Whether a buffer's cache lines are to be given up: if that seems to be faster, and more is to be read at once. Else other
    /// work has taken their place before the next read comes.
    fn gives_lines_up(&self) -> bool {
        let queue = self.lock();
        queue.lines.is_second() && !queue.is_empty()
    }

    /// A read has ended.
    fn ended(&self, slice: &Slice) {
        let mut queue = self.lock();
        queue.in_flight -= 1;
        if queue.wanted.is_empty() {
            queue.spare_since.get_or_insert_with(Instant::now);
        }
        queue.stats.slices += 1;
        queue.stats.slice_bytes += slice.range.end - slice.range.start;
        if queue.in_flight == 0
            && let Some(since) = queue.busy_since.take()
        {
            queue.stats.busy += since.elapsed();
        }
        let now = queue.stats();
        queue.lines.read(now);
    }

    /// Hands over what has come. A bug in the receiver must not leave anyone waiting.
    fn hand_over(&self, slice: &Slice, bytes: Result<&[u8], Error>) {
        if let Err(what) = crate::caught(|| self.receiver.receive(slice.ticket, bytes)) {
            self.receiver.receive(slice.ticket, Err(Error::bug(slice.source.name(), slice.range.start, what)));
        }
    }
}

/// A lane without a ring.
fn one_by_one(shared: &Shared, slice_bytes: usize) {
    // Without memory for it, each read is told that there is none.
    let mut room = buffer(1, slice_bytes).map_or_else(|_| ReadRoom::new(false), ReadRoom::from);
    while shared.wait(|| false) {
        let Some(slice) = shared.lock().take() else { continue };
        let read = read(&slice, &mut room);
        shared.ended(&slice);
        shared.hand_over(&slice, read.map(|place| &room.bytes()[place]));
        if shared.gives_lines_up() {
            room.give_up();
        }
    }
}

/// Reads a slice as its source does it.
fn read(slice: &Slice, room: &mut ReadRoom) -> Result<Range<usize>, Error> {
    let range = std::slice::from_ref(&slice.range);
    let read = crate::caught(|| slice.source.read(range, room));
    let bug = |what| Err(Error::bug(slice.source.name(), slice.range.start, what));
    let places = read.unwrap_or_else(bug)?;
    Ok(places.into_iter().next().unwrap_or(0..0))
}
