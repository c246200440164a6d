//! A model with threads, scratch buffers and the KV cache of its sequences.

use crate::forward::{Forward, Run, Scratch};
use crate::kv::groups::LayerGroups;
use crate::kv::{KvCache, KvKey};
use crate::moe::replay::RouteReplay;
use crate::moe::source::{ExpertSource, Resident};
use crate::record::{Begun, StepRecord};
use crate::rope::RopeTable;
use crate::{Error, Model};
use kernels::attention::{KV_BLOCK, KvType};
use kernels::isa::{Isa, Level};
use kernels::threads::{Placement, Pool};
use memory::processors::{self, ThreadId};
use residency::kv::{BLOCK_TOKENS, Growth, SequenceId};
use std::sync::Arc;

const _: () = assert!(KV_BLOCK == BLOCK_TOKENS);

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
    /// Lossy, so off by default: leave an expert out if it is not in memory and weighs less than this share of an equal part
    /// of the token's experts, 0 to 1. Which ones that are depends on what is in memory.
    pub drop_cold_experts: Option<f32>,
}

impl Default for RunnerOptions {
    fn default() -> Self {
        Self {
            threads: 1,
            isa: None,
            micro_batch: 512,
            type_k: KvType::F16,
            type_v: KvType::F16,
            drop_cold_experts: None,
        }
    }
}

/// A model, a thread pool, scratch buffers and the KV cache of its sequences (see `sequences.rs`).
pub struct Runner {
    model: Arc<Model>,
    pool: Pool,
    level: Level,
    micro_batch: usize,
    scratch: Scratch,
    drop_cold_experts: Option<f32>,
    rope: RopeTable,
    rope_window: RopeTable,
    pub(crate) kv: KvCache,
    kv_types: (KvType, KvType),
    /// The key of sequences without a salt.
    pub(crate) key: KvKey,
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
        // Values that are parts of the keys have no type of their own.
        let type_v = if c.latents.is_some() { options.type_k } else { options.type_v };
        let kv_types = (options.type_k, type_v);
        for (ty, head_len) in
            [kv_types.0, kv_types.1].into_iter().flat_map(|ty| [(ty, c.head_len), (ty, c.head_len_window)])
        {
            if !ty.fits(head_len) {
                return Err(Error::KvType { ty: ty.name(), head_len });
            }
        }
        let factors = model.weights.rope_factors.as_deref();
        Ok(Runner {
            pool: Pool::placed(options.threads.max(1), &Processors),
            level,
            micro_batch: options.micro_batch.max(1),
            scratch: Scratch::default(),
            drop_cold_experts: options.drop_cold_experts,
            rope: RopeTable::new(c.rope_len, &c.rope, factors),
            rope_window: RopeTable::new(
                c.rope_len_window,
                &c.rope_window,
                factors.filter(|_| !model.family.window_rope),
            ),
            kv: KvCache::new(LayerGroups::new(c), c.layer_kv_bytes(kv_types), options.micro_batch.max(1)),
            key: KvKey {
                model: model.identity(),
                adapter: None,
                parameters: format!("{c:?}"),
                types: (kv_types.0.name(), kv_types.1.name()),
                salt: Box::default(),
            },
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

    /// From now on, or no more, what each step takes is recorded.
    pub fn record_steps(&mut self, wanted: bool) {
        self.scratch.records = wanted.then(Vec::new);
    }

    /// What was recorded since the last call.
    pub fn take_steps(&mut self) -> Vec<StepRecord> {
        self.scratch.records.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// From now on tokens take the experts that were recorded elsewhere, in the order in which they come, or their own again.
    pub fn force_routes(&mut self, replay: Option<RouteReplay>) {
        self.scratch.moe.replay = replay;
    }

    /// Tokens that chose each expert so far, `[layers, experts]`; empty before the first, and for models without experts.
    pub fn expert_counts(&self) -> &[u64] {
        &self.scratch.moe.counts
    }

    /// Types of the keys and the values in the KV cache.
    pub fn kv_types(&self) -> (KvType, KvType) {
        self.kv_types
    }

    /// Gives back the buffers of the last step, which the next one takes again; their bytes, at least.
    pub fn scratch_trim(&mut self) -> u64 {
        let logits_bytes = size_of::<f32>() * std::mem::take(&mut self.logits).capacity();
        std::mem::take(&mut self.scratch).bytes() + logits_bytes as u64
    }

    /// Computes `rows` in order (any number; cut into micro-batches inside). Returns the logits of the rows that
    /// asked for them, in order: `[asked, vocab_len]`. Errors: a token id outside the vocabulary, a full context, no memory
    /// for keys and values, weights that cannot be read; then all sequences are as long as before, but for those that would
    /// need what a sliding window has left behind in earlier micro-batches: they are empty.
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
                for (id, len) in before {
                    self.kv.cache.truncate(id, len);
                }
                return Err(error);
            }
            rest = behind;
        }
        Ok(&self.logits)
    }

    /// The logits of the last [`Runner::forward`].
    pub fn logits(&self) -> &[f32] {
        &self.logits
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
        let mut new = std::collections::BTreeMap::new();
        for row in rows {
            if row.token as usize >= vocab_len {
                return Err(Error::Token { token: row.token, vocab_len });
            }
            *new.entry(row.sequence).or_insert(0) += 1;
        }
        for (id, new) in new {
            let (len, context_max) = (self.sequence_len(id), self.kv.cache.context_max(id));
            if len + new > context_max {
                return Err(Error::ContextFull { len, new, context_max });
            }
        }
        Ok(())
    }

    /// Angles for positions below `len`.
    pub(crate) fn grow_rope(&mut self, len: usize) {
        self.rope.grow(len);
        self.rope_window.grow(len);
    }

    fn step(&mut self, batch: &[Row]) -> Result<(), Error> {
        let by_sequence = || batch.chunk_by(|a, b| a.sequence == b.sequence);
        let wants: Vec<(SequenceId, usize)> = by_sequence().map(|rows| (rows[0].sequence, rows.len())).collect();
        if let Growth::Wait(shortage) | Growth::Refuse(shortage) = self.kv.grow(&wants)? {
            return Err(Error::KvFull(shortage));
        }
        self.kv.take(&wants);
        self.grow_rope(wants.iter().map(|&(id, new)| self.sequence_len(id) + new).max().unwrap_or(0));
        let tokens: Vec<u32> = batch.iter().map(|row| row.token).collect();
        let asked: Vec<usize> = (0..batch.len()).filter(|&i| batch[i].logits).collect();
        let KvCache { cache, store, groups, .. } = &mut self.kv;
        let mut first = 0;
        let run = |&(id, len): &(SequenceId, usize)| {
            first += len;
            Run { first: first - len, len, position: cache.tokens(id).len(), tables: cache.tables(id) }
        };
        let runs: Vec<Run<'_>> = wants.iter().map(run).collect();
        let resident = Resident(&self.model.weights);
        let streamed = self.model.weights.streamed.as_ref();
        let expert_source: &dyn ExpertSource = streamed.map_or(&resident, |streamed| streamed);
        let begun = self.scratch.records.is_some().then(|| Begun::now(&self.model.weights, self.pool.busy()));
        let mut forward = Forward {
            family: self.model.family,
            config: &self.model.config,
            weights: &self.model.weights,
            expert_source,
            drop_cold_experts: self.drop_cold_experts,
            rope: &self.rope,
            rope_window: &self.rope_window,
            pool: &mut self.pool,
            level: self.level,
            kv: store,
            groups,
            kv_types: self.kv_types,
            scratch: &mut self.scratch,
        };
        let vocab_len = self.model.config.vocab_len;
        let logits = forward.run(&tokens, &runs, &asked)?;
        for row in logits.chunks_exact(vocab_len.next_multiple_of(16)) {
            self.logits.extend_from_slice(&row[..vocab_len]);
        }
        if let Some(replay) = &mut self.scratch.moe.replay {
            replay.token += batch.len() as u64;
        }
        if let (Some(begun), Some(records)) = (begun, &mut self.scratch.records) {
            records.push(begun.end(&self.model.weights, self.pool.busy(), batch.len()));
        }
        for rows in by_sequence() {
            let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
            self.kv.cache.commit(rows[0].sequence, &tokens);
        }
        self.kv.balance();
        Ok(())
    }
}

/// The system's processors.
struct Processors;

impl Placement for Processors {
    fn thread(&self) -> i32 {
        ThreadId::current().number()
    }

    fn processor(&self) -> usize {
        processors::current()
    }

    fn bring(&self, thread: i32) -> bool {
        let thread = ThreadId::numbered(thread);
        thread.is_off() && thread.move_to(processors::current())
    }

    fn send(&self, thread: i32, processor: usize) {
        ThreadId::numbered(thread).move_to(processor);
    }
}
