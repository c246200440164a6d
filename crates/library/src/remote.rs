//! Parts of a file where it comes from: a header tells how a model would run, and has a hundredth of the file.

use std::io::Read;
use std::ops::Range;
use std::sync::Mutex;

use ureq::http::{HeaderMap, header};

use crate::Error;
use crate::http::{Client, check_status};
use crate::hub::{choose, file_url, list};
use crate::name::Name;
use crate::store::Library;

/// A file on a server that is asked for parts of it.
pub struct RemoteFile {
    client: Client,
    url: String,
    len_bytes: u64,
    /// The version that the first part was of.
    version: Mutex<Option<String>>,
}

impl Library {
    /// The files of `name` where they come from, in order; nothing is fetched but the list of them. A path has no source.
    pub fn remote(&self, name: &Name) -> Result<Vec<RemoteFile>, Error> {
        let endpoint = &self.config.hub_endpoint;
        let file = |url: String, len_bytes: Option<u64>, connect_timeout| -> Result<RemoteFile, Error> {
            let client = Client::new(&self.config, connect_timeout)?;
            let unknown =
                || Error::Transfer { url: url.clone(), reason: "the hub does not tell its length".to_owned() };
            Ok(RemoteFile { len_bytes: len_bytes.ok_or_else(unknown)?, client, url, version: Mutex::default() })
        };
        match name {
            Name::Path(path) => Err(Error::Name {
                name: path.display().to_string(),
                reason: "a path is used as it is and has no other source".to_owned(),
            }),
            Name::Catalog { name, tag } => {
                let entry = self.entry(name, tag.as_deref())?;
                let url = file_url(endpoint, entry.hub_repo, entry.hub_revision, entry.file);
                Ok(vec![file(url, Some(entry.assembly.bytes), self.config.connect_timeout_short)?])
            }
            Name::Hub { user, repo, quant } => {
                let (full, timeout) = (format!("{user}/{repo}"), self.config.connect_timeout);
                let files = list(&Client::new(&self.config, timeout)?, endpoint, &full)?;
                let chosen = choose(&full, &files, quant.as_deref())?;
                chosen.into_iter().map(|f| file(file_url(endpoint, &full, "main", &f.path), f.bytes, timeout)).collect()
            }
        }
    }
}

impl RemoteFile {
    /// Its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its name, without directories.
    pub fn file_name(&self) -> &str {
        self.url.rsplit('/').next().unwrap_or(&self.url)
    }

    /// Its length in bytes, as the hub tells it.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Fills `out` with the bytes from `offset_bytes` on. Errors: the connection's; a server that sends something else than
    /// this part of the file that the first part was of.
    pub fn read(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), Error> {
        if out.is_empty() {
            return Ok(());
        }
        let range = offset_bytes..offset_bytes + out.len() as u64;
        let asked = format!("bytes={}-{}", range.start, range.end - 1);
        let mut answer = self.client.get(&self.url, &[("range", asked)])?;
        check_status(&self.url, &answer)?;
        let failed = |reason: String| Error::Transfer { url: self.url.clone(), reason };
        let headers = answer.response.headers();
        if answer.response.status() == 206 {
            self.check_part(headers, &range).map_err(failed)?;
        } else if range.start > 0 {
            return Err(failed("the server does not give parts of files".to_owned()));
        }
        self.check_version(headers).map_err(failed)?;
        // A whole file is read only as far as it is wanted.
        let body = answer.response.body_mut().with_config().limit(u64::MAX).reader();
        let got = read_up_to(body, out).map_err(|e| failed(e.to_string()))?;
        if got < out.len() {
            return Err(failed(format!("{got} bytes came of {} from byte {} on", out.len(), range.start)));
        }
        Ok(())
    }

    /// Whether an answer is the part that was asked for.
    fn check_part(&self, headers: &HeaderMap, range: &Range<u64>) -> Result<(), String> {
        let told = headers.get(header::CONTENT_RANGE).and_then(|v| v.to_str().ok()).unwrap_or("");
        let wanted = format!("bytes {}-{}/{}", range.start, range.end - 1, self.len_bytes);
        if told == wanted { Ok(()) } else { Err(format!("the server gave {told:?} instead of {wanted:?}")) }
    }

    fn check_version(&self, headers: &HeaderMap) -> Result<(), String> {
        let now = headers.get(header::ETAG).and_then(|v| v.to_str().ok()).unwrap_or("").to_owned();
        let mut version = self.version.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let first = version.get_or_insert_with(|| now.clone());
        if *first == now { Ok(()) } else { Err(format!("the file has changed at its source, from {first} to {now}")) }
    }
}

impl std::fmt::Debug for RemoteFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {}", self.len_bytes, self.url)
    }
}

fn read_up_to(mut from: impl Read, out: &mut [u8]) -> std::io::Result<usize> {
    let mut got = 0;
    while got < out.len() {
        match from.read(&mut out[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}
