//! What an engine gives back when the machine is short of memory.

use residency::pressure::{Given, Step};

use crate::Engine;

impl Engine {
    /// Takes one step of the order in which memory is given back. Nothing is given that a request holds.
    pub fn give_back(&mut self, step: Step) -> Given {
        // What cannot be written stays: the next step takes more.
        let kv_bytes = self.runner.kv_shrink(step).unwrap_or(0);
        Given::bytes(match step {
            Step::StopPrefetch => self.model.stop_read_ahead(),
            // And the buffers of the last step, which the next one takes again.
            Step::ShrinkPrefixCache => kv_bytes + self.runner.scratch_trim(),
            // An engine has one model, who preempts would only do so again, and there is nowhere to route to.
            Step::SpillIdleKv | Step::DropIdleModels | Step::PreemptLowPriority | Step::RouteAway => kv_bytes,
        })
    }
}
