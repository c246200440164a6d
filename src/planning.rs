//! From a model's header, the flags and the machine to a plan.

use model::{ExpertMemory, Footprint, Header, LaneOptions, LoadOptions, RunnerOptions};
use residency::experts::{Bank, CacheSize};
use residency::headroom::Budget;
use residency::plan::{Ask, Demand, Mode, Plan, plan};

use crate::failure::Failure;
use crate::flags::{Compute, Settings, Weights};
use crate::machine::{self, Place};
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
    /// Where experts live.
    pub experts: ExpertMemory,
    /// What the host would give.
    pub auto: Option<Budget>,
}

/// Code of the program that only computing touches, and what the allocator keeps in hand. Measured: see docs/measuring.md.
const BASE_LATER_BYTES: u64 = 3 << 20;
/// Stack and thread-local buffers of a thread that computes.
const THREAD_BYTES: u64 = 128 << 10;

/// How weights are read and held.
pub(crate) fn load_options(compute: &Compute, experts: ExpertMemory) -> LoadOptions {
    LoadOptions {
        experts,
        experts_used: compute.weights.experts.n_expert_used,
        guess_experts: compute.weights.experts.guess_experts,
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
        drop_cold_experts: compute.weights.experts.drop_cold_experts,
    }
}

/// Plans a run of the model at `place`; `weights` says how its weights are held. `lanes`, asked only if experts are to be
/// streamed, tells how slices of so many bytes are read.
pub(crate) fn plan_for(
    header: &Header,
    options: &RunnerOptions,
    memory: Memory,
    need: Need,
    place: &Place,
    weights: &Weights,
    lanes: impl FnOnce(u64) -> LaneOptions,
) -> Result<Planned, model::Error> {
    // A batch is never larger than the context.
    let rows = need.context.map_or(options.micro_batch, |c| options.micro_batch.min(c.max(1)));
    let mut footprint = header.footprint(&RunnerOptions { micro_batch: rows, ..options.clone() }, need.logits_rows)?;
    if let Some(used) = weights.experts.n_expert_used {
        header.config()?.use_fewer_experts(used)?;
        footprint.bank.used = used as u64;
    }
    let demand = Demand {
        weights_bytes: footprint.weights_bytes,
        experts_bytes: 0,
        expert_io_bytes: 0,
        kv_block_bytes: footprint.kv_block_bytes,
        kv_window_block_bytes: footprint.kv_window_block_bytes,
        kv_window_blocks_max: footprint.kv_window_blocks_max,
        kv_block_tokens: footprint.kv_block_tokens,
        context_trained: header.config()?.context_len as u64,
        scratch_bytes: footprint.scratch_bytes,
        scratch_bytes_per_token: footprint.scratch_bytes_per_token,
        io_bytes: footprint.io_bytes,
        metadata_bytes: footprint.metadata_bytes,
        base_bytes: place.base_bytes + BASE_LATER_BYTES + options.threads as u64 * THREAD_BYTES,
    };
    let (budget_bytes, auto) = machine::budget(memory, place.host.as_ref());
    let ask = Ask {
        budget_bytes,
        context: need.context.map(|c| c as u64),
        sessions: need.sessions as u64,
        lazy: weights.in_page_cache(),
        streamed: weights.in_page_cache(),
    };
    let all = plan(&demand, &ask);
    let streams = match weights.experts.cache_mb {
        _ if footprint.bank.slots_all() == 0 => false,
        CacheSize::All => false,
        CacheSize::Bytes(bytes) => bytes < footprint.bank.slots_all() * footprint.bank.slot_bytes,
        CacheSize::Auto => all.mode == Mode::Refused,
    };
    let (plan, experts) = match streams {
        true => stream(&demand, &ask, &footprint, weights, lanes(footprint.expert_slice_bytes)),
        false => (all, ExpertMemory::Resident),
    };
    Ok(Planned { footprint, lazy: need.lazy, plan, budget_bytes, experts, auto })
}

/// Positions of a session that nobody asked for, where experts want the memory that a longer one would take.
const CONTEXT_DEFAULT: u64 = 4096;

/// How the model runs with its experts in slots: as many as the rest leaves room for, or as were asked for.
fn stream(
    demand: &Demand,
    ask: &Ask,
    footprint: &Footprint,
    weights: &Weights,
    lanes: LaneOptions,
) -> (Plan, ExpertMemory) {
    let bank = &footprint.bank;
    let least_bytes = bank.slots_min() * bank.slot_bytes;
    let demand = Demand {
        weights_bytes: demand.weights_bytes - bank.total_bytes(),
        experts_bytes: least_bytes,
        expert_io_bytes: lanes.buffer_bytes(footprint.expert_slice_bytes as usize) as u64,
        ..*demand
    };
    let context = ask.context.unwrap_or_else(|| demand.context_trained.min(CONTEXT_DEFAULT));
    let least = plan(&demand, &Ask { context: Some(context), ..*ask });
    // A machine that cannot hold that context may hold a shorter one.
    let mut plan = match (least.mode, ask.context) {
        (Mode::Refused, None) => plan(&demand, ask),
        _ => least,
    };
    let mut slots = bank.slots_min();
    if plan.mode != Mode::Refused {
        let free_bytes = ask.budget_bytes - plan.bytes.total() + least_bytes;
        match weights.experts.cache_ask().slots(bank, free_bytes) {
            Ok(granted) => {
                slots = granted;
                plan.mode = Mode::Streamed;
                plan.bytes.experts = slots * bank.slot_bytes;
                plan.reasons.retain(|reason| !reason.starts_with("streamed"));
                plan.reasons.extend(stream_reasons(bank, slots));
            }
            Err(error) => {
                plan.mode = Mode::Refused;
                plan.reasons.push(format!("experts: {error}"));
            }
        }
    }
    (plan, ExpertMemory::Slots { slots: slots as usize, lanes })
}

/// What so many slots mean for the speed.
fn stream_reasons(bank: &Bank, slots: u64) -> Vec<String> {
    let mut reasons = vec![format!(
        "experts: {slots} of {} are in memory; a token takes {} of them, {}, and {} of the widest layer",
        bank.slots_all(),
        bank.slots_cycle(),
        size(bank.cycle_bytes()),
        size(bank.layer_bytes())
    )];
    if slots < bank.slots_cycle() {
        reasons.push(format!(
            "experts: below the cliff: {} hold less than the {} that one token goes through, so most are read for each token; \
             --cache-mb {} would be enough",
            size(slots * bank.slot_bytes),
            size(bank.slots_cycle() * bank.slot_bytes),
            (bank.slots_cycle() * bank.slot_bytes).div_ceil(1 << 20)
        ));
    }
    reasons
}

impl Planned {
    /// Whether some experts are in memory and others not.
    fn drops_can_matter(&self) -> bool {
        match self.experts {
            ExpertMemory::Resident => false,
            ExpertMemory::Slots { slots, .. } => slots as u64 > self.footprint.bank.slots_min(),
        }
    }

    /// Buffers that experts are read into.
    pub(crate) fn expert_io_bytes(&self) -> u64 {
        match self.experts {
            ExpertMemory::Resident => 0,
            ExpertMemory::Slots { lanes, .. } => lanes.buffer_bytes(self.footprint.expert_slice_bytes as usize) as u64,
        }
    }

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
        if compute.weights.experts.drop_cold_experts.is_some() && !self.drops_can_matter() {
            let text = "--drop-cold-experts needs a cache to be cold in: all experts are in memory, or --cache-mb is 0";
            return Err(Failure::Usage(text.to_owned()));
        }
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
