//! `airs bench --route-trace`: generation whose routing was recorded elsewhere, so that cache and drive behave as in life,
//! beside what the drive and the processor allow.

use std::path::Path;
use std::time::Duration;

use model::{RouteReplay, Row, StepRecord};
use residency::experts::Trace;
use serde_json::json;

use crate::failure::Failure;
use crate::flags::{Bench, Settings};
use crate::lanes;
use crate::open::{Opened, open};
use crate::planning::Need;
use crate::terminal::{print, print_json};

pub(crate) fn execute(args: &Bench, settings: &Settings, file: &Path) -> Result<(), Failure> {
    let name = file.display();
    let text = std::fs::read_to_string(file).map_err(|e| Failure::Run(format!("{name}: {e}")))?;
    let trace = Trace::parse(&text).map_err(|e| Failure::Run(format!("{name}: {e}")))?;
    let replay = RouteReplay::new(&trace);
    let need = Need { context: Some(replay.tokens as usize), sessions: 1, logits_rows: 1, lazy: false };
    let mut opened = open(settings, args.model.name(), &args.compute, need)?;
    if opened.bank.experts == 0 {
        return Err(Failure::Usage("--route-trace needs a model with experts".to_owned()));
    }
    opened.say_mode("");
    let (prompt, decode) = run(&mut opened, replay)?;
    report(args, &opened, &prompt, &decode)
}

/// Computes the recorded tokens: what the prompt took, and each token behind it.
fn run(opened: &mut Opened, replay: RouteReplay) -> Result<(Vec<StepRecord>, Vec<StepRecord>), Failure> {
    let (prompt, tokens) = (replay.prompt as usize, replay.tokens as usize);
    let vocab_len = opened.model().config.vocab_len;
    let runner = opened.engine.runner();
    let sequence = runner.sequence_open(tokens);
    // Any tokens: where they go was recorded.
    let row = |i: usize| Row { sequence, token: ((i * 7919 + 13) % vocab_len) as u32, logits: i + 1 >= prompt };
    runner.record_steps(true);
    runner.force_routes(Some(replay));
    let fail = |e: model::Error| Failure::Run(e.to_string());
    if prompt > 0 {
        runner.forward(&(0..prompt).map(row).collect::<Vec<_>>()).map_err(fail)?;
    }
    let first = runner.take_steps();
    for i in prompt..tokens {
        runner.forward(&[row(i)]).map_err(fail)?;
    }
    let rest = runner.take_steps();
    runner.sequence_close(sequence);
    runner.record_steps(false);
    runner.force_routes(None);
    Ok((first, rest))
}

fn report(args: &Bench, opened: &Opened, prompt: &[StepRecord], decode: &[StepRecord]) -> Result<(), Failure> {
    let sum = |steps: &[StepRecord], field: fn(&StepRecord) -> Duration| -> f64 {
        steps.iter().map(field).sum::<Duration>().as_secs_f64()
    };
    let tokens = decode.len() as f64;
    let (wall, computed, read) =
        (sum(decode, |s| s.wall), sum(decode, |s| s.computed), sum(decode, |s| s.experts.read));
    let read_bytes: u64 = decode.iter().map(|s| s.experts.read_bytes).sum();
    let (hits, misses) = decode.iter().fold((0, 0), |(h, m), s| (h + s.experts.cache.hits, m + s.experts.cache.misses));
    // Now, not as it is remembered: a drive's rate changes with what else it does.
    let way = if misses > 0 { lanes::measure(&opened.path, opened.slice_bytes) } else { None };
    let rate = way.map(|way| way.bytes_per_second);
    // What one of the two that work at once takes at least.
    let bound = rate.map(|rate| (read_bytes as f64 / rate).max(computed));
    let share = bound.map(|bound| bound / wall);
    let hit_pct = (hits + misses > 0).then(|| 100.0 * hits as f64 / (hits + misses) as f64);
    if args.output.json() {
        return print_json(&json!({
            "prompt_tokens": prompt.iter().map(|s| s.rows).sum::<usize>(),
            "prompt_ms": 1e3 * sum(prompt, |s| s.wall),
            "predicted_tokens": decode.len(),
            "predicted_per_second": tokens / wall,
            "compute_ms_per_token": 1e3 * computed / tokens,
            "stall_ms_per_token": 1e3 * sum(decode, |s| s.stalled) / tokens,
            "read_bytes_per_token": read_bytes as f64 / tokens,
            "read_bytes_per_second": (read > 0.0).then(|| read_bytes as f64 / read),
            "probed_bytes_per_second": rate,
            "cache_hit_pct": hit_pct,
            "fraction_of_bound": share,
        }));
    }
    let mut text = format!(
        "{:.2} tokens/s, {:.1} ms computing and {:.1} ms waiting for each\n",
        tokens / wall,
        1e3 * computed / tokens,
        1e3 * sum(decode, |s| s.stalled) / tokens
    );
    if let Some(hit_pct) = hit_pct {
        text += &format!(
            "{hit_pct:.1} % of the experts were in memory; {:.1} MB a token were read\n",
            read_bytes as f64 / tokens / 1e6
        );
    }
    if let (Some(rate), Some(share)) = (rate, share) {
        text += &format!("{:.0} % of what a drive of {:.2} GB/s and the computing allow\n", 100.0 * share, rate / 1e9);
    }
    print(&text)
}
