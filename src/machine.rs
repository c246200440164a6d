//! What this machine gives the process.

use std::thread;

use memory::pressure::Reader;
use residency::headroom::{self, Budget, Group, Host};

use crate::values::Memory;

/// Threads that compute when none are asked for: the processors that this process may use, within its affinity mask and
/// the CPU quota of its control group (version 1 or 2), rounded down. The standard library reads all three.
pub(crate) fn threads_default() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The most memory that was resident at once so far, if the system tells.
pub(crate) fn peak_rss_bytes() -> Option<u64> {
    Reader::default().process().map(|p| p.peak_bytes).filter(|&bytes| bytes > 0)
}

/// Memory of this process that is there now, if the system tells.
pub(crate) fn rss_bytes() -> Option<u64> {
    Reader::default().process().map(|p| p.resident_bytes + p.huge_pool_bytes)
}

/// This machine's memory, with the control groups that bind the process; `None` where the system does not tell.
pub(crate) fn host() -> Option<Host> {
    let reader = Reader::default();
    let info = reader.meminfo()?;
    let group = |g: memory::pressure::Group| Group {
        limit_bytes: g.limit_bytes,
        used_bytes: g.used_bytes,
        reclaimable_bytes: g.file_bytes,
    };
    Some(Host {
        total_bytes: info.total_bytes,
        available_bytes: info.available_bytes,
        groups: reader.groups().into_iter().map(group).collect(),
        own_bytes: rss_bytes().unwrap_or(0),
        pinned_bytes: 0,
    })
}

/// Where a model is to run.
pub(crate) struct Place {
    /// `None` where the system does not tell.
    pub host: Option<Host>,
    /// What the process had before it read the model's header.
    pub base_bytes: u64,
}

impl Place {
    /// This machine, as it is now.
    pub(crate) fn here() -> Place {
        Place { host: host(), base_bytes: rss_bytes().unwrap_or(0) }
    }
}

/// The budget that `memory` means on `host`, and what the host would give: without a host there is no limit to give.
pub(crate) fn budget(memory: Memory, host: Option<&Host>) -> (u64, Option<Budget>) {
    let auto = host.map(headroom::budget);
    let bytes = match memory {
        Memory::Bytes(bytes) => bytes,
        Memory::Auto => auto.map_or(u64::MAX, |b| b.bytes),
    };
    (bytes, auto)
}
