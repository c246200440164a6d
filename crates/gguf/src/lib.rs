//! GGUF files, versions 2 and 3: header, metadata, tensor table and split files.
//!
//! Source: the GGUF specification (ggml/docs/gguf.md). Everything here treats its input as hostile.
#![forbid(unsafe_code)]

mod error;
mod metadata;
mod tensor_type;

pub use error::Error;
pub use metadata::{Array, Metadata, Value};
pub use tensor_type::TensorType;

use std::io::Read;

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

/// A parsed header: all metadata and the tensor table, without tensor data.
#[derive(Debug, Clone)]
pub struct Gguf {
    /// Format version: 2 or 3.
    pub version: u32,
    /// Key-value pairs in file order.
    pub metadata: Metadata,
    /// Tensor table in file order.
    pub tensors: Vec<TensorInfo>,
    /// `general.alignment`, or 32.
    pub alignment_bytes: u64,
    /// Where tensor data begins, in bytes from the start of the file.
    pub data_offset_bytes: u64,
}

impl Gguf {
    /// Parses the header from `reader`, the start of a file of `len_bytes`.
    pub fn read(reader: &mut dyn Read, len_bytes: u64) -> Result<Self, Error> {
        let _ = (reader, len_bytes);
        todo!()
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|t| t.name == name)
    }
}
