//! Values of flags: what they look like and what is allowed.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_lists_are_ids_or_a_file() {
        assert_eq!(tokens("1, 2,3"), Ok(Tokens(vec![1, 2, 3])));
        assert!(tokens("").is_err() && tokens("-1").is_err() && tokens("@/nowhere").is_err());
    }
}
