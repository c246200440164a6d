//! Products of some rows with one matrix each: as if each band were alone.

use fixtures::{quantize, rng::Rng};
use gguf::TensorType;
use kernels::activations::{Activations, Forms, Norm, Precision, Source};
use kernels::isa::{Isa, Level};
use kernels::matmul::{
    Band, GatedBand, MakePanels, Matrix, Output, Panels, matmul, matmul_bands, matmul_gated, matmul_gated_bands,
};
use kernels::ops::Gate;
use kernels::quant::Format;
use kernels::threads::Pool;
use std::ops::Range;

const COLS: usize = 512;
const ROWS: usize = 80;
const TOKENS: usize = 45;
/// Rows of each band: nothing like a group, several groups, more than a tile, one, none.
const BANDS: [usize; 5] = [3, 39, 140, 1, 0];

fn panels(ty: TensorType, format: Format, rows: usize, rng: &mut Rng) -> Vec<u8> {
    let raw = quantize::random_blocks(ty, rows * COLS, rng, 0.05);
    let row_bytes = format.row_bytes(COLS).expect("whole blocks");
    let mut panels = vec![0; raw.len()];
    for (rows, panel) in raw.chunks(16 * row_bytes).zip(panels.chunks_exact_mut(16 * row_bytes)) {
        format.pack_panel(&rows.chunks_exact(row_bytes).collect::<Vec<_>>(), panel);
    }
    panels
}

/// Copies panels, as a file that is mapped would.
struct Copied<'a>(&'a [u8], usize);

impl MakePanels for Copied<'_> {
    fn make(&self, panels: Range<usize>, out: &mut [u8]) {
        out.copy_from_slice(&self.0[panels.start * self.1..panels.end * self.1]);
    }
}

struct Case {
    format: Format,
    /// Two stacks of matrices, one for each band.
    stacks: [Vec<u8>; 2],
    bias: Vec<f32>,
    x: Vec<f32>,
    weight: Vec<f32>,
    ids: Vec<u32>,
}

impl Case {
    fn matrix<'a>(&'a self, panels: Panels<'a>) -> Matrix<'a> {
        let (rows, bias) = (BANDS.len() * ROWS, Some(&self.bias[..]));
        Matrix { format: self.format, rows, cols: COLS, panels, bias, precision: Precision::Single }
    }

    /// Outputs of all bands, gated and plain, together or one by one.
    fn run(&self, level: Level, threads: usize, together: bool, made: bool) -> Vec<u32> {
        let (mut pool, mut acts) = (Pool::new(threads), Activations::default());
        let panel_bytes = 16 * self.format.row_bytes(COLS).expect("whole blocks");
        let copies = self.stacks.each_ref().map(|stack| Copied(stack, panel_bytes));
        let stacks = std::array::from_fn::<_, 2, _>(|i| match made {
            true => self.matrix(Panels::Made { by: &copies[i], first: 0 }),
            false => self.matrix(Panels::Packed(&self.stacks[i])),
        });
        let norm = Some(Norm { weight: &self.weight, epsilon: 1e-5 });
        let forms = Forms::of([self.format]);
        let mut out = vec![vec![0.0; self.ids.len() * ROWS]; 2];
        let mut first = 0;
        let rows = BANDS.map(|len| {
            first += len;
            first - len..first
        });
        let matrices = |i: usize| stacks.map(|stack| stack.part(i * ROWS..(i + 1) * ROWS));
        if together {
            let source = Source { x: &self.x, stride: COLS, cols: COLS, norm };
            acts.gather(&mut pool, level, &source, &self.ids, &BANDS, forms, Precision::Single);
            let bands = rows.iter().enumerate();
            let gated: Vec<_> = bands
                .clone()
                .map(|(part, rows)| GatedBand { matrices: matrices(part), part, rows: rows.clone() })
                .collect();
            matmul_gated_bands(&mut pool, level, &gated, Gate::SiluClamped, &acts, &mut out[0]);
            let plain: Vec<_> =
                bands.map(|(part, rows)| Band { matrix: matrices(part)[1], part, rows: rows.clone() }).collect();
            matmul_bands(&mut pool, level, &plain, &acts, &mut out[1]);
        } else {
            for (i, rows) in rows.iter().enumerate() {
                for row in rows.clone() {
                    let x = &self.x[self.ids[row] as usize * COLS..][..COLS];
                    acts.fill(&mut pool, level, x, COLS, COLS, 1, norm, forms, Precision::Single);
                    let [gate, up] = matrices(i);
                    let place = row * ROWS..(row + 1) * ROWS;
                    matmul_gated(&mut pool, level, &gate, &up, Gate::SiluClamped, &acts, &mut out[0][place.clone()]);
                    matmul(&mut pool, level, &[up], &acts, &mut out[1][place], Output::Store);
                }
            }
        }
        out.concat().iter().map(|x| x.to_bits()).collect()
    }
}

#[test]
fn many_matrices_at_once_give_the_bits_of_each_row_alone() {
    let mut rng = Rng::new(7);
    for (ty, format) in [
        (TensorType::Q4_K, Format::Q4_K),
        (TensorType::Q6_K, Format::Q6_K),
        (TensorType::MXFP4, Format::MXFP4),
        (TensorType::F16, Format::F16),
    ] {
        let stacks = [0, 1].map(|_| panels(ty, format, BANDS.len() * ROWS, &mut rng));
        let (x, weight) = (rng.normals(TOKENS * COLS, 3.0), rng.normals(COLS, 1.0));
        let ids = (0..BANDS.iter().sum::<usize>()).map(|i| (i * 7 % TOKENS) as u32).collect();
        let case = Case { format, stacks, bias: rng.normals(BANDS.len() * ROWS, 2.0), x, weight, ids };
        let want = case.run(Level::new(Isa::Scalar).expect("always there"), 1, false, false);
        assert!(want.iter().filter(|&&b| b != 0).count() > want.len() / 2, "zeros prove nothing");
        for level in Isa::ALL.iter().filter_map(|&isa| Level::new(isa)) {
            for (threads, made) in [(1, false), (3, false), (2, true)] {
                let same = case.run(level, threads, true, made) == want;
                assert!(same, "{format:?} {} {threads} threads, made: {made}", level.isa());
            }
        }
    }
}
