//! Files whose experts make no sense: typed errors that say what, where and how much.

use fixtures::faults::FaultySource;
use fixtures::gguf_writer::Writer;
use fixtures::tiny_model::{Architecture, TinySpec, build};
use gguf::{TensorType, Value};
use model::{Error, Header, LoadOptions, Model};
use std::sync::Arc;

fn file(architecture: Architecture) -> Writer {
    build(&TinySpec::new(architecture, TensorType::Q8_0))
}

/// The error of opening `architecture`'s tiny model after `change`.
fn error_of(architecture: Architecture, change: impl FnOnce(&mut Writer)) -> Error {
    let mut writer = file(architecture);
    change(&mut writer);
    let source = FaultySource::new("changed", writer.to_bytes());
    let header = Header::from_sources(vec![Arc::new(source)]).expect("a file of good form");
    match Model::from_header(header, &LoadOptions::default()) {
        Ok(_) => panic!("a file that makes no sense was opened"),
        Err(error) => error,
    }
}

fn with(architecture: Architecture, key: &str, value: u32) -> String {
    let key = format!("{}.{key}", architecture.name());
    let error = error_of(architecture, |writer| {
        writer.metadata.retain(|(k, _)| *k != key);
        writer.set(&key, Value::U32(value));
    });
    assert!(matches!(&error, Error::Value { key: k, .. } if *k == key), "{error}");
    error.to_string()
}

#[test]
fn counts_that_make_no_sense_are_refused_with_their_numbers() {
    use Architecture::*;
    for (architecture, key, value, words) in [
        (Qwen3Moe, "expert_used_count", 9, "1 to 8"),
        (Qwen3Moe, "expert_used_count", 0, "1 to 8"),
        (Qwen3Moe, "expert_count", 0, "needs experts"),
        (Qwen3Moe, "expert_count", 1 << 20, "0 to 4096"),
        (Qwen3Moe, "expert_feed_forward_length", 200, "multiple of 16"),
        (Qwen3Moe, "expert_gating_func", 7, "0 to 3"),
        (Glm4Moe, "expert_group_count", 3, "divide the 8 experts"),
        (Glm4Moe, "expert_group_used_count", 1, "3 experts cannot be chosen from so many groups of 2"),
        (Glm4Moe, "leading_dense_block_count", 4, "0 to 3"),
        (Qwen3, "expert_count", 4, "no experts"),
    ] {
        let error = with(architecture, key, value);
        assert!(error.contains(words) && error.contains(&value.to_string()), "{error}");
    }
}

#[test]
fn a_model_that_does_not_say_how_many_experts_a_token_has_is_refused() {
    let error = error_of(Architecture::Qwen3Moe, |w| w.metadata.retain(|(k, _)| k != "qwen3moe.expert_used_count"));
    assert!(matches!(&error, Error::Key(key) if key == "qwen3moe.expert_used_count"), "{error}");
}

#[test]
fn tensors_of_experts_that_are_missing_or_have_another_shape_are_named() {
    for name in ["ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight", "ffn_up_shexp.weight"] {
        let name = format!("blk.1.{name}");
        let error = error_of(Architecture::Qwen2Moe, |w| w.tensors.retain(|t| t.name != name));
        assert!(matches!(&error, Error::Tensor(missing) if *missing == name), "{error}");
    }
    let error = error_of(Architecture::Qwen3Moe, |writer| {
        writer.metadata.retain(|(k, _)| k != "qwen3moe.expert_count");
        writer.set("qwen3moe.expert_count", Value::U32(7));
    });
    let Error::Shape { name, found, wanted } = &error else { panic!("{error}") };
    assert!(name == "blk.0.ffn_gate_inp.weight" && *found == [256, 8] && *wanted == [256, 7], "{error}");
    for (tensor, dims) in [("ffn_up_exps.weight", vec![256, 8, 256]), ("ffn_up_exps.bias", vec![8, 256])] {
        let error = error_of(Architecture::GptOss, |writer| {
            let tensor = writer.tensors.iter_mut().find(|t| t.name.ends_with(tensor)).expect("a tensor");
            tensor.dims = dims.clone();
        });
        assert!(matches!(&error, Error::Shape { found, .. } if *found == dims), "{error}");
    }
}
