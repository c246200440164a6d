//! What to read next: pure bookkeeping.

use super::pace::Pace;
use crate::Error;
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Instant;

/// How far to read ahead of the stage in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Window {
    /// While a pass computes, as many stages as keep reading ahead of it, by the measured times of both, and two at first:
    /// what is read further ahead takes the processor from the pass. Between passes everything.
    #[default]
    Auto,
    /// Until everything is in: the stages ahead first, then those behind.
    All,
    /// So many stages; the rest is read when its turn comes. 0 reads nothing before someone waits for it.
    Stages(usize),
}

#[derive(Debug)]
pub(super) struct Queue {
    /// Units that no reader has taken.
    absent: BTreeSet<usize>,
    /// Units that are not in yet, taken or not.
    pub(super) missing: usize,
    /// Of the absent ones, those that someone waits for.
    wanted: BTreeSet<usize>,
    stages: Vec<Range<usize>>,
    window: Window,
    /// The stage in use.
    front: usize,
    /// Whether a pass is between its first stage and its last.
    computes: bool,
    readers: usize,
    pub(super) pace: Pace,
    pub(super) failure: Option<Error>,
    pub(super) stop: bool,
    /// Interruptions so far.
    pub(super) interrupts: u64,
    /// When bytes last came.
    pub(super) moved: Instant,
    /// When the stage in use was entered, and the time waited until then.
    pub(super) advanced: Option<(Instant, u64)>,
}

impl Queue {
    pub(super) fn new(units: usize, stages: Vec<Range<usize>>, window: Window, readers: usize) -> Queue {
        Queue {
            absent: (0..units).collect(),
            missing: units,
            wanted: BTreeSet::new(),
            stages,
            window,
            front: 0,
            computes: false,
            readers,
            pace: Pace::default(),
            failure: None,
            stop: false,
            interrupts: 0,
            moved: Instant::now(),
            advanced: None,
        }
    }

    /// Someone waits for `units`.
    pub(super) fn want(&mut self, units: Range<usize>) {
        self.wanted.extend(self.absent.range(units));
    }

    /// `stage` is in use; tells whether that is new.
    pub(super) fn advance(&mut self, stage: usize) -> bool {
        let computes = stage + 1 < self.stages.len();
        let was = std::mem::replace(&mut self.computes, computes);
        std::mem::replace(&mut self.front, stage) != stage || was != computes
    }

    /// Nothing is read any more before someone waits for it.
    pub(super) fn stop_ahead(&mut self) {
        self.window = Window::Stages(0);
    }

    /// Takes the unit that is to be read next.
    pub(super) fn take(&mut self) -> Option<usize> {
        let unit = self.wanted.pop_first().or_else(|| self.ahead()).or_else(|| self.background())?;
        self.absent.remove(&unit);
        Some(unit)
    }

    /// Stages that are read ahead.
    fn stages_ahead(&self) -> usize {
        match self.window {
            Window::Auto => {
                let units: usize = self.stages.iter().map(ExactSizeIterator::len).sum();
                self.pace.stages(units as f64 / self.stages.len().max(1) as f64, self.readers)
            }
            Window::All => usize::MAX,
            Window::Stages(stages) => stages,
        }
    }

    /// The first absent unit of the stages in the window, which goes on with the first stage behind the last one.
    fn ahead(&self) -> Option<usize> {
        let (window, all) = (self.stages_ahead(), self.stages.len());
        if window == 0 {
            return None;
        }
        let mut stages = (0..all.min(window.saturating_add(1))).map(|i| &self.stages[(self.front + i) % all]);
        stages.find_map(|stage| self.absent.range(stage.clone()).next().copied())
    }

    /// The first absent unit from the stage in use on, then from the start.
    fn background(&self) -> Option<usize> {
        let reads = match self.window {
            Window::Auto => !self.computes,
            Window::All => true,
            Window::Stages(_) => false,
        };
        let from = self.stages.get(self.front).map_or(0, |stage| stage.start);
        self.absent.range(from..).next().or_else(|| self.absent.first()).copied().filter(|_| reads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(queue: &mut Queue) -> Vec<usize> {
        std::iter::from_fn(|| queue.take()).collect()
    }

    fn queue(window: Window) -> Queue {
        Queue::new(8, vec![0..2, 2..4, 3..6, 6..8], window, 2)
    }

    #[test]
    fn without_a_window_everything_is_read_once_in_order_from_the_stage_in_use_on() {
        let mut all = queue(Window::All);
        assert!(all.advance(2) && !all.advance(2));
        assert_eq!(drain(&mut all), [3, 4, 5, 6, 7, 0, 1, 2]);
    }

    #[test]
    fn what_someone_waits_for_comes_first() {
        let mut all = queue(Window::All);
        assert_eq!(all.take(), Some(0));
        all.want(6..8);
        all.want(0..1);
        assert_eq!(drain(&mut all), [6, 7, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_window_bounds_what_no_one_waits_for_and_wraps() {
        let mut none = queue(Window::Stages(0));
        assert_eq!(none.take(), None);
        none.want(2..4);
        assert_eq!(drain(&mut none), [2, 3]);

        let mut one = queue(Window::Stages(1));
        assert_eq!(drain(&mut one), [0, 1, 2, 3]);
        one.advance(2);
        assert_eq!(drain(&mut one), [4, 5, 6, 7]);

        let mut last = queue(Window::Stages(1));
        last.advance(3);
        assert_eq!(drain(&mut last), [6, 7, 0, 1]);

        assert_eq!(drain(&mut queue(Window::Stages(99))), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_region_without_stages_has_nothing_ahead() {
        assert_eq!(Queue::new(2, Vec::new(), Window::Stages(2), 2).take(), None);
        assert_eq!(Queue::new(2, Vec::new(), Window::All, 2).take(), Some(0));
    }
    #[test]
    fn by_itself_a_window_bounds_a_pass_and_lets_everything_come_between_passes() {
        let stages = |n: usize| (0..n).map(|i| i..i + 1).collect();
        let mut auto = Queue::new(9, stages(9), Window::Auto, 1);
        assert!(auto.advance(0));
        assert_eq!(drain(&mut auto), [0, 1, 2], "two stages ahead of the one in use");
        auto.advance(1);
        assert_eq!(drain(&mut auto), [3]);
        auto.pace.read(4_000_000);
        auto.pace.computed(1_000_000);
        assert_eq!(drain(&mut auto), [4, 5, 6], "reading is slow: five stages ahead");
        assert!(auto.advance(8));
        assert_eq!(drain(&mut auto), [8, 7], "the pass is in its last stage: everything");

        assert_eq!(drain(&mut Queue::new(3, stages(3), Window::Auto, 1)), [0, 1, 2], "no pass has begun");
    }

    #[test]
    fn reading_ahead_can_be_stopped() {
        for window in [Window::Auto, Window::All, Window::Stages(3)] {
            let mut queue = queue(window);
            assert!(queue.take().is_some());
            queue.stop_ahead();
            assert_eq!(queue.take(), None);
            queue.want(5..6);
            assert_eq!(drain(&mut queue), [5]);
        }
    }
}
