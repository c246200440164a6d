//! The numbers of a model, from the header.

mod families;
mod keys;

use crate::Error;
use crate::moe::Routing;
pub use families::{ExpertFamily, FAMILIES, Family, QkNorm, RopePairs};
use gguf::Metadata;
use kernels::attention::{KV_BLOCK, KvType, Shape};
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
    /// The latents that keys and values of all heads are made of, if they are. Then a layer has one key head of
    /// [`Config::head_len`] values, the latent and behind it what is rotated, whose beginning is the value.
    pub latents: Option<Latents>,
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
    /// Factor of rotated values.
    pub magnitude: f64,
    /// What the logarithm of the stretch adds to the factor of queries and keys, where heads are made of latents.
    pub log_multiplier: f64,
}

impl Rope {
    /// Factor of the scores of heads that are rotated in part, as large as if all of a query and a key were multiplied.
    fn score_scale(&self) -> f32 {
        let factor = |yarn: Yarn| yarn.magnitude * (1.0 - yarn.log_multiplier * libm::log(f64::from(self.scale)));
        self.yarn.map_or(1.0, |yarn| libm::pow(factor(yarn), 2.0) as f32)
    }
}

/// Latent attention. Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latents {
    /// Values of a latent that keys and values are made of.
    pub len: usize,
    /// Values of a latent that queries are made of; 0 if they come out of the residual stream.
    pub query_len: usize,
    /// Values of a head's query that meet the latent. Those that are rotated lie behind them.
    pub nope_len: usize,
    /// Values of a head's output.
    pub value_len: usize,
    /// Whether what makes keys and values is one tensor, as in older files.
    pub joined: bool,
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
        let latents = if family.latents { Some(keys.latents()?) } else { None };
        let (heads_kv, heads_kv_window) = match latents {
            Some(_) => (1, 1),
            None => keys.heads_kv(heads, layers, &windows)?,
        };
        let head_len = match latents {
            Some((latents, rope_len)) => latents.len + rope_len,
            None => keys.head_len("", embedding_len / heads)?,
        };
        let head_len_window = keys.head_len("_swa", head_len)?;
        if !embedding_len.is_multiple_of(32) {
            return Err(keys.bad("embedding_length", embedding_len, "it must be a multiple of 32"));
        }
        let rope_len = match latents {
            Some((_, rope_len)) => rope_len,
            None => keys.rope_len("rope.dimension_count", head_len, head_len)?,
        };
        let rope_len_window =
            keys.rope_len("rope.dimension_count_swa", rope_len.min(head_len_window), head_len_window)?;
        for key in ["attention.shared_kv_layers", "embedding_length_per_layer_input", "attention.temperature_length"] {
            keys.refuse(key, "this is not supported yet")?;
        }
        let rope = keys.rope()?;
        let (query_len, score_scale) = match latents {
            // The one model of this family whose scores are not scaled by the length of its heads.
            _ if architecture == "gemma3" && layers == 62 => (embedding_len / heads, 1.0),
            Some((latents, rope_len)) => (latents.nope_len + rope_len, rope.score_scale()),
            None => (head_len, 1.0),
        };
        let score_scale = score_scale / (query_len as f32).sqrt();
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
            experts: keys.experts(family, layers, vocab_len)?,
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
            latents: latents.map(|(latents, _)| latents),
            attention_scale: keys.float_or("attention.scale", family.attention_scale.unwrap_or(score_scale))?,
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

    /// The shape of attention in `layer`, with keys and values of `types`.
    pub(crate) fn shape(&self, layer: usize, types: (KvType, KvType)) -> Shape {
        let (heads_kv, head_len) = self.layer_heads(layer);
        Shape {
            heads: self.heads,
            heads_kv,
            head_len,
            value_len: self.latents.map_or(head_len, |latents| latents.len),
            shared: self.latents.is_some(),
            scale: self.attention_scale,
            window: if self.layer_has_window(layer) { self.window } else { None },
            soft_cap: self.attention_cap,
            type_k: types.0,
            type_v: if self.latents.is_some() { types.0 } else { types.1 },
        }
    }

    /// Bytes of a KV block for each layer: as many for all, so that layers of unlike shapes can take each other's place.
    pub(crate) fn layer_kv_bytes(&self, types: (KvType, KvType)) -> usize {
        (0..self.layers).map(|layer| self.shape(layer, types).block_bytes()).max().unwrap_or(0)
    }

    /// KV cache bytes of one more token, with 16-bit keys and values.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (self.layers * self.layer_kv_bytes(Default::default()) / KV_BLOCK) as u64
    }
}
