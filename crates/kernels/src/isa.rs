//! Which instruction sets this machine has.

/// A level of vector instructions, from the definition to the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust: the definition of every result.
    Scalar,
    /// x86-64 AVX2, FMA and F16C.
    Avx2,
    /// AVX2 with the 256-bit VNNI instructions.
    AvxVnni,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// arm64 NEON without dot products.
    Neon,
    /// arm64 NEON with `sdot`.
    NeonDot,
}
