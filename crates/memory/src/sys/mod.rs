//! System calls without a safe wrapper elsewhere.

pub(crate) mod cpu_time;
pub(crate) mod lines;
pub(crate) mod page_cache;
pub(crate) mod ring;
pub(crate) mod slice;
pub(crate) mod uffd;
