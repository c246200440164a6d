//! Binds the names of a file's tensors to places in a region, by the header alone. Matrices are laid out in the order in
//! which a forward pass uses them; the small vectors of floats are read at once.

use super::cached::Cached;
use super::pack::{Packing, RopeRows};
use super::rows::RowTable;
use super::{Experts, KeyPrior, Layer, Mlp, Place, Store, Weight, Weights, format_of, is_vector};
use crate::config::{self, Config, Family, QkNorm, RopePairs};
use crate::moe::streamed::{ExpertMemory, Streamed};
use crate::{DenseWeights, Error, LoadOptions};
use gguf::{Gguf, TensorInfo};
use kernels::quant::Format;
use memory::Region;
use memory::pager::{Extent, Options, Pager};
use memory::source::{ByteSource, ReadRoom};
use std::ops::Range;
use std::sync::Arc;

/// Matrices start at multiples of a cache line.
const ALIGN_BYTES: usize = 64;

/// Values of a vector at most; what is longer is none of the vectors that models have.
const VECTOR_LEN_MAX: u64 = 1 << 22;

/// Binds all weights and begins to read them.
pub(super) fn bind(
    gguf: &Gguf,
    sources: &[Arc<dyn ByteSource>],
    family: &Family,
    config: &Config,
    options: &LoadOptions,
) -> Result<Weights, Error> {
    let cached = match options.dense_weights {
        DenseWeights::Anon => None,
        DenseWeights::Warm => Some(Cached::new(sources, true)),
        DenseWeights::Mmap => Some(Cached::new(sources, false)),
    };
    let streams = options.experts != ExpertMemory::Resident;
    let mut binder =
        Binder { gguf, streams, sources, cached, extents: Vec::new(), used: 0, read_bytes: 0, vectors: Vec::new() };
    let c = config;
    let embed = c.embedding_len;
    binder.read_vectors()?;
    let rope_factors = binder.floats_if_there("rope_freqs.weight", c.rope_len / 2)?;
    let layers: Vec<Layer> = (0..c.layers).map(|i| binder.layer(i, family, c)).collect::<Result<_, _>>()?;
    let output_norm = binder.floats("output_norm.weight", embed)?;
    let tied = gguf.tensor("output.weight").is_none();
    let output = binder.matrix(if tied { "token_embd" } else { "output" }, c.vocab_len, embed, None)?;
    let embedding = binder.table("token_embd", c.vocab_len, embed)?;

    let streamed = stream(&layers, options)?;
    let used_bytes = binder.used as u64;
    let store = match binder.cached {
        Some(cached) => Store::Cached(cached.sized(layers.len() + 1, used_bytes)),
        None => {
            let region = Arc::new(Region::reserve(binder.used, options.unit_bytes, options.backing)?);
            let stages: Vec<Range<usize>> = layers.iter().map(Layer::range).chain([output.range()]).collect();
            let pager_options = Options { window: options.window, ..Options::default() };
            Store::Paged(Pager::start(region, binder.extents, &stages, pager_options))
        }
    };
    Ok(Weights {
        store,
        streamed,
        embedding,
        tied,
        layers,
        output_norm,
        output,
        rope_factors,
        used_bytes,
        bound_bytes: binder.read_bytes,
    })
}

/// Slots for the experts of `layers`, if that is how they are kept and there are any.
fn stream(layers: &[Layer], options: &LoadOptions) -> Result<Option<Streamed>, Error> {
    let ExpertMemory::Slots { slots, lanes } = options.experts else { return Ok(None) };
    let all: Vec<_> = layers.iter().filter_map(|layer| layer.experts.as_ref()).collect();
    let Some(first) = all.first() else { return Ok(None) };
    let stacks = all.iter().filter_map(|experts| experts.stacks()).collect();
    let mut next = 0..;
    let index = layers.iter().map(|layer| layer.experts.as_ref().and_then(|_| next.next())).collect();
    let counts = (first.count(), first.routing.used);
    Streamed::new(stacks, index, counts, slots, lanes, options.guess_experts).map(Some)
}

pub(super) struct Binder<'a> {
    gguf: &'a Gguf,
    sources: &'a [Arc<dyn ByteSource>],
    /// Whether experts are in slots.
    streams: bool,
    /// Where matrices stay in the files.
    cached: Option<Cached>,
    extents: Vec<Extent>,
    /// Bytes of matrices so far, and of the region.
    used: usize,
    read_bytes: u64,
    /// The vectors of the file and their bytes.
    vectors: Vec<(&'a TensorInfo, Vec<u8>)>,
}

impl<'a> Binder<'a> {
    fn find(&self, name: &str, wanted: &[u64]) -> Result<&'a TensorInfo, Error> {
        let tensor = self.gguf.tensor(name).ok_or_else(|| Error::Tensor(name.into()))?;
        if tensor.dims != wanted {
            return Err(Error::Shape { name: name.into(), found: tensor.dims.clone(), wanted: wanted.to_vec() });
        }
        Ok(tensor)
    }

    fn layer(&mut self, index: usize, family: &Family, c: &Config) -> Result<Layer, Error> {
        let (heads_kv, head_len) = c.layer_heads(index);
        let (embed, q_len, kv_len) = (c.embedding_len, c.heads * head_len, heads_kv * head_len);
        let rope_len = if c.layer_has_window(index) { c.rope_len_window } else { c.rope_len };
        // In heads that are made of latents the last values are rotated, else the first.
        let reorder = |head_len: usize, first| {
            (family.rope_pairs == RopePairs::Adjacent).then_some(RopeRows { head_len, first, len: rope_len })
        };
        let name = |part: &str| format!("blk.{index}.{part}");
        let norm_if = |binder: &mut Self, wanted: bool, part: &str, len: usize| {
            if wanted { binder.floats(&name(part), len).map(Some) } else { binder.floats_if_there(&name(part), len) }
        };
        let qk_norm = family.qk_norm != QkNorm::None;
        let norm_len = |whole: usize| if family.qk_norm == QkNorm::Whole { whole } else { head_len };
        let attention_norm = self.floats(&name("attn_norm.weight"), embed)?;
        let (q, k, v, latents) = match &c.latents {
            Some(latents) => {
                let (q, k, latents) = self.latents(index, c, latents, reorder)?;
                (q, k, None, Some(latents))
            }
            None => {
                let rows = reorder(head_len, 0);
                let q = self.matrix_with_bias(&name("attn_q"), q_len, embed, rows, family.qkv_bias)?;
                let k = self.matrix_with_bias(&name("attn_k"), kv_len, embed, rows, family.qkv_bias)?;
                let v = match family.v_norm && self.gguf.tensor(&name("attn_v.weight")).is_none() {
                    true => None,
                    false => Some(self.matrix_with_bias(&name("attn_v"), kv_len, embed, None, family.qkv_bias)?),
                };
                (q, k, v, None)
            }
        };
        let out_len = c.latents.map_or(q_len, |latents| c.heads * latents.value_len);
        let mut layer = Layer {
            attention_norm,
            q,
            k,
            v,
            latents,
            v_norm: family.v_norm.then(|| vec![1.0; head_len]),
            q_norm: norm_if(self, qk_norm, "attn_q_norm.weight", norm_len(q_len))?,
            k_norm: norm_if(self, qk_norm, "attn_k_norm.weight", norm_len(kv_len))?,
            key_prior: KeyPrior::default(),
            sinks: if family.sinks { Some(self.floats(&name("attn_sinks.weight"), c.heads)?) } else { None },
            attention_out: self.matrix_with_bias(&name("attn_output"), embed, out_len, None, false)?,
            attention_post_norm: match family.ffn_norm {
                "post_attention_norm.weight" => None,
                _ => norm_if(self, family.post_norms, "post_attention_norm.weight", embed)?,
            },
            ffn_norm: self.floats(&name(family.ffn_norm), embed)?,
            mlp: self.mlp(index, c)?,
            experts: match c.layer_experts(index) {
                Some(experts) => Some(self.experts(index, family, &experts, embed)?),
                None => None,
            },
            ffn_post_norm: norm_if(self, family.post_norms, "post_ffw_norm.weight", embed)?,
            out_scale: self.floats_if_there(&name("layer_output_scale.weight"), 1)?.map(|scale| scale[0]),
        };
        layer.key_prior = KeyPrior::new(&layer, heads_kv, head_len, rope_len);
        Ok(layer)
    }

    /// The feed-forward layer, or the shared expert of a layer of experts.
    fn mlp(&mut self, index: usize, c: &Config) -> Result<Option<Mlp>, Error> {
        let experts = c.layer_experts(index);
        let (suffix, len) = match experts.filter(|e| !e.beside) {
            Some(experts) => ("_shexp", experts.shared_feed_forward_len),
            None => ("", c.feed_forward_len),
        };
        if len == 0 {
            return Ok(None);
        }
        let name = |part: &str| format!("blk.{index}.{part}{suffix}");
        Ok(Some(Mlp {
            gate: self.matrix_with_bias(&name("ffn_gate"), len, c.embedding_len, None, false)?,
            up: self.matrix_with_bias(&name("ffn_up"), len, c.embedding_len, None, false)?,
            down: self.matrix_with_bias(&name("ffn_down"), c.embedding_len, len, None, false)?,
        }))
    }

    fn experts(&mut self, index: usize, family: &Family, c: &config::Experts, embed: usize) -> Result<Experts, Error> {
        let name = |part: &str| format!("blk.{index}.{part}");
        let len = c.feed_forward_len;
        let fused = self.gguf.tensor(&name("ffn_gate_up_exps.weight")).is_some();
        let mut own = |part: &str| c.beside.then(|| self.floats(&name(part), embed)).transpose();
        let post_norms = own("post_ffw_norm_2.weight")?.zip(own("post_ffw_norm_1.weight")?);
        let (norm, mut router_norm) = (own("pre_ffw_norm_2.weight")?, own("ffn_gate_inp.scale")?);
        let width = (embed as f32).sqrt();
        router_norm.iter_mut().flatten().for_each(|x| *x /= width);
        Ok(Experts {
            router: self.matrix_with_bias(&name("ffn_gate_inp"), c.count, embed, None, false)?,
            choice_bias: self.floats_if_there(&name("exp_probs_b.bias"), c.count)?,
            shared_gate: match family.experts.is_some_and(|e| e.shared_gate) && c.shared_feed_forward_len > 0 {
                true => Some(self.floats(&name("ffn_gate_inp_shexp.weight"), embed)?),
                false => None,
            },
            router_norm,
            norm,
            post_norms: post_norms.map(|(experts, shared)| [experts, shared]),
            scales: self.floats_if_there(&name("ffn_down_exps.scale"), c.count)?,
            gate: match fused {
                true => self.stack(&name("ffn_gate_up_exps"), c.count, 2 * len, embed)?,
                false => self.stack(&name("ffn_gate_exps"), c.count, len, embed)?,
            },
            up: if fused { None } else { Some(self.stack(&name("ffn_up_exps"), c.count, len, embed)?) },
            down: self.stack(&name("ffn_down_exps"), c.count, embed, len)?,
            routing: c.routing,
            gate_function: family.gate,
        })
    }

    /// Reads the file's vectors, all of a shard at once: one after the other they would cost a seek each.
    fn read_vectors(&mut self) -> Result<(), Error> {
        let mut room = ReadRoom::new(true);
        for (shard, source) in self.sources.iter().enumerate() {
            let is_vector =
                |t: &&TensorInfo| t.shard == shard && is_vector(t) && t.row_len() * t.rows() <= VECTOR_LEN_MAX;
            let vectors: Vec<&TensorInfo> = self.gguf.tensors.iter().filter(is_vector).collect();
            let ranges: Vec<Range<u64>> =
                vectors.iter().map(|t| t.offset_bytes..t.offset_bytes + t.len_bytes).collect();
            let places = source.read(&ranges, &mut room)?;
            self.read_bytes += ranges.iter().map(|r| r.end - r.start).sum::<u64>();
            let bytes = places.into_iter().map(|place| room.bytes()[place].to_vec());
            self.vectors.extend(vectors.into_iter().zip(bytes));
        }
        Ok(())
    }

    /// A vector of floats: norms, biases, factors.
    pub(super) fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        self.floats_of(name, &[len as u64])
    }

    fn floats_of(&mut self, name: &str, wanted: &[u64]) -> Result<Vec<f32>, Error> {
        let tensor = self.find(name, wanted)?;
        let format = format_of(tensor.ty).filter(|f| f.float_activations());
        let format = format.ok_or_else(|| Error::Format { name: name.into(), ty: tensor.ty })?;
        let raw = self.vectors.iter().find(|(t, _)| std::ptr::eq(*t, tensor)).map(|(_, bytes)| &bytes[..]);
        let raw = raw.ok_or_else(|| Error::Tensor(name.into()))?;
        Ok(raw
            .chunks_exact(format.block_bytes())
            .map(|b| match *b {
                [a, b] if format == Format::BF16 => kernels::math::bf16_to_f32(u16::from_le_bytes([a, b])),
                [a, b] => kernels::math::f16_to_f32(u16::from_le_bytes([a, b])),
                [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
                _ => unreachable!("float formats have two or four bytes"),
            })
            .collect())
    }

    fn floats_if_there(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, Error> {
        match self.gguf.tensor(name) {
            Some(_) => self.floats(name, len).map(Some),
            None => Ok(None),
        }
    }

    fn matrix_with_bias(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        rope_rows: Option<RopeRows>,
        needs_bias: bool,
    ) -> Result<Weight, Error> {
        let mut weight = self.matrix(name, rows, cols, rope_rows)?;
        let bias = format!("{name}.bias");
        weight.bias = if needs_bias { Some(self.floats(&bias, rows)?) } else { self.floats_if_there(&bias, rows)? };
        if let (Some(bias), Some(reordered)) = (&mut weight.bias, rope_rows) {
            *bias = (0..rows).map(|row| bias[reordered.source(row)]).collect();
        }
        Ok(weight)
    }

    /// Finds `{name}.weight`, and tells its format and the bytes of a row.
    fn find_matrix(&self, name: &str, dims: &[usize]) -> Result<(&'a TensorInfo, Format, usize), Error> {
        let name = format!("{name}.weight");
        let tensor = self.find(&name, &dims.iter().map(|&n| n as u64).collect::<Vec<_>>())?;
        let format = format_of(tensor.ty).and_then(|f| Some((f, f.row_bytes(dims[0])?)));
        let (format, row_bytes) = format.ok_or(Error::Format { name, ty: tensor.ty })?;
        Ok((tensor, format, row_bytes))
    }

    /// Gives `{name}.weight` the next place.
    pub(super) fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        rope_rows: Option<RopeRows>,
    ) -> Result<Weight, Error> {
        let found = self.find_matrix(name, &[cols, rows])?;
        Ok(self.place(found, rows, cols, rope_rows))
    }

    /// Gives the `count` matrices in `{name}.weight` the next place: as one matrix.
    pub(super) fn tall(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<Weight, Error> {
        let found = self.find_matrix(name, &[cols, rows, count])?;
        Ok(self.place(found, count * rows, cols, None))
    }

    /// Gives the matrices of `count` experts in `{name}.weight`, and their biases if there are any, the next place: as one
    /// matrix.
    fn stack(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<Weight, Error> {
        let mut weight = if self.streams {
            let found = self.find_matrix(name, &[cols, rows, count])?;
            let (tensor, format, row_bytes) = found;
            let offset_bytes = tensor.offset_bytes;
            let packing = Packing { format, rows: count * rows, row_bytes, offset_bytes, rope_rows: None };
            let place = Place::Slots(Arc::clone(&self.sources[tensor.shard]), packing.clone());
            Weight { format, rows: count * rows, cols, len_bytes: packing.len_bytes(), place, bias: None }
        } else {
            self.tall(name, count, rows, cols)?
        };
        let bias = format!("{name}.bias");
        if self.gguf.tensor(&bias).is_some() {
            weight.bias = Some(self.floats_of(&bias, &[rows as u64, count as u64])?);
        }
        Ok(weight)
    }

    fn place(
        &mut self,
        (tensor, format, row_bytes): (&TensorInfo, Format, usize),
        rows: usize,
        cols: usize,
        rope_rows: Option<RopeRows>,
    ) -> Weight {
        let packing = Packing { format, rows, row_bytes, offset_bytes: tensor.offset_bytes, rope_rows };
        let len_bytes = packing.len_bytes();
        let range = self.used..self.used + len_bytes;
        self.used = range.end.next_multiple_of(ALIGN_BYTES);
        let place = match &self.cached {
            Some(cached) => Place::File(cached.rows(tensor.shard, packing)),
            None => {
                let source = Arc::clone(&self.sources[tensor.shard]);
                self.extents.push(Extent { place: range.clone(), source, transcode: Arc::new(packing) });
                Place::Region(range)
            }
        };
        Weight { format, rows, cols, len_bytes, place, bias: None }
    }

    /// `{name}.weight`, to be read by row.
    fn table(&self, name: &str, rows: usize, cols: usize) -> Result<RowTable, Error> {
        let (tensor, format, row_bytes) = self.find_matrix(name, &[cols, rows])?;
        Ok(RowTable::new(format, row_bytes, Arc::clone(&self.sources[tensor.shard]), tensor.offset_bytes))
    }
}
