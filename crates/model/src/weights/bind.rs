//! Binds the names of a file's tensors to places in a region, by the header alone. Matrices are laid out in the order in
//! which a forward pass uses them; the small vectors of floats are read at once.

use super::cached::Cached;
use super::pack::{Packing, source_row};
use super::rows::RowTable;
use super::{Layer, Place, Store, Weight, Weights, format_of};
use crate::config::{Config, Family, RopePairs};
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
    let mut binder = Binder { gguf, sources, cached, extents: Vec::new(), used: 0, read_bytes: 0, vectors: Vec::new() };
    let c = config;
    let embed = c.embedding_len;
    binder.read_vectors()?;
    let rope_factors = binder.floats_if_there("rope_freqs.weight", c.rope_len / 2)?;
    let layers: Vec<Layer> = (0..c.layers).map(|i| binder.layer(i, family, c)).collect::<Result<_, _>>()?;
    let output_norm = binder.floats("output_norm.weight", embed)?;
    let tied = gguf.tensor("output.weight").is_none();
    let output = binder.matrix(if tied { "token_embd" } else { "output" }, c.vocab_len, embed, None)?;
    let embedding = binder.table("token_embd", c.vocab_len, embed)?;

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

struct Binder<'a> {
    gguf: &'a Gguf,
    sources: &'a [Arc<dyn ByteSource>],
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
        let (embed, q_len, kv_len) = (c.embedding_len, c.heads * c.head_len, c.heads_kv * c.head_len);
        let rope_heads = (family.rope_pairs == RopePairs::Adjacent).then_some((c.head_len, c.rope_len));
        let name = |part: &str| format!("blk.{index}.{part}");
        let norm_if = |binder: &mut Self, wanted: bool, part: &str, len: usize| {
            if wanted { binder.floats(&name(part), len).map(Some) } else { binder.floats_if_there(&name(part), len) }
        };
        Ok(Layer {
            attention_norm: self.floats(&name("attn_norm.weight"), embed)?,
            q: self.matrix_with_bias(&name("attn_q"), q_len, embed, rope_heads, family.qkv_bias)?,
            k: self.matrix_with_bias(&name("attn_k"), kv_len, embed, rope_heads, family.qkv_bias)?,
            v: self.matrix_with_bias(&name("attn_v"), kv_len, embed, None, family.qkv_bias)?,
            q_norm: norm_if(self, family.qk_norm, "attn_q_norm.weight", c.head_len)?,
            k_norm: norm_if(self, family.qk_norm, "attn_k_norm.weight", c.head_len)?,
            attention_out: self.matrix_with_bias(&name("attn_output"), embed, q_len, None, false)?,
            attention_post_norm: norm_if(self, family.post_norms, "post_attention_norm.weight", embed)?,
            ffn_norm: self.floats(&name("ffn_norm.weight"), embed)?,
            gate: self.matrix_with_bias(&name("ffn_gate"), c.feed_forward_len, embed, None, false)?,
            up: self.matrix_with_bias(&name("ffn_up"), c.feed_forward_len, embed, None, false)?,
            down: self.matrix_with_bias(&name("ffn_down"), embed, c.feed_forward_len, None, false)?,
            ffn_post_norm: norm_if(self, family.post_norms, "post_ffw_norm.weight", embed)?,
        })
    }

    /// Reads the file's vectors, all of a shard at once: one after the other they would cost a seek each.
    fn read_vectors(&mut self) -> Result<(), Error> {
        let mut room = ReadRoom::new(true);
        for (shard, source) in self.sources.iter().enumerate() {
            let is_vector = |t: &&TensorInfo| t.shard == shard && t.dims.len() == 1 && t.dims[0] <= VECTOR_LEN_MAX;
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
    fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.find(name, &[len as u64])?;
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
        rope_heads: Option<(usize, usize)>,
        needs_bias: bool,
    ) -> Result<Weight, Error> {
        let mut weight = self.matrix(name, rows, cols, rope_heads)?;
        let bias = format!("{name}.bias");
        weight.bias = if needs_bias { Some(self.floats(&bias, rows)?) } else { self.floats_if_there(&bias, rows)? };
        if let (Some(bias), Some(heads)) = (&mut weight.bias, rope_heads) {
            *bias = (0..rows).map(|row| bias[source_row(row, heads)]).collect();
        }
        Ok(weight)
    }

    /// Finds `{name}.weight`, and tells its format and the bytes of a row.
    fn find_matrix(&self, name: &str, rows: usize, cols: usize) -> Result<(&'a TensorInfo, Format, usize), Error> {
        let name = format!("{name}.weight");
        let tensor = self.find(&name, &[cols as u64, rows as u64])?;
        let format = format_of(tensor.ty).and_then(|f| Some((f, f.row_bytes(cols)?)));
        let (format, row_bytes) = format.ok_or(Error::Format { name, ty: tensor.ty })?;
        Ok((tensor, format, row_bytes))
    }

    /// Gives `{name}.weight` the next place.
    fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        rope_heads: Option<(usize, usize)>,
    ) -> Result<Weight, Error> {
        let (tensor, format, row_bytes) = self.find_matrix(name, rows, cols)?;
        let packing = Packing { format, rows, row_bytes, offset_bytes: tensor.offset_bytes, rope_heads };
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
        Ok(Weight { format, rows, cols, len_bytes, place, bias: None })
    }

    /// `{name}.weight`, to be read by row.
    fn table(&self, name: &str, rows: usize, cols: usize) -> Result<RowTable, Error> {
        let (tensor, format, row_bytes) = self.find_matrix(name, rows, cols)?;
        Ok(RowTable::new(format, row_bytes, Arc::clone(&self.sources[tensor.shard]), tensor.offset_bytes))
    }
}
