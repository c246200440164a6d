//! Fetching for someone who may be told to wait no longer.

use fixtures::faults::{Fault, FaultySource, Gate};
use memory::Error;
use memory::source::Fetcher;
use std::ops::Range;
use std::sync::Arc;

fn one(range: Range<u64>) -> Vec<Range<u64>> {
    std::iter::once(range).collect()
}

fn bytes() -> Vec<u8> {
    (0..=255).collect()
}

#[test]
fn ranges_come_in_the_order_asked_for_from_any_number_of_threads() {
    let fetcher = Fetcher::new(Arc::new(FaultySource::new("good", bytes())));
    std::thread::scope(|scope| {
        for thread in 0..16u64 {
            let fetcher = &fetcher;
            scope.spawn(move || {
                for i in 0..20 {
                    let at = thread * 8 + i;
                    let got = fetcher.fetch(vec![at + 1..at + 3, at..at + 1]).expect("a good source");
                    assert_eq!((&got[0][..], &got[1][..]), (&[at as u8 + 1, at as u8 + 2][..], &[at as u8][..]));
                }
            });
        }
    });
}

#[test]
fn an_error_or_a_bug_is_told_to_who_asked_and_to_no_one_else() {
    let source = FaultySource::new("faulty", bytes()).with(10, Fault::Io(5)).with(20, Fault::Panic);
    let fetcher = Fetcher::new(Arc::new(source));
    for _ in 0..3 {
        assert!(matches!(fetcher.fetch(vec![0..1, 10..11]), Err(Error::Io { .. })));
        let bug = fetcher.fetch(one(20..21)).expect_err("a bug");
        assert!(matches!(&bug, Error::Fetch { at_bytes: 20, what, .. } if what.contains("a bug")), "{bug}");
        assert_eq!(&fetcher.fetch(one(30..32)).expect("other bytes")[0][..], &[30, 31]);
    }
}

#[test]
fn sources_that_stall_leave_room_for_others_and_every_wait_can_be_interrupted() {
    let gate = Arc::new(Gate::default());
    let source = FaultySource::new("stalled", bytes()).with(10, Fault::Stall(Arc::clone(&gate)));
    let fetcher = Fetcher::new(Arc::new(source));
    // More than it has threads: the last of them wait for one, and can be interrupted as well.
    for _ in 0..10 {
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| fetcher.fetch(one(10..12)));
            gate.wait_for_arrival();
            while !waiting.is_finished() {
                fetcher.interrupt();
                std::thread::yield_now();
            }
            let error = waiting.join().expect("no panic").expect_err("an interrupted wait");
            assert!(matches!(error, Error::Interrupted { wanted_bytes: 2, .. }), "{error}");
        });
    }
    gate.open();
    assert_eq!(&fetcher.fetch(one(10..12)).expect("bytes move again")[0][..], &[10, 11]);
}
