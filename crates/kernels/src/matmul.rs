//! Matrix products of packed weights with a batch of activations.
//!
//! Every output is one lane's chain over the blocks of its row, from the first to the last. For each 32 columns, with
//! the dot products i₀ and i₁ of the first and the last 16, activation scales x₀ and x₁ and a weight scale w:
//! `acc = fma(fma(i₁, x₁, i₀ · x₀), w, acc)`, and where the format has minima `acc = fma(min, x₀ Σ₀ + x₁ Σ₁, acc)`. With
//! weight scales per 16 columns: `acc = fma(i₀ · w₀, x₀, acc)`, `acc = fma(i₁ · w₁, x₁, acc)`, and minima likewise, one by
//! one. Float weights: `acc = fma(weight, x, acc)` per column.

use crate::PANEL_ROWS;
use crate::activations::{
    Activations, BLOCK_WORDS, NEG_SUM_HIGH, NEG_SUM_LOW, SCALE_HIGH, SCALE_LOW, SUM, SUM_HIGH, SUM_LOW, group_at,
};
use crate::isa::Level;
use crate::ops::{Gate, gate};
use crate::quant::{FloatRow, Format, Quant, Sub, with_quant};
use crate::simd::{Op, Simd};
use crate::threads::{Cell, GridShape, Pool};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

/// Where a matrix's panels come from.
#[derive(Clone, Copy)]
pub enum Panels<'a> {
    /// They are in memory, one after the other.
    Packed(&'a [u8]),
    /// They are made for each use, a few at a time.
    Made(&'a dyn MakePanels),
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
            Panels::Made(_) => write!(f, "made for each use"),
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
}

impl Matrix<'_> {
    /// Outputs, rounded up to whole panels.
    pub fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(PANEL_ROWS)
    }

    fn panel_bytes(&self) -> usize {
        PANEL_ROWS * self.format.row_bytes(self.cols).expect("whole blocks")
    }

    fn len_bytes(&self) -> usize {
        self.padded_rows() / PANEL_ROWS * self.panel_bytes()
    }

    /// The bytes of `panels`, made in `room` if they are not there.
    fn panels<'r>(&'r self, panels: Range<usize>, room: &'r mut Vec<u8>) -> &'r [u8] {
        let panel_bytes = self.panel_bytes();
        match self.panels {
            Panels::Packed(bytes) => &bytes[panels.start * panel_bytes..panels.end * panel_bytes],
            Panels::Made(by) => {
                room.resize(panels.len() * panel_bytes, 0);
                by.make(panels, room);
                room
            }
        }
    }

    /// The biases of a panel's rows; those that fill up the last panel have none.
    fn panel_bias(&self, panel: usize) -> Option<[f32; PANEL_ROWS]> {
        let bias = &self.bias?[panel * PANEL_ROWS..];
        let mut out = [0.0; PANEL_ROWS];
        let n = PANEL_ROWS.min(bias.len());
        out[..n].copy_from_slice(&bias[..n]);
        Some(out)
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

/// Bytes of activations that are worked on at once, to stay in the second-level cache.
const TILE_BYTES: usize = 256 << 10;
/// Weight bytes of a task at least: some microseconds of work.
const TASK_BYTES: usize = 24 << 10;

fn tile_tokens(acts: &Activations) -> usize {
    let fit = TILE_BYTES / (acts.cols() * 2).max(1);
    (fit / 16 * 16).clamp(16, 512)
}

fn task_panels(panels: usize, panel_bytes: usize, tokens: usize, threads: usize) -> usize {
    let wanted = (TASK_BYTES / (panel_bytes.max(1) * tokens.min(16))).max(1);
    wanted.min(panels.div_ceil(4 * threads)).max(1)
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
    let panels = task_panels(row_len / PANEL_ROWS, panel_bytes, acts.tokens(), pool.threads());
    let shape =
        GridShape { rows: acts.tokens(), row_len, cell_rows: tile_tokens(acts), cell_cols: panels * PANEL_ROWS };
    pool.run_grid(out, shape, |row, col, cell| {
        let width = cell.row(0).len();
        let mut c = 0;
        while c < width {
            // Panels of one matrix, as many as are left of it in this cell.
            let (mut m, mut first) = (0, col + c);
            while first >= matrices[m].padded_rows() {
                first -= matrices[m].padded_rows();
                m += 1;
            }
            let matrix = &matrices[m];
            let n = ((matrix.padded_rows() - first).min(width - c) / PANEL_ROWS).min(PANELS);
            let panels = first / PANEL_ROWS..first / PANEL_ROWS + n;
            MADE.with_borrow_mut(|[made, _]| {
                let weights = matrix.panels(panels.clone(), made);
                for group in groups(acts, matrix.format, row, cell.rows()) {
                    PRODUCTS.with_borrow_mut(|[values, _]| {
                        product(level, matrix, weights, acts, group, values);
                        level.run(Emit { values, matrix, panels: panels.clone(), group, row, col: c, output, cell });
                    });
                }
            });
            c += n * PANEL_ROWS;
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
    let floats = [gate_matrix, up_matrix].map(|m| m.format.float_activations());
    assert!(floats[0] == floats[1] || acts.copies(false) == 1, "gate and up must take the same rows of activations");
    let row_len = gate_matrix.padded_rows();
    let panel_bytes = (gate_matrix.len_bytes() + up_matrix.len_bytes()) / (row_len / PANEL_ROWS).max(1);
    let panels = task_panels(row_len / PANEL_ROWS, panel_bytes, acts.tokens(), pool.threads());
    let shape =
        GridShape { rows: acts.tokens(), row_len, cell_rows: tile_tokens(acts), cell_cols: panels * PANEL_ROWS };
    pool.run_grid(out, shape, |row, col, cell| {
        let width = cell.row(0).len();
        for c in (0..width).step_by(PANELS * PANEL_ROWS) {
            let first = (col + c) / PANEL_ROWS;
            let panels = first..first + ((width - c) / PANEL_ROWS).min(PANELS);
            MADE.with_borrow_mut(|[gates_made, ups_made]| {
                let gate_weights = gate_matrix.panels(panels.clone(), gates_made);
                let up_weights = up_matrix.panels(panels.clone(), ups_made);
                for group in groups(acts, gate_matrix.format, row, cell.rows()) {
                    PRODUCTS.with_borrow_mut(|[gates, ups]| {
                        product(level, gate_matrix, gate_weights, acts, group, gates);
                        product(level, up_matrix, up_weights, acts, group, ups);
                        let (gates, ups) = ((&*gates, gate_matrix), (&*ups, up_matrix));
                        level.run(EmitGated { gates, ups, panels: panels.clone(), function, group, row, col: c, cell });
                    });
                }
            });
        }
    });
}

fn check(m: &Matrix<'_>, acts: &Activations) {
    assert_eq!(m.cols, acts.cols(), "columns of weights and activations");
    let row_bytes = m.format.row_bytes(m.cols).expect("whole blocks");
    if let Panels::Packed(bytes) = m.panels {
        assert_eq!(bytes.len(), m.padded_rows() * row_bytes, "bytes of {} rows of {} {:?}", m.rows, m.cols, m.format);
    }
}

/// Panels that are multiplied in one go.
const PANELS: usize = 4;

/// Products of panels with the rows of a group.
type Values = [[[f32; 16]; GROUP]; PANELS];

thread_local! {
    // Clearing these for every task would cost as much as a small panel.
    static PRODUCTS: RefCell<[Values; 2]> = const { RefCell::new([[[[0.0; 16]; GROUP]; PANELS]; 2]) };
    /// Panels that are made for each use.
    static MADE: RefCell<[Vec<u8>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}
/// Rows of the widest group.
const GROUP: usize = 16;

/// Groups that cover `tokens` tokens from `start` on, for weights of `format`.
fn groups(acts: &Activations, format: Format, start: usize, tokens: usize) -> impl Iterator<Item = Group> {
    let copies = acts.copies(format.float_activations());
    let (rows, group_max) = (acts.tokens() * copies, acts.group_max());
    (start * copies..(start + tokens) * copies).step_by(group_max).map(move |first| {
        let (len, width) = group_at(first, rows, group_max);
        Group { first, token: first / copies, tokens: len / copies, copies, width }
    })
}

/// Rows of activations that are multiplied at once.
#[derive(Clone, Copy)]
struct Group {
    /// First row.
    first: usize,
    /// Token of the first row.
    token: usize,
    /// Tokens.
    tokens: usize,
    /// Rows of each token; their products are added.
    copies: usize,
    /// Rows, rounded up to a power of two.
    width: usize,
}

impl Group {
    /// The product of token `t` of this group, for lanes from `at` on.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, values: &[[f32; 16]; GROUP], bias: Option<&[f32; 16]>, t: usize, at: usize) -> S::F {
        let mut y = s.f_load(&values[t * self.copies][at..]);
        if self.copies == 2 {
            y = s.f_add(y, s.f_load(&values[t * 2 + 1][at..]));
        }
        match bias {
            Some(bias) => s.f_add(y, s.f_load(&bias[at..])),
            None => y,
        }
    }
}

/// The products of some panels with one group of rows: `out[panel][row]`.
fn product(level: Level, matrix: &Matrix<'_>, weights: &[u8], acts: &Activations, group: Group, out: &mut Values) {
    let panel_bytes = matrix.panel_bytes();
    let words = acts.group(group.first, matrix.format.float_activations());
    match group.width {
        1 => tile::<1>(level, matrix.format, weights, panel_bytes, words, out),
        2 => tile::<2>(level, matrix.format, weights, panel_bytes, words, out),
        4 => tile::<4>(level, matrix.format, weights, panel_bytes, words, out),
        8 => tile::<8>(level, matrix.format, weights, panel_bytes, words, out),
        _ => tile::<16>(level, matrix.format, weights, panel_bytes, words, out),
    }
}

/// Writes a group's outputs, from column `col` of its rows on, in a cell that starts at token `row`.
struct Emit<'a, 'c> {
    values: &'a Values,
    matrix: &'a Matrix<'a>,
    panels: Range<usize>,
    group: Group,
    row: usize,
    col: usize,
    output: Output,
    cell: &'a mut Cell<'c, f32>,
}

impl Op for Emit<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (i, panel) in self.panels.enumerate() {
            let bias = self.matrix.panel_bias(panel);
            for t in 0..self.group.tokens {
                let out =
                    &mut self.cell.row(self.group.token - self.row + t)[self.col + i * PANEL_ROWS..][..PANEL_ROWS];
                for at in (0..PANEL_ROWS).step_by(S::LANES) {
                    let mut y = self.group.load(s, &self.values[i], bias.as_ref(), t, at);
                    if self.output == Output::Add {
                        y = s.f_add(s.f_load(&out[at..]), y);
                    }
                    s.f_store(y, &mut out[at..]);
                }
            }
        }
    }
}

/// Products and their matrix.
type Products<'a> = (&'a Values, &'a Matrix<'a>);

struct EmitGated<'a, 'c> {
    gates: Products<'a>,
    ups: Products<'a>,
    panels: Range<usize>,
    function: Gate,
    group: Group,
    row: usize,
    col: usize,
    cell: &'a mut Cell<'c, f32>,
}

impl Op for EmitGated<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (i, panel) in self.panels.enumerate() {
            let (gate_bias, up_bias) = (self.gates.1.panel_bias(panel), self.ups.1.panel_bias(panel));
            for t in 0..self.group.tokens {
                let out =
                    &mut self.cell.row(self.group.token - self.row + t)[self.col + i * PANEL_ROWS..][..PANEL_ROWS];
                for at in (0..PANEL_ROWS).step_by(S::LANES) {
                    let g = self.group.load(s, &self.gates.0[i], gate_bias.as_ref(), t, at);
                    let up = self.group.load(s, &self.ups.0[i], up_bias.as_ref(), t, at);
                    s.f_store(s.f_mul(gate(s, self.function, g), up), &mut out[at..]);
                }
            }
        }
    }
}

fn tile<const G: usize>(
    level: Level,
    format: Format,
    panels: &[u8],
    panel_bytes: usize,
    acts: &[u32],
    out: &mut Values,
) {
    let (acts, _) = acts.as_chunks::<G>();
    macro_rules! float {
        ($q:ty) => {
            level.run(FloatTile::<$q, G> { panels, panel_bytes, acts, out, _format: PhantomData })
        };
    }
    match format {
        Format::F32 => float!(crate::quant::F32),
        Format::F16 => float!(crate::quant::F16),
        Format::BF16 => float!(crate::quant::Bf16),
        _ => with_quant!(
            format,
            Q => level.run(Tile::<Q, G> { panels, panel_bytes, acts, out, _format: PhantomData }),
            _ => ()
        ),
    }
}

/// Products of panels of a quantized format with G rows of activations.
struct Tile<'a, Q, const G: usize> {
    panels: &'a [u8],
    panel_bytes: usize,
    acts: &'a [[u32; G]],
    out: &'a mut Values,
    _format: PhantomData<Q>,
}

impl<Q: Quant, const G: usize> Op for Tile<'_, Q, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if G > S::GROUP_MAX {
            return; // Never made: groups are no wider. Without this line the compiler would build it.
        }
        for (panel, out) in self.panels.chunks_exact(self.panel_bytes).zip(self.out) {
            for h in 0..PANEL_ROWS / S::LANES {
                let mut acc = [s.f_splat(0.0); G];
                let blocks = panel.chunks_exact(PANEL_ROWS * Q::BYTES);
                for (block, acts) in blocks.zip(self.acts.chunks_exact(BLOCK_WORDS * Q::SUBS)) {
                    let head = Q::head(s, block, h);
                    macro_rules! sub {
                        ($($j:literal)*) => {$(
                            if $j < Q::SUBS {
                                let sub = Q::sub(s, block, h, head, $j);
                                accumulate::<Q, S, G>(s, &sub, &acts[BLOCK_WORDS * $j..][..BLOCK_WORDS], &mut acc);
                            }
                        )*};
                    }
                    // Written out, so that shifts and offsets are constants.
                    sub!(0 1 2 3 4 5 6 7);
                }
                for (acc, out) in acc.into_iter().zip(out.iter_mut()) {
                    s.f_store(acc, &mut out[h * S::LANES..]);
                }
            }
        }
    }
}

/// Products of panels of a float format with G rows of activations.
struct FloatTile<'a, Q, const G: usize> {
    panels: &'a [u8],
    panel_bytes: usize,
    acts: &'a [[u32; G]],
    out: &'a mut Values,
    _format: PhantomData<Q>,
}

impl<Q: FloatRow, const G: usize> Op for FloatTile<'_, Q, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if G > S::GROUP_MAX {
            return;
        }
        for (panel, out) in self.panels.chunks_exact(self.panel_bytes).zip(self.out) {
            for h in 0..PANEL_ROWS / S::LANES {
                let mut acc = [s.f_splat(0.0); G];
                for (column, x) in panel.chunks_exact(PANEL_ROWS * Q::BYTES).zip(self.acts) {
                    let w = Q::load(s, column, h);
                    for t in 0..G {
                        acc[t] = s.f_fma(w, s.f_splat(f32::from_bits(x[t])), acc[t]);
                    }
                }
                for (acc, out) in acc.into_iter().zip(out.iter_mut()) {
                    s.f_store(acc, &mut out[h * S::LANES..]);
                }
            }
        }
    }
}

/// Adds the products of 32 columns.
#[inline(always)]
pub(crate) fn accumulate<Q: Quant, S: Simd, const G: usize>(s: S, sub: &Sub<S>, x: &[[u32; G]], acc: &mut [S::F; G]) {
    for t in 0..G {
        let low = s.v_to_f(s.dot(start::<Q, S, G>(s, x, NEG_SUM_LOW, t), &sub.w, 0..4, x, t, Q::BITS));
        let high = s.v_to_f(s.dot(start::<Q, S, G>(s, x, NEG_SUM_HIGH, t), &sub.w, 4..8, x, t, Q::BITS));
        let (low_scale, high_scale) = (float::<S, G>(s, x, SCALE_LOW, t), float::<S, G>(s, x, SCALE_HIGH, t));
        if Q::HALVES {
            acc[t] = s.f_fma(s.f_mul(low, sub.scale), low_scale, acc[t]);
            acc[t] = s.f_fma(s.f_mul(high, sub.scale_high), high_scale, acc[t]);
            if Q::MIN {
                acc[t] = s.f_fma(sub.min, float::<S, G>(s, x, SUM_LOW, t), acc[t]);
                acc[t] = s.f_fma(sub.min_high, float::<S, G>(s, x, SUM_HIGH, t), acc[t]);
            }
        } else {
            acc[t] = s.f_fma(s.f_fma(high, high_scale, s.f_mul(low, low_scale)), sub.scale, acc[t]);
            if Q::MIN {
                acc[t] = s.f_fma(sub.min, float::<S, G>(s, x, SUM, t), acc[t]);
            }
        }
    }
}

/// Word `row` of token `t`, a float, in all lanes.
#[inline(always)]
fn float<S: Simd, const G: usize>(s: S, x: &[[u32; G]], row: usize, t: usize) -> S::F {
    s.f_splat(f32::from_bits(x[row][t]))
}

/// What takes the offset of the weights out of a dot product: `-OFFSET · Σ x`.
#[inline(always)]
fn start<Q: Quant, S: Simd, const G: usize>(s: S, x: &[[u32; G]], row: usize, t: usize) -> S::V {
    if Q::OFFSET == 0 { s.v_splat(0) } else { s.v_shl(s.v_splat(x[row][t] as i32), Q::OFFSET.trailing_zeros()) }
}
