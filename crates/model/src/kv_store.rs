//! Memory of KV blocks: slabs in huge pages, cut into blocks that sequences hold by id.
//!
//! Attention reads thousands of pages a step; a block that is an allocation of its own lies on small ones, and a third of
//! the time goes to finding them. A slab is taken whole and given back whole, once none of its blocks is held.

use crate::Error;
use memory::{Buffer, HUGE_PAGE_BYTES};

/// Blocks of a slab at least, so that models with large blocks are not asked for a mapping at every turn.
const SLAB_BLOCKS_MIN: usize = 16;

/// A block that is held: its slab, and its place there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockId {
    slab: usize,
    place: usize,
}

#[derive(Debug)]
struct Slab {
    buffer: Buffer,
    blocks: usize,
    /// Places that no one holds; the last is taken next.
    free: Vec<usize>,
}

/// The blocks of all sequences of a runner.
#[derive(Debug)]
pub(crate) struct KvStore {
    /// `None`: was given back.
    slabs: Vec<Option<Slab>>,
    block_bytes: usize,
    slab_blocks: usize,
}

impl KvStore {
    /// A store without memory, of blocks of `block_bytes`.
    pub(crate) fn new(block_bytes: usize) -> KvStore {
        KvStore { slabs: Vec::new(), block_bytes, slab_blocks: slab_blocks(block_bytes) }
    }

    /// Bytes of a block.
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn slabs(&self) -> impl Iterator<Item = &Slab> {
        self.slabs.iter().flatten()
    }

    /// Blocks that there is memory for, held or free.
    pub(crate) fn blocks(&self) -> usize {
        self.slabs().map(|slab| slab.blocks).sum()
    }

    fn free_blocks(&self) -> usize {
        self.slabs().map(|slab| slab.free.len()).sum()
    }

    /// Blocks that a growth would add so that `wanted` are free: whole slabs, but no more than `blocks_max` blocks in all
    /// unless the wanted ones are.
    pub(crate) fn growth(&self, wanted: usize, blocks_max: usize) -> usize {
        let new = wanted.saturating_sub(self.free_blocks());
        let room = blocks_max.saturating_sub(self.blocks());
        new.checked_next_multiple_of(self.slab_blocks).unwrap_or(new).min(room.max(new))
    }

    /// Makes `wanted` blocks free, by [`KvStore::growth`]. An error leaves everything as it was.
    pub(crate) fn grow(&mut self, wanted: usize, blocks_max: usize) -> Result<(), Error> {
        let blocks = self.growth(wanted, blocks_max);
        if blocks == 0 {
            return Ok(());
        }
        // A length that overflows is one that the system refuses.
        let buffer = Buffer::new(blocks.saturating_mul(self.block_bytes))?;
        let slab = Some(Slab { buffer, blocks, free: (0..blocks).rev().collect() });
        match self.slabs.iter_mut().find(|slab| slab.is_none()) {
            Some(vacant) => *vacant = slab,
            None => self.slabs.push(slab),
        }
        Ok(())
    }

    /// A free block, if there is one, from the first slab that has any: so the later ones come to be free as a whole. What
    /// it contains is left from before.
    pub(crate) fn take(&mut self) -> Option<BlockId> {
        self.slabs.iter_mut().enumerate().find_map(|(i, slab)| {
            let place = slab.as_mut()?.free.pop()?;
            Some(BlockId { slab: i, place })
        })
    }

    /// Makes blocks free that were taken.
    pub(crate) fn release(&mut self, blocks: impl IntoIterator<Item = BlockId>) {
        for BlockId { slab, place } in blocks {
            self.slabs[slab].as_mut().expect("a slab stays while a block is held").free.push(place);
        }
    }

    /// Gives back the slabs of which no block is held; the number of their blocks.
    pub(crate) fn trim(&mut self) -> usize {
        let before = self.blocks();
        for slab in &mut self.slabs {
            slab.take_if(|slab| slab.free.len() == slab.blocks);
        }
        before - self.blocks()
    }

    /// The bytes of a block.
    pub(crate) fn block(&self, id: BlockId) -> &[u8] {
        let slab = self.slabs[id.slab].as_ref().expect("a slab stays while a block is held");
        &slab.buffer[id.place * self.block_bytes..][..self.block_bytes]
    }

    /// The bytes of blocks, all at once, to be written. `ids` must ascend.
    pub(crate) fn blocks_mut(&mut self, ids: impl Iterator<Item = BlockId>) -> impl Iterator<Item = &mut [u8]> {
        let block_bytes = self.block_bytes;
        let mut slabs = self.slabs.iter_mut();
        // Slabs that are behind us, and what is left of the last of them, from a place on.
        let (mut passed, mut place, mut rest) = (0, 0, &mut [][..]);
        ids.map(move |id| {
            if id.slab >= passed {
                let slab = slabs.nth(id.slab - passed).and_then(Option::as_mut);
                rest = &mut slab.expect("a slab stays while a block is held").buffer[..];
                (passed, place) = (id.slab + 1, 0);
            }
            let (_, from) = std::mem::take(&mut rest).split_at_mut((id.place - place) * block_bytes);
            let (block, behind) = from.split_at_mut(block_bytes);
            (rest, place) = (behind, id.place + 1);
            block
        })
    }
}

/// Blocks of a slab: a huge page's worth at least, and of up to twice as many the number that leaves least behind the last
/// whole huge page, for that part lies on small ones.
fn slab_blocks(block_bytes: usize) -> usize {
    let least = SLAB_BLOCKS_MIN.max(HUGE_PAGE_BYTES.div_ceil(block_bytes));
    (least..=2 * least).min_by_key(|blocks| blocks * block_bytes % HUGE_PAGE_BYTES).unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 100 << 10;

    fn taken(store: &mut KvStore, blocks: usize, blocks_max: usize) -> Vec<BlockId> {
        store.grow(blocks, blocks_max).expect("a few MiB of memory");
        (0..blocks).map(|_| store.take().expect("it has grown")).collect()
    }

    #[test]
    fn slabs_fill_huge_pages_and_are_not_large() {
        // SmolLM2 and Qwen2.5-Coder in halves, SmolLM2 in Q8_0, a tiny model.
        for block_bytes in [368_640, 196_608, 195_840, 4352] {
            let bytes = slab_blocks(block_bytes) * block_bytes;
            let behind = bytes % HUGE_PAGE_BYTES;
            assert!(behind * 20 <= bytes, "{behind} of {bytes} bytes are on small pages");
            assert!(bytes >= HUGE_PAGE_BYTES && bytes <= 2 * (HUGE_PAGE_BYTES + SLAB_BLOCKS_MIN * block_bytes));
        }
    }

    #[test]
    fn every_block_is_its_holders_alone() {
        let mut store = KvStore::new(BLOCK);
        let slab = store.slab_blocks;
        let mut ids = taken(&mut store, slab + 3, usize::MAX);
        ids.extend(taken(&mut store, slab, usize::MAX));
        ids.sort_unstable();
        let odd: Vec<BlockId> = ids.iter().copied().skip(1).step_by(2).collect();
        assert!(odd.first().map(|id| id.slab) < odd.last().map(|id| id.slab), "more than one slab");
        for (i, block) in store.blocks_mut(odd.iter().copied()).enumerate() {
            assert_eq!(block.len(), BLOCK);
            block.fill(i as u8 + 1);
        }
        for (i, &id) in ids.iter().enumerate() {
            let want = if i % 2 == 1 { (i / 2) as u8 + 1 } else { 0 };
            assert!(store.block(id).iter().all(|&byte| byte == want), "block {i}");
        }
    }

    #[test]
    fn a_store_grows_by_slabs_but_not_beyond_what_may_be_asked_for() {
        let mut store = KvStore::new(BLOCK);
        let slab = store.slab_blocks;
        taken(&mut store, 1, 2 * slab + 5);
        assert_eq!(store.blocks(), slab);
        taken(&mut store, slab, 2 * slab + 5);
        assert_eq!(store.blocks(), 2 * slab);
        taken(&mut store, slab, 2 * slab + 5);
        assert_eq!(store.blocks(), 2 * slab + 5, "the last slab is smaller");
        assert_eq!(store.growth(4, 0), 0, "four are free");
        assert_eq!(store.growth(6, 0), 2, "what is wanted comes, whatever was said");
        let mapped: usize = store.slabs().map(|slab| slab.buffer.len()).sum();
        assert!(mapped - store.blocks() * BLOCK < store.slabs.len() * HUGE_PAGE_BYTES / 32, "a page for each slab");
    }

    #[test]
    fn a_slab_is_given_back_when_its_last_block_is_released() {
        let mut store = KvStore::new(BLOCK);
        let slab = store.slab_blocks;
        let first = taken(&mut store, slab, usize::MAX);
        let second = taken(&mut store, slab, usize::MAX);
        store.release(second[1..].iter().copied());
        assert_eq!((store.trim(), store.blocks()), (0, 2 * slab), "one block is held");
        store.release(first);
        assert_eq!((store.trim(), store.blocks()), (slab, slab));
        assert_eq!(store.block(second[0]).len(), BLOCK, "what is held stays where it was");
        let again = taken(&mut store, slab, usize::MAX);
        assert_eq!((again.len(), store.blocks(), store.slabs.len()), (slab, 2 * slab, 2), "the place is used again");
        store.release(again.into_iter().chain([second[0]]));
        assert_eq!((store.trim(), store.blocks()), (2 * slab, 0));
        assert!(store.take().is_none());
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error_with_the_bytes_and_changes_nothing() {
        let mut store = KvStore::new(BLOCK);
        let slab = store.slab_blocks;
        let held = taken(&mut store, 1, usize::MAX);
        for blocks in [1 << 46, usize::MAX] {
            let error = store.grow(blocks, 0).expect_err("no machine maps that");
            assert!(matches!(error, Error::Memory(memory::Error::Map { len_bytes, .. }) if len_bytes >= 1 << 60));
        }
        assert_eq!((store.blocks(), store.free_blocks()), (slab, slab - 1));
        assert_eq!(store.block(held[0]).len(), BLOCK);
    }
}
