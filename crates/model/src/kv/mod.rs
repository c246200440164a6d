//! The KV cache of a runner: what [`residency::kv`] decides, with the bytes, charged to a ledger.
//!
//! Memory is taken in slabs as sequences grow, within the limit and the ledger; where that is not enough, what no sequence
//! holds is evicted. What the ledger has granted is what is mapped: the line of sequences, free blocks included, and the
//! line of what only the tree holds.

pub(crate) mod groups;
pub(crate) mod spill;
pub(crate) mod store;

use crate::Error;
use groups::LayerGroups;
use residency::budget::{Full, Grant, Ledger, Line};
use residency::kv::{Cache, Change, Class, Growth, Reason, Scope, SequenceId, Shortage};
use spill::Spill;
use store::KvStore;

/// What keys and values depend on beside the tokens, and who may share them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KvKey {
    /// The model's content, as far as this process can tell it from others.
    pub(crate) model: String,
    /// The adapter's content; there are none yet.
    pub(crate) adapter: Option<String>,
    /// Rotation, window and all other numbers of the architecture.
    pub(crate) parameters: String,
    /// Types of keys and values.
    pub(crate) types: (&'static str, &'static str),
    /// Only those who have the same share.
    pub(crate) salt: Box<[u8]>,
}

#[derive(Debug)]
struct Grants {
    ledger: Ledger,
    kv: Grant,
    prefix: Grant,
}

/// The cache and its bytes.
#[derive(Debug)]
pub(crate) struct KvCache {
    pub(crate) cache: Cache<KvKey>,
    pub(crate) store: KvStore,
    pub(crate) groups: LayerGroups,
    pub(crate) spill: Option<Spill>,
    grants: Option<Grants>,
    limit_bytes: Option<u64>,
    /// Positions that are computed at once at most.
    chunk: usize,
}

impl KvCache {
    /// An empty cache for these layers, of which each takes `layer_bytes` for 16 positions.
    pub(crate) fn new(groups: LayerGroups, layer_bytes: usize, chunk: usize) -> KvCache {
        KvCache {
            cache: Cache::new(groups.layout),
            store: KvStore::new(groups.layers * layer_bytes),
            groups,
            spill: None,
            grants: None,
            limit_bytes: None,
            chunk,
        }
    }

    fn bytes_of(&self, blocks: usize) -> u64 {
        (blocks as u64).saturating_mul(self.store.block_bytes() as u64)
    }

    /// Bytes of a layer in a block.
    pub(crate) fn layer_bytes(&self) -> usize {
        self.store.block_bytes() / self.groups.layers
    }

    /// Bytes of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes_of(self.cache.blocks())
    }

    pub(crate) fn charge_to(&mut self, ledger: &Ledger, owner: &str) -> Result<(), Full> {
        let kv = ledger.grant(Line::Kv, owner, self.bytes())?;
        let prefix = ledger.grant(Line::PrefixCache, owner, 0)?;
        self.grants = Some(Grants { ledger: ledger.clone(), kv, prefix });
        self.balance();
        Ok(())
    }

    pub(crate) fn set_limit(&mut self, bytes: Option<u64>) {
        self.limit_bytes = bytes;
    }

    /// The most bytes that there can be now.
    fn limit_bytes(&self) -> u64 {
        let granted = self.grants.as_ref().map(|g| self.bytes().saturating_add(g.ledger.free_bytes()));
        granted.unwrap_or(u64::MAX).min(self.limit_bytes.unwrap_or(u64::MAX))
    }

    /// Charges each line what it has now.
    pub(crate) fn balance(&mut self) {
        let (bytes, cached) = (self.bytes(), self.bytes_of(self.cache.cached_blocks()));
        if let Some(Grants { kv, prefix, .. }) = &mut self.grants {
            let surplus = (kv.bytes() + prefix.bytes()).saturating_sub(bytes);
            kv.give(prefix, cached.saturating_sub(prefix.bytes()));
            prefix.give(kv, prefix.bytes().saturating_sub(cached));
            // Smaller is always granted.
            let _ = kv.resize(kv.bytes().saturating_sub(surplus));
        }
    }

    /// Makes room for so many more positions of each sequence, for all or none. An error if the system has no memory.
    pub(crate) fn grow(&mut self, wants: &[(SequenceId, usize)]) -> Result<Growth, Error> {
        let missing = self.cache.missing(wants);
        let grown =
            self.free_up(missing, wants.iter().map(|&(id, _)| self.cache.class(id)).max().unwrap_or_default())?;
        self.balance();
        if grown {
            return Ok(Growth::Ready);
        }
        let held: usize = wants.iter().map(|&(id, _)| self.cache.blocks_held(id)).fold(0, usize::saturating_add);
        let shortage = self.shortage(missing);
        let alone = self.bytes_of(held.min(self.cache.leased_blocks()).saturating_add(missing));
        Ok(if alone > shortage.limit_bytes { Growth::Refuse(shortage) } else { Growth::Wait(shortage) })
    }

    /// The numbers where `wanted` blocks are not free.
    fn shortage(&self, wanted: usize) -> Shortage {
        Shortage {
            wanted_bytes: self.bytes_of(wanted.saturating_sub(self.cache.free_blocks())),
            leased_bytes: self.bytes_of(self.cache.leased_blocks()),
            cached_bytes: self.bytes_of(self.cache.cached_blocks()),
            limit_bytes: self.limit_bytes(),
        }
    }

    /// Blocks that memory may still be taken for.
    fn room(&self) -> usize {
        match self.limit_bytes() {
            // Whatever the system has.
            u64::MAX => usize::MAX,
            limit => (limit.saturating_sub(self.bytes()) / self.store.block_bytes() as u64) as usize,
        }
    }

    /// Whether a sequence of `len` positions could be held if there were no other: it is ready or refused.
    pub(crate) fn fits(&self, len: usize) -> Growth {
        let wanted_bytes = self.bytes_of(self.groups.layout.blocks_max(len, self.chunk));
        let shortage = Shortage { wanted_bytes, ..self.shortage(0) };
        if wanted_bytes > shortage.limit_bytes { Growth::Refuse(shortage) } else { Growth::Ready }
    }

    /// Makes `wanted` blocks free, by taking memory, then by evicting what a request of `class` may displace.
    fn free_up(&mut self, wanted: usize, class: Class) -> Result<bool, Error> {
        let Some(short) = wanted.checked_sub(self.cache.free_blocks()).filter(|&short| short > 0) else {
            return Ok(true);
        };
        let room = self.room();
        if short <= room {
            // Whole slabs, as far as somebody will need them.
            let slabs = short.checked_next_multiple_of(self.store.slab_blocks()).unwrap_or(short);
            let to_come = self.cache.blocks_to_come(self.chunk).saturating_sub(self.cache.free_blocks());
            if self.add_blocks(slabs.min(to_come.max(short)).min(room))? {
                return Ok(true);
            }
        }
        // What cannot be mapped must be evicted; if that fails too, nothing was touched.
        let room = if short <= room { 0 } else { room };
        let evicted = self.cache.evict(short - room, Scope::For(class), Reason::Room);
        if evicted > 0 && (evicted >= short || self.add_blocks(short - evicted)?) {
            return Ok(true);
        }
        let (wanted_blocks, leased_blocks) = (short as u64, self.cache.leased_blocks() as u64);
        self.cache.record(Change::Short { class, wanted_blocks, leased_blocks });
        Ok(false)
    }

    /// Gives each sequence the blocks of so many more positions, for which [`KvCache::grow`] has made room.
    pub(crate) fn take(&mut self, wants: &[(SequenceId, usize)]) {
        for &(id, new) in wants {
            let copies = self.cache.extend(id, new).expect("room was made");
            copies.into_iter().for_each(|copy| self.store.copy(copy));
        }
    }

    /// Takes memory for `blocks` blocks, if the ledger grants it.
    fn add_blocks(&mut self, blocks: usize) -> Result<bool, Error> {
        let bytes = self.bytes_of(blocks);
        if let Some(Grants { kv, .. }) = &mut self.grants
            && kv.resize(kv.bytes().saturating_add(bytes)).is_err()
        {
            return Ok(false);
        }
        match self.store.map(blocks) {
            Ok(buffer) => {
                let number = self.cache.add_slab(blocks as u32);
                self.store.put_slab(number, buffer);
                Ok(true)
            }
            Err(error) => {
                self.balance();
                Err(error)
            }
        }
    }

    /// Takes the memory of all positions of a sequence now.
    pub(crate) fn reserve(&mut self, id: SequenceId) -> Result<(), Error> {
        self.cache.set_reserved(id, true);
        let wanted = self.cache.blocks_reserved(self.chunk);
        let freed = self.free_up(wanted, self.cache.class(id));
        if !matches!(freed, Ok(true)) {
            self.cache.set_reserved(id, false);
            freed?;
            return Err(Error::KvFull(self.shortage(wanted)));
        }
        // Written, for pages that are only mapped take none.
        for block in self.cache.free_ids() {
            self.store.block_mut(block).fill(1);
        }
        self.balance();
        Ok(())
    }

    /// Gives back the slabs of which no block is held; their bytes.
    pub(crate) fn trim(&mut self) -> u64 {
        let before = self.bytes();
        for number in self.cache.trim() {
            self.store.drop_slab(number);
        }
        self.balance();
        before - self.bytes()
    }

    /// Evicts what `scope` allows, and gives back the memory; its bytes.
    pub(crate) fn shrink(&mut self, scope: Scope, reason: Reason) -> u64 {
        self.cache.evict(usize::MAX, scope, reason);
        self.trim()
    }
}
