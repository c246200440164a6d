//! The one table of tensor types.

macro_rules! tensor_types {
    ($($name:ident = $id:literal, $block:literal values in $bytes:literal bytes;)*) => {
        /// Element type of a tensor; the numbers are those of the file format.
        #[allow(non_camel_case_types, missing_docs)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum TensorType { $($name = $id),* }

        impl TensorType {
            /// Every type, in order of its number.
            pub const ALL: &[TensorType] = &[$(TensorType::$name),*];

            /// The type with the file's number `id`.
            pub fn from_id(id: u32) -> Option<Self> {
                match id { $($id => Some(Self::$name),)* _ => None }
            }

            /// Name as the tools of this field print it, e.g. `Q4_K`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name)),* }
            }

            /// Values in a quantization block.
            pub fn block_len(self) -> u64 {
                match self { $(Self::$name => $block),* }
            }

            /// Size of a quantization block in bytes.
            pub fn block_bytes(self) -> u64 {
                match self { $(Self::$name => $bytes),* }
            }
        }
    };
}

// Source: ggml.h (enum ggml_type) and ggml-common.h (block structures).
tensor_types! {
    F32 = 0, 1 values in 4 bytes;
    F16 = 1, 1 values in 2 bytes;
    Q4_0 = 2, 32 values in 18 bytes;
    Q4_1 = 3, 32 values in 20 bytes;
    Q5_0 = 6, 32 values in 22 bytes;
    Q5_1 = 7, 32 values in 24 bytes;
    Q8_0 = 8, 32 values in 34 bytes;
    Q8_1 = 9, 32 values in 36 bytes;
    Q2_K = 10, 256 values in 84 bytes;
    Q3_K = 11, 256 values in 110 bytes;
    Q4_K = 12, 256 values in 144 bytes;
    Q5_K = 13, 256 values in 176 bytes;
    Q6_K = 14, 256 values in 210 bytes;
    Q8_K = 15, 256 values in 292 bytes;
    IQ2_XXS = 16, 256 values in 66 bytes;
    IQ2_XS = 17, 256 values in 74 bytes;
    IQ3_XXS = 18, 256 values in 98 bytes;
    IQ1_S = 19, 256 values in 50 bytes;
    IQ4_NL = 20, 32 values in 18 bytes;
    IQ3_S = 21, 256 values in 110 bytes;
    IQ2_S = 22, 256 values in 82 bytes;
    IQ4_XS = 23, 256 values in 136 bytes;
    I8 = 24, 1 values in 1 bytes;
    I16 = 25, 1 values in 2 bytes;
    I32 = 26, 1 values in 4 bytes;
    I64 = 27, 1 values in 8 bytes;
    F64 = 28, 1 values in 8 bytes;
    IQ1_M = 29, 256 values in 56 bytes;
    BF16 = 30, 1 values in 2 bytes;
    TQ1_0 = 34, 256 values in 54 bytes;
    TQ2_0 = 35, 256 values in 66 bytes;
    MXFP4 = 39, 32 values in 17 bytes;
}

impl TensorType {
    /// Bytes of a row of `row_len` values: `None` if that is not a whole number of blocks or overflows.
    pub fn row_bytes(self, row_len: u64) -> Option<u64> {
        if !row_len.is_multiple_of(self.block_len()) {
            return None;
        }
        (row_len / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
