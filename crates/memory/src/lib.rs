//! Mappings, regions, slots, byte sources, the pager and the lanes: the only system calls of the project, and all that is specific to
//! Linux. Knows bytes and ranges; what they mean is its callers' business.

pub mod backing;
pub mod blobs;
mod buffer;
pub mod damon;
mod error;
mod hugetlb;
pub mod lanes;
pub mod pager;
pub mod pressure;
pub mod processors;
pub mod program;
mod region;
pub mod slots;
pub mod source;
mod sys;

pub use buffer::{Buffer, HUGE_PAGE_BYTES};
pub use error::Error;
pub use region::{Region, Staged};

/// What `work` gives, or what it panicked with.
fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
    })
}
