//! Where a layer's experts come from: the seam between computing with them and having them.

use super::{Batch, Choice, Wanted};
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

/// What is done with the experts of a layer as they come.
pub(crate) type Compute<'c> = dyn FnMut(&mut dyn Visit) -> Result<(), Error> + 'c;

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

    /// Whether to guess, before the router of `layer` speaks, which experts its `rows` tokens will want.
    fn wants_guess(&self, layer: usize, rows: usize) -> bool {
        let _ = (layer, rows);
        false
    }

    /// `layer` will probably want the experts of `choices`.
    fn guess(&self, layer: usize, choices: &[Choice]) {
        let _ = (layer, choices);
    }

    /// Whether it is of use to know what tokens nearly chose.
    fn wants_near(&self) -> bool {
        false
    }

    /// Has `compute` use the experts of `layer` that the tokens of `batch` chose.
    fn visit(&self, layer: usize, batch: &Batch, compute: &mut Compute<'_>) -> Result<(), Error>;
}

/// One layer's use of its experts.
pub(crate) trait Visit {
    /// Adds to `ready` what has come since the last call: at least one part, for which it waits, or nothing when all were
    /// handed out. An expert's gate and up come before its down, or with it. What the call before handed out is not used any
    /// more.
    fn next<'s>(&'s mut self, ready: &mut Vec<Ready<'s>>) -> Result<(), Error>;
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
    fn visit(&self, layer: usize, batch: &Batch, compute: &mut Compute<'_>) -> Result<(), Error> {
        compute(&mut All { weights: self.0, layer: &self.0.layers[layer], wanted: &batch.wanted })
    }
}

impl Visit for All<'_> {
    fn next<'s>(&'s mut self, ready: &mut Vec<Ready<'s>>) -> Result<(), Error> {
        let (wanted, experts) = (std::mem::take(&mut self.wanted), self.layer.experts.as_ref());
        for ((i, wanted), experts) in wanted.iter().enumerate().zip(experts.into_iter().cycle()) {
            ready.push(Ready::GateUp(i, experts.gate_up(self.weights, wanted.expert)));
            ready.push(Ready::Down(i, experts.down(self.weights, wanted.expert)));
        }
        Ok(())
    }
}
