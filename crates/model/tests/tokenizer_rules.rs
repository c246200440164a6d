//! The rules of the tokenizer on vocabularies made to order, and what happens with bad ones and with hostile texts.

mod tokenizer_support;

use gguf::{Array, Value};
use model::tokenizer::{Error, StreamDecoder};
use tokenizer_support::{MODELS, Vocabulary, model_path, tokenizer};

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// SentencePiece: unknown, BOS, EOS, then `texts` with falling scores.
fn sentence_piece(texts: &[&str]) -> Vocabulary {
    let all: Vec<&str> = ["<unk>", "<s>", "</s>"].iter().chain(texts).copied().collect();
    let scores = (0..all.len()).map(|i| -(i as f32)).collect();
    Vocabulary::new("llama", &all)
        .with("scores", Value::Array(Array::F32(scores)))
        .with_types(all.len(), &[(0, 2), (1, CONTROL), (2, CONTROL)])
}

#[test]
fn the_first_merge_in_the_list_goes_first() {
    let vocabulary = Vocabulary::bytes(&["ab", "bc", "abc"]).with_texts("merges", &["b c", "a b", "a bc"]);
    let tokenizer = vocabulary.load().unwrap();
    assert_eq!(tokenizer.encode("abc", false), [258]);
    assert_eq!(tokenizer.encode("ab", false), [256]);
    assert_eq!(tokenizer.encode("abbc", false), [256, 257]);
}

#[test]
fn of_equal_pairs_the_leftmost_is_merged() {
    let tokenizer = Vocabulary::bytes(&["aa"]).with_texts("merges", &["a a"]).load().unwrap();
    assert_eq!(tokenizer.encode("aaa", false), [256, u32::from(b'a')]);
    let tokenizer = sentence_piece(&["a", "aa"]).with("add_space_prefix", Value::Bool(false)).load().unwrap();
    assert_eq!(tokenizer.encode("aaa", false), [4, 3]);
}

#[test]
fn whole_words_pass_the_merges_by_only_where_the_rule_says_so() {
    let vocabulary = || Vocabulary::bytes(&["abc"]);
    assert_eq!(vocabulary().load().unwrap().encode("abc", false).len(), 3);
    let llama = vocabulary().with("pre", Value::String("llama-bpe".to_owned())).load().unwrap();
    assert_eq!(llama.encode("abc", false), [256]);
}

#[test]
fn sentence_piece_puts_a_space_first_and_decoding_takes_it_off() {
    let tokenizer = sentence_piece(&["▁", "a", "▁a", "b"]).load().unwrap();
    assert_eq!(tokenizer.encode("a", false), [5]);
    assert_eq!(tokenizer.encode("a a", false), [5, 5]);
    assert_eq!(tokenizer.decode(&[5, 5]), "a a");
    assert_eq!(tokenizer.decode(&[1, 5]), "a");
    assert_eq!(StreamDecoder::continuing(&tokenizer).push(&tokenizer, 5), " a");
    assert!(tokenizer.encode("", false).is_empty());
    // After a control token a text begins anew.
    assert_eq!(tokenizer.encode("</s>a", true), [2, 5]);
    let bare = sentence_piece(&["▁", "a", "▁a"]).with("add_space_prefix", Value::Bool(false)).load().unwrap();
    assert_eq!(bare.encode("a", false), [4]);
    assert_eq!(bare.decode(&[5]), " a");
}

#[test]
fn sentence_piece_falls_back_to_bytes_and_then_to_the_unknown_token() {
    let tokenizer = sentence_piece(&["▁", "<0xC3>", "<0xA9>"])
        .with_types(6, &[(0, 2), (1, CONTROL), (2, CONTROL), (4, BYTE), (5, BYTE)])
        .load()
        .unwrap();
    assert_eq!(tokenizer.encode("é", false), [3, 4, 5]);
    assert_eq!(tokenizer.decode(&[3, 4, 5]), "é");
    assert_eq!(tokenizer.encode("x", false), [3, 0]);
}

#[test]
fn control_tokens_are_parsed_on_demand_and_user_defined_ones_always() {
    let tokenizer =
        Vocabulary::bytes(&["<ctl>", "<usr>"]).with_types(258, &[(256, CONTROL), (257, USER_DEFINED)]).load().unwrap();
    assert_eq!(tokenizer.encode("<ctl><usr>", true), [256, 257]);
    let plain = tokenizer.encode("<ctl><usr>", false);
    assert_eq!((plain.len(), plain[5]), (6, 257));
    assert_eq!(tokenizer.token_bytes(256, false), b"");
    assert_eq!(tokenizer.token_bytes(256, true), b"<ctl>");
    assert_eq!(tokenizer.token_bytes(257, false), b"<usr>");
    assert_eq!(tokenizer.decode(&[256, 257]), "<usr>");
    assert_eq!(StreamDecoder::new(&tokenizer).with_special().push(&tokenizer, 256), "<ctl>");
}

#[test]
fn the_longest_special_token_is_found_first() {
    let tokenizer = Vocabulary::bytes(&["<a", "a><b>", "<a>"])
        .with_types(259, &[(256, CONTROL), (257, CONTROL), (258, CONTROL)])
        .load()
        .unwrap();
    assert_eq!(tokenizer.encode("<a><b>", true), [u32::from(b'<'), 257]);
    assert_eq!(tokenizer.encode("<a>", true), [258]);
    assert_eq!(tokenizer.encode("<a", true), [256]);
}

#[test]
fn phi_3_takes_white_space_after_special_tokens_with_them() {
    let entries = |name: &str| {
        let metadata = sentence_piece(&["▁", "a", "▁a", "<|end|>"])
            .with_types(7, &[(0, 2), (1, CONTROL), (2, CONTROL), (6, CONTROL)])
            .metadata();
        let mut entries: Vec<_> = metadata.iter().map(|(k, v)| (k.to_owned(), v.clone())).collect();
        entries.push(("general.name".to_owned(), Value::String(name.to_owned())));
        model::Tokenizer::new(&gguf::Metadata::from_entries(entries).unwrap()).unwrap()
    };
    assert_eq!(entries("Phi-3 mini").encode("<|end|>\n a", true), [6, 5]);
    assert_eq!(entries("Other").encode("<|end|> a", true), [6, 3, 5]);
}

#[test]
fn prompts_get_one_bos() {
    let tokenizer = sentence_piece(&["▁", "a", "▁a"]).load().unwrap();
    assert!(tokenizer.add_bos() && !tokenizer.add_eos());
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert_eq!(tokenizer.encode_prompt("a"), [1, 5]);
    assert_eq!(tokenizer.encode_prompt("<s>a"), [1, 5]);
    let without = sentence_piece(&["▁", "a", "▁a"]).with("add_bos_token", Value::Bool(false)).load().unwrap();
    assert_eq!(without.encode_prompt("a"), [5]);
}

#[test]
fn a_vocabulary_without_bos_adds_none_and_ends_by_its_known_texts() {
    let texts = ["<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|other|>"];
    let types = [(256, CONTROL), (257, CONTROL), (258, NORMAL), (259, CONTROL)];
    let tokenizer = Vocabulary::bytes(&texts)
        .with_types(260, &types)
        .with("add_bos_token", Value::Bool(true))
        .with("eos_token_id", Value::U32(257))
        .load()
        .unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.add_bos()), (None, false));
    assert_eq!((tokenizer.eos(), tokenizer.eot()), (Some(257), Some(256)));
    assert_eq!(tokenizer.ends_of_generation().collect::<Vec<_>>(), [256, 257, 258]);
    assert!(tokenizer.is_end_of_generation(256) && !tokenizer.is_end_of_generation(259));
    // Known texts are control tokens whatever the file says.
    assert_eq!(tokenizer.token_bytes(258, false), b"");
}

#[test]
fn gpt_oss_ends_at_return_and_call_but_not_at_end() {
    let texts = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>"];
    let types = [(256, CONTROL), (257, CONTROL), (258, CONTROL), (259, CONTROL)];
    let tokenizer = Vocabulary::bytes(&texts).with_types(260, &types).load().unwrap();
    assert_eq!(tokenizer.ends_of_generation().collect::<Vec<_>>(), [256, 257]);
    assert_eq!(tokenizer.decode(&[259]), "<|channel|>");
}

#[test]
fn streams_never_show_half_a_character_and_end_as_from_utf8_lossy_does() {
    let tokenizer = Vocabulary::bytes(&[]).load().unwrap();
    let mut decoder = StreamDecoder::new(&tokenizer);
    let parts: Vec<String> = "é😀".bytes().map(|b| decoder.push(&tokenizer, b.into())).collect();
    assert_eq!(parts, ["", "é", "", "", "", "😀"]);
    assert_eq!(decoder.finish(), "");
    // All strings of five bytes out of these: continuations, starts of each length, bytes that are never valid.
    let bytes = [b'a', 0x80, 0xa9, 0xc3, 0xe2, 0xed, 0xf0, 0xff];
    for n in 0..bytes.len().pow(5) {
        let string: Vec<u8> = (0..5).map(|i| bytes[n / bytes.len().pow(i) % bytes.len()]).collect();
        let mut decoder = StreamDecoder::new(&tokenizer);
        let mut text: String = string.iter().map(|&b| decoder.push(&tokenizer, b.into())).collect();
        text += &decoder.finish();
        assert_eq!(text, String::from_utf8_lossy(&string), "{string:x?}");
    }
}

#[test]
fn ids_outside_the_vocabulary_decode_to_nothing() {
    let tokenizer = Vocabulary::bytes(&[]).load().unwrap();
    assert_eq!(tokenizer.token_bytes(256, true), b"");
    assert_eq!(tokenizer.decode(&[u32::MAX, u32::from(b'a')]), "a");
    assert_eq!(tokenizer.token_text(256), None);
    assert_eq!((tokenizer.len(), tokenizer.is_empty()), (256, false));
}

#[test]
fn bad_vocabularies_are_refused_with_the_key_and_the_numbers() {
    let text = |s: &str| Value::String(s.to_owned());
    let cases: Vec<(Vocabulary, &str)> = vec![
        (Vocabulary::bytes(&[]).without("model"), "the file has no tokenizer.ggml.model"),
        (Vocabulary::bytes(&[]).without("tokens"), "the file has no tokenizer.ggml.tokens"),
        (Vocabulary::bytes(&[]).without("merges"), "the file has no tokenizer.ggml.merges"),
        (Vocabulary::bytes(&[]).with("model", Value::U32(1)), "tokenizer.ggml.model is not a text"),
        (Vocabulary::bytes(&[]).with("pre", Value::U32(1)), "tokenizer.ggml.pre is not a text"),
        (Vocabulary::bytes(&[]).with("tokens", text("a")), "tokenizer.ggml.tokens is not an array of texts"),
        (Vocabulary::bytes(&[]).with("merges", text("a b")), "tokenizer.ggml.merges is not an array of texts"),
        (Vocabulary::bytes(&[]).with_texts("tokens", &[]), "tokenizer.ggml.tokens has 0 elements"),
        (Vocabulary::bytes(&[]).with("token_type", text("a")), "tokenizer.ggml.token_type is not an array of integers"),
        (
            Vocabulary::bytes(&[]).with_types(3, &[]),
            "tokenizer.ggml.token_type has 3 elements, but there are 256 tokens",
        ),
        (sentence_piece(&["a"]).with("scores", text("a")), "tokenizer.ggml.scores is not an array of numbers"),
        (
            sentence_piece(&["a"]).with("scores", Value::Array(Array::F32(vec![0.0; 5]))),
            "tokenizer.ggml.scores has 5 elements, but there are 4 tokens",
        ),
        (
            Vocabulary::bytes(&[]).with("eos_token_id", Value::U32(256)),
            "tokenizer.ggml.eos_token_id is 256, but there are 256 tokens",
        ),
        (
            Vocabulary::bytes(&[]).with("bos_token_id", Value::U64(1 << 40)),
            "tokenizer.ggml.bos_token_id is 1099511627776, but there are 256 tokens",
        ),
        (Vocabulary::bytes(&[]).with("bos_token_id", text("a")), "tokenizer.ggml.bos_token_id is not a token id"),
        (Vocabulary::bytes(&[]).with("add_bos_token", Value::U8(1)), "tokenizer.ggml.add_bos_token is not a boolean"),
        (
            Vocabulary::bytes(&["ab"]).with_texts("merges", &["a b", "ab"]),
            "merge 1 is \"ab\", not two texts with a space between",
        ),
        (
            Vocabulary::bytes(&["ab"]).with_texts("merges", &["a b", "ab c"]),
            "merge 1 is \"ab c\", but \"abc\" is no token",
        ),
        (Vocabulary::bytes(&[]).with_texts("merges", &["a ¼½"]), "merge 0 is \"a ¼½\", but \"¼½\" is no token"),
        (Vocabulary::bytes(&[]).with_texts("merges", &[""]), "merge 0 is \"\", not two texts"),
    ];
    for (vocabulary, expected) in cases {
        let error = vocabulary.load().expect_err(expected).to_string();
        assert!(error.starts_with(expected), "{error:?} instead of {expected:?}");
    }
}

#[test]
fn unknown_rules_are_refused_with_the_known_ones() {
    let name = |key: &str| Vocabulary::bytes(&[]).with(key, Value::String("quux".to_owned())).load().unwrap_err();
    let error = name("pre");
    assert_eq!(error, Error::UnknownPreTokenizer { name: "quux".to_owned() });
    assert!(error.to_string().starts_with("unknown pre-tokenizer \"quux\" (known: default, gpt-2, "), "{error}");
    let error = name("model");
    assert_eq!(error, Error::UnknownModel { name: "quux".to_owned() });
    assert_eq!(error.to_string(), "unknown tokenizer model \"quux\" (known: gpt2, llama, gemma4)");
}

#[test]
fn odd_but_harmless_vocabularies_load() {
    // "None" as files write it, an empty text, one text twice, special tokens that are prefixes of each other.
    let tokenizer = Vocabulary::bytes(&["", "a", "<x", "<x>"])
        .with("eos_token_id", Value::U32(u32::MAX))
        .with("bos_token_id", Value::I32(-1))
        .with_types(260, &[(256, CONTROL), (257, NORMAL), (258, CONTROL), (259, CONTROL)])
        .load()
        .unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, None));
    assert_eq!(tokenizer.encode("a<x><x", true), [u32::from(b'a'), 259, 258]);
}

#[test]
fn megabytes_of_one_thing_are_tokenized_without_loss() {
    for name in MODELS {
        let tokenizer = tokenizer(&model_path(name));
        for unit in ["a", " ", "7", "\n", "😀"] {
            let text = unit.repeat((1 << 20) / unit.len());
            assert_eq!(tokenizer.decode(&tokenizer.encode(&text, false)), text, "{name}, {unit:?}");
        }
        // Control tokens by the thousand.
        let text = "<|im_start|>x<end_of_turn><|endoftext|>\n".repeat(5000);
        assert!(tokenizer.encode(&text, true).len() >= 10_000, "{name}");
    }
}
