//! One region for each content in a process: who opens a file that is open already gets the same weights.

use super::{Weights, bind::bind};
use crate::config::{Config, Family};
use crate::{Error, LoadOptions};
use gguf::Gguf;
use memory::source::{ByteSource, Identity};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What makes two opens the same: the content of all files, and how it is held.
type Key = (Vec<Identity>, LoadOptions);

static OPEN: Mutex<Vec<(Key, Weak<Weights>)>> = Mutex::new(Vec::new());

/// The weights of `sources`: those that someone else holds, unless their reading failed, or new ones.
pub(crate) fn share(
    gguf: &Gguf,
    sources: &[Arc<dyn ByteSource>],
    family: &Family,
    config: &Config,
    options: &LoadOptions,
) -> Result<Arc<Weights>, Error> {
    let identities: Option<Vec<Identity>> = sources.iter().map(|s| s.identity()).collect();
    let new = || bind(gguf, sources, family, config, options).map(Arc::new);
    let Some(identities) = identities else { return new() };
    let key = (identities, *options);
    // Held while names are bound, so that two threads do not bind the same file.
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|(_, weights)| weights.strong_count() > 0);
    let same = open.iter().filter(|(k, _)| *k == key).filter_map(|(_, weights)| weights.upgrade());
    if let Some(weights) = { same }.find(|weights| weights.check().is_ok()) {
        return Ok(weights);
    }
    let weights = new()?;
    open.push((key, Arc::downgrade(&weights)));
    Ok(weights)
}
