//! Text to token ids and back.

use gguf::Metadata;

/// What can be wrong with a vocabulary.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key is missing.
    #[error("the file has no {0}")]
    Missing(&'static str),
}

/// A vocabulary and its rules.
pub struct Tokenizer {
    _private: (),
}

impl Tokenizer {
    /// The tokenizer of a file.
    pub fn new(metadata: &Metadata) -> Result<Self, Error> {
        let _ = metadata;
        todo!()
    }

    /// Ids of `text`, without BOS. With `special`, the text of control tokens is parsed as these tokens.
    pub fn encode(&self, text: &str, special: bool) -> Vec<u32> {
        let _ = (text, special);
        todo!()
    }

    /// Bytes of one token (a control token gives none unless `special`).
    pub fn token_bytes(&self, id: u32, special: bool) -> Vec<u8> {
        let _ = (id, special);
        todo!()
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        todo!()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether prompts begin with BOS.
    pub fn add_bos(&self) -> bool {
        todo!()
    }

    /// Beginning of sequence.
    pub fn bos(&self) -> Option<u32> {
        todo!()
    }

    /// End of sequence.
    pub fn eos(&self) -> Option<u32> {
        todo!()
    }

    /// Whether `id` ends a generation (EOS, EOT and their kin).
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        let _ = id;
        todo!()
    }
}

/// Turns a stream of tokens into text without ever showing half a character.
pub struct StreamDecoder<'t> {
    tokenizer: &'t Tokenizer,
    pending: Vec<u8>,
}

impl<'t> StreamDecoder<'t> {
    /// A decoder at the start of a text.
    pub fn new(tokenizer: &'t Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new() }
    }

    /// The text that is complete once `id` has come.
    pub fn push(&mut self, id: u32) -> String {
        let _ = (id, self.tokenizer, &self.pending);
        todo!()
    }

    /// What is left at the end; incomplete bytes become U+FFFD.
    pub fn finish(&mut self) -> String {
        todo!()
    }
}
