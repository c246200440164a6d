//! Activations, made ready for the matrix products: quantized to 8 bits with a scale per 16 columns, or as floats.
//!
//! Each token is quantized by itself, so batch neighbours cannot matter. Tokens are interleaved in groups of G (1, 2, 4,
//! 8 or 16: as many as an instruction set has accumulators for). For each 32 columns a group holds `BLOCK_WORDS` rows
//! of G words: eight with four columns each, then what the constants below name. The layout depends on the instruction
//! set, the results do not.
//!
//! Rows may be gathered into parts, each of which begins with a group of its own: the tokens of an expert.
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
    /// One for all rows, or those that rows were gathered into.
    parts: Vec<Span>,
    cols: usize,
    group_max: usize,
    quantized: Vec<u32>,
    rest: Vec<u32>,
    floats: Vec<u32>,
    forms: Forms,
    precision: Precision,
}

/// A part's place.
#[derive(Debug, Clone, Copy)]
struct Span {
    /// Tokens before it, groups filled up.
    first: usize,
    tokens: usize,
}

/// Some rows of [`Activations`], in groups.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    acts: &'a Activations,
    span: Span,
}

impl<'a> Part<'a> {
    /// Tokens held.
    pub(crate) fn tokens(&self) -> usize {
        self.span.tokens
    }

    /// Tokens of a group, at most.
    pub(crate) fn group_max(&self) -> usize {
        self.acts.group_max
    }

    /// Words of the group that starts at token `start` of the part.
    pub(crate) fn group(&self, start: usize, form: Form) -> &'a [u32] {
        let acts = self.acts;
        let (_, width) = group_at(start, self.span.tokens, acts.group_max);
        let (buffer, ready) = match form {
            Form::Quantized => (&acts.quantized, acts.forms.quantized),
            Form::Rest => (&acts.rest, acts.forms.quantized && acts.precision == Precision::Double),
            Form::Floats => (&acts.floats, acts.forms.floats),
        };
        assert!(ready, "the activations were not prepared as {form:?}");
        let (first, per_token) = (self.span.first + start, words_per_token(acts.cols, form == Form::Floats));
        &buffer[first * per_token..(first + width) * per_token]
    }
}

/// Tokens of the group that starts at token `start` of `tokens`, and its width (a power of two, at least as many).
pub(crate) fn group_at(start: usize, tokens: usize, group_max: usize) -> (usize, usize) {
    let len = (tokens - start).min(group_max);
    (len, len.next_power_of_two())
}

/// Rows of floats that activations are made of.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The rows, `stride` values apart.
    pub x: &'a [f32],
    /// Values from one row to the next.
    pub stride: usize,
    /// Values of a row.
    pub cols: usize,
    /// Applied to each row.
    pub norm: Option<Norm<'a>>,
}

impl Activations {
    /// Tokens held, in all parts.
    pub fn tokens(&self) -> usize {
        self.parts.iter().map(|part| part.tokens).sum()
    }

    /// Columns of each token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Part `index`; all rows are part 0 if they were not gathered.
    pub(crate) fn part(&self, index: usize) -> Part<'_> {
        Part { acts: self, span: self.parts[index] }
    }

    /// Takes `tokens` rows of `cols` values, `stride` apart in `x`, normalized by `norm` if there is one. `forms` says
    /// which forms the following products need (see `Format::float_activations`), `precision` the finest of them.
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
        self.make(pool, level, &Source { x, stride, cols, norm }, None, &[tokens], forms, precision);
    }

    /// Takes the rows `ids` of `source`, which may repeat, in parts of so many rows.
    pub fn gather(
        &mut self,
        pool: &mut Pool,
        level: Level,
        source: &Source<'_>,
        ids: &[u32],
        parts: &[usize],
        forms: Forms,
        precision: Precision,
    ) {
        assert_eq!(parts.iter().sum::<usize>(), ids.len(), "rows of all parts");
        self.make(pool, level, source, Some(ids), parts, forms, precision);
    }

    fn make(
        &mut self,
        pool: &mut Pool,
        level: Level,
        source: &Source<'_>,
        ids: Option<&[u32]>,
        parts: &[usize],
        forms: Forms,
        precision: Precision,
    ) {
        let cols = source.cols;
        assert!(
            !forms.quantized || cols.is_multiple_of(32),
            "quantized products need columns in multiples of 32, not {cols}"
        );
        let group_max = level.run(GroupMax);
        (self.cols, self.group_max, self.forms, self.precision) = (cols, group_max, forms, precision);
        self.parts.clear();
        let (mut padded, mut groups, mut from) = (0, Vec::new(), 0);
        for &tokens in parts {
            self.parts.push(Span { first: padded, tokens });
            for start in (0..tokens).step_by(group_max) {
                let (len, width) = group_at(start, tokens, group_max);
                groups.push(Rows { source, ids, first: from + start, tokens: len, width });
                padded += width;
            }
            from += tokens;
        }
        let last = ids.map_or(from.checked_sub(1), |ids| ids.iter().max().map(|&id| id as usize));
        let fits = last.is_none_or(|last| last * source.stride + cols <= source.x.len());
        assert!(fits, "row {last:?} of {cols} values, {} apart, of {}", source.stride, source.x.len());

        let double = forms.quantized && precision == Precision::Double;
        let per_token = [(forms.quantized, false), (double, false), (forms.floats, true)]
            .map(|(wanted, floats)| if wanted { words_per_token(cols, floats) } else { 0 });
        let mut left = [
            room(&mut self.quantized, padded * per_token[0]),
            room(&mut self.rest, padded * per_token[1]),
            room(&mut self.floats, padded * per_token[2]),
        ];
        let mut tasks: Vec<_> = groups
            .into_iter()
            .map(|rows| {
                let outs: [&mut [u32]; 3] = std::array::from_fn(|i| {
                    let (out, behind) = std::mem::take(&mut left[i]).split_at_mut(rows.width * per_token[i]);
                    left[i] = behind;
                    out
                });
                (rows, outs)
            })
            .collect();
        pool.run_chunks(&mut tasks, 1, |_, tasks| {
            for (rows, [quantized, rest, floats]) in tasks {
                if !quantized.is_empty() {
                    let rest = Some(&mut **rest).filter(|rest| !rest.is_empty());
                    level.run(Quantize { rows, out: quantized, rest });
                }
                if !floats.is_empty() {
                    level.run(Interleave { rows, out: floats });
                }
            }
        });
    }
}

/// The first `words` of a buffer that only grows.
fn room(buffer: &mut Vec<u32>, words: usize) -> &mut [u32] {
    if buffer.len() < words {
        buffer.resize(words, 0);
    }
    &mut buffer[..words]
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
    source: &'a Source<'a>,
    /// Rows of the source, if they are not its own order.
    ids: Option<&'a [u32]>,
    first: usize,
    tokens: usize,
    width: usize,
}

impl Rows<'_> {
    /// Row `t`, and the factors of its columns and of all of it.
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, t: usize) -> (&[f32], Option<(&[f32], f32)>) {
        let Source { x, stride, cols, norm } = *self.source;
        let id = self.ids.map_or(self.first + t, |ids| ids[self.first + t] as usize);
        let row = &x[id * stride..][..cols];
        (row, norm.map(|norm| (&norm.weight[..cols], rms_scale(s, row, norm.epsilon))))
    }
}

struct Quantize<'a> {
    rows: &'a Rows<'a>,
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
    rows: &'a Rows<'a>,
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
