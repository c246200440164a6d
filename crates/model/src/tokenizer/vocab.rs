//! The list of tokens: texts, scores, attributes, and the ids that have a meaning.

use gguf::{Array, Metadata, Texts, Value};
use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use super::{Error, MODEL_NAME, SCORES, TOKEN_TYPES, TOKENS};

/// What a token is; a set of flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes(u8);

impl Attributes {
    pub(super) const UNDEFINED: Self = Self(0);
    pub(super) const NORMAL: Self = Self(1);
    pub(super) const UNKNOWN: Self = Self(1 << 1);
    pub(super) const CONTROL: Self = Self(1 << 2);
    pub(super) const USER_DEFINED: Self = Self(1 << 3);
    pub(super) const UNUSED: Self = Self(1 << 4);
    pub(super) const BYTE: Self = Self(1 << 5);
    /// White space before it goes with it.
    pub(super) const STRIP_LEFT: Self = Self(1 << 6);
    /// White space after it goes with it.
    pub(super) const STRIP_RIGHT: Self = Self(1 << 7);

    /// The number in `tokenizer.ggml.token_type` (llama.h: enum llama_token_type).
    fn from_type(id: i32) -> Self {
        match id {
            1 => Self::NORMAL,
            2 => Self::UNKNOWN,
            3 => Self::CONTROL,
            4 => Self::USER_DEFINED,
            5 => Self::UNUSED,
            6 => Self::BYTE,
            _ => Self::UNDEFINED,
        }
    }

    /// Whether one of `flags` is set.
    pub(super) fn any(self, flags: Self) -> bool {
        self.0 & flags.0 != 0
    }
}

impl std::ops::BitOr for Attributes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The tokens' texts, and the way back from a text to its token: a table of ids alone.
#[derive(Debug)]
struct Tokens {
    texts: Texts,
    /// Ids by the hash of their text, which has a random seed: files are not to choose what collides.
    ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Tokens {
    fn new(texts: &Texts) -> Tokens {
        let mut tokens = Tokens {
            texts: Texts::default(),
            ids: HashTable::with_capacity(texts.len()),
            hasher: DefaultHashBuilder::default(),
        };
        for (id, text) in texts.iter().enumerate() {
            if text.is_empty() {
                // An empty text would be found everywhere.
                tokens.push(&format!("[EMPTY_{id}]"));
            } else {
                tokens.push(text);
            }
        }
        tokens
    }

    /// The first of several tokens with one text is the one that is found.
    fn push(&mut self, text: &str) {
        let id = self.texts.len() as u32;
        let Tokens { texts, ids, hasher } = self;
        texts.push(text);
        let hash = |id: &u32| hasher.hash_one(text_of(texts, *id));
        ids.entry(hash(&id), |other| text_of(texts, *other) == text, hash).or_insert(id);
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.ids.find(self.hasher.hash_one(text), |id| self.text(*id) == text).copied()
    }

    /// [`Tokens::id`] of each of `wanted`, in steps that do not wait for each other's memory.
    fn ids(&self, wanted: &[&str], found: &mut Vec<Option<u32>>) {
        found.clear();
        // The first token whose hash is similar enough is nearly always the right one.
        found.extend(wanted.iter().map(|text| self.ids.find(self.hasher.hash_one(text), |_| true).copied()));
        for (text, found) in wanted.iter().zip(found) {
            if found.is_some_and(|id| self.text(id) != *text) {
                *found = self.id(text);
            }
        }
    }

    fn text(&self, id: u32) -> &str {
        text_of(&self.texts, id)
    }
}

fn text_of(texts: &Texts, id: u32) -> &str {
    texts.get(id as usize).expect("an id of the vocabulary")
}

/// The tokens.
#[derive(Debug)]
pub(super) struct Vocab {
    tokens: Tokens,
    /// Empty where the file has none.
    scores: Vec<f32>,
    attributes: Vec<Attributes>,
    token_bytes_max: usize,
    byte_tokens: Box<[Option<u32>; 256]>,
    unknown: Option<u32>,
}

impl Vocab {
    pub(super) fn new(metadata: &Metadata) -> Result<Self, Error> {
        let texts = strings(metadata, TOKENS)?.ok_or(Error::Missing(TOKENS))?;
        // One id is kept for "no token".
        if texts.is_empty() || texts.len() >= u32::MAX as usize {
            return Err(Error::TooMany { key: TOKENS, found: texts.len() });
        }
        let types = match metadata.get(TOKEN_TYPES) {
            None => None,
            Some(_) => Some(
                metadata.i32s(TOKEN_TYPES).ok_or(Error::Type { key: TOKEN_TYPES, expected: "an array of integers" })?,
            ),
        };
        let scores = match metadata.get(SCORES) {
            None => Vec::new(),
            Some(Value::Array(Array::F32(scores))) => scores.clone(),
            Some(Value::Array(Array::I32(scores))) => scores.iter().map(|&s| s as f32).collect(),
            Some(_) => return Err(Error::Type { key: SCORES, expected: "an array of numbers" }),
        };
        let same_len = |key, found: Option<usize>| match found {
            Some(found) if found != texts.len() => Err(Error::Length { key, found, expected: texts.len() }),
            _ => Ok(()),
        };
        same_len(TOKEN_TYPES, types.as_ref().map(Vec::len))?;
        same_len(SCORES, metadata.get(SCORES).map(|_| scores.len()))?;

        let tokens = Tokens::new(texts);
        let attributes = match types {
            None => vec![Attributes::NORMAL; texts.len()],
            Some(types) => types.into_iter().map(Attributes::from_type).collect(),
        };
        let byte_token = |byte: usize| tokens.id(&format!("<0x{byte:02X}>"));
        Ok(Self {
            token_bytes_max: tokens.texts.iter().map(str::len).max().unwrap_or(0),
            byte_tokens: Box::new(std::array::from_fn(byte_token)),
            unknown: None,
            tokens,
            scores,
            attributes,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.texts.len()
    }

    /// Whether no two tokens have the same text.
    pub(super) fn has_unique_texts(&self) -> bool {
        self.tokens.ids.len() == self.len()
    }

    /// The token whose text is `text`.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.tokens.id(text)
    }

    /// [`Vocab::id`] of each of `texts`, into `found`; faster than one by one.
    pub(super) fn ids(&self, texts: &[&str], found: &mut Vec<Option<u32>>) {
        self.tokens.ids(texts, found);
    }

    /// The text of a token as the file has it.
    ///
    /// # Panics
    /// On an id outside the vocabulary.
    pub(super) fn text(&self, id: u32) -> &str {
        self.tokens.text(id)
    }

    /// SentencePiece's score; 0 where there are none.
    pub(super) fn score(&self, id: u32) -> f32 {
        self.scores.get(id as usize).copied().unwrap_or(0.0)
    }

    pub(super) fn attributes(&self, id: u32) -> Attributes {
        self.attributes[id as usize]
    }

    pub(super) fn set_attributes(&mut self, id: u32, attributes: Attributes) {
        self.attributes[id as usize] = attributes;
    }

    /// Length of the longest token's text in bytes.
    pub(super) fn token_bytes_max(&self) -> usize {
        self.token_bytes_max
    }

    /// The token `<0x..>` of a byte.
    pub(super) fn byte_token(&self, byte: u8) -> Option<u32> {
        self.byte_tokens[usize::from(byte)]
    }

    /// What stands for text that has no token.
    pub(super) fn unknown(&self) -> Option<u32> {
        self.unknown
    }

    pub(super) fn set_unknown(&mut self, id: Option<u32>) {
        self.unknown = id;
    }
}

/// `key` as a list of texts.
pub(super) fn strings<'m>(metadata: &'m Metadata, key: &'static str) -> Result<Option<&'m Texts>, Error> {
    match (metadata.get(key), metadata.strings(key)) {
        (None, _) => Ok(None),
        (Some(_), Some(texts)) => Ok(Some(texts)),
        (Some(_), None) => Err(Error::Type { key, expected: "an array of texts" }),
    }
}

/// `key` as text.
pub(super) fn text<'m>(metadata: &'m Metadata, key: &'static str) -> Result<Option<&'m str>, Error> {
    match (metadata.get(key), metadata.str(key)) {
        (None, _) => Ok(None),
        (Some(_), Some(text)) => Ok(Some(text)),
        (Some(_), None) => Err(Error::Type { key, expected: "a text" }),
    }
}

/// `key` as a boolean.
pub(super) fn boolean(metadata: &Metadata, key: &'static str) -> Result<Option<bool>, Error> {
    match (metadata.get(key), metadata.bool(key)) {
        (None, _) => Ok(None),
        (Some(_), Some(value)) => Ok(Some(value)),
        (Some(_), None) => Err(Error::Type { key, expected: "a boolean" }),
    }
}

/// The kind of tokenizer, named by the file.
pub(super) fn model_name(metadata: &Metadata) -> Result<&str, Error> {
    text(metadata, MODEL_NAME)?.ok_or(Error::Missing(MODEL_NAME))
}
