//! Q4_K, Q5_K and Q6_K: super-blocks of 256 values.

use super::pack::{gather, interleave, transpose};
use super::{Layout, Packed, Plain, Quant, Rows, Sub, halves, sub_words, unpack_quant_row};
use crate::simd::Simd;

/// Code byte `i` of each row.
#[inline(always)]
fn code<S: Simd>(s: S, codes: &[u8], h: usize, i: usize) -> S::V {
    s.v_load_u8(&codes[16 * i + S::LANES * h..])
}

/// Scale and minimum of sub-block `j`, multiplied out, from the twelve vectors of six-bit codes at `codes`.
///
/// Bytes 0-3 hold the low six bits of scales 0-3, bytes 4-7 those of minima 0-3; bytes 8-11 hold the low four bits of
/// scales (low nibble) and minima (high nibble) 4-7, whose upper two bits are the top bits of bytes 0-3 and 4-7.
#[inline(always)]
fn scale_and_min<S: Simd>(s: S, codes: &[u8], h: usize, (d, dmin): (S::F, S::F), j: usize) -> (S::F, S::F) {
    let (six, four, top) = (s.v_splat(63), s.v_splat(15), s.v_splat(0x30));
    let (scale, min) = if j < 4 {
        (s.v_and(code(s, codes, h, j), six), s.v_and(code(s, codes, h, j + 4), six))
    } else {
        let both = code(s, codes, h, j + 4);
        // The top two bits of a code, moved to bits 4 and 5.
        let scale_top = s.v_shr(code(s, codes, h, j - 4), 2);
        let min_top = s.v_shr(code(s, codes, h, j), 2);
        (s.v_and_or(scale_top, top, s.v_and(both, four)), s.v_and_or(min_top, top, s.v_shr(both, 4)))
    };
    // 11 bits times 6 bits: both products are exact.
    (s.f_mul(d, s.v_to_f(scale)), s.f_mul(dmin, s.v_to_f(min)))
}

/// Scale and negated minimum scale of a super-block.
#[inline(always)]
fn d_and_dmin<S: Simd>(s: S, block: &[u8], h: usize) -> (S::F, S::F) {
    (halves(s, block, h), s.f_sub(s.f_splat(0.0), halves(s, &block[32..], h)))
}

/// Panel block: 16 scales and 16 minimum scales in half precision, twelve vectors of 16 code bytes, then 32 vectors of
/// nibbles: in each group of eight, the low ones are an even sub-block and the high ones the odd one behind it.
#[allow(non_camel_case_types)]
pub(crate) struct Q4_K;

impl Layout for Q4_K {
    const BLOCK: usize = 256;
    const BYTES: usize = 144;
}

impl Packed for Q4_K {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        gather::<2>(rows, at + 2, &mut panel[32..64]);
        transpose::<12>(rows, at + 4, &mut panel[64..256]);
        interleave::<32, 1>(rows, at + 16, &mut panel[256..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q4_K {
    const BITS: u32 = 4;
    const OFFSET: u32 = 0;
    const MIN: bool = true;
    const SPAN: usize = 2;
    type Plain = Plain<4, 0, true, false>;
    type Head<S: Simd> = (S::F, S::F);
    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8], h: usize) -> (S::F, S::F) {
        d_and_dmin(s, block, h)
    }
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, head: (S::F, S::F), j: usize) -> Sub<S> {
        let (scale, min) = scale_and_min(s, &block[64..], h, head, j);
        Sub { min, ..Sub::new(s, sub_words::<Self, S>(s, block, h, j), scale) }
    }
    #[inline(always)]
    fn words<S: Simd>(s: S, block: &[u8], h: usize, g: usize, i: usize) -> [S::V; 4] {
        let mask = s.v_splat(0x0f0f_0f0f);
        let v = s.v_load(&block[256 + 512 * g + 64 * i + 4 * S::LANES * h..]);
        [s.v_and(v, mask), s.v_and(s.v_shr(v, 4), mask), mask, mask]
    }
}

/// Panel block: as Q4_K, with 8 vectors of high bits before the nibbles: bit `j` of a byte belongs to sub-block `j`.
#[allow(non_camel_case_types)]
pub(crate) struct Q5_K;

impl Layout for Q5_K {
    const BLOCK: usize = 256;
    const BYTES: usize = 176;
}

impl Packed for Q5_K {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        gather::<2>(rows, at + 2, &mut panel[32..64]);
        transpose::<12>(rows, at + 4, &mut panel[64..256]);
        interleave::<8, 1>(rows, at + 16, &mut panel[256..768]);
        interleave::<32, 1>(rows, at + 48, &mut panel[768..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q5_K {
    const BITS: u32 = 5;
    const OFFSET: u32 = 0;
    const MIN: bool = true;
    const SPAN: usize = 2;
    type Plain = Plain<5, 0, true, false>;
    type Head<S: Simd> = (S::F, S::F);
    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8], h: usize) -> (S::F, S::F) {
        d_and_dmin(s, block, h)
    }
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, head: (S::F, S::F), j: usize) -> Sub<S> {
        let (scale, min) = scale_and_min(s, &block[64..], h, head, j);
        Sub { min, ..Sub::new(s, sub_words::<Self, S>(s, block, h, j), scale) }
    }
    #[inline(always)]
    fn words<S: Simd>(s: S, block: &[u8], h: usize, g: usize, i: usize) -> [S::V; 4] {
        let (mask, fifth) = (s.v_splat(0x0f0f_0f0f), s.v_splat(0x1010_1010));
        let at = 64 * i + 4 * S::LANES * h;
        let (high, v) = (s.v_load(&block[256 + at..]), s.v_load(&block[768 + 512 * g + at..]));
        let mut w = [s.v_and(v, mask), s.v_and(s.v_shr(v, 4), mask), mask, mask];
        for (k, w) in w.iter_mut().take(2).enumerate() {
            let j = 2 * g as u32 + k as u32;
            let bits = if j < 4 { s.v_shl(high, 4 - j) } else { s.v_shr(high, j - 4) };
            *w = s.v_and_or(bits, fifth, *w);
        }
        w
    }
}

/// Panel block: 16 half-precision scales, 16 vectors of 16 signed scale bytes (one each 16 columns), then for each half of
/// 128 columns eight threes of vectors: nibbles of columns 4i…, bit pairs, nibbles of columns 32 + 4i…. Of a half's four
/// sub-blocks, 0 and 1 are low nibbles, 2 and 3 the high ones, and sub-block `j` has bits `2j` of the pairs.
///
/// Threes, because the products then read memory in order: with nibbles and pairs apart, the processor's prefetchers lost
/// the thread, and a core took in 8 GB/s of 28.
#[allow(non_camel_case_types)]
pub(crate) struct Q6_K;

impl Layout for Q6_K {
    const BLOCK: usize = 256;
    const BYTES: usize = 210;
}

impl Packed for Q6_K {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at + 208, &mut panel[..32]);
        transpose::<16>(rows, at + 192, &mut panel[32..288]);
        for (g, half) in panel[288..].chunks_exact_mut(8 * 192).enumerate() {
            interleave::<8, 3>(rows, at + 64 * g, half);
            interleave::<8, 3>(rows, at + 128 + 32 * g, &mut half[64..]);
            interleave::<8, 3>(rows, at + 64 * g + 32, &mut half[128..]);
        }
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q6_K {
    const BITS: u32 = 6;
    const OFFSET: u32 = 32;
    const HALVES: bool = true;
    const SPAN: usize = 4;
    type Plain = Plain<6, 32, false, true>;
    type Head<S: Simd> = S::F;
    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8], h: usize) -> S::F {
        halves(s, block, h)
    }
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, d: S::F, j: usize) -> Sub<S> {
        // 11 bits times 8 bits: exact.
        let codes = &block[32 + 32 * j..];
        let scale = s.f_mul(d, s.v_to_f(s.v_load_i8(&codes[S::LANES * h..])));
        let scale_high = s.f_mul(d, s.v_to_f(s.v_load_i8(&codes[16 + S::LANES * h..])));
        Sub { scale_high, ..Sub::new(s, sub_words::<Self, S>(s, block, h, j), scale) }
    }
    #[inline(always)]
    fn words<S: Simd>(s: S, block: &[u8], h: usize, g: usize, i: usize) -> [S::V; 4] {
        let (mask, pair) = (s.v_splat(0x0f0f_0f0f), s.v_splat(0x3030_3030));
        let three = &block[288 + 1536 * g + 192 * i + 4 * S::LANES * h..];
        let (even, bits, odd) = (s.v_load(three), s.v_load(&three[64..]), s.v_load(&three[128..]));
        [
            s.v_and_or(s.v_shl(bits, 4), pair, s.v_and(even, mask)),
            s.v_and_or(s.v_shl(bits, 2), pair, s.v_and(odd, mask)),
            s.v_and_or(bits, pair, s.v_and(s.v_shr(even, 4), mask)),
            s.v_and_or(s.v_shr(bits, 2), pair, s.v_and(s.v_shr(odd, 4), mask)),
        ]
    }
}
