//! Memory of the KV cache: what is taken, what is given back, and what happens where there is none.

use fixtures::tiny_model::{Architecture, TinySpec, write};
use gguf::TensorType;
use model::{Error, Model, Row, Runner, RunnerOptions, SequenceId};
use residency::budget::{Ledger, Line};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::process::Command;
use std::sync::Arc;

const CHILD: &str = "AIRS_TEST_CHILD";

fn runner() -> Runner {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("tiny.gguf");
    write(&path, &TinySpec::new(Architecture::Llama, TensorType::Q8_0)).expect("a small file");
    let model = Arc::new(Model::load(&path, &mut |_, _| ()).expect("a good file"));
    Runner::new(model, &RunnerOptions { micro_batch: 32, ..Default::default() }).expect("a runner")
}

fn extend(runner: &mut Runner, sequence: SequenceId, tokens: usize) -> Result<Vec<f32>, Error> {
    let from = runner.sequence_len(sequence);
    let row = |i| Row { sequence, token: (from + i) as u32 % 50, logits: i + 1 == tokens };
    runner.forward(&(0..tokens).map(row).collect::<Vec<_>>()).map(<[f32]>::to_vec)
}

#[test]
fn what_is_taken_is_what_the_ledger_granted_and_no_more_than_the_sequences_may_have() {
    let mut runner = runner();
    let block_bytes = runner.kv_block_bytes();
    let ledger = Ledger::new(1 << 30);
    runner.charge_to(&ledger, "tiny").expect("nothing yet");
    let (a, b) = (runner.sequence_open(100), runner.sequence_open(40));
    assert_eq!(runner.kv_bytes(), 0);
    for (sequence, tokens) in [(a, 33), (b, 1), (a, 50), (b, 39), (a, 17)] {
        extend(&mut runner, sequence, tokens).expect("room");
        assert_eq!(runner.kv_bytes(), ledger.line_bytes(Line::Kv));
    }
    assert_eq!(runner.kv_bytes(), (7 + 3) * block_bytes, "both are full");
    runner.sequence_close(b);
    let c = runner.sequence_open(60);
    runner.sequence_reserve(c).expect("a few KiB");
    assert_eq!(runner.kv_bytes(), (7 + 4) * block_bytes, "three of its blocks were there");
    drop(runner);
    assert_eq!(ledger.used_bytes(), 0);
}

#[test]
fn memory_is_given_back_when_no_sequence_holds_it_and_the_next_has_the_same_bits() {
    let mut runner = runner();
    let first = runner.sequence_open(64);
    let want = extend(&mut runner, first, 64).expect("room");
    let held = runner.kv_bytes();
    assert_eq!((runner.kv_trim(), runner.kv_bytes()), (0, held), "it is in use");
    runner.sequence_close(first);
    assert_eq!(runner.kv_bytes(), held, "kept for the next");
    // In blocks that were used before, and in fresh ones.
    for trim in [false, true] {
        assert_eq!(if trim { runner.kv_trim() } else { held }, held);
        assert_eq!(runner.kv_bytes(), if trim { 0 } else { held });
        let next = runner.sequence_open(64);
        assert!(extend(&mut runner, next, 64).expect("room") == want);
        assert_eq!(runner.kv_bytes(), held);
        runner.sequence_close(next);
    }
}

#[test]
fn a_context_that_no_machine_holds_cannot_be_reserved_and_does_no_harm() {
    let mut runner = runner();
    let (small, large) = (runner.sequence_open(64), runner.sequence_open(usize::MAX));
    extend(&mut runner, small, 20).expect("room");
    let held = runner.kv_bytes();
    assert!(held > 0);
    let error = runner.sequence_reserve(large).expect_err("no machine holds that");
    assert!(matches!(error, Error::Memory(memory::Error::Map { len_bytes, .. }) if len_bytes > 1 << 60), "{error}");
    assert_eq!((runner.kv_bytes(), runner.sequence_len(small), runner.sequence_len(large)), (held, 20, 0));
    extend(&mut runner, small, 44).expect("the small one goes on");
    extend(&mut runner, large, 10).expect("so does the large one, as far as there is memory");
}

/// In a process of its own, for the limit is one of the whole process.
#[test]
fn where_no_memory_is_left_a_step_is_an_error_and_the_sequences_are_as_long_as_before() {
    if std::env::var_os(CHILD).is_none() {
        let name = "where_no_memory_is_left_a_step_is_an_error_and_the_sequences_are_as_long_as_before";
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        let output = command.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().expect("a process");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && printed.contains("refused"), "{output:?}");
        return;
    }
    let mut runner = runner();
    // Buffers that steps share are as large as they get, and the last slab is full.
    let warm = runner.sequence_open(64);
    let want = extend(&mut runner, warm, 64).expect("room");
    let sequence = runner.sequence_open(1 << 20);
    let held = runner.kv_bytes();
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(1 << 20), ..before }).expect("a lower limit");
    let refused = extend(&mut runner, sequence, 64);
    setrlimit(Resource::As, before).expect("the limit as it was");
    let error = refused.expect_err("no address space is left");
    assert!(matches!(error, Error::Memory(memory::Error::Map { len_bytes, .. }) if len_bytes > 0), "{error}");
    assert_eq!((runner.sequence_len(sequence), runner.sequence_len(warm), runner.kv_bytes()), (0, 64, held));
    assert!(extend(&mut runner, sequence, 64).expect("room again") == want);
    println!("refused: {error}");
}
