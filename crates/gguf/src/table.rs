//! The tensor table: what a row may say, and where its data may lie.

use crate::cursor::Cursor;
use crate::error::{Error, clip};
use crate::{DIMS_MAX, TensorInfo, TensorType};

/// Least size of a row in the file: length of the name, number of dimensions, one extent, type, offset.
pub(crate) const TENSOR_BYTES_MIN: u64 = 8 + 4 + 8 + 4 + 8;
/// Sizes and positions are kept below this, so that sums of two do not overflow. It is what a file system can hold.
const SIZE_BYTES_MAX: u64 = i64::MAX as u64;

/// Reads a row. Its offset is still relative to the data section.
pub(crate) fn read_row(cursor: &mut Cursor<'_>) -> Result<TensorInfo, Error> {
    let name = cursor.string("tensor name")?;
    let count = cursor.u32(&name)?;
    if !(1..=DIMS_MAX).contains(&count) {
        return Err(Error::Dims { name: clip(&name), count, max: DIMS_MAX });
    }
    let dims = cursor.list(count as usize, |c| c.u64(&name))?;
    let id = cursor.u32(&name)?;
    let offset_bytes = cursor.u64(&name)?;

    let ty = TensorType::from_id(id).ok_or_else(|| Error::TensorType { name: clip(&name), id })?;
    if let Some(dim) = dims.iter().position(|&n| n == 0) {
        return Err(Error::ZeroExtent { name: clip(&name), dim });
    }
    let (row_len, block_len) = (dims[0], ty.block_len());
    if row_len % block_len != 0 {
        return Err(Error::Row { name: clip(&name), ty, row_len, block_len });
    }
    // The number of values must fit too: its users multiply extents.
    let values = dims.iter().try_fold(1u64, |n, &extent| n.checked_mul(extent)).filter(|&n| n <= SIZE_BYTES_MAX);
    let len_bytes = values.and_then(|n| ty.row_bytes(n)).filter(|&n| n <= SIZE_BYTES_MAX);
    match len_bytes {
        Some(len_bytes) if offset_bytes <= SIZE_BYTES_MAX => {
            Ok(TensorInfo { name, dims, ty, shard: 0, offset_bytes, len_bytes })
        }
        _ => Err(Error::TensorSize { name: clip(&name), dims, offset_bytes }),
    }
}

/// Turns offsets into positions in the file, and checks that every tensor is aligned, inside the file and alone.
pub(crate) fn place(
    mut tensors: Vec<TensorInfo>,
    data_offset_bytes: u64,
    alignment_bytes: u64,
    file_bytes: u64,
) -> Result<Vec<TensorInfo>, Error> {
    for tensor in &mut tensors {
        let offset_bytes = tensor.offset_bytes;
        if offset_bytes % alignment_bytes != 0 {
            return Err(Error::Misaligned { name: clip(&tensor.name), offset_bytes, alignment_bytes });
        }
        let start = data_offset_bytes.checked_add(offset_bytes);
        let Some((start, end_bytes)) = start.and_then(|start| Some((start, start.checked_add(tensor.len_bytes)?)))
        else {
            return Err(Error::TensorSize { name: clip(&tensor.name), dims: tensor.dims.clone(), offset_bytes });
        };
        if end_bytes > file_bytes {
            return Err(Error::BeyondEnd { name: clip(&tensor.name), end_bytes, file_bytes });
        }
        tensor.offset_bytes = start;
    }
    check_apart(&tensors)?;
    Ok(tensors)
}

/// Writers put tensors in table order, but nothing in the format says so: compare neighbours by position.
fn check_apart(tensors: &[TensorInfo]) -> Result<(), Error> {
    let mut by_offset: Vec<usize> = (0..tensors.len()).collect();
    by_offset.sort_unstable_by_key(|&i| (tensors[i].offset_bytes, i));
    for pair in by_offset.windows(2) {
        let (first, second) = (&tensors[pair[0]], &tensors[pair[1]]);
        let first_end_bytes = first.offset_bytes + first.len_bytes;
        if first_end_bytes > second.offset_bytes {
            return Err(Error::Overlap {
                first: clip(&first.name),
                first_end_bytes,
                second: clip(&second.name),
                second_offset_bytes: second.offset_bytes,
            });
        }
    }
    Ok(())
}
