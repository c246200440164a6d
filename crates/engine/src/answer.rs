//! Tokens of an answer, and the text that they make.

use std::ops::ControlFlow;

use model::Tokenizer;
use model::tokenizer::StreamDecoder;

use crate::request::{Request, StopReason};
use crate::stream::StopStrings;

/// What has been generated so far.
pub(crate) struct Answer {
    tokens_max: Option<usize>,
    ignore_end: bool,
    decoder: StreamDecoder,
    stops: StopStrings,
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn new(tokenizer: &Tokenizer, request: &Request) -> Answer {
        Answer {
            tokens_max: request.tokens_max,
            ignore_end: request.ignore_end,
            decoder: StreamDecoder::new(tokenizer),
            stops: StopStrings::new(&request.stop_strings),
            tokens: Vec::new(),
            text: String::new(),
        }
    }

    /// Tokens that may still come.
    pub(crate) fn left(&self) -> usize {
        self.tokens_max.map_or(usize::MAX, |max| max.saturating_sub(self.tokens.len()))
    }

    /// Takes the next token and passes on the text that it completes; gives the reason if it is the last.
    pub(crate) fn take(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        publish: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Option<StopReason> {
        self.tokens.push(token);
        if !self.ignore_end && tokenizer.is_end_of_generation(token) {
            return Some(StopReason::EndOfGeneration);
        }
        let piece = self.decoder.push(tokenizer, token);
        let (free, stopped) = self.stops.push(&piece);
        // Also without text: the caller may want to break.
        let cancelled = publish(&free).is_break();
        self.text.push_str(&free);
        if stopped {
            return Some(StopReason::StopString);
        }
        let length = (self.left() == 0).then_some(StopReason::Length);
        length.or(cancelled.then_some(StopReason::Cancelled))
    }

    /// Passes on what was held back, unless a stop string ended the text.
    pub(crate) fn flush(&mut self, stop: StopReason, publish: &mut dyn FnMut(&str) -> ControlFlow<()>) {
        if stop == StopReason::StopString {
            return;
        }
        let (mut rest, stopped) = self.stops.push(&self.decoder.finish());
        if !stopped {
            rest.push_str(&self.stops.finish());
        }
        if !rest.is_empty() {
            // The end has come anyway.
            let _ = publish(&rest);
            self.text.push_str(&rest);
        }
    }
}
