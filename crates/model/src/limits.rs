//! What bounds a model's speed: what this machine can do, and what the weights ask of it.

use crate::{Error, Model};
use kernels::isa::{Isa, Level};
use kernels::limits::{int8_macs_per_second, read_bytes_per_second};
use kernels::threads::Pool;
use memory::Buffer;

/// Bytes that are read to measure the bandwidth: more than any cache keeps.
const BUFFER_BYTES: usize = 512 << 20;

/// A rate with one thread and with all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// One thread alone.
    pub one: f64,
    /// All threads together.
    pub all: f64,
}

/// What this machine can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Bytes of memory read in a second, in pages like those of weights.
    pub read: Rate,
    /// 8-bit multiply-adds in a second.
    pub int8: Rate,
}

impl Limits {
    /// Measures the limits of `threads` threads. The multiply-adds are those of `isa`, or of the best there is; memory is
    /// always read with the best, for it does not depend on the instructions that a run is made to use. Takes about a
    /// second and 512 MiB of memory, which are free again afterwards.
    pub fn measure(threads: usize, isa: Option<Isa>) -> Result<Limits, Error> {
        let best = Level::detect();
        let level = isa.map_or(Ok(best), |isa| Level::new(isa).ok_or(Error::Isa(isa)))?;
        let mut buffer = Buffer::new(BUFFER_BYTES)?;
        // Pages that were never written all show the same zeros.
        buffer.fill(1);
        let both = |rate: &dyn Fn(&mut Pool) -> f64| {
            let one = rate(&mut Pool::new(1));
            Rate { one, all: if threads > 1 { rate(&mut Pool::new(threads)) } else { one } }
        };
        Ok(Limits {
            read: both(&|pool| read_bytes_per_second(pool, best, &buffer)),
            int8: both(&|pool| int8_macs_per_second(pool, level)),
        })
    }
}

impl Model {
    /// Bytes of weight matrices that a step reads for one token: all but an embedding table that is not the output matrix
    /// too, of which a token takes one row, and but the experts that it does not choose.
    pub fn step_bytes(&self) -> u64 {
        let weights = &self.weights;
        let output = weights.output.len_bytes() as u64;
        output + weights.layers.iter().map(|layer| layer.step_bytes()).sum::<u64>()
    }

    /// As [`crate::Config::prompt_macs`].
    pub fn prompt_macs(&self, tokens: u64) -> u64 {
        self.config.prompt_macs(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fixtures::tiny_model::{Architecture, TinySpec, write};

    fn tiny(tied: bool) -> Model {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tiny.gguf");
        let spec = TinySpec { tied, ..TinySpec::new(Architecture::Llama, gguf::TensorType::Q8_0) };
        write(&path, &spec).expect("a file");
        Model::load(&path, &mut |_, _| ()).expect("a model")
    }

    #[test]
    fn a_step_reads_every_matrix_once_but_not_an_embedding_table_of_its_own() {
        let (tied, untied) = (tiny(true), tiny(false));
        assert_eq!(tied.step_bytes(), untied.step_bytes());
        // Matrices of the tiny models fill whole cache lines, so that nothing lies between them.
        assert_eq!(tied.step_bytes(), tied.weights_bytes);
        // A table of its own is not held at all.
        assert_eq!(untied.step_bytes(), untied.weights_bytes);
    }

    #[test]
    fn a_prompt_multiplies_what_its_tokens_need() {
        let model = tiny(true);
        let c = &model.config;
        let (embed, q, kv, ff) = (c.embedding_len, c.heads * c.head_len, c.heads_kv * c.head_len, c.feed_forward_len);
        let all_tokens = c.layers * embed * (q + 2 * kv) + (c.layers - 1) * embed * (q + 3 * ff);
        let last_token = embed * (q + 3 * ff + c.vocab_len);
        assert!(c.layers > 1);
        assert_eq!(model.prompt_macs(1), (all_tokens + last_token) as u64);
        assert_eq!(model.prompt_macs(10), (10 * all_tokens + last_token) as u64);
    }
}
