//! What happens between the matrix products: norms, rotary positions, gates, caps.

use crate::activations::rms_scale;
use crate::isa::Level;
use crate::math::{exp, sum16, tanh};
use crate::simd::{Op, Simd};

/// The function of a gated feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// x / (1 + e^-x).
    Silu,
    /// 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))).
    GeluTanh,
    /// x / (1 + e^(-1.702 x)) with x at most 7, and one more than the other factor, which is held within ±7. Source:
    /// gpt-oss.
    SiluClamped,
}

/// `f(x) · up`.
#[inline(always)]
pub(crate) fn gated<S: Simd>(s: S, function: Gate, x: S::F, up: S::F) -> S::F {
    let c = |v: f32| s.f_splat(v);
    match function {
        Gate::Silu => s.f_mul(s.f_div(x, s.f_add(c(1.0), exp(s, s.f_sub(c(0.0), x)))), up),
        Gate::GeluTanh => {
            let cube = s.f_mul(s.f_mul(x, x), x);
            let inner = s.f_mul(c(0.797_884_6), s.f_fma(cube, c(0.044_715), x));
            s.f_mul(s.f_mul(s.f_mul(c(0.5), x), s.f_add(c(1.0), tanh(s, inner))), up)
        }
        Gate::SiluClamped => {
            let (x, up) = (s.f_min(x, c(7.0)), s.f_max(s.f_min(up, c(7.0)), c(-7.0)));
            let sigmoid = s.f_div(c(1.0), s.f_add(c(1.0), exp(s, s.f_mul(c(-1.702), x))));
            s.f_mul(s.f_mul(x, sigmoid), s.f_add(up, c(1.0)))
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

struct AddScaled<'a>(&'a mut [f32], &'a [f32], f32);

impl Op for AddScaled<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, y) in self.0.iter_mut().zip(self.1) {
            *x = y.mul_add(self.2, *x);
        }
    }
}

/// `x += factor · y`, rounded once.
pub fn add_scaled(level: Level, x: &mut [f32], y: &[f32], factor: f32) {
    level.run(AddScaled(x, y, factor));
}

struct Dot<'a>(&'a [f32], &'a [f32]);

impl Op for Dot<'_> {
    type Out = f32;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f32 {
        let mut sums = [0.0; 16];
        for (a, b) in self.0.chunks_exact(16).zip(self.1.chunks_exact(16)) {
            for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
                *sum = a.mul_add(*b, *sum);
            }
        }
        let rest = self.0.chunks_exact(16).remainder().iter().zip(self.1.chunks_exact(16).remainder());
        rest.fold(sum16(&sums), |sum, (a, b)| a.mul_add(*b, sum))
    }
}

/// The sum of products of two vectors of equal length: 16 chains, then the tree.
pub fn dot(level: Level, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "vectors of one length");
    level.run(Dot(a, b))
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
