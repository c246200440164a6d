//! Attention with latents: what the cache holds, batches of several slices, and headers that make no sense.

use fixtures::faults::FaultySource;
use fixtures::gguf_writer::Writer;
use fixtures::tiny_model::{Architecture, TinySpec, build};
use gguf::{TensorType, Value};
use model::{DenseWeights, Error, Header, Isa, KvType, LoadOptions, Model, Row, Runner, RunnerOptions};
use std::sync::Arc;

const ALL: [Architecture; 3] = [Architecture::DeepSeek2, Architecture::DeepSeek2Lite, Architecture::DeepSeek2Joined];

fn file(architecture: Architecture) -> Writer {
    build(&TinySpec::new(architecture, TensorType::Q8_0))
}

fn header(writer: &Writer) -> Header {
    let source = FaultySource::new("latents", writer.to_bytes());
    Header::from_sources(vec![Arc::new(source)]).expect("a file of good form")
}

fn open(writer: &Writer) -> Result<Arc<Model>, Error> {
    Model::from_header(header(writer), &LoadOptions::default()).map(Arc::new)
}

fn refused(writer: &Writer) -> Error {
    match open(writer) {
        Ok(_) => panic!("a file that makes no sense was opened"),
        Err(error) => error,
    }
}

/// Logits of all tokens of two sequences whose rows alternate in pieces of `chunk` and half of it.
fn logits(model: &Arc<Model>, options: &RunnerOptions, chunk: usize) -> [Vec<u32>; 2] {
    let mut runner = Runner::new(Arc::clone(model), options).expect("an instruction set that this machine has");
    let lengths = [150, 40];
    let ids = lengths.map(|len| runner.sequence_open(len));
    let (mut done, mut out) = ([0; 2], [Vec::new(), Vec::new()]);
    while done != lengths {
        let mut rows = Vec::new();
        let before = done;
        for (i, step) in [chunk, chunk.div_ceil(2)].into_iter().enumerate() {
            let end = lengths[i].min(done[i] + step);
            let row = |t: usize| Row { sequence: ids[i], token: (t * 73 % 290 + i) as u32, logits: true };
            rows.extend((done[i]..end).map(row));
            done[i] = end;
        }
        let made = runner.forward(&rows).expect("room for all");
        let vocab_len = made.len() / rows.len();
        let (first, second) = made.split_at((done[0] - before[0]) * vocab_len);
        out[0].extend(first.iter().map(|x| x.to_bits()));
        out[1].extend(second.iter().map(|x| x.to_bits()));
    }
    out
}

#[test]
fn slices_batches_instruction_sets_and_caches_of_every_type_give_the_same_bits() {
    // The scalar definition, which is slow, the kernels' own tests compare with.
    let best = Runner::new(open(&file(ALL[0])).expect("a model"), &RunnerOptions::default()).expect("a runner").isa();
    let other = Isa::ALL.iter().copied().rfind(|isa| isa.available() && *isa != best);
    for architecture in ALL {
        let model = open(&file(architecture)).expect("a model");
        let mut seen = Vec::new();
        for &kv in KvType::ALL {
            let options = RunnerOptions { type_k: kv, type_v: kv, threads: 2, ..Default::default() };
            // More than a slice at once, then 60 and 30, where the two are in one slice.
            let want = logits(&model, &options, 400);
            let apart = RunnerOptions { threads: 1, isa: other.or(options.isa), ..options };
            assert!(want == logits(&model, &apart, 60), "{architecture:?} {} {other:?}", kv.name());
            seen.push(want);
        }
        assert!(seen[0] != seen[1] && seen[1] != seen[2], "the type of the cache makes no difference");
    }
}

#[test]
fn weights_that_stay_in_the_page_cache_give_the_same_bits() {
    let directory = tempfile::tempdir().expect("a directory");
    for architecture in ALL {
        let path = directory.path().join(format!("{architecture:?}.gguf"));
        file(architecture).write(&path).expect("a small file");
        let bits = |dense_weights| {
            let options = LoadOptions { dense_weights, ..Default::default() };
            let model = Arc::new(Model::open(&path, &options).expect("a model"));
            logits(&model, &RunnerOptions { threads: 2, ..Default::default() }, 60)
        };
        assert!(bits(DenseWeights::Mmap) == bits(DenseWeights::Anon), "{architecture:?}");
    }
}

#[test]
fn a_position_takes_one_latent_and_what_is_rotated_in_each_layer() {
    let writer = file(Architecture::DeepSeek2);
    let model = open(&writer).expect("a model");
    let (layers, len) = (3, 256 + 32);
    for (kv, bytes) in [(KvType::F16, 2 * len), (KvType::Q8_0, len / 32 * 34), (KvType::Q4_0, len / 32 * 18)] {
        // The type of values says nothing here: there are none beside the keys.
        let options = RunnerOptions { type_k: kv, type_v: KvType::F16, ..Default::default() };
        let runner = Runner::new(Arc::clone(&model), &options).expect("a runner");
        assert_eq!(runner.kv_types(), (kv, kv));
        assert_eq!(runner.kv_bytes_per_token(), (layers * bytes) as u64);
        let footprint = header(&writer).footprint(&options, 1).expect("a model");
        assert_eq!(footprint.kv_block_bytes, footprint.kv_block_tokens * (layers * bytes) as u64);
    }
    assert_eq!(header(&writer).config().expect("its numbers").kv_bytes_per_token(), (layers * 2 * len) as u64);
}

#[test]
fn lengths_that_do_not_agree_are_refused_with_their_numbers() {
    for (key, value, words) in [
        ("attention.kv_lora_rank", 0, "16 to 576"),
        ("attention.kv_lora_rank", 250, "multiple of 16"),
        ("attention.kv_lora_rank", 560, "with 32 rotated values it must be 576 at most"),
        ("attention.kv_lora_rank", 128, "values"),
        ("attention.q_lora_rank", 100, "multiple of 16"),
        ("attention.key_length", 256, "it must be 288"),
        ("attention.value_length", 64, "it must be 256"),
        ("attention.key_length_mla", 32, "48 to 65536"),
        ("attention.key_length_mla", 100, "multiple of 16"),
        ("attention.value_length_mla", 0, "16 to 65536"),
        ("rope.dimension_count", 0, "16 to 576"),
        ("rope.dimension_count", 24, "multiple of 16"),
        ("expert_group_count", 3, "divide the 8 experts"),
        ("attention.temperature_length", 8192, "not supported yet"),
    ] {
        let key = format!("deepseek2.{key}");
        let mut writer = file(Architecture::DeepSeek2);
        writer.metadata.retain(|(k, _)| *k != key);
        writer.set(&key, Value::U32(value));
        let error = refused(&writer);
        let said = error.to_string();
        assert!(matches!(&error, Error::Value { .. }) && said.contains(words), "{key} {value}: {said}");
    }
}

#[test]
fn tensors_of_latents_that_are_missing_or_have_another_shape_are_named() {
    for part in ["attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b"] {
        let name = format!("blk.1.{part}.weight");
        let mut writer = file(Architecture::DeepSeek2);
        writer.tensors.retain(|t| t.name != name);
        let error = refused(&writer);
        assert!(matches!(&error, Error::Tensor(missing) if *missing == name), "{error}");
    }
    let mut writer = file(Architecture::DeepSeek2);
    writer.metadata.retain(|(k, _)| k != "deepseek2.attention.value_length_mla");
    writer.set("deepseek2.attention.value_length_mla", Value::U32(128));
    let error = refused(&writer);
    let Error::Shape { name, found, wanted } = &error else { panic!("{error}") };
    assert!(name == "blk.0.attn_v_b.weight" && *found == [256, 64, 4] && *wanted == [256, 128, 4], "{error}");
}
