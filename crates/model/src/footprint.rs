//! What a model takes in memory and asks of the machine, from its header alone: every buffer of [`crate::Runner`] and of
//! loading, counted as they are allocated.

use crate::config::Config;
use crate::forward::shape;
use crate::kv::groups::LayerGroups;
use crate::weights::format_of;
use crate::{Error, Header, RunnerOptions};
use gguf::TensorInfo;
use kernels::PANEL_ROWS;
use kernels::activations::{Forms, Precision, token_bytes};
use kernels::attention::{KV_BLOCK, SPLIT};

/// Bytes and work of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
}

/// Matrices start at multiples of a cache line.
const ALIGN_BYTES: usize = 64;
/// Buffers of the threads that read. Measured, too.
const READER_BYTES: u64 = 7 << 20;
// Measured on vocabularies of 49k to 262k tokens. The tokenizer's tables have sizes in powers of two, so that one
// vocabulary takes up to a third less of them for each entry than another.
/// A token's text and its places in the tokenizer's tables.
const TOKEN_BYTES: u64 = 54;
/// A merge of two tokens.
const MERGE_BYTES: u64 = 70;

impl Header {
    /// What the model takes when it is run with `options` and the logits of at most `logits_rows` rows are wanted at once.
    pub fn footprint(&self, options: &RunnerOptions, logits_rows: usize) -> Result<Footprint, Error> {
        let config = self.config()?;
        let kv_types = (options.type_k, options.type_v);
        let layer_bytes = shape(&config, 0, kv_types).block_bytes();
        let groups = LayerGroups::new(&config);
        let window_layers = groups.layout.window_groups * groups.layers;
        let is_matrix = |t: &&TensorInfo| t.dims.len() == 2;
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
        })
    }

    /// The buffers of `forward::Scratch` for `rows` rows, and the logits.
    fn scratch_bytes(&self, c: &Config, rows: usize, logits_rows: usize) -> u64 {
        let (q_len, kv_len) = (c.heads * c.head_len, c.heads_kv * c.head_len);
        let post_norms = self.gguf.tensor("blk.0.post_attention_norm.weight").is_some();
        let part = if post_norms { c.embedding_len } else { 0 };
        let floats =
            c.embedding_len + (q_len + 2 * kv_len) + q_len + c.feed_forward_len.next_multiple_of(PANEL_ROWS) + part;
        let formats = self.gguf.tensors.iter().filter(|t| t.dims.len() == 2).filter_map(|t| format_of(t.ty));
        let forms = Forms::of(formats);
        // Each form has a buffer as large as its largest use; that of the rests, in double precision, serves q, k and v.
        let widest = c.embedding_len.max(q_len).max(c.feed_forward_len);
        let bytes = |cols, forms| token_bytes(cols, forms, Precision::Single);
        let quantized = Forms { floats: false, ..forms };
        let activations = bytes(widest, forms) + bytes(c.embedding_len, quantized);
        let logits = c.vocab_len.next_multiple_of(PANEL_ROWS) + c.vocab_len;
        (rows * (4 * floats + activations) + logits_rows * 4 * logits) as u64
    }

    /// Bytes of weights that a step reads, however many tokens it computes; as [`crate::Model::step_bytes`].
    pub fn step_bytes(&self) -> u64 {
        let tied = self.gguf.tensor("output.weight").is_none();
        let read = |t: &&TensorInfo| t.dims.len() == 2 && (tied || t.name != "token_embd.weight");
        self.gguf.tensors.iter().filter(read).filter_map(packed_bytes).sum::<usize>() as u64
    }
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
    let rope = 2 * c.rope_len * size_of::<f32>();
    let partial = c.heads * (c.head_len + 2) * size_of::<f32>();
    (rope + partial.div_ceil(SPLIT)) as u64
}

impl Config {
    /// Multiply-adds of weights in a prompt of `tokens` tokens, of which only the last one's logits are wanted: in the last
    /// layer the others stop at their keys and values. Products that run twice for double precision count once.
    pub fn prompt_macs(&self, tokens: u64) -> u64 {
        let (embed, ff) = (self.embedding_len as u64, self.feed_forward_len as u64);
        let (q_len, kv_len) = ((self.heads * self.head_len) as u64, (self.heads_kv * self.head_len) as u64);
        let projections = embed * (q_len + 2 * kv_len);
        let rest = embed * (q_len + 3 * ff);
        let layers = self.layers as u64;
        tokens * (layers * projections + (layers - 1) * rest) + rest + embed * self.vocab_len as u64
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
        for (architecture, tied) in
            [(Architecture::Llama, true), (Architecture::Llama, false), (Architecture::Gemma3, true)]
        {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("tiny.gguf");
            let spec = TinySpec { tied, ..TinySpec::new(architecture, gguf::TensorType::Q8_0) };
            write(&path, &spec).expect("a file");
            let options = RunnerOptions::default();
            let header = Header::read(&path).expect("a header");
            let footprint = header.footprint(&options, 1).expect("a model");
            let model = Arc::new(Model::load(&path, &mut |_, _| ()).expect("a model"));
            assert_eq!(footprint.weights_bytes, model.weights_bytes);
            assert_eq!(header.step_bytes(), model.step_bytes());
            assert_eq!(footprint.row_table_bytes > 0, !tied);
            let mut runner = Runner::new(model, &options).expect("a runner");
            let sequence = runner.sequence_open(17);
            let row = Row { sequence, token: 1, logits: true };
            runner.forward(&[row; 17]).expect("17 tokens");
            assert_eq!(runner.kv_bytes(), 2 * footprint.kv_block_bytes);
            assert_eq!(footprint.kv_window_block_bytes > 0, architecture == Architecture::Gemma3);
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
