//! Packing: how values of 16 rows come side by side.
//!
//! Every byte of a model goes through here while someone waits for the first token. So these are plain loops over arrays
//! whose lengths the compiler knows: closures (`from_fn`, `map`) were not inlined and took half of the time.

use super::Packed;
use crate::PANEL_ROWS;

/// Rows of the file, all of one length.
pub(crate) type Rows<'r> = [&'r [u8]; PANEL_ROWS];

/// Packs up to 16 rows, block by block; missing ones are zero.
pub(super) fn pack_panel<Q: Packed>(rows: &[&[u8]], panel: &mut [u8]) {
    let row_bytes = panel.len() / PANEL_ROWS;
    assert!(
        rows.len() <= PANEL_ROWS && row_bytes.is_multiple_of(Q::BYTES) && rows.iter().all(|r| r.len() == row_bytes)
    );
    read_in_order(rows);
    let zeros = vec![0; if rows.len() < PANEL_ROWS { row_bytes } else { 0 }];
    let mut all: Rows = [&zeros; PANEL_ROWS];
    all[..rows.len()].copy_from_slice(rows);
    let row_part = Q::AT_ONCE * Q::BYTES;
    for (i, blocks) in panel.chunks_mut(PANEL_ROWS * row_part).enumerate() {
        Q::pack(&all, i * row_part, blocks);
    }
}

/// Brings the rows into the cache, one after the other: the processor's prefetchers follow that, and lose sixteen rows that
/// are read side by side. From memory, packing went from 3.3 to 6.8 GB/s (Q5_0) and from 3.6 to 9.2 (Q4_K).
fn read_in_order(rows: &[&[u8]]) {
    const LINE_BYTES: usize = 64;
    let mut read = 0;
    for row in rows {
        for line in row.chunks(LINE_BYTES) {
            read ^= line[0];
        }
    }
    std::hint::black_box(read);
}

/// Turns values of `BYTES` bytes, from byte `from` of each row on, into as many vectors of 16 as `to` has room for.
#[inline(always)]
pub(super) fn columns<const BYTES: usize>(rows: &Rows, from: usize, to: &mut [u8]) {
    let columns: &mut [[[u8; BYTES]; PANEL_ROWS]] = to.as_chunks_mut().0.as_chunks_mut().0;
    for (r, row) in rows.iter().enumerate() {
        for (column, value) in columns.iter_mut().zip(row[from..].as_chunks().0) {
            column[r] = *value;
        }
    }
}

/// Copies `BYTES` bytes at `from` of each row to `to` as a vector of 16 (scales and the like).
#[inline(always)]
pub(super) fn gather<const BYTES: usize>(rows: &Rows, from: usize, to: &mut [u8]) {
    let to: &mut [[u8; BYTES]; PANEL_ROWS] = to.as_chunks_mut().0.first_chunk_mut().expect("room for a vector");
    for (to, row) in to.iter_mut().zip(rows) {
        *to = *row[from..].first_chunk().expect("a block that is long enough");
    }
}

/// Turns `BYTES` bytes at `from` of each row into as many vectors of 16 bytes (codes of scales).
#[inline(always)]
pub(super) fn transpose<const BYTES: usize>(rows: &Rows, from: usize, to: &mut [u8]) {
    let to: &mut [[u8; PANEL_ROWS]; BYTES] = to.as_chunks_mut().0.first_chunk_mut().expect("room for the vectors");
    for (r, row) in rows.iter().enumerate() {
        let row: &[u8; BYTES] = row[from..].first_chunk().expect("a block that is long enough");
        for (to, byte) in to.iter_mut().zip(row) {
            to[r] = *byte;
        }
    }
}

/// Interleaves `WORDS` words: word `i` at `from` of row `r` becomes word `r` of vector `i`, of which every `STRIDE`th in
/// `to` is one.
#[inline(always)]
pub(super) fn interleave<const WORDS: usize, const STRIDE: usize>(rows: &Rows, from: usize, to: &mut [u8]) {
    // A vector: four quarters of four words.
    let vectors: &mut [[[[u8; 4]; 4]; 4]] = to.as_chunks_mut().0.as_chunks_mut().0.as_chunks_mut().0;
    let vectors = &mut vectors[..(WORDS - 1) * STRIDE + 1];
    let words = |row: usize| -> &[[u8; 4]; WORDS] {
        rows[row][from..].as_chunks().0.first_chunk().expect("a block that is long enough")
    };
    for q in 0..4 {
        let (a, b, c, d) = (words(4 * q), words(4 * q + 1), words(4 * q + 2), words(4 * q + 3));
        for i in 0..WORDS {
            vectors[i * STRIDE][q] = [a[i], b[i], c[i], d[i]];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_words_go_where_the_layouts_say() {
        let file: Vec<u8> = (0..PANEL_ROWS * 64).map(|i| (i * 37 % 251) as u8).collect();
        let mut rows: Rows = [&[]; PANEL_ROWS];
        rows.iter_mut().zip(file.chunks_exact(64)).for_each(|(row, bytes)| *row = bytes);
        let (mut pairs, mut codes, mut words) = ([0; 32], [0; 16 * 5], [7; 64 * 7]);
        gather::<2>(&rows, 3, &mut pairs);
        transpose::<5>(&rows, 9, &mut codes);
        interleave::<3, 3>(&rows, 20, &mut words);
        for r in 0..PANEL_ROWS {
            assert_eq!(pairs[2 * r..2 * r + 2], rows[r][3..5]);
            for i in 0..5 {
                assert_eq!(codes[16 * i + r], rows[r][9 + i]);
            }
            for i in 0..3 {
                assert_eq!(words[64 * 3 * i + 4 * r..][..4], rows[r][20 + 4 * i..][..4]);
            }
        }
        assert!(words[64..192].iter().chain(&words[256..384]).all(|&b| b == 7), "what lies between is left alone");
    }
}
