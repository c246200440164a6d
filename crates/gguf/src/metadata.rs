//! Metadata values.

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// 8-bit unsigned.
    U8(u8),
    /// 8-bit signed.
    I8(i8),
    /// 16-bit unsigned.
    U16(u16),
    /// 16-bit signed.
    I16(i16),
    /// 32-bit unsigned.
    U32(u32),
    /// 32-bit signed.
    I32(i32),
    /// 64-bit unsigned.
    U64(u64),
    /// 64-bit signed.
    I64(i64),
    /// 32-bit float.
    F32(f32),
    /// 64-bit float.
    F64(f64),
    /// Boolean.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Elements of one type.
    Array(Array),
}

/// An array of one element type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// 8-bit unsigned.
    U8(Vec<u8>),
    /// 8-bit signed.
    I8(Vec<i8>),
    /// 16-bit unsigned.
    U16(Vec<u16>),
    /// 16-bit signed.
    I16(Vec<i16>),
    /// 32-bit unsigned.
    U32(Vec<u32>),
    /// 32-bit signed.
    I32(Vec<i32>),
    /// 64-bit unsigned.
    U64(Vec<u64>),
    /// 64-bit signed.
    I64(Vec<i64>),
    /// 32-bit float.
    F32(Vec<f32>),
    /// 64-bit float.
    F64(Vec<f64>),
    /// Boolean.
    Bool(Vec<bool>),
    /// UTF-8 texts.
    String(Vec<String>),
    /// Nested arrays.
    Array(Vec<Array>),
}

/// Key-value pairs in file order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
}

impl Metadata {
    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// All pairs in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// `key` as text.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(s) => Some(s),
            _ => None,
        }
    }

    /// `key` as an unsigned number: any non-negative integer type.
    pub fn u64(&self, key: &str) -> Option<u64> {
        match *self.get(key)? {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// `key` as a float of either width.
    pub fn f32(&self, key: &str) -> Option<f32> {
        match *self.get(key)? {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// `key` as a boolean.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match *self.get(key)? {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// `key` as a list of texts.
    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.get(key)? {
            Value::Array(Array::String(v)) => Some(v),
            _ => None,
        }
    }

    /// `key` as a list of floats.
    pub fn f32s(&self, key: &str) -> Option<&[f32]> {
        match self.get(key)? {
            Value::Array(Array::F32(v)) => Some(v),
            _ => None,
        }
    }

    /// `key` as a list of 32-bit integers (unsigned ones that fit are converted).
    pub fn i32s(&self, key: &str) -> Option<Vec<i32>> {
        match self.get(key)? {
            Value::Array(Array::I32(v)) => Some(v.clone()),
            Value::Array(Array::U32(v)) => v.iter().map(|&x| x.try_into().ok()).collect(),
            Value::Array(Array::I8(v)) => Some(v.iter().map(|&x| x.into()).collect()),
            _ => None,
        }
    }

    pub(crate) fn push(&mut self, key: String, value: Value) {
        self.entries.push((key, value));
    }
}
