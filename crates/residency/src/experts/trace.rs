//! Recorded routing: which experts tokens were routed to, to replay what a cache would have done.
//!
//! The format is that of BigMoeOnEdge, "route_trace v1": comment lines that begin with `#` and tell
//! `n_layer= n_expert= n_expert_used=` and each layer's `expert_bytes=`, a line of names, then
//! `turn,phase,step,layer,slot,expert,weight,...`, the prompt (phase 0) layer by layer, what was generated (phase 1) token
//! by token.

use super::policy::Policy;
use super::{Acquired, Cache, Key};

/// A file that is no trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A line that cannot be read.
    #[error("line {line}: {reason}: {text:?}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        reason: &'static str,
        /// The line.
        text: String,
    },
    /// Nothing in it.
    #[error("no line tells the layers and experts, or none a use")]
    Empty,
}

/// The experts of one layer that one token was routed to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// Whether the token was generated; else it belongs to the prompt.
    pub decode: bool,
    /// The token, counted from the first one of the prompt.
    pub token: u64,
    /// The layer.
    pub layer: u32,
    /// Its experts, by rank.
    pub experts: Vec<u32>,
}

/// A recorded conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    /// Layers with experts.
    pub layers: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of each layer that a token is routed to.
    pub used: u32,
    /// In the order in which they were recorded.
    pub visits: Vec<Visit>,
}

/// Layers and experts are bounded, for tables are made of them.
const COUNT_MAX: u32 = 1 << 16;

impl Trace {
    /// Reads a trace.
    pub fn parse(text: &str) -> Result<Trace, TraceError> {
        let mut trace = Trace::default();
        let (mut prompt, mut last) = (0, None);
        for (number, line) in text.lines().enumerate() {
            let fail = |reason| TraceError::Line { line: number + 1, reason, text: line.chars().take(80).collect() };
            if let Some(comment) = line.strip_prefix('#') {
                trace.read_comment(comment);
                continue;
            }
            if line.is_empty() || line.starts_with("turn,") {
                continue;
            }
            let fields: Vec<u64> = line.split(',').take(6).map_while(|field| field.trim().parse().ok()).collect();
            let &[turn, phase, step, layer, _, expert] = &fields[..] else {
                return Err(fail("six numbers are wanted"));
            };
            if layer >= u64::from(trace.layers) || expert >= u64::from(trace.experts) {
                return Err(fail("a layer or an expert that the header does not tell of"));
            }
            if phase == 0 {
                prompt = prompt.max(step.saturating_add(1));
            }
            let at = (turn, phase, step, layer);
            if last.replace(at) != Some(at) {
                let token = if phase == 0 { step } else { prompt.saturating_add(step) };
                trace.visits.push(Visit { decode: phase != 0, token, layer: layer as u32, experts: Vec::new() });
            }
            if let Some(visit) = trace.visits.last_mut() {
                visit.experts.push(expert as u32);
            }
        }
        if trace.visits.is_empty() { Err(TraceError::Empty) } else { Ok(trace) }
    }

    fn read_comment(&mut self, comment: &str) {
        let set = |name: &str, field: &mut u32| {
            let value = comment.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            if let Some(value) = value.and_then(|v| v.parse().ok()).filter(|v| (1..=COUNT_MAX).contains(v)) {
                *field = value;
            }
        };
        set("n_layer", &mut self.layers);
        set("n_expert", &mut self.experts);
        set("n_expert_used", &mut self.used);
    }

    /// Every use, in order.
    pub fn uses(&self) -> impl Iterator<Item = Key> + '_ {
        self.visits.iter().flat_map(|v| v.experts.iter().map(|&expert| Key { layer: v.layer, expert }))
    }

    /// The share of hits among the uses by generated tokens, with room for `slots` experts, which the prompt has warmed.
    /// Absent if there are no such uses, or if a visit does not fit.
    pub fn hit_share(&self, policy: impl Policy, slots: usize) -> Option<f64> {
        let mut cache = Cache::new(policy, slots, self.layers, self.experts);
        let (mut hits, mut uses) = (0u64, 0u64);
        for visit in &self.visits {
            cache.advance(visit.token..=visit.token, visit.layer);
            let keys = || visit.experts.iter().map(|&expert| Key { layer: visit.layer, expert });
            // As the engine does it: what is there is leased first, so that no miss of the same layer evicts it.
            let (there, missing): (Vec<Key>, Vec<Key>) = keys().partition(|key| cache.find(*key).is_some());
            hits += if visit.decode { there.len() as u64 } else { 0 };
            uses += if visit.decode { visit.experts.len() as u64 } else { 0 };
            let mut leased = Vec::new();
            for key in there.into_iter().chain(missing) {
                match cache.acquire(key) {
                    Acquired::Hit(slot) | Acquired::Miss { slot, .. } => leased.push(slot),
                    Acquired::Full => return None,
                }
            }
            leased.into_iter().for_each(|slot| cache.release(slot));
            keys().for_each(|key| cache.used(key, visit.token));
        }
        (uses > 0).then(|| hits as f64 / uses as f64)
    }
}
