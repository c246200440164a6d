//! A model with threads, scratch buffers and the KV caches of its sequences.

use crate::forward::{Forward, Kv, Run, Scratch, shape};
use crate::rope::RopeTable;
use crate::{Error, Model};
use kernels::attention::{KV_BLOCK, KvType};
use kernels::isa::{Isa, Level};
use kernels::threads::Pool;
use std::sync::Arc;

/// A sequence of a [`Runner`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId(pub usize);

/// One token to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The sequence that it extends; its position is the sequence's length.
    pub sequence: SequenceId,
    /// Token id.
    pub token: u32,
    /// Whether its logits are wanted.
    pub logits: bool,
}

/// How to run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerOptions {
    /// Threads that compute, the caller's included.
    pub threads: usize,
    /// Instruction set; `None` takes the best that is there.
    pub isa: Option<Isa>,
    /// Rows computed at once at most (`-ub`).
    pub micro_batch: usize,
    /// Type of the keys in the KV cache.
    pub type_k: KvType,
    /// Type of the values in the KV cache.
    pub type_v: KvType,
}

impl Default for RunnerOptions {
    fn default() -> Self {
        Self { threads: 1, isa: None, micro_batch: 512, type_k: KvType::F16, type_v: KvType::F16 }
    }
}

struct Sequence {
    kv: Kv,
    context_max: usize,
}

/// A model, a thread pool, scratch buffers and the KV caches of its sequences.
pub struct Runner {
    model: Arc<Model>,
    pool: Pool,
    level: Level,
    micro_batch: usize,
    scratch: Scratch,
    rope: RopeTable,
    rope_window: RopeTable,
    sequences: Vec<Option<Sequence>>,
    free_blocks: Vec<Box<[u8]>>,
    block_bytes: usize,
    kv_types: (KvType, KvType),
    logits: Vec<f32>,
}

impl Runner {
    /// A runner for `model`.
    pub fn new(model: Arc<Model>, options: &RunnerOptions) -> Result<Runner, Error> {
        let level = match options.isa {
            Some(isa) => Level::new(isa).ok_or(Error::Isa(isa))?,
            None => Level::detect(),
        };
        let c = &model.config;
        let kv_types = (options.type_k, options.type_v);
        for ty in [kv_types.0, kv_types.1] {
            if !ty.fits(c.head_len) {
                return Err(Error::KvType { ty: ty.name(), head_len: c.head_len });
            }
        }
        let factors = model.weights.rope_factors.as_deref();
        Ok(Runner {
            pool: Pool::new(options.threads.max(1)),
            level,
            micro_batch: options.micro_batch.max(1),
            scratch: Scratch::default(),
            rope: RopeTable::new(c, c.rope_base, c.rope_scale, factors),
            rope_window: RopeTable::new(c, c.rope_base_window, 1.0, factors),
            sequences: Vec::new(),
            free_blocks: Vec::new(),
            block_bytes: c.layers * shape(c, 0, kv_types).block_bytes(),
            kv_types,
            logits: Vec::new(),
            model,
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.level.isa()
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Opens an empty sequence of at most `context_max` positions. Memory is taken as it grows.
    pub fn sequence_open(&mut self, context_max: usize) -> SequenceId {
        let sequence = Some(Sequence { kv: Kv::default(), context_max });
        match self.sequences.iter().position(Option::is_none) {
            Some(i) => {
                self.sequences[i] = sequence;
                SequenceId(i)
            }
            None => {
                self.sequences.push(sequence);
                SequenceId(self.sequences.len() - 1)
            }
        }
    }

    /// Forgets a sequence.
    pub fn sequence_close(&mut self, id: SequenceId) {
        self.sequence_truncate(id, 0);
        self.sequences[id.0] = None;
    }

    /// Positions computed so far.
    pub fn sequence_len(&self, id: SequenceId) -> usize {
        self.sequences[id.0].as_ref().map_or(0, |s| s.kv.len)
    }

    /// Forgets all positions from `len` on.
    pub fn sequence_truncate(&mut self, id: SequenceId, len: usize) {
        if let Some(sequence) = &mut self.sequences[id.0] {
            sequence.kv.len = sequence.kv.len.min(len);
            let keep = sequence.kv.len.div_ceil(KV_BLOCK);
            self.free_blocks.extend(sequence.kv.blocks.drain(keep..));
        }
    }

    /// Types of the keys and the values in the KV cache.
    pub fn kv_types(&self) -> (KvType, KvType) {
        self.kv_types
    }

    /// Bytes of KV cache held now.
    pub fn kv_bytes(&self) -> u64 {
        let used: usize = self.sequences.iter().flatten().map(|s| s.kv.blocks.len()).sum();
        ((used + self.free_blocks.len()) * self.block_bytes) as u64
    }

    /// Bytes of KV cache that a position takes.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (self.block_bytes / KV_BLOCK) as u64
    }

    /// Bytes of KV cache that will be held once sequence `id` has `len` positions.
    pub fn kv_bytes_at(&self, id: SequenceId, len: usize) -> u64 {
        let has = self.sequences[id.0].as_ref().map_or(0, |s| s.kv.blocks.len());
        let new = len.div_ceil(KV_BLOCK).saturating_sub(has + self.free_blocks.len());
        self.kv_bytes() + (new * self.block_bytes) as u64
    }

    /// Takes the memory of all positions of sequence `id` now, which else comes as it grows.
    pub fn sequence_reserve(&mut self, id: SequenceId) {
        if let Some(sequence) = &mut self.sequences[id.0] {
            while sequence.kv.blocks.len() * KV_BLOCK < sequence.context_max {
                // Written, for pages that are only mapped take none.
                let fresh = || vec![1; self.block_bytes].into_boxed_slice();
                sequence.kv.blocks.push(self.free_blocks.pop().unwrap_or_else(fresh));
            }
            self.rope.grow(sequence.context_max);
            self.rope_window.grow(sequence.context_max);
        }
    }

    /// Gives back the KV blocks that no sequence holds; their bytes.
    pub fn kv_trim(&mut self) -> u64 {
        (std::mem::take(&mut self.free_blocks).len() * self.block_bytes) as u64
    }

    /// Computes `rows` in order (any number; cut into micro-batches inside). Returns the logits of the rows that
    /// asked for them, in order: `[asked, vocab_len]`. Errors: a token id outside the vocabulary, a full context, weights
    /// that cannot be read; then all sequences are as long as before.
    pub fn forward(&mut self, rows: &[Row]) -> Result<&[f32], Error> {
        self.admit(rows)?;
        self.logits.clear();
        let before: Vec<(SequenceId, usize)> = rows
            .chunk_by(|a, b| a.sequence == b.sequence)
            .map(|r| r[0].sequence)
            .map(|id| (id, self.sequence_len(id)))
            .collect();
        let mut rest = rows;
        while !rest.is_empty() {
            let (batch, behind) = rest.split_at(self.batch_len(rest));
            if let Err(error) = self.step(batch) {
                before.into_iter().for_each(|(id, len)| self.sequence_truncate(id, len));
                return Err(error);
            }
            rest = behind;
        }
        Ok(&self.logits)
    }

    /// Rows of the next batch: at most a micro-batch, and a sequence's rows side by side.
    fn batch_len(&self, rows: &[Row]) -> usize {
        let most = rows.len().min(self.micro_batch);
        let returns = |i: &usize| {
            rows[*i].sequence != rows[i - 1].sequence && rows[..*i].iter().any(|r| r.sequence == rows[*i].sequence)
        };
        (1..most).find(returns).unwrap_or(most)
    }

    fn admit(&mut self, rows: &[Row]) -> Result<(), Error> {
        let vocab_len = self.model.config.vocab_len;
        let mut new = vec![0; self.sequences.len()];
        for row in rows {
            if row.token as usize >= vocab_len {
                return Err(Error::Token { token: row.token, vocab_len });
            }
            new[row.sequence.0] += 1;
        }
        for (sequence, &new) in self.sequences.iter().zip(&new) {
            if let Some(Sequence { kv, context_max }) = sequence
                && kv.len + new > *context_max
            {
                return Err(Error::ContextFull { len: kv.len, new, context_max: *context_max });
            }
        }
        Ok(())
    }

    fn step(&mut self, batch: &[Row]) -> Result<(), Error> {
        // Consecutive rows of one sequence are a run. A sequence's cache is taken out while its run is under way.
        let mut runs: Vec<(SequenceId, usize, usize, usize, Kv)> = Vec::new();
        for (i, row) in batch.iter().enumerate() {
            match runs.last_mut() {
                Some((id, _, len, _, _)) if *id == row.sequence => *len += 1,
                _ => {
                    let sequence = self.sequences[row.sequence.0].as_mut().expect("an open sequence");
                    let kv = std::mem::take(&mut sequence.kv);
                    runs.push((row.sequence, i, 1, kv.len, kv));
                }
            }
        }
        let mut longest = 0;
        for (_, _, len, position, kv) in &mut runs {
            kv.len = *position + *len;
            longest = longest.max(kv.len);
            while kv.blocks.len() * KV_BLOCK < kv.len {
                let fresh = || vec![0; self.block_bytes].into_boxed_slice();
                kv.blocks.push(self.free_blocks.pop().unwrap_or_else(fresh));
            }
        }
        self.rope.grow(longest);
        self.rope_window.grow(longest);
        let tokens: Vec<u32> = batch.iter().map(|row| row.token).collect();
        let asked: Vec<usize> = (0..batch.len()).filter(|&i| batch[i].logits).collect();
        let mut borrowed: Vec<Run<'_>> = runs
            .iter_mut()
            .map(|(_, first, len, position, kv)| Run { first: *first, len: *len, position: *position, kv })
            .collect();
        let mut forward = Forward {
            family: self.model.family,
            config: &self.model.config,
            weights: &self.model.weights,
            rope: &self.rope,
            rope_window: &self.rope_window,
            pool: &mut self.pool,
            level: self.level,
            kv_types: self.kv_types,
            scratch: &mut self.scratch,
        };
        let vocab_len = self.model.config.vocab_len;
        let result = forward.run(&tokens, &mut borrowed, &asked).map(|logits| {
            for row in logits.chunks_exact(vocab_len.next_multiple_of(16)) {
                self.logits.extend_from_slice(&row[..vocab_len]);
            }
        });
        for (id, _, _, _, kv) in runs {
            self.sequences[id.0].as_mut().expect("an open sequence").kv = kv;
        }
        result
    }
}
