//! Standard output for results, standard error for everything else. Progress bars only where somebody sees them; no
//! colours, so that there is nothing to switch off.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use library::Event;

use crate::failure::Failure;
use crate::interrupt::Stoppable;

/// A line on standard error. That it cannot be written is no reason to fail.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "airs: {text}");
}

/// Writes to standard output, at once.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::output)
}

/// Prints `value` as one line of JSON.
pub(crate) fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(&format!("{value}\n"))
}

/// Bytes in the unit that people read.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value < 10.0 && unit > 0 { format!("{value:.1} {}", UNITS[unit]) } else { format!("{value:.0} {}", UNITS[unit]) }
}

/// Shows how far something is.
pub(crate) struct Progress {
    bar: ProgressBar,
    seen: bool,
}

impl Progress {
    /// Counts `unit`s; bytes have their own ways, see [`Progress::bytes`].
    pub(crate) fn counting(label: &str, unit: &str) -> Progress {
        Progress::new(label, &format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {unit} {{eta}}"))
    }

    /// Counts bytes.
    pub(crate) fn bytes(label: &str) -> Progress {
        Progress::new(label, "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}")
    }

    fn new(label: &str, template: &str) -> Progress {
        let seen = io::stderr().is_terminal();
        let target = if seen { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target).with_message(label.to_owned());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress { bar, seen }
    }

    /// `done` of `total`.
    pub(crate) fn set(&self, done: u64, total: Option<u64>) {
        if let Some(total) = total {
            self.bar.set_length(total);
        }
        self.bar.set_position(done);
    }

    /// Takes the bar away.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }

    /// Shows a pull; Ctrl-C cancels it.
    pub(crate) fn library_event(&self, event: Event<'_>, stoppable: &Stoppable) -> ControlFlow<()> {
        match event {
            Event::Begin(text) => {
                self.bar.reset();
                self.bar.unset_length();
                self.bar.set_message(text.rsplit('/').next().unwrap_or(text).to_owned());
                if !self.seen {
                    say(text);
                }
            }
            Event::Note(text) => self.bar.suspend(|| say(text)),
            Event::Bytes { done, total } => self.set(done, total),
        }
        stoppable.flow()
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_have_the_unit_that_people_read() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(98_362_432), "94 MiB");
        assert_eq!(size(u64::MAX), "16777216 TiB");
    }
}
