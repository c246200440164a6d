//! The numbered gates of keys and values, on real models: wherever they lie, whoever computed them, whatever became of them
//! meanwhile, the bits are those of a sequence alone in a fresh runner. A number is never reused.

use fixtures::test_models;
use model::{KvDir, Model, Opened, Opening, Row, Runner, RunnerOptions, SequenceId};
use residency::kv::{Class, Stats};
use residency::pressure::Step;
use std::path::Path;
use std::sync::{Arc, LazyLock};

static SMOLLM2: LazyLock<Arc<Model>> = LazyLock::new(|| load(&test_models::smollm2()));
static GEMMA3: LazyLock<Arc<Model>> = LazyLock::new(|| load(&test_models::gemma3()));

fn load(path: &Path) -> Arc<Model> {
    Arc::new(Model::load(path, &mut |_, _| ()).unwrap_or_else(|e| panic!("{e}")))
}

/// Each model with a prompt: Gemma's is longer than its window of 512.
fn models() -> [(&'static Arc<Model>, Vec<u32>); 2] {
    [(&SMOLLM2, 150), (&GEMMA3, 600)].map(|(model, len)| {
        let model: &'static Arc<Model> = model;
        (model, prompt(model, len, 13))
    })
}

/// A prompt that repeats nothing, from the whole vocabulary.
fn prompt(model: &Model, len: usize, first: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7919 + first) % model.config.vocab_len) as u32).collect()
}

fn runner(model: &Arc<Model>) -> Runner {
    let options = RunnerOptions { threads: 2, micro_batch: 128, ..Default::default() };
    Runner::new(Arc::clone(model), &options).expect("the detected instruction set")
}

fn rows(sequence: SequenceId, tokens: &[u32]) -> Vec<Row> {
    tokens.iter().enumerate().map(|(i, &token)| Row { sequence, token, logits: i + 1 == tokens.len() }).collect()
}

/// Computes what a sequence lacks of `tokens`; the last one's logits, as bits.
fn complete(runner: &mut Runner, id: SequenceId, tokens: &[u32]) -> Vec<u32> {
    let from = runner.sequence_len(id);
    let logits = runner.forward(&rows(id, &tokens[from..])).expect("room");
    logits.iter().map(|x| x.to_bits()).collect()
}

/// The oracle: one sequence that shares nothing, in blocks one behind the other.
fn alone(model: &Arc<Model>, tokens: &[u32]) -> Vec<u32> {
    let mut runner = runner(model);
    let id = runner.sequence_open(tokens.len());
    let logits = complete(&mut runner, id, tokens);
    let numbers = || logits.iter().map(|&bits| f32::from_bits(bits));
    let (low, high) = (numbers().fold(f32::MAX, f32::min), numbers().fold(f32::MIN, f32::max));
    assert!(high - low > 5.0, "logits from {low} to {high} prove nothing");
    logits
}

fn join(runner: &mut Runner, tokens: &[u32]) -> Opened {
    let opening = Opening { tokens, context_max: 4096, class: Class::Interactive, salt: b"" };
    runner.sequence_join(&opening).expect("good weights")
}

#[test]
fn gate_10_blocks_anywhere_give_the_bits_of_blocks_in_a_row() {
    for (model, tokens) in models() {
        let mut runner = runner(model);
        // Three take blocks in turn; one of them goes, and a fourth grows into what it leaves.
        let [a, b, c] = [0; 3].map(|_| runner.sequence_open(tokens.len()));
        for chunk in tokens[..tokens.len() / 2].chunks(16) {
            let all: Vec<Row> = [a, b, c].iter().flat_map(|&id| rows(id, chunk)).collect();
            runner.forward(&all).expect("room");
        }
        runner.sequence_close(b);
        let want = alone(model, &tokens);
        for id in [a, runner.sequence_open(tokens.len()), c] {
            assert!(complete(&mut runner, id, &tokens) == want);
        }
    }
}

#[test]
fn gate_11_a_shared_beginning_gives_the_bits_of_one_computed_alone() {
    for (model, tokens) in models() {
        let mut runner = runner(model);
        let first = join(&mut runner, &tokens);
        complete(&mut runner, first.id, &tokens);
        // Within a block, at its end, and after the first is gone.
        for (common, closed) in [(tokens.len() - 1, false), (tokens.len() / 32 * 16, false), (tokens.len() - 7, true)] {
            if closed {
                runner.sequence_close(first.id);
            }
            let other = [&tokens[..common], &prompt(model, 20, 5)].concat();
            let opened = join(&mut runner, &other);
            // While a sequence is open, its last block is its own unless it is full.
            let there = if closed { tokens.len() } else { tokens.len() / 16 * 16 };
            assert_eq!(opened.reused, common.min(there));
            assert!(complete(&mut runner, opened.id, &other) == alone(model, &other), "{common} in common");
        }
    }
}

#[test]
fn gate_12_forks_give_the_bits_of_separate_sequences() {
    for (model, tokens) in models() {
        let mut runner = runner(model);
        let first = join(&mut runner, &tokens).id;
        complete(&mut runner, first, &tokens);
        let second = runner.sequence_fork(first);
        for (id, seed) in [(first, 1), (second, 2), (first, 3)] {
            let all = [runner.sequence_tokens(id), &prompt(model, 9, seed)].concat();
            assert!(complete(&mut runner, id, &all) == alone(model, &all));
        }
        assert!(runner.kv_stats().copied_blocks > 0);
    }
}

#[test]
fn gate_13_what_was_evicted_and_rebuilt_gives_the_bits_of_what_was_kept() {
    for (model, tokens) in models() {
        let mut runner = runner(model);
        let longer = [&tokens[..], &prompt(model, 20, 5)].concat();
        let want = alone(model, &longer);
        // All of it goes, then what a limit takes for another.
        for partly in [false, true] {
            let first = join(&mut runner, &tokens);
            complete(&mut runner, first.id, &tokens);
            runner.sequence_close(first.id);
            if partly {
                // The other takes all that memory is there for.
                let bytes = runner.kv_bytes();
                runner.set_kv_limit(Some(bytes));
                let other = prompt(model, (bytes / runner.kv_bytes_per_token()) as usize, 5);
                let opened = join(&mut runner, &other);
                complete(&mut runner, opened.id, &other);
                runner.sequence_close(opened.id);
            } else {
                runner.kv_shrink(Step::SpillIdleKv).expect("no files");
                assert_eq!(runner.kv_stats().cached_blocks, 0);
            }
            let again = join(&mut runner, &longer);
            assert!(again.reused < tokens.len(), "{} of {} are there", again.reused, tokens.len());
            assert!(complete(&mut runner, again.id, &longer) == want);
            runner.sequence_close(again.id);
        }
        assert!(runner.kv_stats().evicted_blocks.iter().sum::<u64>() > 0);
    }
}

#[test]
fn gate_14_what_was_spilled_and_restored_gives_the_bits_of_what_was_kept() {
    for (model, tokens) in models() {
        let dir = tempfile::tempdir().expect("a directory");
        let kv_dir = KvDir { path: dir.path().to_owned(), bytes_max: 1 << 32, bytes_per_second: 1 << 32 };
        let mut before = runner(model);
        before.kv_dir(&kv_dir).expect("a directory");
        let first = join(&mut before, &tokens);
        complete(&mut before, first.id, &tokens);
        before.sequence_close(first.id);
        assert_eq!(before.kv_spill().expect("a disk").files, tokens.len() as u64 / 16);
        drop(before);

        let mut after = runner(model);
        after.kv_dir(&kv_dir).expect("a directory");
        let longer = [&tokens[..], &prompt(model, 20, 5)].concat();
        let again = join(&mut after, &longer);
        let whole = tokens.len() / 16 * 16;
        assert_eq!((again.reused, again.restored), (whole, whole));
        assert!(complete(&mut after, again.id, &longer) == alone(model, &longer));
    }
}

#[test]
fn eight_sessions_with_a_common_prompt_hold_it_once() {
    const COMMON: usize = 1000;
    const UNIQUE: usize = 100;
    let model = &*GEMMA3;
    let common = prompt(model, COMMON, 13);
    let mut runner = runner(model);
    let held = |runner: &Runner| {
        let Stats { leased_blocks, cached_blocks, .. } = runner.kv_stats();
        (leased_blocks + cached_blocks) * runner.kv_block_bytes()
    };
    for i in 0..8 {
        let all = [&common[..], &prompt(model, UNIQUE, 100 + i)].concat();
        let context_max = COMMON + UNIQUE;
        let opening = Opening { tokens: &all, context_max, class: Class::Interactive, salt: b"" };
        let opened = runner.sequence_join(&opening).expect("good weights");
        assert_eq!(opened.reused, if i == 0 { 0 } else { COMMON });
        complete(&mut runner, opened.id, &all);
    }
    let ideal = runner.kv_bytes_per_token() * (COMMON + 8 * UNIQUE) as u64;
    let ratio = held(&runner) as f64 / ideal as f64;
    eprintln!("{} bytes are held, {ratio:.3} of one prompt and the unique parts", held(&runner));
    assert!(ratio <= 1.1, "{ratio}");
    assert!(runner.kv_bytes() as f64 / ideal as f64 <= 1.1, "{} bytes are mapped", runner.kv_bytes());
}
