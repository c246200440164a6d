//! Serves those who touch what is missing.
//!
//! The forward pass asks before it touches, so a fault here is someone's mistake; it costs time and is counted, and that
//! is all. After an error there is nothing to serve them with, and a thread that was left waiting would never end: it
//! gets a page of ones, which no format reads as a number, and whoever runs it finds the error before the result is used.
//!
//! The thread is watched: one that ends before its time is an error of the pager, and the next one, which does nothing but
//! hand out pages of ones, takes its place.

use super::Shared;
use crate::sys::uffd::Uffd;
use crate::{Error, Region};
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Times that serving is taken up again: what fails each time ends.
const LIVES: usize = 3;

pub(super) struct Trap {
    uffd: Uffd,
    /// What stands in for what can never come.
    page: Vec<u8>,
    /// Pages that someone waits for.
    waiting: Vec<usize>,
}

impl Trap {
    /// Sets the trap, where the system can.
    pub(super) fn set(region: &Region) -> Option<Trap> {
        let uffd = Uffd::open().ok()?;
        region.arm(&uffd).ok()?;
        Some(Trap { uffd, page: vec![0xff; rustix::param::page_size()], waiting: Vec::new() })
    }

    /// Serves it on a thread of its own, until everything is in or the pager is gone.
    pub(super) fn serve(self, shared: Arc<Shared>) {
        let spawned = std::thread::Builder::new().name("airs-trap".to_owned());
        // Without a thread the descriptor is closed again, and missing memory would read as zeros.
        let region = Arc::clone(&shared.region);
        if spawned.spawn(move || self.watch(&shared)).is_err() {
            region.disarm();
        }
    }

    fn watch(mut self, shared: &Shared) {
        for _ in 0..LIVES {
            let what = match crate::caught(|| self.run(shared)) {
                Ok(Ok(())) => break,
                Ok(Err(e)) => e.to_string(),
                Err(panic) => panic,
            };
            shared.fail(Error::Trap { waiting: self.waiting.len(), what });
        }
        // Closing the descriptor makes missing pages read as zeros.
        shared.region.disarm();
        for &address in &self.waiting {
            let _ = self.uffd.wake(address, self.page.len());
        }
    }

    fn run(&mut self, shared: &Shared) -> rustix::io::Result<()> {
        let Some(signal) = &shared.signal else { return Ok(()) };
        loop {
            let faults = self.uffd.wait(signal.as_fd())?;
            self.waiting.extend(faults.iter().map(|address| address & !(self.page.len() - 1)));
            self.waiting.sort_unstable();
            self.waiting.dedup();
            #[cfg(test)]
            assert!(!shared.trap_dies.swap(false, Ordering::Relaxed), "it was told to");
            let (failed, stopped) = want(shared, faults);
            let Trap { uffd, page, waiting } = self;
            waiting.retain(|&address| {
                let at = address - shared.region.address();
                let unit = shared.region.units_of(&(at..at + 1)).start;
                let released = if shared.region.is_present(unit) {
                    uffd.wake(address, page.len())
                } else if failed {
                    match uffd.copy(address, page) {
                        // Someone else's touch brought it.
                        Err(Errno::EXIST) => uffd.wake(address, page.len()),
                        other => other,
                    }
                } else {
                    Err(Errno::AGAIN)
                };
                released.is_err()
            });
            if stopped && waiting.is_empty() {
                return Ok(());
            }
        }
    }
}

/// Puts the units of `faults` in front; tells whether there is nothing to hope for, and whether no fault can come any more.
fn want(shared: &Shared, faults: Vec<usize>) -> (bool, bool) {
    let mut queue = shared.lock();
    shared.faults.fetch_add(faults.len() as u64, Ordering::Relaxed);
    for address in faults {
        let at = address - shared.region.address();
        queue.want(shared.region.units_of(&(at..at + 1)));
        shared.work.notify_all();
    }
    (queue.failure.is_some() || queue.stop, queue.stop || queue.missing == 0)
}

#[cfg(test)]
mod tests {
    use super::super::{Extent, Options, Pager, Transcode, Window};
    use super::*;
    use crate::backing::{Backing, Choice};
    use crate::source::{ByteSource, Identity, ReadRoom};
    use std::ops::Range;
    use std::sync::{Condvar, Mutex};

    const UNIT: usize = 4096;

    /// A source whose bytes come when the gate is opened.
    #[derive(Debug, Default)]
    struct Late {
        open: Mutex<bool>,
        opened: Condvar,
    }

    impl Late {
        fn open(&self) {
            *self.open.lock().expect("no panic under it") = true;
            self.opened.notify_all();
        }
    }

    impl ByteSource for Late {
        fn name(&self) -> &str {
            "late"
        }

        fn len_bytes(&self) -> u64 {
            3 * UNIT as u64
        }

        fn identity(&self) -> Option<Identity> {
            None
        }

        fn read(&self, ranges: &[Range<u64>], room: &mut ReadRoom) -> Result<Vec<Range<usize>>, Error> {
            let closed = self.open.lock().expect("no panic under it");
            drop(self.opened.wait_while(closed, |open| !*open).expect("no panic under it"));
            let len = (ranges[0].end - ranges[0].start) as usize;
            room.of(len)?.fill(1);
            Ok(std::iter::once(0..len).collect())
        }

        fn read_cached(&self, _: u64, _: &mut [u8]) -> Result<(), Error> {
            unreachable!("the pager reads past the page cache")
        }
    }

    struct Same;

    impl Transcode for Same {
        fn source_range(&self, part: Range<usize>) -> Range<u64> {
            part.start as u64..part.end as u64
        }

        fn write(&self, _: Range<usize>, source: &[u8], out: &mut [u8]) {
            out.copy_from_slice(&source[..out.len()]);
        }
    }

    #[test]
    fn when_the_thread_that_serves_dies_those_who_wait_go_on_and_hear_of_it() {
        let source = Arc::new(Late::default());
        let backing = Choice::Only(Backing::Unpinned);
        let region = Arc::new(Region::reserve(3 * UNIT, UNIT, backing).expect("a few KiB"));
        let as_source: Arc<dyn ByteSource> = Arc::clone(&source) as _;
        let extent = Extent { place: 0..3 * UNIT, source: as_source, transcode: Arc::new(Same) };
        let options = Options { window: Window::Stages(0), ..Options::default() };
        let pager = Pager::start(Arc::clone(&region), vec![extent], std::slice::from_ref(&(0..UNIT)), options);
        if !pager.stats().is_trapped {
            eprintln!("skipped: no userfaultfd here");
            return;
        }
        std::thread::scope(|scope| {
            let touch = |unit: usize| {
                let region = &region;
                move || region.bytes(unit * UNIT..unit * UNIT + 1)[0]
            };
            let blocked = [scope.spawn(touch(0)), scope.spawn(touch(1))];
            while pager.stats().faults < 2 {
                std::thread::yield_now();
            }
            assert!(blocked.iter().all(|thread| !thread.is_finished()), "no byte has come");
            pager.shared.trap_dies.store(true, Ordering::Relaxed);
            pager.shared.ring_bell();
            assert_eq!(blocked.map(|thread| thread.join().expect("a page of ones")), [0xff; 2]);
        });
        for range in [0..UNIT, 0..3 * UNIT] {
            let error = pager.ensure(range).expect_err("what was computed with is no weight");
            assert!(matches!(&error, Error::Trap { waiting: 2, what } if what.contains("told")), "{error}");
        }
        assert_eq!(region.bytes(2 * UNIT..2 * UNIT + 1), [0xff], "later touches are not left waiting either");
        source.open();
    }
}
