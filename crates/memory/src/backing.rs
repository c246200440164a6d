//! What can hold weights on this machine, from best to last.

use crate::Error;
use crate::buffer::HUGE_PAGE_BYTES;
use crate::hugetlb::HugeFile;
use crate::region::lockable;
use std::fs;

/// What holds the memory of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backing {
    /// Huge pages of the system's pool, in a memory file that is sealed once it is filled. They are never swapped.
    Huge,
    /// Private memory, transparent huge pages, locked.
    Thp,
    /// Private memory, base pages, locked.
    Base,
    /// Private memory that the system may swap; in huge pages where it gives them.
    Unpinned,
}

impl Backing {
    /// From best to last.
    pub const ALL: [Backing; 4] = [Backing::Huge, Backing::Thp, Backing::Base, Backing::Unpinned];

    /// The word of `--backing`.
    pub fn name(self) -> &'static str {
        match self {
            Backing::Huge => "huge",
            Backing::Thp => "thp",
            Backing::Base => "base",
            Backing::Unpinned => "unpinned",
        }
    }

    pub(crate) fn is_locked(self) -> bool {
        matches!(self, Backing::Thp | Backing::Base)
    }
}

/// Which backing is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Choice {
    /// The first that can hold the region.
    #[default]
    Best,
    /// This one, or an error.
    Only(Backing),
}

/// What one backing can do here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Support {
    /// Which.
    pub backing: Backing,
    /// Whether it can hold what was asked for.
    pub available: bool,
    /// What was found.
    pub reason: String,
    /// What to do about it, if anything is to be done.
    pub fix: Option<String>,
}

/// What each backing can do for a region of `len_bytes`, from best to last. Allocates nothing.
pub fn probe(len_bytes: usize) -> Vec<Support> {
    Backing::ALL.map(|backing| support(backing, len_bytes)).to_vec()
}

fn support(backing: Backing, len_bytes: usize) -> Support {
    let (available, reason, fix) = match backing {
        Backing::Huge => huge_pages(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), len_bytes),
        Backing::Thp => {
            match thp(&fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default()) {
                (true, reason, _) => {
                    let (locks, lock_reason, fix) = locked(len_bytes);
                    (locks, format!("{reason}; {lock_reason}"), fix)
                }
                refused => refused,
            }
        }
        Backing::Base => locked(len_bytes),
        Backing::Unpinned => (true, "the system may swap it".to_owned(), None),
    };
    Support { backing, available, reason, fix }
}

type Found = (bool, String, Option<String>);

/// Whether /proc/meminfo shows enough free huge pages.
fn huge_pages(meminfo: &str, len_bytes: usize) -> Found {
    let field = |name: &str| {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        rest.split_whitespace().next()?.parse::<usize>().ok()
    };
    let wanted = len_bytes.div_ceil(HUGE_PAGE_BYTES);
    match (field("Hugepagesize"), field("HugePages_Free"), field("HugePages_Rsvd"), field("HugePages_Total")) {
        (Some(2048), Some(free), Some(reserved), Some(total)) => {
            let free = free.saturating_sub(reserved);
            let fix = format!("sysctl vm.nr_hugepages={}", total + wanted.saturating_sub(free));
            let reason = format!("{free} huge pages of 2 MiB are free, {wanted} are needed");
            (free >= wanted, reason, (free < wanted).then_some(fix))
        }
        (Some(other), ..) => (false, format!("huge pages have {other} KiB here, not 2048"), None),
        _ => (false, "this kernel has no pool of huge pages".to_owned(), None),
    }
}

/// Whether /sys/kernel/mm/transparent_hugepage/enabled allows huge pages where they are asked for.
fn thp(enabled: &str) -> Found {
    match enabled.split('[').nth(1).and_then(|rest| rest.split(']').next()) {
        Some(mode @ ("always" | "madvise")) => (true, format!("transparent huge pages: {mode}"), None),
        Some(mode) => {
            let fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled".to_owned();
            (false, format!("transparent huge pages: {mode}"), Some(fix))
        }
        None => (false, "this kernel has no transparent huge pages".to_owned(), None),
    }
}

fn locked(len_bytes: usize) -> Found {
    if lockable(len_bytes) {
        return (true, "it can be locked".to_owned(), None);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let limit = limit.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    let kib = len_bytes.div_ceil(1024);
    let fix = format!("ulimit -l {kib}, or LimitMEMLOCK={kib}K in the service's unit");
    (false, format!("the limit of locked memory (RLIMIT_MEMLOCK) is {limit}, {len_bytes} are needed"), Some(fix))
}

/// The backing for `len_bytes`, and the huge pages if it is that one.
pub(crate) fn choose(len_bytes: usize, choice: Choice) -> Result<(Backing, Option<HugeFile>), Error> {
    let candidates: &[Backing] = match &choice {
        Choice::Best => &Backing::ALL,
        Choice::Only(one) => std::slice::from_ref(one),
    };
    let mut refused = None;
    for &backing in candidates {
        let mut found = support(backing, len_bytes);
        if found.available && backing != Backing::Huge {
            return Ok((backing, None));
        }
        if found.available {
            // Someone else may be quicker.
            match HugeFile::new(len_bytes.max(1).next_multiple_of(HUGE_PAGE_BYTES)) {
                Ok(file) => return Ok((backing, Some(file))),
                Err(e) => found.reason = format!("{}; the system refused them: {e}", found.reason),
            }
        }
        refused.get_or_insert(found);
    }
    let found = refused.expect("a candidate that was refused: unpinned memory never is");
    Err(Error::Backing {
        backing: found.backing.name(),
        len_bytes,
        reason: found.reason,
        fix: found.fix.unwrap_or_else(|| "choose another".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal: 1 kB\nHugePages_Total:      10\nHugePages_Free:        8\nHugePages_Rsvd:        3\n\
                           Hugepagesize:       2048 kB\n";

    #[test]
    fn free_huge_pages_are_those_that_no_one_has_reserved() {
        let (five, six) = (huge_pages(MEMINFO, 5 * HUGE_PAGE_BYTES), huge_pages(MEMINFO, 5 * HUGE_PAGE_BYTES + 1));
        assert_eq!((five.0, five.2), (true, None));
        assert_eq!((six.0, six.2.as_deref()), (false, Some("sysctl vm.nr_hugepages=11")));
        assert!(six.1.contains("5 huge pages") && six.1.contains("6 are needed"), "{}", six.1);
    }

    #[test]
    fn a_machine_without_huge_pages_of_two_mebibytes_has_none() {
        assert!(!huge_pages("MemTotal: 1 kB\n", 1).0);
        assert!(!huge_pages(&MEMINFO.replace("2048", "524288"), 1).0);
    }

    #[test]
    fn transparent_huge_pages_are_there_unless_they_are_off() {
        assert!(thp("always [madvise] never\n").0 && thp("[always] madvise never\n").0);
        let never = thp("always madvise [never]\n");
        assert!(!never.0 && never.2.is_some());
        assert_eq!(thp("").2, None);
    }

    #[test]
    fn every_probe_tells_what_it_found_and_the_last_resort_is_always_there() {
        let all = probe(64 << 20);
        assert_eq!(all.len(), Backing::ALL.len());
        assert!(all.iter().all(|s| !s.reason.is_empty()));
        assert!(all.last().is_some_and(|s| s.available && s.backing == Backing::Unpinned));
    }

    #[test]
    fn a_backing_that_was_asked_for_and_cannot_be_had_is_an_error_that_says_how_to_get_it() {
        let error = choose(1 << 50, Choice::Only(Backing::Huge)).expect_err("no pool holds a pebibyte");
        let text = error.to_string();
        assert!(text.contains("--backing huge") && text.contains(&(1u64 << 50).to_string()), "{text}");
        assert_ne!(choose(1 << 40, Choice::Best).expect("the last resort is only addresses").0, Backing::Huge);
    }
}
