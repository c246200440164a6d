//! A model that is still where it comes from, as a source of bytes: enough to read its header.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use library::{Library, Name, RemoteFile};
use memory::Error;
use memory::source::{ByteSource, Identity, ReadRoom};

use crate::failure::Failure;

#[derive(Debug)]
struct Remote(RemoteFile);

/// The files of `name` as sources, and their name; nothing of them is read yet.
pub(crate) fn sources(library: &Library, name: &Name) -> Result<(Vec<Arc<dyn ByteSource>>, String), Failure> {
    let files = library.remote(name)?;
    let file_name = files.first().map_or_else(String::new, |file| file.file_name().to_owned());
    Ok((files.into_iter().map(|file| Arc::new(Remote(file)) as Arc<dyn ByteSource>).collect(), file_name))
}

impl ByteSource for Remote {
    fn name(&self) -> &str {
        self.0.url()
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn identity(&self) -> Option<Identity> {
        None
    }

    fn read(&self, ranges: &[Range<u64>], room: &mut ReadRoom) -> Result<Vec<Range<usize>>, Error> {
        let lens = || ranges.iter().map(|range| (range.end - range.start) as usize);
        let out = room.of(lens().sum())?;
        let mut places = Vec::with_capacity(ranges.len());
        for (range, len) in ranges.iter().zip(lens()) {
            let place = places.last().map_or(0, |last: &Range<usize>| last.end);
            self.read_cached(range.start, &mut out[place..place + len])?;
            places.push(place..place + len);
        }
        Ok(places)
    }

    /// There is no cache between: the same as reading.
    fn read_cached(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), Error> {
        self.0.read(offset_bytes, out).map_err(|e| Error::io(self.name(), io::Error::other(e.to_string())))
    }

    fn readers(&self) -> usize {
        1
    }
}
