//! `airs bench`: tokens per second, as llama-bench measures them: prompt tests (all tokens at once) and generation tests
//! (one token after the other, in one or more sequences at once), with random tokens, each run in fresh sequences, after
//! one run that does not count. With `--limits` beside what this machine could do at most. With `--sessions` or `--arrivals`
//! many sessions on one engine instead, see [`sessions`].

mod arrivals;
mod sessions;

use std::time::Instant;

use engine::Engine;
use model::{Limits, Model, Row, SequenceId};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::flags::{Bench, Settings};
use crate::interrupt::Stoppable;
use crate::open::{Opened, open};
use crate::planning::Need;
use crate::terminal::{Progress, print, print_json, say, size};

/// What one test does.
#[derive(Debug, Clone, Copy)]
struct Test {
    prompt: usize,
    generate: usize,
    parallel: usize,
}

impl Test {
    fn name(self) -> String {
        match self {
            Test { prompt, generate: 0, .. } => format!("pp{prompt}"),
            Test { generate, parallel: 1, .. } => format!("tg{generate}"),
            Test { generate, parallel, .. } => format!("tg{generate} x{parallel}"),
        }
    }

    fn tokens(self) -> usize {
        (self.prompt + self.generate) * self.parallel
    }
}

/// A test's speed beside what bounds it: the reading of weights for generation, multiplications for prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Limit {
    kind: &'static str,
    unit: &'static str,
    /// What all threads together can do in a second.
    per_second: f64,
    /// The share of it that was used.
    fraction: f64,
}

impl Limit {
    /// `speed` is in tokens per second.
    fn new(test: Test, speed: f64, model: &Model, limits: &Limits) -> Limit {
        let (kind, unit, per_second, per_token) = if test.prompt == 0 {
            // A step reads the weights once for a token of every sequence.
            ("read", "GB/s", limits.read.all, model.step_bytes() as f64 / test.parallel as f64)
        } else {
            let macs = model.prompt_macs(test.prompt as u64) as f64;
            ("int8", "GMAC/s", limits.int8.all, macs / test.prompt as f64)
        };
        Limit { kind, unit, per_second, fraction: speed * per_token / per_second }
    }

    fn json(self) -> Value {
        let fraction = (self.fraction * 1e4).round() / 1e4;
        json!({ "kind": self.kind, "value": self.per_second.round(), "fraction": fraction })
    }

    fn text(self) -> String {
        format!("{:.0} % of {} {}", self.fraction * 100.0, billions(self.per_second), self.unit)
    }
}

/// Billions, in three digits.
fn billions(value: f64) -> String {
    let value = value / 1e9;
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

pub(crate) fn execute(args: &Bench, settings: &Settings) -> Result<(), Failure> {
    if let Some(file) = &args.route_trace {
        return super::replay::execute(args, settings, file);
    }
    if let Some(trace) = arrivals::Trace::of(args)? {
        return sessions::execute(args, settings, &trace);
    }
    let prompts = args.prompt.0.iter().map(|&prompt| Test { prompt, generate: 0, parallel: 1 });
    let generations = args
        .generate
        .0
        .iter()
        .flat_map(|&generate| args.parallel.0.iter().map(move |&parallel| Test { prompt: 0, generate, parallel }));
    let tests: Vec<Test> = prompts.chain(generations).filter(|t| t.tokens() > 0).collect();
    if tests.is_empty() {
        return Err(Failure::Usage("-p and -n are both 0: there is nothing to measure".to_owned()));
    }
    // Before the model is there: the memory that this takes is given back, and never held beside the weights.
    let limits = args.limits.then(|| measure_limits(args, settings)).transpose()?;
    let longest = tests.iter().map(|t| t.prompt + t.generate).max().unwrap_or(1);
    let sessions = tests.iter().map(|t| t.parallel).max().unwrap_or(1);
    let need = Need { context: Some(longest), sessions, logits_rows: sessions, lazy: false };
    let mut opened = open(settings, args.model.name(), &args.compute, need)?;
    opened.say_mode("");
    let mut results = Vec::new();
    for test in tests {
        let samples = measure(&mut opened.engine, test, args.repetitions)?;
        let limit = limits.map(|limits| Limit::new(test, median(&samples), opened.model(), &limits));
        results.push(Measured { test, samples, limit });
    }
    if args.output.json() {
        return print_json(&Value::Array(results.iter().map(|measured| json_of(&mut opened, measured)).collect()));
    }
    print(&table(&mut opened, &results, limits.is_some()))
}

/// A test and its results.
struct Measured {
    test: Test,
    /// Tokens per second.
    samples: Vec<f64>,
    limit: Option<Limit>,
}

/// Measures what this machine can do, and says it.
fn measure_limits(args: &Bench, settings: &Settings) -> Result<Limits, Failure> {
    let threads = args.compute.threads();
    let limits = Limits::measure(threads, settings.isa).map_err(|e| Failure::Run(e.to_string()))?;
    let rates = |threads: usize, read: f64, int8: f64| {
        let plural = if threads == 1 { "" } else { "s" };
        format!("{threads} thread{plural}: reads {} GB/s, int8 {} GMAC/s", billions(read), billions(int8))
    };
    let mut text = format!("limits · {}", rates(1, limits.read.one, limits.int8.one));
    if threads > 1 {
        text += &format!(" · {}", rates(threads, limits.read.all, limits.int8.all));
    }
    say(&text);
    Ok(limits)
}

fn table(opened: &mut Opened, results: &[Measured], with_limits: bool) -> String {
    let mut text = format!(
        "| {:<24} | {:>9} | {:>7} | {:<8} | {:<10} | {:>20} |",
        "model", "size", "threads", "isa", "test", "t/s median (least–most)"
    );
    let mut rule =
        "|--------------------------|-----------|---------|----------|------------|-------------------------|"
            .to_owned();
    if with_limits {
        text += &format!(" {:>20} |", "limit");
        rule += "----------------------|";
    }
    text += &format!("\n{rule}\n");
    let isa = opened.engine.runner().isa();
    for Measured { test, samples, limit } in results {
        let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let most = samples.iter().copied().fold(0.0, f64::max);
        let speed = format!("{:.2} ({least:.2}–{most:.2})", median(samples));
        text += &format!(
            "| {:<24} | {:>9} | {:>7} | {:<8} | {:<10} | {speed:>23} |",
            opened.label,
            size(opened.model().weights_bytes),
            opened.threads,
            isa.name(),
            test.name(),
        );
        if let Some(limit) = limit {
            text += &format!(" {:>20} |", limit.text());
        }
        text += "\n";
    }
    text
}

fn json_of(opened: &mut Opened, Measured { test, samples, limit }: &Measured) -> Value {
    let rounded = |v: f64| (v * 100.0).round() / 100.0;
    let mut value = json!({
        "model": opened.label,
        "model_filename": opened.path.display().to_string(),
        "model_size": opened.model().weights_bytes,
        "n_prompt": test.prompt,
        "n_gen": test.generate,
        "n_parallel": test.parallel,
        "n_threads": opened.threads,
        "isa": opened.engine.runner().isa().name(),
        "type_k": opened.engine.runner().kv_types().0.name(),
        "type_v": opened.engine.runner().kv_types().1.name(),
        "samples_ts": samples.iter().map(|&s| rounded(s)).collect::<Vec<_>>(),
        "median_ts": rounded(median(samples)),
    });
    if let Some(limit) = limit {
        value["limit"] = limit.json();
    }
    value
}

/// Tokens per second of each run that counts.
fn measure(engine: &mut Engine, test: Test, repetitions: usize) -> Result<Vec<f64>, Failure> {
    let progress = Progress::counting(&test.name(), "runs");
    let stoppable = Stoppable::begin();
    let mut random = Random(1);
    let mut samples = Vec::new();
    for run in 0..=repetitions {
        progress.set(run as u64, Some(repetitions as u64 + 1));
        let seconds = time_once(engine, test, &mut random, &stoppable);
        let seconds = seconds.inspect_err(|_| progress.clear())?;
        if run > 0 {
            samples.push(test.tokens() as f64 / seconds);
        }
    }
    progress.clear();
    Ok(samples)
}

fn time_once(engine: &mut Engine, test: Test, random: &mut Random, stoppable: &Stoppable) -> Result<f64, Failure> {
    let vocab_len = engine.model().config.vocab_len;
    let runner = engine.runner();
    let context = test.prompt + test.generate;
    let sequences: Vec<SequenceId> = (0..test.parallel).map(|_| runner.sequence_open(context)).collect();
    let prompt: Vec<Row> = (0..test.prompt)
        .map(|i| Row { sequence: sequences[0], token: random.token(vocab_len), logits: i + 1 == test.prompt })
        .collect();
    let begin = Instant::now();
    let mut result = Ok(());
    if !prompt.is_empty() {
        result = runner.forward(&prompt).map(drop).map_err(|e| Failure::Run(e.to_string()));
    }
    for _ in 0..test.generate {
        if stoppable.flow().is_break() {
            result = Err(Failure::Interrupted);
        }
        if result.is_err() {
            break;
        }
        let next = |&sequence: &SequenceId| Row { sequence, token: random.token(vocab_len), logits: true };
        let rows: Vec<Row> = sequences.iter().map(next).collect();
        result = runner.forward(&rows).map(drop).map_err(|e| Failure::Run(e.to_string()));
    }
    let seconds = begin.elapsed().as_secs_f64();
    sequences.into_iter().for_each(|s| runner.sequence_close(s));
    if stoppable.flow().is_break() {
        return Err(Failure::Interrupted);
    }
    result.map(|()| seconds)
}

/// The middle sample, or the mean of the two in the middle.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Tokens whose only merit is that they are the same in every run of the program (Marsaglia's xorshift64).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn token(&mut self, vocab_len: usize) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % vocab_len as u64) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::{Random, median};

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn random_tokens_are_in_the_vocabulary_and_differ() {
        let mut random = Random(1);
        let tokens: Vec<u32> = (0..100).map(|_| random.token(1000)).collect();
        assert!(tokens.iter().all(|&t| t < 1000));
        assert!(tokens.iter().collect::<std::collections::HashSet<_>>().len() > 80);
    }
}
