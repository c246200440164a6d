//! Matrix products of packed weights with a batch of activations.
//!
//! Every output is one lane's chain over the blocks of its row, from the first to the last. For each 32 columns, with
//! the dot products i₀ and i₁ of the first and the last 16, times the powers of two of their steps, the activations' scale x and a weight
//! scale w: `acc = fma((i₀ + i₁) · x, w, acc)`, and where the format has minima `acc = fma(min, sum of activations, acc)`. With
//! weight scales for each 16 columns: `acc = fma(fma(i₁, w₁, i₀ · w₀), x, acc)`, and minima one by one, from sums of quantized
//! values, times these powers. Float weights: `acc = fma(weight, x, acc)` per column. Products in double precision
//! are the sum of two chains.

mod bands;

pub use bands::{Band, GatedBand, matmul_bands, matmul_gated_bands};

use crate::PANEL_ROWS;
use crate::activations::{Activations, BLOCK_WORDS, Form, NEG_SUM, Part, Precision, SCALE, STRETCH, SUM, group_at};
use crate::isa::Level;
use crate::ops::{Gate, gated};
use crate::quant::{FloatRow, Format, Quant, Sub, UnpackPanel, with_quant};
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
/// Weight bytes of a task at least: some microseconds of work.
const TASK_BYTES: usize = 24 << 10;

fn tile_tokens(acts: &Activations) -> usize {
    let fit = TILE_BYTES / (acts.cols() * 2).max(1);
    (fit / GROUP * GROUP).clamp(GROUP, TILE_TOKENS_MAX)
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
        let tokens = row..row + cell.rows();
        for at in (0..cell.row(0).len()).step_by(PANEL_ROWS) {
            let (mut m, mut first) = (0, col + at);
            while first >= matrices[m].padded_rows() {
                first -= matrices[m].padded_rows();
                m += 1;
            }
            MADE.with_borrow_mut(|[room, _]| {
                let panel = Panel::new(&matrices[m], first / PANEL_ROWS, room);
                WORK.with_borrow_mut(|work| {
                    work.product(level, &panel, acts.part(0), tokens.clone(), 0);
                    level.run(Emit { values: &work.values[0], bias: panel.bias(), output, at, cell });
                });
            });
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
    let panel_bytes = (gate_matrix.len_bytes() + up_matrix.len_bytes()) / (row_len / PANEL_ROWS).max(1);
    let panels = task_panels(row_len / PANEL_ROWS, panel_bytes, acts.tokens(), pool.threads());
    let shape =
        GridShape { rows: acts.tokens(), row_len, cell_rows: tile_tokens(acts), cell_cols: panels * PANEL_ROWS };
    pool.run_grid(out, shape, |row, col, cell| {
        let tokens = row..row + cell.rows();
        for at in (0..cell.row(0).len()).step_by(PANEL_ROWS) {
            MADE.with_borrow_mut(|[gate_room, up_room]| {
                let index = (col + at) / PANEL_ROWS;
                let gate = Panel::new(gate_matrix, index, gate_room);
                let up = Panel::new(up_matrix, index, up_room);
                WORK.with_borrow_mut(|work| {
                    work.gated(level, [&gate, &up], function, acts.part(0), tokens.clone(), at, cell);
                });
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

/// One panel of a matrix.
struct Panel<'a> {
    matrix: &'a Matrix<'a>,
    index: usize,
    bytes: &'a [u8],
}

impl<'a> Panel<'a> {
    /// Panel `index`, made in `room` if it is not there.
    fn new(matrix: &'a Matrix<'a>, index: usize, room: &'a mut Vec<u8>) -> Self {
        let len = matrix.panel_bytes();
        let bytes = match matrix.panels {
            Panels::Packed(bytes) => &bytes[index * len..(index + 1) * len],
            Panels::Made { by, first } => {
                room.resize(len, 0);
                by.make(first + index..first + index + 1, room);
                room
            }
        };
        Panel { matrix, index, bytes }
    }

    /// The biases of its rows; those that fill up the last panel have none.
    fn bias(&self) -> Option<[f32; PANEL_ROWS]> {
        let bias = &self.matrix.bias?[self.index * PANEL_ROWS..];
        let mut out = [0.0; PANEL_ROWS];
        let n = PANEL_ROWS.min(bias.len());
        out[..n].copy_from_slice(&bias[..n]);
        Some(out)
    }
}

/// Tokens of the widest group.
const GROUP: usize = 16;
/// Tokens of a cell at most.
const TILE_TOKENS_MAX: usize = 512;
/// Columns of a panel that are unpacked at once, so that they and a group's activations stay in the first-level cache.
const PIECE_COLS: usize = 512;
/// The same for one token and packed weights, where vectors take half of a panel's rows: halves that went over the whole panel
/// one after the other would read memory with the first and leave it idle with the second. The longest block.
const HALF_PIECE_COLS: usize = 256;
/// Room for that many columns, unpacked: at most twelve vectors for each 32.
const UNPACK_BYTES: usize = PIECE_COLS.next_multiple_of(256) / 32 * 12 * 4 * PANEL_ROWS;

/// The products of a panel with each token of a cell, padded to a whole group.
type Values = [[f32; PANEL_ROWS]; TILE_TOKENS_MAX];

/// What one thread works with.
struct Work {
    /// Products with one matrix, with another, and those of the rest in double precision.
    values: [Values; 3],
    unpacked: Aligned,
}

/// Vectors that do not cross cache lines.
#[repr(align(64))]
struct Aligned([u8; UNPACK_BYTES]);

thread_local! {
    /// Panels that are made for each use.
    static MADE: RefCell<[Vec<u8>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
    // Clearing these for every task would cost as much as a small panel.
    static WORK: RefCell<Work> = const {
        RefCell::new(Work {
            values: [[[0.0; PANEL_ROWS]; TILE_TOKENS_MAX]; 3],
            unpacked: Aligned([0; UNPACK_BYTES]),
        })
    };
}

impl Work {
    /// `values[to]`: the products of a panel with `tokens`, which begin with a group.
    fn product(&mut self, level: Level, panel: &Panel<'_>, acts: Part<'_>, tokens: Range<usize>, to: usize) {
        let format = panel.matrix.format;
        if format.float_activations() {
            self.pass(level, panel, acts, tokens, Form::Floats, to);
            return;
        }
        self.pass(level, panel, acts, tokens.clone(), Form::Quantized, to);
        if panel.matrix.precision == Precision::Double {
            self.pass(level, panel, acts, tokens.clone(), Form::Rest, 2);
            let (sums, rest) = self.values.split_at_mut(2);
            for (sum, rest) in sums[to].iter_mut().zip(&rest[0]).take(tokens.len()) {
                for (sum, rest) in sum.iter_mut().zip(rest) {
                    *sum += rest;
                }
            }
        }
    }

    /// The products of `tokens` with a panel of gates and one of ups, combined into the columns of `cell` from `at` on.
    fn gated(
        &mut self,
        level: Level,
        [gate, up]: [&Panel<'_>; 2],
        function: Gate,
        acts: Part<'_>,
        tokens: Range<usize>,
        at: usize,
        cell: &mut Cell<'_, f32>,
    ) {
        self.product(level, gate, acts, tokens.clone(), 0);
        self.product(level, up, acts, tokens, 1);
        let [gates, ups, _] = &self.values;
        level.run(EmitGated { gates, ups, biases: [gate.bias(), up.bias()], function, at, cell });
    }

    /// The products with one form of the activations.
    fn pass(&mut self, level: Level, panel: &Panel<'_>, acts: Part<'_>, tokens: Range<usize>, form: Form, to: usize) {
        let (format, group_max) = (panel.matrix.format, acts.group_max());
        let groups = || {
            tokens.clone().step_by(group_max).map(|first| {
                let (_, width) = group_at(first, acts.tokens(), group_max);
                (first - tokens.start, width, acts.group(first, form))
            })
        };
        let cols = panel.matrix.cols;
        let is_few = acts.is_few();
        let most = match (form, is_few) {
            (Form::Floats, _) => cols,
            (_, true) if acts.tokens() == 1 && level.run(Lanes) < PANEL_ROWS => HALF_PIECE_COLS,
            (_, true) => cols,
            _ => PIECE_COLS,
        };
        // Pieces of equal length, so that none is hardly worth its start.
        let piece_cols = cols.div_ceil(cols.div_ceil(most)).next_multiple_of(format.block_len());
        let piece_bytes = PANEL_ROWS * piece_cols / format.block_len() * format.block_bytes();
        for (piece, bytes) in panel.bytes.chunks(piece_bytes).enumerate() {
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
                tile(level, format, weights, width, words, &mut self.values[to][at..]);
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

/// A panel as it comes to its products.
#[derive(Clone, Copy)]
enum Weights<'a> {
    /// As it is kept, all or some columns of it. With `resume` columns came before: their products are added to.
    Packed { panel: &'a [u8], resume: bool },
    /// Some columns, unpacked.
    Plain { unpacked: &'a [u8], resume: bool },
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

struct Lanes;

impl Op for Lanes {
    type Out = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::LANES
    }
}

/// Writes a panel's outputs to the columns of `cell` from `at` on.
struct Emit<'a, 'c> {
    values: &'a Values,
    bias: Option<[f32; PANEL_ROWS]>,
    output: Output,
    at: usize,
    cell: &'a mut Cell<'c, f32>,
}

impl Op for Emit<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for t in 0..self.cell.rows() {
            let out = &mut self.cell.row(t)[self.at..][..PANEL_ROWS];
            for at in (0..PANEL_ROWS).step_by(S::LANES) {
                let mut y = load(s, &self.values[t], &self.bias, at);
                if self.output == Output::Add {
                    y = s.f_add(s.f_load(&out[at..]), y);
                }
                s.f_store(y, &mut out[at..]);
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

struct EmitGated<'a, 'c> {
    gates: &'a Values,
    ups: &'a Values,
    biases: [Option<[f32; PANEL_ROWS]>; 2],
    function: Gate,
    at: usize,
    cell: &'a mut Cell<'c, f32>,
}

impl Op for EmitGated<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for t in 0..self.cell.rows() {
            let out = &mut self.cell.row(t)[self.at..][..PANEL_ROWS];
            for at in (0..PANEL_ROWS).step_by(S::LANES) {
                let g = load(s, &self.gates[t], &self.biases[0], at);
                let up = load(s, &self.ups[t], &self.biases[1], at);
                s.f_store(gated(s, self.function, g, up), &mut out[at..]);
            }
        }
    }
}

/// Products of (part of) a panel with one group of `width` tokens.
fn tile(
    level: Level,
    format: Format,
    weights: Weights<'_>,
    width: usize,
    words: &[u32],
    out: &mut [[f32; PANEL_ROWS]],
) {
    macro_rules! width {
        ($tile:ident, $q:ty: $($g:literal)*) => {
            match width {
                $($g => level.run($tile::<$q, $g>::new(weights, words, out)),)*
                _ => unreachable!("no group of {width} tokens is made"),
            }
        };
    }
    match (format, weights) {
        (Format::F32, _) => width!(FloatTile, crate::quant::F32: 1 2 4 8 16),
        (Format::F16, _) => width!(FloatTile, crate::quant::F16: 1 2 4 8 16),
        (Format::BF16, _) => width!(FloatTile, crate::quant::Bf16: 1 2 4 8 16),
        (_, Weights::Packed { .. }) => with_quant!(format, Q => width!(Tile, Q: 1 2 4 8), _ => ()),
        (_, Weights::Plain { .. }) => with_quant!(format, Q => width!(Tile, <Q as Quant>::Plain: 1 2 4 8 16), _ => ()),
    }
}

/// Products of a quantized panel with G tokens.
struct Tile<'a, Q, const G: usize> {
    panel: &'a [u8],
    /// Whether the panel is in the cache; if not, it comes from memory.
    resident: bool,
    resume: bool,
    acts: &'a [[u32; G]],
    out: &'a mut [[f32; PANEL_ROWS]; G],
    _format: PhantomData<Q>,
}

impl<'a, Q, const G: usize> Tile<'a, Q, G> {
    fn new(weights: Weights<'a>, words: &'a [u32], out: &'a mut [[f32; PANEL_ROWS]]) -> Self {
        let (panel, resident, resume) = match weights {
            Weights::Packed { panel, resume } => (panel, false, resume),
            Weights::Plain { unpacked, resume } => (unpacked, true, resume),
        };
        let out = out.first_chunk_mut().expect("room for a group");
        Self { panel, resident, resume, acts: words.as_chunks().0, out, _format: PhantomData }
    }
}

impl<Q: Quant, const G: usize> Op for Tile<'_, Q, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if G > S::GROUP_MAX {
            return; // Never made: groups are no wider. Without this line the compiler would build it.
        }
        for h in 0..PANEL_ROWS / S::LANES {
            let mut acc = [s.f_splat(0.0); G];
            if self.resume {
                for (acc, out) in acc.iter_mut().zip(&*self.out) {
                    *acc = s.f_load(&out[h * S::LANES..]);
                }
            }
            let blocks = self.panel.chunks_exact(PANEL_ROWS * Q::BYTES);
            for (block, acts) in blocks.zip(self.acts.chunks_exact(BLOCK_WORDS * Q::SUBS)) {
                let head = Q::head(s, block, h);
                macro_rules! subs {
                    ($($j:literal)*) => {$(
                        if $j < Q::SUBS {
                            if G > 1 && h == 0 && !self.resident {
                                fetch_ahead(s, block, $j, Q::SUBS);
                            }
                            let sub = Q::sub(s, block, h, head, $j);
                            accumulate::<Q, S, G>(s, &sub, &acts[BLOCK_WORDS * $j..][..BLOCK_WORDS], &mut acc);
                        }
                    )*};
                }
                macro_rules! spans {
                    ($($g:literal)*) => {$(
                        if $g * Q::SPAN < Q::SUBS {
                            let acts = &acts[BLOCK_WORDS * Q::SPAN * $g..][..BLOCK_WORDS * Q::SPAN];
                            accumulate_span::<Q, S, G>(s, block, h, head, $g, acts, &mut acc);
                        }
                    )*};
                }
                // Written out, so that shifts and offsets are constants.
                if G == 1 && Q::SPAN > 1 {
                    spans!(0 1 2 3);
                } else {
                    subs!(0 1 2 3 4 5 6 7);
                }
            }
            for (acc, out) in acc.into_iter().zip(self.out.iter_mut()) {
                s.f_store(acc, &mut out[h * S::LANES..]);
            }
        }
    }
}

/// How far ahead of its use memory is asked for: some hundred nanoseconds at the rate of memory.
const FETCH_BYTES: usize = 4096;

/// Asks for the share of sub-block `j` of the memory that lies [`FETCH_BYTES`] ahead of `block`. With more tokens than one,
/// so much work lies between two loads that the processor does not see the next ones by itself; with one it does, and the
/// requests only cost. Spread over the sub-blocks: all at once, they would keep the block's own loads waiting.
#[inline(always)]
fn fetch_ahead<S: Simd>(s: S, block: &[u8], j: usize, subs: usize) {
    let lines = block.len().div_ceil(64);
    for line in j * lines / subs..(j + 1) * lines / subs {
        s.prefetch(block, FETCH_BYTES + 64 * line);
    }
}

/// Products of a panel of floats with G tokens.
struct FloatTile<'a, Q, const G: usize> {
    panel: &'a [u8],
    acts: &'a [[u32; G]],
    out: &'a mut [[f32; PANEL_ROWS]; G],
    _format: PhantomData<Q>,
}

impl<'a, Q, const G: usize> FloatTile<'a, Q, G> {
    fn new(weights: Weights<'a>, words: &'a [u32], out: &'a mut [[f32; PANEL_ROWS]]) -> Self {
        let (Weights::Packed { panel, .. } | Weights::Plain { unpacked: panel, .. }) = weights;
        let out = out.first_chunk_mut().expect("room for a group");
        Self { panel, acts: words.as_chunks().0, out, _format: PhantomData }
    }
}

impl<Q: FloatRow, const G: usize> Op for FloatTile<'_, Q, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if G > S::GROUP_MAX {
            return;
        }
        for h in 0..PANEL_ROWS / S::LANES {
            let mut acc = [s.f_splat(0.0); G];
            for (column, x) in self.panel.chunks_exact(PANEL_ROWS * Q::BYTES).zip(self.acts) {
                let w = Q::load(s, column, h);
                for t in 0..G {
                    acc[t] = s.f_fma(w, s.f_splat(f32::from_bits(x[t])), acc[t]);
                }
            }
            for (acc, out) in acc.into_iter().zip(self.out.iter_mut()) {
                s.f_store(acc, &mut out[h * S::LANES..]);
            }
        }
    }
}

/// Adds the products of 32 columns.
#[inline(always)]
pub(crate) fn accumulate<Q: Quant, S: Simd, const G: usize>(s: S, sub: &Sub<S>, x: &[[u32; G]], acc: &mut [S::F; G]) {
    // Written out, so that the sums stay in registers.
    match G {
        1 => accumulate_some::<Q, S, G, 1>(s, sub, x, acc, 0),
        2 => accumulate_some::<Q, S, G, 2>(s, sub, x, acc, 0),
        3 => accumulate_some::<Q, S, G, 3>(s, sub, x, acc, 0),
        _ => {
            accumulate_some::<Q, S, G, 4>(s, sub, x, acc, 0);
            if G >= 8 {
                accumulate_some::<Q, S, G, 4>(s, sub, x, acc, 4);
            }
            if G >= 16 {
                accumulate_some::<Q, S, G, 4>(s, sub, x, acc, 8);
                accumulate_some::<Q, S, G, 4>(s, sub, x, acc, 12);
            }
        }
    }
}

/// As [`accumulate`], for `T` tokens from `first` on.
#[inline(always)]
fn accumulate_some<Q: Quant, S: Simd, const G: usize, const T: usize>(
    s: S,
    sub: &Sub<S>,
    x: &[[u32; G]],
    acc: &mut [S::F; G],
    first: usize,
) {
    let mut dots = [[s.v_splat(0); T]; 2];
    for half in 0..2 {
        for j in 0..T {
            dots[half][j] = start::<Q, S, G>(s, x, NEG_SUM[half], first + j);
        }
        dots[half] = s.dots::<G, T>(dots[half], &sub.w, 4 * half..4 * half + 4, x, first, Q::BITS);
    }
    scale_dots::<Q, S, G, T>(s, sub, dots, x, acc, first);
}

/// Adds the products of a span of sub-blocks, whose vectors are read once and in order: the order is what the processor's
/// prefetchers follow. (Sub-block by sub-block, a core took in 15 GB/s of Q6_K, and so 27 of 29.)
#[inline(always)]
fn accumulate_span<Q: Quant, S: Simd, const G: usize>(
    s: S,
    block: &[u8],
    h: usize,
    head: Q::Head<S>,
    g: usize,
    x: &[[u32; G]],
    acc: &mut [S::F; G],
) {
    let zero = s.v_splat(0);
    let mut dots = [[[zero; G]; 2]; 4];
    for half in 0..2 {
        let range = 4 * half..4 * half + 4;
        let mut w = [[zero; 8]; 4];
        for i in range.clone() {
            let words = Q::words(s, block, h, g, i);
            for k in 0..Q::SPAN {
                w[k][i] = words[k];
            }
        }
        for k in 0..Q::SPAN {
            let x = &x[BLOCK_WORDS * k..][..BLOCK_WORDS];
            for t in 0..G {
                dots[k][half][t] = start::<Q, S, G>(s, x, NEG_SUM[half], t);
            }
            dots[k][half] = s.dots::<G, G>(dots[k][half], &w[k], range.clone(), x, 0, Q::BITS);
        }
    }
    for k in 0..Q::SPAN {
        let sub = Q::sub(s, block, h, head, Q::SPAN * g + k);
        scale_dots::<Q, S, G, G>(s, &sub, dots[k], &x[BLOCK_WORDS * k..][..BLOCK_WORDS], acc, 0);
    }
}

/// Adds the dot products of the first and the last 16 columns times their scales, for `T` tokens from `first` on.
#[inline(always)]
fn scale_dots<Q: Quant, S: Simd, const G: usize, const T: usize>(
    s: S,
    sub: &Sub<S>,
    dots: [[S::V; T]; 2],
    x: &[[u32; G]],
    acc: &mut [S::F; G],
    first: usize,
) {
    for j in 0..T {
        let t = first + j;
        let scale = float::<S, G>(s, x, SCALE, t);
        let [low, high] =
            [stretch::<S, G>(s, dots[0][j], x, STRETCH[0], t), stretch::<S, G>(s, dots[1][j], x, STRETCH[1], t)];
        if Q::HALVES {
            let product = s.f_fma(high, sub.scale_high, s.f_mul(low, sub.scale));
            acc[t] = s.f_fma(product, scale, acc[t]);
            if Q::MIN {
                for (half, min) in [sub.min, sub.min_high].into_iter().enumerate() {
                    let neg_sum = stretch::<S, G>(s, s.v_splat(x[NEG_SUM[half]][t] as i32), x, STRETCH[half], t);
                    let sum = s.f_mul(s.f_sub(s.f_splat(0.0), neg_sum), scale);
                    acc[t] = s.f_fma(min, sum, acc[t]);
                }
            }
        } else {
            acc[t] = s.f_fma(s.f_mul(s.f_add(low, high), scale), sub.scale, acc[t]);
            if Q::MIN {
                acc[t] = s.f_fma(sub.min, float::<S, G>(s, x, SUM, t), acc[t]);
            }
        }
    }
}

/// Integers as floats, times the power of two that word `row` adds to their exponents. A zero may become a number below 2⁻¹¹⁹, which
/// no sum notices.
#[inline(always)]
fn stretch<S: Simd, const G: usize>(s: S, x: S::V, words: &[[u32; G]], row: usize, t: usize) -> S::F {
    s.v_as_f(s.v_add(s.f_as_v(s.v_to_f(x)), s.v_splat(words[row][t] as i32)))
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
