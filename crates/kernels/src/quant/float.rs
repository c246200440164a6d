//! F32, F16 and BF16: activations stay floats.
//!
//! Panel block: one column of 16 rows.

use super::{Layout, Packed, Rows};
use crate::math::{bf16_to_f32, f16_to_f32};
use crate::simd::Simd;

/// A format whose weights are used as floats.
pub(crate) trait FloatRow: Packed {
    /// Lanes `h * LANES ..` of a column.
    fn load<S: Simd>(s: S, column: &[u8], h: usize) -> S::F;
}

/// Few enough to stay in the first-level cache while row after row adds to them.
const COLUMNS_AT_ONCE: usize = 64;

macro_rules! float_format {
    ($name:ident, $bytes:literal, |$b:ident| $value:expr, |$s:ident, $c:ident| $load:expr) => {
        pub(crate) struct $name;

        impl Layout for $name {
            const BLOCK: usize = 1;
            const BYTES: usize = $bytes;
        }

        impl Packed for $name {
            const AT_ONCE: usize = COLUMNS_AT_ONCE;
            fn pack(rows: &Rows, at: usize, panel: &mut [u8]) {
                super::pack::columns::<$bytes>(rows, at, panel);
            }
            #[inline(always)]
            fn unpack_row<S: Simd>(_: S, block: &[u8], lane: usize, out: &mut [f32]) {
                let mut $b = [0; $bytes];
                $b.copy_from_slice(&block[lane * $bytes..][..$bytes]);
                out[0] = $value;
            }
        }

        impl FloatRow for $name {
            #[inline(always)]
            fn load<S: Simd>($s: S, column: &[u8], h: usize) -> S::F {
                let $c = &column[$bytes * S::LANES * h..];
                $load
            }
        }
    };
}

float_format!(F32, 4, |b| f32::from_le_bytes(b), |s, c| s.v_as_f(s.v_load(c)));
float_format!(F16, 2, |b| f16_to_f32(u16::from_le_bytes(b)), |s, c| s.f_load_f16(c));
float_format!(Bf16, 2, |b| bf16_to_f32(u16::from_le_bytes(b)), |s, c| s.f_load_bf16(c));
