//! `tojson` as Python's `json.dumps` writes it.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Deepest nesting that is written.
const DEPTH_MAX: usize = 128;

/// How to write.
struct Style {
    indent: Option<usize>,
    ensure_ascii: bool,
    sort_keys: bool,
    item_separator: String,
    key_separator: String,
}

/// The filter: `value | tojson(indent=None, ensure_ascii=False, separators=None, sort_keys=False)`.
pub(super) fn to_json(value: &Value, positional: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let indent = options.get::<Option<Value>>("indent")?.or(positional);
    let indent = match indent {
        Some(value) if value.is_integer() => usize::try_from(value).ok(),
        _ => None,
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(other) => return Err(bad(format!("tojson: {} separators instead of 2", other.len()))),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style {
        // More would only be a way to make much text of little.
        indent: indent.map(|n| n.min(16)),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item_separator: item,
        key_separator: key,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    write_value(&mut out, value, &style, 0)?;
    Ok(Value::from(out))
}

fn bad(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(bad(format!("tojson: nested deeper than {DEPTH_MAX}")));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
        ValueKind::Number => out.push_str(&python_float(f64::try_from(value.clone())?)),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let mut first = true;
            out.push('[');
            for item in value.try_iter()? {
                separate(out, style, depth, &mut first);
                write_value(out, &item, style, depth + 1)?;
            }
            close(out, style, depth, first, ']');
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            let mut first = true;
            out.push('{');
            for key in keys {
                separate(out, style, depth, &mut first);
                write_key(out, &key, style)?;
                out.push_str(&style.key_separator);
                write_value(out, &value.get_item(&key)?, style, depth + 1)?;
            }
            close(out, style, depth, first, '}');
        }
        kind => return Err(bad(format!("tojson: a value of kind {kind} has no JSON"))),
    }
    Ok(())
}

fn write_key(out: &mut String, key: &Value, style: &Style) -> Result<(), Error> {
    match key.as_str() {
        Some(text) => write_string(out, text, style.ensure_ascii),
        None => {
            out.push('"');
            write_value(out, key, style, 0)?;
            out.push('"');
        }
    }
    Ok(())
}

fn separate(out: &mut String, style: &Style, depth: usize, first: &mut bool) {
    if !std::mem::replace(first, false) {
        out.push_str(&style.item_separator);
    }
    new_line(out, style, depth + 1);
}

fn close(out: &mut String, style: &Style, depth: usize, empty: bool, bracket: char) {
    if !empty {
        new_line(out, style, depth);
    }
    out.push(bracket);
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent * depth));
    }
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || ensure_ascii && c > '~' => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// A float as Python's `repr` writes it: the shortest digits that give it back, an exponent from 1e16 up and below
/// 1e-4.
fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    if x == 0.0 || (1e-4..1e16).contains(&x.abs()) {
        return format!("{x:?}");
    }
    let text = format!("{x:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases = [
            (0.1, "0.1"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (123456789.5, "123456789.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
        ];
        for (x, expected) in cases {
            assert_eq!(python_float(x), expected);
        }
    }
}
