//! What a step allocates does not grow with the layers: their buffers and lists are kept from step to step.

use fixtures::tiny_model::{self, Architecture, TinySpec};
use gguf::TensorType;
use model::{Model, Row, Runner, RunnerOptions};
use std::sync::Arc;

/// Allocations of a decode step of the model of `spec`, once a few steps have grown its buffers.
fn of_a_step(spec: &TinySpec) -> u64 {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("tiny.gguf");
    tiny_model::write(&path, spec).expect("a small file");
    let model = Model::load(&path, &mut |_, _| ()).expect("a good file");
    let mut runner =
        Runner::new(Arc::new(model), &RunnerOptions { threads: 2, ..Default::default() }).expect("a runner");
    let sequence = runner.sequence_open(64);
    let mut step = |token| {
        let counts = allocation_counter::measure(|| {
            runner.forward(&[Row { sequence, token, logits: true }]).expect("room");
        });
        counts.count_total
    };
    // Not the first steps, and none that begins a KV block.
    (0..8).map(&mut step).last().expect("steps")
}

#[test]
fn a_step_of_many_layers_allocates_no_more_than_one_of_few() {
    use Architecture::*;
    for architecture in [Llama, Gemma3, Qwen3Moe, DeepSeek2, DeepSeek2Joined] {
        let spec = TinySpec::new(architecture, TensorType::Q4_K);
        // Every sixth layer of Gemma 3 sees everything.
        let few = of_a_step(&TinySpec { layers: 6, ..spec.clone() });
        let many = of_a_step(&TinySpec { layers: 12, ..spec });
        assert!(few > 0, "the counter counts");
        assert_eq!(few, many, "{architecture:?}");
    }
}
