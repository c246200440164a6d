//! The numbers of a model, from the header.

mod families;
mod keys;

use crate::Error;
use crate::moe::Routing;
pub use families::{ExpertFamily, FAMILIES, Family, QkNorm, RopePairs};
use gguf::Metadata;
use keys::Keys;

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
    /// Key and value heads in layers with a window.
    pub heads_kv_window: usize,
    /// Values per head there.
    pub head_len_window: usize,
    /// Width of the feed-forward layer; of those without experts, where there are experts.
    pub feed_forward_len: usize,
    /// The experts, if the model has any.
    pub experts: Option<Experts>,
    /// Tokens in the vocabulary.
    pub vocab_len: usize,
    /// Positions that the model was trained for.
    pub context_len: usize,
    /// Added to the mean square in norms.
    pub norm_epsilon: f32,
    /// Values of a head that are rotated.
    pub rope_len: usize,
    /// Values of a head that are rotated in layers with a window.
    pub rope_len_window: usize,
    /// How they are.
    pub rope: Rope,
    /// How they are in layers with a window.
    pub rope_window: Rope,
    /// Positions that a layer with a window sees, the query's own included.
    pub window: Option<usize>,
    /// Which layers have one; empty if none has.
    pub windows: Vec<bool>,
    /// Factor of the attention scores.
    pub attention_scale: f32,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Factor of what a layer's parts add to the residual stream.
    pub residual_scale: f32,
    /// Factor of the logits.
    pub logit_scale: f32,
    /// Cap of the attention scores.
    pub attention_cap: Option<f32>,
    /// Cap of the logits.
    pub logit_cap: Option<f32>,
}

/// Frequencies of rotation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub base: f32,
    /// Factor of the frequencies (linear scaling), or of the low ones (YaRN).
    pub scale: f32,
    /// How frequencies are scaled more the lower they are.
    pub yarn: Option<Yarn>,
}

/// YaRN: high frequencies stay, low ones are scaled, those between are mixed. Source: Peng et al. 2023, and ggml's
/// `rope_yarn` for the mixing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Positions that the model was trained for before.
    pub context_len: f32,
    /// Turns within those positions from which on a frequency stays.
    pub fast: f32,
    /// Turns up to which it is scaled.
    pub slow: f32,
    /// How much of the mixing is done.
    pub mix: f32,
    /// Factor of rotated values, beside the one that follows from the scale.
    pub magnitude: f32,
}

/// The numbers of a model's experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Width of an expert.
    pub feed_forward_len: usize,
    /// Width of the expert that all tokens share; 0 if there is none.
    pub shared_feed_forward_len: usize,
    /// Layers without experts, the first ones.
    pub dense_layers: usize,
    /// Whether the feed-forward layer is the shared expert.
    pub beside: bool,
    /// How tokens choose.
    pub routing: Routing,
}

impl Config {
    /// Routes each token to `used` experts instead of as many as the model was trained with. An error if it has no experts, or
    /// not so many for a token.
    pub fn use_fewer_experts(&mut self, used: usize) -> Result<(), Error> {
        let native = self.experts.map_or(0, |experts| experts.routing.used);
        if used == 0 || used > native {
            let reason = format!("this model routes a token to {native} experts");
            return Err(Error::Value { key: "--n-expert-used".into(), value: used.to_string(), reason });
        }
        self.experts.iter_mut().for_each(|experts| experts.routing.used = used);
        Ok(())
    }

    /// The architecture's row and the numbers of `metadata`; `vocab_len` is the height of the embedding table.
    pub fn new(metadata: &Metadata, vocab_len: usize) -> Result<(&'static Family, Config), Error> {
        let architecture = metadata.str("general.architecture").ok_or(Error::Key("general.architecture".into()))?;
        let family = FAMILIES.iter().find(|f| f.name == architecture).ok_or_else(|| Error::Architecture {
            found: architecture.into(),
            known: FAMILIES.iter().map(|f| f.name).collect::<Vec<_>>().join(", "),
        })?;
        let keys = Keys { metadata, architecture };
        // What comes behind the model's own layers predicts further tokens, and is not used.
        let blocks = keys.count("block_count", 1..=1024)?;
        let layers = blocks - keys.count_or("nextn_predict_layers", 0, 0..=blocks - 1)?;
        let embedding_len = keys.count("embedding_length", 16..=1 << 20)?;
        let heads = keys.count("attention.head_count", 1..=1024)?;
        let window = keys.count_or("attention.sliding_window", 0, 0..=1 << 30)?;
        let windowed = family.window_pattern > 0 && window > 0;
        let windows = if windowed { keys.windows(family.window_pattern, layers)? } else { Vec::new() };
        let (heads_kv, heads_kv_window) = keys.heads_kv(heads, layers, &windows)?;
        let head_len = keys.head_len("", embedding_len / heads)?;
        let head_len_window = keys.head_len("_swa", head_len)?;
        if !embedding_len.is_multiple_of(32) {
            return Err(keys.bad("embedding_length", embedding_len, "it must be a multiple of 32"));
        }
        let rope_len = keys.rope_len("rope.dimension_count", head_len, head_len)?;
        let rope_len_window =
            keys.rope_len("rope.dimension_count_swa", rope_len.min(head_len_window), head_len_window)?;
        for key in ["attention.shared_kv_layers", "embedding_length_per_layer_input"] {
            keys.refuse(key, "this is not supported yet")?;
        }
        let rope = keys.rope()?;
        // The one model of this family whose scores are not scaled by the length of its heads.
        let query_len = if architecture == "gemma3" && layers == 62 { embedding_len / heads } else { head_len };
        let config = Config {
            architecture: architecture.into(),
            layers,
            embedding_len,
            heads,
            heads_kv,
            head_len,
            heads_kv_window,
            head_len_window,
            feed_forward_len: keys.feed_forward_len(layers)?,
            experts: keys.experts(family, layers)?,
            vocab_len,
            context_len: keys.count_or("context_length", 4096, 1..=1 << 30)?,
            norm_epsilon: keys.float_or("attention.layer_norm_rms_epsilon", 1e-5)?,
            rope_len,
            rope_len_window,
            rope,
            rope_window: Rope {
                base: keys.float_or("rope.freq_base_swa", if family.window_rope { 10_000.0 } else { rope.base })?,
                ..if family.window_rope { Rope { scale: 1.0, yarn: None, ..rope } } else { rope }
            },
            window: windowed.then_some(window),
            windows,
            attention_scale: keys
                .float_or("attention.scale", family.attention_scale.unwrap_or(1.0 / (query_len as f32).sqrt()))?,
            embedding_scale: match family.scale_embedding {
                true => (embedding_len as f32).sqrt(),
                false => keys.float_or("embedding_scale", 1.0)?,
            },
            residual_scale: keys.float_or("residual_scale", 1.0)?,
            logit_scale: 1.0 / keys.float_or("logit_scale", 1.0)?,
            attention_cap: keys.cap("attn_logit_softcapping")?,
            logit_cap: keys.cap("final_logit_softcapping")?,
        };
        if config.feed_forward_len < 16 && config.experts.is_none_or(|e| e.dense_layers > 0 || e.beside) {
            keys.count("feed_forward_length", 16..=1 << 22)?;
        }
        Ok((family, config))
    }

    /// Whether `layer` sees only [`Config::window`] positions.
    pub fn layer_has_window(&self, layer: usize) -> bool {
        self.windows.get(layer).copied().unwrap_or(false)
    }

    /// Key and value heads of `layer`, and the values of each of its heads.
    pub fn layer_heads(&self, layer: usize) -> (usize, usize) {
        match self.layer_has_window(layer) {
            true => (self.heads_kv_window, self.head_len_window),
            false => (self.heads_kv, self.head_len),
        }
    }

    /// The experts of `layer`, if it has any.
    pub fn layer_experts(&self, layer: usize) -> Option<Experts> {
        self.experts.filter(|e| layer >= e.dense_layers)
    }

    /// KV cache bytes of one more token, with 16-bit keys and values.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let values = (0..self.layers).map(|layer| self.layer_heads(layer)).map(|(heads, len)| heads * len);
        (self.layers * 2 * 2 * values.max().unwrap_or(0)) as u64
    }
}
