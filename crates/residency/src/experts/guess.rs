//! Whether to read an expert before it is known that it is wanted.
//!
//! When the last missing expert of a layer has come the drive has nothing to do until the next layer's router has spoken,
//! behind the rest of the one layer and the attention of the other. What that router would say of the residual stream as it
//! was before tells which experts it will probably want; those are read meanwhile, one behind the other. Of the time from
//! the last read to the routing a guess has what those before it leave (*hidden*). By so much is the read of a right one
//! begun earlier; after a wrong one the drive is busy with what was begun until then, and the rest is not read. So a guess
//! is worth a read while
//!
//! ```text
//! right * min(hidden, read)  >  (1 - right) * (begun - hidden)
//! ```
//!
//! and right more often than not, for a wrong one takes room and packing, which nobody has measured. The share of right
//! guesses, by the place that the router would give them, and both times are measured. A guess that is not worth a read is
//! settled all the same: that costs no read, and tells when the times have changed.

use std::time::Duration;

/// When experts are read on a guess (`--guess-experts`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GuessWhen {
    /// Never.
    Off,
    /// While it gains time, as far as can be measured.
    #[default]
    Auto,
    /// Always; for tests.
    Always,
}

/// Layers for which guesses are settled before one is worth a read.
const SETTLED_MIN: u32 = 32;
/// Of the layers where no guess is read, one in so many is guessed.
const DRY_EVERY: u32 = 16;
/// The least share of right ones with which guesses are worth a read.
const RIGHT_MIN: f64 = 0.5;
/// What a guess counts in the averages.
const WEIGHT: f64 = 1.0 / 64.0;

/// An average in which the past fades.
#[derive(Debug, Clone, Copy, Default)]
struct Average(Option<f64>);

impl Average {
    fn add(&mut self, value: f64) {
        self.0 = Some(self.0.map_or(value, |old| old + WEIGHT * (value - old)));
    }
}

/// How guesses went so far, and what that means for the next one.
#[derive(Debug, Clone, Default)]
pub struct Guesses {
    when: GuessWhen,
    /// The share of an expert that is read at once.
    at_once: f64,
    /// By place among a token's choices.
    right: Vec<Average>,
    hidden_s: Average,
    read_s: Average,
    settled: u32,
    layers: u32,
}

impl Guesses {
    /// None yet. Of the slices of an expert, the share `at_once` is read at the same time.
    pub fn new(when: GuessWhen, at_once: f64) -> Guesses {
        Guesses { when, at_once: at_once.clamp(0.01, 1.0), ..Guesses::default() }
    }

    /// Whether to guess for the layer that comes next.
    pub fn asks(&mut self) -> bool {
        self.layers = self.layers.wrapping_add(1);
        match self.when {
            GuessWhen::Off => false,
            GuessWhen::Always => true,
            GuessWhen::Auto => {
                let one_pays = (0..self.right.len()).any(|place| self.pays(place, 0));
                one_pays || self.settled < SETTLED_MIN || self.layers.is_multiple_of(DRY_EVERY)
            }
        }
    }

    /// Whether a guess is worth a read, of the choice at this `place` among its token's, if `before` others are read first.
    pub fn pays(&self, place: usize, before: usize) -> bool {
        let right = self.right.get(place).and_then(|right| right.0);
        match (self.when, right, self.hidden_s.0, self.read_s.0) {
            (GuessWhen::Always, ..) => true,
            (GuessWhen::Auto, Some(right), Some(hidden), Some(read)) if self.settled >= SETTLED_MIN => {
                let hidden = hidden - before as f64 * read;
                if hidden <= 0.0 || right < RIGHT_MIN {
                    return false;
                }
                let turn = self.at_once * read;
                let begun = (turn * (1.0 + (hidden / turn).floor())).min(read);
                right * hidden.min(read) > (1.0 - right) * (begun - hidden)
            }
            _ => false,
        }
    }

    /// A guess of the choice at this `place` was `right` or not.
    pub fn settle(&mut self, place: usize, right: bool) {
        if self.right.len() <= place {
            self.right.resize(place + 1, Average::default());
        }
        self.right[place].add(f64::from(u8::from(right)));
    }

    /// The router of a layer spoke so long after guesses for it could be read. Reading an expert takes `read` at present.
    pub fn settle_times(&mut self, hidden: Duration, read: Option<Duration>) {
        self.settled = self.settled.saturating_add(1);
        self.hidden_s.add(hidden.as_secs_f64());
        if let Some(read) = read {
            self.read_s.add(read.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Settles guesses of first choices for `n` layers, of which `right` in a hundred are right.
    fn settle(guesses: &mut Guesses, n: u32, right: u32, hidden_us: u64, read_us: u64) {
        for i in 0..n {
            let time = Duration::from_micros;
            guesses.settle_times(time(hidden_us), Some(time(read_us)));
            guesses.settle(0, i * 37 % 100 < right);
        }
    }

    fn after(right: u32, hidden_us: u64, read_us: u64) -> bool {
        pays_at(1.0, right, hidden_us, read_us)
    }

    fn pays_at(at_once: f64, right: u32, hidden_us: u64, read_us: u64) -> bool {
        let mut guesses = Guesses::new(GuessWhen::Auto, at_once);
        settle(&mut guesses, 400, right, hidden_us, read_us);
        guesses.pays(0, 0)
    }

    #[test]
    fn a_guess_is_worth_a_read_where_right_ones_hide_more_than_wrong_ones_cost() {
        assert!(after(75, 500, 1150), "0.38 > 0.16");
        assert!(!after(75, 500, 2600), "0.38 < 0.53: a slow drive");
        assert!(!after(30, 500, 1150), "0.15 < 0.46: bad guesses");
        assert!(after(51, 1200, 1150), "it costs nothing where all of it is hidden");
        assert!(!after(40, 1200, 1150), "but for room and packing");
        assert!(pays_at(0.66, 75, 500, 2600), "0.38 > 0.30: a third of the read is not begun");
        assert!(!pays_at(0.33, 75, 500, 9000) && pays_at(0.33, 75, 500, 4500), "0.38 < 0.61, 0.38 > 0.25");
        assert!(!pays_at(0.33, 45, 500, 1400), "0.23 < 0.23: the second turn has begun");
    }

    #[test]
    fn a_guess_has_the_time_that_those_before_it_leave_and_is_as_good_as_others_of_its_place() {
        let mut guesses = Guesses::new(GuessWhen::Auto, 1.0);
        for i in 0..400 {
            let time = Duration::from_micros;
            guesses.settle_times(time(2500), Some(time(1000)));
            (0..3).for_each(|place| guesses.settle(place, i * 37 % 100 < [90, 70, 20][place]));
        }
        assert!(guesses.pays(0, 0) && guesses.pays(1, 0) && guesses.pays(1, 1), "two reads fit in");
        assert!(guesses.pays(0, 2) && !guesses.pays(0, 3), "half of the third one does, the fourth would not begin");
        assert!(!guesses.pays(2, 0), "mostly wrong");
        assert!(!guesses.pays(3, 0), "nothing is known of this place");
        assert!(guesses.asks());
    }

    #[test]
    fn nothing_is_read_before_guesses_are_settled_and_dry_ones_go_on_where_they_do_not_pay() {
        let mut guesses = Guesses::new(GuessWhen::Auto, 1.0);
        settle(&mut guesses, SETTLED_MIN - 1, 100, 500, 600);
        assert!(guesses.asks() && !guesses.pays(0, 0));
        settle(&mut guesses, 1, 100, 500, 600);
        assert!(guesses.asks() && guesses.pays(0, 0));
        settle(&mut guesses, 400, 0, 500, 600);
        assert!(!guesses.pays(0, 0));
        assert_eq!((0..10 * DRY_EVERY).filter(|_| guesses.asks()).count(), 10);
        // The times change, and dry guesses tell.
        settle(&mut guesses, 400, 90, 500, 600);
        assert!(guesses.pays(0, 0));
    }

    #[test]
    fn off_asks_never_always_reads_at_once_and_an_unknown_rate_reads_nothing() {
        let mut off = Guesses::new(GuessWhen::Off, 1.0);
        settle(&mut off, 400, 100, 500, 100);
        assert!(!off.asks() && !off.pays(0, 0));
        let mut always = Guesses::new(GuessWhen::Always, 1.0);
        assert!(always.asks() && always.pays(5, 9));
        let mut unknown = Guesses::new(GuessWhen::Auto, 1.0);
        for _ in 0..400 {
            unknown.settle(0, true);
            unknown.settle_times(Duration::from_millis(1), None);
        }
        assert!(!unknown.pays(0, 0));
    }
}
