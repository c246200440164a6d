//! Reading numbers from the header, with bounds.

use super::{Experts, Family, Latents, Rope, Yarn};
use crate::Error;
use crate::moe::{Routing, Scores};
use gguf::Metadata;
use kernels::PANEL_ROWS;
use kernels::attention::HEAD_LEN_MAX;

/// Experts of a layer at most: several times what models have.
const EXPERTS_MAX: usize = 4096;

/// Reads the keys of one architecture, with bounds.
pub(super) struct Keys<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    pub(super) fn bad(&self, name: &str, value: impl std::fmt::Display, reason: &str) -> Error {
        Error::Value { key: self.key(name), value: value.to_string(), reason: reason.into() }
    }

    pub(super) fn count(&self, name: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize, Error> {
        let key = self.key(name);
        if self.metadata.get(&key).is_none() {
            return Err(Error::Key(key));
        }
        self.count_or(name, 0, range)
    }

    pub(super) fn count_or(
        &self,
        name: &str,
        default: usize,
        range: std::ops::RangeInclusive<usize>,
    ) -> Result<usize, Error> {
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

    pub(super) fn float_or(&self, name: &str, default: f32) -> Result<f32, Error> {
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

    pub(super) fn cap(&self, name: &str) -> Result<Option<f32>, Error> {
        match self.metadata.f32(&self.key(name)) {
            None | Some(0.0) => Ok(None),
            Some(_) => self.float_or(name, 0.0).map(Some),
        }
    }

    pub(super) fn refuse(&self, name: &str, reason: &str) -> Result<(), Error> {
        match self.metadata.u64(&self.key(name)) {
            None | Some(0) => Ok(()),
            Some(n) => Err(self.bad(name, n, reason)),
        }
    }

    /// A count that may be given for each layer.
    pub(super) fn counts(
        &self,
        name: &str,
        default: usize,
        layers: usize,
        range: std::ops::RangeInclusive<usize>,
    ) -> Result<Vec<usize>, Error> {
        let key = self.key(name);
        if !matches!(self.metadata.get(&key), Some(gguf::Value::Array(_))) {
            return Ok(vec![self.count_or(name, default, range)?; layers]);
        }
        let list = self.metadata.i32s(&key).ok_or(Error::Key(key))?;
        if list.len() < layers {
            return Err(self.bad(name, list.len(), &format!("there must be one for each of {layers} layers")));
        }
        let in_range = |&n: &i32| match usize::try_from(n) {
            Ok(n) if range.contains(&n) => Ok(n),
            _ => Err(self.bad(name, n, &format!("it must be {} to {}", range.start(), range.end()))),
        };
        list[..layers].iter().map(in_range).collect()
    }

    /// Width of the feed-forward layers, all of them; 0 if the header does not say.
    pub(super) fn feed_forward_len(&self, layers: usize) -> Result<usize, Error> {
        let name = "feed_forward_length";
        let all = self.counts(name, 0, layers, 0..=1 << 22)?;
        match all.iter().find(|len| **len != all[0]) {
            Some(len) => Err(self.bad(name, len, &format!("the first layer has {}, and all must be as wide", all[0]))),
            None => Ok(all[0]),
        }
    }

    /// Which layers have a window: a list, or of how many layers the last one has none.
    pub(super) fn windows(&self, pattern: usize, layers: usize) -> Result<Vec<bool>, Error> {
        let name = "attention.sliding_window_pattern";
        match self.metadata.get(&self.key(name)) {
            Some(gguf::Value::Array(gguf::Array::Bool(list))) if list.len() >= layers => Ok(list[..layers].to_vec()),
            Some(gguf::Value::Array(list)) => {
                let reason = format!("there must be a truth value for each of {layers} layers");
                Err(self.bad(name, list.len(), &reason))
            }
            _ => {
                let pattern = self.count_or(name, pattern, 1..=1024)?;
                Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(pattern)).collect())
            }
        }
    }

    /// Key and value heads of layers that see everything, and of those with a window.
    pub(super) fn heads_kv(&self, heads: usize, layers: usize, windows: &[bool]) -> Result<(usize, usize), Error> {
        let name = "attention.head_count_kv";
        let all = self.counts(name, heads, layers, 1..=1024)?;
        let of_kind = |window: bool| {
            let mut kind = (0..layers).filter(|&layer| windows.get(layer).is_some_and(|w| *w) == window);
            let first = kind.next().map(|layer| all[layer]);
            match kind.find(|&layer| Some(all[layer]) != first) {
                Some(layer) => Err(self.bad(name, all[layer], "layers of one kind must have equally many")),
                None => Ok(first),
            }
        };
        let (full, window) = (of_kind(false)?, of_kind(true)?);
        let (full, window) = (full.or(window).unwrap_or(heads), window.or(full).unwrap_or(heads));
        match [full, window].into_iter().find(|kv| !heads.is_multiple_of(*kv)) {
            Some(kv) => Err(self.bad(name, kv, &format!("it must divide the {heads} query heads"))),
            None => Ok((full, window)),
        }
    }

    /// Values of a head; those of keys and of values must be as many.
    pub(super) fn head_len(&self, suffix: &str, default: usize) -> Result<usize, Error> {
        let (key, value) = (format!("attention.key_length{suffix}"), format!("attention.value_length{suffix}"));
        let len = self.count_or(&key, default, 1..=HEAD_LEN_MAX)?;
        if self.count_or(&value, len, 1..=HEAD_LEN_MAX)? != len {
            return Err(self.bad(&value, len, "keys and values must have the same length"));
        }
        match len.is_multiple_of(16) {
            true => Ok(len),
            false => Err(self.bad(&key, len, "it must be a multiple of 16")),
        }
    }

    /// The lengths of latent attention, and the values of a head that are rotated.
    pub(super) fn latents(&self) -> Result<(Latents, usize), Error> {
        let whole = |name: &str, range| {
            let len = self.count(name, range)?;
            let reason = "it must be a multiple of 16";
            if len.is_multiple_of(PANEL_ROWS) { Ok(len) } else { Err(self.bad(name, len, reason)) }
        };
        let rank = "attention.kv_lora_rank";
        let rope_len = whole("rope.dimension_count", 16..=HEAD_LEN_MAX)?;
        let len = whole(rank, 16..=HEAD_LEN_MAX)?;
        if len + rope_len > HEAD_LEN_MAX {
            let reason = format!("with {rope_len} rotated values it must be {HEAD_LEN_MAX} at most");
            return Err(self.bad(rank, len, &reason));
        }
        // In the header the one key head is as long as a latent and what is rotated, its value as a latent. Older files, which
        // have no other lengths, give those of a head.
        let [key, value, key_mla, value_mla] = ["key_length", "value_length", "key_length_mla", "value_length_mla"]
            .map(|name| format!("attention.{name}"));
        let joined = [&key_mla, &value_mla].iter().all(|name| self.metadata.get(&self.key(name)).is_none());
        for (name, wanted) in [(&key, len + rope_len), (&value, len)] {
            let found = self.count_or(name, wanted, 1..=1 << 16)?;
            if !joined && found != wanted {
                let reason =
                    format!("with latents of {len} values and {rope_len} that are rotated it must be {wanted}");
                return Err(self.bad(name, found, &reason));
            }
        }
        let [key, value] = if joined { [key, value] } else { [key_mla, value_mla] };
        let key_len = whole(&key, rope_len + 16..=1 << 16)?;
        let query_len = self.count_or("attention.q_lora_rank", 0, 0..=1 << 20)?;
        if !query_len.is_multiple_of(PANEL_ROWS) {
            return Err(self.bad("attention.q_lora_rank", query_len, "it must be a multiple of 16"));
        }
        let value_len = whole(&value, 16..=1 << 16)?;
        Ok((Latents { len, query_len, nope_len: key_len - rope_len, value_len, joined }, rope_len))
    }

    pub(super) fn rope_len(&self, name: &str, default: usize, head_len: usize) -> Result<usize, Error> {
        let len = self.count_or(name, default, 2..=head_len)?;
        if len % 2 == 0 { Ok(len) } else { Err(self.bad(name, len, "it must be even")) }
    }

    fn flag_or(&self, name: &str, default: bool) -> Result<bool, Error> {
        let key = self.key(name);
        match self.metadata.get(&key) {
            None => Ok(default),
            Some(_) => self.metadata.bool(&key).ok_or(Error::Key(key)),
        }
    }

    /// The numbers of the experts, if the header counts any.
    pub(super) fn experts(&self, family: &Family, layers: usize, vocab_len: usize) -> Result<Option<Experts>, Error> {
        let count = self.count_or("expert_count", 0, 0..=EXPERTS_MAX)?;
        let kind = match family.experts {
            None if count == 0 => return Ok(None),
            None => return Err(self.bad("expert_count", count, "this architecture has no experts")),
            Some(kind) if count == 0 && kind.optional => return Ok(None),
            Some(_) if count == 0 => return Err(self.bad("expert_count", count, "this architecture needs experts")),
            Some(kind) => kind,
        };
        let used = self.count("expert_used_count", 1..=count)?;
        let any = 0..=1 << 22;
        let dense_len = self.feed_forward_len(layers)?;
        let feed_forward_len = self.count_or("expert_feed_forward_length", dense_len, 1..=1 << 22)?;
        if !feed_forward_len.is_multiple_of(PANEL_ROWS) {
            return Err(self.bad("expert_feed_forward_length", feed_forward_len, "it must be a multiple of 16"));
        }
        let groups = self.count_or("expert_group_count", 1, 0..=count)?.max(1);
        if !count.is_multiple_of(groups) {
            return Err(self.bad("expert_group_count", groups, &format!("it must divide the {count} experts")));
        }
        let groups_used = self.count_or("expert_group_used_count", groups, 0..=groups)?.max(1);
        if groups > 1 && groups_used * (count / groups) < used {
            let reason = format!("{used} experts cannot be chosen from so many groups of {}", count / groups);
            return Err(self.bad("expert_group_used_count", groups_used, &reason));
        }
        let scores = match self.count_or("expert_gating_func", 0, 0..=3)? {
            // Files of GLM 4.7 Flash, which is a DeepSeek of another routing, may leave it out. Source: llama.cpp.
            0 if family.latents && matches!(layers, 47 | 48) && vocab_len == 154_880 => Scores::Sigmoid,
            0 => kind.scores,
            1 => Scores::Softmax,
            2 => Scores::Sigmoid,
            _ => Scores::SoftmaxOfChosen,
        };
        let scale = if self.metadata.f32(&self.key("expert_weights_scale")) == Some(0.0) {
            1.0
        } else {
            self.float_or("expert_weights_scale", 1.0)?
        };
        let shared = self.count_or("expert_shared_count", 0, 0..=EXPERTS_MAX)? * feed_forward_len;
        let shared = if kind.shared_gate || kind.beside { dense_len } else { shared };
        Ok(Some(Experts {
            count,
            feed_forward_len,
            shared_feed_forward_len: self.count_or("expert_shared_feed_forward_length", shared, any)?,
            beside: kind.beside,
            dense_layers: self.count_or("leading_dense_block_count", 0, 0..=layers)?,
            routing: Routing {
                used,
                scores,
                normalize: self.flag_or("expert_weights_norm", kind.normalize)?,
                scale,
                groups,
                groups_used,
            },
        }))
    }

    pub(super) fn rope(&self) -> Result<Rope, Error> {
        let rope = Rope { base: self.float_or("rope.freq_base", 10_000.0)?, scale: 1.0, yarn: None };
        match self.metadata.str(&self.key("rope.scaling.type")) {
            None | Some("none") if self.metadata.get(&self.key("rope.scale_linear")).is_some() => {
                Ok(Rope { scale: 1.0 / self.float_or("rope.scale_linear", 1.0)?, ..rope })
            }
            None | Some("none") => Ok(rope),
            Some("linear") => Ok(Rope { scale: 1.0 / self.float_or("rope.scaling.factor", 1.0)?, ..rope }),
            Some("yarn") => {
                let scale = 1.0 / self.float_or("rope.scaling.factor", 1.0)?;
                let trained = self.count_or("context_length", 4096, 1..=1 << 30)?;
                // Where the header has a multiplier, whole queries and keys are scaled, by way of the scores. Source:
                // llama.cpp, `src/models/deepseek2.cpp`.
                let log_multiplier = self.cap("rope.scaling.yarn_log_multiplier")?.map_or(0.0, f64::from);
                let of_stretch = if log_multiplier > 0.0 { 1.0 } else { 1.0 - 0.1 * libm::log(f64::from(scale)) };
                let factor = f64::from(self.float_or("rope.scaling.yarn_attn_factor", 1.0)?);
                let yarn = Yarn {
                    context_len: self.count_or("rope.scaling.original_context_length", trained, 1..=1 << 30)? as f32,
                    fast: self.float_or("rope.scaling.yarn_beta_fast", 32.0)?,
                    slow: self.float_or("rope.scaling.yarn_beta_slow", 1.0)?,
                    mix: self.float_or("rope.scaling.yarn_ext_factor", 1.0)?,
                    magnitude: factor * of_stretch,
                    log_multiplier,
                };
                Ok(Rope { scale, yarn: Some(yarn), ..rope })
            }
            Some(other) => Err(self.bad("rope.scaling.type", other, "known are \"none\", \"linear\" and \"yarn\"")),
        }
    }
}
