//! Experts that come from storage while the model runs, and stay in slots as long as there is room.
//!
//! A visit leases what is there, has the rest read, and hands out each part when it has come: so what is there is computed
//! while what is missing loads, and what is missing as it arrives. Which expert makes room is `residency`'s decision, how
//! slices are read `memory`'s business; here the two meet, and slices become panels. A prompt that wants most experts of a
//! layer has those of the next one read ahead, into a part of the slots; for a few tokens the next layer's likeliest missing
//! experts are read on a guess.

mod guess;
mod stack;
mod stats;
mod visit;

pub(crate) use stack::Stack;
pub use stats::{ExpertStats, GuessCounts};

use super::source::{Compute, ExpertSource};
use super::{Batch, Choice};
use crate::Error;
use memory::lanes::{LaneOptions, LaneStats, Lanes, Receive, Slice};
use memory::slots::Slots;
use residency::experts::policy::Heat;
use residency::experts::{Acquired, Cache, GuessWhen, Guesses, Key};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Parts of an expert, in the order in which they are read: gate, up, down.
const PARTS: usize = 3;

/// The matrices of a layer's experts, in their files.
pub(crate) type Stacks = [Stack; PARTS];

/// How experts are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ExpertMemory {
    /// All of them, with the other weights.
    #[default]
    Resident,
    /// In so many slots, by so many lanes.
    Slots {
        /// Experts that there is room for.
        slots: usize,
        /// How they are read.
        lanes: LaneOptions,
    },
}

/// Experts in slots.
#[derive(Debug)]
pub(crate) struct Streamed {
    shared: Arc<Shared>,
    lanes: Lanes,
}

/// What the forward pass and the lanes share.
#[derive(Debug)]
struct Shared {
    /// By layer with experts.
    layers: Vec<Stacks>,
    /// The layer with experts that a layer of the model is.
    index: Vec<Option<u32>>,
    experts: usize,
    used: usize,
    slots: Slots,
    slot_bytes: usize,
    state: Mutex<State>,
    /// A part has come, or a slot was released.
    changed: Condvar,
    pack_ns: AtomicU64,
    stall_ns: AtomicU64,
}

#[derive(Debug)]
struct State {
    cache: Cache<Heat>,
    /// By slot: what comes, or came last.
    fetches: Vec<Fetch>,
    /// Tokens computed so far, and the layer that was visited last: where that does not rise, a step begins.
    token: u64,
    last_layer: Option<u32>,
    /// The layer that is read ahead, and its slots, each with a lease.
    ahead: Option<(u32, Vec<usize>)>,
    /// Slots whose experts a run before had at its end.
    warming: Vec<usize>,
    guesses: Guesses,
    /// When it was said that a layer is to be guessed.
    guess_asked: Option<Instant>,
    guessed: Option<guess::Guessed>,
    guess_counts: GuessCounts,
    /// What the lanes had done when their rate was last looked at.
    timed: LaneStats,
    /// Bytes of the slices that were asked for.
    asked_bytes: u64,
    /// Of these, bytes of those that were given up. Both only grow: what a step asks for is told by their differences.
    forgotten_bytes: u64,
    /// Choices of tokens, those looked at for being left out, and those left out.
    routed: u64,
    examined: u64,
    dropped: u64,
}

/// What a read is begun for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    /// A layer that waits for it.
    Visit,
    /// A layer that is sure to come.
    Ahead,
    /// A use that may never come.
    Guess,
}

/// A slot that was leased for one of several keys.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// The key's number.
    number: usize,
    slot: usize,
    /// Whether its read was begun for this.
    own: bool,
}

#[derive(Debug, Clone)]
struct Fetch {
    key: Key,
    /// Parts that have not come.
    pending: usize,
    error: Option<memory::Error>,
}

impl Streamed {
    /// Slots for the experts of `layers`, which are the layers of the model that `index` says. Nothing is read yet.
    pub(crate) fn new(
        layers: Vec<Stacks>,
        index: Vec<Option<u32>>,
        (experts, used): (usize, usize),
        slots: usize,
        options: LaneOptions,
        guess: GuessWhen,
    ) -> Result<Streamed, Error> {
        let widest = |part: usize| layers.iter().map(|stacks| stacks[part].len_bytes()).max().unwrap_or(0);
        let part_bytes = [widest(0), widest(1), widest(2)];
        let slice_bytes = layers.iter().flatten().map(Stack::slice_bytes).max().unwrap_or(0);
        let state = State {
            cache: Cache::new(Heat::default(), slots, layers.len() as u32, experts as u32),
            fetches: vec![Fetch { key: Key { layer: 0, expert: 0 }, pending: 0, error: None }; slots],
            token: 0,
            last_layer: None,
            ahead: None,
            warming: Vec::new(),
            guesses: Guesses::new(guess, (options.lanes * options.depth) as f64 / PARTS as f64),
            guess_asked: None,
            guessed: None,
            guess_counts: GuessCounts::default(),
            timed: LaneStats::default(),
            asked_bytes: 0,
            forgotten_bytes: 0,
            routed: 0,
            examined: 0,
            dropped: 0,
        };
        let shared = Arc::new(Shared {
            layers,
            index,
            experts,
            used,
            slots: Slots::new(slots, &part_bytes)?,
            slot_bytes: Slots::slot_bytes(&part_bytes),
            state: Mutex::new(state),
            changed: Condvar::new(),
            pack_ns: AtomicU64::new(0),
            stall_ns: AtomicU64::new(0),
        });
        let lanes = Lanes::start(options, slice_bytes, Arc::clone(&shared) as _)?;
        Ok(Streamed { shared, lanes })
    }

    /// Leases the slots of as many of `keys` as there are, in order, and has those that are missing read; what found no slot
    /// stays in `keys`.
    fn acquire(&self, state: &mut State, keys: &mut Vec<(usize, Key)>, why: For) -> Vec<Place> {
        let mut acquired = Vec::new();
        let mut slices = Vec::new();
        keys.retain(|&(place, key)| {
            let acquired_one = match why {
                For::Guess => state.cache.acquire_guess(key),
                For::Visit | For::Ahead => state.cache.acquire(key),
            };
            let (slot, own) = match acquired_one {
                Acquired::Full => return true,
                Acquired::Hit(slot) => (slot, false),
                Acquired::Miss { slot, .. } => {
                    // The read's own.
                    state.cache.lease(slot);
                    state.fetches[slot] = Fetch { key, pending: PARTS, error: None };
                    // What an earlier expert left there is not to be taken for this one's.
                    assert!(self.shared.slots.clear(slot), "a slot without leases");
                    slices.extend(self.shared.slices(slot, key));
                    (slot, true)
                }
            };
            acquired.push(Place { number: place, slot, own });
            false
        });
        state.asked_bytes += slices.iter().map(|s| s.range.end - s.range.start).sum::<u64>();
        match why {
            For::Visit => self.lanes.want(slices),
            For::Ahead | For::Guess => self.lanes.read_ahead(slices),
        }
        acquired
    }

    /// The experts in slots, (layer with experts, expert), the one that would go last first.
    pub(crate) fn order(&self) -> Vec<(u32, u32)> {
        self.shared.lock().cache.by_rank().into_iter().map(|key| (key.layer, key.expert)).collect()
    }

    /// Reads as many of `order` as there are free slots beyond the least, until there is something to compute, in the order of
    /// the file. Gives their number. What the model has not got is passed over.
    pub(crate) fn warm(&self, order: &[(u32, u32)]) -> usize {
        let mut state = self.shared.lock();
        let (layers, experts) = (self.shared.layers.len() as u32, self.shared.experts as u32);
        let room = state.cache.free().saturating_sub(2 * self.shared.used);
        let known = order.iter().filter(|(layer, expert)| *layer < layers && *expert < experts);
        let keys = known.map(|&(layer, expert)| Key { layer, expert }).filter(|key| state.cache.find(*key).is_none());
        let mut keys: Vec<(usize, Key)> = keys.take(room).enumerate().collect();
        keys.sort_by_key(|&(_, key)| key);
        keys.dedup_by_key(|&mut (_, key)| key);
        for place in self.acquire(&mut state, &mut keys, For::Guess) {
            state.cache.settle(place.slot);
            // The read keeps its own lease.
            state.cache.release(place.slot);
            state.warming.push(place.slot);
        }
        state.warming.len()
    }

    /// Gives the memory of all slots but `slots` back, as far as they are not in use; the slots that are left.
    pub(crate) fn shrink(&self, slots: usize) -> usize {
        let mut state = self.shared.lock();
        self.stop_warming(&mut state);
        self.settle_guess(&mut state, |_| false);
        self.shared.drop_ahead(&mut state);
        let left = state.cache.shrink(slots);
        for slot in left..state.fetches.len() {
            // Nobody has a lease of it.
            let _ = self.shared.slots.give_back(slot);
        }
        left
    }
}

impl Shared {
    /// The state is consistent between its methods, whatever panicked elsewhere.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slices of an expert that comes into `slot`.
    fn slices(&self, slot: usize, key: Key) -> impl Iterator<Item = Slice> + '_ {
        self.layers[key.layer as usize].iter().enumerate().map(move |(part, stack)| Slice {
            source: stack.source(),
            range: stack.source_range(key.expert as usize),
            ticket: (slot * PARTS + part) as u64,
        })
    }

    /// Bytes of an expert's slices.
    fn expert_bytes(&self, key: Key) -> u64 {
        self.layers[key.layer as usize].iter().map(|stack| stack.slice_bytes() as u64).sum()
    }

    fn release(&self, slots: impl IntoIterator<Item = usize>) {
        let mut state = self.lock();
        slots.into_iter().for_each(|slot| state.cache.release(slot));
        drop(state);
        self.changed.notify_all();
    }

    fn drop_ahead(&self, state: &mut State) {
        for slot in state.ahead.take().into_iter().flat_map(|(_, slots)| slots) {
            state.cache.release(slot);
        }
    }

    /// Packs a slice into its part.
    fn pack(&self, slot: usize, part: usize, key: Key, bytes: &[u8]) -> Result<(), memory::Error> {
        let begin = Instant::now();
        let stack = &self.layers[key.layer as usize][part];
        let mut filling = self.slots.fill(slot, part).expect("nobody reads what has not come");
        stack.pack(key.expert as usize, bytes, &mut filling);
        filling.finish();
        self.pack_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl Receive for Shared {
    fn receive(&self, ticket: u64, bytes: Result<&[u8], memory::Error>) {
        let (slot, part) = (ticket as usize / PARTS, ticket as usize % PARTS);
        let key = self.lock().fetches[slot].key;
        let result = bytes.and_then(|bytes| self.pack(slot, part, key, bytes));
        let mut state = self.lock();
        let fetch = &mut state.fetches[slot];
        fetch.pending -= 1;
        let pending = fetch.pending;
        if let Err(error) = result {
            fetch.error.get_or_insert(error);
            // Nobody is to come upon it from now on.
            state.cache.abandon(slot);
        }
        if pending == 0 {
            state.cache.release(slot);
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl ExpertSource for Streamed {
    fn is_there(&self, layer: usize, expert: usize) -> bool {
        let Some(layer) = self.shared.index[layer] else { return true };
        self.shared.lock().cache.find(Key { layer, expert: expert as u32 }).is_some()
    }

    fn note_left_out(&self, examined: u64, dropped: u64) {
        let mut state = self.shared.lock();
        state.examined += examined;
        state.dropped += dropped;
    }

    fn wants_guess(&self, layer: usize, rows: usize) -> bool {
        if rows >= visit::PROMPT_TOKENS_MIN || self.shared.index[layer].is_none() {
            return false;
        }
        let mut state = self.shared.lock();
        let asks = state.guesses.asks();
        state.guess_asked = asks.then(Instant::now);
        asks
    }

    fn guess(&self, layer: usize, choices: &[Choice]) {
        if let Some(layer) = self.shared.index[layer] {
            self.begin_guess(layer, choices);
        }
    }

    fn wants_near(&self) -> bool {
        true
    }

    fn visit(&self, layer: usize, batch: &Batch, compute: &mut Compute<'_>) -> Result<(), Error> {
        let layer = self.shared.index[layer].expect("a layer with experts");
        compute(&mut visit::Streaming::begin(self, layer, batch))
    }
}
