//! Sessions on a real model: what is reused, what is stopped, what is refused.

use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

use engine::{Engine, Error, Generated, Progress, Request, RunnerOptions, Sampling, StopReason};
use fixtures::test_models;
use model::Model;

static MODEL: LazyLock<Arc<Model>> =
    LazyLock::new(|| Arc::new(Model::load(&test_models::smollm2(), &mut |_, _| ()).unwrap()));

const MICRO_BATCH: usize = 8;

fn engine() -> Engine {
    let options = RunnerOptions { micro_batch: MICRO_BATCH, ..Default::default() };
    Engine::new(Arc::clone(&MODEL), &options).unwrap()
}

fn ids(text: &str) -> Vec<u32> {
    MODEL.tokenizer.encode(text, true)
}

fn request(prompt: &[u32], tokens_max: usize) -> Request {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    Request { tokens_max: Some(tokens_max), sampling, ..Request::new(prompt.to_vec(), 256) }
}

fn on(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// What an engine that has seen nothing answers.
fn fresh(prompt: &[u32], tokens_max: usize) -> Generated {
    let mut engine = engine();
    engine.generate(request(prompt, tokens_max), &mut on).unwrap()
}

#[test]
fn a_common_beginning_is_reused_and_changes_no_token() {
    let mut engine = engine();
    let story = ids("Once upon a time there was a king who had three daughters, and the youngest");
    let first = engine.generate(request(&story, 10), &mut on).unwrap();
    assert_eq!((first.reused, first.timings.prompt_n), (0, story.len()));
    assert_eq!(first.tokens, fresh(&story, 10).tokens);

    // The next turn of a conversation: all that is there, the answer but for its last token included, and more.
    let longer = [&story[..], &first.tokens, &ids(" But one day")].concat();
    let second = engine.generate(request(&longer, 10), &mut on).unwrap();
    assert_eq!(second.reused, story.len() + first.tokens.len() - 1);
    assert_eq!(second.timings.prompt_n, longer.len() - second.reused);
    assert_eq!(second.tokens, fresh(&longer, 10).tokens);

    // Another continuation of the same beginning, and the same prompt again.
    let other = [&story[..12], &ids(" sons, and the eldest")].concat();
    let third = engine.generate(request(&other, 10), &mut on).unwrap();
    assert_eq!(third.reused, 12);
    assert_eq!(third.tokens, fresh(&other, 10).tokens);
    let again = engine.generate(request(&other, 10), &mut on).unwrap();
    assert_eq!(again.reused, other.len() - 1);
    assert_eq!(again.tokens, third.tokens);
}

#[test]
fn the_parts_of_the_text_make_the_whole() {
    let prompt = ids("A list of words in Japanese: 猫,");
    let mut engine = engine();
    let mut text = String::new();
    let answer = engine.generate(request(&prompt, 24), &mut |step| {
        if let Progress::Text(part) = step {
            text.push_str(part);
        }
        ControlFlow::Continue(())
    });
    let answer = answer.unwrap();
    assert_eq!(text, answer.text);
    assert!(!text.is_empty());
}

#[test]
fn a_prompt_can_be_stopped_between_its_chunks_and_taken_up_again() {
    let prompt = ids(&"All work and no play makes Jack a dull boy. ".repeat(4));
    let mut engine = engine();
    let mut seen = Vec::new();
    let stopped = engine.generate(request(&prompt, 5), &mut |step| match step {
        Progress::Prompt { done, total } => {
            seen.push(done);
            assert_eq!(total, prompt.len());
            if done >= 2 * MICRO_BATCH { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        Progress::Text(_) | Progress::Dropped(_) | Progress::Waiting => panic!("{step:?}"),
    });
    let stopped = stopped.unwrap();
    assert_eq!(seen, [MICRO_BATCH, 2 * MICRO_BATCH]);
    assert_eq!((stopped.stop, stopped.tokens.len()), (StopReason::Cancelled, 0));
    let resumed = engine.generate(request(&prompt, 5), &mut on).unwrap();
    assert_eq!(resumed.reused, 2 * MICRO_BATCH);
    assert_eq!(resumed.tokens, fresh(&prompt, 5).tokens);
}

#[test]
fn an_answer_can_be_stopped_after_any_token() {
    let prompt = ids("Once upon a time");
    let mut engine = engine();
    let mut texts = 0;
    let stopped = engine.generate(request(&prompt, 100), &mut |step| {
        texts += usize::from(matches!(step, Progress::Text(_)));
        if texts == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let stopped = stopped.unwrap();
    assert_eq!((stopped.stop, stopped.tokens.len()), (StopReason::Cancelled, 3));
    assert_eq!(stopped.tokens, fresh(&prompt, 3).tokens);
}

#[test]
fn limits_are_kept_and_said() {
    let prompt = ids("Once upon a time");
    let context_max = prompt.len() + 2;
    let mut engine = engine();
    let none = engine.generate(request(&prompt, 0), &mut on).unwrap();
    assert_eq!((none.stop, none.tokens.len(), none.timings.ttft_ms), (StopReason::Length, 0, None));
    let narrow = |prompt: &[u32], tokens_max| Request { context_max, ..request(prompt, tokens_max) };
    let full = engine.generate(narrow(&prompt, 100), &mut on).unwrap();
    assert_eq!((full.stop, full.tokens.len()), (StopReason::Context, 3), "the last token needs no position");

    let refuse = |engine: &mut Engine, prompt: &[u32]| engine.generate(narrow(prompt, 1), &mut on).unwrap_err();
    let long = [&prompt[..], &prompt].concat();
    let error = refuse(&mut engine, &long);
    let (wanted, held) = (long.len(), prompt.len() + 2);
    assert!(
        matches!(error, Error::PromptTooLong { prompt, context } if (prompt, context) == (wanted, held)),
        "{error}"
    );
    assert!(matches!(refuse(&mut engine, &[]), Error::EmptyPrompt));
    assert!(matches!(refuse(&mut engine, &[u32::MAX]), Error::Model(_)));
    let after = engine.generate(narrow(&prompt, 2), &mut on).unwrap();
    assert_eq!(after.tokens, fresh(&prompt, 2).tokens, "a refused prompt does no harm");
}

#[test]
fn logits_of_every_position_are_those_of_the_last_of_each_beginning() {
    let prompt = ids("The quick brown fox jumps over the lazy dog and runs away.");
    let mut engine = engine();
    let mut all = Vec::new();
    let mut keep = |position: usize, logits: &[f32]| {
        assert_eq!(position, all.len());
        all.push(logits.to_vec());
        ControlFlow::Continue(())
    };
    engine.logits(&prompt, 0, &mut keep).unwrap();
    assert_eq!(all.len(), prompt.len());
    for len in [1, MICRO_BATCH, MICRO_BATCH + 1, prompt.len()] {
        let mut seen = 0;
        let mut compare = |position: usize, logits: &[f32]| {
            assert_eq!(position, len - 1);
            assert!(logits == all[len - 1], "position {position}");
            seen += 1;
            ControlFlow::Continue(())
        };
        engine.logits(&prompt[..len], len - 1, &mut compare).unwrap();
        assert_eq!(seen, 1);
    }
}
