//! What goes when room is needed, and in which order.
//!
//! Class by class: batch, background, system, interactive that has been idle for a while; and for a request that is
//! interactive itself, at last, the others. Within a class, what costs least to compute again: first blocks behind every
//! window, which nobody needs who goes on where they stopped; then leaves, partly filled ones first; among equals the one
//! that was not used for longest. What a sequence holds never goes, and what is shared with one would free nothing.
//!
//! A decision is a list of victims, made before anything is touched: a request that cannot be met costs nobody anything.

use super::pool::Pool;
use super::tree::{NodeId, Tree};
use super::{BLOCK_TOKENS, Class, Layout};
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap, HashSet};

/// An interactive session that was not used for so long is idle: by then its user has read the answer.
pub const IDLE_MS: u64 = 5 * 60 * 1000;

/// Whose blocks may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Those that a request of this class may displace.
    For(Class),
    /// All but those of interactive sessions that are not idle.
    Idle,
    /// All that no sequence holds.
    All,
}

/// What goes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    /// The blocks of layers with a window.
    Window,
    /// All of it.
    Node,
}

/// One decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) node: NodeId,
    pub(super) what: What,
    /// Blocks that come to be free.
    pub(super) blocks: usize,
    /// Tokens that would have to be computed again.
    pub(super) cost: usize,
}

/// The order: fields from the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u8,
    cost: usize,
    what: What,
    tick: u64,
    node: NodeId,
}

/// The rank of interactive sessions that are not idle.
const BUSY: u8 = 4;

/// The largest position of at most `len`, on the way of `path`, from which one can go on: the whole, or an end of a block,
/// so that all blocks are there that its window sees.
pub(super) fn reach<K: Ord + Clone>(layout: &Layout, tree: &Tree<K>, path: &[NodeId], len: usize) -> usize {
    if layout.window_groups == 0 {
        return len;
    }
    // For each node, the first of the unbroken row of blocks that ends with it.
    let mut first = 0;
    let rows: Vec<usize> = path
        .iter()
        .enumerate()
        .map(|(i, &id)| {
            if tree.node(id).window.is_none() {
                first = i + 1;
            }
            first
        })
        .collect();
    let mut ends = (1..=path.len()).rev().map(|blocks| (blocks, (blocks * BLOCK_TOKENS).min(len)));
    let usable = |&(blocks, end): &(usize, usize)| rows[blocks - 1] <= layout.first_visible(end);
    ends.find(usable).map_or(0, |(_, end)| end)
}

/// Looks for victims.
pub(super) struct Search<'a, K> {
    pub(super) layout: &'a Layout,
    pub(super) pool: &'a Pool,
    pub(super) tree: &'a Tree<K>,
    pub(super) now_ms: u64,
}

impl<K: Ord + Clone> Search<'_, K> {
    fn rank(&self, id: NodeId, what: What) -> u8 {
        let node = self.tree.node(id);
        match node.class {
            Class::Batch => 0,
            Class::Background => 1,
            Class::System => 2,
            Class::Interactive => {
                let idle = node.seen_idle || self.now_ms.saturating_sub(node.used_ms) >= IDLE_MS;
                // A session that goes on does not miss what is behind its window.
                if idle || what == What::Window { BUSY - 1 } else { BUSY }
            }
        }
    }

    fn end(&self, path: &[NodeId]) -> usize {
        path.last().map_or(0, |&last| (path.len() - 1) * BLOCK_TOKENS + self.tree.node(last).tokens.len())
    }

    /// Tokens to be computed again without the last node of `path`.
    fn cost(&self, path: &[NodeId]) -> usize {
        let before = &path[..path.len() - 1];
        reach(self.layout, self.tree, path, self.end(path)) - reach(self.layout, self.tree, before, self.end(before))
    }

    fn is_leased(&self, id: NodeId) -> bool {
        let node = self.tree.node(id);
        node.full.into_iter().chain(node.window).any(|part| self.pool.leases(part) > 0)
    }

    /// The nodes whose window blocks are needed by whoever goes on from the end of `path`.
    fn needed<'p>(&self, path: &'p [NodeId]) -> &'p [NodeId] {
        &path[self.layout.first_visible(self.end(path))..]
    }

    fn candidate(&self, node: NodeId, what: What, cost: usize) -> Candidate {
        Candidate { rank: self.rank(node, what), cost, what, tick: self.tree.node(node).tick, node }
    }

    fn window_blocks(&self, id: NodeId) -> usize {
        self.tree.node(id).window.map_or(0, |part| self.pool.blocks_of(part).len())
    }

    /// Victims, in order, that free `wanted` blocks, or as many as there are.
    pub(super) fn victims(&self, wanted: usize, scope: Scope) -> Vec<Victim> {
        let rank_max = match scope {
            Scope::All | Scope::For(Class::Interactive) => BUSY,
            Scope::Idle | Scope::For(_) => BUSY - 1,
        };
        let mut plan = Plan::default();
        for (leaf, _) in self.tree.nodes().filter(|(_, node)| node.children.is_empty()) {
            self.add_leaf(&mut plan, leaf);
        }
        if self.layout.window_groups > 0 {
            self.tree.nodes().for_each(|(id, _)| self.add_window(&mut plan, id));
        }
        while plan.freed < wanted
            && let Some(Reverse(Candidate { rank, cost, what, node, .. })) = plan.heap.pop()
        {
            // Those behind may rank lower again: parents of leaves that went.
            if rank > rank_max || plan.gone.contains(&node) {
                continue;
            }
            match what {
                What::Window if plan.windows_gone.contains(&node) || plan.needs.contains_key(&node) => {}
                What::Window => {
                    plan.add(Victim { node, what, blocks: self.window_blocks(node), cost });
                    plan.windows_gone.insert(node);
                }
                What::Node => self.remove_leaf(&mut plan, node, cost),
            }
        }
        plan.victims
    }

    fn add_leaf(&self, plan: &mut Plan, leaf: NodeId) {
        if self.is_leased(leaf) {
            // What its sequences need they hold.
            return;
        }
        let path = self.tree.path(leaf);
        plan.heap.push(Reverse(self.candidate(leaf, What::Node, self.cost(&path))));
        self.needed(&path).iter().for_each(|&id| *plan.needs.entry(id).or_default() += 1);
    }

    fn add_window(&self, plan: &mut Plan, id: NodeId) {
        let free = self.tree.node(id).window.is_some_and(|part| self.pool.leases(part) == 0);
        if free && !plan.needs.contains_key(&id) {
            plan.heap.push(Reverse(self.candidate(id, What::Window, 0)));
        }
    }

    /// A leaf goes: its parent may be one now, and windows before it are needed no more.
    fn remove_leaf(&self, plan: &mut Plan, leaf: NodeId, cost: usize) {
        let node = self.tree.node(leaf);
        let window = if plan.windows_gone.contains(&leaf) { 0 } else { self.window_blocks(leaf) };
        let blocks = window + node.full.map_or(0, |part| self.pool.blocks_of(part).len());
        plan.add(Victim { node: leaf, what: What::Node, blocks, cost });
        plan.gone.insert(leaf);
        if let Some(parent) = node.parent.filter(|&parent| self.tree.node(parent).parent.is_some()) {
            let left = plan.children.entry(parent).or_insert_with(|| self.tree.node(parent).children.len());
            *left -= 1;
            if *left == 0 {
                self.add_leaf(plan, parent);
            }
        }
        let path = self.tree.path(leaf);
        for &id in self.needed(&path) {
            if let Entry::Occupied(mut needs) = plan.needs.entry(id) {
                *needs.get_mut() -= 1;
                if *needs.get() == 0 {
                    needs.remove();
                    self.add_window(plan, id);
                }
            }
        }
    }
}

/// The victims so far, and what they change.
#[derive(Default)]
struct Plan {
    victims: Vec<Victim>,
    freed: usize,
    heap: BinaryHeap<Reverse<Candidate>>,
    gone: HashSet<NodeId>,
    windows_gone: HashSet<NodeId>,
    /// Children left of nodes that lost some.
    children: HashMap<NodeId, usize>,
    /// How many leaves without a lease need a node's window blocks, to go on from their ends.
    needs: HashMap<NodeId, usize>,
}

impl Plan {
    fn add(&mut self, victim: Victim) {
        self.freed += victim.blocks;
        self.victims.push(victim);
    }
}
