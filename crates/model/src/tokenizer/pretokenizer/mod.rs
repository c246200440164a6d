//! Splitting a text into words before byte-pair encoding, by the rule that `tokenizer.ggml.pre` names.
//!
//! A rule is a list of steps; each cuts the pieces of the one before at its matches, and what lies between matches
//! stays a piece. The patterns run on an automaton, so time is linear in the text whatever the text; the one thing in them that an automaton cannot
//! do, the lookahead in `\s+(?!\S)`, is the last space of a match handed back ([`Spaces`]). The Unicode classes are
//! llama.cpp's for every character that its tables know; characters of newer Unicode versions have their own class
//! here and none there.

mod families;

use std::ops::Range;

use regex_automata::meta::Regex;
use regex_automata::{Anchored, Input};

pub(super) use families::{Family, family, names};

/// What becomes of white space that no other alternative of a step wants.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Spaces {
    /// `\s+(?!\S)|\s+`: a run is one piece, but its last character is left to the word that follows.
    Run,
    /// Jais 2: as a run, but only in pieces of 512, 256, … 4 and at last 2 or 1.
    Powers,
}

/// One step.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// Every match is a piece.
    Cut(&'static str),
    /// Every match is a piece, and white space between matches too.
    Words(&'static str, Spaces),
    /// Runs of digits, in threes from the right.
    Threes,
}

/// A step, ready to run.
#[derive(Debug)]
enum Cutter {
    Cut(Regex),
    /// Pattern 0 is the words, pattern 1 white space.
    Words(Regex, Spaces),
    Threes(Regex),
}

/// A rule, ready to run.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    cutters: Vec<Cutter>,
}

impl PreTokenizer {
    pub(super) fn new(family: &Family) -> Self {
        let regex = |patterns: &[&str]| Regex::new_many(patterns).expect("the patterns are part of the program");
        let cutters = family.steps.iter().map(|&step| match step {
            Step::Cut(pattern) => Cutter::Cut(regex(&[pattern])),
            Step::Words(pattern, spaces) => Cutter::Words(regex(&[pattern, r"\s+"]), spaces),
            Step::Threes => Cutter::Threes(regex(&[r"\p{N}+"])),
        });
        Self { cutters: cutters.collect() }
    }

    /// The words of `text` as byte ranges: without gaps, none empty.
    pub(super) fn split(&self, text: &str) -> Vec<Range<usize>> {
        let mut pieces = Vec::new();
        if !text.is_empty() {
            pieces.push(0..text.len());
        }
        for cutter in &self.cutters {
            let mut cut = Vec::with_capacity(pieces.len());
            for piece in pieces {
                cutter.cut(&text[piece.clone()], piece.start, &mut cut);
            }
            pieces = cut;
        }
        pieces
    }
}

impl Cutter {
    /// Cuts `piece`, which begins at `base` in the text.
    fn cut(&self, piece: &str, base: usize, out: &mut Vec<Range<usize>>) {
        let mut start = 0;
        let mut push = |range: Range<usize>| {
            if !range.is_empty() {
                out.push(base + range.start..base + range.end);
            }
        };
        match self {
            Self::Cut(regex) => {
                for found in regex.find_iter(piece) {
                    push(start..found.start());
                    push(found.range());
                    start = found.end();
                }
            }
            Self::Words(regex, spaces) => {
                while start < piece.len() {
                    // Nearly always there is a match right here, and finding its end alone is quicker.
                    let input = Input::new(piece).range(start..);
                    let here = regex.find(input.clone().anchored(Anchored::Yes));
                    let Some(found) = here.or_else(|| regex.find(input)) else { break };
                    push(start..found.start());
                    start = found.start();
                    if found.pattern().as_usize() == 0 {
                        push(found.range());
                        start = found.end();
                        continue;
                    }
                    let last = found.end() == piece.len();
                    // Cut the run up here: looking for its rest anew would be quadratic.
                    loop {
                        let len = spaces.len(&piece[start..found.end()], last);
                        push(start..start + len);
                        start += len;
                        // The last character is left to the word that follows.
                        let rest = piece[start..found.end()].chars().take(2).count();
                        if rest == 0 || rest == 1 && !last {
                            break;
                        }
                    }
                }
            }
            Self::Threes(regex) => {
                for found in regex.find_iter(piece) {
                    push(start..found.start());
                    start = found.start();
                    let count = piece[found.range()].chars().count();
                    for (i, (offset, _)) in piece[found.range()].char_indices().enumerate() {
                        if i > 0 && (count - i).is_multiple_of(3) {
                            push(start..found.start() + offset);
                            start = found.start() + offset;
                        }
                    }
                    push(start..found.end());
                    start = found.end();
                }
            }
        }
        push(start..piece.len());
    }
}

impl Spaces {
    /// Bytes of the first piece of the white space `run`; `last` where nothing follows it.
    fn len(self, run: &str, last: bool) -> usize {
        let count = match self {
            Self::Run => run.chars().count(),
            // No longer piece is cut, so no more matter.
            Self::Powers => run.chars().take(514).count(),
        };
        // The last character belongs to what follows, unless it is the only one.
        let free = if last { count } else { (count - 1).max(1) };
        let take = match self {
            Self::Run => free,
            Self::Powers => (2..10).rev().map(|k| 1 << k).find(|&n| n <= free).unwrap_or(free.min(2)),
        };
        run.char_indices().nth(take).map_or(run.len(), |(i, _)| i)
    }
}

#[cfg(test)]
mod tests {
    use super::families::FAMILIES;
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        PreTokenizer::new(family(name).unwrap()).split(text).into_iter().map(|r| &text[r]).collect()
    }

    #[test]
    fn every_rule_covers_every_text_without_gaps() {
        let text = "I'm ÉTÉ4you,  12345\t\r\n\n 漢字かな ♥\u{301} x\u{85}\u{3000} <=> 'S ١٢٣٤٥ \u{10ffff}  ";
        for family in FAMILIES {
            let pieces = PreTokenizer::new(family).split(text);
            assert_eq!((pieces[0].start, pieces.last().unwrap().end), (0, text.len()), "{:?}", family.names);
            assert!(pieces.windows(2).all(|w| w[0].end == w[1].start), "{:?}", family.names);
            assert!(pieces.iter().all(|p| !p.is_empty()), "{:?}", family.names);
        }
    }

    #[test]
    fn a_megabyte_of_one_character_is_cut_in_linear_time() {
        for family in FAMILIES {
            let words = PreTokenizer::new(family);
            for c in ['a', 'A', ' ', '7', '\n', '\'', '\u{301}', '漢', '😀', '\u{3000}'] {
                let text = c.to_string().repeat((1 << 20) / c.len_utf8());
                let pieces = words.split(&text);
                assert_eq!(pieces.iter().map(|p| p.len()).sum::<usize>(), text.len(), "{c:?}, {:?}", family.names);
            }
        }
    }

    #[test]
    fn no_name_belongs_to_two_rules() {
        let mut all = names();
        all.sort_unstable();
        assert!(all.windows(2).all(|w| w[0] != w[1]));
    }

    #[test]
    fn the_last_space_of_a_run_goes_with_the_word_after_it() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("gpt-2", "a\t\tb  "), ["a", "\t", "\t", "b", "  "]);
        assert_eq!(words("llama-bpe", "a \n\n  b"), ["a", " \n\n", " ", " b"]);
        assert_eq!(words("jais-2", "       b"), ["    ", "  ", " b"]);
        assert_eq!(words("jais-2", "       "), ["    ", "  ", " "]);
        assert_eq!(words("jais-2", "\u{3000}4 5"), ["\u{3000}", "4", " ", "5"]);
    }

    #[test]
    fn digits_are_grouped_as_each_family_wants() {
        assert_eq!(words("qwen2", "1234"), ["1", "2", "3", "4"]);
        assert_eq!(words("llama-bpe", "1234"), ["123", "4"]);
        assert_eq!(words("afmoe", "1234567"), ["1", "234", "567"]);
        assert_eq!(words("falcon", " 1234"), [" ", "123", "4"]);
    }

    #[test]
    fn gpt_4o_cuts_where_small_letters_end() {
        assert_eq!(words("gpt-4o", "CamelCase HTTPServer's ÜBERgroß"), ["Camel", "Case", " HTTPServer's", " ÜBERgroß"]);
    }

    #[test]
    fn kimi_keeps_han_apart_from_other_letters() {
        assert_eq!(words("kimi-k2", "abc漢字def"), ["abc", "漢字", "def"]);
    }
}
