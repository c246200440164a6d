//! Reads that may be in vain: of the expert that a layer will probably want, and of what a run before had at its end.

use super::{Choice, For, Key, PARTS, State, Streamed};
use std::time::{Duration, Instant};

/// The expert that a layer will probably want and has not got.
#[derive(Debug)]
pub(super) struct Guessed {
    key: Key,
    at: Instant,
    /// Its slot, with a lease, if it is read.
    slot: Option<usize>,
}

impl Streamed {
    /// Of the experts of `choices` that are missing, guesses that the weightiest is wanted, and has it read if that pays.
    pub(super) fn begin_guess(&self, layer: u32, choices: &[Choice]) {
        let mut state = self.shared.lock();
        let state = &mut *state;
        self.stop_warming(state);
        // One of a pass that ended early.
        self.settle_guess(state, |_| false);
        let key = |choice: &Choice| Key { layer, expert: choice.expert };
        let missing = choices.iter().filter(|choice| state.cache.find(key(choice)).is_none());
        let Some(key) = missing.max_by(|a, b| a.weight.total_cmp(&b.weight)).map(key) else { return };
        let slot = state.guesses.pays().then(|| self.acquire(state, &mut vec![(0, key)], For::Guess));
        let slot = slot.and_then(|places| places.first().map(|place| place.slot));
        state.guess_counts.reads += u64::from(slot.is_some());
        state.guessed = Some(Guessed { key, at: Instant::now(), slot });
    }

    /// Now it is known what the layer wants. What was read for a wrong guess and has come stays, as long as nothing better
    /// takes its place; what has not come is given up.
    pub(super) fn settle_guess(&self, state: &mut State, is_wanted: impl Fn(Key) -> bool) {
        let Some(Guessed { key, at, slot }) = state.guessed.take() else { return };
        let right = is_wanted(key);
        let expert_bytes = self.shared.expert_bytes(key);
        let read = self.read_time(state, expert_bytes);
        state.guesses.settle(right, at.elapsed(), read);
        let Some(slot) = slot else { return };
        if right {
            state.guess_counts.right += 1;
        } else {
            state.guess_counts.wrong_bytes += expert_bytes - self.forget(state, &[slot]);
            state.cache.settle(slot);
        }
        state.cache.release(slot);
    }

    /// The time in which the lanes read an expert of `bytes` lately, if they have since the last call.
    fn read_time(&self, state: &mut State, bytes: u64) -> Option<Duration> {
        let (now, before) = (self.lanes.stats(), state.timed);
        let read = now.slice_bytes - before.slice_bytes;
        (read >= bytes).then(|| {
            state.timed = now;
            (now.busy - before.busy).mul_f64(bytes as f64 / read as f64)
        })
    }

    /// What a run before had at its end gives way to what this one needs.
    pub(super) fn stop_warming(&self, state: &mut State) {
        let slots = std::mem::take(&mut state.warming);
        if !slots.is_empty() {
            self.forget(state, &slots);
        }
    }

    /// Gives up what was to be read ahead into `slots` and was not begun, and the experts that lack it. Its bytes.
    fn forget(&self, state: &mut State, slots: &[usize]) -> u64 {
        let forgotten = self.lanes.forget(|ticket| slots.contains(&(ticket as usize / PARTS)));
        let mut bytes = 0;
        for slice in forgotten {
            let slot = slice.ticket as usize / PARTS;
            bytes += slice.range.end - slice.range.start;
            state.cache.abandon(slot);
            state.fetches[slot].pending -= 1;
            if state.fetches[slot].pending == 0 {
                state.cache.release(slot);
            }
        }
        state.forgotten_bytes += bytes;
        bytes
    }
}
