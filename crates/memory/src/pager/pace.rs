//! How far reading must be ahead of computing: from how long both take, as measured.

/// Stages ahead before anything is known, and at least: one that is ready and one that comes.
const STAGES_MIN: usize = 2;

/// Weight of the latest measurement: rates change when a neighbour comes or a cache ends.
const LATEST: f64 = 0.25;

/// A mean in which old values fade.
#[derive(Debug, Default, Clone, Copy)]
struct Mean(Option<f64>);

impl Mean {
    fn add(&mut self, value: f64) {
        self.0 = Some(self.0.map_or(value, |mean| mean + LATEST * (value - mean)));
    }
}

/// Follows both times.
#[derive(Debug, Default)]
pub(super) struct Pace {
    read_ns: Mean,
    compute_ns: Mean,
}

impl Pace {
    /// A unit was read in `ns`, from asking for its bytes to its place.
    pub(super) fn read(&mut self, ns: u64) {
        self.read_ns.add(ns as f64);
    }

    /// A stage was computed in `ns`, waits not counted.
    pub(super) fn computed(&mut self, ns: u64) {
        self.compute_ns.add(ns as f64);
    }

    /// Stages to be ahead, of `units_per_stage` units each that `readers` read side by side: one that is ready, and as many
    /// as are computed in the time that reading one takes. Reading that is slower has to begin earlier.
    pub(super) fn stages(&self, units_per_stage: f64, readers: usize) -> usize {
        let (Some(read), Some(compute)) = (self.read_ns.0, self.compute_ns.0) else { return STAGES_MIN };
        let stage_ns = read * units_per_stage / readers.max(1) as f64;
        (1.0 + (stage_ns / compute.max(1.0)).ceil()).max(STAGES_MIN as f64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(read_ns: u64, compute_ns: u64) -> Pace {
        let mut pace = Pace::default();
        pace.read(read_ns);
        pace.computed(compute_ns);
        pace
    }

    #[test]
    fn the_window_is_two_stages_until_both_times_are_known_and_never_less() {
        assert_eq!(Pace::default().stages(4.0, 2), 2);
        let mut half = Pace::default();
        half.read(1_000_000);
        assert_eq!(half.stages(4.0, 2), 2);
        assert_eq!(pace(100, 1_000_000).stages(1.0, 2), 2, "reading is much faster");
    }

    #[test]
    fn reading_that_takes_longer_than_computing_begins_that_many_stages_earlier() {
        // A stage of 4 units takes two readers 2 × 3 ms, and is computed in 1 ms.
        assert_eq!(pace(3_000_000, 1_000_000).stages(4.0, 2), 7);
        assert_eq!(pace(3_000_000, 1_000_000).stages(4.0, 1), 13, "one reader has to begin earlier still");
        assert_eq!(pace(5, 0).stages(1.0, 1), 6, "no time at all counts as a nanosecond");
    }

    #[test]
    fn a_window_follows_what_changes() {
        let mut pace = pace(1_000_000, 1_000_000);
        let at_first = pace.stages(4.0, 2);
        for _ in 0..20 {
            pace.read(10_000_000);
        }
        let slow = pace.stages(4.0, 2);
        for _ in 0..20 {
            pace.computed(100_000_000);
        }
        assert!(at_first < slow && pace.stages(4.0, 2) == 2, "{at_first} {slow}");
    }
}
