//! Gives memory back while a model is in use, when the machine is short of it.
//!
//! A thread looks once a second: at PSI, at what the host or a control group lacks, at our own major faults. Looking is
//! cheap, needs no privileges, and works where triggers do not. What is given is said on standard error.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use engine::Engine;
use memory::pressure::Reader;
use residency::headroom;
use residency::pressure::{Given, Pressure, Reading, Step};
use serde_json::{Value, json};

use crate::kv_watch::KvWatch;
use crate::machine;
use crate::terminal::{say, size};

/// Time between two looks: a tenth of the time that PSI is an average of.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Where readings come from.
pub(crate) trait Readings: Send {
    /// The next one, when its time has come; `None` ends the watch. `stop` disconnects when there is nothing to watch.
    fn next(&mut self, stop: &Receiver<()>) -> Option<Reading>;

    /// The engine does not compute: a look at what it holds.
    fn look(&mut self, engine: &mut Engine) {
        let _ = engine;
    }
}

/// What the kernel says.
pub(crate) struct Kernel {
    reader: Reader,
    begin: Instant,
    kv: Option<KvWatch>,
}

impl Kernel {
    /// With `observe_kv` it is asked, too, which keys and values are not used.
    pub(crate) fn new(observe_kv: bool) -> Kernel {
        let kv = observe_kv.then(|| KvWatch::new(Path::new("/")));
        Kernel { reader: Reader::default(), begin: Instant::now(), kv }
    }

    fn reading(&self) -> Reading {
        Reading {
            stalled_percent: self.reader.psi().map(|psi| psi.some.avg10),
            missing_bytes: machine::host().map_or(0, |host| headroom::budget(&host).missing_bytes(host.own_bytes)),
            major_faults: self.reader.major_faults().unwrap_or(0),
            at_ms: self.begin.elapsed().as_millis() as u64,
        }
    }
}

impl Readings for Kernel {
    fn next(&mut self, stop: &Receiver<()>) -> Option<Reading> {
        match stop.recv_timeout(LOOK_EVERY) {
            Err(RecvTimeoutError::Timeout) => Some(self.reading()),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => None,
        }
    }

    fn look(&mut self, engine: &mut Engine) {
        if let Some(kv) = &mut self.kv {
            kv.look(engine.runner());
        }
    }
}

/// An engine that is used by one thread and watched by another.
pub(crate) struct Watched<'e>(Mutex<&'e mut Engine>);

impl<'e> Watched<'e> {
    /// The engine, for as long as it computes.
    pub(crate) fn engine(&self) -> MutexGuard<'_, &'e mut Engine> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does `work` with an engine that gives memory back meanwhile, as `readings` tell. Gives its result, and what was given.
pub(crate) fn watched<R>(
    engine: &mut Engine,
    mut readings: impl Readings,
    work: impl FnOnce(&Watched<'_>) -> R,
) -> (R, Vec<(Step, Given)>) {
    let model = Arc::clone(engine.model());
    let watched = &Watched(Mutex::new(engine));
    let (running, stop) = channel();
    thread::scope(|scope| {
        let watch = move || {
            let (mut pressure, mut all) = (Pressure::default(), Vec::new());
            let mut give = |step| match step {
                // This needs no turn at the engine, which may be waiting for what is read ahead.
                Step::StopPrefetch => Given::bytes(model.stop_read_ahead()),
                _ => match watched.0.try_lock() {
                    Ok(mut engine) => engine.give_back(step),
                    Err(TryLockError::Poisoned(engine)) => engine.into_inner().give_back(step),
                    Err(TryLockError::WouldBlock) => Given::Busy,
                },
            };
            while let Some(reading) = readings.next(&stop) {
                let mut asked = pressure.relieve(reading, &mut give);
                asked.retain(|(_, given)| *given != Given::Busy);
                asked.iter().for_each(|asked| say(&text_of(asked)));
                all.extend(asked);
                if let Ok(mut engine) = watched.0.try_lock() {
                    readings.look(&mut engine);
                }
            }
            all
        };
        // Without a thread nothing is given, and all goes on.
        let watch = thread::Builder::new().name("airs-relief".to_owned()).spawn_scoped(scope, watch);
        let result = work(watched);
        drop(running);
        (result, watch.ok().and_then(|watch| watch.join().ok()).unwrap_or_default())
    })
}

fn text_of((step, given): &(Step, Given)) -> String {
    let given = match given {
        Given::Bytes(bytes) => size(*bytes),
        Given::Nothing | Given::Busy => "nothing to give".to_owned(),
    };
    format!("memory is short · {}: {given}", step.name())
}

/// What was given, for scripts.
pub(crate) fn json_of(asked: &[(Step, Given)]) -> Value {
    let bytes = |given: &Given| if let Given::Bytes(bytes) = given { Some(*bytes) } else { None };
    asked.iter().map(|(step, given)| json!({ "step": step.name(), "bytes": bytes(given) })).collect()
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::sync::mpsc::Sender;

    use engine::{Request, RunnerOptions, Sampling};
    use fixtures::faults::{Fault, FaultySource, Gate};
    use fixtures::tiny_model::{Architecture, TinySpec, build};
    use model::{Backing, Choice, Header, LoadOptions, Model};

    use super::*;

    /// Readings as the test sends them; tells when the one before was dealt with.
    struct Told(Receiver<Reading>, Sender<()>);

    impl Readings for Told {
        fn next(&mut self, _: &Receiver<()>) -> Option<Reading> {
            let _ = self.1.send(());
            self.0.recv().ok()
        }
    }

    /// An engine of a tiny model, of whose weights a part comes when the gate is opened.
    fn engine(gate: &Arc<Gate>) -> Engine {
        let bytes = build(&TinySpec::new(Architecture::Llama, gguf::TensorType::Q8_0)).to_bytes();
        let gguf = gguf::Gguf::read(&mut &bytes[..], bytes.len() as u64).unwrap();
        let at = gguf.tensor("blk.1.ffn_up.weight").unwrap().offset_bytes;
        let source = Arc::new(FaultySource::new("late", bytes).with(at, Fault::Stall(Arc::clone(gate))));
        source.arm(false);
        let header = Header::from_sources(vec![Arc::clone(&source) as _]).unwrap();
        source.arm(true);
        let options =
            LoadOptions { backing: Choice::Only(Backing::Unpinned), unit_bytes: 4096, ..LoadOptions::default() };
        Engine::new(Arc::new(Model::from_header(header, &options).unwrap()), &RunnerOptions::default()).unwrap()
    }

    fn answer(engine: &mut Engine) -> Vec<u32> {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let request = Request { tokens_max: Some(8), sampling, ..Request::new(vec![1, 2, 3], 64) };
        engine.generate(request, &mut |_| ControlFlow::Continue(())).unwrap().tokens
    }

    #[test]
    fn under_pressure_each_step_acts_or_says_that_it_has_nothing_and_answers_stay_the_same() {
        let gate = Arc::new(Gate::default());
        let mut engine = engine(&gate);
        gate.wait_for_arrival();
        let (readings, told) = channel();
        let (dealt, was_dealt) = channel();
        let short = |at_ms| Reading { stalled_percent: Some(50.0), at_ms, ..Reading::default() };
        let (answers, asked) = watched(&mut engine, Told(told, dealt), |watched| {
            was_dealt.recv().unwrap();
            let look = |at_ms| {
                readings.send(short(at_ms)).unwrap();
                was_dealt.recv().unwrap();
            };
            // Weights are missing: they are not read ahead any more.
            look(0);
            gate.open();
            let first = answer(&mut watched.engine());
            let held = watched.engine().runner().kv_bytes();
            // It computes: what it holds is not touched.
            let busy = watched.engine();
            look(3000);
            drop(busy);
            assert_eq!(watched.engine().runner().kv_bytes(), held);
            // It waits for its user: buffers go, then the conversation, which has just been.
            look(6000);
            look(9000);
            assert!(held > 0 && watched.engine().runner().kv_bytes() == 0);
            look(12_000);
            let second = answer(&mut watched.engine());
            drop(readings);
            (first, second)
        });
        assert_eq!(answers.0, answers.1);
        let steps: Vec<Step> = asked.iter().map(|a| a.0).collect();
        assert_eq!(steps, Step::ORDER, "each once: the busy engine was asked again");
        let gave = |i: usize| matches!(asked[i].1, Given::Bytes(bytes) if bytes > 0);
        assert!((0..3).all(gave), "{asked:?}");
        assert!(asked[3..].iter().all(|a| a.1 == Given::Nothing), "{asked:?}");
        assert_eq!(text_of(&asked[5]), "memory is short · route_away: nothing to give");
        assert_eq!(json_of(&asked)[0]["step"], "stop_prefetch");
        assert!(json_of(&asked)[0]["bytes"].as_u64() > Some(0) && json_of(&asked)[5]["bytes"].is_null());
    }

    #[test]
    fn the_kernel_can_be_asked_and_a_watch_ends_with_its_work() {
        let gate = Arc::new(Gate::default());
        gate.open();
        let mut engine = engine(&gate);
        let begin = Instant::now();
        let (tokens, _) = watched(&mut engine, Kernel::new(true), |watched| answer(&mut watched.engine()));
        assert_eq!(tokens.len(), 8);
        let reading = Kernel { begin, ..Kernel::new(false) }.reading();
        assert!(reading.stalled_percent.is_none_or(|percent| (0.0..=100.0).contains(&percent)));
    }
}
