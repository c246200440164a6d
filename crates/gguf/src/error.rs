//! What can be wrong with a GGUF file.

use crate::TensorType;

/// What can be wrong with a GGUF file, with the numbers.
///
/// Names come from the file: they are cut to [`NAME_CHARS_MAX`] characters and printed escaped, so that a message
/// stays one readable line whatever the file holds.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The reader failed.
    #[error("reading failed at byte {at_bytes}: {message}")]
    Io {
        /// Position in the file.
        at_bytes: u64,
        /// Kind of the system's error.
        kind: std::io::ErrorKind,
        /// What the system said.
        message: String,
    },
    /// The file has no bytes.
    #[error("the file is empty")]
    Empty,
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"")]
    Magic {
        /// The bytes found.
        found: [u8; 4],
    },
    /// The numbers of the file are big-endian.
    #[error("a big-endian GGUF file (version {version}): only little-endian files can be read")]
    BigEndian {
        /// Version, read as big-endian.
        version: u32,
    },
    /// A version other than 2 and 3.
    #[error("GGUF version {found}: only versions 2 and 3 can be read")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The file ends inside something.
    #[error(
        "truncated: {need_bytes} bytes of {what:?} are needed at byte {at_bytes}, but {remaining_bytes} are left of the file"
    )]
    Truncated {
        /// What was being read: a part of the format, or a key.
        what: String,
        /// Position in the file.
        at_bytes: u64,
        /// Bytes needed there.
        need_bytes: u64,
        /// Bytes left there.
        remaining_bytes: u64,
    },
    /// A count that the rest of the file cannot hold.
    #[error(
        "{what:?} claims {count} items of at least {each_bytes_min} bytes at byte {at_bytes}, but {remaining_bytes} bytes are left of the file"
    )]
    Count {
        /// What is counted: a part of the format, or a key.
        what: String,
        /// The count found.
        count: u64,
        /// Least size of one item.
        each_bytes_min: u64,
        /// Position after the count.
        at_bytes: u64,
        /// Bytes left there.
        remaining_bytes: u64,
    },
    /// Text that is not UTF-8.
    #[error(
        "{what:?}: the text of {len_bytes} bytes that ends at byte {at_bytes} is not UTF-8 after its first {valid_bytes} bytes"
    )]
    Utf8 {
        /// What was being read: a part of the format, or a key.
        what: String,
        /// Position after the text.
        at_bytes: u64,
        /// Length of the text.
        len_bytes: u64,
        /// Length of its valid beginning.
        valid_bytes: u64,
    },
    /// A metadata type that the format does not define.
    #[error("metadata key {key:?} has the unknown type {id}: the format defines 0 to 12")]
    ValueType {
        /// The key.
        key: String,
        /// Number of the type.
        id: u32,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("metadata key {key:?} holds the boolean {found}: only 0 and 1 are allowed")]
    Bool {
        /// The key.
        key: String,
        /// The byte found.
        found: u8,
    },
    /// Arrays nested too deeply.
    #[error("metadata key {key:?} nests arrays more than {depth_max} deep")]
    Depth {
        /// The key.
        key: String,
        /// Levels allowed.
        depth_max: usize,
    },
    /// A key that occurs twice.
    #[error("metadata key {key:?} occurs twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// `general.alignment` is not an integer.
    #[error("general.alignment is not an integer")]
    AlignmentType,
    /// `general.alignment` is out of bounds.
    #[error("general.alignment is {found}: a power of two from {min} to {max} is expected")]
    Alignment {
        /// Alignment found, in bytes.
        found: u64,
        /// Least alignment accepted.
        min: u64,
        /// Greatest alignment accepted.
        max: u64,
    },
    /// A tensor name that occurs twice in a file.
    #[error("tensor {name:?} occurs twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// A tensor with no or too many dimensions.
    #[error("tensor {name:?} has {count} dimensions: 1 to {max} are expected")]
    Dims {
        /// Name of the tensor.
        name: String,
        /// Dimensions found.
        count: u32,
        /// Dimensions allowed.
        max: u32,
    },
    /// A tensor with an extent of zero.
    #[error("tensor {name:?} has no values: its dimension {dim} is 0")]
    ZeroExtent {
        /// Name of the tensor.
        name: String,
        /// The dimension, from 0.
        dim: usize,
    },
    /// A tensor whose size or end does not fit 63 bits.
    #[error("tensor {name:?} with dimensions {dims:?} at offset {offset_bytes} is larger than any file")]
    TensorSize {
        /// Name of the tensor.
        name: String,
        /// Its extents.
        dims: Vec<u64>,
        /// Its offset in the data section.
        offset_bytes: u64,
    },
    /// An element type that is not in the table.
    #[error("tensor {name:?} has the unknown type {id}")]
    TensorType {
        /// Name of the tensor.
        name: String,
        /// Number of the type.
        id: u32,
    },
    /// A row that is not a whole number of blocks.
    #[error("tensor {name:?}: rows of {row_len} values are not whole {ty} blocks of {block_len}")]
    Row {
        /// Name of the tensor.
        name: String,
        /// Its type.
        ty: TensorType,
        /// Values in a row.
        row_len: u64,
        /// Values in a block.
        block_len: u64,
    },
    /// A tensor offset that is not a multiple of the alignment.
    #[error("tensor {name:?} starts at offset {offset_bytes}, not a multiple of the alignment {alignment_bytes}")]
    Misaligned {
        /// Name of the tensor.
        name: String,
        /// Its offset in the data section.
        offset_bytes: u64,
        /// The file's alignment.
        alignment_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error(
        "tensor {second:?} starts at byte {second_offset_bytes}, inside {first:?} that ends at byte {first_end_bytes}"
    )]
    Overlap {
        /// Name of the tensor that starts first.
        first: String,
        /// Where it ends in the file.
        first_end_bytes: u64,
        /// Name of the other.
        second: String,
        /// Where it starts in the file.
        second_offset_bytes: u64,
    },
    /// The file ends before the data of a tensor does.
    #[error("truncated: tensor {name:?} ends at byte {end_bytes}, but the file has {file_bytes} bytes")]
    BeyondEnd {
        /// Name of the tensor.
        name: String,
        /// Where its data should end.
        end_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// A shard other than the first was given as the model.
    #[error("{given:?} is not the first file of a split model: give {first:?}")]
    NotFirstShard {
        /// File name given.
        given: String,
        /// File name of the first shard.
        first: String,
    },
    /// No files to merge.
    #[error("a split model of no files")]
    NoShards,
    /// A shard lacks one of its keys.
    #[error("file {shard} of a split model of {given} has no {key:?}")]
    ShardKey {
        /// Place of the file, from 1.
        shard: usize,
        /// Files given.
        given: usize,
        /// The key.
        key: &'static str,
    },
    /// A shard says that the model has another number of files.
    #[error("file {shard} says that the split model has {said} files, but {given} were given")]
    ShardCount {
        /// Place of the file, from 1.
        shard: usize,
        /// `split.count`.
        said: u64,
        /// Files given.
        given: usize,
    },
    /// A shard is not in its place.
    #[error("file {shard} of the split model says that it is number {said}")]
    ShardOrder {
        /// Place of the file, from 1.
        shard: usize,
        /// `split.no` + 1.
        said: u64,
    },
    /// The shards do not hold the tensors that they should.
    #[error("file {shard} says that the split model has {said} tensors, but its files hold {found}")]
    ShardTensors {
        /// Place of the file, from 1.
        shard: usize,
        /// `split.tensors.count`.
        said: u64,
        /// Tensors in all files.
        found: u64,
    },
    /// A tensor is in two shards.
    #[error("tensor {name:?} is in file {first} and in file {second} of the split model")]
    ShardDuplicate {
        /// The name.
        name: String,
        /// Place of one file, from 1.
        first: usize,
        /// Place of the other.
        second: usize,
    },
}

/// Characters of a name from the file that an [`Error`] keeps.
pub const NAME_CHARS_MAX: usize = 200;

/// The beginning of a name from the file.
pub(crate) fn clip(name: &str) -> String {
    match name.char_indices().nth(NAME_CHARS_MAX) {
        Some((cut, _)) => format!("{}…", &name[..cut]),
        None => name.to_owned(),
    }
}
