//! The hub's protocol: which files a repository has, and which of them a quantization means.

use serde::Deserialize;

use crate::Error;
use crate::download::Expected;
use crate::http::{Client, check_status};

/// The quantization that is meant when none is named.
pub(crate) const DEFAULT_QUANT: &str = "Q4_K_M";

/// No listing is larger; a repository with a thousand files has about 300 KB.
const LISTING_BYTES_MAX: u64 = 64 << 20;

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RepoFile {
    pub path: String,
    pub bytes: Option<u64>,
    pub sha256: Option<String>,
}

impl RepoFile {
    pub(crate) fn expected(&self) -> Expected {
        Expected { bytes: self.bytes, sha256: self.sha256.clone() }
    }
}

#[derive(Deserialize)]
struct Listing {
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

/// Address of a file.
pub(crate) fn file_url(endpoint: &str, repo: &str, revision: &str, path: &str) -> String {
    let path: Vec<String> = path.split('/').map(percent_encode).collect();
    format!("{}/{repo}/resolve/{revision}/{}", endpoint.trim_end_matches('/'), path.join("/"))
}

/// RFC 3986: everything but the unreserved characters.
fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for b in text.bytes() {
        match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(b as char),
            _ => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

/// The `.gguf` files of a repository.
pub(crate) fn list(client: &Client, endpoint: &str, repo: &str) -> Result<Vec<RepoFile>, Error> {
    let url = format!("{}/api/models/{repo}?blobs=true", endpoint.trim_end_matches('/'));
    let mut answer = client.get(&url, &[])?;
    check_status(&url, &answer)?;
    let failed = |reason: String| Error::Transfer { url: url.clone(), reason };
    let body = answer.response.body_mut().with_config().limit(LISTING_BYTES_MAX).read_to_vec();
    let body = body.map_err(|e| failed(e.to_string()))?;
    let listing: Listing = serde_json::from_slice(&body).map_err(|e| failed(format!("not the hub's listing: {e}")))?;
    let gguf = listing.siblings.into_iter().filter(|s| s.rfilename.to_ascii_lowercase().ends_with(".gguf"));
    gguf.map(|s| {
        check_relative(&s.rfilename)?;
        let (sha256, lfs_size) = s.lfs.map_or((None, None), |l| (l.sha256, l.size));
        Ok(RepoFile { path: s.rfilename, bytes: lfs_size.or(s.size), sha256 })
    })
    .collect()
}

/// Refuses a path that could leave the directory it is put into.
pub(crate) fn check_relative(path: &str) -> Result<(), Error> {
    let part_is_bad = |part: &str| part.is_empty() || part == "." || part == ".." || part.contains(['\\', ':', '\0']);
    if path.split('/').any(part_is_bad) {
        return Err(Error::HostileName { name: path.to_owned() });
    }
    Ok(())
}

/// The files that `quant` means, in order: one, or all parts of a split one. Names are compared without case.
/// `repo` is for the message.
pub(crate) fn choose(repo: &str, files: &[RepoFile], quant: Option<&str>) -> Result<Vec<RepoFile>, Error> {
    // Projectors and importance matrices are no language models.
    let is_model = |f: &&RepoFile| {
        let name = file_name(&f.path).to_ascii_lowercase();
        !name.contains("mmproj") && !name.contains("imatrix")
    };
    // One candidate for each split file: its first part.
    let mut firsts: Vec<&RepoFile> =
        files.iter().filter(is_model).filter(|f| split_of(&f.path).is_none_or(|s| s.number == 1)).collect();
    firsts.sort_by_key(|f| (f.path.len(), f.path.clone()));
    let wanted = quant.unwrap_or(DEFAULT_QUANT);
    let found = firsts
        .iter()
        .find(|f| f.path.eq_ignore_ascii_case(wanted) || file_name(&f.path).eq_ignore_ascii_case(wanted))
        .or_else(|| firsts.iter().find(|f| has_quant(file_name(&f.path), wanted)))
        .or_else(|| firsts.iter().find(|f| has_quant(&f.path, wanted)));
    let first = match (found, &firsts[..]) {
        (Some(first), _) => *first,
        (None, [only]) if quant.is_none() => *only,
        _ => {
            let mut present: Vec<String> =
                firsts.iter().map(|f| quant_of(&f.path).unwrap_or_else(|| file_name(&f.path).to_owned())).collect();
            present.dedup();
            let present = if present.is_empty() { "no .gguf at all".to_owned() } else { present.join(", ") };
            return Err(Error::NoSuchQuant { repo: repo.to_owned(), wanted: wanted.to_owned(), present });
        }
    };
    let Some(split) = split_of(&first.path) else {
        return Ok(vec![first.clone()]);
    };
    (1..=split.count)
        .map(|number| {
            let path = split.path_of(number);
            files.iter().find(|f| f.path == path).cloned().ok_or_else(|| Error::NoSuchQuant {
                repo: repo.to_owned(),
                wanted: path,
                present: format!("the other parts of {}", split.stem),
            })
        })
        .collect()
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// A part of a split file: `stem-00001-of-00003.gguf`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Split {
    stem: String,
    pub number: u32,
    pub count: u32,
}

impl Split {
    /// The path of part `number`.
    pub(crate) fn path_of(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

/// Reads the numbers of a split file's name.
pub(crate) fn split_of(path: &str) -> Option<Split> {
    let base = path.strip_suffix(".gguf")?;
    let (base, count) = base.rsplit_once("-of-")?;
    let (stem, number) = base.rsplit_once('-')?;
    let read = |t: &str| (t.len() == 5).then(|| t.parse::<u32>().ok()).flatten();
    Some(Split { stem: stem.to_owned(), number: read(number)?, count: read(count)? })
}

/// Whether `quant` stands in `path` as a word of its own: `Q4_K` does not stand in `x-Q4_K_M` nor in `IQ4_K`.
fn has_quant(path: &str, quant: &str) -> bool {
    let (path, quant) = (path.to_ascii_uppercase(), quant.to_ascii_uppercase());
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    path.match_indices(&quant).any(|(at, _)| {
        let before = path[..at].chars().next_back();
        let after = path[at + quant.len()..].chars().next();
        !before.is_some_and(word) && !after.is_some_and(word)
    })
}

/// The quantization in a file name, if one can be told.
pub(crate) fn quant_of(path: &str) -> Option<String> {
    let known = |word: &str| {
        let digit_after =
            |prefix: &str| word.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        ["Q", "IQ", "TQ"].into_iter().any(digit_after) || ["F16", "BF16", "F32", "MXFP4"].contains(&word)
    };
    let upper = path.to_ascii_uppercase();
    let mut words = upper.split(['-', '.', '/']);
    words.rfind(|word| known(word)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<RepoFile> {
        paths.iter().map(|p| RepoFile { path: (*p).to_owned(), bytes: None, sha256: None }).collect()
    }

    fn chosen(paths: &[&str], quant: Option<&str>) -> Vec<String> {
        choose("r", &files(paths), quant).unwrap().into_iter().map(|f| f.path).collect()
    }

    #[test]
    fn a_quantization_is_a_whole_word_without_case() {
        let paths =
            ["m-IQ4_XS.gguf", "m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.q8_0.gguf", "mmproj-F16.gguf"];
        assert_eq!(chosen(&paths, None), ["m-Q4_K_M.gguf"]);
        assert_eq!(chosen(&paths, Some("q4_k_s")), ["m-Q4_K_S.gguf"]);
        assert_eq!(chosen(&paths, Some("Q8_0")), ["m.q8_0.gguf"]);
        assert_eq!(chosen(&paths, Some("UD-Q4_K_M")), ["m-UD-Q4_K_M.gguf"]);
        assert_eq!(chosen(&paths, Some("m.q8_0.gguf")), ["m.q8_0.gguf"]);
        assert!(choose("r", &files(&paths), Some("Q4_K")).is_err());
        let error = choose("r", &files(&paths), Some("F16")).unwrap_err().to_string();
        assert!(error.contains("Q8_0, IQ4_XS") && error.contains("F16"), "{error}");
    }

    #[test]
    fn the_only_file_is_taken_when_nothing_is_asked_for() {
        assert_eq!(chosen(&["m-Q8_0.gguf"], None), ["m-Q8_0.gguf"]);
        assert!(choose("r", &files(&["m-Q8_0.gguf"]), Some("Q4_0")).is_err());
        assert!(choose("r", &files(&[]), None).unwrap_err().to_string().contains("no .gguf at all"));
    }

    #[test]
    fn all_parts_of_a_split_file_are_chosen_in_order() {
        let paths = ["Q2_K/m-00002-of-00002.gguf", "Q2_K/m-00001-of-00002.gguf", "m-Q8_0.gguf"];
        assert_eq!(chosen(&paths, Some("Q2_K")), ["Q2_K/m-00001-of-00002.gguf", "Q2_K/m-00002-of-00002.gguf"]);
        assert!(choose("r", &files(&paths[1..]), Some("Q2_K")).is_err());
    }

    #[test]
    fn paths_that_leave_their_directory_are_refused() {
        for path in ["../a.gguf", "/a.gguf", "a/../../b.gguf", "a//b.gguf", "a\\..\\b.gguf", "C:/a.gguf", ""] {
            assert!(check_relative(path).is_err(), "{path:?}");
        }
        check_relative("Q4_K_M/a b.gguf").unwrap();
    }

    #[test]
    fn addresses_are_percent_encoded() {
        assert_eq!(file_url("https://h/", "u/r", "main", "a b/c.gguf"), "https://h/u/r/resolve/main/a%20b/c.gguf");
    }
}
