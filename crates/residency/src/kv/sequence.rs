//! Sequences: their tables, how they join, grow, share and end.

use super::{BLOCK_TOKENS, BlockId, Cache, Class, Leaf, NodeId, PartId, Pool, SequenceId, reach};

/// An open sequence.
#[derive(Debug, Clone)]
pub(super) struct Sequence<K> {
    /// `None`: it shares with nobody.
    pub(super) key: Option<K>,
    class: Class,
    context_max: usize,
    /// One for each position that is computed.
    tokens: Vec<u32>,
    /// For each 16 positions, the blocks of layers that see everything.
    pub(super) full: Vec<PartId>,
    /// The same for layers with a window; `None` behind it.
    pub(super) window: Vec<Option<PartId>>,
    /// The nodes of full blocks, if it shares.
    pub(super) path: Vec<NodeId>,
    /// Whether the blocks of all its positions are to be there before they are asked for.
    reserved: bool,
}

impl<K> Sequence<K> {
    fn new(key: Option<K>, class: Class, context_max: usize) -> Sequence<K> {
        let (tokens, full, window, path) = Default::default();
        Sequence { key, class, context_max, tokens, full, window, path, reserved: false }
    }
}

/// The blocks of a sequence by layer group.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    pool: &'a Pool,
    full: &'a [PartId],
    window: &'a [Option<PartId>],
    full_groups: usize,
}

impl Tables<'_> {
    /// Blocks of 16 positions, those behind the window included.
    pub fn len(&self) -> usize {
        self.full.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.full.is_empty()
    }

    /// The block of 16 positions number `index` in layer group `group`, of which those with a window are the last; `None`
    /// behind the window.
    pub fn block(&self, group: usize, index: usize) -> Option<BlockId> {
        if group < self.full_groups {
            return Some(self.pool.blocks_of(self.full[index])[group]);
        }
        self.window[index].map(|part| self.pool.blocks_of(part)[group - self.full_groups])
    }
}

/// Bytes to be copied before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// Where from.
    pub from: BlockId,
    /// Where to.
    pub to: BlockId,
}

impl<K: Ord + Clone> Cache<K> {
    fn sequence(&self, id: SequenceId) -> &Sequence<K> {
        self.sequences[id.0].as_ref().expect("an open sequence")
    }

    fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence<K> {
        self.sequences[id.0].as_mut().expect("an open sequence")
    }

    fn add(&mut self, sequence: Sequence<K>) -> SequenceId {
        let place = self.sequences.iter().position(Option::is_none).unwrap_or_else(|| {
            self.sequences.push(None);
            self.sequences.len() - 1
        });
        self.sequences[place] = Some(sequence);
        SequenceId(place)
    }

    /// Opens an empty sequence of at most `context_max` positions. One with a key shares what it computes.
    pub fn open(&mut self, key: Option<K>, class: Class, context_max: usize) -> SequenceId {
        self.add(Sequence::new(key, class, context_max))
    }

    /// The nodes that hold the longest usable beginning of `tokens` under `key`, and its length.
    fn look_up(&self, key: &K, tokens: &[u32]) -> (Vec<NodeId>, usize) {
        let (mut path, mut len) = (Vec::new(), 0);
        let mut at = self.tree.root(key);
        while let Some(node) = at {
            let rest = &tokens[len..];
            let exact = rest.get(..BLOCK_TOKENS).and_then(|block| self.tree.child(node, block));
            let next = exact.map(|child| (child, BLOCK_TOKENS)).or_else(|| self.tree.nearest(node, rest));
            let Some((child, common)) = next else { break };
            path.push(child);
            len += common;
            at = exact;
        }
        let usable = reach(&self.layout, &self.tree, &path, len);
        path.truncate(usable.div_ceil(BLOCK_TOKENS));
        (path, usable)
    }

    /// Positions that a sequence would find if it joined with `tokens` now.
    pub fn match_len(&self, key: &K, tokens: &[u32]) -> usize {
        self.look_up(key, tokens).1
    }

    /// Opens a sequence that has the longest beginning of `tokens` that is there: its length is how many.
    pub fn join(&mut self, key: K, class: Class, context_max: usize, tokens: &[u32]) -> SequenceId {
        let (nodes, len) = self.look_up(&key, tokens);
        let first = self.layout.first_visible(len);
        let mut sequence = Sequence::new(Some(key), class, context_max);
        sequence.tokens = tokens[..len].to_vec();
        sequence.path = nodes[..len / BLOCK_TOKENS].to_vec();
        for (i, &id) in nodes.iter().enumerate() {
            let node = self.tree.node(id);
            sequence.full.extend(node.full.map(|part| self.pool.lease(part)));
            sequence.window.push(node.window.filter(|_| i >= first).map(|part| self.pool.lease(part)));
        }
        self.touch(&nodes, class);
        self.note_peak();
        self.add(sequence)
    }

    /// `nodes` are used by `class` now.
    fn touch(&mut self, nodes: &[NodeId], class: Class) {
        self.ticks += 1;
        for &id in nodes {
            let node = self.tree.node_mut(id);
            node.tick = self.ticks;
            node.seen_idle = false;
            if class >= node.class {
                (node.class, node.used_ms) = (class, self.now_ms);
            }
        }
    }

    fn note_peak(&mut self) {
        let (leased, cached) = (self.pool.leased() as u64, self.pool.cached() as u64);
        self.stats.leased_blocks_peak = self.stats.leased_blocks_peak.max(leased);
        self.stats.held_blocks_peak = self.stats.held_blocks_peak.max(leased + cached);
    }

    /// Tokens computed.
    pub fn tokens(&self, id: SequenceId) -> &[u32] {
        &self.sequence(id).tokens
    }

    /// Whether the sequence is open.
    pub fn is_open(&self, id: SequenceId) -> bool {
        self.sequences.get(id.0).is_some_and(Option::is_some)
    }

    /// The class.
    pub fn class(&self, id: SequenceId) -> Class {
        self.sequence(id).class
    }

    /// The most positions that it may have.
    pub fn context_max(&self, id: SequenceId) -> usize {
        self.sequence(id).context_max
    }

    /// The key; `None` for a sequence that shares nothing.
    pub fn key(&self, id: SequenceId) -> Option<&K> {
        self.sequence(id).key.as_ref()
    }

    /// Where the sequence's blocks are.
    pub fn tables(&self, id: SequenceId) -> Tables<'_> {
        let Sequence { full, window, .. } = self.sequence(id);
        Tables { pool: &self.pool, full, window, full_groups: self.layout.full_groups }
    }

    /// Blocks that a sequence holds, alone or with others.
    pub fn blocks_held(&self, id: SequenceId) -> usize {
        let s = self.sequence(id);
        s.full.len() * self.layout.full_groups + s.window.iter().flatten().count() * self.layout.window_groups
    }

    /// Blocks that the open sequences may still ask for, when at most `chunk` positions are computed at once.
    pub fn blocks_to_come(&self, chunk: usize) -> usize {
        self.to_come(chunk, |_| true)
    }

    /// Blocks that the reserved sequences may still ask for.
    pub fn blocks_reserved(&self, chunk: usize) -> usize {
        self.to_come(chunk, |s| s.reserved)
    }

    fn to_come(&self, chunk: usize, counts: impl Fn(&Sequence<K>) -> bool) -> usize {
        let open = self.sequences.iter().enumerate().filter_map(|(i, s)| Some((SequenceId(i), s.as_ref()?)));
        let to_come = |(id, s): (SequenceId, &Sequence<K>)| {
            self.layout.blocks_max(s.context_max, chunk).saturating_sub(self.blocks_held(id))
        };
        open.filter(|(_, s)| counts(s)).map(to_come).fold(0, usize::saturating_add)
    }

    /// Whether the blocks of all positions of the sequence are to be there before they are asked for.
    pub fn set_reserved(&mut self, id: SequenceId, reserved: bool) {
        self.sequence_mut(id).reserved = reserved;
    }

    /// Lets go what lies behind the window of the next position.
    fn release_behind(&mut self, id: SequenceId) {
        let sequence = self.sequences[id.0].as_mut().expect("an open sequence");
        let first = self.layout.first_visible(sequence.tokens.len()).min(sequence.window.len());
        for part in sequence.window[..first].iter_mut().rev().map_while(Option::take) {
            self.pool.release(part);
        }
    }

    /// Free blocks that are needed so that each sequence can have so many more positions. Lets go what the windows have left
    /// behind.
    pub fn missing(&mut self, wants: &[(SequenceId, usize)]) -> usize {
        wants.iter().map(|&(id, new)| self.missing_one(id, new)).fold(0, usize::saturating_add)
    }

    fn missing_one(&mut self, id: SequenceId, new: usize) -> usize {
        self.release_behind(id);
        let s = self.sequence(id);
        let end = s.tokens.len().saturating_add(new);
        let fresh = end.div_ceil(BLOCK_TOKENS).saturating_sub(s.full.len()).saturating_mul(self.layout.groups());
        fresh.saturating_add(self.shared_tail(id, new).map(|part| self.pool.blocks_of(part).len()).sum())
    }

    /// Parts that hold the first of `new` positions, and that someone else holds too.
    fn shared_tail(&self, id: SequenceId, new: usize) -> impl Iterator<Item = PartId> {
        let s = self.sequence(id);
        let tail = s.tokens.len() / BLOCK_TOKENS;
        let parts = [s.full.get(tail).copied(), s.window.get(tail).copied().flatten()];
        parts.into_iter().flatten().filter(move |&part| new > 0 && self.pool.is_shared(part))
    }

    /// Gives a sequence the blocks of `new` more positions, and blocks of its own for a shared tail, which are to be copied.
    /// `None`: fewer than [`Cache::missing`] blocks are free; the sequence may then have some of them already.
    pub fn extend(&mut self, id: SequenceId, new: usize) -> Option<Vec<Copy>> {
        self.release_behind(id);
        let mut copies = Vec::new();
        let tail = self.sequence(id).tokens.len() / BLOCK_TOKENS;
        for shared in self.shared_tail(id, new).collect::<Vec<_>>() {
            let own = self.pool.take(self.pool.blocks_of(shared).len())?;
            let pairs = self.pool.blocks_of(shared).iter().zip(self.pool.blocks_of(own));
            copies.extend(pairs.map(|(&from, &to)| Copy { from, to }));
            let s = self.sequences[id.0].as_mut().expect("an open sequence");
            if s.full[tail] == shared {
                s.full[tail] = own
            } else {
                s.window[tail] = Some(own)
            }
            // The bytes stay until the copy is made: nothing takes blocks before.
            self.pool.release(shared);
        }
        self.stats.copied_blocks += copies.len() as u64;
        let end = (self.sequence(id).tokens.len() + new).div_ceil(BLOCK_TOKENS);
        while self.sequence(id).full.len() < end {
            if self.pool.free() < self.layout.groups() {
                return None;
            }
            let full = self.pool.take(self.layout.full_groups)?;
            let window =
                if self.layout.window_groups > 0 { Some(self.pool.take(self.layout.window_groups)?) } else { None };
            let s = self.sequence_mut(id);
            s.full.push(full);
            s.window.push(window);
        }
        self.note_peak();
        Some(copies)
    }

    /// The blocks that were taken hold the next positions now, of these tokens. Full blocks go into the tree, or equal ones
    /// are taken from there.
    pub fn commit(&mut self, id: SequenceId, tokens: &[u32]) {
        let s = self.sequence_mut(id);
        s.tokens.extend_from_slice(tokens);
        let Some(key) = s.key.clone() else { return };
        let mut touched = Vec::new();
        for index in self.sequence(id).path.len()..self.sequence(id).tokens.len() / BLOCK_TOKENS {
            let parent = self.sequence(id).path.last().copied().unwrap_or_else(|| self.tree.root_or_new(&key));
            let node = self.share_block(id, index, parent);
            self.sequence_mut(id).path.push(node);
            touched.push(node);
        }
        self.touch(&touched, self.sequence(id).class);
        self.note_peak();
    }

    /// Puts the full block `index` below `parent`, or takes the one that is there.
    fn share_block(&mut self, id: SequenceId, index: usize, parent: NodeId) -> NodeId {
        let s = self.sequences[id.0].as_mut().expect("an open sequence");
        let tokens = &s.tokens[index * BLOCK_TOKENS..][..BLOCK_TOKENS];
        let (full, window) = (s.full[index], s.window[index]);
        let Some(node) = self.tree.child(parent, tokens) else {
            let tokens = tokens.to_vec();
            return self.add_node(parent, &tokens, full, window);
        };
        let there = self.tree.node_mut(node);
        if let Some(equal) = there.full.filter(|&equal| equal != full) {
            self.stats.deduplicated_blocks += self.pool.blocks_of(full).len() as u64;
            s.full[index] = self.pool.lease(equal);
            self.pool.release(full);
        }
        match (there.window, window) {
            (None, Some(own)) => {
                there.window = Some(own);
                self.pool.set_in_tree(own, true);
            }
            (Some(equal), Some(own)) if equal != own => {
                self.stats.deduplicated_blocks += self.pool.blocks_of(own).len() as u64;
                s.window[index] = Some(self.pool.lease(equal));
                self.pool.release(own);
            }
            _ => {}
        }
        node
    }

    /// Forgets all positions from `len` on, and gives the length that the sequence has now: `len`, or nothing if blocks are
    /// gone that the window before `len` needs. (What was computed since the last [`Cache::missing`] can always be taken
    /// back.)
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> usize {
        let s = self.sequences[id.0].as_mut().expect("an open sequence");
        let mut len = len.min(s.tokens.len());
        let keep = len.div_ceil(BLOCK_TOKENS);
        let needed = self.layout.first_visible(len)..keep;
        if self.layout.window_groups > 0 && s.window[needed].iter().any(Option::is_none) {
            len = 0;
        }
        let keep = len.div_ceil(BLOCK_TOKENS);
        s.full.drain(keep..).for_each(|part| self.pool.release(part));
        s.window.drain(keep..).flatten().for_each(|part| self.pool.release(part));
        s.path.truncate(len / BLOCK_TOKENS);
        s.tokens.truncate(len);
        len
    }

    /// A second sequence with the same positions, in the same blocks.
    pub fn fork(&mut self, id: SequenceId) -> SequenceId {
        let fork = Sequence { reserved: false, ..self.sequence(id).clone() };
        for &part in fork.full.iter().chain(fork.window.iter().flatten()) {
            self.pool.lease(part);
        }
        self.add(fork)
    }

    /// As [`Cache::fork`], of a sequence that leaves nothing in the tree.
    pub fn fork_apart(&mut self, id: SequenceId) -> SequenceId {
        let fork = self.fork(id);
        self.sequence_mut(fork).key = None;
        fork
    }

    /// Ends the sequence: what it shares stays in the tree, its tail too.
    pub fn close(&mut self, id: SequenceId) {
        self.share_tail(id);
        let s = self.sequences[id.0].take().expect("an open sequence");
        self.touch(&s.path, s.class);
        s.full.into_iter().chain(s.window.into_iter().flatten()).for_each(|part| self.pool.release(part));
    }

    /// Adds a leaf, for which shorter tails that it begins with go. The caller holds the parts.
    fn add_node(&mut self, parent: NodeId, tokens: &[u32], full: PartId, window: Option<PartId>) -> NodeId {
        let covered = self.tree.covered(parent, tokens);
        let node = self.tree.insert(parent, Leaf { tokens, full, window });
        covered.into_iter().for_each(|tail| self.drop_node(tail));
        // Afterwards: a tail that went may have had the same parts.
        for part in [Some(full), window].into_iter().flatten() {
            self.pool.set_in_tree(part, true);
        }
        node
    }

    /// Puts the tail of a sequence into the tree, unless something there begins with its tokens.
    fn share_tail(&mut self, id: SequenceId) {
        // Blocks that were taken for more positions hold nothing yet.
        self.truncate(id, usize::MAX);
        let s = self.sequence(id);
        let index = s.tokens.len() / BLOCK_TOKENS;
        let (class, tail) = (s.class, s.tokens[index * BLOCK_TOKENS..].to_vec());
        let Some(key) = s.key.clone().filter(|_| !tail.is_empty()) else { return };
        let (full, window) = (s.full[index], s.window[index]);
        let parent = s.path.last().copied().unwrap_or_else(|| self.tree.root_or_new(&key));
        if let Some((node, len)) = self.tree.nearest(parent, &tail)
            && len == tail.len()
        {
            self.touch(&[node], class);
            return;
        }
        let node = self.add_node(parent, &tail, full, window);
        self.touch(&[node], class);
    }

    /// Gives up the blocks of a layer group with a window that hold the last 16 positions of a sequence: they are not known.
    pub fn drop_last_window(&mut self, id: SequenceId) {
        if let Some(part) = self.sequence_mut(id).window.last_mut().and_then(Option::take) {
            self.pool.release(part);
        }
    }
}
