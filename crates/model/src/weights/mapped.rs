//! Matrices left in the page cache, in the file's rows.

use super::pack::Packing;
use crate::Error;
use kernels::PANEL_ROWS;
use kernels::matmul::MakePanels;
use memory::Mapping;
use memory::pager::{Stats, Transcode};
use memory::source::ByteSource;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A matrix in a mapped file.
#[derive(Debug)]
pub(super) struct MappedRows {
    pub(super) map: Arc<Mapping>,
    pub(super) packing: Packing,
}

impl MappedRows {
    fn file_range(&self) -> Range<usize> {
        let range = self.packing.source_range(0..self.packing.len_bytes());
        range.start as usize..range.end as usize
    }
}

impl MakePanels for MappedRows {
    fn make(&self, panels: Range<usize>, out: &mut [u8]) {
        let panel_bytes = PANEL_ROWS * self.packing.row_bytes;
        let part = panels.start * panel_bytes..panels.end * panel_bytes;
        let source = self.packing.source_range(part.clone());
        self.packing.write(part, &self.map[source.start as usize..source.end as usize], out);
    }
}

/// The files of a model, mapped.
#[derive(Debug)]
pub(super) struct Mapped {
    sources: Vec<Arc<dyn ByteSource>>,
    /// Whether a stage is brought into the page cache before it is used for the first time.
    warms: bool,
    used: Vec<AtomicBool>,
    total_bytes: u64,
    used_bytes: AtomicU64,
    waits: AtomicU64,
}

impl Mapped {
    pub(super) fn new(sources: &[Arc<dyn ByteSource>], warms: bool, stages: usize, total_bytes: u64) -> Mapped {
        Mapped {
            sources: sources.to_vec(),
            warms,
            used: (0..stages).map(|_| AtomicBool::new(false)).collect(),
            total_bytes,
            used_bytes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }
    }

    /// Makes sure that the files are what they were, and that `matrices`, those of `stage`, can be read.
    pub(super) fn ensure<'a>(&self, stage: usize, matrices: impl Iterator<Item = &'a MappedRows>) -> Result<(), Error> {
        self.check()?;
        if self.used[stage].load(Ordering::Acquire) {
            return Ok(());
        }
        let mut bytes = 0;
        for rows in matrices {
            let range = rows.file_range();
            bytes += range.len() as u64;
            if self.warms {
                self.waits.fetch_add(1, Ordering::Relaxed);
                rows.map.populate(range)?;
            }
        }
        if !self.used[stage].swap(true, Ordering::AcqRel) {
            self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// A file that was cut off or written to is an error, if it happened before this look.
    pub(super) fn check(&self) -> Result<(), Error> {
        Ok(self.sources.iter().try_for_each(|source| source.check())?)
    }

    /// What has been used at least once counts as present: how much of it the system keeps is its business.
    pub(super) fn stats(&self) -> Stats {
        let used_bytes = self.used_bytes.load(Ordering::Relaxed);
        Stats {
            read_bytes: used_bytes,
            present_bytes: used_bytes,
            total_bytes: self.total_bytes,
            waits: self.waits.load(Ordering::Relaxed),
            ..Stats::default()
        }
    }
}
