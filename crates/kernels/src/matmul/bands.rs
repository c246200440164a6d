//! Products of one batch with many matrices, each of which meets some rows only: the experts of a layer. All of them are
//! tasks of one parallel region, and each is computed as if it were alone.

use super::{Activations, Gate, Matrix, Output, check, gated_product, product, task_panels, tile_tokens};
use crate::PANEL_ROWS;
use crate::isa::Level;
use crate::threads::{Cell, Pool};
use std::cell::RefCell;
use std::ops::Range;

/// Rows that meet a matrix of their own.
#[derive(Debug, Clone)]
pub struct Band<'a> {
    /// The matrix.
    pub matrix: Matrix<'a>,
    /// The part of the activations that holds the rows (see [`Activations::gather`]).
    pub part: usize,
    /// Where their outputs are, as many rows as the part has.
    pub rows: Range<usize>,
}

/// Rows that meet two matrices of equal shape, whose products are combined.
#[derive(Debug, Clone)]
pub struct GatedBand<'a> {
    /// Gate and up.
    pub matrices: [Matrix<'a>; 2],
    /// As [`Band::part`].
    pub part: usize,
    /// As [`Band::rows`].
    pub rows: Range<usize>,
}

/// What all kinds of bands have.
trait Meets: Sync {
    /// Which rows meet what: the matrices, the part of the activations and the rows.
    fn each(&self) -> (&[Matrix<'_>], usize, &Range<usize>);
}

impl Meets for Band<'_> {
    fn each(&self) -> (&[Matrix<'_>], usize, &Range<usize>) {
        (std::slice::from_ref(&self.matrix), self.part, &self.rows)
    }
}

impl Meets for GatedBand<'_> {
    fn each(&self) -> (&[Matrix<'_>], usize, &Range<usize>) {
        (&self.matrices, self.part, &self.rows)
    }
}

/// How bands are cut: for each cell its band, its tokens in the part, and its rows.
#[derive(Default)]
struct Cut {
    tiles: Vec<(usize, Range<usize>)>,
    rows: Vec<Range<usize>>,
}

thread_local! {
    /// Of the last call, for its room.
    static CUT: RefCell<Cut> = RefCell::default();
}

/// Products of each band with its matrix. `out` has rows as long as the matrices' padded rows, which are all the same;
/// bands ascend, and rows between them are left as they are.
pub fn matmul_bands(pool: &mut Pool, level: Level, bands: &[Band<'_>], acts: &Activations, out: &mut [f32]) {
    run(pool, bands, acts, out, |band, tokens, col, cell| {
        let rows = col..col + cell.row(0).len();
        product(level, &band.matrix, rows, acts.part(band.part), tokens, Output::Store, 0, cell);
    });
}

/// Products of each band with its two matrices, combined: `out = f(gate) · up`; else as [`matmul_bands`].
pub fn matmul_gated_bands(
    pool: &mut Pool,
    level: Level,
    bands: &[GatedBand<'_>],
    function: Gate,
    acts: &Activations,
    out: &mut [f32],
) {
    run(pool, bands, acts, out, |band, tokens, col, cell| {
        let [gate, up] = &band.matrices;
        gated_product(level, [gate, up], function, acts.part(band.part), tokens, col, cell);
    });
}

/// Cuts bands into cells, and calls `task` with each: its band, its tokens in the part, its first column.
fn run<B: Meets>(
    pool: &mut Pool,
    bands: &[B],
    acts: &Activations,
    out: &mut [f32],
    task: impl Fn(&B, Range<usize>, usize, &mut Cell<'_, f32>) + Sync,
) {
    let Some(row_len) = bands.first().map(|band| band.each().0[0].padded_rows()) else { return };
    CUT.with_borrow_mut(|Cut { tiles, rows: places }| {
        tiles.clear();
        places.clear();
        let (mut tokens, mut bytes) = (0, 0);
        for (i, band) in bands.iter().enumerate() {
            let (matrices, part, rows) = band.each();
            for matrix in matrices {
                check(matrix, acts);
                assert_eq!(matrix.padded_rows(), row_len, "outputs of all bands");
            }
            bytes += matrices[0].len_bytes();
            assert_eq!(acts.part(part).tokens(), rows.len(), "rows of a band and of its part");
            for start in (0..rows.len()).step_by(tile_tokens(acts)) {
                let end = rows.len().min(start + tile_tokens(acts));
                tiles.push((i, start..end));
                places.push(rows.start + start..rows.start + end);
            }
            tokens += rows.len();
        }
        let (all, across) = (bands.len() * row_len / PANEL_ROWS, row_len / PANEL_ROWS);
        let even = (all / (4 * pool.threads())).max(1);
        let panels = task_panels(bytes / all.max(1), tokens / bands.len()).min(even).min(across);
        pool.run_bands(out, row_len, places, panels * PANEL_ROWS, |tile, col, cell| {
            let (band, tokens) = &tiles[tile];
            task(&bands[*band], tokens.clone(), col, cell);
        });
    });
}
