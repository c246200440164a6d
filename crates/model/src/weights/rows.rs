//! The embedding table, of which a token needs one row: fetched by row, never held as a whole.

use kernels::PANEL_ROWS;
use kernels::isa::Level;
use kernels::quant::Format;
use memory::Error;
use memory::source::{ByteSource, Fetcher};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of rows that are kept: some thousand tokens, and a text repeats most of its own.
const KEPT_BYTES: usize = 4 << 20;

/// A table in a file.
#[derive(Debug)]
pub(super) struct RowTable {
    pub(super) format: Format,
    row_bytes: usize,
    offset_bytes: u64,
    fetcher: Fetcher,
    kept: Mutex<Kept>,
    read_bytes: AtomicU64,
}

#[derive(Debug)]
struct Kept {
    rows: HashMap<u32, (Arc<[u8]>, u64)>,
    /// Counts calls: a row's mark tells when it was last wanted.
    clock: u64,
}

impl RowTable {
    pub(super) fn new(format: Format, row_bytes: usize, source: Arc<dyn ByteSource>, offset_bytes: u64) -> RowTable {
        let kept = Mutex::new(Kept { rows: HashMap::new(), clock: 0 });
        RowTable { format, row_bytes, offset_bytes, fetcher: Fetcher::new(source), kept, read_bytes: AtomicU64::new(0) }
    }

    /// Bytes read so far.
    pub(super) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// The file's rows `ids`, in order. Those that are not kept are read at once, and waiting for them can be interrupted;
    /// others are served meanwhile.
    pub(super) fn rows(&self, ids: &[u32]) -> Result<Vec<Arc<[u8]>>, Error> {
        let mut found = self.kept().find(ids);
        let mut missing: Vec<u32> =
            ids.iter().zip(&found).filter(|(_, row)| row.is_none()).map(|(&id, _)| id).collect();
        missing.sort_unstable();
        missing.dedup();
        if !missing.is_empty() {
            let range = |id: &u32| {
                let start = self.offset_bytes + u64::from(*id) * self.row_bytes as u64;
                start..start + self.row_bytes as u64
            };
            let fetched = self.fetcher.fetch(missing.iter().map(range).collect())?;
            self.read_bytes.fetch_add((missing.len() * self.row_bytes) as u64, Ordering::Relaxed);
            for (row, id) in found.iter_mut().zip(ids).filter(|(row, _)| row.is_none()) {
                *row = missing.binary_search(id).ok().map(|i| Arc::clone(&fetched[i]));
            }
            self.kept().keep(missing.into_iter().zip(fetched), KEPT_BYTES / self.row_bytes);
        }
        Ok(found.into_iter().flatten().collect())
    }

    /// Ends the waits for rows that are under way.
    pub(super) fn interrupt(&self) {
        self.fetcher.interrupt();
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn find(&mut self, ids: &[u32]) -> Vec<Option<Arc<[u8]>>> {
        self.clock += 1;
        let find = |id: &u32| {
            let (row, mark) = self.rows.get_mut(id)?;
            *mark = self.clock;
            Some(Arc::clone(row))
        };
        ids.iter().map(find).collect()
    }

    /// Keeps `rows` too, and of more than `most` the later half.
    fn keep(&mut self, rows: impl Iterator<Item = (u32, Arc<[u8]>)>, most: usize) {
        self.rows.extend(rows.map(|(id, row)| (id, (row, self.clock))));
        if self.rows.len() > most {
            forget_older_half(&mut self.rows);
        }
    }
}

fn forget_older_half(rows: &mut HashMap<u32, (Arc<[u8]>, u64)>) {
    let mut marks: Vec<u64> = rows.values().map(|(_, mark)| *mark).collect();
    let middle = marks.len() / 2;
    let (_, &mut median, _) = marks.select_nth_unstable(middle);
    rows.retain(|_, (_, mark)| *mark > median);
}

/// Dequantizes one of the file's rows, by the same code that does it for a row of a panel.
pub(super) fn unpack(format: Format, level: Level, row: &[u8], out: &mut [f32]) {
    thread_local! {
        static PANEL: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    PANEL.with_borrow_mut(|panel| {
        panel.resize(PANEL_ROWS * row.len(), 0);
        format.pack_panel(&[row], panel);
        format.unpack_row(level, panel, 0, out);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use fixtures::faults::{Fault, FaultySource, Gate};

    const ROW: usize = 4096;

    fn table(rows: usize, fault: Option<(u64, Fault)>) -> (RowTable, Arc<FaultySource>) {
        let source = FaultySource::new("table", (0..rows * ROW).map(|i| (i / ROW * 7 + i % 5) as u8).collect());
        let source = Arc::new(match fault {
            Some((at, fault)) => source.with(at, fault),
            None => source,
        });
        (RowTable::new(Format::Q8_0, ROW, Arc::clone(&source) as _, 0), source)
    }

    #[test]
    fn rows_come_in_the_order_asked_for_and_are_read_once() {
        let (table, source) = table(64, None);
        let ids = [5, 3, 5, 60];
        for _ in 0..2 {
            let rows = table.rows(&ids).expect("a good source");
            assert_eq!(rows.len(), ids.len());
            for (row, id) in rows.iter().zip(ids) {
                assert!(
                    row.len() == ROW
                        && row[..5] == [0, 1, 2, 3, 4].map(|i| (id as usize * 7 + (id as usize * ROW + i) % 5) as u8)
                );
            }
        }
        assert_eq!((source.asked().len(), table.read_bytes()), (3, 3 * ROW as u64));
    }

    #[test]
    fn what_was_not_wanted_for_long_is_forgotten() {
        let many = KEPT_BYTES / ROW;
        let (table, source) = table(many + 2, None);
        for id in 0..=many as u32 {
            table.rows(&[id]).expect("a good source");
        }
        assert!(table.kept.lock().unwrap().rows.len() <= many / 2 + 1);
        let before = source.asked().len();
        table.rows(&[many as u32]).expect("a good source");
        assert_eq!(source.asked().len(), before, "the last one is kept");
        table.rows(&[0]).expect("a good source");
        assert_eq!(source.asked().len(), before + 1, "the first one is not");
    }

    #[test]
    fn a_read_that_stalls_can_be_interrupted_and_holds_nobody_else_up() {
        let gate = Arc::new(Gate::default());
        let stall = Fault::Stall(Arc::clone(&gate));
        let (table, _) = table(8, Some((3 * ROW as u64, stall)));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| table.rows(&[1, 3]));
            gate.wait_for_arrival();
            assert_eq!(table.rows(&[2, 4]).expect("other rows").len(), 2);
            assert!(!waiting.is_finished(), "no byte has moved");
            table.interrupt();
            let error = waiting.join().expect("no panic").expect_err("an interrupted wait");
            assert!(
                matches!(error, Error::Interrupted { wanted_bytes, .. } if wanted_bytes == 2 * ROW as u64),
                "{error}"
            );
            assert!(error.to_string().contains("no bytes moved for"), "{error}");
        });
        gate.open();
        assert_eq!(table.rows(&[3]).expect("bytes move again").len(), 1);
    }

    #[test]
    fn an_error_leaves_the_table_usable() {
        let (table, _) = table(8, Some((3 * ROW as u64, Fault::Io(5))));
        assert!(matches!(table.rows(&[1, 3]), Err(Error::Io { .. })));
        assert_eq!(table.rows(&[1, 2]).expect("other rows").len(), 2);
    }
}
