//! The interactive part of `airs run`: line editing, history, and a conversation whose KV cache is kept from turn to turn.

use std::path::Path;

use engine::StopReason;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::run::Speaker;
use crate::failure::Failure;
use crate::prompt::{chat_tokens, message, raw_tokens};
use crate::relief::Watched;
use crate::terminal::{print, say};

const HELP: &str = "/clear forgets the conversation, /bye or Ctrl-D leaves, Ctrl-C stops an answer";

/// Talks until the user leaves.
pub(super) fn converse(watched: &Watched<'_>, speaker: &Speaker, history: &Path) -> Result<(), Failure> {
    let mut editor = DefaultEditor::new().map_err(|e| Failure::Run(format!("terminal: {e}")))?;
    // There is none the first time.
    let _ = editor.load_history(history);
    if speaker.template.is_none() {
        say("no chat template: every line is continued as it stands");
    }
    say(HELP);
    let mut messages = speaker.opening();
    loop {
        let line = match editor.readline(">>> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => break,
            Err(e) => return Err(Failure::Run(format!("terminal: {e}"))),
        };
        let text = line.trim();
        if text.is_empty() {
            continue;
        }
        // A history that cannot be kept is no reason to end the conversation.
        let _ = editor.add_history_entry(text);
        match text {
            "/bye" | "/exit" | "/quit" => break,
            "/clear" => {
                messages = speaker.opening();
                continue;
            }
            "/help" | "/?" => {
                say(HELP);
                continue;
            }
            _ => {}
        }
        let mut engine = watched.engine();
        let prompt = match &speaker.template {
            None => raw_tokens(engine.model(), text),
            Some(template) => {
                messages.push(message("user", text));
                chat_tokens(engine.model(), template, &messages)?
            }
        };
        match speaker.answer(&mut engine, prompt, true, &mut || ()) {
            Ok(answer) => {
                print("\n")?;
                if answer.stop == StopReason::Context {
                    say(&format!("the context of {} tokens is full; /clear makes room", speaker.context));
                }
                messages.push(message("assistant", &answer.text));
            }
            // Too long, most likely: the question is taken back and the conversation goes on.
            Err(Failure::Run(text)) => {
                say(&format!("{text}; /clear makes room"));
                messages.pop();
            }
            // It waited for weights when it was stopped.
            Err(Failure::Interrupted) => {
                messages.pop();
            }
            Err(other) => return Err(other),
        }
    }
    let _ = history.parent().map(std::fs::create_dir_all);
    let _ = editor.save_history(history);
    Ok(())
}
