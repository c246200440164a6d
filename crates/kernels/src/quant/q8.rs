//! Q8_0: 32 signed bytes with a scale.
//!
//! Panel block: 16 half-precision scales, then 8 vectors of bytes offset by 128 (vpdpbusd takes unsigned weights).

use super::pack::{gather, interleave};
use super::{Layout, Packed, Plain, Quant, Rows, Sub, halves, unpack_quant_row};
use crate::simd::Simd;

#[allow(non_camel_case_types)]
pub(crate) struct Q8_0;

impl Layout for Q8_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 34;
}

impl Packed for Q8_0 {
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        interleave::<8, 1>(rows, at + 2, &mut panel[32..]);
        for byte in &mut panel[32..] {
            *byte ^= 0x80;
        }
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q8_0 {
    const BITS: u32 = 8;
    const OFFSET: u32 = 128;
    type Plain = Plain<8, 128, false, false>;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        let mut w = [s.v_splat(0); 8];
        for (i, w) in w.iter_mut().enumerate() {
            *w = s.v_load(&block[32 + 64 * i + 4 * S::LANES * h..]);
        }
        Sub::new(s, w, halves(s, block, h))
    }
}
