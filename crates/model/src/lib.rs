//! Architectures, weights, forward pass, tokenizer and chat template.

pub mod chat;
pub mod config;
mod error;
mod footprint;
mod forward;
mod kv;
mod latents;
mod limits;
pub mod moe;
mod options;
mod record;
mod rope;
mod runner;
mod sequences;
pub mod tokenizer;
mod weights;

use gguf::Gguf;
use memory::source::{ByteSource, FileSource, Reader};
use std::path::Path;
use std::sync::Arc;

pub use config::Config;
pub use error::Error;
pub use footprint::Footprint;
pub use kernels::attention::KvType;
pub use kernels::isa::Isa;
pub use kv::spill::Spilled;
pub use limits::{Limits, Rate};
pub use memory::backing::{Backing, Choice};
pub use memory::lanes::LaneOptions;
pub use memory::pager::{Stats, Window};
pub use memory::source::ReadOptions;
pub use moe::replay::RouteReplay;
pub use moe::streamed::{ExpertMemory, ExpertStats, GuessCounts};
pub use options::{DenseWeights, LoadOptions};
pub use record::StepRecord;
pub use residency::kv::SequenceId;
pub use runner::{Row, Runner, RunnerOptions};
pub use sequences::{KvDir, Opened, Opening};
pub use tokenizer::Tokenizer;

/// A model file's header, and the file or files that it belongs to.
pub struct Header {
    /// Metadata and tensor table of all files.
    pub gguf: Gguf,
    sources: Vec<Arc<dyn ByteSource>>,
}

impl Header {
    /// Reads the header of the model at `path` (the first shard of a split file, whose other shards lie beside it).
    pub fn read(path: &Path) -> Result<Header, Error> {
        Header::open(path, ReadOptions::default())
    }

    /// As [`Header::read`], with the weights to be read as `options` say.
    pub fn open(path: &Path, options: ReadOptions) -> Result<Header, Error> {
        let name = path.file_name().map_or_else(Default::default, |n| n.to_string_lossy());
        let files = gguf::split::files(&name);
        let files = files.map_err(|source| Error::Gguf { path: path.display().to_string(), source })?;
        let open = |name| -> Result<Arc<dyn ByteSource>, Error> {
            Ok(Arc::new(FileSource::open(&path.with_file_name(name), options)?))
        };
        Header::from_sources(files.into_iter().map(open).collect::<Result<_, _>>()?)
    }

    /// Reads the header of a model whose files, in order, are `sources`.
    pub fn from_sources(sources: Vec<Arc<dyn ByteSource>>) -> Result<Header, Error> {
        let bad = |path: &str, source| Error::Gguf { path: path.to_owned(), source };
        let mut parts = Vec::new();
        for source in &sources {
            let gguf = Gguf::read(&mut Reader::new(Arc::clone(source)), source.len_bytes());
            parts.push(gguf.map_err(|e| bad(source.name(), e))?);
        }
        let gguf = Gguf::merge(parts).map_err(|e| bad(sources.first().map_or("", |s| s.name()), e))?;
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
        self.sources.iter().map(|s| s.len_bytes()).sum()
    }

    /// The file's own chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.gguf.metadata.str("tokenizer.chat_template")
    }
}

/// A model's weights, its tokenizer and its chat template.
pub struct Model {
    /// Numbers from the header.
    pub config: Config,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// The file's own chat template, if it has one.
    pub chat_template: Option<String>,
    /// Bytes of weights in memory when all of them are in.
    pub weights_bytes: u64,
    pub(crate) family: &'static config::Family,
    pub(crate) weights: Arc<weights::Weights>,
    pub(crate) sources: Vec<Arc<dyn ByteSource>>,
}

impl Model {
    /// Opens the model at `path` (the first shard of a split file). The weights are read while the model is used already:
    /// a [`Runner`] waits for each layer when it comes to it. [`Model::ensure_all`] waits for all.
    pub fn open(path: &Path, options: &LoadOptions) -> Result<Model, Error> {
        Model::from_header(Header::open(path, ReadOptions { direct: options.direct_io })?, options)
    }

    /// Opens the model that `header` was read of.
    pub fn from_header(header: Header, options: &LoadOptions) -> Result<Model, Error> {
        let (family, mut config) = header.family_and_config()?;
        if let Some(used) = options.experts_used {
            config.use_fewer_experts(used)?;
        }
        let make = || Tokenizer::new(&header.gguf.metadata);
        // The tokenizer is made while names are bound and the pager begins to read: all of it comes before the first token.
        let (weights, tokenizer) = std::thread::scope(|scope| {
            let made = std::thread::Builder::new().name("airs-tokenizer".to_owned()).spawn_scoped(scope, make);
            let weights = weights::share(&header.gguf, &header.sources, family, &config, options);
            let tokenizer = match made {
                Ok(made) => made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                // A system that gives no thread.
                Err(_) => make(),
            };
            (weights, tokenizer)
        });
        let weights = weights?;
        Ok(Model {
            tokenizer: tokenizer?,
            chat_template: header.chat_template().map(str::to_owned),
            weights_bytes: weights.used_bytes,
            family,
            config,
            weights,
            sources: header.sources,
        })
    }

    /// What tells the model's content from others in this process.
    pub(crate) fn identity(&self) -> String {
        let files = self.sources.iter().map(|s| s.identity().map_or_else(|| s.name().to_owned(), |i| format!("{i:?}")));
        files.collect::<Vec<_>>().join(" ")
    }

    /// Opens the model at `path` and waits until all weights are in; `progress` gets (bytes in memory, bytes in all).
    pub fn load(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Model, Error> {
        let model = Model::open(path, &LoadOptions::default())?;
        model.ensure_all(progress)?;
        Ok(model)
    }

    /// Waits until all weights are in; `progress` gets (bytes in memory, bytes in all).
    pub fn ensure_all(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Error> {
        for stage in 0..self.weights.stages() {
            self.weights.ensure(stage)?;
            let stats = self.stats();
            progress(stats.present_bytes, stats.total_bytes);
        }
        Ok(())
    }

    /// Ends the waits for weights that are under way, in whatever thread, with an error.
    pub fn interrupt(&self) {
        self.weights.interrupt();
    }

    /// From now on no weights are read before someone waits for them. Gives the bytes that are still missing.
    pub fn stop_read_ahead(&self) -> u64 {
        self.weights.stop_ahead()
    }

    /// What has been read and waited for so far.
    pub fn stats(&self) -> Stats {
        self.weights.stats()
    }

    /// Bytes read from the file or files so far.
    pub fn read_bytes(&self) -> u64 {
        self.stats().read_bytes
    }

    /// The share of the matrices' place that is in memory now, if the system tells; `None` where they are left to the page
    /// cache.
    pub fn dense_resident_share(&self) -> Option<f64> {
        self.weights.resident_share()
    }

    /// What happened to the experts, where they are in slots.
    pub fn expert_stats(&self) -> Option<ExpertStats> {
        self.weights.streamed.as_ref().map(moe::streamed::Streamed::stats)
    }

    /// The experts that are in slots, as (layer with experts, expert), the one that would go last first: to be remembered for
    /// [`Model::warm_experts`]. Empty where experts are not in slots.
    pub fn expert_order(&self) -> Vec<(u32, u32)> {
        self.weights.streamed.as_ref().map(moe::streamed::Streamed::order).unwrap_or_default()
    }

    /// Begins to read experts that a run before had at its end into free slots; how many. What is not under way when a forward
    /// pass begins stays where it is.
    pub fn warm_experts(&self, order: &[(u32, u32)]) -> usize {
        self.weights.streamed.as_ref().map_or(0, |streamed| streamed.warm(order))
    }

    /// Gives back the memory of all slots of experts but `slots`, as far as nothing uses them; the slots that are left.
    pub fn shrink_experts(&self, slots: usize) -> Option<usize> {
        self.weights.streamed.as_ref().map(|streamed| streamed.shrink(slots))
    }

    /// What holds the weights, if it is memory of our own.
    pub fn backing(&self) -> Option<Backing> {
        self.weights.region().map(memory::Region::backing)
    }

    /// Bytes of weights that the system has promised to keep in memory.
    pub fn pinned_bytes(&self) -> u64 {
        self.weights.region().map_or(0, |region| region.pinned_bytes() as u64)
    }

    /// Bytes of weights that are in memory now, by the kernel's word; `None` if they are not in memory of our own.
    pub fn resident_bytes(&self) -> Option<u64> {
        self.weights.region().map(memory::Region::resident_bytes)
    }

    /// KV cache bytes for one more token of context.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.config.kv_bytes_per_token()
    }
}
