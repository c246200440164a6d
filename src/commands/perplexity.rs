//! `airs perplexity`: how well a model foretells a text, by llama-perplexity's convention: the text is cut into chunks of
//! `-c` tokens (a rest is left out), each computed afresh, BOS in place of its first token where the model wants one,
//! and scored on the tokens of its second half.

use std::ops::ControlFlow;
use std::path::Path;

use model::Model;
use serde_json::json;

use crate::failure::Failure;
use crate::flags::{Perplexity, Settings};
use crate::interrupt::Stoppable;
use crate::open::open;
use crate::planning::Need;
use crate::terminal::{Progress, print, print_json};

/// Two tokens of context and two to score.
const CONTEXT_MIN: usize = 4;

pub(crate) fn execute(args: &Perplexity, settings: &Settings) -> Result<(), Failure> {
    let (name, file) = match (&args.model, &args.args[..]) {
        (Some(m), [file]) => (m.clone(), file),
        (None, [file]) => (library::DEFAULT_MODEL.to_owned(), file),
        (None, [m, file]) => (m.to_string_lossy().into_owned(), file),
        _ => return Err(Failure::Usage("MODEL is given twice: as an argument and as -m".to_owned())),
    };
    let c = args.context;
    if c < CONTEXT_MIN {
        return Err(Failure::Usage(format!("-c {c}: at least {CONTEXT_MIN} tokens are needed")));
    }
    let text = std::fs::read(file).map_err(|e| Failure::at(&file.display().to_string(), e))?;
    let text = String::from_utf8(text).map_err(|e| {
        Failure::at(&file.display().to_string(), format!("no UTF-8 at byte {}", e.utf8_error().valid_up_to()))
    })?;
    let mut opened = open(settings, &name, &args.compute, Need::all_logits(c))?;
    opened.say_mode("");
    let ids = tokens(opened.model(), &text);
    let chunks = ids.len() / c;
    if chunks == 0 {
        let reason = format!("{} tokens are fewer than one chunk of {c} (-c)", ids.len());
        return Err(Failure::at(&file.display().to_string(), reason));
    }
    let bos = Some(&opened.model().tokenizer).filter(|t| t.add_bos()).and_then(|t| t.bos());
    let progress = Progress::counting(&label(file), "chunks");
    let stoppable = Stoppable::begin();
    let mut score = Score::default();
    for (i, chunk) in ids.chunks_exact(c).enumerate() {
        progress.set(i as u64, Some(chunks as u64));
        let mut chunk = chunk.to_vec();
        if let Some(bos) = bos {
            chunk[0] = bos;
        }
        let mut flow = ControlFlow::Continue(());
        opened.engine.logits(&chunk, c / 2, &mut |position, logits| {
            if let Some(&next) = chunk.get(position + 1) {
                score.add(logits, next);
            }
            flow = stoppable.flow();
            flow
        })?;
        if flow.is_break() {
            progress.clear();
            return Err(Failure::Interrupted);
        }
    }
    progress.clear();
    let (scored, perplexity) = (score.scored, score.perplexity());
    if args.output.json() {
        return print_json(&json!({"tokens": ids.len(), "scored": scored, "perplexity": perplexity}));
    }
    print(&format!("perplexity {perplexity:.4} ({scored} of {} tokens scored, {chunks} chunks of {c})\n", ids.len()))
}

fn tokens(model: &Model, text: &str) -> Vec<u32> {
    let tokenizer = &model.tokenizer;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    bos.into_iter().chain(tokenizer.encode(text, false)).collect()
}

fn label(file: &Path) -> String {
    file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// Sum of the negative log-likelihoods.
#[derive(Debug, Default)]
struct Score {
    sum: f64,
    scored: usize,
}

impl Score {
    fn add(&mut self, logits: &[f32], next: u32) {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = logits.iter().map(|&v| f64::from(v - largest).exp()).sum();
        let this = logits.get(next as usize).map_or(f64::NEG_INFINITY, |&v| f64::from(v - largest));
        self.sum += total.ln() - this;
        self.scored += 1;
    }

    fn perplexity(&self) -> f64 {
        (self.sum / self.scored as f64).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::Score;

    #[test]
    fn equal_logits_have_the_perplexity_of_the_vocabulary() {
        let mut score = Score::default();
        for next in 0..8 {
            score.add(&[-3.5; 8], next);
        }
        assert!((score.perplexity() - 8.0).abs() < 1e-9);
        assert_eq!(score.scored, 8);
    }

    #[test]
    fn a_sure_and_right_model_has_perplexity_one() {
        let mut score = Score::default();
        score.add(&[100.0, 0.0, 0.0], 0);
        assert!((score.perplexity() - 1.0).abs() < 1e-9);
    }
}
