//! The program's own code, kept in memory.
//!
//! Where a neighbour takes all there is, the kernel takes the pages of files first, and code is one: weights that are
//! locked are of no use to a loop that is read back from disk at each turn.
//!
//! Invariants:
//! 1. Locking changes no contents and takes no memory that was not asked for; an address that is no longer mapped is an
//!    error of the call.
#![allow(unsafe_code)]

use rustix::mm::{MlockFlags, mlock_with};
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::ops::Range;

/// Keeps what has been touched of the program's code in memory, and what will be, unless the limit on locked memory is
/// needed for `others_bytes` that will be locked later. Gives the bytes of code that are kept so from now on.
pub fn pin(others_bytes: u64) -> u64 {
    let ranges = code(&fs::read_to_string("/proc/self/maps").unwrap_or_default());
    let bytes: u64 = ranges.iter().map(|range| range.len() as u64).sum();
    let limit = getrlimit(Resource::Memlock).current;
    // What does not fit anyway will not be locked, and needs no room.
    let is_needed = |limit: u64| limit >= others_bytes && limit < others_bytes.saturating_add(bytes);
    if limit.is_some_and(is_needed) {
        return 0;
    }
    let pinned = ranges.iter().filter(|range| {
        let at = std::ptr::without_provenance_mut(range.start);
        // SAFETY: invariant 1.
        unsafe { mlock_with(at, range.len(), MlockFlags::ONFAULT) }.is_ok()
    });
    pinned.map(|range| range.len() as u64).sum()
}

/// Of `/proc/self/maps`, what is mapped of the files that code is run from: the code itself first, then their constants.
fn code(maps: &str) -> Vec<Range<usize>> {
    let entries: Vec<(&str, &str, Range<usize>)> = maps.lines().filter_map(entry).collect();
    let is_code = |(file, rights, _): &&(&str, &str, _)| rights.starts_with("r-x") && *file != "0";
    let files: Vec<&str> = entries.iter().filter(is_code).map(|(file, ..)| *file).collect();
    let constants = |(file, rights, _): &&(&str, &str, _)| rights.starts_with("r--") && files.contains(file);
    entries.iter().filter(is_code).chain(entries.iter().filter(constants)).map(|(.., range)| range.clone()).collect()
}

/// Inode, rights and addresses of a line.
fn entry(line: &str) -> Option<(&str, &str, Range<usize>)> {
    let mut words = line.split_whitespace();
    let (addresses, rights, inode) = (words.next()?, words.next()?, words.nth(2)?);
    let (start, end) = addresses.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some((inode, rights, address(start)?..address(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "1000-3000 r--p 00000000 fe:00 42 /bin/a program\n\
                        3000-7000 r-xp 00002000 fe:00 42 /bin/a program\n\
                        7000-8000 rw-p 00006000 fe:00 42 /bin/a program\n\
                        8000-9000 r--p 00000000 fe:00 43 /some/data\n\
                        9000-a000 r-xp 00000000 00:00 0 [vdso]\n\
                        a000-b000 r--p 00000000 00:00 0 \n";

    #[test]
    fn code_and_constants_are_found_and_data_of_others_is_not() {
        assert_eq!(code(MAPS), [0x3000..0x7000, 0x1000..0x3000]);
        assert_eq!(code("rubbish\n1-x r-xp\n"), []);
    }

    #[test]
    fn this_programs_code_can_be_kept_unless_the_limit_is_needed_for_others() {
        let limit = getrlimit(Resource::Memlock).current;
        match limit {
            Some(limit) => assert_eq!(pin(limit), 0, "others take all of it"),
            None => eprintln!("skipped: locked memory has no limit here"),
        }
        let pinned = pin(u64::MAX);
        if pinned == 0 {
            eprintln!("skipped: {limit:?} bytes may be locked");
            return;
        }
        let status = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let kept =
            status.lines().filter(|line| line.starts_with("VmFlags:") && line.split(' ').any(|flag| flag == "lo"));
        assert!(kept.count() > 0, "{pinned} bytes");
    }
}
