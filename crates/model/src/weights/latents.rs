//! Attention whose keys and values are made of latents (MLA).
//!
//! What makes a head's key of a latent is moved to the query: `q · (K c) = (Kᵀ q) · c`. So queries meet the latents
//! themselves, which all heads share, and what attention mixes of them becomes a head's output. Files hold Kᵀ, a matrix of
//! each head; older ones K, and behind its rows those that make the head's value. Source of names and shapes: llama.cpp,
//! `src/models/deepseek2.cpp`.

use super::bind::Binder;
use super::pack::RopeRows;
use super::{Weight, Weights};
use crate::Error;
use crate::config::{self, Config};
use kernels::matmul::Matrix;
use std::ops::Range;

/// What a layer has of them beside its `q`, which may multiply a latent, and its `k`, which makes latents and, behind each,
/// what is rotated.
#[derive(Debug)]
pub(crate) struct Latents {
    /// What makes the latents of queries, and their norm; `None` if queries come out of the residual stream.
    pub(crate) query: Option<(Weight, Vec<f32>)>,
    /// The norm of latents that keys and values are made of.
    pub(crate) norm: Vec<f32>,
    up: Up,
    heads: usize,
    /// Rows of K that a head has.
    nope_len: usize,
}

/// What makes keys and values of latents, of each head.
#[derive(Debug)]
enum Up {
    /// Kᵀ, and what makes values.
    Apart(Weight, Weight),
    /// Rows of K, then those that make values.
    Joined(Weight),
}

/// What makes of each head's query what meets a latent.
pub(crate) enum Keys<'a> {
    /// Kᵀ of each head.
    Turned(ByHead<'a>),
    /// K of each head.
    Plain(ByHead<'a>),
}

/// A matrix of each head: as many rows of a tall one, all at the same place among the head's rows.
#[derive(Clone, Copy)]
pub(crate) struct ByHead<'a> {
    tall: Matrix<'a>,
    pub(crate) heads: usize,
    /// First row and the row behind the last.
    rows: (usize, usize),
}

impl<'a> ByHead<'a> {
    pub(crate) fn of(&self, head: usize) -> Matrix<'a> {
        let first = head * (self.tall.rows / self.heads);
        self.tall.part(first + self.rows.0..first + self.rows.1)
    }
}

impl Latents {
    /// Matrices before the layer's `q`, in the order of use.
    pub(super) fn first(&self) -> impl Iterator<Item = &Weight> {
        self.query.iter().map(|(weight, _)| weight)
    }

    /// Matrices behind its `k`.
    pub(super) fn last(&self) -> impl Iterator<Item = &Weight> {
        let (first, second) = match &self.up {
            Up::Apart(keys, values) => (keys, Some(values)),
            Up::Joined(both) => (both, None),
        };
        [first].into_iter().chain(second)
    }

    /// What makes of each head's query what meets a latent.
    pub(crate) fn keys<'a>(&'a self, weights: &'a Weights) -> Keys<'a> {
        match &self.up {
            Up::Apart(keys, _) => Keys::Turned(self.by_head(weights.matrix(keys), 0..keys.rows / self.heads)),
            Up::Joined(both) => Keys::Plain(self.by_head(weights.matrix(both), 0..self.nope_len)),
        }
    }

    /// What makes each head's output.
    pub(crate) fn values<'a>(&'a self, weights: &'a Weights) -> ByHead<'a> {
        let (weight, first) = match &self.up {
            Up::Apart(_, values) => (values, 0),
            Up::Joined(both) => (both, self.nope_len),
        };
        self.by_head(weights.matrix(weight), first..weight.rows / self.heads)
    }

    /// Of each head's rows these.
    fn by_head<'a>(&self, tall: Matrix<'a>, rows: Range<usize>) -> ByHead<'a> {
        ByHead { tall, heads: self.heads, rows: (rows.start, rows.end) }
    }
}

impl Binder<'_> {
    /// The layer's `q` and `k`, and what makes the rest of them.
    pub(super) fn latents(
        &mut self,
        index: usize,
        c: &Config,
        of: &config::Latents,
        reorder: impl Fn(usize, usize) -> Option<RopeRows>,
    ) -> Result<(Weight, Weight, Latents), Error> {
        let name = |part: &str| format!("blk.{index}.{part}");
        let (embed, head_len) = (c.embedding_len, of.nope_len + c.rope_len);
        let rows = reorder(head_len, of.nope_len);
        let (query, q) = match of.query_len {
            0 => (None, self.matrix(&name("attn_q"), c.heads * head_len, embed, rows)?),
            len => {
                let down = self.matrix(&name("attn_q_a"), len, embed, None)?;
                let norm = self.floats(&name("attn_q_a_norm.weight"), len)?;
                (Some((down, norm)), self.matrix(&name("attn_q_b"), c.heads * head_len, len, rows)?)
            }
        };
        let k = self.matrix(&name("attn_kv_a_mqa"), c.head_len, embed, reorder(c.head_len, of.len))?;
        let latents = Latents {
            query,
            norm: self.floats(&name("attn_kv_a_norm.weight"), of.len)?,
            up: if of.joined {
                let rows = c.heads * (of.nope_len + of.value_len);
                Up::Joined(self.matrix(&name("attn_kv_b"), rows, of.len, None)?)
            } else {
                let keys = self.tall(&name("attn_k_b"), c.heads, of.len, of.nope_len)?;
                Up::Apart(keys, self.tall(&name("attn_v_b"), c.heads, of.value_len, of.len)?)
            },
            heads: c.heads,
            nope_len: of.nope_len,
        };
        Ok((q, k, latents))
    }
}
