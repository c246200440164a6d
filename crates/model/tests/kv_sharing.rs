//! Sequences that share keys and values, on a tiny model with windows: the same bits, the memory that it must be, and what
//! happens where it is short.

use fixtures::tiny_model::{Architecture, TinySpec, write};
use gguf::TensorType;
use model::{Error, KvDir, Model, Opened, Opening, Row, Runner, RunnerOptions, SequenceId};
use residency::budget::{Ledger, Line};
use residency::kv::{Change, Class, Growth, IDLE_MS};
use residency::pressure::Step;
use sha2::{Digest, Sha256};
use std::fs;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;

const CHUNK: usize = 32;

fn model(seed: u64) -> Arc<Model> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("tiny.gguf");
    let spec = TinySpec { seed, ..TinySpec::new(Architecture::Gemma3, TensorType::Q8_0) };
    write(&path, &spec).expect("a small file");
    Arc::new(Model::load(&path, &mut |_, _| ()).expect("a good file"))
}

fn runner(model: &Arc<Model>) -> Runner {
    let options = RunnerOptions { micro_batch: CHUNK, ..Default::default() };
    Runner::new(Arc::clone(model), &options).expect("a runner")
}

fn tokens(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 31 + i / 7 + salt) % 300).collect()
}

fn rows(sequence: SequenceId, tokens: &[u32]) -> Vec<Row> {
    tokens.iter().enumerate().map(|(i, &token)| Row { sequence, token, logits: i + 1 == tokens.len() }).collect()
}

/// Computes what is missing to `tokens`; the last one's logits.
fn complete(runner: &mut Runner, opened: Opened, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let from = runner.sequence_len(opened.id);
    runner.forward(&rows(opened.id, &tokens[from..])).map(<[f32]>::to_vec)
}

fn alone(model: &Arc<Model>, tokens: &[u32]) -> Vec<f32> {
    let mut runner = runner(model);
    let id = runner.sequence_open(tokens.len());
    runner.forward(&rows(id, tokens)).expect("room").to_vec()
}

fn opening(tokens: &[u32]) -> Opening<'_> {
    Opening { tokens, context_max: 1000, class: Class::Interactive, salt: b"" }
}

fn join(runner: &mut Runner, tokens: &[u32]) -> Opened {
    runner.sequence_join(&opening(tokens)).expect("good weights")
}

#[test]
fn what_one_sequence_computed_the_next_reuses_bit_by_bit_whoever_is_open() {
    let model = model(1);
    let mut runner = runner(&model);
    let mut reused = Vec::new();
    for (len, branch) in [(100, 100), (100, 61), (70, 64), (120, 7), (101, 100)] {
        let all = [&tokens(branch, 0)[..], &tokens(len - branch, 5)].concat();
        let opened = join(&mut runner, &all);
        reused.push(opened.reused);
        assert!(complete(&mut runner, opened, &all).expect("room") == alone(&model, &all), "{len} from {branch}");
        runner.sequence_close(opened.id);
    }
    assert_eq!(reused, [0, 61, 64, 7, 100]);
    let stats = runner.kv_stats();
    assert!(stats.copied_blocks > 0 && stats.reused_tokens == 232, "{stats:?}");
}

#[test]
fn only_the_same_salt_shares() {
    let model = model(1);
    let mut runner = runner(&model);
    let all = tokens(50, 0);
    let mut reused = Vec::new();
    for salt in [&b"a"[..], b"b", b"", b"a"] {
        let opened = runner.sequence_join(&Opening { salt, ..opening(&all) }).expect("good weights");
        reused.push(opened.reused);
        complete(&mut runner, opened, &all).expect("room");
        runner.sequence_close(opened.id);
    }
    assert_eq!(reused, [0, 0, 0, 49]);
}

#[test]
fn forks_share_until_they_go_on_and_then_do_not_hear_of_each_other() {
    let model = model(1);
    let mut runner = runner(&model);
    let begin = tokens(45, 0);
    let first = join(&mut runner, &begin);
    complete(&mut runner, first, &begin).expect("room");
    let before = runner.kv_stats().leased_blocks;
    let second = Opened { id: runner.sequence_fork(first.id), ..first };
    assert_eq!(runner.kv_stats().leased_blocks, before);
    for (opened, salt) in [(first, 1), (second, 2), (first, 3), (second, 4)] {
        let all = [runner.sequence_tokens(opened.id), &tokens(9, salt)].concat();
        assert!(complete(&mut runner, opened, &all).expect("room") == alone(&model, &all));
    }
    // One tail was copied: seven layers, each a group of its own.
    assert_eq!(runner.kv_stats().copied_blocks, 7);
}

#[test]
fn two_that_compute_the_same_end_with_one_copy() {
    let model = model(1);
    let mut runner = runner(&model);
    let all = tokens(96, 0);
    let both = [join(&mut runner, &all), join(&mut runner, &all)];
    for chunk in all.chunks(CHUNK / 2) {
        let batch: Vec<Row> = both.iter().flat_map(|opened| rows(opened.id, chunk)).collect();
        runner.forward(&batch).expect("room");
    }
    let stats = runner.kv_stats();
    assert!(stats.deduplicated_blocks >= 6 * 7, "{stats:?}");
    // One group sees everything; of the six with a window of 16, the last step's blocks and those it saw are there.
    assert!(stats.leased_blocks <= 6 + 6 * 3, "{stats:?}");
}

#[test]
fn what_was_computed_last_can_be_taken_back_at_any_place_of_the_window() {
    let model = model(1);
    let mut runner = runner(&model);
    let all = tokens(200, 0);
    let id = join(&mut runner, &all).id;
    for len in (9..160).step_by(9) {
        let from = runner.sequence_len(id);
        runner.forward(&rows(id, &[&all[from..len], &tokens(CHUNK - 9, 8)].concat())).expect("room");
        assert_eq!(runner.sequence_truncate(id, len), len);
        let got = runner.forward(&rows(id, &all[len..len + 1])).expect("room").to_vec();
        assert!(got == alone(&model, &all[..len + 1]), "{len} positions");
    }
    assert_eq!(runner.sequence_truncate(id, 40), 0, "what the window left behind is gone for this one");
    let again = join(&mut runner, &all[..41]);
    assert_eq!(again.reused, 40, "but not for those who join");
}

#[test]
fn growth_evicts_what_nobody_holds_waits_for_others_and_refuses_what_never_fits() {
    let model = model(1);
    let mut runner = runner(&model);
    let block = runner.kv_block_bytes();
    // Room for one sequence of 128 positions: eight blocks, and six times four of the windows.
    let limit = (8 + 6 * 4) * block;
    runner.set_kv_limit(Some(limit));
    let ledger = Ledger::new(1 << 30);
    runner.charge_to(&ledger, "tiny").expect("nothing yet");
    let run = |runner: &mut Runner, opened, all: &[u32]| {
        let logits = complete(runner, opened, all);
        assert!(runner.kv_bytes() <= limit);
        let stats = runner.kv_stats();
        assert_eq!(ledger.line_bytes(Line::PrefixCache), stats.cached_blocks * block);
        assert_eq!(ledger.used_bytes(), runner.kv_bytes());
        logits
    };
    let (old, new) = (tokens(120, 0), tokens(120, 1));
    let first = join(&mut runner, &old);
    let kept = run(&mut runner, first, &old).expect("room");
    let second = join(&mut runner, &new);
    let error = run(&mut runner, second, &new).expect_err("the first holds what there is");
    assert!(matches!(error, Error::KvFull(s) if s.limit_bytes == limit && s.leased_bytes > 0), "{error}");
    assert!(matches!(runner.kv_grow(&[(second.id, CHUNK)]), Ok(Growth::Wait(_))));
    assert!(matches!(runner.kv_grow(&[(second.id, 1000)]), Ok(Growth::Refuse(_))));
    assert_eq!(runner.sequence_len(first.id), 120, "an open one is never touched");
    runner.sequence_close(first.id);

    // Batch may not displace what an interactive user left a minute ago; after five it may.
    runner.kv_clock(60_000);
    runner.sequence_close(second.id);
    let batch = runner.sequence_join(&Opening { class: Class::Batch, ..opening(&new) }).expect("good weights");
    assert!(matches!(run(&mut runner, batch, &new), Err(Error::KvFull(_))));
    runner.kv_clock(60_000 + IDLE_MS);
    assert!(run(&mut runner, batch, &new).expect("room now") == alone(&model, &new));
    runner.sequence_close(batch.id);
    let evicted = |e: &Change| matches!(e, Change::Evicted { class: Class::Interactive, tokens: 1.., .. });
    assert!(runner.kv_events().any(|e| evicted(&e.change)));

    // Rebuilt, with the same bits.
    let again = join(&mut runner, &old);
    assert!(again.reused < 119, "{again:?}");
    assert!(run(&mut runner, again, &old).expect("room") == kept);
    runner.sequence_close(again.id);
    assert!(runner.kv_shrink(Step::ShrinkPrefixCache).expect("no files") == 0, "slabs hold recent blocks too");
    assert!(runner.kv_shrink(Step::SpillIdleKv).expect("no files") > 0);
    assert_eq!((runner.kv_bytes(), ledger.used_bytes()), (0, 0));
}

fn kv_dir(path: &Path) -> KvDir {
    KvDir { path: path.to_owned(), bytes_max: 1 << 30, bytes_per_second: 1 << 30 }
}

/// A runner that has computed `all`, written it to files, and ended.
fn spill(model: &Arc<Model>, all: &[u32], dir: &Path) {
    let mut runner = runner(model);
    runner.kv_dir(&kv_dir(dir)).expect("a directory");
    let opened = join(&mut runner, all);
    complete(&mut runner, opened, all).expect("room");
    runner.sequence_close(opened.id);
    let spilled = runner.kv_spill().expect("a disk");
    assert_eq!(
        (spilled.files, spilled.tokens, spilled.wait_ms),
        (all.len() as u64 / 16, all.len() as u64 / 16 * 16, None)
    );
    assert_eq!(runner.kv_spill().expect("a disk").files, 0, "once");
}

fn restored(model: &Arc<Model>, all: &[u32], dir: &Path) -> (Opened, Vec<String>) {
    let mut runner = runner(model);
    runner.kv_dir(&kv_dir(dir)).expect("a directory");
    let opened = join(&mut runner, all);
    assert!(complete(&mut runner, opened, all).expect("room") == alone(model, all));
    let reasons = runner.kv_events().filter_map(|e| match &e.change {
        Change::Ignored { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    let reasons = reasons.collect();
    // Whatever happened, nothing wrong stays.
    runner.sequence_close(opened.id);
    let again = join(&mut runner, all);
    assert!(complete(&mut runner, again, all).expect("room") == alone(model, all));
    (opened, reasons)
}

#[test]
fn a_conversation_outlives_the_process_and_its_beginnings_do() {
    let (model, all) = (model(1), tokens(100, 0));
    let dir = tempfile::tempdir().expect("a directory");
    spill(&model, &all, dir.path());
    let (opened, reasons) = restored(&model, &all, dir.path());
    assert_eq!((opened.reused, opened.restored, reasons.len()), (96, 96, 0));
    let other = [&all[..50], &tokens(40, 9)].concat();
    assert_eq!(restored(&model, &other, dir.path()).0.restored, 48);
    assert_eq!(restored(&model, &tokens(50, 7), dir.path()).0.restored, 0);
}

#[test]
fn what_is_written_at_a_bounded_rate_is_all_written_at_last() {
    let (model, all) = (model(1), tokens(100, 0));
    let dir = tempfile::tempdir().expect("a directory");
    let mut runner = runner(&model);
    let blob = 16 * runner.kv_bytes_per_token() + 1000;
    runner.kv_dir(&KvDir { bytes_per_second: 2 * blob, ..kv_dir(dir.path()) }).expect("a directory");
    let opened = join(&mut runner, &all);
    complete(&mut runner, opened, &all).expect("room");
    runner.sequence_close(opened.id);
    let first = runner.kv_spill().expect("a disk");
    assert!(first.files == 2 && first.wait_ms.is_some(), "{first:?}");
    let mut waited = 0;
    let rest = runner.kv_spill_all(&mut |ms| {
        waited += ms;
        ControlFlow::Continue(())
    });
    assert_eq!(rest.expect("a disk").files, 4);
    assert!((1000..3000).contains(&waited), "{waited} ms for four blobs, two a second");
}

#[test]
fn what_is_corrupt_foreign_or_of_another_model_is_not_used_and_said() {
    let (good, all) = (model(1), tokens(100, 0));
    let dir = tempfile::tempdir().expect("a directory");
    spill(&good, &all, dir.path());
    let files = || {
        let mut files: Vec<_> =
            fs::read_dir(dir.path()).expect("it is there").map(|e| e.expect("an entry").path()).collect();
        files.sort_unstable();
        files
    };
    // Of another model nothing has the same name.
    assert_eq!(restored(&model(2), &all, dir.path()).0.restored, 0);
    assert_eq!(files().len(), 6);
    // A file that is another block of the same conversation.
    fs::copy(&files()[0], &files()[1]).expect("a copy");
    let (opened, reasons) = restored(&good, &all, dir.path());
    assert!(
        opened.restored < 96 && reasons.len() == 1 && reasons[0].contains("something else"),
        "{opened:?} {reasons:?}"
    );
    // Flipped bits.
    fs::remove_dir_all(dir.path()).expect("ours");
    spill(&good, &all, dir.path());
    for file in files() {
        let mut bytes = fs::read(&file).expect("a blob");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&file, bytes).expect("a blob");
    }
    let (opened, reasons) = restored(&good, &all, dir.path());
    assert!(opened.restored == 0 && reasons.len() == 1 && reasons[0].contains("checksum"), "{opened:?} {reasons:?}");
}

#[test]
fn keys_and_values_that_the_model_does_not_compute_are_found_whatever_their_checksums_say() {
    let (model, all) = (model(1), tokens(100, 0));
    let dir = tempfile::tempdir().expect("a directory");
    spill(&model, &all, dir.path());
    for entry in fs::read_dir(dir.path()).expect("it is there") {
        let path = entry.expect("an entry").path();
        let mut bytes = fs::read(&path).expect("a blob");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        let sum = Sha256::digest(&bytes[56..]);
        bytes[24..56].copy_from_slice(&sum);
        fs::write(&path, bytes).expect("a blob");
    }
    let (opened, reasons) = restored(&model, &all, dir.path());
    assert!(opened.restored == 0 && reasons.iter().all(|r| r.contains("computes")), "{opened:?} {reasons:?}");
    assert_eq!((reasons.len(), fs::read_dir(dir.path()).expect("it is there").count()), (6, 0));
}

#[test]
fn what_an_observer_saw_idle_goes_before_its_time() {
    let model = model(1);
    let mut runner = runner(&model);
    for salt in [1, 2] {
        let all = tokens(50, salt);
        let opened = join(&mut runner, &all);
        complete(&mut runner, opened, &all).expect("room");
        runner.sequence_close(opened.id);
    }
    let ranges = runner.kv_ranges();
    let inside = |range: &Range<u64>| ranges.iter().any(|r| r.start <= range.start && range.end <= r.end);
    assert_eq!(runner.kv_shrink(Step::ShrinkPrefixCache).expect("no files"), 0, "they are not idle");
    assert_eq!(runner.kv_observe(&|range| inside(range)), 8);
    let again = join(&mut runner, &tokens(50, 1));
    assert_eq!(again.reused, 49);
    runner.sequence_close(again.id);
    assert_eq!(runner.kv_shrink(Step::ShrinkPrefixCache).expect("no files"), 0, "one slab holds both");
    assert_eq!(runner.kv_match_len(&opening(&tokens(50, 1))), 49, "used since");
    assert_eq!(runner.kv_match_len(&opening(&tokens(50, 2))), 0, "gone");
}
