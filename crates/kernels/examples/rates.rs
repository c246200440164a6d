//! Scratch.
use kernels::{activations::*, isa::*, limits, matmul::*, quant::Format, threads::Pool};
use std::time::Instant;
fn main() {
    let isa = std::env::var("AIRS_ISA").ok().and_then(|n| Isa::from_name(&n));
    let threads = std::env::var("T").map_or(1, |t| t.parse().unwrap());
    let level = isa.map_or(Level::detect(), |i| Level::new(i).unwrap());
    let mut pool = Pool::new(threads);
    let peak = limits::int8_macs_per_second(&mut pool, level);
    let bw = limits::read_bytes_per_second(&mut pool, level);
    println!("{} int8 {:.1} GMAC/s read {:.1} GB/s", level.isa(), peak / 1e9, bw / 1e9);
    let only: Vec<String> = std::env::args().skip(1).collect();
    for &f in Format::ALL {
        if !only.is_empty() && !only.contains(&format!("{f:?}")) { continue; }
        let (rows, cols) = (2048usize, 2048usize);
        let rb = f.row_bytes(cols).unwrap();
        let mut panels = vec![0u8; rows * rb];
        let mut z = 1u64;
        for b in panels.iter_mut() { z = z.wrapping_mul(6364136223846793005).wrapping_add(1); *b = (z >> 33) as u8 & 0x3b; }
        let m = Matrix { format: f, rows, cols, panels: &panels, bias: None };
        let x: Vec<f32> = (0..512 * cols).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
        let mut line = format!("{f:?}: ");
        for n in [1usize, 2, 4, 8, 16, 512] {
            let mut acts = Activations::default();
            acts.fill(&mut pool, level, &x, cols, cols, n, None, Forms::of([f]), Precision::Single);
            let mut out = vec![0f32; n * rows];
            let mut best = f64::MAX;
            for _ in 0..(if n > 16 { 5 } else { 40 }) {
                let t = Instant::now();
                matmul(&mut pool, level, &[m], &acts, &mut out, Output::Store);
                best = best.min(t.elapsed().as_secs_f64());
            }
            if n == 1 { line += &format!("n1 {:.1} GB/s; ", panels.len() as f64 / best / 1e9); }
            line += &format!("n{n} {:.1} GMAC/s ({:.0}%); ", (n * rows * cols) as f64 / best / 1e9, (n * rows * cols) as f64 / best / peak * 100.0);
        }
        println!("{line}");
    }
}
