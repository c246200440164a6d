//! Activations, made ready for the matrix products: quantized to 8 bits with a scale per 16 columns, or as floats.
//!
//! Each token is quantized by itself, so batch neighbours cannot matter. Tokens are interleaved in groups of G (1, 2, 4,
//! 8 or 16: as many as an instruction set has accumulators for). For each 32 columns a group holds `BLOCK_WORDS` rows
//! of G words: eight with four columns each, then what the constants below name. The layout depends on the instruction
//! set, the results do not.
//!
//! With [`Precision::Double`] the rest of each value is quantized too, in a buffer of the same layout: products with both
//! are added, which gives twice the multiplications and 254 times the resolution.

use crate::isa::Level;
use crate::math::sum16;
use crate::simd::{Op, Simd};
use crate::threads::Pool;

/// Rows of words for 32 columns.
pub(crate) const BLOCK_WORDS: usize = 13;
/// Scales of the first and the last 16 columns, as floats.
pub(crate) const SCALE_LOW: usize = 8;
pub(crate) const SCALE_HIGH: usize = 9;
/// Sum of the quantized columns times their scales, a float.
pub(crate) const SUM: usize = 10;
/// Sums of the first and the last 16 quantized columns, negated, as integers.
pub(crate) const NEG_SUM: [usize; 2] = [11, 12];

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

/// A form of the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// 8-bit.
    Quantized,
    /// What 8 bits have left over, in 8 bits.
    Rest,
    /// Floats: `[col][G]` in a group.
    Floats,
}

/// Activations of a batch for weights of `cols` columns.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    group_max: usize,
    quantized: Vec<u32>,
    rest: Vec<u32>,
    floats: Vec<u32>,
    forms: Forms,
    precision: Precision,
}

/// Tokens of the group that starts at token `start` of `tokens`, and its width (a power of two, at least as many).
pub(crate) fn group_at(start: usize, tokens: usize, group_max: usize) -> (usize, usize) {
    let len = (tokens - start).min(group_max);
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

    /// Tokens of a group, at most.
    pub(crate) fn group_max(&self) -> usize {
        self.group_max
    }

    /// Words of the group that starts at token `start`.
    pub(crate) fn group(&self, start: usize, form: Form) -> &[u32] {
        let (_, width) = group_at(start, self.tokens, self.group_max);
        let (buffer, ready) = match form {
            Form::Quantized => (&self.quantized, self.forms.quantized),
            Form::Rest => (&self.rest, self.forms.quantized && self.precision == Precision::Double),
            Form::Floats => (&self.floats, self.forms.floats),
        };
        assert!(ready, "the activations were not prepared as {form:?}");
        let per_token = words_per_token(self.cols, form == Form::Floats);
        &buffer[start * per_token..(start + width) * per_token]
    }

    /// Takes `tokens` rows of `cols` values, `stride` apart in `x`, normalized by `norm` if there is one. `forms` says
    /// which forms the following products need (see `Format::float_activations`), `precision` the finest of them.
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
        (self.forms, self.precision) = (forms, precision);
        if tokens == 0 {
            return;
        }
        let group_max = self.group_max;
        // Only the last group can be wider than its tokens.
        let last = (tokens - 1) / group_max * group_max;
        let padded = last + group_at(last, tokens, group_max).1;
        let ready = |buffer: &mut Vec<u32>, wanted: bool, floats: bool| {
            let words = if wanted { padded * words_per_token(cols, floats) } else { 0 };
            if buffer.len() < words {
                buffer.resize(words, 0);
            }
            words
        };
        let words = ready(&mut self.quantized, forms.quantized, false);
        let rest_words = ready(&mut self.rest, forms.quantized && precision == Precision::Double, false);
        let float_words = ready(&mut self.floats, forms.floats, true);
        let rows = |i: usize| {
            let start = i * group_max;
            let (len, width) = group_at(start, tokens, group_max);
            Rows { x: &x[start * stride..], stride, cols, tokens: len, width, norm }
        };
        let per_group = group_max * words_per_token(cols, false);
        if rest_words > 0 {
            let both = (&mut self.quantized[..words], &mut self.rest[..words]);
            pool.run_chunk_pairs(both, per_group, |i, out, rest| {
                level.run(Quantize { rows: rows(i), out, rest: Some(rest) });
            });
        } else {
            pool.run_chunks(&mut self.quantized[..words], per_group, |i, out| {
                level.run(Quantize { rows: rows(i), out, rest: None });
            });
        }
        let per_group = group_max * words_per_token(cols, true);
        pool.run_chunks(&mut self.floats[..float_words], per_group, |i, out| {
            level.run(Interleave { rows: rows(i), out });
        });
    }
}

fn words_per_token(cols: usize, floats: bool) -> usize {
    if floats { cols } else { cols / 32 * BLOCK_WORDS }
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

/// Bytes that [`Activations`] take for a token of `cols` columns.
pub fn token_bytes(cols: usize, forms: Forms, precision: Precision) -> usize {
    let copies = if precision == Precision::Double { 2 } else { 1 };
    let quantized = if forms.quantized { copies * words_per_token(cols, false) } else { 0 };
    let floats = if forms.floats { words_per_token(cols, true) } else { 0 };
    (quantized + floats) * size_of::<u32>()
}

struct GroupMax;

impl Op for GroupMax {
    type Out = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::GROUP_MAX
    }
}

/// The rows of one group.
struct Rows<'a> {
    x: &'a [f32],
    stride: usize,
    cols: usize,
    tokens: usize,
    width: usize,
    norm: Option<Norm<'a>>,
}

impl Rows<'_> {
    /// Row `t`, and the factors of its columns and of all of it.
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, t: usize) -> (&[f32], Option<(&[f32], f32)>) {
        let row = &self.x[t * self.stride..][..self.cols];
        (row, self.norm.map(|norm| (&norm.weight[..self.cols], rms_scale(s, row, norm.epsilon))))
    }
}

struct Quantize<'a> {
    rows: Rows<'a>,
    out: &'a mut [u32],
    rest: Option<&'a mut [u32]>,
}

impl Op for Quantize<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let width = self.rows.width;
        if self.rows.tokens < width {
            self.out.fill(0);
            self.rest.iter_mut().for_each(|rest| rest.fill(0));
        }
        for t in 0..self.rows.tokens {
            let (row, norm) = self.rows.row(s, t);
            for (b, x) in row.chunks_exact(32).enumerate() {
                let norm = norm.map(|(w, scale)| (&w[32 * b..32 * b + 32], scale));
                let words = BLOCK_WORDS * width * b..BLOCK_WORDS * width * (b + 1);
                let rest = self.rest.as_mut().map(|rest| &mut rest[words.clone()]);
                quantize_block(s, x, norm, width, t, &mut self.out[words], rest);
            }
        }
    }
}

struct Interleave<'a> {
    rows: Rows<'a>,
    out: &'a mut [u32],
}

impl Op for Interleave<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.rows.width;
        for t in 0..self.rows.tokens {
            let (row, norm) = self.rows.row(s, t);
            for (k, &x) in row.iter().enumerate() {
                let x = norm.map_or(x, |(weight, scale)| x * scale * weight[k]);
                self.out[k * width + t] = x.to_bits();
            }
        }
        // The tokens that fill up a group must be numbers that do not slow the multiplications.
        for column in self.out.chunks_exact_mut(width) {
            column[self.rows.tokens..].fill(0);
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

/// Quantizes 32 columns into row `row` of a block of a group of `width`; what is left over into that of `rest`.
#[inline(always)]
pub(crate) fn quantize_block<S: Simd>(
    s: S,
    x: &[f32],
    norm: Option<(&[f32], f32)>,
    width: usize,
    row: usize,
    out: &mut [u32],
    rest: Option<&mut [u32]>,
) {
    let zero = s.f_splat(0.0);
    // As many vectors as 16 columns take; the rest of the arrays is not used.
    let mut values = [[zero; 16 / LANES_MIN]; 2];
    let mut scales = [(0.0, 0.0); 2];
    for half in 0..2 {
        let mut largest = zero;
        for h in 0..16 / S::LANES {
            let at = 16 * half + h * S::LANES;
            let mut v = s.f_load(&x[at..]);
            if let Some((weight, scale)) = norm {
                v = s.f_mul(s.f_mul(v, s.f_splat(scale)), s.f_load(&weight[at..]));
            }
            values[half][h] = v;
            largest = s.f_max(s.f_abs(v), largest);
        }
        let largest = s.f_reduce_max(largest);
        scales[half] = (largest / 127.0, if largest > 0.0 { 127.0 / largest } else { 0.0 });
    }
    round_block(s, &mut values, scales, width, row, out);
    if let Some(rest) = rest {
        // The rest is at most half a step: 127 of its own.
        for (scale, inverse) in &mut scales {
            (*scale, *inverse) = (*scale / 254.0, *inverse * 254.0);
        }
        round_block(s, &mut values, scales, width, row, rest);
    }
}

/// Lanes of the narrowest vectors.
const LANES_MIN: usize = 4;

/// Writes `values` in steps of their (scale, 1 / scale), and keeps what is left over of them.
#[inline(always)]
fn round_block<S: Simd>(
    s: S,
    values: &mut [[S::F; 16 / LANES_MIN]; 2],
    scales: [(f32, f32); 2],
    width: usize,
    row: usize,
    out: &mut [u32],
) {
    let mut bytes = [0i8; 32];
    let mut sums = [0.0; 2];
    for half in 0..2 {
        let (scale, inverse) = scales[half];
        let mut sum = s.f_splat(0.0);
        for h in 0..16 / S::LANES {
            let q = s.f_round(s.f_mul(values[half][h], s.f_splat(inverse)));
            s.f_store_i8(q, &mut bytes[16 * half + h * S::LANES..]);
            values[half][h] = s.f_fma(q, s.f_splat(-scale), values[half][h]);
            sum = s.f_add(sum, q);
        }
        // Whole numbers: exact in any order.
        sums[half] = s.f_reduce_add(sum);
        out[[SCALE_LOW, SCALE_HIGH][half] * width + row] = scale.to_bits();
        out[NEG_SUM[half] * width + row] = -(sums[half] as i32) as u32;
    }
    let (words, _) = bytes.as_chunks::<4>();
    for (i, word) in words.iter().enumerate() {
        out[i * width + row] = u32::from_le_bytes(word.map(|b| b as u8));
    }
    out[SUM * width + row] = (scales[0].0 * sums[0] + scales[1].0 * sums[1]).to_bits();
}
