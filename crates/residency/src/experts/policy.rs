//! Which expert goes when there is no free slot.
//!
//! A policy is an order: it gives each expert a rank, and the lowest goes. Ranks are asked for anew at each eviction,
//! because time changes them.

use super::Key;
use std::cmp::Ordering;
use std::collections::HashMap;

/// What is known of an expert, in the cache or not.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Past {
    /// The last token that was routed to it.
    pub token: u64,
    /// Uses of all experts before its last one.
    pub order: u64,
    /// Its uses so far, and as parts of one those where it was nearly chosen, each counted less by half for every
    /// [`HALF_LIFE_TOKENS`] tokens from it to `warmed`.
    pub heat: f32,
    /// The last token that added to heat.
    pub warmed: u64,
}

impl Past {
    pub(super) fn warm(&mut self, token: u64, share: f32) {
        let token = token.max(self.warmed);
        self.heat = self.heat * decay(token - self.warmed) + share;
        self.warmed = token;
    }
}

/// Where the model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moment {
    /// The first and the last of the tokens that are computed at once.
    pub first: u64,
    /// See there.
    pub token: u64,
    /// Uses so far.
    pub order: u64,
    /// The layer, of those that have experts.
    pub layer: u32,
    /// How many have.
    pub layers: u32,
}

impl Moment {
    /// Layers passed since `layer` was: 0 for the one in use, most for the one that comes next.
    fn passed(&self, layer: u32) -> u32 {
        (self.layer + self.layers - layer) % self.layers.max(1)
    }

    /// Tokens from `token` to the next that can use an expert of `layer`: the first of those that are computed, where the layer is still to
    /// come, or the one behind them where it has been passed already. So what the layers to come have kept of a prompt does not
    /// grow old by all the tokens of the next piece, or each piece would find nothing of the one before.
    fn age(&self, layer: u32, token: u64) -> u64 {
        let next = match layer.cmp(&self.layer) {
            Ordering::Less => self.token + 1,
            Ordering::Equal => self.token,
            Ordering::Greater => self.first,
        };
        next.saturating_sub(token)
    }
}

/// An order of eviction.
pub trait Policy {
    /// The word in reports.
    fn name(&self) -> &'static str;

    /// The lowest rank goes first, by its first number, then by its second one.
    fn rank(&self, key: Key, past: &Past, now: &Moment) -> (f64, f64);
}

/// Least recently used. Hits nothing below the token cycle; for comparison.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lru;

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn rank(&self, _: Key, past: &Past, _: &Moment) -> (f64, f64) {
        (past.order as f64, 0.0)
    }
}

/// By the token of the last use; among equals the layer goes that was passed most recently, for its turn is furthest away.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenStamp;

impl Policy for TokenStamp {
    fn name(&self) -> &'static str {
        "token-stamp"
    }

    fn rank(&self, key: Key, past: &Past, now: &Moment) -> (f64, f64) {
        (past.token as f64, f64::from(now.passed(key.layer)))
    }
}

/// Tokens in which heat halves. Between 8 and 24 the recorded traces differ by less than a point; 16 is best where a tenth of
/// the experts or more has room.
pub const HALF_LIFE_TOKENS: f32 = 16.0;

/// What a use by the last token counts beside heat.
const RECENT: f32 = 4.0;

/// By how often an expert was used lately, or nearly used, and how lately: heat as of the next token that can use it, and a
/// share that falls with the tokens since the last use. Heat is remembered of experts that were evicted, too. Ties as
/// [`TokenStamp`].
///
/// On recorded traces, which do not tell what was nearly used, this hits 5-9 points more than the token stamp at 3 % of the
/// experts, 4-5 at 10 %, 1-4 at 20 %.
#[derive(Debug, Clone)]
pub struct Heat {
    /// What is left of heat after so many tokens.
    decay: Vec<f32>,
}

impl Default for Heat {
    fn default() -> Self {
        Heat { decay: (0..256).map(decay).collect() }
    }
}

/// What is left of heat after `tokens`.
fn decay(tokens: u64) -> f32 {
    (-(tokens as f32) / HALF_LIFE_TOKENS).exp2()
}

impl Policy for Heat {
    fn name(&self) -> &'static str {
        "heat"
    }

    fn rank(&self, key: Key, past: &Past, now: &Moment) -> (f64, f64) {
        let age = now.age(key.layer, past.token);
        let decay = self.decay.get(now.age(key.layer, past.warmed) as usize).copied().unwrap_or(0.0);
        (f64::from(past.heat * decay + RECENT / (1.0 + age as f32)), f64::from(now.passed(key.layer)))
    }
}

/// By the next use, which it knows: the limit of all policies.
#[derive(Debug, Clone, Default)]
pub struct Belady {
    uses: HashMap<Key, Vec<u64>>,
}

impl Belady {
    /// For the uses `keys`, in this order.
    pub fn new(keys: impl Iterator<Item = Key>) -> Belady {
        let mut uses: HashMap<Key, Vec<u64>> = HashMap::new();
        for (order, key) in keys.enumerate() {
            uses.entry(key).or_default().push(order as u64);
        }
        Belady { uses }
    }
}

impl Policy for Belady {
    fn name(&self) -> &'static str {
        "belady"
    }

    fn rank(&self, key: Key, _: &Past, now: &Moment) -> (f64, f64) {
        let uses = self.uses.get(&key).map_or(&[][..], Vec::as_slice);
        let next = uses.get(uses.partition_point(|&order| order < now.order));
        (next.map_or(f64::NEG_INFINITY, |&order| -(order as f64)), 0.0)
    }
}
