//! The structure of the project, as a test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What each crate may import of the others; see ARCHITECTURE.md. `fixtures` stands beside the floors: anyone's tests may
/// use it.
const EDGES: &[(&str, &[&str])] = &[
    ("airs", &["gguf", "kernels", "memory", "residency", "model", "engine", "library"]),
    ("engine", &["residency", "model"]),
    ("model", &["gguf", "kernels", "memory", "residency"]),
    ("gguf", &[]),
    ("kernels", &[]),
    ("memory", &[]),
    ("residency", &[]),
    ("library", &[]),
    ("fixtures", &["gguf", "library", "memory"]),
];

/// The files that hold `unsafe`.
const UNSAFE: &[&str] = &[
    "crates/kernels/src/isa.rs",
    "crates/kernels/src/threads.rs",
    "crates/kernels/src/simd/avx2.rs",
    "crates/kernels/src/simd/avx512.rs",
    "crates/kernels/src/simd/neon.rs",
    "crates/memory/src/buffer.rs",
    "crates/memory/src/hugetlb.rs",
    "crates/memory/src/program.rs",
    "crates/memory/src/region.rs",
    "crates/memory/src/slots.rs",
    "crates/memory/src/sys/cpu_time.rs",
    "crates/memory/src/sys/lines.rs",
    "crates/memory/src/sys/page_cache.rs",
    "crates/memory/src/sys/ring.rs",
    "crates/memory/src/sys/slice.rs",
    "crates/memory/src/sys/uffd.rs",
    // The allocator that counts.
    "crates/gguf/tests/mutation.rs",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files of the project: those that git knows or would add.
fn files() -> Vec<String> {
    let list = ["ls-files", "--cached", "--others", "--exclude-standard"];
    // A clone may belong to another user than the one who tests it.
    let output =
        Command::new("git").args(["-c", "safe.directory=*"]).args(list).current_dir(root()).output().expect("git runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files: Vec<String> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter(|file| root().join(file).is_file())
        .map(str::to_owned)
        .collect();
    assert!(files.iter().any(|f| f == "Cargo.toml"), "{files:?}");
    files
}

fn rust_files() -> Vec<String> {
    files().into_iter().filter(|f| f.ends_with(".rs")).collect()
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// Names in the section `[header]` of a Cargo.toml.
fn dependencies(manifest: &str, header: &str) -> BTreeSet<String> {
    let lines = manifest.lines().skip_while(|l| l.trim() != header).skip(1).take_while(|l| !l.starts_with('['));
    let name = |l: &str| l.split(['=', '.', ' ']).next().unwrap_or("").to_owned();
    lines.filter(|l| !l.trim_start().starts_with('#') && !l.trim().is_empty()).map(name).collect()
}

#[test]
fn crates_import_only_what_stands_below_them() {
    let names: BTreeSet<&str> = EDGES.iter().map(|(name, _)| *name).collect();
    let folders: BTreeSet<String> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| root().join("crates").join(name).join("Cargo.toml").exists())
        .collect();
    let listed: BTreeSet<String> = names.iter().filter(|n| **n != "airs").map(|n| (*n).to_owned()).collect();
    assert_eq!(folders, listed, "every crate has a row");
    for (name, allowed) in EDGES {
        let file = if *name == "airs" { "Cargo.toml".to_owned() } else { format!("crates/{name}/Cargo.toml") };
        let manifest = read(&file);
        // Tests may also use what the interface of `fixtures` is made of.
        let beside: &[(&str, &[&str])] =
            &[("[dependencies]", &[]), ("[dev-dependencies]", &["fixtures", "gguf"]), ("[build-dependencies]", &[])];
        for (header, beside) in beside {
            for found in dependencies(&manifest, header).iter().filter(|d| names.contains(d.as_str())) {
                assert!(
                    allowed.contains(&found.as_str()) || beside.contains(&found.as_str()),
                    "{file} {header}: {found}"
                );
            }
        }
        for unseen in ["[target.", "[dependencies.", "[dev-dependencies.", "[build-dependencies."] {
            assert!(!manifest.contains(unseen), "{file}: this test does not see dependencies under {unseen}…");
        }
        assert!(manifest.contains("[lints]\nworkspace = true"), "{file}: the lints are those of the workspace");
    }
}

#[test]
fn unsafe_is_only_in_its_rooms() {
    let mut found = BTreeSet::new();
    for file in rust_files().iter().filter(|f| *f != "tests/tidy.rs") {
        let text = read(file);
        let code: String = text.lines().map(|l| l.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
        let words: BTreeSet<&str> = code.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        if words.contains("unsafe") {
            found.insert(file.clone());
        }
    }
    assert_eq!(found, UNSAFE.iter().map(|file| (*file).to_owned()).collect(), "files with unsafe code and their list");
}

#[test]
fn the_environment_is_read_in_one_place() {
    let mut found = BTreeSet::new();
    // What the tests share may look for the store; build scripts would be told by cargo.
    let sources = |f: &&String| f.contains("src/") && !f.starts_with("crates/fixtures/");
    for file in rust_files().iter().filter(sources) {
        if ["env::var", "env::vars", "env::var_os", "env::set_var"].iter().any(|call| read(file).contains(call)) {
            found.insert(file.clone());
        }
    }
    assert_eq!(found, BTreeSet::from(["src/flags.rs".to_owned()]));
}

/// The modules that `text` declares without a body, with their `#[path]`.
fn declared_modules(text: &str) -> Vec<(String, Option<String>)> {
    let mut path = None;
    let mut modules = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("#[path = \"") {
            path = rest.strip_suffix("\"]").map(str::to_owned);
        }
        let bare = line.strip_prefix("pub ").or_else(|| line.strip_prefix("pub(crate) ")).unwrap_or(line);
        let bare = bare.strip_prefix("pub(super) ").unwrap_or(bare);
        if let Some(name) = bare.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';')) {
            modules.push((name.to_owned(), path.take()));
        }
    }
    modules
}

/// Adds `file` and all modules below it to `reached`.
fn reach(file: &Path, reached: &mut BTreeSet<PathBuf>) {
    if !reached.insert(file.to_owned()) {
        return;
    }
    let Ok(text) = fs::read_to_string(file) else { return };
    let dir = file.parent().unwrap();
    let stem = file.file_stem().unwrap().to_str().unwrap();
    let is_root = ["main", "lib", "mod", "build"].contains(&stem) || is_target(file);
    let below = if is_root { dir.to_owned() } else { dir.join(stem) };
    for (name, path) in declared_modules(&text) {
        match path {
            Some(path) => reach(&dir.join(path), reached),
            None => {
                reach(&below.join(format!("{name}.rs")), reached);
                reach(&below.join(&name).join("mod.rs"), reached);
            }
        }
    }
}

/// Whether cargo compiles `file` as a target of its own.
fn is_target(file: &Path) -> bool {
    let dir = file.parent().unwrap();
    let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    const FOLDERS: [&str; 5] = ["tests", "benches", "examples", "bin", "fuzz_targets"];
    let stem = file.file_stem().unwrap().to_str().unwrap();
    match stem {
        "lib" | "build" => ["src"].contains(&name(dir).as_str()) || dir.join("Cargo.toml").exists(),
        "main" => name(dir) == "src" || dir.parent().is_some_and(|d| FOLDERS.contains(&name(d).as_str())),
        _ => FOLDERS.contains(&name(dir).as_str()),
    }
}

#[test]
fn no_file_is_orphaned() {
    let files: BTreeSet<PathBuf> = rust_files().iter().map(|f| root().join(f)).collect();
    let mut reached = BTreeSet::new();
    for target in files.iter().filter(|f| is_target(f)) {
        reach(target, &mut reached);
    }
    let orphans: Vec<&PathBuf> = files.iter().filter(|f| !reached.contains(*f)).collect();
    assert!(orphans.is_empty(), "no target or module declares {orphans:?}");
    assert!(files.len() > 20);
}

#[test]
fn no_text_names_a_machine_or_a_registry() {
    // In pieces, so that this file does not hold them.
    let words: Vec<String> = [
        ["/tmp", "/models"],
        ["/work", "/"],
        ["/root", "/"],
        ["/home", "/"],
        ["pypi", ".org"],
        ["files.python", "hosted"],
        ["crates", ".io"],
        ["npmjs", ".org"],
        ["index", "-url"],
    ]
    .iter()
    .map(|pieces| pieces.concat())
    .collect();
    for file in files().iter().filter(|f| !f.ends_with(".lock")) {
        // What is not text has no words.
        let Ok(text) = fs::read_to_string(root().join(file)) else { continue };
        for (number, line) in text.lines().enumerate() {
            let found = words.iter().find(|w| line.contains(w.as_str()));
            assert!(found.is_none(), "{file}:{}: {}", number + 1, line.trim());
        }
    }
}

#[test]
fn nothing_is_left_to_be_done_or_left_out() {
    let marks: Vec<String> = [["to", "do!("], ["unimple", "mented!("], ["#[ig", "nore"], ["FIX", "ME"], ["XX", "X"]]
        .map(|p| p.concat())
        .to_vec();
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for file in rust_files() {
        let text = read(&file);
        if let Some(line) = text.lines().find(|l| marks.iter().any(|m| l.contains(m))) {
            found.insert(file, line.trim().to_owned());
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}
