//! Ctrl-C. While something runs that can be stopped cleanly, the first one asks it to stop; at any other time, and the
//! second time, the process ends at once.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

static STOPPABLE: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicBool = AtomicBool::new(false);

/// Exit code of a process that Ctrl-C ended.
const EXIT_CODE: i32 = 130;

/// Ends what the thing that can be stopped waits for.
type EndWait = Arc<dyn Fn() + Send + Sync>;

static WAIT: Mutex<Option<EndWait>> = Mutex::new(None);

/// Between two attempts to end a wait: one may begin just after it was tried.
const AGAIN_EVERY: Duration = Duration::from_millis(50);

/// Takes over Ctrl-C.
pub(crate) fn install() {
    let handler = || {
        if !STOPPABLE.load(Ordering::SeqCst) || ASKED.swap(true, Ordering::SeqCst) {
            std::process::exit(EXIT_CODE);
        }
        // Not on this thread, which the second Ctrl-C needs.
        thread::spawn(end_waits);
    };
    if let Err(e) = ctrlc::set_handler(handler) {
        // Ctrl-C still ends the process, only less politely.
        crate::terminal::say(&format!("Ctrl-C cannot be caught: {e}"));
    }
}

/// Ends every wait until what was asked to stop has stopped.
fn end_waits() {
    while ASKED.load(Ordering::SeqCst) {
        let Some(end) = wait().clone() else { return };
        end();
        thread::sleep(AGAIN_EVERY);
    }
}

fn wait() -> MutexGuard<'static, Option<EndWait>> {
    WAIT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While one of these lives, the first Ctrl-C only asks.
pub(crate) struct Stoppable(());

impl Stoppable {
    pub(crate) fn begin() -> Stoppable {
        ASKED.store(false, Ordering::SeqCst);
        STOPPABLE.store(true, Ordering::SeqCst);
        Stoppable(())
    }

    /// The same for work that may wait for long: `end` ends its waits.
    pub(crate) fn waiting(end: impl Fn() + Send + Sync + 'static) -> Stoppable {
        *wait() = Some(Arc::new(end));
        Stoppable::begin()
    }

    /// `Break` once Ctrl-C was pressed.
    pub(crate) fn flow(&self) -> ControlFlow<()> {
        if ASKED.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        STOPPABLE.store(false, Ordering::SeqCst);
        *wait() = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn waits_are_ended_again_and_again_until_the_work_has_stopped() {
        let (ended, hears) = channel();
        let stoppable = Stoppable::waiting(move || ended.send(()).unwrap_or(()));
        assert!(stoppable.flow().is_continue());
        ASKED.store(true, Ordering::SeqCst);
        let ends = thread::spawn(end_waits);
        // One that begins after the first attempt is ended by a later one.
        assert!((0..3).all(|_| hears.recv().is_ok()) && stoppable.flow().is_break());
        drop(stoppable);
        ends.join().unwrap();
    }
}
