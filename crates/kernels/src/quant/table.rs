//! IQ4_NL, IQ4_XS and MXFP4: four-bit indices into a table of signed values, with a scale.
//!
//! Panel block: 16 scales (half precision; one exponent byte in MXFP4), then 4 vectors of nibbles as in Q4_0. The table
//! is offset by 128, as the bytes of Q8_0 are.

use super::pack::{gather, interleave, transpose};
use super::{Layout, Packed, Plain, Quant, Rows, Sub, halves, nibbles, unpack_quant_row};
use crate::simd::Simd;

const fn offset(values: [i8; 16]) -> [u8; 16] {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = (values[i] as u8) ^ 0x80;
        i += 1;
    }
    out
}

/// Source: `kvalues_iq4nl`.
pub(crate) const IQ4_NL_VALUES: [u8; 16] =
    offset([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]);
/// E2M1 values doubled; the scale is halved. Source: OCP Microscaling formats 1.0.
const MXFP4_VALUES: [u8; 16] = offset([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);

/// Table values of 32 columns.
#[inline(always)]
fn look_up<S: Simd>(s: S, table: &[u8; 16], q: &[u8], h: usize) -> [S::V; 8] {
    let mut w = nibbles(s, q, h);
    for w in &mut w {
        *w = s.v_lookup(table, *w);
    }
    w
}

#[allow(non_camel_case_types)]
pub(crate) struct IQ4_NL;

impl Layout for IQ4_NL {
    const BLOCK: usize = 32;
    const BYTES: usize = 18;
}

impl Packed for IQ4_NL {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        interleave::<4, 1>(rows, at + 2, &mut panel[32..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for IQ4_NL {
    const BITS: u32 = 8;
    const OFFSET: u32 = 128;
    type Plain = Plain<8, 128, false, false>;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        Sub::new(s, look_up(s, &IQ4_NL_VALUES, &block[32..], h), halves(s, block, h))
    }
}

/// IQ4_XS: super-blocks of 256 with a six-bit scale (offset by 32) for each 32 columns.
///
/// Panel block: 16 half-precision scales, two vectors of 16 bytes with the top two bits of the codes, four with their low
/// four bits (two codes a byte), then 4 vectors of nibbles for each 32 columns.
#[allow(non_camel_case_types)]
pub(crate) struct IQ4_XS;

impl Layout for IQ4_XS {
    const BLOCK: usize = 256;
    const BYTES: usize = 136;
}

impl Packed for IQ4_XS {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        transpose::<6>(rows, at + 2, &mut panel[32..128]);
        interleave::<32, 1>(rows, at + 8, &mut panel[128..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for IQ4_XS {
    const BITS: u32 = 8;
    const OFFSET: u32 = 128;
    type Plain = Plain<8, 128, false, false>;
    type Head<S: Simd> = S::F;
    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8], h: usize) -> S::F {
        halves(s, block, h)
    }
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, d: S::F, j: usize) -> Sub<S> {
        let high = s.v_load_u8(&block[32 + 16 * (j / 4) + S::LANES * h..]);
        let low = s.v_load_u8(&block[64 + 16 * (j / 2) + S::LANES * h..]);
        let low = s.v_and(s.v_shr(low, 4 * (j as u32 % 2)), s.v_splat(15));
        let top = s.v_shl(s.v_shr(high, 2 * (j as u32 % 4)), 4);
        let code = s.v_add(s.v_and_or(top, s.v_splat(0x30), low), s.v_splat(-32));
        // 11 bits times 6 bits: exact.
        let scale = s.f_mul(d, s.v_to_f(code));
        Sub::new(s, look_up(s, &IQ4_NL_VALUES, &block[128 + 256 * j..], h), scale)
    }
}

pub(crate) struct MXFP4;

impl Layout for MXFP4 {
    const BLOCK: usize = 32;
    const BYTES: usize = 17;
}

impl Packed for MXFP4 {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<1>(rows, at, &mut panel[..16]);
        interleave::<4, 1>(rows, at + 1, &mut panel[16..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for MXFP4 {
    const BITS: u32 = 8;
    const OFFSET: u32 = 128;
    type Plain = Plain<8, 128, false, false>;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        // The exponent byte e means 2^(e - 127), halved for the doubled table: 2^(e - 128). Its float has exponent field
        // e - 1; building 2^(e - 64) and multiplying by 2^-64 covers e = 0 and 1 too, where the result is subnormal.
        let e = s.v_load_u8(&block[S::LANES * h..]);
        let field = s.v_add(e, s.v_splat(63));
        // Fields of 255 and more would be infinite: 2^(191 - 64) and up never occur in a model, and saturate.
        let large = s.v_as_f(s.v_shl(field, 23));
        let scale = s.f_mul(large, s.f_splat(f32::from_bits(63 << 23)));
        Sub::new(s, look_up(s, &MXFP4_VALUES, &block[16..], h), scale)
    }
}
