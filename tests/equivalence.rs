//! The numbered gates: the same bits on every path. A number is never reused.

use fixtures::test_models;
use fixtures::tiny_model::{self, Architecture, TinySpec};
use gguf::TensorType;
use model::{Isa, Model, Row, Runner, RunnerOptions};
use std::path::Path;
use std::sync::Arc;

/// Logits after each of `tokens`, fed in pieces of `chunk`, as bits.
fn logits(model: &Arc<Model>, isa: Isa, threads: usize, chunk: usize, tokens: &[u32]) -> Vec<u32> {
    let options = RunnerOptions { threads, isa: Some(isa), ..Default::default() };
    let mut runner = Runner::new(Arc::clone(model), &options).expect("an instruction set that this machine has");
    assert_eq!((runner.isa(), runner.threads()), (isa, threads), "the path that was asked for is the one that runs");
    let sequence = runner.sequence_open(tokens.len());
    let mut last = Vec::new();
    for piece in tokens.chunks(chunk) {
        let rows: Vec<Row> = piece.iter().map(|&token| Row { sequence, token, logits: true }).collect();
        let logits = runner.forward(&rows).expect("a context that is long enough");
        last = logits[logits.len() - model.config.vocab_len..].iter().map(|x| x.to_bits()).collect();
    }
    assert_eq!(runner.sequence_len(sequence), tokens.len());
    last
}

/// A prompt that repeats nothing, from the whole vocabulary.
fn prompt(model: &Model, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7919 + 13) % model.config.vocab_len) as u32).collect()
}

fn load(path: &Path) -> Arc<Model> {
    Arc::new(Model::load(path, &mut |_, _| ()).unwrap_or_else(|e| panic!("{e}")))
}

fn gate_1(path: &Path) {
    let model = load(path);
    let tokens = prompt(&model, 100);
    let fastest = *Isa::ALL.iter().rfind(|isa| isa.available()).expect("scalar is always there");
    let want = logits(&model, fastest, 1, tokens.len(), &tokens);
    let numbers: Vec<f32> = want.iter().map(|&b| f32::from_bits(b)).collect();
    let (low, high) = numbers.iter().fold((f32::MAX, f32::MIN), |(l, h), &x| (l.min(x), h.max(x)));
    assert!(low.is_finite() && high.is_finite() && high - low > 5.0, "logits from {low} to {high} prove nothing");
    let mut paths = 0;
    for &isa in Isa::ALL.iter().filter(|isa| isa.available()) {
        for threads in [1, 2] {
            for chunk in [tokens.len(), 7, 1] {
                let got = logits(&model, isa, threads, chunk, &tokens);
                let differ = got.iter().zip(&want).filter(|(g, w)| g != w).count();
                assert_eq!(differ, 0, "of {} logits: {isa}, {threads} threads, chunks of {chunk}", want.len());
                paths += 1;
            }
        }
    }
    if !Isa::Avx512.available() {
        eprintln!("skipped: this machine has no avx512; {paths} paths compared");
    }
    assert!(paths >= 4, "{paths} paths compared");
}

#[test]
fn gate_1_smollm2_gives_the_same_bits_for_every_isa_thread_count_and_chunk() {
    gate_1(&test_models::smollm2());
}

#[test]
fn gate_1_gemma3_gives_the_same_bits_for_every_isa_thread_count_and_chunk() {
    gate_1(&test_models::gemma3());
}

#[test]
fn gate_1_qwen2_5_coder_gives_the_same_bits_for_every_isa_thread_count_and_chunk() {
    gate_1(&test_models::qwen2_5_coder());
}

#[test]
fn gate_2_a_sequence_gives_the_same_bits_alone_and_among_others() {
    let model = load(&test_models::smollm2());
    let options = RunnerOptions { threads: 2, micro_batch: 64, ..Default::default() };
    let prompts: Vec<Vec<u32>> = (0..9).map(|i| prompt(&model, 40 + 3 * i)[i..].to_vec()).collect();
    let mut runner = Runner::new(Arc::clone(&model), &options).expect("the detected instruction set");
    let all: Vec<_> = prompts.iter().map(|p| runner.sequence_open(p.len() + 8)).collect();
    // Prompts one after another in one call, then decode together: batches of 9 rows from 9 sequences.
    let rows: Vec<Row> = all
        .iter()
        .zip(&prompts)
        .flat_map(|(&sequence, prompt)| prompt.iter().map(move |&token| Row { sequence, token, logits: false }))
        .collect();
    runner.forward(&rows).expect("room for all");
    let vocab_len = model.config.vocab_len;
    let mut together = vec![Vec::new(); all.len()];
    for step in 0..8u32 {
        let rows: Vec<Row> = all.iter().map(|&sequence| Row { sequence, token: 100 + step, logits: true }).collect();
        let logits = runner.forward(&rows).expect("room for all");
        assert_eq!(logits.len(), all.len() * vocab_len);
        for (i, row) in logits.chunks_exact(vocab_len).enumerate() {
            together[i] = row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        }
    }
    assert_ne!(together[0], together[1], "different prompts must differ");
    for (prompt, want) in prompts.iter().zip(&together) {
        let tokens: Vec<u32> = prompt.iter().copied().chain((0..8).map(|step| 100 + step)).collect();
        let alone = logits(&model, runner.isa(), 1, tokens.len(), &tokens);
        assert!(alone == *want, "the sequence of {} tokens", prompt.len());
    }
}

/// A model of 16 experts, 4 for each token, whose experts have another type than the rest.
fn experts(directory: &tempfile::TempDir, architecture: Architecture, dense: TensorType, ty: TensorType) -> Arc<Model> {
    let path = directory.path().join(format!("{architecture:?}-{ty}.gguf"));
    let spec = TinySpec { expert_type: ty, experts: 16, experts_used: 4, ..TinySpec::new(architecture, dense) };
    tiny_model::write(&path, &spec).expect("a small file");
    load(&path)
}

/// Types of what all tokens use, and of experts, as real files mix them.
const MIXES: [(Architecture, TensorType, TensorType); 5] = [
    (Architecture::Qwen3Moe, TensorType::F16, TensorType::F16),
    (Architecture::Qwen3Moe, TensorType::Q6_K, TensorType::Q4_K),
    (Architecture::Mixtral, TensorType::Q4_K, TensorType::Q6_K),
    (Architecture::Qwen2Moe, TensorType::F16, TensorType::Q8_0),
    (Architecture::GptOss, TensorType::Q8_0, TensorType::MXFP4),
];

#[test]
fn gate_30_tokens_give_the_same_bits_whatever_experts_their_neighbours_choose() {
    let directory = tempfile::tempdir().expect("a directory");
    for (architecture, dense, ty) in MIXES {
        let model = experts(&directory, architecture, dense, ty);
        let options = RunnerOptions { threads: 2, micro_batch: 32, ..Default::default() };
        let mut runner = Runner::new(Arc::clone(&model), &options).expect("the detected instruction set");
        let prompts: Vec<Vec<u32>> = (0..5).map(|i| prompt(&model, 20 + i)[i..].to_vec()).collect();
        let all: Vec<_> = prompts.iter().map(|p| runner.sequence_open(p.len() + 1)).collect();
        let rows = all
            .iter()
            .zip(&prompts)
            .flat_map(|(&sequence, prompt)| prompt.iter().map(move |&token| Row { sequence, token, logits: false }));
        runner.forward(&rows.collect::<Vec<_>>()).expect("room for all");
        let rows: Vec<Row> = all.iter().map(|&sequence| Row { sequence, token: 7, logits: true }).collect();
        let together: Vec<u32> = runner.forward(&rows).expect("room for all").iter().map(|x| x.to_bits()).collect();
        let counts = runner.expert_counts();
        let ran = counts.iter().filter(|&&count| count > 0).count();
        assert!(ran > counts.len() / 2, "{ran} of {} experts ran", counts.len());
        for (prompt, want) in prompts.iter().zip(together.chunks_exact(model.config.vocab_len)) {
            let tokens: Vec<u32> = prompt.iter().copied().chain([7]).collect();
            for (threads, chunk) in [(1, tokens.len()), (2, 1), (3, 5)] {
                let alone = logits(&model, runner.isa(), threads, chunk, &tokens);
                assert!(alone == want, "{architecture:?} {ty}: {threads} threads, chunks of {chunk}");
            }
        }
    }
}
