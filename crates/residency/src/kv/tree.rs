//! The prefix tree: which blocks hold which tokens, after which others.
//!
//! Each edge is the tokens of one block, all 16 of them, or fewer in a leaf: the tail of a conversation. Children are
//! ordered by their tokens, so that the one with the longest common beginning stands beside the place of what is looked for.
//! Tokens themselves are compared, never hashes of them. Roots are keys: what else keys and values depend on, and who may
//! share them.

use super::pool::PartId;
use super::{BLOCK_TOKENS, Class};
use std::collections::BTreeMap;
use std::ops::Bound;

/// A node, by its place in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

#[derive(Debug, Clone)]
pub(super) struct Node<K> {
    /// `None`: a root.
    pub(super) parent: Option<NodeId>,
    /// Of a root.
    key: Option<K>,
    pub(super) tokens: Box<[u32]>,
    pub(super) children: BTreeMap<Box<[u32]>, NodeId>,
    /// Blocks of the layers that see everything; a root has none.
    pub(super) full: Option<PartId>,
    /// Blocks of the layers with a window, unless they were given up.
    pub(super) window: Option<PartId>,
    /// The highest class that has used it.
    pub(super) class: Class,
    /// When that class used it last.
    pub(super) used_ms: u64,
    /// The order of uses, whoever's.
    pub(super) tick: u64,
    /// Somebody saw that its memory is not touched.
    pub(super) seen_idle: bool,
    /// It is in a file.
    pub(super) spilled: bool,
}

/// Nodes by key and tokens.
#[derive(Debug, Clone)]
pub(super) struct Tree<K> {
    nodes: Vec<Option<Node<K>>>,
    vacant: Vec<NodeId>,
    roots: BTreeMap<K, NodeId>,
}

impl<K> Default for Tree<K> {
    fn default() -> Self {
        Tree { nodes: Vec::new(), vacant: Vec::new(), roots: BTreeMap::new() }
    }
}

/// What a new node is.
pub(super) struct Leaf<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) full: PartId,
    pub(super) window: Option<PartId>,
}

/// How many tokens two lists begin with in common.
pub(super) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl<K: Ord + Clone> Tree<K> {
    /// The node `id`.
    pub(super) fn node(&self, id: NodeId) -> &Node<K> {
        self.nodes[id.0 as usize].as_ref().expect("nodes are named while they exist")
    }

    pub(super) fn node_mut(&mut self, id: NodeId) -> &mut Node<K> {
        self.nodes[id.0 as usize].as_mut().expect("nodes are named while they exist")
    }

    /// Every node but the roots.
    pub(super) fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node<K>)> {
        let with_id = |(i, node): (usize, &'_ Option<Node<K>>)| node.as_ref().map(|_| NodeId(i as u32));
        self.nodes
            .iter()
            .enumerate()
            .filter_map(with_id)
            .map(|id| (id, self.node(id)))
            .filter(|(_, n)| n.parent.is_some())
    }

    /// The keys.
    pub(super) fn roots(&self) -> impl Iterator<Item = (&K, NodeId)> {
        self.roots.iter().map(|(key, &id)| (key, id))
    }

    pub(super) fn root(&self, key: &K) -> Option<NodeId> {
        self.roots.get(key).copied()
    }

    fn add(&mut self, node: Node<K>) -> NodeId {
        match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.0 as usize] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                NodeId(self.nodes.len() as u32 - 1)
            }
        }
    }

    /// The root of `key`, which is made if there is none.
    pub(super) fn root_or_new(&mut self, key: &K) -> NodeId {
        if let Some(root) = self.root(key) {
            return root;
        }
        let root = self.add(Node {
            parent: None,
            key: Some(key.clone()),
            tokens: Box::default(),
            children: BTreeMap::new(),
            full: None,
            window: None,
            class: Class::Batch,
            used_ms: 0,
            tick: 0,
            seen_idle: false,
            spilled: false,
        });
        self.roots.insert(key.clone(), root);
        root
    }

    /// The child of `parent` with exactly `tokens`.
    pub(super) fn child(&self, parent: NodeId, tokens: &[u32]) -> Option<NodeId> {
        self.node(parent).children.get(tokens).copied()
    }

    /// The child of `parent` that begins with most of `tokens`, and with how many.
    pub(super) fn nearest(&self, parent: NodeId, tokens: &[u32]) -> Option<(NodeId, usize)> {
        let children = &self.node(parent).children;
        let below = children.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(tokens))).next_back();
        let above = children.range::<[u32], _>((Bound::Included(tokens), Bound::Unbounded)).next();
        let best = below.into_iter().chain(above).map(|(t, &id)| (id, common(t, tokens))).max_by_key(|&(_, n)| n);
        best.filter(|&(_, n)| n > 0)
    }

    /// Adds a leaf below `parent`, which must have no such child.
    pub(super) fn insert(&mut self, parent: NodeId, leaf: Leaf<'_>) -> NodeId {
        let tokens: Box<[u32]> = leaf.tokens.into();
        let node = self.add(Node {
            parent: Some(parent),
            key: None,
            tokens: tokens.clone(),
            children: BTreeMap::new(),
            full: Some(leaf.full),
            window: leaf.window,
            class: Class::Batch,
            used_ms: 0,
            tick: 0,
            seen_idle: false,
            spilled: false,
        });
        self.node_mut(parent).children.insert(tokens, node);
        node
    }

    /// Takes out a node without children, and its root with the last one.
    pub(super) fn remove(&mut self, id: NodeId) -> Node<K> {
        let node = self.nodes[id.0 as usize].take().expect("nodes are named while they exist");
        debug_assert!(node.children.is_empty());
        self.vacant.push(id);
        if let Some(parent) = node.parent {
            let above = self.node_mut(parent);
            above.children.remove(&node.tokens);
            if above.children.is_empty()
                && let Some(key) = &above.key
            {
                let key = key.clone();
                self.roots.remove(&key);
                self.nodes[parent.0 as usize] = None;
                self.vacant.push(parent);
            }
        }
        node
    }

    /// The tails below `parent` that `tokens` begin with, and that a child with those tokens makes superfluous.
    pub(super) fn covered(&self, parent: NodeId, tokens: &[u32]) -> Vec<NodeId> {
        let most = tokens.len().min(BLOCK_TOKENS);
        (1..most).filter_map(|len| self.child(parent, &tokens[..len])).collect()
    }

    /// From the root's child down to `id`.
    pub(super) fn path(&self, id: NodeId) -> Vec<NodeId> {
        let mut path: Vec<NodeId> = std::iter::successors(Some(id), |&id| self.node(id).parent)
            .filter(|&id| self.node(id).parent.is_some())
            .collect();
        path.reverse();
        path
    }
}
