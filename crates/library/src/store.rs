//! The store on disk.
//!
//! ```text
//! home/models/catalog/NAME/TAG/FILE.gguf      rows of the catalog
//! home/models/hf.co/USER/REPO/PATH.gguf       files of the hub, as they lie there
//! home/locks/…                                one for each file ever fetched
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::catalog::CatalogEntry;
use crate::hub::{RepoFile, choose, quant_of, split_of};
use crate::name::Name;
use crate::{Config, Error};

/// Directories below a repository are followed this deep.
const DEPTH_MAX: usize = 4;

/// A store and the sources that fill it.
#[derive(Debug, Clone)]
pub struct Library {
    pub(crate) config: Config,
}

/// A model in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredModel {
    /// The name that finds it.
    pub name: String,
    /// The file, or the first of a split one.
    pub path: PathBuf,
    /// Size of all its files in bytes.
    pub bytes: u64,
    /// When it came.
    pub modified: Option<SystemTime>,
}

impl Library {
    /// The library of `config`.
    pub fn new(config: Config) -> Library {
        Library { config }
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn models_dir(&self) -> PathBuf {
        self.config.home.join("models")
    }

    pub(crate) fn catalog_path(&self, entry: &CatalogEntry) -> PathBuf {
        self.models_dir().join("catalog").join(entry.name).join(entry.tag).join(entry.file)
    }

    pub(crate) fn repo_dir(&self, user: &str, repo: &str) -> PathBuf {
        self.models_dir().join("hf.co").join(user).join(repo)
    }

    /// The row of the catalog, or an error that lists the rows.
    pub(crate) fn entry(&self, name: &str, tag: Option<&str>) -> Result<&'static CatalogEntry, Error> {
        CatalogEntry::find(name, tag).ok_or_else(|| Error::Unknown {
            name: match tag {
                Some(tag) => format!("{name}:{tag}"),
                None => name.to_owned(),
            },
            known: CatalogEntry::known(),
        })
    }

    /// The file of `name`, if it is here and whole. A path is taken as it is; opening it tells whether it is there.
    pub fn find(&self, name: &Name) -> Result<Option<PathBuf>, Error> {
        match name {
            Name::Path(path) => Ok(Some(path.clone())),
            Name::Catalog { name, tag } => {
                let entry = self.entry(name, tag.as_deref())?;
                let path = self.catalog_path(entry);
                let whole = fs::metadata(&path).is_ok_and(|m| m.len() == entry.assembly.bytes);
                Ok(whole.then_some(path))
            }
            Name::Hub { user, repo, quant } => {
                let dir = self.repo_dir(user, repo);
                let mut files = Vec::new();
                gguf_files(&dir, "", DEPTH_MAX, &mut files);
                Ok(choose(repo, &files, quant.as_deref()).ok().map(|chosen| dir.join(&chosen[0].path)))
            }
        }
    }

    /// All models in the store, by name.
    pub fn list(&self) -> Result<Vec<StoredModel>, Error> {
        let mut models = Vec::new();
        for entry in crate::CATALOG {
            let path = self.catalog_path(entry);
            if fs::metadata(&path).is_ok_and(|m| m.len() == entry.assembly.bytes) {
                models.push(stored(format!("{}:{}", entry.name, entry.tag), path)?);
            }
        }
        let hub = self.models_dir().join("hf.co");
        for user in directories(&hub) {
            for repo in directories(&hub.join(&user)) {
                let dir = self.repo_dir(&user, &repo);
                let mut files = Vec::new();
                gguf_files(&dir, "", DEPTH_MAX, &mut files);
                for file in files.iter().filter(|f| split_of(&f.path).is_none_or(|s| s.number == 1)) {
                    let quant = quant_of(&file.path)
                        .filter(|q| choose(&repo, &files, Some(q)).is_ok_and(|chosen| chosen[0].path == file.path));
                    let tag = quant.unwrap_or_else(|| file.path.clone());
                    models.push(stored(format!("hf.co/{user}/{repo}:{tag}"), dir.join(&file.path))?);
                }
            }
        }
        models.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(models)
    }

    /// Deletes the files of `name`; gives the bytes freed. Only what the store holds can be deleted.
    pub fn remove(&self, name: &Name) -> Result<u64, Error> {
        let absent = || Error::Absent { name: name.to_string(), home: self.config.home.clone() };
        if let Name::Path(_) = name {
            return Err(Error::Name {
                name: name.to_string(),
                reason: "only models of the store are removed, and this is a path".to_owned(),
            });
        }
        let path = self.find(name)?.ok_or_else(absent)?;
        let mut freed = 0;
        for part in parts(&path) {
            let bytes = fs::metadata(&part).map_err(Error::io(&part))?.len();
            fs::remove_file(&part).map_err(Error::io(&part))?;
            freed += bytes;
        }
        // Directories that this leaves empty go too; one that is not empty stays, which is no error.
        let below = |dir: &&Path| dir.starts_with(self.models_dir()) && *dir != self.models_dir();
        path.ancestors().skip(1).take_while(below).take_while(|dir| fs::remove_dir(dir).is_ok()).for_each(drop);
        Ok(freed)
    }
}

/// All files of the model whose first is `path`.
fn parts(path: &Path) -> Vec<PathBuf> {
    let text = path.to_string_lossy();
    match split_of(&text) {
        Some(split) => (1..=split.count).map(|n| PathBuf::from(split.path_of(n))).collect(),
        None => vec![path.to_owned()],
    }
}

fn stored(name: String, path: PathBuf) -> Result<StoredModel, Error> {
    let modified = fs::metadata(&path).map_err(Error::io(&path))?.modified().ok();
    let bytes = parts(&path).iter().filter_map(|p| Some(fs::metadata(p).ok()?.len())).sum();
    Ok(StoredModel { name, path, bytes, modified })
}

fn directories(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let dirs = entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
    dirs.filter_map(|e| e.file_name().into_string().ok()).collect()
}

/// Finished `.gguf` files below `dir`, with `/` between the parts of their paths.
fn gguf_files(dir: &Path, prefix: &str, depth: usize, out: &mut Vec<RepoFile>) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let path = format!("{prefix}{name}");
        match entry.file_type() {
            Ok(t) if t.is_dir() && depth > 0 => gguf_files(&entry.path(), &format!("{path}/"), depth - 1, out),
            Ok(_) if name.to_ascii_lowercase().ends_with(".gguf") => {
                out.push(RepoFile { path, bytes: None, sha256: None });
            }
            _ => {}
        }
    }
}
