//! Model names: `name[:tag]`, `hf.co/user/repo[:quant]`, or a path.

use std::fmt;
use std::path::PathBuf;

use crate::Error;

/// A model as the user names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// A `.gguf` file, or the first of a split one.
    Path(PathBuf),
    /// A row of the catalog.
    Catalog {
        /// Short name.
        name: String,
        /// Variant; `None` is the first that the catalog has.
        tag: Option<String>,
    },
    /// A repository of the hub.
    Hub {
        /// Owner.
        user: String,
        /// Repository.
        repo: String,
        /// Quantization or file name; `None` is the default.
        quant: Option<String>,
    },
}

const HUB_PREFIXES: [&str; 4] = ["hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/"];

impl Name {
    /// Reads a name. A text with a slash or ending in `.gguf` is a path, unless it begins as a hub name does.
    pub fn parse(text: &str) -> Result<Name, Error> {
        let bad = |reason: &str| Error::Name { name: text.to_owned(), reason: reason.to_owned() };
        if text.is_empty() {
            return Err(bad("it is empty"));
        }
        if let Some(rest) = HUB_PREFIXES.iter().find_map(|p| text.strip_prefix(p)) {
            let (path, quant) = match rest.split_once(':') {
                Some((path, quant)) => (path, Some(quant)),
                None => (rest, None),
            };
            let parts: Vec<&str> = path.trim_end_matches('/').split('/').collect();
            let [user, repo] = parts[..] else {
                return Err(bad("a hub name is hf.co/USER/REPO[:QUANT]"));
            };
            for part in [Some(user), Some(repo), quant].into_iter().flatten() {
                check_word(part).map_err(|reason| bad(&reason))?;
            }
            return Ok(Name::Hub { user: user.into(), repo: repo.into(), quant: quant.map(str::to_owned) });
        }
        if Self::looks_like_path(text) {
            return Ok(Name::Path(PathBuf::from(text)));
        }
        let (name, tag) = match text.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (text, None),
        };
        for part in [Some(name), tag].into_iter().flatten() {
            check_word(part).map_err(|reason| bad(&reason))?;
        }
        Ok(Name::Catalog { name: name.into(), tag: tag.map(str::to_owned) })
    }

    /// Whether `text` is written as a path: it has a separator or ends in `.gguf`.
    pub fn looks_like_path(text: &str) -> bool {
        text.contains(['/', '\\']) || text.to_ascii_lowercase().ends_with(".gguf")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (base, tag) = match self {
            Name::Path(path) => return write!(f, "{}", path.display()),
            Name::Catalog { name, tag } => (name.clone(), tag),
            Name::Hub { user, repo, quant } => (format!("hf.co/{user}/{repo}"), quant),
        };
        match tag {
            Some(tag) => write!(f, "{base}:{tag}"),
            None => f.write_str(&base),
        }
    }
}

/// Names become directories: only letters, digits and `._-`, and no leading dot.
fn check_word(word: &str) -> Result<(), String> {
    if word.is_empty() {
        return Err("a part of it is empty".to_owned());
    }
    if word.starts_with('.') {
        return Err(format!("{word:?} begins with a dot"));
    }
    if let Some(c) = word.chars().find(|c| !(c.is_ascii_alphanumeric() || "._-".contains(*c))) {
        return Err(format!("{c:?} is not allowed"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_is_told_from_the_others() {
        let catalog = |name: &str, tag: Option<&str>| Name::Catalog { name: name.into(), tag: tag.map(str::to_owned) };
        assert_eq!(Name::parse("smollm2").unwrap(), catalog("smollm2", None));
        assert_eq!(Name::parse("smollm2:q4_1").unwrap(), catalog("smollm2", Some("q4_1")));
        let hub = Name::Hub { user: "a".into(), repo: "b-GGUF".into(), quant: Some("Q8_0".into()) };
        assert_eq!(Name::parse("hf.co/a/b-GGUF:Q8_0").unwrap(), hub);
        assert_eq!(Name::parse("https://huggingface.co/a/b-GGUF:Q8_0").unwrap(), hub);
        assert_eq!(Name::parse("m.gguf").unwrap(), Name::Path("m.gguf".into()));
        assert_eq!(Name::parse("./smollm2").unwrap(), Name::Path("./smollm2".into()));
        assert_eq!(Name::parse("C:\\m.GGUF").unwrap(), Name::Path("C:\\m.GGUF".into()));
    }

    #[test]
    fn names_that_would_leave_the_store_are_refused() {
        for text in [
            "",
            "..",
            ":x",
            "a:",
            "a:..",
            "hf.co/../x",
            "hf.co/a/..",
            "hf.co/a/b:../c",
            "hf.co/a",
            "hf.co/a/b/c",
            "a b",
            "a\0",
        ] {
            assert!(matches!(Name::parse(text), Err(Error::Name { .. })), "{text:?}");
        }
    }

    #[test]
    fn a_name_prints_as_it_is_written() {
        for text in ["smollm2", "smollm2:x", "hf.co/a/b", "hf.co/a/b:Q4_0", "./m.gguf"] {
            assert_eq!(Name::parse(text).unwrap().to_string(), text);
        }
    }
}
