//! What one thread does with some panels: their products with the tokens of a cell, and what becomes of these.

use super::tile::{Weights, tile};
use super::{Matrix, Output, Panels};
use crate::PANEL_ROWS;
use crate::activations::{BLOCK_WORDS, Form, Part, Precision, group_at};
use crate::isa::Level;
use crate::ops::{Gate, gated};
use crate::quant::{Format, Quant, UnpackPanel, with_quant};
use crate::simd::{Op, Simd};
use crate::threads::Cell;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

/// Cuts rows into runs of panels whose products with so many tokens are made at once.
pub(super) fn runs(rows: Range<usize>, acts: Part<'_>, tokens: usize) -> impl Iterator<Item = Range<usize>> {
    // Many panels of few tokens: two matrices that are read panel by panel in turns are read a third slower than one after the other.
    let most = if acts.is_few() { TILE_TOKENS_MAX / stride(tokens) } else { 1 };
    let panels = rows.start / PANEL_ROWS..rows.end / PANEL_ROWS;
    panels.clone().step_by(most).map(move |first| first..panels.end.min(first + most))
}

/// Consecutive panels of a matrix.
pub(super) struct PanelRun<'a> {
    matrix: &'a Matrix<'a>,
    /// The first one.
    first: usize,
    bytes: &'a [u8],
}

impl<'a> PanelRun<'a> {
    /// The panels `run`, made in `room` if they are not there.
    pub(super) fn new(matrix: &'a Matrix<'a>, run: Range<usize>, room: &'a mut Vec<u8>) -> Self {
        let len = matrix.panel_bytes();
        let bytes = match matrix.panels {
            Panels::Packed(bytes) => &bytes[run.start * len..run.end * len],
            Panels::Made { by, first } => {
                room.resize(run.len() * len, 0);
                by.make(first + run.start..first + run.end, room);
                room
            }
        };
        PanelRun { matrix, first: run.start, bytes }
    }

    fn len(&self) -> usize {
        self.bytes.len() / self.matrix.panel_bytes()
    }

    /// The biases of the rows of panel `i`; those that fill up the last panel have none.
    fn bias(&self, i: usize) -> Option<[f32; PANEL_ROWS]> {
        let bias = &self.matrix.bias?[(self.first + i) * PANEL_ROWS..];
        let mut out = [0.0; PANEL_ROWS];
        let n = PANEL_ROWS.min(bias.len());
        out[..n].copy_from_slice(&bias[..n]);
        Some(out)
    }
}

/// Tokens of the widest group.
pub(super) const GROUP: usize = 16;
/// Tokens of a cell at most.
pub(super) const TILE_TOKENS_MAX: usize = 512;
/// Columns of a panel that are unpacked at once, so that they and a group's activations stay in the first-level cache.
const PIECE_COLS: usize = 512;
/// Room for that many columns, unpacked: at most twelve vectors for each 32.
const UNPACK_BYTES: usize = PIECE_COLS.next_multiple_of(256) / 32 * 12 * 4 * PANEL_ROWS;

/// The products of some panels with each token of a cell: [`stride`] entries for each panel.
pub(super) type Values = [[f32; PANEL_ROWS]; TILE_TOKENS_MAX];

/// Entries for the products of one panel: so many tokens, padded to a whole group.
fn stride(tokens: usize) -> usize {
    if tokens < GROUP { tokens.next_power_of_two() } else { tokens.next_multiple_of(GROUP) }
}

/// What one thread works with.
pub(super) struct Work {
    /// Products with one matrix, with another, and those of the rest in double precision.
    pub(super) values: [Values; 3],
    unpacked: Aligned,
}

/// Vectors that do not cross cache lines.
#[repr(align(64))]
struct Aligned([u8; UNPACK_BYTES]);

thread_local! {
    /// Panels that are made for each use.
    pub(super) static MADE: RefCell<[Vec<u8>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
    // Clearing these for every task would cost as much as a small panel.
    pub(super) static WORK: RefCell<Work> = const {
        RefCell::new(Work {
            values: [[[0.0; PANEL_ROWS]; TILE_TOKENS_MAX]; 3],
            unpacked: Aligned([0; UNPACK_BYTES]),
        })
    };
}

impl Work {
    /// `values[to]`: the products of panels with `tokens`, which begin with a group.
    pub(super) fn product(
        &mut self,
        level: Level,
        panels: &PanelRun<'_>,
        acts: Part<'_>,
        tokens: Range<usize>,
        to: usize,
    ) {
        if panels.matrix.format.float_activations() {
            self.pass(level, panels, acts, tokens, Form::Floats, to);
            return;
        }
        self.pass(level, panels, acts, tokens.clone(), Form::Quantized, to);
        if panels.matrix.precision == Precision::Double {
            let len = panels.len() * stride(tokens.len());
            self.pass(level, panels, acts, tokens, Form::Rest, 2);
            let (sums, rest) = self.values.split_at_mut(2);
            for (sum, rest) in sums[to].iter_mut().zip(&rest[0]).take(len) {
                for (sum, rest) in sum.iter_mut().zip(rest) {
                    *sum += rest;
                }
            }
        }
    }

    /// The products with one form of the activations.
    fn pass(
        &mut self,
        level: Level,
        panels: &PanelRun<'_>,
        acts: Part<'_>,
        tokens: Range<usize>,
        form: Form,
        to: usize,
    ) {
        let (format, group_max) = (panels.matrix.format, acts.group_max());
        let groups = || {
            tokens.clone().step_by(group_max).map(|first| {
                let (_, width) = group_at(first, acts.tokens(), group_max);
                (first - tokens.start, width, acts.group(first, form))
            })
        };
        let cols = panels.matrix.cols;
        let is_few = acts.is_few();
        let most = match (form, is_few) {
            (Form::Floats, _) => cols,
            (_, true) => cols,
            _ => PIECE_COLS,
        };
        // Pieces of equal length, so that none is hardly worth its start.
        let piece_cols = cols.div_ceil(cols.div_ceil(most)).next_multiple_of(format.block_len());
        let piece_bytes = PANEL_ROWS * piece_cols / format.block_len() * format.block_bytes();
        let out = self.values[to].chunks_mut(stride(tokens.len()));
        for (panel, out) in panels.bytes.chunks_exact(panels.matrix.panel_bytes()).zip(out) {
            for (piece, bytes) in panel.chunks(piece_bytes).enumerate() {
                let resume = piece > 0;
                let weights = if is_few || form == Form::Floats {
                    Weights::Packed { panel: bytes, resume }
                } else {
                    let unpacked = unpack(level, format, bytes, &mut self.unpacked.0);
                    level.run(FetchNext { bytes });
                    Weights::Plain { unpacked, resume }
                };
                for (at, width, words) in groups() {
                    let words = &words[piece * piece_cols / 32 * BLOCK_WORDS * width..];
                    tile(level, format, weights, width, words, &mut out[at..]);
                }
            }
        }
    }
}

/// Unpacks whole blocks of a panel; returns as much of `out` as they took.
fn unpack<'a>(level: Level, format: Format, blocks: &[u8], out: &'a mut [u8]) -> &'a [u8] {
    let cols = blocks.len() / PANEL_ROWS / format.block_bytes() * format.block_len();
    with_quant!(
        format,
        Q => {
            let len = cols / 32 * PANEL_ROWS * <<Q as Quant>::Plain as crate::quant::Layout>::BYTES;
            level.run(UnpackPanel::<Q> { blocks, out: &mut out[..len], format: PhantomData });
            &out[..len]
        },
        _ => unreachable!("float formats are not unpacked")
    )
}

/// Asks for as many bytes of memory as `bytes` that follow them: they come while these are multiplied.
struct FetchNext<'a> {
    bytes: &'a [u8],
}

impl Op for FetchNext<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for offset in (self.bytes.len()..2 * self.bytes.len()).step_by(64) {
            s.prefetch(self.bytes, offset);
        }
    }
}

/// Writes the outputs of panels to the columns of `cell` from `at` on.
pub(super) struct Emit<'a, 'c> {
    pub(super) values: &'a Values,
    pub(super) panels: &'a PanelRun<'a>,
    pub(super) output: Output,
    pub(super) at: usize,
    pub(super) cell: &'a mut Cell<'c, f32>,
}

impl Op for Emit<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let tokens = self.cell.rows();
        for (i, values) in self.values.chunks(stride(tokens)).take(self.panels.len()).enumerate() {
            let bias = self.panels.bias(i);
            for t in 0..tokens {
                let out = &mut self.cell.row(t)[self.at + i * PANEL_ROWS..][..PANEL_ROWS];
                for at in (0..PANEL_ROWS).step_by(S::LANES) {
                    let mut y = load(s, &values[t], &bias, at);
                    if self.output == Output::Add {
                        y = s.f_add(s.f_load(&out[at..]), y);
                    }
                    s.f_store(y, &mut out[at..]);
                }
            }
        }
    }
}

/// Lanes from `at` on, with their biases.
#[inline(always)]
fn load<S: Simd>(s: S, values: &[f32; PANEL_ROWS], bias: &Option<[f32; PANEL_ROWS]>, at: usize) -> S::F {
    let y = s.f_load(&values[at..]);
    match bias {
        Some(bias) => s.f_add(y, s.f_load(&bias[at..])),
        None => y,
    }
}

/// Combines the outputs of panels of two matrices, and writes them as [`Emit`] does.
pub(super) struct EmitGated<'a, 'c> {
    pub(super) gates: &'a Values,
    pub(super) ups: &'a Values,
    pub(super) panels: [&'a PanelRun<'a>; 2],
    pub(super) function: Gate,
    pub(super) at: usize,
    pub(super) cell: &'a mut Cell<'c, f32>,
}

impl Op for EmitGated<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let tokens = self.cell.rows();
        let values = self.gates.chunks(stride(tokens)).zip(self.ups.chunks(stride(tokens)));
        for (i, (gates, ups)) in values.take(self.panels[0].len()).enumerate() {
            let biases = self.panels.map(|panels| panels.bias(i));
            for t in 0..tokens {
                let out = &mut self.cell.row(t)[self.at + i * PANEL_ROWS..][..PANEL_ROWS];
                for at in (0..PANEL_ROWS).step_by(S::LANES) {
                    let g = load(s, &gates[t], &biases[0], at);
                    let up = load(s, &ups[t], &biases[1], at);
                    s.f_store(gated(s, self.function, g, up), &mut out[at..]);
                }
            }
        }
    }
}
