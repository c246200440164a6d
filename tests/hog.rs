//! A neighbour in the same control group takes memory: the pool gives back what is idle, nobody is killed, and weights stay
//! where they are.
//!
//! Each test starts itself again, inside a control group of its own: once as the one that is watched, which starts the hog.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use engine::{Engine, Error, Pool, Progress, Request, RunnerOptions, Sampling, Shelf};
use fixtures::test_models;
use memory::pressure::Reader;
use model::{Header, Model, Row};
use residency::budget::{Ledger, Line};
use residency::headroom::{Group, Host, budget};
use residency::models::{Change, Policy, Reason};
use residency::pressure::{Given, Pressure, Reading};

const POOL: &str = "a_hog_in_the_group_gets_what_is_idle_and_kills_nobody";
const DECODE: &str = "weights_stay_in_memory_and_nothing_is_read_back_while_a_hog_squeezes";
/// `hog`, or the directory of the group that the test is in.
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

/// The hog: for each line that it reads takes a bite, keeps it and says so; or begins to read the file of that name over and
/// over, so that the kernel must take the group's pages of files from someone all the time.
fn hog() {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for line in std::io::stdin().lines() {
        match line.as_deref() {
            Err(_) => return,
            Ok("more") => {
                kept.push(vec![1; BITE_BYTES]);
                println!("bite {}", kept.len());
            }
            Ok(path) => {
                let path = path.to_owned();
                std::thread::spawn(move || while read_through(&path).is_ok() {});
            }
        }
    }
}

/// Reads a file through the page cache.
fn read_through(path: &str) -> std::io::Result<()> {
    let (mut file, mut piece) = (fs::File::open(path)?, vec![0; 1 << 20]);
    while file.read(&mut piece)? > 0 {}
    Ok(())
}

struct Hog(Child, ChildStdin, BufReader<ChildStdout>);

impl Hog {
    fn start(test: &str) -> Hog {
        let mut child = again(test, "hog").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
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

/// A test once more, in another role.
fn again(test: &str, role: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ROLE, role);
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

    let mut hog = Hog::start(POOL);
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

/// Tokens that are decoded beside the hog, unless `AIRS_HOG_TOKENS` says how many (10,000 is what is asked of a release).
const TOKENS: usize = 300;
const CONTEXT: usize = 512;

/// The likeliest tokens, one after the other, in sequences of `CONTEXT` positions, each with a digest of all its logits' bits.
fn decode(engine: &mut Engine, tokens: usize) -> Vec<(u32, u64)> {
    let runner = engine.runner();
    let sequence = runner.sequence_open(CONTEXT);
    let (mut token, mut out) = (1, Vec::with_capacity(tokens));
    for i in 0..tokens {
        if i % CONTEXT == 0 {
            runner.sequence_truncate(sequence, 0);
            token = 1;
        }
        let logits = runner.forward(&[Row { sequence, token, logits: true }]).unwrap();
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).unwrap();
        token = best as u32;
        // FNV-1a.
        let digest = logits
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |h, x| (h ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01b3));
        out.push((token, digest));
    }
    runner.sequence_close(sequence);
    out
}

/// How often the group was at its limit.
fn times_at_limit(group: &Path) -> u64 {
    let v1 = fs::read_to_string(group.join("memory.failcnt")).ok().and_then(|text| text.trim().parse().ok());
    let v2 = || {
        let text = fs::read_to_string(group.join("memory.events")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("max ")?.trim().parse().ok())
    };
    v1.or_else(v2).expect("a group tells")
}

/// The one that decodes, beside a hog that leaves next to nothing and reads a file all the time.
fn beside_a_hog(group: &Path) {
    let tokens = env::var("AIRS_HOG_TOKENS").ok().map_or(TOKENS, |n| n.parse().expect("a number of tokens"));
    let model = Model::load(&test_models::smollm2(), &mut |_, _| ()).unwrap();
    let total_bytes = model.stats().total_bytes;
    // As the program does.
    if memory::program::pin(total_bytes) == 0 {
        eprintln!("skipped: this user may not lock the program's code");
        return;
    }
    let mut engine = Engine::new(Arc::new(model), &RunnerOptions { micro_batch: 8, ..Default::default() }).unwrap();
    // A whole context: code for long ones is touched, too.
    let expected = decode(&mut engine, CONTEXT);

    let mut hog = Hog::start(DECODE);
    // What can be taken from the page cache counts as free: of that the group keeps less than a bite.
    while reading(0).missing_bytes == 0 {
        hog.bite();
    }
    // A file of nothing but a length needs no disk, and its pages are the group's as any other's.
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LIMIT_BYTES).unwrap();
    writeln!(hog.1, "{}", file.path().display()).unwrap();
    let squeezed = times_at_limit(group);
    while times_at_limit(group) == squeezed {
        std::thread::yield_now();
    }

    let (reader, begin) = (Reader::default(), times_at_limit(group));
    let before = reader.major_faults().unwrap();
    let got = decode(&mut engine, tokens);
    let faults = reader.major_faults().unwrap() - before;
    let squeezed = times_at_limit(group) - begin;
    let resident_bytes = engine.model().resident_bytes().unwrap();
    eprintln!(
        "{tokens} tokens, {faults} major faults, {squeezed} times at the limit, {resident_bytes} of {total_bytes}"
    );
    assert!(squeezed > 0, "the hog was idle");
    assert_eq!((faults, resident_bytes), (0, total_bytes));
    // Each sequence begins alike.
    assert!(got.chunks(CONTEXT).all(|sequence| *sequence == expected[..sequence.len()]));
    drop(hog.1);
    assert!(hog.0.wait().unwrap().success());
}

/// A memory control group that this user may make, with the limit set.
fn group(test: &str) -> Option<PathBuf> {
    for (base, limit) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")] {
        let dir = Path::new(base).join(format!("airs-hog-{}-{}", test.len(), std::process::id()));
        if fs::create_dir(&dir).is_ok() {
            if fs::write(dir.join(limit), LIMIT_BYTES.to_string()).is_ok() {
                return Some(dir);
            }
            let _ = fs::remove_dir(&dir);
        }
    }
    eprintln!("skipped: this user may not make a memory control group");
    None
}

/// Runs `test` once more in a group of its own, from a copy of the program that was read there: its pages are the group's to
/// lose, too.
fn in_group(test: &str) {
    // Fetched outside of the group, if it is not there yet.
    test_models::smollm2();
    let Some(dir) = group(test) else { return };
    let home = tempfile::tempdir().unwrap();
    let child = again(test, dir.to_str().unwrap());
    let mut shell = Command::new("sh");
    shell.arg("-c").arg("echo $$ > \"$0\"/cgroup.procs && cp \"$1\" \"$2\" && shift && exec \"$@\"").arg(&dir);
    shell.arg(child.get_program()).arg(home.path().join("copy"));
    let output = shell.args(child.get_args()).env(ROLE, &dir).output().unwrap();
    let _ = fs::remove_dir(&dir);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{:?}\n{}\n{}", output.status, text(&output.stdout), text(&output.stderr));
    // What was measured.
    eprint!("{}", text(&output.stderr));
}

#[test]
fn a_hog_in_the_group_gets_what_is_idle_and_kills_nobody() {
    match env::var(ROLE).as_deref() {
        Ok("hog") => hog(),
        Ok(_) => pool(),
        Err(_) => in_group(POOL),
    }
}

#[test]
fn weights_stay_in_memory_and_nothing_is_read_back_while_a_hog_squeezes() {
    match env::var(ROLE).as_deref() {
        Ok("hog") => hog(),
        Ok(group) => beside_a_hog(Path::new(group)),
        Err(_) => in_group(DECODE),
    }
}
