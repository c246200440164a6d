//! From what the user says to the tokens that the model sees.

use std::path::Path;

use model::Model;
use model::chat::{self, Message, RenderInput};
use serde_json::json;

use crate::failure::Failure;

/// A message of a conversation.
pub(crate) fn message(role: &str, content: &str) -> Message {
    json!({"role": role, "content": content})
}

/// The template to use: the one asked for, else the file's own.
pub(crate) fn template(model: &Model, asked: Option<&str>) -> Result<Option<String>, Failure> {
    let Some(asked) = asked else { return Ok(model.chat_template.clone()) };
    if asked.contains("{{") || asked.contains("{%") {
        return Ok(Some(asked.to_owned()));
    }
    let read = std::fs::read_to_string(Path::new(asked));
    read.map(Some)
        .map_err(|e| Failure::Usage(format!("--chat-template {asked}: no template and no readable file: {e}")))
}

/// Tokens of a conversation, the answer's turn opened.
pub(crate) fn chat_tokens(model: &Model, template: &str, messages: &[Message]) -> Result<Vec<u32>, Failure> {
    let tokenizer = &model.tokenizer;
    let text_of = |id: Option<u32>| {
        id.map_or_else(String::new, |id| String::from_utf8_lossy(&tokenizer.token_bytes(id, true)).into_owned())
    };
    let input = RenderInput {
        messages,
        tools: None,
        bos_token: &text_of(tokenizer.bos()),
        eos_token: &text_of(tokenizer.eos()),
        add_generation_prompt: true,
    };
    let text = chat::render(template, &input).map_err(|e| Failure::Run(e.to_string()))?;
    Ok(with_bos(model, tokenizer.encode(&text, true)))
}

/// Tokens of a text that is continued as it stands. Special tokens may be written out.
pub(crate) fn raw_tokens(model: &Model, text: &str) -> Vec<u32> {
    with_bos(model, model.tokenizer.encode(text, true))
}

/// BOS in front where the model wants one, but not twice: many templates write it themselves.
fn with_bos(model: &Model, mut ids: Vec<u32>) -> Vec<u32> {
    if let Some(bos) = model.tokenizer.bos()
        && model.tokenizer.add_bos()
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
    }
    ids
}
