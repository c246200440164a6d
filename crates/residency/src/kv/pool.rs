//! Blocks and who holds them, without their bytes.
//!
//! A *part* is what 16 positions take in all layer groups of one kind: a block for each. Its blocks come and go together, so
//! holders are counted for the part. A part is *leased* while a sequence holds it, *cached* while only the tree does, and
//! free otherwise.

/// A block: its slab, and its place there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    /// Number of the slab.
    pub slab: u32,
    /// Number of the block in the slab.
    pub place: u32,
}

/// A part, by its place in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PartId(u32);

#[derive(Debug, Clone)]
struct Slab {
    blocks: u32,
    /// Places that no part has; the last is taken next.
    free: Vec<u32>,
}

#[derive(Debug, Clone, Default)]
struct Part {
    blocks: Box<[BlockId]>,
    /// Sequences that hold it.
    leases: u32,
    /// Whether the tree holds it.
    in_tree: bool,
}

/// The blocks of a cache.
#[derive(Debug, Clone, Default)]
pub(super) struct Pool {
    /// `None`: was given back.
    slabs: Vec<Option<Slab>>,
    parts: Vec<Part>,
    /// Places of `parts` that hold none.
    vacant: Vec<PartId>,
    leased: usize,
    cached: usize,
}

impl Pool {
    fn slabs(&self) -> impl Iterator<Item = &Slab> {
        self.slabs.iter().flatten()
    }

    /// Blocks that there is memory for.
    pub(super) fn blocks(&self) -> usize {
        self.slabs().map(|slab| slab.blocks as usize).sum()
    }

    /// Blocks of parts that sequences hold.
    pub(super) fn leased(&self) -> usize {
        self.leased
    }

    /// Blocks of parts that only the tree holds.
    pub(super) fn cached(&self) -> usize {
        self.cached
    }

    /// Blocks that no part has.
    pub(super) fn free(&self) -> usize {
        self.blocks() - self.leased - self.cached
    }

    /// Blocks that no part has, by id.
    pub(super) fn free_ids(&self) -> impl Iterator<Item = BlockId> {
        let of_slab = |(slab, s): (usize, &'_ Option<Slab>)| {
            let places = s.iter().flat_map(|s| s.free.clone()).collect::<Vec<_>>();
            places.into_iter().map(move |place| BlockId { slab: slab as u32, place })
        };
        self.slabs.iter().enumerate().flat_map(of_slab)
    }

    /// Adds a slab of `blocks` blocks; gives its number.
    pub(super) fn add_slab(&mut self, blocks: u32) -> usize {
        let slab = Some(Slab { blocks, free: (0..blocks).rev().collect() });
        match self.slabs.iter().position(Option::is_none) {
            Some(vacant) => {
                self.slabs[vacant] = slab;
                vacant
            }
            None => {
                self.slabs.push(slab);
                self.slabs.len() - 1
            }
        }
    }

    /// Takes out the slabs of which no block is held; their numbers.
    pub(super) fn trim(&mut self) -> Vec<usize> {
        let is_free = |slab: &Slab| slab.free.len() == slab.blocks as usize;
        let gone: Vec<usize> = (0..self.slabs.len()).filter(|&i| self.slabs[i].as_ref().is_some_and(is_free)).collect();
        gone.iter().for_each(|&i| self.slabs[i] = None);
        gone
    }

    /// A part of `blocks` blocks, leased once; `None` if so many are not free. Blocks come from the first slabs that have
    /// any: so the later ones come to be free as a whole.
    pub(super) fn take(&mut self, blocks: usize) -> Option<PartId> {
        if self.free() < blocks {
            return None;
        }
        let mut ids = Vec::with_capacity(blocks);
        for (number, slab) in self.slabs.iter_mut().enumerate() {
            let Some(slab) = slab else { continue };
            while ids.len() < blocks
                && let Some(place) = slab.free.pop()
            {
                ids.push(BlockId { slab: number as u32, place });
            }
        }
        let part = Part { blocks: ids.into(), leases: 1, in_tree: false };
        self.leased += blocks;
        Some(match self.vacant.pop() {
            Some(id) => {
                self.parts[id.0 as usize] = part;
                id
            }
            None => {
                self.parts.push(part);
                PartId(self.parts.len() as u32 - 1)
            }
        })
    }

    fn part(&self, id: PartId) -> &Part {
        &self.parts[id.0 as usize]
    }

    /// The blocks of a part, by layer group.
    pub(super) fn blocks_of(&self, id: PartId) -> &[BlockId] {
        &self.part(id).blocks
    }

    /// Sequences that hold a part.
    pub(super) fn leases(&self, id: PartId) -> u32 {
        self.part(id).leases
    }

    /// Whether anyone but one sequence holds a part.
    pub(super) fn is_shared(&self, id: PartId) -> bool {
        let part = self.part(id);
        part.leases + u32::from(part.in_tree) > 1
    }

    /// One more sequence holds the part.
    pub(super) fn lease(&mut self, id: PartId) -> PartId {
        self.change(id, |part| part.leases += 1);
        id
    }

    /// A sequence lets the part go.
    pub(super) fn release(&mut self, id: PartId) {
        self.change(id, |part| part.leases -= 1);
    }

    /// The tree takes the part, or lets it go.
    pub(super) fn set_in_tree(&mut self, id: PartId, in_tree: bool) {
        self.change(id, |part| part.in_tree = in_tree);
    }

    /// Changes the holders of a part, and all counts with them.
    fn change(&mut self, id: PartId, change: impl FnOnce(&mut Part)) {
        let part = &mut self.parts[id.0 as usize];
        let len = part.blocks.len();
        let counts = |part: &Part| match part {
            Part { leases: 1.., .. } => (len, 0),
            Part { in_tree: true, .. } => (0, len),
            _ => (0, 0),
        };
        let before = counts(part);
        change(part);
        let after = counts(part);
        self.leased = self.leased + after.0 - before.0;
        self.cached = self.cached + after.1 - before.1;
        if part.leases == 0 && !part.in_tree {
            for BlockId { slab, place } in std::mem::take(&mut part.blocks) {
                let slab = self.slabs[slab as usize].as_mut();
                slab.expect("a slab stays while a block of it is held").free.push(place);
            }
            self.vacant.push(id);
        }
    }

    /// Holders of all parts that have any, for the tests: leases and whether the tree is one.
    #[cfg(test)]
    pub(super) fn holders(&self) -> impl Iterator<Item = (PartId, u32, bool)> {
        let held = |(i, part): (usize, &Part)| {
            (part.leases > 0 || part.in_tree).then_some((PartId(i as u32), part.leases, part.in_tree))
        };
        self.parts.iter().enumerate().filter_map(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_one_part_and_is_free_again_when_its_last_holder_is_gone() {
        let mut pool = Pool::default();
        assert_eq!(pool.take(1), None);
        assert_eq!((pool.add_slab(4), pool.add_slab(3)), (0, 1));
        let a = pool.take(3).expect("four are free");
        let b = pool.take(3).expect("one is left there, three are behind");
        let mut all: Vec<BlockId> = [a, b].iter().flat_map(|&p| pool.blocks_of(p)).copied().collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!((all.len(), pool.leased(), pool.free()), (6, 6, 1));
        assert_eq!(pool.take(2), None);
        pool.lease(a);
        pool.set_in_tree(b, true);
        assert!(pool.is_shared(a) && pool.is_shared(b));
        pool.release(a);
        pool.release(b);
        assert_eq!((pool.leased(), pool.cached(), pool.free()), (3, 3, 1));
        assert!(pool.trim().is_empty());
        pool.set_in_tree(b, false);
        assert_eq!((pool.trim(), pool.blocks()), (vec![1], 4));
        pool.release(a);
        assert_eq!((pool.trim(), pool.blocks(), pool.free()), (vec![0], 0, 0));
        assert_eq!((pool.add_slab(2), pool.slabs.len()), (0, 2), "the place is used again");
    }
}
