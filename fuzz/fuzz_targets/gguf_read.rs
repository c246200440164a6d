//! Any bytes are a GGUF file or a typed error; and what the parser promises about a file holds.
#![no_main]

use gguf::Gguf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let len_bytes = bytes.len() as u64;
    match Gguf::read(&mut &bytes[..], len_bytes) {
        Ok(file) => {
            for tensor in &file.tensors {
                assert!(tensor.offset_bytes + tensor.len_bytes <= len_bytes);
                assert_eq!(
                    tensor.ty.row_bytes(tensor.row_len()).map(|row| row * tensor.rows()),
                    Some(tensor.len_bytes)
                );
                assert_eq!(file.tensor(&tensor.name), Some(tensor));
            }
            for (key, value) in file.metadata.iter() {
                // Debug text, because a NaN is not equal to itself.
                assert_eq!(format!("{:?}", file.metadata.get(key)), format!("{:?}", Some(value)));
            }
            let _ = Gguf::merge(vec![file]);
        }
        Err(error) => assert!(error.to_string().len() < 4000),
    }
});
