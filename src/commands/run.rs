//! `airs run`: answer a prompt, or chat.

use std::io::{self, IsTerminal, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use engine::{Engine, Generated, LIGHT_ROWS, Overflow, Progress as Step, Request, Sampling, StopReason};
use library::{CATALOG, Name};
use residency::pressure;
use serde_json::json;

use super::chat;
use crate::failure::Failure;
use crate::flags::{Run, Settings};
use crate::interrupt::Stoppable;
use crate::open::{Opened, open};
use crate::planning::Need;
use crate::prompt::{chat_tokens, message, raw_tokens, template};
use crate::relief::{self, Kernel, Watched, watched};
use crate::terminal::{Progress, print, print_json, say};
use crate::values::Guess;
use crate::{kv_files, metrics, receipts, speculate, warm};

pub(crate) fn execute(args: &Run, settings: &Settings) -> Result<(), Failure> {
    let (model, mut text) = model_and_prompt(args.model.as_deref(), &args.args, |p| Path::new(p).exists())?;
    if args.tokens.is_some() && text.is_some() {
        return Err(Failure::Usage("--tokens and a prompt exclude each other".to_owned()));
    }
    let chats = text.is_none() && args.tokens.is_none() && io::stdin().is_terminal();
    if chats && args.output.json() {
        return Err(Failure::Usage("-o json needs a prompt".to_owned()));
    }
    if !chats && text.is_none() && args.tokens.is_none() {
        text = Some(read_stdin()?);
    }
    // Guesses are rows whose logits are wanted.
    let logits_rows = if args.speculate == Guess::Off { 1 } else { LIGHT_ROWS };
    let mut opened = open(settings, &model, &args.compute, Need { logits_rows, ..Need::up_to(args.context) })?;
    speculate::set_up(settings, &args.compute, &args.speculate, &mut opened)?;
    kv_files::open(&args.kv, &mut opened.engine)?;
    let result = speak(args, settings, &mut opened, text, chats);
    kv_files::save(&args.kv, &mut opened.engine);
    result
}

/// Answers the prompt, or chats.
fn speak(
    args: &Run,
    settings: &Settings,
    opened: &mut Opened,
    text: Option<String>,
    chats: bool,
) -> Result<(), Failure> {
    let speaker = Speaker::new(args, opened.model(), opened.context)?;
    let sampling = &speaker.sampling;
    let seed = if sampling.temperature > 0.0 { format!(" · seed {}", sampling.seed) } else { String::new() };
    opened.say_mode(&seed);
    let trained = opened.model().config.context_len;
    if speaker.context > trained {
        say(&format!("-c {}: the model was trained for {trained} tokens", speaker.context));
    }
    if chats {
        let history = settings.library.home.join("history");
        let talk = |watched: &Watched<'_>| chat::converse(watched, &speaker, &history);
        let talked = watched(&mut opened.engine, Kernel::new(args.observe_kv), talk).0;
        warm::keep(settings, &opened.path, opened.model());
        return talked;
    }
    let prompt = match (&args.tokens, &text) {
        (Some(tokens), _) => tokens.0.clone(),
        (None, text) => speaker.prompt(opened.model(), text.as_deref().unwrap_or(""))?,
    };
    let streams = !args.output.json();
    opened.engine.runner().record_steps(args.metrics.is_some());
    let (model, mut first_read_bytes) = (Arc::clone(opened.model()), None);
    let mut first = || first_read_bytes = Some(model.read_bytes());
    let (answer, given) = watched(&mut opened.engine, Kernel::new(args.observe_kv), |watched| {
        speaker.answer(&mut watched.engine(), prompt.clone(), streams, &mut first)
    });
    let answer = answer?;
    receipts::keep(settings, opened, &answer.timings);
    warm::keep(settings, &opened.path, opened.model());
    if let Some(path) = &args.metrics {
        metrics::write(path, opened, &answer.timings)?;
    }
    if streams {
        print("\n")?;
    } else {
        print_json(&json_of(opened, &prompt, &answer, first_read_bytes, &given))?;
    }
    if answer.drafted > 0 {
        say(&format!("{} of {} guesses were right", answer.accepted, answer.drafted));
    }
    match answer.stop {
        StopReason::Cancelled => Err(Failure::Interrupted),
        StopReason::Context => {
            say(&format!("the context of {} tokens is full (-c)", speaker.context));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Which of the arguments is the model and which the prompt.
fn model_and_prompt(
    model: Option<&str>,
    args: &[String],
    exists: impl Fn(&str) -> bool,
) -> Result<(String, Option<String>), Failure> {
    let default = || library::DEFAULT_MODEL.to_owned();
    let (first, rest) = match (model, args) {
        (Some(model), []) => return Ok((model.to_owned(), None)),
        (Some(model), prompt) => return Ok((model.to_owned(), Some(prompt.join(" ")))),
        (None, []) => return Ok((default(), None)),
        (None, [first, rest @ ..]) => (first, rest),
    };
    let known = match Name::parse(first) {
        Ok(Name::Catalog { name, .. }) => CATALOG.iter().any(|e| e.name.eq_ignore_ascii_case(&name)),
        Ok(Name::Hub { .. }) => true,
        Ok(Name::Path(_)) => !first.contains(char::is_whitespace) || first.to_ascii_lowercase().ends_with(".gguf"),
        Err(_) => false,
    };
    if known || exists(first) {
        // A file in the current directory needs no "./" here.
        let model = if known { first.clone() } else { format!("./{first}") };
        let model = if first.starts_with('/') { first.clone() } else { model };
        return Ok((model, (!rest.is_empty()).then(|| rest.join(" "))));
    }
    let is_one_word = Name::parse(first).is_ok();
    if rest.is_empty() && !is_one_word || first.contains(char::is_whitespace) {
        return Ok((default(), Some(args.join(" "))));
    }
    Err(Failure::Usage(format!(
        "{first:?} is neither a known model nor a file; to ask the default model: airs run {} {:?}; other models: \
         hf.co/USER/REPO:QUANT or a path to a .gguf",
        library::DEFAULT_MODEL,
        args.join(" "),
    )))
}

/// A shorter prompt is over before anyone has read the bar.
const BAR_TOKENS_MIN: usize = 256;

/// All of standard input, without the line break that `echo` adds.
fn read_stdin() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).map_err(|e| Failure::Run(format!("standard input: {e}")))?;
    let mut text = String::from_utf8(bytes)
        .map_err(|e| Failure::Run(format!("standard input: no UTF-8 at byte {}", e.utf8_error().valid_up_to())))?;
    if text.ends_with('\n') {
        text.pop();
    }
    if text.is_empty() {
        return Err(Failure::Usage("the prompt on standard input is empty".to_owned()));
    }
    Ok(text)
}

/// How prompts become answers: the flags, resolved.
pub(super) struct Speaker {
    /// `None` continues text as it stands.
    pub template: Option<String>,
    pub system: Option<String>,
    pub sampling: Sampling,
    pub context: usize,
    tokens_max: Option<usize>,
    stop_strings: Vec<String>,
    ignore_end: bool,
    overflow: Overflow,
    keep: usize,
}

impl Speaker {
    fn new(args: &Run, model: &model::Model, context: usize) -> Result<Speaker, Failure> {
        let template = if args.raw { None } else { template(model, args.chat_template.as_deref())? };
        if template.is_none() && args.system.is_some() {
            let why = if args.raw { "--raw" } else { "a model without a chat template" };
            return Err(Failure::Usage(format!("--system has no meaning with {why}")));
        }
        Ok(Speaker {
            template,
            system: args.system.clone(),
            sampling: args.sample.resolve(),
            context,
            tokens_max: usize::try_from(args.n).ok(),
            stop_strings: args.stop.clone(),
            ignore_end: args.ignore_eos,
            overflow: args.context_overflow,
            keep: args.keep,
        })
    }

    /// The conversation before the user says anything.
    pub(super) fn opening(&self) -> Vec<model::chat::Message> {
        self.system.iter().map(|text| message("system", text)).collect()
    }

    fn prompt(&self, model: &model::Model, text: &str) -> Result<Vec<u32>, Failure> {
        let Some(template) = &self.template else { return Ok(raw_tokens(model, text)) };
        let mut messages = self.opening();
        messages.push(message("user", text));
        chat_tokens(model, template, &messages)
    }

    /// Generates an answer; with `streams` its text goes to standard output as it comes. `first` is called once the prompt is
    /// computed, before the first token.
    pub(super) fn answer(
        &self,
        engine: &mut Engine,
        prompt: Vec<u32>,
        streams: bool,
        first: &mut dyn FnMut(),
    ) -> Result<Generated, Failure> {
        let request = Request {
            tokens_max: self.tokens_max,
            sampling: self.sampling.clone(),
            stop_strings: self.stop_strings.clone(),
            ignore_end: self.ignore_end,
            overflow: self.overflow,
            keep: self.keep,
            ..Request::new(prompt, self.context)
        };
        let bar = Progress::counting("prompt", "tokens");
        let (model, bell) = (Arc::clone(engine.model()), engine.bell());
        let stoppable = Stoppable::waiting(move || {
            model.interrupt();
            bell.ring();
        });
        let mut failure = None;
        let answer = engine.generate(request, &mut |step| {
            match step {
                Step::Prompt { done, total } if total - done >= BAR_TOKENS_MIN => {
                    bar.set(done as u64, Some(total as u64))
                }
                Step::Prompt { done, total } if done == total => {
                    bar.clear();
                    first();
                }
                Step::Prompt { .. } | Step::Waiting => {}
                Step::Text(text) if streams => {
                    if let Err(e) = print(text) {
                        failure = Some(e);
                        return ControlFlow::Break(());
                    }
                }
                Step::Text(_) => {}
                Step::Dropped(dropped) => {
                    say(&format!("the context of {} tokens is full: {dropped} were left out of it", self.context));
                }
            }
            stoppable.flow()
        });
        bar.clear();
        match failure {
            Some(failure) => Err(failure),
            // A wait that was ended: how long nothing had come is worth knowing.
            None if stoppable.flow().is_break() => answer.map_err(|e| {
                say(&e.to_string());
                Failure::Interrupted
            }),
            None => Ok(answer?),
        }
    }
}

fn json_of(
    opened: &Opened,
    prompt: &[u32],
    answer: &Generated,
    first_read_bytes: Option<u64>,
    given: &[(pressure::Step, pressure::Given)],
) -> serde_json::Value {
    let t = &answer.timings;
    let mut value = json!({
        "prompt_tokens": prompt,
        "tokens": answer.tokens,
        "text": answer.text,
        "stop": answer.stop.name(),
        "mode": opened.mode.name(),
        "given_back": relief::json_of(given),
        "lossy": opened.lossy,
        "timings": {
            "load_ms": opened.load_ms,
            "ttft_ms": t.ttft_ms,
            "prompt_n": t.prompt_n,
            "prompt_per_second": t.prompt_per_second,
            "predicted_n": t.predicted_n,
            "predicted_per_second": t.predicted_per_second,
            // Before the first token.
            "bytes_read": first_read_bytes,
            "peak_rss_bytes": crate::machine::peak_rss_bytes(),
        },
    });
    // What happens only where it was asked for.
    if answer.drafted > 0 {
        value["timings"]["draft_n"] = json!(answer.drafted);
        value["timings"]["draft_n_accepted"] = json!(answer.accepted);
    }
    if answer.dropped > 0 {
        value["dropped_tokens"] = json!(answer.dropped);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(model: Option<&str>, args: &[&str]) -> Result<(String, Option<String>), ()> {
        let args: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
        let exists = |p: &str| p == "model-file" || p == "/abs/model file" || p == "my model.bin";
        model_and_prompt(model, &args, exists).map_err(drop)
    }

    fn is(model: &str, prompt: Option<&str>) -> Result<(String, Option<String>), ()> {
        Ok((model.to_owned(), prompt.map(str::to_owned)))
    }

    #[test]
    fn one_argument_is_a_model_if_it_can_be_one_and_else_a_prompt() {
        assert_eq!(split(None, &[]), is("smollm2", None));
        assert_eq!(split(None, &["smollm2"]), is("smollm2", None));
        assert_eq!(split(None, &["SmolLM2:latest"]), is("SmolLM2:latest", None));
        assert_eq!(split(None, &["some/where.gguf"]), is("some/where.gguf", None));
        assert_eq!(split(None, &["missing.gguf"]), is("missing.gguf", None));
        assert_eq!(split(None, &["hf.co/a/b:Q4_0"]), is("hf.co/a/b:Q4_0", None));
        assert_eq!(split(None, &["model-file"]), is("./model-file", None));
        assert_eq!(split(None, &["my model.bin"]), is("./my model.bin", None));
        assert_eq!(split(None, &["/abs/model file"]), is("/abs/model file", None));
        assert_eq!(split(None, &["What is 1/2?"]), is("smollm2", Some("What is 1/2?")));
        assert_eq!(split(None, &["Hello!"]), is("smollm2", Some("Hello!")));
    }

    #[test]
    fn a_single_word_that_could_be_a_misspelt_model_is_an_error_that_says_so() {
        assert_eq!(split(None, &["smolm2"]), Err(()));
        assert_eq!(split(None, &["smolm2", "Hello", "there"]), Err(()));
    }

    #[test]
    fn with_more_arguments_the_first_is_the_model() {
        assert_eq!(split(None, &["smollm2", "What", "is up?"]), is("smollm2", Some("What is up?")));
        assert_eq!(split(Some("x.gguf"), &["smollm2"]), is("x.gguf", Some("smollm2")));
        assert_eq!(split(Some("x.gguf"), &[]), is("x.gguf", None));
    }
}
