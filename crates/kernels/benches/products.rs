//! Products, packing and attention, on one thread: what a core does by itself, to be held against `kernels::limits`.
//!
//! The matrices stay in the cache. A decode kernel is fast enough when it takes in more than the core's share of the
//! memory bandwidth; whether memory then delivers that is for `airs bench --limits` to say. GB are bytes of weights (of
//! keys and values in attention), Gelem/s are G multiply-adds a second.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fixtures::{quantize::random_blocks, rng::Rng};
use gguf::TensorType;
use kernels::PANEL_ROWS;
use kernels::activations::{Activations, Forms, Precision};
use kernels::attention::{KV_BLOCK, KvBlocks, KvType, Run, Scratch, Shape, Terms, attention, write_kv};
use kernels::isa::Level;
use kernels::matmul::{Matrix, Output, Panels, matmul};
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
            let matrix = Matrix {
                format,
                rows: ROWS,
                cols: COLS,
                panels: Panels::Packed(&panels),
                bias: None,
                precision: Precision::Single,
            };
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

/// The heads of a model of a billion parameters: one token after 4096 positions, and a prompt of 512.
fn attentions(c: &mut Criterion) {
    let (mut pool, level) = (Pool::new(1), Level::detect());
    let mut group = c.benchmark_group("attention");
    for &ty in KvType::ALL {
        let shape = Shape {
            heads: 32,
            heads_kv: 8,
            head_len: 64,
            value_len: 64,
            shared: false,
            scale: 0.125,
            window: None,
            soft_cap: None,
            type_k: ty,
            type_v: ty,
        };
        let (row_len, kv_len, positions) = (shape.heads * shape.head_len, shape.heads_kv * shape.head_len, 4096);
        let mut rng = Rng::new(3);
        let mut blocks = vec![vec![0; shape.block_bytes()].into_boxed_slice(); positions / KV_BLOCK];
        for position in 0..positions {
            let (key, value) = (rng.normals(kv_len, 1.0), rng.normals(kv_len, 1.0));
            write_kv(level, &shape, &mut blocks[position / KV_BLOCK], position % KV_BLOCK, &[], &key, &value);
        }
        let views: Vec<&[u8]> = blocks.iter().map(|block| &**block).collect();
        let kv = KvBlocks { blocks: &views };
        let mut scratch = Scratch::default();
        for (name, position, tokens) in [("decode4096", positions - 1, 1), ("prefill512", 0, 512)] {
            let q = rng.normals(tokens * row_len, 1.0);
            let mut out = vec![0.0; tokens * row_len];
            group.throughput(if tokens == 1 {
                Throughput::BytesDecimal((blocks.len() * shape.block_bytes()) as u64)
            } else {
                // Query t sees t + 1 positions; each is one product with a key and one with a value.
                Throughput::Elements((tokens * (tokens + 1) / 2 * 2 * row_len) as u64)
            });
            group.bench_function(format!("{name}/{}", ty.name()), |b| {
                b.iter(|| {
                    let run = Run { kv, first: 0, tokens, position };
                    attention(&mut pool, level, &shape, &[run], &q, row_len, Terms::default(), &mut out, &mut scratch);
                });
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
    targets = packing, products, attentions
}
criterion_main!(all);
