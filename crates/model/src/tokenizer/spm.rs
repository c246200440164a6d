//! SentencePiece: the best-scored pair of neighbours is merged first; what is no token falls back to bytes.

use super::merge::{Merger, UNKNOWN};
use super::vocab::Vocab;

/// Puts `▁` for every space, the form in which such vocabularies are written.
pub(super) fn escape_spaces(text: &str) -> String {
    text.replace(' ', "\u{2581}")
}

/// Appends the ids of `text`, whose spaces are escaped.
pub(super) fn encode(vocab: &Vocab, text: &str, merger: &mut Merger, out: &mut Vec<u32>) {
    merger.clear();
    for (start, c) in text.char_indices() {
        let end = start + c.len_utf8();
        merger.push(vocab.id(&text[start..end]).unwrap_or(UNKNOWN), start, end);
    }
    merger.run(|left, right| {
        // Longer than any token: not worth a look, and looking would make long texts quadratic.
        if right.end - left.start > vocab.token_bytes_max() {
            return None;
        }
        let id = vocab.id(&text[left.start..right.end])?;
        Some((rank(vocab.score(id)), id))
    });
    for symbol in merger.symbols() {
        if symbol.id == UNKNOWN {
            for &byte in &text.as_bytes()[symbol.start..symbol.end] {
                out.extend(vocab.byte_token(byte).or(vocab.unknown()));
            }
        } else {
            out.push(symbol.id);
        }
    }
}

/// A number that is smaller for a higher score. Zeros of both signs are equal; NaN comes last.
fn rank(score: f32) -> u32 {
    let score = if score.is_nan() { f32::NEG_INFINITY } else { score + 0.0 };
    let bits = score.to_bits();
    // IEEE order: negative numbers grow downwards.
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_score_has_a_smaller_rank() {
        let scores = [f32::INFINITY, 3.5, 0.0, -1e-30, -1.0, -1e9, f32::NEG_INFINITY];
        assert!(scores.windows(2).all(|w| rank(w[0]) < rank(w[1])));
        assert_eq!(rank(0.0), rank(-0.0));
        assert_eq!(rank(f32::NAN), rank(f32::NEG_INFINITY));
    }
}
