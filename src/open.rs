//! From a model's name to an engine that holds it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use engine::{Engine, RunnerOptions};
use library::{Library, Name};
use model::Model;

use crate::failure::Failure;
use crate::flags::{Compute, Settings};
use crate::interrupt::Stoppable;
use crate::terminal::{Progress, say, size};

/// How the weights are held.
pub(crate) const MODE: &str = "resident";

/// A loaded model.
pub(crate) struct Opened {
    pub engine: Engine,
    /// What the user calls it.
    pub label: String,
    pub path: PathBuf,
    pub threads: usize,
    /// From the file's name to an engine that is ready.
    pub load_ms: f64,
}

impl Opened {
    pub(crate) fn model(&self) -> &Arc<Model> {
        self.engine.model()
    }

    /// Tells how the model runs: the mode is always said.
    pub(crate) fn say_mode(&mut self, more: &str) {
        let isa = self.engine.runner().isa();
        let weights = size(self.model().weights_bytes);
        let threads = self.threads;
        let plural = if threads == 1 { "" } else { "s" };
        say(&format!("{} · {MODE} · {weights} weights · {isa} · {threads} thread{plural}{more}", self.label));
    }
}

/// The file that `name` means, pulled if it is not here.
pub(crate) fn locate(settings: &Settings, name: &str) -> Result<PathBuf, Failure> {
    let library = Library::new(settings.library.clone());
    let name = Name::parse(name)?;
    let progress = Progress::bytes("");
    let stoppable = Stoppable::begin();
    let path = library.ensure(&name, &mut |event| progress.library_event(event, &stoppable));
    progress.clear();
    Ok(path?)
}

/// Loads the model called `name`.
pub(crate) fn open(settings: &Settings, name: &str, compute: &Compute) -> Result<Opened, Failure> {
    let path = locate(settings, name)?;
    let begin = Instant::now();
    let model = load(&path)?;
    let threads = compute.threads();
    let options = RunnerOptions {
        threads,
        isa: settings.isa,
        micro_batch: compute.micro_batch,
        type_k: compute.type_k,
        type_v: compute.type_v,
    };
    let engine = Engine::new(Arc::new(model), &options).map_err(|e| Failure::at(&path.display().to_string(), e))?;
    let load_ms = begin.elapsed().as_secs_f64() * 1e3;
    let label = match Name::parse(name) {
        Ok(Name::Path(path)) => path.file_name().map_or(name.to_owned(), |f| f.to_string_lossy().into_owned()),
        _ => name.to_owned(),
    };
    Ok(Opened { engine, label, path, threads, load_ms })
}

fn load(path: &Path) -> Result<Model, Failure> {
    let progress = Progress::bytes("loading");
    let model = Model::load(path, &mut |done, total| progress.set(done, Some(total)));
    progress.clear();
    model.map_err(|e| Failure::at(&path.display().to_string(), e))
}
