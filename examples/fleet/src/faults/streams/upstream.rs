//! An engine over HTTP/1.1 that does what the header `x-play` of a request says, and tells what reached it.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

use super::wire::{Body, Framing, Head, Wire, digest};

/// A running upstream; gone with its connections when it is dropped.
pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    accept: JoinHandle<()>,
}

/// What a rig's upstreams know of the exchanges, by the number in their header `x-id`.
#[derive(Debug, Default)]
pub(super) struct Notes {
    exchanges: Mutex<BTreeMap<u64, Note>>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Note {
    attempts: u32,
    /// Attempts that are not over.
    open: u32,
}

impl Notes {
    /// Attempts of an exchange that reached an upstream so far, and those that are still under way.
    pub(super) fn of(&self, id: u64) -> (u32, u32) {
        let note = self.lock().get(&id).copied().unwrap_or_default();
        (note.attempts, note.open)
    }

    /// An attempt begins: which one it is, and what ends it when it is dropped.
    pub(super) fn begin(self: &Arc<Self>, id: u64) -> (u32, Attempt) {
        let mut exchanges = self.lock();
        let note = exchanges.entry(id).or_default();
        note.attempts += 1;
        note.open += 1;
        (
            note.attempts,
            Attempt {
                notes: Arc::clone(self),
                id,
            },
        )
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Note>> {
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One attempt of an exchange.
pub(super) struct Attempt {
    notes: Arc<Notes>,
    id: u64,
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some(note) = self.notes.lock().get_mut(&self.id) {
            note.open -= 1;
        }
    }
}

impl Upstream {
    /// One that plays what it is asked to.
    pub(super) async fn start(notes: &Arc<Notes>) -> io::Result<Self> {
        let notes = Arc::clone(notes);
        Self::serve(move |wire| {
            let notes = Arc::clone(&notes);
            async move {
                let _ = serve(wire, &notes).await;
            }
        })
        .await
    }

    /// One that closes each connection as soon as it is there.
    pub(super) async fn closing() -> io::Result<Self> {
        Self::serve(|wire| async move { drop(wire) }).await
    }

    async fn serve<F: Future<Output = ()> + Send + 'static>(
        connection: impl Fn(Wire) -> F + Send + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let accept = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                if let Ok(wire) = Wire::new(stream) {
                    connections.spawn(connection(wire));
                }
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { address, accept })
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

/// What an `x-play` asks for: a word and its arguments.
pub(super) struct Play<'a>(Vec<&'a str>);

impl<'a> Play<'a> {
    pub(super) fn of(text: Option<&'a str>) -> Self {
        Self(text.unwrap_or("echo").split(' ').collect())
    }

    /// The word or one of its arguments.
    pub(super) fn word(&self, at: usize) -> &'a str {
        self.0.get(at).copied().unwrap_or_default()
    }

    pub(super) fn number(&self, at: usize) -> u64 {
        self.word(at).parse().unwrap_or(0)
    }

    pub(super) fn pause(&self, at: usize) -> Duration {
        Duration::from_millis(self.number(at))
    }
}

async fn serve(mut wire: Wire, notes: &Arc<Notes>) -> io::Result<()> {
    while let Some(head) = wire.head().await? {
        let id = head.get("x-id").and_then(|id| id.parse().ok()).unwrap_or(0);
        let (attempt, _under_way) = notes.begin(id);
        let play = Play::of(head.get("x-play"));
        if play.word(0) == "fail" && u64::from(attempt) <= play.number(1) {
            fail(wire, &head, play.word(2), play.word(3) == "reset").await;
            return Ok(());
        }
        if !answer(&mut wire, &head, &play, attempt).await? {
            return wire.half_close().await;
        }
    }
    Ok(())
}

/// Breaks off where it is told to.
async fn fail(mut wire: Wire, head: &Head, phase: &str, by_reset: bool) {
    if phase == "body" {
        // Some of the body, but not all of it.
        let _ = wire.take(100, &mut Vec::new()).await;
    } else if phase != "head" {
        wire.body(head.request_framing()).await;
    }
    let begun: &[u8] = match phase {
        "hints" => HINTS,
        "answer" => b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n",
        "length" => b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf of it",
        "chunk" => b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nwhole\r\nff\r\nhalf",
        "between" => b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nwhole\r\n",
        _ => b"",
    };
    let _ = wire.send(begun).await;
    if !begun.is_empty() {
        // What is on its way when a reset follows may be lost; both sides shall see it.
        tokio::time::sleep(LINGER).await;
    }
    if by_reset {
        wire.reset();
    }
}

/// Plays; false when the connection is to be closed.
async fn answer(wire: &mut Wire, head: &Head, play: &Play<'_>, attempt: u32) -> io::Result<bool> {
    match play.word(0) {
        "early" => return early(wire, head, play).await,
        "duplex" => {
            wire.send(CHUNKED).await?;
            let mut piece = Vec::new();
            while let Some(1..) = wire.chunk(&mut piece).await {
                wire.send_chunk(&std::mem::take(&mut piece)).await?;
            }
            wire.body(Framing::Chunked).await;
            wire.send(b"0\r\n\r\n").await?;
            return Ok(false);
        }
        "upgrade" => {
            wire.send(
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
            )
            .await?;
            return tunnel(wire).await;
        }
        "connect" => {
            wire.send(b"HTTP/1.1 200 OK\r\n\r\n").await?;
            return tunnel(wire).await;
        }
        "hundred" => wire.send(b"HTTP/1.1 100 Continue\r\n\r\n").await?,
        "expectation-failed" => {
            wire.send(b"HTTP/1.1 417 Expectation Failed\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                .await?;
            return Ok(false);
        }
        _ => {}
    }
    let body = wire.body(head.request_framing()).await;
    if body.is_cut {
        return Ok(false);
    }
    let echo = echo(head, &body);
    match play.word(0) {
        "status" if u64::from(attempt) <= play.number(2) => {
            reply(wire, play.word(1), "", &echo).await?;
        }
        "slow" | "hang" => {
            let pause = match play.word(0) {
                "slow" if u64::from(attempt) <= play.number(2).max(1) => play.pause(1),
                "slow" => Duration::ZERO,
                _ => Duration::from_secs(600),
            };
            if wire.ends_within(pause).await {
                return Ok(false);
            }
            reply(wire, "200 OK", "", &echo).await?;
        }
        "sse" => {
            wire.send(EVENTS).await?;
            for event in 0..play.number(1) {
                wire.send_chunk(format!("data: {event}\n\n").as_bytes()).await?;
                if wire.ends_within(play.pause(2)).await {
                    return Ok(false);
                }
            }
            wire.send_chunk(b"data: [DONE]\n\n").await?;
            wire.send(b"0\r\n\r\n").await?;
        }
        "hints" => {
            wire.send(HINTS).await?;
            reply(wire, "200 OK", "", &echo).await?;
        }
        "empty" => {
            let head = format!("HTTP/1.1 {} Nothing\r\netag: \"one\"\r\n\r\n", play.word(1));
            wire.send(head.as_bytes()).await?;
        }
        "head" => {
            wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
                .await?
        }
        "gzip" => {
            reply(
                wire,
                "200 OK",
                "content-encoding: gzip\r\nvary: accept-encoding\r\n",
                GZIP,
            )
            .await?
        }
        "cookies" => reply(wire, "200 OK", COOKIES, &echo).await?,
        "trailers" => {
            wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n")
                .await?;
            wire.send_chunk(&echo).await?;
            wire.send(b"0\r\nx-sum: 1\r\nx-sum: 2\r\n\r\n").await?;
        }
        "extensions" => {
            wire.send(CHUNKED).await?;
            wire.send(format!("{:x};name=value;other=\"quoted\"\r\n", echo.len()).as_bytes())
                .await?;
            wire.send(&echo).await?;
            wire.send(b"\r\n0;last\r\n\r\n").await?;
        }
        "until-close" => {
            wire.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n").await?;
            wire.send(&echo).await?;
            return Ok(false);
        }
        "headers" => {
            let value = "v".repeat(usize::try_from(play.number(2)).unwrap_or(0));
            let lines: String = (0..play.number(1))
                .map(|number| format!("x-large-{number}: {value}\r\n"))
                .collect();
            reply(wire, "200 OK", &lines, &echo).await?;
        }
        "large" => {
            let bytes = usize::try_from(play.number(1)).unwrap_or(0);
            let large: Vec<u8> = (0u32..).flat_map(u32::to_le_bytes).take(bytes).collect();
            reply(
                wire,
                "200 OK",
                "content-type: application/octet-stream\r\n",
                &large,
            )
            .await?;
        }
        _ => reply(wire, "200 OK", "content-type: text/plain\r\n", &echo).await?,
    }
    Ok(true)
}

/// Answers by the headers alone; what is left of the body is read, or not.
async fn early(wire: &mut Wire, head: &Head, play: &Play<'_>) -> io::Result<bool> {
    let closes = play.word(2) == "close";
    let more = if closes { "connection: close\r\n" } else { "" };
    reply(wire, &format!("{} Early", play.word(1)), more, b"early").await?;
    if closes {
        // Unread bytes would make the kernel send a reset, which may overtake the answer.
        wire.half_close().await?;
        wire.ends_within(LINGER).await;
        return Ok(false);
    }
    Ok(!wire.body(head.request_framing()).await.is_cut)
}

/// Sends back what comes until the peer sends no more.
async fn tunnel(wire: &mut Wire) -> io::Result<bool> {
    let mut byte = Vec::new();
    while wire.take(1, &mut byte).await.is_some() {
        wire.send(&byte).await?;
        byte.clear();
    }
    Ok(false)
}

async fn reply(wire: &mut Wire, status: &str, lines: &str, body: &[u8]) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\n{lines}content-length: {}\r\n\r\n",
        body.len()
    );
    let mut answer = head.into_bytes();
    answer.extend_from_slice(body);
    wire.send(&answer).await
}

/// All that reached the upstream, as text, except for what is new each time.
pub(super) fn echo(head: &Head, body: &Body) -> Vec<u8> {
    let mut lines = head.lines.clone();
    lines.retain(|(name, _)| name != "x-request-id");
    lines.sort();
    let head = Head {
        first: head.first.clone(),
        lines,
    };
    let (bytes, trailers) = (digest(&body.bytes), &body.trailers);
    format!("{head}\nbody: {bytes}\ntrailers: {trailers:?}\n").into_bytes()
}

const LINGER: Duration = Duration::from_millis(100);
const HINTS: &[u8] = b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n";
const CHUNKED: &[u8] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
const EVENTS: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
const COOKIES: &str = "set-cookie: a=1; path=/\r\nset-cookie: b=2; expires=Thu, 01 Jan 2099 00:00:00 GMT\r\n\
                       set-cookie: a=3\r\n";
/// Not really compressed: nobody here may look into it.
const GZIP: &[u8] = b"\x1f\x8b\x08\0\0\0\0\0\0\x03 not to be looked into \xff\xfe\0";
