//! Ctrl-C. While something runs that can be stopped cleanly, the first one asks it to stop; at any other time, and the
//! second time, the process ends at once.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

static STOPPABLE: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicBool = AtomicBool::new(false);

/// Exit code of a process that Ctrl-C ended.
const EXIT_CODE: i32 = 130;

/// Takes over Ctrl-C.
pub(crate) fn install() {
    let handler = || {
        if !STOPPABLE.load(Ordering::SeqCst) || ASKED.swap(true, Ordering::SeqCst) {
            std::process::exit(EXIT_CODE);
        }
    };
    if let Err(e) = ctrlc::set_handler(handler) {
        // Ctrl-C still ends the process, only less politely.
        crate::terminal::say(&format!("Ctrl-C cannot be caught: {e}"));
    }
}

/// While one of these lives, the first Ctrl-C only asks.
pub(crate) struct Stoppable(());

impl Stoppable {
    pub(crate) fn begin() -> Stoppable {
        ASKED.store(false, Ordering::SeqCst);
        STOPPABLE.store(true, Ordering::SeqCst);
        Stoppable(())
    }

    /// `Break` once Ctrl-C was pressed.
    pub(crate) fn flow(&self) -> ControlFlow<()> {
        if ASKED.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        STOPPABLE.store(false, Ordering::SeqCst);
    }
}
