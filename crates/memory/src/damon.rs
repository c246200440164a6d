//! DAMON through sysfs: which parts of our own memory nobody has touched for a while.
//!
//! An optional second opinion beside the program's own clock, never needed for correctness. Used only where no kdamond is
//! there: one that is belongs to somebody else and is left alone, and ours is taken away again. Needs root.
//! Source: the kernel's `Documentation/admin-guide/mm/damon/usage.rst`.

use crate::Error;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The directory of kdamonds, below the root.
const KDAMONDS: &str = "sys/kernel/mm/damon/admin/kdamonds";
/// How often pages are looked at and how long looks are added up, in microseconds: the kernel's own defaults. The list of
/// mappings need not be followed, because the ranges are given.
const INTERVALS_US: [(&str, u64); 3] = [("sample_us", 5_000), ("aggr_us", 100_000), ("update_us", 60_000_000)];
/// Bounds of the number of regions, and so of the work.
const REGIONS: [(&str, u64); 2] = [("min", 10), ("max", 1000)];

/// What the machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// This kernel has none, or does not show it to this user.
    Absent,
    /// Nobody uses it.
    Free,
    /// Somebody does, with so many kdamonds.
    InUse(u64),
}

impl State {
    /// The state of the machine whose files are at `root` (`/`, but for tests).
    pub fn read(root: &Path) -> State {
        let number = fs::read_to_string(root.join(KDAMONDS).join("nr_kdamonds")).ok();
        match number.and_then(|text| text.trim().parse().ok()) {
            None => State::Absent,
            Some(0) => State::Free,
            Some(n) => State::InUse(n),
        }
    }
}

/// A kdamond of our own; dropped, it ends.
#[derive(Debug)]
pub struct Observer {
    kdamonds: PathBuf,
}

impl Observer {
    /// Observes `ranges` of the memory of process `pid`, of the machine whose files are at `root`. `None` where somebody else
    /// has a kdamond, or there is none. What counts as idle was not touched for `idle_ms`.
    pub fn start(root: &Path, pid: u32, ranges: &[Range<u64>], idle_ms: u64) -> Result<Option<Observer>, Error> {
        if State::read(root) != State::Free {
            return Ok(None);
        }
        let observer = Observer { kdamonds: root.join(KDAMONDS) };
        // From here on it is ours: if anything fails, the drop takes it away.
        observer.set("nr_kdamonds", "1")?;
        observer.set("0/contexts/nr_contexts", "1")?;
        observer.set("0/contexts/0/operations", "vaddr")?;
        for (name, us) in INTERVALS_US {
            observer.set(&format!("0/contexts/0/monitoring_attrs/intervals/{name}"), &us.to_string())?;
        }
        for (name, n) in REGIONS {
            observer.set(&format!("0/contexts/0/monitoring_attrs/nr_regions/{name}"), &n.to_string())?;
        }
        let target = "0/contexts/0/targets";
        observer.set(&format!("{target}/nr_targets"), "1")?;
        observer.set(&format!("{target}/0/pid_target"), &pid.to_string())?;
        observer.set(&format!("{target}/0/regions/nr_regions"), &ranges.len().to_string())?;
        for (i, range) in ranges.iter().enumerate() {
            observer.set(&format!("{target}/0/regions/{i}/start"), &range.start.to_string())?;
            observer.set(&format!("{target}/0/regions/{i}/end"), &range.end.to_string())?;
        }
        let scheme = "0/contexts/0/schemes";
        observer.set(&format!("{scheme}/nr_schemes"), "1")?;
        observer.set(&format!("{scheme}/0/action"), "stat")?;
        // Ages are counted in aggregations.
        let age = idle_ms * 1000 / INTERVALS_US[1].1;
        let pattern = [("sz", 0, u64::MAX), ("nr_accesses", 0, 0), ("age", age, u64::from(u32::MAX))];
        for (what, min, max) in pattern {
            observer.set(&format!("{scheme}/0/access_pattern/{what}/min"), &min.to_string())?;
            observer.set(&format!("{scheme}/0/access_pattern/{what}/max"), &max.to_string())?;
        }
        observer.set("0/state", "on")?;
        Ok(Some(observer))
    }

    fn set(&self, file: &str, value: &str) -> Result<(), Error> {
        let path = self.kdamonds.join(file);
        // Opened, never made: what is not there this kernel does not have.
        let written = fs::OpenOptions::new().write(true).truncate(true).open(&path);
        let written = written.and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()));
        written.map_err(|e| Error::io(&path.display().to_string(), e))
    }

    /// The ranges of addresses that were idle at the last look, ascending.
    pub fn idle(&self) -> Result<Vec<Range<u64>>, Error> {
        self.set("0/state", "update_schemes_tried_regions")?;
        let path = self.kdamonds.join("0/contexts/0/schemes/0/tried_regions");
        let entries = fs::read_dir(&path).map_err(|e| Error::io(&path.display().to_string(), e))?;
        let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let region = |entry: fs::DirEntry| Some(number(entry.path().join("start"))?..number(entry.path().join("end"))?);
        let mut regions: Vec<Range<u64>> = entries.flatten().filter_map(region).collect();
        regions.sort_unstable_by_key(|r| r.start);
        // Neighbours are one: what lies across both is idle too.
        let mut idle: Vec<Range<u64>> = Vec::new();
        for region in regions {
            match idle.last_mut() {
                Some(last) if last.end >= region.start => last.end = last.end.max(region.end),
                _ => idle.push(region),
            }
        }
        Ok(idle)
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        // A kernel that refuses this has nothing to take away.
        let _ = self.set("0/state", "off");
        let _ = self.set("nr_kdamonds", "0");
    }
}

/// Whether all of `range` is in one of the `idle` ranges, which ascend.
pub fn is_within(idle: &[Range<u64>], range: &Range<u64>) -> bool {
    let before = idle.partition_point(|r| r.start <= range.start);
    before > 0 && idle[before - 1].end >= range.end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(kdamonds: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        fixtures::damon::tree(root.path(), kdamonds, &[0x9000..0xa000, 0x1000..0x3000, 0x3000..0x4000]);
        root
    }

    fn text(root: &tempfile::TempDir, file: &str) -> String {
        fs::read_to_string(root.path().join(KDAMONDS).join(file)).expect("a file")
    }

    #[test]
    fn where_nobody_is_we_observe_and_leave_nothing_behind() {
        let root = tree("0\n");
        assert_eq!(State::read(root.path()), State::Free);
        let ranges = [0x1000..0x8000, 0x9000..0xb000];
        let observer = Observer::start(root.path(), 77, &ranges, 30_000).expect("files").expect("it is free");
        for (file, want) in [
            ("nr_kdamonds", "1"),
            ("0/state", "on"),
            ("0/contexts/0/operations", "vaddr"),
            ("0/contexts/0/targets/0/pid_target", "77"),
            ("0/contexts/0/targets/0/regions/1/start", "36864"),
            ("0/contexts/0/schemes/0/access_pattern/nr_accesses/max", "0"),
            ("0/contexts/0/schemes/0/access_pattern/age/min", "300"),
        ] {
            assert_eq!(text(&root, file), want, "{file}");
        }
        let idle = observer.idle().expect("files");
        assert_eq!(idle, [0x1000..0x4000, 0x9000..0xa000]);
        assert_eq!(text(&root, "0/state"), "update_schemes_tried_regions");
        for (range, want) in
            [(0x1000..0x4000, true), (0x2000..0x3800, true), (0x3000..0x4001, false), (0xfff..0x2000, false)]
        {
            assert_eq!(is_within(&idle, &range), want, "{range:?}");
        }
        drop(observer);
        assert_eq!((text(&root, "0/state"), text(&root, "nr_kdamonds")), ("off".to_owned(), "0".to_owned()));
    }

    #[test]
    fn somebody_elses_kdamond_is_left_alone() {
        let root = tree("1\n");
        assert_eq!(State::read(root.path()), State::InUse(1));
        assert!(Observer::start(root.path(), 77, &[], 1000).expect("no error").is_none());
        assert_eq!(
            (text(&root, "nr_kdamonds"), text(&root, "0/contexts/0/operations")),
            ("1\n".to_owned(), String::new())
        );
        let empty = tempfile::tempdir().expect("a directory");
        assert_eq!(State::read(empty.path()), State::Absent);
        assert!(Observer::start(empty.path(), 77, &[], 1000).expect("no error").is_none());
    }

    #[test]
    fn a_kernel_that_lacks_a_file_is_an_error_and_nothing_is_left_behind() {
        let root = tree("0\n");
        fs::remove_file(root.path().join(KDAMONDS).join("0/contexts/0/schemes/0/action")).expect("it was there");
        let error = Observer::start(root.path(), 77, &[], 1000).expect_err("no such file");
        assert!(error.to_string().contains("action"), "{error}");
        assert_eq!(text(&root, "nr_kdamonds"), "0");
    }
}
