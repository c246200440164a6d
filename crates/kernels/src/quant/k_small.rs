//! Q2_K and Q3_K: super-blocks of 256 values with a scale for each 16.
//!
//! In both, the two low bits of sub-block `j` of each half of 128 columns are bits `2j` of the half's 32 bytes.

use super::pack::{gather, interleave, transpose};
use super::{Layout, Packed, Plain, Quant, Rows, Sub, halves, sub_words, unpack_quant_row};
use crate::simd::Simd;

/// Word `i` of the two low bits of the four sub-blocks of half `g`, from the vectors at `q`.
#[inline(always)]
fn pairs<S: Simd>(s: S, q: &[u8], h: usize, g: usize, i: usize) -> [S::V; 4] {
    let all = s.v_load(&q[512 * g + 64 * i + 4 * S::LANES * h..]);
    let mask = s.v_splat(0x0303_0303);
    [s.v_and(all, mask), s.v_and(s.v_shr(all, 2), mask), s.v_and(s.v_shr(all, 4), mask), s.v_and(s.v_shr(all, 6), mask)]
}

/// Panel block: 16 scales and 16 minimum scales in half precision, 16 vectors of 16 code bytes (scale in the low nibble,
/// minimum in the high one), 16 vectors of bit pairs.
#[allow(non_camel_case_types)]
pub(crate) struct Q2_K;

impl Layout for Q2_K {
    const BLOCK: usize = 256;
    const BYTES: usize = 84;
}

impl Packed for Q2_K {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at + 80, &mut panel[..32]);
        gather::<2>(rows, at + 82, &mut panel[32..64]);
        transpose::<16>(rows, at, &mut panel[64..320]);
        interleave::<16, 1>(rows, at + 16, &mut panel[320..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q2_K {
    const BITS: u32 = 2;
    const OFFSET: u32 = 0;
    const MIN: bool = true;
    const HALVES: bool = true;
    const SPAN: usize = 4;
    type Plain = Plain<4, 0, true, true>;
    type Head<S: Simd> = (S::F, S::F);
    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8], h: usize) -> (S::F, S::F) {
        (halves(s, block, h), s.f_sub(s.f_splat(0.0), halves(s, &block[32..], h)))
    }
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (d, dmin): (S::F, S::F), j: usize) -> Sub<S> {
        let four = s.v_splat(15);
        let low = s.v_load_u8(&block[64 + 32 * j + S::LANES * h..]);
        let high = s.v_load_u8(&block[80 + 32 * j + S::LANES * h..]);
        Sub {
            w: sub_words::<Self, S>(s, block, h, j),
            scale: s.f_mul(d, s.v_to_f(s.v_and(low, four))),
            scale_high: s.f_mul(d, s.v_to_f(s.v_and(high, four))),
            min: s.f_mul(dmin, s.v_to_f(s.v_shr(low, 4))),
            min_high: s.f_mul(dmin, s.v_to_f(s.v_shr(high, 4))),
        }
    }
    #[inline(always)]
    fn words<S: Simd>(s: S, block: &[u8], h: usize, g: usize, i: usize) -> [S::V; 4] {
        pairs(s, &block[320..], h, g, i)
    }
}

/// Panel block: 16 half-precision scales, twelve vectors of 16 code bytes, 8 vectors of high bits (bit `j` of a byte
/// belongs to sub-block `j`), 16 vectors of bit pairs.
#[allow(non_camel_case_types)]
pub(crate) struct Q3_K;

impl Layout for Q3_K {
    const BLOCK: usize = 256;
    const BYTES: usize = 110;
}

impl Packed for Q3_K {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at + 108, &mut panel[..32]);
        transpose::<12>(rows, at + 96, &mut panel[32..224]);
        interleave::<8, 1>(rows, at, &mut panel[224..736]);
        interleave::<16, 1>(rows, at + 32, &mut panel[736..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

/// Scale `i` of 16: six bits, offset by 32. Its low four bits are the low nibble of byte `i` (0-7) or the high nibble of
/// byte `i - 8`, its top two are bits `2 (i / 4)` of byte `8 + i % 4`.
#[inline(always)]
fn scale_q3<S: Simd>(s: S, codes: &[u8], h: usize, d: S::F, i: usize) -> S::F {
    let low = s.v_load_u8(&codes[16 * (i % 8) + S::LANES * h..]);
    let low = s.v_and(if i < 8 { low } else { s.v_shr(low, 4) }, s.v_splat(15));
    let top = s.v_load_u8(&codes[16 * (8 + i % 4) + S::LANES * h..]);
    let top = s.v_shl(s.v_shr(top, 2 * (i as u32 / 4)), 4);
    let code = s.v_add(s.v_and_or(top, s.v_splat(0x30), low), s.v_splat(-32));
    s.f_mul(d, s.v_to_f(code))
}

impl Quant for Q3_K {
    const BITS: u32 = 3;
    const OFFSET: u32 = 4;
    const HALVES: bool = true;
    const SPAN: usize = 4;
    type Plain = Plain<4, 4, false, true>;
    type Head<S: Simd> = S::F;
    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8], h: usize) -> S::F {
        halves(s, block, h)
    }
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, d: S::F, j: usize) -> Sub<S> {
        let scale = scale_q3(s, &block[32..], h, d, 2 * j);
        let w = sub_words::<Self, S>(s, block, h, j);
        Sub { scale_high: scale_q3(s, &block[32..], h, d, 2 * j + 1), ..Sub::new(s, w, scale) }
    }
    #[inline(always)]
    fn words<S: Simd>(s: S, block: &[u8], h: usize, g: usize, i: usize) -> [S::V; 4] {
        let third = s.v_splat(0x0404_0404);
        let high = s.v_load(&block[224 + 64 * i + 4 * S::LANES * h..]);
        let mut w = pairs(s, &block[736..], h, g, i);
        for (k, w) in w.iter_mut().enumerate() {
            let j = 4 * g as u32 + k as u32;
            let bits = if j < 2 { s.v_shl(high, 2 - j) } else { s.v_shr(high, j - 2) };
            *w = s.v_and_or(bits, third, *w);
        }
        w
    }
}
