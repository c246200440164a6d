//! Every format: packing keeps the values, products are near the truth, and all paths give the same bits.

use fixtures::{dequantize, quantize, rng::Rng};
use gguf::TensorType;
use kernels::activations::{Activations, Forms, Norm, Precision};
use kernels::isa::{Isa, Level};
use kernels::matmul::{Matrix, Output, Panels, matmul, matmul_gated};
use kernels::ops::Gate;
use kernels::quant::Format;
use kernels::threads::Pool;

const COLS: usize = 768;
const ROWS: usize = 16 * 7 + 5;

fn tensor_type(format: Format) -> TensorType {
    let name = format!("{format:?}");
    *TensorType::ALL.iter().find(|ty| ty.name() == name).expect("the file format knows every kernel format")
}

/// Random rows of `format`, as in a file.
fn random_rows(format: Format, rows: usize, cols: usize, rng: &mut Rng) -> Vec<u8> {
    let ty = tensor_type(format);
    let sigma = 1.0 / (cols as f32).sqrt();
    if quantize::is_supported(ty) {
        quantize::quantize(ty, &rng.normals(rows * cols, sigma))
    } else {
        quantize::random_blocks(ty, rows * cols, rng, sigma)
    }
}

fn pack(format: Format, raw: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let row_bytes = format.row_bytes(cols).expect("whole blocks");
    let mut panels = vec![0; rows.next_multiple_of(16) * row_bytes];
    for (rows, panel) in raw.chunks(16 * row_bytes).zip(panels.chunks_exact_mut(16 * row_bytes)) {
        let rows: Vec<&[u8]> = rows.chunks_exact(row_bytes).collect();
        format.pack_panel(&rows, panel);
    }
    panels
}

fn levels() -> Vec<Level> {
    Isa::ALL.iter().filter_map(|&isa| Level::new(isa)).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn packed_rows_hold_exactly_the_values_of_the_file() {
    let mut rng = Rng::new(1);
    for &format in Format::ALL {
        let raw = random_rows(format, ROWS, COLS, &mut rng);
        let panels = pack(format, &raw, ROWS, COLS);
        let want = dequantize::dequantize(tensor_type(format), &raw);
        let panel_bytes = panels.len() / ROWS.div_ceil(16);
        for level in levels() {
            for row in 0..ROWS {
                let mut got = vec![0.0; COLS];
                format.unpack_row(level, &panels[row / 16 * panel_bytes..][..panel_bytes], row % 16, &mut got);
                for (col, (got, want)) in got.iter().zip(&want[row * COLS..]).enumerate() {
                    // The oracle may multiply and add in another order: two roundings apart at most.
                    let close = (got - want).abs() <= want.abs().max(1e-3) * 3e-7;
                    assert!(close, "{format:?} {} row {row} column {col}: {got} for {want}", level.isa());
                }
            }
        }
    }
}

struct Case {
    format: Format,
    panels: Vec<u8>,
    x: Vec<f32>,
    bias: Vec<f32>,
    tokens: usize,
}

fn product(case: &Case, level: Level, threads: usize, chunk: usize, precision: Precision) -> Vec<u32> {
    let mut pool = Pool::new(threads);
    let mut acts = Activations::default();
    let (format, panels) = (case.format, Panels::Packed(&case.panels));
    let matrix = Matrix { format, rows: ROWS, cols: COLS, panels, bias: Some(&case.bias), precision };
    let mut all = Vec::new();
    for x in case.x.chunks(chunk * COLS) {
        let n = x.len() / COLS;
        acts.fill(&mut pool, level, x, COLS, COLS, n, None, Forms::of([case.format]), precision);
        let mut out = vec![0.5; n * matrix.padded_rows()];
        matmul(&mut pool, level, &[matrix], &acts, &mut out, Output::Add);
        all.extend(out.chunks(matrix.padded_rows()).flat_map(|row| bits(&row[..ROWS])));
    }
    assert_eq!(all.len(), case.tokens * ROWS);
    all
}

fn case(format: Format, tokens: usize, seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    let raw = random_rows(format, ROWS, COLS, &mut rng);
    let panels = pack(format, &raw, ROWS, COLS);
    let mut x = rng.normals(tokens * COLS, 1.0);
    x[COLS - 40..COLS].fill(0.0);
    x[3] = 40.0;
    Case { format, panels, x, bias: rng.normals(ROWS, 1.0), tokens }
}

#[test]
fn every_isa_thread_count_and_batch_gives_the_bits_of_the_scalar_definition() {
    for &format in Format::ALL {
        let case = case(format, 37, 2);
        for precision in [Precision::Single, Precision::Double] {
            let want = product(&case, Level::new(Isa::Scalar).expect("always there"), 1, 1, precision);
            assert!(want.iter().any(|&b| f32::from_bits(b) != 0.5), "a product of zeros proves nothing");
            for level in levels() {
                for (threads, chunk) in [(1, 1), (2, 37), (1, 7), (3, 16), (2, 3)] {
                    let got = product(&case, level, threads, chunk, precision);
                    assert!(got == want, "{format:?} {} {threads} threads, chunks of {chunk}", level.isa());
                }
            }
        }
    }
}

#[test]
fn products_are_as_near_the_truth_as_eight_bit_activations_allow() {
    for &format in Format::ALL {
        let tokens = 3;
        let mut rng = Rng::new(3);
        let raw = random_rows(format, ROWS, COLS, &mut rng);
        let case = Case {
            format,
            panels: pack(format, &raw, ROWS, COLS),
            x: rng.normals(tokens * COLS, 1.0),
            bias: vec![0.0; ROWS],
            tokens,
        };
        let weights = dequantize::dequantize(tensor_type(format), &raw);
        // 127 steps to the largest of 16 values: an error of about 0.4 % of a value's size; and 1/254 of that.
        for (precision, limit) in [(Precision::Single, 6e-3), (Precision::Double, 3e-5)] {
            let got = product(&case, Level::detect(), 1, tokens, precision);
            let (mut error, mut size) = (0.0, 0.0);
            for t in 0..tokens {
                for row in 0..ROWS {
                    let (w, x) = (&weights[row * COLS..][..COLS], &case.x[t * COLS..][..COLS]);
                    let want: f64 = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                    let got = f64::from(f32::from_bits(got[t * ROWS + row])) - 0.5;
                    error += (got - want).powi(2);
                    size += want.powi(2);
                }
            }
            let relative = (error / size).sqrt();
            let limit = if format.float_activations() { 1e-5 } else { limit };
            assert!(relative < limit && size > 0.0, "{format:?} {precision:?}: relative error {relative:e}");
        }
    }
}

#[test]
fn gated_products_and_norms_give_the_same_bits_everywhere() {
    let mut rng = Rng::new(4);
    for format in [Format::Q4_1, Format::Q8_0, Format::Q4_K, Format::F16] {
        let tokens = 19;
        let gate = pack(format, &random_rows(format, ROWS, COLS, &mut rng), ROWS, COLS);
        let up = pack(format, &random_rows(format, ROWS, COLS, &mut rng), ROWS, COLS);
        let (x, weight) = (rng.normals(tokens * COLS, 1.0), rng.normals(COLS, 1.0));
        for function in [Gate::Silu, Gate::GeluTanh, Gate::SiluClamped] {
            let run = |level: Level, threads: usize, chunk: usize| {
                let mut pool = Pool::new(threads);
                let mut acts = Activations::default();
                let matrix = |panels| Matrix {
                    format,
                    rows: ROWS,
                    cols: COLS,
                    panels,
                    bias: None,
                    precision: Precision::Single,
                };
                let (gate, up) = (matrix(Panels::Packed(&gate)), matrix(Panels::Packed(&up)));
                let norm = Some(Norm { weight: &weight, epsilon: 1e-5 });
                let mut all = Vec::new();
                for x in x.chunks(chunk * COLS) {
                    let n = x.len() / COLS;
                    acts.fill(&mut pool, level, x, COLS, COLS, n, norm, Forms::of([format]), Precision::Single);
                    let mut out = vec![0.0; n * gate.padded_rows()];
                    matmul_gated(&mut pool, level, &gate, &up, function, &acts, &mut out);
                    all.extend(bits(&out));
                }
                all
            };
            let want = run(Level::new(Isa::Scalar).expect("always there"), 1, 1);
            assert!(want.iter().any(|&b| b != 0));
            for level in levels() {
                assert!(
                    run(level, 2, 19) == want && run(level, 1, 5) == want,
                    "{format:?} {function:?} {}",
                    level.isa()
                );
            }
        }
    }
}

#[test]
fn panels_that_are_multiplied_in_one_run_give_the_bits_of_each_alone() {
    let mut rng = Rng::new(5);
    let format = Format::Q4_K;
    // More panels than a task takes, and than one is helped with at the end of a share.
    let rows = [16 * 90, 40, 16 * 7 + 1];
    let raw: Vec<_> =
        rows.iter().map(|&rows| pack(format, &random_rows(format, rows, COLS, &mut rng), rows, COLS)).collect();
    let biases: Vec<_> = rows.iter().map(|&rows| rng.normals(rows, 1.0)).collect();
    let matrices: Vec<Matrix<'_>> = (0..rows.len())
        .map(|i| Matrix {
            format,
            rows: rows[i],
            cols: COLS,
            panels: Panels::Packed(&raw[i]),
            bias: Some(&biases[i]),
            precision: Precision::Single,
        })
        .collect();
    let row_len: usize = matrices.iter().map(Matrix::padded_rows).sum();
    let mut acts = Activations::default();
    for (tokens, threads) in [(1, 1), (1, 2), (5, 3), (9, 2)] {
        let mut pool = Pool::new(threads);
        let x = rng.normals(tokens * COLS, 1.0);
        let level = Level::detect();
        acts.fill(&mut pool, level, &x, COLS, COLS, tokens, None, Forms::of([format]), Precision::Single);
        let mut got = vec![0.0; tokens * row_len];
        matmul(&mut pool, level, &matrices, &acts, &mut got, Output::Store);
        let mut at = 0;
        for matrix in &matrices {
            for row in (0..matrix.rows).step_by(16) {
                let panel = matrix.part(row..matrix.rows.min(row + 16));
                let mut want = vec![0.0; tokens * 16];
                matmul(&mut pool, level, &[panel], &acts, &mut want, Output::Store);
                assert!(want.iter().any(|&y| y != 0.0));
                for t in 0..tokens {
                    let got = &got[t * row_len + at..][..16];
                    assert_eq!(bits(got), bits(&want[16 * t..][..16]), "{tokens} tokens, rows from {row} on");
                }
                at += 16;
            }
        }
    }
}
