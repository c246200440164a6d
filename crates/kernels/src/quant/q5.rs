//! Q5_0 and Q5_1: 32 five-bit values with a scale, and a minimum in Q5_1.
//!
//! Panel block: as Q4_0 and Q4_1, with one vector of high bits before the nibbles: bit `j` of byte `i` of a row's word
//! is the fifth bit of column `4j + i`, so that one shift brings the bits of vector `j` into place.

use super::{Layout, Packed, Plain, Quant, Sub, gather, halves, interleave, nibbles, unpack_quant_row};
use crate::PANEL_ROWS;
use crate::simd::Simd;

/// Bit `4j + i` of the file's word to bit `8i + j`.
fn spread(qh: u32) -> u32 {
    // Two exchanges transpose the 8 × 4 bit matrix.
    let mut out = 0;
    for i in 0..4 {
        let mut bits = qh >> i & 0x1111_1111;
        bits = (bits | bits >> 3) & 0x0303_0303;
        bits = (bits | bits >> 6) & 0x000f_000f;
        bits = (bits | bits >> 12) & 0xff;
        out |= bits << (8 * i);
    }
    out
}

fn pack_high(rows: &[&[u8]; PANEL_ROWS], from: usize, to: &mut [u8]) {
    for (row, to) in rows.iter().zip(to.chunks_exact_mut(4)) {
        let word = u32::from_le_bytes([row[from], row[from + 1], row[from + 2], row[from + 3]]);
        to.copy_from_slice(&spread(word).to_le_bytes());
    }
}

/// Five-bit values from the high-bit vector at `q` and the nibbles behind it.
#[inline(always)]
fn five_bits<S: Simd>(s: S, q: &[u8], h: usize) -> [S::V; 8] {
    let high = s.v_load(&q[4 * S::LANES * h..]);
    let mut w = nibbles(s, &q[64..], h);
    let mask = s.v_splat(0x1010_1010);
    for (j, w) in w.iter_mut().enumerate() {
        let high = if j < 4 { s.v_shl(high, 4 - j as u32) } else { s.v_shr(high, j as u32 - 4) };
        *w = s.v_and_or(high, mask, *w);
    }
    w
}

#[allow(non_camel_case_types)]
pub(crate) struct Q5_0;

impl Layout for Q5_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 22;
}

impl Packed for Q5_0 {
    fn pack(rows: &[&[u8]; PANEL_ROWS], panel: &mut [u8]) {
        gather::<2>(rows, 0, &mut panel[..32]);
        pack_high(rows, 2, &mut panel[32..96]);
        interleave::<4>(rows, 6, &mut panel[96..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q5_0 {
    const BITS: u32 = 5;
    const OFFSET: u32 = 16;
    type Plain = Plain<5, 16, false, false>;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        Sub::new(s, five_bits(s, &block[32..], h), halves(s, block, h))
    }
}

#[allow(non_camel_case_types)]
pub(crate) struct Q5_1;

impl Layout for Q5_1 {
    const BLOCK: usize = 32;
    const BYTES: usize = 24;
}

impl Packed for Q5_1 {
    fn pack(rows: &[&[u8]; PANEL_ROWS], panel: &mut [u8]) {
        gather::<2>(rows, 0, &mut panel[..32]);
        gather::<2>(rows, 2, &mut panel[32..64]);
        pack_high(rows, 4, &mut panel[64..128]);
        interleave::<4>(rows, 8, &mut panel[128..]);
    }
    #[inline(always)]
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
        unpack_quant_row::<Self, S>(s, block, lane, out);
    }
}

impl Quant for Q5_1 {
    const BITS: u32 = 5;
    const OFFSET: u32 = 0;
    const MIN: bool = true;
    type Plain = Plain<5, 0, true, false>;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        let w = five_bits(s, &block[64..], h);
        Sub { min: halves(s, &block[32..], h), ..Sub::new(s, w, halves(s, block, h)) }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn spread_moves_bit_4j_plus_i_to_8i_plus_j() {
        for i in 0..4 {
            for j in 0..8 {
                assert_eq!(super::spread(1 << (4 * j + i)), 1 << (8 * i + j));
            }
        }
    }
}
