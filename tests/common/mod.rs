//! Runs the program as a user would.
#![allow(dead_code, reason = "each suite uses a part of it")]

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Once;

use serde_json::Value;

/// The user's store: the one that the test models were put into.
pub(crate) fn user_store() -> PathBuf {
    let model = fixtures::test_models::smollm2();
    model.ancestors().find(|dir| dir.join("locks").is_dir()).unwrap().to_owned()
}

/// A store with the same models, so that what runs leave behind (receipts, rates, locks) does not come into the user's.
pub(crate) fn store() -> PathBuf {
    let store = Path::new(env!("CARGO_TARGET_TMPDIR")).join("store");
    fs::create_dir_all(&store).unwrap();
    // One test of a suite makes the link, and anew if the user's store was another one before.
    static LINK: Once = Once::new();
    LINK.call_once(|| {
        let (models, link) = (user_store().join("models"), store.join("models"));
        if fs::read_link(&link).ok().as_deref() != Some(&models) {
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(&models, &link).unwrap();
        }
    });
    store
}

/// The program with nothing in its environment but a store and the search path.
pub(crate) fn airs(store: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_airs"));
    command.env_clear().env("AIRS_HOME", store).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // No test reaches a hub, and none waits for it.
    command.env("HF_ENDPOINT", "http://127.0.0.1:1");
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command
}

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn of(output: Output) -> Ended {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// The result, which must be one line of JSON after success.
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert_eq!(self.stdout.lines().count(), 1, "{self:?}");
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// Asserts a failure with this exit code whose one line contains all of `words`.
    pub(crate) fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is missing: {self:?}");
        }
    }
}

/// Runs with `args`.
pub(crate) fn run(store: &Path, args: &[&str]) -> Ended {
    Ended::of(airs(store).args(args).output().unwrap())
}

/// Runs with `args` and `input` on standard input.
pub(crate) fn run_with_input(store: &Path, args: &[&str], input: &str) -> Ended {
    let mut child = airs(store).args(args).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    Ended::of(child.wait_with_output().unwrap())
}

/// A memory control group of this test's own, removed when it is dropped.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// `None` where this user may not make one.
    pub(crate) fn new(name: &str, limit_bytes: u64) -> Option<Cgroup> {
        for base in ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"] {
            let dir = Path::new(base).join(format!("airs-{name}-{}", std::process::id()));
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Cgroup(dir);
            if group.limit(limit_bytes) {
                return Some(group);
            }
        }
        eprintln!("skipped: this user may not make a memory control group");
        None
    }

    /// Sets the limit; whether that could be done.
    pub(crate) fn limit(&self, limit_bytes: u64) -> bool {
        let files = ["memory.limit_in_bytes", "memory.max"].map(|name| self.0.join(name));
        files.iter().any(|file| file.exists() && fs::write(file, limit_bytes.to_string()).is_ok())
    }

    /// Bytes that are charged to it now and that were at most; `None` where the kernel does not keep the latter.
    pub(crate) fn used_and_peak_bytes(&self) -> Option<(u64, u64)> {
        let read = |name| fs::read_to_string(self.0.join(name)).ok()?.trim().parse().ok();
        let used = read("memory.usage_in_bytes").or_else(|| read("memory.current"))?;
        Some((used, read("memory.max_usage_in_bytes").or_else(|| read("memory.peak"))?))
    }

    /// Reads `file` inside, through the page cache.
    pub(crate) fn read(&self, file: &Path) {
        let read = self.inside().arg("cat").arg(file).stdout(Stdio::null()).status();
        assert!(read.unwrap().success());
    }

    /// A command that runs its arguments inside.
    fn inside(&self) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg("echo $$ > \"$0\"/cgroup.procs && exec \"$@\"").arg(&self.0);
        command
    }

    /// Runs the program with `args` inside.
    pub(crate) fn run(&self, home: &Path, args: &[&str]) -> Ended {
        let program = airs(home);
        let mut command = self.inside();
        command.arg(program.get_program()).args(args);
        command.env_clear().env("AIRS_HOME", home).env("PATH", std::env::var_os("PATH").unwrap_or_default());
        Ended::of(command.stdin(std::process::Stdio::null()).output().unwrap())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// `model`'s header with `change` applied to it, followed by zeros up to the model's length (without taking that much
/// space).
pub(crate) fn changed_header(model: &Path, to: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    use std::io::Read;
    let mut header = Vec::new();
    File::open(model).unwrap().take(4 << 20).read_to_end(&mut header).unwrap();
    change(&mut header);
    fs::write(to, &header).unwrap();
    File::options().write(true).open(to).unwrap().set_len(fs::metadata(model).unwrap().len()).unwrap();
}

/// Where `needle` is in `haystack`.
pub(crate) fn position(haystack: &[u8], needle: &[u8]) -> usize {
    haystack.windows(needle.len()).position(|w| w == needle).unwrap()
}
