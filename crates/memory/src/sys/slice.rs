//! How long a thread computes at a time, as the scheduler sees it.
//!
//! Invariants:
//! 1. [`Attributes`] has the layout of the first version of `sched_attr` in linux/sched/types.h, says its length, and lives until the
//!    call returns.
#![allow(unsafe_code)]

/// The shortest slice that the system takes, in ns. It is enough to begin a read and pack the one that has come.
const SLICE_NS: u64 = 100_000;

#[repr(C)]
#[derive(Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const LEN_BYTES: u32 = size_of::<Attributes>() as u32;
/// This thread.
const SELF: libc::pid_t = 0;

fn get() -> Option<Attributes> {
    let mut attributes = Attributes { size: LEN_BYTES, ..Attributes::default() };
    // SAFETY: invariant 1.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, SELF, &mut attributes, LEN_BYTES, 0u32) };
    (result == 0).then_some(attributes)
}

/// Asks the system to let this thread run soon whenever it wakes, among threads that compute all the time, in exchange for the short
/// slices that it needs anyway (Linux 6.12; its share of the processor and its priority stay). Tells whether the system took it.
pub(crate) fn shorten() -> bool {
    let Some(mut attributes) = get().filter(|a| a.policy == libc::SCHED_OTHER as u32) else { return false };
    attributes.runtime = SLICE_NS;
    // SAFETY: invariant 1.
    unsafe { libc::syscall(libc::SYS_sched_setattr, SELF, &attributes, 0u32) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gets_short_slices_and_keeps_its_priority() {
        let Some(before) = get() else {
            return eprintln!("not tested: the scheduler's attributes cannot be read here");
        };
        if !shorten() || before.runtime == 0 {
            return eprintln!("not tested: this scheduler has no slices of threads");
        }
        let after = get().expect("it was read before");
        assert_eq!(after.runtime, SLICE_NS);
        assert_eq!((after.policy, after.nice), (before.policy, before.nice));
    }
}
