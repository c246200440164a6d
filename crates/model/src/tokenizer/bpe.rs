//! Byte-pair encoding: the pair of neighbours that comes first in the merge list is merged first.

use gguf::Texts;
use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use super::Error;
use super::merge::{Merger, UNKNOWN};
use super::pretokenizer::{Family, PreTokenizer};
use super::vocab::Vocab;

/// How the text of a word becomes symbols.
#[derive(Debug)]
enum Symbols {
    /// GPT-2: each byte stands for one printable character; the ids of the 256 of them.
    Bytes(Box<[u32; 256]>),
    /// Gemma 4: the characters themselves, spaces as `▁`; what is no token falls back to bytes.
    Characters,
}

/// The merge list, and the way from a pair to its first place in it. The table holds places alone: it is filled at random
/// places, and the larger it is, the longer that waits for memory.
#[derive(Debug)]
struct Merges {
    list: Vec<Merge>,
    /// Places by the hash of their pair, which has a random seed.
    ranks: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

/// Two ids and the id of the result.
#[derive(Debug)]
struct Merge {
    pair: (u32, u32),
    merged: u32,
}

impl Merges {
    fn with_capacity(len: usize) -> Merges {
        Merges {
            list: Vec::with_capacity(len),
            ranks: HashTable::with_capacity(len),
            hasher: DefaultHashBuilder::default(),
        }
    }

    /// Appends a merge. Of several with one pair the first is the one that is found.
    fn push(&mut self, pair: (u32, u32), merged: u32) {
        let Merges { list, ranks, hasher } = self;
        let rank = list.len() as u32;
        list.push(Merge { pair, merged });
        let hash = |rank: &u32| hasher.hash_one(list[*rank as usize].pair);
        ranks.entry(hash(&rank), |other| list[*other as usize].pair == pair, hash).or_insert(rank);
    }

    /// Place in the list and result of a pair.
    fn get(&self, pair: (u32, u32)) -> Option<(u32, u32)> {
        let rank = self.ranks.find(self.hasher.hash_one(pair), |rank| self.list[*rank as usize].pair == pair)?;
        Some((*rank, self.list[*rank as usize].merged))
    }
}

/// Merge list and word splitter.
#[derive(Debug)]
pub(super) struct Bpe {
    words: PreTokenizer,
    symbols: Symbols,
    merges: Merges,
    /// A word that is a token as it stands is taken so, merges or not (llama.cpp: `ignore_merges`).
    whole_words: bool,
    /// The same for words of nothing but newlines.
    whole_newlines: bool,
}

impl Bpe {
    /// `merges` are lines of two texts with a space between.
    pub(super) fn new(vocab: &Vocab, family: &'static Family, merges: &Texts) -> Result<Self, Error> {
        let symbols = if family.spaces_escaped {
            Symbols::Characters
        } else {
            let id = |byte| vocab.id(byte_char(byte).encode_utf8(&mut [0; 4])).unwrap_or(UNKNOWN);
            Symbols::Bytes(Box::new(std::array::from_fn(|byte| id(byte as u8))))
        };
        Ok(Self {
            words: PreTokenizer::new(family),
            symbols,
            merges: parse_merges(vocab, merges)?,
            whole_words: family.whole_words,
            whole_newlines: family.spaces_escaped,
        })
    }

    /// Whether spaces are written as `▁` in this vocabulary.
    pub(super) fn spaces_escaped(&self) -> bool {
        matches!(self.symbols, Symbols::Characters)
    }

    /// Appends the ids of `text`, whose spaces are escaped where the vocabulary wants it.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, merger: &mut Merger, out: &mut Vec<u32>) {
        for word in self.words.split(text) {
            let word = &text[word];
            match self.whole_word(vocab, word) {
                Some(id) => out.push(id),
                None => self.encode_word(vocab, word, merger, out),
            }
        }
    }

    fn whole_word(&self, vocab: &Vocab, word: &str) -> Option<u32> {
        if self.whole_newlines && word.bytes().all(|b| b == b'\n') {
            return vocab.id(word);
        }
        if !self.whole_words {
            return None;
        }
        match self.symbols {
            Symbols::Characters => vocab.id(word),
            // Every byte becomes one or two bytes of text.
            Symbols::Bytes(_) if word.len() > vocab.token_bytes_max() => None,
            Symbols::Bytes(_) => vocab.id(&word.bytes().map(byte_char).collect::<String>()),
        }
    }

    fn encode_word(&self, vocab: &Vocab, word: &str, merger: &mut Merger, out: &mut Vec<u32>) {
        merger.clear();
        match &self.symbols {
            Symbols::Bytes(ids) => {
                for (i, byte) in word.bytes().enumerate() {
                    merger.push(ids[usize::from(byte)], i, i + 1);
                }
            }
            Symbols::Characters => {
                for (start, c) in word.char_indices() {
                    let end = start + c.len_utf8();
                    merger.push(vocab.id(&word[start..end]).unwrap_or(UNKNOWN), start, end);
                }
            }
        }
        merger.run(|left, right| self.merges.get((left.id, right.id)));
        for symbol in merger.symbols() {
            if symbol.id != UNKNOWN {
                out.push(symbol.id);
            } else if self.spaces_escaped() {
                for &byte in &word.as_bytes()[symbol.start..symbol.end] {
                    out.extend(vocab.byte_token(byte).or(vocab.unknown()));
                }
            }
            // A byte that a byte-level vocabulary lacks is dropped, as llama.cpp does.
        }
    }
}

/// Lines whose texts are looked up together.
const LINES_AT_ONCE: usize = 32;

fn parse_merges(vocab: &Vocab, lines: &Texts) -> Result<Merges, Error> {
    if lines.len() > u32::MAX as usize {
        return Err(Error::TooMany { key: super::MERGES, found: lines.len() });
    }
    let mut merges = Merges::with_capacity(lines.len());
    let mut next: Option<u32> = None;
    let (mut texts, mut ids) = (Vec::new(), Vec::new());
    for (index, line) in lines.iter().enumerate() {
        if index % LINES_AT_ONCE == 0 {
            let ahead = (index..lines.len()).take(LINES_AT_ONCE).filter_map(|index| lines.get(index));
            texts.clear();
            texts.extend(ahead.flat_map(|line| <[&str; 2]>::from(halves(line).unwrap_or_default())));
            vocab.ids(&texts, &mut ids);
        }
        let bad = |text: &str| Error::MergeToken { index, merge: line.to_owned(), text: text.to_owned() };
        let (left, right) = halves(line).ok_or_else(|| Error::MergeForm { index, merge: line.to_owned() })?;
        let place = index % LINES_AT_ONCE * 2;
        let pair = (ids[place].ok_or_else(|| bad(left))?, ids[place + 1].ok_or_else(|| bad(right))?);
        // Mostly the results are tokens one after the other, and looking at the next one saves a search.
        let is_joined =
            |text: &str| text.len() == left.len() + right.len() && text.starts_with(left) && text.ends_with(right);
        let merged = match next.filter(|&id| vocab.has_unique_texts() && is_joined(vocab.text(id))) {
            Some(merged) => merged,
            None => {
                let joined = [left, right].concat();
                vocab.id(&joined).ok_or_else(|| bad(&joined))?
            }
        };
        next = Some(merged + 1).filter(|&id| (id as usize) < vocab.len());
        merges.push(pair, merged);
    }
    Ok(merges)
}

/// The two texts of a merge. The left one may itself begin with a space.
fn halves(line: &str) -> Option<(&str, &str)> {
    let space = line.bytes().skip(1).position(|b| b == b' ')? + 1;
    Some((&line[..space], &line[space + 1..]))
}

/// The printable character that stands for `byte` in GPT-2's vocabularies: itself where it is printable in Latin-1,
/// otherwise the next free one from U+0100 on.
pub(super) fn byte_char(byte: u8) -> char {
    let code = match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
        0..=0x20 => 0x100 + u32::from(byte),
        0x7f..=0xa0 => 0x121 + u32::from(byte - 0x7f),
        0xad => 0x143,
    };
    char::from_u32(code).expect("below U+0144")
}

/// The byte that `c` stands for.
pub(super) fn char_byte(c: char) -> Option<u8> {
    Some(match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code as u8,
        code @ 0x100..=0x120 => (code - 0x100) as u8,
        code @ 0x121..=0x142 => (code - 0x121 + 0x7f) as u8,
        0x143 => 0xad,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character_and_comes_back() {
        for byte in 0..=255 {
            assert_eq!(char_byte(byte_char(byte)), Some(byte));
        }
        assert_eq!((byte_char(b' '), byte_char(b'\n'), byte_char(0xad)), ('Ġ', 'Ċ', 'Ń'));
        assert_eq!((char_byte('▁'), char_byte(' ')), (None, None));
    }
}
