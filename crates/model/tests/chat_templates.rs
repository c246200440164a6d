//! The chat templates of seventy public models render to what Jinja2 renders, and hostile ones end with an error.

mod tokenizer_support;

use std::fs;

use fixtures::peer_suite::peer_suite_dir;
use model::chat::{Error, LocalTime, RenderInput, RenderOptions, Template, render};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};
use tokenizer_support::golden;

const NEW_YEAR: LocalTime = LocalTime { year: 2026, month: 1, day: 1, hour: 0, minute: 0, second: 0 };

fn sha256(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn seventy_public_templates_render_as_jinja2_does() {
    let dir = peer_suite_dir().join("templates");
    let conversations = golden("conversations.json");
    let expected = golden("template_renders.json");
    let tools = expected["tools"].as_array().unwrap();
    let options = RenderOptions { now: Some(NEW_YEAR), ..RenderOptions::default() };
    let (mut same, mut refused, mut better) = (0, 0, 0);
    let mut failures = Vec::new();
    for (name, entry) in expected["templates"].as_object().unwrap() {
        let source = fs::read_to_string(dir.join(name)).unwrap();
        assert_eq!(sha256(&source), entry["sha256"].as_str().unwrap(), "{name} is another template");
        let template = Template::new(&source).unwrap();
        for (i, sum) in entry["renders"].as_array().unwrap().iter().enumerate() {
            let messages = match i {
                0..=3 => &conversations[i],
                4 => &conversations[0],
                _ => &expected["tool_conversation"],
            };
            let input = RenderInput {
                messages: messages.as_array().unwrap(),
                tools: (i >= 4).then_some(tools.as_slice()),
                bos_token: "<s>",
                eos_token: "</s>",
                add_generation_prompt: true,
            };
            match (sum.as_str().unwrap(), template.render(&input, &options)) {
                ("error", Ok(_)) => better += 1,
                ("error", Err(Error { line, reason })) => {
                    assert!(line > 0 && !reason.is_empty(), "{name}, {i}: line {line}: {reason:?}");
                    refused += 1;
                }
                (sum, Ok(text)) if sha256(&text) == sum => same += 1,
                (_, result) => failures.push(format!("{name}, {i}: {result:?}")),
            }
        }
    }
    assert!(failures.is_empty(), "{} renders differ:\n{}", failures.len(), failures.join("\n"));
    assert_eq!((same, refused + better), (404, 16));
}

fn input(messages: &[Json]) -> RenderInput<'_> {
    RenderInput { messages, tools: None, bos_token: "<s>", eos_token: "</s>", add_generation_prompt: true }
}

fn text(template: &str) -> Result<String, Error> {
    let options = RenderOptions {
        extra: serde_json::from_value(json!({
            "enable_thinking": false,
            "data": {"b": [1, 2.0, true, null, "ä\"\n"], "a": {}},
            "messages": "not these",
        }))
        .unwrap(),
        now: Some(LocalTime { year: 2024, month: 7, day: 6, hour: 15, minute: 4, second: 5 }),
    };
    Template::new(template)?.render(&input(&[json!({"role": "user", "content": "Hi"})]), &options)
}

#[test]
fn a_failing_template_names_its_line() {
    let error = text("one\ntwo {{ raise_exception('no system role') }}").unwrap_err();
    assert_eq!(error.to_string(), "chat template line 2: no system role");
    let error = text("a\n\n{{ messages[0].content.nothing() }}").unwrap_err();
    assert_eq!(error.line, 3);
    assert!(error.reason.contains("nothing"), "{error}");
    let error = text("a\n{% if %}").unwrap_err();
    assert_eq!(error.line, 2);
    let error = text("a\n\n\n{{ missing.field }}").unwrap_err();
    assert_eq!(error.line, 4);
    assert!(error.reason.contains("missing"), "{error}");
}

#[test]
fn tojson_writes_what_python_writes() {
    assert_eq!(text("{{ data | tojson }}").unwrap(), r#"{"b": [1, 2.0, true, null, "ä\"\n"], "a": {}}"#);
    assert_eq!(
        text("{{ data | tojson(indent=2) }}").unwrap(),
        "{\n  \"b\": [\n    1,\n    2.0,\n    true,\n    null,\n    \"ä\\\"\\n\"\n  ],\n  \"a\": {}\n}"
    );
    assert_eq!(
        text("{{ {'b': '<&\\'>', 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}")
            .unwrap(),
        r#"{"a":"\u00e9","b":"<&'>"}"#
    );
    assert!(text("{{ nothing | tojson }}").is_err());
}

#[test]
fn values_print_as_python_prints_them() {
    assert_eq!(text("{{ true }} {{ none }} {{ 2.0 }} {{ 1 }} {{ undefined_name }}").unwrap(), "True None 2.0 1 ");
    assert_eq!(text("{{ [1, 'a', none] }} {{ {'k': false} }}").unwrap(), "[1, 'a', None] {'k': False}");
}

#[test]
fn now_is_what_the_caller_says() {
    assert_eq!(text("{{ strftime_now('%d %b %Y %H:%M') }}").unwrap(), "06 Jul 2024 15:04");
    let today = render("{{ strftime_now('%Y') }}", &input(&[])).unwrap();
    assert!(today.parse::<u32>().unwrap() >= 2025, "{today}");
}

#[test]
fn variables_can_be_added_but_not_replaced() {
    assert_eq!(text("{{ enable_thinking }} {{ messages[0].content }}").unwrap(), "False Hi");
    assert_eq!(text("{{ tools is defined }} {{ documents is defined }}").unwrap(), "False False");
}

#[test]
fn the_generation_tag_has_no_effect_but_on_white_space() {
    assert_eq!(text("a {%- generation -%} b {% endgeneration %}\nc\n").unwrap(), "ab c");
    assert_eq!(text("{% generation %}\n{% set x = 1 %}{% endgeneration %}{{ x }}").unwrap(), "1");
    assert_eq!(text("{% set generation = 2 %}{{ generation }}").unwrap(), "2");
}

#[test]
fn what_is_added_to_a_safe_text_is_escaped_as_in_jinja2() {
    let template =
        "{{ '<a>'|safe + '<b>' }}{{ '<c>' }}{{ '<d>'|safe }} {{ '\"' + \"'\" }}{{ '&'|safe + '\"' + \"'\" }}";
    assert_eq!(text(template).unwrap(), "<a>&lt;b&gt;<c><d> \"'&&#34;&#39;");
    assert_eq!(text("{{ '<a>' + '<b>' }}{{ '<c>'|safe }}").unwrap(), "<a><b><c>");
}

#[test]
fn python_methods_work() {
    let template = "{{ ' a b '.strip().split(' ')[-1] }} {{ 'x'.startswith('x') }} {{ data.get('z', 7) }} \
                    {% for k, v in data.items() %}{{ k }}{% endfor %} {{ 'ab'.replace('a', 'c').upper() }}";
    assert_eq!(text(template).unwrap(), "b True 7 ba CB");
}

#[test]
fn a_hostile_template_ends_with_an_error() {
    let hostile = [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}".to_owned(),
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}".to_owned(),
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}".to_owned(),
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}".to_owned(),
        "{{ 'a' * 1000000000000 }}".to_owned(),
        "{{ range(1000000000000) | list }}".to_owned(),
        "{% set n = namespace(s=[]) %}{% for i in range(40000) %}{% set n.s = [n.s] %}{% endfor %}{{ n.s | tojson }}"
            .to_owned(),
        format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(50_000), "]".repeat(50_000)),
        "{% if true %}".repeat(10_000),
        "{{ 2".to_owned() + &"**2".repeat(5000) + " }}",
        "{{ 1".to_owned() + &"[0]".repeat(40_000) + " }}",
        "{{ strftime_now('%') }}".to_owned(),
        "x".repeat((128 << 10) + 1),
    ];
    for template in hostile {
        let result = text(&template);
        assert!(result.is_err(), "{}: {} bytes", &template[..60.min(template.len())], result.unwrap().len());
    }
}

#[test]
fn deep_nesting_and_long_chains_do_not_overflow_the_stack() {
    let deep = [
        format!("{{{{ {}1 }}}}", "-".repeat(100_000)),
        format!("{{{{ 1{} }}}}", "|abs".repeat(30_000)),
        format!("{{{{ 1{} }}}}", " if 1 else 1".repeat(10_000)),
        format!("{{% if 1 %}}1{}{{% endif %}}", "{% elif 1 %}1".repeat(9_000)),
        "{% set n = namespace(s=[], t=[]) %}{% for i in range(20000) %}{% set n.s = [n.s] %}{% set n.t = [n.t] %}\
         {% endfor %}{{ n.s == n.t }}"
            .to_owned(),
    ];
    for template in deep {
        text(&template).unwrap();
    }
}

#[test]
fn a_long_conversation_is_not_taken_for_an_endless_loop() {
    let messages: Vec<Json> = (0..601)
        .map(|i| json!({"role": if i % 2 == 0 { "user" } else { "assistant" }, "content": "A line of words."}))
        .collect();
    let dir = peer_suite_dir().join("templates");
    // The first looks at all messages for each.
    for name in ["google-gemma-4-31B-it.jinja", "Qwen-Qwen3-0.6B.jinja"] {
        let text = render(&fs::read_to_string(dir.join(name)).unwrap(), &input(&messages)).unwrap();
        assert_eq!(text.matches("A line of words.").count(), 601, "{name}");
    }
}
