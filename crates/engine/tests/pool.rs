//! The model pool at work: nothing lost, nothing wrong, the ledger exact.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;

use engine::{Engine, Error, Pool, Progress, Request, RunnerOptions, Sampling, Shelf};
use fixtures::faults::{Fault, FaultySource, Gate};
use fixtures::tiny_model::{Architecture, TinySpec, write};
use model::{Backing, Choice, Header, LoadOptions, Model};
use residency::budget::{Ledger, Line};
use residency::models::{Change, Policy, Reason, State};
use residency::pressure::{Given, Pressure, Reading, Step};

const CONTEXT: usize = 64;

/// Tiny models in a directory.
struct Tiny {
    dir: tempfile::TempDir,
    loads: Arc<AtomicUsize>,
    fails: Arc<AtomicBool>,
}

impl Tiny {
    fn new() -> Tiny {
        let dir = tempfile::tempdir().unwrap();
        for (name, architecture) in [("llama", Architecture::Llama), ("qwen", Architecture::Qwen2)] {
            let spec = TinySpec::new(architecture, gguf::TensorType::Q8_0);
            write(&dir.path().join(name), &spec).unwrap();
        }
        Tiny { dir, loads: Arc::default(), fails: Arc::default() }
    }

    fn options() -> RunnerOptions {
        RunnerOptions { micro_batch: 16, ..RunnerOptions::default() }
    }

    fn lines(&self, model: &str) -> Result<(u64, u64, u64), Error> {
        let f = Header::read(&self.dir.path().join(model))?.footprint(&Tiny::options(), 1)?;
        Ok((f.weights_bytes + f.row_table_bytes, f.scratch_bytes, f.kv_block_bytes * (CONTEXT / 16) as u64))
    }

    fn engine(&self, model: &str) -> Engine {
        let model = Model::load(&self.dir.path().join(model), &mut |_, _| ()).unwrap();
        Engine::new(Arc::new(model), &Tiny::options()).unwrap()
    }
}

impl Shelf for Tiny {
    fn bytes(&self, model: &str) -> Result<u64, Error> {
        self.lines(model).map(|(weights, scratch, kv)| weights + scratch + kv)
    }

    fn load(&self, model: &str, ledger: &Ledger) -> Result<Engine, Error> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        let (weights, scratch, _) = self.lines(model)?;
        let grant = |line, bytes| ledger.grant(line, model, bytes).map_err(|full| Error::Full { line, full });
        let grants = [grant(Line::Weights, weights)?, grant(Line::Scratch, scratch)?];
        if self.fails.load(Ordering::SeqCst) {
            return Err(Error::NoLogits(0));
        }
        let mut engine = self.engine(model);
        grants.into_iter().for_each(|g| engine.hold(g));
        engine.charge_to(ledger, model)?;
        Ok(engine)
    }
}

fn answer(engine: &mut Engine, prompt: &[u32]) -> Vec<u32> {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let request = Request { tokens_max: Some(12), sampling, ..Request::new(prompt.to_vec(), CONTEXT) };
    let on = &mut |_: Progress<'_>| std::ops::ControlFlow::Continue(());
    engine.generate(request, on).unwrap().tokens
}

/// A pool that holds `share` of the two models' bytes, in percent.
fn pool(tiny: Tiny, percent: u64) -> Pool {
    let bytes = (tiny.bytes("llama").unwrap() + tiny.bytes("qwen").unwrap()) * percent / 100;
    let policy =
        Policy { capacity_bytes: bytes, idle_bytes_max: bytes, keep_alive_ms: None, thrash_ms: 1000, waiting_max: 256 };
    let ticks = AtomicUsize::new(0);
    let clock = move || ticks.fetch_add(1, Ordering::SeqCst) as u64;
    Pool::new(Box::new(tiny), Ledger::new(bytes), policy, Box::new(clock))
}

#[test]
fn models_that_do_not_fit_together_take_turns_and_no_request_is_lost_or_wrong() {
    let tiny = Tiny::new();
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| (1..10 + i).collect()).collect();
    let expected: Vec<Vec<Vec<u32>>> = ["llama", "qwen"]
        .map(|model| {
            let mut engine = tiny.engine(model);
            prompts.iter().map(|p| answer(&mut engine, p)).collect()
        })
        .into();
    assert_ne!(expected[0], expected[1]);
    let loads = Arc::clone(&tiny.loads);
    let pool = pool(tiny, 75);
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for worker in 0..4 {
            let (pool, prompts, expected, done) = (&pool, &prompts, &expected, &done);
            scope.spawn(move || {
                for round in 0..40 {
                    let (m, p) = ((worker + round) % 2, (worker * 7 + round) % prompts.len());
                    let held = pool.acquire(["llama", "qwen"][m]).unwrap();
                    let got = answer(&mut held.engine(), &prompts[p]);
                    assert_eq!(got, expected[m][p], "worker {worker}, round {round}");
                    let ledger = pool.ledger();
                    assert!(ledger.used_bytes() <= ledger.budget_bytes());
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(done.load(Ordering::SeqCst), 160);
    assert!(loads.load(Ordering::SeqCst) >= 20, "{} loads: they had room together", loads.load(Ordering::SeqCst));
    assert!(pool.ledger().used_bytes() > 0);
    pool.close();
    assert_eq!((pool.ledger().used_bytes(), pool.ledger().entries(), pool.list()), (0, vec![], vec![]));
}

#[test]
fn twenty_switches_one_by_one() {
    let tiny = Tiny::new();
    let loads = Arc::clone(&tiny.loads);
    let pool = pool(tiny, 75);
    let prompt: Vec<u32> = (1..9).collect();
    let mut answers = Vec::new();
    for switch in 0..20 {
        let held = pool.acquire(["llama", "qwen"][switch % 2]).unwrap();
        answers.push(answer(&mut held.engine(), &prompt));
    }
    assert_eq!(loads.load(Ordering::SeqCst), 20);
    assert!(answers.chunks(2).all(|pair| pair == &answers[..2]));
    let replaced = |e: &residency::models::Event<String>| {
        matches!(e.change, Change::State { state: State::Draining, reason: Some(Reason::Replace) })
    };
    assert_eq!(pool.events().iter().filter(|e| replaced(e)).count(), 19);
    pool.close();
    assert_eq!(pool.ledger().used_bytes(), 0);
}

#[test]
fn models_that_fit_together_are_loaded_once_and_shared() {
    let tiny = Tiny::new();
    let loads = Arc::clone(&tiny.loads);
    let pool = pool(tiny, 100);
    let all: Vec<_> = (0..10).map(|i| pool.acquire(["llama", "qwen"][i % 2]).unwrap()).collect();
    assert_eq!(loads.load(Ordering::SeqCst), 2);
    drop(all);
    assert_eq!(pool.list().iter().filter(|(_, state, _)| *state == State::Resident).count(), 2);
}

#[test]
fn a_load_that_fails_is_an_error_to_who_asked_and_the_pool_goes_on() {
    let tiny = Tiny::new();
    let fails = Arc::clone(&tiny.fails);
    let pool = pool(tiny, 75);
    fails.store(true, Ordering::SeqCst);
    assert!(matches!(pool.acquire("llama").err(), Some(Error::NoLogits(0))));
    assert!(matches!(pool.acquire("missing").err(), Some(Error::Model(_))));
    assert_eq!(pool.ledger().used_bytes(), 0);
    fails.store(false, Ordering::SeqCst);
    assert!(pool.acquire("llama").is_ok());
}

#[test]
fn a_model_larger_than_the_pool_is_refused_with_the_numbers() {
    let tiny = Tiny::new();
    let (bytes, most) = (tiny.bytes("llama").unwrap(), tiny.bytes("llama").unwrap().max(tiny.bytes("qwen").unwrap()));
    let pool = pool(tiny, 100);
    pool.resize(bytes - 1).unwrap();
    let error = pool.acquire("llama").err().unwrap().to_string();
    assert!(error.contains(&bytes.to_string()) && error.contains(&(bytes - 1).to_string()), "{error}");
    pool.resize(most).unwrap();
    assert!(pool.acquire("llama").is_ok());
}

#[test]
fn who_waits_for_a_model_that_closes_gets_an_answer() {
    let pool = pool(Tiny::new(), 75);
    let held = pool.acquire("llama").unwrap();
    let waiter = {
        let pool = pool.clone();
        thread::spawn(move || pool.acquire("qwen").err().map(|e| e.to_string()))
    };
    while pool.waiting() == 0 {
        thread::yield_now();
    }
    pool.close();
    assert_eq!(waiter.join().unwrap(), Some(Error::Closed.to_string()));
    assert!(pool.ledger().used_bytes() > 0, "it is in use");
    assert_eq!(answer(&mut held.engine(), &[1, 2, 3]).len(), 12);
    drop(held);
    assert_eq!(pool.ledger().used_bytes(), 0);
}

#[test]
fn unloading_waits_for_the_lease_and_refuses_the_next_with_an_answer() {
    let pool = pool(Tiny::new(), 100);
    let held = pool.acquire("llama").unwrap();
    assert!(pool.unload("llama") && !pool.unload("unknown"));
    assert!(matches!(pool.acquire("llama").err(), Some(Error::Unloading { .. })));
    drop(held);
    assert_eq!((pool.ledger().used_bytes(), pool.list()), (0, vec![]));
    assert!(pool.acquire("llama").is_ok());
}

#[test]
fn pressure_gives_memory_back_in_order_and_takes_nothing_in_use() {
    let pool = pool(Tiny::new(), 100);
    let (busy, idle) = (pool.acquire("llama").unwrap(), pool.acquire("qwen").unwrap());
    let expected = answer(&mut busy.engine(), &[1, 2, 3]);
    answer(&mut idle.engine(), &[1, 2, 3]);
    drop(idle);
    let mut pressure = Pressure::default();
    let mut asked = Vec::new();
    for second in 0..20 {
        let reading = Reading { stalled_percent: Some(20.0), at_ms: second * 1000, ..Reading::default() };
        asked.extend(pressure.relieve(reading, &mut |step| pool.give_back(step)));
    }
    assert_eq!(asked.iter().map(|a| a.0).collect::<Vec<_>>(), Step::ORDER);
    let gave = |given: &Given| matches!(given, Given::Bytes(bytes) if *bytes > 0);
    let given: Vec<Step> = asked.iter().filter(|a| gave(&a.1)).map(|a| a.0).collect();
    // Buffers first; the conversations have just been, and go when nothing else is left.
    assert_eq!(given, [Step::ShrinkPrefixCache, Step::SpillIdleKv, Step::DropIdleModels]);
    assert_eq!(pool.list().len(), 1);
    assert_eq!(answer(&mut busy.engine(), &[1, 2, 3]), expected);
    let logged: Vec<_> = pool
        .events()
        .iter()
        .filter_map(|e| if let Change::Asked { step, given } = e.change { Some((step, given)) } else { None })
        .collect();
    assert_eq!(logged, asked, "each step is in the log with what it gave");
}

/// A tiny model whose weights come when the gate is opened.
struct Late(Arc<Gate>);

impl Shelf for Late {
    fn bytes(&self, _: &str) -> Result<u64, Error> {
        Ok(1)
    }

    fn load(&self, _: &str, _: &Ledger) -> Result<Engine, Error> {
        let bytes = fixtures::tiny_model::build(&TinySpec::new(Architecture::Llama, gguf::TensorType::Q8_0)).to_bytes();
        let gguf = gguf::Gguf::read(&mut &bytes[..], bytes.len() as u64).unwrap();
        let at = gguf.tensor("blk.1.ffn_up.weight").unwrap().offset_bytes;
        let source = Arc::new(FaultySource::new("late", bytes).with(at, Fault::Stall(Arc::clone(&self.0))));
        source.arm(false);
        let header = Header::from_sources(vec![Arc::clone(&source) as _])?;
        source.arm(true);
        let backing = Choice::Only(Backing::Unpinned);
        let options = LoadOptions { backing, unit_bytes: 4096, ..LoadOptions::default() };
        Engine::new(Arc::new(Model::from_header(header, &options)?), &Tiny::options())
    }
}

#[test]
fn pressure_while_weights_come_stops_reading_ahead_and_what_is_needed_comes_all_the_same() {
    let gate = Arc::new(Gate::default());
    let policy = Policy { capacity_bytes: 1, idle_bytes_max: 1, keep_alive_ms: None, thrash_ms: 0, waiting_max: 1 };
    let pool = Pool::new(Box::new(Late(Arc::clone(&gate))), Ledger::new(1), policy, Box::new(|| 0));
    let held = pool.acquire("late").unwrap();
    gate.wait_for_arrival();
    let Given::Bytes(missing) = pool.give_back(Step::StopPrefetch) else { panic!("its last unit is missing") };
    assert!(missing > 0);
    gate.open();
    assert_eq!(answer(&mut held.engine(), &[1, 2, 3]), answer(&mut Tiny::new().engine("llama"), &[1, 2, 3]));
    assert_eq!(pool.give_back(Step::StopPrefetch), Given::Nothing, "all is there");
}

#[test]
fn requests_of_one_model_that_come_while_it_loads_share_the_load() {
    let tiny = Tiny::new();
    let loads = Arc::clone(&tiny.loads);
    let pool = pool(tiny, 75);
    let (send, receive) = mpsc::channel();
    let barrier = Arc::new(Barrier::new(8));
    for _ in 0..8 {
        let (pool, send, barrier) = (pool.clone(), send.clone(), Arc::clone(&barrier));
        thread::spawn(move || {
            barrier.wait();
            let held = pool.acquire("llama").unwrap();
            send.send(answer(&mut held.engine(), &[5, 6, 7])).unwrap();
            // Nobody leaves before all have come: else a late one might find the pool empty.
            barrier.wait();
        });
    }
    let answers: Vec<_> = (0..8).map(|_| receive.recv().unwrap()).collect();
    assert!(answers.iter().all(|a| *a == answers[0]));
    assert_eq!(loads.load(Ordering::SeqCst), 1);
}
