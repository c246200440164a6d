//! The cache against a naive one: every position knows what it must contain, and every count is counted again.

use super::tree::common;
use super::*;
use fixtures::rng::Rng;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

const PLAIN: Layout = Layout { full_groups: 1, window_groups: 0, window: 0 };
const WINDOWED: Layout = Layout { full_groups: 1, window_groups: 2, window: 40 };
const SLAB: usize = 8;
const CHUNK: usize = 48;

/// What keys and values of a position depend on.
fn content(key: u32, tokens: &[u32], group: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    (key, tokens, group).hash(&mut hasher);
    hasher.finish()
}

#[derive(Clone)]
struct Harness {
    cache: Cache<u32>,
    limit: usize,
    bytes: HashMap<BlockId, [u64; BLOCK_TOKENS]>,
    open: Vec<(SequenceId, u32)>,
    refused: usize,
}

impl Harness {
    fn new(layout: Layout, limit: usize) -> Harness {
        Harness { cache: Cache::new(layout), limit, bytes: HashMap::new(), open: Vec::new(), refused: 0 }
    }

    fn join(&mut self, key: u32, class: Class, tokens: &[u32]) -> usize {
        let id = self.cache.join(key, class, 1000, tokens);
        self.open.push((id, key));
        self.open.len() - 1
    }

    /// Extends by `tokens`, in a chunk, if there is room; whether there was.
    fn append(&mut self, at: usize, tokens: &[u32]) -> bool {
        let (id, key) = self.open[at];
        let missing = self.cache.missing(&[(id, tokens.len())]);
        let cache = &mut self.cache;
        if missing > cache.free_blocks() {
            let room = self.limit - cache.blocks();
            let slab = (missing - cache.free_blocks()).next_multiple_of(SLAB).min(room);
            if slab > 0 {
                cache.add_slab(slab as u32);
            }
        }
        if missing > cache.free_blocks() {
            let (class, short) = (cache.class(id), missing - cache.free_blocks());
            let freed = cache.evict(short, Scope::For(class), Reason::Room);
            if freed == 0 {
                // Nothing is left that an urgent request could have.
                assert!(class < Class::Interactive || cache.cached_blocks() < short, "{short} of {cache:?}");
                self.refused += 1;
                return false;
            }
            assert!(freed >= short);
        }
        let copies = self.cache.extend(id, tokens.len()).expect("there is room");
        for Copy { from, to } in copies {
            let bytes = self.bytes[&from];
            self.bytes.insert(to, bytes);
        }
        let mut all = self.cache.tokens(id).to_vec();
        let first = all.len();
        all.extend_from_slice(tokens);
        let groups = self.cache.layout.groups();
        for position in first..all.len() {
            let s = self.cache.sequences[id.0].as_ref().unwrap();
            let index = position / BLOCK_TOKENS;
            for part in [Some(s.full[index]), s.window[index]].into_iter().flatten() {
                assert!(!self.cache.pool.is_shared(part), "nobody writes into what others read");
            }
            for group in 0..groups {
                let block = self.cache.tables(id).block(group, index).expect("new positions have blocks");
                let bytes = self.bytes.entry(block).or_default();
                bytes[position % BLOCK_TOKENS] = content(key, &all[..=position], group);
            }
        }
        self.cache.commit(id, tokens);
        true
    }

    fn close(&mut self, at: usize) {
        let (id, _) = self.open.swap_remove(at);
        self.cache.close(id);
    }

    /// Every position that the next token would see contains what it must.
    fn verify(&self, at: usize) {
        let (id, key) = self.open[at];
        let (tokens, tables) = (self.cache.tokens(id), self.cache.tables(id));
        let layout = self.cache.layout;
        for group in 0..layout.groups() {
            let first = if group < layout.full_groups { 0 } else { (tokens.len() + 1).saturating_sub(layout.window) };
            for position in first..tokens.len() {
                let block = tables.block(group, position / BLOCK_TOKENS).expect("what is seen is there");
                let found = self.bytes[&block][position % BLOCK_TOKENS];
                assert_eq!(found, content(key, &tokens[..=position], group), "group {group}, position {position}");
            }
        }
    }

    /// Counts all holders again.
    fn audit(&self) {
        let Cache { pool, tree, layout, .. } = &self.cache;
        let (mut leases, mut in_tree) = (HashMap::new(), HashSet::new());
        for s in self.cache.sequences.iter().flatten() {
            assert_eq!(s.full.len(), s.window.len());
            for &part in s.full.iter().chain(s.window.iter().flatten()) {
                *leases.entry(part).or_insert(0) += 1;
            }
        }
        for (_, node) in tree.nodes() {
            for part in node.full.into_iter().chain(node.window) {
                assert!(in_tree.insert(part), "one node for a part");
            }
        }
        let (mut leased, mut cached, mut blocks) = (0, 0, HashSet::new());
        for (part, n, tree) in pool.holders() {
            assert_eq!((n, tree), (leases.remove(&part).unwrap_or(0), in_tree.remove(&part)));
            *if n > 0 { &mut leased } else { &mut cached } += pool.blocks_of(part).len();
            assert!(pool.blocks_of(part).iter().all(|&block| blocks.insert(block)), "one part for a block");
        }
        assert!(leases.is_empty() && in_tree.is_empty(), "what is held is in the pool");
        assert_eq!((pool.leased(), pool.cached()), (leased, cached));
        assert_eq!(pool.free() + leased + cached, pool.blocks());
        assert!(pool.blocks() <= self.limit);
        for &(id, _) in &self.open {
            let (len, tables) = (self.cache.tokens(id).len(), self.cache.tables(id));
            assert_eq!(tables.len(), len.div_ceil(BLOCK_TOKENS), "as many blocks as positions need");
            if layout.window_groups > 0 {
                let held = (0..tables.len()).filter(|&i| tables.block(1, i).is_some()).count();
                let most = layout.blocks_max(len, CHUNK) - tables.len() * layout.full_groups;
                assert!(held * layout.window_groups <= most, "{held} window blocks after {len} positions");
            }
        }
    }

    /// The longest usable beginning, by looking at every node; at block ends only, and anywhere.
    fn naive_match(&self, key: u32, tokens: &[u32]) -> (usize, usize) {
        let Cache { tree, layout, .. } = &self.cache;
        let (mut aligned, mut any) = (0, 0);
        let root = tree.root(&key);
        for (id, _) in tree.nodes() {
            let path = tree.path(id);
            if tree.node(path[0]).parent != root {
                continue;
            }
            let all: Vec<u32> = path.iter().flat_map(|&id| tree.node(id).tokens.to_vec()).collect();
            let len = common(&all, tokens);
            let usable = |end: usize| {
                let first = if layout.window_groups > 0 { (end + 1).saturating_sub(layout.window) } else { end };
                (first..end).all(|position| tree.node(path[position / BLOCK_TOKENS]).window.is_some())
            };
            let ends = (1..=len / BLOCK_TOKENS).map(|n| n * BLOCK_TOKENS).filter(|&end| usable(end));
            aligned = aligned.max(ends.max().unwrap_or(0));
            any = any.max(if usable(len) { len } else { 0 });
        }
        (aligned, any.max(aligned))
    }
}

/// Tokens that often begin as others did.
fn tokens(rng: &mut Rng, len: usize) -> Vec<u32> {
    (0..len).map(|i| if i % 11 == 10 { rng.below(2) as u32 } else { i as u32 % 7 }).collect()
}

fn pick(rng: &mut Rng, n: usize) -> usize {
    rng.below(n as u64) as usize
}

fn random_operations(layout: Layout, operations: usize) {
    let mut rng = Rng::new(6);
    let mut h = Harness::new(layout, 26 * layout.groups());
    let mut reused = 0;
    for operation in 0..operations {
        let some = (!h.open.is_empty()).then(|| pick(&mut rng, h.open.len().max(1)));
        match (rng.below(20), some) {
            (0..=3, _) if h.open.len() < 6 => {
                let (key, len) = (rng.below(3) as u32, pick(&mut rng, 130));
                let (class, tokens) = (Class::ALL[pick(&mut rng, 4)], tokens(&mut rng, len));
                let (aligned, any) = h.naive_match(key, &tokens);
                let at = h.join(key, class, &tokens);
                let len = h.cache.tokens(h.open[at].0).len();
                // Where several tails begin alike, the one that was taken may lack a window.
                let least = if layout.window_groups > 0 { aligned } else { any };
                assert!((least..=any).contains(&len), "{len} of {aligned} or {any}");
                reused += len;
                h.verify(at);
            }
            (4..=12, Some(at)) => {
                let len = h.cache.tokens(h.open[at].0).len();
                let most = if rng.below(3) == 0 { CHUNK } else { 4 };
                let new = 1 + pick(&mut rng, most);
                let all = tokens(&mut rng, len + new);
                if h.append(at, &all[len..]) {
                    h.verify(at);
                } else if h.open.len() > 1 {
                    h.close(at);
                }
            }
            (13, Some(at)) => {
                let len = h.cache.tokens(h.open[at].0).len();
                let wanted = len - pick(&mut rng, len.min(30) + 1);
                let got = h.cache.truncate(h.open[at].0, wanted);
                assert!(got == wanted || (got == 0 && layout.window_groups > 0));
                h.verify(at);
            }
            (14, Some(at)) if h.open.len() < 6 => {
                let (id, key) = h.open[at];
                let fork = h.cache.fork(id);
                h.open.push((fork, key));
            }
            (15..=17, Some(at)) => h.close(at),
            (18, _) => h.cache.set_clock(operation as u64 * 10_000),
            (19, _) => match rng.below(30) {
                0 => drop(h.cache.evict(usize::MAX, Scope::All, Reason::Pressure)),
                1 => drop(h.cache.evict(usize::MAX, Scope::Idle, Reason::Pressure)),
                2 => drop(h.cache.observe_idle(&|block| block.place % 2 == 0)),
                _ => {
                    for slab in h.cache.trim() {
                        h.bytes.retain(|block, _| block.slab as usize != slab);
                    }
                }
            },
            _ => {}
        }
        h.audit();
        if operation % 64 == 0 {
            (0..h.open.len()).for_each(|at| h.verify(at));
        }
    }
    let stats = h.cache.stats();
    let evicted: u64 = stats.evicted_blocks.iter().sum();
    let counts = [reused as u64, stats.copied_blocks, stats.deduplicated_blocks, evicted, h.refused as u64];
    assert!(counts.iter().all(|&n| n > 100), "reused, copied, deduplicated, evicted, refused: {counts:?}");
    assert!(stats.evicted_blocks.iter().all(|&n| n > 0), "{stats:?}");
    (0..h.open.len()).for_each(|_| h.close(0));
    assert_eq!(h.cache.leased_blocks(), 0);
    h.cache.evict(usize::MAX, Scope::All, Reason::Pressure);
    h.audit();
    h.cache.trim();
    assert_eq!((h.cache.blocks(), h.cache.cached().len()), (0, 0), "nothing leaked");
    assert_eq!(h.cache.tree.roots().count(), 0);
}

#[test]
fn a_hundred_thousand_operations_leave_every_count_and_every_position_right() {
    random_operations(PLAIN, 100_000);
}

#[test]
fn the_same_holds_where_layers_have_windows() {
    random_operations(WINDOWED, 100_000);
}

/// A cache with closed conversations: key, class, tokens, and when each was closed.
fn with(layout: Layout, conversations: &[(u32, Class, usize, u64)]) -> Harness {
    let mut h = Harness::new(layout, 1000);
    for &(key, class, len, at_ms) in conversations {
        h.cache.set_clock(at_ms);
        let all: Vec<u32> = (0..len as u32).collect();
        let at = h.join(key, class, &all);
        for chunk in all.chunks(CHUNK) {
            assert!(h.append(at, chunk));
        }
        h.close(at);
    }
    h
}

/// How much is left of each conversation while a block at a time goes.
fn left(h: &mut Harness, scope: Scope, conversations: &[(u32, usize)], times: usize) -> Vec<Vec<usize>> {
    let step = |_| {
        h.cache.evict(1, scope, Reason::Room);
        conversations.iter().map(|&(key, len)| h.cache.match_len(&key, &(0..len as u32).collect::<Vec<_>>())).collect()
    };
    (0..times).map(step).collect()
}

#[test]
fn classes_go_in_order_and_an_interactive_one_only_when_it_is_idle_or_for_its_like() {
    let [batch, background, system, interactive] = Class::ALL;
    // In another order than they go, the batch one used last.
    let all = [(3, interactive, 20, 0), (2, system, 20, 1), (1, background, 20, 2), (0, batch, 20, 3)];
    let lens: Vec<(u32, usize)> = (0..4).map(|key| (key, 20)).collect();
    let mut h = with(PLAIN, &all);
    let steps = left(&mut h, Scope::For(batch), &lens, 7);
    let want = [
        [16, 20, 20, 20],
        [0, 20, 20, 20],
        [0, 16, 20, 20],
        [0, 0, 20, 20],
        [0, 0, 16, 20],
        [0, 0, 0, 20],
        [0, 0, 0, 20],
    ];
    assert_eq!(steps, want, "the last one is refused");
    assert_eq!(left(&mut h.clone(), Scope::For(interactive), &lens, 1), [[0, 0, 0, 16]]);
    let mut seen = h.clone();
    assert_eq!(seen.cache.observe_idle(&|_| true), 2);
    assert_eq!(left(&mut seen, Scope::For(batch), &lens, 1), [[0, 0, 0, 16]]);
    h.cache.set_clock(IDLE_MS);
    assert_eq!(left(&mut h, Scope::Idle, &lens, 2), [[0, 0, 0, 16], [0, 0, 0, 0]]);
}

#[test]
fn within_a_class_the_least_recomputation_goes_first_then_what_was_used_least_recently() {
    let class = Class::Batch;
    let mut h = with(PLAIN, &[(0, class, 32 + 9, 0), (1, class, 32 + 3, 1), (2, class, 32, 2)]);
    let steps = left(&mut h, Scope::For(class), &[(0, 41), (1, 35), (2, 32)], 5);
    assert_eq!(steps, [[41, 32, 32], [32, 32, 32], [16, 32, 32], [0, 32, 32], [0, 16, 32]]);
    let h = with(PLAIN, &[(0, class, 32, 0), (1, class, 32, 1)]);
    // What an open sequence holds frees nothing, and its parents stay too.
    let mut held = h.clone();
    held.join(0, class, &(0..20).collect::<Vec<_>>());
    assert_eq!(left(&mut held, Scope::All, &[(0, 32), (1, 32)], 3), [[32, 16], [32, 0], [32, 0]]);
    // A request that cannot be met costs nobody anything.
    let mut whole = h.clone();
    assert_eq!(whole.cache.evict(5, Scope::All, Reason::Room), 0);
    assert_eq!(whole.cache.cached_blocks(), 4);
}

#[test]
fn blocks_behind_every_window_go_first_and_cost_nothing() {
    let mut h = with(WINDOWED, &[(0, Class::Interactive, 200, 0)]);
    let all: Vec<u32> = (0..200).collect();
    assert_eq!(h.cache.cached_blocks(), 13 * 3);
    assert_eq!(h.cache.match_len(&0, &all[..100]), 100);
    // To go on from 200 the window needs positions from 161 on, in blocks 10 to 12. Batch may take the rest: ten times two.
    assert_eq!(h.cache.evict(20, Scope::For(Class::Batch), Reason::Room), 20);
    assert_eq!((h.cache.match_len(&0, &all), h.cache.match_len(&0, &all[..100])), (200, 0));
    assert_eq!(h.cache.evict(1, Scope::For(Class::Batch), Reason::Room), 0, "the others are its user's");
    // The tail of eight tokens costs those; without it one goes on from 192, which needs block 9, so all would be lost.
    assert_eq!(h.cache.evict(1, Scope::All, Reason::Room), 3);
    let lost: Vec<u64> = h
        .cache
        .events()
        .filter_map(|e| match e.change {
            Change::Evicted { tokens, .. } => Some(tokens),
            _ => None,
        })
        .collect();
    assert_eq!(lost, [0, 200]);
}
