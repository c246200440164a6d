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

/// Bytes read to try a way: some hundredths of a second of a fast device.
const TRY_BYTES: u64 = 48 << 20;

/// Ways that are tried: what a memory card wants, and what a drive with queues does.
const WAYS: [(usize, usize); 5] = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)];

/// Reads slices of `slice_bytes` all over `source` in every way that is worth trying. An error if it cannot be read.
pub fn probe(source: &Arc<dyn ByteSource>, slice_bytes: u64) -> Result<Vec<Probed>, Error> {
    WAYS.iter().map(|&(lanes, depth)| rate(source, slice_bytes, LaneOptions { lanes, depth, ring: true })).collect()
}

impl LaneOptions {
    /// Of the ways that were tried, the one with the most lanes that is within 5 % of the fastest; of several such, the one
    /// with fewer reads in flight.
    pub fn choose(probed: &[Probed]) -> Option<LaneOptions> {
        let best = probed.iter().map(|p| p.bytes_per_second).fold(0.0, f64::max);
        let good = probed.iter().filter(|p| p.bytes_per_second >= 0.95 * best).map(|p| p.options);
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

fn rate(source: &Arc<dyn ByteSource>, slice_bytes: u64, options: LaneOptions) -> Result<Probed, Error> {
    let len = source.len_bytes();
    let slice_bytes = slice_bytes.clamp(1, len.max(1));
    let slices = (TRY_BYTES.min(len) / slice_bytes).max(1);
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
