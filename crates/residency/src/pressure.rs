//! Giving memory back when the machine is short of it: what, and in which order.
//!
//! There is no control loop. A reading says whether the machine is short; each time it is, one more step of the
//! order is taken, and what was given back is not taken again before it is asked for.

/// What can be given back, in the order in which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Read nothing ahead.
    StopPrefetch,
    /// Keys and values that no session holds.
    ShrinkPrefixCache,
    /// Keys and values of sessions that wait for their users.
    SpillIdleKv,
    /// Models without a lease.
    DropIdleModels,
    /// Work of low priority.
    PreemptLowPriority,
    /// New requests go elsewhere, or are refused.
    RouteAway,
}

impl Step {
    /// The declared order.
    pub const ORDER: &[Step] = &[
        Step::StopPrefetch,
        Step::ShrinkPrefixCache,
        Step::SpillIdleKv,
        Step::DropIdleModels,
        Step::PreemptLowPriority,
        Step::RouteAway,
    ];

    /// The word in events.
    pub fn name(self) -> &'static str {
        match self {
            Step::StopPrefetch => "stop_prefetch",
            Step::ShrinkPrefixCache => "shrink_prefix_cache",
            Step::SpillIdleKv => "spill_idle_kv",
            Step::DropIdleModels => "drop_idle_models",
            Step::PreemptLowPriority => "preempt_low_priority",
            Step::RouteAway => "route_away",
        }
    }
}

/// What a step gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// There was nothing to give.
    Nothing,
    /// At least so many bytes, freed or not taken any more.
    Bytes(u64),
    /// What could give is at work: it is to be asked again.
    Busy,
}

impl Given {
    /// Of a number of bytes.
    pub fn bytes(bytes: u64) -> Given {
        if bytes == 0 { Given::Nothing } else { Given::Bytes(bytes) }
    }
}

/// What is known at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Reading {
    /// Percent of the last ten seconds in which some task waited for memory (PSI), if the kernel tells.
    pub stalled_percent: Option<f64>,
    /// Bytes that are missing to what the host or the control group should keep: beyond that a control group kills, and
    /// nobody needs to have waited before.
    pub missing_bytes: u64,
    /// Pages that this process has had to read back from disk so far.
    pub major_faults: u64,
    /// When, in milliseconds of any clock that does not go back.
    pub at_ms: u64,
}

/// From here on the machine is short: one percent of the time is what reclaim in passing costs.
const STALLED_PERCENT: f64 = 1.0;
/// Without PSI: major faults a second that are more than a file opened here and there.
const FAULTS_PER_SECOND: u64 = 50;
/// What a step gave back needs this long to show in the readings, which are averages.
const SETTLE_MS: u64 = 2_000;

/// Follows the readings.
#[derive(Debug, Clone, Default)]
pub struct Pressure {
    last: Option<Reading>,
    taken: usize,
    taken_at_ms: Option<u64>,
}

impl Pressure {
    /// Takes a reading; gives the step to take now, if there is one.
    pub fn step(&mut self, reading: Reading) -> Option<Step> {
        let last = self.last.replace(reading);
        if !is_short(last, reading) {
            self.taken = 0;
            return None;
        }
        let settled = self.taken_at_ms.is_none_or(|at| reading.at_ms.saturating_sub(at) >= SETTLE_MS);
        let step = *Step::ORDER.get(self.taken).filter(|_| settled || self.taken == 0)?;
        self.taken += 1;
        self.taken_at_ms = Some(reading.at_ms);
        Some(step)
    }

    /// The last step found nothing to give: the next one, which need not wait for it.
    fn pass_over(&mut self) -> Option<Step> {
        let step = *Step::ORDER.get(self.taken)?;
        self.taken += 1;
        Some(step)
    }

    /// Takes a reading. If the machine is short, asks `give` for the steps that are due until one gives something. What was
    /// asked for, in order, and what it gave.
    pub fn relieve(&mut self, reading: Reading, give: &mut dyn FnMut(Step) -> Given) -> Vec<(Step, Given)> {
        let mut asked = Vec::new();
        let mut due = self.step(reading);
        while let Some(step) = due {
            let given = give(step);
            asked.push((step, given));
            due = match given {
                Given::Nothing => self.pass_over(),
                Given::Bytes(_) => None,
                Given::Busy => {
                    self.taken -= 1;
                    self.taken_at_ms = None;
                    None
                }
            };
        }
        asked
    }
}

/// Whether a machine with this reading is short of memory.
fn is_short(last: Option<Reading>, now: Reading) -> bool {
    if now.missing_bytes > 0 {
        return true;
    }
    if let Some(percent) = now.stalled_percent {
        return percent >= STALLED_PERCENT;
    }
    last.is_some_and(|last| {
        let faults = now.major_faults.saturating_sub(last.major_faults);
        let ms = now.at_ms.saturating_sub(last.at_ms).max(1);
        faults * 1000 >= FAULTS_PER_SECOND * ms
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn psi(percent: f64, at_ms: u64) -> Reading {
        Reading { stalled_percent: Some(percent), at_ms, ..Reading::default() }
    }

    #[test]
    fn steps_come_in_the_declared_order_one_at_a_time_and_settle_between() {
        let mut pressure = Pressure::default();
        assert_eq!(pressure.step(psi(0.0, 0)), None);
        let mut taken = Vec::new();
        for at_ms in (0..20_000).step_by(500) {
            taken.extend(pressure.step(psi(5.0, at_ms)).map(|step| (step, at_ms)));
        }
        let steps: Vec<Step> = taken.iter().map(|t| t.0).collect();
        assert_eq!(steps, Step::ORDER);
        assert!(taken.windows(2).all(|pair| pair[1].1 - pair[0].1 >= SETTLE_MS), "{taken:?}");
    }

    #[test]
    fn relief_begins_the_order_again() {
        let mut pressure = Pressure::default();
        assert_eq!(pressure.step(psi(5.0, 0)), Some(Step::StopPrefetch));
        assert_eq!(pressure.step(psi(5.0, 1)), None);
        assert_eq!(pressure.step(psi(5.0, SETTLE_MS)), Some(Step::ShrinkPrefixCache));
        assert_eq!(pressure.step(psi(0.5, 5000)), None);
        assert_eq!(pressure.step(psi(5.0, 5001)), Some(Step::StopPrefetch));
    }

    #[test]
    fn what_has_nothing_is_passed_over_what_gives_is_given_time_and_what_is_busy_is_asked_again() {
        let mut pressure = Pressure::default();
        let mut busy = true;
        let mut give = |step| match step {
            Step::ShrinkPrefixCache if std::mem::take(&mut busy) => Given::Busy,
            Step::ShrinkPrefixCache => Given::Bytes(7),
            Step::DropIdleModels => Given::bytes(9),
            _ => Given::bytes(0),
        };
        let mut at = |at_ms| pressure.relieve(psi(5.0, at_ms), &mut give);
        use Given::{Busy, Bytes, Nothing};
        assert_eq!(at(0), [(Step::StopPrefetch, Nothing), (Step::ShrinkPrefixCache, Busy)]);
        assert_eq!(at(1), [(Step::ShrinkPrefixCache, Bytes(7))], "nothing was given that would need time");
        assert_eq!(at(2), [], "it needs time to show");
        assert_eq!(at(3000), [(Step::SpillIdleKv, Nothing), (Step::DropIdleModels, Bytes(9))]);
        assert_eq!(at(6000), [(Step::PreemptLowPriority, Nothing), (Step::RouteAway, Nothing)]);
        assert_eq!(at(9000), [], "all is given");
        assert_eq!(pressure.relieve(psi(0.0, 9001), &mut |_| unreachable!("no one is short")), []);
    }

    #[test]
    fn a_group_near_its_limit_is_short_though_nobody_waits() {
        let mut pressure = Pressure::default();
        let near = Reading { missing_bytes: 1, ..psi(0.0, 0) };
        assert_eq!(pressure.step(near), Some(Step::StopPrefetch));
        assert_eq!(pressure.step(psi(0.0, 1)), None);
    }

    #[test]
    fn without_psi_our_own_major_faults_are_the_signal() {
        let faults = |major_faults, at_ms| Reading { major_faults, at_ms, ..Reading::default() };
        let mut pressure = Pressure::default();
        assert_eq!(pressure.step(faults(10_000, 0)), None, "what was before does not count");
        assert_eq!(pressure.step(faults(10_020, 1000)), None);
        assert_eq!(pressure.step(faults(10_120, 2000)), Some(Step::StopPrefetch));
    }
}
