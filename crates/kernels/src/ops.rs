//! What happens between the matrix products: norms, rotary positions, gates, caps.

use crate::activations::rms_scale;
use crate::isa::Level;
use crate::math::{exp, tanh};
use crate::simd::{Op, Simd};

/// The function of a gated feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// x / (1 + e^-x).
    Silu,
    /// 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))).
    GeluTanh,
}

#[inline(always)]
pub(crate) fn gate<S: Simd>(s: S, function: Gate, x: S::F) -> S::F {
    let c = |v: f32| s.f_splat(v);
    match function {
        Gate::Silu => s.f_div(x, s.f_add(c(1.0), exp(s, s.f_sub(c(0.0), x)))),
        Gate::GeluTanh => {
            let cube = s.f_mul(s.f_mul(x, x), x);
            let inner = s.f_mul(c(0.797_884_6), s.f_fma(cube, c(0.044_715), x));
            s.f_mul(s.f_mul(c(0.5), x), s.f_add(c(1.0), tanh(s, inner)))
        }
    }
}

/// Calls `$body` with each piece of at most `LANES` values, copied to a full vector where it is shorter.
#[inline(always)]
fn map_in_place<S: Simd>(s: S, x: &mut [f32], mut f: impl FnMut(usize, S::F) -> S::F) {
    let len = x.len();
    let mut at = 0;
    while at + S::LANES <= len {
        let y = f(at, s.f_load(&x[at..]));
        s.f_store(y, &mut x[at..]);
        at += S::LANES;
    }
    if at < len {
        let mut rest = [0.0; 16];
        rest[..len - at].copy_from_slice(&x[at..]);
        let y = f(at, s.f_load(&rest));
        s.f_store(y, &mut rest);
        x[at..].copy_from_slice(&rest[..len - at]);
    }
}

struct RmsNorm<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    epsilon: f32,
}

impl Op for RmsNorm<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.x.chunks_exact_mut(self.weight.len()) {
            let scale = rms_scale(s, row, self.epsilon);
            let mut weight = [0.0; 16];
            let all = self.weight;
            map_in_place(s, row, |at, x| {
                let w = if at + S::LANES <= all.len() {
                    s.f_load(&all[at..])
                } else {
                    weight[..all.len() - at].copy_from_slice(&all[at..]);
                    s.f_load(&weight)
                };
                s.f_mul(s.f_mul(x, s.f_splat(scale)), w)
            });
        }
    }
}

/// Root-mean-square norm of each piece of `weight.len()` values, in place.
pub fn rms_norm(level: Level, x: &mut [f32], weight: &[f32], epsilon: f32) {
    level.run(RmsNorm { x, weight, epsilon });
}

struct Rope<'a> {
    x: &'a mut [f32],
    head_len: usize,
    cos_sin: &'a [f32],
}

impl Op for Rope<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = self.cos_sin.len() / 2;
        let (cos, sin) = self.cos_sin.split_at(half);
        for head in self.x.chunks_exact_mut(self.head_len) {
            let (low, high) = head[..2 * half].split_at_mut(half);
            let mut at = 0;
            while at + S::LANES <= half {
                let (x, y) = (s.f_load(&low[at..]), s.f_load(&high[at..]));
                let (c, n) = (s.f_load(&cos[at..]), s.f_load(&sin[at..]));
                let minus_y = s.f_sub(s.f_splat(0.0), y);
                s.f_store(s.f_fma(x, c, s.f_mul(minus_y, n)), &mut low[at..]);
                s.f_store(s.f_fma(y, c, s.f_mul(x, n)), &mut high[at..]);
                at += S::LANES;
            }
            for i in at..half {
                let (x, y) = (low[i], high[i]);
                low[i] = x.mul_add(cos[i], -y * sin[i]);
                high[i] = y.mul_add(cos[i], x * sin[i]);
            }
        }
    }
}

/// Rotary positions, in place, for heads of `head_len` values: value `i` is paired with `i + n/2`, where `n` =
/// `cos_sin.len()` values are rotated; `cos_sin` has n/2 cosines, then n/2 sines.
pub fn rope(level: Level, x: &mut [f32], head_len: usize, cos_sin: &[f32]) {
    level.run(Rope { x, head_len, cos_sin });
}

struct SoftCap<'a>(&'a mut [f32], f32);

impl Op for SoftCap<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        map_in_place(s, self.0, |_, x| s.f_mul(tanh(s, s.f_div(x, s.f_splat(self.1))), s.f_splat(self.1)));
    }
}

/// `cap · tanh(x / cap)`, in place.
pub fn soft_cap(level: Level, x: &mut [f32], cap: f32) {
    level.run(SoftCap(x, cap));
}

struct Add<'a>(&'a mut [f32], &'a [f32]);

impl Op for Add<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, y) in self.0.iter_mut().zip(self.1) {
            *x += y;
        }
    }
}

/// `x += y`.
pub fn add(level: Level, x: &mut [f32], y: &[f32]) {
    level.run(Add(x, y));
}

/// Hadamard transform over the longest power of two that divides the length, piece by piece, in place; orthonormal, and
/// its own inverse.
pub(crate) fn hadamard(x: &mut [f32]) {
    let n = 1 << x.len().trailing_zeros();
    let scale = 1.0 / (n as f32).sqrt();
    for piece in x.chunks_exact_mut(n) {
        let mut half = 1;
        while half < n {
            for pair in piece.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        piece.iter_mut().for_each(|x| *x *= scale);
    }
}
