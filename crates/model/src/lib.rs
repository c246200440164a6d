//! Architectures, weights, forward pass, tokenizer and chat template.

pub mod chat;
pub mod tokenizer;
