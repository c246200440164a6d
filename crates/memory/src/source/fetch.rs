//! Reads for someone who waits, and who may be told to wait no longer.
//!
//! The read itself may hang in the system for as long as a device or a server likes, so it is done by a thread that nobody
//! needs to wait for. A thread that hangs is left alone: the next fetch gets another.

use super::{ByteSource, ReadRoom};
use crate::Error;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Threads that may hang at once; a fetch beyond that waits until one is free.
const THREADS_MAX: usize = 8;

/// Fetches ranges of one source.
#[derive(Debug)]
pub struct Fetcher {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    source: Arc<dyn ByteSource>,
    state: Mutex<State>,
    /// There is something to read, or nothing more ever.
    work: Condvar,
    /// There is a result or an interruption.
    done: Condvar,
}

type Fetched = Result<Vec<Arc<[u8]>>, Error>;

#[derive(Debug)]
struct State {
    jobs: VecDeque<(u64, Vec<Range<u64>>)>,
    /// Jobs that someone waits for.
    wanted: BTreeSet<u64>,
    results: HashMap<u64, Fetched>,
    last: u64,
    threads: usize,
    idle: usize,
    interrupts: u64,
    /// When bytes last came.
    moved: Instant,
    stop: bool,
}

impl Fetcher {
    /// A fetcher of `source`. Its first thread begins with the first fetch.
    pub fn new(source: Arc<dyn ByteSource>) -> Fetcher {
        let state = State {
            jobs: VecDeque::new(),
            wanted: BTreeSet::new(),
            results: HashMap::new(),
            last: 0,
            threads: 0,
            idle: 0,
            interrupts: 0,
            moved: Instant::now(),
            stop: false,
        };
        let shared = Shared { source, state: Mutex::new(state), work: Condvar::new(), done: Condvar::new() };
        Fetcher { shared: Arc::new(shared) }
    }

    /// The bytes of `ranges`, in order. Errors: the source's; [`Error::Interrupted`] after [`Fetcher::interrupt`].
    pub fn fetch(&self, ranges: Vec<Range<u64>>) -> Fetched {
        let shared = &self.shared;
        let (wanted_bytes, begin) = (ranges.iter().map(|r| r.end - r.start).sum(), Instant::now());
        let mut state = shared.lock();
        let interrupts = state.interrupts;
        state.last += 1;
        let job = state.last;
        state.jobs.push_back((job, ranges));
        state.wanted.insert(job);
        if state.jobs.len() > state.idle && state.threads < THREADS_MAX {
            match self.spawn() {
                Ok(()) => state.threads += 1,
                // One that is there will come to it.
                Err(_) if state.threads > 0 => {}
                Err(e) => {
                    state.forget(job);
                    return Err(Error::io("the thread that fetches", e));
                }
            }
        }
        shared.work.notify_one();
        loop {
            if let Some(result) = state.results.remove(&job) {
                state.wanted.remove(&job);
                return result;
            }
            if state.interrupts != interrupts {
                state.forget(job);
                return Err(Error::Interrupted { wanted_bytes, still: still_for(begin, state.moved) });
            }
            state = shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn spawn(&self) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new().name("airs-fetch".to_owned()).spawn(move || shared.run()).map(drop)
    }

    /// Ends the fetches that are under way with an error. Later ones wait again.
    pub fn interrupt(&self) {
        self.shared.lock().interrupts += 1;
        self.shared.done.notify_all();
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
    }
}

/// How long no byte has moved for someone who began to wait at `begin`.
pub(crate) fn still_for(begin: Instant, moved: Instant) -> Duration {
    begin.max(moved).elapsed()
}

impl State {
    /// Nobody waits for `job` any more.
    fn forget(&mut self, job: u64) {
        self.wanted.remove(&job);
        self.jobs.retain(|(queued, _)| *queued != job);
    }
}

impl Shared {
    /// The state is consistent between its changes, whatever panicked elsewhere.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut room = ReadRoom::new(true);
        let mut state = self.lock();
        while !state.stop {
            let Some((job, ranges)) = state.jobs.pop_front() else {
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            drop(state);
            let result = crate::caught(|| self.read(&ranges, &mut room)).unwrap_or_else(|what| {
                let at_bytes = ranges.first().map_or(0, |range| range.start);
                Err(Error::Fetch { path: self.source.name().to_owned(), at_bytes, what })
            });
            state = self.lock();
            state.moved = Instant::now();
            if state.wanted.contains(&job) {
                state.results.insert(job, result);
                self.done.notify_all();
            }
        }
    }

    fn read(&self, ranges: &[Range<u64>], room: &mut ReadRoom) -> Fetched {
        let places = self.source.read(ranges, room)?;
        Ok(places.into_iter().map(|place| room.bytes()[place].into()).collect())
    }
}
