//! Where an engine's guesses come from, by the flag.

use std::sync::Arc;

use engine::{Draft, Error, Speculate};
use model::{ExpertMemory, Header, Model, ReadOptions};
use residency::budget::Line;

use crate::failure::Failure;
use crate::flags::{Compute, Settings};
use crate::open::{Opened, label, locate};
use crate::planning::{load_options, runner_options};
use crate::terminal::{Progress, say};
use crate::values::Guess;

/// Sets up `opened` to guess as `guess` says.
pub(crate) fn set_up(
    settings: &Settings,
    compute: &Compute,
    guess: &Guess,
    opened: &mut Opened,
) -> Result<(), Failure> {
    if *guess != Guess::Off && opened.experts != ExpertMemory::Resident {
        // Every token that is checked asks for experts of its own, and those are what is waited for.
        say("--speculate is off while experts come from storage");
        return Ok(());
    }
    let speculate = match guess {
        Guess::Off => Speculate::Off,
        Guess::Lookup => Speculate::Lookup,
        Guess::Model(name) => Speculate::Draft(Box::new(draft(settings, compute, name, opened)?)),
    };
    opened.engine.set_speculation(speculate);
    Ok(())
}

/// Loads the draft model called `name`, from the same budget.
fn draft(settings: &Settings, compute: &Compute, name: &str, opened: &Opened) -> Result<Draft, Failure> {
    let path = locate(settings, name)?;
    let place = path.display().to_string();
    let fail = |e: Error| Failure::at(&place, e);
    let options = runner_options(compute, settings);
    let read = ReadOptions { direct: !compute.weights.no_direct_io };
    let header = Header::open(&path, read).map_err(|e| fail(e.into()))?;
    let footprint = header.footprint(&options, 1).map_err(|e| fail(e.into()))?;
    let owner = label(name, &path);
    let grant = |line, bytes| {
        let grant = opened.ledger.grant(line, &owner, bytes);
        grant.map_err(|full| fail(Error::Full { line, full }))
    };
    let scratch_bytes = footprint.scratch_bytes + footprint.scratch_bytes_per_token * opened.context as u64;
    let held = [
        grant(Line::Weights, footprint.weights_bytes)?,
        grant(Line::Metadata, footprint.metadata_bytes + footprint.row_table_bytes)?,
        grant(Line::Scratch, scratch_bytes)?,
    ];
    let _buffers = grant(Line::Io, footprint.io_bytes)?;
    let model = Model::from_header(header, &load_options(compute, model::ExpertMemory::Resident))
        .map_err(|e| fail(e.into()))?;
    let progress = Progress::bytes("loading the draft model");
    let loaded = model.ensure_all(&mut |done, total| progress.set(done, Some(total)));
    progress.clear();
    loaded.map_err(|e| fail(e.into()))?;
    let mut draft = Draft::new(Arc::new(model), opened.model(), &options).map_err(fail)?;
    held.into_iter().for_each(|grant| draft.hold(grant));
    draft.charge_to(&opened.ledger, &owner).map_err(fail)?;
    Ok(draft)
}
