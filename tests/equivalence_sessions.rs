//! The numbered gates of sessions: on real models, what an engine computes for many is what it computes for one.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use engine::{Class, Engine, Generated, Request, RequestId, RunnerOptions, Sampling, Speculate, Submission};
use fixtures::test_models;
use model::{Model, Opening, Row};

fn load(path: &Path) -> Arc<Model> {
    Arc::new(Model::load(path, &mut |_, _| ()).unwrap_or_else(|e| panic!("{e}")))
}

fn engine(model: &Arc<Model>, chunk: usize) -> Engine {
    let options = RunnerOptions { threads: 2, micro_batch: chunk, ..Default::default() };
    Engine::new(Arc::clone(model), &options).expect("the detected instruction set")
}

/// Drawn from all tokens, so that each logit counts.
fn drawn(prompt: &[u32], tokens_max: usize, seed: u64) -> Request {
    let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed, ..Sampling::default() };
    let context_max = prompt.len() + tokens_max;
    Request { tokens_max: Some(tokens_max), sampling, ..Request::new(prompt.to_vec(), context_max) }
}

fn submit(engine: &mut Engine, request: Request) -> RequestId {
    match engine.submit(request).expect("a good request") {
        Submission::Queued(id) => id,
        full => panic!("{full:?}"),
    }
}

fn finish(engine: &mut Engine) -> BTreeMap<RequestId, Generated> {
    let mut ended = BTreeMap::new();
    while !engine.is_idle() {
        engine.step(&mut |_, _| ControlFlow::Continue(()));
        ended.extend(engine.take_ended().into_iter().map(|e| (e.id, e.result.expect("an answer"))));
    }
    ended
}

fn generate(engine: &mut Engine, request: Request) -> Generated {
    engine.generate(request, &mut |_| ControlFlow::Continue(())).expect("an answer")
}

/// The logits behind `history`, as bits, computed upon the keys and values that the engine has kept: all but `new_max` of them.
fn logits_upon_kept(engine: &mut Engine, history: &[u32], new_max: usize) -> Vec<u32> {
    let opening = Opening { tokens: history, context_max: history.len(), class: Class::Batch, salt: b"" };
    let opened = engine.runner().sequence_join(&opening).expect("memory");
    let rest = &history[opened.reused..];
    assert!(rest.len() <= new_max, "{} tokens had to be computed anew", rest.len());
    let row = |(i, &token): (usize, &u32)| Row { sequence: opened.id, token, logits: i + 1 == rest.len() };
    let rows: Vec<Row> = rest.iter().enumerate().map(row).collect();
    let logits = engine.runner().forward(&rows).expect("memory").iter().map(|x| x.to_bits()).collect();
    engine.runner().sequence_close(opened.id);
    logits
}

fn logits_alone(model: &Arc<Model>, history: &[u32]) -> Vec<u32> {
    logits_upon_kept(&mut engine(model, 512), history, history.len())
}

#[test]
fn gate_21_a_session_alone_and_among_sixteen_others_has_the_same_bits_for_any_chunk() {
    let model = load(&test_models::smollm2());
    let vocab_len = model.config.vocab_len;
    let request = |i: usize| {
        let prompt: Vec<u32> = (0..20 + 3 * i).map(|j| ((i * 31 + j * 7919 + 13) % vocab_len) as u32).collect();
        Request { class: Class::ALL[i % 4], ..drawn(&prompt, 6, i as u64) }
    };
    let requests: Vec<Request> = (0..17).map(request).collect();
    let alone: Vec<Generated> = requests.iter().map(|r| generate(&mut engine(&model, 512), r.clone())).collect();
    assert!(alone.windows(2).all(|w| w[0].tokens != w[1].tokens));
    let mut compared = 0;
    for chunk in [16, 200] {
        let mut engine = engine(&model, chunk);
        let ids: Vec<RequestId> = requests.iter().map(|r| submit(&mut engine, r.clone())).collect();
        let ended = finish(&mut engine);
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(ended[id].tokens, alone[i].tokens, "session {i}, chunks of {chunk}");
            if i % 4 == 0 {
                let history = [&requests[i].prompt[..], &ended[id].tokens].concat();
                let upon = logits_upon_kept(&mut engine, &history, 1);
                assert!(upon == logits_alone(&model, &history), "session {i}, chunks of {chunk}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 10);
}

/// A function, and the wish to see it again with a change.
const EDIT: &str = "<|im_start|>user\nRename the variable total to sum in this function and show all of it:\n\
    ```python\ndef mean(values):\n    total = 0\n    count = 0\n    for value in values:\n        if value is None:\n\
    \x20           continue\n        total += value\n        count += 1\n    if count == 0:\n        return None\n\
    \x20   return total / count\n```<|im_end|>\n<|im_start|>assistant\n```python\n";

#[test]
fn gate_22_guessed_and_plain_decoding_have_the_same_bits() {
    let model = load(&test_models::qwen2_5_coder());
    let prompt = model.tokenizer.encode(EDIT, true);
    for sampling in [
        Sampling { temperature: 0.0, ..Sampling::default() },
        Sampling { temperature: 0.7, seed: 3, repeat_penalty: 1.05, ..Sampling::default() },
    ] {
        let request = Request { sampling, ..drawn(&prompt, 60, 0) };
        let plain = generate(&mut engine(&model, 512), request.clone());
        let mut engine = engine(&model, 512);
        engine.set_speculation(Speculate::Lookup);
        let guessed = generate(&mut engine, request);
        assert_eq!((&guessed.tokens, &guessed.text, guessed.stop), (&plain.tokens, &plain.text, plain.stop));
        assert!(guessed.accepted >= 10, "{} of {}", guessed.accepted, guessed.drafted);
        // The guesses that were wrong have left nothing behind.
        let history = [&prompt[..], &guessed.tokens].concat();
        assert!(logits_upon_kept(&mut engine, &history, 1) == logits_alone(&model, &history));
    }
}

#[test]
fn gate_23_two_agents_that_alternate_compute_only_what_is_new_and_have_the_same_bits() {
    let model = load(&test_models::smollm2());
    let vocab_len = model.config.vocab_len;
    let mut engine = engine(&model, 256);
    let tokens = |seed: usize, len: usize| (0..len).map(move |j| ((seed * 977 + j * 7919) % vocab_len) as u32);
    let mut histories = [1, 2].map(|agent| tokens(agent, 200).collect::<Vec<u32>>());
    for turn in 0..3 {
        for (agent, history) in histories.iter_mut().enumerate() {
            let new = if turn == 0 { history.len() } else { 25 + 1 };
            history.extend(tokens(10 * turn + agent, if turn == 0 { 0 } else { 25 }));
            let answer = generate(&mut engine, Request { context_max: 400, ..drawn(history, 8, turn as u64) });
            assert_eq!(answer.timings.prompt_n, new, "turn {turn} of agent {agent}");
            history.extend(&answer.tokens);
        }
    }
    for history in &histories {
        assert!(logits_upon_kept(&mut engine, history, 1) == logits_alone(&model, history));
    }
}
