//! The KV cache of one model, without its bytes: blocks, the tables of sequences, the prefix tree, eviction.
//!
//! A *sequence* is a lease: while it is open, nothing that it needs is given up. What it has computed belongs to the tree as
//! soon as a block is full, and its tail when it is closed, so that sharing outlives the session that computed. A sequence
//! that joins with tokens gets the blocks of the longest beginning that is there under its key.
//!
//! Nobody writes into a block that someone else holds: a sequence that goes on in a shared tail gets a copy first. Full
//! blocks are never written.
//!
//! Layers with a window hold no more than it sees. What falls behind belongs to the tree alone, for those who will go on
//! from an earlier position, and is the first to go. A beginning can be used only as far as the window's blocks before its
//! end are there.
//!
//! The caller has the bytes. Before a step it asks for [`Cache::missing`] blocks, makes them free with [`Cache::add_slab`] or
//! [`Cache::evict`], takes them with [`Cache::extend`], copies what that says, and after the step tells the tokens to
//! [`Cache::commit`].

mod eviction;
mod growth;
mod layout;
mod log;
mod pool;
mod sequence;
#[cfg(test)]
mod tests;
mod tree;

pub use eviction::{IDLE_MS, Scope};
use eviction::{Search, What, reach};
pub use growth::{Growth, Shortage};
pub use layout::{BLOCK_TOKENS, Layout};
use log::Log;
pub use log::{Change, Event, Reason, Stats};
pub use pool::BlockId;
use pool::{PartId, Pool};
use sequence::Sequence;
pub use sequence::{Copy, Tables};
pub use tree::NodeId;
use tree::{Leaf, Tree};

/// How urgent work is, and how dear what it has computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Class {
    /// Done some day.
    Batch,
    /// Nobody looks at it now.
    Background,
    /// The system's own.
    System,
    /// Somebody waits for it.
    #[default]
    Interactive,
}

impl Class {
    /// All of them, the least urgent first.
    pub const ALL: [Class; 4] = [Class::Batch, Class::Background, Class::System, Class::Interactive];

    /// The word in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Class::Batch => "batch",
            Class::Background => "background",
            Class::System => "system",
            Class::Interactive => "interactive",
        }
    }
}

/// An open sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub usize);

/// A block of 16 positions (or a tail of fewer) in the tree.
#[derive(Debug, Clone)]
pub struct Cached<'a, K> {
    /// Its name while it is there.
    pub id: NodeId,
    /// The one before it.
    pub parent: Option<NodeId>,
    /// What it belongs to.
    pub key: &'a K,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Its blocks in layer groups that see everything.
    pub full: &'a [BlockId],
    /// Its blocks in layer groups with a window, unless they were given up.
    pub window: &'a [BlockId],
    /// Whether a file has it.
    pub spilled: bool,
}

/// The cache; `K` is what keys and values depend on beside tokens, and who may share them.
#[derive(Debug, Clone)]
pub struct Cache<K> {
    layout: Layout,
    pool: Pool,
    tree: Tree<K>,
    sequences: Vec<Option<Sequence<K>>>,
    now_ms: u64,
    ticks: u64,
    stats: Stats,
    log: Log,
}

impl<K: Ord + Clone> Cache<K> {
    /// An empty cache without blocks.
    pub fn new(layout: Layout) -> Cache<K> {
        Cache {
            layout,
            pool: Pool::default(),
            tree: Tree::default(),
            sequences: Vec::new(),
            now_ms: 0,
            ticks: 0,
            stats: Stats::default(),
            log: Log::default(),
        }
    }

    /// The layer groups.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// It is `now_ms` now, in milliseconds of any clock; one that goes back stands still.
    pub fn set_clock(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// The time that was set last.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Blocks that there is memory for.
    pub fn blocks(&self) -> usize {
        self.pool.blocks()
    }

    /// Blocks that nobody holds.
    pub fn free_blocks(&self) -> usize {
        self.pool.free()
    }

    /// The same, one by one.
    pub fn free_ids(&self) -> Vec<BlockId> {
        self.pool.free_ids().collect()
    }

    /// Blocks that sequences hold.
    pub fn leased_blocks(&self) -> usize {
        self.pool.leased()
    }

    /// Blocks that only the tree holds.
    pub fn cached_blocks(&self) -> usize {
        self.pool.cached()
    }

    /// There is memory for `blocks` more blocks; gives the number of the slab that they are in.
    pub fn add_slab(&mut self, blocks: u32) -> usize {
        self.pool.add_slab(blocks)
    }

    /// Takes out the slabs of which no block is held: their numbers.
    pub fn trim(&mut self) -> Vec<usize> {
        self.pool.trim()
    }

    /// Counts.
    pub fn stats(&self) -> Stats {
        Stats {
            leased_blocks: self.pool.leased() as u64,
            cached_blocks: self.pool.cached() as u64,
            free_blocks: self.pool.free() as u64,
            ..self.stats
        }
    }

    /// What happened lately, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.log.events()
    }

    /// Writes down what the caller did with files, or that it found no room.
    pub fn record(&mut self, change: Change) {
        match &change {
            Change::Restored { tokens } => self.stats.restored_tokens += tokens,
            Change::Spilled { files, .. } => self.stats.spilled_files += files,
            Change::Ignored { .. } => self.stats.ignored_files += 1,
            Change::Evicted { .. } | Change::Short { .. } => {}
        }
        self.log.push(self.now_ms, change);
    }

    /// Makes `wanted` more blocks free by giving up what `scope` allows, in order. If that is not enough, nothing is given up,
    /// unless `wanted` is `usize::MAX`. The number of blocks that came to be free.
    pub fn evict(&mut self, wanted: usize, scope: Scope, reason: Reason) -> usize {
        let search = Search { layout: &self.layout, pool: &self.pool, tree: &self.tree, now_ms: self.now_ms };
        let victims = search.victims(wanted, scope);
        let freed = victims.iter().map(|v| v.blocks).sum();
        if wanted != usize::MAX && freed < wanted {
            return 0;
        }
        let mut by_class = [(0, 0); Class::ALL.len()];
        for victim in victims {
            let class = self.tree.node(victim.node).class as usize;
            by_class[class].0 += victim.blocks as u64;
            by_class[class].1 += victim.cost as u64;
            match victim.what {
                What::Window => self.drop_window(victim.node),
                What::Node => self.drop_node(victim.node),
            }
        }
        for (class, (blocks, tokens)) in Class::ALL.into_iter().zip(by_class).filter(|(_, (blocks, _))| *blocks > 0) {
            self.stats.evicted_blocks[class as usize] += blocks;
            self.log.push(self.now_ms, Change::Evicted { class, reason, blocks, tokens });
        }
        freed
    }

    fn drop_window(&mut self, id: NodeId) {
        if let Some(part) = self.tree.node_mut(id).window.take() {
            self.pool.set_in_tree(part, false);
        }
    }

    fn drop_node(&mut self, id: NodeId) {
        let node = self.tree.remove(id);
        node.full.into_iter().chain(node.window).for_each(|part| self.pool.set_in_tree(part, false));
    }

    /// What `is_idle` says of all blocks of a node counts as if its session had been idle for [`IDLE_MS`], until it is used.
    pub fn observe_idle(&mut self, is_idle: &dyn Fn(BlockId) -> bool) -> usize {
        let idle: Vec<NodeId> = self
            .tree
            .nodes()
            .filter(|(_, node)| {
                let mut blocks = node.full.into_iter().chain(node.window).flat_map(|part| self.pool.blocks_of(part));
                blocks.all(|&block| is_idle(block))
            })
            .map(|(id, _)| id)
            .collect();
        idle.iter().for_each(|&id| self.tree.node_mut(id).seen_idle = true);
        idle.len()
    }

    /// When the next interactive session counts as idle, so that requests of lower classes may displace it.
    pub fn next_idle_ms(&self) -> Option<u64> {
        let waited_for = self.tree.nodes().filter(|(_, node)| node.class == Class::Interactive && !node.seen_idle);
        waited_for.map(|(_, node)| node.used_ms + IDLE_MS).filter(|&at_ms| at_ms > self.now_ms).min()
    }

    /// What the tree has, each node after the one before it.
    pub fn cached(&self) -> Vec<Cached<'_, K>> {
        let mut out = Vec::new();
        for (key, root) in self.tree.roots() {
            let mut rest: Vec<NodeId> = self.tree.node(root).children.values().rev().copied().collect();
            while let Some(id) = rest.pop() {
                let node = self.tree.node(id);
                rest.extend(node.children.values().rev());
                out.push(Cached {
                    id,
                    parent: node.parent.filter(|&parent| parent != root),
                    key,
                    tokens: &node.tokens,
                    full: node.full.map_or(&[], |part| self.pool.blocks_of(part)),
                    window: node.window.map_or(&[], |part| self.pool.blocks_of(part)),
                    spilled: node.spilled,
                });
            }
        }
        out
    }

    /// `asked` tokens were looked up, and `reused` of them were there.
    pub fn count_look_up(&mut self, asked: usize, reused: usize) {
        self.stats.looked_up_tokens += asked as u64;
        self.stats.reused_tokens += reused as u64;
    }

    /// Gives up these nodes, each after the one before it, as far as nobody uses them: they do not contain what the model
    /// computes.
    pub fn discard(&mut self, nodes: &[NodeId]) {
        for &id in nodes.iter().rev() {
            let node = self.tree.node(id);
            let mut parts = node.full.into_iter().chain(node.window);
            if node.children.is_empty() && parts.all(|part| self.pool.leases(part) == 0) {
                self.drop_node(id);
            }
        }
    }

    /// A file has the node now.
    pub fn set_spilled(&mut self, id: NodeId) {
        self.tree.node_mut(id).spilled = true;
    }

    /// Whether a sequence reads the node's blocks.
    pub fn is_used(&self, id: SequenceId, node: NodeId) -> bool {
        self.sequences.get(id.0).and_then(Option::as_ref).is_some_and(|s| s.path.contains(&node))
    }

    /// The node of the last full block of a sequence that shares.
    pub fn last_node(&self, id: SequenceId) -> Option<NodeId> {
        self.sequences.get(id.0)?.as_ref()?.path.last().copied()
    }
}
