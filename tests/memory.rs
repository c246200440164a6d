//! Budgets, plans, and the ledger against the kernel.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{Cgroup, Ended, run};
use fixtures::test_models;
use serde_json::Value;
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_plan_has_the_bytes_by_line_and_they_are_the_total() {
    let home = TempDir::new().unwrap();
    let model = test_models::smollm2();
    let plan = run(home.path(), &["plan", text(&model), "--memory", "2G", "-o", "json"]).json();
    assert_eq!(plan["mode"], "resident");
    let line = |name: &str| plan["bytes"][name].as_u64().unwrap();
    assert_eq!(["weights", "kv", "scratch", "io", "base"].map(line).iter().sum::<u64>(), line("total"));
    assert_eq!(plan["kv_bytes_per_token"], 23040);
    assert_eq!(plan["kv_bytes_per_token_by_type"]["q8_0"], 23040 / 64 * 34);
    assert_eq!((&plan["context"], &plan["context_max"]), (&Value::from(8192), &Value::from(8192)));
    let speed = plan["forecast"]["predicted_per_second"].as_f64().unwrap();
    assert!(speed > 0.0 && plan["forecast"]["ttft_ms"].as_f64().unwrap() > 0.0);
    assert!(plan["reasons"].as_array().unwrap().is_empty());
    let words = run(home.path(), &["plan", text(&model), "--memory", "2G"]);
    assert!(words.stdout.contains("(forecast)") && words.stdout.contains("resident"), "{words:?}");
}

#[test]
fn a_smaller_budget_gives_a_smaller_context_and_then_a_refusal_with_the_arithmetic() {
    let home = TempDir::new().unwrap();
    let model = test_models::smollm2();
    let plan = |memory: &str| run(home.path(), &["plan", text(&model), "--memory", memory, "-o", "json"]).json();
    let some = plan("200MiB");
    let context = some["context_max"].as_u64().unwrap();
    assert!(some["mode"] == "resident" && context > 16 && context < 8192, "{some}");
    assert!(some["bytes"]["total"].as_u64().unwrap() <= 200 << 20);
    assert!(some["reasons"][0].as_str().unwrap().contains(&context.to_string()), "{some}");
    let none = plan("90MiB");
    assert_eq!((&none["mode"], &none["context_max"]), (&Value::from("refused"), &Value::from(0)));
    assert_eq!(none["forecast"]["predicted_per_second"], Value::Null);
    run(home.path(), &["run", text(&model), "--memory", "90MiB", "Hi"])
        .fails(1, &["weights 92", "scratch", "the budget is 90.0 MiB"]);
    run(home.path(), &["run", text(&model), "--memory", "90MiB", "--force", "Hi"]).fails(1, &["does not fit"]);
}

#[test]
fn a_risk_is_refused_unless_it_is_wanted() {
    let home = TempDir::new().unwrap();
    let model = test_models::smollm2();
    let args = ["run", text(&model), "--raw", "-n", "2", "--temp", "0", "-o", "json", "Once upon"];
    let refused = run(home.path(), &[&args[..], &["--memory", "100T"]].concat());
    refused.fails(1, &["--memory", "--force"]);
    let forced = run(home.path(), &[&args[..], &["--memory", "100T", "--force"]].concat()).json();
    // A context that would not fit in whole, of which little is used.
    let small = ["--memory", "200MiB", "-c", "8000"];
    run(home.path(), &[&args[..], &small].concat()).fails(1, &["8000", "would fit", "--force"]);
    let small = run(home.path(), &[&args[..], &small, &["--force"]].concat()).json();
    assert_eq!(forced["tokens"], small["tokens"]);
}

#[test]
fn other_machines_can_be_planned_for() {
    let home = TempDir::new().unwrap();
    let model = test_models::qwen2_5_coder();
    let total = |device: &str| {
        let plan = run(home.path(), &["plan", text(&model), "--device", device, "-o", "json"]).json();
        assert_eq!(plan["mode"], "resident");
        plan["budget_bytes"].as_u64().unwrap()
    };
    let budgets = ["2G", "4G", "8G", "16G"].map(total);
    assert!(budgets.is_sorted() && budgets[0] > 1 << 30 && budgets[3] < 16 << 30, "{budgets:?}");
}

#[test]
fn the_ledger_is_within_two_percent_of_the_kernel_and_the_plan_said_so() {
    let home = TempDir::new().unwrap();
    for model in [test_models::smollm2(), test_models::gemma3(), test_models::qwen2_5_coder()] {
        for context in ["512", "2048"] {
            let flags = [text(&model), "-c", context, "--memory", "1500MiB", "-o", "json"];
            let mem = run(home.path(), &[&["mem"], &flags[..]].concat()).json();
            let error = mem["error_percent"].as_f64().unwrap();
            assert!(error.abs() <= 2.0, "{mem}");
            let sum: u64 = mem["lines"]
                .as_object()
                .unwrap()
                .iter()
                .filter(|(k, _)| *k != "total")
                .map(|(_, v)| v.as_u64().unwrap())
                .sum();
            assert_eq!(mem["lines"]["total"].as_u64(), Some(sum));
            assert_eq!(mem["weights"]["resident_percent"], 100.0, "{mem}");
            let plan = run(home.path(), &[&["plan"], &flags[..]].concat()).json();
            let planned = plan["bytes"]["total"].as_f64().unwrap();
            let peak = mem["kernel"]["peak_rss_bytes"].as_f64().unwrap();
            assert!((planned / peak - 1.0).abs() <= 0.02, "{context}: {planned} planned, {peak} measured");
        }
    }
}

#[test]
fn a_run_leaves_a_receipt_that_the_next_forecast_uses() {
    let home = TempDir::new().unwrap();
    let model = test_models::smollm2();
    run(home.path(), &["run", text(&model), "--raw", "-n", "40", "--temp", "0", "-o", "json", "Once upon"]).json();
    let receipts = fs::read_to_string(home.path().join("receipts.jsonl")).unwrap();
    assert_eq!(receipts.lines().count(), 1, "{receipts}");
    let plan = run(home.path(), &["plan", text(&model)]);
    assert!(plan.stdout.contains("from 1 run"), "{plan:?}");
}

#[test]
fn doctor_names_what_is_there_and_how_to_enable_what_is_not() {
    let home = TempDir::new().unwrap();
    let report = run(home.path(), &["doctor", "-o", "json"]).json();
    let all = report["capabilities"].as_array().unwrap();
    let names: Vec<&str> = all.iter().map(|c| c["name"].as_str().unwrap()).collect();
    for name in [
        "hugetlb pool",
        "transparent huge pages",
        "mlock limit",
        "userfaultfd",
        "io_uring",
        "O_DIRECT",
        "PSI",
        "control group",
        "DAMON",
        "avx2",
        "memory bandwidth",
        "storage",
    ] {
        assert!(names.contains(&name), "{name} is missing in {names:?}");
    }
    assert!(all.iter().all(|c| !c["gives"].as_str().unwrap().is_empty()));
    assert!(all.iter().all(|c| c["available"] != true || c["enable"].is_null()));
}

#[test]
fn everything_works_without_privileges() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let home = TempDir::new().unwrap();
    fs::set_permissions(home.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // A copy that anybody may read, wherever the store is.
    let model = home.path().join("model.gguf");
    fs::copy(test_models::smollm2(), &model).unwrap();
    let program = home.path().join("airs");
    fs::copy(env!("CARGO_BIN_EXE_airs"), &program).unwrap();
    let is_root = fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0);
    for args in [
        &["plan", text(&model), "-o", "json"][..],
        &["mem", text(&model), "-c", "64", "-o", "json"],
        &["doctor", "-o", "json"],
        &["run", text(&model), "--raw", "-n", "2", "-o", "json", "Once"],
    ] {
        // Not even memory may be locked, but for what every container allows.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "ulimit -l 64 && exec \"$0\" \"$@\""]).arg(&program);
        command.env_clear().env("AIRS_HOME", home.path()).args(args).current_dir(home.path());
        if is_root {
            command.uid(65534).gid(65534);
        } else {
            eprintln!("this user has no privileges to give up: the test runs as it is");
        }
        Ended::of(command.output().unwrap()).json();
    }
}

#[test]
fn in_a_control_group_the_budget_is_what_its_limit_leaves() {
    let Some(group) = Cgroup::new("budget", 700 << 20) else { return };
    let home = TempDir::new().unwrap();
    let model = test_models::qwen2_5_coder();
    let plan = group.run(home.path(), &["plan", text(&model), "-o", "json"]).json();
    let budget = plan["budget_bytes"].as_u64().unwrap();
    assert!(budget > 600 << 20 && budget < 700 << 20, "{plan}");
    let context = plan["context_max"].as_u64().unwrap();
    assert!(context > 16 && context < 32768, "{plan}");
    // The whole of that context is really there.
    let mem = group.run(home.path(), &["mem", text(&model), "-o", "json"]).json();
    assert!(mem["context"].as_u64().unwrap() > 1000 && mem["error_percent"].as_f64().unwrap().abs() <= 2.0, "{mem}");
    let args = ["run", text(&model), "--raw", "-n", "8", "--temp", "0", "-o", "json", "fn main() {"];
    let inside = group.run(home.path(), &args).json();
    assert_eq!(inside["tokens"], run(home.path(), &args).json()["tokens"]);
}

#[test]
fn loading_takes_no_second_copy_and_a_full_page_cache_makes_room() {
    const LIMIT_BYTES: u64 = 700 << 20;
    let Some(group) = Cgroup::new("copy", LIMIT_BYTES) else { return };
    let home = TempDir::new().unwrap();
    let model = test_models::qwen2_5_coder();
    let args = ["run", text(&model), "--raw", "-n", "8", "-c", "64", "--temp", "0", "-o", "json", "fn main() {"];
    let empty = group.run(home.path(), &args).json();
    let Some((_, peak)) = group.used_and_peak_bytes() else {
        eprintln!("skipped: this kernel does not keep a group's peak");
        return;
    };
    let plan = run(home.path(), &["plan", text(&model), "-c", "64", "-o", "json"]).json();
    let [weights, kv, scratch] = ["weights", "kv", "scratch"].map(|line| plan["bytes"][line].as_u64().unwrap());
    assert!(peak > weights && peak <= weights + kv + scratch + (64 << 20), "{peak} bytes at most: {plan}");
    // A file of nothing but a length fills the cache without a disk.
    let filler = home.path().join("filler");
    fs::File::create(&filler).unwrap().set_len(LIMIT_BYTES).unwrap();
    group.read(&filler);
    let (used, _) = group.used_and_peak_bytes().unwrap();
    assert!(used > LIMIT_BYTES / 10 * 9, "{used} bytes: the cache is full");
    let full = group.run(home.path(), &args).json();
    assert_eq!(full["tokens"], empty["tokens"]);
}

#[test]
fn a_control_group_that_is_too_small_is_a_refusal_and_no_kill() {
    let Some(group) = Cgroup::new("small", 400 << 20) else { return };
    let home = TempDir::new().unwrap();
    let model = test_models::qwen2_5_coder();
    let refused = group.run(home.path(), &["run", text(&model), "Hi"]);
    refused.fails(1, &["does not fit", "the budget is"]);
}
