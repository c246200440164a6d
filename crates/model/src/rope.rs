//! Cosines and sines of rotary positions.

use crate::config::{Rope, Yarn};
use kernels::attention::{KV_BLOCK, Turns};

/// A growing table for one way to rotate: a row of `rope_len / 2` cosines and as many sines for each position.
///
/// Computed in double precision by functions written in Rust, so that every machine has the same bits.
#[derive(Debug)]
pub(crate) struct RopeTable {
    frequencies: Vec<f64>,
    /// Factor of cosines and sines.
    magnitude: f64,
    rows: Vec<f32>,
    /// For each frequency the cosines, then the sines of the positions of a KV block, not multiplied.
    within: Vec<f32>,
}

impl RopeTable {
    /// A table for heads of which `len` values are rotated; `factors` divide the frequencies (`rope_freqs.weight`).
    pub(crate) fn new(len: usize, rope: &Rope, factors: Option<&[f32]>) -> RopeTable {
        let half = len / 2;
        let (base, scale) = (f64::from(rope.base), f64::from(rope.scale));
        let ramp = rope.yarn.map(|yarn| Ramp::new(len, base, &yarn));
        let frequency = |i: usize| {
            let factor = factors.and_then(|f| f.get(i)).map_or(1.0, |&f| f64::from(f));
            let whole = libm::pow(base, -((2 * i) as f64) / len as f64) / factor;
            let kept = ramp.as_ref().map_or(0.0, |ramp| ramp.kept(i));
            whole * scale * (1.0 - kept) + whole * kept
        };
        let magnitude = rope.yarn.map_or(1.0, |yarn| yarn.magnitude);
        let frequencies: Vec<f64> = (0..half).map(frequency).collect();
        let mut within = Vec::with_capacity(half * 2 * KV_BLOCK);
        for f in &frequencies {
            let angle = |position: usize| position as f64 * f;
            within.extend((0..KV_BLOCK).map(|position| libm::cos(angle(position)) as f32));
            within.extend((0..KV_BLOCK).map(|position| libm::sin(angle(position)) as f32));
        }
        RopeTable { frequencies, magnitude, rows: Vec::new(), within }
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
            self.rows.extend(self.frequencies.iter().map(|f| (libm::cos(angle(f)) * self.magnitude) as f32));
            self.rows.extend(self.frequencies.iter().map(|f| (libm::sin(angle(f)) * self.magnitude) as f32));
        }
    }

    /// All of it, as attention takes it.
    pub(crate) fn turns(&self) -> Turns<'_> {
        Turns { pairs: self.frequencies.len(), rows: &self.rows, within: &self.within }
    }

    /// Cosines, then sines of `position`, which must be below the length grown to.
    pub(crate) fn row(&self, position: usize) -> &[f32] {
        let row_len = 2 * self.frequencies.len();
        &self.rows[position * row_len..(position + 1) * row_len]
    }
}

/// How much of each frequency YaRN keeps.
struct Ramp {
    low: f64,
    high: f64,
    mix: f64,
}

impl Ramp {
    fn new(len: usize, base: f64, yarn: &Yarn) -> Ramp {
        // The frequency that turns so often within the context of training.
        let place = |turns: f32| {
            let ratio = f64::from(yarn.context_len) / (f64::from(turns) * 2.0 * std::f64::consts::PI);
            len as f64 * libm::log(ratio) / (2.0 * libm::log(base))
        };
        let low = libm::floor(place(yarn.fast)).max(0.0);
        let high = libm::ceil(place(yarn.slow)).min(len as f64 - 1.0);
        Ramp { low, high, mix: f64::from(yarn.mix) }
    }

    fn kept(&self, i: usize) -> f64 {
        let along = (i as f64 - self.low) / (self.high - self.low).max(0.001);
        (1.0 - along.clamp(0.0, 1.0)) * self.mix
    }
}
