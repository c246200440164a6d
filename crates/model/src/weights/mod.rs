//! Weights: names bound to places in a region, which a pager fills with panels while the model already runs.

mod bind;
mod pack;
mod rows;
mod shared;

pub(crate) use shared::share;

use crate::Error;
use gguf::TensorType;
use kernels::PANEL_ROWS;
use kernels::isa::Level;
use kernels::matmul::Matrix;
use kernels::quant::Format;
use memory::pager::{Pager, Stats};
use rows::RowTable;
use std::ops::Range;
use std::sync::Arc;

/// A weight matrix in the region.
#[derive(Debug)]
pub(crate) struct Weight {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    range: Range<usize>,
    bias: Option<Vec<f32>>,
}

impl Weight {
    /// Bytes of its panels.
    pub(crate) fn len_bytes(&self) -> usize {
        self.range.len()
    }
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

impl Layer {
    /// The layer's matrices, in the order of use.
    pub(crate) fn matrices(&self) -> [&Weight; 7] {
        [&self.q, &self.k, &self.v, &self.attention_out, &self.gate, &self.up, &self.down]
    }

    /// Where they are: side by side.
    fn range(&self) -> Range<usize> {
        self.q.range.start..self.down.range.end
    }
}

/// All tensors of a model.
#[derive(Debug)]
pub(crate) struct Weights {
    pager: Pager,
    embedding: RowTable,
    /// The output matrix is the embedding table.
    tied: bool,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vec<f32>,
    pub(crate) output: Weight,
    pub(crate) rope_factors: Option<Vec<f32>>,
    /// Bytes of matrices.
    pub(crate) used_bytes: u64,
    /// Bytes read while names were bound: norms, biases, factors.
    bound_bytes: u64,
}

/// Rows of the embedding table for the tokens of a batch.
pub(crate) enum EmbeddingRows<'a> {
    /// In the panels of the output matrix.
    Panels(&'a Weights),
    /// As in the file, one for each token.
    File(Format, Vec<Arc<[u8]>>),
}

impl EmbeddingRows<'_> {
    /// Dequantizes the row of `token`, token `i` of the batch.
    pub(crate) fn unpack(&self, level: Level, i: usize, token: u32, out: &mut [f32]) {
        match self {
            EmbeddingRows::Panels(weights) => {
                let (panel, lane) = weights.panel_of_row(&weights.output, token as usize);
                weights.output.format.unpack_row(level, panel, lane, out);
            }
            EmbeddingRows::File(format, rows) => rows::unpack(*format, level, &rows[i], out),
        }
    }
}

impl Weights {
    /// `weight` for the kernels. It must have been ensured.
    pub(crate) fn matrix<'a>(&'a self, weight: &'a Weight) -> Matrix<'a> {
        Matrix {
            format: weight.format,
            rows: weight.rows,
            cols: weight.cols,
            panels: self.pager.region().bytes(weight.range.clone()),
            bias: weight.bias.as_deref(),
        }
    }

    /// The panel that holds row `row` of `weight`, and the row's lane in it.
    fn panel_of_row(&self, weight: &Weight, row: usize) -> (&[u8], usize) {
        let panel_bytes = weight.range.len() / weight.rows.div_ceil(PANEL_ROWS);
        let at = weight.range.start + row / PANEL_ROWS * panel_bytes;
        (self.pager.region().bytes(at..at + panel_bytes), row % PANEL_ROWS)
    }

    /// The embedding rows of `tokens`: from memory where the table is there anyway, else from the file.
    pub(crate) fn embedding_rows(&self, tokens: &[u32]) -> Result<EmbeddingRows<'_>, Error> {
        if self.tied && self.pager.is_present(self.output.range.clone()) {
            return Ok(EmbeddingRows::Panels(self));
        }
        Ok(EmbeddingRows::File(self.embedding.format, self.embedding.rows(tokens)?))
    }

    /// Stages: the layers, then the output matrix.
    pub(crate) fn stages(&self) -> usize {
        self.layers.len() + 1
    }

    /// Returns when `stage` is in memory; what comes behind it is read meanwhile.
    pub(crate) fn ensure(&self, stage: usize) -> Result<(), Error> {
        self.pager.advance(stage);
        let range = self.layers.get(stage).map_or_else(|| self.output.range.clone(), Layer::range);
        Ok(self.pager.ensure(range)?)
    }

    /// An error if something that was computed with may not have been there.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.pager.failure().map_or(Ok(()), |e| Err(e.into()))
    }

    /// Ends waits that are under way.
    pub(crate) fn interrupt(&self) {
        self.pager.interrupt();
    }

    /// The pager's counts, embedding rows and vectors included.
    pub(crate) fn stats(&self) -> Stats {
        let stats = self.pager.stats();
        Stats { read_bytes: stats.read_bytes + self.embedding.read_bytes() + self.bound_bytes, ..stats }
    }

    /// The region that holds the matrices.
    pub(crate) fn region(&self) -> &memory::Region {
        self.pager.region()
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
