//! Text to token ids and back, by the vocabulary and the rules in a file's metadata.
//!
//! Made to agree with llama.cpp token for token (its llama-vocab.cpp and unicode.cpp are the source of the facts).
//! Where llama.cpp only approximates the model's own splitting rule for want of a regex engine with Unicode classes
//! (GPT-4o, Tekken), the model's own rule is taken.

mod bpe;
mod meanings;
mod merge;
mod pretokenizer;
mod special;
mod spm;
mod stream;
mod vocab;

use std::collections::BTreeSet;

use gguf::Metadata;

pub use stream::StreamDecoder;

use bpe::Bpe;
use merge::Merger;
use special::{Fragment, SpecialTokens};
use vocab::{Attributes, Vocab};

const MODEL_NAME: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// The values of `tokenizer.ggml.model` that are supported.
pub const MODELS: &[&str] = &["gpt2", "llama", "gemma4"];

/// What can be wrong with a vocabulary.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key is missing.
    #[error("the file has no {0}")]
    Missing(&'static str),
    /// A key has a value of the wrong type.
    #[error("{key} is not {expected}")]
    Type {
        /// The key.
        key: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// An array does not have one element for each token.
    #[error("{key} has {found} elements, but there are {expected} tokens")]
    Length {
        /// The key.
        key: &'static str,
        /// Elements found.
        found: usize,
        /// Number of tokens.
        expected: usize,
    },
    /// An array has no elements, or more than can be numbered.
    #[error("{key} has {found} elements; 1 to {} are possible", u32::MAX - 1)]
    TooMany {
        /// The key.
        key: &'static str,
        /// Elements found.
        found: usize,
    },
    /// The kind of tokenizer is not supported.
    #[error("unknown tokenizer model {name:?} (known: {})", MODELS.join(", "))]
    UnknownModel {
        /// Value of `tokenizer.ggml.model`.
        name: String,
    },
    /// The rule that splits text into words is not supported.
    #[error("unknown pre-tokenizer {name:?} (known: {})", pretokenizer::names().join(", "))]
    UnknownPreTokenizer {
        /// Value of `tokenizer.ggml.pre`.
        name: String,
    },
    /// A token id is outside the vocabulary.
    #[error("{key} is {id}, but there are {len} tokens")]
    TokenId {
        /// The key.
        key: &'static str,
        /// The id.
        id: u64,
        /// Number of tokens.
        len: usize,
    },
    /// A merge is not two texts with a space between.
    #[error("merge {index} is {merge:?}, not two texts with a space between")]
    MergeForm {
        /// Place in the list, from 0.
        index: usize,
        /// The line.
        merge: String,
    },
    /// A merge names a text that is no token.
    #[error("merge {index} is {merge:?}, but {text:?} is no token")]
    MergeToken {
        /// Place in the list, from 0.
        index: usize,
        /// The line.
        merge: String,
        /// The part or the result that is no token.
        text: String,
    },
    /// The special tokens are too many for a search automaton.
    #[error("{count} special tokens of one length: {reason}")]
    SpecialTokens {
        /// How many.
        count: usize,
        /// What the automaton's builder said.
        reason: String,
    },
}

#[derive(Debug)]
enum Algorithm {
    Bpe(Bpe),
    SentencePiece,
}

/// A vocabulary and its rules.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    algorithm: Algorithm,
    special: SpecialTokens,
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    ends: BTreeSet<u32>,
    add_bos: bool,
    add_eos: bool,
    add_space_prefix: bool,
}

impl Tokenizer {
    /// The tokenizer of a file.
    pub fn new(metadata: &Metadata) -> Result<Self, Error> {
        let model = vocab::model_name(metadata)?;
        let pre = vocab::text(metadata, PRE)?.unwrap_or("default");
        let family = match model {
            "llama" => None,
            "gpt2" => Some(pretokenizer::family(pre)?),
            "gemma4" => Some(pretokenizer::family("gemma4")?),
            _ => return Err(Error::UnknownModel { name: model.to_owned() }),
        };
        let mut vocab = Vocab::new(metadata)?;
        // llama.cpp's default for BPE is Falcon's 11; elsewhere that is a comma.
        let falcon = vocab.id("<|endoftext|>").filter(|&id| id == 11);
        let defaults = match family {
            None => [Some(1), Some(2), Some(0)],
            Some(_) => [falcon, falcon, None],
        };
        let meanings = vocab.meanings(metadata, defaults)?;
        let algorithm = match family {
            None => Algorithm::SentencePiece,
            Some(family) => {
                let merges = vocab::strings(metadata, MERGES)?.ok_or(Error::Missing(MERGES))?;
                Algorithm::Bpe(Bpe::new(&vocab, family, merges)?)
            }
        };
        let flag = |key, default| Ok(vocab::boolean(metadata, key)?.unwrap_or(default));
        let add_bos = flag("tokenizer.ggml.add_bos_token", family.is_none_or(|f| f.add_bos))?;
        // Gemma 4 files say that no BOS is wanted; the model wants it.
        let add_bos = add_bos || family.is_some_and(|f| f.bos_forced);
        Ok(Self {
            special: SpecialTokens::new(&vocab)?,
            add_bos: add_bos && meanings.bos.is_some(),
            add_eos: flag("tokenizer.ggml.add_eos_token", false)? && meanings.eos.is_some(),
            add_space_prefix: flag("tokenizer.ggml.add_space_prefix", family.is_none())? && family.is_none(),
            bos: meanings.bos,
            eos: meanings.eos,
            eot: meanings.eot,
            ends: meanings.ends,
            vocab,
            algorithm,
        })
    }

    /// Ids of `text`, without BOS. With `special`, the text of control tokens is parsed as these tokens.
    pub fn encode(&self, text: &str, special: bool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut merger = Merger::default();
        let mut after_special = true;
        for fragment in self.special.split(text, special) {
            match fragment {
                Fragment::Token(id) => ids.push(id),
                Fragment::Text(text) => self.encode_fragment(text, after_special, &mut merger, &mut ids),
            }
            after_special = matches!(fragment, Fragment::Token(_));
        }
        ids
    }

    fn encode_fragment(&self, text: &str, after_special: bool, merger: &mut Merger, ids: &mut Vec<u32>) {
        match &self.algorithm {
            Algorithm::Bpe(bpe) if bpe.spaces_escaped() => {
                bpe.encode(&self.vocab, &spm::escape_spaces(text), merger, ids);
            }
            Algorithm::Bpe(bpe) => bpe.encode(&self.vocab, text, merger, ids),
            Algorithm::SentencePiece => {
                let mut escaped = spm::escape_spaces(text);
                if self.add_space_prefix && after_special {
                    escaped.insert(0, '\u{2581}');
                }
                spm::encode(&self.vocab, &escaped, merger, ids);
            }
        }
    }

    /// Ids of a prompt as the model wants it: control tokens parsed, BOS first where it is wanted and `text` does not
    /// itself begin with it (chat templates often do).
    pub fn encode_prompt(&self, text: &str) -> Vec<u32> {
        let mut ids = self.encode(text, true);
        if let Some(bos) = self.bos
            && self.add_bos
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        ids
    }

    /// Bytes of one token (a control token gives none unless `special`; neither does an id outside the vocabulary).
    pub fn token_bytes(&self, id: u32, special: bool) -> Vec<u8> {
        if id as usize >= self.vocab.len() {
            return Vec::new();
        }
        let (text, attributes) = (self.vocab.text(id), self.vocab.attributes(id));
        let control = Attributes::UNKNOWN | Attributes::CONTROL;
        if attributes.any(control) && !special {
            Vec::new()
        } else if attributes.any(control | Attributes::USER_DEFINED) {
            text.into()
        } else if attributes.any(Attributes::BYTE) {
            byte_of(text).map_or_else(|| text.into(), |byte| vec![byte])
        } else if attributes.any(Attributes::NORMAL) {
            self.plain_bytes(text)
        } else {
            // Unused and undefined tokens, which no text becomes.
            Vec::new()
        }
    }

    fn plain_bytes(&self, text: &str) -> Vec<u8> {
        match &self.algorithm {
            Algorithm::Bpe(bpe) if !bpe.spaces_escaped() => {
                let mut bytes = Vec::with_capacity(text.len());
                for c in text.chars() {
                    match bpe::char_byte(c) {
                        Some(byte) => bytes.push(byte),
                        None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
                bytes
            }
            _ => text.replace('\u{2581}', " ").into_bytes(),
        }
    }

    /// The text of `ids`: control tokens give nothing, the space that the tokenizer puts before a text is taken off
    /// again, invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut decoder = StreamDecoder::new(self);
        let mut text: String = ids.iter().map(|&id| decoder.push(self, id)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// The text of a token as the vocabulary writes it; `None` outside the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        ((id as usize) < self.vocab.len()).then(|| self.vocab.text(id))
    }

    /// The token with this text, as the vocabulary writes it.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocab.id(text)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.vocab.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether prompts begin with BOS.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether texts end with EOS.
    pub fn add_eos(&self) -> bool {
        self.add_eos
    }

    /// Whether a space is put before a text.
    pub fn add_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Beginning of sequence.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// End of sequence.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// End of turn, by the file's key or by a well-known text.
    pub fn eot(&self) -> Option<u32> {
        self.eot
    }

    /// Whether `id` ends a generation (EOS, EOT and their kin).
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// All tokens that end a generation, ascending.
    pub fn ends_of_generation(&self) -> impl Iterator<Item = u32> {
        self.ends.iter().copied()
    }
}

/// The byte that `<0x..>` names.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if hex { u8::from_str_radix(digits, 16).ok() } else { None }
}
