//! Chat templates: the file's own Jinja, rendered by `minijinja`.

/// One message of a conversation, as the templates see it.
pub type Message = serde_json::Value;

/// Why a template gave no text.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("chat template line {line}: {reason}")]
pub struct Error {
    /// Line of the template, from 1.
    pub line: usize,
    /// What it said.
    pub reason: String,
}

/// Inputs of a render beside the template.
pub struct RenderInput<'a> {
    /// Objects with `role` and `content` (and `tool_calls` …).
    pub messages: &'a [Message],
    /// Tools, if any, in OpenAI's shape.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Text of the BOS token.
    pub bos_token: &'a str,
    /// Text of the EOS token.
    pub eos_token: &'a str,
    /// Whether the assistant's turn is opened at the end.
    pub add_generation_prompt: bool,
}

/// Renders `template`.
pub fn render(template: &str, input: &RenderInput<'_>) -> Result<String, Error> {
    let _ = (template, input);
    todo!()
}
