//! What each step took, for those who want to know where the time went.

use crate::moe::streamed::ExpertStats;
use crate::weights::Weights;
use std::time::{Duration, Instant};

/// One forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepRecord {
    /// Tokens computed.
    pub rows: usize,
    /// From beginning to end.
    pub wall: Duration,
    /// In parallel regions, as measured there.
    pub computed: Duration,
    /// With nothing to compute, waiting for weights or experts.
    pub stalled: Duration,
    /// What happened to experts meanwhile; their reads may go on after the step.
    pub experts: ExpertStats,
}

/// The counts before a step.
pub(crate) struct Begun {
    at: Instant,
    computed: Duration,
    waited: Duration,
    experts: ExpertStats,
}

impl Begun {
    /// Reads them; `computed` is the pool's.
    pub(crate) fn now(weights: &Weights, computed: Duration) -> Begun {
        let experts = weights.streamed.as_ref().map_or_else(ExpertStats::default, |s| s.stats());
        Begun { at: Instant::now(), computed, waited: weights.stats().waited, experts }
    }

    /// What the step took that began there and ends now.
    pub(crate) fn end(self, weights: &Weights, computed: Duration, rows: usize) -> StepRecord {
        let now = Begun::now(weights, computed);
        let experts = now.experts.since(&self.experts);
        StepRecord {
            rows,
            wall: now.at - self.at,
            computed: now.computed - self.computed,
            stalled: now.waited - self.waited + experts.stalled,
            experts,
        }
    }
}
