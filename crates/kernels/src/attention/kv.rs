//! How keys and values lie in a KV block, by type.
//!
//! F16: keys `[head_len][16 positions]`, values `[16 positions][head_len]`.
//! Q8_0 and Q4_0 keys are a panel of weights whose 16 rows are the positions (of Q8_0 and of IQ4_NL); queries are quantized
//! as activations are. Q8_0 and Q4_0 values, for each 32 values of the head: 16 half-precision scales, one a position, then
//! 16 rows of 32 bytes (Q8_0) or of 16 bytes (Q4_0: value i in the low nibble of byte i, value 16 + i in the high one).
//! Both are rotated first, by a Hadamard transform (its own inverse) that spreads outliers over the head and makes values
//! nearly normal: so the levels of Q4_0 are the unequal ones of IQ4_NL, which have a sixth less error than equal steps.

use super::rounding::Rounding;
use super::{HEAD_LEN_MAX, KV_BLOCK};
use crate::math::{f16_to_f32, f32_to_f16, sum16};
use crate::ops::hadamard;
use crate::quant::IQ4_NL_VALUES;
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

/// The level of 4 bits next to each whole number from -128 on.
pub(super) const NEAREST: [u8; 256] = {
    let mut nearest = [0; 256];
    let mut level = 0;
    let mut i = 0;
    while i < 256 {
        // Levels ascend, and so do those next to ascending numbers.
        while level < 15 && IQ4_NL_VALUES[level + 1].abs_diff(i as u8) < IQ4_NL_VALUES[level].abs_diff(i as u8) {
            level += 1;
        }
        nearest[i] = level as u8;
        i += 1;
    }
    nearest
};

/// What the value of largest magnitude may become; the best is taken. More of them gain little.
const EXTREMES: [f32; 6] = [-127.0, -107.0, -147.0, 113.0, 133.0, 153.0];

/// 32 values to codes of a type and their scale in half precision.
#[inline(always)]
fn quantize<S: Simd>(s: S, ty: KvType, x: &[f32]) -> ([u8; 32], u16) {
    let (mut high, mut low) = (s.f_splat(0.0), s.f_splat(0.0));
    for at in (0..32).step_by(S::LANES) {
        let x = s.f_load(&x[at..]);
        high = s.f_max(x, high);
        low = s.f_max(s.f_sub(s.f_splat(0.0), x), low);
    }
    let (high, low) = (s.f_reduce_max(high), s.f_reduce_max(low));
    if ty == KvType::Q4_0 {
        return levels(s, x, if high >= low { high } else { -low });
    }
    let scale = f32_to_f16(high.max(low) / 127.0);
    let rounded = f16_to_f32(scale);
    let codes = whole_numbers(s, x, if rounded > 0.0 { 1.0 / rounded } else { 0.0 });
    (codes, scale)
}

/// 32 values times a factor, rounded, at most ±127.
#[inline(always)]
fn whole_numbers<S: Simd>(s: S, x: &[f32], factor: f32) -> [u8; 32] {
    let mut out = [0; 32];
    for at in (0..32).step_by(S::LANES) {
        let q = s.f_mul(s.f_load(&x[at..]), s.f_splat(factor));
        // A scale in half precision may have been rounded down.
        let q = s.f_min(s.f_max(q, s.f_splat(-127.0)), s.f_splat(127.0));
        s.f_store_i8(q, &mut out[at..]);
    }
    out.map(|q| q as u8)
}

/// 32 values to levels of 4 bits, with the scale that leaves the least squares; `extreme` has the largest magnitude.
#[inline(always)]
fn levels<S: Simd>(s: S, x: &[f32], extreme: f32) -> ([u8; 32], u16) {
    let (mut best, mut codes, mut scale) = (0.0, [0; 32], 0.0);
    for level in EXTREMES {
        let tried = whole_numbers(s, x, if extreme == 0.0 { 0.0 } else { level / extreme });
        let tried = tried.map(|q| NEAREST[usize::from(q ^ 0x80)]);
        let values = tried.map(|code| IQ4_NL_VALUES[usize::from(code)] ^ 0x80);
        let mut products = [0.0; 16];
        for at in (0..16).step_by(S::LANES) {
            let value = |at| s.v_to_f(s.v_load_i8(&values[at..]));
            let first = s.f_mul(s.f_load(&x[at..]), value(at));
            s.f_store(s.f_fma(s.f_load(&x[16 + at..]), value(16 + at), first), &mut products[at..]);
        }
        let product = sum16(&products);
        let square: i32 = values.iter().map(|&v| i32::from(v as i8) * i32::from(v as i8)).sum();
        // Σ (x - d v)² is least for d = Σ x v / Σ v², and the smaller the larger this is.
        let gain = product * product / square as f32;
        if gain > best {
            (best, codes, scale) = (gain, tried, product / square as f32);
        }
    }
    (codes, f32_to_f16(scale))
}

/// Writes the key of position `slot`, rounded by `rounding` if it has 4 bits.
#[inline(always)]
pub(super) fn write_key<S: Simd>(
    s: S,
    ty: KvType,
    keys: &mut [u8],
    slot: usize,
    key: &[f32],
    mut rounding: Option<Rounding<'_>>,
) {
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
    for (i, (block, x)) in keys.chunks_exact_mut(KV_BLOCK * ty.bytes(32)).zip(key.chunks_exact(32)).enumerate() {
        let (mut q, scale) = quantize(s, ty, x);
        if let Some(rounding) = &mut rounding {
            q = rounding.levels(32 * i, x, f16_to_f32(scale));
        }
        block[2 * slot..2 * slot + 2].copy_from_slice(&scale.to_le_bytes());
        let words = block[32..].chunks_exact_mut(4 * KV_BLOCK);
        for (i, vector) in words.enumerate() {
            for (j, byte) in vector[4 * slot..4 * slot + 4].iter_mut().enumerate() {
                *byte = match ty {
                    KvType::Q4_0 => q[4 * i + j] | q[16 + 4 * i + j] << 4,
                    _ => q[4 * i + j] ^ 0x80,
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
                *byte = q[i] | q[16 + i] << 4;
            }
        } else {
            block[32 + 32 * slot..][..32].copy_from_slice(&q);
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

/// The levels of codes in 32-bit lanes.
#[inline(always)]
fn level<S: Simd>(s: S, code: S::V) -> S::F {
    let value = s.v_and(s.v_lookup(&IQ4_NL_VALUES, code), s.v_splat(255));
    s.v_to_f(s.v_add(value, s.v_splat(-128)))
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
        let code = s.v_and(if at % 32 < 16 { both } else { s.v_shr(both, 4) }, s.v_splat(15));
        level(s, code)
    }
    #[inline(always)]
    fn column<S: Simd>(s: S, keys: &[u8], at: usize, h: usize) -> S::F {
        let words = s.v_load(&keys[at / 32 * KV_BLOCK * 18 + 32 + at % 16 / 4 * 4 * KV_BLOCK + 4 * S::LANES * h..]);
        let code = s.v_and(s.v_shr(words, (8 * (at % 4) + 4 * (at % 32 / 16)) as u32), s.v_splat(15));
        level(s, code)
    }
}
