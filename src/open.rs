//! From a model's name to an engine that holds it, with everything that it holds on the ledger.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use engine::{Engine, Error};
use library::{Library, Name};
use model::{ExpertMemory, Header, Model, ReadOptions};
use residency::budget::{Grant, Ledger, Line};
use residency::experts::Bank;
use residency::plan::Mode;

use crate::failure::Failure;
use crate::flags::{Compute, Settings};
use crate::interrupt::Stoppable;
use crate::lanes;
use crate::machine::Place;
use crate::planning::{Need, Planned, load_options, plan_for, runner_options};
use crate::terminal::{Progress, say, size};
use crate::warm;

/// A loaded model.
pub(crate) struct Opened {
    pub engine: Engine,
    /// What the user calls it.
    pub label: String,
    pub path: PathBuf,
    pub threads: usize,
    /// Positions of a session.
    pub context: usize,
    /// How the weights are held.
    pub mode: Mode,
    /// Where its experts live, and what they are.
    pub experts: ExpertMemory,
    pub bank: Bank,
    /// Bytes of a slice of an expert at most.
    pub slice_bytes: u64,
    /// What makes its answers others than the model's own.
    pub lossy: Vec<String>,
    /// What all of it was granted from.
    pub ledger: Ledger,
    /// From the file's name to an engine that is ready.
    pub load_ms: f64,
    // Until the process ends.
    _process: [Grant; 1],
}

impl Opened {
    pub(crate) fn model(&self) -> &Arc<Model> {
        self.engine.model()
    }

    /// Bytes of keys and values that a step at position `tokens` reads.
    pub(crate) fn kv_step_bytes(&mut self, tokens: usize) -> u64 {
        self.engine.runner().kv_bytes_per_token() * tokens as u64
    }

    /// Tells how the model runs: the mode is always said.
    pub(crate) fn say_mode(&mut self, more: &str) {
        let isa = self.engine.runner().isa();
        let weights = size(self.model().weights_bytes);
        let (threads, mode) = (self.threads, self.mode.name());
        let plural = if threads == 1 { "" } else { "s" };
        let experts = match self.experts {
            ExpertMemory::Resident => String::new(),
            ExpertMemory::Slots { slots, .. } => {
                let bytes = size(slots as u64 * self.bank.slot_bytes);
                format!(" · {slots} of {} experts in {bytes}", self.bank.slots_all())
            }
        };
        let lossy = if self.lossy.is_empty() { String::new() } else { format!(" · lossy: {}", self.lossy.join(", ")) };
        let more = format!("{experts}{lossy}{more}");
        say(&format!("{} · {mode} · {weights} weights · {isa} · {threads} thread{plural}{more}", self.label));
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

/// What the user calls the model `name` at `path`.
pub(crate) fn label(name: &str, path: &Path) -> String {
    match Name::parse(name) {
        Ok(Name::Path(_)) => path.file_name().map_or(name.to_owned(), |f| f.to_string_lossy().into_owned()),
        _ => name.to_owned(),
    }
}

/// Loads the model called `name` for `need`.
pub(crate) fn open(settings: &Settings, name: &str, compute: &Compute, need: Need) -> Result<Opened, Failure> {
    let path = locate(settings, name)?;
    let place = path.display().to_string();
    let begin = Instant::now();
    let options = runner_options(compute, settings);
    // Before the header is there: what it takes belongs to the metadata.
    let here = Place::here();
    let read = ReadOptions { direct: !compute.weights.no_direct_io };
    let header = Header::open(&path, read).map_err(|e| Failure::at(&place, e))?;
    let lanes = |slice_bytes| {
        let find = || lanes::find(&settings.library.home, &path, slice_bytes);
        lanes::choose(compute.weights.experts.io_threads, find)
    };
    let planned = plan_for(&header, &options, compute.budget.memory, need, &here, &compute.weights, lanes)
        .map_err(|e| Failure::at(&place, e))?;
    planned.check(compute).map_err(|failure| failure.about(&place))?;

    let label = label(name, &path);
    let ledger = Ledger::new(planned.budget_bytes);
    memory::program::pin(planned.plan.bytes.weights);
    let process = ledger.charge_unavoidable(Line::Base, "", planned.plan.bytes.base);
    let engine = load(header, &place, &ledger, &label, &planned, compute, &options)?;
    warm::begin(settings, &path, engine.model());
    Ok(Opened {
        engine,
        label,
        path,
        threads: options.threads,
        context: planned.plan.context as usize,
        // What was refused runs if it is forced to, as far as memory goes.
        mode: match (planned.plan.mode, planned.experts) {
            (Mode::Refused, ExpertMemory::Resident) => Mode::Resident,
            (Mode::Refused, ExpertMemory::Slots { .. }) => Mode::Streamed,
            (mode, _) => mode,
        },
        experts: planned.experts,
        slice_bytes: planned.footprint.expert_slice_bytes,
        bank: planned.footprint.bank,
        lossy: compute.weights.experts.lossy(),
        ledger,
        load_ms: begin.elapsed().as_secs_f64() * 1e3,
        _process: [process],
    })
}

/// Loads the model after everything that it will hold was granted, but for keys and values, which are as they come. Unless
/// the need is lazy it waits until all weights are there.
fn load(
    header: Header,
    place: &str,
    ledger: &Ledger,
    owner: &str,
    planned: &Planned,
    compute: &Compute,
    options: &engine::RunnerOptions,
) -> Result<Engine, Failure> {
    let bytes = &planned.plan.bytes;
    let fail = |e: Error| Failure::at(place, e);
    let grant = |line, bytes| ledger.grant(line, owner, bytes).map_err(|full| fail(Error::Full { line, full }));
    let held = [grant(Line::Weights, bytes.weights)?, grant(Line::Metadata, bytes.metadata)?];
    let experts = [grant(Line::Experts, bytes.experts)?, grant(Line::Io, planned.expert_io_bytes())?];
    let mut buffers = Some(grant(Line::Io, planned.footprint.io_bytes)?);
    let model =
        Model::from_header(header, &load_options(compute, planned.experts)).map_err(|e| Failure::at(place, e))?;
    // Where there is no room for the buffers beside the rest, all weights must be there before.
    let room = ledger.free_bytes() >= bytes.scratch;
    if !planned.lazy || !room {
        let progress = Progress::bytes("loading");
        let loaded = model.ensure_all(&mut |done, total| progress.set(done, Some(total)));
        progress.clear();
        loaded.map_err(|e| Failure::at(place, e))?;
        buffers = None;
    }
    let scratch = grant(Line::Scratch, bytes.scratch)?;
    let mut engine = Engine::new(Arc::new(model), options).map_err(fail)?;
    held.into_iter().chain(experts).chain([scratch]).for_each(|grant| engine.hold(grant));
    buffers.into_iter().for_each(|grant| engine.hold_while_loading(grant));
    engine.charge_to(ledger, owner).map_err(fail)?;
    Ok(engine)
}
