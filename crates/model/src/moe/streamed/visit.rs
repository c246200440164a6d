//! One layer's use of its experts, as they come.

use super::{For, Key, PARTS, Place, Stacks, State, Streamed};
use crate::Error;
use crate::moe::source::{Ready, Visit};
use crate::moe::{Batch, Wanted};
use kernels::matmul::Matrix;
use memory::slots::Lease;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Tokens of a batch from which on it is a prompt: its rows are tokens that follow each other. Fewer are one token each of
/// as many conversations.
pub(super) const PROMPT_TOKENS_MIN: usize = 17;

pub(super) struct Streaming<'a> {
    source: &'a Streamed,
    layer: u32,
    stacks: &'a Stacks,
    wanted: &'a [Wanted],
    /// Those that have no slot yet.
    waiting: Vec<(usize, Key)>,
    held: Vec<Held>,
    /// What the last call handed out.
    leases: Vec<Part<'a>>,
}

/// An expert with a slot.
struct Held {
    wanted: usize,
    slot: usize,
    /// Whether its read was begun for this visit.
    own: bool,
    gate_up: bool,
    down: bool,
}

/// A part that is being used: of which of the wanted.
struct Part<'a> {
    wanted: usize,
    part: usize,
    lease: Lease<'a>,
}

impl<'a> Streaming<'a> {
    pub(super) fn begin(source: &'a Streamed, layer: u32, batch: &'a Batch) -> Streaming<'a> {
        let wanted = &batch.wanted[..];
        let mut state = source.shared.lock();
        source.stop_warming(&mut state);
        let wants = |key: Key| key.layer == layer && wanted.iter().any(|w| w.expert == key.expert as usize);
        source.settle_guess(&mut state, wants);
        source.shared.note_uses(&mut state, layer, batch);
        let keys = wanted.iter().map(|w| Key { layer, expert: w.expert as u32 }).enumerate();
        // What is there first, so that nothing that is missing takes its slot.
        let (mut there, mut waiting): (Vec<_>, Vec<_>) = keys.partition(|(_, key)| state.cache.find(*key).is_some());
        let mut held = source.acquire(&mut state, &mut there, For::Visit);
        // What is on its way already, as read ahead, is waited for from here on; what was read ahead in vain may go.
        let late: Vec<usize> = held.iter().map(|p| p.slot).filter(|&s| state.fetches[s].pending > 0).collect();
        if !late.is_empty() {
            source.lanes.hurry(|ticket| late.contains(&(ticket as usize / PARTS)));
        }
        source.shared.drop_ahead(&mut state);
        held.extend(source.acquire(&mut state, &mut waiting, For::Visit));
        drop(state);
        let held = held.into_iter().map(Held::new).collect();
        let stacks = &source.shared.layers[layer as usize];
        Streaming { source, layer, stacks, wanted, waiting, held, leases: Vec::new() }
    }

    /// Gives back what the last call handed out, and the slots of experts that are done.
    fn give_back(&mut self) {
        self.leases.clear();
        let (done, held) = std::mem::take(&mut self.held).into_iter().partition(|h: &Held| h.down);
        self.held = held;
        self.source.shared.release(done.into_iter().map(|h| h.slot));
    }

    /// Lets go of reads that others had begun and that failed: what they needed and did not get is no error of this visit,
    /// which tries by itself. Tells whether there were any.
    fn let_go(&mut self, state: &mut State) -> bool {
        let failed = |held: &Held| !held.own && state.fetches[held.slot].error.is_some();
        let (failed, held): (Vec<Held>, Vec<Held>) = std::mem::take(&mut self.held).into_iter().partition(failed);
        self.held = held;
        for held in &failed {
            state.cache.release(held.slot);
            self.waiting.push((held.wanted, Key { layer: self.layer, expert: self.wanted[held.wanted].expert as u32 }));
        }
        !failed.is_empty()
    }

    /// Takes the parts that have come. An error if one did not.
    fn collect(&mut self, state: &State) -> Result<(), Error> {
        let slots = &self.source.shared.slots;
        for held in &mut self.held {
            if let Some(error) = &state.fetches[held.slot].error {
                return Err(error.clone().into());
            }
            let take = |part| {
                let lease = slots.lease(held.slot, part)?;
                Some(Part { wanted: held.wanted, part, lease })
            };
            if !held.gate_up
                && let (Some(gate), Some(up)) = (take(0), take(1))
            {
                held.gate_up = true;
                self.leases.extend([gate, up]);
            }
            if held.gate_up
                && let Some(down) = take(2)
            {
                held.down = true;
                self.leases.push(down);
            }
        }
        Ok(())
    }

    fn matrix<'s>(&'s self, part: &'s Part<'a>) -> Matrix<'s> {
        self.stacks[part.part].matrix(self.wanted[part.wanted].expert, part.lease.bytes())
    }

    /// Adds the matrices of what was taken.
    fn hand_out<'s>(&'s self, ready: &mut Vec<Ready<'s>>) {
        let mut parts = self.leases.iter();
        while let Some(part) = parts.next() {
            if part.part == 2 {
                ready.push(Ready::Down(part.wanted, self.matrix(part)));
            } else if let Some(up) = parts.next() {
                ready.push(Ready::GateUp(part.wanted, [self.matrix(part), self.matrix(up)]));
            }
        }
    }
}

impl Held {
    fn new(place: Place) -> Held {
        Held { wanted: place.number, slot: place.slot, own: place.own, gate_up: false, down: false }
    }
}

impl Visit for Streaming<'_> {
    fn next<'s>(&'s mut self, ready: &mut Vec<Ready<'s>>) -> Result<(), Error> {
        self.give_back();
        let shared = &*self.source.shared;
        let mut state = shared.lock();
        let mut waited: Option<Instant> = None;
        loop {
            let acquired = self.source.acquire(&mut state, &mut self.waiting, For::Visit);
            self.held.extend(acquired.into_iter().map(Held::new));
            if self.waiting.is_empty() {
                self.source.read_ahead(&mut state, self.layer, self.wanted.len());
            }
            if self.let_go(&mut state) {
                continue;
            }
            self.collect(&state)?;
            if !self.leases.is_empty() || self.held.is_empty() && self.waiting.is_empty() {
                break;
            }
            waited.get_or_insert_with(Instant::now);
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        if let Some(begin) = waited {
            shared.stall_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        self.hand_out(ready);
        Ok(())
    }
}

impl Drop for Streaming<'_> {
    fn drop(&mut self) {
        self.leases.clear();
        self.source.shared.release(self.held.drain(..).map(|h| h.slot));
    }
}

/// The token that a row of a batch is, of `span` tokens up to `last`. More than there were so far may be meant: where choices were
/// left out, a prompt counts as one token in its first layer, and as what it is in the next.
fn token_of_row(row: u32, last: u64, span: u64) -> u64 {
    (last + 1 + u64::from(row).min(span - 1)).saturating_sub(span)
}

impl super::Shared {
    /// Tells the cache which experts the tokens of a batch chose or nearly chose, and when.
    fn note_uses(&self, state: &mut State, layer: u32, Batch { wanted, near, .. }: &Batch) {
        let rows: usize = wanted.iter().map(|w| w.rows.len()).sum();
        let tokens = rows / self.used.max(1);
        let span = if tokens >= PROMPT_TOKENS_MIN { tokens as u64 } else { 1 };
        if state.last_layer.is_none_or(|last| layer <= last) {
            state.token += span;
        }
        state.last_layer = Some(layer);
        state.routed += rows as u64;
        // Of the first layers choices may have been left out: their span is shorter then.
        state.cache.advance((state.token + 1).saturating_sub(span)..=state.token, layer);
        for near in near {
            let key = Key { layer, expert: near.expert };
            state.cache.nearly_used(key, token_of_row(near.token, state.token, span), near.share);
        }
        for w in wanted {
            // Which of a prompt's tokens they are is not known here: spread evenly, they cool as if it were.
            let n = w.rows.len() as u64;
            let key = Key { layer, expert: w.expert as u32 };
            (1..=n).for_each(|i| state.cache.used(key, (state.token + i * span / n).saturating_sub(span)));
        }
    }
}

impl Streamed {
    /// If most experts of `layer` are wanted, those of the next layer will be: begins to read them, into half of the slots at
    /// most.
    fn read_ahead(&self, state: &mut State, layer: u32, wanted: usize) {
        let shared = &*self.shared;
        let next = layer + 1;
        if state.ahead.is_some() || 2 * wanted < shared.experts || next as usize == shared.layers.len() {
            return;
        }
        let keys = (0..shared.experts as u32).map(|expert| Key { layer: next, expert });
        let missing = keys.filter(|key| state.cache.find(*key).is_none()).enumerate();
        let mut missing: Vec<(usize, Key)> = missing.take(state.cache.slots() / 2).collect();
        let slots = self.acquire(state, &mut missing, For::Ahead).into_iter().map(|place| place.slot).collect();
        state.ahead = Some((next, slots));
    }
}

#[cfg(test)]
mod tests {
    use super::token_of_row;

    #[test]
    fn rows_are_the_last_tokens_and_none_is_before_the_first() {
        assert_eq!([0, 1, 3].map(|row| token_of_row(row, 9, 4)), [6, 7, 9]);
        assert_eq!(token_of_row(5, 9, 1), 9, "one token each of as many conversations");
        assert_eq!([0, 18, 19].map(|row| token_of_row(row, 1, 20)), [0, 0, 1], "twenty after a layer that counted one");
    }
}
