//! Files that must be read, and what is read from them.

use fixtures::gguf_writer::Writer;
use gguf::{Array, Error, Gguf, TensorType, Value};

fn read(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::read(&mut &bytes[..], bytes.len() as u64)
}

fn every_value() -> Vec<(&'static str, Value)> {
    let nested =
        Array::Array(vec![Array::U8(vec![1, 2]), Array::Array(vec![Array::String(["deep"].iter().collect())])]);
    vec![
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-100)),
        ("u16", Value::U16(60_000)),
        ("i16", Value::I16(-30_000)),
        ("u32", Value::U32(4_000_000_000)),
        ("i32", Value::I32(-2_000_000_000)),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f32", Value::F32(1.5)),
        ("f64", Value::F64(-2.25)),
        ("bool", Value::Bool(true)),
        ("string", Value::String("zażółć 🦀".into())),
        ("empty string", Value::String(String::new())),
        ("u8s", Value::Array(Array::U8(vec![1, 255]))),
        ("i8s", Value::Array(Array::I8(vec![-1, 127]))),
        ("u16s", Value::Array(Array::U16(vec![1, 65_535]))),
        ("i16s", Value::Array(Array::I16(vec![-1]))),
        ("u32s", Value::Array(Array::U32((0..5000).collect()))),
        ("i32s", Value::Array(Array::I32(vec![-7, 7]))),
        ("u64s", Value::Array(Array::U64(vec![u64::MAX]))),
        ("i64s", Value::Array(Array::I64(vec![i64::MIN, 0]))),
        ("f32s", Value::Array(Array::F32(vec![0.5, -0.5]))),
        ("f64s", Value::Array(Array::F64(vec![1e300]))),
        ("bools", Value::Array(Array::Bool(vec![true, false]))),
        ("strings", Value::Array(Array::String(["a", "", &"x".repeat(10_000)].iter().collect()))),
        ("none", Value::Array(Array::F32(vec![]))),
        ("nested", Value::Array(nested)),
    ]
}

#[test]
fn every_metadata_type_is_read_as_written_in_both_versions() {
    for version in [2, 3] {
        let mut writer = Writer { version, ..Writer::new() };
        for (key, value) in every_value() {
            writer.set(key, value);
        }
        let file = read(&writer.to_bytes()).unwrap();
        assert_eq!(file.version, version);
        let read: Vec<(&str, Value)> = file.metadata.iter().map(|(k, v)| (k, v.clone())).collect();
        assert_eq!(read, every_value());
        for (key, value) in every_value() {
            assert_eq!(file.metadata.get(key), Some(&value));
        }
        assert_eq!(file.metadata.get("absent"), None);
    }
}

#[test]
fn numbers_are_found_whatever_their_width() {
    let mut writer = Writer::new();
    for (key, value) in every_value() {
        writer.set(key, value);
    }
    let metadata = read(&writer.to_bytes()).unwrap().metadata;
    assert_eq!(metadata.u64("u16"), Some(60_000));
    assert_eq!(metadata.u64("i16"), None);
    assert_eq!(metadata.u64("f32"), None);
    assert_eq!(metadata.f32("f64"), Some(-2.25));
    assert_eq!(metadata.bool("bool"), Some(true));
    assert_eq!(metadata.str("string"), Some("zażółć 🦀"));
    assert_eq!(metadata.strings("strings").map(gguf::Texts::len), Some(3));
    assert_eq!(metadata.i32s("i8s"), Some(vec![-1, 127]));
    assert_eq!(metadata.f32s("f32s"), Some(&[0.5, -0.5][..]));
}

#[test]
fn tensors_have_absolute_positions_behind_aligned_data() {
    let mut writer = Writer::new();
    writer.align(64);
    writer.tensor("a", &[32, 3], TensorType::Q4_0, vec![1; 54]);
    writer.tensor("b", &[5], TensorType::F32, vec![2; 20]);
    let bytes = writer.to_bytes();
    let file = read(&bytes).unwrap();
    assert_eq!((file.alignment_bytes, file.data_offset_bytes % 64, file.shard_count()), (64, 0, 1));
    let (a, b) = (file.tensor("a").unwrap(), file.tensor("b").unwrap());
    assert_eq!((a.row_len(), a.rows(), a.len_bytes, a.shard), (32, 3, 54, 0));
    assert_eq!(b.offset_bytes, a.offset_bytes + 64);
    assert_eq!(bytes[b.offset_bytes as usize..][..20], [2; 20]);
    assert_eq!(file.tensor("c"), None);
}

#[test]
fn the_last_tensor_may_lack_its_padding_and_the_file_may_go_on() {
    let mut writer = Writer::new();
    writer.tensor("a", &[3], TensorType::F32, vec![1; 12]);
    let mut bytes = writer.to_bytes();
    bytes.truncate(bytes.len() - 20);
    read(&bytes).unwrap();
    bytes.extend([9; 1000]);
    read(&bytes).unwrap();
}

#[test]
fn a_vocabulary_without_tensors_may_end_before_the_aligned_data() {
    let mut writer = Writer::new();
    writer.set("k", 1u8);
    let mut bytes = writer.to_bytes();
    bytes.truncate(24 + 8 + 1 + 4 + 1);
    assert_eq!(read(&bytes).unwrap().tensors, []);
}

#[test]
fn every_tensor_type_has_a_number_and_whole_blocks() {
    for &ty in TensorType::ALL {
        assert_eq!(TensorType::from_id(ty as u32), Some(ty));
        assert_eq!(ty.row_bytes(ty.block_len() * 2), Some(ty.block_bytes() * 2));
        let mut writer = Writer::new();
        writer.tensor("t", &[ty.block_len(), 2], ty, vec![0; 2 * ty.block_bytes() as usize]);
        assert_eq!(read(&writer.to_bytes()).unwrap().tensors[0].ty, ty);
    }
}

#[test]
fn a_split_model_becomes_one_index() {
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama");
    for i in 0..5u8 {
        writer.tensor(&format!("t{i}"), &[8], TensorType::F32, vec![i; 32]);
    }
    let shards: Vec<_> = writer.split(3).iter().map(|w| read(&w.to_bytes()).unwrap()).collect();
    let merged = Gguf::merge(shards).unwrap();
    assert_eq!((merged.shard_count(), merged.tensors.len()), (3, 5));
    let places: Vec<usize> = (0..5).map(|i| merged.tensor(&format!("t{i}")).unwrap().shard).collect();
    assert_eq!(places, [0, 0, 1, 1, 2]);
    assert_eq!(merged.metadata.str("general.architecture"), Some("llama"));
}

#[test]
fn a_single_file_merges_to_itself() {
    let mut writer = Writer::new();
    writer.tensor("t", &[8], TensorType::F32, vec![0; 32]);
    let merged = Gguf::merge(vec![read(&writer.to_bytes()).unwrap()]).unwrap();
    assert_eq!((merged.shard_count(), merged.tensors.len()), (1, 1));
}
