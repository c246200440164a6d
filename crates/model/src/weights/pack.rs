//! Panels out of the file's rows.

use kernels::PANEL_ROWS;
use kernels::quant::Format;
use memory::pager::Transcode;
use std::ops::Range;

/// A matrix in the file and in panels.
#[derive(Debug, Clone)]
pub(crate) struct Packing {
    pub(crate) format: Format,
    pub(super) rows: usize,
    pub(crate) row_bytes: usize,
    /// Of the first row, in its file.
    pub(super) offset_bytes: u64,
    /// Where the rotated rows of each head are reordered from neighbours to halves.
    pub(super) rope_rows: Option<RopeRows>,
}

/// Rows of each head that are rotated.
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeRows {
    pub(super) head_len: usize,
    /// The first of them.
    pub(super) first: usize,
    pub(super) len: usize,
}

impl RopeRows {
    /// Rows of the file that lie among themselves as packed rows, `row` among them.
    fn together(self, row: usize) -> Range<usize> {
        let first = row / self.head_len * self.head_len + self.first;
        let all = first..first + self.len;
        if all.contains(&row) { all } else { row..row + 1 }
    }

    /// The file's row of packed row `row`: of those that are rotated in a head, packed i and i + n/2 are the file's 2i and
    /// 2i + 1.
    pub(super) fn source(self, row: usize) -> usize {
        let (head, i) = (row / self.head_len * self.head_len + self.first, row % self.head_len);
        let half = self.len / 2;
        match i.checked_sub(self.first) {
            Some(i) if i < half => head + 2 * i,
            Some(i) if i < self.len => head + 2 * (i - half) + 1,
            _ => row,
        }
    }
}

impl Packing {
    fn panel_bytes(&self) -> usize {
        PANEL_ROWS * self.row_bytes
    }

    /// Bytes of all panels: as in the file, but for rows that fill up the last one.
    pub(super) fn len_bytes(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS) * self.panel_bytes()
    }

    fn panels_of(&self, part: &Range<usize>) -> Range<usize> {
        part.start / self.panel_bytes()..part.end.div_ceil(self.panel_bytes())
    }

    /// The file's rows that some panels are made of: the same ones, and all that are reordered with them.
    fn source_rows(&self, panels: &Range<usize>) -> Range<usize> {
        let (first, end) = (panels.start * PANEL_ROWS, (panels.end * PANEL_ROWS).min(self.rows));
        let together = |row: usize| self.rope_rows.map_or(row..row + 1, |rows| rows.together(row));
        together(first).start..together(end.max(first + 1) - 1).end
    }

    /// Packs panel `panel`. `source` are the file's rows from `first` on.
    fn pack(&self, panel: usize, source: &[u8], first: usize, out: &mut [u8]) {
        let rows = panel * PANEL_ROWS..((panel + 1) * PANEL_ROWS).min(self.rows);
        let row = |row: usize| {
            let from = self.rope_rows.map_or(row, |rows| rows.source(row)) - first;
            &source[from * self.row_bytes..(from + 1) * self.row_bytes]
        };
        let slices: [&[u8]; PANEL_ROWS] =
            std::array::from_fn(|i| if i < rows.len() { row(rows.start + i) } else { &[] });
        self.format.pack_panel(&slices[..rows.len()], out);
    }
}

impl Transcode for Packing {
    fn source_range(&self, part: Range<usize>) -> Range<u64> {
        let rows = self.source_rows(&self.panels_of(&part));
        let at = |row: usize| self.offset_bytes + (row * self.row_bytes) as u64;
        at(rows.start)..at(rows.end)
    }

    fn write(&self, part: Range<usize>, source: &[u8], out: &mut [u8]) {
        let panels = self.panels_of(&part);
        let first = self.source_rows(&panels).start;
        let mut whole = Vec::new();
        for panel in panels {
            let place = panel * self.panel_bytes()..(panel + 1) * self.panel_bytes();
            let inside = place.start.max(part.start)..place.end.min(part.end);
            let to = &mut out[inside.start - part.start..inside.end - part.start];
            if inside == place {
                self.pack(panel, source, first, to);
                continue;
            }
            // A panel that lies in two units is packed for each of them.
            whole.clear();
            whole.resize(self.panel_bytes(), 0);
            self.pack(panel, source, first, &mut whole);
            to.copy_from_slice(&whole[inside.start - place.start..inside.end - place.start]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reordered_rows_are_a_permutation_that_brings_neighbours_half_a_head_apart() {
        let rows = |first, len| -> Vec<usize> {
            let rows = RopeRows { head_len: 8, first, len };
            (0..16).map(|row| rows.source(row)).collect()
        };
        assert_eq!(rows(0, 6), [0, 2, 4, 1, 3, 5, 6, 7, 8, 10, 12, 9, 11, 13, 14, 15]);
        assert_eq!(rows(4, 4), [0, 1, 2, 3, 4, 6, 5, 7, 8, 9, 10, 11, 12, 14, 13, 15]);
    }

    #[test]
    fn any_cut_of_the_panels_gives_the_same_bytes() {
        let (rows, cols) = (88, 64);
        let heads = |head_len, first, len| Some(RopeRows { head_len, first, len });
        for (format, rope_rows) in [
            (Format::Q8_0, None),
            (Format::F16, None),
            (Format::Q4_0, heads(8, 0, 6)),
            (Format::Q8_0, heads(44, 0, 44)),
            (Format::Q8_0, heads(44, 40, 4)),
        ] {
            let row_bytes = format.row_bytes(cols).expect("whole blocks");
            let file: Vec<u8> = (0..7 + rows * row_bytes).map(|i| (i * 37 % 251) as u8).collect();
            let packing = Packing { format, rows, row_bytes, offset_bytes: 7, rope_rows };
            let part_of = |part: Range<usize>| {
                let source = packing.source_range(part.clone());
                let mut out = vec![0; part.len()];
                packing.write(part, &file[source.start as usize..source.end as usize], &mut out);
                out
            };
            let whole = part_of(0..packing.len_bytes());
            assert!(whole.iter().any(|&b| b != 0));
            for cut in [1, 333, packing.panel_bytes(), 3 * packing.panel_bytes() - 1] {
                let cuts = (0..packing.len_bytes()).step_by(cut);
                let parts: Vec<u8> = cuts.flat_map(|at| part_of(at..(at + cut).min(packing.len_bytes()))).collect();
                assert!(parts == whole, "{format:?} cut every {cut} bytes");
            }
        }
    }
}
