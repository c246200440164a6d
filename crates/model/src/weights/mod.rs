//! Weights: names bound to places, in a region that a pager fills with panels while the model already runs, or in the
//! page cache.

mod bind;
mod cached;
mod experts;
mod key_prior;
mod latents;
mod pack;
mod rows;
mod shared;

pub(crate) use experts::Experts;
pub(crate) use key_prior::KeyPrior;
pub(crate) use latents::{ByHead, Keys, Latents};
pub(crate) use pack::Packing;
pub(crate) use shared::share;

use crate::Error;
use crate::moe::streamed::Streamed;
use cached::{Cached, CachedRows};
use gguf::{TensorInfo, TensorType};
use kernels::PANEL_ROWS;
use kernels::activations::Precision;
use kernels::isa::Level;
use kernels::matmul::{Matrix, Panels};
use kernels::quant::Format;
use memory::pager::{Pager, Stats};
use memory::source::ByteSource;
use rows::RowTable;
use std::ops::Range;
use std::sync::Arc;

/// A weight matrix.
#[derive(Debug)]
pub(crate) struct Weight {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    len_bytes: usize,
    place: Place,
    bias: Option<Vec<f32>>,
}

/// Where a matrix is.
#[derive(Debug)]
enum Place {
    /// In panels, in the region.
    Region(Range<usize>),
    /// In rows, in a file.
    File(CachedRows),
    /// In slots, expert by expert, out of the rows of a file.
    Slots(Arc<dyn ByteSource>, Packing),
}

impl Weight {
    /// Bytes of its panels.
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Its place in the region; nothing if it has none.
    fn range(&self) -> Range<usize> {
        match &self.place {
            Place::Region(range) => range.clone(),
            Place::File(_) | Place::Slots(..) => 0..0,
        }
    }

    fn cached(&self) -> Option<&CachedRows> {
        match &self.place {
            Place::Region(_) | Place::Slots(..) => None,
            Place::File(rows) => Some(rows),
        }
    }
}

/// What keeps the matrices.
#[derive(Debug)]
enum Store {
    Paged(Pager),
    Cached(Cached),
}

/// Tensors of one layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) q: Weight,
    pub(crate) k: Weight,
    /// `None`: the keys are the values too.
    pub(crate) v: Option<Weight>,
    /// Where keys and values are made of latents.
    pub(crate) latents: Option<Latents>,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    /// Ones, where values are normalized.
    pub(crate) v_norm: Option<Vec<f32>>,
    pub(crate) key_prior: KeyPrior,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) attention_out: Weight,
    pub(crate) attention_post_norm: Option<Vec<f32>>,
    pub(crate) ffn_norm: Vec<f32>,
    /// The feed-forward layer, or the expert that all tokens share.
    pub(crate) mlp: Option<Mlp>,
    pub(crate) experts: Option<Experts>,
    pub(crate) ffn_post_norm: Option<Vec<f32>>,
    /// Factor of the residual stream behind the layer.
    pub(crate) out_scale: Option<f32>,
}

/// A gated feed-forward layer.
#[derive(Debug)]
pub(crate) struct Mlp {
    pub(crate) gate: Weight,
    pub(crate) up: Weight,
    pub(crate) down: Weight,
}

impl Layer {
    /// The layer's matrices, in the order of use.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Weight> {
        let first = self.latents.iter().flat_map(Latents::first).chain([&self.q, &self.k]);
        let last = self.v.iter().chain(self.latents.iter().flat_map(Latents::last)).chain([&self.attention_out]);
        let mlp = self.mlp.iter().flat_map(|mlp| [&mlp.gate, &mlp.up, &mlp.down]);
        first.chain(last).chain(mlp).chain(self.experts.iter().flat_map(Experts::matrices))
    }

    /// Bytes of them that a step reads for one token.
    pub(crate) fn step_bytes(&self) -> u64 {
        let experts = self.experts.iter();
        let all: usize = self.matrices().map(Weight::len_bytes).sum();
        let experts_bytes: usize = experts.clone().flat_map(Experts::matrices).map(Weight::len_bytes).sum();
        (all - experts_bytes) as u64 + experts.map(Experts::step_bytes).sum::<u64>()
    }

    /// Where they are in the region: side by side.
    fn range(&self) -> Range<usize> {
        let places = || self.matrices().map(Weight::range);
        let (first, end) = (places().next(), places().map(|place| place.end).max());
        first.map_or(0, |first| first.start)..end.unwrap_or(0)
    }
}

/// All tensors of a model.
#[derive(Debug)]
pub(crate) struct Weights {
    store: Store,
    /// The experts, where they are in slots.
    pub(crate) streamed: Option<Streamed>,
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
    /// All of them, in panels.
    Panels(Format, &'a [u8]),
    /// As in the file, one for each token.
    File(Format, Vec<Arc<[u8]>>),
}

impl EmbeddingRows<'_> {
    /// Dequantizes the row of `token`, token `i` of the batch.
    pub(crate) fn unpack(&self, level: Level, i: usize, token: u32, out: &mut [f32]) {
        match self {
            EmbeddingRows::Panels(format, panels) => {
                let panel_bytes = PANEL_ROWS * format.row_bytes(out.len()).expect("whole blocks");
                let (panel, lane) = (token as usize / PANEL_ROWS, token as usize % PANEL_ROWS);
                format.unpack_row(level, &panels[panel * panel_bytes..(panel + 1) * panel_bytes], lane, out);
            }
            EmbeddingRows::File(format, rows) => rows::unpack(*format, level, &rows[i], out),
        }
    }
}

impl Weights {
    /// `weight` for the kernels. It must have been ensured.
    pub(crate) fn matrix<'a>(&'a self, weight: &'a Weight) -> Matrix<'a> {
        let panels = match (&weight.place, &self.store) {
            (Place::Region(range), Store::Paged(pager)) => Panels::Packed(pager.region().bytes(range.clone())),
            (Place::File(rows), _) => Panels::Made { by: rows, first: 0 },
            (Place::Region(_), Store::Cached(_)) => unreachable!("weights in the page cache have no region"),
            (Place::Slots(..), _) => unreachable!("experts in slots are not a matrix"),
        };
        let bias = weight.bias.as_deref();
        let precision = Precision::Single;
        Matrix { format: weight.format, rows: weight.rows, cols: weight.cols, panels, bias, precision }
    }

    /// The embedding rows of `tokens`: from memory where the table is there anyway, else from the file.
    pub(crate) fn embedding_rows(&self, tokens: &[u32]) -> Result<EmbeddingRows<'_>, Error> {
        let range = self.output.range();
        if let Store::Paged(pager) = &self.store
            && self.tied
            && pager.is_present(range.clone())
        {
            return Ok(EmbeddingRows::Panels(self.output.format, pager.region().bytes(range)));
        }
        Ok(EmbeddingRows::File(self.embedding.format, self.embedding.rows(tokens)?))
    }

    /// Stages: the layers, then the output matrix.
    pub(crate) fn stages(&self) -> usize {
        self.layers.len() + 1
    }

    /// Returns when `stage` is in memory; what comes behind it is read meanwhile.
    pub(crate) fn ensure(&self, stage: usize) -> Result<(), Error> {
        let layer = self.layers.get(stage);
        match &self.store {
            Store::Paged(pager) => {
                pager.advance(stage);
                Ok(pager.ensure(layer.map_or_else(|| self.output.range(), Layer::range))?)
            }
            Store::Cached(cached) => match layer {
                Some(layer) => cached.ensure(stage, layer.matrices().filter_map(Weight::cached)),
                None => cached.ensure(stage, self.output.cached().into_iter()),
            },
        }
    }

    /// An error if something that was computed with may not have been there.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match &self.store {
            Store::Paged(pager) => pager.failure().map_or(Ok(()), |e| Err(e.into())),
            Store::Cached(cached) => cached.check(),
        }
    }

    /// Ends waits that are under way.
    pub(crate) fn interrupt(&self) {
        self.embedding.interrupt();
        if let Store::Paged(pager) = &self.store {
            pager.interrupt();
        }
    }

    /// From now on nothing is read before someone waits for it; the bytes that are still missing.
    pub(crate) fn stop_ahead(&self) -> u64 {
        match &self.store {
            Store::Paged(pager) => pager.stop_ahead(),
            Store::Cached(_) => 0,
        }
    }

    /// The store's counts, embedding rows and vectors included.
    pub(crate) fn stats(&self) -> Stats {
        let stats = match &self.store {
            Store::Paged(pager) => pager.stats(),
            Store::Cached(cached) => cached.stats(),
        };
        let experts = self.streamed.as_ref().map_or(0, |experts| experts.stats().read_bytes);
        Stats { read_bytes: stats.read_bytes + self.embedding.read_bytes() + self.bound_bytes + experts, ..stats }
    }

    /// The share of the region that is in memory now.
    pub(crate) fn resident_share(&self) -> Option<f64> {
        let region = self.region()?;
        Some(region.resident_bytes() as f64 / region.len_bytes().max(1) as f64)
    }

    /// The region that holds the matrices, if it is one.
    pub(crate) fn region(&self) -> Option<&memory::Region> {
        match &self.store {
            Store::Paged(pager) => Some(pager.region()),
            Store::Cached(_) => None,
        }
    }
}

/// Whether a tensor is read at once, as floats, and not a matrix that products are made with: norms, biases, factors.
pub(crate) fn is_vector(tensor: &TensorInfo) -> bool {
    tensor.dims.len() == 1 || !tensor.name.ends_with(".weight")
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
