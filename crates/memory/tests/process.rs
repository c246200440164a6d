//! What ends a process, and what it leaves behind. Each test runs itself again in a process of its own.

use fixtures::faults::{Fault, FaultySource, Gate};
use memory::backing::{Backing, Choice};
use memory::pager::{Extent, Options, Pager, Transcode, Window};
use memory::source::ByteSource;
use memory::{Error, Region};
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::sync::Arc;

const CHILD: &str = "AIRS_TEST_CHILD";
const UNIT: usize = 2 << 20;
const SIGSEGV: i32 = 11;

struct Same;

impl Transcode for Same {
    fn source_range(&self, part: Range<usize>) -> Range<u64> {
        part.start as u64..part.end as u64
    }

    fn write(&self, _: Range<usize>, source: &[u8], out: &mut [u8]) {
        out.copy_from_slice(source);
    }
}

fn start(source: Arc<dyn ByteSource>, choice: Choice, options: Options) -> Result<Pager, Error> {
    let len = source.len_bytes() as usize;
    let region = Arc::new(Region::reserve(len, UNIT, choice)?);
    let extent = Extent { place: 0..len, source, transcode: Arc::new(Same) };
    Ok(Pager::start(region, vec![extent], &[0..len / 2, len / 2..len], options))
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// This test, in a process of its own.
fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(CHILD, "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn without_a_trap_touching_what_is_missing_ends_the_process_and_shows_no_zero() {
    if is_child() {
        let source = Arc::new(FaultySource::new("never read", vec![7; 2 * UNIT]));
        let options = Options { window: Window::Stages(0), trap: false, ring: false };
        let pager = start(source, Choice::Only(Backing::Unpinned), options).expect("a few MiB");
        println!("seen: {}", pager.region().bytes(UNIT..UNIT + 1)[0]);
        return;
    }
    let output = child("without_a_trap_touching_what_is_missing_ends_the_process_and_shows_no_zero").output();
    let output = output.expect("a process");
    assert_eq!(output.status.signal(), Some(SIGSEGV), "{output:?}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("seen"), "{output:?}");
}

#[test]
fn a_process_killed_in_mid_load_leaves_its_huge_pages_free() {
    let name = "a_process_killed_in_mid_load_leaves_its_huge_pages_free";
    if is_child() {
        let gate = Arc::new(Gate::default());
        let source = FaultySource::new("stalled", vec![7; 4 * UNIT]).with(3 * UNIT as u64, Fault::Stall(gate));
        let pager = start(Arc::new(source), Choice::Only(Backing::Huge), Options::default()).expect("huge pages");
        pager.ensure(0..UNIT).expect("the stall is elsewhere");
        println!("\nloading");
        // For ever: until the parent kills this process.
        let _ = pager.ensure(3 * UNIT..4 * UNIT);
        return;
    }
    let huge = &memory::backing::probe(4 * UNIT)[0];
    if !huge.available {
        eprintln!("skipped: {}", huge.reason);
        return;
    }
    let free = || memory::backing::probe(4 * UNIT)[0].reason.clone();
    let before = free();
    let mut process = child(name).spawn().expect("a process");
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    assert!(lines.any(|line| line.expect("text") == "loading"));
    assert_ne!(free(), before, "the pages are taken");
    process.kill().expect("a process to kill");
    assert_eq!(process.wait().expect("its end").signal(), Some(9));
    assert_eq!(free(), before);
}

#[test]
fn a_process_without_any_rights_still_fills_and_traps() {
    let name = "a_process_without_any_rights_still_fills_and_traps";
    const NOBODY: u32 = 65534;
    if is_child() {
        let limit = rustix::process::Rlimit { current: Some(64 << 10), maximum: Some(64 << 10) };
        rustix::process::setrlimit(rustix::process::Resource::Memlock, limit).expect("less is always allowed");
        let source = Arc::new(FaultySource::new("plain", vec![7; 2 * UNIT]));
        let options = Options { window: Window::Stages(0), ..Options::default() };
        let pager = start(source, Choice::Best, options).expect("the last resort");
        assert!(matches!(pager.region().backing(), Backing::Unpinned | Backing::Huge));
        if pager.stats().is_trapped {
            assert_eq!(pager.region().bytes(UNIT..UNIT + 1), [7]);
            assert_eq!(pager.stats().faults, 1);
        }
        pager.ensure(0..2 * UNIT).expect("a good source");
        assert!(pager.region().bytes(0..2 * UNIT).iter().all(|&b| b == 7));
        let locked =
            start(Arc::new(FaultySource::new("plain", vec![7; UNIT])), Choice::Only(Backing::Base), Options::default());
        let error = locked.expect_err("64 KiB is less than a unit").to_string();
        assert!(error.contains("65536 bytes") && error.contains("ulimit -l 2048"), "{error}");
        println!("\nfilled, trap {}", pager.stats().is_trapped);
        return;
    }
    let mut command = child(name);
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    match command.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && said.contains("filled, trap"), "{output:?}");
            if said.contains("trap false") {
                eprintln!("skipped: no userfaultfd for an unprivileged process");
            }
        }
        Err(e) => eprintln!("skipped: another user cannot run this test: {e}"),
    }
}
