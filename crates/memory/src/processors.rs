//! Which processors threads run on, or wait for.
//!
//! A thread that the system has descheduled for another program waits some milliseconds for its turn, even where a processor is
//! idle by then: balancing is for longer terms. Whoever waits for that thread may bring it to their own processor.

use crate::sys::cpu_time::cpu_time;
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};
use std::sync::Mutex;

/// A thread of this process, by the system's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadId(i32);

impl ThreadId {
    /// The calling thread.
    pub fn current() -> ThreadId {
        thread_local! {
            static CURRENT: ThreadId = ThreadId(gettid().as_raw_nonzero().get());
        }
        CURRENT.with(|&current| current)
    }

    /// The number.
    pub fn number(self) -> i32 {
        self.0
    }

    /// The thread with a number, if there is one.
    pub fn numbered(number: i32) -> ThreadId {
        ThreadId(number)
    }

    /// Whether it is on no processor: for some microseconds its clock does not move. So it waits, for a processor or for
    /// something else.
    pub fn is_off(self) -> bool {
        let Some(before) = cpu_time(self.0) else { return false };
        // Each look takes a few hundred nanoseconds.
        (0..8).all(|_| cpu_time(self.0) == Some(before))
    }

    /// Moves it to `processor`, if it may run there, and leaves it free to go elsewhere. Whether it was moved: not while another
    /// thread is being moved.
    pub fn move_to(self, processor: usize) -> bool {
        // Two who move one thread at once would take each other's single processor for what it is allowed.
        static MOVING: Mutex<()> = Mutex::new(());
        let Ok(_moving) = MOVING.try_lock() else { return false };
        let Some(pid) = Pid::from_raw(self.0) else { return false };
        let Ok(allowed) = sched_getaffinity(Some(pid)) else { return false };
        if processor >= CpuSet::MAX_CPU || !allowed.is_set(processor) {
            return false;
        }
        let mut one = CpuSet::new();
        one.set(processor);
        let moved = sched_setaffinity(Some(pid), &one).is_ok();
        moved && sched_setaffinity(Some(pid), &allowed).is_ok()
    }
}

/// The processor that the calling thread is on.
pub fn current() -> usize {
    sched_getcpu()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    #[test]
    fn a_thread_is_moved_and_may_run_where_it_could_before() {
        let allowed = sched_getaffinity(None).expect("this thread's processors");
        let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&i| allowed.is_set(i)).collect();
        if processors.len() < 2 {
            return eprintln!("not tested: one processor");
        }
        let (place, stop, id) = (AtomicUsize::new(usize::MAX), AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                id.store(ThreadId::current().0 as usize, Ordering::SeqCst);
                while !stop.load(Ordering::SeqCst) {
                    place.store(current(), Ordering::SeqCst);
                    std::thread::yield_now();
                }
            });
            while place.load(Ordering::SeqCst) == usize::MAX {
                std::thread::yield_now();
            }
            let thread = ThreadId(id.load(Ordering::SeqCst) as i32);
            // The system may move it on at once, but not each time.
            for &to in &processors {
                while place.load(Ordering::SeqCst) != to {
                    assert!(thread.move_to(to));
                    std::thread::yield_now();
                }
            }
            let pid = Pid::from_raw(thread.0);
            assert_eq!(sched_getaffinity(pid).expect("its processors"), allowed);
            assert!(!thread.move_to(CpuSet::MAX_CPU), "there is no such processor");
            stop.store(true, Ordering::SeqCst);
        });
    }

    #[test]
    fn a_thread_that_waits_is_off_and_one_that_computes_is_not() {
        assert!(!ThreadId::current().is_off());
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                tell.send(ThreadId::current()).expect("somebody waits");
                ended.recv().expect("an end");
            });
            let thread = told.recv().expect("an id");
            while !thread.is_off() {
                std::thread::yield_now();
            }
            end.send(()).expect("it waits");
        });
    }
}
