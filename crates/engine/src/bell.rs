//! What wakes an engine that has nothing to do.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Rung when room came to be free or a request is no longer wanted; clones are the same bell.
#[derive(Debug, Clone, Default)]
pub struct Bell(Arc<(Mutex<u64>, Condvar)>);

impl Bell {
    fn count(&self) -> MutexGuard<'_, u64> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes who waits.
    pub fn ring(&self) {
        *self.count() += 1;
        self.0.1.notify_all();
    }

    /// How often it was rung.
    pub fn rings(&self) -> u64 {
        *self.count()
    }

    /// Returns when it was rung since there were `seen` rings, or after `at_most`.
    pub fn wait(&self, seen: u64, at_most: Option<Duration>) {
        let (count, quiet) = (self.count(), |count: &mut u64| *count == seen);
        match at_most {
            Some(at_most) => drop(self.0.1.wait_timeout_while(count, at_most, quiet)),
            None => drop(self.0.1.wait_while(count, quiet)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_not_lost_and_one_from_elsewhere_ends_it() {
        let bell = Bell::default();
        let seen = bell.rings();
        bell.ring();
        bell.wait(seen, None);
        let (seen, other) = (bell.rings(), bell.clone());
        let rings = std::thread::spawn(move || other.ring());
        bell.wait(seen, None);
        assert_eq!(bell.rings(), 2);
        rings.join().unwrap();
        bell.wait(2, Some(Duration::ZERO));
    }
}
