//! Reads that may be in vain: of the experts that a layer will probably want, and of what a run before had at its end.

use super::{Choice, For, Key, PARTS, State, Streamed};
use std::time::{Duration, Instant};

/// Experts that a layer will probably want and has not got, the most probable first.
#[derive(Debug)]
pub(super) struct Guessed {
    at: Instant,
    experts: Vec<Guess>,
}

#[derive(Debug)]
struct Guess {
    key: Key,
    /// Among the choices of its token.
    place: usize,
    /// Its slot, with a lease, if it is read.
    slot: Option<usize>,
}

impl Streamed {
    /// Guesses that the experts of `choices` are wanted, each token's first most probably, and has those read that are missing
    /// and worth it, when nothing else is to be read.
    pub(super) fn begin_guess(&self, layer: u32, choices: &[Choice]) {
        let mut state = self.shared.lock();
        let state = &mut *state;
        let asked = state.guess_asked.take();
        self.stop_warming(state);
        // One of a pass that ended early.
        self.settle_guess(state, |_| false);
        let key = |choice: &Choice| Key { layer, expert: choice.expert };
        let placed = choices.iter().enumerate().map(|(i, choice)| (i % self.shared.used, key(choice)));
        let mut missing: Vec<(usize, Key)> = placed.filter(|(_, key)| state.cache.find(*key).is_none()).collect();
        missing.sort_unstable();
        let mut experts: Vec<Guess> = Vec::new();
        let mut keys: Vec<(usize, Key)> = Vec::new();
        let mut gain_s = 0.0;
        for (place, key) in missing {
            if experts.iter().all(|other| other.key != key) {
                if let Some(gain) = state.guesses.gain(place, keys.len()) {
                    keys.push((experts.len(), key));
                    gain_s += gain;
                }
                experts.push(Guess { key, place, slot: None });
            }
        }
        for place in self.acquire(state, &mut keys, For::Guess) {
            experts[place.number].slot = Some(place.slot);
            state.guess_counts.reads += 1;
        }
        let at = Instant::now();
        state.guesses.guessed(asked.map_or(Duration::ZERO, |asked| at - asked), gain_s);
        state.guessed = Some(Guessed { at, experts });
    }

    /// Now it is known what the layer wants. What was read for a wrong guess and has come stays, as long as nothing better
    /// takes its place; what has not come is given up.
    pub(super) fn settle_guess(&self, state: &mut State, is_wanted: impl Fn(Key) -> bool) {
        let Some(Guessed { at, experts }) = state.guessed.take() else { return };
        let Some(first) = experts.first() else { return };
        // Reads on a guess begin when those of the layer before have ended.
        let begin = self.lanes.spare_since().map_or(at, |spare| spare.max(at));
        let read = self.read_time(state, self.shared.expert_bytes(first.key));
        state.guesses.settle_times(begin.elapsed(), read);
        for Guess { key, place, slot } in experts {
            let right = is_wanted(key);
            state.guesses.settle(place, right);
            let Some(slot) = slot else { continue };
            if right {
                state.guess_counts.right += 1;
            } else {
                state.guess_counts.wrong_bytes += self.shared.expert_bytes(key) - self.forget(state, &[slot]);
                state.cache.settle(slot);
            }
            state.cache.release(slot);
        }
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
