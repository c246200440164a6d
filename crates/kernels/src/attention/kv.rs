//! How keys and values lie in a KV block, by type.
//!
//! F16: keys `[head_len][16 positions]`, values `[16 positions][head_len]`.
//! Q8_0 and Q4_0 keys are a panel of weights whose 16 rows are the positions; queries are quantized as activations are.
//! Q8_0 and Q4_0 values, for each 32 values of the head: 16 half-precision scales, one a position, then 16 rows of 32
//! bytes (Q8_0) or of 16 bytes (Q4_0: value i in the low nibble of byte i, value 16 + i in the high one, offset by 8).
//! Both are rotated first, by a Hadamard transform (its own inverse) that spreads outliers over the head: without it, four
//! bits are not enough for any model, and eight cost Qwen2.5, whose keys have large biases, 4 % of perplexity.

use super::{HEAD_LEN_MAX, KV_BLOCK};
use crate::math::{f16_to_f32, f32_to_f16};
use crate::ops::hadamard;
use crate::simd::Simd;

/// Type of keys or values in the cache.
#[allow(non_camel_case_types, missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvType {
    #[default]
    F16,
    Q8_0,
    Q4_0,
}

impl KvType {
    /// Every type.
    pub const ALL: &[KvType] = &[KvType::F16, KvType::Q8_0, KvType::Q4_0];

    /// Name as the flags spell it.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::Q8_0 => "q8_0",
            KvType::Q4_0 => "q4_0",
        }
    }

    /// The type called `name`.
    pub fn from_name(name: &str) -> Option<KvType> {
        KvType::ALL.iter().copied().find(|ty| ty.name() == name)
    }

    /// Bytes of `head_len` values.
    pub fn bytes(self, head_len: usize) -> usize {
        match self {
            KvType::F16 => 2 * head_len,
            KvType::Q8_0 => head_len / 32 * 34,
            KvType::Q4_0 => head_len / 32 * 18,
        }
    }

    /// Whether heads of `head_len` values can have this type.
    pub fn fits(self, head_len: usize) -> bool {
        self == KvType::F16 || head_len.is_multiple_of(32)
    }

    /// Whether heads are rotated on their way into the cache.
    pub(super) fn is_rotated(self) -> bool {
        self != KvType::F16
    }
}

/// `x` as it goes into the cache. Where it is rotated, its first `first` values are by themselves.
#[inline(always)]
pub(super) fn rotated(ty: KvType, x: &[f32], first: usize) -> [f32; HEAD_LEN_MAX] {
    let mut out = [0.0; HEAD_LEN_MAX];
    out[..x.len()].copy_from_slice(x);
    if ty.is_rotated() {
        rotate(&mut out[..x.len()], first);
    }
    out
}

/// Rotates the first `first` values of `x`, and the others by themselves.
pub(super) fn rotate(x: &mut [f32], first: usize) {
    let (first, rest) = x.split_at_mut(first);
    hadamard(first);
    if !rest.is_empty() {
        hadamard(rest);
    }
}

/// Largest quantized value of a type.
fn steps(ty: KvType) -> f32 {
    if ty == KvType::Q8_0 { 127.0 } else { 7.0 }
}

/// 32 values to whole numbers of at most [`steps`], and their scale in half precision.
#[inline(always)]
fn quantize<S: Simd>(s: S, ty: KvType, x: &[f32]) -> ([i8; 32], u16) {
    let mut largest = s.f_splat(0.0);
    for at in (0..32).step_by(S::LANES) {
        largest = s.f_max(s.f_abs(s.f_load(&x[at..])), largest);
    }
    let scale = f32_to_f16(s.f_reduce_max(largest) / steps(ty));
    let rounded = f16_to_f32(scale);
    let inverse = if rounded > 0.0 { 1.0 / rounded } else { 0.0 };
    let mut out = [0; 32];
    for at in (0..32).step_by(S::LANES) {
        let q = s.f_mul(s.f_load(&x[at..]), s.f_splat(inverse));
        // The scale may have been rounded down.
        let q = s.f_min(s.f_max(q, s.f_splat(-steps(ty))), s.f_splat(steps(ty)));
        s.f_store_i8(q, &mut out[at..]);
    }
    (out, scale)
}

/// Writes the key of position `slot`.
#[inline(always)]
pub(super) fn write_key<S: Simd>(s: S, ty: KvType, keys: &mut [u8], slot: usize, key: &[f32]) {
    if ty == KvType::F16 {
        let mut half = [0; 16];
        for at in (0..key.len()).step_by(S::LANES) {
            s.f_store_half(s.f_load(&key[at..]), &mut half);
            for (i, h) in half[..S::LANES].iter().enumerate() {
                keys[2 * ((at + i) * KV_BLOCK + slot)..][..2].copy_from_slice(&h.to_le_bytes());
            }
        }
        return;
    }
    for (block, x) in keys.chunks_exact_mut(KV_BLOCK * ty.bytes(32)).zip(key.chunks_exact(32)) {
        let (q, scale) = quantize(s, ty, x);
        block[2 * slot..2 * slot + 2].copy_from_slice(&scale.to_le_bytes());
        let words = block[32..].chunks_exact_mut(4 * KV_BLOCK);
        for (i, vector) in words.enumerate() {
            for (j, byte) in vector[4 * slot..4 * slot + 4].iter_mut().enumerate() {
                *byte = match ty {
                    KvType::Q4_0 => (q[4 * i + j] + 8) as u8 | ((q[16 + 4 * i + j] + 8) as u8) << 4,
                    _ => q[4 * i + j] as u8 ^ 0x80,
                };
            }
        }
    }
}

/// Writes the value of position `slot`.
#[inline(always)]
pub(super) fn write_value<S: Simd>(s: S, ty: KvType, values: &mut [u8], slot: usize, value: &[f32]) {
    if ty == KvType::F16 {
        let mut half = [0; 16];
        for at in (0..value.len()).step_by(S::LANES) {
            s.f_store_half(s.f_load(&value[at..]), &mut half);
            let out = &mut values[2 * (slot * value.len() + at)..][..2 * S::LANES];
            for (to, h) in out.chunks_exact_mut(2).zip(&half) {
                to.copy_from_slice(&h.to_le_bytes());
            }
        }
        return;
    }
    for (block, x) in values.chunks_exact_mut(KV_BLOCK * ty.bytes(32)).zip(value.chunks_exact(32)) {
        let (q, scale) = quantize(s, ty, x);
        block[2 * slot..2 * slot + 2].copy_from_slice(&scale.to_le_bytes());
        if ty == KvType::Q4_0 {
            for (i, byte) in block[32 + 16 * slot..][..16].iter_mut().enumerate() {
                *byte = (q[i] + 8) as u8 | ((q[16 + i] + 8) as u8) << 4;
            }
        } else {
            for (byte, q) in block[32 + 32 * slot..][..32].iter_mut().zip(q) {
                *byte = q as u8;
            }
        }
    }
}

/// How values are read.
pub(super) trait Values {
    /// Whether 32 values share a scale.
    const SCALED: bool;
    /// The scales of 16 positions for the values from `at` on.
    fn scales(values: &[u8], at: usize) -> &[u8];
    /// The vector at `at` of position `slot`, without its scale.
    fn load<S: Simd>(s: S, values: &[u8], value_len: usize, slot: usize, at: usize) -> S::F;
    /// Value `at` of keys that values are the beginnings of, without its scale: vector `h` of the 16 positions.
    fn column<S: Simd>(s: S, keys: &[u8], at: usize, h: usize) -> S::F;
}

pub(super) struct F16;
pub(super) struct Q8;
pub(super) struct Q4;

impl Values for F16 {
    const SCALED: bool = false;
    #[inline(always)]
    fn scales(_: &[u8], _: usize) -> &[u8] {
        &[]
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, values: &[u8], value_len: usize, slot: usize, at: usize) -> S::F {
        s.f_load_f16(&values[2 * (slot * value_len + at)..])
    }
    #[inline(always)]
    fn column<S: Simd>(s: S, keys: &[u8], at: usize, h: usize) -> S::F {
        s.f_load_f16(&keys[2 * (at * KV_BLOCK + h * S::LANES)..])
    }
}

impl Values for Q8 {
    const SCALED: bool = true;
    #[inline(always)]
    fn scales(values: &[u8], at: usize) -> &[u8] {
        &values[at / 32 * KV_BLOCK * 34..]
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, values: &[u8], _: usize, slot: usize, at: usize) -> S::F {
        s.v_to_f(s.v_load_i8(&values[at / 32 * KV_BLOCK * 34 + 32 + 32 * slot + at % 32..]))
    }
    #[inline(always)]
    fn column<S: Simd>(s: S, keys: &[u8], at: usize, h: usize) -> S::F {
        let words = s.v_load(&keys[at / 32 * KV_BLOCK * 34 + 32 + at % 32 / 4 * 4 * KV_BLOCK + 4 * S::LANES * h..]);
        let q = s.v_and(s.v_shr(words, 8 * (at % 4) as u32), s.v_splat(255));
        s.v_to_f(s.v_add(q, s.v_splat(-128)))
    }
}

impl Values for Q4 {
    const SCALED: bool = true;
    #[inline(always)]
    fn scales(values: &[u8], at: usize) -> &[u8] {
        &values[at / 32 * KV_BLOCK * 18..]
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, values: &[u8], _: usize, slot: usize, at: usize) -> S::F {
        let both = s.v_load_u8(&values[at / 32 * KV_BLOCK * 18 + 32 + 16 * slot + at % 16..]);
        let q = s.v_and(if at % 32 < 16 { both } else { s.v_shr(both, 4) }, s.v_splat(15));
        s.v_to_f(s.v_add(q, s.v_splat(-8)))
    }
    #[inline(always)]
    fn column<S: Simd>(s: S, keys: &[u8], at: usize, h: usize) -> S::F {
        let words = s.v_load(&keys[at / 32 * KV_BLOCK * 18 + 32 + at % 16 / 4 * 4 * KV_BLOCK + 4 * S::LANES * h..]);
        let q = s.v_and(s.v_shr(words, (8 * (at % 4) + 4 * (at % 32 / 16)) as u32), s.v_splat(15));
        s.v_to_f(s.v_add(q, s.v_splat(-8)))
    }
}
