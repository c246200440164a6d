//! What the tokenizer's and the chat template's tests share: golden data, files, vocabularies made to order.
#![allow(dead_code)]

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use gguf::{Array, Gguf, Metadata, Value};
use model::Tokenizer;
use serde_json::Value as Json;

/// The models that golden outputs exist for.
pub(crate) const MODELS: [&str; 3] = ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"];

/// The file of a model.
pub(crate) fn model_path(name: &str) -> PathBuf {
    match name {
        "smollm2-135m" => fixtures::test_models::smollm2(),
        "gemma3-270m" => fixtures::test_models::gemma3(),
        "qwen2.5-coder-0.5b" => fixtures::test_models::qwen2_5_coder(),
        _ => panic!("no test model {name}"),
    }
}

/// A file of golden data.
pub(crate) fn golden(name: &str) -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The metadata of a file.
pub(crate) fn metadata(path: &Path) -> Metadata {
    let file = File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let len = file.metadata().unwrap().len();
    Gguf::read(&mut BufReader::new(file), len).unwrap_or_else(|e| panic!("{}: {e}", path.display())).metadata
}

/// The tokenizer of a file.
pub(crate) fn tokenizer(path: &Path) -> Tokenizer {
    Tokenizer::new(&metadata(path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A list of ids.
pub(crate) fn ids(json: &Json) -> Vec<u32> {
    json.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Metadata of a vocabulary made to order.
pub(crate) struct Vocabulary {
    entries: Vec<(String, Value)>,
}

impl Vocabulary {
    /// One of the kind `model` with these tokens, all normal.
    pub(crate) fn new(model: &str, tokens: &[&str]) -> Self {
        Self { entries: Vec::new() }
            .with("model", Value::String(model.to_owned()))
            .with("tokens", Value::Array(Array::String(tokens.iter().collect())))
    }

    /// The 256 byte tokens of a GPT-2 vocabulary, with `more` behind them.
    pub(crate) fn bytes(more: &[&str]) -> Self {
        let byte = |b: u32| match b {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => b,
            0..=0x20 => 0x100 + b,
            0x7f..=0xa0 => 0x121 + b - 0x7f,
            _ => 0x143,
        };
        let bytes: Vec<String> = (0..256).map(|b| char::from_u32(byte(b)).unwrap().to_string()).collect();
        let tokens: Vec<&str> = bytes.iter().map(String::as_str).chain(more.iter().copied()).collect();
        Self::new("gpt2", &tokens).with_texts("merges", &[]).with("pre", Value::String("gpt-2".to_owned()))
    }

    /// The same with `tokenizer.ggml.<key>` set.
    pub(crate) fn with(mut self, key: &str, value: Value) -> Self {
        let key = format!("tokenizer.ggml.{key}");
        self.entries.retain(|(k, _)| *k != key);
        self.entries.push((key, value));
        self
    }

    /// The same with a list of texts set.
    pub(crate) fn with_texts(self, key: &str, texts: &[&str]) -> Self {
        self.with(key, Value::Array(Array::String(texts.iter().collect())))
    }

    /// The same with types: `types` for some ids, normal for the rest.
    pub(crate) fn with_types(self, len: usize, types: &[(usize, i32)]) -> Self {
        let mut all = vec![1; len];
        for &(id, ty) in types {
            all[id] = ty;
        }
        self.with("token_type", Value::Array(Array::I32(all)))
    }

    /// The same without `tokenizer.ggml.<key>`.
    pub(crate) fn without(mut self, key: &str) -> Self {
        let key = format!("tokenizer.ggml.{key}");
        self.entries.retain(|(k, _)| *k != key);
        self
    }

    /// The metadata.
    pub(crate) fn metadata(self) -> Metadata {
        Metadata::from_entries(self.entries).unwrap()
    }

    /// The tokenizer, or what is wrong.
    pub(crate) fn load(self) -> Result<Tokenizer, model::tokenizer::Error> {
        Tokenizer::new(&self.metadata())
    }
}
