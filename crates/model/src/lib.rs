//! Architectures, weights, forward pass, tokenizer and chat template.

pub mod chat;
pub mod config;
mod error;
mod footprint;
mod forward;
mod limits;
mod rope;
mod runner;
pub mod tokenizer;
mod weights;

use gguf::Gguf;
use memory::Source;
use std::path::Path;

pub use config::Config;
pub use error::Error;
pub use footprint::Footprint;
pub use kernels::attention::KvType;
pub use kernels::isa::Isa;
pub use limits::{Limits, Rate};
pub use runner::{Row, Runner, RunnerOptions, SequenceId};
pub use tokenizer::Tokenizer;

/// A model file's header, and the file or files that it belongs to.
pub struct Header {
    /// Metadata and tensor table of all files.
    pub gguf: Gguf,
    sources: Vec<Source>,
}

impl Header {
    /// Reads the header of the model at `path` (the first shard of a split file, whose other shards lie beside it).
    pub fn read(path: &Path) -> Result<Header, Error> {
        let mut parts = Vec::new();
        let mut sources = Vec::new();
        let bad = |source| Error::Gguf { path: path.display().to_string(), source };
        let name = path.file_name().map_or_else(Default::default, |n| n.to_string_lossy());
        for name in gguf::split::files(&name).map_err(bad)? {
            let source = Source::open(&path.with_file_name(name))?;
            let gguf = Gguf::read(&mut source.reader(), source.len_bytes());
            parts.push(gguf.map_err(|e| Error::Gguf { path: source.path().to_owned(), source: e })?);
            sources.push(source);
        }
        let gguf = Gguf::merge(parts).map_err(bad)?;
        Ok(Header { gguf, sources })
    }

    /// The architecture's numbers.
    pub fn config(&self) -> Result<Config, Error> {
        self.family_and_config().map(|(_, config)| config)
    }

    fn family_and_config(&self) -> Result<(&'static config::Family, Config), Error> {
        // The architecture first: a file of another kind should hear that, and not which tensor it lacks.
        let vocab_len = self.gguf.tensor("token_embd.weight").and_then(|t| t.dims.get(1)).copied();
        let (family, config) = Config::new(&self.gguf.metadata, vocab_len.unwrap_or(0) as usize)?;
        if vocab_len.is_none() {
            return Err(Error::Tensor("token_embd.weight".into()));
        }
        Ok((family, config))
    }

    /// Length of the file or files in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.sources.iter().map(Source::len_bytes).sum()
    }

    /// The file's own chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.gguf.metadata.str("tokenizer.chat_template")
    }
}

/// A model's weights in memory, its tokenizer and its chat template.
pub struct Model {
    /// Numbers from the header.
    pub config: Config,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// The file's own chat template, if it has one.
    pub chat_template: Option<String>,
    /// Bytes of weights in memory.
    pub weights_bytes: u64,
    /// Bytes read from the file or files.
    pub read_bytes: u64,
    pub(crate) family: &'static config::Family,
    pub(crate) weights: weights::Weights,
}

impl Model {
    /// Loads the model at `path` (the first shard of a split file); `progress` gets (bytes done, bytes in all).
    pub fn load(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Model, Error> {
        let header = Header::read(path)?;
        let (family, config) = header.family_and_config()?;
        let tokenizer = Tokenizer::new(&header.gguf.metadata)?;
        let weights = weights::load(&header.gguf, &header.sources, family, &config, progress)?;
        Ok(Model {
            tokenizer,
            chat_template: header.chat_template().map(str::to_owned),
            weights_bytes: weights.used_bytes,
            read_bytes: weights.read_bytes,
            family,
            config,
            weights,
        })
    }

    /// KV cache bytes for one more token of context.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.config.kv_bytes_per_token()
    }
}
