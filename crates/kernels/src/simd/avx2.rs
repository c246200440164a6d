//! AVX2 with FMA and F16C, 8 lanes; with [`VEX`] or [`EVEX`], the 256-bit VNNI instruction too.
//!
//! Invariants:
//! 1. A value of [`Avx2`] exists only where its instructions were detected: `Avx2::new` is unsafe and says so.
//! 2. Loads and stores check the length of their slice before they touch memory.
#![allow(unsafe_code)]

use super::{Op, Simd};
use std::arch::asm;
use std::arch::x86_64::*;

/// No VNNI: byte products by vpmaddubsw.
pub const PLAIN: u8 = 0;
/// AVX-VNNI: vpdpbusd in its VEX encoding (Intel N100, 12th-generation laptops).
pub const VEX: u8 = 1;
/// AVX512-VNNI with VL: the same instruction on the same 16 registers in its EVEX encoding, so that processors without
/// the VEX form can run and test this level.
pub const EVEX: u8 = 2;

/// Permission to use AVX2, FMA and F16C, and the VNNI encoding `VNNI`.
#[derive(Debug, Clone, Copy)]
pub struct Avx2<const VNNI: u8>(());

impl<const VNNI: u8> Avx2<VNNI> {
    /// The permission.
    ///
    /// # Safety
    /// The processor must have avx2, fma, f16c, bmi1, bmi2 and popcnt; with [`VEX`] avxvnni, with [`EVEX`] avx512vnni and avx512vl.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }

    /// Runs `op` compiled for these instructions.
    pub(crate) fn run<O: Op>(self, op: O) -> O::Out {
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
        fn enter<O: Op, const VNNI: u8>(s: Avx2<VNNI>, op: O) -> O::Out {
            op.run(s)
        }
        // SAFETY: invariant 1.
        unsafe { enter(self, op) }
    }
}

const N: usize = 8;

/// One intrinsic under invariant 1.
macro_rules! isa {
    ($e:expr) => {
        // SAFETY: invariant 1; memory operands are checked by the caller (invariant 2).
        unsafe { $e }
    };
}

/// `acc + dot4(w, x)` per lane. Inline assembly, so that neither encoding lets the compiler use more registers than
/// the processors of this level have.
#[inline]
#[target_feature(enable = "avx2")]
fn dpbusd<const VNNI: u8>(mut acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
    if VNNI == VEX {
        isa!(asm!("{{vex}} vpdpbusd {0}, {1}, {2}", inout(ymm_reg) acc, in(ymm_reg) w, in(ymm_reg) x,
            options(pure, nomem, nostack, preserves_flags)));
    } else {
        isa!(asm!("{{evex}} vpdpbusd {0}, {1}, {2}", inout(ymm_reg) acc, in(ymm_reg) w, in(ymm_reg) x,
            options(pure, nomem, nostack, preserves_flags)));
    }
    acc
}

impl<const VNNI: u8> Simd for Avx2<VNNI> {
    const LANES: usize = N;
    const GROUP_MAX: usize = 4;
    // Sums of pairs stay in 16 bits for up to four.
    const DOT_WORDS: usize = if VNNI == PLAIN { 4 } else { 1 };
    type F = __m256;
    type V = __m256i;

    #[inline(always)]
    fn f_splat(self, x: f32) -> __m256 {
        isa!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    fn f_load(self, from: &[f32]) -> __m256 {
        let from = &from[..N];
        isa!(_mm256_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn f_store(self, x: __m256, to: &mut [f32]) {
        let to = &mut to[..N];
        isa!(_mm256_storeu_ps(to.as_mut_ptr(), x));
    }
    #[inline(always)]
    fn f_load_f16(self, from: &[u8]) -> __m256 {
        let from = &from[..2 * N];
        isa!(_mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn f_load_half(self, from: &[u16]) -> __m256 {
        let from = &from[..N];
        isa!(_mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn f_store_half(self, x: __m256, to: &mut [u16]) {
        let to = &mut to[..N];
        isa!(_mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)));
    }
    #[inline(always)]
    fn f_load_bf16(self, from: &[u8]) -> __m256 {
        let from = &from[..2 * N];
        isa!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast())))))
    }
    #[inline(always)]
    fn f_add(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn f_sub(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn f_mul(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn f_div(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn f_fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        isa!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn f_max(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn f_min(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn f_abs(self, x: __m256) -> __m256 {
        isa!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), x))
    }
    #[inline(always)]
    fn f_round(self, x: __m256) -> __m256 {
        isa!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }
    #[inline(always)]
    fn f_keep(self, x: __m256, from: usize, to: usize, fill: f32) -> __m256 {
        isa!({
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let below = |n: usize| _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(N) as i32), lane);
            let keep = _mm256_andnot_si256(below(from), below(to));
            _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(keep))
        })
    }
    #[inline(always)]
    fn f_reduce_max(self, x: __m256) -> f32 {
        isa!({
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        })
    }
    #[inline(always)]
    fn f_reduce_add(self, x: __m256) -> f32 {
        isa!({
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        })
    }
    #[inline(always)]
    fn f_store_i8(self, x: __m256, to: &mut [i8]) {
        let to = &mut to[..N];
        isa!({
            let v = _mm256_cvtps_epi32(x);
            let v = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            _mm_storel_epi64(to.as_mut_ptr().cast(), _mm_packs_epi16(v, v));
        });
    }
    #[inline(always)]
    fn f_to_v(self, x: __m256) -> __m256i {
        isa!(_mm256_cvtps_epi32(x))
    }

    #[inline(always)]
    fn v_splat(self, x: i32) -> __m256i {
        isa!(_mm256_set1_epi32(x))
    }
    #[inline(always)]
    fn v_load(self, from: &[u8]) -> __m256i {
        let from = &from[..4 * N];
        isa!(_mm256_loadu_si256(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn v_store(self, x: __m256i, to: &mut [u8]) {
        let to = &mut to[..4 * N];
        isa!(_mm256_storeu_si256(to.as_mut_ptr().cast(), x))
    }
    #[inline(always)]
    fn v_load_u8(self, from: &[u8]) -> __m256i {
        let from = &from[..N];
        isa!(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn v_load_i8(self, from: &[u8]) -> __m256i {
        let from = &from[..N];
        isa!(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn v_add(self, a: __m256i, b: __m256i) -> __m256i {
        isa!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn v_and(self, a: __m256i, b: __m256i) -> __m256i {
        isa!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn v_or(self, a: __m256i, b: __m256i) -> __m256i {
        isa!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn v_and_or(self, a: __m256i, mask: __m256i, b: __m256i) -> __m256i {
        isa!(_mm256_or_si256(_mm256_and_si256(a, mask), b))
    }
    #[inline(always)]
    fn v_shr(self, x: __m256i, bits: u32) -> __m256i {
        isa!(_mm256_srl_epi32(x, _mm_cvtsi32_si128(bits as i32)))
    }
    #[inline(always)]
    fn v_shl(self, x: __m256i, bits: u32) -> __m256i {
        isa!(_mm256_sll_epi32(x, _mm_cvtsi32_si128(bits as i32)))
    }
    #[inline(always)]
    fn v_lookup(self, table: &[u8; 16], index: __m256i) -> __m256i {
        isa!(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), index))
    }
    #[inline(always)]
    fn v_to_f(self, x: __m256i) -> __m256 {
        isa!(_mm256_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn v_as_f(self, x: __m256i) -> __m256 {
        isa!(_mm256_castsi256_ps(x))
    }
    #[inline(always)]
    fn f_as_v(self, x: __m256) -> __m256i {
        isa!(_mm256_castps_si256(x))
    }

    #[inline(always)]
    fn dot<const G: usize>(
        self,
        acc: __m256i,
        w: &[__m256i; 8],
        range: std::ops::Range<usize>,
        x: &[[u32; G]],
        t: usize,
        bits: u32,
    ) -> __m256i {
        let word = |i: usize| isa!(_mm256_set1_epi32(x[i][t] as i32));
        if VNNI != PLAIN {
            let mut acc = acc;
            for i in range {
                acc = isa!(dpbusd::<VNNI>(acc, w[i], word(i)));
            }
            return acc;
        }
        let ones = isa!(_mm256_set1_epi16(1));
        if bits == 8 {
            // The byte w - 128 with the sign moved to x: |w - 128| ≤ 128 and |x| ≤ 127, so a pair stays below 2^15.
            let mut sum = isa!(_mm256_setzero_si256());
            for i in range {
                isa!({
                    let signed = _mm256_xor_si256(w[i], _mm256_set1_epi8(-128));
                    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(word(i), signed));
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
                });
            }
            return sum;
        }
        // A pair of products is at most 2 · (2^bits - 1) · 127; so many of them fit in 16 bits.
        let in_i16 = match bits {
            0..=4 => 8,
            5 => 4,
            6 => 2,
            _ => 1,
        };
        let mut acc = acc;
        let mut i = range.start;
        while i < range.end {
            let end = (i + in_i16).min(range.end);
            let mut pairs = isa!(_mm256_maddubs_epi16(w[i], word(i)));
            i += 1;
            while i < end {
                pairs = isa!(_mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[i], word(i))));
                i += 1;
            }
            acc = isa!(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones)));
        }
        acc
    }

    #[inline(always)]
    fn prefetch(self, base: &[u8], offset: usize) {
        // A prefetch of an unmapped address does nothing, so the address need not lie in the slice.
        isa!(_mm_prefetch::<_MM_HINT_T1>(base.as_ptr().wrapping_add(offset).cast()));
    }
}
