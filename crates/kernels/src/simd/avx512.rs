//! AVX-512 F, BW, DQ, VL and VNNI: a panel's 16 rows are the 16 lanes.
//!
//! Invariants:
//! 1. A value of [`Avx512`] exists only where `Isa::Avx512` was detected: `Avx512::new` is unsafe and says so.
//! 2. Loads and stores check the length of their slice before they touch memory.
#![allow(unsafe_code)]

use super::{Op, Simd};
use std::arch::x86_64::*;

/// Permission to use AVX-512.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// The permission.
    ///
    /// # Safety
    /// The processor must have avx512f, avx512bw, avx512dq, avx512vl, avx512vnni, avx2, fma and f16c.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }

    /// Runs `op` compiled for these instructions.
    pub(crate) fn run<O: Op>(self, op: O) -> O::Out {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi1,bmi2,popcnt")]
        fn enter<O: Op>(s: Avx512, op: O) -> O::Out {
            op.run(s)
        }
        // SAFETY: invariant 1.
        unsafe { enter(self, op) }
    }
}

const N: usize = 16;

/// One intrinsic under invariant 1.
macro_rules! isa {
    ($e:expr) => {
        // SAFETY: invariant 1; memory operands are checked by the caller (invariant 2).
        unsafe { $e }
    };
}

impl Simd for Avx512 {
    const LANES: usize = N;
    const GROUP_MAX: usize = 16;
    const DOT_WORDS: usize = 1;
    type F = __m512;
    type V = __m512i;

    #[inline(always)]
    fn f_splat(self, x: f32) -> __m512 {
        isa!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn f_load(self, from: &[f32]) -> __m512 {
        let from = &from[..N];
        isa!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn f_store(self, x: __m512, to: &mut [f32]) {
        let to = &mut to[..N];
        isa!(_mm512_storeu_ps(to.as_mut_ptr(), x));
    }
    #[inline(always)]
    fn f_load_f16(self, from: &[u8]) -> __m512 {
        let from = &from[..2 * N];
        isa!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn f_load_half(self, from: &[u16]) -> __m512 {
        let from = &from[..N];
        isa!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn f_store_half(self, x: __m512, to: &mut [u16]) {
        let to = &mut to[..N];
        isa!(_mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)));
    }
    #[inline(always)]
    fn f_load_bf16(self, from: &[u8]) -> __m512 {
        let from = &from[..2 * N];
        isa!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
            from.as_ptr().cast()
        )))))
    }
    #[inline(always)]
    fn f_add(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn f_sub(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn f_mul(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn f_div(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn f_fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        isa!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn f_max(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn f_min(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn f_abs(self, x: __m512) -> __m512 {
        isa!(_mm512_abs_ps(x))
    }
    #[inline(always)]
    fn f_round(self, x: __m512) -> __m512 {
        isa!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }
    #[inline(always)]
    fn f_keep(self, x: __m512, from: usize, to: usize, fill: f32) -> __m512 {
        let below = |n: usize| ((1u32 << n.min(N)) - 1) as u16;
        isa!(_mm512_mask_mov_ps(_mm512_set1_ps(fill), below(to) & !below(from), x))
    }
    #[inline(always)]
    fn f_reduce_max(self, x: __m512) -> f32 {
        isa!(_mm512_reduce_max_ps(x))
    }
    #[inline(always)]
    fn f_reduce_add(self, x: __m512) -> f32 {
        isa!(_mm512_reduce_add_ps(x))
    }
    #[inline(always)]
    fn f_store_i8(self, x: __m512, to: &mut [i8]) {
        let to = &mut to[..N];
        isa!(_mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))));
    }
    #[inline(always)]
    fn f_to_v(self, x: __m512) -> __m512i {
        isa!(_mm512_cvtps_epi32(x))
    }

    #[inline(always)]
    fn v_splat(self, x: i32) -> __m512i {
        isa!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn v_load(self, from: &[u8]) -> __m512i {
        let from = &from[..4 * N];
        isa!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn v_store(self, x: __m512i, to: &mut [u8]) {
        let to = &mut to[..4 * N];
        isa!(_mm512_storeu_si512(to.as_mut_ptr().cast(), x))
    }
    #[inline(always)]
    fn v_load_u8(self, from: &[u8]) -> __m512i {
        let from = &from[..N];
        isa!(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn v_load_i8(self, from: &[u8]) -> __m512i {
        let from = &from[..N];
        isa!(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn v_add(self, a: __m512i, b: __m512i) -> __m512i {
        isa!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn v_and(self, a: __m512i, b: __m512i) -> __m512i {
        isa!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn v_or(self, a: __m512i, b: __m512i) -> __m512i {
        isa!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn v_and_or(self, a: __m512i, mask: __m512i, b: __m512i) -> __m512i {
        // Truth table of (a & mask) | b.
        isa!(_mm512_ternarylogic_epi32::<0xEA>(a, mask, b))
    }
    #[inline(always)]
    fn v_shr(self, x: __m512i, bits: u32) -> __m512i {
        isa!(_mm512_srl_epi32(x, _mm_cvtsi32_si128(bits as i32)))
    }
    #[inline(always)]
    fn v_shl(self, x: __m512i, bits: u32) -> __m512i {
        isa!(_mm512_sll_epi32(x, _mm_cvtsi32_si128(bits as i32)))
    }
    #[inline(always)]
    fn v_lookup(self, table: &[u8; 16], index: __m512i) -> __m512i {
        isa!({
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, index)
        })
    }
    #[inline(always)]
    fn v_to_f(self, x: __m512i) -> __m512 {
        isa!(_mm512_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn v_as_f(self, x: __m512i) -> __m512 {
        isa!(_mm512_castsi512_ps(x))
    }
    #[inline(always)]
    fn f_as_v(self, x: __m512) -> __m512i {
        isa!(_mm512_castps_si512(x))
    }

    #[inline(always)]
    fn dot<const G: usize>(
        self,
        acc: __m512i,
        w: &[__m512i; 8],
        range: std::ops::Range<usize>,
        x: &[[u32; G]],
        t: usize,
        _bits: u32,
    ) -> __m512i {
        let mut acc = acc;
        for i in range {
            acc = isa!(_mm512_dpbusd_epi32(acc, w[i], _mm512_set1_epi32(x[i][t] as i32)));
        }
        acc
    }

    #[inline(always)]
    fn dots<const G: usize, const T: usize>(
        self,
        acc: [__m512i; T],
        w: &[__m512i; 8],
        range: std::ops::Range<usize>,
        x: &[[u32; G]],
        t: usize,
        _bits: u32,
    ) -> [__m512i; T] {
        let mut acc = acc;
        for i in range {
            for j in 0..T {
                acc[j] = isa!(_mm512_dpbusd_epi32(acc[j], w[i], _mm512_set1_epi32(x[i][t + j] as i32)));
            }
        }
        acc
    }

    #[inline(always)]
    fn prefetch(self, base: &[u8], offset: usize) {
        // A prefetch of an unmapped address does nothing, so the address need not lie in the slice.
        isa!(_mm_prefetch::<_MM_HINT_T1>(base.as_ptr().wrapping_add(offset).cast()));
    }
}
