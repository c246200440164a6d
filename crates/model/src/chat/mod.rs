//! Chat templates: the files' own Jinja, rendered by `minijinja` as the tools around Jinja2 render it.
//!
//! That is: `trim_blocks` and `lstrip_blocks`, Python's methods of strings, lists and dictionaries, `raise_exception`,
//! `strftime_now`, `tojson` like Python's `json.dumps(ensure_ascii=False)`, `{% generation %}` without effect, `tools`
//! undefined where there are none. A template comes out of a file that may be hostile: the steps it takes, the bytes
//! it makes and the depth it goes to are bounded.

mod json;
mod markup;

use std::panic::resume_unwind;
use std::thread;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value};

/// One message of a conversation, as the templates see it.
pub type Message = serde_json::Value;

/// Longest template in bytes. The longest known has 17 KB; parsing takes the square of a hostile one's length.
const TEMPLATE_BYTES_MAX: usize = 128 << 10;
/// Stack for parsing and rendering, of which only what is used costs memory. `minijinja` goes one level deeper for each
/// link of a chain of operators, and for each list in a list when it compares or drops them; a level takes up to 640
/// bytes, so this is enough for the longest template and for [`steps_max`] of some hundred messages.
const STACK_BYTES: usize = 512 << 20;
/// Name of the template inside its environment.
const NAME: &str = "chat";

/// Why a template gave no text.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("chat template{}: {reason}", at(*.line))]
pub struct Error {
    /// Line of the template, from 1; 0 where none is to blame.
    pub line: usize,
    /// What it said.
    pub reason: String,
}

fn at(line: usize) -> String {
    if line == 0 { String::new() } else { format!(" line {line}") }
}

/// Inputs of a render beside the template.
#[derive(Debug, Clone, Copy)]
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

/// What a render can be given besides.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Further variables (`enable_thinking`, `documents`, `builtin_tools` …). They do not replace those of
    /// [`RenderInput`].
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// What `strftime_now` takes for now; `None` asks the clock.
    pub now: Option<LocalTime>,
}

/// A moment on the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalTime {
    /// Year.
    pub year: i16,
    /// Month, 1 to 12.
    pub month: i8,
    /// Day, 1 to 31.
    pub day: i8,
    /// Hour, 0 to 23.
    pub hour: i8,
    /// Minute.
    pub minute: i8,
    /// Second.
    pub second: i8,
}

/// Renders `template` once.
pub fn render(template: &str, input: &RenderInput<'_>) -> Result<String, Error> {
    Template::new(template)?.render(input, &RenderOptions::default())
}

/// A template, parsed once for many renders.
#[derive(Debug, Clone)]
pub struct Template {
    environment: Environment<'static>,
    adds_to_safe_text: bool,
}

impl Template {
    /// Parses `source`.
    pub fn new(source: &str) -> Result<Self, Error> {
        if source.len() > TEMPLATE_BYTES_MAX {
            let reason = format!("{} bytes are more than {TEMPLATE_BYTES_MAX}", source.len());
            return Err(Error { line: 0, reason });
        }
        on_deep_stack(|| Self::parse(source))
    }

    fn parse(source: &str) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(error)?);
        // An error about an undefined value names it; by itself the library does so in debug builds only.
        environment.set_debug(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::to_json);
        environment.add_function("raise_exception", raise_exception);
        let adds_to_safe_text = markup::is_wanted(source);
        if adds_to_safe_text {
            markup::set(&mut environment);
        }
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(error)?;
        Ok(Self { environment, adds_to_safe_text })
    }

    /// The text of a conversation.
    pub fn render(&self, input: &RenderInput<'_>, options: &RenderOptions) -> Result<String, Error> {
        on_deep_stack(|| {
            let mut environment = self.environment.clone();
            environment.set_fuel(Some(steps_max(input.messages.len())));
            let text = environment.get_template(NAME).and_then(|t| t.render(variables(input, options)));
            let text = text.map_err(error)?;
            Ok(if self.adds_to_safe_text { markup::finish(&text) } else { text })
        })
    }
}

/// Steps that a render may take; each 64 bytes that it makes count as a step too. Most templates known take some
/// hundred for a message, but some look at all other messages for each.
fn steps_max(messages: usize) -> u64 {
    let n = messages as u64;
    n.saturating_mul(n).saturating_mul(5).saturating_add(n.saturating_mul(1000)).saturating_add(500_000)
}

/// What the template sees.
fn variables(input: &RenderInput<'_>, options: &RenderOptions) -> Value {
    let now = options.now;
    let given = [
        ("messages", Some(Value::from(Serde(input.messages)))),
        ("tools", input.tools.map(|tools| Value::from(Serde(tools)))),
        ("bos_token", Some(Value::from(input.bos_token))),
        ("eos_token", Some(Value::from(input.eos_token))),
        ("add_generation_prompt", Some(Value::from(input.add_generation_prompt))),
        ("strftime_now", Some(Value::from_function(move |format: &str| strftime(now, format)))),
    ];
    let given = given.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let extra = options.extra.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
    // Of two values of one name the later one counts.
    Value::from_pairs(extra.chain(given))
}

/// Runs `work` where deep recursion is safe.
fn on_deep_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("chat template".to_owned()).stack_size(STACK_BYTES);
        let handle = builder
            .spawn_scoped(scope, work)
            .map_err(|e| Error { line: 0, reason: format!("no thread with a stack of {STACK_BYTES} bytes: {e}") })?;
        handle.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn error(e: minijinja::Error) -> Error {
    let line = e.line().unwrap_or(0);
    // What a template raises is meant to be read as it is.
    let reason = match (e.kind(), e.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        (ErrorKind::OutOfFuel, _) => {
            "endless, or nearly so: more steps than a conversation of this length can need".to_owned()
        }
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    Error { line, reason }
}

fn raise_exception(message: &str) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

fn strftime(now: Option<LocalTime>, format: &str) -> Result<String, minijinja::Error> {
    let fail = |e: jiff::Error| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}"));
    let time = match now {
        None => jiff::tz::TimeZone::system().to_datetime(jiff::Timestamp::now()),
        Some(t) => jiff::civil::DateTime::new(t.year, t.month, t.day, t.hour, t.minute, t.second, 0).map_err(fail)?,
    };
    jiff::fmt::strtime::format(format, time).map_err(fail)
}

/// Makes `{% generation %}`, which only marks the assistant's words for training, an `if` that is always true: the
/// same white space, the same lines, no effect.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::new();
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open + 2);
        let word_at = tag.find(|c: char| !c.is_whitespace() && c != '-' && c != '+').unwrap_or(tag.len());
        let (lead, tail) = tag.split_at(word_at);
        out.push_str(before);
        out.push_str(lead);
        rest = tail;
        for (word, instead) in [("generation", "if true"), ("endgeneration", "endif")] {
            let Some(after) = tail.strip_prefix(word) else { continue };
            if after.trim_start().trim_start_matches(['-', '+']).starts_with("%}") {
                out.push_str(instead);
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}
