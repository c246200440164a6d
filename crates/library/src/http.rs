//! GET requests with redirects followed by hand: the first answer carries what the hub knows of a file, and the token
//! must stay with the hub.

use std::fs;
use std::time::Duration;

use ureq::http::{HeaderMap, Response, StatusCode, Uri, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

use crate::{Config, Error};

const REDIRECTS_MAX: usize = 8;

/// An HTTP client with the settings of a [`Config`].
pub(crate) struct Client {
    agent: Agent,
    token: Option<String>,
    /// Scheme and authority that may see the token.
    token_origin: Option<String>,
}

/// An answer and what was seen on the way to it.
pub(crate) struct Answer {
    pub response: Response<Body>,
    /// Headers of the first hop.
    pub first_headers: HeaderMap,
}

impl Client {
    pub(crate) fn new(config: &Config, connect_timeout: Duration) -> Result<Client, Error> {
        let roots = match &config.ca_file {
            None => RootCerts::WebPki,
            Some(path) => {
                let pem = fs::read(path).map_err(Error::io(path))?;
                let certs = parse_pem(&pem).filter_map(|item| match item {
                    Ok(PemItem::Certificate(c)) => Some(c),
                    _ => None,
                });
                RootCerts::from(certs.collect::<Vec<_>>())
            }
        };
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("airs/", env!("CARGO_PKG_VERSION")))
            .proxy(proxy(config)?)
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .timeout_resolve(Some(connect_timeout))
            .timeout_connect(Some(connect_timeout))
            .timeout_recv_response(Some(config.stall_timeout))
            .timeout_per_read(Some(config.stall_timeout))
            .build()
            .new_agent();
        let token_origin = config.hub_endpoint.parse::<Uri>().ok().and_then(|uri| origin(&uri));
        Ok(Client { agent, token: config.hub_token.clone(), token_origin })
    }

    /// GETs `url`, following redirects; `headers` go to every hop, the token to the hub only.
    pub(crate) fn get(&self, url: &str, headers: &[(&str, String)]) -> Result<Answer, Error> {
        let failed = |reason: String| Error::Transfer { url: url.to_owned(), reason };
        let mut uri: Uri = url.parse().map_err(|e| failed(format!("bad address: {e}")))?;
        let mut first_headers = None;
        for _ in 0..REDIRECTS_MAX {
            let mut request = self.agent.get(&uri);
            for (name, value) in headers {
                request = request.header(*name, value);
            }
            if let Some(token) = &self.token
                && origin(&uri) == self.token_origin
            {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| failed(reason(&e)))?;
            let first_headers = &*first_headers.get_or_insert_with(|| response.headers().clone());
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED {
                return Ok(Answer { first_headers: first_headers.clone(), response });
            }
            let location = response.headers().get(header::LOCATION).and_then(|l| l.to_str().ok());
            let location = location.ok_or_else(|| failed(format!("{} without a location", response.status())))?;
            uri = redirect_target(&uri, location).map_err(failed)?;
        }
        Err(failed(format!("more than {REDIRECTS_MAX} redirects")))
    }
}

/// Turns an answer that is no success into an error.
pub(crate) fn check_status(url: &str, answer: &Answer) -> Result<(), Error> {
    let status = answer.response.status().as_u16();
    let hint = match status {
        200..=299 => return Ok(()),
        401 | 403 => " (private or gated, or no such repository: set HF_TOKEN to a token that may read it)",
        404 => " (no such repository or file)",
        429 => " (too many requests: try later)",
        _ => "",
    };
    Err(Error::Status { url: url.to_owned(), status, hint })
}

/// What went wrong, without the layers between.
fn reason(error: &ureq::Error) -> String {
    match error {
        ureq::Error::HostNotFound => "host not found".to_owned(),
        ureq::Error::Timeout(ureq::Timeout::PerRead) => "stalled: no byte for too long".to_owned(),
        ureq::Error::Timeout(what) => format!("no answer in time ({what})"),
        ureq::Error::Io(e) => e.to_string(),
        other => other.to_string(),
    }
}

fn origin(uri: &Uri) -> Option<String> {
    Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?))
}

/// Where a redirect leads. A step from https down to http is refused.
fn redirect_target(from: &Uri, location: &str) -> Result<Uri, String> {
    let absolute = if location.starts_with("http://") || location.starts_with("https://") {
        location.to_owned()
    } else if location.starts_with('/') && !location.starts_with("//") {
        format!("{}{location}", origin(from).unwrap_or_default())
    } else {
        return Err(format!("redirect to {location:?}"));
    };
    let to: Uri = absolute.parse().map_err(|e| format!("redirect to {location:?}: {e}"))?;
    if from.scheme_str() == Some("https") && to.scheme_str() != Some("https") {
        return Err(format!("redirect from https to {location:?}"));
    }
    Ok(to)
}

fn proxy(config: &Config) -> Result<Option<Proxy>, Error> {
    let Some(text) = config.proxy.as_deref().filter(|t| !t.is_empty()) else {
        return Ok(None);
    };
    // The address may hold a password, so it is not repeated.
    let bad = |e: ureq::Error| Error::Setting { setting: "HTTPS_PROXY".to_owned(), reason: e.to_string() };
    let plain = Proxy::new(text).map_err(bad)?;
    let mut builder = Proxy::builder(plain.protocol()).host(plain.host()).port(plain.port());
    if let Some(user) = plain.username() {
        builder = builder.username(user);
    }
    if let Some(password) = plain.password() {
        builder = builder.password(password);
    }
    for host in config.no_proxy.iter().flat_map(|list| list.split(',')) {
        builder = builder.no_proxy(host.trim());
    }
    builder.build().map(Some).map_err(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_may_be_relative_but_not_leave_tls() {
        let from: Uri = "https://hub.example/a/b".parse().unwrap();
        assert_eq!(redirect_target(&from, "/c").unwrap(), "https://hub.example/c");
        assert_eq!(redirect_target(&from, "https://cdn.example/x?y").unwrap(), "https://cdn.example/x?y");
        assert!(redirect_target(&from, "http://cdn.example/x").is_err());
        assert!(redirect_target(&from, "//cdn.example/x").is_err());
        assert!(redirect_target(&from, "file:///etc/passwd").is_err());
    }
}
