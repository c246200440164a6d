//! Activations, made ready for the matrix products: quantized to 8 bits with a scale per 16 columns, or as floats.
//!
//! Each token is quantized by itself, so batch neighbours cannot matter. Tokens are interleaved in groups of G (1, 2, 4,
//! 8 or 16: as many as an instruction set has accumulators for). For each 32 columns a group holds `BLOCK_WORDS` rows
//! of G words: eight with four columns each, then what the constants below name, for the first 16 columns (low) and the
//! last 16 (high). The layout depends on the instruction set, the results do not.
//!
//! With [`Precision::Double`] a token takes two rows of a group, its quantized values and the quantized rest, whose
//! products are added: twice the multiplications, 254 times the resolution. A decode step reads weights for as long as
//! that takes anyway.

use crate::isa::Level;
use crate::math::sum16;
use crate::simd::{Op, Simd};
use crate::threads::Pool;

/// Rows of words for 32 columns.
pub(crate) const BLOCK_WORDS: usize = 15;
/// Scales, as floats.
pub(crate) const SCALE_LOW: usize = 8;
pub(crate) const SCALE_HIGH: usize = 9;
/// Sums of the quantized columns, negated, as integers.
pub(crate) const NEG_SUM_LOW: usize = 10;
pub(crate) const NEG_SUM_HIGH: usize = 11;
/// Sums times their scales, and both together.
pub(crate) const SUM_LOW: usize = 12;
pub(crate) const SUM_HIGH: usize = 13;
pub(crate) const SUM: usize = 14;

/// A normalization applied on the way in.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Factor of each column.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub epsilon: f32,
}

/// How finely activations are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// 8 bits.
    #[default]
    Single,
    /// 8 bits, and 8 bits of the rest.
    Double,
}

/// Activations of a batch for weights of `cols` columns.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    group_max: usize,
    /// Rows that a token takes in its group: 2 with double precision.
    copies: usize,
    quantized: Vec<u32>,
    floats: Vec<u32>,
    has_quantized: bool,
    has_floats: bool,
}

/// Rows of the group that starts at row `start` of `rows`, and its width (a power of two, at least as many).
pub(crate) fn group_at(start: usize, rows: usize, group_max: usize) -> (usize, usize) {
    let len = (rows - start).min(group_max);
    (len, len.next_power_of_two())
}

impl Activations {
    /// Tokens held.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Columns of each token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows of a group, at most.
    pub(crate) fn group_max(&self) -> usize {
        self.group_max
    }

    /// Rows of a token for weights that take `floats` or not.
    pub(crate) fn copies(&self, floats: bool) -> usize {
        if floats { 1 } else { self.copies }
    }

    /// Words of the group that starts at row `start`: quantized, or floats (`[col][G]`).
    pub(crate) fn group(&self, start: usize, floats: bool) -> &[u32] {
        let (_, width) = group_at(start, self.tokens * self.copies(floats), self.group_max);
        let per_token = if floats { self.cols } else { self.cols / 32 * BLOCK_WORDS };
        let (buffer, ready) =
            if floats { (&self.floats, self.has_floats) } else { (&self.quantized, self.has_quantized) };
        assert!(ready, "the activations were not prepared for this format");
        &buffer[start * per_token..(start + width) * per_token]
    }

    /// Takes `tokens` rows of `cols` values, `stride` apart in `x`, normalized by `norm` if there is one. `quantize` and
    /// `floats` say which forms the following products need (see `Format::float_activations`).
    #[allow(clippy::too_many_arguments)]
    pub fn fill(
        &mut self,
        pool: &mut Pool,
        level: Level,
        x: &[f32],
        stride: usize,
        cols: usize,
        tokens: usize,
        norm: Option<Norm<'_>>,
        forms: Forms,
        precision: Precision,
    ) {
        assert!(
            !forms.quantized || cols.is_multiple_of(32),
            "quantized products need columns in multiples of 32, not {cols}"
        );
        assert!(
            tokens == 0 || (tokens - 1) * stride + cols <= x.len(),
            "{tokens} rows of {cols} in {} values",
            x.len()
        );
        (self.tokens, self.cols, self.group_max) = (tokens, cols, level.run(GroupMax));
        // A group of one row (an instruction set with few registers never has that) could not hold a token's two.
        self.copies = if precision == Precision::Double && self.group_max > 1 { 2 } else { 1 };
        (self.has_quantized, self.has_floats) = (forms.quantized, forms.floats);
        for (wanted, floats) in [(forms.quantized, false), (forms.floats, true)] {
            if wanted && tokens > 0 {
                self.fill_form(pool, level, x, stride, norm, floats);
            }
        }
    }

    fn fill_form(
        &mut self,
        pool: &mut Pool,
        level: Level,
        x: &[f32],
        stride: usize,
        norm: Option<Norm<'_>>,
        floats: bool,
    ) {
        let (cols, group_max, copies) = (self.cols, self.group_max, self.copies(floats));
        let rows = self.tokens * copies;
        let per_row = if floats { cols } else { cols / 32 * BLOCK_WORDS };
        let buffer = if floats { &mut self.floats } else { &mut self.quantized };
        // Only the last group can be wider than its rows.
        let last = (rows - 1) / group_max * group_max;
        let words = (last + group_at(last, rows, group_max).1) * per_row;
        if buffer.len() < words {
            buffer.resize(words, 0);
        }
        pool.run_chunks(&mut buffer[..words], group_max * per_row, |i, out| {
            let start = i * group_max;
            let (len, width) = group_at(start, rows, group_max);
            let x = &x[start / copies * stride..];
            level.run(FillGroup { rows: x, stride, cols, tokens: len / copies, copies, width, norm, out, floats });
        });
    }
}

/// Which forms of the activations are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forms {
    /// 8-bit, for quantized weights.
    pub quantized: bool,
    /// Floats, for float weights.
    pub floats: bool,
}

impl Forms {
    /// The forms that products with these formats need.
    pub fn of(formats: impl IntoIterator<Item = crate::quant::Format>) -> Forms {
        let mut forms = Forms::default();
        for format in formats {
            if format.float_activations() {
                forms.floats = true;
            } else {
                forms.quantized = true;
            }
        }
        forms
    }
}

/// Bytes that [`Activations`] take for a row of `cols` columns in these forms; double precision takes two rows.
pub fn row_bytes(cols: usize, forms: Forms) -> usize {
    let quantized = if forms.quantized { cols / 32 * BLOCK_WORDS } else { 0 };
    (quantized + if forms.floats { cols } else { 0 }) * size_of::<u32>()
}

struct GroupMax;

impl Op for GroupMax {
    type Out = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::GROUP_MAX
    }
}

struct FillGroup<'a> {
    rows: &'a [f32],
    stride: usize,
    cols: usize,
    tokens: usize,
    copies: usize,
    width: usize,
    norm: Option<Norm<'a>>,
    out: &'a mut [u32],
    floats: bool,
}

impl Op for FillGroup<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.tokens * self.copies < self.width {
            self.out.fill(0);
        }
        for t in 0..self.tokens {
            let row = &self.rows[t * self.stride..][..self.cols];
            let scale = self.norm.map(|norm| rms_scale(s, row, norm.epsilon));
            let norm = self.norm.zip(scale).map(|(norm, scale)| (&norm.weight[..self.cols], scale));
            if self.floats {
                for (k, &x) in row.iter().enumerate() {
                    let x = norm.map_or(x, |(weight, scale)| x * scale * weight[k]);
                    self.out[k * self.width + t] = x.to_bits();
                }
            } else {
                let group = self.out.chunks_exact_mut(BLOCK_WORDS * self.width);
                for (b, (block, x)) in group.zip(row.chunks_exact(32)).enumerate() {
                    let norm = norm.map(|(w, scale)| (&w[32 * b..32 * b + 32], scale));
                    quantize_block(s, x, norm, block, self.width, t * self.copies, self.copies);
                }
            }
        }
    }
}

/// 1 / sqrt(mean of squares + epsilon).
#[inline(always)]
pub(crate) fn rms_scale<S: Simd>(s: S, row: &[f32], epsilon: f32) -> f32 {
    let mut sums = [0.0; 16];
    for h in 0..16 / S::LANES {
        let at = h * S::LANES;
        let mut acc = s.f_splat(0.0);
        for piece in row.chunks_exact(16) {
            let x = s.f_load(&piece[at..]);
            acc = s.f_fma(x, x, acc);
        }
        s.f_store(acc, &mut sums[at..]);
    }
    let mut sum = sum16(&sums);
    for &x in row.chunks_exact(16).remainder() {
        sum = x.mul_add(x, sum);
    }
    1.0 / (sum / row.len() as f32 + epsilon).sqrt()
}

/// Quantizes 32 columns into rows `row` (and `row + 1`, the rest, with two `copies`) of a group.
#[inline(always)]
pub(crate) fn quantize_block<S: Simd>(
    s: S,
    x: &[f32],
    norm: Option<(&[f32], f32)>,
    out: &mut [u32],
    width: usize,
    row: usize,
    copies: usize,
) {
    let zero = s.f_splat(0.0);
    let parts = 16 / S::LANES;
    let mut sums = [[0.0; 2]; 2];
    for half in 0..2 {
        // As many vectors as 16 columns take; the rest of the array is not used.
        let mut values = [zero; 4];
        let mut largest = zero;
        for h in 0..parts {
            let at = 16 * half + h * S::LANES;
            let mut v = s.f_load(&x[at..]);
            if let Some((weight, scale)) = norm {
                v = s.f_mul(s.f_mul(v, s.f_splat(scale)), s.f_load(&weight[at..]));
            }
            values[h] = v;
            largest = s.f_max(s.f_abs(v), largest);
        }
        let largest = s.f_reduce_max(largest);
        let (mut scale, mut inverse) = (largest / 127.0, if largest > 0.0 { 127.0 / largest } else { 0.0 });
        for copy in 0..copies {
            let mut bytes = [0i8; 16];
            let mut sum = zero;
            for h in 0..parts {
                let q = s.f_round(s.f_mul(values[h], s.f_splat(inverse)));
                s.f_store_i8(q, &mut bytes[h * S::LANES..]);
                values[h] = s.f_fma(q, s.f_splat(-scale), values[h]);
                sum = s.f_add(sum, q);
            }
            // Whole numbers: exact in any order.
            let sum = s.f_reduce_add(sum);
            let t = row + copy;
            let (words, _) = bytes.as_chunks::<4>();
            for (i, word) in words.iter().enumerate() {
                out[(4 * half + i) * width + t] = u32::from_le_bytes(word.map(|b| b as u8));
            }
            sums[copy][half] = scale * sum;
            out[(SCALE_LOW + half) * width + t] = scale.to_bits();
            out[(NEG_SUM_LOW + half) * width + t] = -(sum as i32) as u32;
            out[(SUM_LOW + half) * width + t] = sums[copy][half].to_bits();
            // The rest is at most half a step: 127 of its own.
            (scale, inverse) = (scale / 254.0, inverse * 254.0);
        }
    }
    for (copy, sums) in sums[..copies].iter().enumerate() {
        out[SUM * width + row + copy] = (sums[0] + sums[1]).to_bits();
    }
}
