//! Activations, made ready for the matrix products: quantized to 8 bits, or as floats.
//!
//! Quantized columns have a scale for each 32, and a step for each 16: the scale times a power of two. So the dot products of both
//! halves are added as floats, the coarser one with a larger exponent, and scaled once.
//!
//! Each token is quantized by itself, so batch neighbours cannot matter. Tokens are interleaved in groups of G (1, 2, 4,
//! 8 or 16: as many as an instruction set has accumulators for). For each 32 columns a group holds `BLOCK_WORDS` rows
//! of G words: eight with four columns each, then what the constants below name. The layout depends on the instruction
//! set, the results do not.
//!
//! A group's forms lie side by side: the quantized words, those of the rest, the floats.
//!
//! Rows may be gathered into parts, each of which begins with a group of its own: the tokens of an expert.
//!
//! With [`Precision::Double`] the rest of each value is quantized too, in a buffer of the same layout: products with both
//! are added, which gives twice the multiplications and 254 times the resolution.

use crate::isa::Level;
use crate::math::sum16;
use crate::simd::{Op, Simd};
use crate::threads::Pool;
use std::ops::Range;

/// Rows of words for 32 columns.
pub(crate) const BLOCK_WORDS: usize = 14;
/// Scale, a float: the finer of the two steps.
pub(crate) const SCALE: usize = 8;
/// What the steps of the first and the last 16 columns are of the scale: what is added to the bits of a float to multiply it with
/// that power of two. One is 0.
pub(crate) const STRETCH: [usize; 2] = [9, 10];
/// Sum of the quantized columns times their steps, a float.
pub(crate) const SUM: usize = 11;
/// Sums of the first and the last 16 quantized columns, negated, as integers.
pub(crate) const NEG_SUM: [usize; 2] = [12, 13];

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

impl Form {
    const ALL: usize = 3;
}

/// Activations of a batch for weights of `cols` columns.
#[derive(Debug, Default)]
pub struct Activations {
    /// One for all rows, or those that rows were gathered into.
    parts: Vec<Span>,
    cols: usize,
    /// Tokens of the widest group.
    group_max: usize,
    /// The groups, one after the other; it only grows.
    words: Vec<u32>,
    /// Words of a token in each form.
    form_words: [usize; Form::ALL],
    /// Which rows each group takes, and its place, in tokens; both only grow.
    groups: Vec<Group>,
    places: Vec<Range<usize>>,
}

/// Rows that make a group.
#[derive(Debug, Clone, Copy)]
struct Group {
    /// The first, among those that were asked for.
    first: usize,
    tokens: usize,
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
        group_max(self.span.tokens, self.acts.group_max)
    }

    /// Whether so few tokens are multiplied with packed weights; for more, weights are unpacked first.
    pub(crate) fn is_few(&self) -> bool {
        is_few(self.span.tokens, self.acts.group_max)
    }

    /// Words of the group that starts at token `start` of the part.
    pub(crate) fn group(&self, start: usize, form: Form) -> &'a [u32] {
        let acts = self.acts;
        let (_, width) = group_at(start, self.span.tokens, self.group_max());
        let (before, len) = (&acts.form_words[..form as usize], acts.form_words[form as usize]);
        assert!(len > 0, "the activations were not prepared as {form:?}");
        let place = (self.span.first + start) * acts.token_words() + width * before.iter().sum::<usize>();
        &acts.words[place..place + width * len]
    }
}

/// Tokens of the widest group that weights are unpacked for as they are multiplied.
const DIRECT_GROUP_MAX: usize = 8;
/// So many of these groups are less work than to unpack the weights first.
const DIRECT_GROUPS_MAX: usize = 4;

fn is_few(tokens: usize, widest: usize) -> bool {
    tokens <= DIRECT_GROUPS_MAX * widest.min(DIRECT_GROUP_MAX)
}

/// Tokens of a group, at most, if there are `tokens` and an instruction set takes `widest`.
fn group_max(tokens: usize, widest: usize) -> usize {
    if is_few(tokens, widest) { widest.min(DIRECT_GROUP_MAX) } else { widest }
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

    /// Words of a token in all forms.
    fn token_words(&self) -> usize {
        self.form_words.iter().sum()
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
        (self.cols, self.group_max) = (cols, level.run(GroupMax));
        let double = forms.quantized && precision == Precision::Double;
        self.form_words = [(forms.quantized, false), (double, false), (forms.floats, true)]
            .map(|(wanted, floats)| if wanted { words_per_token(cols, floats) } else { 0 });
        let rows = self.cut(parts);
        let last = ids.map_or(rows.checked_sub(1), |ids| ids.iter().max().map(|&id| id as usize));
        let fits = last.is_none_or(|last| last * source.stride + cols <= source.x.len());
        assert!(fits, "row {last:?} of {cols} values, {} apart, of {}", source.stride, source.x.len());

        let row_len = self.token_words();
        let padded = self.places.last().map_or(0, |place| place.end);
        if self.words.len() < padded * row_len {
            self.words.resize(padded * row_len, 0);
        }
        let Self { words, groups, places, form_words, .. } = self;
        pool.run_bands(words, row_len, places, row_len.max(1), |i, _, cell| {
            let (Group { first, tokens }, width) = (groups[i], places[i].len());
            let rows = Rows { source, ids, first, tokens, width };
            let (quantized, others) = cell.all().split_at_mut(width * form_words[0]);
            let (rest, floats) = others.split_at_mut(width * form_words[1]);
            if !quantized.is_empty() {
                let rest = Some(rest).filter(|rest| !rest.is_empty());
                level.run(Quantize { rows: &rows, out: quantized, rest });
            }
            if !floats.is_empty() {
                level.run(Interleave { rows: &rows, out: floats });
            }
        });
    }

    /// Cuts parts of so many rows into groups; the rows of all.
    fn cut(&mut self, parts: &[usize]) -> usize {
        self.parts.clear();
        self.groups.clear();
        self.places.clear();
        let (mut padded, mut from) = (0, 0);
        for &tokens in parts {
            self.parts.push(Span { first: padded, tokens });
            let group_max = group_max(tokens, self.group_max);
            for start in (0..tokens).step_by(group_max) {
                let (len, width) = group_at(start, tokens, group_max);
                self.groups.push(Group { first: from + start, tokens: len });
                self.places.push(padded..padded + width);
                padded += width;
            }
            from += tokens;
        }
        from
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
    fn row<S: Simd>(&self, s: S, t: usize) -> (&[f32], Factors<'_>) {
        let Source { x, stride, cols, norm } = *self.source;
        // No closures here: they are compiled without the instructions of `S`.
        let id = match self.ids {
            Some(ids) => ids[self.first + t] as usize,
            None => self.first + t,
        };
        let row = &x[id * stride..][..cols];
        match norm {
            Some(norm) => (row, Factors(Some((&norm.weight[..cols], rms_scale(s, row, norm.epsilon))))),
            None => (row, Factors(None)),
        }
    }
}

/// What a row is multiplied with on the way in: all columns by one factor, then each by its own.
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a>(pub(crate) Option<(&'a [f32], f32)>);

impl<'a> Factors<'a> {
    /// Those of the columns from `first` on.
    #[inline(always)]
    fn at(self, first: usize) -> Factors<'a> {
        match self.0 {
            Some((weight, scale)) => Factors(Some((&weight[first..], scale))),
            None => self,
        }
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
            if let Some(rest) = &mut self.rest {
                rest.fill(0);
            }
        }
        for t in 0..self.rows.tokens {
            let (row, factors) = self.rows.row(s, t);
            quantize_row(s, row, factors, width, t, self.out, self.rest.as_deref_mut());
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
            let (row, factors) = self.rows.row(s, t);
            for (k, &x) in row.iter().enumerate() {
                let x = match factors.0 {
                    Some((weight, scale)) => x * scale * weight[k],
                    None => x,
                };
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

/// Columns that are quantized together: enough that scales are divided out a vector at a time.
const STRIP: usize = 256;
/// Runs of 16 columns in a strip, each with a step of its own.
const STRIP_STEPS: usize = STRIP / 16;
/// The most that steps of the same 32 columns differ by: 2⁷.
const STEP_RATIO_MAX: f32 = 128.0;
/// Keeps 1 / step finite where all columns are zero.
const LARGEST_MIN: f32 = 1e-30;

/// Quantizes a row, times `factors`, into row `row` of the blocks `out` of a group of `width`; what is left over into `rest`.
#[inline(always)]
pub(crate) fn quantize_row<S: Simd>(
    s: S,
    x: &[f32],
    factors: Factors<'_>,
    width: usize,
    row: usize,
    out: &mut [u32],
    mut rest: Option<&mut [u32]>,
) {
    for (i, x) in x.chunks(STRIP).enumerate() {
        let mut strip = Strip::new(s, x, factors.at(STRIP * i));
        let words = BLOCK_WORDS * width * (STRIP / 32 * i)..;
        strip.round(s, x.len(), width, row, &mut out[words.clone()]);
        if let Some(rest) = &mut rest {
            strip.refine(s);
            strip.round(s, x.len(), width, row, &mut rest[words]);
        }
    }
}

/// Columns of one token on their way into 8 bits.
struct Strip {
    /// What is still to be put into steps.
    values: [f32; STRIP],
    steps: [f32; STRIP_STEPS],
    /// 1 / step.
    inverses: [f32; STRIP_STEPS],
}

impl Strip {
    /// Takes up to [`STRIP`] columns. Steps are a 127th of the largest of 32, halved for each 16 as often as the largest of these
    /// allows.
    #[inline(always)]
    fn new<S: Simd>(s: S, x: &[f32], factors: Factors<'_>) -> Strip {
        let mut strip = Strip { values: [0.0; STRIP], steps: [0.0; STRIP_STEPS], inverses: [0.0; STRIP_STEPS] };
        let mut largest = [LARGEST_MIN; STRIP_STEPS];
        for (i, (x, values)) in x.chunks_exact(16).zip(strip.values.chunks_exact_mut(16)).enumerate() {
            let mut most = s.f_splat(0.0);
            for at in (0..16).step_by(S::LANES) {
                let mut v = s.f_load(&x[at..]);
                if let Some((weight, scale)) = factors.0 {
                    v = s.f_mul(s.f_mul(v, s.f_splat(scale)), s.f_load(&weight[16 * i + at..]));
                }
                s.f_store(v, &mut values[at..]);
                most = s.f_max(s.f_abs(v), most);
            }
            largest[i] = s.f_reduce_max(most).max(LARGEST_MIN);
        }
        let mut of_both = [0.0; STRIP_STEPS];
        for (of_both, pair) in of_both.chunks_exact_mut(2).zip(largest.chunks_exact(2)) {
            of_both.fill(pair[0].max(pair[1]));
        }
        let (steps, exponent) = (s.f_splat(127.0), s.v_splat(0x7f80_0000));
        for at in (0..STRIP_STEPS).step_by(S::LANES) {
            let of_both = s.f_load(&of_both[at..]);
            let ratio = s.f_min(s.f_div(of_both, s.f_load(&largest[at..])), s.f_splat(STEP_RATIO_MAX));
            // The power of two below it; multiplying with that and dividing by it is exact.
            let finer = s.v_as_f(s.v_and(s.f_as_v(ratio), exponent));
            s.f_store(s.f_div(s.f_div(of_both, steps), finer), &mut strip.steps[at..]);
            s.f_store(s.f_mul(s.f_div(steps, of_both), finer), &mut strip.inverses[at..]);
        }
        strip
    }

    /// Takes finer steps for the rest: it is at most half a step, 127 of the new ones.
    #[inline(always)]
    fn refine<S: Simd>(&mut self, s: S) {
        let finer = s.f_splat(254.0);
        for at in (0..STRIP_STEPS).step_by(S::LANES) {
            s.f_store(s.f_div(s.f_load(&self.steps[at..]), finer), &mut self.steps[at..]);
            s.f_store(s.f_mul(s.f_load(&self.inverses[at..]), finer), &mut self.inverses[at..]);
        }
    }

    /// Writes `len` columns in whole steps to row `row` of the blocks `out` of a group of `width`, and keeps what is left
    /// over.
    #[inline(always)]
    fn round<S: Simd>(&mut self, s: S, len: usize, width: usize, row: usize, out: &mut [u32]) {
        let mut sums = [0.0; STRIP_STEPS];
        let mut bytes = [0i8; STRIP];
        for i in 0..len / 16 {
            let (step, inverse) = (s.f_splat(-self.steps[i]), s.f_splat(self.inverses[i]));
            let mut sum = s.f_splat(0.0);
            for at in (16 * i..16 * i + 16).step_by(S::LANES) {
                let v = s.f_load(&self.values[at..]);
                let q = s.f_round(s.f_mul(v, inverse));
                s.f_store_i8(q, &mut bytes[at..]);
                s.f_store(s.f_fma(q, step, v), &mut self.values[at..]);
                sum = s.f_add(sum, q);
            }
            // Whole numbers: exact in any order.
            sums[i] = s.f_reduce_add(sum);
        }
        let mut neg_sums = [0u8; 4 * STRIP_STEPS];
        for at in (0..STRIP_STEPS).step_by(S::LANES) {
            let neg = s.f_sub(s.f_splat(0.0), s.f_load(&sums[at..]));
            s.v_store(s.f_to_v(neg), &mut neg_sums[4 * at..]);
        }
        let (words, _) = bytes.as_chunks::<4>();
        let (neg_sums, _) = neg_sums.as_chunks::<4>();
        for b in 0..len / 32 {
            let out = &mut out[BLOCK_WORDS * width * b..][..BLOCK_WORDS * width];
            for i in 0..8 {
                let word = words[8 * b + i];
                out[i * width + row] = u32::from_le_bytes([word[0] as u8, word[1] as u8, word[2] as u8, word[3] as u8]);
            }
            let [low, high] = [self.steps[2 * b], self.steps[2 * b + 1]];
            let scale = low.min(high);
            out[SCALE * width + row] = scale.to_bits();
            // Their mantissas are the same.
            out[STRETCH[0] * width + row] = low.to_bits() - scale.to_bits();
            out[STRETCH[1] * width + row] = high.to_bits() - scale.to_bits();
            out[SUM * width + row] = (low * sums[2 * b] + high * sums[2 * b + 1]).to_bits();
            out[NEG_SUM[0] * width + row] = u32::from_le_bytes(neg_sums[2 * b]);
            out[NEG_SUM[1] * width + row] = u32::from_le_bytes(neg_sums[2 * b + 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// 32 quantized columns of a token alone, as products see them.
    struct Block {
        steps: [f32; 2],
        values: [i8; 32],
        sum: f32,
        negated_sums: [i32; 2],
    }

    fn block(words: &[u32]) -> Block {
        assert_eq!(words.len(), BLOCK_WORDS);
        let steps = STRETCH.map(|at| f32::from_bits(words[SCALE] + words[at]));
        let bytes: Vec<i8> = words[..8].iter().flat_map(|w| w.to_le_bytes()).map(|b| b as i8).collect();
        let values = bytes.try_into().expect("four in each of eight words");
        Block { steps, values, sum: f32::from_bits(words[SUM]), negated_sums: NEG_SUM.map(|at| words[at] as i32) }
    }

    /// Columns between -1 and 1, except that the first of each 16 are 1 and -1, times a size for each 16.
    fn columns(sizes: &[f32]) -> Vec<f32> {
        let shape = |i: usize| if i < 2 { 1.0 - 2.0 * i as f32 } else { (i * 37 % 101) as f32 / 50.0 - 1.0 };
        sizes.iter().flat_map(|size| (0..16).map(move |i| size * shape(i))).collect()
    }

    /// Each of two halves is so much of the larger one's largest; how often its step is halved.
    const HALVINGS: [(f32, i32); 10] = [
        (1.0, 0),
        (0.75, 0),
        (0.500_001, 0),
        (0.5, 1),
        (0.499_999, 1),
        (0.25, 2),
        (0.02, 5),
        (1.0 / 128.0, 7),
        (1.0 / 1000.0, 7),
        (0.0, 7),
    ];

    #[test]
    fn the_smaller_half_of_32_columns_has_a_step_halved_as_often_as_its_largest_allows() {
        for level in Isa::ALL.iter().filter_map(|&isa| Level::new(isa)) {
            for (share, halvings) in HALVINGS {
                for large in [1.0f32, 3.7, 1e-12, 6e20] {
                    for sizes in [[large, large * share], [large * share, large]] {
                        let (x, mut acts) = (columns(&sizes), Activations::default());
                        let forms = Forms { quantized: true, floats: false };
                        acts.fill(&mut Pool::new(1), level, &x, 32, 32, 1, None, forms, Precision::Single);
                        let block = block(acts.part(0).group(0, Form::Quantized));
                        check(&x, &sizes, halvings, &block);
                    }
                }
            }
        }
    }

    fn check(x: &[f32], sizes: &[f32; 2], halvings: i32, block: &Block) {
        let what = format!("{sizes:?}: {:?}", block.steps);
        let finer = usize::from(sizes[1] < sizes[0]);
        let [coarse, fine] = [block.steps[1 - finer], block.steps[finer]];
        assert_eq!(coarse, sizes[1 - finer] / 127.0, "{what}");
        assert_eq!(fine, coarse / 2f32.powi(halvings), "halved {halvings} times, {what}");
        assert_eq!(coarse.to_bits() << 9, fine.to_bits() << 9, "one mantissa, {what}");
        let mut exact = 0.0;
        for half in 0..2 {
            let (step, range) = (block.steps[half], 16 * half..16 * half + 16);
            let mut sum = 0;
            for (&x, &q) in x[range.clone()].iter().zip(&block.values[range]) {
                let off = (f64::from(x) - f64::from(q) * f64::from(step)).abs();
                // Half a step, and what rounding 1 / step costs a value of 127 steps.
                assert!(off <= f64::from(step) * 0.500_05, "{x} is {q} steps, {what}");
                sum += i32::from(q);
            }
            assert_eq!(block.negated_sums[half], -sum, "{what}");
            exact += f64::from(step) * f64::from(sum);
        }
        let error = (f64::from(block.sum) - exact).abs();
        assert!(error <= 1e-4 * f64::from(coarse), "{} for {exact}, {what}", block.sum);
        let used = block.values.iter().map(|q| q.unsigned_abs()).max();
        assert_eq!(used, Some(127), "no bit is wasted, {what}");
    }
}
