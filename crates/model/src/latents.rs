//! Attention with latents (MLA): queries are turned to the side of the latents, which are keys and values of all heads at
//! once, and what attention mixes of them becomes the heads' outputs.
//!
//! A query that meets latents, and a mix of them, are several times as long as those of a head of its own. So a batch goes
//! through attention in slices, which changes no result.

use crate::config::{self, Config};
use crate::forward::{Forward, KvViews, Run, grow, recycled};
use crate::weights::{ByHead, Keys, Latents, Layer};
use kernels::PANEL_ROWS;
use kernels::activations::{Activations, Forms, Norm, Precision, Source, token_bytes};
use kernels::attention::{self, HEAD_LEN_MAX, KV_BLOCK, KvBlocks, Terms};
use kernels::isa::Level;
use kernels::matmul::{Band, Matrix, Output, Panels, matmul, matmul_bands};
use kernels::ops;
use kernels::threads::Pool;
use std::ops::Range;

/// Tokens of a slice.
pub(crate) const SLICE_TOKENS: usize = 128;

/// Buffers of a layer's attention beside those of [`crate::forward::Scratch`]; they only grow.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Latents of queries, `[tokens, query_len]`.
    query_latents: Vec<f32>,
    /// `[tokens, heads * (nope_len + rope_len)]`.
    queries: Vec<f32>,
    /// Queries turned to the latents, then the heads' outputs, of a slice: `[heads, tokens, len or value_len]`.
    by_head: Vec<f32>,
    /// Queries as attention takes them, of a slice: `[tokens, heads * head_len]`.
    turned: Vec<f32>,
    /// Latents mixed, of a slice: `[tokens, heads * len]`.
    mixed: Vec<f32>,
    lists: Lists,
}

/// Lists of a slice, kept for their room.
#[derive(Debug, Default)]
struct Lists {
    /// Its rows, head by head.
    rows: Vec<u32>,
    /// How many each head has.
    parts: Vec<usize>,
    bands: Vec<Band<'static>>,
}

impl Scratch {
    pub(crate) fn bytes(&self) -> u64 {
        let buffers = [&self.query_latents, &self.queries, &self.by_head, &self.turned, &self.mixed];
        buffers.iter().map(|buffer| (size_of::<f32>() * buffer.capacity()) as u64).sum()
    }
}

impl Forward<'_> {
    /// Attends; leaves the heads' outputs in `attended`.
    pub(crate) fn attend_latents(
        &mut self,
        index: usize,
        layer: &Layer,
        latents: &Latents,
        runs: &[Run<'_>],
        n: usize,
    ) {
        let (c, level) = (self.config, self.level);
        let (shape, of) = (c.shape(index, self.kv_types), c.latents.expect("the layer has them"));
        self.make_latents(layer, latents, n);
        let rope = self.rope;
        self.store(&shape, index, runs, shape.head_len, |row, position, kv| {
            let (latent, rotated) = row.split_at_mut(of.len);
            ops::rms_norm(level, latent, &latents.norm, c.norm_epsilon);
            ops::rope(level, rotated, c.rope_len, rope.row(position));
            attention::write_kv(level, &shape, kv, position % KV_BLOCK, &[], row, &[]);
        });
        let (weights, s) = (self.weights, &mut *self.scratch);
        let views = KvViews::of(&mut s.views, self.kv, self.groups, &shape, index, runs);
        let (query_len, turned_len) = (of.nope_len + c.rope_len, c.heads * shape.head_len);
        let attended = grow(&mut s.attended, n * c.heads * of.value_len);
        let Scratch { queries, by_head, turned, mixed, lists, .. } = &mut s.latents;
        for first in (0..n).step_by(SLICE_TOKENS) {
            let slice = first..n.min(first + SLICE_TOKENS);
            let m = slice.len();
            lists.begin(c.heads, m);

            let queries = &queries[slice.start * c.heads * query_len..slice.end * c.heads * query_len];
            let nope = Source { x: queries, stride: query_len, cols: of.nope_len, norm: None };
            match latents.keys(weights) {
                Keys::Turned(keys) => by_heads(self.pool, level, keys, &nope, lists, &mut s.acts, by_head),
                Keys::Plain(keys) => by_columns(self.pool, level, keys, &nope, m, by_head),
            }
            let (from, turned) = (&*by_head, grow(turned, m * turned_len));
            self.pool.run_chunks(turned, shape.head_len, |i, q| {
                let (t, head) = (i / c.heads, i % c.heads);
                let (latent, rotated) = q.split_at_mut(of.len);
                latent.copy_from_slice(&from[(head * m + t) * of.len..][..of.len]);
                rotated.copy_from_slice(&queries[i * query_len + of.nope_len..][..c.rope_len]);
                ops::rope(level, rotated, c.rope_len, rope.row(position(runs, slice.start + t)));
            });

            let mut parts = recycled(&mut s.attended_runs);
            parts.extend(runs.iter().zip(views.by_run()).filter_map(|(run, kv)| part(run, kv, &slice)));
            let (mixed, scratch) = (grow(mixed, m * c.heads * of.len), &mut s.attention);
            attention::attention(
                self.pool,
                level,
                &shape,
                &parts,
                turned,
                turned_len,
                Terms::default(),
                mixed,
                scratch,
            );
            s.attended_runs = recycled(&mut parts);

            let mixes = Source { x: mixed, stride: of.len, cols: of.len, norm: None };
            by_heads(self.pool, level, latents.values(weights), &mixes, lists, &mut s.acts, by_head);
            let (from, row_len) = (&*by_head, c.heads * of.value_len);
            let to = &mut attended[slice.start * row_len..slice.end * row_len];
            self.pool.run_chunks(to, row_len, |t, row| {
                for (head, out) in row.chunks_exact_mut(of.value_len).enumerate() {
                    out.copy_from_slice(&from[(head * m + t) * of.value_len..][..of.value_len]);
                }
            });
        }
        views.done(&mut s.views);
    }

    /// Projects the normalized residual stream to queries, and in `qkv` to latents with what is rotated behind each.
    fn make_latents(&mut self, layer: &Layer, latents: &Latents, n: usize) {
        let (weights, c, s) = (self.weights, self.config, &mut *self.scratch);
        let finely = |weight| Matrix { precision: Precision::Double, ..weights.matrix(weight) };
        let (q, k) = (finely(&layer.q), finely(&layer.k));
        let down = latents.query.as_ref().map(|(weight, _)| finely(weight));
        let first = down.unwrap_or(q);
        let norm = Some(Norm { weight: &layer.attention_norm, epsilon: c.norm_epsilon });
        let (level, width, precision) = (self.level, c.embedding_len, Precision::Double);
        let forms = Forms::of([first.format, k.format]);
        s.acts.fill(self.pool, level, &s.x, width, width, n, norm, forms, precision);
        matmul(self.pool, level, &[k], &s.acts, grow(&mut s.qkv, n * k.padded_rows()), Output::Store);
        let Scratch { query_latents, queries, .. } = &mut s.latents;
        let queries = grow(queries, n * q.padded_rows());
        if let (Some((_, norm)), Some(down)) = (&latents.query, down) {
            let made = grow(query_latents, n * down.rows);
            matmul(self.pool, level, &[down], &s.acts, made, Output::Store);
            let norm = Some(Norm { weight: norm, epsilon: c.norm_epsilon });
            let forms = Forms::of([q.format]);
            s.acts.fill(self.pool, level, made, down.rows, down.rows, n, norm, forms, precision);
        }
        matmul(self.pool, level, &[q], &s.acts, queries, Output::Store);
    }
}

/// Bytes of [`Scratch`] for a batch of `rows` rows.
pub(crate) fn scratch_bytes(c: &Config, of: &config::Latents, rows: usize) -> usize {
    let whole = of.query_len + c.heads * (of.nope_len + c.rope_len);
    let slice = c.heads * (of.len.max(of.value_len) + c.head_len + of.len + 1);
    (rows * whole + rows.min(SLICE_TOKENS) * slice) * size_of::<f32>()
}

/// Bytes of activations that products of latents and of each head take, and of what is left of them in double precision.
pub(crate) fn activation_bytes(c: &Config, of: &config::Latents, rows: usize, forms: Forms) -> [usize; 2] {
    let bytes = |cols, forms| token_bytes(cols, forms, Precision::Single);
    let (sliced, quantized) = (rows.min(SLICE_TOKENS) * c.heads, Forms { floats: false, ..forms });
    [forms, quantized].map(|forms| {
        let by_head = sliced * bytes(of.len.max(of.nope_len), forms);
        by_head.max(rows * bytes(of.query_len, forms))
    })
}

/// Multiply-adds of a token in the weights of a layer, but for those behind the heads' outputs.
pub(crate) fn weights(c: &Config, of: &config::Latents) -> u64 {
    let (embed, q_len) = (c.embedding_len, c.heads * (of.nope_len + c.rope_len));
    let queries = if of.query_len == 0 { embed * q_len } else { of.query_len * (embed + q_len) };
    (queries + embed * c.head_len + c.heads * of.len * (of.nope_len + of.value_len)) as u64
}

impl Lists {
    /// Those of a slice of `tokens`.
    fn begin(&mut self, heads: usize, tokens: usize) {
        self.rows.clear();
        self.rows.extend((0..heads).flat_map(|head| (0..tokens).map(move |t| (t * heads + head) as u32)));
        self.parts.clear();
        self.parts.resize(heads, tokens);
    }
}

/// The products of each head's matrix with its rows of `source`: `[heads, tokens, outputs]`. In double precision, as all that
/// becomes keys and values.
fn by_heads(
    pool: &mut Pool,
    level: Level,
    matrices: ByHead<'_>,
    source: &Source<'_>,
    lists: &mut Lists,
    acts: &mut Activations,
    out: &mut Vec<f32>,
) {
    let Lists { rows, parts, bands: room } = lists;
    let (precision, mut first, mut bands) = (Precision::Double, 0, recycled(room));
    bands.extend(parts.iter().enumerate().map(|(part, &tokens)| {
        let rows = first..first + tokens;
        first = rows.end;
        Band { matrix: Matrix { precision, ..matrices.of(part) }, part, rows }
    }));
    let Matrix { format, .. } = bands[0].matrix;
    let row_len = bands[0].matrix.padded_rows();
    acts.gather(pool, level, source, rows, parts, Forms::of([format]), precision);
    matmul_bands(pool, level, &bands, acts, grow(out, rows.len() * row_len));
    *room = recycled(&mut bands);
}

/// The products of the columns of each head's matrix with the head's rows of `source`, which has all heads of a token side by
/// side: `[heads, tokens, columns]`. Each output is a chain over the matrix's rows.
fn by_columns(
    pool: &mut Pool,
    level: Level,
    matrices: ByHead<'_>,
    source: &Source<'_>,
    tokens: usize,
    out: &mut Vec<f32>,
) {
    let (heads, Matrix { cols, format, .. }) = (matrices.heads, matrices.of(0));
    let panel_bytes = PANEL_ROWS * format.row_bytes(cols).expect("whole blocks");
    let out = grow(out, heads * tokens * cols);
    pool.run_chunks(out, tokens * cols, |head, out| {
        out.fill(0.0);
        // The room is for weights that stay in the page cache; others need none.
        let (matrix, mut room, mut weights) = (matrices.of(head), Vec::new(), [0.0; HEAD_LEN_MAX]);
        let weights = &mut weights[..cols];
        for panel in 0..matrix.rows / PANEL_ROWS {
            let bytes = match matrix.panels {
                Panels::Packed(bytes) => &bytes[panel * panel_bytes..][..panel_bytes],
                Panels::Made { by, first } => {
                    room.resize(panel_bytes, 0);
                    by.make(first + panel..first + panel + 1, &mut room);
                    &room
                }
            };
            for lane in 0..PANEL_ROWS {
                format.unpack_row(level, bytes, lane, weights);
                for (t, out) in out.chunks_exact_mut(cols).enumerate() {
                    let x = source.x[(t * heads + head) * source.stride + panel * PANEL_ROWS + lane];
                    ops::add_scaled(level, out, weights, x);
                }
            }
        }
    });
}

/// The position of row `row` of the batch.
fn position(runs: &[Run<'_>], row: usize) -> usize {
    let run = &runs[runs.partition_point(|run| run.first + run.len <= row)];
    run.position + row - run.first
}

/// What of `run` is in the slice, whose first row is 0.
fn part<'a>(run: &Run<'_>, kv: KvBlocks<'a>, slice: &Range<usize>) -> Option<attention::Run<'a>> {
    let rows = run.first.max(slice.start)..(run.first + run.len).min(slice.end);
    (!rows.is_empty()).then(|| attention::Run {
        kv,
        first: rows.start - slice.start,
        tokens: rows.len(),
        position: run.position + rows.start - run.first,
    })
}
