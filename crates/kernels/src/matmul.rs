//! Matrix products of packed weights with a batch of activations.
//!
//! Every output is one lane's chain over the blocks of its row, from the first to the last. For each 32 columns, with
//! the dot products i₀ and i₁ of the first and the last 16, times the powers of two of their steps, the activations' scale x and a weight
//! scale w: `acc = fma((i₀ + i₁) · x, w, acc)`, and where the format has minima `acc = fma(min, sum of activations, acc)`. With
//! weight scales for each 16 columns: `acc = fma(fma(i₁, w₁, i₀ · w₀), x, acc)`, and minima one by one, from sums of quantized
//! values, times these powers. Float weights: `acc = fma(weight, x, acc)` per column. Products in double precision
//! are the sum of two chains.

mod bands;
mod tile;
mod work;

pub use bands::{Band, GatedBand, matmul_bands, matmul_gated_bands};
pub(crate) use tile::accumulate;

use crate::PANEL_ROWS;
use crate::activations::{Activations, Part, Precision};
use crate::isa::Level;
use crate::ops::Gate;
use crate::quant::Format;
use crate::threads::{Cell, GridShape, Pool};
use std::ops::Range;
use work::{Emit, EmitGated, GROUP, MADE, PanelRun, TILE_TOKENS_MAX, WORK, runs};

/// Where a matrix's panels come from.
#[derive(Clone, Copy)]
pub enum Panels<'a> {
    /// They are in memory, one after the other.
    Packed(&'a [u8]),
    /// They are made for each use, one at a time: those of `by` from `first` on.
    Made {
        /// Who makes them.
        by: &'a dyn MakePanels,
        /// Which of its panels is the matrix's first.
        first: usize,
    },
}

/// Makes panels out of something else.
pub trait MakePanels: Sync {
    /// Writes `panels` to `out`, which has room for just these.
    fn make(&self, panels: Range<usize>, out: &mut [u8]);
}

impl std::fmt::Debug for Panels<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Panels::Packed(bytes) => write!(f, "{} bytes", bytes.len()),
            Panels::Made { .. } => write!(f, "made for each use"),
        }
    }
}

/// A weight matrix in panels.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Element format.
    pub format: Format,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `rows.div_ceil(16)` panels.
    pub panels: Panels<'a>,
    /// Added to the outputs.
    pub bias: Option<&'a [f32]>,
    /// How finely quantized activations it is multiplied with; floats are floats.
    pub precision: Precision,
}

impl Matrix<'_> {
    /// Outputs, rounded up to whole panels.
    pub fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(PANEL_ROWS)
    }

    /// Some of its rows: whole panels.
    pub fn part(&self, rows: Range<usize>) -> Self {
        assert!(
            rows.start.is_multiple_of(PANEL_ROWS) && (rows.end.is_multiple_of(PANEL_ROWS) || rows.end == self.rows),
            "rows {rows:?} of {} are not whole panels",
            self.rows
        );
        let panels = rows.start / PANEL_ROWS..rows.end.div_ceil(PANEL_ROWS);
        let panels = match self.panels {
            Panels::Packed(bytes) => {
                Panels::Packed(&bytes[panels.start * self.panel_bytes()..panels.end * self.panel_bytes()])
            }
            Panels::Made { by, first } => Panels::Made { by, first: first + panels.start },
        };
        Self { rows: rows.len(), panels, bias: self.bias.map(|bias| &bias[rows]), ..*self }
    }

    fn panel_bytes(&self) -> usize {
        PANEL_ROWS * self.format.row_bytes(self.cols).expect("whole blocks")
    }

    fn len_bytes(&self) -> usize {
        self.padded_rows() / PANEL_ROWS * self.panel_bytes()
    }
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// It replaces the output.
    Store,
    /// It is added to the output.
    Add,
}

/// Bytes of activations that are worked on at once. They come from the caches beyond the first in time, however many they are; a
/// larger share of them means that weights are unpacked less often.
const TILE_BYTES: usize = 2 << 20;
/// Weight bytes of a task, where there are enough of them for all threads, and tokens are few: some ten microseconds of reading.
/// Each task begins a stream of its own, and until it flows memory is idle: with tasks of 24 KiB decoding took in two thirds of
/// what it takes in with these.
const TASK_BYTES: usize = 256 << 10;

fn tile_tokens(acts: &Activations) -> usize {
    let fit = TILE_BYTES / (acts.cols() * 2).max(1);
    (fit / GROUP * GROUP).clamp(GROUP, TILE_TOKENS_MAX)
}

/// Panels of a task at most.
fn task_panels(panel_bytes: usize, tokens: usize) -> usize {
    (4 * TASK_BYTES / (panel_bytes.max(1) * tokens.max(4))).max(1)
}

/// Products of one batch with several matrices: `out` has a row of `row_len` values for each token, with the outputs of
/// the matrices side by side, each padded to whole panels.
pub fn matmul(
    pool: &mut Pool,
    level: Level,
    matrices: &[Matrix<'_>],
    acts: &Activations,
    out: &mut [f32],
    output: Output,
) {
    let row_len: usize = matrices.iter().map(Matrix::padded_rows).sum();
    for m in matrices {
        check(m, acts);
    }
    let panel_bytes = matrices.iter().map(Matrix::len_bytes).sum::<usize>() / (row_len / PANEL_ROWS).max(1);
    let shape = grid(row_len, task_panels(panel_bytes, acts.tokens()), acts);
    pool.run_grid(out, shape, |row, col, cell| {
        let tokens = row..row + cell.rows();
        let (mut m, mut first) = (0, col);
        while first >= matrices[m].padded_rows() {
            first -= matrices[m].padded_rows();
            m += 1;
        }
        let mut at = 0;
        while at < cell.row(0).len() {
            let end = (first + cell.row(0).len() - at).min(matrices[m].padded_rows());
            product(level, &matrices[m], first..end, acts.part(0), tokens.clone(), output, at, cell);
            at += end - first;
            (m, first) = (m + 1, 0);
        }
    });
}

/// Products with two matrices of equal shape, combined: `out = f(gate) · up`, `[tokens, padded_rows]`.
pub fn matmul_gated(
    pool: &mut Pool,
    level: Level,
    gate_matrix: &Matrix<'_>,
    up_matrix: &Matrix<'_>,
    function: Gate,
    acts: &Activations,
    out: &mut [f32],
) {
    check(gate_matrix, acts);
    check(up_matrix, acts);
    assert_eq!(gate_matrix.rows, up_matrix.rows, "gate and up must have equal rows");
    let row_len = gate_matrix.padded_rows();
    // A task reads one matrix after the other: each of them is to be a stream that is long enough.
    let shape = grid(row_len, task_panels(gate_matrix.panel_bytes(), acts.tokens()), acts);
    pool.run_grid(out, shape, |row, col, cell| {
        let tokens = row..row + cell.rows();
        gated_product(level, [gate_matrix, up_matrix], function, acts.part(0), tokens, col, cell);
    });
}

fn grid(row_len: usize, panels: usize, acts: &Activations) -> GridShape {
    let (cell_rows, cell_cols) = (tile_tokens(acts), panels * PANEL_ROWS);
    GridShape { rows: acts.tokens(), row_len, cell_rows, cell_cols, unit: PANEL_ROWS }
}

fn check(m: &Matrix<'_>, acts: &Activations) {
    assert_eq!(m.cols, acts.cols(), "columns of weights and activations");
    let row_bytes = m.format.row_bytes(m.cols).expect("whole blocks");
    if let Panels::Packed(bytes) = m.panels {
        assert_eq!(bytes.len(), m.padded_rows() * row_bytes, "bytes of {} rows of {} {:?}", m.rows, m.cols, m.format);
    }
}

/// Products of rows of a matrix, in whole panels, with the tokens of `cell`, whose columns from `at` on they become.
fn product(
    level: Level,
    matrix: &Matrix<'_>,
    rows: Range<usize>,
    acts: Part<'_>,
    tokens: Range<usize>,
    output: Output,
    at: usize,
    cell: &mut Cell<'_, f32>,
) {
    for run in runs(rows.clone(), acts, tokens.len()) {
        let at = at + run.start * PANEL_ROWS - rows.start;
        MADE.with_borrow_mut(|[room, _]| {
            let panels = &PanelRun::new(matrix, run, room);
            WORK.with_borrow_mut(|work| {
                work.product(level, panels, acts, tokens.clone(), 0);
                level.run(Emit { values: &work.values[0], panels, output, at, cell });
            });
        });
    }
}

/// As many rows of two matrices as `cell` has columns, from row `first` on: their products with its tokens, combined.
fn gated_product(
    level: Level,
    [gate, up]: [&Matrix<'_>; 2],
    function: Gate,
    acts: Part<'_>,
    tokens: Range<usize>,
    first: usize,
    cell: &mut Cell<'_, f32>,
) {
    for run in runs(first..first + cell.row(0).len(), acts, tokens.len()) {
        let at = run.start * PANEL_ROWS - first;
        MADE.with_borrow_mut(|[gate_room, up_room]| {
            let panels = [&PanelRun::new(gate, run.clone(), gate_room), &PanelRun::new(up, run, up_room)];
            WORK.with_borrow_mut(|work| {
                for (to, panels) in panels.into_iter().enumerate() {
                    work.product(level, panels, acts, tokens.clone(), to);
                }
                let [gates, ups, _] = &work.values;
                level.run(EmitGated { gates, ups, panels, function, at, cell });
            });
        });
    }
}
