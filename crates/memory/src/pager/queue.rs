//! What to read next: pure bookkeeping.

use crate::Error;
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Instant;

/// How far to read ahead of the stage in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Window {
    /// Until everything is in: the stages ahead first, then those behind. A pass needs all of them in the end.
    #[default]
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
    pub(super) failure: Option<Error>,
    pub(super) stop: bool,
    /// Interruptions so far.
    pub(super) interrupts: u64,
    /// When bytes last came.
    pub(super) moved: Instant,
}

impl Queue {
    pub(super) fn new(units: usize, stages: Vec<Range<usize>>, window: Window) -> Queue {
        Queue {
            absent: (0..units).collect(),
            missing: units,
            wanted: BTreeSet::new(),
            stages,
            window,
            front: 0,
            failure: None,
            stop: false,
            interrupts: 0,
            moved: Instant::now(),
        }
    }

    /// Someone waits for `units`.
    pub(super) fn want(&mut self, units: Range<usize>) {
        self.wanted.extend(self.absent.range(units));
    }

    /// `stage` is in use; tells whether that is new.
    pub(super) fn advance(&mut self, stage: usize) -> bool {
        std::mem::replace(&mut self.front, stage) != stage
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

    /// The first absent unit of the stages in the window, which goes on with the first stage behind the last one.
    fn ahead(&self) -> Option<usize> {
        let window = match self.window {
            Window::All => usize::MAX,
            Window::Stages(0) => return None,
            Window::Stages(stages) => stages,
        };
        let all = self.stages.len();
        let mut stages = (0..all.min(window.saturating_add(1))).map(|i| &self.stages[(self.front + i) % all]);
        stages.find_map(|stage| self.absent.range(stage.clone()).next().copied())
    }

    /// The first absent unit, whatever stage it belongs to, if the window lets it be read.
    fn background(&self) -> Option<usize> {
        self.absent.first().copied().filter(|_| self.window == Window::All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(queue: &mut Queue) -> Vec<usize> {
        std::iter::from_fn(|| queue.take()).collect()
    }

    fn queue(window: Window) -> Queue {
        Queue::new(8, vec![0..2, 2..4, 3..6, 6..8], window)
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
        assert_eq!(Queue::new(2, Vec::new(), Window::Stages(2)).take(), None);
        assert_eq!(Queue::new(2, Vec::new(), Window::All).take(), Some(0));
    }

    #[test]
    fn reading_ahead_can_be_stopped() {
        for window in [Window::All, Window::Stages(3)] {
            let mut queue = queue(window);
            assert!(queue.take().is_some());
            queue.stop_ahead();
            assert_eq!(queue.take(), None);
            queue.want(5..6);
            assert_eq!(drain(&mut queue), [5]);
        }
    }
}
