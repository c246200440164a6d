//! Command line and environment. Nothing else reads the environment; what it says goes down as [`Settings`].

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use engine::{Overflow, Sampling};
use kernels::isa::Isa;
use model::{Backing, Choice, DenseWeights, KvType};
use residency::experts::{CacheAsk, CacheSize, GuessWhen};

use crate::values::{
    Counts, Guess, Memory, Tokens, at_least_one, bytes, cache_size, counts, counts_from_one, guess, guess_experts,
    memory, not_negative, positive, share, tokens,
};

/// Runs GGUF language models on machines too small for them.
///
/// MODEL is a name of the catalog (smollm2), a repository of the hub (hf.co/USER/REPO:QUANT), or a path to a .gguf file
/// (the first one of a split model). Results go to standard output, everything else to standard error.
#[derive(Debug, Parser)]
#[command(name = "airs", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer a prompt, or chat.
    ///
    /// With one argument: a known name, a path or a hub name is the model; a text with spaces is a prompt for the
    /// default model. With more, the first is the model. Without a prompt: a chat if standard input is a terminal, else
    /// standard input is the prompt. Models without a chat template continue the text as it stands.
    Run(Run),
    /// Fetch a model into the store, or check the one that is there.
    Pull(Pull),
    /// List the models in the store.
    #[command(visible_alias = "ls")]
    List(List),
    /// Delete a model from the store.
    Rm(Rm),
    /// Show what a model is, from its header alone.
    Show(Show),
    /// Tell how a model would run, from its header alone: memory by line, context, speed.
    Plan(Plan),
    /// Load a model, fill its context, and compare the ledger with what the kernel says.
    Mem(Mem),
    /// Tell what this machine offers, what each thing is good for, and how to enable what is missing.
    Doctor(Doctor),
    /// Turn the text on standard input into token ids, without BOS.
    Tokenize(Tokenize),
    /// Print the largest logits after a list of tokens.
    Logits(Logits),
    /// Measure perplexity on a text file, as llama-perplexity does: chunks of -c tokens, scored on each second half.
    Perplexity(Perplexity),
    /// Tell where the time of an answer went, out of a file of `run --metrics`, and what would help most.
    Why(Why),
    /// Measure the speed of prompts and of generation, as llama-bench does.
    Bench(Bench),
}

#[derive(Debug, Args)]
#[command(override_usage = "airs run [OPTIONS] [MODEL] [PROMPT]")]
pub(crate) struct Run {
    /// Model; then all arguments are the prompt
    #[arg(short, long)]
    pub model: Option<String>,
    /// Model and prompt; each may be left out
    #[arg(value_name = "MODEL PROMPT")]
    pub args: Vec<String>,
    /// Take these token ids for the prompt: 1,2,3 or @FILE with a JSON list
    #[arg(long, value_parser = tokens, conflicts_with = "system")]
    pub tokens: Option<Tokens>,
    /// Tokens to generate at most; -1 until the model ends
    #[arg(short, long = "predict", visible_alias = "n-predict", default_value_t = -1, allow_negative_numbers = true)]
    pub n: i64,
    /// Tokens of context; 0 for as many as fit, up to what the model was trained for
    #[arg(short, long = "ctx-size", default_value_t = 0)]
    pub context: usize,
    /// System message
    #[arg(long, visible_alias = "system-prompt")]
    pub system: Option<String>,
    /// Continue the prompt as it stands, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// Chat template to use instead of the file's own: Jinja, or a file with it
    #[arg(long)]
    pub chat_template: Option<String>,
    /// Write what each step took to this file, as JSON lines; `airs why` reads it
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// End the answer before this text (can be repeated)
    #[arg(long)]
    pub stop: Vec<String>,
    /// Go on when the model ends its answer
    #[arg(long)]
    pub ignore_eos: bool,
    /// When the context is full: refuse (a prompt is an error, an answer ends), truncate (a prompt loses its oldest tokens),
    /// shift (an answer too: half of what is behind --keep is left out)
    #[arg(long, value_name = "HOW", default_value = "refuse", value_parser = overflow)]
    pub context_overflow: Overflow,
    /// Tokens at the beginning of the prompt that an overflow leaves
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub keep: usize,
    /// Guess tokens and check them in one step, which changes no token: off, lookup (what followed in the text before), or a
    /// smaller model with the same vocabulary
    #[arg(long, value_name = "HOW", default_value = "off", value_parser = guess)]
    pub speculate: Guess,
    /// In a chat, have the kernel tell which keys and values are not used (DAMON; needs root, and nobody else may use it)
    #[arg(long)]
    pub observe_kv: bool,
    #[command(flatten)]
    pub sample: Sample,
    #[command(flatten)]
    pub compute: Compute,
    #[command(flatten)]
    pub kv: KvFiles,
    #[command(flatten)]
    pub output: Output,
}

/// How tokens are drawn; order and defaults are llama.cpp's.
#[derive(Debug, Args)]
pub(crate) struct Sample {
    /// Temperature; 0 always takes the likeliest token
    #[arg(long, visible_alias = "temperature", default_value_t = 0.8, value_parser = not_negative)]
    temp: f32,
    /// Only the K likeliest tokens; 0 for all
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// Only the likeliest tokens that together have this probability; 1 for all
    #[arg(long, default_value_t = 0.95, value_parser = share)]
    top_p: f32,
    /// Only tokens with at least this share of the likeliest one's probability; 0 for all
    #[arg(long, default_value_t = 0.05, value_parser = share)]
    min_p: f32,
    /// Weaken tokens that were seen lately; 1 does not
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    repeat_penalty: f32,
    /// How many tokens count as lately
    #[arg(long, default_value_t = 64)]
    repeat_last_n: usize,
    /// Start of the random numbers; -1 for a new one each time (it is printed)
    #[arg(long, default_value_t = -1, allow_negative_numbers = true)]
    seed: i64,
}

impl Sample {
    /// As the engine wants it.
    pub(crate) fn resolve(&self) -> Sampling {
        Sampling {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            seed: u64::try_from(self.seed).unwrap_or_else(|_| new_seed()),
        }
    }
}

/// A seed of 32 bits, so that it is easily typed again.
fn new_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) >> 32
}

/// How to compute.
#[derive(Debug, Clone, Args)]
pub(crate) struct Compute {
    /// Threads; default: as many as processors may be used (affinity and CPU quota count)
    #[arg(short, long, value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Tokens computed at once at most [short: -ub]
    #[arg(long = "ubatch-size", value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub micro_batch: usize,
    /// Type of the keys in the KV cache: f16, q8_0, q4_0 [short: -ctk]
    #[arg(long = "cache-type-k", value_name = "TYPE", default_value = "f16", value_parser = kv_type)]
    pub type_k: KvType,
    /// Type of the values in the KV cache [short: -ctv]
    #[arg(long = "cache-type-v", value_name = "TYPE", default_value = "f16", value_parser = kv_type)]
    pub type_v: KvType,
    #[command(flatten)]
    pub budget: Budget,
    #[command(flatten)]
    pub weights: Weights,
}

/// Keys and values in files.
#[derive(Debug, Clone, Args)]
pub(crate) struct KvFiles {
    /// Keep the keys and values of what was computed in DIR, where the next run with the same beginning finds them
    #[arg(long, value_name = "DIR")]
    pub kv_dir: Option<PathBuf>,
    /// The most bytes in there; what was not used for longest goes first
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = bytes, requires = "kv_dir")]
    pub kv_dir_max: u64,
}

/// What a model may take.
#[derive(Debug, Clone, Args)]
pub(crate) struct Budget {
    /// Memory for everything: 3G, 1500MiB, or auto: what the machine and its control groups leave
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = memory)]
    pub memory: Memory,
    /// Run even where it is a risk: a budget above what can be had, a context that may not fit
    #[arg(long)]
    pub force: bool,
}

/// How weights are held and read; no bit of a result depends on it.
#[derive(Debug, Clone, Args)]
pub(crate) struct Weights {
    /// What holds the weights: best, huge (the system's pool of huge pages), thp, base (locked), unpinned
    #[arg(long, value_name = "KIND", default_value = "best", value_parser = backing)]
    pub backing: Choice,
    /// Whose memory that is: anon (our own), warm or mmap (the page cache)
    #[arg(long, value_name = "KIND", default_value = "anon", value_parser = dense_weights)]
    pub dense_weights: DenseWeights,
    /// Read files through the page cache
    #[arg(long)]
    pub no_direct_io: bool,
    #[command(flatten)]
    pub experts: Experts,
}

/// Experts of a model that has more of them than memory holds.
#[derive(Debug, Clone, Args)]
pub(crate) struct Experts {
    /// Memory for experts in MiB: auto (what --memory leaves), all, or so many; 0 is the least that works
    #[arg(long, value_name = "MIB", default_value = "auto", value_parser = cache_size)]
    pub cache_mb: CacheSize,
    /// The most that --cache-mb auto takes
    #[arg(long, value_name = "MIB")]
    pub cache_ceil_mb: Option<u64>,
    /// The least memory for experts that is worth running with
    #[arg(long, value_name = "MIB")]
    pub cache_floor_mb: Option<u64>,
    /// Lossy: route each token to only so many experts
    #[arg(long, value_name = "K", value_parser = at_least_one)]
    pub n_expert_used: Option<usize>,
    /// Lossy: skip an expert that is not in memory if it weighs less than F of an equal part of the token's experts (0 to 1)
    #[arg(long, value_name = "F", value_parser = share)]
    pub drop_cold_experts: Option<f32>,
    /// Whether to read experts before it is known that they are wanted: auto (where that gains time), always, off
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = guess_experts)]
    pub guess_experts: GuessWhen,
    /// Threads that read experts; default: what the drive gave most with when it was first tried
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub io_threads: Option<usize>,
}

impl Experts {
    /// What is wanted of the cache.
    pub(crate) fn cache_ask(&self) -> CacheAsk {
        let bytes = |mib: Option<u64>| mib.map(|mib| mib.saturating_mul(1 << 20));
        CacheAsk { size: self.cache_mb, ceil_bytes: bytes(self.cache_ceil_mb), floor_bytes: bytes(self.cache_floor_mb) }
    }

    /// The settings among these that change answers, as they are named in each of them.
    pub(crate) fn lossy(&self) -> Vec<String> {
        let used = self.n_expert_used.map(|used| format!("--n-expert-used {used}"));
        used.into_iter().chain(self.drop_cold_experts.map(|share| format!("--drop-cold-experts {share}"))).collect()
    }
}

impl Weights {
    /// Whether the weights are left to the page cache.
    pub(crate) fn in_page_cache(&self) -> bool {
        self.dense_weights != DenseWeights::Anon
    }
}

impl Compute {
    /// How many threads compute.
    pub(crate) fn threads(&self) -> usize {
        self.threads.unwrap_or_else(crate::machine::threads_default)
    }
}

/// How to print.
#[derive(Debug, Args)]
pub(crate) struct Output {
    /// Format of the result
    #[arg(short = 'o', long = "output", value_name = "FORMAT", default_value = "text")]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl Output {
    /// Whether the result is wanted as JSON.
    pub(crate) fn json(&self) -> bool {
        self.format == Format::Json
    }
}

#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// Model to fetch
    #[arg(default_value = library::DEFAULT_MODEL)]
    pub model: String,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Models to delete
    #[arg(required = true)]
    pub models: Vec<String>,
}

/// The model as an argument or as `-m`.
#[derive(Debug, Args)]
pub(crate) struct ModelArg {
    /// Model; default: the catalog's first
    model: Option<String>,
    /// The same as an option
    #[arg(short = 'm', long = "model", value_name = "MODEL", conflicts_with = "model")]
    m: Option<String>,
}

impl ModelArg {
    pub(crate) fn name(&self) -> &str {
        self.m.as_deref().or(self.model.as_deref()).unwrap_or(library::DEFAULT_MODEL)
    }
}

#[derive(Debug, Args)]
pub(crate) struct Show {
    #[command(flatten)]
    pub model: ModelArg,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    pub model: ModelArg,
    #[command(flatten)]
    pub sessions: Sessions,
    /// Tokens of the prompt whose first answer is forecast
    #[arg(short = 'p', long = "n-prompt", value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub prompt: usize,
    /// Plan for a machine sold with so much memory (2G, 4G, 8G, 16G) instead of this one
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub device: Option<u64>,
    #[command(flatten)]
    pub compute: Compute,
    #[command(flatten)]
    pub output: Output,
}

/// How much conversation at once.
#[derive(Debug, Args)]
pub(crate) struct Sessions {
    /// Tokens of context of each session; 0 for as many as fit, up to what the model was trained for
    #[arg(short, long = "ctx-size", default_value_t = 0)]
    pub context: usize,
    /// Sessions at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub parallel: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Mem {
    #[command(flatten)]
    pub model: ModelArg,
    #[command(flatten)]
    pub sessions: Sessions,
    #[command(flatten)]
    pub compute: Compute,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Tokenize {
    #[command(flatten)]
    pub model: ModelArg,
    /// Parse the text of special tokens as these tokens
    #[arg(long)]
    pub special: bool,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Logits {
    #[command(flatten)]
    pub model: ModelArg,
    /// Token ids: 1,2,3 or @FILE with a JSON list
    #[arg(long, value_parser = tokens)]
    pub tokens: Tokens,
    /// How many of the largest logits
    #[arg(long, default_value_t = 20, value_parser = at_least_one)]
    pub top: usize,
    /// After every token, not only after the last
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub compute: Compute,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Why {
    /// What `airs run --metrics` wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(override_usage = "airs perplexity [OPTIONS] [MODEL] <FILE>")]
pub(crate) struct Perplexity {
    /// Model
    #[arg(short, long)]
    pub model: Option<String>,
    /// Model, which may be left out, and the text to measure on
    #[arg(value_name = "MODEL FILE", required = true, num_args = 1..=2)]
    pub args: Vec<PathBuf>,
    /// Tokens of a chunk
    #[arg(short, long = "ctx-size", default_value_t = 512)]
    pub context: usize,
    #[command(flatten)]
    pub compute: Compute,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub model: ModelArg,
    /// Tokens of the prompt test; 0 skips it
    #[arg(short = 'p', long = "n-prompt", value_name = "N", default_value = "512", value_parser = counts)]
    pub prompt: Counts,
    /// Tokens of the generation test; 0 skips it
    #[arg(short = 'n', long = "n-gen", value_name = "N", default_value = "128", value_parser = counts)]
    pub generate: Counts,
    /// Sequences that generate at once
    #[arg(long, value_name = "N", default_value = "1", value_parser = counts_from_one)]
    pub parallel: Counts,
    /// Runs that count, after one that does not
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub repetitions: usize,
    /// Measure N sessions at once instead, on one engine; those after the first come when the one before has its first token,
    /// or all at once without a shared prefix
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "arrivals")]
    pub sessions: Option<usize>,
    /// Tokens that the prompts of all sessions begin with
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub shared_prefix: usize,
    /// Tokens behind them that each has for itself
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub unique: usize,
    /// Tokens that each generates
    #[arg(long = "gen", value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub generate_each: usize,
    /// Replay the sessions in FILE: CSV with a header or JSON lines; at_ms, prompt, gen, and optionally class, prefix (tokens
    /// that it shares) and group (with whom)
    #[arg(long, value_name = "FILE")]
    pub arrivals: Option<PathBuf>,
    /// With --sessions or --arrivals, have the kernel tell which keys and values are not used, as in a chat of `run`
    #[arg(long)]
    pub observe_kv: bool,
    /// Generate with the experts that a recorded trace (route_trace v1) tells, and nothing else
    #[arg(long, value_name = "FILE")]
    pub route_trace: Option<PathBuf>,
    /// Measure what this machine can do first, and print each result as a fraction of it
    #[arg(long)]
    pub limits: bool,
    #[command(flatten)]
    pub compute: Compute,
    #[command(flatten)]
    pub output: Output,
}

/// What the environment says.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Store and sources.
    pub library: library::Config,
    /// Instruction set to force.
    pub isa: Option<Isa>,
}

/// Reads command line and environment; on an error or a request for help, all is printed and the exit code given.
pub(crate) fn read(args: impl Iterator<Item = OsString>) -> Result<(Command, Settings), ExitCode> {
    let cli = parse(args).map_err(|e| {
        let code = u8::try_from(e.exit_code()).unwrap_or(2);
        // Where help cannot be printed there is nobody to tell.
        let _ = e.print();
        ExitCode::from(code)
    })?;
    let settings = settings().map_err(|text| crate::failure::Failure::Usage(text).report())?;
    Ok((cli.command, settings))
}

fn parse(args: impl Iterator<Item = OsString>) -> Result<Cli, clap::Error> {
    // As everywhere in this field, the last of several equal flags counts: wrappers append theirs.
    let mut command = Cli::command().mut_subcommands(|c| c.args_override_self(true));
    let matches = command.try_get_matches_from_mut(spell_out(args))?;
    Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut command))
}

/// llama.cpp's short flags of several letters, which the parser does not know, in their long form.
fn spell_out(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut literal = false;
    let spell = |arg: OsString| {
        literal |= arg == "--";
        let Some(text) = arg.to_str().filter(|_| !literal) else { return arg };
        let (flag, value) = text.find('=').map_or((text, ""), |at| text.split_at(at));
        match LONG_FORMS.iter().find(|(short, _)| *short == flag) {
            Some((_, long)) => format!("{long}{value}").into(),
            None => arg,
        }
    };
    args.map(spell).collect()
}

const LONG_FORMS: &[(&str, &str)] = &[("-ub", "--ubatch-size"), ("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")];

fn kv_type(name: &str) -> Result<KvType, String> {
    KvType::from_name(name).ok_or_else(|| {
        let known: Vec<_> = KvType::ALL.iter().map(|ty| ty.name()).collect();
        format!("known are {}", known.join(", "))
    })
}

fn backing(name: &str) -> Result<Choice, String> {
    if name == "best" {
        return Ok(Choice::Best);
    }
    Backing::ALL.into_iter().find(|b| b.name() == name).map(Choice::Only).ok_or_else(|| {
        let known: Vec<_> = Backing::ALL.iter().map(|b| b.name()).collect();
        format!("known are best, {}", known.join(", "))
    })
}

fn dense_weights(name: &str) -> Result<DenseWeights, String> {
    DenseWeights::ALL.into_iter().find(|d| d.name() == name).ok_or_else(|| {
        let known: Vec<_> = DenseWeights::ALL.iter().map(|d| d.name()).collect();
        format!("known are {}", known.join(", "))
    })
}

fn overflow(name: &str) -> Result<Overflow, String> {
    Overflow::ALL.into_iter().find(|o| o.name() == name).ok_or_else(|| {
        let known: Vec<_> = Overflow::ALL.iter().map(|o| o.name()).collect();
        format!("known are {}", known.join(", "))
    })
}

fn settings() -> Result<Settings, String> {
    let text = |name: &str| match env::var(name) {
        Ok(value) if !value.is_empty() => Ok(Some(value)),
        Ok(_) | Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => Err(format!("{name}: not UTF-8")),
    };
    let path = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = path("AIRS_HOME")
        .or_else(|| path("XDG_CACHE_HOME").map(|d| d.join("airs")))
        .or_else(|| path("HOME").map(|d| d.join(".cache").join("airs")))
        .ok_or("no place for the store: set AIRS_HOME")?;
    let mut library = library::Config::new(home);
    if let Some(endpoint) = text("HF_ENDPOINT")? {
        library.hub_endpoint = endpoint;
    }
    library.hub_token = text("HF_TOKEN")?;
    for name in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
        library.proxy = library.proxy.or(text(name)?);
    }
    library.no_proxy = text("NO_PROXY")?.or(text("no_proxy")?);
    library.ca_file = path("SSL_CERT_FILE");
    let isa = text("AIRS_ISA")?.map(|name| isa(&name)).transpose()?;
    Ok(Settings { library, isa })
}

fn isa(name: &str) -> Result<Isa, String> {
    let names = |list: Vec<Isa>| list.iter().map(|i| i.name()).collect::<Vec<_>>().join(", ");
    let isa = Isa::from_name(name)
        .ok_or_else(|| format!("AIRS_ISA={name}: no such instruction set; there are {}", names(Isa::ALL.to_vec())))?;
    if !isa.available() {
        let available = Isa::ALL.iter().copied().filter(|i| i.available()).collect();
        return Err(format!("AIRS_ISA={name}: this machine does not have it; it has {}", names(available)));
    }
    Ok(isa)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Command, clap::Error> {
        super::parse(["airs"].iter().chain(args).map(|&a| OsString::from(a))).map(|cli| cli.command)
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn llama_cpp_spellings_parse() {
        let args = [
            "run", "-m", "m.gguf", "-n", "-1", "-c", "512", "-t", "2", "-ub", "64", "--seed", "-1", "--temp", "0", "hi",
        ];
        let Ok(Command::Run(run)) = parse(&args) else { panic!("{:?}", parse(&args)) };
        assert_eq!((run.n, run.context, run.compute.threads, run.compute.micro_batch), (-1, 512, Some(2), 64));
        assert_eq!(run.args, ["hi"]);
        let Ok(Command::Bench(bench)) =
            parse(&["bench", "-p", "512", "-n", "0", "-r", "3", "-ub=7", "--parallel", "1,4,8"])
        else {
            panic!()
        };
        assert_eq!((bench.prompt.0, bench.generate.0, bench.parallel.0), (vec![512], vec![0], vec![1, 4, 8]));
        assert_eq!(bench.compute.micro_batch, 7);
    }

    #[test]
    fn the_last_of_equal_flags_counts() {
        let Ok(Command::Run(run)) = parse(&["run", "-n", "1", "-n", "2", "--stop", "a", "--stop", "b"]) else {
            panic!()
        };
        assert_eq!((run.n, run.stop), (2, vec!["a".to_owned(), "b".to_owned()]));
    }

    #[test]
    fn after_two_dashes_everything_is_text() {
        let Ok(Command::Run(run)) = parse(&["run", "smollm2", "--", "-ub"]) else { panic!() };
        assert_eq!(run.args, ["smollm2", "-ub"]);
    }

    #[test]
    fn values_out_of_range_are_usage_errors() {
        for args in [
            &["run", "--top-p", "1.5"][..],
            &["run", "--temp", "nan"],
            &["run", "--temp=-1"],
            &["run", "-t", "0"],
            &["run", "-ub", "0"],
            &["run", "--repeat-penalty", "0"],
            &["run", "--tokens", "1,x"],
            &["logits"],
            &["perplexity"],
            &["show", "a", "-m", "b"],
            &["run", "--memory", "much"],
            &["plan", "--device", "0"],
            &["run", "--backing", "gold"],
            &["run", "--dense-weights", "heavy"],
            &["run", "--context-overflow", "ignore"],
            &["run", "--speculate", ""],
            &["bench", "--sessions", "0"],
            &["bench", "--sessions", "2", "--arrivals", "f"],
            &["nonsense"],
        ] {
            assert_eq!(parse(args).map(|_| ()).map_err(|e| e.exit_code()), Err(2), "{args:?}");
        }
    }
}
