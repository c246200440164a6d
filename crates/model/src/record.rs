//! What each step took, for those who want to know where the time went.

use crate::moe::streamed::ExpertStats;
use crate::weights::Weights;
use memory::pressure::{Process, Reader};
use std::time::{Duration, Instant};

/// One forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
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
    /// Pages that the system read meanwhile for this process on its own, where it tells.
    pub major_faults: Option<u64>,
    /// The process's memory at the end, where the system tells.
    pub process: Option<Process>,
    /// The share of the packed weights that was resident at the end, where they are memory of our own.
    pub dense_resident: Option<f64>,
}

/// The counts before a step.
pub(crate) struct Begun {
    at: Instant,
    computed: Duration,
    waited: Duration,
    experts: ExpertStats,
    major_faults: Option<u64>,
}

impl Begun {
    /// Reads them; `computed` is the pool's.
    pub(crate) fn now(weights: &Weights, computed: Duration) -> Begun {
        let experts = weights.streamed.as_ref().map_or_else(ExpertStats::default, |s| s.stats());
        let major_faults = Reader::default().major_faults();
        Begun { at: Instant::now(), computed, waited: weights.stats().waited, experts, major_faults }
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
            major_faults: now.major_faults.zip(self.major_faults).map(|(now, before)| now - before),
            process: Reader::default().process(),
            dense_resident: weights.resident_share(),
        }
    }
}
