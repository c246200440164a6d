//! The list of tokens: texts, scores, attributes, and the ids that have a meaning.

use std::collections::{BTreeSet, HashMap};

use gguf::{Array, Metadata, Value};

use super::{Error, MODEL_NAME, PRE, SCORES, TOKEN_TYPES, TOKENS};

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

    fn without(self, flags: Self) -> Self {
        Self(self.0 & !flags.0)
    }
}

impl std::ops::BitOr for Attributes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The tokens.
#[derive(Debug)]
pub(super) struct Vocab {
    texts: Vec<Box<str>>,
    /// Empty where the file has none.
    scores: Vec<f32>,
    attributes: Vec<Attributes>,
    ids: HashMap<Box<str>, u32>,
    token_bytes_max: usize,
    byte_tokens: Box<[Option<u32>; 256]>,
    unknown: Option<u32>,
}

impl Vocab {
    pub(super) fn new(metadata: &Metadata) -> Result<Self, Error> {
        let tokens = strings(metadata, TOKENS)?.ok_or(Error::Missing(TOKENS))?;
        // One id is kept for "no token".
        if tokens.is_empty() || tokens.len() >= u32::MAX as usize {
            return Err(Error::TooMany { key: TOKENS, found: tokens.len() });
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
            Some(found) if found != tokens.len() => Err(Error::Length { key, found, expected: tokens.len() }),
            _ => Ok(()),
        };
        same_len(TOKEN_TYPES, types.as_ref().map(Vec::len))?;
        same_len(SCORES, metadata.get(SCORES).map(|_| scores.len()))?;

        let mut ids = HashMap::with_capacity(tokens.len());
        let mut texts: Vec<Box<str>> = Vec::with_capacity(tokens.len());
        for (id, text) in tokens.iter().enumerate() {
            // An empty text would be found everywhere.
            let text = if text.is_empty() { format!("[EMPTY_{id}]") } else { text.clone() }.into_boxed_str();
            // The first of several tokens with one text is the one that is found.
            ids.entry(text.clone()).or_insert(id as u32);
            texts.push(text);
        }
        let attributes = match types {
            None => vec![Attributes::NORMAL; texts.len()],
            Some(types) => types.into_iter().map(Attributes::from_type).collect(),
        };
        let byte_token = |byte: usize| ids.get(format!("<0x{byte:02X}>").as_str()).copied();
        Ok(Self {
            token_bytes_max: texts.iter().map(|t| t.len()).max().unwrap_or(0),
            byte_tokens: Box::new(std::array::from_fn(byte_token)),
            unknown: None,
            texts,
            scores,
            attributes,
            ids,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// The token whose text is `text`.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// The text of a token as the file has it.
    ///
    /// # Panics
    /// On an id outside the vocabulary.
    pub(super) fn text(&self, id: u32) -> &str {
        &self.texts[id as usize]
    }

    /// SentencePiece's score; 0 where there are none.
    pub(super) fn score(&self, id: u32) -> f32 {
        self.scores.get(id as usize).copied().unwrap_or(0.0)
    }

    pub(super) fn attributes(&self, id: u32) -> Attributes {
        self.attributes[id as usize]
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
}

/// Ids with a meaning.
#[derive(Debug, Default)]
pub(super) struct Meanings {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) eot: Option<u32>,
    pub(super) ends: BTreeSet<u32>,
}

/// Texts of the end of a turn, the best sign first (llama.cpp finds them by text too).
const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];
/// Further texts after which nothing is to be generated.
const ENDS: &[&str] = &[
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
];
/// Fill-in-the-middle: padding, repository and file separator end a generation; the key and the known texts of each.
const FILL_ENDS: [(&str, &[&str]); 3] = [
    ("tokenizer.ggml.fim_pad_token_id", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    ("tokenizer.ggml.fim_rep_token_id", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    ("tokenizer.ggml.fim_sep_token_id", &["<|file_sep|>"]),
];
/// Fill-in-the-middle: prefix, suffix and middle only become control tokens.
const FILL_PARTS: [(&str, &[&str]); 3] = [
    (
        "tokenizer.ggml.fim_pre_token_id",
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
    ),
    (
        "tokenizer.ggml.fim_suf_token_id",
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
    ),
    (
        "tokenizer.ggml.fim_mid_token_id",
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
    ),
];
/// gpt-oss: parts of its answer's structure, always shown.
const ALWAYS_SHOWN: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

impl Vocab {
    /// Finds the ids with a meaning by the file's keys and by well-known texts, and corrects the attributes of the
    /// tokens that files are known to get wrong. `defaults` are BOS, EOS and unknown where the file names none.
    pub(super) fn meanings(&mut self, metadata: &Metadata, defaults: [Option<u32>; 3]) -> Result<Meanings, Error> {
        let len = self.len();
        let or_default =
            |key, default: Option<u32>| Ok(token_id(metadata, key, len)?.or(default.filter(|&id| (id as usize) < len)));
        let mut found = Meanings {
            bos: or_default("tokenizer.ggml.bos_token_id", defaults[0])?,
            eos: or_default("tokenizer.ggml.eos_token_id", defaults[1])?,
            eot: token_id(metadata, "tokenizer.ggml.eot_token_id", len)?,
            ends: BTreeSet::new(),
        };
        self.unknown = or_default("tokenizer.ggml.unknown_token_id", defaults[2])?;
        if found.eot.is_none() {
            found.eot = self.first_control(END_OF_TURN);
        }
        found.ends.extend(found.eos);
        found.ends.extend(found.eot);
        found.ends.extend(token_id(metadata, "tokenizer.ggml.eom_token_id", len)?);
        for (key, texts) in FILL_ENDS {
            found.ends.extend(match token_id(metadata, key, len)? {
                Some(id) => Some(id),
                None => self.first_control(texts),
            });
        }
        for (key, texts) in FILL_PARTS {
            if token_id(metadata, key, len)?.is_none() {
                self.first_control(texts);
            }
        }
        for text in END_OF_TURN.iter().chain(ENDS) {
            found.ends.extend(self.first_control(&[text]));
        }
        for text in ALWAYS_SHOWN {
            self.set(text, Attributes::USER_DEFINED);
        }
        self.spare_texts_of_structure(&mut found.ends);
        self.strip_white_space(metadata);
        Ok(found)
    }

    /// The first of `texts` that is a token; it becomes a control token.
    fn first_control(&mut self, texts: &[&str]) -> Option<u32> {
        let id = texts.iter().find_map(|text| self.id(text))?;
        let attributes = &mut self.attributes[id as usize];
        *attributes = *attributes | Attributes::CONTROL;
        Some(id)
    }

    fn set(&mut self, text: &str, attributes: Attributes) {
        if let Some(id) = self.id(text) {
            self.attributes[id as usize] = attributes;
        }
    }

    /// Some of the known texts are not an end where others are there too.
    fn spare_texts_of_structure(&mut self, ends: &mut BTreeSet<u32>) {
        let has = |text: &str| self.ids.get(text).is_some_and(|id| ends.contains(id));
        // gpt-oss and Solar: `<|end|>` ends a message, not the answer.
        let call = has("<|call|>") || has("<|calls|>");
        let end_is_structure = call && (has("<|return|>") || has("<|flush|>")) && has("<|end|>");
        // Gemma 4: `</s>` is plain text.
        let s_is_text = (has("<|tool_response>") || has("<|plamo:eos|>")) && has("</s>");
        for (spare, text, attributes) in
            [(end_is_structure, "<|end|>", Attributes::USER_DEFINED), (s_is_text, "</s>", Attributes::NORMAL)]
        {
            if spare {
                self.set(text, attributes);
                if let Some(id) = self.id(text) {
                    ends.remove(&id);
                }
            }
        }
    }

    /// White space that goes with special tokens is not in the files; llama.cpp knows it by the model's name.
    fn strip_white_space(&mut self, metadata: &Metadata) {
        let name = metadata.str("general.name").unwrap_or_default().to_lowercase();
        let pre = metadata.str(PRE).unwrap_or_default();
        let mut add = |text: &str, flag: Attributes| {
            if let Some(id) = self.id(text) {
                let attributes = &mut self.attributes[id as usize];
                *attributes = *attributes | flag;
            }
        };
        if ["jina-v2-de", "jina-v2-es", "jina-v2-code"].iter().any(|p| pre.contains(p)) {
            add("<mask>", Attributes::STRIP_LEFT);
        } else if name.contains("phi-3") || name.contains("phi3") {
            add("</s>", Attributes::STRIP_RIGHT);
            let special = Attributes::CONTROL | Attributes::USER_DEFINED | Attributes::UNKNOWN;
            for attributes in &mut self.attributes {
                if attributes.any(special) {
                    *attributes = *attributes | Attributes::STRIP_RIGHT;
                }
            }
            for text in ["<unk>", "<s>", "<|endoftext|>"] {
                if let Some(id) = self.id(text) {
                    self.attributes[id as usize] = self.attributes[id as usize].without(Attributes::STRIP_RIGHT);
                }
            }
        } else if name.contains("modern-bert") {
            add("[MASK]", Attributes::STRIP_LEFT);
        }
    }
}

/// `key` as a token id. -1 (all bits set) is how files say "none".
fn token_id(metadata: &Metadata, key: &'static str, len: usize) -> Result<Option<u32>, Error> {
    match metadata.get(key) {
        None | Some(Value::U32(u32::MAX) | Value::I32(-1) | Value::I64(-1)) => Ok(None),
        Some(_) => {
            let id = metadata.u64(key).ok_or(Error::Type { key, expected: "a token id" })?;
            match u32::try_from(id) {
                Ok(id) if (id as usize) < len => Ok(Some(id)),
                _ => Err(Error::TokenId { key, id, len }),
            }
        }
    }
}

/// `key` as a list of texts.
pub(super) fn strings<'m>(metadata: &'m Metadata, key: &'static str) -> Result<Option<&'m [String]>, Error> {
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
