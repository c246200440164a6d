//! `airs plan`: how a model would run, from its header alone, with the arithmetic.

use std::path::PathBuf;

use library::{Library, Name};
use model::{ExpertMemory, Header, Isa, KvType, RunnerOptions};
use residency::forecast::{Forecast, Rates, Shares, Work, forecast};
use residency::headroom;
use residency::plan::{Bytes, Mode};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::flags::{Plan, Settings};
use crate::lanes;
use crate::machine::Place;
use crate::open::{label, locate};
use crate::planning::{Need, Planned, plan_for, runner_options};
use crate::receipts;
use crate::remote;
use crate::storage::{self, Probe};
use crate::terminal::{print, print_json, say, size};
use crate::values::Memory;

/// Free memory that measuring the machine wants, with room to spare.
const MEASURE_BYTES: u64 = 768 << 20;
/// Tokens into an answer at which its speed is forecast.
const PREDICTED: usize = 32;

pub(crate) fn execute(args: &Plan, settings: &Settings) -> Result<(), Failure> {
    let mut target = Place::here();
    let here = target.host.clone();
    let Subject { header, place, label, key, path } = Subject::find(args, settings)?;
    let fail = |e: model::Error| Failure::at(&place, e);
    let options = runner_options(&args.compute, settings);
    target.host = args.device.map(headroom::device).or(target.host);
    let context = Some(args.sessions.context).filter(|&c| c > 0);
    let need = Need { context, sessions: args.sessions.parallel, logits_rows: 1, lazy: true };
    let memory = args.compute.budget.memory;
    let lanes = |slice_bytes| {
        let known = || path.as_deref().and_then(|path| lanes::known(&settings.library.home, path, slice_bytes));
        lanes::choose(args.compute.weights.experts.io_threads, known)
    };
    let planned = plan_for(&header, &options, memory, need, &target, &args.compute.weights, lanes).map_err(fail)?;

    let room = here.map_or(0, |host| headroom::budget(&host).bytes);
    let probe = path.as_deref().and_then(|path| storage::probe(path).ok());
    let speed = Speed::new(args, settings, &key, probe, &header, &planned, &options, room).map_err(fail)?;
    let mut reasons = planned.plan.reasons.clone();
    reasons.extend(planned.risk(memory).filter(|_| !args.compute.budget.force));
    if args.device.is_some() {
        reasons.push("forecast: with the speed of this machine, not of the device".to_owned());
    }
    reasons.extend(speed.notes());
    reasons.extend(speed.by_budget(&planned));
    if path.is_none() {
        reasons.push("the model is not here: its header was read where it comes from".to_owned());
    }
    let by_type = kv_by_type(&header, &options).map_err(fail)?;
    if args.output.json() {
        return print_json(&json_of(&planned, &by_type, &options, &speed.forecast, &reasons));
    }
    print(&text_of(&label, memory, &planned, &by_type, &speed, &reasons))
}

/// What is planned for.
struct Subject {
    header: Header,
    /// What messages call it.
    place: String,
    /// What the user calls it.
    label: String,
    /// What its receipts are kept under.
    key: String,
    /// `None`: it is not here.
    path: Option<PathBuf>,
}

impl Subject {
    /// Reads the header, of what is not here from where it comes from.
    fn find(args: &Plan, settings: &Settings) -> Result<Subject, Failure> {
        let text = args.model.name();
        let (library, name) = (Library::new(settings.library.clone()), Name::parse(text)?);
        if library.find(&name)?.is_none() {
            match Subject::remote(&library, &name) {
                // A model of the catalog has another source, which gives it only as a whole.
                Err(e) if matches!(name, Name::Catalog { .. }) => say(&format!("{e}; fetching the model")),
                other => return other,
            }
        }
        let path = locate(settings, text)?;
        let place = path.display().to_string();
        let header = Header::read(&path).map_err(|e| Failure::at(&place, e))?;
        let (label, key) = (label(text, &path), receipts::model_key(&path));
        Ok(Subject { header, place, label, key, path: Some(path) })
    }

    fn remote(library: &Library, name: &Name) -> Result<Subject, Failure> {
        let (sources, file_name) = remote::sources(library, name)?;
        let first_bytes = sources.first().map_or(0, |source| source.len_bytes());
        let place = name.to_string();
        let header = Header::from_sources(sources).map_err(|e| Failure::at(&place, e))?;
        Ok(Subject { header, label: place.clone(), place, key: receipts::key_of(&file_name, first_bytes), path: None })
    }
}

/// Bytes of keys and values of one token, by the type of both.
fn kv_by_type(header: &Header, options: &RunnerOptions) -> Result<Vec<(KvType, u64)>, model::Error> {
    let head_len = header.config()?.head_len;
    let fitting = KvType::ALL.iter().copied().filter(|ty| ty.fits(head_len));
    fitting
        .map(|ty| {
            let f = header.footprint(&RunnerOptions { type_k: ty, type_v: ty, ..options.clone() }, 1)?;
            Ok((ty, f.kv_block_bytes / f.kv_block_tokens))
        })
        .collect()
}

/// The forecast and what it was made from.
struct Speed {
    forecast: Forecast,
    work: Work,
    /// `None`: there was no room to measure.
    rates: Option<(Rates, Shares)>,
    probe: Option<Probe>,
}

impl Speed {
    fn new(
        args: &Plan,
        settings: &Settings,
        key: &str,
        probe: Option<Probe>,
        header: &Header,
        planned: &Planned,
        options: &RunnerOptions,
        room_bytes: u64,
    ) -> Result<Speed, model::Error> {
        let f = &planned.footprint;
        let kv_tokens = (args.prompt + PREDICTED) as u64;
        let streamed = planned.plan.mode == Mode::Streamed;
        let step_bytes = header.step_bytes()?;
        let work = Work {
            step_bytes,
            kv_bytes: f.kv_block_bytes * kv_tokens / f.kv_block_tokens,
            prompt_macs: header.config()?.prompt_macs(args.prompt as u64),
            file_bytes: match planned.experts {
                // The rest is never read before the first token.
                ExpertMemory::Slots { .. } => {
                    header.file_bytes() - f.bank.total_bytes() + f.bank.prompt_bytes(args.prompt as u64)
                }
                ExpertMemory::Resident => header.file_bytes(),
            },
            streamed_bytes: match planned.experts {
                ExpertMemory::Slots { slots, .. } => f.bank.expected_read_bytes(slots as u64),
                ExpertMemory::Resident if streamed => step_bytes,
                ExpertMemory::Resident => 0,
            },
            overlaps: planned.lazy,
        };
        let isa = options.isa.unwrap_or_else(Isa::detect);
        let nothing = Forecast { ttft_ms: None, predicted_per_second: None };
        let mut speed = Speed { forecast: nothing, work, rates: None, probe };
        if room_bytes < MEASURE_BYTES {
            return Ok(speed);
        }
        // What cannot be measured is absent.
        let Ok(mut rates) = receipts::rates(settings, options.threads, isa) else { return Ok(speed) };
        rates.file_bytes_per_second = speed.probe.map(|p| p.bytes_per_second);
        let shares = receipts::shares(settings, key, options.threads, isa, &rates);
        if planned.plan.mode != Mode::Refused {
            speed.forecast = forecast(&speed.work, &rates, &shares);
        }
        speed.rates = Some((rates, shares));
        Ok(speed)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.rates.is_none() {
            notes.push(format!("forecast: less than {} are free to measure this machine with", size(MEASURE_BYTES)));
        }
        if self.probe.is_some_and(|p| !p.direct) {
            notes.push("forecast: the file was read through the page cache, storage may be slower".to_owned());
        }
        notes
    }

    /// The speed that more memory for experts would give, or less.
    fn by_budget(&self, planned: &Planned) -> Option<String> {
        let ExpertMemory::Slots { slots, .. } = planned.experts else { return None };
        let (bank, (rates, shares)) = (&planned.footprint.bank, self.rates.as_ref()?);
        let rest_bytes = planned.plan.bytes.total() - slots as u64 * bank.slot_bytes;
        let step = |slots: u64| {
            let work = Work { streamed_bytes: bank.expected_read_bytes(slots), ..self.work };
            let speed = forecast(&work, rates, shares).predicted_per_second?;
            Some(format!("{} gives {speed:.1} tokens/s", size(rest_bytes + slots * bank.slot_bytes)))
        };
        let steps: Vec<String> = bank.steps().into_iter().filter_map(step).collect();
        (!steps.is_empty()).then(|| format!("forecast by budget: {}", steps.join(", ")))
    }

    /// How the forecast came about.
    fn arithmetic(&self) -> Vec<String> {
        let Some((rates, shares)) = &self.rates else { return Vec::new() };
        let giga = |v: f64| v / 1e9;
        let origin = match shares.receipts {
            0 => "it has not run here yet".to_owned(),
            1 => "from 1 run".to_owned(),
            n => format!("from {n} runs"),
        };
        let mut lines = vec![
            format!(
                "a token reads {:.3} GB; memory gives {:.1} GB/s, of which {:.0} % are reached ({origin})",
                giga((self.work.step_bytes + self.work.kv_bytes) as f64),
                giga(rates.read_bytes_per_second),
                100.0 * shares.decode
            ),
            format!(
                "the prompt takes {:.1} G multiply-adds; the processor gives {:.0} G/s, of which {:.0} % are reached",
                giga(self.work.prompt_macs as f64),
                giga(rates.int8_macs_per_second),
                100.0 * shares.prefill
            ),
        ];
        if let Some(probe) = &self.probe {
            let way = if probe.direct { "storage" } else { "the page cache" };
            let (bytes, rate) = (giga(self.work.file_bytes as f64), giga(probe.bytes_per_second));
            lines.push(format!("the file has {bytes:.3} GB; {way} gives {rate:.2} GB/s"));
        }
        lines
    }
}

fn json_of(
    planned: &Planned,
    by_type: &[(KvType, u64)],
    options: &RunnerOptions,
    forecast: &Forecast,
    reasons: &[String],
) -> Value {
    let plan = &planned.plan;
    let Bytes { weights, experts, kv, scratch, io, metadata, base } = plan.bytes;
    let rounded = |v: Option<f64>| v.map(|v| (v * 100.0).round() / 100.0);
    let f = &planned.footprint;
    json!({
        "mode": plan.mode.name(),
        "bytes": {
            "weights": weights,
            "experts": experts,
            "kv": kv,
            "scratch": scratch,
            "io": io,
            // What the process holds whatever it does with the model, and the model's words.
            "base": base + metadata,
            "total": plan.bytes.total(),
        },
        "budget_bytes": planned.budget_bytes,
        "kv_bytes_per_token": f.kv_block_bytes / f.kv_block_tokens,
        "kv_bytes_per_token_by_type": by_type.iter().map(|(ty, b)| (ty.name().to_owned(), json!(b))).collect::<serde_json::Map<_, _>>(),
        "type_k": options.type_k.name(),
        "type_v": options.type_v.name(),
        "context": plan.context,
        "context_max": plan.context_max,
        "forecast": {
            "ttft_ms": rounded(forecast.ttft_ms),
            "predicted_per_second": rounded(forecast.predicted_per_second),
        },
        "reasons": reasons,
    })
}

fn text_of(
    label: &str,
    memory: Memory,
    planned: &Planned,
    by_type: &[(KvType, u64)],
    speed: &Speed,
    reasons: &[String],
) -> String {
    let plan = &planned.plan;
    let mut out = String::new();
    let mut row = |key: &str, value: String| out += &format!("{key:<18}{value}\n");
    row("model", label.to_owned());
    row("mode", plan.mode.name().to_owned());
    let budget = match (memory, planned.auto) {
        (Memory::Auto, Some(auto)) => format!(
            "{}: {} can be had{}, {} stay with the host; idle models may hold {}",
            size(auto.bytes),
            size(auto.headroom_bytes),
            if auto.group.is_some() { " in the control group" } else { "" },
            size(auto.reserve_bytes),
            size(auto.pool_bytes)
        ),
        (Memory::Auto, None) => "none: the system does not tell its memory".to_owned(),
        (Memory::Bytes(bytes), _) => size(bytes),
    };
    row("budget", budget);
    let b = &plan.bytes;
    for (name, bytes) in [
        ("weights", b.weights),
        ("experts", b.experts),
        ("KV cache", b.kv),
        ("scratch", b.scratch),
        ("I/O buffers", b.io),
        ("metadata", b.metadata),
        ("process", b.base),
        ("total", b.total()),
    ] {
        row(name, format!("{:>10.1} MiB", bytes as f64 / f64::from(1 << 20)));
    }
    let types: Vec<String> = by_type.iter().map(|(ty, bytes)| format!("{} {}", ty.name(), size(*bytes))).collect();
    row("KV for a token", types.join(", "));
    row("context", format!("{} tokens; the most that fit: {}", plan.context, plan.context_max));
    row("evicts", "nothing: no other model is loaded by this process".to_owned());
    let or_unknown = |v: Option<String>| v.unwrap_or_else(|| "unknown".to_owned());
    let forecast = &speed.forecast;
    row("first token", or_unknown(forecast.ttft_ms.map(|ms| format!("{ms:.0} ms (forecast)"))));
    row("speed", or_unknown(forecast.predicted_per_second.map(|v| format!("{v:.1} tokens/s (forecast)"))));
    for (i, line) in speed.arithmetic().iter().enumerate() {
        row(if i == 0 { "because" } else { "" }, line.clone());
    }
    for (i, reason) in reasons.iter().enumerate() {
        row(if i == 0 { "notes" } else { "" }, reason.clone());
    }
    out
}
