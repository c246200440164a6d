//! What this machine gives the process.

use std::fs;
use std::thread;

/// Threads that compute when none are asked for: the processors that this process may use, within its affinity mask and
/// the CPU quota of its control group (version 1 or 2), rounded down. The standard library reads all three.
pub(crate) fn threads_default() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The most memory that was resident at once so far, if the system tells.
pub(crate) fn peak_rss_bytes() -> Option<u64> {
    vm_hwm_bytes(&fs::read_to_string("/proc/self/status").ok()?)
}

fn vm_hwm_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::vm_hwm_bytes;

    #[test]
    fn the_peak_is_read_or_absent() {
        assert_eq!(vm_hwm_bytes("Name:\tairs\nVmHWM:\t    2048 kB\nVmRSS:\t 1 kB\n"), Some(2 << 20));
        assert_eq!(vm_hwm_bytes("Name:\tairs\n"), None);
        assert_eq!(vm_hwm_bytes("VmHWM:\t x kB\n"), None);
    }
}
