//! A model with threads, scratch buffers and the KV caches of its sequences.

use crate::forward::{Forward, Run, Scratch, shape};
use crate::kv_store::{BlockId, KvStore};
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
    /// Blocks of 16 positions, each with the keys and values of all layers.
    blocks: Vec<BlockId>,
    /// Positions computed.
    len: usize,
    context_max: usize,
}

impl Sequence {
    /// Blocks that `new` more positions take beyond those that are there.
    fn missing(&self, new: usize) -> usize {
        (self.len + new).div_ceil(KV_BLOCK).saturating_sub(self.blocks.len())
    }
}

fn open(sequences: &[Option<Sequence>], id: SequenceId) -> &Sequence {
    sequences[id.0].as_ref().expect("an open sequence")
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
    kv: KvStore,
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
            kv: KvStore::new(c.layers * shape(c, 0, kv_types).block_bytes()),
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
        let sequence = Some(Sequence { blocks: Vec::new(), len: 0, context_max });
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
        self.sequences[id.0].as_ref().map_or(0, |s| s.len)
    }

    /// Forgets all positions from `len` on.
    pub fn sequence_truncate(&mut self, id: SequenceId, len: usize) {
        if let Some(sequence) = &mut self.sequences[id.0] {
            sequence.len = sequence.len.min(len);
            let keep = sequence.len.div_ceil(KV_BLOCK);
            self.kv.release(sequence.blocks.drain(keep..));
        }
    }

    /// Types of the keys and the values in the KV cache.
    pub fn kv_types(&self) -> (KvType, KvType) {
        self.kv_types
    }

    /// Bytes of KV cache held now, for positions of sequences or for those that come next. Of the last page of a mapping
    /// they count what is used.
    pub fn kv_bytes(&self) -> u64 {
        (self.kv.blocks() * self.kv.block_bytes()) as u64
    }

    /// Bytes of KV cache that a position takes.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (self.kv.block_bytes() / KV_BLOCK) as u64
    }

    /// Bytes of KV cache that will be held once sequence `id` has `len` positions.
    pub fn kv_bytes_at(&self, id: SequenceId, len: usize) -> u64 {
        let has = self.sequences[id.0].as_ref().map_or(0, |s| s.blocks.len());
        let growth = self.kv.growth(len.div_ceil(KV_BLOCK).saturating_sub(has), self.kv_blocks_max());
        self.kv_bytes().saturating_add((growth as u64).saturating_mul(self.kv.block_bytes() as u64))
    }

    /// Blocks that the open sequences can ever hold: more are never taken, so that what was planned for them is enough.
    fn kv_blocks_max(&self) -> usize {
        let most = self.sequences.iter().flatten().map(|s| s.context_max.div_ceil(KV_BLOCK));
        most.fold(0, usize::saturating_add)
    }

    /// Takes the memory of all positions of sequence `id` now, which else comes as it grows. Errors: there is none; then
    /// nothing has changed.
    pub fn sequence_reserve(&mut self, id: SequenceId) -> Result<(), Error> {
        let blocks_max = self.kv_blocks_max();
        if let Some(sequence) = &mut self.sequences[id.0] {
            let new = sequence.context_max.div_ceil(KV_BLOCK).saturating_sub(sequence.blocks.len());
            self.kv.grow(new, blocks_max)?;
            let mut fresh: Vec<BlockId> = (0..new).map_while(|_| self.kv.take()).collect();
            sequence.blocks.extend_from_slice(&fresh);
            // Written, for pages that are only mapped take none.
            fresh.sort_unstable();
            self.kv.blocks_mut(fresh.into_iter()).for_each(|block| block.fill(1));
            self.rope.grow(sequence.context_max);
            self.rope_window.grow(sequence.context_max);
        }
        Ok(())
    }

    /// Gives back the KV memory that no sequence holds any part of; its bytes.
    pub fn kv_trim(&mut self) -> u64 {
        (self.kv.trim() * self.kv.block_bytes()) as u64
    }

    /// Computes `rows` in order (any number; cut into micro-batches inside). Returns the logits of the rows that
    /// asked for them, in order: `[asked, vocab_len]`. Errors: a token id outside the vocabulary, a full context, no memory
    /// for keys and values, weights that cannot be read; then all sequences are as long as before.
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
            if let Some(Sequence { len, context_max, .. }) = sequence
                && len + new > *context_max
            {
                return Err(Error::ContextFull { len: *len, new, context_max: *context_max });
            }
        }
        Ok(())
    }

    fn step(&mut self, batch: &[Row]) -> Result<(), Error> {
        let by_sequence = || batch.chunk_by(|a, b| a.sequence == b.sequence);
        let wanted = by_sequence().map(|rows| open(&self.sequences, rows[0].sequence).missing(rows.len())).sum();
        self.kv.grow(wanted, self.kv_blocks_max())?;
        let mut longest = 0;
        for rows in by_sequence() {
            let sequence = self.sequences[rows[0].sequence.0].as_mut().expect("an open sequence");
            let missing = sequence.missing(rows.len());
            sequence.blocks.extend((0..missing).map_while(|_| self.kv.take()));
            sequence.len += rows.len();
            longest = longest.max(sequence.len);
        }
        self.rope.grow(longest);
        self.rope_window.grow(longest);
        let tokens: Vec<u32> = batch.iter().map(|row| row.token).collect();
        let asked: Vec<usize> = (0..batch.len()).filter(|&i| batch[i].logits).collect();
        let mut first = 0;
        let runs: Vec<Run<'_>> = by_sequence()
            .map(|rows| {
                let Sequence { blocks, len, .. } = open(&self.sequences, rows[0].sequence);
                first += rows.len();
                Run { first: first - rows.len(), len: rows.len(), position: len - rows.len(), blocks }
            })
            .collect();
        let mut forward = Forward {
            family: self.model.family,
            config: &self.model.config,
            weights: &self.model.weights,
            rope: &self.rope,
            rope_window: &self.rope_window,
            pool: &mut self.pool,
            level: self.level,
            kv: &mut self.kv,
            kv_types: self.kv_types,
            scratch: &mut self.scratch,
        };
        let vocab_len = self.model.config.vocab_len;
        let logits = forward.run(&tokens, &runs, &asked)?;
        for row in logits.chunks_exact(vocab_len.next_multiple_of(16)) {
            self.logits.extend_from_slice(&row[..vocab_len]);
        }
        Ok(())
    }
}
