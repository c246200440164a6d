//! Q5_0 and Q5_1: 32 five-bit values with a scale, and a minimum in Q5_1.
//!
//! Panel block: as Q4_0 and Q4_1, with one vector of high bits before the nibbles: bit `j` of byte `i` of a row's word
//! is the fifth bit of column `4j + i`, so that one shift brings the bits of vector `j` into place.

use super::pack::{gather, interleave};
use super::{Layout, Packed, Plain, Quant, Rows, Sub, halves, nibbles, unpack_quant_row};
use crate::PANEL_ROWS;
use crate::simd::Simd;

/// Bit `4j + i` of the file's word to bit `8i + j`: the bits of an index are rotated by two, which four exchanges of two
/// of them do. In each, the bits at `low` change places with those `shift` above.
fn spread(mut word: u32) -> u32 {
    for (shift, low) in [(14, 0x0000_cccc), (7, 0x00aa_00aa), (2, 0x0c0c_0c0c), (1, 0x2222_2222)] {
        let differ = (word >> shift ^ word) & low;
        word ^= differ ^ differ << shift;
    }
    word
}

#[inline(always)]
fn pack_high(rows: &Rows, from: usize, to: &mut [u8]) {
    let mut words = [[0; 4]; PANEL_ROWS];
    gather::<4>(rows, from, words.as_flattened_mut());
    // Apart from the rest, these are vector instructions.
    for (to, word) in to.as_chunks_mut().0.iter_mut().zip(words) {
        *to = spread(u32::from_le_bytes(word)).to_le_bytes();
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
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        pack_high(rows, at + 2, &mut panel[32..96]);
        interleave::<4, 1>(rows, at + 6, &mut panel[96..]);
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
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
        gather::<2>(rows, at, &mut panel[..32]);
        gather::<2>(rows, at + 2, &mut panel[32..64]);
        pack_high(rows, at + 4, &mut panel[64..128]);
        interleave::<4, 1>(rows, at + 8, &mut panel[128..]);
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
