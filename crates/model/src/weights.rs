//! Weights: read from the file in large pieces and packed into panels on the way in, so that there is one copy.

use crate::Error;
use crate::config::{Config, Family, RopePairs};
use gguf::{Gguf, TensorInfo, TensorType};
use kernels::PANEL_ROWS;
use kernels::matmul::Matrix;
use kernels::quant::Format;
use memory::{Region, Source};
use std::ops::Range;

/// A weight matrix in the region.
#[derive(Debug)]
pub(crate) struct Weight {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    range: Range<usize>,
    bias: Option<Vec<f32>>,
}

/// Tensors of one layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) q: Weight,
    pub(crate) k: Weight,
    pub(crate) v: Weight,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    pub(crate) attention_out: Weight,
    pub(crate) attention_post_norm: Option<Vec<f32>>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) gate: Weight,
    pub(crate) up: Weight,
    pub(crate) down: Weight,
    pub(crate) ffn_post_norm: Option<Vec<f32>>,
}

/// All tensors of a model.
#[derive(Debug)]
pub(crate) struct Weights {
    region: Region,
    pub(crate) embedding: Weight,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vec<f32>,
    /// `None` where the embedding table is the output matrix too.
    output: Option<Weight>,
    pub(crate) rope_factors: Option<Vec<f32>>,
    pub(crate) used_bytes: u64,
    pub(crate) read_bytes: u64,
}

impl Weights {
    /// The output matrix.
    pub(crate) fn output(&self) -> &Weight {
        self.output.as_ref().unwrap_or(&self.embedding)
    }

    /// `weight` for the kernels.
    pub(crate) fn matrix<'a>(&'a self, weight: &'a Weight) -> Matrix<'a> {
        Matrix {
            format: weight.format,
            rows: weight.rows,
            cols: weight.cols,
            panels: &self.region[weight.range.clone()],
            bias: weight.bias.as_deref(),
        }
    }

    /// The panel that holds row `row` of `weight`, and the row's lane in it.
    pub(crate) fn panel_of_row(&self, weight: &Weight, row: usize) -> (&[u8], usize) {
        let panel_bytes = weight.range.len() / weight.rows.div_ceil(PANEL_ROWS);
        let at = weight.range.start + row / PANEL_ROWS * panel_bytes;
        (&self.region[at..at + panel_bytes], row % PANEL_ROWS)
    }
}

/// The kernels' name for a tensor type.
pub(crate) fn format_of(ty: TensorType) -> Option<Format> {
    Some(match ty {
        TensorType::F32 => Format::F32,
        TensorType::F16 => Format::F16,
        TensorType::BF16 => Format::BF16,
        TensorType::Q4_0 => Format::Q4_0,
        TensorType::Q4_1 => Format::Q4_1,
        TensorType::Q5_0 => Format::Q5_0,
        TensorType::Q5_1 => Format::Q5_1,
        TensorType::Q8_0 => Format::Q8_0,
        TensorType::Q2_K => Format::Q2_K,
        TensorType::Q3_K => Format::Q3_K,
        TensorType::Q4_K => Format::Q4_K,
        TensorType::Q5_K => Format::Q5_K,
        TensorType::Q6_K => Format::Q6_K,
        TensorType::IQ4_NL => Format::IQ4_NL,
        TensorType::IQ4_XS => Format::IQ4_XS,
        TensorType::MXFP4 => Format::MXFP4,
        _ => return None,
    })
}

/// Bytes read at once.
pub(crate) const READ_BYTES: usize = 4 << 20;
/// Matrices start at multiples of a cache line.
const ALIGN_BYTES: usize = 64;

/// Reads all weights. `progress` gets (bytes read, bytes of the file's tensors).
pub(crate) fn load(
    gguf: &Gguf,
    sources: &[Source],
    family: &Family,
    config: &Config,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Weights, Error> {
    let total: usize = gguf.tensors.iter().map(|t| packed_bytes(t).unwrap_or(0)).sum();
    let mut loader = Loader {
        gguf,
        sources,
        region: Region::new(total)?,
        used: 0,
        read_bytes: 0,
        file_bytes: gguf.tensors.iter().map(|t| t.len_bytes).sum(),
        buffer: Vec::new(),
        progress,
    };
    let c = config;
    let (embed, q_len, kv_len) = (c.embedding_len, c.heads * c.head_len, c.heads_kv * c.head_len);
    let rope_heads = (family.rope_pairs == RopePairs::Adjacent).then_some((c.head_len, c.rope_len));
    let embedding = loader.matrix("token_embd", c.vocab_len, embed, None)?;
    let rope_factors = loader.floats_if_there("rope_freqs.weight", c.rope_len / 2)?;
    let mut layers = Vec::with_capacity(c.layers);
    for i in 0..c.layers {
        let name = |part: &str| format!("blk.{i}.{part}");
        let norm_if = |loader: &mut Loader<'_>, wanted: bool, part: &str, len: usize| {
            if wanted { loader.floats(&name(part), len).map(Some) } else { loader.floats_if_there(&name(part), len) }
        };
        layers.push(Layer {
            attention_norm: loader.floats(&name("attn_norm.weight"), embed)?,
            q: loader.matrix_with_bias(&name("attn_q"), q_len, embed, rope_heads, family.qkv_bias)?,
            k: loader.matrix_with_bias(&name("attn_k"), kv_len, embed, rope_heads, family.qkv_bias)?,
            v: loader.matrix_with_bias(&name("attn_v"), kv_len, embed, None, family.qkv_bias)?,
            q_norm: norm_if(&mut loader, family.qk_norm, "attn_q_norm.weight", c.head_len)?,
            k_norm: norm_if(&mut loader, family.qk_norm, "attn_k_norm.weight", c.head_len)?,
            attention_out: loader.matrix_with_bias(&name("attn_output"), embed, q_len, None, false)?,
            attention_post_norm: norm_if(&mut loader, family.post_norms, "post_attention_norm.weight", embed)?,
            ffn_norm: loader.floats(&name("ffn_norm.weight"), embed)?,
            gate: loader.matrix_with_bias(&name("ffn_gate"), c.feed_forward_len, embed, None, false)?,
            up: loader.matrix_with_bias(&name("ffn_up"), c.feed_forward_len, embed, None, false)?,
            down: loader.matrix_with_bias(&name("ffn_down"), embed, c.feed_forward_len, None, false)?,
            ffn_post_norm: norm_if(&mut loader, family.post_norms, "post_ffw_norm.weight", embed)?,
        });
    }
    let output_norm = loader.floats("output_norm.weight", embed)?;
    let output = match gguf.tensor("output.weight") {
        Some(_) => Some(loader.matrix("output", c.vocab_len, embed, None)?),
        None => None,
    };
    Ok(Weights {
        embedding,
        layers,
        output_norm,
        output,
        rope_factors,
        used_bytes: loader.used as u64,
        read_bytes: loader.read_bytes,
        region: loader.region,
    })
}

/// Bytes of a tensor in panels: as in the file, but for rows that fill up the last panel.
pub(crate) fn packed_bytes(tensor: &TensorInfo) -> Option<usize> {
    let cols = usize::try_from(*tensor.dims.first()?).ok()?;
    let rows = usize::try_from(tensor.dims.iter().skip(1).product::<u64>()).ok()?;
    let row_bytes = usize::try_from(tensor.len_bytes).ok()? / rows.max(1);
    let bytes = row_bytes.checked_mul(rows.next_multiple_of(PANEL_ROWS))?;
    (cols > 0).then_some(bytes.next_multiple_of(ALIGN_BYTES))
}

struct Loader<'a> {
    gguf: &'a Gguf,
    sources: &'a [Source],
    region: Region,
    used: usize,
    read_bytes: u64,
    file_bytes: u64,
    buffer: Vec<u8>,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Loader<'_> {
    fn find(&self, name: &str, wanted: &[u64]) -> Result<&TensorInfo, Error> {
        let tensor = self.gguf.tensor(name).ok_or_else(|| Error::Tensor(name.into()))?;
        if tensor.dims != wanted {
            return Err(Error::Shape { name: name.into(), found: tensor.dims.clone(), wanted: wanted.to_vec() });
        }
        Ok(tensor)
    }

    /// A vector of floats: norms, biases, factors.
    fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.find(name, &[len as u64])?;
        let format = format_of(tensor.ty).filter(|f| f.float_activations());
        let format = format.ok_or_else(|| Error::Format { name: name.into(), ty: tensor.ty })?;
        let (shard, offset_bytes, bytes) = (tensor.shard, tensor.offset_bytes, tensor.len_bytes);
        let mut raw = vec![0; bytes as usize];
        self.sources[shard].read_exact_at(&mut raw, offset_bytes)?;
        self.advance(bytes);
        let width = format.block_bytes();
        Ok(raw
            .chunks_exact(width)
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

    /// Reads `{name}.weight` and packs it. With `rope_heads` = (head length, rotated values), the rotated rows of each
    /// head are reordered from neighbours to halves.
    fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        rope_heads: Option<(usize, usize)>,
    ) -> Result<Weight, Error> {
        let name = format!("{name}.weight");
        let tensor = self.find(&name, &[cols as u64, rows as u64])?;
        let format = format_of(tensor.ty).ok_or_else(|| Error::Format { name: name.clone(), ty: tensor.ty })?;
        let row_bytes = format.row_bytes(cols).ok_or_else(|| Error::Format { name: name.clone(), ty: tensor.ty })?;
        let (shard, offset_bytes) = (tensor.shard, tensor.offset_bytes);
        let bytes = rows.next_multiple_of(PANEL_ROWS) * row_bytes;
        let range = self.used..self.used + bytes;
        self.used = range.end.next_multiple_of(ALIGN_BYTES);
        // Whole panels at a time, and whole heads where rows are reordered.
        let unit = rope_heads.map_or(PANEL_ROWS, |(head_len, _)| head_len.next_multiple_of(PANEL_ROWS));
        let step = (READ_BYTES / row_bytes / unit).max(1) * unit;
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            self.buffer.resize(n * row_bytes, 0);
            self.sources[shard].read_exact_at(&mut self.buffer, offset_bytes + (first * row_bytes) as u64)?;
            let row = |r: usize| {
                let from = rope_heads.map_or(r, |heads| source_row(r, heads));
                &self.buffer[from * row_bytes..(from + 1) * row_bytes]
            };
            let out = &mut self.region[range.start + first * row_bytes..range.end];
            for (p, panel) in out.chunks_exact_mut(PANEL_ROWS * row_bytes).take(n.div_ceil(PANEL_ROWS)).enumerate() {
                let count = PANEL_ROWS.min(n - p * PANEL_ROWS);
                let rows: [&[u8]; PANEL_ROWS] =
                    std::array::from_fn(|r| if r < count { row(p * PANEL_ROWS + r) } else { &[] });
                format.pack_panel(&rows[..count], panel);
            }
            self.advance((n * row_bytes) as u64);
        }
        Ok(Weight { format, rows, cols, range, bias: None })
    }

    fn advance(&mut self, bytes: u64) {
        self.read_bytes += bytes;
        (self.progress)(self.read_bytes, self.file_bytes);
    }
}

/// The file's row of packed row `row`: in each head, packed rows i and i + n/2 are the file's 2i and 2i + 1.
fn source_row(row: usize, (head_len, rope_len): (usize, usize)) -> usize {
    let (head, i) = (row / head_len * head_len, row % head_len);
    let half = rope_len / 2;
    head + match i {
        _ if i < half => 2 * i,
        _ if i < rope_len => 2 * (i - half) + 1,
        _ => i,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reordered_rows_are_a_permutation_that_brings_neighbours_half_a_head_apart() {
        let heads = (8, 6);
        let rows: Vec<usize> = (0..16).map(|r| source_row(r, heads)).collect();
        assert_eq!(rows, [0, 2, 4, 1, 3, 5, 6, 7, 8, 10, 12, 9, 11, 13, 14, 15]);
    }
}
