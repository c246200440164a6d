//! The program from outside: many sessions, guesses, contexts that overflow.

mod common;

use std::fs;

use common::{run, store};
use fixtures::tiny_model::{self, Architecture, TinySpec};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROMPT: [&str; 9] = ["run", "-m", "smollm2", "--tokens", "1,9690,198,2683,359", "--temp", "0", "-o", "json"];

fn answer(args: &[&str]) -> Value {
    run(&store(), &[&PROMPT[..], args].concat()).json()
}

#[test]
fn guesses_change_no_token_and_are_counted() {
    let args = ["-n", "48", "--ignore-eos"];
    let plain = answer(&args);
    assert!(plain["timings"].get("draft_n").is_none());
    let lookup = answer(&[&args[..], &["--speculate", "lookup"]].concat());
    // The model itself: every guess is right.
    let draft = answer(&[&args[..], &["--speculate", "smollm2"]].concat());
    assert_eq!((&lookup["tokens"], &draft["tokens"]), (&plain["tokens"], &plain["tokens"]));
    let count = |result: &Value, key: &str| result["timings"][key].as_u64().unwrap();
    assert!(count(&draft, "draft_n") > 8, "{draft}");
    assert_eq!(count(&draft, "draft_n"), count(&draft, "draft_n_accepted"));
}

#[test]
fn a_draft_model_with_another_vocabulary_is_an_error_with_the_numbers() {
    let gemma = fixtures::test_models::gemma3();
    let ended = run(&store(), &[&PROMPT[..], &["--speculate", gemma.to_str().unwrap()]].concat());
    assert_eq!(ended.code, Some(1));
    let last = ended.stderr.lines().last().unwrap();
    assert!(last.contains("262144") && last.contains("49152"), "{last}");
}

#[test]
fn nothing_is_guessed_while_experts_come_from_storage() {
    let home = TempDir::new().unwrap();
    let path = home.path().join("tiny-moe.gguf");
    let spec = TinySpec { experts: 64, layers: 4, ..TinySpec::new(Architecture::Qwen3Moe, gguf::TensorType::Q4_K) };
    tiny_model::write(&path, &spec).unwrap();
    let args =
        ["run", "-m", path.to_str().unwrap(), "--tokens", "50,90,130,50,90,130,50,90", "-n", "24", "--temp", "0"];
    let with = |cache: &str| {
        let more = ["--ignore-eos", "--speculate", "lookup", "--cache-mb", cache, "-o", "json"];
        run(home.path(), &[&args[..], &more].concat())
    };
    let (streamed, resident) = (with("0"), with("all"));
    assert!(streamed.stderr.contains("--speculate is off"), "{streamed:?}");
    assert!(!resident.stderr.contains("--speculate is off"), "{resident:?}");
    assert!(streamed.json()["timings"].get("draft_n").is_none());
    assert_eq!(streamed.json()["tokens"], resident.json()["tokens"]);
}

#[test]
fn a_context_that_overflows_is_refused_unless_asked_otherwise_and_never_silent() {
    let narrow = ["-n", "12", "-c", "9", "--ignore-eos"];
    let refused = answer(&narrow);
    assert_eq!((&refused["stop"], refused.get("dropped_tokens")), (&json!("context"), None));
    let shifted = run(&store(), &[&PROMPT[..], &narrow, &["--context-overflow", "shift", "--keep", "1"]].concat());
    let result = shifted.json();
    assert_eq!((&result["stop"], result["tokens"].as_array().unwrap().len()), (&json!("length"), 12));
    assert!(result["dropped_tokens"].as_u64().unwrap() > 0, "{result}");
    assert!(shifted.stderr.contains("the context of 9 tokens is full"), "{shifted:?}");
    let cut = answer(&["-n", "1", "-c", "4", "--context-overflow", "truncate"]);
    assert_eq!(cut["dropped_tokens"], 2);
}

#[test]
fn bench_measures_sessions_that_share_a_prefix() {
    let args = ["bench", "-m", "smollm2", "--sessions", "3", "--shared-prefix", "64", "--unique", "8", "--gen", "5"];
    let result = run(&store(), &[&args[..], &["-o", "json"]].concat()).json();
    let sessions = result["sessions"].as_array().unwrap();
    let cached: Vec<u64> = sessions.iter().map(|s| s["cached_tokens"].as_u64().unwrap()).collect();
    assert_eq!(cached, [0, 64, 64]);
    for session in sessions {
        assert_eq!((&session["prompt_tokens"], &session["predicted_n"]), (&json!(72), &json!(5)));
        assert!(session["ttft_ms"].as_f64().unwrap() > 0.0 && session["predicted_per_second"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(result["hit_rate"].as_f64().unwrap(), (1000.0 * 128.0 / 216.0f64).round() / 1000.0);
    assert!(result["tokens_per_second"].as_f64().unwrap() > 0.0 && result["kv_bytes_peak"].as_u64().unwrap() > 0);
    assert!(result["waste"].as_f64().unwrap() < 16.0 / 64.0, "{result}");
    let table = run(&store(), &args).stdout;
    assert!(table.contains("interactive") && table.contains("59.3 % of the prompts"), "{table}");
}

#[test]
fn bench_replays_arrivals() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("trace.csv");
    fs::write(&file, "at_ms,prompt,gen,class\n0,100,3,background\n5,10,4,interactive\n").unwrap();
    let file = file.to_str().unwrap();
    let result = run(&store(), &["bench", "smollm2", "--arrivals", file, "-ub", "32", "-o", "json"]).json();
    let counts = |class: &str| result["classes"][class]["sessions"].as_u64();
    assert_eq!((counts("background"), counts("interactive"), counts("batch")), (Some(1), Some(1), None));
    assert!(result["classes"]["interactive"]["inter_token_ms"]["p95"].as_f64().unwrap() > 0.0);
    assert_eq!(result["sessions"].as_array().unwrap().iter().filter(|s| s.get("error").is_some()).count(), 0);
    fs::write(file, "at_ms,prompt,gen\n0,many,3\n").unwrap();
    let home = TempDir::new().unwrap();
    run(home.path(), &["bench", "smollm2", "--arrivals", file]).fails(2, &[file, "line 2", "many"]);
}

#[test]
fn what_one_run_computed_the_next_finds_in_its_directory() {
    let dir = TempDir::new().unwrap();
    let tokens = (1000..1040).map(|t| t.to_string()).collect::<Vec<_>>().join(",");
    let args = ["run", "-m", "smollm2", "--tokens", &tokens, "-n", "4", "--temp", "0", "-o", "json"];
    let plain = run(&store(), &args).json();
    let kept = [&args[..], &["--kv-dir", dir.path().to_str().unwrap()]].concat();
    let first = run(&store(), &kept);
    assert!(first.stderr.contains("32 tokens kept"), "{}", first.stderr);
    let (first, second) = (first.json(), run(&store(), &kept).json());
    assert_eq!((&first["tokens"], &second["tokens"]), (&plain["tokens"], &plain["tokens"]));
    let computed = |answer: &Value| answer["timings"]["prompt_n"].as_u64().unwrap();
    assert_eq!((computed(&first), computed(&second)), (40, 40 - 32));
    let lost = run(&store(), &[&args[..], &["--kv-dir-max", "1G"]].concat());
    assert_eq!(lost.code, Some(2), "a bound of nothing");
}
