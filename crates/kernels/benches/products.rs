//! Products and packing, on one thread: what a core does by itself, to be held against `kernels::limits`.
//!
//! The matrices stay in the cache. A decode kernel is fast enough when it takes in more than the core's share of the
//! memory bandwidth; whether memory then delivers that is for `airs bench --limits` to say. GB are bytes of weights,
//! Gelem/s are G multiply-adds a second.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fixtures::{quantize::random_blocks, rng::Rng};
use gguf::TensorType;
use kernels::PANEL_ROWS;
use kernels::activations::{Activations, Forms, Precision};
use kernels::isa::Level;
use kernels::matmul::{Matrix, Output, matmul};
use kernels::quant::Format;
use kernels::threads::Pool;
use std::time::Duration;

const ROWS: usize = 1024;
const COLS: usize = 2048;

/// Random rows of `format`, as in a file.
fn raw_rows(format: Format) -> Vec<u8> {
    let name = format!("{format:?}");
    let ty = TensorType::ALL.iter().find(|ty| ty.name() == name).expect("the file format knows every kernel format");
    random_blocks(*ty, ROWS * COLS, &mut Rng::new(1), 1.0 / (COLS as f32).sqrt())
}

fn pack(format: Format, raw: &[u8], panels: &mut [u8]) {
    let row_bytes = raw.len() / ROWS;
    for (rows, panel) in raw.chunks_exact(PANEL_ROWS * row_bytes).zip(panels.chunks_exact_mut(PANEL_ROWS * row_bytes)) {
        let rows: [&[u8]; PANEL_ROWS] = std::array::from_fn(|r| &rows[r * row_bytes..(r + 1) * row_bytes]);
        format.pack_panel(&rows, panel);
    }
}

fn packing(c: &mut Criterion) {
    let mut group = c.benchmark_group("packing");
    for &format in Format::ALL {
        let raw = raw_rows(format);
        let mut panels = vec![0; raw.len()];
        group.throughput(Throughput::BytesDecimal(raw.len() as u64));
        group.bench_function(format!("{format:?}"), |b| b.iter(|| pack(format, &raw, &mut panels)));
    }
}

/// Products with 1 token (as in decoding), 8 (as in sequences that decode at once) and 512 (as in a prompt).
fn products(c: &mut Criterion) {
    let (mut pool, level) = (Pool::new(1), Level::detect());
    for tokens in [1, 8, 512] {
        let mut group = c.benchmark_group(format!("rows{tokens}"));
        let x = Rng::new(2).normals(tokens * COLS, 1.0);
        let mut acts = Activations::default();
        let mut out = vec![0.0; tokens * ROWS];
        for &format in Format::ALL {
            let raw = raw_rows(format);
            let mut panels = vec![0; raw.len()];
            pack(format, &raw, &mut panels);
            let matrix = Matrix { format, rows: ROWS, cols: COLS, panels: &panels, bias: None };
            acts.fill(&mut pool, level, &x, COLS, COLS, tokens, None, Forms::of([format]), Precision::Single);
            group.throughput(match tokens {
                1 => Throughput::BytesDecimal(panels.len() as u64),
                _ => Throughput::Elements((tokens * ROWS * COLS) as u64),
            });
            group.bench_function(format!("{format:?}"), |b| {
                b.iter(|| matmul(&mut pool, level, &[matrix], &acts, &mut out, Output::Store));
            });
        }
    }
}

/// Short, so that all of them take a minute or two.
fn settings() -> Criterion {
    Criterion::default()
        .without_plots()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
}

criterion_group! {
    name = all;
    config = settings();
    targets = packing, products
}
criterion_main!(all);
