//! What a model will need and how it can run, from numbers that its header tells.

use std::fmt;

/// What a model asks for, in bytes unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand {
    /// Weights that stay.
    pub weights_bytes: u64,
    /// Slots of experts, where these come while the model runs.
    pub experts_bytes: u64,
    /// Buffers that they are read into.
    pub expert_io_bytes: u64,
    /// A block of keys and values.
    pub kv_block_bytes: u64,
    /// Of these, those of layers with a sliding window.
    pub kv_window_block_bytes: u64,
    /// Blocks that such layers hold at most.
    pub kv_window_blocks_max: u64,
    /// Positions of a block.
    pub kv_block_tokens: u64,
    /// Positions that the model was trained for.
    pub context_trained: u64,
    /// Activations and logits.
    pub scratch_bytes: u64,
    /// More scratch for each position of the longest context (rotation tables).
    pub scratch_bytes_per_token: u64,
    /// Buffers that the file is read into; given back once all weights stay.
    pub io_bytes: u64,
    /// Header, tokenizer, template.
    pub metadata_bytes: u64,
    /// The process before it has a model.
    pub base_bytes: u64,
}

/// What it may have and shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// The budget.
    pub budget_bytes: u64,
    /// Positions of each session; `None` for as many as fit, up to what the model was trained for.
    pub context: Option<u64>,
    /// Sessions at once.
    pub sessions: u64,
    /// Whether weights are left to the page cache.
    pub lazy: bool,
    /// Whether weights may be read anew for each step instead of staying.
    pub streamed: bool,
}

/// How a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// All weights are read once, then they stay.
    Resident,
    /// Weights are in the page cache: read when they are first used, they stay as long as there is room.
    Lazy,
    /// Weights are read from storage for each step.
    Streamed,
    /// It does not fit.
    Refused,
}

impl Mode {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Resident => "resident",
            Mode::Lazy => "lazy",
            Mode::Streamed => "streamed",
            Mode::Refused => "refused",
        }
    }
}

/// Bytes by line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// Weights that stay.
    pub weights: u64,
    /// Slots of experts.
    pub experts: u64,
    /// Keys and values of all sessions at their full length.
    pub kv: u64,
    /// Activations, logits, rotation tables.
    pub scratch: u64,
    /// Read buffers, as far as they are not free again when keys, values and scratch are taken.
    pub io: u64,
    /// Header, tokenizer, template.
    pub metadata: u64,
    /// The process.
    pub base: u64,
}

impl Bytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.experts + self.kv + self.scratch + self.io + self.metadata + self.base
    }
}

/// How a model would run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// How.
    pub mode: Mode,
    /// With which bytes; those of the least that could run where it is refused.
    pub bytes: Bytes,
    /// Positions of each session.
    pub context: u64,
    /// The longest context that fits, up to what the model was trained for; 0 where it is refused.
    pub context_max: u64,
    /// Why it is so.
    pub reasons: Vec<String>,
}

impl Demand {
    /// Keys and values of a session of `context` positions.
    pub fn kv_bytes(&self, context: u64) -> u64 {
        let blocks = context.div_ceil(self.kv_block_tokens.max(1));
        let full = self.kv_block_bytes - self.kv_window_block_bytes;
        blocks * full + blocks.min(self.kv_window_blocks_max) * self.kv_window_block_bytes
    }

    /// Bytes in `mode` with `sessions` of `context` positions.
    pub fn bytes(&self, mode: Mode, context: u64, sessions: u64) -> Bytes {
        let weights = if mode == Mode::Streamed { 0 } else { self.weights_bytes };
        let comes = matches!(mode, Mode::Lazy | Mode::Streamed);
        let kv = self.kv_bytes(context) * sessions;
        let scratch = self.scratch_bytes + context * self.scratch_bytes_per_token;
        // Weights that come while the model runs need the buffers beside the rest; else they are free before that is taken.
        let io = if comes { self.io_bytes } else { self.io_bytes.saturating_sub(kv + scratch) };
        let (experts, io) = (self.experts_bytes, io + self.expert_io_bytes);
        Bytes { weights, experts, kv, scratch, io, metadata: self.metadata_bytes, base: self.base_bytes }
    }

    /// The longest context whose bytes fit in `budget_bytes`, at most `context_trained`; `None` if not one block does.
    fn context_max(&self, mode: Mode, budget_bytes: u64, sessions: u64) -> Option<u64> {
        let fits = |context: u64| self.bytes(mode, context, sessions).total() <= budget_bytes;
        let block = self.kv_block_tokens.max(1);
        let blocks = self.context_trained.div_ceil(block).max(1);
        if !fits(self.least()) {
            return None;
        }
        // The first number of blocks that does not fit.
        let (mut low, mut high) = (1, blocks + 1);
        while low + 1 < high {
            let middle = low.midpoint(high);
            if fits((middle * block).min(self.context_trained)) { low = middle } else { high = middle }
        }
        Some((low * block).min(self.context_trained))
    }

    /// The shortest context that is worth running: one block.
    fn least(&self) -> u64 {
        self.kv_block_tokens.max(1).min(self.context_trained.max(1))
    }
}

/// How a model with this demand would run.
pub fn plan(demand: &Demand, ask: &Ask) -> Plan {
    let sessions = ask.sessions.max(1);
    let resident_mode = if ask.lazy { Mode::Lazy } else { Mode::Resident };
    let ways = [resident_mode].into_iter().chain(ask.streamed.then_some(Mode::Streamed));
    let mut reasons = Vec::new();
    for mode in ways {
        let Some(context_max) = demand.context_max(mode, ask.budget_bytes, sessions) else {
            let least = demand.bytes(mode, demand.least(), sessions);
            reasons.push(format!("{}: {}", mode.name(), TooLittle { bytes: least, budget_bytes: ask.budget_bytes }));
            continue;
        };
        let context = ask.context.unwrap_or(context_max);
        let bytes = demand.bytes(mode, context, sessions);
        if bytes.total() > ask.budget_bytes {
            let short = TooLittle { bytes, budget_bytes: ask.budget_bytes };
            reasons.push(format!("{}: a context of {context}: {short}; {context_max} would fit", mode.name()));
            continue;
        }
        if mode == Mode::Streamed {
            reasons.push("streamed: the weights are read from storage for each step".to_owned());
        }
        if context_max < demand.context_trained {
            let trained = demand.context_trained;
            reasons.push(format!("context: {context_max} of the {trained} positions of training fit in the budget"));
        }
        return Plan { mode, bytes, context, context_max, reasons };
    }
    let mode = if ask.streamed { Mode::Streamed } else { resident_mode };
    let context_max = demand.context_max(mode, ask.budget_bytes, sessions).unwrap_or(0);
    let context = ask.context.unwrap_or(demand.least());
    let bytes = demand.bytes(mode, context, sessions);
    Plan { mode: Mode::Refused, bytes, context, context_max, reasons }
}

/// A budget that is too small, with the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLittle {
    /// What is needed.
    pub bytes: Bytes,
    /// What there is.
    pub budget_bytes: u64,
}

impl fmt::Display for TooLittle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.bytes;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "weights {:.1} + experts {:.1} + KV {:.1} + scratch {:.1} + I/O {:.1} + metadata {:.1} + process {:.1} = {:.1} MiB, and the budget is {:.1} MiB",
            mib(b.weights),
            mib(b.experts),
            mib(b.kv),
            mib(b.scratch),
            mib(b.io),
            mib(b.metadata),
            mib(b.base),
            mib(b.total()),
            mib(self.budget_bytes),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand {
        weights_bytes: 1000,
        experts_bytes: 0,
        expert_io_bytes: 0,
        kv_block_bytes: 16,
        kv_window_block_bytes: 0,
        kv_window_blocks_max: 0,
        kv_block_tokens: 16,
        context_trained: 500,
        scratch_bytes: 100,
        scratch_bytes_per_token: 1,
        io_bytes: 300,
        metadata_bytes: 20,
        base_bytes: 30,
    };

    fn with(budget_bytes: u64, context: Option<u64>) -> Plan {
        plan(&DEMAND, &Ask { budget_bytes, context, sessions: 1, lazy: false, streamed: false })
    }

    #[test]
    fn the_default_context_is_what_fits_and_the_bytes_are_in_the_budget() {
        let all = with(1 << 20, None);
        assert_eq!((all.mode, all.context, all.context_max), (Mode::Resident, 500, 500));
        assert_eq!(all.bytes.total(), 1000 + 512 + 600 + 20 + 30, "the buffers are free before so much is taken");
        assert!(all.reasons.is_empty());
        for budget in 1350..2200 {
            let plan = with(budget, None);
            assert_eq!(plan.mode, Mode::Resident);
            assert!(plan.bytes.total() <= budget && plan.context <= plan.context_max);
            let more = DEMAND.bytes(Mode::Resident, (plan.context + 16).min(500), 1).total();
            assert!(plan.context == 500 || more > budget, "{budget}: {} positions", plan.context);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_arithmetic() {
        // Buffers: 300 − (16 + 116).
        let least = 1000 + 16 + 116 + 168 + 20 + 30;
        assert_eq!(with(least, None).mode, Mode::Resident);
        let plan = with(least - 1, None);
        assert_eq!((plan.mode, plan.context_max, plan.bytes.total()), (Mode::Refused, 0, least));
        assert!(plan.reasons[0].contains("weights") && plan.reasons[0].contains("budget"), "{:?}", plan.reasons);
    }

    #[test]
    fn a_context_that_does_not_fit_is_refused_and_the_one_that_would_is_named() {
        let plan = with(1600, Some(400));
        assert_eq!((plan.mode, plan.context), (Mode::Refused, 400));
        assert!(plan.context_max > 0 && plan.reasons[0].contains(&plan.context_max.to_string()));
        assert_eq!(with(1600, Some(plan.context_max)).mode, Mode::Resident);
    }

    #[test]
    fn weights_that_do_not_fit_are_streamed_where_that_can_be() {
        let ask = Ask { budget_bytes: 800, context: None, sessions: 1, lazy: true, streamed: true };
        let streamed = plan(&DEMAND, &ask);
        assert_eq!((streamed.mode, streamed.bytes.weights), (Mode::Streamed, 0));
        assert_eq!(streamed.bytes.io, 300);
        assert!(streamed.reasons[0].starts_with("lazy: weights"), "{:?}", streamed.reasons);
        assert_eq!(plan(&DEMAND, &Ask { budget_bytes: 1 << 20, ..ask }).mode, Mode::Lazy);
    }

    #[test]
    fn behind_a_window_nothing_is_kept() {
        let demand = Demand { kv_window_block_bytes: 12, kv_window_blocks_max: 5, ..DEMAND };
        assert_eq!([1, 80, 81, 480].map(|c| demand.kv_bytes(c)), [16, 5 * 16, 5 * 16 + 4, 5 * 16 + 25 * 4]);
        let budget = DEMAND.bytes(Mode::Resident, 160, 1).total();
        assert!(demand.context_max(Mode::Resident, budget, 1) > DEMAND.context_max(Mode::Resident, budget, 1));
    }

    #[test]
    fn every_session_has_its_keys_and_values() {
        let one = DEMAND.bytes(Mode::Resident, 100, 1);
        assert_eq!(DEMAND.bytes(Mode::Resident, 100, 4).kv, 4 * one.kv);
        assert_eq!(one.kv, 7 * 16, "whole blocks");
    }
}
