//! Architectures as rows of a table, and their numbers from the header.

use crate::Error;
use gguf::Metadata;
use kernels::attention::HEAD_LEN_MAX;
use kernels::ops::Gate;

/// Which values of a head are rotated together, in the file's order of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// Neighbours (2i, 2i + 1); the rows are reordered at load, so that the kernels know only the other kind.
    Adjacent,
    /// Value i and value i + n/2.
    Halves,
}

/// What sets one architecture apart from the others. Biases and q/k norms are used where the file has their tensors.
#[derive(Debug)]
pub struct Family {
    /// `general.architecture`.
    pub name: &'static str,
    /// Order of rotated values.
    pub rope_pairs: RopePairs,
    /// Function of the gated feed-forward layer.
    pub gate: Gate,
    /// Whether embeddings are multiplied by the square root of their width.
    pub scale_embedding: bool,
    /// Whether q and k are normalized by head.
    pub qk_norm: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether attention and feed-forward outputs are normalized before they are added.
    pub post_norms: bool,
    /// Of how many layers one sees the whole context, unless the header says (0: all do).
    pub window_pattern: usize,
}

/// The table. Source: the architecture's tensors and graph in the GGUF ecosystem (llama.cpp's `src/models`).
pub const FAMILIES: &[Family] = &[
    Family {
        name: "llama",
        rope_pairs: RopePairs::Adjacent,
        gate: Gate::Silu,
        scale_embedding: false,
        qk_norm: false,
        qkv_bias: false,
        post_norms: false,
        window_pattern: 0,
    },
    Family {
        name: "qwen2",
        rope_pairs: RopePairs::Halves,
        gate: Gate::Silu,
        scale_embedding: false,
        qk_norm: false,
        qkv_bias: true,
        post_norms: false,
        window_pattern: 0,
    },
    Family {
        name: "qwen3",
        rope_pairs: RopePairs::Halves,
        gate: Gate::Silu,
        scale_embedding: false,
        qk_norm: true,
        qkv_bias: false,
        post_norms: false,
        window_pattern: 0,
    },
    Family {
        name: "gemma3",
        rope_pairs: RopePairs::Halves,
        gate: Gate::GeluTanh,
        scale_embedding: true,
        qk_norm: true,
        qkv_bias: false,
        post_norms: true,
        window_pattern: 6,
    },
];

/// The numbers of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `general.architecture`.
    pub architecture: String,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub embedding_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Values per head.
    pub head_len: usize,
    /// Width of the feed-forward layer.
    pub feed_forward_len: usize,
    /// Tokens in the vocabulary.
    pub vocab_len: usize,
    /// Positions that the model was trained for.
    pub context_len: usize,
    /// Added to the mean square in norms.
    pub norm_epsilon: f32,
    /// Values of a head that are rotated.
    pub rope_len: usize,
    /// Base of the rotation frequencies.
    pub rope_base: f32,
    /// Factor of the rotation frequencies (linear scaling).
    pub rope_scale: f32,
    /// Base in layers with a window.
    pub rope_base_window: f32,
    /// Positions that a layer with a window sees, the query's own included.
    pub window: Option<usize>,
    /// Of how many layers the last one sees everything (0: all do).
    pub window_pattern: usize,
    /// Factor of the attention scores.
    pub attention_scale: f32,
    /// Cap of the attention scores.
    pub attention_cap: Option<f32>,
    /// Cap of the logits.
    pub logit_cap: Option<f32>,
}

impl Config {
    /// The architecture's row and the numbers of `metadata`; `vocab_len` is the height of the embedding table.
    pub fn new(metadata: &Metadata, vocab_len: usize) -> Result<(&'static Family, Config), Error> {
        let architecture = metadata.str("general.architecture").ok_or(Error::Key("general.architecture".into()))?;
        let family = FAMILIES.iter().find(|f| f.name == architecture).ok_or_else(|| Error::Architecture {
            found: architecture.into(),
            known: FAMILIES.iter().map(|f| f.name).collect::<Vec<_>>().join(", "),
        })?;
        let keys = Keys { metadata, architecture };
        keys.refuse("expert_count", "mixture-of-experts models are not supported yet")?;
        let layers = keys.count("block_count", 1..=1024)?;
        let embedding_len = keys.count("embedding_length", 16..=1 << 20)?;
        let heads = keys.count("attention.head_count", 1..=1024)?;
        let heads_kv = keys.count_or("attention.head_count_kv", heads, 1..=1024)?;
        if !heads.is_multiple_of(heads_kv) {
            return Err(keys.bad(
                "attention.head_count_kv",
                heads_kv,
                &format!("it must divide the {heads} query heads"),
            ));
        }
        let head_len = keys.count_or("attention.key_length", embedding_len / heads, 1..=HEAD_LEN_MAX)?;
        if keys.count_or("attention.value_length", head_len, 1..=HEAD_LEN_MAX)? != head_len {
            return Err(keys.bad("attention.value_length", head_len, "keys and values must have the same length"));
        }
        if !head_len.is_multiple_of(16) {
            return Err(keys.bad("attention.key_length", head_len, "it must be a multiple of 16"));
        }
        if !embedding_len.is_multiple_of(32) {
            return Err(keys.bad("embedding_length", embedding_len, "it must be a multiple of 32"));
        }
        let rope_len = keys.count_or("rope.dimension_count", head_len, 2..=head_len)?;
        if rope_len % 2 != 0 {
            return Err(keys.bad("rope.dimension_count", rope_len, "it must be even"));
        }
        let rope_base = keys.float_or("rope.freq_base", 10_000.0)?;
        let window = keys.count_or("attention.sliding_window", 0, 0..=1 << 30)?;
        let windowed = family.window_pattern > 0 && window > 0;
        // The one model of this family whose scores are not scaled by the length of its heads.
        let query_len = if architecture == "gemma3" && layers == 62 { embedding_len / heads } else { head_len };
        let config = Config {
            architecture: architecture.into(),
            layers,
            embedding_len,
            heads,
            heads_kv,
            head_len,
            feed_forward_len: keys.count("feed_forward_length", 16..=1 << 22)?,
            vocab_len,
            context_len: keys.count_or("context_length", 4096, 1..=1 << 30)?,
            norm_epsilon: keys.float_or("attention.layer_norm_rms_epsilon", 1e-5)?,
            rope_len,
            rope_base,
            rope_scale: keys.rope_scale()?,
            rope_base_window: keys.float_or("rope.freq_base_swa", 10_000.0)?,
            window: windowed.then_some(window),
            window_pattern: if windowed {
                keys.count_or("attention.sliding_window_pattern", family.window_pattern, 1..=1024)?
            } else {
                0
            },
            attention_scale: keys.float_or("attention.scale", 1.0 / (query_len as f32).sqrt())?,
            attention_cap: keys.cap("attn_logit_softcapping")?,
            logit_cap: keys.cap("final_logit_softcapping")?,
        };
        Ok((family, config))
    }

    /// Whether `layer` sees only [`Config::window`] positions.
    pub fn layer_has_window(&self, layer: usize) -> bool {
        self.window_pattern > 0 && !(layer + 1).is_multiple_of(self.window_pattern)
    }

    /// KV cache bytes of one more token, with 16-bit keys and values.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (self.layers * 2 * self.heads_kv * self.head_len * 2) as u64
    }
}

/// Reads the keys of one architecture, with bounds.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn bad(&self, name: &str, value: impl std::fmt::Display, reason: &str) -> Error {
        Error::Value { key: self.key(name), value: value.to_string(), reason: reason.into() }
    }

    fn count(&self, name: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize, Error> {
        let key = self.key(name);
        if self.metadata.get(&key).is_none() {
            return Err(Error::Key(key));
        }
        self.count_or(name, 0, range)
    }

    fn count_or(&self, name: &str, default: usize, range: std::ops::RangeInclusive<usize>) -> Result<usize, Error> {
        let key = self.key(name);
        let value = match self.metadata.get(&key) {
            None => default as u64,
            Some(_) => self.metadata.u64(&key).ok_or(Error::Key(key))?,
        };
        match usize::try_from(value) {
            Ok(n) if range.contains(&n) => Ok(n),
            _ => Err(self.bad(name, value, &format!("it must be {} to {}", range.start(), range.end()))),
        }
    }

    fn float_or(&self, name: &str, default: f32) -> Result<f32, Error> {
        let key = self.key(name);
        match self.metadata.get(&key) {
            None => Ok(default),
            Some(_) => {
                let value = self.metadata.f32(&key).ok_or(Error::Key(key))?;
                if value.is_finite() && value > 0.0 {
                    Ok(value)
                } else {
                    Err(self.bad(name, value, "it must be positive"))
                }
            }
        }
    }

    fn cap(&self, name: &str) -> Result<Option<f32>, Error> {
        match self.metadata.f32(&self.key(name)) {
            None | Some(0.0) => Ok(None),
            Some(_) => self.float_or(name, 0.0).map(Some),
        }
    }

    fn refuse(&self, name: &str, reason: &str) -> Result<(), Error> {
        match self.metadata.u64(&self.key(name)) {
            None | Some(0) => Ok(()),
            Some(n) => Err(self.bad(name, n, reason)),
        }
    }

    /// Factor of the rotation frequencies: 1 over the linear scaling factor.
    fn rope_scale(&self) -> Result<f32, Error> {
        match self.metadata.str(&self.key("rope.scaling.type")) {
            None | Some("none") if self.metadata.get(&self.key("rope.scale_linear")).is_some() => {
                Ok(1.0 / self.float_or("rope.scale_linear", 1.0)?)
            }
            None | Some("none") => Ok(1.0),
            Some("linear") => Ok(1.0 / self.float_or("rope.scaling.factor", 1.0)?),
            Some(other) => Err(self.bad("rope.scaling.type", other, "known are \"none\" and \"linear\"")),
        }
    }
}
