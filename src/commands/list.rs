//! `airs list`: the models in the store.

use std::time::{SystemTime, UNIX_EPOCH};

use library::{Library, StoredModel};
use serde_json::json;

use crate::failure::Failure;
use crate::flags::{List, Settings};
use crate::terminal::{print, print_json, size};

pub(crate) fn execute(args: &List, settings: &Settings) -> Result<(), Failure> {
    let models = Library::new(settings.library.clone()).list()?;
    if args.output.json() {
        let one = |m: &StoredModel| {
            let since_epoch = m.modified.and_then(|t| t.duration_since(UNIX_EPOCH).ok());
            json!({
                "name": m.name,
                "path": m.path.display().to_string(),
                "bytes": m.bytes,
                "modified_unix_s": since_epoch.map(|d| d.as_secs()),
            })
        };
        return print_json(&models.iter().map(one).collect());
    }
    let width = models.iter().map(|m| m.name.len()).max().unwrap_or(0).max(4);
    let mut text = format!("{:width$}  {:>9}  MODIFIED\n", "NAME", "SIZE");
    for m in &models {
        text += &format!("{:width$}  {:>9}  {}\n", m.name, size(m.bytes), age(m.modified));
    }
    print(&text)
}

/// How long ago, in the largest unit.
fn age(when: Option<SystemTime>) -> String {
    let Some(elapsed) = when.and_then(|t| t.elapsed().ok()) else { return "-".to_owned() };
    let minutes = elapsed.as_secs() / 60;
    match minutes {
        0 => "now".to_owned(),
        1..=59 => format!("{minutes} min ago"),
        60..=2879 => format!("{} h ago", minutes / 60),
        _ => format!("{} days ago", minutes / 1440),
    }
}
