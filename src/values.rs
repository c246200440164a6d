//! Values of flags: what they look like and what is allowed.

use residency::experts::{CacheSize, GuessWhen};

/// Token ids from the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tokens(pub Vec<u32>);

/// Ids separated by commas, or `@FILE` with a JSON list.
pub(crate) fn tokens(text: &str) -> Result<Tokens, String> {
    let ids: Vec<u32> = match text.strip_prefix('@') {
        Some(file) => {
            let json = std::fs::read(file).map_err(|e| format!("{file}: {e}"))?;
            serde_json::from_slice(&json).map_err(|e| format!("{file}: no JSON list of ids: {e}"))?
        }
        None => {
            let id = |word: &str| word.trim().parse().map_err(|e| format!("{word:?}: {e}"));
            text.split(',').map(id).collect::<Result<_, _>>()?
        }
    };
    if ids.is_empty() { Err("no ids".to_owned()) } else { Ok(Tokens(ids)) }
}

/// Numbers separated by commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counts(pub Vec<usize>);

/// Numbers, 0 included.
pub(crate) fn counts(text: &str) -> Result<Counts, String> {
    let one = |word: &str| word.trim().parse().map_err(|e| format!("{word:?}: {e}"));
    text.split(',').map(one).collect::<Result<_, _>>().map(Counts)
}

/// Numbers from 1.
pub(crate) fn counts_from_one(text: &str) -> Result<Counts, String> {
    text.split(',').map(|word| at_least_one(word.trim())).collect::<Result<_, _>>().map(Counts)
}

/// Bytes: a number with a unit. K, M, G, T and KiB … are powers of 1024, as in llama.cpp and systemd; KB … are powers of 1000.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is no size like 3G or 1500MiB"))?;
    let unit = unit.trim().to_ascii_lowercase();
    let power = match unit.chars().next() {
        None | Some('b') => 0,
        Some('k') => 1,
        Some('m') => 2,
        Some('g') => 3,
        Some('t') => 4,
        Some(_) => 9,
    };
    let base: f64 = match (power, unit.get(1..).unwrap_or("")) {
        (0..=4, "" | "ib") => 1024.0,
        (1..=4, "b") => 1000.0,
        _ => return Err(format!("{text:?}: units are K M G T, KiB MiB GiB TiB, KB MB GB TB")),
    };
    let bytes = number * base.powi(power);
    if bytes >= 1.0 && bytes <= (1u64 << 62) as f64 {
        Ok(bytes as u64)
    } else {
        Err(format!("{text:?} is out of range"))
    }
}

/// `auto`, `always` or `off`.
pub(crate) fn guess_experts(text: &str) -> Result<GuessWhen, String> {
    match text {
        "auto" => Ok(GuessWhen::Auto),
        "always" => Ok(GuessWhen::Always),
        "off" => Ok(GuessWhen::Off),
        _ => Err(format!("{text:?} is none of auto, always, off")),
    }
}

/// A budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// What the machine leaves.
    Auto,
    /// So many bytes.
    Bytes(u64),
}

/// `auto` or bytes.
pub(crate) fn memory(text: &str) -> Result<Memory, String> {
    if text == "auto" { Ok(Memory::Auto) } else { bytes(text).map(Memory::Bytes) }
}

/// Where guesses at the next tokens come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Guess {
    /// There are none.
    Off,
    /// The text so far.
    Lookup,
    /// The model of this name.
    Model(String),
}

/// `off`, `lookup` or a model.
pub(crate) fn guess(text: &str) -> Result<Guess, String> {
    match text {
        "" => Err("off, lookup, or a model".to_owned()),
        "off" => Ok(Guess::Off),
        "lookup" => Ok(Guess::Lookup),
        model => Ok(Guess::Model(model.to_owned())),
    }
}

fn number(text: &str, allowed: impl Fn(f32) -> bool, what: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|e| format!("{e}"))?;
    if allowed(value) { Ok(value) } else { Err(format!("must be {what}")) }
}

/// A finite number from 0.
pub(crate) fn not_negative(text: &str) -> Result<f32, String> {
    number(text, |v| v.is_finite() && v >= 0.0, "0 or more")
}

/// A number from 0 to 1.
pub(crate) fn share(text: &str) -> Result<f32, String> {
    number(text, |v| (0.0..=1.0).contains(&v), "between 0 and 1")
}

/// A finite number above 0.
pub(crate) fn positive(text: &str) -> Result<f32, String> {
    number(text, |v| v.is_finite() && v > 0.0, "more than 0")
}

/// A whole number from 1.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(value) => Ok(value),
        Err(e) => Err(format!("{e}")),
    }
}

/// `auto`, `all`, or MiB.
pub(crate) fn cache_size(text: &str) -> Result<CacheSize, String> {
    match text {
        "auto" => Ok(CacheSize::Auto),
        "all" => Ok(CacheSize::All),
        mib => {
            let mib: u64 = mib.parse().map_err(|_| format!("{mib:?} is neither auto nor all nor a number of MiB"))?;
            Ok(CacheSize::Bytes(mib.saturating_mul(1 << 20)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_the_units_that_people_write() {
        assert_eq!(bytes("3G"), Ok(3 << 30));
        assert_eq!(bytes("1500MiB"), Ok(1500 << 20));
        assert_eq!(bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(bytes("2gb"), Ok(2_000_000_000));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("7B"), Ok(7));
        for bad in ["", "G", "3X", "-1G", "0", "3Gb2", "1e9", "9999999T", "3GiBB", "1..5G"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        assert_eq!((memory("auto"), memory("1K")), (Ok(Memory::Auto), Ok(Memory::Bytes(1024))));
    }

    #[test]
    fn token_lists_are_ids_or_a_file() {
        assert_eq!(tokens("1, 2,3"), Ok(Tokens(vec![1, 2, 3])));
        assert!(tokens("").is_err() && tokens("-1").is_err() && tokens("@/nowhere").is_err());
    }
}
