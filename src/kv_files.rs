//! Keys and values that outlive the program (`--kv-dir`): what a run has computed, the next one with the same beginning
//! finds.

use std::thread;
use std::time::Duration;

use engine::Engine;
use model::KvDir;

use crate::failure::Failure;
use crate::flags::KvFiles;
use crate::interrupt::Stoppable;
use crate::terminal::{say, size};

/// Leaves a slow disk to others, and takes less than a second for a long conversation with a small model.
const BYTES_PER_SECOND: u64 = 256 << 20;

/// Looks in the directory from now on, if there is one.
pub(crate) fn open(args: &KvFiles, engine: &mut Engine) -> Result<(), Failure> {
    let Some(path) = &args.kv_dir else { return Ok(()) };
    let dir = KvDir { path: path.clone(), bytes_max: args.kv_dir_max, bytes_per_second: BYTES_PER_SECOND };
    engine.runner().kv_dir(&dir).map_err(|e| Failure::at(&path.display().to_string(), e))
}

/// Writes what is not there yet. What cannot be written is said, and no reason to fail: the answer is out.
pub(crate) fn save(args: &KvFiles, engine: &mut Engine) {
    let Some(path) = &args.kv_dir else { return };
    let stoppable = Stoppable::begin();
    let written = engine.runner().kv_spill_all(&mut |ms| {
        thread::sleep(Duration::from_millis(ms));
        stoppable.flow()
    });
    match written {
        Ok(all) if all.files > 0 => {
            say(&format!("{} tokens kept in {} ({})", all.tokens, path.display(), size(all.bytes)))
        }
        Ok(_) => {}
        Err(e) => say(&format!("--kv-dir: {e}")),
    }
}
