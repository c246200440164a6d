//! Models with more experts than memory, as a user runs them: what is said of them, measured, explained and refused.

mod common;

use common::{Cgroup, Ended, run};
use fixtures::Rng;
use fixtures::route_trace::{RouteSpec, made_up};
use fixtures::tiny_model::{self, Architecture, TinySpec};
use gguf::TensorType;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A model with 256 experts of 72 KiB.
fn model(directory: &Path) -> PathBuf {
    let path = directory.join("tiny-moe.gguf");
    let spec = TinySpec { experts: 64, layers: 4, ..TinySpec::new(Architecture::Qwen3Moe, TensorType::Q4_K) };
    tiny_model::write(&path, &spec).expect("a small file");
    path
}

fn answer(home: &Path, model: &Path, more: &[&str]) -> Ended {
    let model = model.display().to_string();
    let prompt =
        ["run", "-m", &model, "--tokens", "5,9,13,2,7,1", "-n", "24", "--temp", "1", "--seed", "3", "-o", "json"];
    run(home, &[&prompt[..], more].concat())
}

#[test]
fn an_answer_is_the_same_with_few_experts_in_memory_and_its_metrics_tell_what_they_cost() {
    let home = tempfile::tempdir().expect("a directory");
    let model = model(home.path());
    let file = home.path().join("metrics.jsonl").display().to_string();
    let want = answer(home.path(), &model, &["--cache-mb", "all"]).json();
    assert_eq!(want["mode"], "resident");
    assert_eq!(want["lossy"], serde_json::json!([]));
    for cache in ["0", "2"] {
        let ended = answer(
            home.path(),
            &model,
            &["--cache-mb", cache, "--metrics", &file, "--io-threads", "1", "--guess-experts", "always"],
        );
        assert!(ended.stderr.contains("of 256 experts"), "{}", ended.stderr);
        let got = ended.json();
        assert_eq!((&got["tokens"], &got["mode"]), (&want["tokens"], &Value::from("streamed")));

        let text = std::fs::read_to_string(&file).expect("metrics");
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let (config, summary) = (&lines[0], &lines[lines.len() - 1]);
        assert_eq!((&config["kind"], &config["io_threads"]), (&Value::from("config"), &Value::from(1)));
        assert!(lines.len() >= 24 && lines[1..lines.len() - 1].iter().all(|line| line["kind"] == "step"), "{text}");
        for line in &lines[1..lines.len() - 1] {
            assert!(line["rss_bytes"].as_u64() > Some(0) && line["major_faults"].is_u64(), "{line}");
            assert_eq!(line["dense_resident_frac"], 1.0);
        }
        let number = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("{key} in {summary}"));
        assert!(number("misses") > 0.0 && number("evictions") > 0.0 && number("expert_read_bytes") > 0.0);
        assert!(number("guessed") > number("guessed_right") && number("guessed_wrong_bytes") > 0.0, "{summary}");
        assert!(number("experts_routed") >= 4.0 * 24.0 && number("experts_dropped") == 0.0);
        assert!(number("token_demand_MiB") > number("layer_demand_MiB") && number("cache_budget_MiB") > 0.0);
        assert!(number("wall_ms") > 0.0 && number("compute_ms") > 0.0);
        let why = run(home.path(), &["why", &file, "-o", "json"]).json();
        assert!(why["story"].as_str().is_some_and(|story| story.contains("tiny-moe.gguf (streamed)")), "{why}");
        assert!(why["advice"].as_str().is_some_and(|advice| !advice.is_empty()), "{why}");
    }
    run(home.path(), &["why", &model.display().to_string()]).fails(1, &["tiny-moe.gguf"]);
}

#[test]
fn a_plan_tells_the_experts_in_memory_and_the_cliff() {
    let home = tempfile::tempdir().expect("a directory");
    let model = model(home.path()).display().to_string();
    let plan = |more: &[&str]| run(home.path(), &[&["plan", &model, "-o", "json"], more].concat()).json();
    let few = plan(&["--cache-mb", "0"]);
    assert_eq!(few["mode"], "streamed");
    let text = few["reasons"].to_string();
    assert!(text.contains("of 256 are in memory") && text.contains("below the cliff"), "{text}");
    let all = plan(&["--cache-mb", "all"]);
    assert_eq!((&all["mode"], &all["bytes"]["experts"]), (&Value::from("resident"), &Value::from(0)));
    let bytes = |plan: &Value, key: &str| plan["bytes"][key].as_u64().expect("bytes");
    assert!(bytes(&few, "experts") > 0 && bytes(&few, "total") < bytes(&all, "total"));
    assert_eq!(plan(&["--cache-mb", "2", "--cache-floor-mb", "3"])["mode"], "refused");
}

#[test]
fn settings_that_change_answers_are_named_and_those_without_meaning_refused() {
    let home = tempfile::tempdir().expect("a directory");
    let model = model(home.path());
    let fewer = answer(home.path(), &model, &["--n-expert-used", "1"]);
    assert!(fewer.stderr.contains("lossy: --n-expert-used 1"), "{}", fewer.stderr);
    assert_eq!(fewer.json()["lossy"], serde_json::json!(["--n-expert-used 1"]));
    let dropped = answer(home.path(), &model, &["--cache-mb", "3", "--drop-cold-experts", "0.75"]).json();
    assert_eq!(dropped["lossy"], serde_json::json!(["--drop-cold-experts 0.75"]));
    for bad in [&["--drop-cold-experts", "0.5"][..], &["--cache-mb", "0", "--drop-cold-experts", "0.5"]] {
        answer(home.path(), &model, bad).fails(2, &["--drop-cold-experts", "cache"]);
    }
    for bad in ["NaN", "1.5", "-0.1"] {
        let ended = answer(home.path(), &model, &["--cache-mb", "3", &format!("--drop-cold-experts={bad}")]);
        assert_eq!((ended.code, &ended.stdout[..]), (Some(2), ""), "{ended:?}");
    }
    answer(home.path(), &model, &["--n-expert-used", "9"]).fails(1, &["--n-expert-used", "3 experts"]);
}

#[test]
fn recorded_routing_is_replayed_and_the_second_run_of_a_model_begins_warm() {
    let home = tempfile::tempdir().expect("a directory");
    let model = model(home.path());
    let trace = home.path().join("trace.csv");
    let spec = RouteSpec { layers: 4, experts: 64, used: 3, prompt: 6, decode: 20, again: 0.4, seed: 2 };
    std::fs::write(&trace, made_up(&spec)).expect("room");
    let (model, trace) = (model.display().to_string(), trace.display().to_string());
    let args = ["bench", "-m", &model, "--cache-mb", "3", "--route-trace", &trace, "-o", "json"];
    let result = run(home.path(), &args).json();
    assert_eq!((&result["prompt_tokens"], &result["predicted_tokens"]), (&Value::from(6), &Value::from(20)));
    assert!(result["cache_hit_pct"].as_f64().is_some_and(|pct| pct > 0.0 && pct < 100.0), "{result}");
    assert!(result["read_bytes_per_token"].as_f64().is_some_and(|bytes| bytes > 0.0), "{result}");

    answer(home.path(), Path::new(&model), &["--cache-mb", "3"]).json();
    // The way to read was found by the first run, and the last one found it.
    let ways = std::fs::read_to_string(home.path().join("lanes.json")).expect("the way that was found");
    assert!(ways.contains("\"lanes\":"), "{ways}");
    let kept = std::fs::read_dir(home.path().join("experts")).expect("what was hot").count();
    assert_eq!(kept, 1);
}

/// Whatever the budget: either it is refused with numbers, or the answer is the same, and the process stays within the budget
/// but for code and the header, which a control group of 64 MiB more has room for.
#[test]
fn fifty_random_budgets_are_refused_with_numbers_or_served_exactly() {
    const MIB: u64 = 1 << 20;
    let home = tempfile::tempdir().expect("a directory");
    let model = home.path().join("wide-moe.gguf");
    let spec = TinySpec {
        experts: 64,
        layers: 6,
        embedding_len: 512,
        heads: 8,
        expert_feed_forward_len: 512,
        ..TinySpec::new(Architecture::Qwen3Moe, TensorType::Q4_K)
    };
    tiny_model::write(&model, &spec).expect("room");
    let all_bytes = std::fs::metadata(&model).expect("a file").len();
    let want = answer(home.path(), &model, &["--cache-mb", "all"]).json();
    assert!(all_bytes > 150 * MIB && want["mode"] == "resident", "{want}");

    let (mut rng, mut modes) = (Rng::new(50), std::collections::BTreeMap::<String, usize>::new());
    let Some(group) = Cgroup::new("budgets", all_bytes) else { return };
    let name = model.display().to_string();
    for _ in 0..50 {
        let budget_bytes = 4 * MIB + rng.below(all_bytes + 32 * MIB);
        assert!(group.limit(budget_bytes + 64 * MIB));
        let budget = budget_bytes.to_string();
        let args = [
            &["run", "-m", &name, "--tokens", "5,9,13,2,7,1", "-n", "24", "--temp", "1", "--seed", "3"][..],
            &["-o", "json", "-c", "64", "--memory", &budget],
        ];
        let ended = group.run(home.path(), &args.concat());
        let mode = if ended.code == Some(0) {
            let got = ended.json();
            assert_eq!(got["tokens"], want["tokens"], "{budget_bytes}: {got}");
            got["mode"].as_str().expect("a mode").to_owned()
        } else {
            ended.fails(1, &["does not fit", "MiB"]);
            "refused".to_owned()
        };
        *modes.entry(mode).or_default() += 1;
    }
    let met: Vec<&str> = modes.keys().map(String::as_str).collect();
    assert_eq!(met, ["refused", "resident", "streamed"], "{modes:?}");
}
