//! Fills a region from its sources, in the order in which it will be used, while it is used.
//!
//! The region is cut into *extents* (where bytes come from and how they are changed on the way) and, for those who wait,
//! into *stages*: ranges that are used one after the other. Reader threads take unit after unit: first those that someone
//! waits for, then those ahead of the stage in use, then, unless the window forbids it, all others. What they read they
//! hand through the extent's [`Transcode`] into the unit, so there is no second copy of anything.
//!
//! An error is final: what is missing then stays missing, everyone who waits for it gets the error, and the rest of the
//! region stays usable. There is no time limit: a source that stalls is waited for, until someone interrupts the wait.

mod queue;
mod trap;
mod worker;

pub use queue::Window;

use crate::source::{ByteSource, still_for};
use crate::{Error, Region};
use queue::Queue;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How bytes of a source become bytes of an extent. `part` is a range of the extent, from its start.
pub trait Transcode: Send + Sync {
    /// The bytes of the source that `part` is made of.
    fn source_range(&self, part: Range<usize>) -> Range<u64>;

    /// Makes `part` out of them. `out` is as long as `part`, and zero.
    fn write(&self, part: Range<usize>, source: &[u8], out: &mut [u8]);
}

/// A range of the region and where its bytes come from.
#[derive(Clone)]
pub struct Extent {
    /// In the region. Extents do not overlap; what none covers is zero.
    pub place: Range<usize>,
    /// Where the bytes come from.
    pub source: Arc<dyn ByteSource>,
    /// What becomes of them.
    pub transcode: Arc<dyn Transcode>,
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extent({:?} of {})", self.place, self.source.name())
    }
}

/// How to fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// How far to read ahead.
    pub window: Window,
    /// Serve touches of what is missing, where the system can (userfaultfd).
    pub trap: bool,
    /// Read by io_uring, where the system can.
    pub ring: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { window: Window::All, trap: true, ring: true }
    }
}

/// What was done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Bytes read from the sources, those included that were read twice.
    pub read_bytes: u64,
    /// Bytes of the region that are filled, of how many.
    pub present_bytes: u64,
    /// Bytes of the region.
    pub total_bytes: u64,
    /// Calls of [`Pager::ensure`] that had to wait.
    pub waits: u64,
    /// Time spent in them.
    pub waited: Duration,
    /// Touches of missing memory that were served.
    pub faults: u64,
    /// Whether such touches are served; else they end the process.
    pub is_trapped: bool,
}

/// Fills one region. Dropping it stops the filling; a reader that is stuck in its source ends when the source lets it.
#[derive(Debug)]
pub struct Pager {
    shared: Arc<Shared>,
}

struct Shared {
    region: Arc<Region>,
    /// By place.
    extents: Vec<Extent>,
    options: Options,
    queue: Mutex<Queue>,
    /// A unit was filled, or there is an error or an interruption.
    filled: Condvar,
    /// There may be something to read.
    work: Condvar,
    /// The same for the thread that serves the trap, which listens to descriptors.
    signal: Option<OwnedFd>,
    read_bytes: AtomicU64,
    present_bytes: AtomicU64,
    waits: AtomicU64,
    waited_ns: AtomicU64,
    faults: AtomicU64,
    /// Has the thread that serves the trap end as a bug would have it.
    #[cfg(test)]
    trap_dies: std::sync::atomic::AtomicBool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} extents of {:?}", self.extents.len(), self.region)
    }
}

impl Pager {
    /// Begins to fill `region`. `stages` are ranges of it in the order of use.
    ///
    /// # Panics
    /// If an extent or a stage lies outside the region, or two extents overlap.
    pub fn start(region: Arc<Region>, mut extents: Vec<Extent>, stages: &[Range<usize>], options: Options) -> Pager {
        extents.sort_by_key(|e| e.place.start);
        assert!(extents.windows(2).all(|e| e[0].place.end <= e[1].place.start), "extents overlap");
        let ends = extents.iter().map(|e| e.place.end).chain(stages.iter().map(|s| s.end));
        assert!(ends.max().unwrap_or(0) <= region.len_bytes(), "extents and stages lie in the region");
        let stages = stages.iter().map(|stage| region.units_of(stage)).collect();
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok().filter(|_| options.trap);
        let trap = signal.as_ref().and_then(|_| trap::Trap::set(&region));
        let signal = signal.filter(|_| trap.is_some());
        let readers = extents.iter().map(|e| e.source.readers()).min().unwrap_or(1).max(1);
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::new(region.units(), stages, options.window)),
            region,
            extents,
            options,
            filled: Condvar::new(),
            work: Condvar::new(),
            signal,
            read_bytes: AtomicU64::new(0),
            present_bytes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            #[cfg(test)]
            trap_dies: Default::default(),
        });
        if let Some(trap) = trap {
            trap.serve(Arc::clone(&shared));
        }
        for i in 0..readers {
            worker::start(Arc::clone(&shared), i);
        }
        Pager { shared }
    }

    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.shared.region
    }

    /// Tells that `stage` is in use: what comes behind it is read ahead.
    pub fn advance(&self, stage: usize) {
        let shared = &*self.shared;
        let mut queue = shared.lock();
        if queue.advance(stage) {
            shared.work.notify_all();
        }
    }

    /// From now on nothing is read before someone waits for it. Gives the bytes that are still missing.
    pub fn stop_ahead(&self) -> u64 {
        self.shared.lock().stop_ahead();
        let stats = self.stats();
        stats.total_bytes - stats.present_bytes
    }

    /// Returns when all of `range` is filled, which is read before anything that no one waits for. Errors: what went wrong
    /// with a unit of it; [`Error::Interrupted`] after [`Pager::interrupt`].
    pub fn ensure(&self, range: Range<usize>) -> Result<(), Error> {
        let shared = &*self.shared;
        let units = shared.region.units_of(&range);
        if units.clone().all(|unit| shared.region.is_present(unit)) {
            return Ok(());
        }
        let begin = Instant::now();
        let mut queue = shared.lock();
        let interrupts = queue.interrupts;
        queue.want(units.clone());
        shared.work.notify_all();
        shared.waits.fetch_add(1, Ordering::Relaxed);
        let result = loop {
            let missing: Vec<usize> = units.clone().filter(|&unit| !shared.region.is_present(unit)).collect();
            if missing.is_empty() {
                break Ok(());
            }
            if let Some(error) = &queue.failure {
                break Err(error.clone());
            }
            if queue.interrupts != interrupts || queue.stop {
                let wanted_bytes = missing.iter().map(|&unit| shared.region.unit(unit).len() as u64).sum();
                break Err(Error::Interrupted { wanted_bytes, still: still_for(begin, queue.moved) });
            }
            queue = shared.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        drop(queue);
        shared.waited_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    /// Whether all of `range` is filled.
    pub fn is_present(&self, range: Range<usize>) -> bool {
        self.shared.region.units_of(&range).all(|unit| self.shared.region.is_present(unit))
    }

    /// Ends the waits that are under way with an error. Later ones wait again.
    pub fn interrupt(&self) {
        self.shared.lock().interrupts += 1;
        self.shared.filled.notify_all();
    }

    /// The error that ended the filling, if one did.
    pub fn failure(&self) -> Option<Error> {
        self.shared.lock().failure.clone()
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let s = &*self.shared;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            read_bytes: get(&s.read_bytes),
            present_bytes: get(&s.present_bytes),
            total_bytes: s.region.len_bytes() as u64,
            waits: get(&s.waits),
            waited: Duration::from_nanos(get(&s.waited_ns)),
            faults: get(&s.faults),
            is_trapped: s.signal.is_some(),
        }
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.shared.region.close();
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        self.shared.filled.notify_all();
        self.shared.ring_bell();
    }
}

impl Shared {
    /// The queue is consistent between its methods, whatever panicked elsewhere.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread that serves the trap.
    fn ring_bell(&self) {
        if let Some(signal) = &self.signal {
            let _ = rustix::io::write(signal.as_fd(), &1u64.to_ne_bytes());
        }
    }

    /// Ends the filling.
    fn fail(&self, error: Error) {
        self.region.close();
        self.lock().failure.get_or_insert(error);
        self.filled.notify_all();
        self.work.notify_all();
        self.ring_bell();
    }
}
