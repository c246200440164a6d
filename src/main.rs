//! airs: runs GGUF language models on machines too small for them.
fn main() {}
