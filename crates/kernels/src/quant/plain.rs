//! Panels unpacked to the operands of their products.
//!
//! A prompt multiplies each panel by many groups of tokens. Unpacking it once, into a buffer that stays in the first-level
//! cache, takes that work out of the inner loop, and formats that differ only in how they are packed share their products.
//!
//! Block of 32 columns: eight vectors of values, then 16 scales; with `MIN` 16 minima; with `HALVES` first both for the
//! first 16 columns, then both for the last.

use super::{Layout, Quant, Sub};
use crate::PANEL_ROWS;
use crate::simd::{Op, Simd};
use std::marker::PhantomData;

/// Bytes of a vector of the whole panel: four columns, or one float for each row.
const VECTOR_BYTES: usize = 4 * PANEL_ROWS;

/// An unpacked format; the parameters are those of [`Quant`].
pub(crate) struct Plain<const BITS: u32, const OFFSET: u32, const MIN: bool, const HALVES: bool>;

impl<const BITS: u32, const OFFSET: u32, const MIN: bool, const HALVES: bool> Layout
    for Plain<BITS, OFFSET, MIN, HALVES>
{
    const BLOCK: usize = 32;
    const BYTES: usize = (8 + (1 + MIN as usize) * (1 + HALVES as usize)) * VECTOR_BYTES / PANEL_ROWS;
}

impl<const BITS: u32, const OFFSET: u32, const MIN: bool, const HALVES: bool> Quant
    for Plain<BITS, OFFSET, MIN, HALVES>
{
    const BITS: u32 = BITS;
    const OFFSET: u32 = OFFSET;
    const MIN: bool = MIN;
    const HALVES: bool = HALVES;
    type Plain = Self;
    type Head<S: Simd> = ();
    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8], _: usize) {}
    #[inline(always)]
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, (): (), _: usize) -> Sub<S> {
        let mut w = [s.v_splat(0); 8];
        for (i, w) in w.iter_mut().enumerate() {
            *w = s.v_load(&block[VECTOR_BYTES * i + 4 * S::LANES * h..]);
        }
        let float = |i: usize| s.v_as_f(s.v_load(&block[VECTOR_BYTES * (8 + i) + 4 * S::LANES * h..]));
        let mut sub = Sub::new(s, w, float(0));
        match (MIN, HALVES) {
            (false, false) => {}
            (true, false) => sub.min = float(1),
            (false, true) => sub.scale_high = float(1),
            (true, true) => (sub.min, sub.scale_high, sub.min_high) = (float(1), float(2), float(3)),
        }
        sub
    }
}

/// Unpacks whole blocks of a panel into `out`, which has room for `Q::Plain::BYTES` × 16 bytes for each 32 columns.
pub(crate) struct UnpackPanel<'a, Q> {
    pub(crate) blocks: &'a [u8],
    pub(crate) out: &'a mut [u8],
    pub(crate) format: PhantomData<Q>,
}

impl<Q: Quant> Op for UnpackPanel<'_, Q> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let sub_bytes = PANEL_ROWS * Q::Plain::BYTES;
        let blocks = self.blocks.chunks_exact(PANEL_ROWS * Q::BYTES);
        for (block, out) in blocks.zip(self.out.chunks_exact_mut(sub_bytes * Q::SUBS)) {
            for h in 0..PANEL_ROWS / S::LANES {
                let head = Q::head(s, block, h);
                let mut put = |j: usize, i: usize, v: S::V| {
                    s.v_store(v, &mut out[sub_bytes * j + VECTOR_BYTES * i + 4 * S::LANES * h..]);
                };
                macro_rules! spans {
                    ($($g:literal)*) => {$(
                        if $g * Q::SPAN < Q::SUBS {
                            for i in 0..8 {
                                let words = Q::words(s, block, h, $g, i);
                                for (k, word) in words.into_iter().take(Q::SPAN).enumerate() {
                                    put($g * Q::SPAN + k, i, word);
                                }
                            }
                        }
                    )*};
                }
                // Written out, so that shifts and offsets are constants.
                spans!(0 1 2 3 4 5 6 7);
                for j in 0..Q::SUBS {
                    let sub = Q::sub(s, block, h, head, j);
                    let floats = match (Q::MIN, Q::HALVES) {
                        (true, _) => [sub.scale, sub.min, sub.scale_high, sub.min_high],
                        (false, _) => [sub.scale, sub.scale_high, sub.scale, sub.scale],
                    };
                    for (i, float) in
                        floats.into_iter().take(Q::Plain::BYTES * PANEL_ROWS / VECTOR_BYTES - 8).enumerate()
                    {
                        put(j, 8 + i, s.f_as_v(float));
                    }
                }
            }
        }
    }
}
