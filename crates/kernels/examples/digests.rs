//! Runs every kernel at every level that this machine has, stops if two levels differ in a bit, and prints a digest of each
//! result. The output is the same on every processor: `tools/neon/check.sh` compares that of arm64 with that of x86.

use fixtures::rng::Rng;
use kernels::activations::{Activations, Forms, Norm, Precision};
use kernels::attention::{KV_BLOCK, KvBlocks, KvType, Run, Scratch, Shape, Terms, attention, write_kv};
use kernels::isa::{Isa, Level};
use kernels::matmul::{Matrix, Output, Panels, matmul, matmul_gated};
use kernels::ops::{Gate, add, rms_norm, rope, soft_cap};
use kernels::quant::Format;
use kernels::threads::Pool;

/// Two blocks of the longest format.
const COLS: usize = 512;
/// A full panel, and one that is not.
const ROWS: usize = 16 + 5;
/// Full groups and one that is not, at every level.
const TOKENS: usize = 11;

fn main() {
    let levels: Vec<Level> = Isa::ALL.iter().filter_map(|&isa| Level::new(isa)).collect();
    eprintln!("levels: {}", levels.iter().map(|level| level.isa().name()).collect::<Vec<_>>().join(" "));
    let mut pool = Pool::new(2);
    let pool = &mut pool;
    for &format in Format::ALL {
        let weights = panels(format, 1);
        report(&levels, &format!("{format:?} unpacked"), |level| unpacked(level, format, &weights));
        for precision in [Precision::Single, Precision::Double] {
            let name = format!("{format:?} product {precision:?}");
            report(&levels, &name, |level| product(pool, level, format, &weights, precision));
        }
    }
    for function in [Gate::Silu, Gate::GeluTanh] {
        for format in [Format::Q4_K, Format::F16] {
            let (gate, up) = (panels(format, 2), panels(format, 3));
            report(&levels, &format!("{format:?} gated {function:?}"), |level| {
                gated(pool, level, format, [&gate, &up], function)
            });
        }
    }
    for (ty, heads, heads_kv, head_len, shared, window, cap) in [
        (KvType::F16, 6, 2, 64, false, None, None),
        (KvType::F16, 8, 1, 96, false, Some(40), Some(5.0)),
        (KvType::F16, 8, 1, 96, true, None, None),
        (KvType::Q8_0, 6, 2, 64, false, Some(40), None),
        (KvType::Q8_0, 6, 2, 96, true, Some(40), None),
        (KvType::Q4_0, 6, 2, 64, false, None, Some(5.0)),
        (KvType::Q4_0, 6, 2, 96, true, None, None),
    ] {
        let (scale, type_k, type_v, soft_cap) = (0.125, ty, ty, cap);
        let value_len = if shared { 64 } else { head_len };
        let shape = Shape { heads, heads_kv, head_len, value_len, shared, scale, window, soft_cap, type_k, type_v };
        report(&levels, &format!("attention {shape:?}"), |level| attended(pool, level, &shape));
    }
    report(&levels, "norm, rope, cap, add", others);
}

/// Prints the digest of `result`, which must be the same at all levels.
fn report(levels: &[Level], name: &str, mut result: impl FnMut(Level) -> Vec<f32>) {
    let want = result(levels[0]);
    assert!(want.iter().any(|&x| x != want[0]), "{name}: a constant proves nothing");
    assert!(want.iter().all(|x| x.is_finite()), "{name}: not a number");
    for &level in &levels[1..] {
        let got = result(level);
        let same = got.len() == want.len() && got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits());
        assert!(same, "{name}: {} and {} differ", level.isa(), levels[0].isa());
    }
    // FNV-1a.
    let hash = |h: u64, byte: u8| (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let digest = want.iter().flat_map(|x| x.to_bits().to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, hash);
    println!("{digest:016x} {name}");
}

/// Numbers that do not depend on a library's logarithm.
fn uniform(rng: &mut Rng, n: usize, size: f32) -> Vec<f32> {
    (0..n).map(|_| rng.range(-size, size)).collect()
}

/// Packed rows of random blocks, with any scales that keep the values within reason.
fn panels(format: Format, seed: u64) -> Vec<u8> {
    let scalar = Level::new(Isa::Scalar).expect("always there");
    let mut rng = Rng::new(seed);
    let (block_bytes, block_len) = (format.block_bytes(), format.block_len());
    let block = |rng: &mut Rng| {
        loop {
            let mut block = vec![0; block_bytes];
            rng.fill(&mut block);
            let (mut panel, mut values) = (vec![0; 16 * block_bytes], vec![0.0; block_len]);
            format.pack_panel(&[&block], &mut panel);
            format.unpack_row(scalar, &panel, 0, &mut values);
            if values.iter().all(|v| v.abs() < 1e4) {
                return block;
            }
        }
    };
    let rows: Vec<Vec<u8>> = (0..ROWS).map(|_| (0..COLS / block_len).flat_map(|_| block(&mut rng)).collect()).collect();
    let row_bytes = COLS / block_len * block_bytes;
    let mut panels = vec![0; ROWS.next_multiple_of(16) * row_bytes];
    for (rows, panel) in rows.chunks(16).zip(panels.chunks_exact_mut(16 * row_bytes)) {
        let rows: Vec<&[u8]> = rows.iter().map(|row| &row[..]).collect();
        format.pack_panel(&rows, panel);
    }
    panels
}

fn unpacked(level: Level, format: Format, panels: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; ROWS * COLS];
    let panel_bytes = panels.len() / ROWS.div_ceil(16);
    for (row, out) in out.chunks_exact_mut(COLS).enumerate() {
        format.unpack_row(level, &panels[row / 16 * panel_bytes..][..panel_bytes], row % 16, out);
    }
    out
}

/// Products with all tokens at once, then with each alone.
fn product(pool: &mut Pool, level: Level, format: Format, panels: &[u8], precision: Precision) -> Vec<f32> {
    let mut rng = Rng::new(4);
    let (x, bias) = (uniform(&mut rng, TOKENS * COLS, 3.0), uniform(&mut rng, ROWS, 1.0));
    let matrix =
        Matrix { format, rows: ROWS, cols: COLS, panels: Panels::Packed(panels), bias: Some(&bias), precision };
    let mut acts = Activations::default();
    let mut all = Vec::new();
    for chunk in [TOKENS, 1] {
        for x in x.chunks(chunk * COLS) {
            let forms = Forms::of([format]);
            acts.fill(pool, level, x, COLS, COLS, x.len() / COLS, None, forms, precision);
            let mut out = vec![0.5; x.len() / COLS * matrix.padded_rows()];
            matmul(pool, level, &[matrix], &acts, &mut out, Output::Add);
            all.extend(out);
        }
    }
    let (batch, single) = all.split_at(all.len() / 2);
    assert_eq!(batch, single, "{format:?}: a batch changes results");
    all
}

fn gated(pool: &mut Pool, level: Level, format: Format, [gate, up]: [&[u8]; 2], function: Gate) -> Vec<f32> {
    let mut rng = Rng::new(5);
    let (x, weight) = (uniform(&mut rng, TOKENS * COLS, 3.0), uniform(&mut rng, COLS, 0.01));
    let [gate, up] = [gate, up].map(|panels| Matrix {
        format,
        rows: ROWS,
        cols: COLS,
        panels: Panels::Packed(panels),
        bias: None,
        precision: Precision::Single,
    });
    let mut acts = Activations::default();
    let norm = Some(Norm { weight: &weight, epsilon: 1e-5 });
    acts.fill(pool, level, &x, COLS, COLS, TOKENS, norm, Forms::of([format]), Precision::Single);
    let mut out = vec![0.0; TOKENS * gate.padded_rows()];
    matmul_gated(pool, level, &gate, &up, function, &acts, &mut out);
    out
}

/// The first tokens of a sequence at once, the last one alone.
fn attended(pool: &mut Pool, level: Level, shape: &Shape) -> Vec<f32> {
    let tokens = 3 * KV_BLOCK + 5;
    let (row, out_row) = (shape.heads * shape.head_len, shape.heads * shape.value_len);
    let (k_row, v_row) = (shape.heads_kv * shape.head_len, shape.heads_kv * shape.value_len);
    let mut rng = Rng::new(6);
    let (q, k, v) = (
        uniform(&mut rng, tokens * row, 2.0),
        uniform(&mut rng, tokens * k_row, 2.0),
        uniform(&mut rng, tokens * v_row, 1.0),
    );
    let fresh = || vec![0; shape.block_bytes()].into_boxed_slice();
    let mut blocks: Vec<Box<[u8]>> = (0..tokens.div_ceil(KV_BLOCK)).map(|_| fresh()).collect();
    for t in 0..tokens {
        let (q, k, v) = (&q[t * row..][..row], &k[t * k_row..][..k_row], &v[t * v_row..][..v_row]);
        write_kv(level, shape, &mut blocks[t / KV_BLOCK], t % KV_BLOCK, q, k, v);
    }
    let views: Vec<&[u8]> = blocks.iter().map(|block| &**block).collect();
    let kv = KvBlocks { blocks: &views };
    let mut out = vec![0.0; tokens * out_row];
    let mut scratch = Scratch::default();
    for (first, n) in [(0, tokens - 1), (tokens - 1, 1)] {
        let run = Run { kv, first, tokens: n, position: first };
        attention(pool, level, shape, &[run], &q, row, Terms::default(), &mut out, &mut scratch);
    }
    out
}

fn others(level: Level) -> Vec<f32> {
    let mut rng = Rng::new(7);
    // Not a multiple of any number of lanes.
    let (mut x, weight) = (uniform(&mut rng, 6 * 38, 4.0), uniform(&mut rng, 38, 1.0));
    let cos_sin = uniform(&mut rng, 34, 1.0);
    let other = uniform(&mut rng, 6 * 38, 4.0);
    rms_norm(level, &mut x, &weight, 1e-6);
    rope(level, &mut x, 38, &cos_sin);
    soft_cap(level, &mut x, 1.5);
    add(level, &mut x, &other);
    x
}
