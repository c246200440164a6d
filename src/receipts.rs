//! What runs did, and what this machine can do, kept beside the store: forecasts are made from both.
//!
//! ```text
//! home/receipts.jsonl   a line for each run that was long enough to tell
//! home/machine.json     rates of this machine, for each number of threads and instruction set that was measured
//! ```
//! Both may be deleted at any time. A line that cannot be read counts as absent.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use engine::Timings;
use model::{ExpertMemory, Isa, Limits};
use residency::forecast::{self, Rates, Shares};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::flags::Settings;
use crate::open::Opened;
use crate::terminal::say;

/// Tokens that a run must have decoded to tell a speed.
const PREDICTED_MIN: usize = 16;
/// Tokens of a prompt that tell a speed: fewer are bound by memory.
const PROMPT_MIN: usize = 128;
/// Lines that are kept.
const LINES_MAX: usize = 256;

/// How fast a run was, in units that do not depend on the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Line {
    model: String,
    threads: usize,
    isa: String,
    decode_bytes_per_second: Option<f64>,
    prefill_macs_per_second: Option<f64>,
}

/// Rates of this machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Measured {
    threads: usize,
    isa: String,
    read_bytes_per_second: f64,
    int8_macs_per_second: f64,
}

fn receipts_path(settings: &Settings) -> PathBuf {
    settings.library.home.join("receipts.jsonl")
}

/// The name that a model's receipts bear: names of files change, their lengths tell them apart.
pub(crate) fn model_key(path: &Path) -> String {
    let bytes = fs::metadata(path).map_or(0, |m| m.len());
    key_of(&path.file_name().map_or_else(Default::default, |n| n.to_string_lossy()), bytes)
}

/// The same for a (first) file that is not here.
pub(crate) fn key_of(file_name: &str, bytes: u64) -> String {
    format!("{file_name}/{bytes}")
}

/// Keeps a receipt of a run, if it was long enough to tell something.
pub(crate) fn keep(settings: &Settings, opened: &mut Opened, timings: &Timings) {
    let model = std::sync::Arc::clone(opened.model());
    let kv_bytes = opened.kv_step_bytes(timings.prompt_n + timings.predicted_n / 2);
    // What was read from storage says nothing of memory.
    let from_memory = opened.experts == ExpertMemory::Resident;
    let decode = timings.predicted_per_second.filter(|_| from_memory && timings.predicted_n >= PREDICTED_MIN);
    // What the prompt waited for the disk says nothing of the processor.
    let waited_s = model.stats().waited.as_secs_f64();
    let prompt_n = timings.prompt_n as f64;
    let prefill = timings.prompt_per_second.filter(|_| from_memory && timings.prompt_n >= PROMPT_MIN);
    let prefill = prefill.map(|speed| prompt_n / (prompt_n / speed - waited_s)).filter(|v| v.is_finite() && *v > 0.0);
    if decode.is_none() && prefill.is_none() {
        return;
    }
    let macs_per_token = model.prompt_macs(timings.prompt_n as u64) as f64 / timings.prompt_n.max(1) as f64;
    let line = Line {
        model: model_key(&opened.path),
        threads: opened.threads,
        decode_bytes_per_second: decode.map(|speed| speed * (model.step_bytes() + kv_bytes) as f64),
        prefill_macs_per_second: prefill.map(|speed| speed * macs_per_token),
        isa: opened.engine.runner().isa().name().to_owned(),
    };
    // A store that cannot be written to is no reason to fail an answer.
    if let Err(e) = append(&receipts_path(settings), &line) {
        say(&format!("no receipt of this run was kept: {e}"));
    }
}

fn append(path: &Path, line: &Line) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    let mut lines = read_lines(path);
    let text = serde_json::to_string(line)? + "\n";
    if lines.len() < 2 * LINES_MAX {
        // One write of a whole line: runs that end together do not mix theirs.
        return File::options().create(true).append(true).open(path)?.write_all(text.as_bytes());
    }
    lines.push(line.clone());
    let kept: Result<Vec<String>, _> = lines[lines.len() - LINES_MAX..].iter().map(serde_json::to_string).collect();
    replace(path, &(kept?.join("\n") + "\n"))
}

pub(crate) fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    fs::write(&partial, text)?;
    fs::rename(&partial, path)
}

fn read_lines(path: &Path) -> Vec<Line> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

/// The shares of `rates` that the model with receipts under `key` reaches, as far as they tell.
pub(crate) fn shares(settings: &Settings, key: &str, threads: usize, isa: Isa, rates: &Rates) -> Shares {
    let lines = read_lines(&receipts_path(settings));
    let like_this = |l: &&Line| l.threads == threads && l.isa == isa.name();
    let receipt = |l: &Line| forecast::Receipt {
        model: l.model.clone(),
        decode: l.decode_bytes_per_second.map(|v| v / rates.read_bytes_per_second),
        prefill: l.prefill_macs_per_second.map(|v| v / rates.int8_macs_per_second),
    };
    let receipts: Vec<_> = lines.iter().filter(like_this).map(receipt).collect();
    Shares::fit(&receipts, key)
}

/// What this machine can do with `threads` and `isa`: measured the first time, which takes a second and as much memory as
/// [`Limits::measure`] says, then remembered.
pub(crate) fn rates(settings: &Settings, threads: usize, isa: Isa) -> Result<Rates, Failure> {
    let path = settings.library.home.join("machine.json");
    let text = fs::read_to_string(&path).unwrap_or_default();
    let mut known: Vec<Measured> = serde_json::from_str(&text).unwrap_or_default();
    if let Some(m) = known.iter().find(|m| m.threads == threads && m.isa == isa.name()) {
        return Ok(m.rates());
    }
    say("measuring what this machine can do (once)");
    let limits = Limits::measure(threads, Some(isa)).map_err(|e| Failure::Run(e.to_string()))?;
    let measured = Measured {
        threads,
        isa: isa.name().to_owned(),
        read_bytes_per_second: limits.read.all.round(),
        int8_macs_per_second: limits.int8.all.round(),
    };
    let rates = measured.rates();
    known.push(measured);
    let text = serde_json::to_string(&known).map_err(|e| Failure::Run(e.to_string()))?;
    let kept = fs::create_dir_all(&settings.library.home).and_then(|()| replace(&path, &text));
    if let Err(e) = kept {
        say(&format!("{}: {e}: it will be measured again", path.display()));
    }
    Ok(rates)
}

impl Measured {
    fn rates(&self) -> Rates {
        Rates {
            read_bytes_per_second: self.read_bytes_per_second,
            int8_macs_per_second: self.int8_macs_per_second,
            file_bytes_per_second: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(n: usize) -> Line {
        Line {
            model: format!("m{n}"),
            threads: 2,
            isa: "scalar".to_owned(),
            decode_bytes_per_second: Some(n as f64),
            prefill_macs_per_second: None,
        }
    }

    #[test]
    fn receipts_are_read_back_the_latest_are_kept_and_rubbish_counts_as_absent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new").join("receipts.jsonl");
        append(&path, &line(0)).unwrap();
        fs::write(&path, fs::read_to_string(&path).unwrap() + "rubbish\n{}\n").unwrap();
        for n in 1..=2 * LINES_MAX {
            append(&path, &line(n)).unwrap();
        }
        let lines = read_lines(&path);
        assert_eq!(lines.len(), LINES_MAX);
        assert_eq!(lines.last(), Some(&line(2 * LINES_MAX)));
    }
}
