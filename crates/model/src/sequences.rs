//! The sequences of a runner: how they open, share, grow and end, and what memory they take.

use crate::kv::KvKey;
use crate::kv::spill::{Restored, Spill, Spilled};
use crate::{Error, Row, Runner};
use kernels::attention::KV_BLOCK;
use memory::blobs::{BlobDir, Bounds};
use residency::budget::{Full, Ledger};
use residency::kv::{Change, Class, Event, Growth, Reason, Scope, SequenceId, Stats, Tables};
use residency::pressure::Step;
use std::ops::{ControlFlow, Range};
use std::path::PathBuf;

/// A sequence that shares.
#[derive(Debug, Clone, Copy)]
pub struct Opening<'a> {
    /// What it will begin with: the history of a conversation, or a prompt.
    pub tokens: &'a [u32],
    /// Positions at most.
    pub context_max: usize,
    /// How urgent it is, and how dear what it computes.
    pub class: Class,
    /// Only sequences with the same salt share.
    pub salt: &'a [u8],
}

/// A sequence that has joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// Its name.
    pub id: SequenceId,
    /// Tokens of the opening that need not be computed; never all of them, for somebody wants the last one's logits.
    pub reused: usize,
    /// How many of these came from files.
    pub restored: usize,
}

/// Where keys and values outlive the process (`--kv-dir`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvDir {
    /// A directory, made if it is not there.
    pub path: PathBuf,
    /// The most bytes in it.
    pub bytes_max: u64,
    /// The most bytes written in a second.
    pub bytes_per_second: u64,
}

impl Runner {
    /// It is `now_ms` now, in milliseconds of any clock that does not go back: what eviction and spilling go by.
    pub fn kv_clock(&mut self, now_ms: u64) {
        self.kv.cache.set_clock(now_ms);
    }

    /// When that clock shows this, more may be evicted than now.
    pub fn kv_next_idle_ms(&self) -> Option<u64> {
        self.kv.cache.next_idle_ms()
    }

    /// Opens an empty sequence of at most `context_max` positions that shares nothing and leaves nothing behind. Memory is
    /// taken as it grows.
    pub fn sequence_open(&mut self, context_max: usize) -> SequenceId {
        self.kv.cache.open(None, Class::Interactive, context_max)
    }

    fn key(&self, salt: &[u8]) -> KvKey {
        KvKey { salt: salt.into(), ..self.key.clone() }
    }

    /// The tokens of an opening that may be reused: all but the last.
    fn reusable<'a>(opening: &Opening<'a>) -> &'a [u32] {
        let most = opening.tokens.len().saturating_sub(1).min(opening.context_max);
        &opening.tokens[..most]
    }

    /// Positions that [`Runner::sequence_join`] would find now, files aside.
    pub fn kv_match_len(&self, opening: &Opening<'_>) -> usize {
        self.kv.cache.match_len(&self.key(opening.salt), Runner::reusable(opening))
    }

    /// Opens a sequence that has the longest beginning of `opening.tokens` whose keys and values are there, in memory or in
    /// files, and that shares what it computes. What comes from files is used once its last block, computed anew, is the
    /// same bit by bit. Errors: weights that cannot be read, no memory for blocks.
    pub fn sequence_join(&mut self, opening: &Opening<'_>) -> Result<Opened, Error> {
        let (key, tokens, class) = (self.key(opening.salt), Runner::reusable(opening), opening.class);
        let here = self.kv.cache.match_len(&key, tokens);
        let restored = self.kv.restore(&key, class, tokens)?;
        let mut id = self.kv.cache.join(key.clone(), class, opening.context_max, tokens);
        let mut reused = self.sequence_len(id);
        let is_true = if restored.nodes.is_empty() { Ok(true) } else { self.is_true(&key, id, &restored) };
        if !matches!(is_true, Ok(true)) {
            self.kv.cache.close(id);
            self.kv.forget(&restored, matches!(is_true, Ok(false)));
            match is_true {
                // No room for the check, so nothing is proven, and there would be none for the sequence.
                Ok(_) | Err(Error::KvFull(_)) => {}
                Err(error) => return Err(error),
            }
            id = self.kv.cache.join(key, class, opening.context_max, tokens);
            reused = self.sequence_len(id);
        }
        let restored = reused.saturating_sub(here);
        self.kv.cache.count_look_up(tokens.len(), reused);
        if restored > 0 {
            self.kv.cache.record(Change::Restored { tokens: restored as u64 });
        }
        self.kv.balance();
        Ok(Opened { id, reused, restored })
    }

    /// Whether the last full block of `id` is what the model computes. Its keys and values come from the weights of all
    /// layers and from all positions before, so blocks of another model, or of another definition of a result, show there.
    /// (Bytes that changed on their way checksums have found before.)
    fn is_true(&mut self, key: &KvKey, id: SequenceId, restored: &Restored) -> Result<bool, Error> {
        let tokens = self.kv.cache.tokens(id).to_vec();
        let blocks = tokens.len() / KV_BLOCK;
        if blocks == 0 || !restored.nodes.iter().any(|&node| self.kv.cache.is_used(id, node)) {
            // Nothing of it can be used, for want of the blocks before it.
            return Ok(true);
        }
        let (last, end) = ((blocks - 1) * KV_BLOCK, blocks * KV_BLOCK);
        // With a window it may have to begin earlier.
        let before = self.kv.cache.join(key.clone(), Class::Batch, usize::MAX, &tokens[..last]);
        let check = self.kv.cache.fork_apart(before);
        self.kv.cache.close(before);
        let from = self.sequence_len(check);
        let rows: Vec<Row> =
            tokens[from..end].iter().map(|&token| Row { sequence: check, token, logits: false }).collect();
        let computed = self.forward(&rows).map(drop);
        let same = computed.map(|()| {
            let (got, want) = (self.kv.cache.tables(check), self.kv.cache.tables(id));
            let config = &self.model().config;
            (0..config.layers).all(|layer| {
                let (group, place) = self.kv.groups.place(layer);
                // Layers that are smaller than others leave bytes unused.
                let len = config.shape(layer, self.kv_types()).block_bytes();
                let start = place * self.kv.layer_bytes();
                let part = |tables: &Tables<'_>| {
                    tables.block(group, blocks - 1).map(|block| &self.kv.store.block(block)[start..start + len])
                };
                part(&got).is_some() && part(&got) == part(&want)
            })
        });
        self.kv.cache.close(check);
        same
    }

    /// A second sequence with the same positions, in the same blocks until one of them goes on.
    pub fn sequence_fork(&mut self, id: SequenceId) -> SequenceId {
        self.kv.cache.fork(id)
    }

    /// Ends a sequence. What one that joined has computed stays for others, as long as there is room.
    pub fn sequence_close(&mut self, id: SequenceId) {
        self.kv.cache.close(id);
        self.kv.balance();
    }

    /// Positions computed so far; 0 of one that is closed.
    pub fn sequence_len(&self, id: SequenceId) -> usize {
        self.sequence_tokens(id).len()
    }

    /// Tokens at these positions.
    pub fn sequence_tokens(&self, id: SequenceId) -> &[u32] {
        if self.kv.cache.is_open(id) { self.kv.cache.tokens(id) } else { &[] }
    }

    /// Forgets all positions from `len` on; gives the length that the sequence has now: `len`, or nothing if blocks are gone
    /// that a sliding window needs before `len`. What the last call of [`Runner::forward`] computed, if in one micro-batch,
    /// can always be taken back exactly.
    pub fn sequence_truncate(&mut self, id: SequenceId, len: usize) -> usize {
        let len = self.kv.cache.truncate(id, len);
        self.kv.balance();
        len
    }

    /// Makes room for so many more positions of each sequence, at most a micro-batch in all: for all or for none. The most
    /// urgent of them decides what may be evicted. An error if the system has no memory.
    pub fn kv_grow(&mut self, wants: &[(SequenceId, usize)]) -> Result<Growth, Error> {
        self.kv.grow(wants)
    }

    /// Whether a sequence of `len` positions could be held if there were no other: it is ready or refused.
    pub fn kv_fits(&self, len: usize) -> Growth {
        self.kv.fits(len)
    }

    /// Takes the memory of all positions of sequence `id` now, which else comes as it grows. Errors: there is none.
    pub fn sequence_reserve(&mut self, id: SequenceId) -> Result<(), Error> {
        self.kv.reserve(id)?;
        let context_max = self.kv.cache.context_max(id);
        self.grow_rope(context_max);
        Ok(())
    }

    /// From now on `ledger` grants all memory of keys and values before it is taken.
    pub fn charge_to(&mut self, ledger: &Ledger, owner: &str) -> Result<(), Full> {
        self.kv.charge_to(ledger, owner)
    }

    /// The most bytes of keys and values, those that no sequence holds included; `None`: what the ledger or the machine has.
    pub fn set_kv_limit(&mut self, bytes: Option<u64>) {
        self.kv.set_limit(bytes);
    }

    /// Bytes of keys and values that memory is taken for. Of the last page of a mapping they count what is used.
    pub fn kv_bytes(&self) -> u64 {
        self.kv.bytes()
    }

    /// Bytes of a block: of 16 positions, of the layers of one group.
    pub fn kv_block_bytes(&self) -> u64 {
        self.kv.store.block_bytes() as u64
    }

    /// Bytes of keys and values of a position, in all layers.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (self.kv.store.block_bytes() * self.kv.groups.layout.groups() / KV_BLOCK) as u64
    }

    /// Gives back the memory that nothing is kept in; its bytes.
    pub fn kv_trim(&mut self) -> u64 {
        self.kv.trim()
    }

    /// Takes one step of the order in which memory is given back; the bytes that it freed.
    pub fn kv_shrink(&mut self, step: Step) -> Result<u64, Error> {
        match step {
            Step::ShrinkPrefixCache => Ok(self.kv.shrink(Scope::Idle, Reason::Pressure)),
            Step::SpillIdleKv => {
                self.kv_spill()?;
                Ok(self.kv.shrink(Scope::All, Reason::Pressure))
            }
            Step::StopPrefetch | Step::DropIdleModels | Step::PreemptLowPriority | Step::RouteAway => Ok(0),
        }
    }

    /// Counts.
    pub fn kv_stats(&self) -> Stats {
        self.kv.cache.stats()
    }

    /// What happened to keys and values lately, oldest first.
    pub fn kv_events(&self) -> impl Iterator<Item = &Event> {
        self.kv.cache.events()
    }

    /// Keeps keys and values in files too: they are looked for there, and [`Runner::kv_spill`] writes them.
    pub fn kv_dir(&mut self, dir: &KvDir) -> Result<(), Error> {
        let bounds = Bounds { bytes_max: dir.bytes_max, bytes_per_second: dir.bytes_per_second };
        self.kv.spill = Some(Spill::new(BlobDir::open(&dir.path, bounds)?, &self.model().sources)?);
        Ok(())
    }

    /// Writes what is computed and in no file yet, as fast as is allowed. To be called when there is nothing else to do, and
    /// before the model goes.
    pub fn kv_spill(&mut self) -> Result<Spilled, Error> {
        self.kv.spill()
    }

    /// As [`Runner::kv_spill`], until all is written; `wait` passes so many milliseconds in between, or breaks it off.
    pub fn kv_spill_all(&mut self, wait: &mut dyn FnMut(u64) -> ControlFlow<()>) -> Result<Spilled, Error> {
        let mut all = Spilled::default();
        loop {
            let some = self.kv_spill()?;
            all.files += some.files;
            all.bytes += some.bytes;
            all.tokens += some.tokens;
            all.wait_ms = some.wait_ms;
            let Some(wait_ms) = some.wait_ms else { return Ok(all) };
            if wait(wait_ms).is_break() {
                return Ok(all);
            }
            self.kv_clock(self.kv.cache.now_ms().saturating_add(wait_ms));
        }
    }

    /// Where in the process's memory keys and values are, for an observer of that (see [`memory::damon`]).
    pub fn kv_ranges(&self) -> Vec<Range<u64>> {
        self.kv.store.ranges()
    }

    /// What `is_idle` says of the addresses of its blocks counts as if a conversation had been idle for long, until it is
    /// used; how many blocks of 16 positions it says so of.
    pub fn kv_observe(&mut self, is_idle: &dyn Fn(&Range<u64>) -> bool) -> usize {
        let store = &self.kv.store;
        self.kv.cache.observe_idle(&|block| is_idle(&store.address(block)))
    }
}
