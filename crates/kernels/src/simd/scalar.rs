//! Plain Rust: the definition of every operation.

use super::Simd;
use crate::math::{bf16_to_f32, f16_to_f32, f32_to_f16};

/// Plain Rust, 16 lanes.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

const N: usize = 16;

#[inline(always)]
fn map(mut f: impl FnMut(usize) -> f32) -> [f32; N] {
    let mut out = [0.0; N];
    for (i, o) in out.iter_mut().enumerate() {
        *o = f(i);
    }
    out
}

#[inline(always)]
fn map_words(mut f: impl FnMut(usize) -> u32) -> [u32; N] {
    let mut out = [0; N];
    for (i, o) in out.iter_mut().enumerate() {
        *o = f(i);
    }
    out
}

impl Simd for Scalar {
    const LANES: usize = N;
    const GROUP_MAX: usize = 4;
    const DOT_WORDS: usize = 4;
    type F = [f32; N];
    type V = [u32; N];

    fn f_splat(self, x: f32) -> Self::F {
        [x; N]
    }
    fn f_load(self, from: &[f32]) -> Self::F {
        map(|i| from[i])
    }
    fn f_store(self, x: Self::F, to: &mut [f32]) {
        to[..N].copy_from_slice(&x);
    }
    fn f_load_f16(self, from: &[u8]) -> Self::F {
        map(|i| f16_to_f32(u16::from_le_bytes([from[2 * i], from[2 * i + 1]])))
    }
    fn f_load_half(self, from: &[u16]) -> Self::F {
        map(|i| f16_to_f32(from[i]))
    }
    fn f_store_half(self, x: Self::F, to: &mut [u16]) {
        for (o, x) in to[..N].iter_mut().zip(x) {
            *o = f32_to_f16(x);
        }
    }
    fn f_load_bf16(self, from: &[u8]) -> Self::F {
        map(|i| bf16_to_f32(u16::from_le_bytes([from[2 * i], from[2 * i + 1]])))
    }
    fn f_add(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| a[i] + b[i])
    }
    fn f_sub(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| a[i] - b[i])
    }
    fn f_mul(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| a[i] * b[i])
    }
    fn f_div(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| a[i] / b[i])
    }
    fn f_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        map(|i| a[i].mul_add(b[i], c[i]))
    }
    fn f_max(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    fn f_min(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    fn f_abs(self, x: Self::F) -> Self::F {
        map(|i| x[i].abs())
    }
    fn f_round(self, x: Self::F) -> Self::F {
        map(|i| x[i].round_ties_even())
    }
    fn f_keep(self, x: Self::F, from: usize, to: usize, fill: f32) -> Self::F {
        map(|i| if i >= from && i < to { x[i] } else { fill })
    }
    fn f_reduce_max(self, x: Self::F) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    fn f_reduce_add(self, x: Self::F) -> f32 {
        x.into_iter().sum()
    }
    fn f_store_i8(self, x: Self::F, to: &mut [i8]) {
        for (o, x) in to[..N].iter_mut().zip(x) {
            *o = x.round_ties_even() as i8;
        }
    }
    fn f_to_v(self, x: Self::F) -> Self::V {
        map_words(|i| x[i].round_ties_even() as i32 as u32)
    }

    fn v_splat(self, x: i32) -> Self::V {
        [x as u32; N]
    }
    fn v_load(self, from: &[u8]) -> Self::V {
        let (words, _) = from[..4 * N].as_chunks::<4>();
        map_words(|i| u32::from_le_bytes(words[i]))
    }
    fn v_store(self, x: Self::V, to: &mut [u8]) {
        let (words, _) = to[..4 * N].as_chunks_mut::<4>();
        for (word, x) in words.iter_mut().zip(x) {
            *word = x.to_le_bytes();
        }
    }
    fn v_load_u8(self, from: &[u8]) -> Self::V {
        map_words(|i| from[i].into())
    }
    fn v_load_i8(self, from: &[u8]) -> Self::V {
        map_words(|i| from[i] as i8 as u32)
    }
    fn v_add(self, a: Self::V, b: Self::V) -> Self::V {
        map_words(|i| a[i].wrapping_add(b[i]))
    }
    fn v_and(self, a: Self::V, b: Self::V) -> Self::V {
        map_words(|i| a[i] & b[i])
    }
    fn v_or(self, a: Self::V, b: Self::V) -> Self::V {
        map_words(|i| a[i] | b[i])
    }
    fn v_and_or(self, a: Self::V, mask: Self::V, b: Self::V) -> Self::V {
        map_words(|i| (a[i] & mask[i]) | b[i])
    }
    fn v_shr(self, x: Self::V, bits: u32) -> Self::V {
        map_words(|i| x[i] >> bits)
    }
    fn v_shl(self, x: Self::V, bits: u32) -> Self::V {
        map_words(|i| x[i] << bits)
    }
    fn v_lookup(self, table: &[u8; 16], index: Self::V) -> Self::V {
        map_words(|i| u32::from_le_bytes(index[i].to_le_bytes().map(|b| table[usize::from(b & 15)])))
    }
    fn v_to_f(self, x: Self::V) -> Self::F {
        map(|i| x[i] as i32 as f32)
    }
    fn v_as_f(self, x: Self::V) -> Self::F {
        map(|i| f32::from_bits(x[i]))
    }
    fn f_as_v(self, x: Self::F) -> Self::V {
        map_words(|i| x[i].to_bits())
    }

    #[inline(always)]
    fn dot<const G: usize>(
        self,
        acc: Self::V,
        w: &[Self::V; 8],
        range: std::ops::Range<usize>,
        x: &[[u32; G]],
        t: usize,
        _bits: u32,
    ) -> Self::V {
        let mut acc = acc;
        for i in range {
            let [x0, x1, x2, x3] = x[i][t].to_le_bytes().map(|b| i32::from(b as i8));
            for (acc, w) in acc.iter_mut().zip(&w[i]) {
                let (w0, w1) = ((w & 255) as i32, (w >> 8 & 255) as i32);
                let (w2, w3) = ((w >> 16 & 255) as i32, (w >> 24) as i32);
                *acc = acc.wrapping_add((w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3) as u32);
            }
        }
        acc
    }

    fn prefetch(self, _base: &[u8], _offset: usize) {}
}
