//! GGUF files, versions 2 and 3: header, metadata, tensor table and split files.
#![forbid(unsafe_code)]
