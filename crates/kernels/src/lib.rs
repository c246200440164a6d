//! Block formats, panels, matrix products, attention and the thread pool.
//!
//! Every result is defined by the generic code here run with [`simd::Scalar`]: integer dot products are exact, and
//! each float result is one lane's chain of correctly rounded operations in a fixed order. The other instruction sets
//! run the same code with wider registers, so they give the same bits, whatever the batch or the number of threads.

pub mod activations;
pub mod attention;
pub mod isa;
pub mod limits;
pub mod math;
pub mod matmul;
pub mod ops;
pub mod quant;
pub mod simd;
pub mod threads;

/// Rows of a weight matrix that are interleaved: one per lane of a 512-bit vector.
pub const PANEL_ROWS: usize = 16;
