//! How long a thread has computed.
//!
//! Invariants:
//! 1. The clock is written to a `timespec` of this frame.
#![allow(unsafe_code)]

use std::time::Duration;

/// The clock of a thread's time on processors, as linux/posix-timers.h makes its number: CPUCLOCK_SCHED, CPUCLOCK_PERTHREAD_MASK.
fn clock(thread: i32) -> libc::clockid_t {
    (!thread << 3) | 2 | 4
}

/// The time that a thread of this process has been on a processor, up to now; none if there is no such thread.
pub(crate) fn cpu_time(thread: i32) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: invariant 1.
    let result = unsafe { libc::clock_gettime(clock(thread), &mut time) };
    (result == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_for_a_thread_that_computes_and_for_no_other() {
        let me = rustix::thread::gettid().as_raw_nonzero().get();
        let before = cpu_time(me).expect("this thread exists");
        while cpu_time(me).expect("still") == before {}
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get()).expect("somebody waits");
            ended.recv().expect("an end");
        });
        let thread = told.recv().expect("an id");
        // It may still be on its way into its wait.
        let mut last = cpu_time(thread);
        while let next = cpu_time(thread)
            && next != last
        {
            last = next;
        }
        assert!(last.is_some());
        end.send(()).expect("it waits");
        sleeper.join().expect("no panic");
    }
}
