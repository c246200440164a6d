//! Text out of a stream of tokens.

use super::Tokenizer;

/// Turns a stream of tokens into text without ever showing half a character.
///
/// All that it gives, put together, is what `String::from_utf8_lossy` makes of all the bytes.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    pending: Vec<u8>,
    strip_space: bool,
    special: bool,
}

impl StreamDecoder {
    /// A decoder at the start of a text: the space that the tokenizer puts before a text is taken off again.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self { pending: Vec::new(), strip_space: tokenizer.add_space_prefix(), special: false }
    }

    /// A decoder in the middle of a text: the first token's space is text.
    pub fn continuing(tokenizer: &Tokenizer) -> Self {
        Self { strip_space: false, ..Self::new(tokenizer) }
    }

    /// The same decoder, but control tokens are shown.
    pub fn with_special(self) -> Self {
        Self { special: true, ..self }
    }

    /// The text that is complete once `id`, a token of `tokenizer`, has come.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let bytes = tokenizer.token_bytes(id, self.special);
        let stripped = if self.strip_space { bytes.strip_prefix(b" ") } else { None };
        if !bytes.is_empty() {
            self.strip_space = false;
        }
        self.pending.extend_from_slice(stripped.unwrap_or(&bytes));
        self.take()
    }

    /// What is left at the end; incomplete bytes become U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut text = self.take();
        if !self.pending.is_empty() {
            self.pending.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
        text
    }

    /// Takes the complete characters off the pending bytes.
    fn take(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = bad;
                    let Some(len) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[len..];
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        text
    }
}
