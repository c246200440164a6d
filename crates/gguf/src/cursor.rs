//! A reader in which every length is checked.
//!
//! Two facts bound memory: a length or count is compared with the bytes that the file still has before anything is
//! read, and vectors grow only as bytes really arrive (a reader may hold less than the file's length promises).

use std::io::{BufRead, BufReader, ErrorKind, Read};

use crate::error::{Error, clip};
use crate::texts::Texts;

/// Bytes read at once, and the most that is allocated before any of them has arrived.
const CHUNK_BYTES: usize = 4096;
/// Size of the read buffer; tables are made of items of a few bytes.
const BUFFER_BYTES: u64 = 64 * 1024;

/// A position in a file of known length.
pub(crate) struct Cursor<'r> {
    reader: BufReader<&'r mut dyn Read>,
    at_bytes: u64,
    len_bytes: u64,
}

impl<'r> Cursor<'r> {
    /// The start of a file of `len_bytes`.
    pub(crate) fn new(reader: &'r mut dyn Read, len_bytes: u64) -> Self {
        let capacity = len_bytes.clamp(1, BUFFER_BYTES) as usize;
        Self { reader: BufReader::with_capacity(capacity, reader), at_bytes: 0, len_bytes }
    }

    /// Bytes read so far.
    pub(crate) fn at_bytes(&self) -> u64 {
        self.at_bytes
    }

    /// Bytes from here to the end of the file.
    pub(crate) fn remaining_bytes(&self) -> u64 {
        self.len_bytes - self.at_bytes
    }

    fn truncated(&self, what: &str, need_bytes: u64, remaining_bytes: u64) -> Error {
        Error::Truncated { what: clip(what), at_bytes: self.at_bytes, need_bytes, remaining_bytes }
    }

    /// Fills `out`; `what` names it in errors.
    fn fill(&mut self, out: &mut [u8], what: &str) -> Result<(), Error> {
        let need_bytes = out.len() as u64;
        if need_bytes > self.remaining_bytes() {
            return Err(self.truncated(what, need_bytes, self.remaining_bytes()));
        }
        let mut done = 0;
        while done < out.len() {
            match self.reader.read(&mut out[done..]) {
                Ok(0) => return Err(self.truncated(what, need_bytes, done as u64)),
                Ok(n) => done += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    let at_bytes = self.at_bytes + done as u64;
                    return Err(Error::Io { at_bytes, kind: e.kind(), message: e.to_string() });
                }
            }
        }
        self.at_bytes += need_bytes;
        Ok(())
    }

    /// The next `N` bytes.
    pub(crate) fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        self.fill(&mut out, what)?;
        Ok(out)
    }

    /// A 32-bit unsigned number.
    pub(crate) fn u32(&mut self, what: &str) -> Result<u32, Error> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    /// A 64-bit unsigned number.
    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, Error> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    /// A 64-bit count of items that take at least `each_bytes_min` each in what follows.
    pub(crate) fn count(&mut self, what: &str, each_bytes_min: u64) -> Result<usize, Error> {
        let count = self.u64(what)?;
        self.check_count(what, count, each_bytes_min)
    }

    /// `count` as a size, if the rest of the file can hold that many items of at least `each_bytes_min`.
    pub(crate) fn check_count(&self, what: &str, count: u64, each_bytes_min: u64) -> Result<usize, Error> {
        let fits = count.checked_mul(each_bytes_min).is_some_and(|bytes| bytes <= self.remaining_bytes());
        match usize::try_from(count) {
            Ok(n) if fits => Ok(n),
            _ => Err(Error::Count {
                what: clip(what),
                count,
                each_bytes_min,
                at_bytes: self.at_bytes,
                remaining_bytes: self.remaining_bytes(),
            }),
        }
    }

    /// A counted array of `N`-byte numbers.
    pub(crate) fn numbers<T, const N: usize>(
        &mut self,
        what: &str,
        decode: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Error> {
        let count = self.count(what, N as u64)?;
        let mut out = Vec::new();
        let mut chunk = [0u8; CHUNK_BYTES];
        while out.len() < count {
            let n = (count - out.len()).min(CHUNK_BYTES / N);
            self.fill(&mut chunk[..n * N], what)?;
            grow(&mut out, n, count);
            out.extend(chunk[..n * N].as_chunks::<N>().0.iter().map(|&bytes| decode(bytes)));
        }
        Ok(out)
    }

    /// A counted UTF-8 text.
    pub(crate) fn string(&mut self, what: &str) -> Result<String, Error> {
        let count = self.count(what, 1)?;
        let mut out = Vec::new();
        while out.len() < count {
            let start = out.len();
            let n = (count - start).min(CHUNK_BYTES);
            grow(&mut out, n, count);
            out.resize(start + n, 0);
            self.fill(&mut out[start..], what)?;
        }
        String::from_utf8(out).map_err(|e| Error::Utf8 {
            what: clip(what),
            at_bytes: self.at_bytes,
            len_bytes: count as u64,
            valid_bytes: e.utf8_error().valid_up_to() as u64,
        })
    }

    /// `count` texts, each behind its length; the caller has checked `count`.
    pub(crate) fn texts(&mut self, count: usize, what: &str) -> Result<Texts, Error> {
        let mut texts = Texts::default();
        while texts.len() < count {
            self.take_buffered(count, &mut texts);
            if texts.len() < count {
                // Past the end of the buffer, or bad: the long way reads on and says what is wrong.
                texts.push(&self.string(what)?);
            }
        }
        Ok(texts)
    }

    /// Appends texts that are whole in the buffer, up to `count` in all. Nearly all of a vocabulary's are.
    fn take_buffered(&mut self, count: usize, texts: &mut Texts) {
        let buffer = self.reader.buffer();
        let mut rest = &buffer[..buffer.len().min(usize::try_from(self.remaining_bytes()).unwrap_or(usize::MAX))];
        let before = rest.len();
        while texts.len() < count
            && let Some((len, behind)) = rest.split_first_chunk()
            && let Some((text, behind)) =
                usize::try_from(u64::from_le_bytes(*len)).ok().and_then(|n| behind.split_at_checked(n))
            && let Ok(text) = std::str::from_utf8(text)
        {
            texts.push(text);
            rest = behind;
        }
        let taken = before - rest.len();
        self.reader.consume(taken);
        self.at_bytes += taken as u64;
    }

    /// A list of `count` items read by `item`; the caller has checked `count`.
    pub(crate) fn list<T>(
        &mut self,
        count: usize,
        mut item: impl FnMut(&mut Self) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let mut out = Vec::new();
        for _ in 0..count {
            let next = item(self)?;
            grow(&mut out, 1, count);
            out.push(next);
        }
        Ok(out)
    }
}

/// Makes room for `more` items by doubling, but for no more than `total` in all.
fn grow<T>(out: &mut Vec<T>, more: usize, total: usize) {
    let need = out.len() + more;
    if need > out.capacity() {
        let capacity = need.max(out.capacity() * 2).max(4).min(total.max(need));
        out.reserve_exact(capacity - out.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_beyond_the_file_is_refused_before_anything_is_read() {
        let bytes = u64::MAX.to_le_bytes();
        let mut reader = &bytes[..];
        let error = Cursor::new(&mut reader, 8).string("text").unwrap_err();
        assert_eq!(
            error,
            Error::Count { what: "text".into(), count: u64::MAX, each_bytes_min: 1, at_bytes: 8, remaining_bytes: 0 }
        );
    }

    #[test]
    fn a_reader_shorter_than_the_stated_length_is_truncated() {
        let mut bytes = 1_000_000u64.to_le_bytes().to_vec();
        bytes.extend([7; 5000]);
        let mut reader = &bytes[..];
        let error = Cursor::new(&mut reader, u64::MAX).numbers("list", |[b]: [u8; 1]| b).unwrap_err();
        assert!(matches!(error, Error::Truncated { remaining_bytes: 904, .. }), "{error:?}");
    }

    #[test]
    fn texts_are_the_same_however_the_reader_cuts_them_and_a_bad_one_is_found_at_its_place() {
        struct Slow<'b>(&'b [u8], usize);
        impl Read for Slow<'_> {
            fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
                let n = out.len().min(self.1).min(self.0.len());
                out[..n].copy_from_slice(&self.0[..n]);
                self.0 = &self.0[n..];
                Ok(n)
            }
        }
        let list = ["", "a", "zażółć", "🦀🦀", "", "the end"];
        let mut bytes: Vec<u8> = Vec::new();
        for text in list {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        let read = |bytes: &[u8], step| {
            let mut reader = Slow(bytes, step);
            let cursor = &mut Cursor::new(&mut reader, bytes.len() as u64);
            cursor.texts(list.len(), "texts")
        };
        let wanted: Texts = list.iter().collect();
        let mut bad = bytes.clone();
        let end = bad.len();
        bad[end - 1] = 0xff;
        for step in [1, 3, 10, 1000] {
            assert_eq!(read(&bytes, step), Ok(wanted.clone()), "{step}");
            let error = read(&bad, step).unwrap_err();
            assert!(
                matches!(error, Error::Utf8 { at_bytes, valid_bytes: 6, .. } if at_bytes == end as u64),
                "{error:?}"
            );
        }
    }

    #[test]
    fn a_failing_reader_reports_the_position() {
        struct Failing;
        impl Read for Failing {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::Error::other("unplugged"))
            }
        }
        let error = Cursor::new(&mut Failing, 100).u32("header").unwrap_err();
        assert_eq!(error, Error::Io { at_bytes: 0, kind: ErrorKind::Other, message: "unplugged".into() });
    }

    #[test]
    fn vectors_never_grow_past_what_was_claimed() {
        let mut out: Vec<u64> = Vec::new();
        for i in 0..1000 {
            grow(&mut out, 1, 1000);
            out.push(i);
            assert!(out.capacity() <= 1000);
        }
    }
}
