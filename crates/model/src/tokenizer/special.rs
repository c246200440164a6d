//! Tokens that are found in the text before anything else: control tokens (on demand) and user-defined ones (always).

use std::collections::BTreeMap;

use aho_corasick::{AhoCorasick, Input, MatchKind};

use super::Error;
use super::vocab::{Attributes, Vocab};

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fragment<'t> {
    /// Still to be tokenized; not empty.
    Text(&'t str),
    /// A special token.
    Token(u32),
}

/// Finders for both kinds of call.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    user_defined: Vec<Finder>,
    all: Vec<Finder>,
}

/// The tokens of one length in bytes.
#[derive(Debug)]
struct Finder {
    automaton: AhoCorasick,
    /// Pattern number → token, and whether white space on its left and right goes with it.
    tokens: Vec<(u32, bool, bool)>,
}

impl SpecialTokens {
    pub(super) fn new(vocab: &Vocab) -> Result<Self, Error> {
        let control = Attributes::CONTROL | Attributes::UNKNOWN;
        Ok(Self {
            user_defined: finders(vocab, |a| a.any(Attributes::USER_DEFINED) && !a.any(control))?,
            all: finders(vocab, |a| a.any(control | Attributes::USER_DEFINED))?,
        })
    }

    /// Cuts `text` at its special tokens: the longest tokens are looked for everywhere first, then the shorter ones in
    /// what is left, as llama.cpp does. `control` says whether control tokens count.
    pub(super) fn split<'t>(&self, text: &'t str, control: bool) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        if !text.is_empty() {
            fragments.push(Fragment::Text(text));
        }
        for finder in if control { &self.all } else { &self.user_defined } {
            if fragments.iter().any(|f| matches!(f, Fragment::Text(t) if finder.automaton.is_match(t))) {
                let mut cut = Vec::with_capacity(fragments.len() + 2);
                for fragment in fragments {
                    match fragment {
                        Fragment::Token(_) => cut.push(fragment),
                        Fragment::Text(text) => finder.cut(text, &mut cut),
                    }
                }
                fragments = cut;
            }
        }
        fragments
    }
}

impl Finder {
    fn cut<'t>(&self, text: &'t str, out: &mut Vec<Fragment<'t>>) {
        let mut start = 0;
        // Searched anew after each match, since white space that goes with a token hides tokens in it.
        while let Some(found) = self.automaton.find(Input::new(text).range(start..)) {
            let (id, strip_left, strip_right) = self.tokens[found.pattern().as_usize()];
            let before = &text[start..found.start()];
            let before = if strip_left { before.trim_end_matches(is_c_space) } else { before };
            if !before.is_empty() {
                out.push(Fragment::Text(before));
            }
            out.push(Fragment::Token(id));
            let after = &text[found.end()..];
            let after = if strip_right { after.trim_start_matches(is_c_space) } else { after };
            start = text.len() - after.len();
        }
        if start < text.len() {
            out.push(Fragment::Text(&text[start..]));
        }
    }
}

fn finders(vocab: &Vocab, wanted: impl Fn(Attributes) -> bool) -> Result<Vec<Finder>, Error> {
    let mut by_len: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for id in 0..vocab.len() as u32 {
        if wanted(vocab.attributes(id)) && !vocab.text(id).is_empty() {
            by_len.entry(vocab.text(id).len()).or_default().push(id);
        }
    }
    let finder = |ids: Vec<u32>| {
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostFirst)
            .build(ids.iter().map(|&id| vocab.text(id)))
            .map_err(|e| Error::SpecialTokens { count: ids.len(), reason: e.to_string() })?;
        let token = |&id: &u32| {
            let attributes = vocab.attributes(id);
            (id, attributes.any(Attributes::STRIP_LEFT), attributes.any(Attributes::STRIP_RIGHT))
        };
        Ok(Finder { automaton, tokens: ids.iter().map(token).collect() })
    };
    by_len.into_values().rev().map(finder).collect()
}

/// `isspace` of the C locale.
fn is_c_space(c: char) -> bool {
    matches!(c, ' ' | '\t'..='\r')
}
