//! `airs why`: where the time of an answer went, and the one change that would help most.

use std::fs;

use serde_json::{Value, json};

use crate::failure::Failure;
use crate::flags::Why;
use crate::terminal::{print, print_json};

pub(crate) fn execute(args: &Why) -> Result<(), Failure> {
    let name = args.file.display();
    let text = fs::read_to_string(&args.file).map_err(|e| Failure::Run(format!("{name}: {e}")))?;
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let of_kind = |kind: &str| lines.iter().rev().find(|line| line["kind"] == kind);
    let (Some(config), Some(summary)) = (of_kind("config"), of_kind("summary")) else {
        return Err(Failure::Run(format!("{name}: no file of --metrics: it has no summary")));
    };
    let (story, advice) = (story(config, summary), advice(config, summary));
    if args.output.json() {
        return print_json(&json!({ "story": story, "advice": advice }));
    }
    print(&format!("{story} {advice}\n"))
}

/// The share of the time from which on waiting for a processor is worth a word.
const WAIT_SHARE: f64 = 0.05;

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or(0.0)
}

/// Where the time went.
fn story(config: &Value, summary: &Value) -> String {
    let wall = number(summary, "wall_ms");
    let share =
        |key: &str| format!("{:.0} % ({:.0} ms)", 100.0 * number(summary, key) / wall.max(1e-9), number(summary, key));
    let tokens = number(summary, "prompt_tokens") + number(summary, "predicted_tokens");
    let mut text = format!(
        "{} ({}) took {wall:.0} ms for {tokens} tokens: {} computing and {} waiting for weights.",
        config["model"].as_str().unwrap_or("the model"),
        config["mode"].as_str().unwrap_or("unknown mode"),
        share("compute_ms"),
        share("stall_ms"),
    );
    if let Some(hits) = summary["cache_hit_pct"].as_f64() {
        let (bytes, io) = (number(summary, "expert_read_bytes"), number(summary, "io_ms"));
        text += &format!(
            " Of the experts, {hits:.0} % were in memory; {:.0} MB of others were read, {:.2} GB/s while reads were under way, and packed \
             in {:.0} ms beside the computing.",
            bytes / 1e6,
            bytes / 1e6 / io.max(1e-9),
            number(summary, "pack_ms"),
        );
        let (misses, again) = (number(summary, "misses"), number(summary, "rereads"));
        if again > 0.0 {
            text += &format!(" {again:.0} of {misses:.0} had been in memory before and had made room.");
        }
    }
    let (guessed, right) = (number(summary, "guessed"), number(summary, "guessed_right"));
    if guessed > 0.0 {
        text += &format!(
            " {guessed:.0} experts were read on a guess before their layer had chosen: {:.0} % were wanted, \
             {:.0} MB were read in vain.",
            100.0 * right / guessed,
            number(summary, "guessed_wrong_bytes") / 1e6,
        );
    }
    let faults = number(summary, "major_faults");
    if faults > 0.0 {
        text += &format!(" The system read {faults:.0} pages on its own (major faults).");
    }
    let (queue, throttled) = (number(summary, "processor_wait_ms"), number(summary, "throttled_ms"));
    // Some always passes while threads wake each other.
    if queue > WAIT_SHARE * wall {
        text += &format!(" Its threads waited {queue:.0} ms for a processor, all together.");
    }
    if throttled > 0.0 {
        text += &format!(" Its control group's CPU quota has been used up for {throttled:.0} ms so far.");
    }
    text
}

/// The one change that would help most.
fn advice(config: &Value, summary: &Value) -> String {
    let (wall, stalled, computed) =
        (number(summary, "wall_ms"), number(summary, "stall_ms"), number(summary, "compute_ms"));
    let hits = summary["cache_hit_pct"].as_f64();
    if number(summary, "swap_bytes") > 0.0 {
        return "Part of the process was swapped out: a smaller --memory, or --cache-ceil-mb, would keep it in memory."
            .into();
    }
    if number(summary, "processor_wait_ms") > 0.3 * wall * number(config, "threads").max(1.0) {
        return "Most helpful: fewer other programs on the processors, or fewer threads (-t): ours waited for their turn.".into();
    }
    match hits {
        Some(_) if stalled > 0.3 * wall => {
            let (have, token) = (number(summary, "cache_budget_MiB"), number(summary, "token_demand_MiB"));
            if have < token {
                return format!(
                    "Most helpful: more memory for experts. {have:.0} MiB hold less than the {token:.0} MiB that one token goes through; \
                     try --cache-mb {:.0}.",
                    token.ceil()
                );
            }
            format!("Most helpful: more memory for experts (--memory, or --cache-mb above {have:.0}), or a faster drive.")
        }
        None if stalled > 0.3 * wall => {
            "Most helpful: a second question in the same process, for the weights were still being read; or a faster drive.".into()
        }
        _ if computed > 0.6 * wall => {
            let threads = number(config, "threads");
            format!("Computing binds: a smaller quantization or more cores than {threads:.0} would help, memory would not.")
        }
        _ => "Nothing stands out: the rest was the time between steps, or other programs on the processor.".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(stalled: f64, cache: f64) -> Value {
        json!({
            "wall_ms": 1000.0, "compute_ms": 900.0 - stalled, "stall_ms": stalled, "prompt_tokens": 3,
            "predicted_tokens": 5, "cache_hit_pct": 60.0, "expert_read_bytes": 2e9, "io_ms": 800.0,
            "token_demand_MiB": 500.0, "cache_budget_MiB": cache, "swap_bytes": 0,
        })
    }

    #[test]
    fn the_story_has_the_shares_and_the_advice_follows_the_largest() {
        let config = json!({ "model": "m", "mode": "streamed", "threads": 2 });
        let text = story(&config, &summary(500.0, 100.0));
        assert!(text.contains("40 % (400 ms) computing") && text.contains("50 % (500 ms) waiting"), "{text}");
        assert!(text.contains("60 % were in memory") && text.contains("2.50 GB/s"), "{text}");
        assert!(advice(&config, &summary(500.0, 100.0)).contains("--cache-mb 500"));
        assert!(advice(&config, &summary(500.0, 800.0)).contains("faster drive"));
        assert!(advice(&config, &summary(0.0, 800.0)).contains("Computing binds"));

        let with = |key: &str, number: f64| {
            let mut summary = summary(500.0, 100.0);
            summary[key] = json!(number);
            summary
        };
        assert!(!story(&config, &with("processor_wait_ms", 40.0)).contains("processor"));
        assert!(story(&config, &with("processor_wait_ms", 700.0)).contains("700 ms for a processor"));
        assert!(advice(&config, &with("processor_wait_ms", 700.0)).contains("fewer threads"));
        assert!(story(&config, &with("throttled_ms", 30.0)).contains("quota has been used up for 30 ms"));
        assert!(story(&config, &with("rereads", 7.0)).contains("7 of 0 had been"));
        assert!(!story(&config, &with("guessed", 0.0)).contains("guess"));
        let mut guessed = with("guessed", 40.0);
        (guessed["guessed_right"], guessed["guessed_wrong_bytes"]) = (json!(30), json!(12e6));
        let told = story(&config, &guessed);
        assert!(told.contains("40 experts") && told.contains("75 % were wanted, 12 MB"), "{told}");
    }
}
