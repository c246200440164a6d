//! Q4_0 and Q4_1: 32 four-bit values with a scale, and a minimum in Q4_1.
//!
//! Panel block of Q4_0: 16 half-precision scales, then 4 vectors of nibbles (low: columns 4i…, high: columns 16+4i…).
//! Q4_1 has 16 half-precision minima after the scales.

use super::pack::{gather, interleave};
use super::{Layout, Packed, Plain, Quant, Rows, Sub, halves, nibbles, unpack_quant_row};
use crate::simd::Simd;

#[allow(non_camel_case_types)]
pub(crate) struct Q4_0;

impl Layout for Q4_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 18;
}

impl Packed for Q4_0 {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        interleave::<4, 1>(rows, at + 2, &mut panel[32..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q4_0 {
    const BITS: u32 = 4;
    const OFFSET: u32 = 8;
    type Plain = Plain<4, 8, false, false>;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        Sub::new(s, nibbles(s, &block[32..], h), halves(s, block, h))
    }
}

#[allow(non_camel_case_types)]
pub(crate) struct Q4_1;

impl Layout for Q4_1 {
    const BLOCK: usize = 32;
    const BYTES: usize = 20;
}

impl Packed for Q4_1 {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        gather::<2>(rows, at + 2, &mut panel[32..64]);
        interleave::<4, 1>(rows, at + 4, &mut panel[64..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q4_1 {
    const BITS: u32 = 4;
    const OFFSET: u32 = 0;
    const MIN: bool = true;
    type Plain = Plain<4, 0, true, false>;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        let w = nibbles(s, &block[64..], h);
        Sub { min: halves(s, &block[32..], h), ..Sub::new(s, w, halves(s, block, h)) }
    }
}
