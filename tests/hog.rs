//! A neighbour in the same control group takes memory: the pool gives back what is idle, and nobody is killed.
//!
//! The test starts itself again, inside a control group of its own: once as the pool, which starts the hog.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use engine::{Engine, Error, Pool, Progress, Request, RunnerOptions, Sampling, Shelf};
use fixtures::test_models;
use memory::pressure::Reader;
use model::{Header, Model};
use residency::budget::{Ledger, Line};
use residency::headroom::{Group, Host, budget};
use residency::models::{Change, Policy, Reason};
use residency::pressure::{Given, Pressure, Reading};

const NAME: &str = "a_hog_in_the_group_gets_what_is_idle_and_kills_nobody";
const ROLE: &str = "AIRS_HOG_ROLE";
const MIB: u64 = 1 << 20;
/// Room for two copies of a model of 92 MiB and this process, and not for the hog besides.
const LIMIT_BYTES: u64 = 320 * MIB;
/// What the hog takes at a time.
const BITE_BYTES: usize = 8 << 20;
/// More than the group has free at first, less than it has without the idle model.
const BITES: usize = 16;

/// One model in two files: models of one file would share its weights.
struct Copies(tempfile::TempDir);

impl Copies {
    fn new() -> Copies {
        let dir = tempfile::tempdir().unwrap();
        for name in ["busy", "idle"] {
            fs::copy(test_models::smollm2(), dir.path().join(name)).unwrap();
        }
        Copies(dir)
    }

    fn weights(&self) -> Result<u64, Error> {
        Ok(Header::read(&self.0.path().join("busy"))?.footprint(&RunnerOptions::default(), 1)?.weights_bytes)
    }
}

impl Shelf for Copies {
    fn bytes(&self, _: &str) -> Result<u64, Error> {
        self.weights().map(|w| w + 4 * MIB)
    }

    fn load(&self, model: &str, ledger: &Ledger) -> Result<Engine, Error> {
        let grant = ledger.grant(Line::Weights, model, self.weights()?);
        let grant = grant.map_err(|full| Error::Full { line: Line::Weights, full })?;
        let loaded = Model::load(&self.0.path().join(model), &mut |_, _| ())?;
        let mut engine = Engine::new(Arc::new(loaded), &RunnerOptions { micro_batch: 8, ..Default::default() })?;
        engine.hold(grant);
        engine.charge_to(ledger, model)?;
        Ok(engine)
    }
}

fn answer(engine: &mut Engine) -> Vec<u32> {
    let prompt = engine.model().tokenizer.encode("Once upon a time", true);
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let request = Request { tokens_max: Some(8), sampling, ..Request::new(prompt, 64) };
    let on = &mut |_: Progress<'_>| ControlFlow::Continue(());
    engine.generate(request, on).unwrap().tokens
}

/// What the machine says now, `at_ms`.
fn reading(at_ms: u64) -> Reading {
    let reader = Reader::default();
    let info = reader.meminfo().unwrap();
    let group = |g: memory::pressure::Group| Group {
        limit_bytes: g.limit_bytes,
        used_bytes: g.used_bytes,
        reclaimable_bytes: g.file_bytes,
    };
    let host = Host {
        total_bytes: info.total_bytes,
        available_bytes: info.available_bytes,
        groups: reader.groups().into_iter().map(group).collect(),
        own_bytes: 0,
        pinned_bytes: 0,
    };
    // A bite is taken between two readings: there must be room for it.
    let missing_bytes = budget(&host).missing_bytes(0).max((BITE_BYTES as u64).saturating_sub(budget(&host).bytes));
    Reading { missing_bytes, major_faults: reader.major_faults().unwrap_or(0), at_ms, stalled_percent: None }
}

/// The hog: takes a bite for each line that it reads, keeps all, and says so.
fn hog() {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for line in std::io::stdin().lines() {
        let Ok(_) = line else { return };
        kept.push(vec![1; BITE_BYTES]);
        println!("bite {}", kept.len());
    }
}

struct Hog(Child, ChildStdin, BufReader<ChildStdout>);

impl Hog {
    fn start() -> Hog {
        let mut child = again("hog").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Hog(child, stdin, stdout)
    }

    fn bite(&mut self) {
        writeln!(self.1, "more").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.2.read_line(&mut line).unwrap() > 0, "the hog was killed");
            // The test harness has its say on standard output too.
            if line.contains("bite ") {
                return;
            }
        }
    }
}

/// This test once more, in another role.
fn again(role: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", NAME, "--nocapture"]).env(ROLE, role);
    command
}

/// The pool: one model in use, one idle, and a hog.
fn pool() {
    let shelf = Copies::new();
    let capacity_bytes = 2 * shelf.bytes("").unwrap();
    let policy =
        Policy { capacity_bytes, idle_bytes_max: capacity_bytes, keep_alive_ms: None, thrash_ms: 0, waiting_max: 8 };
    let pool = Pool::new(Box::new(shelf), Ledger::new(capacity_bytes), policy, Box::new(|| 0));
    let busy = pool.acquire("busy").unwrap();
    drop(pool.acquire("idle").unwrap());
    let expected = answer(&mut busy.engine());
    assert_eq!(pool.list().len(), 2);

    let mut hog = Hog::start();
    let (mut pressure, mut given_bytes) = (Pressure::default(), 0);
    for bite in 0..BITES {
        // Each reading comes long after the one before, as far as the policy can tell.
        for look in 0..8 {
            let asked = pressure.relieve(reading((bite * 8 + look) as u64 * 10_000), &mut |step| pool.give_back(step));
            let gave = |(_, given)| if let Given::Bytes(bytes) = given { bytes } else { 0 };
            given_bytes += asked.into_iter().map(gave).sum::<u64>();
        }
        hog.bite();
    }
    assert!(given_bytes > 80 * MIB, "{given_bytes} bytes were given back");
    assert_eq!(pool.list().len(), 1, "{:?}", pool.list());
    let dropped = |c: &Change<String>| matches!(c, Change::State { reason: Some(Reason::Pressure), .. });
    assert!(pool.events().iter().any(|e| dropped(&e.change) && e.model.as_deref() == Some("idle")));
    assert_eq!(answer(&mut busy.engine()), expected);
    drop(hog.1);
    assert!(hog.0.wait().unwrap().success());
}

/// A memory control group that this user may make, with the limit set.
fn group() -> Option<PathBuf> {
    for (base, limit) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")] {
        let dir = Path::new(base).join(format!("airs-hog-{}", std::process::id()));
        if fs::create_dir(&dir).is_ok() {
            if fs::write(dir.join(limit), LIMIT_BYTES.to_string()).is_ok() {
                return Some(dir);
            }
            let _ = fs::remove_dir(&dir);
        }
    }
    None
}

#[test]
fn a_hog_in_the_group_gets_what_is_idle_and_kills_nobody() {
    match env::var(ROLE).as_deref() {
        Ok("hog") => return hog(),
        Ok(_) => return pool(),
        Err(_) => {}
    }
    // Fetched outside of the group, if it is not there yet.
    test_models::smollm2();
    let Some(dir) = group() else {
        eprintln!("skipped: this user may not make a memory control group; tests/pool.rs has the policy without one");
        return;
    };
    let child = again("pool");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg("echo $$ > \"$0\"/cgroup.procs && exec \"$@\"").arg(&dir).arg(child.get_program());
    let output = shell.args(child.get_args()).env(ROLE, "pool").output().unwrap();
    let _ = fs::remove_dir(&dir);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{:?}\n{}\n{}", output.status, text(&output.stdout), text(&output.stderr));
}
