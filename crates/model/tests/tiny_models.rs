//! Tiny random models of every architecture and tensor type: near the plain F32 computation of the same file, and the same
//! bits on every path. What no real file of the tests has (Qwen 3, frequency factors, most types) is covered here.

use fixtures::reference::Reference;
use fixtures::tiny_model::{self, Architecture, TinySpec};
use gguf::TensorType;
use model::{Isa, KvType, Model, RouteReplay, Row, Runner, RunnerOptions};
use residency::experts::{Trace, Visit};
use std::path::PathBuf;
use std::sync::Arc;

const TYPES: &[TensorType] = &[
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q2_K,
    TensorType::Q3_K,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
    TensorType::IQ4_NL,
    TensorType::IQ4_XS,
    TensorType::MXFP4,
];

/// What experts come in: their paths differ from those of other matrices by who multiplies, not by type.
const EXPERT_TYPES: &[TensorType] =
    &[TensorType::F16, TensorType::Q8_0, TensorType::Q4_K, TensorType::Q6_K, TensorType::MXFP4];

fn types(architecture: Architecture) -> &'static [TensorType] {
    match architecture {
        Architecture::Qwen3Moe | Architecture::GptOss | Architecture::DeepSeek2 => EXPERT_TYPES,
        _ if architecture == Architecture::Granite || architecture.has_experts() => {
            &[TensorType::F16, TensorType::Q4_K]
        }
        _ => TYPES,
    }
}

/// Longer than the window of Gemma 3's local layers and than a KV block.
const TOKENS: usize = 41;

fn tokens() -> Vec<u32> {
    (0..TOKENS).map(|i| (i * 73 % 290) as u32).collect()
}

fn written(directory: &tempfile::TempDir, spec: &TinySpec) -> PathBuf {
    let path = directory.path().join(format!("{:?}-{}.gguf", spec.architecture, spec.tensor_type));
    tiny_model::write(&path, spec).expect("a small file");
    path
}

/// Logits at every position, fed in pieces of `chunk`.
fn logits(model: &Arc<Model>, options: &RunnerOptions, chunk: usize) -> Vec<f32> {
    routed_logits(model, options, chunk, None)
}

/// As [`logits`], with experts that were chosen elsewhere.
fn routed_logits(model: &Arc<Model>, options: &RunnerOptions, chunk: usize, routes: Option<RouteReplay>) -> Vec<f32> {
    let mut runner = Runner::new(Arc::clone(model), options).expect("an instruction set that this machine has");
    runner.force_routes(routes);
    let sequence = runner.sequence_open(TOKENS);
    let mut all = Vec::new();
    for piece in tokens().chunks(chunk) {
        let rows: Vec<Row> = piece.iter().map(|&token| Row { sequence, token, logits: true }).collect();
        all.extend_from_slice(runner.forward(&rows).expect("room for all"));
    }
    if let Some(experts) = model.config.experts {
        let counts = runner.expert_counts();
        assert_eq!(
            counts.iter().sum::<u64>(),
            (TOKENS * experts.routing.used * (model.config.layers - experts.dense_layers)) as u64
        );
        let routed = &counts[counts.len() / model.config.layers * experts.dense_layers..];
        let ran = routed.iter().filter(|&&count| count > 0).count();
        assert!(ran > routed.len() / 2, "few experts ran: {counts:?}");
    }
    all
}

fn load(path: &std::path::Path) -> Arc<Model> {
    Arc::new(Model::load(path, &mut |_, _| ()).unwrap_or_else(|e| panic!("{e}")))
}

/// Root mean square of the difference over that of the truth.
fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = got.iter().zip(want).map(|(&g, &w)| square(g - w)).sum();
    let size: f64 = want.iter().map(|&w| square(w)).sum();
    assert!(size > 0.0, "logits of zero prove nothing");
    (error / size).sqrt()
}

/// The choices of the reference, to be forced on a runner.
fn routes(reference: &Reference) -> RouteReplay {
    let mut trace = Trace::default();
    for (layer, rows) in reference.chosen_experts() {
        let visit = |(token, experts)| Visit { token: token as u64, layer: layer as u32, experts, decode: false };
        trace.visits.extend(rows.into_iter().enumerate().map(visit));
    }
    assert!(!trace.visits.is_empty(), "nothing was chosen");
    RouteReplay::new(&trace)
}

/// The relative error that so many positions in 100 have at most. At the others, where it is below `worst`, two experts, or two groups
/// of them, may have changed places whose scores are as near to each other as the two computations.
fn most_positions_error(got: &[f32], want: &[f32], percent: usize, worst: f64) -> f64 {
    let rows = got.chunks_exact(got.len() / TOKENS).zip(want.chunks_exact(want.len() / TOKENS));
    let mut errors: Vec<f64> = rows.map(|(got, want)| relative_error(got, want)).collect();
    errors.sort_by(f64::total_cmp);
    assert!(errors[TOKENS - 1] < worst, "{errors:?}");
    errors[(TOKENS - 1) * percent / 100]
}

#[test]
fn every_architecture_and_type_is_near_a_plain_f32_computation() {
    let directory = tempfile::tempdir().expect("a directory");
    for architecture in Architecture::all() {
        for &tensor_type in types(architecture) {
            let path = written(&directory, &TinySpec::new(architecture, tensor_type));
            let reference = Reference::open(&path).expect("a model for the reference");
            let want = reference.logits(&tokens()).concat();
            let (model, options) = (load(&path), RunnerOptions::default());
            let got = logits(&model, &options, TOKENS);
            let error = match architecture.has_experts() {
                // One token that chose otherwise is seen by all that follow it. So the reference chooses for most of this
                // comparison, and for what is left it is enough that half of the positions are near.
                true => {
                    let worst = if architecture.has_latents() { 0.75 } else { 0.5 };
                    let routed = routed_logits(&model, &options, TOKENS, Some(routes(&reference)));
                    let [own, routed] = [(&got, 50), (&routed, 90)]
                        .map(|(got, percent)| most_positions_error(got, &want, percent, worst));
                    eprintln!("{architecture:?} {tensor_type}: {own:.2e} with choices of its own");
                    own.max(routed)
                }
                false => relative_error(&got, &want),
            };
            // Float weights meet float activations, so that only the half-precision cache is left; else 8 bits.
            let floats = matches!(tensor_type, TensorType::F32 | TensorType::F16 | TensorType::BF16);
            // Queries that are turned to latents have one or two more such products behind each other.
            let quantized = if architecture.has_latents() { 3e-2 } else { 2e-2 };
            let limit = if floats { 1e-3 } else { quantized };
            eprintln!("{architecture:?} {tensor_type}: {error:.2e}");
            assert!(error < limit, "{architecture:?} {tensor_type}: relative error {error:e}");
        }
    }
}

#[test]
fn frequency_factors_change_the_logits_and_agree_with_the_reference() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut results = Vec::new();
    for rope_freqs in [true, false] {
        let spec = TinySpec { rope_freqs, ..TinySpec::new(Architecture::Llama, TensorType::F32) };
        let path = written(&directory, &spec);
        let want = Reference::open(&path).expect("a model for the reference").logits(&tokens()).concat();
        let got = logits(&load(&path), &RunnerOptions::default(), TOKENS);
        assert!(relative_error(&got, &want) < 1e-3);
        results.push(got);
    }
    assert!(relative_error(&results[0], &results[1]) > 1e-2, "the factors made no difference");
}

#[test]
fn every_architecture_and_type_gives_the_same_bits_on_every_path() {
    let directory = tempfile::tempdir().expect("a directory");
    let isas: Vec<Isa> = Isa::ALL.iter().copied().filter(|isa| isa.available()).collect();
    let mut compared = 0;
    for architecture in Architecture::all() {
        for &tensor_type in types(architecture) {
            let model = load(&written(&directory, &TinySpec::new(architecture, tensor_type)));
            for kv in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
                let options = RunnerOptions { type_k: kv, type_v: kv, ..Default::default() };
                // The cache's type shows in every way to attend; the types of weights, and experts, need it only once.
                if kv != KvType::F16 && (tensor_type != TensorType::Q4_K || architecture.has_experts()) {
                    continue;
                }
                let bits = |options: &RunnerOptions, chunk| -> Vec<u32> {
                    logits(&model, options, chunk).iter().map(|x| x.to_bits()).collect()
                };
                let want = bits(&RunnerOptions { isa: Some(Isa::Scalar), ..options.clone() }, TOKENS);
                for &isa in &isas {
                    for (threads, chunk) in [(1, TOKENS), (2, 7), (2, 1)] {
                        let options = RunnerOptions { isa: Some(isa), threads, ..options.clone() };
                        let same = bits(&options, chunk) == want;
                        let name = architecture.name();
                        assert!(
                            same,
                            "{name} {tensor_type} cache {} {isa}, {threads} threads, chunk {chunk}",
                            kv.name()
                        );
                        compared += 1;
                    }
                }
            }
        }
    }
    let caches = |architecture: Architecture| if architecture.has_experts() { 0 } else { 2 };
    let files: usize = Architecture::all().map(|a| types(a).len() + caches(a)).sum();
    assert_eq!(compared, isas.len() * 3 * files);
}
