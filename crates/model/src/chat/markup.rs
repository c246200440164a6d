//! Jinja2's one surprise with `safe`: what is added to a safe text is escaped for HTML, even where nothing else is.
//!
//! `minijinja` does so only in templates that escape everything, so for the few templates that add to safe texts
//! escaping is switched on, and undone wherever Jinja2 would not have done it: a text that is written is put between
//! two marks first; it is escaped if the marks turn up inside a safe text (it was added to it), otherwise they are
//! just taken away at the end.

use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, Output, State, Value};

/// Characters that no text has: Unicode keeps these code points free for uses like this one.
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';

/// Whether `template` adds to safe texts. Captured blocks are safe texts themselves while escaping is on, so templates
/// with macros and the like are left alone.
pub(super) fn is_wanted(template: &str) -> bool {
    let adds = template.match_indices('|').any(|(i, _)| {
        let after = template[i + 1..].trim_start().strip_prefix("safe");
        after.is_some_and(|after| after.trim_start().starts_with('+'))
    });
    adds && !["macro", "endset", "endcall", "endfilter"].iter().any(|word| template.contains(word))
}

/// Switches it on.
pub(super) fn set(environment: &mut Environment<'_>) {
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_formatter(format);
}

fn format(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::Undefined => return Ok(()),
        _ => value.to_string(),
    };
    let text = if value.is_safe() { resolve(&text, escape) } else { format!("{OPEN}{text}{CLOSE}") };
    out.write_str(&text).map_err(Error::from)
}

/// Takes away the marks that are left.
pub(super) fn finish(text: &str) -> String {
    resolve(text, |inside| inside.to_owned())
}

fn resolve(text: &str, change: impl Fn(&str) -> String) -> String {
    let mut out = String::with_capacity(text.len());
    for (i, part) in text.split(OPEN).enumerate() {
        match part.split_once(CLOSE) {
            Some((inside, after)) if i > 0 => {
                out.push_str(&change(inside));
                out.push_str(after);
            }
            _ => out.push_str(part),
        }
    }
    out
}

/// As MarkupSafe writes it.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}
