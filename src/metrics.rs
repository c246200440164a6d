//! `--metrics FILE`: what each step of an answer took, as JSON lines, and what `airs why` makes of them.
//!
//! ```text
//! {"kind":"config", ...}     which program, model and settings made the file
//! {"kind":"step", ...}       one for each forward pass
//! {"kind":"summary", ...}    the whole answer
//! ```
//! What could not be measured is null.

use std::fs;
use std::path::Path;
use std::time::Duration;

use engine::Timings;
use memory::pressure::Reader;
use model::{ExpertMemory, StepRecord};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::open::Opened;

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// The share of hits in percent; null where there were no uses.
fn hit_pct(hits: u64, misses: u64) -> Value {
    match hits + misses {
        0 => Value::Null,
        all => json!((1e4 * hits as f64 / all as f64).round() / 100.0),
    }
}

fn config_of(opened: &mut Opened) -> Value {
    let (slots, lanes) = match opened.experts {
        ExpertMemory::Resident => (None, None),
        ExpertMemory::Slots { slots, lanes } => (Some(slots), Some(lanes)),
    };
    json!({
        "kind": "config",
        "airs": env!("CARGO_PKG_VERSION"),
        "model": opened.label,
        "mode": opened.mode.name(),
        "threads": opened.threads,
        "isa": opened.engine.runner().isa().name(),
        "context": opened.context,
        "budget_bytes": opened.ledger.budget_bytes(),
        "expert_slots": slots,
        "io_threads": lanes.map(|l| l.lanes),
        "io_depth": lanes.map(|l| l.depth),
        "io_uring": lanes.map(|l| l.ring),
        "lossy": opened.lossy,
    })
}

fn step_of(step: &StepRecord) -> Value {
    let (e, process) = (&step.experts, step.process.as_ref());
    json!({
        "kind": "step",
        "tokens": step.rows,
        "wall_ms": ms(step.wall),
        "compute_ms": ms(step.computed),
        "stall_ms": ms(step.stalled),
        "io_ms": ms(e.read),
        "pack_ms": ms(e.packed),
        "read_bytes": e.read_bytes,
        "cache_hit_pct": hit_pct(e.cache.hits, e.cache.misses),
        "misses": e.cache.misses,
        "guessed": e.guesses.reads,
        "guessed_right": e.guesses.right,
        "guessed_wrong_bytes": e.guesses.wrong_bytes,
        "major_faults": step.major_faults,
        "rss_bytes": process.map(|p| p.resident_bytes),
        "anon_bytes": process.map(|p| p.anonymous_bytes),
        "file_bytes": process.map(|p| p.mapped_bytes),
        "swap_bytes": process.map(|p| p.swapped_bytes),
        "dense_resident_frac": step.dense_resident,
    })
}

fn summary_of(opened: &Opened, timings: &Timings, steps: &[StepRecord]) -> Value {
    let reader = Reader::default();
    let process = reader.process();
    let sum = |field: fn(&StepRecord) -> Duration| ms(steps.iter().map(field).sum());
    let mib = |bytes: u64| (bytes as f64 / f64::from(1 << 20) * 10.0).round() / 10.0;
    let stats = opened.model().expert_stats().unwrap_or_default();
    let experts = stats.slots > 0;
    let if_experts = |value: Value| if experts { value } else { Value::Null };
    json!({
        "kind": "summary",
        "prompt_tokens": timings.prompt_n,
        "predicted_tokens": timings.predicted_n,
        "ttft_ms": timings.ttft_ms,
        "predicted_per_second": timings.predicted_per_second,
        "wall_ms": sum(|s| s.wall),
        "compute_ms": sum(|s| s.computed),
        "stall_ms": sum(|s| s.stalled),
        "io_ms": if_experts(json!(ms(stats.read))),
        "pack_ms": if_experts(json!(ms(stats.packed))),
        "read_bytes": opened.model().read_bytes(),
        "expert_read_bytes": if_experts(json!(stats.read_bytes)),
        "cache_hit_pct": hit_pct(stats.cache.hits, stats.cache.misses),
        "misses": if_experts(json!(stats.cache.misses)),
        "guessed": if_experts(json!(stats.guesses.reads)),
        "guessed_right": if_experts(json!(stats.guesses.right)),
        "guessed_wrong_bytes": if_experts(json!(stats.guesses.wrong_bytes)),
        "evictions": if_experts(json!(stats.cache.evictions)),
        "rereads": if_experts(json!(stats.cache.rereads)),
        "experts_routed": if_experts(json!(stats.routed)),
        "experts_dropped": if_experts(json!(stats.dropped)),
        "experts_examined": if_experts(json!(stats.examined)),
        "token_demand_MiB": if_experts(json!(mib(opened.bank.cycle_bytes()))),
        "layer_demand_MiB": if_experts(json!(mib(opened.bank.layer_bytes()))),
        "cache_budget_MiB": if_experts(json!(mib((stats.slots * stats.slot_bytes) as u64))),
        "dense_resident_frac": opened.model().dense_resident_share(),
        "major_faults": reader.major_faults(),
        "processor_wait_ms": reader.processor_wait().map(ms),
        "throttled_ms": reader.throttled().map(ms),
        "rss_bytes": process.as_ref().map(|p| p.resident_bytes),
        "anon_bytes": process.as_ref().map(|p| p.anonymous_bytes),
        "file_bytes": process.as_ref().map(|p| p.mapped_bytes),
        "swap_bytes": process.as_ref().map(|p| p.swapped_bytes),
        "peak_rss_bytes": process.as_ref().map(|p| p.peak_bytes),
    })
}

/// Writes what the answer took to `path`.
pub(crate) fn write(path: &Path, opened: &mut Opened, timings: &Timings) -> Result<(), Failure> {
    let steps = opened.engine.runner().take_steps();
    let config = config_of(opened);
    let lines = [config].into_iter().chain(steps.iter().map(step_of)).chain([summary_of(opened, timings, &steps)]);
    let text: String = lines.map(|line| line.to_string() + "\n").collect();
    fs::write(path, text).map_err(|e| Failure::Run(format!("{}: {e}", path.display())))
}
