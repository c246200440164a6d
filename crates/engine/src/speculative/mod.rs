//! Speculative decoding: tokens are guessed, and a step that waits for the weights anyway checks them all at once. A row has
//! the same bits in any batch, and tokens are drawn from the checked rows one after the other, so the answer is that of plain
//! decoding, whatever was guessed.

mod draft;
mod gate;
mod lookup;

pub use draft::Draft;

use draft::Follower;
use gate::Gate;
use lookup::Lookup;

/// Where guesses come from.
#[derive(Default)]
pub enum Speculate {
    /// There are none.
    #[default]
    Off,
    /// The text so far: what followed the last time that the same tokens came.
    Lookup,
    /// A smaller model.
    Draft(Box<Draft>),
}

/// A session's guesses.
pub(crate) struct Guesser {
    source: Source,
    pub(crate) gate: Gate,
}

enum Source {
    None,
    Lookup(Lookup),
    Draft(Follower),
}

impl Guesser {
    /// The history has lost something in its middle.
    pub(crate) fn restart(&mut self) {
        if let Source::Lookup(lookup) = &mut self.source {
            *lookup = Lookup::default();
        }
    }
}

impl Speculate {
    /// For a new session.
    pub(crate) fn guesser(&mut self) -> Guesser {
        let (source, cost_each) = match self {
            Speculate::Off => (Source::None, 0.0),
            Speculate::Lookup => (Source::Lookup(Lookup::default()), 0.0),
            Speculate::Draft(draft) => (Source::Draft(draft.open()), draft.cost_each()),
        };
        Guesser { source, gate: Gate::new(cost_each) }
    }

    /// Guesses at what follows `history`, as many as pay and at most `len`.
    pub(crate) fn propose(&mut self, guesser: &mut Guesser, history: &[u32], len: usize) -> Vec<u32> {
        let len = len.min(guesser.gate.wanted());
        if len == 0 {
            return Vec::new();
        }
        match (&mut guesser.source, self) {
            (Source::Lookup(lookup), _) => lookup.propose(history, len),
            (Source::Draft(follower), Speculate::Draft(draft)) => draft.propose(follower, history, len),
            _ => Vec::new(),
        }
    }

    /// The session has ended.
    pub(crate) fn close(&mut self, guesser: Guesser) {
        if let (Source::Draft(follower), Speculate::Draft(draft)) = (guesser.source, self) {
            draft.close(follower);
        }
    }
}
