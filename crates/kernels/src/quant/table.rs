//! IQ4_NL and MXFP4: 32 four-bit indices into a table of signed values, with a scale.
//!
//! Panel block: 16 scales (half precision; one exponent byte in MXFP4), then 4 vectors of nibbles as in Q4_0. The table
//! is offset by 128, as the bytes of Q8_0 are.

use super::{Packed, Quant, Sub, gather, halves, interleave, nibbles, unpack_quant_row};
use crate::PANEL_ROWS;
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
pub(super) const IQ4_NL_VALUES: [u8; 16] = offset([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]);
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

impl Packed for IQ4_NL {
    const BLOCK: usize = 32;
    const BYTES: usize = 18;
    fn pack(rows: &[&[u8]; PANEL_ROWS], panel: &mut [u8]) {
        gather::<2>(rows, 0, &mut panel[..32]);
        interleave(rows, 2, &mut panel[32..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for IQ4_NL {
    const BITS: u32 = 8;
    const OFFSET: u32 = 128;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        let zero = s.f_splat(0.0);
        Sub { w: look_up(s, &IQ4_NL_VALUES, &block[32..], h), scale: halves(s, block, h), scale_high: zero, min: zero }
    }
}

pub(crate) struct MXFP4;

impl Packed for MXFP4 {
    const BLOCK: usize = 32;
    const BYTES: usize = 17;
    fn pack(rows: &[&[u8]; PANEL_ROWS], panel: &mut [u8]) {
        gather::<1>(rows, 0, &mut panel[..16]);
        interleave(rows, 1, &mut panel[16..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for MXFP4 {
    const BITS: u32 = 8;
    const OFFSET: u32 = 128;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        let zero = s.f_splat(0.0);
        // The exponent byte e means 2^(e - 127), halved for the doubled table: 2^(e - 128). Its float has exponent field
        // e - 1; building 2^(e - 64) and multiplying by 2^-64 covers e = 0 and 1 too, where the result is subnormal.
        let e = s.v_load_u8(&block[S::LANES * h..]);
        let field = s.v_add(e, s.v_splat(63));
        // Fields of 255 and more would be infinite: 2^(191 - 64) and up never occur in a model, and saturate.
        let large = s.v_as_f(s.v_shl(field, 23));
        let scale = s.f_mul(large, s.f_splat(f32::from_bits(63 << 23)));
        Sub { w: look_up(s, &MXFP4_VALUES, &block[16..], h), scale, scale_high: zero, min: zero }
    }
}
