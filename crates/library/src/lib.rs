//! Model names, the store on disk, the catalog, and how files get from their sources into the store.
//!
//! Knows networks and disks, and nothing of inference. The environment is not read here: the caller fills in a
//! [`Config`].
#![forbid(unsafe_code)]

mod catalog;
mod disk;
mod download;
mod error;
mod http;
mod hub;
mod name;
pub mod package;
mod pull;
mod remote;
mod store;

pub use catalog::{CATALOG, CatalogEntry, DEFAULT_MODEL};
pub use error::Error;
pub use name::Name;
pub use pull::Pulled;
pub use remote::RemoteFile;
pub use store::{Library, StoredModel};

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

/// Where things are and how long to wait for them.
#[derive(Debug, Clone)]
pub struct Config {
    /// Directory of the store.
    pub home: PathBuf,
    /// Base address of the hub.
    pub hub_endpoint: String,
    /// Bearer token for the hub; goes to the hub's own host only.
    pub hub_token: Option<String>,
    /// Proxy address.
    pub proxy: Option<String>,
    /// Hosts that are reached without the proxy, comma-separated.
    pub no_proxy: Option<String>,
    /// Certificates to trust instead of the built-in ones: a PEM file.
    pub ca_file: Option<PathBuf>,
    /// Program that runs `-m pip`.
    pub python: PathBuf,
    /// Time for one connection when there is another source to turn to.
    pub connect_timeout_short: Duration,
    /// Time for one connection when there is none.
    pub connect_timeout: Duration,
    /// Without a byte for this long, a transfer has stalled. There is no limit on the whole.
    pub stall_timeout: Duration,
    /// Pause before a broken transfer is taken up again; doubles each time.
    pub retry_delay: Duration,
}

impl Config {
    /// Defaults for a store at `home`.
    pub fn new(home: impl Into<PathBuf>) -> Self {
        Config {
            home: home.into(),
            hub_endpoint: "https://huggingface.co".to_owned(),
            hub_token: None,
            proxy: None,
            no_proxy: None,
            ca_file: None,
            python: PathBuf::from("python3"),
            connect_timeout_short: Duration::from_secs(4),
            connect_timeout: Duration::from_secs(15),
            stall_timeout: Duration::from_secs(30),
            retry_delay: Duration::from_millis(500),
        }
    }
}

/// What a pull reports while it works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// A new transfer or check begins; the text says of what.
    Begin(&'a str),
    /// Bytes done so far, of how many if that is known.
    Bytes {
        /// Bytes done.
        done: u64,
        /// Bytes in all.
        total: Option<u64>,
    },
    /// Something that the user should know.
    Note(&'a str),
}

/// Receives [`Event`]s; `Break` cancels the pull.
pub type Report<'a> = dyn FnMut(Event<'_>) -> ControlFlow<()> + 'a;

/// Passes `event` on; a `Break` becomes [`Error::Cancelled`].
fn tell(report: &mut Report<'_>, event: Event<'_>) -> Result<(), Error> {
    match report(event) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Cancelled),
    }
}
