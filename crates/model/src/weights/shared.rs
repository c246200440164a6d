//! One region for each content in a process: who opens a file that is open already gets the same weights.

use super::{Weights, bind::bind};
use crate::config::{Config, Family};
use crate::{Error, LoadOptions};
use gguf::Gguf;
use memory::source::{ByteSource, Identity};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What makes two opens the same: the content of all files, and how it is held.
type Key = (Vec<Identity>, LoadOptions);

static OPEN: Mutex<Open> = Mutex::new(Vec::new());

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
    if let Some(weights) = find(&lock(), &key) {
        return Ok(weights);
    }
    // Not under the lock: a file that stalls must not hold up those who open another. Whoever binds the same file meanwhile
    // and comes second takes what is there, and drops its own before much of it is read.
    let weights = new()?;
    let mut open = lock();
    if let Some(first) = find(&open, &key) {
        return Ok(first);
    }
    open.retain(|(_, weights)| weights.strong_count() > 0);
    open.push((key, Arc::downgrade(&weights)));
    Ok(weights)
}

type Open = Vec<(Key, Weak<Weights>)>;

fn lock() -> MutexGuard<'static, Open> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(open: &Open, key: &Key) -> Option<Arc<Weights>> {
    let mut same = open.iter().filter(|(k, _)| k == key).filter_map(|(_, weights)| weights.upgrade());
    same.find(|weights| weights.check().is_ok())
}
