//! Many requests on one engine: none changes, delays without end, or harms another.

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{alone, drawn, engine, finish, greedy, load, step, submit, tiny, tokens};
use engine::{Class, Error, Overflow, Progress, Request, StopReason, Submission};
use fixtures::rng::Rng;
use fixtures::tiny_model::{Architecture, TinySpec, build};

#[test]
fn a_request_alone_and_among_sixteen_others_gives_the_same_tokens_for_any_chunk() {
    for architecture in Architecture::DENSE.into_iter().chain([Architecture::Qwen3Moe]) {
        let model = tiny(architecture);
        let mut rng = Rng::new(1);
        let requests: Vec<Request> = (0..17)
            .map(|i| {
                let prompt = tokens(&mut rng, 1 + 13 * i);
                let class = Class::ALL[i % 4];
                Request { class, ..drawn(&prompt, 10 + i, i as u64) }
            })
            .collect();
        let expected: Vec<Vec<u32>> = requests.iter().map(|r| alone(&model, r.clone()).tokens).collect();
        assert!(expected.windows(2).all(|w| w[0] != w[1][..w[0].len()]), "they differ");
        for chunk in [1, 7, 64] {
            let mut engine = engine(&model, chunk);
            let ids: Vec<_> = requests.iter().map(|r| submit(&mut engine, r.clone())).collect();
            let ended = finish(&mut engine);
            for (id, expected) in ids.iter().zip(&expected) {
                assert_eq!(ended[id].as_ref().unwrap().tokens, *expected, "{architecture:?}, chunks of {chunk}");
            }
        }
    }
}

#[test]
fn who_breaks_off_is_gone_in_the_same_step_and_the_others_go_on() {
    let model = tiny(Architecture::Llama);
    let mut engine = engine(&model, 64);
    let mut rng = Rng::new(2);
    let (quitter, other) = (tokens(&mut rng, 30), tokens(&mut rng, 20));
    let quitter = submit(&mut engine, greedy(&quitter, 100));
    let stays = submit(&mut engine, greedy(&other, 20));
    for _ in 0..5 {
        engine.step(&mut |id, what| match what {
            Progress::Text(_) if id == quitter => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        });
        if engine.load().0 == 1 {
            break;
        }
    }
    let fill = engine.fill();
    assert!(fill.used > 0 && fill.used < 30, "only the other's positions are held: {fill:?}");
    let ended = finish(&mut engine);
    let quit = ended[&quitter].as_ref().unwrap();
    assert_eq!((quit.stop, quit.tokens.len()), (StopReason::Cancelled, 1));
    assert_eq!(ended[&stays].as_ref().unwrap().tokens, alone(&model, greedy(&other, 20)).tokens);
}

#[test]
fn a_cancelled_request_and_one_whose_time_is_over_end_with_what_they_have() {
    let model = tiny(Architecture::Llama);
    let mut engine = engine(&model, 64);
    let time = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&time);
    engine.set_clock(Box::new(move || clock.load(Ordering::SeqCst)));
    let prompt: Vec<u32> = (30..50).collect();
    let late = submit(&mut engine, Request { deadline_ms: Some(100), ..greedy(&prompt, 1000) });
    let cancelled = submit(&mut engine, greedy(&prompt[1..], 1000));
    for _ in 0..6 {
        step(&mut engine);
    }
    engine.cancel(cancelled);
    assert_eq!(engine.load(), (1, 0));
    step(&mut engine);
    time.store(100, Ordering::SeqCst);
    step(&mut engine);
    assert!(engine.is_idle());
    let ended = finish(&mut engine);
    let (late, cancelled) = (ended[&late].as_ref().unwrap(), ended[&cancelled].as_ref().unwrap());
    assert_eq!((late.stop, late.tokens.len()), (StopReason::Deadline, 7));
    assert_eq!((cancelled.stop, cancelled.tokens.len()), (StopReason::Cancelled, 6));
    assert_eq!(late.tokens, alone(&model, greedy(&prompt, 7)).tokens);
}

#[test]
fn a_request_whose_logits_are_no_numbers_fails_and_harms_no_other() {
    // One token's embedding is not a number; the output matrix is another one.
    let bad: u32 = 77;
    let spec = TinySpec { tied: false, ..TinySpec::new(Architecture::Llama, gguf::TensorType::F32) };
    let (writer, row_bytes) = (build(&spec), spec.embedding_len * 4);
    let mut bytes = writer.to_bytes();
    // It is the first tensor.
    let at = writer.header_len().next_multiple_of(32) + bad as usize * row_bytes;
    bytes[at..at + row_bytes].chunks_exact_mut(4).for_each(|out| out.copy_from_slice(&f32::NAN.to_le_bytes()));
    let model = load(&bytes);
    let good: Vec<u32> = (100..120).collect();
    let expected = alone(&model, greedy(&good, 12)).tokens;
    let mut engine = engine(&model, 64);
    let poisoned = submit(&mut engine, greedy(&[40, bad, 41], 12));
    let healthy = submit(&mut engine, greedy(&good, 12));
    let ended = finish(&mut engine);
    assert!(matches!(ended[&poisoned], Err(Error::NoLogits(300))), "{:?}", ended[&poisoned]);
    assert_eq!(ended[&healthy].as_ref().unwrap().tokens, expected);
}

#[test]
fn bad_requests_are_refused_before_they_queue_and_a_full_queue_is_a_value() {
    let model = tiny(Architecture::Llama);
    let mut engine = engine(&model, 64);
    engine.set_limits(1, 2);
    assert!(matches!(engine.submit(greedy(&[], 1)), Err(Error::EmptyPrompt)));
    assert!(matches!(engine.submit(greedy(&[300], 1)), Err(Error::Model(model::Error::Token { token: 300, .. }))));
    let long = Request { context_max: 3, ..greedy(&[1, 2, 3, 4], 1) };
    assert!(matches!(engine.submit(long), Err(Error::PromptTooLong { prompt: 4, context: 3 })));
    assert!(engine.is_idle());
    submit(&mut engine, greedy(&[40], 3));
    submit(&mut engine, greedy(&[41], 3));
    assert_eq!(engine.submit(greedy(&[42], 3)).unwrap(), Submission::Full { waiting: 2, waiting_max: 2 });
    let full = engine.generate(greedy(&[42], 3), &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(full, Error::QueueFull { waiting: 2, waiting_max: 2 }), "{full}");
    assert_eq!(finish(&mut engine).len(), 2);
}

#[test]
fn a_context_that_overflows_goes_on_as_if_the_text_had_begun_with_what_is_left() {
    let model = tiny(Architecture::Llama);
    let prompt = tokens(&mut Rng::new(3), 40);
    let shifting = Request { context_max: 48, keep: 8, overflow: Overflow::Shift, ..greedy(&prompt, 30) };
    let mut told = Vec::new();
    let answer = engine(&model, 16).generate(shifting.clone(), &mut |what| {
        if let Progress::Dropped(n) = what {
            told.push(n);
        }
        ControlFlow::Continue(())
    });
    let answer = answer.unwrap();
    assert_eq!((answer.tokens.len(), answer.stop), (30, StopReason::Length));
    // 49 tokens fill the context with the last one to come: half of the 41 behind the kept ones go; so 20 more come until
    // the next time.
    assert_eq!(told, [20, 20]);
    assert_eq!(answer.dropped, 40);
    let filled = [&prompt[..], &answer.tokens[..9]].concat();
    let left = [&filled[..8], &filled[28..]].concat();
    let begun_so = alone(&model, greedy(&left, 20));
    assert_eq!(answer.tokens[9..29], begun_so.tokens, "the same as begun with what is left");

    let refusing = Request { overflow: Overflow::Refuse, ..shifting.clone() };
    let refused = alone(&model, refusing);
    assert_eq!((refused.stop, refused.tokens.len(), refused.dropped), (StopReason::Context, 9, 0));
    assert_eq!(refused.tokens, answer.tokens[..9]);
}

#[test]
fn a_prompt_that_overflows_is_cut_as_asked_and_that_is_told() {
    let model = tiny(Architecture::Llama);
    let prompt = tokens(&mut Rng::new(4), 100);
    for overflow in [Overflow::Truncate, Overflow::Shift] {
        let mut told = 0;
        let cut = Request { context_max: 64, keep: 4, overflow, ..greedy(&prompt, 5) };
        let answer = engine(&model, 16).generate(cut, &mut |what| {
            if let Progress::Dropped(n) = what {
                told += n;
            }
            ControlFlow::Continue(())
        });
        let answer = answer.unwrap();
        assert_eq!((answer.dropped, told), (52, 52), "three quarters of the context are filled");
        let left = [&prompt[..4], &prompt[56..]].concat();
        assert_eq!(answer.tokens, alone(&model, greedy(&left, 5)).tokens);
    }
}
