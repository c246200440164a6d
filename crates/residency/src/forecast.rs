//! How fast a model will be, before it runs; and how well earlier forecasts did.
//!
//! A step that decodes reads all its weights once: it takes their bytes over the machine's read bandwidth, of which a
//! share is reached. A prompt multiplies: it takes its multiply-adds over the machine's rate, of which another share is
//! reached. The shares are what was measured on other machines until receipts of runs say what they are on this one.

/// What a machine can do, all threads together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Bytes of memory read in a second.
    pub read_bytes_per_second: f64,
    /// 8-bit multiply-adds in a second.
    pub int8_macs_per_second: f64,
    /// Bytes of storage read in a second; `None` if that was not measured.
    pub file_bytes_per_second: Option<f64>,
}

/// What a model asks of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Bytes of weights that a step reads.
    pub step_bytes: u64,
    /// Bytes of keys and values that it reads besides.
    pub kv_bytes: u64,
    /// Multiply-adds of the prompt.
    pub prompt_macs: u64,
    /// Bytes of the file before the first token.
    pub file_bytes: u64,
    /// Bytes of the file in each step: 0 unless weights are streamed.
    pub streamed_bytes: u64,
    /// Whether reading and computing the prompt overlap.
    pub overlaps: bool,
}

/// Shares of the machine's rates that are reached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shares {
    /// Of the read bandwidth, when decoding.
    pub decode: f64,
    /// Of the multiply-adds, in prompts.
    pub prefill: f64,
    /// Runs of the model that they come from; 0 for those of others and the built-in ones.
    pub receipts: usize,
}

impl Default for Shares {
    /// Medians over the models of docs/measuring.md.
    fn default() -> Self {
        Shares { decode: 0.78, prefill: 0.40, receipts: 0 }
    }
}

/// What a run did, beside what the machine could have done.
#[derive(Debug, Clone, PartialEq)]
pub struct Receipt {
    /// The model that ran.
    pub model: String,
    /// Bytes of weights (and keys and values) read in a second of decoding, over the read bandwidth.
    pub decode: Option<f64>,
    /// Multiply-adds in a second of the prompt, over the machine's rate.
    pub prefill: Option<f64>,
}

/// Receipts that count: machines change.
const RECEIPTS_MAX: usize = 8;

impl Shares {
    /// The shares that the latest receipts show: those of `model` if there are any; else those of all models, among which
    /// the built-in ones have a vote, for models differ.
    pub fn fit(receipts: &[Receipt], model: &str) -> Shares {
        let own: Vec<&Receipt> = receipts.iter().filter(|r| r.model == model).collect();
        let all: Vec<&Receipt> = receipts.iter().collect();
        let of = |built_in: f64, field: fn(&Receipt) -> Option<f64>| {
            let latest = |list: &[&Receipt]| -> Vec<f64> {
                list.iter().rev().filter_map(|r| field(r)).filter(|v| *v > 0.0).take(RECEIPTS_MAX).collect()
            };
            let own = latest(&own);
            if own.is_empty() { (0, median([latest(&all), vec![built_in]].concat())) } else { (own.len(), median(own)) }
        };
        let built_in = Shares::default();
        let (decode, prefill) = (of(built_in.decode, |r| r.decode), of(built_in.prefill, |r| r.prefill));
        Shares { receipts: decode.0.max(prefill.0), decode: decode.1, prefill: prefill.1 }
    }
}

/// The middle of some values, or the mean of the two in the middle.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
    values[low].midpoint(values[high])
}

/// A forecast. What there is no rate for is absent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// From the start to the first token, the file read from storage, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Tokens decoded in a second.
    pub predicted_per_second: Option<f64>,
}

/// How fast `work` will be.
pub fn forecast(work: &Work, rates: &Rates, shares: &Shares) -> Forecast {
    let memory_s = (work.step_bytes + work.kv_bytes) as f64 / (rates.read_bytes_per_second * shares.decode);
    let per_token_s = match (work.streamed_bytes, rates.file_bytes_per_second) {
        (0, _) => Some(memory_s),
        (bytes, Some(rate)) => Some(memory_s + bytes as f64 / rate),
        (_, None) => None,
    };
    let prompt_s = work.prompt_macs as f64 / (rates.int8_macs_per_second * shares.prefill);
    // A short prompt is one step: it reads the weights as a token does.
    let prompt_s = prompt_s.max(memory_s);
    let ttft_s = rates.file_bytes_per_second.map(|rate| {
        let file_s = work.file_bytes as f64 / rate;
        if work.overlaps { file_s.max(prompt_s) } else { file_s + prompt_s }
    });
    let finite = |value: f64| Some(value).filter(|v| v.is_finite() && *v > 0.0);
    Forecast {
        ttft_ms: ttft_s.and_then(|s| finite(s * 1e3)),
        predicted_per_second: per_token_s.and_then(|s| finite(1.0 / s)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates =
        Rates { read_bytes_per_second: 20e9, int8_macs_per_second: 400e9, file_bytes_per_second: Some(2e9) };
    const WORK: Work = Work {
        step_bytes: 400_000_000,
        kv_bytes: 0,
        prompt_macs: 120_000_000_000,
        file_bytes: 400_000_000,
        streamed_bytes: 0,
        overlaps: true,
    };
    const SHARES: Shares = Shares { decode: 0.8, prefill: 0.3, receipts: 0 };

    #[test]
    fn decoding_takes_the_bytes_of_a_step_and_the_first_token_the_longer_of_reading_and_computing() {
        let near = |a: Option<f64>, b: f64| (a.unwrap() - b).abs() < 1e-6 * b;
        let f = forecast(&WORK, &RATES, &SHARES);
        assert!(near(f.predicted_per_second, 40.0) && near(f.ttft_ms, 1000.0), "{f:?}");
        let sum = forecast(&Work { overlaps: false, ..WORK }, &RATES, &SHARES);
        assert!(near(sum.ttft_ms, 1200.0), "{sum:?}");
        let short = forecast(&Work { prompt_macs: 1, file_bytes: 0, ..WORK }, &RATES, &SHARES);
        assert!(near(short.ttft_ms, 25.0), "a step at least: {short:?}");
        let streamed = forecast(&Work { streamed_bytes: 400_000_000, ..WORK }, &RATES, &SHARES);
        assert!(near(streamed.predicted_per_second, 1.0 / 0.225), "{streamed:?}");
    }

    #[test]
    fn without_a_storage_rate_what_depends_on_it_is_absent() {
        let rates = Rates { file_bytes_per_second: None, ..RATES };
        let f = forecast(&Work { streamed_bytes: 1, ..WORK }, &rates, &SHARES);
        assert_eq!((f.ttft_ms, f.predicted_per_second), (None, None));
        assert!(forecast(&WORK, &rates, &SHARES).predicted_per_second.is_some());
    }

    #[test]
    fn shares_come_from_the_models_own_receipts_or_else_from_all_and_the_built_in_ones() {
        let receipt = |model: &str, decode| Receipt { model: model.to_owned(), decode: Some(decode), prefill: None };
        assert_eq!(Shares::fit(&[], "a"), Shares::default());
        let receipts = [receipt("a", 0.5), receipt("a", 0.7), receipt("a", 0.9), receipt("b", 0.1)];
        let own = Shares::fit(&receipts, "a");
        assert_eq!((own.decode, own.prefill, own.receipts), (0.7, Shares::default().prefill, 3));
        let others = Shares::fit(&receipts, "c");
        assert_eq!((others.decode, others.receipts), (0.7, 0), "of 0.1, 0.5, 0.7, the built-in one and 0.9");
        let many: Vec<Receipt> = (0..100).map(|i| receipt("a", if i < 50 { 0.1 } else { 0.8 })).collect();
        assert_eq!(Shares::fit(&many, "a").decode, 0.8, "the latest count");
    }
}
