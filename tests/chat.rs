//! The conversation at a terminal, driven through a pseudo-terminal.
#![cfg(unix)]

use std::process::Command;

use fixtures::test_models;
use rexpect::session::{PtySession, spawn_command};
use tempfile::TempDir;

/// Nothing here takes nearly so long; a test that waits in vain ends some day.
const PATIENCE_MS: u64 = 60_000;

/// The program at a terminal; `home` gets the history.
fn at_terminal(home: &TempDir, args: &[&str]) -> PtySession {
    let mut command = Command::new(env!("CARGO_BIN_EXE_airs"));
    command.env_clear().env("AIRS_HOME", home.path()).env("TERM", "xterm").args(args);
    spawn_command(command, Some(PATIENCE_MS)).unwrap()
}

#[test]
fn a_conversation_remembers_and_ends_with_bye() {
    let home = TempDir::new().unwrap();
    let model = test_models::smollm2();
    let mut chat = at_terminal(&home, &["run", model.to_str().unwrap(), "-n", "32", "--temp", "0"]);
    chat.exp_string("resident").unwrap();
    chat.exp_string(">>> ").unwrap();
    chat.send_line("What is the capital of France?").unwrap();
    chat.exp_string("Paris").unwrap();
    chat.exp_string(">>> ").unwrap();
    chat.send_line("/help").unwrap();
    chat.exp_string("/clear").unwrap();
    chat.exp_string(">>> ").unwrap();
    chat.send_line("/bye").unwrap();
    chat.exp_eof().unwrap();
    let history = std::fs::read_to_string(home.path().join("history")).unwrap();
    assert!(history.contains("What is the capital of France?"), "{history}");
}

#[test]
fn ctrl_c_stops_the_answer_and_ctrl_d_leaves() {
    let home = TempDir::new().unwrap();
    // A base model that repeats itself until the context is full.
    let model = test_models::gemma3();
    let mut chat = at_terminal(&home, &["run", model.to_str().unwrap(), "--temp", "0"]);
    chat.exp_string("no chat template").unwrap();
    chat.exp_string(">>> ").unwrap();
    chat.send_line("What is the capital of France?").unwrap();
    chat.exp_string("Paris").unwrap();
    chat.send_control('c').unwrap();
    chat.exp_string(">>> ").unwrap();
    chat.send_control('d').unwrap();
    chat.exp_eof().unwrap();
}
