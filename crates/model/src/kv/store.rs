//! Memory of KV blocks: slabs in huge pages, cut into blocks.
//!
//! Attention reads thousands of pages a step; a block that is an allocation of its own lies on small ones, and a third of
//! the time goes to finding them. Who holds which block, and which slabs come and go, [`residency::kv`] knows.

use crate::Error;
use memory::{Buffer, HUGE_PAGE_BYTES};
use residency::kv::{BlockId, Copy};
use std::ops::Range;

/// Blocks of a slab at least, so that models with large blocks are not asked for a mapping at every turn.
const SLAB_BLOCKS_MIN: usize = 16;

/// The bytes of all blocks of a runner.
#[derive(Debug)]
pub(crate) struct KvStore {
    /// `None`: was given back.
    slabs: Vec<Option<Buffer>>,
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

    /// Blocks of a whole slab.
    pub(crate) fn slab_blocks(&self) -> usize {
        self.slab_blocks
    }

    /// Memory for `blocks` blocks, to be put in place with [`KvStore::put_slab`].
    pub(crate) fn map(&self, blocks: usize) -> Result<Buffer, Error> {
        // A length that overflows is one that the system refuses; so are more blocks than have numbers.
        let blocks = u32::try_from(blocks).map_or(usize::MAX, |blocks| blocks as usize);
        Ok(Buffer::new(blocks.saturating_mul(self.block_bytes))?)
    }

    /// Slab `number` is this memory from now on.
    pub(crate) fn put_slab(&mut self, number: usize, buffer: Buffer) {
        if self.slabs.len() <= number {
            self.slabs.resize_with(number + 1, || None);
        }
        self.slabs[number] = Some(buffer);
    }

    /// Gives back the memory of slab `number`.
    pub(crate) fn drop_slab(&mut self, number: usize) {
        self.slabs[number] = None;
    }

    fn slab(&self, number: u32) -> &Buffer {
        self.slabs[number as usize].as_ref().expect("a slab stays while a block is held")
    }

    /// The bytes of a block.
    pub(crate) fn block(&self, id: BlockId) -> &[u8] {
        &self.slab(id.slab)[id.place as usize * self.block_bytes..][..self.block_bytes]
    }

    /// Where a block is in the process's memory.
    pub(crate) fn address(&self, id: BlockId) -> Range<u64> {
        let start = self.block(id).as_ptr().addr() as u64;
        start..start + self.block_bytes as u64
    }

    /// Where the slabs are.
    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        let range = |slab: &Buffer| {
            let start = slab.as_ptr().addr() as u64;
            start..start + slab.len() as u64
        };
        self.slabs.iter().flatten().map(range).collect()
    }

    /// The bytes of a block, to be written.
    pub(crate) fn block_mut(&mut self, id: BlockId) -> &mut [u8] {
        let slab = self.slabs[id.slab as usize].as_mut().expect("a slab stays while a block is held");
        &mut slab[id.place as usize * self.block_bytes..][..self.block_bytes]
    }

    /// Copies a block's bytes.
    pub(crate) fn copy(&mut self, Copy { from, to }: Copy) {
        let len = self.block_bytes;
        let (from_byte, to_byte) = (from.place as usize * len, to.place as usize * len);
        if from.slab == to.slab {
            let slab = self.slabs[from.slab as usize].as_mut().expect("a slab stays while a block is held");
            return slab.copy_within(from_byte..from_byte + len, to_byte);
        }
        let places = [from.slab as usize, to.slab as usize];
        let [source, target] = self.slabs.get_disjoint_mut(places).expect("two slabs that are there");
        let (source, target) = (source.as_ref().expect("it is held"), target.as_mut().expect("it is held"));
        target[to_byte..][..len].copy_from_slice(&source[from_byte..][..len]);
    }

    /// The bytes of blocks, many at once, to be written.
    pub(crate) fn blocks_mut(&mut self) -> BlocksMut<'_> {
        BlocksMut { slabs: self.slabs.iter_mut(), block_bytes: self.block_bytes, passed: 0, place: 0, rest: &mut [] }
    }
}

/// The bytes of blocks that ascend.
pub(crate) struct BlocksMut<'a> {
    slabs: std::slice::IterMut<'a, Option<Buffer>>,
    block_bytes: usize,
    /// Slabs that are behind us.
    passed: u32,
    /// What is left of the last of them, from a place on.
    place: u32,
    rest: &'a mut [u8],
}

impl<'a> BlocksMut<'a> {
    /// The bytes of `id`, which comes after those before.
    pub(crate) fn next(&mut self, id: BlockId) -> &'a mut [u8] {
        if id.slab >= self.passed {
            let slab = self.slabs.nth((id.slab - self.passed) as usize).and_then(Option::as_mut);
            self.rest = &mut slab.expect("a slab stays while a block is held")[..];
            (self.passed, self.place) = (id.slab + 1, 0);
        }
        let rest = std::mem::take(&mut self.rest);
        let (_, from) = rest.split_at_mut((id.place - self.place) as usize * self.block_bytes);
        let (block, behind) = from.split_at_mut(self.block_bytes);
        (self.rest, self.place) = (behind, id.place + 1);
        block
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

    fn store(slabs: &[usize]) -> KvStore {
        let mut store = KvStore::new(BLOCK);
        for (number, &blocks) in slabs.iter().enumerate() {
            let buffer = store.map(blocks).expect("a few MiB of memory");
            store.put_slab(number, buffer);
        }
        store
    }

    #[test]
    fn blocks_do_not_overlap_and_copies_are_of_one_block() {
        let mut store = store(&[20, 3]);
        let ids: Vec<BlockId> =
            [(0, 20), (1, 3)].iter().flat_map(|&(slab, n)| (0..n).map(move |place| BlockId { slab, place })).collect();
        let odd = || ids.iter().copied().skip(1).step_by(2);
        let mut blocks = store.blocks_mut();
        for (i, block) in odd().map(|id| blocks.next(id)).enumerate() {
            assert_eq!(block.len(), BLOCK);
            block.fill(i as u8 + 1);
        }
        let value = |i: usize| if i % 2 == 1 { (i / 2) as u8 + 1 } else { 0 };
        let all = |store: &KvStore, id, byte| store.block(id).iter().all(|&b| b == byte);
        for (i, &id) in ids.iter().enumerate() {
            assert!(all(&store, id, value(i)), "block {i}");
        }
        // Within a slab and across.
        for (from, to) in [(3, 8), (5, 22)] {
            store.copy(Copy { from: ids[from], to: ids[to] });
            assert!(all(&store, ids[to], value(from)));
            for i in [from, to - 2, to - 1] {
                assert!(all(&store, ids[i], value(i)), "block {i}");
            }
        }
        assert_eq!(store.address(ids[1]).start - store.address(ids[0]).start, BLOCK as u64);
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error_with_the_bytes() {
        for blocks in [1 << 46, usize::MAX] {
            let error = store(&[]).map(blocks).expect_err("no machine maps that");
            assert!(matches!(error, Error::Memory(memory::Error::Map { len_bytes, .. }) if len_bytes >= 1 << 60));
        }
    }
}
