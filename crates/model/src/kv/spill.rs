//! Keys and values in files: each full block of the prefix tree is a blob, named by what it depends on.
//!
//! A name is a digest of the model's content, its numbers, the types of keys and values, the salt and all tokens from the
//! first: who can compute the name may use the blob, and a conversation finds its beginning whoever wrote it, without an
//! index. What names and checksums say is not taken on trust: tokens are compared, and after a restore the last block is
//! computed anew and compared, bit by bit (see [`crate::Runner::sequence_join`]).
//!
//! A blob: name (32 bytes), blocks of layers that see everything, blocks of layers with a window, bytes of a block, tokens
//! (4 bytes each, little-endian), the 16 tokens, the blocks.

use super::{KvCache, KvKey};
use crate::Error;
use memory::blobs::{BlobDir, Got, Put};
use memory::source::{ByteSource, ReadRoom};
use residency::kv::{BLOCK_TOKENS, Change, Class, Growth, NodeId, SequenceId};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::sync::Arc;

type Name = [u8; 32];

/// Raised when the bytes of keys and values change that the kernels write for the same contents.
const KV_LAYOUT: u32 = 3;

/// Places of a file that are looked at to tell its content.
const SAMPLES: u64 = 64;
/// Bytes of each.
const SAMPLE_BYTES: u64 = 64 << 10;

/// Keys and values in files.
#[derive(Debug)]
pub(crate) struct Spill {
    dir: BlobDir,
    /// Digest of the model's content.
    content: Name,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spilled {
    /// Blobs written.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Tokens that they hold.
    pub tokens: u64,
    /// How long to wait before more may be written; `None`: all is in files that can be.
    pub wait_ms: Option<u64>,
}

/// What came from files.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    pub(crate) nodes: Vec<NodeId>,
    names: Vec<Name>,
}

/// A digest by which files of other content are told apart: of lengths and samples, for reading everything would take as
/// long as loading. What it misses the comparison after a restore finds.
fn content(sources: &[Arc<dyn ByteSource>]) -> Result<Name, Error> {
    let mut hash = Sha256::new();
    let mut room = ReadRoom::new(false);
    for source in sources {
        let len = source.len_bytes();
        hash.update(len.to_le_bytes());
        let step = (len / SAMPLES).max(SAMPLE_BYTES);
        for start in (0..SAMPLES).map(|i| i * step).take_while(|&start| start < len) {
            let range = start..(start + SAMPLE_BYTES).min(len);
            let places = source.read(std::slice::from_ref(&range), &mut room)?;
            places.into_iter().for_each(|place| hash.update(&room.bytes()[place]));
        }
    }
    Ok(hash.finalize().into())
}

impl Spill {
    pub(crate) fn new(dir: BlobDir, sources: &[Arc<dyn ByteSource>]) -> Result<Spill, Error> {
        Ok(Spill { dir, content: content(sources)? })
    }

    /// What all names under a key depend on.
    fn root(&self, key: &KvKey) -> Name {
        let adapter = key.adapter.as_deref().unwrap_or("");
        let words = [adapter, &key.parameters, key.types.0, key.types.1].map(str::as_bytes);
        let mut hash = Sha256::new_with_prefix(self.content);
        hash.update(KV_LAYOUT.to_le_bytes());
        for part in words.into_iter().chain([&key.salt[..]]) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.finalize().into()
    }
}

/// The name of the block with `tokens` after the one called `before`.
fn name(before: &Name, tokens: &[u32]) -> Name {
    let mut hash = Sha256::new_with_prefix(before);
    tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
    hash.finalize().into()
}

fn file(name: &Name) -> String {
    name.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What stands before the blocks.
fn header(name: &Name, tokens: &[u32], blocks: [usize; 2], block_bytes: usize) -> Vec<u8> {
    let mut out = name.to_vec();
    for number in [blocks[0], blocks[1], block_bytes, tokens.len()] {
        out.extend((number as u32).to_le_bytes());
    }
    tokens.iter().for_each(|token| out.extend(token.to_le_bytes()));
    out
}

impl KvCache {
    /// Writes what the tree has and no file, as fast as is allowed.
    pub(crate) fn spill(&mut self) -> Result<Spilled, Error> {
        let Some(spill) = &mut self.spill else { return Ok(Spilled::default()) };
        let now_ms = self.cache.now_ms();
        let (mut spilled, mut names, mut done) = (Spilled::default(), HashMap::new(), Vec::new());
        for node in self.cache.cached() {
            if node.tokens.len() < BLOCK_TOKENS {
                continue;
            }
            let before = node.parent.and_then(|parent| names.get(&parent).copied());
            let name = name(&before.unwrap_or_else(|| spill.root(node.key)), node.tokens);
            names.insert(node.id, name);
            if node.spilled {
                continue;
            }
            let blocks = [node.full.len(), node.window.len()];
            let header = header(&name, node.tokens, blocks, self.store.block_bytes());
            let bytes = node.full.iter().chain(node.window).map(|&block| self.store.block(block));
            let parts: Vec<&[u8]> = [&header[..]].into_iter().chain(bytes).collect();
            match spill.dir.put(&file(&name), &parts, now_ms)? {
                Put::Written(len) => {
                    spilled.files += 1;
                    spilled.bytes += len;
                    spilled.tokens += node.tokens.len() as u64;
                    done.push(node.id);
                }
                Put::Exists => done.push(node.id),
                Put::TooLarge => {}
                Put::Later { wait_ms } => {
                    spilled.wait_ms = Some(wait_ms);
                    break;
                }
            }
        }
        done.into_iter().for_each(|id| self.cache.set_spilled(id));
        if spilled.files > 0 {
            self.cache.record(Change::Spilled { files: spilled.files, bytes: spilled.bytes });
        }
        Ok(spilled)
    }

    /// Puts into the tree what files have of `tokens` beyond what it has already.
    pub(crate) fn restore(&mut self, key: &KvKey, class: Class, tokens: &[u32]) -> Result<Restored, Error> {
        let mut restored = Restored::default();
        let Some(spill) = &self.spill else { return Ok(restored) };
        let mut before = spill.root(key);
        let there = self.cache.match_len(key, tokens) / BLOCK_TOKENS * BLOCK_TOKENS;
        let id = self.cache.join(key.clone(), class, usize::MAX, &tokens[..there]);
        let from = self.cache.tokens(id).len() / BLOCK_TOKENS;
        for (index, block) in tokens.chunks_exact(BLOCK_TOKENS).enumerate() {
            before = name(&before, block);
            if index < from {
                continue;
            }
            let Some(bytes) = self.read(&before, block) else { break };
            if !matches!(self.grow(&[(id, BLOCK_TOKENS)])?, Growth::Ready) || !self.put(id, index, &bytes) {
                break;
            }
            self.cache.commit(id, block);
            if let Some(node) = self.cache.last_node(id) {
                self.cache.set_spilled(node);
                restored.nodes.push(node);
                restored.names.push(before);
            }
        }
        self.cache.close(id);
        Ok(restored)
    }

    /// The blob called `name`, if it is what it should be: window blocks or none behind those of the other layers.
    fn read(&mut self, name: &Name, tokens: &[u32]) -> Option<Vec<u8>> {
        let file = file(name);
        let reason = match self.spill.as_ref()?.dir.get(&file) {
            Got::Missing => return None,
            Got::Bad(reason) => reason,
            Got::Blob(bytes) => {
                let (layout, block_bytes) = (self.groups.layout, self.store.block_bytes());
                let fits = |window: usize| {
                    let header = header(name, tokens, [layout.full_groups, window], block_bytes);
                    let len = header.len() + (layout.full_groups + window) * block_bytes;
                    bytes.len() == len && bytes.starts_with(&header)
                };
                if fits(layout.window_groups) || fits(0) {
                    return Some(bytes[header(name, tokens, [0, 0], 0).len()..].to_vec());
                }
                "it holds something else than its name says".to_owned()
            }
        };
        self.cache.record(Change::Ignored { file: file.clone(), reason });
        // So that it can be written anew.
        self.spill.as_mut()?.dir.remove(&file);
        None
    }

    /// Takes blocks for 16 more positions and fills them with `bytes`.
    fn put(&mut self, id: SequenceId, index: usize, bytes: &[u8]) -> bool {
        if self.cache.extend(id, BLOCK_TOKENS).is_none() {
            return false;
        }
        let tables = self.cache.tables(id);
        for (group, bytes) in bytes.chunks_exact(self.store.block_bytes()).enumerate() {
            if let Some(block) = tables.block(group, index) {
                self.store.block_mut(block).copy_from_slice(bytes);
            }
        }
        if bytes.len() < self.groups.layout.groups() * self.store.block_bytes() {
            self.cache.drop_last_window(id);
        }
        true
    }

    /// Gives up what was restored, and where it is `refuted`, not being what the model computes, the files too.
    pub(crate) fn forget(&mut self, restored: &Restored, refuted: bool) {
        self.cache.discard(&restored.nodes);
        for name in restored.names.iter().filter(|_| refuted) {
            let reason = "it is not what the model computes".to_owned();
            self.cache.record(Change::Ignored { file: file(name), reason });
            if let Some(spill) = &mut self.spill {
                spill.dir.remove(&file(name));
            }
        }
        self.balance();
    }
}
