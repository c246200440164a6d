//! `airs show`: what a model is, from its header alone.

use std::collections::BTreeMap;

use gguf::TensorType;
use model::Header;
use serde_json::json;

use crate::failure::Failure;
use crate::flags::{Settings, Show};
use crate::open::locate;
use crate::terminal::{print, print_json, size};

/// Tensors of one type.
#[derive(Debug, Clone, Copy, Default)]
struct OfType {
    count: u64,
    values: u64,
    bytes: u64,
}

pub(crate) fn execute(args: &Show, settings: &Settings) -> Result<(), Failure> {
    let path = locate(settings, args.model.name())?;
    let place = path.display().to_string();
    let header = Header::read(&path).map_err(|e| Failure::at(&place, e))?;
    let config = header.config().map_err(|e| Failure::at(&place, e))?;
    let metadata = &header.gguf.metadata;
    let text = |key: &str| metadata.str(key).map(str::to_owned);

    let mut types: BTreeMap<TensorType, OfType> = BTreeMap::new();
    for tensor in &header.gguf.tensors {
        let of_type = types.entry(tensor.ty).or_default();
        of_type.count += 1;
        of_type.values += tensor.dims.iter().product::<u64>();
        of_type.bytes += tensor.len_bytes;
    }
    let parameters: u64 = types.values().map(|t| t.values).sum();
    let tensor_bytes: u64 = types.values().map(|t| t.bytes).sum();
    let name = text("general.name");
    let license = text("general.license");
    let tokenizer = text("tokenizer.ggml.model");
    let pre_tokenizer = text("tokenizer.ggml.pre");
    let template = header.chat_template();
    let kv_bytes_per_token = config.kv_bytes_per_token();

    if args.output.json() {
        let one = |(ty, t): (&TensorType, &OfType)| json!({"type": ty.name(), "count": t.count, "values": t.values, "bytes": t.bytes});
        return print_json(&json!({
            "name": name,
            "path": place,
            "license": license,
            "architecture": config.architecture,
            "gguf_version": header.gguf.version,
            "files": header.gguf.shard_count(),
            "file_bytes": header.file_bytes(),
            "parameters": parameters,
            "layers": config.layers,
            "embedding_length": config.embedding_len,
            "heads": config.heads,
            "heads_kv": config.heads_kv,
            "head_length": config.head_len,
            "latent_length": config.latents.map(|latents| latents.len),
            "feed_forward_length": config.feed_forward_len,
            "experts": config.experts.map(|e| json!({
                "count": e.count,
                "used": e.routing.used,
                "feed_forward_length": e.feed_forward_len,
                "shared_feed_forward_length": e.shared_feed_forward_len,
                "dense_layers": e.dense_layers,
                "bytes": header.expert_bytes(),
            })),
            "vocabulary": config.vocab_len,
            "context_length": config.context_len,
            "sliding_window": config.window,
            "kv_bytes_per_token": kv_bytes_per_token,
            "kv_bytes_full_context": kv_bytes_per_token * config.context_len as u64,
            "tokenizer": tokenizer,
            "pre_tokenizer": pre_tokenizer,
            "tensors": header.gguf.tensors.len(),
            "tensor_bytes": tensor_bytes,
            "tensor_types": types.iter().map(one).collect::<Vec<_>>(),
            "chat_template": template,
        }));
    }
    let or_none = |t: Option<String>| t.unwrap_or_else(|| "-".to_owned());
    let mut out = String::new();
    let mut row = |key: &str, value: String| out += &format!("{key:<18}{value}\n");
    row("name", or_none(name));
    row("file", place.clone());
    row(
        "size",
        format!("{} in {} file(s), GGUF {}", size(header.file_bytes()), header.gguf.shard_count(), header.gguf.version),
    );
    row("license", or_none(license));
    row("architecture", config.architecture.clone());
    row("parameters", format!("{:.1} M", parameters as f64 / 1e6));
    row("layers", config.layers.to_string());
    row("embedding", config.embedding_len.to_string());
    row(
        "heads",
        match &config.latents {
            None => format!("{} query, {} key/value, {} values each", config.heads, config.heads_kv, config.head_len),
            Some(l) => format!(
                "{} query, keys and values in one latent of {} values and {} rotated",
                config.heads, l.len, config.rope_len
            ),
        },
    );
    match &config.experts {
        None => row("feed-forward", config.feed_forward_len.to_string()),
        Some(e) => row(
            "experts",
            format!("{} a layer, {} for each token, {}", e.count, e.routing.used, size(header.expert_bytes())),
        ),
    }
    row("context", format!("{} tokens", config.context_len));
    if let Some(window) = config.window {
        row("sliding window", format!("{window} tokens in some layers"));
    }
    let full = size(kv_bytes_per_token * config.context_len as u64);
    row("KV cache", format!("{} for each token, {full} for the whole context", size(kv_bytes_per_token)));
    row("vocabulary", format!("{} tokens, {} ({})", config.vocab_len, or_none(tokenizer), or_none(pre_tokenizer)));
    row("tensors", format!("{}, {}", header.gguf.tensors.len(), size(tensor_bytes)));
    for (ty, t) in &types {
        row("", format!("{:<8}{:>5} tensors {:>10}", ty.name(), t.count, size(t.bytes)));
    }
    let described = template.map_or_else(
        || "none: the model continues text".to_owned(),
        |t| format!("{} characters, the model chats", t.chars().count()),
    );
    row("chat template", described);
    print(&out)
}
