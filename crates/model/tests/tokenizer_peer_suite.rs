//! llama.cpp's own tokenizer suite: its vocabularies, texts and expected ids.

mod tokenizer_support;

use std::fs;

use fixtures::peer_suite::peer_suite_dir;
use tokenizer_support::tokenizer;

const VOCABULARIES: [&str; 14] = [
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
];

#[test]
fn every_text_of_the_peer_suite_gives_the_expected_ids() {
    let dir = peer_suite_dir();
    let mut failures = Vec::new();
    let mut compared = 0;
    for name in VOCABULARIES {
        let path = dir.join(format!("ggml-vocab-{name}.gguf"));
        let read = |ending: &str| fs::read_to_string(format!("{}.{ending}", path.display())).unwrap();
        let (texts, expected) = (read("inp"), read("out"));
        let tokenizer = tokenizer(&path);
        // In most files the last text is followed by a separator too.
        let separator = "\n__ggml_vocab_test__\n";
        let texts: Vec<&str> = texts.strip_suffix(separator).unwrap_or(&texts).split(separator).collect();
        let expected: Vec<Vec<u32>> =
            expected.lines().map(|l| l.split_whitespace().map(|id| id.parse().unwrap()).collect()).collect();
        assert_eq!(texts.len(), expected.len(), "{name}");
        for (text, expected) in texts.iter().zip(expected) {
            let ids = tokenizer.encode(text, false);
            if ids != expected {
                failures.push(format!("{name}: {text:?}\n  expected {expected:?}\n  got      {ids:?}"));
            }
            compared += 1;
        }
    }
    assert!(failures.is_empty(), "{} of {compared} texts differ:\n{}", failures.len(), failures.join("\n"));
    assert!(compared >= 14 * 40, "only {compared} texts");
}
