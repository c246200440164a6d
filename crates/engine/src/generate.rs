//! Prompts in, answers out: prefill in chunks, then one token at a time.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use model::tokenizer::StreamDecoder;
use model::{Model, Row, Runner, RunnerOptions};

use residency::budget::{Grant, Ledger, Line};

use crate::Error;
use crate::account::Account;
use crate::sampler::{Sampler, Sampling};
use crate::session::Session;
use crate::stream::StopStrings;

/// Positions whose logits are held at once by [`Engine::logits`]: a large vocabulary has a mebibyte of them for each.
pub const LOGITS_ROWS_MAX: usize = 64;

/// A model that computes, and its sessions.
pub struct Engine {
    model: Arc<Model>,
    runner: Runner,
    chunk: usize,
    // After what it pays for: fields are dropped in order.
    account: Account,
}

/// What to generate.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// Token ids of the prompt, BOS included where the model wants one.
    pub prompt: &'a [u32],
    /// Tokens to generate at most; `None` until the model or the context ends it.
    pub tokens_max: Option<usize>,
    /// How to draw.
    pub sampling: Sampling,
    /// The text ends before the first of these.
    pub stop_strings: &'a [String],
}

/// What happens while a request is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress<'a> {
    /// Tokens of the prompt done, of how many.
    Prompt {
        /// Tokens done, reused ones included.
        done: usize,
        /// Tokens in all.
        total: usize,
    },
    /// Text that is final.
    Text(&'a str),
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model ended its answer.
    EndOfGeneration,
    /// As many tokens as asked for.
    Length,
    /// A stop string came.
    StopString,
    /// The context is full.
    Context,
    /// The caller wanted no more.
    Cancelled,
}

impl StopReason {
    /// The word that scripts see.
    pub fn name(self) -> &'static str {
        match self {
            StopReason::EndOfGeneration => "stop",
            StopReason::Length => "length",
            StopReason::StopString => "stop_string",
            StopReason::Context => "context",
            StopReason::Cancelled => "cancelled",
        }
    }
}

/// How long things took. What could not be measured is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timings {
    /// From the request to the first token.
    pub ttft_ms: Option<f64>,
    /// Tokens of the prompt that were computed (not reused).
    pub prompt_n: usize,
    /// Speed of these.
    pub prompt_per_second: Option<f64>,
    /// Tokens generated.
    pub predicted_n: usize,
    /// Speed of the tokens after the first; that one belongs to the prompt's time.
    pub predicted_per_second: Option<f64>,
}

/// A finished generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// Ids in order, the one that ended the generation included.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub stop: StopReason,
    /// Tokens of the prompt that were in the session's KV cache already.
    pub reused: usize,
    /// How long it took.
    pub timings: Timings,
}

impl Engine {
    /// An engine for `model`.
    pub fn new(model: Arc<Model>, options: &RunnerOptions) -> Result<Engine, Error> {
        let runner = Runner::new(Arc::clone(&model), options)?;
        Ok(Engine { model, runner, chunk: options.micro_batch.max(1), account: Account::default() })
    }

    /// Keeps a grant for as long as the engine exists: the weights', the scratch buffers'.
    pub fn hold(&mut self, grant: Grant) {
        self.account.hold(grant);
    }

    /// Keeps the grant of the buffers that weights are read into until the first step is done, for which all were needed.
    pub fn hold_while_loading(&mut self, grant: Grant) {
        self.account.hold_while_loading(grant);
    }

    /// From now on `ledger` grants all memory of keys and values before it is taken.
    pub fn charge_to(&mut self, ledger: &Ledger, owner: &str) -> Result<(), Error> {
        self.runner.charge_to(ledger, owner).map_err(|full| Error::Full { line: Line::Kv, full })
    }

    /// Takes the memory for all positions of `session` now, which else comes as it grows.
    pub fn reserve(&mut self, session: &Session) -> Result<(), Error> {
        Ok(self.runner.sequence_reserve(session.sequence)?)
    }

    /// Gives back the memory of keys and values that nothing is kept in.
    pub fn trim_kv(&mut self) {
        self.runner.kv_trim();
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The runner below, for measurements that need no session.
    pub fn runner(&mut self) -> &mut Runner {
        &mut self.runner
    }

    /// An empty session of at most `context_max` positions.
    pub fn open(&mut self, context_max: usize) -> Session {
        Session { sequence: self.runner.sequence_open(context_max), tokens: Vec::new(), context_max }
    }

    /// Gives a session's memory back.
    pub fn close(&mut self, session: Session) {
        self.runner.sequence_close(session.sequence);
    }

    /// Forgets what the session computed beyond the beginning that it shares with `prompt`; gives that beginning's length.
    fn rewind(&mut self, session: &mut Session, prompt: &[u32]) -> Result<usize, Error> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if prompt.len() > session.context_max {
            return Err(Error::PromptTooLong { prompt: prompt.len(), context: session.context_max });
        }
        let reused = self.runner.sequence_truncate(session.sequence, session.reusable(prompt));
        session.tokens.truncate(reused);
        Ok(reused)
    }

    /// Computes `tokens` behind the session's; gives the logits of those from place `from` on.
    fn extend(&mut self, session: &mut Session, tokens: &[u32], from: usize) -> Result<&[f32], Error> {
        let row = |(i, &token): (usize, &u32)| Row { sequence: session.sequence, token, logits: i >= from };
        let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
        let mut computed = self.runner.forward(&rows).map(drop);
        // Where the buffers of loading are in the way, loading is waited for.
        if matches!(computed, Err(model::Error::KvFull(_))) && self.account.loaded() {
            self.model.ensure_all(&mut |_, _| ())?;
            computed = self.runner.forward(&rows).map(drop);
        }
        computed?;
        // A step has been through all of them.
        self.account.loaded();
        session.tokens.extend_from_slice(tokens);
        Ok(self.runner.logits())
    }

    /// Computes `prompt` in a session of its own and shows the logits from position `from` on: position and logits to
    /// `each`, which may `Break`.
    pub fn logits(
        &mut self,
        prompt: &[u32],
        from: usize,
        each: &mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        let mut session = self.open(prompt.len());
        let result = self.logits_in(&mut session, prompt, from, each);
        self.close(session);
        result
    }

    fn logits_in(
        &mut self,
        session: &mut Session,
        prompt: &[u32],
        from: usize,
        each: &mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        self.rewind(session, prompt)?;
        let vocab_len = self.model.config.vocab_len;
        let mut done = 0;
        while done < prompt.len() {
            let len = if done < from { (from - done).min(self.chunk) } else { LOGITS_ROWS_MAX.min(self.chunk) };
            let end = (done + len).min(prompt.len());
            let wanted_from = from.saturating_sub(done);
            let logits = self.extend(session, &prompt[done..end], wanted_from)?;
            for (i, row) in logits.chunks_exact(vocab_len).enumerate() {
                if each(done + wanted_from + i, row).is_break() {
                    return Ok(());
                }
            }
            done = end;
        }
        Ok(())
    }

    /// Answers `request` in `session`. `progress` may `Break`: between chunks of the prompt and between tokens.
    pub fn generate(
        &mut self,
        session: &mut Session,
        request: &Request<'_>,
        progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Generated, Error> {
        let begin = Instant::now();
        let model = Arc::clone(&self.model);
        let reused = self.rewind(session, request.prompt)?;
        let mut sampler = Sampler::new(request.sampling.clone());
        request.prompt.iter().for_each(|&t| sampler.accept(t));
        let mut answer = Answer::new(&model, request);

        let total = request.prompt.len();
        let mut next = None;
        for chunk in request.prompt[reused..].chunks(self.chunk) {
            if progress(Progress::Prompt { done: session.tokens.len(), total }).is_break() {
                return Ok(answer.end(StopReason::Cancelled, reused, Timings::default()));
            }
            let is_last = session.tokens.len() + chunk.len() == total;
            let logits = self.extend(session, chunk, if is_last { chunk.len() - 1 } else { chunk.len() })?;
            if is_last && request.tokens_max != Some(0) {
                next = Some(sampler.sample(logits)?);
            }
        }
        let first = Instant::now();
        let (prompt_n, prompt_s) = (total - reused, (first - begin).as_secs_f64());
        let mut cancelled = progress(Progress::Prompt { done: total, total }).is_break();

        let mut stop = StopReason::Length;
        while let Some(token) = next.take() {
            sampler.accept(token);
            if let Some(reason) = answer.take(token, progress, &mut cancelled) {
                stop = reason;
            } else if cancelled {
                stop = StopReason::Cancelled;
            } else if session.tokens.len() == session.context_max {
                stop = StopReason::Context;
            } else {
                next = Some(sampler.sample(self.extend(session, &[token], 0)?)?);
            }
        }
        answer.flush(stop, progress);
        let predicted_n = answer.tokens.len();
        let timings = Timings {
            ttft_ms: (predicted_n > 0).then_some(prompt_s * 1e3),
            prompt_n,
            prompt_per_second: rate(prompt_n, prompt_s),
            predicted_n,
            predicted_per_second: rate(predicted_n.saturating_sub(1), first.elapsed().as_secs_f64()),
        };
        Ok(answer.end(stop, reused, timings))
    }
}

/// Things per second, if there were any and the time could be told from none.
fn rate(n: usize, seconds: f64) -> Option<f64> {
    (n > 0 && seconds > 0.0).then(|| n as f64 / seconds)
}

/// What has been generated so far.
struct Answer<'m> {
    model: &'m Model,
    tokens_max: Option<usize>,
    decoder: StreamDecoder<'m>,
    stops: StopStrings,
    tokens: Vec<u32>,
    text: String,
}

impl<'m> Answer<'m> {
    fn new(model: &'m Model, request: &Request<'_>) -> Self {
        Answer {
            model,
            tokens_max: request.tokens_max,
            decoder: StreamDecoder::new(&model.tokenizer),
            stops: StopStrings::new(request.stop_strings),
            tokens: Vec::new(),
            text: String::new(),
        }
    }

    /// Takes the next token and passes on the text that it completes; gives the reason if it is the last.
    fn take(
        &mut self,
        token: u32,
        progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
        cancelled: &mut bool,
    ) -> Option<StopReason> {
        self.tokens.push(token);
        if self.model.tokenizer.is_end_of_generation(token) {
            return Some(StopReason::EndOfGeneration);
        }
        let piece = self.decoder.push(token);
        let (free, stopped) = self.stops.push(&piece);
        // Also without text: the caller may want to break.
        *cancelled |= progress(Progress::Text(&free)).is_break();
        self.text.push_str(&free);
        if stopped {
            return Some(StopReason::StopString);
        }
        self.tokens_max.is_some_and(|max| self.tokens.len() >= max).then_some(StopReason::Length)
    }

    /// Passes on what was held back, unless a stop string ended the text.
    fn flush(&mut self, stop: StopReason, progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>) {
        if stop == StopReason::StopString {
            return;
        }
        let (mut rest, stopped) = self.stops.push(&self.decoder.finish());
        if !stopped {
            rest.push_str(&self.stops.finish());
        }
        if !rest.is_empty() {
            // The end has come anyway.
            let _ = progress(Progress::Text(&rest));
            self.text.push_str(&rest);
        }
    }

    fn end(self, stop: StopReason, reused: usize, timings: Timings) -> Generated {
        Generated { tokens: self.tokens, text: self.text, stop, reused, timings }
    }
}
