//! The forward pass.

use crate::Error;
use crate::config::{Config, Family};
use crate::kv::groups::LayerGroups;
use crate::kv::store::KvStore;
use crate::latents;
use crate::moe::{self, source::ExpertSource};
use crate::record::StepRecord;
use crate::rope::RopeTable;
use crate::weights::{KeyPrior, Layer, Mlp, Weights};
use kernels::activations::{Activations, Forms, Norm, Precision};
use kernels::attention::{self, KV_BLOCK, KvBlocks, KvType, Shape, Terms};
use kernels::isa::Level;
use kernels::matmul::{Matrix, Output, matmul, matmul_gated};
use kernels::ops;
use kernels::threads::Pool;
use residency::kv::{BlockId, Tables};
use std::ops::Range;

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
#[derive(Debug)]
struct Part<'a> {
    block: BlockId,
    rows: &'a mut [f32],
    /// Of the first row.
    position: usize,
    /// The layer's part of the block.
    kv: &'a mut [u8],
}

/// Every buffer of a step; they only grow.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// What steps took, if that is wanted.
    pub(crate) records: Option<Vec<StepRecord>>,
    /// Residual stream, `[tokens, embedding_len]`.
    pub(crate) x: Vec<f32>,
    /// Queries, keys and values side by side, `[tokens, (heads + 2 heads_kv) * head_len]`.
    pub(crate) qkv: Vec<f32>,
    /// Attention output, `[tokens, heads * head_len]`.
    pub(crate) attended: Vec<f32>,
    pub(crate) latents: latents::Scratch,
    /// Feed-forward middle, `[tokens, feed_forward_len padded]`.
    middle: Vec<f32>,
    /// A layer part's output before its norm, `[tokens, embedding_len padded]`.
    pub(crate) part: Vec<f32>,
    /// The residual stream normalized, for layers of experts, `[tokens, embedding_len]`.
    pub(crate) normed: Vec<f32>,
    pub(crate) moe: moe::Scratch,
    /// `[asked, vocab_len padded]`.
    logits: Vec<f32>,
    pub(crate) acts: Activations,
    pub(crate) attention: attention::Scratch,
    /// Lists of a layer, kept for their room.
    parts: Vec<Part<'static>>,
    pub(crate) views: KvViews<'static>,
    pub(crate) attended_runs: Vec<attention::Run<'static>>,
}

impl Scratch {
    /// Bytes that its own buffers take; the kernels' are not counted.
    pub(crate) fn bytes(&self) -> u64 {
        let buffers = [&self.x, &self.qkv, &self.attended, &self.middle, &self.part, &self.logits];
        buffers.iter().map(|buffer| (size_of::<f32>() * buffer.capacity()) as u64).sum::<u64>() + self.latents.bytes()
    }
}

/// What the forward pass works with.
pub(crate) struct Forward<'a> {
    pub(crate) family: &'a Family,
    pub(crate) config: &'a Config,
    pub(crate) weights: &'a Weights,
    /// `--drop-cold-experts`: the share of an equal part below which a choice may be left out.
    pub(crate) drop_cold_experts: Option<f32>,
    pub(crate) expert_source: &'a dyn ExpertSource,
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

pub(crate) fn grow(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// An empty list in the room of another one, of elements that differ in nothing but what they borrow.
pub(crate) fn recycled<A, B>(list: &mut Vec<A>) -> Vec<B> {
    let mut list = std::mem::take(list);
    list.clear();
    // The standard library collects into the memory that it iterates over, where sizes agree; a test counts.
    list.into_iter().map(|_| unreachable!("an empty list")).collect()
}

/// Where `layer`, which is of `shape`, has its bytes in a KV block.
fn layer_part(kv: &KvStore, groups: &LayerGroups, shape: &Shape, layer: usize) -> Range<usize> {
    let start = groups.place(layer).1 * (kv.block_bytes() / groups.layers);
    start..start + shape.block_bytes()
}

/// The parts that a layer has of KV blocks, run by run.
#[derive(Debug, Default)]
pub(crate) struct KvViews<'a> {
    blocks: Vec<&'a [u8]>,
    /// Where each run's end.
    ends: Vec<usize>,
}

impl<'a> KvViews<'a> {
    /// Those of `layer`, which is of `shape`, in the room of others.
    pub(crate) fn of(
        room: &mut KvViews<'static>,
        kv: &'a KvStore,
        groups: &LayerGroups,
        shape: &Shape,
        layer: usize,
        runs: &[Run<'_>],
    ) -> KvViews<'a> {
        let mut views = KvViews { blocks: recycled(&mut room.blocks), ends: recycled(&mut room.ends) };
        let (group, used) = (groups.place(layer).0, layer_part(kv, groups, shape, layer));
        for run in runs {
            let part = |id| &kv.block(id)[used.clone()];
            // Behind the window nothing is read.
            let table = (0..run.tables.len()).map(|i| run.tables.block(group, i).map_or(&[][..], part));
            views.blocks.extend(table);
            views.ends.push(views.blocks.len());
        }
        views
    }

    /// Each run's.
    pub(crate) fn by_run(&self) -> impl Iterator<Item = KvBlocks<'_>> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let blocks = &self.blocks[start..end];
            start = end;
            KvBlocks { blocks }
        })
    }

    /// Gives the room back.
    pub(crate) fn done(mut self, room: &mut KvViews<'static>) {
        *room = KvViews { blocks: recycled(&mut self.blocks), ends: self.ends };
    }
}

/// What keys are kept without, if they are quantized.
fn key_prior<'a>(layer: &'a Layer, shape: &Shape) -> Option<&'a KeyPrior> {
    (shape.type_k != KvType::F16).then_some(&layer.key_prior)
}

impl<'a> Forward<'a> {
    fn rope_of(&self, shape: &Shape) -> &'a RopeTable {
        if shape.window.is_some() { self.rope_window } else { self.rope }
    }

    /// Computes `tokens`, cut into `runs`; `asked` are the rows whose logits are wanted, ascending. Returns their logits,
    /// `[asked, padded vocab]`. An error if weights cannot be read; then the caches hold nothing that may be used.
    pub(crate) fn run(&mut self, tokens: &[u32], runs: &[Run<'_>], asked: &[usize]) -> Result<&[f32], Error> {
        let (n, width) = (tokens.len(), self.config.embedding_len);
        self.embed(tokens)?;
        let mut rows = n;
        for (i, layer) in self.weights.layers.iter().enumerate() {
            self.weights.ensure(i)?;
            self.guess_first_experts(i, n);
            self.attend(i, layer, runs, n);
            if i + 1 == self.config.layers {
                // Nothing reads the other rows any more.
                self.keep_rows(asked, i);
                rows = asked.len();
            }
            if rows > 0 {
                self.attention_out(layer, rows);
                self.feed_forward(i, layer, rows)?;
                if let Some(scale) = layer.out_scale {
                    let x = &mut self.scratch.x[..rows * width];
                    self.pool.run_chunks(x, width, |_, row| row.iter_mut().for_each(|x| *x *= scale));
                }
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
        let scale = self.config.logit_scale;
        if scale != 1.0 {
            self.pool.run_chunks(logits, 4096, |_, x| x.iter_mut().for_each(|x| *x *= scale));
        }
        if let Some(cap) = self.config.logit_cap {
            let level = self.level;
            self.pool.run_chunks(logits, 4096, |_, x| ops::soft_cap(level, x, cap));
        }
        self.weights.check()?;
        Ok(logits)
    }

    fn embed(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let (weights, level, width) = (self.weights, self.level, self.config.embedding_len);
        let scale = Some(self.config.embedding_scale).filter(|&scale| scale != 1.0);
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
        if let Some(latents) = &layer.latents {
            return self.attend_latents(index, layer, latents, runs, n);
        }
        let (c, level, s) = (self.config, self.level, &mut *self.scratch);
        let shape = c.shape(index, self.kv_types);
        let v = layer.v.as_ref().unwrap_or(&layer.k);
        let mut matrices = [&layer.q, &layer.k, v].map(|w| self.weights.matrix(w));
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
        let (q_len, kv_len) = (shape.heads * shape.head_len, shape.heads_kv * shape.head_len);
        let row_len = q_len + 2 * kv_len;
        let qkv = grow(&mut s.qkv, n * row_len);
        matmul(self.pool, level, &matrices, &s.acts, qkv, Output::Store);

        self.rotate_and_store(&shape, index, layer, runs, row_len);
        let turns = self.rope_of(&shape).turns();
        let s = &mut *self.scratch;
        let views = KvViews::of(&mut s.views, self.kv, self.groups, &shape, index, runs);
        let mut parts = recycled(&mut s.attended_runs);
        parts.extend(runs.iter().zip(views.by_run()).map(|(run, kv)| attention::Run {
            kv,
            first: run.first,
            tokens: run.len,
            position: run.position,
        }));
        let attended = grow(&mut s.attended, n * q_len);
        let terms = Terms {
            sinks: layer.sinks.as_deref(),
            key_bias: key_prior(layer, &shape).and_then(|prior| prior.key_bias(turns)),
        };
        attention::attention(self.pool, level, &shape, &parts, &s.qkv, row_len, terms, attended, &mut s.attention);
        s.attended_runs = recycled(&mut parts);
        views.done(&mut s.views);
    }

    /// Normalizes and rotates queries and keys, and writes keys and values into the KV cache.
    fn rotate_and_store(&mut self, shape: &Shape, index: usize, layer: &Layer, runs: &[Run<'_>], row_len: usize) {
        let (c, level) = (self.config, self.level);
        let (q_len, kv_len) = (shape.heads * shape.head_len, shape.heads_kv * shape.head_len);
        let (rope, prior) = (self.rope_of(shape), key_prior(layer, shape));
        self.store(shape, index, runs, row_len, |row, position, kv| {
            let (q, rest) = row.split_at_mut(q_len);
            let (k, v) = rest.split_at_mut(kv_len);
            if let (Some(q_norm), Some(k_norm)) = (&layer.q_norm, &layer.k_norm) {
                ops::rms_norm(level, q, q_norm, c.norm_epsilon);
                ops::rms_norm(level, k, k_norm, c.norm_epsilon);
            }
            if let Some(prior) = prior {
                prior.apply(q, k, shape.head_len);
            }
            let angles = rope.row(position);
            ops::rope(level, q, shape.head_len, angles);
            ops::rope(level, k, shape.head_len, angles);
            if let Some(ones) = &layer.v_norm {
                ops::rms_norm(level, v, ones, c.norm_epsilon);
            }
            attention::write_kv(level, shape, kv, position % KV_BLOCK, q, k, v);
        });
    }

    /// Calls `write` with each row of `qkv`, its position, and the layer's part of the KV block that this is in.
    pub(crate) fn store(
        &mut self,
        shape: &Shape,
        index: usize,
        runs: &[Run<'_>],
        row_len: usize,
        write: impl Fn(&mut [f32], usize, &mut [u8]) + Sync,
    ) {
        let used = layer_part(self.kv, self.groups, shape, index);
        let (group, _) = self.groups.place(index);
        let mut parts = recycled(&mut self.scratch.parts);
        let mut rows = &mut self.scratch.qkv[..];
        for run in runs {
            let (mut position, end) = (run.position, run.position + run.len);
            for i in position / KV_BLOCK..end.div_ceil(KV_BLOCK) {
                let block = run.tables.block(group, i).expect("what is computed is not behind the window");
                let len = (position / KV_BLOCK * KV_BLOCK + KV_BLOCK).min(end) - position;
                let (part, rest) = rows.split_at_mut(len * row_len);
                parts.push(Part { block, rows: part, position, kv: &mut [] });
                (rows, position) = (rest, position + len);
            }
        }
        parts.sort_unstable_by_key(|part| part.block);
        let mut kv = self.kv.blocks_mut();
        for part in &mut parts {
            part.kv = &mut kv.next(part.block)[used.clone()];
        }
        self.pool.run_chunks(&mut parts, 1, |_, parts| {
            for Part { rows, position, kv, .. } in parts {
                for (i, row) in rows.chunks_exact_mut(row_len).enumerate() {
                    write(row, *position + i, kv);
                }
            }
        });
        self.scratch.parts = recycled(&mut parts);
    }

    /// Moves the rows `asked` of the residual stream and of the attention output to the front.
    fn keep_rows(&mut self, asked: &[usize], layer: usize) {
        let (width, q_len) = (self.config.embedding_len, self.weights.layers[layer].attention_out.cols);
        for (to, &from) in asked.iter().enumerate() {
            self.scratch.x.copy_within(from * width..(from + 1) * width, to * width);
            self.scratch.attended.copy_within(from * q_len..(from + 1) * q_len, to * q_len);
        }
    }

    fn attention_out(&mut self, layer: &Layer, n: usize) {
        let (matrix, q_len) = (self.weights.matrix(&layer.attention_out), layer.attention_out.cols);
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

    fn feed_forward(&mut self, index: usize, layer: &Layer, n: usize) -> Result<(), Error> {
        if let Some(mlp) = &layer.mlp {
            self.middle(mlp, &layer.ffn_norm, n);
        }
        let down = layer.mlp.as_ref().map(|mlp| self.weights.matrix(&mlp.down));
        let Some(experts) = &layer.experts else {
            if let Some(down) = down {
                self.add_part(down, layer.ffn_post_norm.as_deref(), n);
            }
            return Ok(());
        };
        // The layer's part begins with what the shared expert makes.
        let s = &mut *self.scratch;
        let part = grow(&mut s.part, n * self.config.embedding_len);
        match down {
            Some(down) => matmul(self.pool, self.level, &[down], &s.acts, part, Output::Store),
            None => part.fill(0.0),
        }
        self.experts(index, experts, &layer.ffn_norm, n)?;
        self.add(layer.ffn_post_norm.as_deref(), n);
        Ok(())
    }

    /// Prepares the middle of a gated feed-forward layer for its downward product.
    fn middle(&mut self, mlp: &Mlp, norm: &[f32], n: usize) {
        let (c, level) = (self.config, self.level);
        let (gate, up) = (self.weights.matrix(&mlp.gate), self.weights.matrix(&mlp.up));
        let norm = Norm { weight: norm, epsilon: c.norm_epsilon };
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
        let forms = Forms::of([mlp.down.format]);
        s.acts.fill(self.pool, level, middle, row_len, gate.rows, n, None, forms, Precision::Single);
    }

    /// Multiplies the prepared activations by `matrix`, normalizes if asked to, and adds the result to the residual stream.
    fn add_part(&mut self, matrix: Matrix<'_>, post_norm: Option<&[f32]>, n: usize) {
        let (width, s) = (self.config.embedding_len, &mut *self.scratch);
        if post_norm.is_none() && self.config.residual_scale == 1.0 {
            matmul(self.pool, self.level, &[matrix], &s.acts, &mut s.x[..n * width], Output::Add);
            return;
        }
        matmul(self.pool, self.level, &[matrix], &s.acts, grow(&mut s.part, n * width), Output::Store);
        self.add(post_norm, n);
    }

    /// Adds the layer's part, normalized if asked to, to the residual stream, as much of it as the model says.
    fn add(&mut self, post_norm: Option<&[f32]>, n: usize) {
        let (c, level, s) = (self.config, self.level, &mut *self.scratch);
        let width = c.embedding_len;
        let part = &mut s.part[..n * width];
        if let Some(weight) = post_norm {
            self.pool.run_chunks(part, width, |_, row| ops::rms_norm(level, row, weight, c.norm_epsilon));
        }
        let part = &*part;
        let x = &mut s.x[..n * width];
        let scale = c.residual_scale;
        self.pool.run_chunks(x, width, |i, row| {
            ops::add_scaled(level, row, &part[i * width..(i + 1) * width], scale);
        });
    }
}
