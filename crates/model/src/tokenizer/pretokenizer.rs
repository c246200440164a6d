//! Splitting a text into words before byte-pair encoding, by the rule that `tokenizer.ggml.pre` names.
//!
//! A rule is a list of steps; each cuts the pieces of the one before at its matches, and what lies between matches
//! stays a piece. The patterns are those of the models' own `tokenizer.json` files, as llama.cpp lists them. They run
//! on an automaton, so time is linear in the text whatever the text; the one thing in them that an automaton cannot
//! do, the lookahead in `\s+(?!\S)`, is the last space of a match handed back ([`Spaces`]).

use std::ops::Range;

use regex_automata::meta::Regex;
use regex_automata::{Anchored, Input};

use super::Error;

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

/// Models that split alike.
#[derive(Debug)]
pub(super) struct Family {
    names: &'static [&'static str],
    steps: &'static [Step],
    /// A word that is a token as it stands is taken so, merges or not.
    pub(super) whole_words: bool,
    /// Whether prompts begin with BOS where the file says nothing.
    pub(super) add_bos: bool,
    /// Whether prompts begin with BOS whatever the file says.
    pub(super) bos_forced: bool,
    /// The vocabulary is written in plain text with `▁` for spaces, not in GPT-2's bytes.
    pub(super) spaces_escaped: bool,
}

const FAMILY: Family =
    Family { names: &[], steps: &[], whole_words: false, add_bos: false, bos_forced: false, spaces_escaped: false };

/// `'s`, `'re` and the like, of any case.
macro_rules! endings {
    () => {
        r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])"
    };
}
/// A letter that can begin a word in capitals, and one that can go on in small ones (scripts without case do both).
macro_rules! upper {
    () => {
        r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
    };
}
macro_rules! lower {
    () => {
        r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    };
}
/// Words cut where small letters end, as in GPT-4o; `$not` is taken away from both kinds of letters.
macro_rules! cased_words {
    ($not:literal, $ending:expr) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[",
            upper!(),
            $not,
            "]*[",
            lower!(),
            $not,
            "]+",
            $ending,
            r"|[^\r\n\p{L}\p{N}]?[",
            upper!(),
            $not,
            "]+[",
            lower!(),
            $not,
            "]*",
            $ending
        )
    };
}

const GPT2: Step = Step::Words(r"'(?:[stmd]|[rv]e|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+", Spaces::Run);
const LLAMA3_PATTERN: &str =
    concat!(endings!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+");
const LLAMA3: Step = Step::Words(LLAMA3_PATTERN, Spaces::Run);
const QWEN2: Step = Step::Words(
    concat!(endings!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"),
    Spaces::Run,
);
const GPT4O: Step = Step::Words(
    concat!(cased_words!("", concat!("(?:", endings!(), ")?")), r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"),
    Spaces::Run,
);
const DIGIT: Step = Step::Cut(r"\p{N}");
const DIGITS_3: Step = Step::Cut(r"\p{N}{1,3}");
const LINES: Step = Step::Cut(r"[^\n]+|\n+");
const HAN_KANA: Step = Step::Cut("[一-龥぀-ゟ゠-ヿ]+");
const DEEPSEEK3: Step = Step::Words(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"##,
    Spaces::Run,
);
const BLOOM: Step = Step::Cut(r" ?[^(\s|.,!?…。，、।۔،)]+");
const CJK_OLD: Step = Step::Cut("[一-龥ࠀ-一가-\u{d7ff}]+");

static FAMILIES: &[Family] = &[
    Family {
        names: &["default"],
        steps: &[Step::Cut(r"[\p{P}\$\+<=>\^~\|]+"), GPT2, Step::Cut(r"\p{N}+"), Step::Cut("[0-9][0-9][0-9]")],
        ..FAMILY
    },
    Family {
        names: &[
            "gpt-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "exaone4",
        ],
        steps: &[GPT2],
        ..FAMILY
    },
    Family {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        steps: &[DIGIT, GPT2],
        ..FAMILY
    },
    Family {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        steps: &[LLAMA3],
        whole_words: true,
        add_bos: true,
        ..FAMILY
    },
    Family { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], steps: &[LLAMA3], ..FAMILY },
    Family { names: &["glm4", "glm5"], steps: &[LLAMA3], whole_words: true, ..FAMILY },
    Family { names: &["jais-2"], steps: &[Step::Words(LLAMA3_PATTERN, Spaces::Powers)], ..FAMILY },
    Family {
        names: &["minicpm5"],
        steps: &[
            DIGITS_3,
            Step::Words(
                concat!(endings!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"),
                Spaces::Run,
            ),
        ],
        whole_words: true,
        ..FAMILY
    },
    Family {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        steps: &[QWEN2],
        ..FAMILY
    },
    Family {
        names: &["qwen35"],
        steps: &[Step::Words(
            concat!(endings!(), r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"),
            Spaces::Run,
        )],
        ..FAMILY
    },
    Family { names: &["laguna"], steps: &[LINES, QWEN2], ..FAMILY },
    Family {
        names: &["ufakzeka"],
        steps: &[Step::Words(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+", Spaces::Run)],
        ..FAMILY
    },
    Family {
        names: &["seed-coder"],
        steps: &[Step::Words(
            concat!(endings!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"),
            Spaces::Run,
        )],
        ..FAMILY
    },
    Family {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        steps: &[Step::Words(
            concat!(endings!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"),
            Spaces::Run,
        )],
        ..FAMILY
    },
    Family {
        names: &["exaone-moe"],
        steps: &[Step::Words(
            concat!(
                endings!(),
                r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
            ),
            Spaces::Run,
        )],
        ..FAMILY
    },
    Family { names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], steps: &[GPT4O], ..FAMILY },
    Family { names: &["granite-embed-multi-97m"], steps: &[GPT4O], whole_words: true, ..FAMILY },
    Family { names: &["tiny_aya", "cohere2moe"], steps: &[Step::Threes, GPT4O], ..FAMILY },
    Family {
        names: &["tekken"],
        steps: &[Step::Words(
            concat!(cased_words!("", ""), r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"),
            Spaces::Run,
        )],
        whole_words: true,
        add_bos: true,
        ..FAMILY
    },
    Family {
        names: &["youtu"],
        steps: &[
            Step::Cut("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"),
            Step::Words(
                concat!(
                    cased_words!("", concat!("(?:", endings!(), ")?")),
                    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
                ),
                Spaces::Run,
            ),
        ],
        whole_words: true,
        ..FAMILY
    },
    Family {
        names: &["kimi-k2"],
        steps: &[Step::Words(
            concat!(
                r"\p{Han}+|",
                cased_words!(r"&&[^\p{Han}]", concat!("(?:", endings!(), ")?")),
                r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            ),
            Spaces::Run,
        )],
        ..FAMILY
    },
    Family {
        names: &["deepseek-llm"],
        steps: &[
            Step::Cut(r"[\r\n]"),
            Step::Cut(concat!(
                r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃",
                "]+"
            )),
            Step::Cut(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            Step::Cut(r"\s+$"),
            CJK_OLD,
            Step::Cut(r"\p{N}+"),
        ],
        ..FAMILY
    },
    Family {
        names: &["deepseek-coder"],
        steps: &[Step::Cut(r"[\r\n]"), Step::Cut(r"\s?\p{L}+"), Step::Cut(r"\s?\p{P}+"), CJK_OLD, DIGIT],
        ..FAMILY
    },
    Family {
        names: &["deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"],
        steps: &[DIGITS_3, HAN_KANA, DEEPSEEK3],
        ..FAMILY
    },
    Family {
        names: &["spark2_5"],
        steps: &[
            DIGITS_3,
            HAN_KANA,
            Step::Words(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]"##,
                Spaces::Run,
            ),
            DIGIT,
        ],
        ..FAMILY
    },
    Family {
        names: &["afmoe"],
        steps: &[
            Step::Threes,
            Step::Cut(
                "[一-鿿㐀-䶿豈-\u{faff}぀-ゟ゠-ヿ･-ﾟ⼀-\u{2fdf}\u{e00}-\u{e7f}\u{e80}-\u{eff}\u{1780}-\u{17ff}\u{1000}-\u{109f}\u{aa60}-\u{aa7f}\u{a9e0}-\u{a9ff}가-\u{d7af}ᄀ-ᇿ]+",
            ),
            DEEPSEEK3,
        ],
        ..FAMILY
    },
    Family {
        names: &["falcon"],
        steps: &[Step::Cut(r"[\p{P}\$\+<=>\^~\|`]+"), GPT2, Step::Cut("[0-9][0-9][0-9]")],
        ..FAMILY
    },
    Family { names: &["superbpe"], steps: &[Step::Threes], ..FAMILY },
    Family { names: &["poro-chat", "bloom", "gpt3-finnish"], steps: &[BLOOM], ..FAMILY },
    Family { names: &["viking"], steps: &[BLOOM, DIGIT], ..FAMILY },
    Family {
        names: &["gemma4", "granite-embed-multi-311m"],
        steps: &[LINES],
        bos_forced: true,
        spaces_escaped: true,
        ..FAMILY
    },
];

/// All values of `tokenizer.ggml.pre` that are known.
pub(super) fn names() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|f| f.names).copied().collect()
}

/// The rule called `name`.
pub(super) fn family(name: &str) -> Result<&'static Family, Error> {
    let known = FAMILIES.iter().find(|f| f.names.contains(&name));
    known.ok_or_else(|| Error::UnknownPreTokenizer { name: name.to_owned() })
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
                    start = match found.pattern().as_usize() {
                        0 => found.end(),
                        _ => found.start() + spaces.len(&piece[found.range()], found.end() == piece.len()),
                    };
                    push(found.start()..start);
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
        let count = run.chars().count();
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
        for c in ['a', 'A', ' ', '7', '\n', '\'', '!', '\u{301}', '漢', '😀', '\u{3000}'] {
            let text = c.to_string().repeat((1 << 20) / c.len_utf8());
            for family in FAMILIES {
                let pieces = PreTokenizer::new(family).split(&text);
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
