//! `airs pull`: fetch a model, or check the one that is here.

use library::{Library, Name};

use crate::failure::Failure;
use crate::flags::{Pull, Settings};
use crate::interrupt::Stoppable;
use crate::terminal::{Progress, print, say};

pub(crate) fn execute(args: &Pull, settings: &Settings) -> Result<(), Failure> {
    let library = Library::new(settings.library.clone());
    let name = Name::parse(&args.model)?;
    let progress = Progress::bytes("");
    let stoppable = Stoppable::begin();
    let pulled = library.pull(&name, &mut |event| progress.library_event(event, &stoppable));
    progress.clear();
    let pulled = pulled?;
    say(&format!("{name}: {}", if pulled.fetched { "fetched" } else { "already here, checked" }));
    print(&format!("{}\n", pulled.path.display()))
}
