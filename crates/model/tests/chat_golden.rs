//! Chat templates render to the text that Jinja2 renders.

mod tokenizer_support;

use model::chat::{RenderInput, render};
use serde_json::Value as Json;
use tokenizer_support::{MODELS, golden, metadata, model_path, tokenizer};

#[test]
fn the_real_models_templates_render_as_jinja2_does() {
    let conversations = golden("conversations.json");
    let mut compared = 0;
    for name in MODELS {
        let expected = golden(&format!("{name}.json"));
        let path = model_path(name);
        let metadata = metadata(&path);
        let Some(template) = metadata.str("tokenizer.chat_template") else {
            assert_eq!(expected["chat"].as_array().unwrap().len(), 0, "{name}");
            continue;
        };
        let tokenizer = tokenizer(&path);
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
        for (i, messages) in conversations.as_array().unwrap().iter().enumerate() {
            let input = RenderInput {
                messages: messages.as_array().unwrap(),
                tools: None,
                bos_token: text(tokenizer.bos()),
                eos_token: text(tokenizer.eos()),
                add_generation_prompt: true,
            };
            match &expected["chat"][i] {
                Json::String(expected) => assert_eq!(&render(template, &input).unwrap(), expected, "{name}, {i}"),
                refused => panic!("{name}, {i}: {refused}"),
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 8);
}
