//! Activations, made ready for the matrix products: quantized to 8 bits with a scale per 32 columns, or as floats.
//!
//! Each token is quantized by itself, so batch neighbours cannot matter. Tokens are interleaved in groups of G (1, 2, 4,
//! 8 or 16: as many as an instruction set has accumulators for). For each 32 columns a group holds [`BLOCK_WORDS`] rows
//! of G words: eight with four columns each, then the scale, the scale times the sum of the columns, and the negated sums of
//! all columns, of the first 16 and of the last 16. The layout depends on the instruction set, the results do not.

use crate::isa::Level;
use crate::math::sum16;
use crate::simd::{Op, Simd};
use crate::threads::Pool;

/// Rows of words for 32 columns.
pub(crate) const BLOCK_WORDS: usize = 13;
pub(crate) const SCALE: usize = 8;
pub(crate) const SCALED_SUM: usize = 9;
pub(crate) const NEG_SUM: usize = 10;
pub(crate) const NEG_SUM_LOW: usize = 11;
pub(crate) const NEG_SUM_HIGH: usize = 12;

/// A normalization applied on the way in.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Factor of each column.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub epsilon: f32,
}

/// Activations of a batch for weights of `cols` columns.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    group_max: usize,
    quantized: Vec<u32>,
    floats: Vec<u32>,
    has_quantized: bool,
    has_floats: bool,
}

/// Tokens of the group that starts at `start`, and its width (a power of two, at least as many).
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

    pub(crate) fn group_max(&self) -> usize {
        self.group_max
    }

    /// Words of the group that starts at token `start`: quantized, or floats (`[col][G]`).
    pub(crate) fn group(&self, start: usize, floats: bool) -> &[u32] {
        let (_, width) = group_at(start, self.tokens, self.group_max);
        let per_token = if floats { self.cols } else { self.cols / 32 * BLOCK_WORDS };
        let (buffer, ready) = if floats { (&self.floats, self.has_floats) } else { (&self.quantized, self.has_quantized) };
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
    ) {
        assert!(!forms.quantized || cols.is_multiple_of(32), "quantized products need columns in multiples of 32, not {cols}");
        assert!(tokens == 0 || (tokens - 1) * stride + cols <= x.len(), "{tokens} rows of {cols} in {} values", x.len());
        (self.tokens, self.cols, self.group_max) = (tokens, cols, level.run(GroupMax));
        (self.has_quantized, self.has_floats) = (forms.quantized, forms.floats);
        let group_max = self.group_max;
        let job = |start: usize, out: &mut [u32], floats: bool| {
            let (len, width) = group_at(start, tokens, group_max);
            let rows = &x[start * stride..];
            level.run(FillGroup { rows, stride, cols, len, width, norm, out, floats });
        };
        for (wanted, floats) in [(forms.quantized, false), (forms.floats, true)] {
            if !wanted {
                continue;
            }
            let per_token = if floats { cols } else { cols / 32 * BLOCK_WORDS };
            let buffer = if floats { &mut self.floats } else { &mut self.quantized };
            // Only the last group can be wider than its tokens.
            let padded = tokens + group_max;
            if buffer.len() < padded * per_token {
                buffer.resize(padded * per_token, 0);
            }
            let groups = tokens.div_ceil(group_max.max(1));
            let used = &mut buffer[..groups.saturating_sub(1) * group_max * per_token
                + if tokens == 0 { 0 } else { group_at((groups - 1) * group_max, tokens, group_max).1 * per_token }];
            pool.run_chunks(used, group_max * per_token, |i, out| job(i * group_max, out, floats));
        }
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
    len: usize,
    width: usize,
    norm: Option<Norm<'a>>,
    out: &'a mut [u32],
    floats: bool,
}

impl Op for FillGroup<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.len < self.width {
            self.out.fill(0);
        }
        for t in 0..self.len {
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
                    quantize_block(s, x, norm.map(|(w, scale)| (&w[32 * b..32 * b + 32], scale)), block, self.width, t);
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

#[inline(always)]
fn quantize_block<S: Simd>(s: S, x: &[f32], norm: Option<(&[f32], f32)>, out: &mut [u32], width: usize, t: usize) {
    let mut values = [0.0f32; 32];
    let mut largest = s.f_splat(0.0);
    for at in (0..32).step_by(S::LANES) {
        let mut v = s.f_load(&x[at..]);
        if let Some((weight, scale)) = norm {
            v = s.f_mul(s.f_mul(v, s.f_splat(scale)), s.f_load(&weight[at..]));
        }
        s.f_store(v, &mut values[at..]);
        largest = s.f_max(s.f_abs(v), largest);
    }
    let largest = s.f_reduce_max(largest);
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let mut bytes = [0i8; 32];
    for at in (0..32).step_by(S::LANES) {
        s.f_store_i8(s.f_mul(s.f_load(&values[at..]), s.f_splat(inverse)), &mut bytes[at..]);
    }
    let sum = |half: &[i8]| half.iter().map(|&b| i32::from(b)).sum::<i32>();
    let (low, high) = (sum(&bytes[..16]), sum(&bytes[16..]));
    let (words, _) = bytes.as_chunks::<4>();
    for (i, word) in words.iter().enumerate() {
        out[i * width + t] = u32::from_le_bytes(word.map(|b| b as u8));
    }
    let scale = largest / 127.0;
    out[SCALE * width + t] = scale.to_bits();
    out[SCALED_SUM * width + t] = (scale * (low + high) as f32).to_bits();
    out[NEG_SUM * width + t] = -(low + high) as u32;
    out[NEG_SUM_LOW * width + t] = -low as u32;
    out[NEG_SUM_HIGH * width + t] = -high as u32;
}
