//! What this machine can do: the limits that kernels are measured against.

use crate::isa::Level;
use crate::simd::{Op, Simd};
use crate::threads::Pool;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// How long one measurement runs at least.
const MEASURE: Duration = Duration::from_millis(200);

/// Bytes per second that the pool's threads read from `buffer`, in order. It should be far larger than the caches, and lie
/// in the same kind of pages as weights do.
pub fn read_bytes_per_second(pool: &mut Pool, level: Level, buffer: &[u8]) -> f64 {
    const CHUNK: usize = 1 << 20;
    best(|| {
        pool.run(buffer.len() / CHUNK, |i| {
            black_box(level.run(ReadAll(&buffer[i * CHUNK..(i + 1) * CHUNK])));
        });
        buffer.len() as f64
    })
}

/// 8-bit multiply-adds per second of the pool's threads, from registers.
pub fn int8_macs_per_second(pool: &mut Pool, level: Level) -> f64 {
    const ROUNDS: usize = 100_000;
    let threads = pool.threads();
    // Tasks are many and small, so that a thread that comes late still gets its share.
    let tasks = 16 * threads;
    best(|| {
        pool.run(tasks, |i| {
            black_box(level.run(Dots { rounds: ROUNDS, seed: i as u32 }));
        });
        (tasks * ROUNDS * 16 * 32 * 16) as f64
    })
}

/// Best rate of several runs of `work`, which returns what it did.
fn best(mut work: impl FnMut() -> f64) -> f64 {
    let mut best = 0.0f64;
    let begin = Instant::now();
    while begin.elapsed() < MEASURE || best == 0.0 {
        let start = Instant::now();
        let done = work();
        best = best.max(done / start.elapsed().as_secs_f64());
    }
    best
}

struct ReadAll<'a>(&'a [u8]);

impl Op for ReadAll<'_> {
    type Out = u32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> u32 {
        let mut acc = [s.v_splat(0); 8];
        let step = 4 * S::LANES;
        for piece in self.0.chunks_exact(8 * step) {
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = s.v_or(*acc, s.v_load(&piece[i * step..]));
            }
            s.prefetch(piece, 4096);
        }
        let all = acc.into_iter().reduce(|a, b| s.v_or(a, b)).unwrap_or(s.v_splat(0));
        let mut out = [0.0; 16];
        s.f_store(s.v_to_f(all), &mut out);
        out[0] as u32
    }
}

struct Dots {
    rounds: usize,
    seed: u32,
}

impl Op for Dots {
    type Out = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        // 16 independent chains of eight products for 16 lanes: more than the latency of any level asks for.
        let mut w = [s.v_splat(0x0102_0304); 8];
        for (i, w) in w.iter_mut().enumerate() {
            *w = s.v_splat(black_box(self.seed.wrapping_add(i as u32) & 0x0f0f_0f0f) as i32);
        }
        let x: [[u32; 16]; 8] =
            black_box(std::array::from_fn(|i| std::array::from_fn(|t| (i * t) as u32 & 0x0303_0303)));
        let parts = 16 / S::LANES;
        let mut acc = [s.v_splat(0); 16];
        for _ in 0..self.rounds * parts {
            for (t, acc) in acc.iter_mut().enumerate() {
                *acc = s.dot(*acc, &w, 0..8, &x, t, 4);
            }
        }
        let mut out = [0.0; 16];
        let all = acc.into_iter().reduce(|a, b| s.v_add(a, b)).unwrap_or(s.v_splat(0));
        s.f_store(s.v_to_f(all), &mut out);
        out[0]
    }
}
