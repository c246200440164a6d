//! Experts that come from storage: the bits of those that are in memory, however few slots there are and however they are
//! read; and what cannot be read is an error to the request that needs it, and to no other.

use fixtures::faults::{Fault, FaultySource, Gate};
use fixtures::route_trace::{RouteSpec, made_up};
use fixtures::tiny_model::{self, Architecture, TinySpec};
use gguf::TensorType;
use model::{
    DenseWeights, Error, ExpertMemory, ExpertStats, GuessCounts, Header, LaneOptions, LoadOptions, Model, RouteReplay,
    Row, Runner, RunnerOptions,
};
use residency::experts::{GuessWhen, Trace};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EIO: i32 = 5;
/// Tokens of the prompt: enough to want most experts of each layer, so that the next layer's are read ahead.
const PROMPT: usize = 24;
const DECODE: usize = 8;

fn runner(model: &Arc<Model>) -> Runner {
    Runner::new(Arc::clone(model), &RunnerOptions { threads: 2, ..Default::default() }).expect("a runner")
}

/// Logits of the tokens behind the prompt, one by one, as bits.
fn logits(model: &Arc<Model>) -> Result<Vec<u32>, Error> {
    let mut runner = runner(model);
    let sequence = runner.sequence_open(PROMPT + DECODE);
    let token = |i: usize| ((i * 7919 + 13) % model.config.vocab_len) as u32;
    let row = |i: usize, logits| Row { sequence, token: token(i), logits };
    let prompt: Vec<Row> = (0..PROMPT).map(|i| row(i, i + 1 == PROMPT)).collect();
    let mut bits: Vec<u32> = runner.forward(&prompt)?.iter().map(|x| x.to_bits()).collect();
    for i in PROMPT..PROMPT + DECODE {
        bits.extend(runner.forward(&[row(i, true)])?.iter().map(|x| x.to_bits()));
    }
    Ok(bits)
}

fn options(slots: usize, lanes: usize, depth: usize, ring: bool) -> LoadOptions {
    let experts = ExpertMemory::Slots { slots, lanes: LaneOptions { lanes, depth, ring } };
    LoadOptions { experts, guess_experts: GuessWhen::Always, ..Default::default() }
}

fn open(path: &Path, options: &LoadOptions) -> Arc<Model> {
    Arc::new(Model::open(path, options).unwrap_or_else(|e| panic!("{e}")))
}

fn stats(model: &Model) -> ExpertStats {
    model.expert_stats().expect("experts in slots")
}

fn written(directory: &tempfile::TempDir, spec: &TinySpec) -> PathBuf {
    let path = directory.path().join(format!("{:?}-{}-{}.gguf", spec.architecture, spec.tensor_type, spec.expert_type));
    tiny_model::write(&path, spec).expect("a small file");
    path
}

/// Bytes of an expert's slices in the file; all layers of experts are alike.
fn expert_bytes(path: &Path) -> u64 {
    let header = Header::read(path).expect("a header");
    let last = format!("blk.{}.", header.config().expect("a model").layers - 1);
    let of_experts = |name: &str| name.starts_with(&last) && name.ends_with("_exps.weight");
    header.gguf.tensors.iter().filter(|t| of_experts(&t.name)).map(|t| t.len_bytes / t.dims[2]).sum()
}

/// Slots for no more than what works, for some, and for all.
const SLOTS: [usize; 3] = [6, 11, 8 * 8];

#[test]
fn experts_in_slots_give_the_bits_of_those_in_memory_in_every_way() {
    let directory = tempfile::tempdir().expect("a directory");
    use TensorType::{F16, MXFP4, Q4_K, Q6_K, Q8_0};
    let (mut ways, mut guesses, mut right) = (0, 0, 0);
    for architecture in Architecture::EXPERTS {
        for (tensor_type, expert_type) in [(F16, F16), (Q4_K, Q6_K), (Q6_K, Q4_K), (Q8_0, Q8_0), (Q8_0, MXFP4)] {
            let spec = TinySpec { expert_type, ..TinySpec::new(architecture, tensor_type) };
            let path = written(&directory, &spec);
            let want = logits(&open(&path, &LoadOptions::default())).expect("a good file");
            let expert_bytes = expert_bytes(&path);
            for slots in SLOTS {
                for (lanes, depth, ring, direct_io) in
                    [(2, 1, true, true), (3, 2, true, true), (1, 1, true, false), (2, 1, false, true)]
                {
                    // What is guessed decides when something is read, and nothing else.
                    let guess_experts =
                        [GuessWhen::Always, GuessWhen::Off, GuessWhen::Auto, GuessWhen::Always][ways % 4];
                    let options = LoadOptions { direct_io, guess_experts, ..options(slots, lanes, depth, ring) };
                    let model = open(&path, &options);
                    assert!(logits(&model).expect("a good file") == want, "{architecture:?} {options:?}");
                    let stats = stats(&model);
                    // Every slice is read once for each miss and wrong guess; what was read ahead and not used may be on its
                    // way.
                    let GuessCounts { reads, right: right_reads, wrong_bytes } = stats.guesses;
                    let asked_bytes = stats.asked_bytes - stats.forgotten_bytes;
                    assert_eq!(asked_bytes, stats.cache.misses * expert_bytes + wrong_bytes, "{stats:?}");
                    assert!(wrong_bytes <= (reads - right_reads) * expert_bytes, "{stats:?}");
                    assert!(reads == 0 || guess_experts != GuessWhen::Off, "{stats:?}");
                    (guesses, right) = (guesses + reads, right + right_reads);
                    assert!(stats.read_bytes > 0 && stats.read_bytes <= asked_bytes, "{stats:?}");
                    assert!(stats.cache.misses > 0 && stats.routed > 0, "{stats:?}");
                    assert!(slots > SLOTS[0] || stats.cache.evictions > 0 && stats.cache.rereads > 0, "{stats:?}");
                    assert!(slots < SLOTS[2] || stats.cache.evictions == 0 && stats.cache.rereads == 0, "{stats:?}");
                    ways += 1;
                }
            }
        }
    }
    assert_eq!(ways, Architecture::EXPERTS.len() * 5 * 3 * 4);
    assert!(0 < right && right < guesses, "{right} of {guesses} guesses were right");
}

#[test]
fn experts_stream_beside_dense_weights_of_each_kind() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Glm4Moe, TensorType::Q4_K));
    let want = logits(&open(&path, &LoadOptions::default())).expect("a good file");
    for dense_weights in [DenseWeights::Anon, DenseWeights::Warm, DenseWeights::Mmap] {
        for direct_io in [true, false] {
            let options = LoadOptions { dense_weights, direct_io, ..options(7, 2, 1, true) };
            let model = open(&path, &options);
            assert!(logits(&model).expect("a good file") == want, "{options:?}");
            assert!(stats(&model).cache.evictions > 0, "{options:?}");
            assert_eq!(model.dense_resident_share().is_some(), dense_weights == DenseWeights::Anon, "{options:?}");
        }
    }
}

#[test]
fn a_split_file_gives_the_same_bits() {
    let directory = tempfile::tempdir().expect("a directory");
    let spec = TinySpec::new(Architecture::Qwen2Moe, TensorType::Q4_K);
    let want = logits(&open(&written(&directory, &spec), &LoadOptions::default())).expect("a good file");
    let shards = tiny_model::build(&spec).split(3);
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("split-{:05}-of-00003.gguf", i + 1);
        std::fs::write(directory.path().join(name), shard.to_bytes()).expect("room");
    }
    let model = open(&directory.path().join("split-00001-of-00003.gguf"), &options(7, 2, 1, true));
    assert!(logits(&model).expect("a good file") == want);
    assert!(stats(&model).cache.evictions > 0);
}

#[test]
fn a_second_turn_finds_what_the_first_one_read_and_fewer_slots_change_no_bit() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Qwen3Moe, TensorType::Q4_K));
    let want = logits(&open(&path, &LoadOptions::default())).expect("a good file");
    let model = open(&path, &options(64, 2, 1, true));
    assert!(logits(&model).expect("a good file") == want);
    let first = stats(&model).cache;
    assert!(logits(&model).expect("a good file") == want);
    let second = stats(&model).cache;
    assert!(second.misses == first.misses && second.hits > first.hits, "{first:?} {second:?}");
    assert_eq!(model.shrink_experts(7), Some(7));
    assert!(logits(&model).expect("a good file") == want);
    let third = stats(&model).cache;
    assert!(third.evictions > 0 && third.rereads > 0, "{third:?}");
}

#[test]
fn a_warm_start_reads_what_was_there_last_and_a_request_finds_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Qwen3Moe, TensorType::Q4_K));
    let first = open(&path, &options(40, 2, 1, true));
    let want = logits(&first).expect("a good file");
    let order = first.expert_order();
    assert!(!order.is_empty());
    drop(first);
    let again = open(&path, &options(40, 2, 1, true));
    let mut told = order.clone();
    told.extend([(99, 0), (0, 99), order[0]]);
    let warmed = again.warm_experts(&told);
    assert!(warmed > 0 && warmed <= order.len(), "{warmed} of {}", order.len());
    while stats(&again).slices < 3 * warmed as u64 {
        std::thread::yield_now();
    }
    assert!(logits(&again).expect("a good file") == want);
    let stats = stats(&again);
    assert!(stats.cache.misses <= 64 - warmed as u64 && stats.cache.hits > 0, "{stats:?}");
}

#[test]
fn a_request_does_not_wait_for_a_warm_start() {
    let gate = Arc::new(Gate::default());
    let (header, source) = faulty("blk.0.ffn_gate_exps.weight", &Fault::Stall(Arc::clone(&gate)));
    let model = Arc::new(Model::from_header(header, &options(64, 1, 1, false)).expect("nothing is read yet"));
    model.ensure_all(&mut |_, _| ()).expect("all but experts");
    source.arm(true);
    // One read is under way, and stays there until the request has come.
    let order: Vec<(u32, u32)> = (0..40).map(|i| (i / 8, i % 8)).filter(|(layer, _)| *layer < 2).collect();
    assert_eq!(model.warm_experts(&order), order.len());
    gate.wait_for_arrival();
    let begun = |model: &Model| stats(model).cache.misses + stats(model).cache.hits > 0;
    std::thread::scope(|scope| {
        let request = scope.spawn(|| {
            let mut runner = runner(&model);
            runner.record_steps(true);
            let sequence = runner.sequence_open(1);
            let len = runner.forward(&[Row { sequence, token: 5, logits: true }]).map(<[f32]>::len);
            len.map(|len| (len, runner.take_steps()))
        });
        while !begun(&model) {
            std::thread::yield_now();
        }
        gate.open();
        let (len, records) = request.join().expect("no panic").expect("a good file");
        let experts = &records[0].experts;
        assert!(len > 0 && experts.forgotten_bytes > experts.asked_bytes, "the warm start was given up: {experts:?}");
    });
    let stats = stats(&model);
    let slices_of_misses = 3 * (stats.cache.misses + stats.guesses.reads);
    assert!(stats.slices <= slices_of_misses + 1, "only what was under way was read beside: {stats:?}");
}

#[test]
fn conversations_at_once_share_what_is_read_for_a_layer() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Qwen3Moe, TensorType::Q8_0));
    let run = |model: &Arc<Model>| {
        let mut runner = runner(model);
        let sequences: Vec<_> = (0..4).map(|_| runner.sequence_open(16)).collect();
        let mut bits = Vec::new();
        for step in 0..6 {
            let row = |(i, &sequence): (usize, _)| Row { sequence, token: (i * 31 + step * 7) as u32, logits: true };
            let rows: Vec<Row> = sequences.iter().enumerate().map(row).collect();
            bits.extend(runner.forward(&rows).expect("a good file").iter().map(|x| x.to_bits()));
        }
        bits
    };
    let model = open(&path, &options(7, 2, 1, true));
    assert!(run(&open(&path, &LoadOptions::default())) == run(&model));
    let stats = stats(&model);
    assert!(stats.cache.hits + stats.cache.misses < stats.routed, "{stats:?}");
}

/// A tiny model in memory whose experts' tensor `name` meets `fault` in the middle of each expert.
fn faulty(name: &str, fault: &Fault) -> (Header, Arc<FaultySource>) {
    let bytes = tiny_model::build(&TinySpec::new(Architecture::Qwen3Moe, TensorType::Q8_0)).to_bytes();
    let gguf = gguf::Gguf::read(&mut &bytes[..], bytes.len() as u64).expect("a good file");
    let tensor = gguf.tensor(name).expect("a tensor of experts");
    let one = tensor.len_bytes / tensor.dims[2];
    let source = (0..tensor.dims[2]).fold(FaultySource::new("faulty", bytes), |source, expert| {
        source.with(tensor.offset_bytes + expert * one + one / 2, fault.clone())
    });
    let source = Arc::new(source);
    source.arm(false);
    (Header::from_sources(vec![Arc::clone(&source) as _]).expect("a good header"), source)
}

#[test]
fn an_expert_that_cannot_be_read_ends_the_request_and_the_next_one_works() {
    for name in ["blk.0.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"] {
        let (header, _) = faulty(name, &Fault::Short);
        let want = Model::from_header(header, &LoadOptions::default()).expect("a good file");
        let want = logits(&Arc::new(want)).expect("a good file");
        for fault in [Fault::Io(EIO), Fault::Short, Fault::Changed, Fault::Panic] {
            for slots in [6, 64] {
                let (header, source) = faulty(name, &fault);
                let model = Model::from_header(header, &options(slots, 2, 1, true)).expect("nothing is read yet");
                let model = Arc::new(model);
                model.ensure_all(&mut |_, _| ()).expect("all but experts");
                source.arm(true);
                for _ in 0..2 {
                    let error = logits(&model).expect_err("a fault");
                    assert!(matches!(error, Error::Memory(_)), "{name} {fault:?}: {error}");
                }
                source.arm(false);
                assert!(logits(&model).expect("the fault is gone") == want, "{name} {fault:?} {slots}");
            }
        }
    }
}

#[test]
fn an_expert_that_comes_late_is_waited_for() {
    let gate = Arc::new(Gate::default());
    let (header, source) = faulty("blk.1.ffn_up_exps.weight", &Fault::Stall(Arc::clone(&gate)));
    let model = Arc::new(Model::from_header(header, &options(9, 2, 1, false)).expect("nothing is read yet"));
    model.ensure_all(&mut |_, _| ()).expect("all but experts");
    source.arm(true);
    let late = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| logits(&model));
        gate.wait_for_arrival();
        gate.open();
        waiting.join().expect("no panic").expect("bytes move again")
    });
    let (header, _) = faulty("blk.1.ffn_up_exps.weight", &Fault::Short);
    let resident = Arc::new(Model::from_header(header, &LoadOptions::default()).expect("a good file"));
    assert!(late == logits(&resident).expect("a good file"));
}

#[test]
fn routing_that_was_recorded_is_followed_where_it_is_known() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Qwen3Moe, TensorType::Q8_0));
    let model = open(&path, &options(7, 2, 1, true));
    let layers = model.config.layers as u32;
    let spec = RouteSpec { layers, experts: 8, used: 2, prompt: 3, decode: 4, again: 0.3, seed: 9 };
    let trace = Trace::parse(&made_up(&spec)).expect("our own format");
    let mut runner = runner(&model);
    let sequence = runner.sequence_open(16);
    runner.force_routes(Some(RouteReplay::new(&trace)));
    let row = |token| Row { sequence, token, logits: true };
    runner.forward(&[1, 2, 3].map(row)).expect("a good file");
    for token in 0..4 {
        runner.forward(&[row(token)]).expect("a good file");
    }
    let mut want = vec![0; layers as usize * 8];
    trace.uses().for_each(|key| want[(key.layer * 8 + key.expert) as usize] += 1);
    assert_eq!(runner.expert_counts(), want);
    runner.force_routes(None);
    runner.forward(&[row(5)]).expect("a good file");
    let all: u64 = runner.expert_counts().iter().sum();
    assert_eq!(all, want.iter().sum::<u64>() + u64::from(layers) * 3, "its own three experts in each layer again");
}

#[test]
fn leaving_out_what_is_cold_saves_reads_and_a_threshold_of_nothing_changes_no_bit() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Qwen3Moe, TensorType::Q8_0));
    let run = |share: Option<f32>| {
        // A model of its own each time: what is cold depends on what was read before.
        let (header, _) = faulty("blk.0.ffn_gate_exps.weight", &Fault::Short);
        let model = Arc::new(Model::from_header(header, &options(7, 2, 1, true)).expect("a good file"));
        let options = RunnerOptions { threads: 2, drop_cold_experts: share, ..Default::default() };
        let mut runner = Runner::new(Arc::clone(&model), &options).expect("a runner");
        let sequence = runner.sequence_open(16);
        let mut bits = Vec::new();
        for token in 0..12 {
            let logits = runner.forward(&[Row { sequence, token: token * 7, logits: true }]).expect("a good file");
            bits.extend(logits.iter().map(|x| x.to_bits()));
        }
        (bits, stats(&model))
    };
    let (want, plain) = run(None);
    let (inert, looked) = run(Some(0.0));
    assert!(inert == want && looked.dropped == 0 && looked.examined > 0, "{looked:?}");
    let (_, dropped) = run(Some(1.0));
    assert!(dropped.dropped > 0 && dropped.read_bytes < plain.read_bytes, "{dropped:?} {plain:?}");
    // With one expert for a token there is nothing to leave out.
    let one = LoadOptions { experts_used: Some(1), ..options(7, 2, 1, true) };
    let all = |share| {
        let model = open(&path, &one);
        let options = RunnerOptions { drop_cold_experts: share, ..Default::default() };
        let mut runner = Runner::new(Arc::clone(&model), &options).expect("a runner");
        let sequence = runner.sequence_open(4);
        runner.forward(&[Row { sequence, token: 3, logits: true }]).expect("a good file").to_vec()
    };
    assert!(all(None) == all(Some(1.0)));
    for used in [0, 4] {
        let error = Model::open(&path, &LoadOptions { experts_used: Some(used), ..Default::default() });
        assert!(error.err().expect("3 are native").to_string().contains("--n-expert-used"));
    }
}
