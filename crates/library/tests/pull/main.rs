//! How files get into the store.

mod common;
mod hub;
#[cfg(unix)]
mod package;
