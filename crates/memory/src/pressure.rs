//! What the kernel says of memory: the machine's, the control groups', this process's; and how scarce it is.
//!
//! Everything here reads text files of `/proc` and the control group file systems, needs no privileges, and is absent
//! (`None`) where the kernel does not tell. The parsers are pure; [`Reader`] has the paths, so that tests can show
//! them a tree of files.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The machine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    /// `MemTotal`.
    pub total_bytes: u64,
    /// `MemAvailable`: what can be had without swapping, in the kernel's opinion.
    pub available_bytes: u64,
    /// Free pages of the huge page pool, and their size.
    pub huge_pages_free: u64,
    /// `Hugepagesize`.
    pub huge_page_bytes: u64,
    /// `SwapTotal`.
    pub swap_bytes: u64,
}

/// A control group of the process, or one above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its directory.
    pub path: PathBuf,
    /// 1 or 2.
    pub version: u8,
    /// The most it may hold; `None` if it has no limit.
    pub limit_bytes: Option<u64>,
    /// What is charged to it.
    pub used_bytes: u64,
    /// Page cache in that.
    pub file_bytes: u64,
}

/// This process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Process {
    /// `VmRSS`.
    pub resident_bytes: u64,
    /// `VmHWM`: the most that was resident at once.
    pub peak_bytes: u64,
    /// `RssAnon`: our own memory.
    pub anonymous_bytes: u64,
    /// `RssFile` and `RssShmem`: the program and what it maps.
    pub mapped_bytes: u64,
    /// `VmLck`.
    pub locked_bytes: u64,
    /// `VmSwap`.
    pub swapped_bytes: u64,
    /// `VmPTE`: page tables.
    pub page_table_bytes: u64,
    /// `HugetlbPages`, which no other field counts.
    pub huge_pool_bytes: u64,
}

/// A line of a pressure file: the share of time in which tasks waited.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stall {
    /// Percent of the last 10 s.
    pub avg10: f64,
    /// Percent of the last 60 s.
    pub avg60: f64,
    /// Microseconds since the machine started.
    pub total_us: u64,
}

/// Pressure stall information of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Psi {
    /// Some task waited.
    pub some: Stall,
    /// All tasks waited at once.
    pub full: Stall,
}

/// A value in kB of a file like `/proc/meminfo` or `/proc/self/status`, in bytes.
pub fn kib_field(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Parses `/proc/meminfo`.
pub fn meminfo(text: &str) -> Option<MemInfo> {
    let count = |key: &str| text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':')?.trim().parse().ok());
    Some(MemInfo {
        total_bytes: kib_field(text, "MemTotal")?,
        available_bytes: kib_field(text, "MemAvailable")?,
        huge_pages_free: count("HugePages_Free").unwrap_or(0),
        huge_page_bytes: kib_field(text, "Hugepagesize").unwrap_or(0),
        swap_bytes: kib_field(text, "SwapTotal").unwrap_or(0),
    })
}

/// Parses `/proc/self/status`.
pub fn process(text: &str) -> Option<Process> {
    let field = |key| kib_field(text, key).unwrap_or(0);
    Some(Process {
        resident_bytes: kib_field(text, "VmRSS")?,
        peak_bytes: field("VmHWM"),
        anonymous_bytes: field("RssAnon"),
        mapped_bytes: field("RssFile") + field("RssShmem"),
        locked_bytes: field("VmLck"),
        swapped_bytes: field("VmSwap"),
        page_table_bytes: field("VmPTE"),
        huge_pool_bytes: field("HugetlbPages"),
    })
}

/// Parses a pressure file of memory.
pub fn psi(text: &str) -> Option<Psi> {
    let line = |kind: &str| -> Option<Stall> {
        let line = text.lines().find_map(|l| l.strip_prefix(kind))?;
        let field = |key: &str| line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        Some(Stall {
            avg10: field("avg10")?.parse().ok()?,
            avg60: field("avg60")?.parse().ok()?,
            total_us: field("total")?.parse().ok()?,
        })
    };
    Some(Psi { some: line("some ")?, full: line("full ")? })
}

/// Major faults in `/proc/self/stat`: pages that had to come from disk.
pub fn major_faults(stat: &str) -> Option<u64> {
    // The second field is a name in parentheses, which may hold anything.
    let rest = &stat[stat.rfind(')')? + 1..];
    rest.split_whitespace().nth(9)?.parse().ok()
}

/// The time of a `cpu.stat` in which its group was not let run: microseconds in version 2, nanoseconds in version 1.
fn throttled(stat: &str) -> Option<Duration> {
    let v2 = stat_field(stat, "throttled_usec").map(Duration::from_micros);
    v2.or_else(|| stat_field(stat, "throttled_time").map(Duration::from_nanos))
}

/// The time of a `schedstat` in which its thread waited for a processor: the second field, nanoseconds.
fn processor_wait(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// A number in a file of `key value` lines.
fn stat_field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The most bytes that version 1 writes for "no limit" is just below 2^63, in whole pages.
const UNLIMITED_BYTES: u64 = 1 << 62;

fn limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|&bytes: &u64| bytes < UNLIMITED_BYTES)
}

/// The groups of a process: of `/proc/self/cgroup`, the path in the version 1 hierarchy of `controller` and in version 2.
fn group_paths<'t>(text: &'t str, controller: &str) -> (Option<&'t str>, Option<&'t str>) {
    let mut paths = (None, None);
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        match (fields.next(), fields.next(), fields.next()) {
            (Some("0"), Some(""), path) => paths.1 = path,
            (_, Some(controllers), path) if controllers.split(',').any(|c| c == controller) => paths.0 = path,
            _ => {}
        }
    }
    paths
}

/// Where the control groups are mounted: of `/proc/self/mountinfo`, for version 1 of `controller` and for version 2, the
/// group at the top of the mount and the mount's place.
fn group_mounts<'t>(text: &'t str, controller: &str) -> [Option<(&'t str, &'t str)>; 2] {
    let mut mounts = [None, None];
    for line in text.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let (Some(&root), Some(&place)) = (left.get(3), left.get(4)) else { continue };
        let mut right = right.split(' ');
        match (right.next(), right.nth(1)) {
            (Some("cgroup2"), _) => mounts[1] = Some((root, place)),
            (Some("cgroup"), Some(options)) if options.split(',').any(|o| o == controller) => {
                mounts[0] = Some((root, place));
            }
            _ => {}
        }
    }
    mounts
}

/// Reads the kernel's files below a root.
#[derive(Debug, Clone)]
pub struct Reader {
    root: PathBuf,
}

impl Default for Reader {
    fn default() -> Self {
        Reader::at(Path::new("/"))
    }
}

impl Reader {
    /// A reader of the tree at `root`: `/`, or a copy for tests.
    pub fn at(root: &Path) -> Reader {
        Reader { root: root.to_owned() }
    }

    /// The text of `path`, which is absolute.
    pub fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path.trim_start_matches('/'))).ok()
    }

    /// The machine's memory.
    pub fn meminfo(&self) -> Option<MemInfo> {
        meminfo(&self.text("/proc/meminfo")?)
    }

    /// This process.
    pub fn process(&self) -> Option<Process> {
        process(&self.text("/proc/self/status")?)
    }

    /// What all mappings of this process hold in proportion to how many share them (`Pss`).
    pub fn proportional_bytes(&self) -> Option<u64> {
        kib_field(&self.text("/proc/self/smaps_rollup")?, "Pss")
    }

    /// Major faults of this process so far.
    pub fn major_faults(&self) -> Option<u64> {
        major_faults(&self.text("/proc/self/stat")?)
    }

    /// Memory pressure: of the process's own control group where it is told, else of the machine.
    pub fn psi(&self) -> Option<Psi> {
        let own = self.groups().into_iter().find(|g| g.version == 2);
        let own = own.and_then(|g| psi(&fs::read_to_string(g.path.join("memory.pressure")).ok()?));
        own.or_else(|| psi(&self.text("/proc/pressure/memory")?))
    }

    /// The control groups of this process that account for memory, its own first, up to the top of what is mounted.
    pub fn groups(&self) -> Vec<Group> {
        let dirs = self.group_dirs("memory");
        dirs.iter().filter_map(|(dir, version)| group(dir, *version)).collect()
    }

    /// The directories of this process's control groups in the hierarchies of `controller`, each with its version.
    fn group_dirs(&self, controller: &str) -> Vec<(PathBuf, u8)> {
        let paths = self.text("/proc/self/cgroup").unwrap_or_default();
        let mounts = self.text("/proc/self/mountinfo").unwrap_or_default();
        let (v1, v2) = group_paths(&paths, controller);
        let mut dirs = Vec::new();
        for ((path, mount), version) in [v1, v2].into_iter().zip(group_mounts(&mounts, controller)).zip([1, 2]) {
            let (Some(path), Some((top, place))) = (path, mount) else { continue };
            // In a container the mount shows a part of the tree, and the path may be told from the tree's own top.
            let path = path.strip_prefix(top.trim_end_matches('/')).unwrap_or("");
            let place = self.root.join(place.trim_start_matches('/'));
            let own = place.join(path.trim_start_matches('/'));
            let below = |dir: &&Path| dir.starts_with(&place);
            dirs.extend(own.ancestors().take_while(below).map(|dir| (dir.to_owned(), version)));
        }
        dirs
    }

    /// Time in which this process's control groups were not let run, since they were made: their CPU quota was used up.
    pub fn throttled(&self) -> Option<Duration> {
        let of = |(dir, _): (PathBuf, u8)| throttled(&fs::read_to_string(dir.join("cpu.stat")).ok()?);
        self.group_dirs("cpu").into_iter().filter_map(of).max()
    }

    /// Time in which threads of this process could have run and waited for a processor, all together, so far.
    pub fn processor_wait(&self) -> Option<Duration> {
        let tasks = fs::read_dir(self.root.join("proc/self/task")).ok()?;
        let of = |task: fs::DirEntry| processor_wait(&fs::read_to_string(task.path().join("schedstat")).ok()?);
        Some(tasks.filter_map(Result::ok).filter_map(of).sum())
    }
}

/// Reads the group at `dir`; `None` if it does not account for memory.
fn group(dir: &Path, version: u8) -> Option<Group> {
    let text = |name: &str| fs::read_to_string(dir.join(name)).ok();
    let (used, limit_file, prefix) = match version {
        1 => ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_"),
        _ => ("memory.current", "memory.max", ""),
    };
    let used_bytes = text(used)?.trim().parse().ok()?;
    let stat = text("memory.stat").unwrap_or_default();
    let field = |key: &str| stat_field(&stat, &format!("{prefix}{key}")).unwrap_or(0);
    let file_bytes = field("inactive_file") + field("active_file");
    let high = if version == 2 { text("memory.high").and_then(|t| limit(&t)) } else { None };
    let max = text(limit_file).and_then(|t| limit(&t));
    // Above `high` the kernel throttles to a crawl, which is no better than a limit.
    let limit_bytes = max.into_iter().chain(high).min();
    Some(Group { path: dir.to_owned(), version, limit_bytes, used_bytes, file_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_or_absent() {
        let status = "Name:\tairs\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nRssAnon:\t 512 kB\nRssFile:\t 500 kB\n\
                      RssShmem:\t 12 kB\nVmLck:\t 8 kB\n";
        let p = process(status).unwrap();
        assert_eq!((p.peak_bytes, p.resident_bytes, p.anonymous_bytes), (2 << 20, 1 << 20, 512 << 10));
        assert_eq!((p.mapped_bytes, p.locked_bytes, p.swapped_bytes), (512 << 10, 8 << 10, 0));
        assert_eq!(process("Name:\tairs\n"), None);
        assert_eq!(kib_field("VmHWM:\t x kB\n", "VmHWM"), None);
        let info = "MemTotal: 4000000 kB\nMemAvailable: 3000 kB\nHugePages_Free:        7\nHugepagesize:  2048 kB\n";
        let info = meminfo(info).unwrap();
        assert_eq!((info.total_bytes, info.available_bytes), (4_096_000_000, 3_072_000));
        assert_eq!((info.huge_pages_free, info.huge_page_bytes, info.swap_bytes), (7, 2 << 20, 0));
    }

    #[test]
    fn major_faults_follow_a_name_that_may_hold_anything() {
        let stat = "12 (a) b (c)) S 1 2 3 4 5 6 111 0 42 0 7 8";
        assert_eq!(major_faults(stat), Some(42));
        assert_eq!(major_faults("12 (a"), None);
    }

    #[test]
    fn pressure_is_two_lines_of_shares() {
        let text =
            "some avg10=1.50 avg60=0.93 avg300=0.37 total=1401770\nfull avg10=0.07 avg60=0.77 avg300=0.30 total=9\n";
        let psi = psi(text).unwrap();
        assert_eq!((psi.some.avg10, psi.some.total_us, psi.full.avg60), (1.5, 1_401_770, 0.77));
        assert_eq!(super::psi("some avg10=x\n"), None);
    }

    /// A tree of files like the kernel's.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Reader) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let reader = Reader::at(dir.path());
        (dir, reader)
    }

    #[test]
    fn the_chain_of_version_2_goes_from_the_own_group_to_the_top() {
        let (_dir, reader) = tree(&[
            ("proc/self/cgroup", "0::/user/app\n"),
            ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/user/app/memory.current", "1000\n"),
            ("sys/fs/cgroup/user/app/memory.max", "max\n"),
            ("sys/fs/cgroup/user/app/memory.high", "9000\n"),
            ("sys/fs/cgroup/user/app/memory.stat", "anon 600\nfile 400\ninactive_file 300\nactive_file 50\n"),
            ("sys/fs/cgroup/user/memory.current", "5000\n"),
            ("sys/fs/cgroup/user/memory.max", "8000\n"),
        ]);
        let groups = reader.groups();
        let numbers: Vec<_> = groups.iter().map(|g| (g.version, g.limit_bytes, g.used_bytes, g.file_bytes)).collect();
        assert_eq!(numbers, [(2, Some(9000), 1000, 350), (2, Some(8000), 5000, 0)], "the top accounts for nothing");
    }

    #[test]
    fn version_1_has_a_hierarchy_of_its_own_and_a_huge_number_for_no_limit() {
        let (_dir, reader) = tree(&[
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "70\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "100\n"),
            ("sys/fs/cgroup/memory/a/b/memory.stat", "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 10\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "80\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let groups = reader.groups();
        let numbers: Vec<_> = groups.iter().map(|g| (g.version, g.limit_bytes, g.used_bytes, g.file_bytes)).collect();
        assert_eq!(numbers, [(1, Some(100), 70, 40), (1, None, 80, 0)]);
    }

    #[test]
    fn in_a_container_the_path_may_be_told_from_the_top_of_the_tree() {
        let (_dir, reader) = tree(&[
            ("proc/self/cgroup", "4:memory:/docker/abc\n"),
            ("proc/self/mountinfo", "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "70\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "100\n"),
        ]);
        assert_eq!(reader.groups().len(), 1);
        assert_eq!(reader.groups()[0].limit_bytes, Some(100));
    }

    #[test]
    fn time_without_a_processor_is_told_by_group_and_by_thread() {
        let (_dir, reader) = tree(&[
            ("proc/self/cgroup", "3:cpu,cpuacct:/a\n0::/b\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/cpu/a/cpu.stat", "nr_throttled 2\nthrottled_time 5000000\n"),
            ("sys/fs/cgroup/unified/b/cpu.stat", "usage_usec 9\nthrottled_usec 7000\n"),
            ("proc/self/task/10/schedstat", "900 1000000 3\n"),
            ("proc/self/task/11/schedstat", "900 2000000 3\n"),
        ]);
        assert_eq!(reader.throttled(), Some(Duration::from_millis(7)), "what holds it longest");
        assert_eq!(reader.processor_wait(), Some(Duration::from_millis(3)));
    }

    #[test]
    fn where_the_kernel_tells_nothing_all_is_absent() {
        let (_dir, reader) = tree(&[]);
        assert_eq!((reader.meminfo(), reader.process(), reader.psi()), (None, None, None));
        assert_eq!((reader.throttled(), reader.processor_wait()), (None, None));
        assert_eq!((reader.major_faults(), reader.proportional_bytes(), reader.groups()), (None, None, vec![]));
    }

    #[test]
    fn this_machine_tells_its_memory() {
        let reader = Reader::default();
        let (info, process) = (reader.meminfo().unwrap(), reader.process().unwrap());
        assert!(info.available_bytes <= info.total_bytes && process.resident_bytes > 0);
        assert!(process.resident_bytes <= process.peak_bytes);
        assert!(reader.major_faults().is_some());
    }
}
