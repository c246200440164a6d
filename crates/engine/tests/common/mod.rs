//! Engines over tiny models, and what they are asked.
#![allow(dead_code, reason = "each suite uses a part of it")]

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use engine::{Engine, Error, Generated, Progress, Request, RequestId, RunnerOptions, Sampling, Submission};
use fixtures::rng::Rng;
use fixtures::tiny_model::{Architecture, TinySpec, build};
use model::Model;

/// The model in `bytes`.
pub(crate) fn load(bytes: &[u8]) -> Arc<Model> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    std::fs::write(&path, bytes).unwrap();
    Arc::new(Model::load(&path, &mut |_, _| ()).unwrap())
}

/// A tiny model of `spec`.
pub(crate) fn tiny_of(spec: &TinySpec) -> Arc<Model> {
    load(&build(spec).to_bytes())
}

/// A tiny model.
pub(crate) fn tiny(architecture: Architecture) -> Arc<Model> {
    tiny_of(&TinySpec { context_len: 8192, ..TinySpec::new(architecture, gguf::TensorType::Q8_0) })
}

/// An engine whose chunks have `chunk` rows.
pub(crate) fn engine(model: &Arc<Model>, chunk: usize) -> Engine {
    let options = RunnerOptions { micro_batch: chunk, ..RunnerOptions::default() };
    Engine::new(Arc::clone(model), &options).unwrap()
}

/// A request that generates `tokens_max` tokens, greedily.
pub(crate) fn greedy(prompt: &[u32], tokens_max: usize) -> Request {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let context_max = prompt.len() + tokens_max;
    Request { tokens_max: Some(tokens_max), sampling, ignore_end: true, ..Request::new(prompt.to_vec(), context_max) }
}

/// The same, drawn with `seed` from nearly all tokens, so that each logit counts.
pub(crate) fn drawn(prompt: &[u32], tokens_max: usize, seed: u64) -> Request {
    let sampling = Sampling { temperature: 1.2, top_k: 0, top_p: 1.0, min_p: 0.0, seed, ..Sampling::default() };
    Request { sampling, ..greedy(prompt, tokens_max) }
}

/// Random tokens of the tiny models that are no control tokens.
pub(crate) fn tokens(rng: &mut Rng, len: usize) -> Vec<u32> {
    (0..len).map(|_| 20 + rng.below(280) as u32).collect()
}

/// Takes `request` on.
pub(crate) fn submit(engine: &mut Engine, request: Request) -> RequestId {
    match engine.submit(request).unwrap() {
        Submission::Queued(id) => id,
        full => panic!("{full:?}"),
    }
}

/// A step that nobody listens to.
pub(crate) fn step(engine: &mut Engine) {
    engine.step(&mut |_, _| ControlFlow::Continue(()));
}

/// Steps until nothing is left to do; what became of each request.
pub(crate) fn finish(engine: &mut Engine) -> BTreeMap<RequestId, Result<Generated, Error>> {
    let mut ended = BTreeMap::new();
    for _ in 0..1_000_000 {
        ended.extend(engine.take_ended().into_iter().map(|e| (e.id, e.result)));
        if engine.is_idle() {
            return ended;
        }
        step(engine);
    }
    panic!("it does not end");
}

/// What an engine that has seen nothing answers.
pub(crate) fn alone(model: &Arc<Model>, request: Request) -> Generated {
    engine(model, 64).generate(request, &mut |_: Progress<'_>| ControlFlow::Continue(())).unwrap()
}
