//! Mappings, regions, byte sources and the pager: the only system calls of the project, and all that is specific to
//! Linux. Knows bytes and ranges; what they mean is its callers' business.

pub mod backing;
pub mod blobs;
mod buffer;
pub mod damon;
mod error;
mod hugetlb;
mod mapping;
pub mod pager;
pub mod pressure;
mod region;
pub mod source;
mod sys;

pub use buffer::{Buffer, HUGE_PAGE_BYTES};
pub use error::Error;
pub use mapping::Mapping;
pub use region::{Region, Staged};
