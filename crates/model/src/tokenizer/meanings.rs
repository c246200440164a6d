//! Ids with a meaning, by the file's keys and by well-known texts, as llama.cpp finds them.

use std::collections::BTreeSet;

use gguf::{Metadata, Value};

use super::vocab::{Attributes, Vocab};
use super::{Error, PRE};

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
        self.set_unknown(or_default("tokenizer.ggml.unknown_token_id", defaults[2])?);
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
        self.set_attributes(id, self.attributes(id) | Attributes::CONTROL);
        Some(id)
    }

    fn set(&mut self, text: &str, attributes: Attributes) {
        if let Some(id) = self.id(text) {
            self.set_attributes(id, attributes);
        }
    }

    /// Some of the known texts are not an end where others are there too.
    fn spare_texts_of_structure(&mut self, ends: &mut BTreeSet<u32>) {
        let has = |text: &str| self.id(text).is_some_and(|id| ends.contains(&id));
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
        let (text, flag) = if ["jina-v2-de", "jina-v2-es", "jina-v2-code"].iter().any(|p| pre.contains(p)) {
            ("<mask>", Attributes::STRIP_LEFT)
        } else if name.contains("modern-bert") {
            ("[MASK]", Attributes::STRIP_LEFT)
        } else if name.contains("phi-3") || name.contains("phi3") {
            let special = Attributes::CONTROL | Attributes::USER_DEFINED | Attributes::UNKNOWN;
            let bare = ["<unk>", "<s>", "<|endoftext|>"].map(|text| self.id(text));
            for id in 0..self.len() as u32 {
                if self.attributes(id).any(special) && !bare.contains(&Some(id)) {
                    self.set_attributes(id, self.attributes(id) | Attributes::STRIP_RIGHT);
                }
            }
            ("</s>", Attributes::STRIP_RIGHT)
        } else {
            return;
        };
        if let Some(id) = self.id(text) {
            self.set_attributes(id, self.attributes(id) | flag);
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
