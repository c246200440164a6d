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
//!
//! To ask a router twice takes time, too. Where most experts are there, what is gained by it for a layer on average, which is the
//! difference of both sides above for each read, is less than that: then only some layers are guessed.

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

/// Layers that are guessed before a guess is worth a read.
const GUESSED_MIN: u32 = 32;
/// Of the layers where guessing does not pay, one in so many is guessed.
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
    /// Of guessing for a layer.
    gain_s: Average,
    cost_s: Average,
    guessed: u32,
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
                // What they gain takes as many more layers to be known.
                let is_known = self.guessed >= 2 * GUESSED_MIN;
                !is_known || self.gain_s.0 > self.cost_s.0 || self.layers.is_multiple_of(DRY_EVERY)
            }
        }
    }

    /// The seconds that are gained by reading on a guess, of the choice at this `place` among its token's, if `before` others
    /// are read first; `None` if it is not worth a read.
    pub fn gain(&self, place: usize, before: usize) -> Option<f64> {
        let right = self.right.get(place).and_then(|right| right.0);
        match (self.when, right, self.hidden_s.0, self.read_s.0) {
            (GuessWhen::Always, ..) => Some(0.0),
            (GuessWhen::Auto, Some(right), Some(hidden), Some(read)) if self.guessed >= GUESSED_MIN => {
                let hidden = hidden - before as f64 * read;
                if hidden <= 0.0 || right < RIGHT_MIN {
                    return None;
                }
                let turn = self.at_once * read;
                let begun = (turn * (1.0 + (hidden / turn).floor())).min(read);
                let gain = right * hidden.min(read) - (1.0 - right) * (begun - hidden).max(0.0);
                (gain > 0.0).then_some(gain)
            }
            _ => None,
        }
    }

    /// A layer was guessed, which took as long as `cost`, and what is read for it gains `gain_s` seconds.
    pub fn guessed(&mut self, cost: Duration, gain_s: f64) {
        self.guessed = self.guessed.saturating_add(1);
        self.cost_s.add(cost.as_secs_f64());
        if self.guessed > GUESSED_MIN {
            self.gain_s.add(gain_s);
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
        self.hidden_s.add(hidden.as_secs_f64());
        if let Some(read) = read {
            self.read_s.add(read.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Guesses {
        fn pays(&self, place: usize, before: usize) -> bool {
            self.gain(place, before).is_some()
        }
    }

    /// Guesses the first choice for `n` layers, at a cost of 10 us, and settles it; `right` in a hundred are right.
    fn settle(guesses: &mut Guesses, n: u32, right: u32, hidden_us: u64, read_us: u64) {
        for i in 0..n {
            let time = Duration::from_micros;
            guesses.guessed(time(10), guesses.gain(0, 0).unwrap_or(0.0));
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
            guesses.guessed(time(1), 0.0);
            guesses.settle_times(time(2500), Some(time(1000)));
            (0..3).for_each(|place| guesses.settle(place, i * 37 % 100 < [90, 70, 20][place]));
        }
        assert!(guesses.pays(0, 0) && guesses.pays(1, 0) && guesses.pays(1, 1), "two reads fit in");
        assert!(guesses.pays(0, 2) && !guesses.pays(0, 3), "half of the third one does, the fourth would not begin");
        assert!(!guesses.pays(2, 0), "mostly wrong");
        assert!(!guesses.pays(3, 0), "nothing is known of this place");
        assert!((guesses.gain(0, 0).expect("it pays") - 0.9e-3).abs() < 0.05e-3);
        let second = guesses.gain(1, 1).expect("it pays");
        assert!((guesses.gain(1, 2).expect("it pays") - (0.5 * second - 0.15e-3)).abs() < 0.03e-3);
    }

    #[test]
    fn layers_are_guessed_while_that_gains_more_than_it_costs() {
        let mut guesses = Guesses::new(GuessWhen::Auto, 1.0);
        let asked = |guesses: &mut Guesses| (0..10 * DRY_EVERY).filter(|_| guesses.asks()).count() as u32;
        assert_eq!(asked(&mut guesses), 10 * DRY_EVERY, "nothing is known");
        // Nearly everything is there: a layer in twenty has something to read.
        let layers = |guesses: &mut Guesses, gain_ms: f64, every: u32| {
            for i in 0..400u32 {
                let gain = if i.is_multiple_of(every) { gain_ms / 1e3 } else { 0.0 };
                guesses.guessed(Duration::from_micros(80), gain);
            }
        };
        layers(&mut guesses, 1.0, 20);
        assert_eq!(asked(&mut guesses), 10, "0.05 ms for 0.08");
        layers(&mut guesses, 1.0, 5);
        assert_eq!(asked(&mut guesses), 10 * DRY_EVERY, "0.2 ms for 0.08");
    }

    #[test]
    fn nothing_is_read_before_guesses_are_settled_and_dry_ones_go_on_where_they_do_not_pay() {
        let mut guesses = Guesses::new(GuessWhen::Auto, 1.0);
        settle(&mut guesses, GUESSED_MIN - 1, 100, 500, 600);
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
            unknown.guessed(Duration::ZERO, 0.0);
            unknown.settle(0, true);
            unknown.settle_times(Duration::from_millis(1), None);
        }
        assert!(!unknown.pays(0, 0));
    }
}
