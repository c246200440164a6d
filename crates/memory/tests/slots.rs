//! Slices read by lanes into slots: the bytes are right, each is read once, and what fails is told and stays local.

use fixtures::faults::{Fault, FaultySource, Gate};
use memory::Error;
use memory::lanes::{LaneOptions, Lanes, Probed, Receive, Slice, probe};
use memory::slots::Slots;
use memory::source::{ByteSource, FileSource, ReadOptions};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

const EIO: i32 = 5;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

/// Packs what comes into slot `ticket`, inverted, and remembers how it went.
struct Packer {
    slots: Slots,
    came: Mutex<BTreeMap<u64, Result<usize, Error>>>,
    changed: Condvar,
    panics_at: Option<u64>,
}

impl Packer {
    fn new(slots: usize, part_bytes: usize) -> Arc<Packer> {
        let slots = Slots::new(slots, &[part_bytes]).expect("a few MiB");
        Arc::new(Packer { slots, came: Mutex::default(), changed: Condvar::new(), panics_at: None })
    }

    fn wait(&self, count: usize) -> BTreeMap<u64, Result<usize, Error>> {
        let came = self.came.lock().expect("no panic");
        self.changed.wait_while(came, |came| came.len() < count).expect("no panic").clone()
    }
}

impl Receive for Packer {
    fn receive(&self, ticket: u64, bytes: Result<&[u8], Error>) {
        if bytes.is_ok() && self.panics_at == Some(ticket) {
            panic!("a bug in packing");
        }
        let result = bytes.map(|bytes| {
            let mut filling = self.slots.fill(ticket as usize, 0).expect("a slot of its own");
            filling.iter_mut().zip(bytes).for_each(|(to, from)| *to = !from);
            filling.finish();
            bytes.len()
        });
        assert!(self.came.lock().expect("no panic").insert(ticket, result).is_none(), "called once for each slice");
        self.changed.notify_all();
    }
}

/// Ways to read.
fn ways() -> Vec<LaneOptions> {
    let of = |(lanes, depth, ring)| LaneOptions { lanes, depth, ring };
    [(1, 1, true), (2, 2, true), (3, 4, true), (1, 1, false), (4, 1, false)].map(of).to_vec()
}

const SLICE: usize = 200_000;

/// Slices that begin and end anywhere.
fn ranges() -> Vec<Range<u64>> {
    (0..24u64).map(|i| i * 130_001..i * 130_001 + SLICE as u64 - i * 777).collect()
}

fn read_all(source: &Arc<dyn ByteSource>, options: LaneOptions) -> Arc<Packer> {
    let packer = Packer::new(ranges().len(), SLICE);
    let lanes = Lanes::start(options, SLICE, Arc::clone(&packer) as _).expect("threads");
    let slice = |(i, range): (usize, Range<u64>)| Slice { source: Arc::clone(source), range, ticket: i as u64 };
    let all: Vec<Slice> = ranges().into_iter().enumerate().map(slice).collect();
    lanes.read_ahead(all[12..].to_vec());
    lanes.want(all[..12].to_vec());
    packer.wait(all.len());
    let stats = lanes.stats();
    assert_eq!(stats.slices, all.len() as u64);
    assert_eq!(stats.slice_bytes, ranges().iter().map(|r| r.end - r.start).sum::<u64>());
    assert!(!stats.busy.is_zero());
    packer
}

fn check(packer: &Packer, want: &[u8]) {
    for (i, range) in ranges().into_iter().enumerate() {
        let lease = packer.slots.lease(i, 0).expect("it has come");
        let want = &want[range.start as usize..range.end as usize];
        assert!(lease.bytes()[..want.len()].iter().zip(want).all(|(got, want)| *got == !*want), "slice {i}");
    }
}

#[test]
fn every_way_of_reading_packs_the_same_bytes_and_reads_each_aligned_slice_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("file");
    let want = bytes(3_400_000);
    std::fs::write(&path, &want).expect("room");
    std::fs::File::open(&path).expect("a file").sync_all().expect("a disk");
    let aligned: u64 = ranges().iter().map(|r| r.end.next_multiple_of(4096) - r.start / 4096 * 4096).sum();
    let mut direct = 0;
    for way in ways() {
        for is_direct in [true, false] {
            let file = std::fs::File::open(&path).expect("a file");
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
            let source = Arc::new(FileSource::open(&path, ReadOptions { direct: is_direct }).expect("a file"));
            check(&read_all(&(Arc::clone(&source) as _), way), &want);
            if source.is_direct() && source.is_cached(0..4096) == Some(false) {
                // The alignment of a device may be coarser, never finer.
                assert!(source.direct_bytes() >= aligned && source.direct_bytes() < aligned + (aligned >> 4));
                direct += source.direct_bytes();
            }
        }
    }
    if direct == 0 {
        eprintln!("skipped: no direct reads here");
    }
}

#[test]
fn what_is_in_the_page_cache_is_taken_from_there() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("file");
    let want = bytes(3_400_000);
    std::fs::write(&path, &want).expect("room");
    let source = Arc::new(FileSource::open(&path, ReadOptions::default()).expect("a file"));
    if source.is_cached(0..want.len() as u64) != Some(true) {
        eprintln!("skipped: the system does not tell what its page cache holds");
        return;
    }
    check(&read_all(&(Arc::clone(&source) as _), LaneOptions::default()), &want);
    assert_eq!(source.direct_bytes(), 0);
}

#[test]
fn a_read_that_fails_is_told_with_its_reason_and_the_others_come() {
    let want = bytes(3_400_000);
    for (fault, reason) in [(Fault::Io(EIO), "os error 5"), (Fault::Short, "ends before"), (Fault::Panic, "a bug")] {
        for way in ways() {
            // In slice 3 alone.
            let at = ranges()[4].start - 1;
            let at = if ranges()[3].contains(&at) && !ranges()[2].contains(&at) { at } else { ranges()[2].end };
            let source: Arc<dyn ByteSource> = Arc::new(FaultySource::new("bad", want.clone()).with(at, fault.clone()));
            let met: Vec<u64> = (0..24).filter(|&i| ranges()[i as usize].contains(&at)).collect();
            let packer = read_all(&source, way);
            let came = packer.wait(24);
            for (ticket, result) in &came {
                match result {
                    Err(error) => assert!(met.contains(ticket) && error.to_string().contains(reason), "{error}"),
                    Ok(_) => assert!(!met.contains(ticket)),
                }
            }
            assert!(!met.is_empty() && met.len() < 4);
        }
    }
}

#[test]
fn a_bug_in_the_receiver_is_told_to_it() {
    let source: Arc<dyn ByteSource> = Arc::new(FaultySource::new("good", bytes(3_400_000)));
    for way in ways() {
        let slots = Slots::new(2, &[SLICE]).expect("a few pages");
        let packer = Packer { slots, came: Mutex::default(), changed: Condvar::new(), panics_at: Some(0) };
        let packer = Arc::new(packer);
        let lanes = Lanes::start(way, SLICE, Arc::clone(&packer) as _).expect("threads");
        lanes.want((0..2).map(|i| Slice { source: Arc::clone(&source), range: 0..100, ticket: i }));
        let came = packer.wait(2);
        assert!(came[&0].as_ref().is_err_and(|e| e.to_string().contains("a bug in packing")) && came[&1].is_ok());
    }
}

#[test]
fn what_someone_waits_for_overtakes_what_is_read_ahead() {
    let gate = Arc::new(Gate::default());
    let faulty = FaultySource::new("slow", bytes(100_000)).with(5, Fault::Stall(Arc::clone(&gate)));
    let source = Arc::new(faulty);
    let packer = Packer::new(9, 10_000);
    let way = LaneOptions { lanes: 1, depth: 1, ring: false };
    let lanes = Lanes::start(way, 10_000, Arc::clone(&packer) as _).expect("threads");
    let slice = |i: u64| Slice { source: Arc::clone(&source) as _, range: i * 10_000..i * 10_000 + 100, ticket: i };
    lanes.want([slice(0)]);
    gate.wait_for_arrival();
    lanes.read_ahead((1..5).map(slice));
    lanes.want([slice(5)]);
    lanes.hurry(|ticket| ticket == 4);
    lanes.want([slice(6)]);
    lanes.read_ahead([slice(7), slice(8)]);
    let forgotten = lanes.forget(|ticket| [0, 4, 7].contains(&ticket));
    assert_eq!(forgotten.len(), 1, "one is under way, and one is waited for");
    assert_eq!(forgotten[0].ticket, 7);
    gate.open();
    assert!(packer.wait(8).values().all(Result::is_ok));
    let order: Vec<u64> = source.asked().iter().map(|range| range.start / 10_000).collect();
    assert_eq!(order, [0, 5, 4, 6, 1, 2, 3, 8]);
}

#[test]
fn lanes_are_spare_from_the_end_of_what_is_wanted_until_more_is() {
    let source = Arc::new(FaultySource::new("fast", bytes(100_000)));
    let slice = |i: u64| Slice { source: Arc::clone(&source) as _, range: i * 10_000..i * 10_000 + 100, ticket: i };
    for way in ways() {
        let packer = Packer::new(9, 10_000);
        let lanes = Lanes::start(way, 10_000, Arc::clone(&packer) as _).expect("threads");
        assert_eq!(lanes.spare_since(), None, "nothing was wanted yet");
        let before = Instant::now();
        lanes.want([slice(0), slice(1)]);
        packer.wait(2);
        let since = lanes.spare_since().expect("all has come");
        assert!(since >= before && since <= Instant::now());
        lanes.read_ahead([slice(2)]);
        packer.wait(3);
        assert_eq!(lanes.spare_since(), Some(since), "what is read ahead is read by spare lanes");
        lanes.want([slice(3)]);
        packer.wait(4);
        assert!(lanes.spare_since().expect("all has come") > since);
    }
}

#[test]
fn a_probe_tries_several_ways_and_the_choice_is_among_the_fastest() {
    let source: Arc<dyn ByteSource> = Arc::new(FaultySource::new("fast", bytes(3_400_000)));
    let probed = probe(&source, 100_000).expect("a good source");
    assert!(probed.len() > 2 && probed.iter().all(|p| p.bytes_per_second > 0.0));
    let way =
        |lanes, depth, bytes_per_second| Probed { options: LaneOptions { lanes, depth, ring: true }, bytes_per_second };
    let probed = [way(1, 1, 80.0), way(2, 2, 99.0), way(2, 1, 97.0), way(4, 1, 100.0), way(4, 2, 200.0)];
    let chosen = |processors| LaneOptions::choose(&probed, processors).map(|o| (o.lanes, o.depth));
    assert_eq!(chosen(8), Some((4, 2)));
    assert_eq!(chosen(2), Some((2, 1)), "no more lanes than processors, and no more reads than it takes");
    assert_eq!(chosen(0), Some((1, 1)));
    assert_eq!(LaneOptions::choose(&[], 4), None);
    let bad: Arc<dyn ByteSource> = Arc::new(FaultySource::new("bad", bytes(100)).with(7, Fault::Io(EIO)));
    assert!(probe(&bad, 50).is_err());
}
