//! The vector operations that the kernels are written in, one implementation per instruction set.
//!
//! A value of a type that implements [`Simd`] is the permission to use its instructions: it is only made after
//! detection (see [`crate::isa`]). All operations are exact or correctly rounded, so that implementations agree in
//! every bit. A panel has 16 lanes; an implementation with fewer lanes works through it in `16 / LANES` parts.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
mod scalar;

pub use scalar::Scalar;

/// Vector operations of one instruction set.
///
/// Slices passed to loads and stores must hold at least the stated number of elements; shorter ones panic.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Float lanes of a vector.
    const LANES: usize;
    /// Tokens whose activations are interleaved, at most: as many accumulators as the registers hold.
    const GROUP_MAX: usize;
    /// Vectors of weights that [`Self::dot`] takes best at once: 1, 2 or 4.
    const DOT_WORDS: usize;
    /// `LANES` floats.
    type F: Copy;
    /// `LANES` 32-bit integers, or `4 * LANES` bytes.
    type V: Copy;

    /// All lanes `x`.
    fn f_splat(self, x: f32) -> Self::F;
    /// Loads `LANES` floats.
    fn f_load(self, from: &[f32]) -> Self::F;
    /// Stores `LANES` floats.
    fn f_store(self, x: Self::F, to: &mut [f32]);
    /// Loads `LANES` IEEE half floats (`2 * LANES` bytes, little-endian).
    fn f_load_f16(self, from: &[u8]) -> Self::F;
    /// Loads `LANES` IEEE half floats held as bits.
    fn f_load_half(self, from: &[u16]) -> Self::F;
    /// Stores `LANES` IEEE half floats as bits, rounded to nearest even.
    fn f_store_half(self, x: Self::F, to: &mut [u16]);
    /// Loads `LANES` bfloat16 (`2 * LANES` bytes, little-endian).
    fn f_load_bf16(self, from: &[u8]) -> Self::F;
    /// `a + b`.
    fn f_add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn f_sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn f_mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn f_div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn f_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; `b` where either is NaN.
    fn f_max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` where either is NaN.
    fn f_min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Absolute value.
    fn f_abs(self, x: Self::F) -> Self::F;
    /// Rounds to the nearest integer, ties to even.
    fn f_round(self, x: Self::F) -> Self::F;
    /// Lanes `from..to` of `x`, the others `fill`.
    fn f_keep(self, x: Self::F, from: usize, to: usize, fill: f32) -> Self::F;
    /// The largest lane. NaN lanes are ignored or returned.
    fn f_reduce_max(self, x: Self::F) -> f32;
    /// The sum of all lanes, in an order of its own: for sums that are exact in any order.
    fn f_reduce_add(self, x: Self::F) -> f32;
    /// Rounds to the nearest integer, ties to even, saturates to 8 bits and stores `LANES` bytes.
    fn f_store_i8(self, x: Self::F, to: &mut [i8]);
    /// Converts to 32-bit integers, rounding to nearest even. The values must fit.
    fn f_to_v(self, x: Self::F) -> Self::V;

    /// All lanes the 32-bit integer `x`.
    fn v_splat(self, x: i32) -> Self::V;
    /// Loads `4 * LANES` bytes.
    fn v_load(self, from: &[u8]) -> Self::V;
    /// Stores `4 * LANES` bytes.
    fn v_store(self, x: Self::V, to: &mut [u8]);
    /// Loads `LANES` unsigned bytes into 32-bit lanes.
    fn v_load_u8(self, from: &[u8]) -> Self::V;
    /// Loads `LANES` signed bytes into 32-bit lanes.
    fn v_load_i8(self, from: &[u8]) -> Self::V;
    /// 32-bit addition.
    fn v_add(self, a: Self::V, b: Self::V) -> Self::V;
    /// Bitwise and.
    fn v_and(self, a: Self::V, b: Self::V) -> Self::V;
    /// Bitwise or.
    fn v_or(self, a: Self::V, b: Self::V) -> Self::V;
    /// `(a & mask) | b`.
    fn v_and_or(self, a: Self::V, mask: Self::V, b: Self::V) -> Self::V;
    /// Shifts each 32-bit lane right, zeros in.
    fn v_shr(self, x: Self::V, bits: u32) -> Self::V;
    /// Shifts each 32-bit lane left.
    fn v_shl(self, x: Self::V, bits: u32) -> Self::V;
    /// `table[byte]` for each byte of `index`, which must be below 16.
    fn v_lookup(self, table: &[u8; 16], index: Self::V) -> Self::V;
    /// Converts 32-bit integers to floats, rounding to nearest even.
    fn v_to_f(self, x: Self::V) -> Self::F;
    /// Reads the bits of 32-bit lanes as floats.
    fn v_as_f(self, x: Self::V) -> Self::F;
    /// Reads floats as the bits of 32-bit lanes.
    fn f_as_v(self, x: Self::F) -> Self::V;

    /// Per lane, `acc + Σ w[i].byte[j] · x[i][t].byte[j]` for `i` in `range` and `j < 4`, exactly: `w` unsigned and
    /// below `2^bits`, `x` signed and not -128. With `bits` = 8, `w` is offset by 128 and `acc` must be
    /// `-128 · Σ x` over the range: the result is `Σ (w - 128) · x`.
    fn dot<const G: usize>(
        self,
        acc: Self::V,
        w: &[Self::V; 8],
        range: std::ops::Range<usize>,
        x: &[[u32; G]],
        t: usize,
        bits: u32,
    ) -> Self::V;

    /// [`Self::dot`] for `T` tokens from `t` on, whose instructions may be interleaved.
    #[inline(always)]
    fn dots<const G: usize, const T: usize>(
        self,
        acc: [Self::V; T],
        w: &[Self::V; 8],
        range: std::ops::Range<usize>,
        x: &[[u32; G]],
        t: usize,
        bits: u32,
    ) -> [Self::V; T] {
        let mut acc = acc;
        for (j, acc) in acc.iter_mut().enumerate() {
            *acc = self.dot(*acc, w, range.clone(), x, t + j, bits);
        }
        acc
    }

    /// Asks for the cache line at `offset` past the start of `base`, which may lie outside, to come into the second-level cache:
    /// the first one can wait for too few lines at a time to keep memory busy.
    fn prefetch(self, base: &[u8], offset: usize);
}

/// A piece of work written for any instruction set. `run` must be `#[inline(always)]`, with all that it calls.
pub trait Op {
    /// Result.
    type Out;
    /// Does the work with the instructions of `S`.
    fn run<S: Simd>(self, s: S) -> Self::Out;
}
