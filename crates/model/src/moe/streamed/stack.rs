//! One matrix of each expert of a layer, in a file.

use crate::weights::Packing;
use kernels::PANEL_ROWS;
use kernels::activations::Precision;
use kernels::matmul::{Matrix, Panels};
use memory::pager::Transcode;
use memory::source::ByteSource;
use std::ops::Range;
use std::sync::Arc;

/// The rows of a tensor that belong to each expert: whole panels, at equal distances.
#[derive(Debug, Clone)]
pub(crate) struct Stack {
    /// Where the tensor is.
    pub(crate) source: Arc<dyn ByteSource>,
    /// All of its rows.
    pub(crate) packing: Packing,
    /// Inputs.
    pub(crate) cols: usize,
    /// The first expert's first row.
    pub(crate) first: usize,
    /// Rows of an expert.
    pub(crate) rows: usize,
    /// Rows from one expert's first to the next one's.
    pub(crate) stride: usize,
    /// Of all rows of the tensor.
    pub(crate) bias: Option<Vec<f32>>,
}

impl Stack {
    /// The source that it is read from.
    pub(super) fn source(&self) -> Arc<dyn ByteSource> {
        Arc::clone(&self.source)
    }

    /// Bytes of an expert's panels: those of its rows in the file.
    pub(super) fn len_bytes(&self) -> usize {
        self.rows * self.packing.row_bytes
    }

    /// Bytes of an expert in the file.
    pub(super) fn slice_bytes(&self) -> usize {
        self.len_bytes()
    }

    fn rows_of(&self, expert: usize) -> Range<usize> {
        let first = self.first + expert * self.stride;
        first..first + self.rows
    }

    /// Where an expert's panels would be, if all were there.
    fn part(&self, expert: usize) -> Range<usize> {
        let rows = self.rows_of(expert);
        rows.start * self.packing.row_bytes..rows.end * self.packing.row_bytes
    }

    /// Where an expert is in the file.
    pub(super) fn source_range(&self, expert: usize) -> Range<u64> {
        self.packing.source_range(self.part(expert))
    }

    /// Makes panels of an expert's rows.
    pub(super) fn pack(&self, expert: usize, source: &[u8], out: &mut [u8]) {
        debug_assert!(self.rows.is_multiple_of(PANEL_ROWS));
        self.packing.write(self.part(expert), source, &mut out[..self.len_bytes()]);
    }

    /// An expert's matrix, whose panels are at the front of `bytes`.
    pub(super) fn matrix<'a>(&'a self, expert: usize, bytes: &'a [u8]) -> Matrix<'a> {
        Matrix {
            format: self.packing.format,
            rows: self.rows,
            cols: self.cols,
            panels: Panels::Packed(&bytes[..self.len_bytes()]),
            bias: self.bias.as_deref().map(|bias| &bias[self.rows_of(expert)]),
            precision: Precision::Single,
        }
    }
}
