//! Slots and what is in them.
//!
//! The cache says where an expert is to be found or put; that its bytes have come is the business of whoever reads them.

use super::Key;
use super::policy::{Heat, Moment, Past, Policy};
use std::ops::RangeInclusive;

/// Where an expert is, or comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acquired {
    /// It is in this slot, or on its way there.
    Hit(usize),
    /// It is to be read into this slot, and what was there is gone.
    Miss {
        /// The slot.
        slot: usize,
        /// What was there.
        evicted: Option<Key>,
    },
    /// All slots are leased: one has to be released first.
    Full,
}

/// What happened so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Found in a slot.
    pub hits: u64,
    /// Not found.
    pub misses: u64,
    /// Experts that made room.
    pub evictions: u64,
    /// Misses of experts that were in a slot once.
    pub rereads: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    key: Option<Key>,
    leases: u32,
    /// Read on a guess that was not settled yet.
    guessed: bool,
}

/// A fixed number of slots for the experts of a model.
#[derive(Debug)]
pub struct Cache<P = Heat> {
    policy: P,
    slots: Vec<Slot>,
    /// Slots that hold nothing.
    free: Vec<usize>,
    layers: u32,
    experts: u32,
    /// The slot of each expert that has one, by layer and expert.
    places: Vec<Option<usize>>,
    pasts: Vec<Past>,
    /// Experts that were in a slot once.
    seen: Vec<bool>,
    now: Moment,
    counts: Counts,
}

impl<P: Policy> Cache<P> {
    /// An empty cache of `slots` slots for `layers` layers of `experts` experts.
    pub fn new(policy: P, slots: usize, layers: u32, experts: u32) -> Cache<P> {
        let all = layers as usize * experts as usize;
        Cache {
            policy,
            slots: vec![Slot::default(); slots],
            free: (0..slots).rev().collect(),
            layers,
            experts,
            places: vec![None; all],
            pasts: vec![Past::default(); all],
            seen: vec![false; all],
            now: Moment { layers, ..Moment::default() },
            counts: Counts::default(),
        }
    }

    fn at(&self, key: Key) -> usize {
        assert!(key.layer < self.layers && key.expert < self.experts, "{key:?} of {} x {}", self.layers, self.experts);
        key.layer as usize * self.experts as usize + key.expert as usize
    }

    /// Slots, free ones included.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Slots that hold nothing.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The slot of `key`, if it has one.
    pub fn find(&self, key: Key) -> Option<usize> {
        self.places[self.at(key)]
    }

    /// The model comes to `layer`, and computes `tokens` at once.
    pub fn advance(&mut self, tokens: RangeInclusive<u64>, layer: u32) {
        self.now.first = self.now.first.max(*tokens.start());
        self.now.token = self.now.token.max(*tokens.end());
        self.now.layer = layer;
    }

    /// Token `token` was routed to `key`.
    pub fn used(&mut self, key: Key, token: u64) {
        let at = self.at(key);
        let past = &mut self.pasts[at];
        past.warm(token, 1.0);
        past.token = past.token.max(token);
        past.order = self.now.order;
        self.now.order += 1;
    }

    /// Token `token` came near to being routed to `key`: as `share` of a use, it is likely to be used soon.
    pub fn nearly_used(&mut self, key: Key, token: u64, share: f32) {
        let at = self.at(key);
        self.pasts[at].warm(token, share);
    }

    /// Leases the slot of `key`, making one free if it has none: of those without a lease, the one that the policy ranks
    /// lowest.
    pub fn acquire(&mut self, key: Key) -> Acquired {
        let at = self.at(key);
        if let Some(slot) = self.places[at] {
            // What was guessed is read for this use.
            let guessed = std::mem::take(&mut self.slots[slot].guessed);
            self.count(at, !guessed);
            self.slots[slot].leases += 1;
            return Acquired::Hit(slot);
        }
        let taken = self.take(key);
        if matches!(taken, Acquired::Miss { .. }) {
            self.count(at, false);
        }
        taken
    }

    /// As [`Cache::acquire`], for what is to be read before anyone is routed to it: a miss is counted at its first use.
    pub fn acquire_guess(&mut self, key: Key) -> Acquired {
        if let Some(slot) = self.find(key) {
            self.slots[slot].leases += 1;
            return Acquired::Hit(slot);
        }
        let taken = self.take(key);
        if let Acquired::Miss { slot, .. } = taken {
            self.slots[slot].guessed = true;
        }
        taken
    }

    /// The guess that filled `slot` is settled: who uses it from now on finds it there.
    pub fn settle(&mut self, slot: usize) {
        self.slots[slot].guessed = false;
    }

    fn count(&mut self, at: usize, hit: bool) {
        if hit {
            self.counts.hits += 1;
        } else {
            self.counts.misses += 1;
            self.counts.rereads += u64::from(std::mem::replace(&mut self.seen[at], true));
        }
    }

    /// Makes room for `key`.
    fn take(&mut self, key: Key) -> Acquired {
        let Some((slot, evicted)) = self.make_room() else { return Acquired::Full };
        self.slots[slot] = Slot { key: Some(key), leases: 1, guessed: false };
        let at = self.at(key);
        self.places[at] = Some(slot);
        Acquired::Miss { slot, evicted }
    }

    fn make_room(&mut self) -> Option<(usize, Option<Key>)> {
        if let Some(slot) = self.free.pop() {
            return Some((slot, None));
        }
        let ranked = self.slots.iter().enumerate().filter(|(_, slot)| slot.leases == 0).filter_map(|(i, slot)| {
            let key = slot.key?;
            Some((self.policy.rank(key, &self.pasts[self.at(key)], &self.now), key, i))
        });
        let by_rank = |a: &((f64, f64), Key, usize), b: &((f64, f64), Key, usize)| {
            a.0.0.total_cmp(&b.0.0).then(a.0.1.total_cmp(&b.0.1)).then(a.1.cmp(&b.1))
        };
        let (_, key, slot) = ranked.min_by(by_rank)?;
        self.abandon(slot);
        self.free.retain(|&free| free != slot);
        self.counts.evictions += 1;
        Some((slot, Some(key)))
    }

    /// One more lease of a slot that has one.
    pub fn lease(&mut self, slot: usize) {
        debug_assert!(self.slots[slot].leases > 0, "slot {slot} is not leased");
        self.slots[slot].leases += 1;
    }

    /// Gives a lease back.
    ///
    /// # Panics
    /// If `slot` has none.
    pub fn release(&mut self, slot: usize) {
        let Slot { key, leases, .. } = &mut self.slots[slot];
        *leases = leases.checked_sub(1).expect("a lease to give back");
        if *leases == 0 && key.is_none() {
            self.free.push(slot);
        }
    }

    /// What was to come into `slot` did not come: nobody finds it there any more, and the slot is free once its leases are
    /// given back.
    pub fn abandon(&mut self, slot: usize) {
        if let Some(key) = self.slots[slot].key.take() {
            let at = self.at(key);
            self.places[at] = None;
            if self.slots[slot].leases == 0 {
                self.free.push(slot);
            }
        }
    }

    /// Gives the slots from `slots` on back, and what they hold; those that are leased stay, and all before them. The slots
    /// that are left.
    pub fn shrink(&mut self, slots: usize) -> usize {
        while self.slots.len() > slots && self.slots.last().is_some_and(|slot| slot.leases == 0) {
            let last = self.slots.len() - 1;
            self.abandon(last);
            self.free.retain(|&free| free != last);
            self.slots.pop();
        }
        self.slots.len()
    }

    /// The experts in slots, the one that would go last first.
    pub fn by_rank(&self) -> Vec<Key> {
        let rank = |key: &Key| self.policy.rank(*key, &self.pasts[self.at(*key)], &self.now);
        let mut keys: Vec<Key> = self.slots.iter().filter_map(|slot| slot.key).collect();
        keys.sort_by(|a, b| {
            let (a_rank, b_rank) = (rank(a), rank(b));
            b_rank.0.total_cmp(&a_rank.0).then(b_rank.1.total_cmp(&a_rank.1)).then(a.cmp(b))
        });
        keys
    }
}
