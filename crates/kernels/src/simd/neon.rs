//! NEON (arm64), 4 lanes; with `DOT`, the dot product instruction `sdot` too.
//!
//! Invariants:
//! 1. A value of [`Neon`] exists only where its instructions were detected: [`Neon::new`] is unsafe and says so.
//! 2. Loads and stores check the length of their slice before they touch memory.
#![allow(unsafe_code)]

use super::{Op, Simd};
use std::arch::aarch64::*;
use std::arch::asm;

/// Permission to use NEON, and `sdot` where `DOT`.
#[derive(Debug, Clone, Copy)]
pub struct Neon<const DOT: bool>(());

impl<const DOT: bool> Neon<DOT> {
    /// The permission.
    ///
    /// # Safety
    /// The processor must have neon; with `DOT`, dotprod.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }

    /// Runs `op` compiled for these instructions.
    pub(crate) fn run<O: Op>(self, op: O) -> O::Out {
        // Every arm64 processor that Rust knows has neon, so it could be inlined in the dispatch; apart, it is compiled
        // beside the scalar code instead of after it.
        #[inline(never)]
        #[target_feature(enable = "neon")]
        fn plain<O: Op, const DOT: bool>(s: Neon<DOT>, op: O) -> O::Out {
            op.run(s)
        }
        #[target_feature(enable = "neon,dotprod")]
        fn dot<O: Op, const DOT: bool>(s: Neon<DOT>, op: O) -> O::Out {
            op.run(s)
        }
        // SAFETY: invariant 1.
        unsafe { if DOT { dot(self, op) } else { plain(self, op) } }
    }
}

const N: usize = 4;

// Panels and activations hold little-endian words, which are loaded as they are.
const _: () = assert!(cfg!(target_endian = "little"));

/// One intrinsic or instruction under invariant 1.
macro_rules! isa {
    ($e:expr) => {
        // SAFETY: invariant 1; memory operands are checked by the caller (invariant 2).
        unsafe { $e }
    };
}

/// `acc + dot4(w, word LANE of x)` per lane. Inline assembly, because the intrinsics are not stable; with the word as an
/// element, because a load that copies it to all lanes would take turns with `sdot` on the vector pipes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const LANE: usize>(mut acc: uint32x4_t, w: uint32x4_t, x: uint32x4_t) -> uint32x4_t {
    isa!(asm!("sdot {acc:v}.4s, {w:v}.16b, {x:v}.4b[{lane}]", acc = inout(vreg) acc, w = in(vreg) w, x = in(vreg) x,
        lane = const LANE, options(pure, nomem, nostack, preserves_flags)));
    acc
}

/// 4 halves to singles. Inline assembly, because the intrinsic takes an unstable type; part of NEON itself.
#[inline(always)]
fn widen(x: uint16x4_t) -> float32x4_t {
    let out: float32x4_t;
    isa!(asm!("fcvtl {out:v}.4s, {x:v}.4h", out = lateout(vreg) out, x = in(vreg) x,
        options(pure, nomem, nostack, preserves_flags)));
    out
}

/// 4 singles to halves, rounded to nearest even (the mode that Rust code runs in).
#[inline(always)]
fn narrow(x: float32x4_t) -> uint16x4_t {
    let out: uint16x4_t;
    isa!(asm!("fcvtn {out:v}.4h, {x:v}.4s", out = lateout(vreg) out, x = in(vreg) x,
        options(pure, nomem, nostack, preserves_flags)));
    out
}

/// The bytes of `x` as signed numbers.
#[inline(always)]
fn signed(x: uint32x4_t) -> int8x16_t {
    isa!(vreinterpretq_s8_u32(x))
}

/// Weights that were offset by 128, as signed bytes.
#[inline(always)]
fn without_offset(w: uint32x4_t) -> uint32x4_t {
    isa!(veorq_u32(w, vdupq_n_u32(0x8080_8080)))
}

/// 4 bytes in the low half of a register, in one load.
#[inline(always)]
fn four_bytes(from: &[u8]) -> uint32x2_t {
    let from = &from[..N];
    isa!(vdup_n_u32(from.as_ptr().cast::<u32>().read_unaligned()))
}

impl<const DOT: bool> Simd for Neon<DOT> {
    const LANES: usize = N;
    const GROUP_MAX: usize = 8;
    const DOT_WORDS: usize = 4;
    type F = float32x4_t;
    type V = uint32x4_t;

    #[inline(always)]
    fn f_splat(self, x: f32) -> float32x4_t {
        isa!(vdupq_n_f32(x))
    }
    #[inline(always)]
    fn f_load(self, from: &[f32]) -> float32x4_t {
        let from = &from[..N];
        isa!(vld1q_f32(from.as_ptr()))
    }
    #[inline(always)]
    fn f_store(self, x: float32x4_t, to: &mut [f32]) {
        let to = &mut to[..N];
        isa!(vst1q_f32(to.as_mut_ptr(), x));
    }
    #[inline(always)]
    fn f_load_f16(self, from: &[u8]) -> float32x4_t {
        let from = &from[..2 * N];
        widen(isa!(vreinterpret_u16_u8(vld1_u8(from.as_ptr()))))
    }
    #[inline(always)]
    fn f_load_half(self, from: &[u16]) -> float32x4_t {
        let from = &from[..N];
        widen(isa!(vld1_u16(from.as_ptr())))
    }
    #[inline(always)]
    fn f_store_half(self, x: float32x4_t, to: &mut [u16]) {
        let to = &mut to[..N];
        isa!(vst1_u16(to.as_mut_ptr(), narrow(x)));
    }
    #[inline(always)]
    fn f_load_bf16(self, from: &[u8]) -> float32x4_t {
        let from = &from[..2 * N];
        isa!(vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(from.as_ptr())))))
    }
    #[inline(always)]
    fn f_add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        isa!(vaddq_f32(a, b))
    }
    #[inline(always)]
    fn f_sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        isa!(vsubq_f32(a, b))
    }
    #[inline(always)]
    fn f_mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        isa!(vmulq_f32(a, b))
    }
    #[inline(always)]
    fn f_div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        isa!(vdivq_f32(a, b))
    }
    #[inline(always)]
    fn f_fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        isa!(vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn f_max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // Not fmax, which returns NaN where either is one.
        isa!(vbslq_f32(vcgtq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn f_min(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        isa!(vbslq_f32(vcltq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn f_abs(self, x: float32x4_t) -> float32x4_t {
        isa!(vabsq_f32(x))
    }
    #[inline(always)]
    fn f_round(self, x: float32x4_t) -> float32x4_t {
        isa!(vrndnq_f32(x))
    }
    #[inline(always)]
    fn f_keep(self, x: float32x4_t, from: usize, to: usize, fill: f32) -> float32x4_t {
        isa!({
            let lane = vld1q_u32([0, 1, 2, 3].as_ptr());
            let below = |n: usize| vcltq_u32(lane, vdupq_n_u32(n.min(N) as u32));
            vbslq_f32(vbicq_u32(below(to), below(from)), x, vdupq_n_f32(fill))
        })
    }
    #[inline(always)]
    fn f_reduce_max(self, x: float32x4_t) -> f32 {
        isa!(vmaxnmvq_f32(x))
    }
    #[inline(always)]
    fn f_reduce_add(self, x: float32x4_t) -> f32 {
        isa!(vaddvq_f32(x))
    }
    #[inline(always)]
    fn f_store_i8(self, x: float32x4_t, to: &mut [i8]) {
        let to = &mut to[..N];
        isa!({
            let half = vqmovn_s32(vcvtnq_s32_f32(x));
            let bytes = vqmovn_s16(vcombine_s16(half, half));
            let word = vget_lane_u32::<0>(vreinterpret_u32_s8(bytes));
            to.as_mut_ptr().cast::<u32>().write_unaligned(word);
        });
    }
    #[inline(always)]
    fn f_to_v(self, x: float32x4_t) -> uint32x4_t {
        isa!(vreinterpretq_u32_s32(vcvtnq_s32_f32(x)))
    }

    #[inline(always)]
    fn v_splat(self, x: i32) -> uint32x4_t {
        isa!(vdupq_n_u32(x as u32))
    }
    #[inline(always)]
    fn v_load(self, from: &[u8]) -> uint32x4_t {
        let from = &from[..4 * N];
        isa!(vreinterpretq_u32_u8(vld1q_u8(from.as_ptr())))
    }
    #[inline(always)]
    fn v_store(self, x: uint32x4_t, to: &mut [u8]) {
        let to = &mut to[..4 * N];
        isa!(vst1q_u8(to.as_mut_ptr(), vreinterpretq_u8_u32(x)))
    }
    #[inline(always)]
    fn v_load_u8(self, from: &[u8]) -> uint32x4_t {
        isa!(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four_bytes(from))))))
    }
    #[inline(always)]
    fn v_load_i8(self, from: &[u8]) -> uint32x4_t {
        isa!(vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four_bytes(from)))))))
    }
    #[inline(always)]
    fn v_add(self, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        isa!(vaddq_u32(a, b))
    }
    #[inline(always)]
    fn v_and(self, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        isa!(vandq_u32(a, b))
    }
    #[inline(always)]
    fn v_or(self, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        isa!(vorrq_u32(a, b))
    }
    #[inline(always)]
    fn v_and_or(self, a: uint32x4_t, mask: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        isa!(vorrq_u32(vandq_u32(a, mask), b))
    }
    #[inline(always)]
    fn v_shr(self, x: uint32x4_t, bits: u32) -> uint32x4_t {
        // A shift to the left by a negative number.
        isa!(vshlq_u32(x, vdupq_n_s32(-(bits as i32))))
    }
    #[inline(always)]
    fn v_shl(self, x: uint32x4_t, bits: u32) -> uint32x4_t {
        isa!(vshlq_u32(x, vdupq_n_s32(bits as i32)))
    }
    #[inline(always)]
    fn v_lookup(self, table: &[u8; 16], index: uint32x4_t) -> uint32x4_t {
        isa!(vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_u32(index))))
    }
    #[inline(always)]
    fn v_to_f(self, x: uint32x4_t) -> float32x4_t {
        isa!(vcvtq_f32_s32(vreinterpretq_s32_u32(x)))
    }
    #[inline(always)]
    fn v_as_f(self, x: uint32x4_t) -> float32x4_t {
        isa!(vreinterpretq_f32_u32(x))
    }
    #[inline(always)]
    fn f_as_v(self, x: float32x4_t) -> uint32x4_t {
        isa!(vreinterpretq_u32_f32(x))
    }

    /// Reads the words of `x` in fours, so its end must not cut the four of a word that is used.
    #[inline(always)]
    fn dot<const G: usize>(
        self,
        acc: uint32x4_t,
        w: &[uint32x4_t; 8],
        range: std::ops::Range<usize>,
        x: &[[u32; G]],
        t: usize,
        bits: u32,
    ) -> uint32x4_t {
        let offset = bits == 8;
        let weight = |i: usize| if offset { without_offset(w[i]) } else { w[i] };
        let mut acc = if offset { isa!(vdupq_n_u32(0)) } else { acc };
        if DOT {
            for i in range {
                let at = i * G + t;
                let four = &x.as_flattened()[at / 4 * 4..][..4];
                let x = isa!(vld1q_u32(four.as_ptr()));
                acc = isa!(match at % 4 {
                    0 => sdot::<0>(acc, weight(i), x),
                    1 => sdot::<1>(acc, weight(i), x),
                    2 => sdot::<2>(acc, weight(i), x),
                    _ => sdot::<3>(acc, weight(i), x),
                });
            }
            return acc;
        }
        // Products that are at most (2^bits - 1) · 127, or 128 · 127 without the offset; so many of them fit in 16 bits.
        let in_i16 = match bits {
            0..=5 => 8,
            6 => 4,
            _ => 2,
        };
        let word = |i: usize| isa!(vreinterpretq_s8_u32(vdupq_n_u32(x[i][t])));
        let mut i = range.start;
        while i < range.end {
            let end = (i + in_i16).min(range.end);
            let (b, x) = (signed(weight(i)), word(i));
            let mut low = isa!(vmull_s8(vget_low_s8(b), vget_low_s8(x)));
            let mut high = isa!(vmull_high_s8(b, x));
            i += 1;
            while i < end {
                let (b, x) = (signed(weight(i)), word(i));
                low = isa!(vmlal_s8(low, vget_low_s8(b), vget_low_s8(x)));
                high = isa!(vmlal_high_s8(high, b, x));
                i += 1;
            }
            let sum = isa!(vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
            acc = isa!(vaddq_u32(acc, vreinterpretq_u32_s32(sum)));
        }
        acc
    }

    #[inline(always)]
    fn prefetch(self, base: &[u8], offset: usize) {
        // A prefetch of an unmapped address does nothing, so the address need not lie in the slice.
        let at = base.as_ptr().wrapping_add(offset);
        isa!(asm!("prfm pldl2keep, [{0}]", in(reg) at, options(nomem, nostack, preserves_flags)));
    }
}
