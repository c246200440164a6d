//! `airs bench`: tokens per second, as llama-bench measures them: prompt tests (all tokens at once) and generation tests
//! (one token after the other, in one or more sequences at once), with random tokens, each run in fresh sequences, after
//! one run that does not count.

use std::time::Instant;

use engine::Engine;
use model::{Row, SequenceId};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::flags::{Bench, Settings};
use crate::interrupt::Stoppable;
use crate::open::{Opened, open};
use crate::terminal::{Progress, print, print_json, size};

/// Type of the KV cache: the runner has only this one.
const KV_TYPE: &str = "f16";

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

pub(crate) fn execute(args: &Bench, settings: &Settings) -> Result<(), Failure> {
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
    let mut opened = open(settings, args.model.name(), &args.compute)?;
    opened.say_mode("");
    let mut results = Vec::new();
    for test in tests {
        let samples = measure(&mut opened.engine, test, args.repetitions)?;
        results.push((test, samples));
    }
    if args.output.json() {
        let one = |(test, samples): &(Test, Vec<f64>)| json_of(&mut opened, *test, samples);
        return print_json(&Value::Array(results.iter().map(one).collect()));
    }
    let mut text = format!(
        "| {:<24} | {:>9} | {:>7} | {:<8} | {:<10} | {:>20} |\n",
        "model", "size", "threads", "isa", "test", "t/s median (least–most)"
    );
    text += "|--------------------------|-----------|---------|----------|------------|-------------------------|\n";
    let isa = opened.engine.runner().isa();
    for (test, samples) in &results {
        let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let most = samples.iter().copied().fold(0.0, f64::max);
        let speed = format!("{:.2} ({least:.2}–{most:.2})", median(samples));
        text += &format!(
            "| {:<24} | {:>9} | {:>7} | {:<8} | {:<10} | {speed:>23} |\n",
            opened.label,
            size(opened.model().weights_bytes),
            opened.threads,
            isa.name(),
            test.name(),
        );
    }
    print(&text)
}

fn json_of(opened: &mut Opened, test: Test, samples: &[f64]) -> Value {
    let rounded = |v: f64| (v * 100.0).round() / 100.0;
    json!({
        "model": opened.label,
        "model_filename": opened.path.display().to_string(),
        "model_size": opened.model().weights_bytes,
        "n_prompt": test.prompt,
        "n_gen": test.generate,
        "n_parallel": test.parallel,
        "n_threads": opened.threads,
        "isa": opened.engine.runner().isa().name(),
        "type_k": KV_TYPE,
        "samples_ts": samples.iter().map(|&s| rounded(s)).collect::<Vec<_>>(),
        "median_ts": rounded(median(samples)),
    })
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
