//! Serves those who touch what is missing.
//!
//! The forward pass asks before it touches, so a fault here is someone's mistake; it costs time and is counted, and that
//! is all. After an error there is nothing to serve them with, and a thread that was left waiting would never end: it
//! gets a page of ones, which no format reads as a number, and whoever runs it finds the error before the result is used.

use super::Shared;
use crate::Region;
use crate::sys::uffd::Uffd;
use rustix::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(super) struct Trap {
    uffd: Uffd,
}

impl Trap {
    /// Sets the trap, where the system can.
    pub(super) fn set(region: &Region) -> Option<Trap> {
        let uffd = Uffd::open().ok()?;
        region.arm(&uffd).ok()?;
        Some(Trap { uffd })
    }

    /// Serves it on a thread of its own, until everything is in or the pager is gone.
    pub(super) fn serve(self, shared: Arc<Shared>) {
        let spawned = std::thread::Builder::new().name("airs-trap".to_owned());
        // Without a thread the descriptor is closed again, and missing memory would read as zeros.
        let region = Arc::clone(&shared.region);
        if spawned.spawn(move || self.run(&shared)).is_err() {
            region.disarm();
        }
    }

    fn run(self, shared: &Shared) {
        let Some(signal) = &shared.signal else { return };
        let page = vec![0xff; rustix::param::page_size()];
        let mut waiting: Vec<usize> = Vec::new();
        while let Ok(faults) = self.uffd.wait(signal.as_fd()) {
            waiting.extend(faults.iter().map(|address| address & !(page.len() - 1)));
            let (failed, stopped) = self.want(shared, faults);
            waiting.retain(|&address| {
                let at = address - shared.region.address();
                let unit = shared.region.units_of(&(at..at + 1)).start;
                let released = if shared.region.is_present(unit) {
                    self.uffd.wake(address, page.len()).is_ok()
                } else {
                    failed && self.uffd.copy(address, &page).is_ok()
                };
                !released
            });
            if stopped && waiting.is_empty() {
                break;
            }
        }
        // Closing the descriptor makes missing pages read as zeros.
        shared.region.disarm();
        for address in waiting {
            let _ = self.uffd.wake(address, page.len());
        }
    }

    /// Puts the units of `faults` in front; tells whether there is nothing to hope for, and whether no fault can come any more.
    fn want(&self, shared: &Shared, faults: Vec<usize>) -> (bool, bool) {
        let mut queue = shared.lock();
        shared.faults.fetch_add(faults.len() as u64, Ordering::Relaxed);
        for address in faults {
            let at = address - shared.region.address();
            queue.want(shared.region.units_of(&(at..at + 1)));
            shared.work.notify_all();
        }
        (queue.failure.is_some() || queue.stop, queue.stop || queue.missing == 0)
    }
}
