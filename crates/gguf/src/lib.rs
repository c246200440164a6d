//! GGUF files, versions 2 and 3: header, metadata, tensor table and split files.
//!
//! Source: the GGUF specification (ggml/docs/gguf.md). Everything here treats its input as hostile.
#![forbid(unsafe_code)]

mod cursor;
mod error;
mod metadata;
pub mod split;
mod table;
mod tensor_type;
mod texts;

pub use error::{Error, NAME_CHARS_MAX};
pub use metadata::{ARRAY_DEPTH_MAX, Array, Metadata, Value};
pub use tensor_type::TensorType;
pub use texts::Texts;

use std::io::Read;

use cursor::Cursor;
use error::clip;

/// Alignment of tensor data in a file without `general.alignment`.
pub const ALIGNMENT_BYTES_DEFAULT: u64 = 32;
/// Least `general.alignment` accepted: the specification asks for multiples of 8.
pub const ALIGNMENT_BYTES_MIN: u64 = 8;
/// Greatest `general.alignment` accepted: half a huge page, far beyond what any file asks for.
pub const ALIGNMENT_BYTES_MAX: u64 = 1 << 20;
/// Dimensions of a tensor at most (`GGML_MAX_DIMS`).
pub const DIMS_MAX: u32 = 4;
/// Least size of a key-value pair in the file: length of the key, type, one byte of value.
const PAIR_BYTES_MIN: u64 = 8 + 4 + 1;

/// One row of the tensor table.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// Name, unique in the file.
    pub name: String,
    /// Extents, fastest varying first, as in the file (`ne`): `[n_in, n_out, …]`.
    pub dims: Vec<u64>,
    /// Element type.
    pub ty: TensorType,
    /// Index of the split file that holds the bytes (0 for a single file).
    pub shard: usize,
    /// Position of the first byte in that file, in bytes from its start.
    pub offset_bytes: u64,
    /// Length of the data in bytes.
    pub len_bytes: u64,
}

impl TensorInfo {
    /// Values in a row.
    pub fn row_len(&self) -> u64 {
        self.dims.first().copied().unwrap_or(0)
    }

    /// Rows, over all dimensions but the first.
    pub fn rows(&self) -> u64 {
        self.dims.iter().skip(1).product()
    }
}

/// A parsed header: all metadata and the tensor table, without tensor data.
#[derive(Debug, Clone)]
pub struct Gguf {
    /// Format version: 2 or 3.
    pub version: u32,
    /// Key-value pairs in file order.
    pub metadata: Metadata,
    /// Tensor table in file order. To be read only: [`Gguf::tensor`] has an index into it.
    pub tensors: Vec<TensorInfo>,
    /// `general.alignment`, or 32.
    pub alignment_bytes: u64,
    /// Where tensor data begins, in bytes from the start of the (first) file.
    pub data_offset_bytes: u64,
    /// Files that hold the tensors.
    shards: usize,
    /// Places in `tensors`, ordered by name.
    by_name: Vec<usize>,
}

impl Gguf {
    /// Parses the header from `reader`, the start of a file of `len_bytes`. Reads ahead: where `reader` stands
    /// afterwards is not defined.
    ///
    /// Any bytes give a value or an [`Error`], and memory stays within a small multiple of the bytes really read.
    /// After success every tensor lies inside the file, aligned, made of whole blocks and apart from the others.
    pub fn read(reader: &mut dyn Read, len_bytes: u64) -> Result<Self, Error> {
        if len_bytes == 0 {
            return Err(Error::Empty);
        }
        let cursor = &mut Cursor::new(reader, len_bytes);
        let version = read_version(cursor)?;
        let tensor_count = cursor.u64("tensor count")?;
        let pair_count = cursor.count("metadata count", PAIR_BYTES_MIN)?;
        let tensor_count = cursor.check_count("tensor count", tensor_count, table::TENSOR_BYTES_MIN)?;

        let pairs = cursor.list(pair_count, |c| {
            let key = c.string("metadata key")?;
            let type_id = c.u32(&key)?;
            let value = Value::read(c, type_id, &key)?;
            Ok((key, value))
        })?;
        let metadata = Metadata::from_entries(pairs)?;
        let alignment_bytes = alignment_bytes(&metadata)?;

        let rows = cursor.list(tensor_count, table::read_row)?;
        // Cannot overflow: so many bytes have really been read.
        let data_offset_bytes = cursor.at_bytes().next_multiple_of(alignment_bytes);
        let tensors = table::place(rows, data_offset_bytes, alignment_bytes, len_bytes)?;
        let by_name = order_by_name(&tensors, |a, _| Error::DuplicateTensor { name: clip(&a.name) })?;
        Ok(Self { version, metadata, tensors, alignment_bytes, data_offset_bytes, shards: 1, by_name })
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let place =
            self.by_name.binary_search_by(|&i| self.tensors.get(i).map_or("", |t| t.name.as_str()).cmp(name)).ok()?;
        self.tensors.get(self.by_name[place])
    }

    /// Files that hold the tensors: 1, or the number of files given to [`Gguf::merge`].
    pub fn shard_count(&self) -> usize {
        self.shards
    }
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, Error> {
    let found = cursor.bytes("header")?;
    if &found != b"GGUF" {
        return Err(Error::Magic { found });
    }
    match cursor.u32("header")? {
        version @ (2 | 3) => Ok(version),
        found => match found.swap_bytes() {
            version @ 1..=0xffff => Err(Error::BigEndian { version }),
            _ => Err(Error::Version { found }),
        },
    }
}

fn alignment_bytes(metadata: &Metadata) -> Result<u64, Error> {
    let key = "general.alignment";
    match (metadata.get(key), metadata.u64(key)) {
        (None, _) => Ok(ALIGNMENT_BYTES_DEFAULT),
        (Some(_), None) => Err(Error::AlignmentType),
        (Some(_), Some(found)) => {
            let (min, max) = (ALIGNMENT_BYTES_MIN, ALIGNMENT_BYTES_MAX);
            if found.is_power_of_two() && (min..=max).contains(&found) {
                Ok(found)
            } else {
                Err(Error::Alignment { found, min, max })
            }
        }
    }
}

/// Places in `tensors` ordered by name; two of one name give the error made by `duplicate`.
fn order_by_name(
    tensors: &[TensorInfo],
    duplicate: impl Fn(&TensorInfo, &TensorInfo) -> Error,
) -> Result<Vec<usize>, Error> {
    let mut by_name: Vec<usize> = (0..tensors.len()).collect();
    by_name.sort_unstable_by(|&a, &b| (&tensors[a].name, a).cmp(&(&tensors[b].name, b)));
    for pair in by_name.windows(2) {
        let (a, b) = (&tensors[pair[0]], &tensors[pair[1]]);
        if a.name == b.name {
            return Err(duplicate(a, b));
        }
    }
    Ok(by_name)
}
