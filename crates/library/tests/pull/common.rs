//! A small HTTP server that speaks as much of the hub's protocol as a test wants, and keeps what it was asked.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::thread;

use library::Event;
use sha2::{Digest, Sha256};

/// What a client asked.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    headers: HashMap<String, String>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// First byte of the range asked for.
    pub(crate) fn range_start(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// What the server answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    sent: Option<usize>,
    hang: bool,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Reply {
        Reply { status, body: body.into(), ..Reply::default() }
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// Ends the connection after `n` bytes of the body.
    pub(crate) fn cut_after(mut self, n: usize) -> Reply {
        self.sent = Some(n);
        self
    }

    /// Sends nothing more after `n` bytes of the body, but keeps the connection open.
    pub(crate) fn hang_after(mut self, n: usize) -> Reply {
        self.hang = true;
        self.cut_after(n)
    }

    /// `file` with its tag, or the part of it that `request` asks for.
    pub(crate) fn file(request: &Request, file: &[u8], etag: &str) -> Reply {
        match request.range_start() {
            Some(start) if request.header("if-range").is_none_or(|tag| tag == etag) => {
                if start >= file.len() {
                    return Reply::new(416, "").header("content-range", format!("bytes */{}", file.len()));
                }
                let range = format!("bytes {start}-{}/{}", file.len() - 1, file.len());
                Reply::new(206, &file[start..]).header("content-range", range)
            }
            _ => Reply::new(200, file),
        }
        .header("etag", etag)
    }
}

/// A server that lives as long as the test's process.
pub(crate) struct Server {
    pub(crate) address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Answers with `handler`, which also gets the number of requests before this one.
    pub(crate) fn start(handler: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        let handler = Arc::new(handler);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (seen, handler) = (Arc::clone(&seen), Arc::clone(&handler));
                thread::spawn(move || serve(&stream.unwrap(), &seen, &*handler));
            }
        });
        Server { address, requests }
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// Requests for paths that contain `part`.
    pub(crate) fn requests_for(&self, part: &str) -> Vec<Request> {
        self.requests().into_iter().filter(|r| r.path.contains(part)).collect()
    }
}

fn serve(mut stream: &TcpStream, seen: &Mutex<Vec<Request>>, handler: &dyn Fn(&Request, usize) -> Reply) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let path = first.split(' ').nth(1).unwrap().to_owned();
    let headers = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_once(": ").map(|(k, v)| (k.to_ascii_lowercase(), v.to_owned())))
        .collect();
    let request = Request { path, headers };
    let before = {
        let mut seen = seen.lock().unwrap();
        seen.push(request.clone());
        seen.len() - 1
    };
    let reply = handler(&request, before);
    let mut head =
        format!("HTTP/1.1 {} X\r\nconnection: close\r\ncontent-length: {}\r\n", reply.status, reply.body.len());
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let sent = &reply.body[..reply.sent.unwrap_or(reply.body.len())];
    // The client may have left: that is its right.
    let _ = stream.write_all((head + "\r\n").as_bytes()).and_then(|()| stream.write_all(sent));
    if reply.hang {
        // Until the client gives up.
        let _ = stream.read(&mut [0]);
    }
}

/// Bytes without any pattern that a mistake could hide behind.
pub(crate) fn noise(len: usize, seed: u8) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 32);
    let mut block = Sha256::digest([seed]);
    while out.len() < len {
        out.extend_from_slice(&block);
        block = Sha256::digest(block);
    }
    out.truncate(len);
    out
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Collects what a pull says.
pub(crate) fn notes(into: &mut Vec<String>) -> impl FnMut(Event<'_>) -> ControlFlow<()> {
    |event| {
        if let Event::Note(text) = event {
            into.push(text.to_owned());
        }
        ControlFlow::Continue(())
    }
}

pub(crate) fn quiet(_: Event<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}
