//! From a model's header, the flags and the machine to a plan.

use model::{Footprint, Header, LoadOptions, RunnerOptions};
use residency::headroom::{Budget, Host};
use residency::plan::{Ask, Demand, Mode, Plan, plan};

use crate::failure::Failure;
use crate::flags::{Compute, Settings};
use crate::machine;
use crate::terminal::size;
use crate::values::Memory;

/// What a verb is going to do with a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    /// Positions of each session; `None` for as many as fit.
    pub context: Option<usize>,
    /// Sessions at once.
    pub sessions: usize,
    /// Positions whose logits are wanted at once.
    pub logits_rows: usize,
    /// Whether it begins before all weights are there.
    pub lazy: bool,
}

impl Need {
    /// One session of exactly `context` positions, each of whose logits may be wanted.
    pub(crate) fn all_logits(context: usize) -> Need {
        Need { context: Some(context), sessions: 1, logits_rows: context.min(engine::LOGITS_ROWS_MAX), lazy: false }
    }

    /// One session of `context` positions, 0 for as many as fit.
    pub(crate) fn up_to(context: usize) -> Need {
        Need { context: Some(context).filter(|&c| c > 0), sessions: 1, logits_rows: 1, lazy: true }
    }
}

/// A plan and what it came from.
pub(crate) struct Planned {
    pub footprint: Footprint,
    pub plan: Plan,
    /// Whether the work begins before all weights are there.
    pub lazy: bool,
    pub budget_bytes: u64,
    /// What the host would give.
    pub auto: Option<Budget>,
}

/// Code of the program that only computing touches, and what the allocator keeps in hand. Measured: see docs/measuring.md.
const BASE_LATER_BYTES: u64 = 3 << 20;
/// Stack and thread-local buffers of a thread that computes.
const THREAD_BYTES: u64 = 128 << 10;

/// How weights are read and held.
pub(crate) fn load_options(compute: &Compute) -> LoadOptions {
    LoadOptions {
        backing: compute.weights.backing,
        dense_weights: compute.weights.dense_weights,
        direct_io: !compute.weights.no_direct_io,
        ..LoadOptions::default()
    }
}

/// How the runner is set up by `compute`.
pub(crate) fn runner_options(compute: &Compute, settings: &Settings) -> RunnerOptions {
    RunnerOptions {
        threads: compute.threads(),
        isa: settings.isa,
        micro_batch: compute.micro_batch,
        type_k: compute.type_k,
        type_v: compute.type_v,
    }
}

/// Plans a run of the model on `host`, in a process that had `base_bytes` before it read the header;
/// with `page_cache` its weights are left there.
pub(crate) fn plan_for(
    header: &Header,
    options: &RunnerOptions,
    memory: Memory,
    need: Need,
    host: Option<&Host>,
    base_bytes: u64,
    page_cache: bool,
) -> Result<Planned, model::Error> {
    // A batch is never larger than the context.
    let rows = need.context.map_or(options.micro_batch, |c| options.micro_batch.min(c.max(1)));
    let footprint = header.footprint(&RunnerOptions { micro_batch: rows, ..options.clone() }, need.logits_rows)?;
    let demand = Demand {
        weights_bytes: footprint.weights_bytes,
        kv_block_bytes: footprint.kv_block_bytes,
        kv_window_block_bytes: footprint.kv_window_block_bytes,
        kv_window_blocks_max: footprint.kv_window_blocks_max,
        kv_block_tokens: footprint.kv_block_tokens,
        context_trained: header.config()?.context_len as u64,
        scratch_bytes: footprint.scratch_bytes,
        scratch_bytes_per_token: footprint.scratch_bytes_per_token,
        io_bytes: footprint.io_bytes,
        metadata_bytes: footprint.metadata_bytes,
        base_bytes: base_bytes + BASE_LATER_BYTES + options.threads as u64 * THREAD_BYTES,
    };
    let (budget_bytes, auto) = machine::budget(memory, host);
    let ask = Ask {
        budget_bytes,
        context: need.context.map(|c| c as u64),
        sessions: need.sessions as u64,
        lazy: page_cache,
        streamed: page_cache,
    };
    Ok(Planned { footprint, lazy: need.lazy, plan: plan(&demand, &ask), budget_bytes, auto })
}

impl Planned {
    /// A budget that is more than can be had, in words.
    pub(crate) fn risk(&self, memory: Memory) -> Option<String> {
        let (Memory::Bytes(bytes), Some(auto)) = (memory, self.auto) else { return None };
        (bytes > auto.headroom_bytes).then(|| {
            format!(
                "--memory {bytes}: {} are more than the {} that can be had now; --force takes the risk",
                size(bytes),
                size(auto.headroom_bytes)
            )
        })
    }

    /// Refuses what cannot run, and without `--force` what might not.
    pub(crate) fn check(&self, compute: &Compute) -> Result<(), Failure> {
        let force = compute.budget.force;
        if let Some(risk) = self.risk(compute.budget.memory).filter(|_| !force) {
            return Err(Failure::Run(risk));
        }
        // Keys and values come as a conversation grows: a context that does not fit may never be filled.
        let is_risk = self.plan.context_max > 0;
        if self.plan.mode == Mode::Refused && !(force && is_risk) {
            let way_out = if is_risk { "; --force takes the risk" } else { "" };
            return Err(Failure::Run(format!("does not fit: {}{way_out}", self.plan.reasons.join("; "))));
        }
        Ok(())
    }
}
