//! The experts of a layer. A tensor of the file holds one matrix of each expert, one after the other, and is kept as one tall
//! matrix: experts have whole panels of rows, so that each is a stretch of panels.

use super::{Place, Weight, Weights};
use crate::moe::Routing;
use crate::moe::streamed::{Stack, Stacks};
use kernels::activations::Forms;
use kernels::matmul::Matrix;
use kernels::ops::Gate;

/// Tensors of a layer of experts.
#[derive(Debug)]
pub(crate) struct Experts {
    /// A row for each expert.
    pub(crate) router: Weight,
    /// Added to the scores when experts are chosen.
    pub(crate) choice_bias: Option<Vec<f32>>,
    /// What its product with a token says, through a sigmoid, is the share of the shared expert.
    pub(crate) shared_gate: Option<Vec<f32>>,
    /// What the stream is normalized by for the router, where that is not the layer's norm.
    pub(crate) router_norm: Option<Vec<f32>>,
    /// The norm before the experts, where they have one of their own.
    pub(crate) norm: Option<Vec<f32>>,
    /// Of what the experts make together, and of what the shared one makes.
    pub(crate) post_norms: Option<[Vec<f32>; 2]>,
    /// Factor of what each expert makes.
    pub(crate) scales: Option<Vec<f32>>,
    pub(super) gate: Weight,
    /// `None` if each expert's rows of `gate` are those of gate and then those of up.
    pub(super) up: Option<Weight>,
    pub(super) down: Weight,
    pub(crate) routing: Routing,
    pub(crate) gate_function: Gate,
}

impl Experts {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.router.rows
    }

    /// Values between upward and downward products.
    pub(crate) fn middle_len(&self) -> usize {
        self.down.cols
    }

    /// The forms of activations that gate and up need.
    pub(crate) fn forms_in(&self) -> Forms {
        Forms::of([&self.gate].into_iter().chain(&self.up).map(|weight| weight.format))
    }

    /// Gate and up of `expert`.
    pub(crate) fn gate_up<'a>(&'a self, weights: &'a Weights, expert: usize) -> [Matrix<'a>; 2] {
        let len = self.middle_len();
        let gate = weights.matrix(&self.gate);
        match &self.up {
            Some(up) => [gate, weights.matrix(up)].map(|m| m.part(expert * len..(expert + 1) * len)),
            None => [2 * expert, 2 * expert + 1].map(|i| gate.part(i * len..(i + 1) * len)),
        }
    }

    /// Down of `expert`.
    pub(crate) fn down<'a>(&'a self, weights: &'a Weights, expert: usize) -> Matrix<'a> {
        let len = self.down.rows / self.count();
        weights.matrix(&self.down).part(expert * len..(expert + 1) * len)
    }

    /// Where each expert's matrices are, if they come expert by expert.
    pub(super) fn stacks(&self) -> Option<Stacks> {
        let stack = |weight: &Weight, first, rows, stride| match &weight.place {
            Place::Slots(source, packing) => {
                let (source, packing) = (std::sync::Arc::clone(source), packing.clone());
                Some(Stack { source, packing, cols: weight.cols, first, rows, stride, bias: weight.bias.clone() })
            }
            _ => None,
        };
        let len = self.middle_len();
        let [gate, up] = match &self.up {
            Some(up) => [stack(&self.gate, 0, len, len)?, stack(up, 0, len, len)?],
            None => [0, len]
                .map(|first| stack(&self.gate, first, len, 2 * len))
                .into_iter()
                .collect::<Option<Vec<_>>>()?
                .try_into()
                .ok()?,
        };
        let out = self.down.rows / self.count();
        Some([gate, up, stack(&self.down, 0, out, out)?])
    }

    /// All matrices, in the order of use.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Weight> {
        [&self.router, &self.gate].into_iter().chain(&self.up).chain([&self.down])
    }

    /// Bytes that a token reads: the router and the experts that it chooses.
    pub(crate) fn step_bytes(&self) -> u64 {
        let all: u64 = self.matrices().skip(1).map(|weight| weight.len_bytes() as u64).sum();
        self.router.len_bytes() as u64 + all / self.count() as u64 * self.routing.used as u64
    }
}
