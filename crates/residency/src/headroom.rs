//! How much memory may be had: the least that the host and every control group above the process leave.

/// Memory of a control group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The most that it may hold; `None` is no limit.
    pub limit_bytes: Option<u64>,
    /// What it holds.
    pub used_bytes: u64,
    /// Page cache in that, which goes when it must.
    pub reclaimable_bytes: u64,
}

/// Memory of the machine as the process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// All memory.
    pub total_bytes: u64,
    /// What the kernel thinks can be had without swapping.
    pub available_bytes: u64,
    /// The control groups from the process's own upwards.
    pub groups: Vec<Group>,
    /// What the process holds now: it is inside the readings, and inside the budget.
    pub own_bytes: u64,
    /// Page cache that the process depends on. The kernel calls it available, and it is not.
    pub pinned_bytes: u64,
}

/// The budget that a host gives, and how it came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// What could be had at most, the process's own bytes included.
    pub headroom_bytes: u64,
    /// What is left to others.
    pub reserve_bytes: u64,
    /// What the process may hold: the difference.
    pub bytes: u64,
    /// What idle models may hold of it.
    pub pool_bytes: u64,
    /// Whether a control group is what binds, and which, counted from the process's own.
    pub group: Option<usize>,
}

impl Budget {
    /// Bytes that are missing to the reserve; what the process itself holds does not count as free.
    pub fn missing_bytes(&self, own_bytes: u64) -> u64 {
        (self.reserve_bytes + own_bytes).saturating_sub(self.headroom_bytes)
    }
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The host keeps a twentieth of its memory, and no less than this: a desktop that swaps is frozen.
const HOST_RESERVE_MIN_BYTES: u64 = 256 * MIB;
/// A control group is ours: what it keeps is for page tables and what the kernel charges besides.
const GROUP_RESERVE_MIN_BYTES: u64 = 8 * MIB;
/// A machine is at least this many percent of the size that it is sold as; the rest is firmware and graphics.
const NOMINAL_PERCENT: u64 = 85;

/// The budget on `host` when nobody says one.
pub fn budget(host: &Host) -> Budget {
    let group_left = |group: &Group| {
        let reclaimable_bytes = group.reclaimable_bytes.saturating_sub(host.pinned_bytes);
        group.limit_bytes.map(|limit| limit.saturating_sub(group.used_bytes.saturating_sub(reclaimable_bytes)))
    };
    let available = host.available_bytes.saturating_sub(host.pinned_bytes);
    let host_reserve = (host.total_bytes / 20).max(HOST_RESERVE_MIN_BYTES);
    let mut least = (available, host_reserve, None);
    for (i, group) in host.groups.iter().enumerate() {
        let reserve = (group.limit_bytes.unwrap_or(0) / 64).max(GROUP_RESERVE_MIN_BYTES);
        // The binding one is the one that leaves least after its reserve.
        if let Some(left) = group_left(group)
            && left.saturating_sub(reserve) < least.0.saturating_sub(least.1)
        {
            least = (left, reserve, Some(i));
        }
    }
    let (left, reserve_bytes, group) = least;
    let headroom_bytes = left + host.own_bytes;
    let bytes = headroom_bytes.saturating_sub(reserve_bytes);
    Budget { headroom_bytes, reserve_bytes, bytes, pool_bytes: pool_bytes(host.total_bytes).min(bytes), group }
}

/// What idle models may hold by default on a machine of `total_bytes`: half of its nominal size; nothing up to 2 GB,
/// where the next model would need all there is.
fn pool_bytes(total_bytes: u64) -> u64 {
    match nominal_bytes(total_bytes) {
        nominal if nominal <= 2 * GIB => 0,
        nominal => nominal / 2,
    }
}

/// The size that a machine with `total_bytes` of memory is sold as: the least power of two of GiB that it is nearly, or
/// what it has if it is none.
pub fn nominal_bytes(total_bytes: u64) -> u64 {
    let above = total_bytes.div_ceil(GIB).next_power_of_two() * GIB;
    if total_bytes >= above / 100 * NOMINAL_PERCENT { above } else { total_bytes }
}

/// A machine sold with `nominal_bytes` and nothing running on it but its system.
pub fn device(nominal_bytes: u64) -> Host {
    // Firmware and graphics take a twentieth; a system without a desktop an eighth, and no less than 384 MiB.
    let total_bytes = nominal_bytes - nominal_bytes / 20;
    let system_bytes = (total_bytes / 8).clamp(384 * MIB, 1536 * MIB);
    let available_bytes = total_bytes.saturating_sub(system_bytes);
    Host { total_bytes, available_bytes, groups: Vec::new(), own_bytes: 0, pinned_bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(available_mib: u64, groups: &[(Option<u64>, u64, u64)]) -> Host {
        let group = |&(limit, used, cache): &(Option<u64>, u64, u64)| Group {
            limit_bytes: limit.map(|l| l * MIB),
            used_bytes: used * MIB,
            reclaimable_bytes: cache * MIB,
        };
        Host {
            total_bytes: 16 * GIB,
            available_bytes: available_mib * MIB,
            groups: groups.iter().map(group).collect(),
            own_bytes: 10 * MIB,
            pinned_bytes: 0,
        }
    }

    #[test]
    fn the_least_of_host_and_groups_binds_and_its_page_cache_does_not_count_as_used() {
        let free = budget(&host(8000, &[(None, 5000, 0)]));
        assert_eq!((free.headroom_bytes, free.group), (8010 * MIB, None));
        assert_eq!(free.bytes, free.headroom_bytes - 16 * GIB / 20);
        // 1000 - (300 - 100) = 800, and the outer group leaves 2000 - 1900 = 100.
        let inner = budget(&host(8000, &[(Some(1000), 300, 100), (Some(4000), 1900, 0)]));
        assert_eq!((inner.headroom_bytes, inner.group), (810 * MIB, Some(0)));
        let outer = budget(&host(8000, &[(Some(1000), 300, 100), (Some(2000), 1900, 0)]));
        assert_eq!((outer.headroom_bytes, outer.group), (110 * MIB, Some(1)));
    }

    #[test]
    fn page_cache_that_we_depend_on_is_not_free() {
        let mut host = host(8000, &[(Some(1000), 600, 500)]);
        assert_eq!(budget(&host).headroom_bytes, 910 * MIB);
        host.pinned_bytes = 400 * MIB;
        assert_eq!(budget(&host).headroom_bytes, 510 * MIB);
        // More is pinned than the group holds: part of it is charged elsewhere.
        host.pinned_bytes = 4000 * MIB;
        assert_eq!(budget(&host).headroom_bytes, 410 * MIB);
    }

    #[test]
    fn a_group_that_is_over_its_limit_leaves_nothing() {
        let over = budget(&host(8000, &[(Some(100), 200, 0)]));
        assert_eq!(over.bytes, 10 * MIB - GROUP_RESERVE_MIN_BYTES);
        assert_eq!(budget(&host(0, &[])).bytes, 0);
        assert_eq!(over.missing_bytes(10 * MIB), GROUP_RESERVE_MIN_BYTES);
        assert_eq!(budget(&host(8000, &[])).missing_bytes(10 * MIB), 0);
    }

    #[test]
    fn machines_are_taken_for_what_they_are_sold_as() {
        let mib = |n: u64| n * MIB;
        assert_eq!(nominal_bytes(mib(3890)), 4 * GIB);
        assert_eq!(nominal_bytes(mib(7800)), 8 * GIB);
        assert_eq!(nominal_bytes(mib(1900)), 2 * GIB);
        assert_eq!(nominal_bytes(mib(24105)), mib(24105));
        assert_eq!(pool_bytes(mib(1900)), 0);
        assert_eq!(pool_bytes(mib(3890)), 2 * GIB);
        assert_eq!(pool_bytes(mib(7800)), 4 * GIB);
        assert_eq!(pool_bytes(mib(15700)), 8 * GIB);
    }

    #[test]
    fn the_pool_is_clamped_by_what_there_is() {
        assert_eq!(budget(&host(3000, &[])).pool_bytes, 3010 * MIB - 16 * GIB / 20);
        for gib in [2, 4, 8, 16] {
            let device = device(gib * GIB);
            assert_eq!(nominal_bytes(device.total_bytes), gib * GIB);
            let budget = budget(&device);
            assert!(budget.bytes > gib * GIB / 2 && budget.bytes < gib * GIB, "{gib} {budget:?}");
        }
    }
}
