//! Architectures as rows of a table.

use crate::moe::Scores;
use kernels::ops::Gate;

/// Which values of a head are rotated together, in the file's order of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// Neighbours (2i, 2i + 1); the rows are reordered at load, so that the kernels know only the other kind.
    Adjacent,
    /// Value i and value i + n/2.
    Halves,
}

/// What is normalized of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Nothing, unless the file has weights for heads.
    None,
    /// Each head.
    Heads,
    /// All heads of a token together.
    Whole,
}

/// What sets one architecture apart from the others. Biases and q/k norms are used where the file has their tensors.
#[derive(Debug)]
pub struct Family {
    /// `general.architecture`.
    pub name: &'static str,
    /// Order of rotated values.
    pub rope_pairs: RopePairs,
    /// Function of the gated feed-forward layer.
    pub gate: Gate,
    /// Whether embeddings are multiplied by the square root of their width.
    pub scale_embedding: bool,
    /// What is normalized of q and k.
    pub qk_norm: QkNorm,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// The tensor of the norm before the feed-forward layer.
    pub ffn_norm: &'static str,
    /// Whether attention and feed-forward outputs are normalized before they are added.
    pub post_norms: bool,
    /// Whether each query head has a sink: a score without a value.
    pub sinks: bool,
    /// Of how many layers one sees the whole context, unless the header says (0: all do).
    pub window_pattern: usize,
    /// Whether layers with a window rotate in their own way.
    pub window_rope: bool,
    /// Whether values are normalized too.
    pub v_norm: bool,
    /// Factor of the attention scores unless the header says; `None` follows from the length of a head.
    pub attention_scale: Option<f32>,
    /// Whether keys and values of all heads are made of one latent of a position (MLA).
    pub latents: bool,
    /// How its experts are used where the header counts any; `None` if it cannot have them.
    pub experts: Option<ExpertFamily>,
}

impl Family {
    /// What most have.
    const PLAIN: Family = Family {
        name: "",
        rope_pairs: RopePairs::Halves,
        gate: Gate::Silu,
        scale_embedding: false,
        qk_norm: QkNorm::None,
        qkv_bias: false,
        ffn_norm: "ffn_norm.weight",
        post_norms: false,
        sinks: false,
        window_pattern: 0,
        window_rope: false,
        v_norm: false,
        attention_scale: None,
        latents: false,
        experts: None,
    };
}

/// How an architecture's experts are used. Tensors of a shared expert are used where the header gives its width.
#[derive(Debug, Clone, Copy)]
pub struct ExpertFamily {
    /// Unless the header says.
    pub scores: Scores,
    /// Whether weights are divided by their sum, unless the header says.
    pub normalize: bool,
    /// Whether the shared expert has a gate of its own.
    pub shared_gate: bool,
    /// Whether the feed-forward layer stays beside the experts, with norms for each of them, and a factor for each expert.
    pub beside: bool,
    /// Whether a model without experts is one of this architecture too.
    pub optional: bool,
}

impl ExpertFamily {
    const SOFTMAX: ExpertFamily =
        ExpertFamily { scores: Scores::Softmax, normalize: true, shared_gate: false, beside: false, optional: false };
}

/// The table. Source: the architecture's tensors and graph in the GGUF ecosystem (llama.cpp's `src/models`).
pub const FAMILIES: &[Family] = &[
    Family {
        name: "llama",
        rope_pairs: RopePairs::Adjacent,
        experts: Some(ExpertFamily { optional: true, ..ExpertFamily::SOFTMAX }),
        ..Family::PLAIN
    },
    Family { name: "qwen2", qkv_bias: true, ..Family::PLAIN },
    Family {
        name: "qwen2moe",
        qkv_bias: true,
        experts: Some(ExpertFamily { normalize: false, shared_gate: true, ..ExpertFamily::SOFTMAX }),
        ..Family::PLAIN
    },
    Family { name: "qwen3", qk_norm: QkNorm::Heads, ..Family::PLAIN },
    Family { name: "qwen3moe", qk_norm: QkNorm::Heads, experts: Some(ExpertFamily::SOFTMAX), ..Family::PLAIN },
    Family {
        name: "gemma3",
        gate: Gate::GeluTanh,
        scale_embedding: true,
        qk_norm: QkNorm::Heads,
        post_norms: true,
        window_pattern: 6,
        window_rope: true,
        ..Family::PLAIN
    },
    Family {
        name: "gemma4",
        gate: Gate::GeluTanh,
        scale_embedding: true,
        qk_norm: QkNorm::Heads,
        post_norms: true,
        window_pattern: 6,
        window_rope: true,
        v_norm: true,
        attention_scale: Some(1.0),
        experts: Some(ExpertFamily { beside: true, optional: true, ..ExpertFamily::SOFTMAX }),
        ..Family::PLAIN
    },
    Family {
        name: "olmoe",
        qk_norm: QkNorm::Whole,
        experts: Some(ExpertFamily { normalize: false, ..ExpertFamily::SOFTMAX }),
        ..Family::PLAIN
    },
    Family { name: "granite", rope_pairs: RopePairs::Adjacent, ..Family::PLAIN },
    Family {
        name: "granitemoe",
        rope_pairs: RopePairs::Adjacent,
        experts: Some(ExpertFamily::SOFTMAX),
        ..Family::PLAIN
    },
    Family {
        name: "gpt-oss",
        gate: Gate::SiluClamped,
        qkv_bias: true,
        ffn_norm: "post_attention_norm.weight",
        sinks: true,
        window_pattern: 2,
        experts: Some(ExpertFamily { scores: Scores::SoftmaxOfChosen, normalize: false, ..ExpertFamily::SOFTMAX }),
        ..Family::PLAIN
    },
    Family {
        name: "deepseek2",
        rope_pairs: RopePairs::Adjacent,
        latents: true,
        experts: Some(ExpertFamily { normalize: false, optional: true, ..ExpertFamily::SOFTMAX }),
        ..Family::PLAIN
    },
    Family {
        name: "glm4moe",
        ffn_norm: "post_attention_norm.weight",
        experts: Some(ExpertFamily { scores: Scores::Sigmoid, normalize: false, ..ExpertFamily::SOFTMAX }),
        ..Family::PLAIN
    },
];
