//! Damaged files: never a panic, never more memory than a small multiple of the file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use fixtures::Rng;
use fixtures::gguf_writer::Writer;
use gguf::{Array, Error, Gguf, TensorType, Value};

/// Memory for each byte of the file. The worst is a table of the smallest pairs: 13 bytes of file become an entry of
/// 56 bytes, and a growing vector holds its old half beside the new whole.
const BYTES_PER_FILE_BYTE: usize = 10;
/// Memory whatever the file: first steps of vectors, and messages.
const SLACK_BYTES: usize = 16 * 1024;
/// The buffer in front of the reader, where the length promised is not that of the file.
const BUFFER_BYTES: usize = 64 * 1024;

/// What one thread has allocated since [`measure`] began.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    now: usize,
    peak: usize,
    largest: usize,
}

thread_local! {
    // Constant and without a destructor, so that touching it never allocates.
    static USE: Cell<Use> = const { Cell::new(Use { now: 0, peak: 0, largest: 0 }) };
}

fn count(freed: usize, taken: usize) {
    USE.with(|cell| {
        let mut used = cell.get();
        // The old half of a growing vector may live beside the new one while it is copied.
        used.peak = used.peak.max(used.now + taken);
        // What was allocated before the measurement may be freed within it.
        used.now = (used.now + taken).saturating_sub(freed);
        used.largest = used.largest.max(taken);
        cell.set(used);
    });
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of the caller.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `dealloc`; `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(layout.size(), new_size);
        // SAFETY: the caller keeps the contract of `realloc`; `ptr` came from `System`.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of reading `bytes` as a file of `len_bytes`, and the memory that took.
fn measure(bytes: &[u8], len_bytes: u64) -> (Result<Gguf, Error>, Use) {
    USE.set(Use::default());
    let result = Gguf::read(&mut &bytes[..], len_bytes);
    (result, USE.get())
}

fn assert_bounded(used: Use, file_bytes: usize, slack_bytes: usize, what: &str) {
    let limit = file_bytes * BYTES_PER_FILE_BYTE + slack_bytes;
    assert!(used.peak <= limit, "{what}: a file of {file_bytes} bytes took {} bytes", used.peak);
    assert!(used.largest <= limit, "{what}: a file of {file_bytes} bytes took {} bytes at once", used.largest);
}

/// A small file with every kind of value and several tensors.
fn complete_file() -> Vec<u8> {
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").align(64);
    writer.set("a", 1u8).set("b", -1i8).set("c", 2u16).set("d", -2i16).set("e", 3u32).set("f", -3i32);
    writer.set("g", 4u64).set("h", -4i64).set("i", 0.5f32).set("j", 0.25f64).set("k", true);
    writer.set("tokens", (0..60).map(|i| format!("token {i}")).collect::<Vec<_>>());
    writer.set("scores", (0..60).map(|i| i as f32).collect::<Vec<_>>());
    writer.set("types", vec![1i32; 60]);
    writer.set("bools", Value::Array(Array::Bool(vec![true, false, true])));
    writer.set("words", Value::Array(Array::U64(vec![7; 10])));
    writer.set(
        "nested",
        Value::Array(Array::Array(vec![Array::U8(vec![1, 2, 3]), Array::String(["x"].iter().collect())])),
    );
    for (i, ty) in [TensorType::F32, TensorType::Q4_K, TensorType::Q8_0, TensorType::BF16].into_iter().enumerate() {
        let len = 2 * ty.row_bytes(256).unwrap() as usize;
        writer.tensor(&format!("blk.{i}.weight"), &[256, 2], ty, vec![i as u8; len]);
    }
    writer.to_bytes()
}

/// Damages `bytes`, mostly in the header of `header_len` bytes.
fn damage(bytes: &mut Vec<u8>, header_len: usize, rng: &mut Rng) {
    let place = |rng: &mut Rng, room: usize| rng.below((header_len - room) as u64) as usize;
    match rng.below(6) {
        0 => {
            for _ in 0..=rng.below(8) {
                let at = place(rng, 0);
                bytes[at] ^= 1 << rng.below(8);
            }
        }
        1 => bytes.truncate(rng.below(bytes.len() as u64) as usize),
        2 => {
            // A number that looks like a count or a length becomes another one.
            for _ in 0..64 {
                let at = place(rng, 8);
                let old = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                if old < 10_000 {
                    let left = (bytes.len() - at) as u64;
                    let new = match rng.below(7) {
                        0 => old + 1,
                        1 => old.wrapping_sub(1),
                        2 => left / (1 + rng.below(32)),
                        3 => 1 << rng.below(64),
                        4 => u64::MAX - rng.below(64),
                        5 => u64::MAX / (1 + rng.below(300)),
                        _ => rng.below(old + 100),
                    };
                    bytes[at..at + 8].copy_from_slice(&new.to_le_bytes());
                    break;
                }
            }
        }
        3 => {
            let at = place(rng, 4);
            let new = rng.below(45) as u32;
            bytes[at..at + 4].copy_from_slice(&new.to_le_bytes());
        }
        4 => {
            let (at, len) = (place(rng, 0), rng.below(40) as usize);
            bytes.drain(at..(at + len).min(header_len));
        }
        _ => {
            let (from, at) = (place(rng, 40), place(rng, 0));
            let copy: Vec<u8> = bytes[from..from + rng.below(40) as usize].to_vec();
            bytes.splice(at..at, copy);
        }
    }
}

#[test]
fn a_damaged_file_gives_an_error_or_a_file_and_takes_no_more_memory_than_its_size_allows() {
    let whole = complete_file();
    let header_len = Gguf::read(&mut &whole[..], whole.len() as u64).unwrap().data_offset_bytes as usize;
    let mut rng = Rng::new(20_240_601);
    let (mut read, mut kinds) = (0, HashSet::new());
    const ROUNDS: usize = 60_000;
    for round in 0..ROUNDS {
        let mut bytes = whole.clone();
        damage(&mut bytes, header_len, &mut rng);
        // One time in eight the length promised is a lie.
        let (len_bytes, slack) = match rng.below(8) {
            0 => (rng.u64() >> rng.below(64), SLACK_BYTES + BUFFER_BYTES),
            _ => (bytes.len() as u64, SLACK_BYTES),
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| measure(&bytes, len_bytes)));
        let (result, used) = outcome.unwrap_or_else(|_| panic!("round {round} panicked"));
        assert_bounded(used, bytes.len(), slack, &format!("round {round}"));
        match result {
            Ok(file) => {
                read += 1;
                for tensor in &file.tensors {
                    assert!(tensor.offset_bytes + tensor.len_bytes <= len_bytes, "round {round}");
                    assert_eq!(tensor.ty.row_bytes(tensor.row_len()).unwrap() * tensor.rows(), tensor.len_bytes);
                    assert_eq!(file.tensor(&tensor.name), Some(tensor), "round {round}");
                }
            }
            Err(error) => {
                assert!(error.to_string().len() < 2000, "round {round}");
                kinds.insert(std::mem::discriminant(&error));
            }
        }
    }
    // Not vacuous: some damage is harmless (a changed value), and the rest meets nearly every check.
    assert!(read > ROUNDS / 20 && read < ROUNDS / 2, "{read} of {ROUNDS} files were read");
    assert!(kinds.len() >= 18, "{} kinds of errors", kinds.len());
}

#[test]
fn files_of_the_smallest_items_take_memory_in_proportion() {
    let mut pairs = Writer::new();
    let mut tensors = Writer::new();
    tensors.align(8);
    for i in 0..8000u32 {
        let name: String = [i % 20, i / 20 % 20, i / 400].iter().map(|&c| char::from(b'a' + c as u8)).collect();
        pairs.set(&name, 1u8);
        tensors.tensor(&name, &[1], TensorType::I8, vec![0]);
    }
    let mut strings = Writer::new();
    strings.set("k", vec![String::new(); 20_000]);
    let mut arrays = Writer::new();
    arrays.set("k", Value::Array(Array::Array(vec![Array::U8(vec![]); 20_000])));
    let mut bytes = Writer::new();
    bytes.set("k", "x".repeat(200_000));
    for (what, writer) in
        [("pairs", pairs), ("tensors", tensors), ("strings", strings), ("arrays", arrays), ("bytes", bytes)]
    {
        let file = writer.to_bytes();
        let (result, used) = measure(&file, file.len() as u64);
        result.unwrap();
        assert_bounded(used, file.len(), SLACK_BYTES, what);
        // Not vacuous: the counting allocator has seen the table.
        assert!(used.peak > file.len() / 2, "{what}: {used:?}");
    }
}
