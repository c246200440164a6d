//! How a model's weights are held and read.

use crate::moe::streamed::ExpertMemory;
use memory::backing::Choice;
use memory::pager::Window;
use residency::experts::GuessWhen;

/// How a model's weights are held and read. None of it changes a bit of what is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// What holds them (`--backing`).
    pub backing: Choice,
    /// Whose memory that is (`--dense-weights`).
    pub dense_weights: DenseWeights,
    /// Whether files are read past the page cache where that is possible (`--no-direct-io`).
    pub direct_io: bool,
    /// How far the pager reads ahead of the layer that computes.
    pub window: Window,
    /// Lossy, so `None` by default: experts that a token is routed to, where the model has more.
    pub experts_used: Option<usize>,
    /// Where experts live.
    pub experts: ExpertMemory,
    /// When experts are read on a guess, where they are in slots.
    pub guess_experts: GuessWhen,
    /// Bytes that become resident together; rounded up to whole pages.
    pub unit_bytes: usize,
}

/// Large enough for the speed of large reads, small enough that the first layer does not wait for the second. Two huge pages.
const UNIT_BYTES: usize = 4 << 20;

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            backing: Choice::Best,
            dense_weights: DenseWeights::Anon,
            direct_io: true,
            window: Window::All,
            experts_used: None,
            experts: ExpertMemory::Resident,
            guess_experts: GuessWhen::Auto,
            unit_bytes: UNIT_BYTES,
        }
    }
}

/// Where the matrices of layers and output live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DenseWeights {
    /// In memory of our own, in panels.
    #[default]
    Anon,
    /// In the page cache, which is filled before a layer is used for the first time. The system may take it back. Panels are
    /// made when they are needed, each time.
    Warm,
    /// In the page cache, as the system sees fit; read from there, so that a file that is cut off is an error and no signal.
    Mmap,
}

impl DenseWeights {
    /// All of them.
    pub const ALL: [DenseWeights; 3] = [DenseWeights::Anon, DenseWeights::Warm, DenseWeights::Mmap];

    /// The word of `--dense-weights`.
    pub fn name(self) -> &'static str {
        match self {
            DenseWeights::Anon => "anon",
            DenseWeights::Warm => "warm",
            DenseWeights::Mmap => "mmap",
        }
    }
}
