//! What an engine has been granted.

use residency::budget::Grant;

/// Grants that last as long as the engine, and one that ends when all weights are there.
#[derive(Debug, Default)]
pub(crate) struct Account {
    fixed: Vec<Grant>,
    /// Of buffers that are there until all weights are.
    loading: Option<Grant>,
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
}
