//! Real models in the pool: switching between two that do not fit together, and many sessions on one.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use engine::{Engine, Error, Pool, Progress, Request, RequestId, RunnerOptions, Sampling, Shelf, Submission};
use fixtures::huge_pages::{HugePages, free_pages};
use fixtures::test_models;
use model::{Backing, Choice, Header, LoadOptions, Model};
use residency::budget::{Ledger, Line};
use residency::models::Policy;
use residency::pressure::Step;

const CONTEXT: usize = 128;
const NAMES: [&str; 2] = ["smollm2", "gemma3"];

/// The tests measure the whole process, and the pool of huge pages is one for all.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn path(model: &str) -> PathBuf {
    if model == NAMES[0] { test_models::smollm2() } else { test_models::gemma3() }
}

fn options() -> RunnerOptions {
    RunnerOptions { micro_batch: 32, ..RunnerOptions::default() }
}

/// Two real models.
struct Real {
    backing: Choice,
    loads: Arc<AtomicUsize>,
}

impl Real {
    fn new(backing: Choice) -> Real {
        Real { backing, loads: Arc::default() }
    }

    /// Bytes of weights, of everything else that is granted before the model runs, and of keys and values.
    fn lines(model: &str) -> Result<[u64; 3], Error> {
        let f = Header::read(&path(model))?.footprint(&options(), 1)?;
        let kv = f.kv_block_bytes * (CONTEXT as u64).div_ceil(f.kv_block_tokens);
        Ok([f.weights_bytes + f.row_table_bytes, f.scratch_bytes + f.metadata_bytes, kv])
    }
}

impl Shelf for Real {
    fn bytes(&self, model: &str) -> Result<u64, Error> {
        Ok(Real::lines(model)?.iter().sum())
    }

    fn load(&self, model: &str, ledger: &Ledger) -> Result<Engine, Error> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        let [weights, rest, _] = Real::lines(model)?;
        let grant = |line, bytes| ledger.grant(line, model, bytes).map_err(|full| Error::Full { line, full });
        let grants = [grant(Line::Weights, weights)?, grant(Line::Scratch, rest)?];
        let load_options = LoadOptions { backing: self.backing, ..LoadOptions::default() };
        // It answers while its weights come.
        let loaded = Model::open(&path(model), &load_options)?;
        if let Choice::Only(backing) = self.backing {
            assert_eq!(loaded.backing(), Some(backing));
        }
        let mut engine = Engine::new(Arc::new(loaded), &options())?;
        grants.into_iter().for_each(|g| engine.hold(g));
        engine.charge_to(ledger, model)?;
        Ok(engine)
    }
}

fn request(prompt: Vec<u32>) -> Request {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    Request { tokens_max: Some(6), sampling, ..Request::new(prompt, CONTEXT) }
}

fn answer(engine: &mut Engine, prompt: &[u32]) -> Vec<u32> {
    let on = &mut |_: Progress<'_>| ControlFlow::Continue(());
    engine.generate(request(prompt.to_vec()), on).unwrap().tokens
}

fn prompt(i: usize) -> Vec<u32> {
    (0..12).map(|at| ((i * 977 + at * 131) % 40_000 + 10) as u32).collect()
}

/// Lets `workers` threads ask for the two models in turns, `rounds` times each; gives the loads that it took.
fn switch(backing: Choice, workers: usize, rounds: usize) -> usize {
    let expected: Vec<Vec<Vec<u32>>> = NAMES
        .iter()
        .map(|name| {
            let model = Model::load(&path(name), &mut |_, _| ()).unwrap();
            let mut engine = Engine::new(Arc::new(model), &options()).unwrap();
            (0..4).map(|i| answer(&mut engine, &prompt(i))).collect()
        })
        .collect();
    assert_ne!(expected[0], expected[1]);
    let shelf = Real::new(backing);
    let loads = Arc::clone(&shelf.loads);
    let bytes = NAMES.map(|name| shelf.bytes(name).unwrap());
    // Room for the larger one and half of the smaller.
    let capacity_bytes = bytes[0].max(bytes[1]) + bytes[0].min(bytes[1]) / 2;
    let policy =
        Policy { capacity_bytes, idle_bytes_max: capacity_bytes, keep_alive_ms: None, thrash_ms: 1, waiting_max: 64 };
    // So slow that no model comes back soon: each request that needs another one gets it.
    let ticks = AtomicUsize::new(0);
    let clock = move || 1000 * ticks.fetch_add(1, Ordering::SeqCst) as u64;
    let pool = Pool::new(Box::new(shelf), Ledger::new(capacity_bytes), policy, Box::new(clock));
    let answered = AtomicUsize::new(0);
    thread::scope(|scope| {
        for worker in 0..workers {
            let (pool, expected, answered) = (&pool, &expected, &answered);
            scope.spawn(move || {
                for round in 0..rounds {
                    let (m, p) = ((worker + round) % 2, (worker * 3 + round) % 4);
                    let held = pool.acquire(NAMES[m]).unwrap();
                    assert_eq!(
                        answer(&mut held.engine(), &prompt(p)),
                        expected[m][p],
                        "worker {worker}, round {round}"
                    );
                    assert!(pool.ledger().used_bytes() <= pool.ledger().budget_bytes());
                    answered.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(answered.load(Ordering::SeqCst), workers * rounds, "none is lost");
    assert!(pool.ledger().used_bytes() > 0);
    pool.close();
    assert_eq!((pool.ledger().used_bytes(), pool.ledger().entries(), pool.list()), (0, vec![], vec![]));
    loads.load(Ordering::SeqCst)
}

/// Whether all huge pages come back: the last thread of a pager may be on its way out.
fn come_back(before: Option<usize>) -> bool {
    (0..10_000).any(|_| free_pages() == before)
}

#[test]
fn twenty_switches_with_requests_in_flight_lose_nothing_and_leave_nothing() {
    let _alone = alone();
    let before = free_pages();
    let loads = switch(Choice::Best, 2, 21);
    assert!(loads > 20, "{loads} loads: they had room together");
    assert!(come_back(before), "{:?} huge pages of {before:?}", free_pages());
}

#[test]
fn huge_pages_go_back_to_the_pool_at_every_switch() {
    let _alone = alone();
    let weights: u64 = NAMES.iter().map(|name| Real::lines(name).unwrap()[0]).sum();
    let Some(_pages) = HugePages::add(weights as usize + (16 << 20)) else {
        eprintln!("skipped: this user may not add huge pages");
        return;
    };
    let before = free_pages();
    assert!(before > Some(0));
    let loads = switch(Choice::Only(Backing::Huge), 2, 4);
    assert!(loads >= 4, "{loads} loads");
    assert!(come_back(before), "{:?} huge pages of {before:?}", free_pages());
}

/// What the process holds, shared pages in part.
fn pss_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("Pss:"))?.trim().strip_suffix("kB")?.trim().parse::<u64>();
    Some(kib.ok()? << 10)
}

/// Answers eight prompts at once, as `expected`. What the process held meanwhile, and its keys and values, in bytes.
fn eight_at_once(engine: &mut Engine, expected: &[Vec<u32>]) -> (u64, u64) {
    let ids: Vec<RequestId> = (0..8)
        .map(|i| match engine.submit(request(prompt(i))).unwrap() {
            Submission::Queued(id) => id,
            full @ Submission::Full { .. } => panic!("{full:?}"),
        })
        .collect();
    let mut most = (0, 0);
    while !engine.is_idle() {
        engine.step(&mut |_, _| ControlFlow::Continue(()));
        if engine.load().0 == ids.len() {
            most = (pss_bytes().unwrap_or(0), engine.runner().kv_bytes());
        }
    }
    for ended in engine.take_ended() {
        let i = ids.iter().position(|id| *id == ended.id).unwrap();
        assert_eq!(ended.result.unwrap().tokens, expected[i]);
    }
    most
}

#[test]
fn eight_sessions_on_one_model_hold_its_weights_once() {
    let _alone = alone();
    let model = Model::load(&path(NAMES[0]), &mut |_, _| ()).unwrap();
    let weights_bytes = model.weights_bytes;
    let mut engine = Engine::new(Arc::new(model), &options()).unwrap();
    let expected: Vec<Vec<u32>> = (0..8).map(|i| answer(&mut engine, &prompt(i))).collect();
    // Buffers of a step for eight are no part of the question.
    eight_at_once(&mut engine, &expected);
    engine.give_back(Step::SpillIdleKv);
    assert_eq!(engine.runner().kv_bytes(), 0);
    let Some(one) = pss_bytes() else {
        eprintln!("skipped: this kernel does not tell what a process holds");
        return;
    };
    let (eight, kv_bytes) = eight_at_once(&mut engine, &expected);
    assert!(one > weights_bytes && kv_bytes > 0, "eight ran at once");
    assert_eq!(engine.model().resident_bytes().unwrap() / weights_bytes, 1);
    let added = eight.saturating_sub(one).saturating_sub(kv_bytes);
    assert!(
        added * 100 < weights_bytes,
        "{added} bytes beside {kv_bytes} of keys and values, {weights_bytes} of weights"
    );
}
