//! Speculative decoding gives the answer of plain decoding, whatever is guessed.

mod common;

use std::sync::Arc;

use common::{alone, drawn, engine, finish, greedy, load, submit, tiny, tiny_of, tokens};
use engine::{Draft, Engine, Error, Generated, Overflow, Request, RunnerOptions, Sampling, Speculate};
use fixtures::rng::Rng;
use fixtures::tiny_model::{Architecture, TinySpec, build};
use model::Model;

fn lookup(model: &Arc<Model>) -> Engine {
    let mut engine = engine(model, 64);
    engine.set_speculation(Speculate::Lookup);
    engine
}

fn with_draft(model: &Arc<Model>, draft: &Arc<Model>) -> Engine {
    let mut engine = engine(model, 64);
    let draft = Draft::new(Arc::clone(draft), model, &RunnerOptions::default()).unwrap();
    engine.set_speculation(Speculate::Draft(Box::new(draft)));
    engine
}

/// A prompt that repeats itself with small changes.
fn repetitive(rng: &mut Rng) -> Vec<u32> {
    let line = tokens(rng, 24);
    let mut prompt = line.clone();
    for _ in 0..6 {
        prompt.extend(&line);
        let at = prompt.len() - 1 - rng.below(20) as usize;
        prompt[at] = 20 + rng.below(280) as u32;
    }
    prompt
}

fn generate(engine: &mut Engine, request: Request) -> Generated {
    let id = submit(engine, request);
    finish(engine).remove(&id).unwrap().unwrap()
}

#[test]
fn guessed_and_plain_decoding_give_the_same_tokens_also_when_they_are_drawn() {
    let (mut drafted, mut accepted) = (0, 0);
    for architecture in Architecture::DENSE.into_iter().chain([Architecture::Qwen3Moe]) {
        let model = tiny(architecture);
        let other = tiny_of(&TinySpec { seed: 5, ..TinySpec::new(architecture, gguf::TensorType::Q8_0) });
        for seed in 0..3 {
            let prompt = repetitive(&mut Rng::new(seed));
            // Sharp enough that tokens repeat, and with penalties, which each token changes.
            let sampling = Sampling { temperature: 0.3, seed, repeat_penalty: 1.1, ..Sampling::default() };
            for request in [greedy(&prompt, 80), drawn(&prompt, 40, seed), Request { sampling, ..greedy(&prompt, 60) }]
            {
                let plain = alone(&model, request.clone());
                assert_eq!(plain.drafted, 0);
                for mut engine in [lookup(&model), with_draft(&model, &other), with_draft(&model, &model)] {
                    let guessed = generate(&mut engine, request.clone());
                    assert_eq!(guessed.tokens, plain.tokens, "{architecture:?}, seed {seed}");
                    assert_eq!((guessed.text, guessed.stop), (plain.text.clone(), plain.stop));
                    drafted += guessed.drafted;
                    accepted += guessed.accepted;
                }
            }
        }
    }
    assert!(accepted > 1000 && drafted > accepted + 100, "{accepted} of {drafted}");
}

#[test]
fn a_draft_model_that_is_the_model_itself_is_always_right_and_one_that_never_is_gets_no_say() {
    let model = tiny(Architecture::Llama);
    let other = tiny_of(&TinySpec { seed: 5, ..TinySpec::new(Architecture::Llama, gguf::TensorType::Q8_0) });
    let prompt = tokens(&mut Rng::new(1), 50);
    let same = generate(&mut with_draft(&model, &model), greedy(&prompt, 200));
    assert_eq!(same.accepted, same.drafted);
    let wrong = generate(&mut with_draft(&model, &other), greedy(&prompt, 200));
    assert!(wrong.drafted > 0 && wrong.drafted <= 3 * 4, "trials only: {} drafted", wrong.drafted);
}

#[test]
fn guesses_of_many_sessions_at_once_change_none_of_them() {
    let model = tiny(Architecture::Gemma3);
    let requests: Vec<Request> = (0..6).map(|seed| greedy(&repetitive(&mut Rng::new(seed)), 80)).collect();
    let mut engine = lookup(&model);
    let ids: Vec<_> = requests.iter().map(|r| submit(&mut engine, r.clone())).collect();
    let ended = finish(&mut engine);
    let mut accepted = 0;
    for (id, request) in ids.iter().zip(requests) {
        let answer = ended[id].as_ref().unwrap();
        assert_eq!(answer.tokens, alone(&model, request).tokens);
        accepted += answer.accepted;
    }
    assert!(accepted > 20, "{accepted}");
}

#[test]
fn the_source_of_guesses_can_change_while_requests_run() {
    let model = tiny(Architecture::Llama);
    let request = greedy(&repetitive(&mut Rng::new(4)), 60);
    let plain = alone(&model, request.clone());
    let mut engine = with_draft(&model, &model);
    let id = submit(&mut engine, request);
    let draft = || Box::new(Draft::new(Arc::clone(&model), &model, &RunnerOptions::default()).unwrap());
    for speculate in [Speculate::Lookup, Speculate::Draft(draft()), Speculate::Off, Speculate::Draft(draft())] {
        (0..3).for_each(|_| common::step(&mut engine));
        engine.set_speculation(speculate);
    }
    let answer = finish(&mut engine).remove(&id).unwrap().unwrap();
    assert!(answer.accepted > 0 && answer.tokens == plain.tokens);
}

#[test]
fn guesses_respect_what_was_asked_for_and_the_context() {
    let model = tiny(Architecture::Llama);
    let prompt = repetitive(&mut Rng::new(3));
    for tokens_max in [1, 2, 3, 5, 50] {
        let answer = generate(&mut lookup(&model), greedy(&prompt, tokens_max));
        assert_eq!(answer.tokens.len(), tokens_max);
    }
    let context_max = prompt.len() + 21;
    let narrow = Request { context_max, tokens_max: None, ..greedy(&prompt, 0) };
    let answer = generate(&mut lookup(&model), narrow.clone());
    assert_eq!(answer.tokens, alone(&model, narrow.clone()).tokens);
    assert_eq!(answer.tokens.len(), 22);
    let shifting = Request { tokens_max: Some(100), overflow: Overflow::Shift, ..narrow };
    let answer = generate(&mut lookup(&model), shifting.clone());
    assert_eq!(answer.tokens, alone(&model, shifting).tokens);
    assert!(answer.dropped > 0 && answer.accepted > 0);
}

#[test]
fn a_draft_model_with_another_vocabulary_is_refused_with_the_numbers() {
    let model = tiny(Architecture::Llama);
    let spec = TinySpec::new(Architecture::Llama, gguf::TensorType::Q8_0);
    let mut bytes = build(&spec).to_bytes();
    let entry = |letter: u8| [&1u64.to_le_bytes()[..], &[letter]].concat();
    let (as_it_is, swapped) = ([entry(b'A'), entry(b'B')].concat(), [entry(b'B'), entry(b'A')].concat());
    let at = bytes.windows(as_it_is.len()).position(|w| w == as_it_is).unwrap();
    bytes[at..at + swapped.len()].copy_from_slice(&swapped);
    let swapped = load(&bytes);
    let first = model.tokenizer.token_id("A").unwrap();
    let error = Draft::new(swapped, &model, &RunnerOptions::default()).err().unwrap();
    assert!(
        matches!(error, Error::Vocabulary { draft_len: 300, target_len: 300, differs: Some(id) } if id == first),
        "{error}"
    );
}
