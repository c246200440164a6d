//! `airs mem`: loads a model, fills its context, and holds the ledger against what the kernel says.

use std::ops::ControlFlow;

use memory::pressure::{Group, Process, Reader};
use model::Model;
use residency::budget::{Ledger, Line};
use serde_json::{Map, Value, json};

use crate::failure::Failure;
use crate::flags::{Mem, Settings};
use crate::open::{Opened, open};
use crate::planning::Need;
use crate::terminal::{print, print_json};

/// What the kernel says of the process and its control groups.
struct Kernel {
    process: Process,
    /// `Pss`: shared pages count in part.
    proportional_bytes: Option<u64>,
    groups: Vec<Group>,
}

impl Kernel {
    /// `None` where the system does not tell.
    fn read() -> Option<Kernel> {
        let reader = Reader::default();
        let process = reader.process()?;
        Some(Kernel { process, proportional_bytes: reader.proportional_bytes(), groups: reader.groups() })
    }

    /// What is held in memory, in the swap or in the pool of huge pages.
    fn held_bytes(&self) -> u64 {
        self.process.resident_bytes + self.process.swapped_bytes + self.process.huge_pool_bytes
    }
}

/// What holds the weights, as far as that is memory of our own.
struct Held {
    backing: &'static str,
    /// What of them is in memory now, by the kernel's word.
    resident_percent: f64,
    /// What the kernel has promised to keep there.
    pinned_bytes: u64,
}

impl Held {
    fn of(model: &Model) -> Option<Held> {
        let resident_percent = model.resident_bytes()? as f64 * 100.0 / model.stats().total_bytes as f64;
        Some(Held { backing: model.backing()?.name(), resident_percent, pinned_bytes: model.pinned_bytes() })
    }
}

/// By how many percent the ledger is above what the kernel says.
fn error_percent(ledger_bytes: u64, kernel_bytes: u64) -> f64 {
    (ledger_bytes as f64 - kernel_bytes as f64) * 100.0 / kernel_bytes as f64
}

pub(crate) fn execute(args: &Mem, settings: &Settings) -> Result<(), Failure> {
    let context = Some(args.sessions.context).filter(|&c| c > 0);
    let need = Need { context, sessions: args.sessions.parallel, logits_rows: 1, lazy: false };
    let mut opened = open(settings, args.model.name(), &args.compute, need)?;
    opened.say_mode("");
    warm(&mut opened, args)?;
    let kernel = Kernel::read();
    let ledger = &opened.ledger;
    let error = kernel.as_ref().map(|k| error_percent(ledger.used_bytes(), k.held_bytes()));
    let held = Held::of(opened.model());
    if args.output.json() {
        return print_json(&json_of(&opened, kernel.as_ref(), held.as_ref(), error));
    }
    print(&text_of(ledger, kernel.as_ref(), held.as_ref(), error))
}

/// Computes a batch, and takes the memory of all sessions at their full length.
fn warm(opened: &mut Opened, args: &Mem) -> Result<(), Failure> {
    let batch = args.compute.micro_batch.min(opened.context).max(1);
    let vocab_len = opened.model().config.vocab_len;
    // Any tokens do.
    let tokens: Vec<u32> = (0..batch).map(|i| (i % vocab_len) as u32).collect();
    opened.engine.logits(&tokens, batch - 1, &mut |_, _| ControlFlow::Continue(()))?;
    for _ in 0..args.sessions.parallel {
        opened.engine.reserve(opened.context)?;
    }
    Ok(())
}

fn json_of(opened: &Opened, kernel: Option<&Kernel>, held: Option<&Held>, error: Option<f64>) -> Value {
    let ledger = &opened.ledger;
    let line = |&line: &Line| (line.name().to_owned(), json!(ledger.line_bytes(line)));
    let mut lines: Map<String, Value> = Line::ALL.iter().map(line).collect();
    lines.insert("total".to_owned(), json!(ledger.used_bytes()));
    let group = |g: &Group| {
        json!({
            "path": g.path.display().to_string(),
            "version": g.version,
            "limit_bytes": g.limit_bytes,
            "used_bytes": g.used_bytes,
            "file_bytes": g.file_bytes,
        })
    };
    let kernel = kernel.map(|k| {
        json!({
            "rss_bytes": k.process.resident_bytes,
            "peak_rss_bytes": k.process.peak_bytes,
            "pss_bytes": k.proportional_bytes,
            "anonymous_bytes": k.process.anonymous_bytes,
            "mapped_bytes": k.process.mapped_bytes,
            "huge_pool_bytes": k.process.huge_pool_bytes,
            "locked_bytes": k.process.locked_bytes,
            "swapped_bytes": k.process.swapped_bytes,
            "page_table_bytes": k.process.page_table_bytes,
            "cgroups": k.groups.iter().map(group).collect::<Vec<_>>(),
        })
    });
    let held = held.map(|held| {
        json!({
            "backing": held.backing,
            "resident_percent": (held.resident_percent * 100.0).round() / 100.0,
            "pinned_bytes": held.pinned_bytes,
        })
    });
    json!({
        "model": opened.label,
        "mode": opened.mode.name(),
        "context": opened.context,
        "budget_bytes": ledger.budget_bytes(),
        "lines": lines,
        "weights": held,
        "kernel": kernel,
        "error_percent": error.map(|e| (e * 100.0).round() / 100.0),
    })
}

fn text_of(ledger: &Ledger, kernel: Option<&Kernel>, held: Option<&Held>, error: Option<f64>) -> String {
    let mut out = String::new();
    let mut row = |key: &str, bytes: u64| out += &format!("{key:<30}{:>10.1} MiB\n", bytes as f64 / f64::from(1 << 20));
    for &line in Line::ALL.iter().filter(|&&line| ledger.line_bytes(line) > 0) {
        row(line.name(), ledger.line_bytes(line));
    }
    row("ledger", ledger.used_bytes());
    row("of the budget", ledger.budget_bytes());
    if let Some(held) = held {
        row(&format!("pinned ({}, {:.0} % in memory)", held.backing, held.resident_percent), held.pinned_bytes);
    }
    let (Some(kernel), Some(error)) = (kernel, error) else {
        return out + "the kernel does not tell what the process holds\n";
    };
    row("kernel: resident", kernel.process.resident_bytes);
    row("  its own memory", kernel.process.anonymous_bytes);
    row("  the program, mapped", kernel.process.mapped_bytes);
    row("kernel: most at once", kernel.process.peak_bytes);
    if let Some(bytes) = kernel.proportional_bytes {
        row("kernel: proportional (Pss)", bytes);
    }
    for (name, bytes) in [
        ("kernel: huge page pool", kernel.process.huge_pool_bytes),
        ("kernel: locked", kernel.process.locked_bytes),
        ("kernel: swapped", kernel.process.swapped_bytes),
    ] {
        if bytes > 0 {
            row(name, bytes);
        }
    }
    for group in kernel.groups.iter().filter(|g| g.limit_bytes.is_some()) {
        row(&format!("control group v{}: used", group.version), group.used_bytes);
        row("  limit", group.limit_bytes.unwrap_or(0));
    }
    out + &format!("ledger against resident {error:>+20.2} %\n")
}

#[cfg(test)]
mod tests {
    use super::error_percent;

    #[test]
    fn the_error_has_the_sign_of_what_the_ledger_says_too_much() {
        assert_eq!(error_percent(102, 100), 2.0);
        assert_eq!(error_percent(99, 100), -1.0);
    }
}
