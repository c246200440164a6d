//! One file from an HTTP server into the store: resumed where it was cut, checked, and named only when whole.
//!
//! Beside `file` there are, while it is on its way: `file.partial`, the bytes so far, and `file.partial.json`, which
//! version of the file they belong to.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use ureq::http::{HeaderMap, StatusCode, header};

use crate::disk::{CHUNK_BYTES, create_parent, hash_into, hex, publish, remove_if_there, with_suffix};
use crate::http::{Answer, Client, check_status};
use crate::{Error, Event, Report, tell};

/// Attempts in a row that bring no byte before the transfer is given up.
const FRUITLESS_MAX: u32 = 3;

/// What is known of a file beforehand.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    pub bytes: Option<u64>,
    pub sha256: Option<String>,
}

/// What the bytes of a `.partial` belong to.
#[derive(Debug, Default, Serialize, Deserialize)]
struct PartialInfo {
    /// The version as the first hop names it.
    first_etag: Option<String>,
    /// The version as the last hop names it.
    last_etag: Option<String>,
}

/// How one attempt ended.
enum Attempt {
    Whole,
    /// The connection ended early.
    Cut(Error),
    /// What is on disk does not go with what the server has now.
    Stale,
}

/// Fetches `url` to `dest`.
pub(crate) fn download(
    client: &Client,
    url: &str,
    dest: &Path,
    expected: &Expected,
    retry_delay: Duration,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    create_parent(dest)?;
    let (expected, total) = (expected.clone(), expected.bytes);
    let mut transfer = Transfer { client, url, dest, expected, done: 0, total, hasher: Sha256::new(), hashed: 0 };
    let mut fruitless = 0;
    loop {
        let before = transfer.partial_len()?;
        match transfer.attempt(report)? {
            Attempt::Whole => return transfer.finish(report),
            Attempt::Stale => {
                tell(report, Event::Note("the file has changed at its source; starting over"))?;
                transfer.discard()?;
                fruitless += 1;
                if fruitless >= FRUITLESS_MAX {
                    let reason = "the source gives another version every time".to_owned();
                    return Err(Error::Transfer { url: url.to_owned(), reason });
                }
            }
            Attempt::Cut(error) => {
                fruitless = if transfer.done > before { 0 } else { fruitless + 1 };
                if fruitless >= FRUITLESS_MAX {
                    return Err(error);
                }
                tell(report, Event::Note(&format!("{error}; continuing at byte {}", transfer.done)))?;
                std::thread::sleep(retry_delay * 2u32.pow(fruitless));
            }
        }
    }
}

struct Transfer<'a> {
    client: &'a Client,
    url: &'a str,
    dest: &'a Path,
    expected: Expected,
    done: u64,
    total: Option<u64>,
    hasher: Sha256,
    /// Bytes that `hasher` has seen.
    hashed: u64,
}

impl Transfer<'_> {
    fn partial(&self) -> std::path::PathBuf {
        with_suffix(self.dest, ".partial")
    }

    fn info_path(&self) -> std::path::PathBuf {
        with_suffix(self.dest, ".partial.json")
    }

    fn partial_len(&self) -> Result<u64, Error> {
        let partial = self.partial();
        match fs::metadata(&partial) {
            Ok(meta) => Ok(meta.len()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(e) => Err(Error::io(&partial)(e)),
        }
    }

    fn discard(&self) -> Result<(), Error> {
        remove_if_there(&self.partial())?;
        remove_if_there(&self.info_path())
    }

    /// One request, from where the partial file ends.
    fn attempt(&mut self, report: &mut Report<'_>) -> Result<Attempt, Error> {
        self.done = self.partial_len()?;
        let info: Option<PartialInfo> =
            fs::read(self.info_path()).ok().and_then(|json| serde_json::from_slice(&json).ok());
        let mut headers = Vec::new();
        let info = match info {
            Some(info) if self.done > 0 => {
                headers.push(("range", format!("bytes={}-", self.done)));
                // A weak tag does not promise equal bytes and may not stand here.
                if let Some(etag) = info.last_etag.as_deref().filter(|t| !t.starts_with("W/")) {
                    headers.push(("if-range", etag.to_owned()));
                }
                Some(info)
            }
            _ => {
                self.discard()?;
                self.done = 0;
                None
            }
        };
        let answer = match self.client.get(self.url, &headers) {
            Ok(answer) => answer,
            // Once something has come, a failure to connect is one more cut; before, the source is not there.
            Err(error @ Error::Transfer { .. }) if self.done > 0 => return Ok(Attempt::Cut(error)),
            Err(error) => return Err(error),
        };
        let status = answer.response.status();
        if status.is_server_error() && self.done > 0 {
            return Ok(Attempt::Cut(check_status(self.url, &answer).err().unwrap_or(Error::Cancelled)));
        }
        let now =
            PartialInfo { first_etag: tag(&answer.first_headers), last_etag: text(answer.response.headers(), "etag") };
        if let Some(before) = &info
            && before.first_etag != now.first_etag
        {
            return Ok(Attempt::Stale);
        }
        if status == StatusCode::RANGE_NOT_SATISFIABLE && self.done > 0 {
            let whole = content_range(answer.response.headers()).and_then(|r| r.total) == Some(self.done);
            return Ok(if whole { Attempt::Whole } else { Attempt::Stale });
        }
        check_status(self.url, &answer)?;
        self.learn(&answer);
        if status == StatusCode::PARTIAL_CONTENT {
            let range = content_range(answer.response.headers());
            let fits = range.as_ref().is_some_and(|r| r.start == self.done);
            if !fits || info.is_some_and(|before| before.last_etag != now.last_etag) {
                return Ok(Attempt::Stale);
            }
            self.total = range.and_then(|r| r.total).or(self.total);
        } else {
            // The whole file, asked for or not.
            self.done = 0;
            self.total = length(answer.response.headers()).or(self.total);
        }
        self.check_total()?;
        let json = serde_json::to_vec(&now).map_err(|e| Error::io(&self.info_path())(e.into()))?;
        fs::write(self.info_path(), json).map_err(Error::write(&self.info_path(), 0, None))?;
        self.receive(answer, report)
    }

    /// The hub names size and sha256 of a large file in its first answer.
    fn learn(&mut self, answer: &Answer) {
        if self.expected.sha256.is_none() {
            self.expected.sha256 = text(&answer.first_headers, "x-linked-etag").and_then(|t| as_sha256(&t));
        }
        if self.expected.bytes.is_none() {
            self.expected.bytes = text(&answer.first_headers, "x-linked-size").and_then(|t| t.parse().ok());
        }
    }

    fn check_total(&self) -> Result<(), Error> {
        match (self.expected.bytes, self.total) {
            (Some(expected), Some(found)) if expected != found => {
                Err(Error::Size { what: self.url.to_owned(), expected, found })
            }
            _ => Ok(()),
        }
    }

    /// Writes the body behind what is there.
    fn receive(&mut self, answer: Answer, report: &mut Report<'_>) -> Result<Attempt, Error> {
        let partial = self.partial();
        let mut file = File::options()
            .create(true)
            .write(true)
            .truncate(false)
            .open(&partial)
            .map_err(Error::write(&partial, self.done, self.total))?;
        file.set_len(self.done).map_err(Error::io(&partial))?;
        io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(Error::io(&partial))?;
        self.hash_partial(report)?;
        tell(report, Event::Bytes { done: self.done, total: self.total })?;
        let mut body = answer.response.into_body().into_with_config().limit(u64::MAX).reader();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let n = match body.read(&mut chunk) {
                Ok(n) => n,
                Err(e) => return Ok(Attempt::Cut(self.cut(e.to_string()))),
            };
            if n == 0 {
                break;
            }
            file.write_all(&chunk[..n]).map_err(Error::write(&partial, self.done, self.total))?;
            self.hasher.update(&chunk[..n]);
            self.done += n as u64;
            self.hashed = self.done;
            tell(report, Event::Bytes { done: self.done, total: self.total })?;
        }
        match self.total {
            Some(total) if self.done < total => {
                Ok(Attempt::Cut(self.cut(format!("the connection ended at byte {} of {total}", self.done))))
            }
            _ => Ok(Attempt::Whole),
        }
    }

    /// Brings the digest up to what is on disk, when that did not all come through this process.
    fn hash_partial(&mut self, report: &mut Report<'_>) -> Result<(), Error> {
        if self.hashed != self.done {
            self.hasher = Sha256::new();
            let partial = self.partial();
            self.hashed = hash_into(&mut self.hasher, &partial, report)?;
        }
        Ok(())
    }

    fn cut(&self, reason: String) -> Error {
        Error::Transfer { url: self.url.to_owned(), reason }
    }

    /// Checks the whole and gives it its name.
    fn finish(&mut self, report: &mut Report<'_>) -> Result<(), Error> {
        let partial = self.partial();
        let what = self.dest.display().to_string();
        if let Some(expected) = self.expected.bytes.or(self.total)
            && expected != self.done
        {
            self.discard()?;
            return Err(Error::Size { what, expected, found: self.done });
        }
        self.hash_partial(report)?;
        if let Some(expected) = &self.expected.sha256 {
            let found = hex(&self.hasher.finalize_reset());
            if !found.eq_ignore_ascii_case(expected) {
                self.discard()?;
                return Err(Error::Checksum { what, expected: expected.clone(), found });
            }
        }
        let file = File::options().append(true).open(&partial).map_err(Error::io(&partial))?;
        publish(&partial, &file, self.dest)?;
        remove_if_there(&self.info_path())
    }
}

/// The version of a file: of the file behind the redirect if the server tells, else of the answer.
fn tag(headers: &HeaderMap) -> Option<String> {
    text(headers, "x-linked-etag").or_else(|| text(headers, "etag"))
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

fn length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Large files have their sha256 as tag.
fn as_sha256(etag: &str) -> Option<String> {
    let digest = etag.trim_start_matches("W/").trim_matches('"');
    (digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit())).then(|| digest.to_ascii_lowercase())
}

struct ContentRange {
    start: u64,
    total: Option<u64>,
}

/// `bytes 5-9/10`, or `bytes */10` in a refusal.
fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
    let value = text(headers, "content-range")?;
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let start = match range {
        "*" => 0,
        _ => range.split_once('-')?.0.parse().ok()?,
    };
    Some(ContentRange { start, total: total.parse().ok() })
}
