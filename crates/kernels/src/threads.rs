//! A fork-join pool in which work is taken, not dealt out.
//!
//! Each thread begins at a place of its own and takes the tasks behind it in order, so that it reads weights as one stream
//! (two threads that took turns read 20-30 % slower than one alone); out of tasks, it takes those of the others.
//!
//! The caller of [`Pool::run`] works too. Helpers spin for a short while between regions, then park. A helper that the
//! system has descheduled is not waited for: a region ends when all its tasks are done, and a helper that never entered
//! it has nothing to finish. One that was descheduled in the middle of a task is brought to the processor of whoever waits
//! for it (see [`Placement`]). So a busy neighbour on one core costs its share of that core and no more.
//!
//! Invariants:
//! 1. `state` is `epoch << 32 | CLOSED | helpers inside`. A helper enters by raising the count in a compare-exchange that
//!    requires an open region; the caller closes the region and waits for the count to be 0 before `run` returns.
//!    So while a helper is inside, the caller's stack frame, and with it the job, is alive.
//! 2. `job` is written only by the caller of `run`, which holds `&mut Pool`, while the region is closed and empty.
//! 3. A region hands each task index out once, and the cells of different indices do not overlap.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

const CLOSED: u64 = 1 << 31;
const COUNT: u64 = CLOSED - 1;
/// Looks at the state before a thread parks: some tens of microseconds, longer than the serial parts of a step.
const SPINS: u32 = 4_000;

/// How long a wait is before it is asked again whether the others still have processors.
const WAIT: Duration = Duration::from_micros(500);

/// Where the threads of a pool run.
///
/// A thread that is descheduled for a neighbour in the middle of a task keeps all others waiting for some milliseconds, as
/// long as the neighbour's turn takes: they have nothing more to do, and their processors are idle. So the one that waits brings it
/// to its own, and a helper is sent back when the region ends: on one processor with the caller it would be of no use.
pub trait Placement: Sync {
    /// The calling thread, by a number.
    fn thread(&self) -> i32;
    /// The calling thread's processor, by a number.
    fn processor(&self) -> usize;
    /// If `thread` has no processor, brings it to the calling thread's. Whether it did.
    fn bring(&self, thread: i32) -> bool;
    /// Moves `thread`.
    fn send(&self, thread: i32, processor: usize);
}

/// Threads stay where the system puts them.
struct Anywhere;

impl Placement for Anywhere {
    fn thread(&self) -> i32 {
        0
    }
    fn processor(&self) -> usize {
        0
    }
    fn bring(&self, _: i32) -> bool {
        false
    }
    fn send(&self, _: i32, _: usize) {}
}

/// A value with a cache line of its own.
#[repr(align(128))]
struct Line<T>(T);

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    state: AtomicU64,
    /// Next task of each thread's own stretch.
    next: Vec<Line<AtomicUsize>>,
    tasks: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
    /// A task panicked in a helper; the caller panics in turn.
    panicked: AtomicBool,
    caller: UnsafeCell<Option<Thread>>,
    caller_parked: AtomicBool,
    /// The thread that called, and its processor then.
    caller_thread: AtomicI32,
    caller_processor: AtomicUsize,
    helpers: Vec<Helper>,
    placement: &'static dyn Placement,
}

#[derive(Default)]
struct Helper {
    parked: AtomicBool,
    thread: AtomicI32,
    /// The last processor on which it was without the caller.
    processor: AtomicUsize,
    /// In a region.
    inside: AtomicBool,
    /// It was brought to the caller's processor.
    brought: AtomicBool,
}

// SAFETY: `job` and `caller` are written under invariant 2 and read by helpers that are inside (invariant 1).
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` is dead outside `run`.
unsafe impl Send for Shared {}

/// A pool of threads, the caller's included.
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    busy: Duration,
}

impl Pool {
    /// A pool in which `threads` threads work, the caller's included (at least 1).
    pub fn new(threads: usize) -> Pool {
        Pool::placed(threads, &Anywhere)
    }

    /// As [`Pool::new`]; `placement` says where threads run, and moves them.
    pub fn placed(threads: usize, placement: &'static dyn Placement) -> Pool {
        let helpers = threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(CLOSED),
            next: (0..=helpers).map(|_| Line(AtomicUsize::new(0))).collect(),
            tasks: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            caller: UnsafeCell::new(None),
            caller_parked: AtomicBool::new(false),
            caller_thread: AtomicI32::new(0),
            caller_processor: AtomicUsize::new(0),
            helpers: (0..helpers).map(|_| Helper::default()).collect(),
            placement,
        });
        let helpers = (0..helpers)
            .filter_map(|i| {
                let shared = Arc::clone(&shared);
                // A system that gives no more threads gets by with fewer: the results are the same.
                std::thread::Builder::new().name(format!("airs-{}", i + 1)).spawn(move || help(&shared, i)).ok()
            })
            .collect();
        Pool { shared, helpers, busy: Duration::ZERO }
    }

    /// Threads that work, the caller's included.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Time that was spent in regions so far, from their beginnings to their ends.
    pub fn busy(&self) -> Duration {
        self.busy
    }

    /// Calls `task` with each of `0..tasks`, once, on whichever thread is free, and returns when all have returned.
    pub fn run(&mut self, tasks: usize, task: impl Fn(usize) + Sync) {
        let begin = Instant::now();
        self.region(tasks, task);
        self.busy += begin.elapsed();
    }

    fn region(&mut self, tasks: usize, task: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.helpers.is_empty() {
            (0..tasks).for_each(task);
            return;
        }
        let shared = &*self.shared;
        let job: *const (dyn Fn(usize) + Sync + '_) = &task;
        // SAFETY: invariant 2: the region is closed and empty. The lifetime is erased under invariant 1.
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job));
            *shared.caller.get() = Some(std::thread::current());
        }
        shared.caller_thread.store(shared.placement.thread(), Ordering::Relaxed);
        shared.caller_processor.store(shared.placement.processor(), Ordering::Relaxed);
        for (i, next) in shared.next.iter().enumerate() {
            next.0.store(shared.stretch(i, tasks).start, Ordering::Relaxed);
        }
        shared.tasks.store(tasks, Ordering::Relaxed);
        let epoch = (shared.state.load(Ordering::Relaxed) >> 32) + 1;
        shared.state.store(epoch << 32, Ordering::SeqCst);
        for (helper, handle) in shared.helpers.iter().zip(&self.helpers) {
            if helper.parked.load(Ordering::SeqCst) {
                handle.thread().unpark();
            }
        }
        // The guard closes the region also when a task of ours panics.
        let guard = Close(shared);
        while let Some(i) = shared.take(0) {
            task(i);
        }
        drop(guard);
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a task panicked in a helper thread");
    }

    /// Calls `task` with each cell of a grid over `data`: `shape.rows` rows of `shape.row_len` values, cut into cells
    /// of `shape.cell_rows` rows and at most `shape.cell_cols` values. A cell is one task's alone.
    pub fn run_grid<T: Send>(
        &mut self,
        data: &mut [T],
        shape: GridShape,
        task: impl Fn(usize, usize, &mut Cell<'_, T>) + Sync,
    ) {
        assert!(shape.rows * shape.row_len <= data.len(), "a grid of {shape:?} over {} values", data.len());
        assert!(shape.cell_cols >= shape.unit, "cells of {} values of whole {}s", shape.cell_cols, shape.unit);
        let cuts = Cuts::new(shape.row_len.div_ceil(shape.unit), self.threads(), shape.cell_cols / shape.unit);
        let (down, across) = (shape.rows.div_ceil(shape.cell_rows), cuts.cells());
        let base = Base(data.as_mut_ptr());
        self.run(down * across, |i| {
            let row = i / across * shape.cell_rows;
            let rows = row..shape.rows.min(row + shape.cell_rows);
            let units = cuts.cell(i % across);
            let col = units.start * shape.unit;
            if !units.is_empty() {
                task(row, col, &mut base.cell(shape.row_len, rows, col, units.len() * shape.unit));
            }
        });
    }

    /// As [`Pool::run_grid`], for rows of `row_len` values that are cut into `bands`, which ascend and do not overlap;
    /// `task` gets the number of the band.
    pub fn run_bands<T: Send>(
        &mut self,
        data: &mut [T],
        row_len: usize,
        bands: &[Range<usize>],
        cell_cols: usize,
        task: impl Fn(usize, usize, &mut Cell<'_, T>) + Sync,
    ) {
        let ascend = bands.iter().all(|b| b.start <= b.end) && bands.windows(2).all(|b| b[0].end <= b[1].start);
        let end = bands.last().map_or(0, |b| b.end);
        assert!(ascend && end * row_len <= data.len(), "{bands:?} of {row_len} values over {}", data.len());
        let across = row_len.div_ceil(cell_cols);
        let base = Base(data.as_mut_ptr());
        self.run(bands.len() * across, |i| {
            let (band, col) = (i / across, i % across * cell_cols);
            task(band, col, &mut base.cell(row_len, bands[band].clone(), col, cell_cols));
        });
    }

    /// Calls `task` with each piece of `chunk_len` values of `data` (the last may be shorter).
    pub fn run_chunks<T: Send>(&mut self, data: &mut [T], chunk_len: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        let (len, chunk_len) = (data.len(), chunk_len.max(1));
        let base = Base(data.as_mut_ptr());
        self.run(len.div_ceil(chunk_len), |i| task(i, base.cell(len, 0..1, i * chunk_len, chunk_len).row(0)));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            let _ = helper.join();
        }
    }
}

impl Shared {
    /// The tasks that thread `thread` takes first.
    fn stretch(&self, thread: usize, tasks: usize) -> Range<usize> {
        let threads = self.next.len();
        thread * tasks / threads..(thread + 1) * tasks / threads
    }

    /// A task for `thread`: the next of its own stretch, else of the others'.
    fn take(&self, thread: usize) -> Option<usize> {
        let tasks = self.tasks.load(Ordering::Relaxed);
        for i in 0..self.next.len() {
            let owner = (thread + i) % self.next.len();
            let (next, end) = (&self.next[owner].0, self.stretch(owner, tasks).end);
            // The plain load keeps threads that wait at the end from bouncing the line.
            if next.load(Ordering::Relaxed) < end {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task < end {
                    return Some(task);
                }
            }
        }
        None
    }

    /// Sends the calling helper back to where it was, if the system has put it on the caller's processor. There it would stay, for two
    /// of ours on one processor and a neighbour on another are a balance, too.
    fn part(&self, me: &Helper) {
        let here = self.placement.processor();
        if here != self.caller_processor.load(Ordering::Relaxed) {
            me.processor.store(here, Ordering::SeqCst);
        } else if me.processor.load(Ordering::SeqCst) != here {
            self.placement.send(me.thread.load(Ordering::SeqCst), me.processor.load(Ordering::SeqCst));
        }
    }

    /// Brings a helper that was descheduled inside the region to the caller's processor.
    fn bring_helper(&self) {
        for helper in self.helpers.iter().filter(|helper| helper.inside.load(Ordering::SeqCst)) {
            if self.placement.bring(helper.thread.load(Ordering::SeqCst)) {
                helper.brought.store(true, Ordering::SeqCst);
                return;
            }
        }
    }

    /// Sends helpers that were brought back to where they were. They cannot do that: woken by them, the caller takes their place.
    fn send_back(&self) {
        for helper in self.helpers.iter().filter(|helper| helper.brought.swap(false, Ordering::SeqCst)) {
            self.placement.send(helper.thread.load(Ordering::SeqCst), helper.processor.load(Ordering::SeqCst));
        }
    }

    /// Brings a caller that was descheduled to the processor of the calling helper, which goes to the caller's in turn.
    fn bring_caller(&self) {
        let from = self.caller_processor.load(Ordering::Relaxed);
        if self.placement.bring(self.caller_thread.load(Ordering::Relaxed)) {
            self.placement.send(self.placement.thread(), from);
        }
    }

    /// Leaves no task to take.
    fn empty(&self) {
        for next in &self.next {
            next.0.store(usize::MAX / 2, Ordering::Relaxed);
        }
    }
}

/// Closes the region and waits for the helpers inside.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        let shared = self.0;
        if std::thread::panicking() {
            shared.empty();
        }
        let mut state = shared.state.fetch_or(CLOSED, Ordering::AcqRel);
        let mut spins = 0;
        while state & COUNT != 0 {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                shared.caller_parked.store(true, Ordering::SeqCst);
                if shared.state.load(Ordering::SeqCst) & COUNT != 0 {
                    shared.bring_helper();
                    std::thread::park_timeout(WAIT);
                }
                shared.caller_parked.store(false, Ordering::SeqCst);
            }
            state = shared.state.load(Ordering::Acquire);
        }
        shared.send_back();
    }
}

fn help(shared: &Shared, index: usize) {
    let me = &shared.helpers[index];
    me.thread.store(shared.placement.thread(), Ordering::SeqCst);
    me.processor.store(shared.placement.processor(), Ordering::SeqCst);
    let mut seen = 0;
    let mut spins = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        let state = shared.state.load(Ordering::Acquire);
        let open = state >> 32 != seen && state & CLOSED == 0;
        if open {
            shared.part(me);
            if shared.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                seen = state >> 32;
                spins = 0;
                work(shared, index + 1);
            }
        } else if spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        } else {
            me.parked.store(true, Ordering::SeqCst);
            let state = shared.state.load(Ordering::SeqCst);
            let (stop, closed) = (shared.stop.load(Ordering::SeqCst), state & CLOSED != 0);
            if !stop && closed {
                std::thread::park();
                spins = 0;
            } else if !stop && state >> 32 == seen {
                shared.bring_caller();
                std::thread::park_timeout(WAIT);
            }
            me.parked.store(false, Ordering::SeqCst);
        }
    }
}

/// Works inside a region that this helper has entered.
fn work(shared: &Shared, thread: usize) {
    let me = &shared.helpers[thread - 1];
    me.inside.store(true, Ordering::SeqCst);
    // SAFETY: invariants 1 and 2: we are inside, so the job is set and alive.
    let (job, caller) =
        unsafe { (&*(*shared.job.get()).expect("an open region has a job"), (*shared.caller.get()).clone()) };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        while let Some(i) = shared.take(thread) {
            job(i);
        }
    }));
    if result.is_err() {
        shared.panicked.store(true, Ordering::Relaxed);
    }
    me.inside.store(false, Ordering::SeqCst);
    shared.state.fetch_sub(1, Ordering::SeqCst);
    if shared.caller_parked.load(Ordering::SeqCst)
        && let Some(caller) = caller
    {
        caller.unpark();
    }
}

/// Extents of a grid over a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridShape {
    /// Rows of the data.
    pub rows: usize,
    /// Values in a row, which is also the distance between rows.
    pub row_len: usize,
    /// Rows of a cell.
    pub cell_rows: usize,
    /// Values of a cell's row at most, and at least `unit`.
    pub cell_cols: usize,
    /// A row is cut between so many values.
    pub unit: usize,
}

/// How the units of a row are cut into cells: each thread's share into equally many, of `most` units while at least as much as that is
/// left behind them, and from there on ever smaller ones. Large cells are read as one stream; with small ones at the end nobody
/// waits long for who began late or is slow.
struct Cuts {
    len: usize,
    threads: usize,
    most: usize,
    /// Cells of a share; where shares differ, some are empty.
    per_share: usize,
}

impl Cuts {
    fn new(len: usize, threads: usize, most: usize) -> Self {
        let longest = len.div_ceil(threads);
        let mut cuts = Cuts { len, threads, most, per_share: 0 };
        cuts.per_share = cuts.whole(longest);
        let mut left = longest - cuts.per_share * most;
        while left > 0 {
            left -= cuts.next(left);
            cuts.per_share += 1;
        }
        cuts
    }

    /// Cells of `most` units at the beginning of a share of `len`.
    fn whole(&self, len: usize) -> usize {
        (len / self.most).saturating_sub(1)
    }

    /// Units of the next cell, when `left` are left of the share: less than two cells of `most`.
    fn next(&self, left: usize) -> usize {
        // A thread alone waits for nobody; and a cell is not worth its start if it is far smaller than it might be.
        let part = if self.threads == 1 { left } else { left / 2 };
        part.clamp((self.most / 16).max(1), self.most).min(left)
    }

    fn cells(&self) -> usize {
        self.threads * self.per_share
    }

    /// The units of cell `i`.
    fn cell(&self, i: usize) -> Range<usize> {
        let (thread, i) = (i / self.per_share, i % self.per_share);
        let share = thread * self.len / self.threads..(thread + 1) * self.len / self.threads;
        let whole = self.whole(share.len());
        let mut start = share.start + whole.min(i) * self.most;
        for _ in whole..i {
            start += self.next(share.end - start);
        }
        start..start + if i < whole { self.most } else { self.next(share.end - start) }
    }
}

/// A rectangle of a grid, owned by one task.
pub struct Cell<'a, T> {
    base: *mut T,
    stride: usize,
    rows: usize,
    cols: usize,
    _data: std::marker::PhantomData<&'a mut [T]>,
}

impl<T> Cell<'_, T> {
    /// Rows of this cell.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Row `i` of the cell.
    pub fn row(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of a cell of {}", self.rows);
        // SAFETY: invariant 3; the cell lies in the slice that `run_grid` borrows for as long as tasks run.
        unsafe { std::slice::from_raw_parts_mut(self.base.wrapping_add(i * self.stride), self.cols) }
    }

    /// All of its values, row by row, of a cell that is as wide as the data.
    pub fn all(&mut self) -> &mut [T] {
        assert_eq!(self.cols, self.stride, "columns of a cell and of its data");
        // SAFETY: invariant 3; rows without a gap between them lie in the slice as one piece.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.rows * self.cols) }
    }
}

struct Base<T>(*mut T);
// SAFETY: the pointer is only used through cells that do not overlap (invariant 3), for values that may be sent.
unsafe impl<T: Send> Sync for Base<T> {}
impl<T> Base<T> {
    /// The cell of `rows` and at most `cols` values from `col` on.
    fn cell<'a>(&self, stride: usize, rows: Range<usize>, col: usize, cols: usize) -> Cell<'a, T> {
        Cell {
            base: self.0.wrapping_add(rows.start * stride + col),
            stride,
            rows: rows.len(),
            cols: cols.min(stride - col),
            _data: std::marker::PhantomData,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_on_any_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(threads);
            for round in 0..300 {
                let counts: Vec<AtomicUsize> = (0..round % 37).map(|_| AtomicUsize::new(0)).collect();
                pool.run(counts.len(), |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn grid_cells_cover_the_data_without_overlap() {
        let mut pool = Pool::new(3);
        let mut data = vec![0u32; 7 * 50];
        let shape = GridShape { rows: 7, row_len: 50, cell_rows: 3, cell_cols: 16, unit: 4 };
        pool.run_grid(&mut data, shape, |row, col, cell| {
            for r in 0..cell.rows() {
                for (c, x) in cell.row(r).iter_mut().enumerate() {
                    *x += ((row + r) * 50 + col + c) as u32 + 1;
                }
            }
        });
        assert!(data.iter().enumerate().all(|(i, &x)| x as usize == i + 1));
    }

    #[test]
    fn cells_of_a_share_are_large_at_first_and_small_at_last() {
        for (len, threads, most) in (1..200).flat_map(|len| [1, 2, 3, 8].map(|t| (len, t, 1 + len % 40))) {
            let cuts = Cuts::new(len, threads, most);
            let cells: Vec<_> = (0..cuts.cells()).map(|i| cuts.cell(i)).collect();
            assert!(cells.iter().all(|c| c.len() <= most));
            let ends = cells.iter().scan(0, |end, c| Some((std::mem::replace(end, c.end), c.start)));
            assert!(ends.into_iter().all(|(end, start)| end == start), "{len}, {threads}, {most}: {cells:?}");
            assert_eq!(cells.last().map(|c| c.end), Some(len));
        }
        let lens = |len, threads, most| -> Vec<usize> {
            let cuts = Cuts::new(len, threads, most);
            (0..cuts.per_share).map(|i| cuts.cell(i).len()).collect()
        };
        assert_eq!(lens(100, 2, 12), [12, 12, 12, 7, 3, 2, 1, 1]);
        assert_eq!(lens(100, 1, 32), [32, 32, 32, 4]);
        assert_eq!(lens(200, 2, 64), [50, 25, 12, 6, 4, 3], "no cell of less than a 16th");
    }

    #[test]
    fn bands_cover_their_rows_and_no_others() {
        let mut pool = Pool::new(3);
        let mut data = vec![0u32; 9 * 20];
        pool.run_bands(&mut data, 20, &[0..1, 1..4, 6..9], 16, |band, col, cell| {
            for r in 0..cell.rows() {
                cell.row(r).iter_mut().for_each(|x| *x += (band * 100 + col + 1) as u32);
            }
        });
        let mut whole = data.clone();
        pool.run_bands(&mut whole, 20, std::slice::from_ref(&(0..9)), 20, |_, _, cell| {
            cell.all().iter_mut().for_each(|x| *x += 1)
        });
        assert!(whole.iter().zip(&data).all(|(a, b)| *a == b + 1));
        let bands = [Some(0), Some(1), Some(1), Some(1), None, None, Some(2), Some(2), Some(2)];
        for (i, &x) in data.iter().enumerate() {
            let want = bands[i / 20].map_or(0, |band| band * 100 + i % 20 / 16 * 16 + 1);
            assert_eq!(x as usize, want, "value {i}");
        }
        let overlap = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run_bands(&mut data, 20, &[0..2, 1..3], 20, |_, _, _| ());
        }));
        assert!(overlap.is_err(), "two tasks would write one row");
    }

    /// Threads by the order in which they were asked for, from 1; processors as the test says.
    #[derive(Default)]
    struct Places {
        threads: std::sync::Mutex<Vec<std::thread::ThreadId>>,
        /// Of threads 1 and 2.
        processors: [AtomicUsize; 2],
        /// Threads that have none.
        off: [AtomicBool; 2],
        brought: AtomicUsize,
        sent: AtomicUsize,
    }

    impl Placement for Places {
        fn thread(&self) -> i32 {
            let me = std::thread::current().id();
            let mut threads = self.threads.lock().expect("no panic");
            let at = threads.iter().position(|&thread| thread == me).unwrap_or_else(|| {
                threads.push(me);
                threads.len() - 1
            });
            at as i32 + 1
        }
        fn processor(&self) -> usize {
            self.processors[self.thread() as usize - 1].load(Ordering::SeqCst)
        }
        fn bring(&self, thread: i32) -> bool {
            let was_off = self.off[thread as usize - 1].swap(false, Ordering::SeqCst);
            if was_off {
                self.send(thread, self.processor());
                self.brought.fetch_add(1, Ordering::SeqCst);
            }
            was_off
        }
        fn send(&self, thread: i32, processor: usize) {
            self.processors[thread as usize - 1].store(processor, Ordering::SeqCst);
            self.sent.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A pool of two threads on processors 0 (the caller) and 1.
    fn two_placed() -> (Pool, &'static Places) {
        let places: &'static Places = Box::leak(Box::default());
        assert_eq!(places.thread(), 1);
        places.processors[1].store(1, Ordering::SeqCst);
        (Pool::placed(2, places), places)
    }

    /// Runs a region in which both threads are inside, and in which thread `stuck` goes on only when it has a processor.
    fn region_with_a_thread_off(pool: &mut Pool, places: &Places, stuck: i32) {
        let inside = AtomicUsize::new(0);
        pool.run(2, |_| {
            inside.fetch_add(1, Ordering::SeqCst);
            while inside.load(Ordering::SeqCst) < 2 {
                std::hint::spin_loop();
            }
            if places.thread() == stuck {
                places.off[stuck as usize - 1].store(true, Ordering::SeqCst);
                while places.off[stuck as usize - 1].load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
            }
        });
    }

    #[test]
    fn a_helper_without_a_processor_is_brought_to_the_callers_and_sent_back() {
        let (mut pool, places) = two_placed();
        for round in 1..=3 {
            region_with_a_thread_off(&mut pool, places, 2);
            assert_eq!(places.brought.load(Ordering::SeqCst), round);
            assert_eq!(places.sent.load(Ordering::SeqCst), 2 * round);
            assert_eq!(places.processors[1].load(Ordering::SeqCst), 1);
        }
    }

    #[test]
    fn a_caller_without_a_processor_changes_places_with_a_helper() {
        let (mut pool, places) = two_placed();
        for round in 1..=3 {
            region_with_a_thread_off(&mut pool, places, 1);
            assert_eq!(places.brought.load(Ordering::SeqCst), round);
            while places.sent.load(Ordering::SeqCst) < 2 * round {
                std::thread::yield_now();
            }
            let both = [0, 1].map(|i| places.processors[i].load(Ordering::SeqCst));
            assert_eq!(both, [round % 2, 1 - round % 2]);
        }
    }

    #[test]
    fn a_helper_that_was_put_on_the_callers_processor_goes_back_to_its_own() {
        let (mut pool, places) = two_placed();
        let both_work = |pool: &mut Pool| region_with_a_thread_off(pool, places, 0);
        both_work(&mut pool);
        assert_eq!(places.sent.load(Ordering::SeqCst), 0);
        places.processors[1].store(0, Ordering::SeqCst);
        both_work(&mut pool);
        assert_eq!(places.sent.load(Ordering::SeqCst), 1);
        assert_eq!(places.processors[1].load(Ordering::SeqCst), 1);
        assert_eq!(places.brought.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(2);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(100, |i| assert!(i != 57, "task 57"));
        }));
        assert!(panicked.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(100, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }
}
