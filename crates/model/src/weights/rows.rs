//! The embedding table, of which a token needs one row: fetched by row, never held as a whole.

use kernels::PANEL_ROWS;
use kernels::isa::Level;
use kernels::quant::Format;
use memory::Error;
use memory::source::{ByteSource, ReadRoom};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of rows that are kept: some thousand tokens, and a text repeats most of its own.
const KEPT_BYTES: usize = 4 << 20;

/// A table in a file.
#[derive(Debug)]
pub(super) struct RowTable {
    pub(super) format: Format,
    row_bytes: usize,
    source: Arc<dyn ByteSource>,
    offset_bytes: u64,
    kept: Mutex<Kept>,
    read_bytes: AtomicU64,
}

#[derive(Debug)]
struct Kept {
    rows: HashMap<u32, (Arc<[u8]>, u64)>,
    /// Counts calls: a row's mark tells when it was last wanted.
    clock: u64,
    room: ReadRoom,
}

impl RowTable {
    pub(super) fn new(format: Format, row_bytes: usize, source: Arc<dyn ByteSource>, offset_bytes: u64) -> RowTable {
        let kept = Kept { rows: HashMap::new(), clock: 0, room: ReadRoom::new(true) };
        RowTable { format, row_bytes, source, offset_bytes, kept: Mutex::new(kept), read_bytes: AtomicU64::new(0) }
    }

    /// Bytes read so far.
    pub(super) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// The file's rows `ids`, in order. Those that are not kept are read at once.
    pub(super) fn rows(&self, ids: &[u32]) -> Result<Vec<Arc<[u8]>>, Error> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Kept { rows, clock, room } = &mut *kept;
        *clock += 1;
        let mut missing: Vec<u32> = ids.iter().copied().filter(|id| !rows.contains_key(id)).collect();
        missing.sort_unstable();
        missing.dedup();
        let range = |id: &u32| {
            let start = self.offset_bytes + u64::from(*id) * self.row_bytes as u64;
            start..start + self.row_bytes as u64
        };
        if !missing.is_empty() {
            let places = self.source.read(&missing.iter().map(range).collect::<Vec<_>>(), room)?;
            self.read_bytes.fetch_add((missing.len() * self.row_bytes) as u64, Ordering::Relaxed);
            rows.extend(missing.iter().zip(places).map(|(&id, place)| (id, (room.bytes()[place].into(), *clock))));
        }
        let mut take = |id: &u32| {
            let (row, mark) = rows.get_mut(id)?;
            *mark = *clock;
            Some(Arc::clone(row))
        };
        let found = ids.iter().filter_map(&mut take).collect();
        if rows.len() * self.row_bytes > KEPT_BYTES {
            forget_older_half(rows);
        }
        Ok(found)
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
    use fixtures::faults::{Fault, FaultySource};

    const ROW: usize = 4096;

    fn table(rows: usize, fault: Option<u64>) -> (RowTable, Arc<FaultySource>) {
        let source = FaultySource::new("table", (0..rows * ROW).map(|i| (i / ROW * 7 + i % 5) as u8).collect());
        let source = Arc::new(match fault {
            Some(at) => source.with(at, Fault::Io(5)),
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
    fn an_error_leaves_the_table_usable() {
        let (table, _) = table(8, Some(3 * ROW as u64));
        assert!(matches!(table.rows(&[1, 3]), Err(Error::Io { .. })));
        assert_eq!(table.rows(&[1, 2]).expect("other rows").len(), 2);
    }
}
