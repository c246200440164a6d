//! Quantization formats: the layout of a panel, packing, and unpacking into dot-product operands. One file per family.
//!
//! A panel holds 16 rows, block by block; a panel block has exactly the bytes of 16 blocks of the file. Per-row scales
//! come first as vectors of 16, then the quantized values: word `i` of a 64-byte vector belongs to row `i`, so that one
//! vector holds four consecutive columns of all rows. Source of the block layouts: ggml-common.h.

mod float;
mod k;
mod k_small;
mod pack;
mod plain;
mod q4;
mod q5;
mod q8;
mod table;

pub(crate) use float::{Bf16, F16, F32, FloatRow};
pub(crate) use k::{Q4_K, Q5_K, Q6_K};
pub(crate) use k_small::{Q2_K, Q3_K};
pub(crate) use pack::Rows;
pub(crate) use plain::{Plain, UnpackPanel};
pub(crate) use q4::{Q4_0, Q4_1};
pub(crate) use q5::{Q5_0, Q5_1};
pub(crate) use q8::Q8_0;
pub(crate) use table::{IQ4_NL, IQ4_NL_VALUES, IQ4_XS, MXFP4};

use crate::PANEL_ROWS;
use crate::isa::Level;
use crate::simd::{Op, Simd};

/// Runs `$e` with `$q` standing for the type of a format whose activations are quantized, `$other` for the rest.
#[rustfmt::skip] // One line for each format.
macro_rules! with_quant {
    ($format:expr, $q:ident => $e:expr, _ => $other:expr) => {{
        use $crate::quant;
        match $format {
            quant::Format::Q4_0 => { type $q = quant::Q4_0; $e }
            quant::Format::Q4_1 => { type $q = quant::Q4_1; $e }
            quant::Format::Q5_0 => { type $q = quant::Q5_0; $e }
            quant::Format::Q5_1 => { type $q = quant::Q5_1; $e }
            quant::Format::Q8_0 => { type $q = quant::Q8_0; $e }
            quant::Format::Q2_K => { type $q = quant::Q2_K; $e }
            quant::Format::Q3_K => { type $q = quant::Q3_K; $e }
            quant::Format::Q4_K => { type $q = quant::Q4_K; $e }
            quant::Format::Q5_K => { type $q = quant::Q5_K; $e }
            quant::Format::Q6_K => { type $q = quant::Q6_K; $e }
            quant::Format::IQ4_NL => { type $q = quant::IQ4_NL; $e }
            quant::Format::IQ4_XS => { type $q = quant::IQ4_XS; $e }
            quant::Format::MXFP4 => { type $q = quant::MXFP4; $e }
            quant::Format::F32 | quant::Format::F16 | quant::Format::BF16 => $other,
        }
    }};
}
pub(crate) use with_quant;

/// Runs `$e` with `$q` standing for the type of any format.
macro_rules! with_format {
    ($format:expr, $q:ident => $e:expr) => {{
        use $crate::quant;
        match $format {
            quant::Format::F32 => { type $q = quant::F32; $e }
            quant::Format::F16 => { type $q = quant::F16; $e }
            quant::Format::BF16 => { type $q = quant::Bf16; $e }
            format => quant::with_quant!(format, $q => $e, _ => unreachable!("float formats have their own arms")),
        }
    }};
}

/// Element format of a weight matrix.
#[allow(non_camel_case_types, missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

impl Format {
    /// Every format.
    pub const ALL: &[Format] = &[
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q2_K,
        Format::Q3_K,
        Format::Q4_K,
        Format::Q5_K,
        Format::Q6_K,
        Format::IQ4_NL,
        Format::IQ4_XS,
        Format::MXFP4,
    ];

    /// Values in a block of one row.
    pub fn block_len(self) -> usize {
        with_format!(self, Q => Q::BLOCK)
    }

    /// Bytes of a block of one row.
    pub fn block_bytes(self) -> usize {
        with_format!(self, Q => Q::BYTES)
    }

    /// Bytes of one row of `cols` values, or `None` if `cols` is no multiple of the block.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        (cols.is_multiple_of(self.block_len())).then(|| cols / self.block_len() * self.block_bytes())
    }

    /// Whether activations stay floats for this format; otherwise they are quantized to 8 bits.
    pub fn float_activations(self) -> bool {
        matches!(self, Format::F32 | Format::F16 | Format::BF16)
    }

    /// Packs up to 16 rows (each of [`Self::row_bytes`]) into `panel` (16 times as many bytes). Missing rows are zero.
    pub fn pack_panel(self, rows: &[&[u8]], panel: &mut [u8]) {
        with_format!(self, Q => pack::pack_panel::<Q>(rows, panel));
    }

    /// Dequantizes row `lane` of a panel into `out` (as many values as the row has).
    pub fn unpack_row(self, level: Level, panel: &[u8], lane: usize, out: &mut [f32]) {
        with_format!(self, Q => level.run(UnpackRow::<Q> { panel, lane, out, _format: std::marker::PhantomData }));
    }
}

/// Extents of a block.
pub(crate) trait Layout: 'static {
    /// Values in a block of one row.
    const BLOCK: usize;
    /// Bytes of a block of one row.
    const BYTES: usize;
}

/// A format of the file: how 16 blocks make a panel block.
pub(crate) trait Packed: Layout {
    /// Blocks that are packed by one call, at most.
    const AT_ONCE: usize = 1;
    /// Writes the panel blocks that `panel` has room for, of the 16 row blocks from byte `at` of their rows on.
    fn pack(rows: &Rows, at: usize, panel: &mut [u8]);
    /// Dequantizes row `lane` of a panel block.
    fn unpack_row<S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]);
}

/// A format whose products with 8-bit activations are integer dot products over 32 columns.
pub(crate) trait Quant: Layout {
    /// Sub-blocks of 32 columns in a block.
    const SUBS: usize = Self::BLOCK / 32;
    /// Quantized values are unsigned and below `2^BITS`.
    const BITS: u32;
    /// The value means `q - OFFSET`; 0 or a power of two, and 128 where `BITS` is 8.
    const OFFSET: u32;
    /// Whether a minimum is added.
    const MIN: bool = false;
    /// Whether each 16 columns have their own scale.
    const HALVES: bool = false;
    /// The form that products with many tokens unpack a panel to.
    type Plain: Quant;
    /// Sub-blocks that are unpacked from the same vectors: 1, 2 or 4.
    const SPAN: usize = 1;
    /// What is prepared once per block.
    type Head<S: Simd>: Copy;
    /// Prepares a block for lanes `h * LANES ..`.
    fn head<S: Simd>(s: S, block: &[u8], h: usize) -> Self::Head<S>;
    /// Operands of sub-block `j`.
    fn sub<S: Simd>(s: S, block: &[u8], h: usize, head: Self::Head<S>, j: usize) -> Sub<S>;
    /// `w[i]` of each sub-block of span `g`, in the order of the sub-blocks; entries past `SPAN` mean nothing. Spans in
    /// order, and `i` in order in each, read the values' memory once and in order.
    #[inline(always)]
    fn words<S: Simd>(s: S, block: &[u8], h: usize, g: usize, i: usize) -> [S::V; 4] {
        [Self::sub(s, block, h, Self::head(s, block, h), g).w[i]; 4]
    }
}

/// `w` of sub-block `j`, by way of [`Quant::words`].
#[inline(always)]
fn sub_words<Q: Quant, S: Simd>(s: S, block: &[u8], h: usize, j: usize) -> [S::V; 8] {
    // No closure: one that is not inlined is compiled without the instructions of `S`.
    let mut w = [s.v_splat(0); 8];
    for (i, w) in w.iter_mut().enumerate() {
        *w = Q::words(s, block, h, j / Q::SPAN, i)[j % Q::SPAN];
    }
    w
}

/// Operands of 32 columns of a panel.
pub(crate) struct Sub<S: Simd> {
    /// Unsigned values, four columns a vector.
    pub(crate) w: [S::V; 8],
    /// Scale of the first 16 columns, or of all.
    pub(crate) scale: S::F,
    /// Scale of the last 16 columns (where `HALVES`).
    pub(crate) scale_high: S::F,
    /// Minimum, to be added (where `MIN`), to the first 16 columns where `HALVES` too.
    pub(crate) min: S::F,
    /// Minimum of the last 16 columns (where `MIN` and `HALVES`).
    pub(crate) min_high: S::F,
}

impl<S: Simd> Sub<S> {
    /// Operands with one scale for all 32 columns, and no minimum.
    #[inline(always)]
    pub(crate) fn new(s: S, w: [S::V; 8], scale: S::F) -> Self {
        let zero = s.f_splat(0.0);
        Self { w, scale, scale_high: zero, min: zero, min_high: zero }
    }
}

struct UnpackRow<'a, Q> {
    panel: &'a [u8],
    lane: usize,
    out: &'a mut [f32],
    _format: std::marker::PhantomData<Q>,
}

impl<Q: Packed> Op for UnpackRow<'_, Q> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let blocks = self.panel.chunks_exact(PANEL_ROWS * Q::BYTES);
        for (block, out) in blocks.zip(self.out.chunks_exact_mut(Q::BLOCK)) {
            Q::unpack_row(s, block, self.lane, out);
        }
    }
}

/// [`Packed::unpack_row`] by way of [`Quant::sub`].
#[inline(always)]
pub(crate) fn unpack_quant_row<Q: Quant, S: Simd>(s: S, block: &[u8], lane: usize, out: &mut [f32]) {
    let (h, lane) = (lane / S::LANES, lane % S::LANES);
    let head = Q::head(s, block, h);
    let mut floats = [0.0; PANEL_ROWS];
    let mut pick = |v: S::F| {
        s.f_store(v, &mut floats);
        floats[lane]
    };
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        let sub = Q::sub(s, block, h, head, j);
        let scales = [pick(sub.scale), pick(if Q::HALVES { sub.scale_high } else { sub.scale })];
        let mins = [pick(sub.min), pick(if Q::HALVES { sub.min_high } else { sub.min })];
        for (i, out) in out.iter_mut().enumerate() {
            // Byte `i % 4` of each word, as an integer that a float holds exactly.
            let q = s.v_and(s.v_shr(sub.w[i / 4], 8 * (i as u32 % 4)), s.v_splat(255));
            let q = pick(s.v_to_f(q)) - Q::OFFSET as f32;
            *out = q.mul_add(scales[i / 16], mins[i / 16]);
        }
    }
}

/// Low nibbles of four vectors, then their high nibbles: the columns of a 32-wide block in order.
#[inline(always)]
fn nibbles<S: Simd>(s: S, q: &[u8], h: usize) -> [S::V; 8] {
    let mask = s.v_splat(0x0f0f_0f0f);
    let mut w = [mask; 8];
    for i in 0..4 {
        let both = s.v_load(&q[64 * i + 4 * S::LANES * h..]);
        w[i] = s.v_and(both, mask);
        w[i + 4] = s.v_and(s.v_shr(both, 4), mask);
    }
    w
}

/// Vector `h` of 16 half-precision values at the start of `from`.
#[inline(always)]
fn halves<S: Simd>(s: S, from: &[u8], h: usize) -> S::F {
    s.f_load_f16(&from[2 * S::LANES * h..])
}
