//! Which instruction sets this machine has, and running an [`Op`] with one of them.
//!
//! Invariants:
//! 1. An [`Isa`] other than `Scalar` reaches [`Level::run`] only as the field of a [`Level`], and a `Level` is only made
//!    by [`Level::new`], which checks [`Isa::available`].
#![allow(unsafe_code)]

use crate::simd::{Op, Scalar};

/// A level of vector instructions, from the definition to the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust: the definition of every result.
    Scalar,
    /// x86-64 AVX2, FMA and F16C.
    Avx2,
    /// AVX2 with the 256-bit VNNI instruction.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// arm64 NEON.
    Neon,
    /// NEON with the dot product instructions.
    NeonDot,
}

impl Isa {
    /// Every level, from the definition to the fastest.
    pub const ALL: &[Isa] = &[Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Neon, Isa::NeonDot];

    /// Name as `AIRS_ISA` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
            Isa::NeonDot => "neondot",
        }
    }

    /// The level called `name`.
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::ALL.iter().copied().find(|isa| isa.name() == name)
    }

    /// Whether this machine has it.
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => has_avx2() && (is_x86_feature_detected!("avxvnni") || has_avx512()),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => has_avx2() && has_avx512(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod"),
            // Levels of other processors.
            _ => false,
        }
    }

    /// The fastest that this machine has.
    pub fn detect() -> Isa {
        Isa::ALL.iter().copied().rev().find(|isa| isa.available()).unwrap_or(Isa::Scalar)
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("popcnt")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// An instruction set that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    isa: Isa,
    /// Whether AVX-VNNI comes in its VEX encoding.
    vex: bool,
}

impl Level {
    /// `isa`, or `None` if this machine has not got it.
    pub fn new(isa: Isa) -> Option<Level> {
        #[cfg(target_arch = "x86_64")]
        let vex = is_x86_feature_detected!("avxvnni");
        #[cfg(not(target_arch = "x86_64"))]
        let vex = false;
        isa.available().then_some(Level { isa, vex })
    }

    /// The fastest level of this machine.
    pub fn detect() -> Level {
        Level::new(Isa::detect()).unwrap_or(Level { isa: Isa::Scalar, vex: false })
    }

    /// Which one it is.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Runs `op` with these instructions.
    pub fn run<O: Op>(self, op: O) -> O::Out {
        #[cfg(target_arch = "aarch64")]
        use crate::simd::neon::Neon;
        #[cfg(target_arch = "x86_64")]
        use crate::simd::{
            avx2::{Avx2, EVEX, PLAIN, VEX},
            avx512::Avx512,
        };
        match self.isa {
            Isa::Scalar => op.run(Scalar),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: invariant 1.
            Isa::Avx2 => unsafe { Avx2::<PLAIN>::new() }.run(op),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: invariant 1; `vex` was detected in `Level::new`.
            Isa::AvxVnni if self.vex => unsafe { Avx2::<VEX>::new() }.run(op),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: invariant 1; without VEX, `available` has seen the EVEX form.
            Isa::AvxVnni => unsafe { Avx2::<EVEX>::new() }.run(op),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: invariant 1.
            Isa::Avx512 => unsafe { Avx512::new() }.run(op),
            #[cfg(target_arch = "aarch64")]
            // SAFETY: invariant 1.
            Isa::Neon => unsafe { Neon::<false>::new() }.run(op),
            #[cfg(target_arch = "aarch64")]
            // SAFETY: invariant 1.
            Isa::NeonDot => unsafe { Neon::<true>::new() }.run(op),
            // Levels of other processors: never made.
            _ => op.run(Scalar),
        }
    }
}
