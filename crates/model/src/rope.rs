//! Cosines and sines of rotary positions.

use crate::config::Config;

/// A growing table for one rotation base: a row of `rope_len / 2` cosines and as many sines for each position.
///
/// Computed in double precision by functions written in Rust, so that every machine has the same bits.
#[derive(Debug)]
pub(crate) struct RopeTable {
    frequencies: Vec<f64>,
    rows: Vec<f32>,
}

impl RopeTable {
    /// A table for `base`; `factors` divide the frequencies (`rope_freqs.weight`).
    pub(crate) fn new(config: &Config, base: f32, scale: f32, factors: Option<&[f32]>) -> RopeTable {
        let half = config.rope_len / 2;
        let frequency = |i: usize| {
            let exponent = -((2 * i) as f64) / config.rope_len as f64;
            let factor = factors.and_then(|f| f.get(i)).map_or(1.0, |&f| f64::from(f));
            libm::pow(f64::from(base), exponent) * f64::from(scale) / factor
        };
        RopeTable { frequencies: (0..half).map(frequency).collect(), rows: Vec::new() }
    }

    /// Makes the rows of all positions below `len`.
    pub(crate) fn grow(&mut self, len: usize) {
        let row_len = 2 * self.frequencies.len();
        let from = self.rows.len() / row_len;
        if len <= from {
            return;
        }
        self.rows.reserve((len - from) * row_len);
        for position in from..len {
            let angle = |f: &f64| position as f64 * f;
            self.rows.extend(self.frequencies.iter().map(|f| libm::cos(angle(f)) as f32));
            self.rows.extend(self.frequencies.iter().map(|f| libm::sin(angle(f)) as f32));
        }
    }

    /// Cosines, then sines of `position`, which must be below the length grown to.
    pub(crate) fn row(&self, position: usize) -> &[f32] {
        let row_len = 2 * self.frequencies.len();
        &self.rows[position * row_len..(position + 1) * row_len]
    }
}
