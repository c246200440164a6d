//! However the weights are held and read, the bits are the same; and what cannot be read is an error to those who need it.

use fixtures::faults::{Fault, FaultySource, Gate};
use fixtures::huge_pages::HugePages;
use fixtures::test_models;
use fixtures::tiny_model::{self, Architecture, TinySpec};
use gguf::TensorType;
use memory::source::{ByteSource, FileSource, Identity, ReadRoom};
use model::{
    Backing, Choice, DenseWeights, Error, Header, LoadOptions, Model, ReadOptions, Row, Runner, RunnerOptions, Stats,
    Window,
};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A few KiB at once: even tiny models have many units.
const UNIT: usize = 4096;
const EIO: i32 = 5;

fn tokens(model: &Model, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7919 + 13) % model.config.vocab_len) as u32).collect()
}

/// Logits of the last of `len` tokens, after a prompt in two pieces, as bits.
fn logits(model: &Arc<Model>, len: usize) -> Result<Vec<u32>, Error> {
    let options = RunnerOptions { threads: 2, ..Default::default() };
    let mut runner = Runner::new(Arc::clone(model), &options)?;
    let sequence = runner.sequence_open(len);
    let mut last = Vec::new();
    for piece in tokens(model, len).chunks(len.div_ceil(2)) {
        let rows: Vec<Row> = piece.iter().map(|&token| Row { sequence, token, logits: true }).collect();
        let logits = runner.forward(&rows)?;
        last = logits[logits.len() - model.config.vocab_len..].iter().map(|x| x.to_bits()).collect();
    }
    Ok(last)
}

fn open(path: &Path, options: &LoadOptions) -> Arc<Model> {
    Arc::new(Model::open(path, options).unwrap_or_else(|e| panic!("{e}")))
}

fn backings(len_bytes: usize) -> Vec<Choice> {
    let all = memory::backing::probe(len_bytes);
    for missing in all.iter().filter(|s| !s.available) {
        eprintln!("skipped: {}: {}", missing.backing.name(), missing.reason);
    }
    all.iter().filter(|s| s.available).map(|s| Choice::Only(s.backing)).collect()
}

/// Every way to hold and read `path` gives the bits of the eager default. Returns the number of ways.
fn all_ways_agree(path: &Path, unit_bytes: usize, len: usize) -> usize {
    let eager = Model::load(path, &mut |_, _| ()).unwrap_or_else(|e| panic!("{e}"));
    let weights_bytes = eager.weights_bytes;
    let want = logits(&Arc::new(eager), len).expect("a good file");
    let mut ways = 0;
    let windows = [Window::Stages(0), Window::Stages(2), Window::All].map(|window| (window, true));
    for backing in backings(weights_bytes as usize) {
        for (window, direct_io) in windows.into_iter().chain([(Window::All, false)]) {
            let options = LoadOptions { backing, window, direct_io, unit_bytes, ..Default::default() };
            let model = open(path, &options);
            assert!(logits(&model, len).expect("a good file") == want, "{options:?}");
            assert_eq!(backing, model.backing().map(Choice::Only).expect("memory of our own"));
            is_not_vacuous(&options, &model.stats(), weights_bytes);
            assert_eq!(model.resident_bytes(), Some(model.stats().total_bytes), "{options:?}");
            ways += 1;
        }
    }
    for dense_weights in [DenseWeights::Warm, DenseWeights::Mmap] {
        let options = LoadOptions { dense_weights, unit_bytes, ..Default::default() };
        let model = open(path, &options);
        assert_eq!((model.backing(), model.pinned_bytes()), (None, 0));
        assert!(logits(&model, len).expect("a good file") == want, "{options:?}");
        is_not_vacuous(&options, &model.stats(), weights_bytes);
        ways += 1;
    }
    ways
}

fn is_not_vacuous(options: &LoadOptions, stats: &Stats, weights_bytes: u64) {
    assert!(stats.read_bytes > weights_bytes / 2, "{options:?}: {stats:?}");
    // Rows that fill up a last panel are in no file, and what lies between matrices is in both.
    assert!(stats.present_bytes + (1 << 16) >= stats.total_bytes, "{options:?}: everything was used: {stats:?}");
    assert_eq!(stats.faults, 0, "{options:?}: the forward pass asks before it touches");
    if options.window == Window::Stages(0) || options.dense_weights == DenseWeights::Warm {
        assert!(stats.waits >= 1, "{options:?}: what is used was waited for: {stats:?}");
    }
}

fn written(directory: &tempfile::TempDir, spec: &TinySpec) -> PathBuf {
    let path = directory.path().join(format!("{:?}-{}.gguf", spec.architecture, spec.tensor_type));
    tiny_model::write(&path, spec).expect("a small file");
    path
}

#[test]
fn tiny_models_of_every_architecture_give_the_same_bits_in_every_way() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut ways = 0;
    for architecture in Architecture::DENSE.into_iter().chain([Architecture::Qwen3Moe, Architecture::Gemma4]) {
        for tensor_type in [TensorType::Q4_K, TensorType::F16] {
            let path = written(&directory, &TinySpec::new(architecture, tensor_type));
            ways += all_ways_agree(&path, UNIT, 9);
        }
    }
    assert!(ways >= 8 * 6, "{ways} ways compared");
}

/// The pool of huge pages is one for all: who counts on what is in it has it alone.
static POOL: Mutex<()> = Mutex::new(());

/// Bytes of huge pages beside the largest model's: other tests take some when there are any.
const SPARE_BYTES: usize = 128 << 20;

/// The real models, and one more that `AIRS_TEST_MODEL` names.
#[test]
fn real_models_give_the_same_bits_in_every_way() {
    let mut paths = vec![test_models::smollm2(), test_models::gemma3(), test_models::qwen2_5_coder()];
    paths.extend(std::env::var_os("AIRS_TEST_MODEL").map(PathBuf::from));
    let _pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let largest = paths.iter().map(|path| std::fs::metadata(path).expect("a file").len()).max();
    let huge = HugePages::add(largest.unwrap_or(0) as usize + SPARE_BYTES);
    for path in paths {
        // A unit that no other test uses, so that the weights are not shared with one of them.
        let ways = all_ways_agree(&path, 3 << 20, 24);
        assert!(ways >= if huge.is_some() { 4 + 4 + 2 } else { 4 + 2 }, "{ways} ways compared");
    }
}

/// In place of a model of a billion parameters, which is no test's to fetch: many units, most layers in several.
#[test]
fn a_generated_model_of_many_units_gives_the_same_bits_in_every_way() {
    let directory = tempfile::tempdir().expect("a directory");
    for tensor_type in [TensorType::Q4_K, TensorType::Q6_K] {
        let spec = TinySpec {
            embedding_len: 512,
            layers: 6,
            heads: 8,
            feed_forward_len: 1536,
            ..TinySpec::new(Architecture::Llama, tensor_type)
        };
        let path = written(&directory, &spec);
        let model = open(&path, &LoadOptions { unit_bytes: 64 << 10, ..Default::default() });
        assert!(model.weights_bytes > 100 * (64 << 10), "{} bytes", model.weights_bytes);
        let ways = all_ways_agree(&path, 64 << 10, 33);
        assert!(ways >= 4 + 2, "{ways} ways compared");
    }
}

/// A tiny llama in memory, with `fault` at the middle of tensor `name`.
fn faulty(name: &str, fault: Fault) -> Header {
    let bytes = tiny_model::build(&TinySpec::new(Architecture::Llama, TensorType::Q8_0)).to_bytes();
    let gguf = gguf::Gguf::read(&mut &bytes[..], bytes.len() as u64).expect("a good file");
    let tensor = gguf.tensor(name).expect("a tensor of a llama");
    let at = tensor.offset_bytes + tensor.len_bytes / 2;
    let source = Arc::new(FaultySource::new("faulty", bytes).with(at, fault));
    // The header's reader looks far ahead.
    source.arm(false);
    let header = Header::from_sources(vec![Arc::clone(&source) as _]).expect("a good header");
    source.arm(true);
    header
}

fn lazy() -> LoadOptions {
    // Huge pages would make one unit of it all.
    let backing = Choice::Only(Backing::Unpinned);
    LoadOptions { backing, window: Window::Stages(0), unit_bytes: UNIT, ..Default::default() }
}

#[test]
fn weights_that_cannot_be_read_are_an_error_and_the_sequence_is_as_long_as_before() {
    for name in ["blk.1.ffn_up.weight", "output.weight"] {
        for fault in [Fault::Io(EIO), Fault::Short, Fault::Changed, Fault::Panic] {
            let header = faulty(name, fault.clone());
            let model = Arc::new(Model::from_header(header, &lazy()).expect("nothing of it is needed yet"));
            let options = RunnerOptions { micro_batch: 2, ..Default::default() };
            let mut runner = Runner::new(Arc::clone(&model), &options).expect("a runner");
            let sequence = runner.sequence_open(8);
            let rows: Vec<Row> =
                tokens(&model, 5).into_iter().map(|token| Row { sequence, token, logits: true }).collect();
            for _ in 0..2 {
                let error = runner.forward(&rows).expect_err("a fault");
                assert!(matches!(error, Error::Memory(_)), "{name} {fault:?}: {error}");
                assert_eq!((runner.sequence_len(sequence), runner.kv_bytes() > 0), (0, true));
            }
        }
    }
}

#[test]
fn a_load_after_one_that_failed_works() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Qwen2, TensorType::Q8_0));
    let whole = std::fs::read(&path).expect("a file");
    let model = open(&path, &lazy());
    // The file shrinks under us.
    std::fs::write(&path, &whole[..whole.len() / 2]).expect("a file");
    let error = logits(&model, 3).expect_err("half of a file");
    assert!(matches!(error, Error::Memory(memory::Error::Short { .. } | memory::Error::Changed { .. })), "{error}");
    std::fs::write(&path, &whole).expect("a file");
    logits(&open(&path, &lazy()), 3).expect("a whole file");
}

#[test]
fn a_file_in_the_page_cache_that_shrinks_is_an_error() {
    let directory = tempfile::tempdir().expect("a directory");
    for dense_weights in [DenseWeights::Warm, DenseWeights::Mmap] {
        let path = written(&directory, &TinySpec::new(Architecture::Qwen2, TensorType::Q8_0));
        let model = open(&path, &LoadOptions { dense_weights, ..Default::default() });
        logits(&model, 3).expect("a good file");
        std::fs::File::options().write(true).open(&path).and_then(|f| f.set_len(5000)).expect("a shorter file");
        let error = logits(&model, 3).expect_err("the rest of a file");
        assert!(matches!(error, Error::Memory(memory::Error::Changed { .. })), "{error}");
    }
}

/// A file that is cut off behind the first look that finds it whole.
#[derive(Debug)]
struct Cutting {
    file: FileSource,
    path: PathBuf,
    len_bytes: u64,
    armed: AtomicBool,
}

impl ByteSource for Cutting {
    fn name(&self) -> &str {
        self.file.name()
    }

    fn len_bytes(&self) -> u64 {
        self.file.len_bytes()
    }

    fn identity(&self) -> Option<Identity> {
        None
    }

    fn read(&self, ranges: &[Range<u64>], room: &mut ReadRoom) -> Result<Vec<Range<usize>>, memory::Error> {
        self.file.read(ranges, room)
    }

    fn read_cached(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), memory::Error> {
        self.file.read_cached(offset_bytes, out)
    }

    fn check(&self) -> Result<(), memory::Error> {
        self.file.check()?;
        if self.armed.swap(false, Ordering::SeqCst) {
            std::fs::File::options()
                .write(true)
                .open(&self.path)
                .and_then(|f| f.set_len(self.len_bytes))
                .expect("a file");
        }
        Ok(())
    }
}

#[test]
fn a_file_in_the_page_cache_that_is_cut_off_between_look_and_use_is_an_error_and_not_a_signal() {
    let directory = tempfile::tempdir().expect("a directory");
    for dense_weights in [DenseWeights::Warm, DenseWeights::Mmap] {
        let path = written(&directory, &TinySpec::new(Architecture::Qwen2, TensorType::Q8_0));
        let file = FileSource::open(&path, ReadOptions::default()).expect("a file");
        // The vectors lie before it and most matrices behind.
        let len_bytes = file.len_bytes() / 2;
        let source = Arc::new(Cutting { file, path, len_bytes, armed: AtomicBool::new(false) });
        let header = Header::from_sources(vec![Arc::clone(&source) as _]).expect("a good header");
        let options = LoadOptions { dense_weights, ..Default::default() };
        let model = Arc::new(Model::from_header(header, &options).expect("a good file"));
        logits(&model, 3).expect("a good file");
        source.armed.store(true, Ordering::SeqCst);
        let error = logits(&model, 3).expect_err("half of a file");
        assert!(!source.armed.load(Ordering::SeqCst), "it was cut after a look");
        assert!(matches!(error, Error::Memory(memory::Error::Short { .. } | memory::Error::Changed { .. })), "{error}");
    }
}

#[test]
fn rows_in_the_page_cache_that_cannot_be_read_are_an_error() {
    for dense_weights in [DenseWeights::Warm, DenseWeights::Mmap] {
        for fault in [Fault::Io(EIO), Fault::Short] {
            let header = faulty("blk.1.ffn_up.weight", fault);
            let options = LoadOptions { dense_weights, ..Default::default() };
            let model = Arc::new(Model::from_header(header, &options).expect("nothing of it is needed yet"));
            let error = logits(&model, 3).expect_err("a fault");
            assert!(matches!(error, Error::Memory(memory::Error::Io { .. } | memory::Error::Short { .. })), "{error}");
        }
    }
}

#[test]
fn a_file_that_is_replaced_is_still_the_one_that_was_opened() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Qwen2, TensorType::Q8_0));
    let want = logits(&open(&path, &LoadOptions::default()), 3).expect("a good file");
    let model = open(&path, &lazy());
    let other = TinySpec { seed: 2, ..TinySpec::new(Architecture::Qwen2, TensorType::Q8_0) };
    tiny_model::write(&path.with_extension("new"), &other).expect("a small file");
    std::fs::rename(path.with_extension("new"), &path).expect("one directory");
    assert!(logits(&model, 3).expect("the old file is still there") == want);
    assert!(logits(&open(&path, &lazy()), 3).expect("a good file") != want, "the new one is another model");
}

#[test]
fn a_stalled_load_can_be_interrupted_and_goes_on_afterwards() {
    let gate = Arc::new(Gate::default());
    let header = faulty("blk.1.ffn_up.weight", Fault::Stall(Arc::clone(&gate)));
    let model = Arc::new(Model::from_header(header, &lazy()).expect("nothing of it is needed yet"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| logits(&model, 3));
        gate.wait_for_arrival();
        model.interrupt();
        let error = waiting.join().expect("no panic").expect_err("an interrupted wait");
        assert!(matches!(error, Error::Memory(memory::Error::Interrupted { .. })), "{error}");
    });
    gate.open();
    logits(&model, 3).expect("bytes move again");
}

#[test]
fn a_stalled_read_of_embedding_rows_can_be_interrupted_and_harms_no_other_session() {
    let gate = Arc::new(Gate::default());
    // The middle of the table is the row of none of the tokens but the last.
    let header = faulty("token_embd.weight", Fault::Stall(Arc::clone(&gate)));
    let table = header.gguf.tensor("token_embd.weight").expect("an embedding");
    let stalled = (table.len_bytes / 2 / (table.len_bytes / table.rows())) as u32;
    let model = Arc::new(Model::from_header(header, &lazy()).expect("nothing of it is needed yet"));
    let runner = || Runner::new(Arc::clone(&model), &RunnerOptions::default()).expect("a runner");
    let row = |sequence, token| [Row { sequence, token, logits: true }];
    let mut other = runner();
    let others = other.sequence_open(8);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut runner = runner();
            let sequence = runner.sequence_open(8);
            runner.forward(&row(sequence, stalled - 1)).expect("another row");
            let error = runner.forward(&row(sequence, stalled)).expect_err("an interrupted wait");
            (error, runner.sequence_len(sequence))
        });
        gate.wait_for_arrival();
        other.forward(&row(others, stalled + 1)).expect("another row");
        assert!(!waiting.is_finished(), "no byte has moved");
        model.interrupt();
        let (error, len) = waiting.join().expect("no panic");
        assert!(matches!(error, Error::Memory(memory::Error::Interrupted { .. })) && len == 1, "{error}");
        other.forward(&row(others, stalled + 1)).expect("its row is there");
        assert_eq!(other.sequence_len(others), 2);
    });
    gate.open();
    other.forward(&row(others, stalled)).expect("bytes move again");
}

#[test]
fn two_opens_of_one_content_share_one_region_and_another_content_does_not() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Llama, TensorType::Q8_0));
    let link = directory.path().join("another-name.gguf");
    std::fs::hard_link(&path, &link).expect("one file system");
    let one = open(&path, &lazy());
    logits(&one, 3).expect("a good file");
    let read = one.read_bytes();
    let two = open(&link, &lazy());
    logits(&two, 3).expect("a good file");
    assert_eq!((two.read_bytes(), one.read_bytes()), (read, read), "nothing was read again");
    let copy = directory.path().join("copy.gguf");
    std::fs::copy(&path, &copy).expect("room");
    let three = open(&copy, &lazy());
    assert!(three.read_bytes() < read, "another file begins from nothing");
}

#[test]
fn an_embedding_table_of_its_own_is_read_by_row() {
    let bytes = tiny_model::build(&TinySpec::new(Architecture::Llama, TensorType::Q8_0)).to_bytes();
    let gguf = gguf::Gguf::read(&mut &bytes[..], bytes.len() as u64).expect("a good file");
    let table = gguf.tensor("token_embd.weight").expect("an embedding").clone();
    let source = Arc::new(FaultySource::new("counted", bytes));
    let header = Header::from_sources(vec![Arc::clone(&source) as _]).expect("a good header");
    let model = Arc::new(Model::from_header(header, &lazy()).expect("a good file"));
    assert!(model.weights_bytes < gguf.tensors.iter().map(|t| t.len_bytes).sum::<u64>() - table.len_bytes / 2);
    let before = source.asked().len();
    logits(&model, 3).expect("a good file");
    let in_table = |at: u64| (table.offset_bytes..table.offset_bytes + table.len_bytes).contains(&at);
    let rows = source.asked().split_off(before).into_iter().filter(|r| in_table(r.start)).collect::<Vec<_>>();
    assert_eq!(rows.len(), 3, "{rows:?}");
    assert!(rows.iter().all(|r| r.end - r.start == table.len_bytes / table.rows()), "{rows:?}");
}

#[test]
fn a_backing_that_cannot_be_had_is_an_error_before_anything_is_read() {
    let _pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().expect("a directory");
    let path = written(&directory, &TinySpec::new(Architecture::Llama, TensorType::Q8_0));
    if memory::backing::probe(1 << 20)[0].available {
        eprintln!("skipped: this machine has huge pages");
        return;
    }
    let options = LoadOptions { backing: Choice::Only(Backing::Huge), ..Default::default() };
    let error = Model::open(&path, &options).err().expect("no huge pages");
    assert!(error.to_string().contains("vm.nr_hugepages"), "{error}");
}
