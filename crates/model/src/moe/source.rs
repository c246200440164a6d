//! Where a layer's experts come from: the seam between computing with them and having them.

use super::Wanted;
use crate::Error;
use crate::weights::{Layer, Weights};
use kernels::matmul::Matrix;

/// Matrices that can be used now, of the expert at this place among those wanted.
#[derive(Debug)]
pub(crate) enum Ready<'a> {
    /// Gate and up.
    GateUp(usize, [Matrix<'a>; 2]),
    /// Down.
    Down(usize, Matrix<'a>),
}

/// Has the experts of all layers, or gets them.
pub(crate) trait ExpertSource: Send + Sync {
    /// Whether an expert of `layer` is in memory, or on its way there.
    fn is_there(&self, layer: usize, expert: usize) -> bool {
        let _ = (layer, expert);
        true
    }

    /// So many choices were looked at for being left out, and so many were.
    fn note_left_out(&self, examined: u64, dropped: u64) {
        let _ = (examined, dropped);
    }

    /// Begins with the experts `wanted` of `layer`, which ascend.
    fn visit<'a>(&'a self, layer: usize, wanted: &'a [Wanted]) -> Result<Box<dyn Visit + 'a>, Error>;
}

/// One layer's use of its experts.
pub(crate) trait Visit {
    /// What has come since the last call: at least one part, for which it waits, or nothing when all were handed out.
    /// An expert's gate and up come before its down, or with it. What the call before handed out is not used any more.
    fn next(&mut self) -> Result<Vec<Ready<'_>>, Error>;
}

/// Experts that are in memory with all other weights.
#[derive(Debug)]
pub(crate) struct Resident<'a>(pub(crate) &'a Weights);

struct All<'a> {
    weights: &'a Weights,
    layer: &'a Layer,
    wanted: &'a [Wanted],
}

impl ExpertSource for Resident<'_> {
    fn visit<'a>(&'a self, layer: usize, wanted: &'a [Wanted]) -> Result<Box<dyn Visit + 'a>, Error> {
        Ok(Box::new(All { weights: self.0, layer: &self.0.layers[layer], wanted }))
    }
}

impl Visit for All<'_> {
    fn next(&mut self) -> Result<Vec<Ready<'_>>, Error> {
        let (wanted, experts) = (std::mem::take(&mut self.wanted), self.layer.experts.as_ref());
        let parts = wanted.iter().enumerate().zip(experts.into_iter().cycle());
        let parts = parts.flat_map(|((i, wanted), experts)| {
            let gate_up = experts.gate_up(self.weights, wanted.expert);
            [Ready::GateUp(i, gate_up), Ready::Down(i, experts.down(self.weights, wanted.expert))]
        });
        Ok(parts.collect())
    }
}
