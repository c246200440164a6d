//! `airs plan` of a model that is not here, by its header alone.

mod common;

use std::fs;

use common::{Ended, airs, run};
use fixtures::hub::{Reply, Request, Server};
use fixtures::test_models;
use serde_json::json;
use tempfile::TempDir;

#[test]
fn a_model_that_is_not_here_is_planned_for_from_its_header_and_nothing_is_fetched() {
    let file = fs::read(test_models::smollm2()).unwrap();
    let len = file.len();
    let server = Server::start(move |request, _| {
        if request.path.starts_with("/api/models/u/r") {
            let listing = json!({"siblings": [{"rfilename": "m-Q4_1.gguf", "size": file.len()}]});
            return Reply::new(200, listing.to_string());
        }
        Reply::file(request, &file, "\"v1\"")
    });
    let home = TempDir::new().unwrap();
    let args = ["--memory", "2G", "-o", "json"];
    let mut command = airs(home.path());
    command.env("HF_ENDPOINT", &server.address).args(["plan", "hf.co/u/r:Q4_1"]).args(args);
    let remote = Ended::of(command.output().unwrap()).json();
    let here = test_models::smollm2();
    let local = run(home.path(), &[&["plan", here.to_str().unwrap()], &args[..]].concat()).json();
    for key in ["mode", "kv_bytes_per_token", "context", "context_max", "budget_bytes"] {
        assert_eq!(remote[key], local[key], "{key}");
    }
    for line in ["weights", "kv", "scratch", "io"] {
        assert_eq!(remote["bytes"][line], local["bytes"][line], "{line}");
    }
    let reasons = remote["reasons"].to_string();
    assert!(reasons.contains("not here"), "{reasons}");
    assert!(remote["forecast"]["ttft_ms"].is_null(), "no disk was measured: {remote}");
    assert!(remote["forecast"]["predicted_per_second"].as_f64().unwrap() > 0.0);

    let parts: Vec<_> = server.requests_for("/resolve/").iter().map(Request::range).collect();
    let bytes: usize = parts.iter().map(|part| part.and_then(|(first, last)| Some(last? + 1 - first)).unwrap()).sum();
    assert!(bytes > 0 && bytes < len / 10, "{bytes} of {len} bytes were asked for: {parts:?}");
    assert!(!home.path().join("models").exists(), "nothing is in the store");
}

#[test]
fn a_source_that_cannot_be_reached_is_an_error_that_names_it() {
    let home = TempDir::new().unwrap();
    run(home.path(), &["plan", "hf.co/u/r"]).fails(1, &["http://127.0.0.1:1"]);
}
