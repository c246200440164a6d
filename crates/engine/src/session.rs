//! A request from its prompt to its answer.

use std::ops::ControlFlow;
use std::time::Instant;

use model::{Model, Opening, Row, SequenceId};

use crate::Error;
use crate::answer::Answer;
use crate::request::{Generated, Progress, Request, StopReason, Timings};
use crate::sampler::Sampler;
use crate::scheduler::Share;
use crate::speculative::Guesser;

/// Where what happens goes; `Break` ends the request.
pub(crate) type Publish<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// A request that is being worked on.
pub(crate) struct Session {
    pub(crate) request: Request,
    /// The prompt, as far as it was kept, and what was generated. Keys and values are there of its beginning.
    pub(crate) history: Vec<u32>,
    pub(crate) computed: usize,
    /// While it holds keys and values.
    pub(crate) sequence: Option<SequenceId>,
    pub(crate) guesser: Guesser,
    /// Guesses at what follows the history.
    pub(crate) guesses: Vec<u32>,
    sampler: Sampler,
    answer: Answer,
    dropped: usize,
    /// Tokens left out that the caller has not heard of.
    dropped_untold: usize,
    /// Tokens of the prompt that were there when it first began.
    reused: Option<usize>,
    /// Tokens of the prompt, as far as it was kept.
    prompt_len: usize,
    begin: Instant,
    /// When the prompt was computed.
    first: Option<Instant>,
}

impl Session {
    /// An error if the prompt cannot be answered in the request's context.
    pub(crate) fn new(model: &Model, mut request: Request, guesser: Guesser) -> Result<Session, Box<(Error, Guesser)>> {
        let history = match admissible(model, &mut request) {
            Ok(history) => history,
            Err(error) => return Err(Box::new((error, guesser))),
        };
        let dropped = request.prompt.len() - history.len();
        let mut sampler = Sampler::new(request.sampling.clone());
        history.iter().for_each(|&t| sampler.accept(t));
        Ok(Session {
            answer: Answer::new(&model.tokenizer, &request),
            prompt_len: history.len(),
            history,
            computed: 0,
            sequence: None,
            guesser,
            guesses: Vec::new(),
            sampler,
            dropped,
            dropped_untold: dropped,
            reused: None,
            begin: Instant::now(),
            first: None,
            request,
        })
    }

    /// What its sequence opens with.
    pub(crate) fn opening(&self) -> Opening<'_> {
        let Request { context_max, class, ref salt, .. } = self.request;
        Opening { tokens: &self.history, context_max, class, salt }
    }

    /// Keys and values of the first `reused` tokens are there, in `sequence`.
    pub(crate) fn joined(&mut self, sequence: SequenceId, reused: usize) {
        (self.sequence, self.computed) = (Some(sequence), reused);
        self.reused.get_or_insert(reused);
    }

    /// Keys and values are gone; gives the sequence that held them.
    pub(crate) fn released(&mut self) -> Option<SequenceId> {
        self.computed = 0;
        self.sequence.take()
    }

    pub(crate) fn pending(&self) -> usize {
        self.history.len() - self.computed
    }

    /// Guesses that there is room for, in the context and in what was asked for.
    pub(crate) fn guesses_max(&self) -> usize {
        let room = self.request.context_max.saturating_sub(self.history.len());
        if self.pending() == 1 { room.min(self.answer.left().saturating_sub(1)) } else { 0 }
    }

    /// The rows of `share`; logits are wanted of those after which a token may follow.
    pub(crate) fn rows(&self, share: Share) -> impl Iterator<Item = Row> + '_ {
        let (end, answers) = (self.computed + share.rows, self.answer.left() > 0);
        let last = end == self.history.len() && answers;
        let known = self.history[self.computed..end].iter().copied();
        let known = known.enumerate().map(move |(i, token)| (token, last && i + 1 == share.rows));
        let guessed = self.guesses[..share.drafts].iter().map(|&token| (token, true));
        let sequence = self.sequence;
        known.chain(guessed).filter_map(move |(token, logits)| Some(Row { sequence: sequence?, token, logits }))
    }

    /// The step with `share` is done and gave `logits`. Gives the reason if the request has ended.
    pub(crate) fn advance(
        &mut self,
        model: &Model,
        share: Share,
        logits: &[f32],
        publish: &mut Publish<'_>,
    ) -> Result<Option<StopReason>, Error> {
        self.computed += share.rows;
        if self.first.is_none() {
            let progress = Progress::Prompt { done: self.computed.min(self.prompt_len), total: self.prompt_len };
            if publish(progress).is_break() {
                return Ok(Some(StopReason::Cancelled));
            }
        }
        if self.pending() > 0 {
            return Ok(None);
        }
        self.first.get_or_insert_with(Instant::now);
        if self.answer.left() == 0 {
            return Ok(Some(StopReason::Length));
        }
        let mut accepted = 0;
        let stop = loop {
            let row = &logits[accepted * model.config.vocab_len..][..model.config.vocab_len];
            let token = self.sampler.sample(row)?;
            if let Some(stop) = self.take(model, token, publish) {
                break Some(stop);
            }
            if accepted == share.drafts || self.guesses[accepted] != token {
                break None;
            }
            // The guess was right: the next row is that of this token.
            accepted += 1;
            self.computed += 1;
        };
        match share.drafts {
            0 => self.guesser.gate.passed(),
            drafted => self.guesser.gate.checked(drafted, accepted),
        }
        self.guesses.clear();
        Ok(stop)
    }

    fn take(&mut self, model: &Model, token: u32, publish: &mut Publish<'_>) -> Option<StopReason> {
        self.sampler.accept(token);
        self.history.push(token);
        let text = &mut |text: &str| publish(Progress::Text(text));
        let stop = self.answer.take(&model.tokenizer, token, text);
        stop.or_else(|| (self.computed == self.request.context_max).then_some(StopReason::Context))
    }

    /// The context is full. Leaves something out of it if that was asked for; else the answer ends.
    pub(crate) fn shift(&mut self) -> bool {
        let Some(cut) = self.request.overflow.cut_history(self.history.len(), self.request.keep) else { return false };
        self.dropped += cut.len();
        self.dropped_untold += cut.len();
        self.history.drain(cut);
        self.guesser.restart();
        true
    }

    /// Tells what was left out since the last time.
    pub(crate) fn tell_dropped(&mut self, publish: &mut Publish<'_>) -> ControlFlow<()> {
        match std::mem::take(&mut self.dropped_untold) {
            0 => ControlFlow::Continue(()),
            dropped => publish(Progress::Dropped(dropped)),
        }
    }

    /// The end; gives what there is, and the guesser.
    pub(crate) fn end(mut self, stop: StopReason, publish: &mut Publish<'_>) -> (Generated, Guesser) {
        self.answer.flush(stop, &mut |text| publish(Progress::Text(text)));
        let reused = self.reused.unwrap_or(0);
        let (prompt_n, predicted_n) = (self.prompt_len - reused, self.answer.tokens.len());
        let prompt_s = self.first.map(|first| (first - self.begin).as_secs_f64());
        let answer_s = self.first.map(|first| first.elapsed().as_secs_f64());
        let timings = Timings {
            ttft_ms: prompt_s.filter(|_| predicted_n > 0).map(|s| s * 1e3),
            prompt_n,
            prompt_per_second: rate(prompt_n, prompt_s),
            predicted_n,
            predicted_per_second: rate(predicted_n.saturating_sub(1), answer_s),
        };
        let generated = Generated {
            tokens: self.answer.tokens,
            text: self.answer.text,
            stop,
            reused,
            dropped: self.dropped,
            drafted: self.guesser.gate.drafted,
            accepted: self.guesser.gate.accepted,
            timings,
        };
        (generated, self.guesser)
    }
}

/// The tokens that a request begins with.
fn admissible(model: &Model, request: &mut Request) -> Result<Vec<u32>, Error> {
    let (vocab_len, context) = (model.config.vocab_len, request.context_max);
    if request.prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if let Some(&token) = request.prompt.iter().find(|&&token| token as usize >= vocab_len) {
        return Err(model::Error::Token { token, vocab_len }.into());
    }
    let prompt = request.prompt.len();
    let cut = request.overflow.cut_prompt(prompt, request.keep, context);
    let cut = cut.ok_or(Error::PromptTooLong { prompt, context })?;
    let mut history = request.prompt.clone();
    history.drain(cut);
    Ok(history)
}

/// Things per second, if there were any and the time could be told from none.
fn rate(n: usize, seconds: Option<f64>) -> Option<f64> {
    seconds.filter(|&s| n > 0 && s > 0.0).map(|s| n as f64 / s)
}
