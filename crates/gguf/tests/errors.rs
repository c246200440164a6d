//! Files that must be refused, and the numbers and names in the refusal.

use fixtures::gguf_writer::{Tensor, Writer};
use gguf::{ARRAY_DEPTH_MAX, Array, Error, Gguf, NAME_CHARS_MAX, TensorType, Value};

fn read(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::read(&mut &bytes[..], bytes.len() as u64)
}

fn refusal(bytes: &[u8]) -> Error {
    read(bytes).expect_err("the file should be refused")
}

/// A header without its counts' contents: version 3, so many tensors and pairs, then `rest`.
fn header(tensors: u64, pairs: u64, rest: &[u8]) -> Vec<u8> {
    [&b"GGUF"[..], &3u32.to_le_bytes(), &tensors.to_le_bytes(), &pairs.to_le_bytes(), rest].concat()
}

/// A pair called `k` of the type `id`.
fn pair(id: u32, value: &[u8]) -> Vec<u8> {
    [&1u64.to_le_bytes()[..], b"k", &id.to_le_bytes(), value].concat()
}

fn one_tensor(dims: &[u64], ty: TensorType, len: usize) -> Writer {
    let mut writer = Writer::new();
    writer.tensor("t", dims, ty, vec![0; len]);
    writer
}

/// The file of `writer` with the offset of its last tensor, which ends the header, replaced.
fn with_last_offset(writer: &Writer, offset: u64) -> Vec<u8> {
    let mut bytes = writer.to_bytes();
    let end = writer.header_len();
    bytes[end - 8..end].copy_from_slice(&offset.to_le_bytes());
    bytes
}

#[test]
fn an_empty_file_is_refused() {
    assert_eq!(refusal(b""), Error::Empty);
}

#[test]
fn another_magic_is_refused() {
    assert_eq!(refusal(b"PK\x03\x04 and so on"), Error::Magic { found: *b"PK\x03\x04" });
}

#[test]
fn a_big_endian_file_is_named_so() {
    let bytes = [&b"GGUF"[..], &3u32.to_be_bytes(), &[0; 16]].concat();
    assert_eq!(refusal(&bytes), Error::BigEndian { version: 3 });
}

#[test]
fn other_versions_are_refused() {
    for found in [0, 1, 4, u32::MAX] {
        let bytes = [&b"GGUF"[..], &found.to_le_bytes(), &[0; 16]].concat();
        assert_eq!(refusal(&bytes), Error::Version { found });
    }
}

#[test]
fn a_header_cut_anywhere_is_truncated() {
    let mut writer = one_tensor(&[8], TensorType::F32, 32);
    writer.set("key", "value").set("list", vec![1i32, 2, 3]);
    let bytes = writer.to_bytes();
    read(&bytes).unwrap();
    for len in 1..bytes.len() - 32 {
        let error = refusal(&bytes[..len]);
        assert!(
            matches!(error, Error::Truncated { .. } | Error::Count { .. } | Error::BeyondEnd { .. }),
            "{len}: {error}"
        );
    }
    let Error::Truncated { at_bytes, need_bytes, remaining_bytes, .. } = refusal(&bytes[..6]) else { panic!() };
    assert_eq!((at_bytes, need_bytes, remaining_bytes), (4, 4, 2));
}

#[test]
fn a_reader_shorter_than_the_stated_length_is_truncated() {
    let bytes = one_tensor(&[8], TensorType::F32, 32).to_bytes();
    let error = Gguf::read(&mut &bytes[..30], bytes.len() as u64).unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");
}

#[test]
fn counts_that_the_file_cannot_hold_are_refused() {
    for (tensors, pairs, name) in
        [(0, u64::MAX, "metadata count"), (u64::MAX, 0, "tensor count"), (2, 0, "tensor count")]
    {
        let Error::Count { what, count, remaining_bytes, .. } = refusal(&header(tensors, pairs, &[0; 40])) else {
            panic!()
        };
        assert_eq!((what.as_str(), count, remaining_bytes), (name, tensors.max(pairs), 40));
    }
    // A string, an array of numbers, one of strings, one of arrays.
    let huge = u64::MAX.to_le_bytes();
    let array = |id: u32| [&id.to_le_bytes()[..], &huge].concat();
    for (id, value) in [(8, huge.to_vec()), (9, array(6)), (9, array(8)), (9, array(9))] {
        let error = refusal(&header(0, 1, &pair(id, &value)));
        assert!(matches!(&error, Error::Count { what, count: u64::MAX, .. } if what == "k"), "{error}");
    }
}

#[test]
fn text_that_is_not_utf8_is_refused() {
    let value = [&4u64.to_le_bytes()[..], b"ab\xff\xff"].concat();
    let error = refusal(&header(0, 1, &pair(8, &value)));
    assert_eq!(error, Error::Utf8 { what: "k".into(), at_bytes: 49, len_bytes: 4, valid_bytes: 2 });
}

#[test]
fn unknown_metadata_types_are_refused() {
    assert_eq!(refusal(&header(0, 1, &pair(13, &[0; 8]))), Error::ValueType { key: "k".into(), id: 13 });
    let array = [&77u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
    assert_eq!(refusal(&header(0, 1, &pair(9, &array))), Error::ValueType { key: "k".into(), id: 77 });
}

#[test]
fn booleans_are_zero_or_one() {
    assert_eq!(refusal(&header(0, 1, &pair(7, &[2]))), Error::Bool { key: "k".into(), found: 2 });
    let array = [&7u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[1, 9]].concat();
    assert_eq!(refusal(&header(0, 1, &pair(9, &array))), Error::Bool { key: "k".into(), found: 9 });
}

#[test]
fn arrays_nest_to_a_limit() {
    let nested = |levels: usize| {
        let mut writer = Writer::new();
        let inner = (1..levels).fold(Array::U8(vec![1]), |inner, _| Array::Array(vec![inner]));
        writer.set("k", Value::Array(inner));
        writer.to_bytes()
    };
    read(&nested(ARRAY_DEPTH_MAX)).unwrap();
    let error = refusal(&nested(ARRAY_DEPTH_MAX + 1));
    assert_eq!(error, Error::Depth { key: "k".into(), depth_max: ARRAY_DEPTH_MAX });
}

#[test]
fn a_key_occurs_once() {
    let mut writer = Writer::new();
    writer.set("b", 1u8).set("a", 2u8).set("b", 3u8);
    assert_eq!(refusal(&writer.to_bytes()), Error::DuplicateKey { key: "b".into() });
}

#[test]
fn the_alignment_is_a_sane_power_of_two() {
    for found in [0u64, 1, 4, 24, 1 << 21, u64::MAX] {
        let mut writer = Writer::new();
        writer.set("general.alignment", found);
        assert!(matches!(refusal(&writer.to_bytes()), Error::Alignment { found: f, .. } if f == found), "{found}");
    }
    for value in [Value::String("32".into()), Value::I32(-32), Value::F32(32.0)] {
        let mut writer = Writer::new();
        writer.set("general.alignment", value);
        assert_eq!(refusal(&writer.to_bytes()), Error::AlignmentType);
    }
}

#[test]
fn a_tensor_name_occurs_once() {
    let mut writer = one_tensor(&[8], TensorType::F32, 32);
    writer.tensor("t", &[8], TensorType::F32, vec![0; 32]);
    assert_eq!(refusal(&writer.to_bytes()), Error::DuplicateTensor { name: "t".into() });
}

#[test]
fn a_tensor_has_one_to_four_dimensions() {
    for dims in [&[][..], &[1, 1, 1, 1, 1]] {
        let bytes = [one_tensor(dims, TensorType::F32, 4).to_bytes(), vec![0; 64]].concat();
        let count = dims.len() as u32;
        assert_eq!(refusal(&bytes), Error::Dims { name: "t".into(), count, max: 4 });
    }
    let mut bytes = one_tensor(&[8], TensorType::F32, 32).to_bytes();
    bytes[24 + 9..24 + 13].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(refusal(&bytes), Error::Dims { name: "t".into(), count: u32::MAX, max: 4 });
}

#[test]
fn a_tensor_without_values_is_refused() {
    let error = refusal(&one_tensor(&[8, 0], TensorType::F32, 0).to_bytes());
    assert_eq!(error, Error::ZeroExtent { name: "t".into(), dim: 1 });
}

#[test]
fn a_tensor_larger_than_any_file_is_refused() {
    for dims in [&[u64::MAX, 2][..], &[1 << 32, 1 << 31], &[1 << 62]] {
        let error = refusal(&one_tensor(dims, TensorType::F32, 32).to_bytes());
        assert!(matches!(&error, Error::TensorSize { dims: d, .. } if d == dims), "{error}");
    }
    let bytes = with_last_offset(&one_tensor(&[8], TensorType::F32, 32), !31);
    assert!(matches!(refusal(&bytes), Error::TensorSize { offset_bytes, .. } if offset_bytes == !31));
}

#[test]
fn an_unknown_tensor_type_is_named_with_its_tensor() {
    let mut bytes = one_tensor(&[8], TensorType::F32, 32).to_bytes();
    bytes[24 + 9 + 12..24 + 9 + 16].copy_from_slice(&31u32.to_le_bytes());
    let error = refusal(&bytes);
    assert_eq!(error, Error::TensorType { name: "t".into(), id: 31 });
    assert_eq!(error.to_string(), "tensor \"t\" has the unknown type 31");
}

#[test]
fn a_row_is_whole_blocks() {
    let error = refusal(&one_tensor(&[48, 2], TensorType::Q4_0, 54).to_bytes());
    assert_eq!(error, Error::Row { name: "t".into(), ty: TensorType::Q4_0, row_len: 48, block_len: 32 });
}

#[test]
fn a_misaligned_tensor_is_refused() {
    let bytes = with_last_offset(&one_tensor(&[8], TensorType::F32, 64), 8);
    assert_eq!(refusal(&bytes), Error::Misaligned { name: "t".into(), offset_bytes: 8, alignment_bytes: 32 });
}

#[test]
fn tensors_that_share_bytes_are_refused() {
    let mut writer = one_tensor(&[16], TensorType::F32, 64);
    writer.tensor("u", &[8], TensorType::F32, vec![0; 32]);
    let Error::Overlap { first, first_end_bytes, second, second_offset_bytes } =
        refusal(&with_last_offset(&writer, 32))
    else {
        panic!()
    };
    assert_eq!((first.as_str(), second.as_str(), first_end_bytes - second_offset_bytes), ("t", "u", 32));
    read(&with_last_offset(&writer, 64)).unwrap();
}

#[test]
fn tensor_data_past_the_end_of_the_file_is_refused() {
    let bytes = one_tensor(&[8], TensorType::F32, 32).to_bytes();
    let (end_bytes, file_bytes) = (bytes.len() as u64, bytes.len() as u64 - 1);
    let error = refusal(&bytes[..bytes.len() - 1]);
    assert_eq!(error, Error::BeyondEnd { name: "t".into(), end_bytes, file_bytes });
}

#[test]
fn long_and_strange_names_stay_one_short_line_in_messages() {
    let mut writer = Writer::new();
    let name = format!("\u{1b}[31m\n{}", "é".repeat(5000));
    writer.tensors = vec![Tensor { name, dims: vec![0], ty: TensorType::F32, bytes: vec![] }];
    let message = refusal(&writer.to_bytes()).to_string();
    assert!(!message.contains(['\u{1b}', '\n']) && message.chars().count() < NAME_CHARS_MAX + 100, "{message}");
}

mod split {
    use super::*;

    fn shards(count: usize) -> Vec<Writer> {
        let mut writer = Writer::new();
        for i in 0..4 {
            writer.tensor(&format!("t{i}"), &[8], TensorType::F32, vec![0; 32]);
        }
        writer.split(count)
    }

    fn merge(writers: &[Writer]) -> Error {
        let files = writers.iter().map(|w| read(&w.to_bytes()).unwrap()).collect();
        Gguf::merge(files).expect_err("the files should be refused")
    }

    fn set(writer: &mut Writer, key: &str, value: Option<Value>) {
        writer.metadata.retain(|(k, _)| k != key);
        if let Some(value) = value {
            writer.set(key, value);
        }
    }

    #[test]
    fn no_files_are_refused() {
        assert_eq!(merge(&[]), Error::NoShards);
    }

    #[test]
    fn shards_in_the_wrong_order_are_refused() {
        let mut files = shards(3);
        files.swap(1, 2);
        assert_eq!(merge(&files), Error::ShardOrder { shard: 2, said: 3 });
        assert_eq!(merge(&shards(2)[1..]), Error::ShardOrder { shard: 1, said: 2 });
    }

    #[test]
    fn a_missing_shard_is_noticed() {
        assert_eq!(merge(&shards(3)[..2]), Error::ShardCount { shard: 1, said: 3, given: 2 });
        assert_eq!(merge(&shards(3)[..1]), Error::ShardCount { shard: 1, said: 3, given: 1 });
    }

    #[test]
    fn a_file_of_no_split_does_not_belong() {
        let mut files = shards(2);
        set(&mut files[1], "split.count", None);
        assert_eq!(merge(&files), Error::ShardKey { shard: 2, given: 2, key: "split.count" });
    }

    #[test]
    fn the_number_of_tensors_must_be_as_stated() {
        let mut files = shards(2);
        set(&mut files[1], "split.tensors.count", Some(Value::I32(5)));
        assert_eq!(merge(&files), Error::ShardTensors { shard: 2, said: 5, found: 4 });
        set(&mut files[1], "split.tensors.count", Some(Value::I32(-1)));
        assert_eq!(merge(&files), Error::ShardKey { shard: 2, given: 2, key: "split.tensors.count" });
    }

    #[test]
    fn a_tensor_in_two_shards_is_refused() {
        let mut files = shards(2);
        files[1].tensors[0].name = "t1".into();
        assert_eq!(merge(&files), Error::ShardDuplicate { name: "t1".into(), first: 1, second: 2 });
    }
}
