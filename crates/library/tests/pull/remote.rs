//! Parts of files from a server that speaks the hub's protocol.

use fixtures::hub::{Reply, Request, Server, noise};
use library::{Config, Error, Library, Name, RemoteFile};
use serde_json::json;

const LEN: usize = 100_000;
const NAME: &str = "hf.co/u/r:Q8_0";

/// The remote file of a server that answers a question for it with `answer`.
fn remote(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> (Server, RemoteFile) {
    let server = Server::start(move |request, _| {
        if request.path.starts_with("/api/models/u/r") {
            let listing = json!({"siblings": [{"rfilename": "m-Q8_0.gguf", "size": LEN}]});
            return Reply::new(200, listing.to_string());
        }
        answer(request)
    });
    let mut config = Config::new("/no/such/home");
    config.hub_endpoint = server.address.clone();
    let files = Library::new(config).remote(&Name::parse(NAME).unwrap()).unwrap();
    let [file] = <[RemoteFile; 1]>::try_from(files).unwrap();
    (server, file)
}

#[test]
fn parts_come_as_they_are_asked_for_and_nothing_else_is_sent() {
    let file = noise(LEN, 1);
    let bytes = file.clone();
    let (server, remote) = remote(move |r| Reply::file(r, &file, "\"v1\""));
    assert_eq!((remote.file_name(), remote.len_bytes()), ("m-Q8_0.gguf", LEN as u64));
    for range in [0..10, 5000..70_000, LEN - 1..LEN] {
        let mut out = vec![0; range.len()];
        remote.read(range.start as u64, &mut out).unwrap();
        assert!(out == bytes[range]);
    }
    remote.read(7, &mut []).unwrap();
    let asked: Vec<_> = server.requests_for("/resolve/main/m-Q8_0.gguf").iter().map(Request::range).collect();
    assert_eq!(asked, [Some((0, Some(9))), Some((5000, Some(69_999))), Some((LEN - 1, Some(LEN - 1)))]);
}

#[test]
fn a_server_that_knows_no_parts_can_give_the_beginning_and_is_an_error_beyond() {
    let file = noise(LEN, 2);
    let bytes = file.clone();
    let (_server, remote) = remote(move |_| Reply::new(200, &file[..]));
    let mut out = vec![0; 100];
    remote.read(0, &mut out).unwrap();
    assert!(out == bytes[..100]);
    let error = remote.read(100, &mut out).unwrap_err().to_string();
    assert!(error.contains("parts of files"), "{error}");
}

#[test]
fn another_version_another_part_or_too_little_is_an_error_that_says_so() {
    type Answer = fn(&Request) -> Reply;
    let answers: [(Answer, &str); 4] = [
        (|r| Reply::file(r, &noise(LEN, 3), if r.range_start() == Some(0) { "\"v1\"" } else { "\"v2\"" }), "changed"),
        (|r| Reply::file(r, &noise(LEN + 1, 3), "\"v1\""), "instead of"),
        (|r| Reply::file(r, &noise(LEN, 3), "\"v1\"").cut_after(5), "m-Q8_0.gguf"),
        (|_| Reply::new(404, ""), "404"),
    ];
    for (answer, words) in answers {
        let (_server, remote) = remote(answer);
        let mut out = vec![0; 100];
        let read = remote.read(0, &mut out).and_then(|()| remote.read(200, &mut out));
        let error = read.unwrap_err();
        assert!(matches!(error, Error::Transfer { .. } | Error::Status { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn a_path_has_no_source() {
    let library = Library::new(Config::new("/no/such/home"));
    assert!(matches!(library.remote(&Name::parse("./m.gguf").unwrap()), Err(Error::Name { .. })));
}
