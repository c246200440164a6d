//! Files as sources: direct and buffered reads agree, leave the page cache as it was, and notice what happens to a file.

use memory::Error;
use memory::source::{ByteSource, FileSource, ReadOptions, ReadRoom, Reader};
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// Not a multiple of anything.
const LEN: usize = (1 << 20) + 12_345;

fn bytes() -> Vec<u8> {
    (0..LEN).map(|i| (i * 31 % 251) as u8).collect()
}

fn written(directory: &tempfile::TempDir) -> PathBuf {
    let path = directory.path().join("file");
    let mut file = File::create(&path).expect("a file");
    file.write_all(&bytes()).expect("room");
    // What is not on the disk cannot leave the page cache.
    file.sync_all().expect("a disk");
    path
}

fn open(path: &std::path::Path, direct: bool) -> FileSource {
    let source = FileSource::open(path, ReadOptions { direct }).expect("a file");
    if direct && !source.is_direct() {
        eprintln!("skipped: no direct reads on {:?}", source.storage());
    }
    source
}

/// Has the page cache forget the file.
fn forget(path: &std::path::Path) {
    let file = File::open(path).expect("a file");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
}

#[test]
fn direct_and_buffered_reads_of_any_ranges_give_the_files_bytes() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory);
    let want = bytes();
    let end = LEN as u64;
    let ranges = [0..1, 4095..4097, 512..70_000, 300_001..300_001, 999..1000, end - 1..end, end - 9000..end, 0..end];
    let mut direct_bytes = 0;
    for (direct, ring) in [(true, true), (true, false), (false, false)] {
        forget(&path);
        let source = open(&path, direct);
        let mut room = ReadRoom::new(ring);
        for ranges in [&ranges[..], &ranges[2..3], &[]] {
            let found = source.read(ranges, &mut room).expect("a good file");
            assert_eq!(found.len(), ranges.len());
            for (range, place) in ranges.iter().zip(found) {
                let want = &want[range.start as usize..range.end as usize];
                assert!(room.bytes()[place] == *want, "{range:?} direct {direct} ring {ring}");
            }
        }
        direct_bytes += source.direct_bytes();
        assert!(direct || source.direct_bytes() == 0);
        if open(&path, true).is_direct() {
            assert!(!direct || source.direct_bytes() >= end, "direct reads were asked for and are possible");
        }
    }
    eprintln!("{direct_bytes} bytes read directly");
}

#[test]
fn reading_leaves_the_page_cache_as_it_was() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory);
    for direct in [true, false] {
        forget(&path);
        let source = open(&path, direct);
        let all = 0..LEN as u64;
        match source.is_cached(all.clone()) {
            Some(false) => {}
            found => {
                eprintln!("skipped: the system says {found:?} about its page cache");
                return;
            }
        }
        let mut room = ReadRoom::new(true);
        let half = 0..LEN as u64 / 2;
        source.read(std::slice::from_ref(&half), &mut room).expect("a good file");
        assert_eq!(source.is_cached(0..LEN as u64 / 4), Some(false), "direct {direct}");
        // What others keep in the cache stays there, and is taken from there.
        std::fs::read(&path).expect("a good file");
        let before = source.direct_bytes();
        source.read(std::slice::from_ref(&all), &mut room).expect("a good file");
        assert_eq!((source.is_cached(all), source.direct_bytes()), (Some(true), before), "direct {direct}");
    }
}

#[test]
fn a_file_that_is_cut_off_or_written_to_is_an_error_that_says_so() {
    let directory = tempfile::tempdir().expect("a directory");
    for direct in [true, false] {
        for (len, offset) in [(LEN as u64 / 2, 0), (LEN as u64 / 2, LEN as u64 / 2 + 5), (LEN as u64 + 1, 0)] {
            let path = written(&directory);
            let source = open(&path, direct);
            let file = File::options().write(true).open(&path).expect("a file");
            file.set_len(len).expect("another length");
            let range = offset..offset + 100;
            let error = source.read(std::slice::from_ref(&range), &mut ReadRoom::new(true)).expect_err("another file");
            assert!(matches!(error, Error::Changed { .. } | Error::Short { .. }), "{error}");
            assert!(error.to_string().contains(&LEN.to_string()), "{error}");
            assert!(source.check().is_err());
        }
    }
}

#[test]
fn a_file_that_is_replaced_by_another_is_still_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory);
    let source = open(&path, true);
    std::fs::rename(&path, directory.path().join("moved")).expect("one directory");
    std::fs::write(&path, b"another").expect("room");
    let range = 5..10;
    let mut room = ReadRoom::new(true);
    let found = source.read(std::slice::from_ref(&range), &mut room).expect("the old file");
    assert_eq!(room.bytes()[found[0].clone()], bytes()[5..10]);
    assert_ne!(source.identity(), open(&path, true).identity());
}

#[test]
fn what_is_no_file_is_an_error_with_its_name() {
    let directory = tempfile::tempdir().expect("a directory");
    for path in [directory.path().to_owned(), directory.path().join("missing")] {
        let error = FileSource::open(&path, ReadOptions::default()).expect_err("no file");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}

#[test]
fn a_reader_gives_all_bytes_and_so_does_the_page_cache_which_keeps_them() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory);
    let source = Arc::new(open(&path, true));
    let mut all = Vec::new();
    Reader::new(Arc::clone(&source) as _).read_to_end(&mut all).expect("a good file");
    assert!(all == bytes());
    forget(&path);
    let mut part = vec![0; LEN - 100];
    source.read_cached(100, &mut part).expect("a good file");
    assert!(part == bytes()[100..]);
    assert_ne!(source.is_cached(100..LEN as u64), Some(false));
    File::options().write(true).open(&path).and_then(|f| f.set_len(1000)).expect("a shorter file");
    let error = source.read_cached(100, &mut part).expect_err("the rest of a file");
    assert!(matches!(error, Error::Short { end_bytes, .. } if end_bytes == LEN as u64), "{error}");
}
