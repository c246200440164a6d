//! How many lanes a device wants.

use super::{LaneOptions, Lanes, Receive, Slice};
use crate::Error;
use crate::source::ByteSource;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// A way of reading and its rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probed {
    /// The way.
    pub options: LaneOptions,
    /// Bytes of slices in a second.
    pub bytes_per_second: f64,
}

/// Bytes read to try a way, at most: some hundredths of a second of a fast device.
const TRY_BYTES: u64 = 48 << 20;
/// As long does one way take on a device that is slower, about.
const TRY_S: f64 = 0.05;
/// Slices that a way is tried with, at least.
const TRY_SLICES: u64 = 8;

/// Ways that are tried: what a memory card wants, and what a drive with queues does.
const WAYS: [(usize, usize); 5] = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)];

/// Reads slices of `slice_bytes` all over `source` in every way that is worth trying: a quarter of a second, or some slices
/// where a device takes longer for them. An error if it cannot be read.
pub fn probe(source: &Arc<dyn ByteSource>, slice_bytes: u64) -> Result<Vec<Probed>, Error> {
    let len_bytes = source.len_bytes();
    let slice_bytes = slice_bytes.clamp(1, len_bytes.max(1));
    let way = |(lanes, depth)| LaneOptions { lanes, depth, ring: true };
    // One read tells how many there is time for.
    let first = rate(source, slice_bytes, 1, way(WAYS[0]))?;
    let in_time = (first.bytes_per_second * TRY_S) as u64;
    let bytes = in_time.min(TRY_BYTES).max(TRY_SLICES * slice_bytes).min(len_bytes);
    let slices = (bytes / slice_bytes).max(1);
    WAYS.iter().map(|&lanes_depth| rate(source, slice_bytes, slices, way(lanes_depth))).collect()
}

impl LaneOptions {
    /// Of the ways that were tried, the one with the most lanes, though no more than `processors`, that is within 5 % of the
    /// fastest of these; of several such, the one with fewer reads in flight. Lanes pack what they read: more of them than
    /// processors take the time of those that compute.
    pub fn choose(probed: &[Probed], processors: usize) -> Option<LaneOptions> {
        let fitting = || probed.iter().filter(|p| p.options.lanes <= processors.max(1));
        let best = fitting().map(|p| p.bytes_per_second).fold(0.0, f64::max);
        let good = fitting().filter(|p| p.bytes_per_second >= 0.95 * best).map(|p| p.options);
        good.max_by_key(|o| (o.lanes, std::cmp::Reverse(o.depth)))
    }
}

#[derive(Debug, Default)]
struct Count {
    left: Mutex<(u64, Option<Error>)>,
    done: Condvar,
    bytes: AtomicU64,
}

impl Receive for Count {
    fn receive(&self, _: u64, bytes: Result<&[u8], Error>) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        match bytes {
            Ok(bytes) => drop(self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed)),
            Err(error) => left.1 = Some(error),
        }
        left.0 -= 1;
        self.done.notify_all();
    }
}

fn rate(source: &Arc<dyn ByteSource>, slice_bytes: u64, slices: u64, options: LaneOptions) -> Result<Probed, Error> {
    let len = source.len_bytes();
    let count = Arc::new(Count::default());
    count.left.lock().unwrap_or_else(PoisonError::into_inner).0 = slices;
    let lanes = Lanes::start(options, slice_bytes as usize, Arc::clone(&count) as _)?;
    // Apart from each other, and from those of the other ways: what was just read may be in a cache of the device.
    let way = (options.lanes * 7 + options.depth) as u64;
    let at = |i: u64| (i * 0x9e37_79b9 + way * 0x85eb_ca6b) % (len - slice_bytes).max(1);
    let slice = |i| Slice { source: Arc::clone(source), range: at(i)..(at(i) + slice_bytes).min(len), ticket: i };
    let begin = Instant::now();
    lanes.want((0..slices).map(slice));
    let left = count.left.lock().unwrap_or_else(PoisonError::into_inner);
    let left = count.done.wait_while(left, |left| left.0 > 0).unwrap_or_else(PoisonError::into_inner);
    let seconds = begin.elapsed().as_secs_f64();
    match &left.1 {
        Some(error) => Err(error.clone()),
        None => Ok(Probed { options, bytes_per_second: count.bytes.load(Ordering::Relaxed) as f64 / seconds }),
    }
}
