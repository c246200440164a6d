//! The pager, on sources that do what they should and on those that do not.

use fixtures::faults::{Fault, FaultySource, Gate};
use memory::backing::{Backing, Choice};
use memory::pager::{Extent, Options, Pager, Transcode, Window};
use memory::source::ByteSource;
use memory::{Error, Region};
use std::ops::Range;
use std::sync::{Arc, mpsc};

/// Small units, so that a few KiB have many.
const UNIT: usize = 4096;
/// A backing that has such units: huge pages would make one of them all.
const SMALL: Choice = Choice::Only(Backing::Unpinned);
const EIO: i32 = 5;

/// The bytes of the source from `from` on, inverted: a fill that forgot a byte leaves a zero.
struct Invert {
    from: u64,
}

impl Transcode for Invert {
    fn source_range(&self, part: Range<usize>) -> Range<u64> {
        self.from + part.start as u64..self.from + part.end as u64
    }

    fn write(&self, _: Range<usize>, source: &[u8], out: &mut [u8]) {
        assert_eq!(source.len(), out.len());
        out.iter_mut().zip(source).for_each(|(o, s)| *o = !s);
    }
}

/// Never 255, which inverts to zero.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

fn backings() -> Vec<Choice> {
    memory::backing::probe(64 * UNIT)
        .into_iter()
        .filter(|s| {
            if !s.available {
                eprintln!("skipped: {}: {}", s.backing.name(), s.reason);
            }
            s.available
        })
        .map(|s| Choice::Only(s.backing))
        .collect()
}

/// A region of the whole source in three extents that do not end at units, and four stages.
fn start(source: &Arc<dyn ByteSource>, choice: Choice, options: Options) -> Pager {
    let len = source.len_bytes() as usize;
    let region = Arc::new(Region::reserve(len, UNIT, choice).expect("a few KiB"));
    let cuts = [0, len / 5 + 7, len / 2 + 1, len];
    let extents = cuts.windows(2).map(|cut| Extent {
        place: cut[0]..cut[1],
        source: Arc::clone(source),
        transcode: Arc::new(Invert { from: cut[0] as u64 }),
    });
    let stages: Vec<_> = (0..4).map(|i| i * len / 4..(i + 1) * len / 4).collect();
    Pager::start(region, extents.collect(), &stages, options)
}

fn good(len: usize) -> Arc<dyn ByteSource> {
    Arc::new(FaultySource::new("good", bytes(len)))
}

fn is_right(pager: &Pager, range: Range<usize>) -> bool {
    let want = bytes(range.end);
    pager.region().bytes(range.clone()).iter().zip(&want[range]).all(|(g, w)| *g == !*w)
}

const LEN: usize = 20 * UNIT + 123;

#[test]
fn every_backing_and_window_gives_the_same_bytes() {
    let mut filled = 0;
    for choice in backings() {
        for window in [Window::All, Window::Stages(0), Window::Stages(2)] {
            for (trap, ring) in [(true, true), (false, false)] {
                let pager = start(&good(LEN), choice, Options { window, trap, ring });
                for stage in 0..4 {
                    pager.advance(stage);
                    pager.ensure(stage * LEN / 4..(stage + 1) * LEN / 4).expect("a source without faults");
                }
                assert!(is_right(&pager, 0..LEN), "{choice:?} {window:?}");
                assert_eq!(
                    pager.region().bytes(LEN..pager.region().len_bytes()).iter().map(|&b| u64::from(b)).sum::<u64>(),
                    0
                );
                let stats = pager.stats();
                assert!(stats.read_bytes >= LEN as u64 && stats.present_bytes == stats.total_bytes, "{stats:?}");
                assert_eq!(stats.faults, 0);
                if window == Window::Stages(0) {
                    assert!(stats.waits >= 1, "nothing was read before it was asked for: {stats:?}");
                }
                filled += 1;
            }
        }
    }
    assert!(filled >= 6, "{filled} ways compared");
}

#[test]
fn a_window_reads_no_further_than_it_says() {
    let source = Arc::new(FaultySource::new("counted", bytes(40 * UNIT)));
    let as_source: Arc<dyn ByteSource> = Arc::clone(&source) as _;
    let pager = start(&as_source, SMALL, Options { window: Window::Stages(0), ..Options::default() });
    assert_eq!(source.asked(), [], "no one has asked for anything");
    pager.ensure(5 * UNIT..6 * UNIT).expect("a good source");
    assert_eq!(pager.stats().present_bytes, UNIT as u64);
    assert_eq!(pager.stats().waits, 1);
    assert!(pager.is_present(5 * UNIT..6 * UNIT) && !pager.is_present(4 * UNIT..6 * UNIT));
}

#[test]
fn touching_what_is_missing_is_served_and_counted() {
    let pager = start(&good(LEN), SMALL, Options { window: Window::Stages(0), ..Options::default() });
    if !pager.stats().is_trapped {
        eprintln!("skipped: no userfaultfd here");
        return;
    }
    assert!(is_right(&pager, 3 * UNIT + 5..3 * UNIT + 9), "no one asked for it, and still it is not zero");
    assert_eq!((pager.stats().faults, pager.stats().present_bytes), (1, UNIT as u64));
    pager.ensure(0..LEN).expect("a good source");
    assert!(is_right(&pager, 0..LEN));
    assert_eq!(pager.stats().faults, 1);
}

#[test]
fn an_error_is_told_to_those_who_need_the_range_and_to_no_one_else() {
    type Is = fn(&Error) -> bool;
    let faults: [(Fault, Is); 4] = [
        (Fault::Io(EIO), |e| matches!(e, Error::Io { source, .. } if source.raw_os_error() == Some(EIO))),
        (Fault::Short, |e| matches!(e, Error::Short { .. })),
        (Fault::Changed, |e| matches!(e, Error::Changed { .. })),
        (Fault::Panic, |e| matches!(e, Error::Pager { what, .. } if what.contains("a bug at byte"))),
    ];
    let healthy = start(&good(LEN), SMALL, Options { window: Window::Stages(0), ..Options::default() });
    for (fault, is_it) in faults {
        let at = 10 * UNIT;
        let source: Arc<dyn ByteSource> =
            Arc::new(FaultySource::new("faulty", bytes(LEN)).with(at as u64, fault.clone()));
        let pager = start(&source, SMALL, Options { window: Window::Stages(0), ..Options::default() });
        pager.ensure(0..UNIT).expect("the fault is elsewhere");
        for _ in 0..2 {
            let error = pager.ensure(at..at + 1).expect_err("a fault");
            assert!(is_it(&error), "{fault:?} gave {error}");
        }
        assert!(is_right(&pager, 0..UNIT), "what is in stays usable");
        pager.ensure(0..UNIT).expect("what is in needs no source");
        assert!(pager.failure().is_some_and(|e| is_it(&e)));
    }
    healthy.ensure(0..LEN).expect("another region is not harmed");
    assert!(is_right(&healthy, 0..LEN));
}

#[test]
fn a_thread_that_touches_what_can_never_come_goes_on_and_sees_no_zeros() {
    let at = 10 * UNIT;
    let source: Arc<dyn ByteSource> = Arc::new(FaultySource::new("faulty", bytes(LEN)).with(at as u64, Fault::Io(EIO)));
    let pager = start(&source, SMALL, Options { window: Window::Stages(0), ..Options::default() });
    if !pager.stats().is_trapped {
        eprintln!("skipped: no userfaultfd here");
        return;
    }
    assert_eq!(pager.region().bytes(at..at + 4), [0xff; 4], "no number in any format");
    assert!(pager.failure().is_some(), "and whoever asks is told");
    assert_eq!(pager.region().bytes(15 * UNIT..15 * UNIT + 1), [0xff], "after the error as well");
    assert_eq!(pager.stats().faults, 2);
}

#[test]
fn a_stalled_source_is_waited_for_and_the_wait_can_be_interrupted() {
    let gate = Arc::new(Gate::default());
    let at = 10 * UNIT;
    let source: Arc<dyn ByteSource> =
        Arc::new(FaultySource::new("stalled", bytes(LEN)).with(at as u64, Fault::Stall(Arc::clone(&gate))));
    let pager = start(&source, SMALL, Options { window: Window::Stages(0), ..Options::default() });
    std::thread::scope(|scope| {
        let (told, heard) = mpsc::channel();
        let pager = &pager;
        scope.spawn(move || told.send(pager.ensure(at..at + 1)).expect("a listener"));
        gate.wait_for_arrival();
        assert!(heard.try_recv().is_err(), "no bytes have moved");
        pager.ensure(0..UNIT).expect("the other reader is not stalled");
        pager.interrupt();
        let error = heard.recv().expect("an answer").expect_err("an interrupted wait");
        assert!(matches!(error, Error::Interrupted { wanted_bytes, .. } if wanted_bytes == UNIT as u64), "{error}");
        gate.open();
        pager.ensure(at..at + 1).expect("bytes move again");
    });
    assert!(is_right(&pager, at..at + UNIT));
}

#[test]
fn dropping_a_pager_does_not_wait_for_a_stalled_source() {
    let gate = Arc::new(Gate::default());
    let source: Arc<dyn ByteSource> =
        Arc::new(FaultySource::new("stalled", bytes(LEN)).with(0, Fault::Stall(Arc::clone(&gate))));
    let pager = start(&source, SMALL, Options::default());
    gate.wait_for_arrival();
    let region = Arc::clone(pager.region());
    drop(pager);
    gate.open();
    assert!(!region.is_present(0), "a region whose pager is gone is not filled any more");
}

#[test]
fn many_threads_may_ask_at_once() {
    for choice in backings() {
        let pager = start(&good(LEN), choice, Options { window: Window::Stages(0), ..Options::default() });
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let pager = &pager;
                scope.spawn(move || {
                    for i in 0..20 {
                        let unit = (i * 7 + thread * 3) % 20;
                        pager.ensure(unit * UNIT..(unit + 1) * UNIT).expect("a good source");
                        assert!(is_right(pager, unit * UNIT..(unit + 1) * UNIT));
                    }
                });
            }
        });
        let stats = pager.stats();
        assert_eq!(stats.faults, 0, "{stats:?}");
        assert!(pager.stats().read_bytes < 2 * LEN as u64, "every unit is filled once: {stats:?}");
    }
}

#[test]
fn pinned_backings_pin_what_is_in() {
    for choice in backings() {
        let pager = start(&good(LEN), choice, Options::default());
        pager.ensure(0..LEN).expect("a good source");
        let pinned = pager.region().pinned_bytes();
        match choice {
            Choice::Only(Backing::Unpinned) => assert_eq!(pinned, 0),
            _ => assert_eq!(pinned, pager.region().len_bytes(), "{choice:?}"),
        }
    }
}
