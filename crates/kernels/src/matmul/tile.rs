//! Products of one panel, or of some columns of it, with one group of tokens.

use crate::PANEL_ROWS;
use crate::activations::{BLOCK_WORDS, NEG_SUM, SCALE, STRETCH, SUM};
use crate::isa::Level;
use crate::quant::{FloatRow, Format, Quant, Sub, with_quant};
use crate::simd::{Op, Simd};
use std::marker::PhantomData;

/// A panel as it comes to its products.
#[derive(Clone, Copy)]
pub(super) enum Weights<'a> {
    /// As it is kept, all or some columns of it. With `resume` columns came before: their products are added to.
    Packed { panel: &'a [u8], resume: bool },
    /// Some columns, unpacked.
    Plain { unpacked: &'a [u8], resume: bool },
}

/// Products of (part of) a panel with one group of `width` tokens.
pub(super) fn tile(
    level: Level,
    format: Format,
    weights: Weights<'_>,
    width: usize,
    words: &[u32],
    out: &mut [[f32; PANEL_ROWS]],
) {
    macro_rules! width {
        ($tile:ident, $q:ty: $($g:literal)*) => {
            match width {
                $($g => level.run($tile::<$q, $g>::new(weights, words, out)),)*
                _ => unreachable!("no group of {width} tokens is made"),
            }
        };
    }
    match (format, weights) {
        (Format::F32, _) => width!(FloatTile, crate::quant::F32: 1 2 4 8 16),
        (Format::F16, _) => width!(FloatTile, crate::quant::F16: 1 2 4 8 16),
        (Format::BF16, _) => width!(FloatTile, crate::quant::Bf16: 1 2 4 8 16),
        (_, Weights::Packed { .. }) => with_quant!(format, Q => width!(Tile, Q: 1 2 4 8), _ => ()),
        (_, Weights::Plain { .. }) => with_quant!(format, Q => width!(Tile, <Q as Quant>::Plain: 1 2 4 8 16), _ => ()),
    }
}

/// Products of a quantized panel with G tokens.
struct Tile<'a, Q, const G: usize> {
    panel: &'a [u8],
    /// Whether the panel is in the cache; if not, it comes from memory.
    resident: bool,
    resume: bool,
    acts: &'a [[u32; G]],
    out: &'a mut [[f32; PANEL_ROWS]; G],
    _format: PhantomData<Q>,
}

impl<'a, Q, const G: usize> Tile<'a, Q, G> {
    fn new(weights: Weights<'a>, words: &'a [u32], out: &'a mut [[f32; PANEL_ROWS]]) -> Self {
        let (panel, resident, resume) = match weights {
            Weights::Packed { panel, resume } => (panel, false, resume),
            Weights::Plain { unpacked, resume } => (unpacked, true, resume),
        };
        let out = out.first_chunk_mut().expect("room for a group");
        Self { panel, resident, resume, acts: words.as_chunks().0, out, _format: PhantomData }
    }
}

impl<Q: Quant, const G: usize> Op for Tile<'_, Q, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if G > S::GROUP_MAX {
            return; // Never made: groups are no wider. Without this line the compiler would build it.
        }
        let parts = PANEL_ROWS / S::LANES;
        let blocks = || {
            let blocks = self.panel.chunks_exact(PANEL_ROWS * Q::BYTES);
            blocks.zip(self.acts.chunks_exact(BLOCK_WORDS * Q::SUBS))
        };
        // Vectors that take part of the rows go over a panel once for each part. With one token they do so block by block: the
        // parts one after the other would read memory with the first and leave it idle with the rest.
        if G == 1 && (2..=PARTS_MAX).contains(&parts) {
            let mut acc = [[s.f_splat(0.0); G]; PARTS_MAX];
            if self.resume {
                for (h, acc) in acc.iter_mut().take(parts).enumerate() {
                    acc[0] = s.f_load(&self.out[0][h * S::LANES..]);
                }
            }
            for (block, acts) in blocks() {
                for (h, acc) in acc.iter_mut().take(parts).enumerate() {
                    add_block::<Q, S, G>(s, block, h, acts, self.resident, acc);
                }
            }
            for (h, acc) in acc.iter().take(parts).enumerate() {
                s.f_store(acc[0], &mut self.out[0][h * S::LANES..]);
            }
            return;
        }
        for h in 0..parts {
            let mut acc = [s.f_splat(0.0); G];
            if self.resume {
                for (acc, out) in acc.iter_mut().zip(&*self.out) {
                    *acc = s.f_load(&out[h * S::LANES..]);
                }
            }
            for (block, acts) in blocks() {
                add_block::<Q, S, G>(s, block, h, acts, self.resident, &mut acc);
            }
            for (acc, out) in acc.into_iter().zip(self.out.iter_mut()) {
                s.f_store(acc, &mut out[h * S::LANES..]);
            }
        }
    }
}

/// Adds the products of a block.
#[inline(always)]
fn add_block<Q: Quant, S: Simd, const G: usize>(
    s: S,
    block: &[u8],
    h: usize,
    acts: &[[u32; G]],
    resident: bool,
    acc: &mut [S::F; G],
) {
    let head = Q::head(s, block, h);
    let parts = PANEL_ROWS / S::LANES;
    // One token on whole vectors reads new lines all the time, which the processor follows by itself; on parts, it reads nothing new
    // after the first of them.
    let asks = if G > 1 { h == 0 } else { parts > 1 && h == parts - 1 };
    let ahead = asks && !resident;
    macro_rules! subs {
        ($($j:literal)*) => {$(
            if $j < Q::SUBS {
                if ahead {
                    fetch_ahead(s, block, $j, Q::SUBS);
                }
                let sub = Q::sub(s, block, h, head, $j);
                accumulate::<Q, S, G>(s, &sub, &acts[BLOCK_WORDS * $j..][..BLOCK_WORDS], acc);
            }
        )*};
    }
    let span = |g: usize| &acts[BLOCK_WORDS * Q::SPAN * g..][..BLOCK_WORDS * Q::SPAN];
    macro_rules! spans {
        ($($g:literal)*) => {$(
            if $g * Q::SPAN < Q::SUBS {
                if ahead {
                    fetch_ahead(s, block, $g, Q::SUBS / Q::SPAN);
                }
                accumulate_span::<Q, S, G>(s, block, h, head, $g, span($g), acc);
            }
        )*};
    }
    // Spans keep `SPAN * G` sums for each half in registers. What is written out has shifts and offsets that are constants; spans
    // of four are so long that the compiler would mix them, and read memory in no order.
    if Q::SPAN == 1 || G > 1 && Q::SPAN * G > S::GROUP_MAX / 2 {
        subs!(0 1 2 3 4 5 6 7);
    } else if Q::SPAN == 2 {
        spans!(0 1 2 3);
    } else {
        for g in 0..Q::SUBS / Q::SPAN {
            if ahead {
                fetch_ahead(s, block, g, Q::SUBS / Q::SPAN);
            }
            accumulate_span::<Q, S, G>(s, block, h, head, g, span(g), acc);
        }
    }
}

/// Parts of a panel, each of a vector's lanes, that are kept in registers at once.
const PARTS_MAX: usize = 4;

/// How far ahead of its use memory is asked for: some hundred nanoseconds at the rate of memory.
const FETCH_BYTES: usize = 8192;

/// Asks for the share of sub-block `j` of the memory that lies [`FETCH_BYTES`] ahead of `block`. With more tokens than one,
/// so much work lies between two loads that the processor does not see the next ones by itself. Spread over the sub-blocks: all at
/// once, they would keep the block's own loads waiting.
#[inline(always)]
fn fetch_ahead<S: Simd>(s: S, block: &[u8], j: usize, subs: usize) {
    let lines = block.len().div_ceil(64);
    for line in j * lines / subs..(j + 1) * lines / subs {
        s.prefetch(block, FETCH_BYTES + 64 * line);
    }
}

/// Products of a panel of floats with G tokens.
struct FloatTile<'a, Q, const G: usize> {
    panel: &'a [u8],
    acts: &'a [[u32; G]],
    out: &'a mut [[f32; PANEL_ROWS]; G],
    _format: PhantomData<Q>,
}

impl<'a, Q, const G: usize> FloatTile<'a, Q, G> {
    fn new(weights: Weights<'a>, words: &'a [u32], out: &'a mut [[f32; PANEL_ROWS]]) -> Self {
        let (Weights::Packed { panel, .. } | Weights::Plain { unpacked: panel, .. }) = weights;
        let out = out.first_chunk_mut().expect("room for a group");
        Self { panel, acts: words.as_chunks().0, out, _format: PhantomData }
    }
}

impl<Q: FloatRow, const G: usize> Op for FloatTile<'_, Q, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if G > S::GROUP_MAX {
            return;
        }
        for h in 0..PANEL_ROWS / S::LANES {
            let mut acc = [s.f_splat(0.0); G];
            for (column, x) in self.panel.chunks_exact(PANEL_ROWS * Q::BYTES).zip(self.acts) {
                let w = Q::load(s, column, h);
                for t in 0..G {
                    acc[t] = s.f_fma(w, s.f_splat(f32::from_bits(x[t])), acc[t]);
                }
            }
            for (acc, out) in acc.into_iter().zip(self.out.iter_mut()) {
                s.f_store(acc, &mut out[h * S::LANES..]);
            }
        }
    }
}

/// Adds the products of 32 columns.
#[inline(always)]
pub(crate) fn accumulate<Q: Quant, S: Simd, const G: usize>(s: S, sub: &Sub<S>, x: &[[u32; G]], acc: &mut [S::F; G]) {
    // Written out, so that the sums stay in registers.
    match G {
        1 => accumulate_some::<Q, S, G, 1>(s, sub, x, acc, 0),
        2 => accumulate_some::<Q, S, G, 2>(s, sub, x, acc, 0),
        3 => accumulate_some::<Q, S, G, 3>(s, sub, x, acc, 0),
        _ => {
            accumulate_some::<Q, S, G, 4>(s, sub, x, acc, 0);
            if G >= 8 {
                accumulate_some::<Q, S, G, 4>(s, sub, x, acc, 4);
            }
            if G >= 16 {
                accumulate_some::<Q, S, G, 4>(s, sub, x, acc, 8);
                accumulate_some::<Q, S, G, 4>(s, sub, x, acc, 12);
            }
        }
    }
}

/// As [`accumulate`], for `T` tokens from `first` on.
#[inline(always)]
fn accumulate_some<Q: Quant, S: Simd, const G: usize, const T: usize>(
    s: S,
    sub: &Sub<S>,
    x: &[[u32; G]],
    acc: &mut [S::F; G],
    first: usize,
) {
    let mut dots = [[s.v_splat(0); T]; 2];
    for half in 0..2 {
        for j in 0..T {
            dots[half][j] = start::<Q, S, G>(s, x, NEG_SUM[half], first + j);
        }
        dots[half] = s.dots::<G, T>(dots[half], &sub.w, 4 * half..4 * half + 4, x, first, Q::BITS);
    }
    scale_dots::<Q, S, G, T>(s, sub, dots, x, acc, first);
}

/// Adds the products of a span of sub-blocks, whose vectors are read once and in order: the order is what the processor's
/// prefetchers follow. (Sub-block by sub-block, a core took in 15 GB/s of Q6_K, and so 27 of 29.)
#[inline(always)]
fn accumulate_span<Q: Quant, S: Simd, const G: usize>(
    s: S,
    block: &[u8],
    h: usize,
    head: Q::Head<S>,
    g: usize,
    x: &[[u32; G]],
    acc: &mut [S::F; G],
) {
    let zero = s.v_splat(0);
    let mut dots = [[[zero; G]; 2]; 4];
    let mut w = [[zero; 8]; 4];
    // Long spans have so many words of each kind that there are no registers for more than two.
    let at_once = if Q::SPAN > 2 { S::DOT_WORDS.min(2) } else { S::DOT_WORDS };
    macro_rules! steps {
        ($($first:literal)*) => {$(
            if $first % at_once == 0 {
                for i in $first..$first + at_once {
                    let words = Q::words(s, block, h, g, i);
                    for k in 0..Q::SPAN {
                        w[k][i] = words[k];
                    }
                }
                for k in 0..Q::SPAN {
                    let x = &x[BLOCK_WORDS * k..][..BLOCK_WORDS];
                    let half = $first / 4;
                    if $first % 4 == 0 {
                        for t in 0..G {
                            dots[k][half][t] = start::<Q, S, G>(s, x, NEG_SUM[half], t);
                        }
                    }
                    dots[k][half] = s.dots::<G, G>(dots[k][half], &w[k], $first..$first + at_once, x, 0, Q::BITS);
                }
            }
        )*};
    }
    // Written out: as a loop it was not inlined for AVX2, and each vector went through memory.
    steps!(0 1 2 3 4 5 6 7);
    for k in 0..Q::SPAN {
        let sub = Q::sub(s, block, h, head, Q::SPAN * g + k);
        scale_dots::<Q, S, G, G>(s, &sub, dots[k], &x[BLOCK_WORDS * k..][..BLOCK_WORDS], acc, 0);
    }
}

/// Adds the dot products of the first and the last 16 columns times their scales, for `T` tokens from `first` on.
#[inline(always)]
fn scale_dots<Q: Quant, S: Simd, const G: usize, const T: usize>(
    s: S,
    sub: &Sub<S>,
    dots: [[S::V; T]; 2],
    x: &[[u32; G]],
    acc: &mut [S::F; G],
    first: usize,
) {
    for j in 0..T {
        let t = first + j;
        let scale = float::<S, G>(s, x, SCALE, t);
        let [low, high] =
            [stretch::<S, G>(s, dots[0][j], x, STRETCH[0], t), stretch::<S, G>(s, dots[1][j], x, STRETCH[1], t)];
        if Q::HALVES {
            let product = s.f_fma(high, sub.scale_high, s.f_mul(low, sub.scale));
            acc[t] = s.f_fma(product, scale, acc[t]);
            if Q::MIN {
                for (half, min) in [sub.min, sub.min_high].into_iter().enumerate() {
                    let neg_sum = stretch::<S, G>(s, s.v_splat(x[NEG_SUM[half]][t] as i32), x, STRETCH[half], t);
                    let sum = s.f_mul(s.f_sub(s.f_splat(0.0), neg_sum), scale);
                    acc[t] = s.f_fma(min, sum, acc[t]);
                }
            }
        } else {
            acc[t] = s.f_fma(s.f_mul(s.f_add(low, high), scale), sub.scale, acc[t]);
            if Q::MIN {
                acc[t] = s.f_fma(sub.min, float::<S, G>(s, x, SUM, t), acc[t]);
            }
        }
    }
}

/// Integers as floats, times the power of two that word `row` adds to their exponents. A zero may become a number below 2⁻¹¹⁹, which
/// no sum notices.
#[inline(always)]
fn stretch<S: Simd, const G: usize>(s: S, x: S::V, words: &[[u32; G]], row: usize, t: usize) -> S::F {
    s.v_as_f(s.v_add(s.f_as_v(s.v_to_f(x)), s.v_splat(words[row][t] as i32)))
}

/// Word `row` of token `t`, a float, in all lanes.
#[inline(always)]
fn float<S: Simd, const G: usize>(s: S, x: &[[u32; G]], row: usize, t: usize) -> S::F {
    s.f_splat(f32::from_bits(x[row][t]))
}

/// What takes the offset of the weights out of a dot product: `-OFFSET · Σ x`.
#[inline(always)]
fn start<Q: Quant, S: Simd, const G: usize>(s: S, x: &[[u32; G]], row: usize, t: usize) -> S::V {
    if Q::OFFSET == 0 { s.v_splat(0) } else { s.v_shl(s.v_splat(x[row][t] as i32), Q::OFFSET.trailing_zeros()) }
}
