//! Cache lines of memory that somebody else is to write next.
//!
//! In most virtual machines a disk's blocks are copied into memory by a processor of the host. Lines that this machine's
//! processors have read before are taken out of their caches one by one then, which cost up to two fifths of a drive's rate.
//!
//! Invariants:
//! 1. The instruction is one that the processor has said to have, and is given addresses of a borrowed slice. It changes no
//!    contents.
#![allow(unsafe_code)]

use std::sync::LazyLock;

/// Whether a disk's blocks are probably copied by a processor, and lines can be given up.
static HELPS: LazyLock<bool> = LazyLock::new(is_hypervised);

/// Has the caches give up the lines of `bytes`, where that helps who writes there next. About 20 us for 1 MiB.
pub(crate) fn give_up(bytes: &[u8]) {
    if *HELPS {
        flush(bytes);
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "the intrinsic is safe in newer toolchains")]
fn is_hypervised() -> bool {
    // SAFETY: every processor of this architecture has the instruction.
    let leaf = |leaf| unsafe { std::arch::x86_64::__cpuid_count(leaf, 0) };
    // The first leaf tells how many there are: Intel's manual, volume 2, CPUID; AMD's, volume 3, appendix E.
    let leaves = leaf(0).eax;
    let hypervisor = leaves >= 1 && leaf(1).ecx & (1 << 31) != 0;
    hypervisor && leaves >= 7 && leaf(7).ebx & CLFLUSHOPT != 0
}

#[cfg(target_arch = "x86_64")]
const CLFLUSHOPT: u32 = 1 << 23;

#[cfg(target_arch = "x86_64")]
fn flush(bytes: &[u8]) {
    const LINE_BYTES: usize = 64;
    for line in bytes.chunks(LINE_BYTES).filter_map(<[u8]>::first).chain(bytes.last()) {
        // SAFETY: invariant 1; `HELPS` is set only where there is CLFLUSHOPT.
        unsafe { std::arch::asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn is_hypervised() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn flush(_: &[u8]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_as_before_wherever_they_begin_and_end() {
        if !*HELPS {
            eprintln!("not tested: no virtual machine, or no instruction for it");
        }
        let bytes: Vec<u8> = (0..5000).map(|i| (i % 251) as u8).collect();
        for range in [0..5000, 3..4099, 7..8, 100..100] {
            give_up(&bytes[range]);
        }
        assert!((0..5000).all(|i| bytes[i] == (i % 251) as u8));
    }
}
