//! Attention whose keys and values are made of latents (MLA).
//!
//! What makes a head's key of a latent is moved to the query: `q · (Kᵀ c) = (K q) · c`. So queries meet the latents
//! themselves, which all heads share, and what attention mixes of them becomes a head's output. The files hold K turned that
//! way. Source of names and shapes: llama.cpp, `src/models/deepseek2.cpp`.

use super::bind::Binder;
use super::pack::RopeRows;
use super::{Weight, Weights};
use crate::Error;
use crate::config::{self, Config};
use kernels::matmul::Matrix;

/// What a layer has of them beside its `q`, which may multiply a latent, and its `k`, which makes latents and, behind each,
/// what is rotated.
#[derive(Debug)]
pub(crate) struct Latents {
    /// What makes the latents of queries, and their norm; `None` if queries come out of the residual stream.
    pub(crate) query: Option<(Weight, Vec<f32>)>,
    /// The norm of latents that keys and values are made of.
    pub(crate) norm: Vec<f32>,
    /// Of each head: what makes of a query what meets a latent.
    key: Weight,
    /// Of each head: what makes its output of a mix of latents.
    value: Weight,
    heads: usize,
}

impl Latents {
    /// Matrices before the layer's `q`, in the order of use.
    pub(super) fn first(&self) -> impl Iterator<Item = &Weight> {
        self.query.iter().map(|(weight, _)| weight)
    }

    /// Matrices behind its `k`.
    pub(super) fn last(&self) -> [&Weight; 2] {
        [&self.key, &self.value]
    }

    /// What makes of each head's query what meets a latent.
    pub(crate) fn keys<'a>(&'a self, weights: &'a Weights) -> impl Iterator<Item = Matrix<'a>> {
        self.of_heads(weights.matrix(&self.key))
    }

    /// What makes each head's output.
    pub(crate) fn values<'a>(&'a self, weights: &'a Weights) -> impl Iterator<Item = Matrix<'a>> {
        self.of_heads(weights.matrix(&self.value))
    }

    fn of_heads<'a>(&self, all: Matrix<'a>) -> impl Iterator<Item = Matrix<'a>> {
        let rows = all.rows / self.heads;
        (0..self.heads).map(move |head| all.part(head * rows..(head + 1) * rows))
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
            key: self.tall(&name("attn_k_b"), c.heads, of.len, of.nope_len)?,
            value: self.tall(&name("attn_v_b"), c.heads, of.value_len, of.len)?,
            heads: c.heads,
        };
        Ok((q, k, latents))
    }
}
