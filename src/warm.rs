//! Which experts were in memory at the end of a run, kept beside the store, so that the next run of the model begins with
//! them.
//!
//! ```text
//! home/experts/NAME.BYTES.json   [[layer, expert], …], the hottest first
//! ```
//! It may be deleted at any time. What cannot be read counts as absent.

use std::fs;
use std::path::{Path, PathBuf};

use model::Model;

use crate::flags::Settings;
use crate::receipts::{model_key, replace};
use crate::terminal::say;

fn path_of(settings: &Settings, model: &Path) -> PathBuf {
    settings.library.home.join("experts").join(model_key(model).replace('/', ".") + ".json")
}

/// Begins to read what was in memory last time, as far as there are free slots and nothing else is to be read.
pub(crate) fn begin(settings: &Settings, path: &Path, model: &Model) {
    let text = fs::read_to_string(path_of(settings, path)).unwrap_or_default();
    let order: Vec<(u32, u32)> = serde_json::from_str(&text).unwrap_or_default();
    model.warm_experts(&order);
}

/// Remembers what is in memory now.
pub(crate) fn keep(settings: &Settings, path: &Path, model: &Model) {
    let order = model.expert_order();
    if order.is_empty() {
        return;
    }
    let file = path_of(settings, path);
    let text = serde_json::to_string(&order).unwrap_or_default();
    let kept = file.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| replace(&file, &text));
    // A store that cannot be written to is no reason to fail an answer.
    if let Err(e) = kept {
        say(&format!("{}: {e}: the next run begins without experts", file.display()));
    }
}
