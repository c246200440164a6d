//! The rules: which steps belong to which name, from the models' own `tokenizer.json` files as llama.cpp lists them.

use super::{Spaces, Step};
use crate::tokenizer::Error;

/// Models that split alike.
#[derive(Debug)]
pub(in crate::tokenizer) struct Family {
    pub(super) names: &'static [&'static str],
    pub(super) steps: &'static [Step],
    /// A word that is a token as it stands is taken so, merges or not.
    pub(in crate::tokenizer) whole_words: bool,
    /// Whether prompts begin with BOS where the file says nothing.
    pub(in crate::tokenizer) add_bos: bool,
    /// Whether prompts begin with BOS whatever the file says.
    pub(in crate::tokenizer) bos_forced: bool,
    /// The vocabulary is written in plain text with `▁` for spaces, not in GPT-2's bytes.
    pub(in crate::tokenizer) spaces_escaped: bool,
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

pub(super) static FAMILIES: &[Family] = &[
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
pub(in crate::tokenizer) fn names() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|f| f.names).copied().collect()
}

/// The rule called `name`.
pub(in crate::tokenizer) fn family(name: &str) -> Result<&'static Family, Error> {
    let known = FAMILIES.iter().find(|f| f.names.contains(&name));
    known.ok_or_else(|| Error::UnknownPreTokenizer { name: name.to_owned() })
}
