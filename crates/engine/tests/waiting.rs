//! Who waits for room is woken by what gives it, and by nothing else.

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{alone, engine, greedy, tiny, tokens};
use engine::{Class, Engine, Generated, Progress, Request, StopReason};
use fixtures::rng::Rng;
use fixtures::tiny_model::Architecture;
use model::Model;
use residency::budget::{Ledger, Line};
use residency::kv::IDLE_MS;

/// An engine whose memory is full of what an interactive session left, a request of a lower class that needs it, and the
/// engine's clock.
struct Full {
    model: Arc<Model>,
    engine: Engine,
    request: Request,
    time_ms: Arc<AtomicU64>,
}

/// `bound` bounds the memory of so many bytes.
fn full(bound: impl FnOnce(&mut Engine, u64)) -> Full {
    let model = tiny(Architecture::Llama);
    let (mut engine, mut rng) = (engine(&model, 64), Rng::new(3));
    let time_ms = Arc::new(AtomicU64::new(1000));
    let clock = Arc::clone(&time_ms);
    engine.set_clock(Box::new(move || clock.load(Ordering::SeqCst)));
    let bytes = engine.runner().kv_bytes_per_token() * 160;
    bound(&mut engine, bytes);
    engine.generate(greedy(&tokens(&mut rng, 120), 10), &mut |_| ControlFlow::Continue(())).unwrap();
    let request = Request { class: Class::Batch, ..greedy(&tokens(&mut rng, 100), 8) };
    Full { model, engine, request, time_ms }
}

fn limited() -> Full {
    full(|engine, bytes| engine.runner().set_kv_limit(Some(bytes)))
}

impl Full {
    /// The answer, and how often it was waited for. `waits` is told of each time.
    fn answer(&mut self, waits: &mut dyn FnMut() -> ControlFlow<()>) -> (Generated, usize) {
        let mut waited = 0;
        let answer = self.engine.generate(self.request.clone(), &mut |what| match what {
            Progress::Waiting => {
                waited += 1;
                waits()
            }
            _ => ControlFlow::Continue(()),
        });
        (answer.unwrap(), waited)
    }
}

#[test]
fn time_in_which_what_is_kept_becomes_idle_ends_the_wait() {
    let mut full = limited();
    let time_ms = Arc::clone(&full.time_ms);
    let (answer, waited) = full.answer(&mut || {
        time_ms.store(1000 + IDLE_MS, Ordering::SeqCst);
        ControlFlow::Continue(())
    });
    assert_eq!((answer.tokens, waited), (alone(&full.model, full.request).tokens, 1));
}

#[test]
fn room_that_another_owner_of_the_ledger_gives_back_ends_the_wait() {
    let mut others = None;
    let mut full = full(|engine, bytes| {
        let ledger = Ledger::new(4 * bytes);
        others = Some(ledger.grant(Line::Weights, "other", 3 * bytes).unwrap());
        engine.charge_to(&ledger, "this").unwrap();
    });
    let (answer, waited) = full.answer(&mut || {
        drop(others.take());
        ControlFlow::Continue(())
    });
    assert_eq!((answer.tokens, waited), (alone(&full.model, full.request).tokens, 1));
}

#[test]
fn a_deadline_and_a_caller_who_wants_no_more_end_the_wait() {
    let mut full = limited();
    full.request.deadline_ms = Some(5000);
    let time_ms = Arc::clone(&full.time_ms);
    let (late, waited) = full.answer(&mut || {
        time_ms.store(5000, Ordering::SeqCst);
        ControlFlow::Continue(())
    });
    assert_eq!((late.stop, late.tokens.len(), waited), (StopReason::Deadline, 0, 1));

    full.request.deadline_ms = None;
    let bell = full.engine.bell();
    let mut rings = 0;
    let (cancelled, waited) = full.answer(&mut || {
        // A ring that gave no room is another look, no more.
        rings += 1;
        bell.ring();
        if rings == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!((cancelled.stop, cancelled.tokens.len(), waited), (StopReason::Cancelled, 0, 3));
    assert_eq!(full.engine.load(), (0, 0));
}
