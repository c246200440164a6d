//! System calls without a safe wrapper elsewhere.

pub(crate) mod page_cache;
pub(crate) mod ring;
pub(crate) mod uffd;
