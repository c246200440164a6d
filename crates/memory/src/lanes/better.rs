//! Which of two ways to read is the faster one at present, where that changes with what nobody here can see.
//!
//! Whether it helps to give up cache lines before they are read into again depends on where the host runs the thread that
//! copies them: with them given up, a virtual drive gave 2.0-2.1 GB/s at all times, and else 1.4-1.6 or 2.3-2.5, changing
//! within minutes.

use super::LaneStats;

/// Bytes by which a way is judged: some hundredths of a second of a fast drive.
const TURN_BYTES: u64 = 24 << 20;
/// One turn in so many is the slower way's.
const OTHER_EVERY: u32 = 8;
/// What a turn counts in a way's rate.
const WEIGHT: f64 = 0.5;

/// Two ways, which take turns.
#[derive(Debug, Default)]
pub(super) struct Better {
    /// The way in use: the first, or the second.
    second: bool,
    /// Bytes in a second of busy time, of both ways.
    rates: [Option<f64>; 2],
    turns: u32,
    /// When the turn began.
    begin: LaneStats,
}

impl Better {
    /// Whether it is the second way's turn.
    pub(super) fn is_second(&self) -> bool {
        self.second
    }

    /// So much was read up to now.
    pub(super) fn read(&mut self, now: LaneStats) {
        let bytes = now.slice_bytes - self.begin.slice_bytes;
        if bytes < TURN_BYTES {
            return;
        }
        let rate = bytes as f64 / (now.busy - self.begin.busy).as_secs_f64().max(1e-9);
        let old = &mut self.rates[usize::from(self.second)];
        *old = Some(old.map_or(rate, |old| old + WEIGHT * (rate - old)));
        self.begin = now;
        self.turns += 1;
        self.second = match self.rates {
            [Some(first), Some(second)] => (second > first) != self.turns.is_multiple_of(OTHER_EVERY),
            // It was not tried yet.
            _ => self.rates[1].is_none(),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_faster_way_has_most_turns_and_a_change_is_seen() {
        let mut better = Better::default();
        let mut stats = LaneStats::default();
        let mut seconds_of = |better: &mut Better, rates: [f64; 2]| {
            (0..80)
                .filter(|_| {
                    let (second, turns) = (better.is_second(), better.turns);
                    while better.turns == turns {
                        stats.slice_bytes += 1 << 20;
                        stats.busy += Duration::from_secs_f64(f64::from(1 << 20) / rates[usize::from(second)]);
                        better.read(stats);
                    }
                    second
                })
                .count()
        };
        assert_eq!(seconds_of(&mut better, [2.4e9, 2.0e9]), 10, "one in eight");
        assert!(seconds_of(&mut better, [1.5e9, 2.0e9]) >= 66, "it changes sides soon");
        assert!(seconds_of(&mut better, [2.4e9, 2.0e9]) <= 20, "and back, with one try of the other in eight");
    }

    #[test]
    fn little_is_no_turn() {
        let mut better = Better::default();
        let stats = |slice_bytes| LaneStats { slice_bytes, busy: Duration::from_millis(1), slices: 1 };
        better.read(stats(TURN_BYTES - 1));
        assert!(!better.is_second());
        better.read(stats(TURN_BYTES));
        assert!(better.is_second(), "what was not tried yet");
    }
}
