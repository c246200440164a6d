//! How files get into the store.

mod hub;
#[cfg(unix)]
mod package;
mod remote;
