//! Block formats, panels, matrix products, attention and the thread pool.
pub mod isa;
