//! The forward pass.

use crate::Error;
use crate::config::{Config, Family};
use crate::kv::groups::LayerGroups;
use crate::kv::store::KvStore;
use crate::rope::RopeTable;
use crate::weights::{Layer, Weights};
use kernels::activations::{Activations, Forms, Norm, Precision};
use kernels::attention::{self, KV_BLOCK, KvBlocks, KvType, Shape};
use kernels::isa::Level;
use kernels::matmul::{Matrix, Output, matmul, matmul_gated};
use kernels::ops;
use kernels::threads::Pool;
use residency::kv::{BlockId, Tables};

/// Consecutive tokens of one sequence in a batch.
pub(crate) struct Run<'a> {
    /// First row in the batch: where the run before it ends.
    pub(crate) first: usize,
    /// Rows.
    pub(crate) len: usize,
    /// Position of the first.
    pub(crate) position: usize,
    /// The sequence's KV blocks, for all positions up to the end of this run.
    pub(crate) tables: Tables<'a>,
}

/// Rows of queries, keys and values whose positions share a KV block: the work of one task.
struct Part<'a> {
    block: BlockId,
    rows: &'a mut [f32],
    /// Of the first row.
    position: usize,
}

/// Every buffer of a step; they only grow.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Residual stream, `[tokens, embedding_len]`.
    x: Vec<f32>,
    /// Queries, keys and values side by side, `[tokens, (heads + 2 heads_kv) * head_len]`.
    qkv: Vec<f32>,
    /// Attention output, `[tokens, heads * head_len]`.
    attended: Vec<f32>,
    /// Feed-forward middle, `[tokens, feed_forward_len padded]`.
    middle: Vec<f32>,
    /// A layer part's output before its norm, `[tokens, embedding_len padded]`.
    part: Vec<f32>,
    /// `[asked, vocab_len padded]`.
    logits: Vec<f32>,
    acts: Activations,
    attention: attention::Scratch,
}

impl Scratch {
    /// Bytes that its own buffers take; the kernels' are not counted.
    pub(crate) fn bytes(&self) -> u64 {
        let buffers = [&self.x, &self.qkv, &self.attended, &self.middle, &self.part, &self.logits];
        buffers.iter().map(|buffer| (size_of::<f32>() * buffer.capacity()) as u64).sum()
    }
}

/// What the forward pass works with.
pub(crate) struct Forward<'a> {
    pub(crate) family: &'a Family,
    pub(crate) config: &'a Config,
    pub(crate) weights: &'a Weights,
    pub(crate) rope: &'a RopeTable,
    pub(crate) rope_window: &'a RopeTable,
    pub(crate) pool: &'a mut Pool,
    pub(crate) level: Level,
    /// The memory of all KV blocks.
    pub(crate) kv: &'a mut KvStore,
    /// Which layer has which of a sequence's blocks.
    pub(crate) groups: &'a LayerGroups,
    /// Types of keys and values in there.
    pub(crate) kv_types: (KvType, KvType),
    pub(crate) scratch: &'a mut Scratch,
}

fn grow(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// The shape of attention in `layer`, with keys and values of `types`.
pub(crate) fn shape(config: &Config, layer: usize, types: (KvType, KvType)) -> Shape {
    Shape {
        heads: config.heads,
        heads_kv: config.heads_kv,
        head_len: config.head_len,
        scale: config.attention_scale,
        window: if config.layer_has_window(layer) { config.window } else { None },
        soft_cap: config.attention_cap,
        type_k: types.0,
        type_v: types.1,
    }
}

impl Forward<'_> {
    /// Computes `tokens`, cut into `runs`; `asked` are the rows whose logits are wanted, ascending. Returns their logits,
    /// `[asked, padded vocab]`. An error if weights cannot be read; then the caches hold nothing that may be used.
    pub(crate) fn run(&mut self, tokens: &[u32], runs: &[Run<'_>], asked: &[usize]) -> Result<&[f32], Error> {
        let (n, width) = (tokens.len(), self.config.embedding_len);
        self.embed(tokens)?;
        let mut rows = n;
        for (i, layer) in self.weights.layers.iter().enumerate() {
            self.weights.ensure(i)?;
            self.attend(i, layer, runs, n);
            if i + 1 == self.config.layers {
                // Nothing reads the other rows any more.
                self.keep_rows(asked);
                rows = asked.len();
            }
            if rows > 0 {
                self.attention_out(layer, rows);
                self.feed_forward(layer, rows);
            }
        }
        self.weights.check()?;
        if rows == 0 {
            return Ok(&[]);
        }
        self.weights.ensure(self.weights.layers.len())?;
        let output = self.weights.matrix(&self.weights.output);
        let norm = Norm { weight: &self.weights.output_norm, epsilon: self.config.norm_epsilon };
        let s = &mut *self.scratch;
        s.acts.fill(
            self.pool,
            self.level,
            &s.x,
            width,
            width,
            rows,
            Some(norm),
            Forms::of([output.format]),
            Precision::Single,
        );
        let logits = grow(&mut s.logits, rows * output.padded_rows());
        matmul(self.pool, self.level, &[output], &s.acts, logits, Output::Store);
        if let Some(cap) = self.config.logit_cap {
            let level = self.level;
            self.pool.run_chunks(logits, 4096, |_, x| ops::soft_cap(level, x, cap));
        }
        self.weights.check()?;
        Ok(logits)
    }

    fn embed(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let (weights, level, width) = (self.weights, self.level, self.config.embedding_len);
        let scale = self.family.scale_embedding.then(|| (width as f32).sqrt());
        let table = weights.embedding_rows(tokens)?;
        let x = grow(&mut self.scratch.x, tokens.len() * width);
        self.pool.run_chunks(x, width, |i, row| {
            table.unpack(level, i, tokens[i], row);
            if let Some(scale) = scale {
                row.iter_mut().for_each(|x| *x *= scale);
            }
        });
        Ok(())
    }

    /// Projects the normalized residual stream to queries, keys and values, and attends.
    fn attend(&mut self, index: usize, layer: &Layer, runs: &[Run<'_>], n: usize) {
        let (c, level, s) = (self.config, self.level, &mut *self.scratch);
        let shape = shape(c, index, self.kv_types);
        let mut matrices = [&layer.q, &layer.k, &layer.v].map(|w| self.weights.matrix(w));
        for m in &mut matrices {
            m.precision = Precision::Double;
        }
        let norm = Norm { weight: &layer.attention_norm, epsilon: c.norm_epsilon };
        let width = c.embedding_len;
        s.acts.fill(
            self.pool,
            level,
            &s.x,
            width,
            width,
            n,
            Some(norm),
            Forms::of(matrices.map(|m| m.format)),
            Precision::Double,
        );
        let (q_len, kv_len) = (c.heads * c.head_len, c.heads_kv * c.head_len);
        let row_len = q_len + 2 * kv_len;
        let qkv = grow(&mut s.qkv, n * row_len);
        matmul(self.pool, level, &matrices, &s.acts, qkv, Output::Store);

        self.rotate_and_store(&shape, index, layer, runs, row_len);
        let s = &mut *self.scratch;
        let (group, place) = self.groups.place(index);
        let part = |id| &self.kv.block(id)[place * shape.block_bytes()..][..shape.block_bytes()];
        // Behind the window nothing is read.
        let table = |run: &Run<'_>| -> Vec<&[u8]> {
            (0..run.tables.len()).map(|i| run.tables.block(group, i).map_or(&[][..], part)).collect()
        };
        let blocks: Vec<Vec<&[u8]>> = runs.iter().map(table).collect();
        let runs: Vec<attention::Run<'_>> = runs
            .iter()
            .zip(&blocks)
            .map(|(run, blocks)| attention::Run {
                kv: KvBlocks { blocks },
                first: run.first,
                tokens: run.len,
                position: run.position,
            })
            .collect();
        let attended = grow(&mut s.attended, n * q_len);
        attention::attention(self.pool, level, &shape, &runs, &s.qkv, row_len, attended, &mut s.attention);
    }

    /// Normalizes and rotates queries and keys, and writes keys and values into the KV cache.
    fn rotate_and_store(&mut self, shape: &Shape, index: usize, layer: &Layer, runs: &[Run<'_>], row_len: usize) {
        let (c, level) = (self.config, self.level);
        let (q_len, kv_len) = (c.heads * c.head_len, c.heads_kv * c.head_len);
        let rope = if shape.window.is_some() { self.rope_window } else { self.rope };
        let layer_bytes = shape.block_bytes();
        let (group, place) = self.groups.place(index);
        let mut parts = Vec::new();
        let mut rows = &mut self.scratch.qkv[..];
        for run in runs {
            let (mut position, end) = (run.position, run.position + run.len);
            for i in position / KV_BLOCK..end.div_ceil(KV_BLOCK) {
                let block = run.tables.block(group, i).expect("what is computed is not behind the window");
                let len = (position / KV_BLOCK * KV_BLOCK + KV_BLOCK).min(end) - position;
                let (part, rest) = rows.split_at_mut(len * row_len);
                parts.push(Part { block, rows: part, position });
                (rows, position) = (rest, position + len);
            }
        }
        parts.sort_unstable_by_key(|part| part.block);
        let blocks = self.kv.blocks_mut(parts.iter().map(|part| part.block));
        let kv: Vec<&mut [u8]> = blocks.map(|block| &mut block[place * layer_bytes..][..layer_bytes]).collect();
        let mut tasks: Vec<_> = parts.iter_mut().zip(kv).collect();
        self.pool.run_chunks(&mut tasks, 1, |_, tasks| {
            for (Part { rows, position, .. }, kv) in tasks {
                for (i, row) in rows.chunks_exact_mut(row_len).enumerate() {
                    let (q, rest) = row.split_at_mut(q_len);
                    let (k, v) = rest.split_at_mut(kv_len);
                    if let (Some(q_norm), Some(k_norm)) = (&layer.q_norm, &layer.k_norm) {
                        ops::rms_norm(level, q, q_norm, c.norm_epsilon);
                        ops::rms_norm(level, k, k_norm, c.norm_epsilon);
                    }
                    let position = *position + i;
                    let angles = rope.row(position);
                    ops::rope(level, q, c.head_len, angles);
                    ops::rope(level, k, c.head_len, angles);
                    attention::write_kv(level, shape, kv, position % KV_BLOCK, k, v);
                }
            }
        });
    }

    /// Moves the rows `asked` of the residual stream and of the attention output to the front.
    fn keep_rows(&mut self, asked: &[usize]) {
        let (width, q_len) = (self.config.embedding_len, self.config.heads * self.config.head_len);
        for (to, &from) in asked.iter().enumerate() {
            self.scratch.x.copy_within(from * width..(from + 1) * width, to * width);
            self.scratch.attended.copy_within(from * q_len..(from + 1) * q_len, to * q_len);
        }
    }

    fn attention_out(&mut self, layer: &Layer, n: usize) {
        let q_len = self.config.heads * self.config.head_len;
        let matrix = self.weights.matrix(&layer.attention_out);
        let s = &mut *self.scratch;
        s.acts.fill(
            self.pool,
            self.level,
            &s.attended,
            q_len,
            q_len,
            n,
            None,
            Forms::of([matrix.format]),
            Precision::Single,
        );
        self.add_part(matrix, layer.attention_post_norm.as_deref(), n);
    }

    fn feed_forward(&mut self, layer: &Layer, n: usize) {
        let (c, level) = (self.config, self.level);
        let (gate, up, down) =
            (self.weights.matrix(&layer.gate), self.weights.matrix(&layer.up), self.weights.matrix(&layer.down));
        let norm = Norm { weight: &layer.ffn_norm, epsilon: c.norm_epsilon };
        let (width, s) = (c.embedding_len, &mut *self.scratch);
        s.acts.fill(
            self.pool,
            level,
            &s.x,
            width,
            width,
            n,
            Some(norm),
            Forms::of([gate.format, up.format]),
            Precision::Single,
        );
        let row_len = gate.padded_rows();
        let middle = grow(&mut s.middle, n * row_len);
        matmul_gated(self.pool, level, &gate, &up, self.family.gate, &s.acts, middle);
        s.acts.fill(
            self.pool,
            level,
            middle,
            row_len,
            c.feed_forward_len,
            n,
            None,
            Forms::of([down.format]),
            Precision::Single,
        );
        self.add_part(down, layer.ffn_post_norm.as_deref(), n);
    }

    /// Multiplies the prepared activations by `matrix`, normalizes if asked to, and adds the result to the residual stream.
    fn add_part(&mut self, matrix: Matrix<'_>, post_norm: Option<&[f32]>, n: usize) {
        let (c, level, s) = (self.config, self.level, &mut *self.scratch);
        let width = c.embedding_len;
        let x = &mut s.x[..n * width];
        let Some(weight) = post_norm else {
            matmul(self.pool, level, &[matrix], &s.acts, x, Output::Add);
            return;
        };
        let part = grow(&mut s.part, n * width);
        matmul(self.pool, level, &[matrix], &s.acts, part, Output::Store);
        self.pool.run_chunks(part, width, |_, row| ops::rms_norm(level, row, weight, c.norm_epsilon));
        let part = &*part;
        self.pool.run_chunks(x, width, |i, row| ops::add(level, row, &part[i * width..(i + 1) * width]));
    }
}
