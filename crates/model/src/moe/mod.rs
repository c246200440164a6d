//! Layers of experts. Each token chooses a few (`routing`), the batch is turned over so that each expert has its tokens
//! (`batch`), the experts are computed as their matrices come (`source`), all that are there in one parallel region;
//! and each token's results are summed in the order of its choices, so that the order of computation cannot matter.

mod batch;
pub(crate) mod replay;
pub mod routing;
pub(crate) mod source;
pub(crate) mod streamed;

use crate::Error;
use crate::config::Config;
use crate::forward::{Forward, grow, recycled};
use crate::weights::{Experts, Weights};
pub(crate) use batch::{Batch, Near, Wanted};
use kernels::activations::{Activations, Forms, Precision, Source};
use kernels::isa::Level;
use kernels::matmul::{Band, GatedBand, Output, matmul, matmul_bands, matmul_gated_bands};
use kernels::ops;
use kernels::threads::Pool;
use replay::RouteReplay;
pub use routing::{Choice, Routing, Scores};
use source::{ExpertSource, Ready};

/// Buffers of a layer of experts; they only grow.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    routed: Routed,
    guess: Guess,
    batch: Batch,
    /// Normalized residual stream, once for each choice.
    acts: Activations,
    /// What the layer's middle becomes for the downward product.
    middle_acts: Activations,
    /// Feed-forward middle, `[tokens * used, expert feed_forward_len]`.
    middle: Vec<f32>,
    /// Outputs before they are weighed, `[tokens * used, embedding_len]`.
    out: Vec<f32>,
    round: Round,
    /// Their sums, where these are normalized, `[tokens, embedding_len]`.
    sums: Vec<f32>,
    /// Tokens that chose each expert so far, `[layers, experts]`.
    pub(crate) counts: Vec<u64>,
    /// Choices that were recorded elsewhere, instead of the router's.
    pub(crate) replay: Option<RouteReplay>,
}

/// What a router said.
#[derive(Debug, Default)]
struct Routed {
    /// Its outputs, `[tokens, experts padded]`.
    logits: Vec<f32>,
    /// `[tokens, used]`.
    choices: Vec<Choice>,
}

/// What a router would say.
#[derive(Debug, Default)]
struct Guess {
    /// The residual stream before it is what the router will see, normalized.
    normed: Vec<f32>,
    acts: Activations,
    routed: Routed,
}

/// Lists of what is computed at once, kept for their room.
#[derive(Debug, Default)]
struct Round {
    ready: Vec<Ready<'static>>,
    gates: Vec<GatedBand<'static>>,
    downs: Vec<Band<'static>>,
    /// Rows of the downward product, and how many each expert has.
    ids: Vec<u32>,
    parts: Vec<usize>,
}

impl Forward<'_> {
    /// Adds to each row of the layer's part, which is what the shared expert made, what its experts make of the residual
    /// stream, normalized by `norm`. An error if they cannot be had.
    pub(crate) fn experts(&mut self, index: usize, experts: &Experts, norm: &[f32], n: usize) -> Result<(), Error> {
        self.normalize(experts.router_norm.as_deref().unwrap_or(norm), n);
        self.choose(index, experts, n);
        if let Some(norm) = &experts.norm {
            self.normalize(norm, n);
        }
        self.compute_experts(index, experts, n)?;
        self.sum(experts, n);
        Ok(())
    }

    /// Guesses which experts a layer will want that no layer with experts comes before.
    pub(crate) fn guess_first_experts(&mut self, index: usize, n: usize) {
        let layers = &self.weights.layers;
        if layers[index].experts.is_some() && index.checked_sub(1).is_none_or(|before| layers[before].experts.is_none())
        {
            let s = &mut *self.scratch;
            let guesser =
                Guesser { source: self.expert_source, weights: self.weights, config: self.config, level: self.level };
            guesser.guess(self.pool, index, &s.x[..n * self.config.embedding_len], &mut s.moe.guess);
        }
    }

    /// Adds what the experts made of each token, in the order of its choices, to its part.
    fn sum(&mut self, experts: &Experts, n: usize) {
        let (level, width, epsilon) = (self.level, self.config.embedding_len, self.config.norm_epsilon);
        let s = &mut *self.scratch;
        let (part, normed, used) = (&mut s.part[..n * width], &s.normed, experts.routing.used);
        let Scratch { out, batch, routed: Routed { choices, .. }, sums, .. } = &mut s.moe;
        let add_experts = |t: usize, row: &mut [f32]| {
            for i in (t * used..(t + 1) * used).filter(|&i| batch.rows[i] != batch::NO_ROW) {
                let choice = choices[i];
                let scale = experts.scales.as_ref().map_or(1.0, |scales| scales[choice.expert as usize]);
                let out = &out[batch.rows[i] * width..][..width];
                ops::add_scaled(level, row, out, choice.weight * scale);
            }
        };
        let Some([experts_norm, shared_norm]) = &experts.post_norms else {
            self.pool.run_chunks(part, width, |t, row| {
                if let Some(gate) = &experts.shared_gate {
                    let share = routing::sigmoid(ops::dot(level, gate, &normed[t * width..(t + 1) * width]));
                    row.iter_mut().for_each(|x| *x *= share);
                }
                add_experts(t, row);
            });
            return;
        };
        let sums = grow(sums, n * width);
        self.pool.run_chunks(sums, width, |t, row| {
            row.fill(0.0);
            add_experts(t, row);
            ops::rms_norm(level, row, experts_norm, epsilon);
        });
        let sums = &*sums;
        self.pool.run_chunks(part, width, |t, row| {
            ops::rms_norm(level, row, shared_norm, epsilon);
            ops::add(level, row, &sums[t * width..(t + 1) * width]);
        });
    }

    /// Writes the normalized residual stream.
    fn normalize(&mut self, norm: &[f32], n: usize) {
        let (width, s) = (self.config.embedding_len, &mut *self.scratch);
        normalize(self.pool, self.level, (norm, self.config.norm_epsilon), &s.x[..n * width], &mut s.normed);
    }

    /// Has each of `n` tokens choose its experts, and sorts the choices by experts.
    fn choose(&mut self, index: usize, experts: &Experts, n: usize) {
        let (used, count, s) = (experts.routing.used, experts.router.rows, &mut *self.scratch);
        let normed = &s.normed[..n * self.config.embedding_len];
        let moe = &mut s.moe;
        let row_len = route(self.pool, self.level, (self.weights, experts), normed, &mut s.acts, &mut moe.routed);
        let Routed { logits, choices } = &mut moe.routed;
        moe.batch.near.clear();
        // What is forced on the router says nothing of what it would choose next.
        if self.expert_source.wants_near() && moe.replay.is_none() {
            let rows = logits.chunks_exact(row_len).zip(choices.chunks_exact(used));
            for (token, (logits, choices)) in (0u32..).zip(rows) {
                let found = |expert, share| moe.batch.near.push(Near { expert, token, share });
                experts.routing.near(&logits[..count], choices, found);
            }
        }
        if let Some(replay) = &moe.replay {
            for (t, choices) in choices.chunks_exact_mut(used).enumerate() {
                replay.force(t, index as u32, count, choices);
            }
        }
        if let Some(share) = self.drop_cold_experts {
            let source = self.expert_source;
            let is_there = |expert| source.is_there(index, expert as usize);
            let counts = choices.chunks_exact_mut(used).map(|choices| routing::drop_cold(choices, share, is_there));
            let (examined, dropped) = counts.fold((0, 0), |sum, counts| (sum.0 + counts.0, sum.1 + counts.1));
            source.note_left_out(examined, dropped);
        }
        moe.batch.sort(choices, used, count);
        moe.counts.resize(self.weights.layers.len() * count, 0);
        for wanted in &moe.batch.wanted {
            moe.counts[index * count + wanted.expert] += wanted.rows.len() as u64;
        }
    }

    /// Computes the experts that were chosen, each for all of its tokens, as they come.
    fn compute_experts(&mut self, index: usize, experts: &Experts, n: usize) -> Result<(), Error> {
        let (level, width, s) = (self.level, self.config.embedding_len, &mut *self.scratch);
        let Scratch { batch, acts, middle_acts, middle, out, round, guess, .. } = &mut s.moe;
        let (wanted, rows) = (&batch.wanted, batch.tokens.len());
        let source = Source { x: &s.normed, stride: width, cols: width, norm: None };
        round.parts.clear();
        round.parts.extend(wanted.iter().map(|w| w.rows.len()));
        // A token alone is the same for all of its experts.
        let alone = n == 1;
        let (ids, parts) = if alone { (&[0][..], &[1][..]) } else { (&batch.tokens[..], &round.parts[..]) };
        acts.gather(self.pool, level, &source, ids, parts, experts.forms_in(), Precision::Single);
        let middle_len = experts.middle_len();
        let (middle, out) = (grow(middle, rows * middle_len), grow(out, rows * width));
        let pool = &mut *self.pool;
        let guesser = Guesser { source: self.expert_source, weights: self.weights, config: self.config, level };
        let x = &s.x[..n * width];
        self.expert_source.visit(index, batch, &mut |visit| {
            // What this layer lacks is being read by now, and the drive knows what to do next.
            guesser.guess(pool, index + 1, x, guess);
            loop {
                let (mut gates, mut downs) = (recycled(&mut round.gates), recycled(&mut round.downs));
                let mut ready = recycled(&mut round.ready);
                visit.next(&mut ready)?;
                for ready in ready.drain(..) {
                    match ready {
                        Ready::GateUp(i, matrices) => {
                            let part = if alone { 0 } else { i };
                            gates.push(GatedBand { matrices, part, rows: wanted[i].rows.clone() });
                        }
                        Ready::Down(i, matrix) => downs.push(Band { matrix, part: 0, rows: wanted[i].rows.clone() }),
                    }
                }
                round.ready = recycled(&mut ready);
                if gates.is_empty() && downs.is_empty() {
                    (round.gates, round.downs) = (recycled(&mut gates), recycled(&mut downs));
                    return Ok(());
                }
                gates.sort_unstable_by_key(|band| band.rows.start);
                downs.sort_unstable_by_key(|band| band.rows.start);
                matmul_gated_bands(pool, level, &gates, experts.gate_function, acts, middle);
                round.gates = recycled(&mut gates);

                downs.iter_mut().enumerate().for_each(|(part, band)| band.part = part);
                round.ids.clear();
                round.ids.extend(downs.iter().flat_map(|band| band.rows.clone()).map(|row| row as u32));
                round.parts.clear();
                round.parts.extend(downs.iter().map(|band| band.rows.len()));
                let source = Source { x: middle, stride: middle_len, cols: middle_len, norm: None };
                let forms = Forms::of(downs.iter().map(|band| band.matrix.format));
                middle_acts.gather(pool, level, &source, &round.ids, &round.parts, forms, Precision::Single);
                matmul_bands(pool, level, &downs, middle_acts, out);
                round.downs = recycled(&mut downs);
            }
        })
    }
}

/// Normalizes rows of the residual stream into `normed`.
fn normalize(pool: &mut Pool, level: Level, (norm, epsilon): (&[f32], f32), x: &[f32], normed: &mut Vec<f32>) {
    let normed = grow(normed, x.len());
    normed.copy_from_slice(x);
    pool.run_chunks(normed, norm.len(), |_, row| ops::rms_norm(level, row, norm, epsilon));
}

/// Has a router choose experts for each row of the normalized residual stream. The length of a row of its outputs.
fn route(
    pool: &mut Pool,
    level: Level,
    (weights, experts): (&Weights, &Experts),
    normed: &[f32],
    acts: &mut Activations,
    routed: &mut Routed,
) -> usize {
    let mut router = weights.matrix(&experts.router);
    router.precision = Precision::Double;
    let (width, forms) = (router.cols, Forms::of([router.format]));
    let n = normed.len() / width;
    acts.fill(pool, level, normed, width, width, n, None, forms, Precision::Double);
    let (row_len, used) = (router.padded_rows(), experts.routing.used);
    let logits = grow(&mut routed.logits, n * row_len);
    matmul(pool, level, &[router], acts, logits, Output::Store);
    routed.choices.clear();
    routed.choices.resize(n * used, Choice::default());
    let (logits, bias) = (&*logits, experts.choice_bias.as_deref());
    pool.run_chunks(&mut routed.choices, used, |t, choices| {
        experts.routing.route(&logits[t * row_len..][..router.rows], bias, choices);
    });
    row_len
}

/// Tells which experts a layer will probably want, while another is being computed: those that its router chooses for the
/// residual stream as it is. What comes of it decides what is read when, and nothing else.
struct Guesser<'a> {
    source: &'a dyn ExpertSource,
    weights: &'a Weights,
    config: &'a Config,
    level: Level,
}

impl Guesser<'_> {
    /// Guesses for layer `index`, from the residual stream `x`, if there is such a layer and that may be of use.
    fn guess(&self, pool: &mut Pool, index: usize, x: &[f32], guess: &mut Guess) {
        let Some(layer) = self.weights.layers.get(index) else { return };
        let rows = x.len() / self.config.embedding_len;
        let Some(experts) = layer.experts.as_ref().filter(|_| self.source.wants_guess(index, rows)) else { return };
        let norm = (experts.router_norm.as_deref().unwrap_or(&layer.ffn_norm), self.config.norm_epsilon);
        let Guess { normed, acts, routed } = guess;
        normalize(pool, self.level, norm, x, normed);
        route(pool, self.level, (self.weights, experts), &normed[..x.len()], acts, routed);
        self.source.guess(index, &routed.choices);
    }
}
