//! Every format's panel block, byte for byte, against the layouts written down as a table.

use fixtures::rng::Rng;
use kernels::PANEL_ROWS;
use kernels::quant::Format;

/// What becomes of a value on the way.
#[derive(Clone, Copy)]
enum Change {
    Same,
    /// Signed bytes are offset by 128.
    Offset,
    /// Bit `4j + i` goes to bit `8i + j`.
    Bits,
}
use Change::{Bits, Offset, Same};

/// `count` values of `bytes` bytes at `from` of a row's block: value `i` of row `r` is at `to + i * step + r * bytes` of the
/// panel's.
type Field = (usize, usize, usize, usize, usize, Change);

#[rustfmt::skip] // One line for each format.
fn fields(format: Format) -> Vec<Field> {
    let sixes = |g: usize| [
        (64 * g, 4, 8, 288 + 1536 * g, 192, Same), (128 + 32 * g, 4, 8, 352 + 1536 * g, 192, Same),
        (64 * g + 32, 4, 8, 416 + 1536 * g, 192, Same),
    ];
    match format {
        Format::F32 => vec![(0, 4, 1, 0, 0, Same)],
        Format::F16 | Format::BF16 => vec![(0, 2, 1, 0, 0, Same)],
        Format::Q4_0 | Format::IQ4_NL => vec![(0, 2, 1, 0, 0, Same), (2, 4, 4, 32, 64, Same)],
        Format::Q4_1 => vec![(0, 2, 2, 0, 32, Same), (4, 4, 4, 64, 64, Same)],
        Format::Q5_0 => vec![(0, 2, 1, 0, 0, Same), (2, 4, 1, 32, 0, Bits), (6, 4, 4, 96, 64, Same)],
        Format::Q5_1 => vec![(0, 2, 2, 0, 32, Same), (4, 4, 1, 64, 0, Bits), (8, 4, 4, 128, 64, Same)],
        Format::Q8_0 => vec![(0, 2, 1, 0, 0, Same), (2, 4, 8, 32, 64, Offset)],
        Format::Q2_K => vec![(80, 2, 2, 0, 32, Same), (0, 1, 16, 64, 16, Same), (16, 4, 16, 320, 64, Same)],
        Format::Q3_K => vec![
            (108, 2, 1, 0, 0, Same), (96, 1, 12, 32, 16, Same), (0, 4, 8, 224, 64, Same), (32, 4, 16, 736, 64, Same),
        ],
        Format::Q4_K => vec![(0, 2, 2, 0, 32, Same), (4, 1, 12, 64, 16, Same), (16, 4, 32, 256, 64, Same)],
        Format::Q5_K => vec![
            (0, 2, 2, 0, 32, Same), (4, 1, 12, 64, 16, Same), (16, 4, 8, 256, 64, Same), (48, 4, 32, 768, 64, Same),
        ],
        Format::Q6_K => [(208, 2, 1, 0, 0, Same), (192, 1, 16, 32, 16, Same)].into_iter()
            .chain(sixes(0)).chain(sixes(1)).collect(),
        Format::IQ4_XS => vec![(0, 2, 1, 0, 0, Same), (2, 1, 6, 32, 16, Same), (8, 4, 32, 128, 64, Same)],
        Format::MXFP4 => vec![(0, 1, 1, 0, 0, Same), (1, 4, 4, 16, 64, Same)],
    }
}

fn changed(value: &[u8], change: Change) -> Vec<u8> {
    let bit = |n: usize| value[n / 8] >> (n % 8) & 1;
    match change {
        Same => value.to_vec(),
        Offset => value.iter().map(|byte| byte.wrapping_add(128)).collect(),
        Bits => (0..4).map(|i| (0..8).map(|j| bit(4 * j + i) << j).sum()).collect(),
    }
}

#[test]
fn panels_are_laid_out_as_the_table_says_with_zeros_for_missing_rows() {
    let mut rng = Rng::new(7);
    for &format in Format::ALL {
        // More values than are packed at once where a block is one.
        let (block_bytes, blocks) = (format.block_bytes(), if format.block_len() == 1 { 150 } else { 3 });
        let fields = fields(format);
        let covered: usize = fields.iter().map(|(_, bytes, count, ..)| bytes * count).sum();
        assert_eq!(covered, block_bytes, "{format:?}: the table covers the block");
        for given in [16, 5, 1] {
            let mut file = vec![0; PANEL_ROWS * block_bytes * blocks];
            rng.fill(&mut file[..given * block_bytes * blocks]);
            let rows: Vec<&[u8]> = file.chunks_exact(block_bytes * blocks).collect();
            let mut panel = vec![0xa5; file.len()];
            format.pack_panel(&rows[..given], &mut panel);
            for (b, block) in panel.chunks_exact(PANEL_ROWS * block_bytes).enumerate() {
                for &(from, bytes, count, to, step, change) in &fields {
                    for (i, r) in (0..count).flat_map(|i| (0..PANEL_ROWS).map(move |r| (i, r))) {
                        let value = &rows[r][b * block_bytes + from + i * bytes..][..bytes];
                        let found = &block[to + i * step + r * bytes..][..bytes];
                        assert_eq!(found, changed(value, change), "{format:?} block {b} row {r} byte {from} value {i}");
                    }
                }
            }
        }
    }
}
