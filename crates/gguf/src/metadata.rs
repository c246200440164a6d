//! Metadata values: reading them, and looking them up.

use crate::cursor::Cursor;
use crate::error::{Error, clip};
use crate::texts::Texts;

/// Levels of nested arrays that are read; files in the wild have one.
pub const ARRAY_DEPTH_MAX: usize = 8;
/// Least size of an array in the file: element type and count.
const ARRAY_BYTES_MIN: u64 = 4 + 8;
/// Least size of a text in the file: its length.
const STRING_BYTES_MIN: u64 = 8;

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
    String(Texts),
    /// Nested arrays.
    Array(Vec<Array>),
}

impl Value {
    /// Reads a value of the file's type number `id`; `key` names it in errors.
    pub(crate) fn read(cursor: &mut Cursor<'_>, id: u32, key: &str) -> Result<Self, Error> {
        Ok(match id {
            0 => Self::U8(cursor.bytes(key).map(u8::from_le_bytes)?),
            1 => Self::I8(cursor.bytes(key).map(i8::from_le_bytes)?),
            2 => Self::U16(cursor.bytes(key).map(u16::from_le_bytes)?),
            3 => Self::I16(cursor.bytes(key).map(i16::from_le_bytes)?),
            4 => Self::U32(cursor.bytes(key).map(u32::from_le_bytes)?),
            5 => Self::I32(cursor.bytes(key).map(i32::from_le_bytes)?),
            6 => Self::F32(cursor.bytes(key).map(f32::from_le_bytes)?),
            7 => {
                let [byte] = cursor.bytes(key)?;
                check_bool(byte, key)?;
                Self::Bool(byte == 1)
            }
            8 => Self::String(cursor.string(key)?),
            9 => Self::Array(Array::read(cursor, key, 1)?),
            10 => Self::U64(cursor.bytes(key).map(u64::from_le_bytes)?),
            11 => Self::I64(cursor.bytes(key).map(i64::from_le_bytes)?),
            12 => Self::F64(cursor.bytes(key).map(f64::from_le_bytes)?),
            _ => return Err(Error::ValueType { key: clip(key), id }),
        })
    }

    /// Number of this value's type in the file.
    pub fn type_id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }
}

impl Array {
    fn read(cursor: &mut Cursor<'_>, key: &str, depth: usize) -> Result<Self, Error> {
        if depth > ARRAY_DEPTH_MAX {
            return Err(Error::Depth { key: clip(key), depth_max: ARRAY_DEPTH_MAX });
        }
        let id = cursor.u32(key)?;
        Ok(match id {
            0 => Self::U8(cursor.numbers(key, u8::from_le_bytes)?),
            1 => Self::I8(cursor.numbers(key, i8::from_le_bytes)?),
            2 => Self::U16(cursor.numbers(key, u16::from_le_bytes)?),
            3 => Self::I16(cursor.numbers(key, i16::from_le_bytes)?),
            4 => Self::U32(cursor.numbers(key, u32::from_le_bytes)?),
            5 => Self::I32(cursor.numbers(key, i32::from_le_bytes)?),
            6 => Self::F32(cursor.numbers(key, f32::from_le_bytes)?),
            7 => {
                let bytes = cursor.numbers(key, |[byte]: [u8; 1]| byte)?;
                bytes.iter().try_for_each(|&byte| check_bool(byte, key))?;
                Self::Bool(bytes.into_iter().map(|byte| byte == 1).collect())
            }
            8 => {
                let count = cursor.count(key, STRING_BYTES_MIN)?;
                Self::String(cursor.texts(count, key)?)
            }
            9 => {
                let count = cursor.count(key, ARRAY_BYTES_MIN)?;
                Self::Array(cursor.list(count, |c| Self::read(c, key, depth + 1))?)
            }
            10 => Self::U64(cursor.numbers(key, u64::from_le_bytes)?),
            11 => Self::I64(cursor.numbers(key, i64::from_le_bytes)?),
            12 => Self::F64(cursor.numbers(key, f64::from_le_bytes)?),
            _ => return Err(Error::ValueType { key: clip(key), id }),
        })
    }

    /// Number of the elements' type in the file.
    pub fn type_id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::Array(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn check_bool(found: u8, key: &str) -> Result<(), Error> {
    if found > 1 { Err(Error::Bool { key: clip(key), found }) } else { Ok(()) }
}

/// Key-value pairs in file order. Every key occurs once.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    /// Places in `entries`, ordered by key.
    by_key: Vec<usize>,
}

impl Metadata {
    /// The pairs in `entries`. A key that occurs twice is an error.
    pub fn from_entries(entries: Vec<(String, Value)>) -> Result<Self, Error> {
        let mut by_key: Vec<usize> = (0..entries.len()).collect();
        by_key.sort_unstable_by(|&a, &b| entries[a].0.cmp(&entries[b].0));
        for pair in by_key.windows(2) {
            if entries[pair[0]].0 == entries[pair[1]].0 {
                return Err(Error::DuplicateKey { key: clip(&entries[pair[0]].0) });
            }
        }
        Ok(Self { entries, by_key })
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let place = self.by_key.binary_search_by(|&i| self.entries[i].0.as_str().cmp(key)).ok()?;
        Some(&self.entries[self.by_key[place]].1)
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
    pub fn strings(&self, key: &str) -> Option<&Texts> {
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
}
