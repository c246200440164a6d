//! A reader thread: takes units and fills them.

use super::Shared;
use crate::Error;
use crate::source::{ByteSource, ReadRoom};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Starts reader `index`. A system that gives no thread at all is an error for those who will wait.
pub(super) fn start(shared: Arc<Shared>, index: usize) {
    let work = Arc::clone(&shared);
    let spawned = std::thread::Builder::new().name(format!("airs-read-{index}")).spawn(move || run(&work));
    if let (Err(e), 0) = (spawned, index) {
        shared.fail(Error::io("the pager's thread", e));
    }
}

fn run(shared: &Shared) {
    let mut room = ReadRoom::new(shared.options.ring);
    while let Some(unit) = next(shared) {
        // A bug in a transcoder must not leave anyone waiting.
        let result = crate::caught(|| fill(shared, unit, &mut room))
            .unwrap_or_else(|what| Err(Error::Pager { at_bytes: shared.region.unit(unit).start, what }));
        match result.and_then(|()| finish(shared, unit)) {
            Ok(()) => shared.filled.notify_all(),
            Err(error) => shared.fail(error),
        }
        shared.ring_bell();
    }
}

/// The next unit to fill; `None` when there is nothing more to do, ever.
fn next(shared: &Shared) -> Option<usize> {
    let mut queue = shared.lock();
    loop {
        if queue.stop || queue.missing == 0 || queue.failure.is_some() {
            return None;
        }
        if let Some(unit) = queue.take() {
            return Some(unit);
        }
        queue = shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Counts a unit that is in; after the last one the region is sealed and the other threads go home.
fn finish(shared: &Shared, unit: usize) -> Result<(), Error> {
    shared.present_bytes.fetch_add(shared.region.unit(unit).len() as u64, Ordering::Relaxed);
    let mut queue = shared.lock();
    queue.moved = Instant::now();
    queue.missing -= 1;
    if queue.missing == 0 {
        shared.work.notify_all();
        drop(queue);
        shared.region.seal()?;
    }
    Ok(())
}

/// Reads and transcodes what `unit` is made of, and puts it in its place.
fn fill(shared: &Shared, unit: usize, room: &mut ReadRoom) -> Result<(), Error> {
    let Some(mut staged) = shared.region.stage(unit)? else { return Ok(()) };
    let place = shared.region.unit(unit);
    let first = shared.extents.partition_point(|e| e.place.end <= place.start);
    let extents = &shared.extents[first..];
    let extents = &extents[..extents.partition_point(|e| e.place.start < place.end)];
    let same = |a: &Arc<dyn ByteSource>, b: &Arc<dyn ByteSource>| Arc::ptr_eq(a, b);
    for group in extents.chunk_by(|a, b| same(&a.source, &b.source)) {
        let parts: Vec<Range<usize>> = group
            .iter()
            .map(|e| e.place.start.max(place.start) - e.place.start..e.place.end.min(place.end) - e.place.start)
            .collect();
        let ranges: Vec<Range<u64>> =
            group.iter().zip(&parts).map(|(e, part)| e.transcode.source_range(part.clone())).collect();
        let found = group[0].source.read(&ranges, room)?;
        shared.read_bytes.fetch_add(ranges.iter().map(|r| r.end - r.start).sum(), Ordering::Relaxed);
        for ((extent, part), found) in group.iter().zip(parts).zip(found) {
            let at = extent.place.start + part.start - place.start;
            let out = &mut staged[at..at + part.len()];
            extent.transcode.write(part, &room.bytes()[found], out);
        }
        room.give_up();
    }
    staged.publish()
}
