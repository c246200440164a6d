//! What an engine has been granted.

use residency::budget::{Grant, Ledger, Line};

use crate::Error;

/// Grants that last as long as the engine, and the one of the KV cache, which moves.
#[derive(Debug, Default)]
pub(crate) struct Account {
    fixed: Vec<Grant>,
    /// Of buffers that are there until all weights are.
    loading: Option<Grant>,
    /// `None`: nobody keeps a ledger.
    kv: Option<Grant>,
}

impl Account {
    pub(crate) fn hold(&mut self, grant: Grant) {
        self.fixed.push(grant);
    }

    /// Keeps the grant of the buffers that weights are read into while the engine works already.
    pub(crate) fn hold_while_loading(&mut self, grant: Grant) {
        self.loading = Some(grant);
    }

    /// All weights are there. Whether they were still coming.
    pub(crate) fn loaded(&mut self) -> bool {
        self.loading.take().is_some()
    }

    /// Keeps the KV cache, `bytes` large now, in `ledger` from here on.
    pub(crate) fn open_kv(&mut self, ledger: &Ledger, owner: &str, bytes: u64) -> Result<(), Error> {
        let grant = ledger.grant(Line::Kv, owner, bytes).map_err(|full| Error::Full { line: Line::Kv, full })?;
        self.kv = Some(grant);
        Ok(())
    }

    /// The KV cache is about to have `bytes`, unless it has more.
    pub(crate) fn kv(&mut self, bytes: u64) -> Result<(), Error> {
        match &mut self.kv {
            Some(grant) if bytes > grant.bytes() => {
                grant.resize(bytes).map_err(|full| Error::Full { line: Line::Kv, full })
            }
            _ => Ok(()),
        }
    }

    /// The KV cache has only `bytes` left.
    pub(crate) fn kv_shrunk(&mut self, bytes: u64) {
        if let Some(grant) = &mut self.kv {
            // Smaller is always granted.
            let _ = grant.resize(bytes.min(grant.bytes()));
        }
    }
}
