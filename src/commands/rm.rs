//! `airs rm`: delete models from the store.

use library::{Library, Name};

use crate::failure::Failure;
use crate::flags::{Rm, Settings};
use crate::terminal::{say, size};

pub(crate) fn execute(args: &Rm, settings: &Settings) -> Result<(), Failure> {
    let library = Library::new(settings.library.clone());
    for model in &args.models {
        let freed = library.remove(&Name::parse(model)?)?;
        say(&format!("{model}: deleted, {} freed", size(freed)));
    }
    Ok(())
}
