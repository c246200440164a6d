//! Number formats, and functions that give the same bits on every instruction set.

use crate::simd::Simd;

/// IEEE half to single precision, exactly.
pub fn f16_to_f32(h: u16) -> f32 {
    let sign = u32::from(h & 0x8000) << 16;
    let magnitude = u32::from(h & 0x7fff);
    let bits = match magnitude >> 10 {
        0 => return f32::from_bits(sign | (magnitude as f32 * f32::from_bits(0x3380_0000)).to_bits()), // · 2^-24
        31 => 0x7f80_0000 | (magnitude & 0x3ff) << 13 | if magnitude > 0x7c00 { 0x40_0000 } else { 0 },
        _ => (magnitude << 13) + (112 << 23),
    };
    f32::from_bits(sign | bits)
}

/// Single to half precision, rounded to nearest even.
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | (magnitude >> 13 & 0x3ff) as u16;
    }
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00; // 65536 and above, infinity
    }
    if magnitude < 0x3880_0000 {
        // Below 2^-14: adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded to nearest even.
        let rounded = (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits();
        return sign | rounded as u16;
    }
    let odd = magnitude >> 13 & 1;
    let rounded = magnitude - (112 << 23) + 0xfff + odd;
    sign | (rounded >> 13) as u16
}

/// bfloat16 to single precision, exactly.
pub fn bf16_to_f32(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

/// e^x with `x` clamped to -87.3 … 88 (so never 0 and never infinite). Relative error below 2 units in the last place.
///
/// Range reduction by x = n·ln 2 + r with ln 2 in two parts, then the Taylor polynomial of degree 7 for |r| ≤ ln 2 / 2.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let c = |v: f32| s.f_splat(v);
    // The constant comes second, so that a NaN becomes a number instead of an arbitrary integer below.
    let clamped = s.f_max(s.f_min(x, c(88.0)), c(-87.3));
    let n = s.f_round(s.f_mul(clamped, c(std::f32::consts::LOG2_E)));
    let r = s.f_fma(n, c(-0.693_359_4), clamped);
    let r = s.f_fma(n, c(2.121_944_4e-4), r);
    let mut p = c(1.0 / 5040.0);
    for k in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.f_fma(p, r, c(k));
    }
    let two_to_n = s.v_as_f(s.v_shl(s.v_add(s.f_to_v(n), s.v_splat(127)), 23));
    s.f_mul(p, two_to_n)
}

/// tanh by e^2x, clamped where it is 1 to single precision.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let clamped = s.f_max(s.f_min(x, s.f_splat(10.0)), s.f_splat(-10.0));
    let e = exp(s, s.f_add(clamped, clamped));
    let one = s.f_splat(1.0);
    s.f_div(s.f_sub(e, one), s.f_add(e, one))
}

/// Sum of 16 lanes as a balanced tree: the one order that every reduction uses.
#[inline(always)]
pub fn sum16(x: &[f32; 16]) -> f32 {
    let mut a = *x;
    let mut n = 8;
    while n > 0 {
        for i in 0..n {
            a[i] += a[i + n];
        }
        n /= 2;
    }
    a[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Scalar;

    #[test]
    fn every_half_survives_the_round_trip() {
        for h in 0..=u16::MAX {
            let x = f16_to_f32(h);
            if x.is_nan() {
                assert!(f16_to_f32(f32_to_f16(x)).is_nan());
            } else {
                assert_eq!(f32_to_f16(x), h, "{h:04x} is {x}");
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_even() {
        assert_eq!(f32_to_f16(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(f32_to_f16(1.0 + 3.0 / 2048.0), 0x3c02);
        assert_eq!(f32_to_f16(65519.0), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(f32::from_bits(0x3300_0000)), 0); // 2^-25 is halfway to the smallest
        assert_eq!(f32_to_f16(f32::from_bits(0x3300_0001)), 1);
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let got = f64::from(exp(Scalar, [x; 16])[3]);
            let want = f64::from(x).exp();
            worst = worst.max((got - want).abs() / want);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        for x in [f32::NEG_INFINITY, -1e30, -88.0] {
            let got = exp(Scalar, [x; 16])[0];
            assert!(got > 0.0 && got < 1.3e-38, "{got:e}");
        }
    }
}
