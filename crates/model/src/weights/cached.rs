//! Matrices left in the page cache, in the file's rows.
//!
//! They are read when they are needed, not mapped: whoever touches a mapping of a file that was cut off gets a signal that
//! ends the process, and no look beforehand can rule that out. A read of what is not there is an error.

use super::pack::Packing;
use crate::Error;
use kernels::PANEL_ROWS;
use kernels::matmul::MakePanels;
use memory::pager::{Stats, Transcode};
use memory::source::ByteSource;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Bytes that are read at once into the page cache.
const PIECE_BYTES: usize = 1 << 20;

/// The first read that failed: what was computed after it is none of the model's numbers.
type Failure = Arc<OnceLock<memory::Error>>;

/// A matrix in a file.
#[derive(Debug)]
pub(super) struct CachedRows {
    source: Arc<dyn ByteSource>,
    failure: Failure,
    packing: Packing,
}

impl CachedRows {
    fn file_range(&self) -> Range<u64> {
        self.packing.source_range(0..self.packing.len_bytes())
    }

    /// Brings the matrix into the page cache.
    fn warm(&self, room: &mut Vec<u8>) -> Result<(), memory::Error> {
        let range = self.file_range();
        room.resize(PIECE_BYTES, 0);
        range.clone().step_by(PIECE_BYTES).try_for_each(|at| {
            let len = (range.end - at).min(PIECE_BYTES as u64) as usize;
            self.source.read_cached(at, &mut room[..len])
        })
    }
}

impl MakePanels for CachedRows {
    fn make(&self, panels: Range<usize>, out: &mut [u8]) {
        thread_local! {
            static ROWS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let panel_bytes = PANEL_ROWS * self.packing.row_bytes;
        let part = panels.start * panel_bytes..panels.end * panel_bytes;
        let source = self.packing.source_range(part.clone());
        ROWS.with_borrow_mut(|rows| {
            rows.resize((source.end - source.start) as usize, 0);
            match self.source.read_cached(source.start, rows) {
                Ok(()) => self.packing.write(part, rows, out),
                Err(error) => {
                    // Whoever computes finds it before the result is used.
                    let _ = self.failure.set(error);
                    out.fill(0xff);
                }
            }
        });
    }
}

/// The files of a model whose matrices stay in the page cache.
#[derive(Debug)]
pub(super) struct Cached {
    sources: Vec<Arc<dyn ByteSource>>,
    failure: Failure,
    /// Whether a stage is brought into the page cache before it is used for the first time.
    warms: bool,
    used: Vec<AtomicBool>,
    total_bytes: u64,
    used_bytes: AtomicU64,
    waits: AtomicU64,
}

impl Cached {
    pub(super) fn new(sources: &[Arc<dyn ByteSource>], warms: bool) -> Cached {
        Cached {
            sources: sources.to_vec(),
            failure: Failure::default(),
            warms,
            used: Vec::new(),
            total_bytes: 0,
            used_bytes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }
    }

    /// The matrix of `packing` in file `shard`.
    pub(super) fn rows(&self, shard: usize, packing: Packing) -> CachedRows {
        CachedRows { source: Arc::clone(&self.sources[shard]), failure: Arc::clone(&self.failure), packing }
    }

    /// The same, for a model of `stages` that has `total_bytes` of matrices.
    pub(super) fn sized(self, stages: usize, total_bytes: u64) -> Cached {
        Cached { used: (0..stages).map(|_| AtomicBool::new(false)).collect(), total_bytes, ..self }
    }

    /// Makes sure that the files are what they were, and that `matrices`, those of `stage`, can be read.
    pub(super) fn ensure<'a>(&self, stage: usize, matrices: impl Iterator<Item = &'a CachedRows>) -> Result<(), Error> {
        self.check()?;
        if self.used[stage].load(Ordering::Acquire) {
            return Ok(());
        }
        let (mut bytes, mut room) = (0, Vec::new());
        for rows in matrices {
            let range = rows.file_range();
            bytes += range.end - range.start;
            if self.warms {
                self.waits.fetch_add(1, Ordering::Relaxed);
                rows.warm(&mut room)?;
            }
        }
        if !self.used[stage].swap(true, Ordering::AcqRel) {
            self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// An error if a read has failed or a file was written to.
    pub(super) fn check(&self) -> Result<(), Error> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone().into());
        }
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
