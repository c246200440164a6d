//! Many sessions on one engine: times to the first token and between tokens, what was found in the cache, memory.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use engine::{Class, Ended, Engine, Progress as Step, Request, RequestId, Sampling, Submission};
use serde_json::{Map, Value, json};

use super::arrivals::{Arrival, Trace, When};
use crate::failure::Failure;
use crate::flags::{Bench, Settings};
use crate::interrupt::Stoppable;
use crate::kv_watch::KvWatch;
use crate::open::{Opened, open};
use crate::planning::Need;
use crate::relief::LOOK_EVERY;
use crate::terminal::{Progress, print, print_json, size};

/// What became of a session.
#[derive(Debug, Clone)]
struct Outcome {
    class: Class,
    prompt: usize,
    /// When it came.
    came: Instant,
    /// When each of its tokens came.
    tokens: Vec<Instant>,
    cached: usize,
    error: Option<String>,
}

/// What all of them took.
#[derive(Debug, Default)]
struct Totals {
    seconds: f64,
    steps: usize,
    /// The most memory taken for keys and values at once, free blocks included.
    kv_mapped_bytes_peak: u64,
    /// Sums over the steps: positions in blocks of running sessions, and those of them that hold a token.
    positions: usize,
    used: usize,
    /// Parts of conversations that the kernel saw no use of, where it was asked and could tell.
    kv_seen_idle: Option<usize>,
}

pub(super) fn execute(args: &Bench, settings: &Settings, trace: &Trace) -> Result<(), Failure> {
    let running = trace.0.len().min(engine::RUNNING_MAX);
    // One session must fit; whether more do, the ledger says as they come.
    let need = Need { context: Some(trace.context()), sessions: 1, logits_rows: running, lazy: false };
    let mut opened = open(settings, args.model.name(), &args.compute, need)?;
    opened.say_mode("");
    opened.engine.set_limits(running, trace.0.len());
    let progress = Progress::counting("sessions", "sessions");
    let result = replay(&mut opened.engine, trace, args.observe_kv, &progress);
    progress.clear();
    let (outcomes, totals) = result?;
    let report = report(&mut opened, &outcomes, &totals);
    if args.output.json() { print_json(&report) } else { print(&text_of(&report)) }
}

/// Submits the sessions of `trace` as they come, and steps until all have ended.
fn replay(
    engine: &mut Engine,
    trace: &Trace,
    observe_kv: bool,
    progress: &Progress,
) -> Result<(Vec<Outcome>, Totals), Failure> {
    let vocab_len = engine.model().config.vocab_len;
    let stoppable = Stoppable::begin();
    let begin = Instant::now();
    let mut outcomes: Vec<Outcome> = Vec::new();
    let mut ids: HashMap<RequestId, usize> = HashMap::new();
    let (mut totals, mut done) = (Totals::default(), 0);
    let (mut watch, mut looked) = (observe_kv.then(|| KvWatch::new(Path::new("/"))), begin);
    while done < trace.0.len() {
        while let Some(arrival) = trace.0.get(outcomes.len()) {
            let Some(came) = has_come(arrival, begin, outcomes.last()) else { break };
            let tokens = arrival.tokens(outcomes.len(), vocab_len);
            outcomes.push(Outcome {
                class: arrival.class,
                prompt: arrival.prompt,
                came,
                tokens: Vec::new(),
                cached: 0,
                error: None,
            });
            match engine.submit(request(arrival, tokens))? {
                Submission::Queued(id) => drop(ids.insert(id, outcomes.len() - 1)),
                Submission::Full { waiting, .. } => {
                    return Err(Failure::Run(format!("{waiting} sessions wait, and there is no place for more")));
                }
            }
        }
        if engine.is_idle() {
            wait_for(trace.0.get(outcomes.len()), begin);
        }
        let stepped = engine.step(&mut |id, what| {
            if let (Step::Text(_), Some(&i)) = (what, ids.get(&id)) {
                outcomes[i].tokens.push(Instant::now());
            }
            stoppable.flow()
        });
        if stoppable.flow().is_break() {
            return Err(Failure::Interrupted);
        }
        if stepped.rows == 0 {
            // What others keep goes when it has been idle for long enough.
            std::thread::sleep(Duration::from_millis(1));
        }
        totals.count(engine);
        if let Some(watch) = watch.as_mut().filter(|_| looked.elapsed() >= LOOK_EVERY) {
            watch.look(engine.runner());
            looked = Instant::now();
        }
        for Ended { id, result } in engine.take_ended() {
            let Some(&i) = ids.get(&id) else { continue };
            match result {
                Ok(generated) => {
                    outcomes[i].cached = generated.reused;
                    // The rest of a character comes as text without a token.
                    outcomes[i].tokens.truncate(generated.tokens.len());
                }
                Err(error) => outcomes[i].error = Some(error.to_string()),
            }
            done += 1;
            progress.set(done as u64, Some(trace.0.len() as u64));
        }
    }
    totals.seconds = begin.elapsed().as_secs_f64();
    totals.kv_seen_idle = watch.and_then(|watch| watch.told());
    Ok((outcomes, totals))
}

/// The moment at which `arrival` came, if it has come.
fn has_come(arrival: &Arrival, begin: Instant, before: Option<&Outcome>) -> Option<Instant> {
    match arrival.when {
        When::At(at) => Some(begin + at).filter(|&at| at <= Instant::now()),
        // One that failed has no first token to wait for.
        When::AfterFirstToken => before.filter(|b| !b.tokens.is_empty() || b.error.is_some()).map(|_| Instant::now()),
    }
}

/// Sleeps until `next` comes.
fn wait_for(next: Option<&Arrival>, begin: Instant) {
    if let Some(Arrival { when: When::At(at), .. }) = next {
        std::thread::sleep((begin + *at).saturating_duration_since(Instant::now()).min(Duration::from_secs(1)));
    }
}

fn request(arrival: &Arrival, prompt: Vec<u32>) -> Request {
    Request {
        class: arrival.class,
        tokens_max: Some(arrival.generate),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        ignore_end: true,
        ..Request::new(prompt, arrival.prompt + arrival.generate)
    }
}

impl Totals {
    /// After a step.
    fn count(&mut self, engine: &mut Engine) {
        let fill = engine.fill();
        self.steps += 1;
        self.positions += fill.positions;
        self.used += fill.used;
        self.kv_mapped_bytes_peak = self.kv_mapped_bytes_peak.max(engine.runner().kv_bytes());
    }
}

/// The value below which `percent` of `sorted` lie, by nearest rank.
fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// Median, 95th and 99th percentile and the most, in milliseconds to three places.
fn percentiles(mut values: Vec<f64>) -> Value {
    values.sort_unstable_by(f64::total_cmp);
    let at = |percent| percentile(&values, percent).map(rounded);
    json!({ "p50": at(50), "p95": at(95), "p99": at(99), "max": at(100) })
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Outcome {
    fn ttft_ms(&self) -> Option<f64> {
        self.tokens.first().map(|&first| ms(first - self.came))
    }

    fn gaps_ms(&self) -> impl Iterator<Item = f64> + '_ {
        self.tokens.windows(2).map(|w| ms(w[1] - w[0]))
    }

    fn json(&self) -> Value {
        let seconds = self.gaps_ms().sum::<f64>() / 1e3;
        let speed = (seconds > 0.0).then(|| rounded((self.tokens.len() - 1) as f64 / seconds));
        let mut value = json!({
            "class": self.class.name(),
            "ttft_ms": self.ttft_ms().map(rounded),
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "predicted_n": self.tokens.len(),
            "predicted_per_second": speed,
        });
        if let Some(error) = &self.error {
            value["error"] = json!(error);
        }
        value
    }
}

fn report(opened: &mut Opened, outcomes: &[Outcome], totals: &Totals) -> Value {
    let of_class = |class: Class| outcomes.iter().filter(move |o| o.class == class);
    let times = |class: Class| {
        json!({
            "sessions": of_class(class).count(),
            "ttft_ms": percentiles(of_class(class).filter_map(Outcome::ttft_ms).collect()),
            "inter_token_ms": percentiles(of_class(class).flat_map(Outcome::gaps_ms).collect()),
        })
    };
    let classes = Class::ALL.iter().rev().filter(|&&class| of_class(class).next().is_some());
    let classes: Map<String, Value> = classes.map(|&class| (class.name().to_owned(), times(class))).collect();
    let generated: usize = outcomes.iter().map(|o| o.tokens.len()).sum();
    let prompts: usize = outcomes.iter().filter(|o| o.error.is_none()).map(|o| o.prompt).sum();
    let cached: usize = outcomes.iter().map(|o| o.cached).sum();
    let runner = opened.engine.runner();
    let (blocks_peak, block_bytes) = (runner.kv_stats().held_blocks_peak, runner.kv_block_bytes());
    let share = |part: usize, whole: usize| (whole > 0).then(|| rounded(part as f64 / whole as f64));
    json!({
        "model": opened.label,
        "sessions": outcomes.iter().map(Outcome::json).collect::<Vec<_>>(),
        "classes": classes,
        "tokens_per_second": rounded(generated as f64 / totals.seconds),
        "hit_rate": share(cached, prompts),
        "steps": totals.steps,
        "kv_blocks_peak": blocks_peak,
        "kv_bytes_peak": blocks_peak * block_bytes,
        "kv_mapped_bytes_peak": totals.kv_mapped_bytes_peak,
        "kv_seen_idle": totals.kv_seen_idle,
        // Of the positions in blocks of running sessions, those without a token.
        "waste": share(totals.positions - totals.used, totals.positions),
    })
}

fn text_of(report: &Value) -> String {
    let number = |value: &Value| value.as_f64().map_or("-".to_owned(), |v| format!("{v:.1}"));
    let mut text = String::from(
        "| class        | sessions | TTFT p50 |   p95 ms | token p50 |   p95 |   p99 |  max ms |\n\
         |--------------|----------|----------|----------|-----------|-------|-------|---------|\n",
    );
    for (class, times) in report["classes"].as_object().into_iter().flatten() {
        let (first, gaps) = (&times["ttft_ms"], &times["inter_token_ms"]);
        text += &format!(
            "| {class:<12} | {:>8} | {:>8} | {:>8} | {:>9} | {:>5} | {:>5} | {:>7} |\n",
            times["sessions"],
            number(&first["p50"]),
            number(&first["p95"]),
            number(&gaps["p50"]),
            number(&gaps["p95"]),
            number(&gaps["p99"]),
            number(&gaps["max"]),
        );
    }
    let percent = |value: &Value| value.as_f64().map_or("-".to_owned(), |v| format!("{:.1} %", v * 100.0));
    let failed = report["sessions"].as_array().into_iter().flatten().filter(|s| s.get("error").is_some()).count();
    text += &format!(
        "{} tokens/s in {} steps · {} of the prompts found in the cache · keys and values {} in {} blocks at most, {} of it unused\n",
        number(&report["tokens_per_second"]),
        report["steps"],
        percent(&report["hit_rate"]),
        size(report["kv_bytes_peak"].as_u64().unwrap_or(0)),
        report["kv_blocks_peak"],
        percent(&report["waste"]),
    );
    if failed > 0 {
        text += &format!("{failed} sessions failed\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!([50, 95, 99, 100].map(|p| percentile(&values, p)), [10.0, 19.0, 20.0, 20.0].map(Some));
        assert_eq!(percentile(&[7.0], 50), Some(7.0));
        assert_eq!(percentile(&[], 50), None);
    }
}
