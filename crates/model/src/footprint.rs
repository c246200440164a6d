//! What a model takes in memory and asks of the machine, from its header alone: every buffer of [`crate::Runner`] and of
//! loading, counted as they are allocated.

use crate::config::{Config, Experts};
use crate::kv::groups::LayerGroups;
use crate::latents;
use crate::moe::Choice;
use crate::weights::{format_of, is_vector};
use crate::{Error, Header, RunnerOptions};
use gguf::TensorInfo;
use kernels::PANEL_ROWS;
use kernels::activations::{Forms, Precision, token_bytes};
use kernels::attention::{KV_BLOCK, SPLIT};
use memory::slots::Slots;
use residency::experts::Bank;

/// Bytes and work of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// Weight matrices in panels, without [`Footprint::row_table_bytes`].
    pub weights_bytes: u64,
    /// An embedding table that is not the output matrix too: a token takes one row of it.
    pub row_table_bytes: u64,
    /// Tokenizer, template and vectors of floats.
    pub metadata_bytes: u64,
    /// Keys and values of a block of [`Footprint::kv_block_tokens`] positions.
    pub kv_block_bytes: u64,
    /// Of these, those of layers with a sliding window.
    pub kv_window_block_bytes: u64,
    /// Blocks that such a layer holds at most; the others have one for all [`Footprint::kv_block_tokens`] positions.
    pub kv_window_blocks_max: u64,
    /// Positions of a block.
    pub kv_block_tokens: u64,
    /// Activations and logits of a micro-batch.
    pub scratch_bytes: u64,
    /// Rotation tables and partial attention, for each position of the longest sequence.
    pub scratch_bytes_per_token: u64,
    /// Buffers that weights are read into, until all are there.
    pub io_bytes: u64,
    /// The experts among [`Footprint::weights_bytes`]; none where no layer has any.
    pub bank: Bank,
    /// Bytes that are read at once of an expert at most.
    pub expert_slice_bytes: u64,
}

/// Matrices start at multiples of a cache line.
const ALIGN_BYTES: usize = 64;
/// Tokens that are missing in a group at most: nine take the room of sixteen.
const GROUP_FILL_MAX: usize = 7;
/// Buffers of the threads that read. Measured, too.
const READER_BYTES: u64 = 7 << 20;
// Measured on vocabularies of 49k to 262k tokens. The tokenizer's tables have sizes in powers of two, so that one
// vocabulary takes up to a third less of them for each entry than another.
/// A token's text and its places in the tokenizer's tables.
const TOKEN_BYTES: u64 = 54;
/// A merge of two tokens.
const MERGE_BYTES: u64 = 55;

impl Header {
    /// What the model takes when it is run with `options` and the logits of at most `logits_rows` rows are wanted at once.
    pub fn footprint(&self, options: &RunnerOptions, logits_rows: usize) -> Result<Footprint, Error> {
        let config = self.config()?;
        let kv_types = (options.type_k, options.type_v);
        let layer_bytes = config.layer_kv_bytes(kv_types);
        let groups = LayerGroups::new(&config);
        let window_layers = groups.layout.window_groups * groups.layers;
        let is_matrix = |t: &&TensorInfo| !is_vector(t);
        let packed = |t: &TensorInfo| packed_bytes(t).unwrap_or(0) as u64;
        let tied = self.gguf.tensor("output.weight").is_none();
        let row_table_bytes = self.gguf.tensor("token_embd.weight").filter(|_| !tied).map_or(0, packed);
        let matrices: u64 = self.gguf.tensors.iter().filter(is_matrix).map(packed).sum();
        let vectors: u64 = self.gguf.tensors.iter().filter(|t| !is_matrix(t)).map(|t| 4 * t.row_len() * t.rows()).sum();
        let merges = self.gguf.metadata.get("tokenizer.ggml.merges").map_or(0, array_len);
        let template_bytes = self.chat_template().map_or(0, str::len) as u64;
        Ok(Footprint {
            weights_bytes: matrices - row_table_bytes,
            row_table_bytes,
            metadata_bytes: config.vocab_len as u64 * TOKEN_BYTES + merges * MERGE_BYTES + vectors + template_bytes,
            kv_block_bytes: (config.layers * layer_bytes) as u64,
            kv_window_block_bytes: (window_layers * layer_bytes) as u64,
            kv_window_blocks_max: groups.layout.window_blocks_max(options.micro_batch) as u64,
            kv_block_tokens: KV_BLOCK as u64,
            scratch_bytes: self.scratch_bytes(&config, options.micro_batch.min(config.context_len).max(1), logits_rows),
            scratch_bytes_per_token: scratch_bytes_per_token(&config),
            io_bytes: READER_BYTES,
            expert_slice_bytes: self.expert_parts(&config).into_iter().flatten().max().unwrap_or(0) as u64,
            bank: self.bank(&config),
        })
    }

    /// Bytes of an expert's gate, up and down, for each layer that has experts.
    fn expert_parts(&self, config: &Config) -> Vec<[usize; 3]> {
        let parts = |layer: usize| {
            let count = config.layer_experts(layer)?.count as u64;
            let bytes = |part: &str| {
                let tensor = self.gguf.tensor(&format!("blk.{layer}.ffn_{part}_exps.weight"));
                tensor.map(|tensor| (tensor.len_bytes / count) as usize)
            };
            let both = bytes("gate_up").map_or([bytes("gate"), bytes("up")], |both| [Some(both / 2); 2]);
            Some([both[0]?, both[1]?, bytes("down")?])
        };
        (0..config.layers).filter_map(parts).collect()
    }

    fn bank(&self, config: &Config) -> Bank {
        let parts = self.expert_parts(config);
        let (Some(experts), false) = (config.experts, parts.is_empty()) else { return Bank::default() };
        let widest = [0, 1, 2].map(|i| parts.iter().map(|parts| parts[i]).max().unwrap_or(0));
        Bank {
            experts: experts.count as u64,
            used: experts.routing.used as u64,
            expert_bytes: parts.iter().map(|parts| parts.iter().sum::<usize>() as u64).collect(),
            slot_bytes: Slots::slot_bytes(&widest) as u64,
        }
    }

    /// The buffers of `forward::Scratch` for `rows` rows, and the logits.
    fn scratch_bytes(&self, c: &Config, rows: usize, logits_rows: usize) -> u64 {
        let (made_len, q_len) = c.widest_attention();
        let post_norms = self.gguf.tensor("blk.0.post_attention_norm.weight").is_some();
        let part = if post_norms || c.experts.is_some() || c.residual_scale != 1.0 { c.embedding_len } else { 0 };
        let mlp_len = c.mlp_len();
        let floats = c.embedding_len + made_len + q_len + mlp_len.next_multiple_of(PANEL_ROWS) + part;
        let formats = self.gguf.tensors.iter().filter(|t| !is_vector(t)).filter_map(|t| format_of(t.ty));
        let forms = Forms::of(formats);
        // Each form has a buffer as large as its largest use; that of the rests, in double precision, serves q, k and v.
        let widest = c.embedding_len.max(q_len).max(mlp_len);
        let bytes = |cols, forms| token_bytes(cols, forms, Precision::Single);
        let quantized = Forms { floats: false, ..forms };
        let mut activations = [rows * bytes(widest, forms), rows * bytes(c.embedding_len, quantized)];
        let mut latents_bytes = 0;
        if let Some(latents) = &c.latents {
            latents_bytes = latents::scratch_bytes(c, latents, rows);
            let made = latents::activation_bytes(c, latents, rows, forms);
            activations = [activations[0].max(made[0]), activations[1].max(made[1])];
        }
        let logits = c.vocab_len.next_multiple_of(PANEL_ROWS) + c.vocab_len;
        let experts = c.experts.map_or(0, |experts| expert_scratch_bytes(c, &experts, rows, forms));
        (rows * 4 * floats + activations[0] + activations[1] + latents_bytes + logits_rows * 4 * logits + experts)
            as u64
    }

    /// Bytes of weights that a step reads for one token; as [`crate::Model::step_bytes`].
    pub fn step_bytes(&self) -> Result<u64, Error> {
        let tied = self.gguf.tensor("output.weight").is_none();
        let read = |t: &&TensorInfo| !is_vector(t) && (tied || t.name != "token_embd.weight");
        let experts = self.config()?.experts;
        let bytes = |t: &TensorInfo| {
            let all = packed_bytes(t).unwrap_or(0) as u64;
            experts.filter(|_| is_experts(t)).map_or(all, |e| all / e.count as u64 * e.routing.used as u64)
        };
        Ok(self.gguf.tensors.iter().filter(read).map(bytes).sum())
    }

    /// Bytes of the experts of all layers, in panels.
    pub fn expert_bytes(&self) -> u64 {
        self.gguf.tensors.iter().filter(|t| is_experts(t)).filter_map(packed_bytes).sum::<usize>() as u64
    }
}

/// The buffers of `moe::Scratch` for `rows` rows.
fn expert_scratch_bytes(c: &Config, experts: &Experts, rows: usize, forms: Forms) -> usize {
    let (embed, len, used) = (c.embedding_len, experts.feed_forward_len, experts.routing.used);
    let choices = rows * used;
    // The tokens of each expert are groups of their own, filled up to a power of two.
    let padded = (choices + experts.count * GROUP_FILL_MAX).min(2 * choices);
    let activations =
        padded * [embed, len].map(|cols| token_bytes(cols, forms, Precision::Single)).iter().sum::<usize>();
    let sums = if experts.beside { embed } else { 0 };
    let floats = rows * (sums + embed + experts.count.next_multiple_of(PANEL_ROWS)) + choices * (embed + len);
    let sorted = choices * (size_of::<Choice>() + size_of::<u32>() + size_of::<usize>());
    activations + floats * size_of::<f32>() + sorted
}

/// Whether a tensor holds a matrix of each expert of a layer.
fn is_experts(tensor: &TensorInfo) -> bool {
    !is_vector(tensor) && tensor.name.ends_with("_exps.weight")
}

/// Bytes of a tensor in panels: as in the file, but for rows that fill up the last panel.
fn packed_bytes(tensor: &TensorInfo) -> Option<usize> {
    let rows = usize::try_from(tensor.rows()).ok()?;
    let row_bytes = usize::try_from(tensor.len_bytes).ok()? / rows.max(1);
    Some(row_bytes.checked_mul(rows.next_multiple_of(PANEL_ROWS))?.next_multiple_of(ALIGN_BYTES))
}

fn array_len(value: &gguf::Value) -> u64 {
    match value {
        gguf::Value::Array(array) => array.len() as u64,
        _ => 0,
    }
}

fn scratch_bytes_per_token(c: &Config) -> u64 {
    // Cosines and sines of a position, for each of the two rotations.
    let rope = (c.rope_len + c.rope_len_window) * size_of::<f32>();
    let value_len = c.latents.map_or(c.head_len.max(c.head_len_window), |latents| latents.len);
    let partial = c.heads * (value_len + 2) * size_of::<f32>();
    (rope + partial.div_ceil(SPLIT)) as u64
}

impl Config {
    /// Multiply-adds of weights in a prompt of `tokens` tokens, of which only the last one's logits are wanted: in the last
    /// layer the others stop at their keys and values. Products that run twice for double precision count once.
    pub fn prompt_macs(&self, tokens: u64) -> u64 {
        let embed = self.embedding_len as u64;
        let projections = |layer| match &self.latents {
            Some(latents) => latents::weights(self, latents),
            None => embed * self.made_len(layer) as u64,
        };
        let rest = |layer| embed * (self.attended_len(layer) + self.feed_forward_values(layer)) as u64;
        let last = self.layers - 1;
        let before = (0..=last).map(projections).sum::<u64>() + (0..last).map(rest).sum::<u64>();
        tokens * before + rest(last) + embed * self.vocab_len as u64
    }

    /// Values of a token's queries, keys and values in `layer`; of latents and what is rotated, where keys are made of them.
    fn made_len(&self, layer: usize) -> usize {
        let (heads_kv, head_len) = self.layer_heads(layer);
        if self.latents.is_some() { head_len } else { (self.heads + 2 * heads_kv) * head_len }
    }

    /// Values of what attention makes of a token in `layer`.
    fn attended_len(&self, layer: usize) -> usize {
        self.heads * self.latents.map_or(self.layer_heads(layer).1, |latents| latents.value_len)
    }

    /// The two in the layers that have most.
    fn widest_attention(&self) -> (usize, usize) {
        let lens = (0..self.layers).map(|layer| (self.made_len(layer), self.attended_len(layer)));
        lens.fold((0, 0), |most, len| (most.0.max(len.0), most.1.max(len.1)))
    }

    /// Rows of feed-forward matrices as wide as the residual stream, of one kind or the other, that a token meets in
    /// `layer`.
    fn feed_forward_values(&self, layer: usize) -> usize {
        match self.layer_experts(layer) {
            None => 3 * self.feed_forward_len,
            Some(e) => 3 * (e.routing.used * e.feed_forward_len + e.shared_feed_forward_len) + e.count,
        }
    }

    /// Width of the widest feed-forward layer that all tokens go through; 0 if there are only experts.
    fn mlp_len(&self) -> usize {
        let len =
            |e: Experts| e.shared_feed_forward_len.max(if e.dense_layers > 0 { self.feed_forward_len } else { 0 });
        self.experts.map_or(self.feed_forward_len, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, Row, Runner};
    use fixtures::tiny_model::{Architecture, TinySpec, write};
    use std::sync::Arc;

    #[test]
    fn the_header_tells_what_loading_and_running_take() {
        for (architecture, tied) in [
            (Architecture::Llama, true),
            (Architecture::Llama, false),
            (Architecture::Gemma3, true),
            (Architecture::Qwen2Moe, false),
            (Architecture::GptOss, false),
            (Architecture::Glm4Moe, true),
            (Architecture::DeepSeek2, false),
            (Architecture::DeepSeek2Lite, true),
        ] {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("tiny.gguf");
            let spec = TinySpec { tied, ..TinySpec::new(architecture, gguf::TensorType::Q8_0) };
            write(&path, &spec).expect("a file");
            let options = RunnerOptions::default();
            let header = Header::read(&path).expect("a header");
            let footprint = header.footprint(&options, 1).expect("a model");
            let model = Arc::new(Model::load(&path, &mut |_, _| ()).expect("a model"));
            assert_eq!(footprint.weights_bytes, model.weights_bytes);
            assert_eq!(header.step_bytes().expect("a model"), model.step_bytes());
            assert_eq!(footprint.row_table_bytes > 0, !tied);
            assert_eq!(header.expert_bytes() > 0, architecture.has_experts());
            assert_eq!(model.step_bytes() < model.weights_bytes, architecture.has_experts());
            let mut runner = Runner::new(model, &options).expect("a runner");
            let sequence = runner.sequence_open(17);
            let row = Row { sequence, token: 1, logits: true };
            runner.forward(&[row; 17]).expect("17 tokens");
            assert_eq!(runner.kv_bytes(), 2 * footprint.kv_block_bytes);
            let windows = matches!(architecture, Architecture::Gemma3 | Architecture::GptOss);
            assert_eq!(footprint.kv_window_block_bytes > 0, windows);
            runner.sequence_close(sequence);
            runner.kv_trim();
            let long = runner.sequence_open(1000);
            let row = Row { sequence: long, token: 1, logits: false };
            runner.forward(&[row; 100]).expect("100 tokens");
            runner.sequence_reserve(long).expect("a few MiB");
            let full = footprint.kv_block_bytes - footprint.kv_window_block_bytes;
            let window = footprint.kv_window_block_bytes * footprint.kv_window_blocks_max.min(63);
            assert_eq!(runner.kv_bytes(), 63 * full + window, "{architecture:?}");
        }
    }
}
