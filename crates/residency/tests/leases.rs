//! Every interleaving of requests that acquire a model with those that evict it.

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use residency::models::{Admission, Models, Policy, State};

/// Memory of the two models: 1 while it exists.
struct World {
    pool: Mutex<Models<usize>>,
    exists: [AtomicUsize; 2],
}

impl World {
    fn free(&self, model: usize) {
        assert_eq!(self.exists[model].swap(0, Ordering::SeqCst), 1, "freed once");
        self.pool.lock().unwrap().evicted(&model, 0);
    }

    /// One request, in the steps of the engine: decide under the lock, do the work outside.
    fn request(&self, model: usize) -> bool {
        let ticket = self.pool.lock().unwrap().ask(&model, 60).unwrap();
        let lease = loop {
            let admission = self.pool.lock().unwrap().admit(ticket, 0).unwrap();
            match admission {
                Admission::Use(lease) => break lease,
                Admission::Load(lease) => {
                    assert_eq!(self.exists[1 - model].load(Ordering::SeqCst), 0, "they do not fit together");
                    assert_eq!(self.exists[model].swap(1, Ordering::SeqCst), 0, "loaded once");
                    self.pool.lock().unwrap().advance(&lease, State::Resident, 0);
                    break lease;
                }
                Admission::Evict(models) => models.into_iter().for_each(|m| self.free(m)),
                Admission::Wait => thread::yield_now(),
                Admission::Unloading => return false,
            }
        };
        while self.pool.lock().unwrap().state_under(&lease) < Some(State::Resident) {
            thread::yield_now();
        }
        assert_eq!(self.exists[model].load(Ordering::SeqCst), 1, "what a lease covers is there");
        if self.pool.lock().unwrap().release(lease, 0) {
            self.free(model);
        }
        true
    }
}

fn world() -> Arc<World> {
    let policy = Policy { capacity_bytes: 100, idle_bytes_max: 100, keep_alive_ms: None, thrash_ms: 0, waiting_max: 8 };
    Arc::new(World { pool: Mutex::new(Models::new(policy)), exists: [AtomicUsize::new(0), AtomicUsize::new(0)] })
}

fn explore(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // Two preemptions find what three threads can do wrong here, in seconds instead of hours.
    builder.preemption_bound = Some(2);
    builder.check(check);
}

#[test]
fn two_models_that_do_not_fit_together_take_turns() {
    explore(|| {
        let world = world();
        let other = Arc::clone(&world);
        let first = thread::spawn(move || other.request(0));
        assert!(world.request(1));
        assert!(first.join().unwrap());
    });
}

#[test]
fn a_model_is_not_freed_under_a_lease_and_not_freed_twice() {
    explore(|| {
        let world = world();
        let users: Vec<_> = (0..2)
            .map(|_| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.request(0))
            })
            .collect();
        if world.pool.lock().unwrap().unload(&0, 0) {
            world.free(0);
        }
        for user in users {
            user.join().unwrap();
        }
        assert!(world.pool.lock().unwrap().leases(&0) == 0);
    });
}
