//! `--observe-kv`: which keys and values the kernel saw no use of (DAMON), beside our own clock.

use std::ops::Range;
use std::path::{Path, PathBuf};

use memory::damon::{Observer, State, is_within};
use model::Runner;

use crate::terminal::say;

/// What was not touched for so long counts as idle: sooner than our own clock says so.
const IDLE_MS: u64 = 60_000;

/// Watches the memory of a runner's keys and values.
pub(crate) struct KvWatch {
    /// Where the machine's files are.
    root: PathBuf,
    ranges: Vec<Range<u64>>,
    observer: Option<Observer>,
    /// Parts of conversations that it told of.
    told: usize,
    /// It failed once, which was said: it is not tried again.
    failed: bool,
}

impl KvWatch {
    /// Of the machine whose files are at `root`.
    pub(crate) fn new(root: &Path) -> KvWatch {
        KvWatch { root: root.to_owned(), ranges: Vec::new(), observer: None, told: 0, failed: false }
    }

    /// Tells the runner what the kernel saw no use of; how many parts of conversations that is. Where that cannot be seen it
    /// is said once, when there is something to see.
    pub(crate) fn look(&mut self, runner: &mut Runner) -> usize {
        if self.failed {
            return 0;
        }
        let told = self.try_look(runner).unwrap_or_else(|why| {
            (self.failed, self.observer) = (true, None);
            say(&format!("--observe-kv: {why}; our own clock alone tells what is idle"));
            0
        });
        self.told += told;
        told
    }

    /// How many parts of conversations it told of, if it could see them all the time.
    pub(crate) fn told(&self) -> Option<usize> {
        self.observer.as_ref().map(|_| self.told)
    }

    fn try_look(&mut self, runner: &mut Runner) -> Result<usize, String> {
        let ranges = runner.kv_ranges();
        if ranges != self.ranges {
            // Memory came or went: what is watched begins anew, and so do its ages. The one before must be gone first.
            self.observer = None;
            if !ranges.is_empty() {
                self.observer = Some(self.observe(&ranges)?);
            }
            self.ranges = ranges;
            return Ok(0);
        }
        let Some(observer) = &self.observer else { return Ok(0) };
        let idle = observer.idle().map_err(|error| error.to_string())?;
        Ok(runner.kv_observe(&|block| is_within(&idle, block)))
    }

    fn observe(&self, ranges: &[Range<u64>]) -> Result<Observer, String> {
        match Observer::start(&self.root, std::process::id(), ranges, IDLE_MS) {
            Ok(Some(observer)) => Ok(observer),
            Ok(None) if State::read(&self.root) == State::Absent => {
                Err("this kernel does not show DAMON to this user".to_owned())
            }
            Ok(None) => Err("somebody else uses DAMON".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::ops::ControlFlow;
    use std::sync::Arc;

    use engine::{Engine, Request, RunnerOptions};
    use fixtures::tiny_model::{self, Architecture, TinySpec};
    use model::Model;

    use super::*;

    fn engine(dir: &Path) -> Engine {
        let path = dir.join("tiny.gguf");
        tiny_model::write(&path, &TinySpec::new(Architecture::Llama, gguf::TensorType::Q8_0)).unwrap();
        let model = Model::load(&path, &mut |_, _| ()).unwrap();
        let mut engine = Engine::new(Arc::new(model), &RunnerOptions::default()).unwrap();
        let request = Request { tokens_max: Some(20), ..Request::new((1..40).collect(), 64) };
        engine.generate(request, &mut |_| ControlFlow::Continue(())).unwrap();
        engine
    }

    #[test]
    fn what_the_kernel_saw_no_use_of_is_idle_and_a_watch_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine(dir.path());
        let ranges = engine.runner().kv_ranges();
        assert!(!ranges.is_empty());
        fixtures::damon::tree(dir.path(), "0\n", &ranges);
        let kdamonds = dir.path().join("sys/kernel/mm/damon/admin/kdamonds");
        let text = |file: &str| fs::read_to_string(kdamonds.join(file)).unwrap();
        let mut watch = KvWatch::new(dir.path());
        assert_eq!(watch.look(engine.runner()), 0, "the watch has just begun");
        assert_eq!(text("0/contexts/0/targets/0/regions/0/start"), ranges[0].start.to_string());
        let idle = watch.look(engine.runner());
        assert!(idle > 0 && watch.told() == Some(idle));
        fs::remove_dir_all(kdamonds.join("0/contexts/0/schemes/0/tried_regions")).unwrap();
        assert_eq!(watch.look(engine.runner()), 0, "a kernel that fails is not asked again");
        assert_eq!(watch.told(), None);
        assert_eq!((text("0/state"), text("nr_kdamonds")), ("off".to_owned(), "0".to_owned()));
        assert!(watch.failed);
    }

    #[test]
    fn a_machine_without_it_or_whose_is_in_use_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine(dir.path());
        let mut watch = KvWatch::new(dir.path());
        assert!(!watch.failed, "nothing is said before there is something to see");
        assert_eq!((watch.look(engine.runner()), watch.failed), (0, true));
        fixtures::damon::tree(dir.path(), "1\n", std::slice::from_ref(&(0..u64::MAX)));
        let mut watch = KvWatch::new(dir.path());
        assert_eq!((watch.look(engine.runner()), watch.look(engine.runner())), (0, 0));
        let number = fs::read_to_string(dir.path().join("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds")).unwrap();
        assert_eq!(number, "1\n");
    }
}
