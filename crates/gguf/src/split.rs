//! Models split over several files (`gguf-split`).
//!
//! The files are called `NAME-00001-of-0000N.gguf`, counted from 1. Each says its number from 0 in `split.no`, the
//! number of files in `split.count` and the number of tensors of all files in `split.tensors.count`. The first has
//! the model's metadata. Source: llama.cpp, `tools/gguf-split` and `llama_split_path`.

use crate::error::{Error, clip};
use crate::{Gguf, order_by_name};

/// A file name's parts: `NAME`, number of the file from 1, number of files.
fn parse(name: &str) -> Option<(&str, usize, usize)> {
    let number = |digits: &str| -> Option<usize> {
        (digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
    };
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, no) = rest.rsplit_once('-')?;
    let (no, count) = (number(no)?, number(count)?);
    (1..=count).contains(&no).then_some((stem, no, count))
}

/// The file names of all shards in order, if `name` (without directories) is the name of one of them.
pub fn shard_names(name: &str) -> Option<Vec<String>> {
    let (stem, _, count) = parse(name)?;
    Some((1..=count).map(|no| shard_name(stem, no, count)).collect())
}

fn shard_name(stem: &str, no: usize, count: usize) -> String {
    format!("{stem}-{no:05}-of-{count:05}.gguf")
}

/// The names of the files to open for the model `name` (without directories): all shards if it is the first of a split
/// model, else itself. A shard that is not the first is an error that names the first.
pub fn files(name: &str) -> Result<Vec<String>, Error> {
    match parse(name) {
        Some((stem, no, count)) if no != 1 => {
            Err(Error::NotFirstShard { given: name.to_owned(), first: shard_name(stem, 1, count) })
        }
        _ => Ok(shard_names(name).unwrap_or_else(|| vec![name.to_owned()])),
    }
}

impl Gguf {
    /// One index over the files of a split model, in order; the metadata is that of the first.
    ///
    /// A single file that is not split is returned as it is. Errors: a file that is missing, in the wrong place or of
    /// another split, a tensor in two files, a number of tensors other than stated.
    pub fn merge(shards: Vec<Gguf>) -> Result<Gguf, Error> {
        let given = shards.len();
        let found: u64 = shards.iter().map(|s| s.tensors.len() as u64).sum();
        for (place, shard) in shards.iter().enumerate() {
            check_shard(shard, place + 1, given, found)?;
        }

        let mut shards = shards.into_iter();
        let mut merged = shards.next().ok_or(Error::NoShards)?;
        for (place, shard) in shards.enumerate() {
            merged.tensors.extend(shard.tensors.into_iter().map(|mut tensor| {
                tensor.shard = place + 1;
                tensor
            }));
        }
        merged.shards = given;
        merged.by_name = order_by_name(&merged.tensors, |a, b| Error::ShardDuplicate {
            name: clip(&a.name),
            first: a.shard + 1,
            second: b.shard + 1,
        })?;
        Ok(merged)
    }
}

/// Checks what file number `shard` (from 1) of `given` says about itself and about all.
fn check_shard(gguf: &Gguf, shard: usize, given: usize, tensors: u64) -> Result<(), Error> {
    let number = |key: &'static str| gguf.metadata.u64(key).ok_or(Error::ShardKey { shard, given, key });
    if given == 1 && gguf.metadata.get("split.count").is_none() {
        return Ok(());
    }
    let count = number("split.count")?;
    // A model in one file may carry the keys with a count of 0 or 1.
    if given == 1 && count <= 1 {
        return Ok(());
    }
    let no = number("split.no")?;
    if no != shard as u64 - 1 {
        return Err(Error::ShardOrder { shard, said: no.saturating_add(1) });
    }
    if count != given as u64 {
        return Err(Error::ShardCount { shard, said: count, given });
    }
    let said = number("split.tensors.count")?;
    if said != tensors {
        return Err(Error::ShardTensors { shard, said, found: tensors });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_count_from_one_with_five_digits() {
        let names = shard_names("m-00001-of-00003.gguf").unwrap();
        assert_eq!(names, ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]);
        assert_eq!(shard_names("a-of-b-00002-of-00002.gguf").unwrap()[0], "a-of-b-00001-of-00002.gguf");
    }

    #[test]
    fn other_names_are_not_those_of_shards() {
        for name in [
            "m.gguf",
            "m-1-of-3.gguf",
            "m-00000-of-00003.gguf",
            "m-00004-of-00003.gguf",
            "m-00001-of-00003.bin",
            "m-0000a-of-00003.gguf",
            "m-+0001-of-00003.gguf",
            "00001-of-00003.gguf",
            "",
        ] {
            assert_eq!(shard_names(name), None, "{name}");
            assert_eq!(files(name).unwrap(), [name]);
        }
    }

    #[test]
    fn a_shard_that_is_not_the_first_is_refused_and_the_first_named() {
        assert_eq!(files("m-00001-of-00002.gguf").unwrap().len(), 2);
        let error = files("m-00002-of-00002.gguf").unwrap_err();
        assert!(error.to_string().contains("m-00001-of-00002.gguf"), "{error}");
    }
}
