//! HTTP/1.1 byte by byte, for a client or an upstream that must be able to do it wrong.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// One connection and what was read of it but not used.
pub(super) struct Wire {
    stream: TcpStream,
    unread: Vec<u8>,
}

/// First line and headers.
#[derive(Debug, Clone, Default)]
pub(super) struct Head {
    /// Request or status line.
    pub(super) first: String,
    /// Header names in lower case with their values, in the order they came.
    pub(super) lines: Vec<(String, String)>,
}

/// How the end of a body is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// There is no body.
    None,
    /// By `content-length`.
    Length(usize),
    /// By the last chunk.
    Chunked,
    /// By the end of the connection.
    UntilClose,
}

/// A body as far as it came.
#[derive(Debug, Clone, Default)]
pub(super) struct Body {
    pub(super) bytes: Vec<u8>,
    pub(super) trailers: Vec<(String, String)>,
    /// Whether the connection ended before it.
    pub(super) is_cut: bool,
}

impl Wire {
    pub(super) async fn connect(address: SocketAddr) -> io::Result<Self> {
        Self::new(TcpStream::connect(address).await?)
    }

    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            unread: Vec::new(),
        })
    }

    /// Sends bytes while whatever comes back is read, as a peer may answer before it was sent everything.
    pub(super) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (mut reader, mut writer) = self.stream.split();
        let unread = &mut self.unread;
        let read = async {
            while let Ok(1..) = reader.read_buf(unread).await {}
            // The peer sends no more; it may still read.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            sent = writer.write_all(bytes) => sent,
            () = read => Ok(()),
        }
    }

    /// Sends bytes as one chunk.
    pub(super) async fn send_chunk(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.send(&chunk(bytes)).await
    }

    /// Reads more; false at the end of the connection.
    pub(super) async fn fill(&mut self) -> io::Result<bool> {
        Ok(self.stream.read_buf(&mut self.unread).await? > 0)
    }

    /// Reads the next head; `None` where the connection ends first.
    pub(super) async fn head(&mut self) -> io::Result<Option<Head>> {
        let end = loop {
            if let Some(at) = self.unread.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.fill().await? {
                return Ok(None);
            }
        };
        let head: Vec<u8> = self.unread.drain(..end).collect();
        let text = String::from_utf8_lossy(&head).into_owned();
        let mut lines = text.trim_end().split("\r\n");
        let first = lines.next().unwrap_or_default().to_owned();
        let lines = lines.filter_map(header).collect();
        Ok(Some(Head { first, lines }))
    }

    /// Reads a body as far as it comes.
    pub(super) async fn body(&mut self, framing: Framing) -> Body {
        let mut body = Body::default();
        body.is_cut = self.read_body(framing, &mut body).await.is_none();
        body
    }

    async fn read_body(&mut self, framing: Framing, body: &mut Body) -> Option<()> {
        match framing {
            Framing::None => {}
            Framing::Length(length) => self.take(length, &mut body.bytes).await?,
            Framing::UntilClose => {
                while self.fill().await.ok()? {}
                body.bytes.append(&mut self.unread);
            }
            Framing::Chunked => {
                while self.chunk(&mut body.bytes).await? > 0 {}
                loop {
                    let line = self.line().await?;
                    match header(&line) {
                        Some(trailer) => body.trailers.push(trailer),
                        None => break,
                    }
                }
            }
        }
        Some(())
    }

    /// Reads one chunk and tells its size, but leaves what follows the last one.
    pub(super) async fn chunk(&mut self, bytes: &mut Vec<u8>) -> Option<usize> {
        let line = self.line().await?;
        let size = line.split(';').next().unwrap_or_default().trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        if size > 0 {
            self.take(size, bytes).await?;
            self.take(2, &mut Vec::new()).await?;
        }
        Some(size)
    }

    /// Moves so many bytes to `bytes`, or those that come before the connection ends.
    pub(super) async fn take(&mut self, mut length: usize, bytes: &mut Vec<u8>) -> Option<()> {
        loop {
            let count = length.min(self.unread.len());
            bytes.extend(self.unread.drain(..count));
            length -= count;
            if length == 0 {
                return Some(());
            }
            if !self.fill().await.ok()? {
                return None;
            }
        }
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            if !self.fill().await.ok()? {
                return None;
            }
        }
    }

    /// Reads and forgets for so long, or until the connection ends: then true.
    pub(super) async fn ends_within(&mut self, time: Duration) -> bool {
        let end = async {
            while self.fill().await.unwrap_or(false) {
                self.unread.clear();
            }
        };
        tokio::time::timeout(time, end).await.is_ok()
    }

    /// Sends no more.
    pub(super) async fn half_close(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }

    /// Ends the connection by a reset.
    pub(super) fn reset(self) {
        let _ = self.stream.set_zero_linger();
    }
}

impl Head {
    /// First value of a header.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let line = self.lines.iter().find(|(other, _)| other == name);
        line.map(|(_, value)| value.as_str())
    }

    /// The number that a status line gives.
    pub(super) fn status(&self) -> u16 {
        let status = self.first.split(' ').nth(1);
        status.and_then(|status| status.parse().ok()).unwrap_or(0)
    }

    /// How the body of a request ends that has this head.
    pub(super) fn request_framing(&self) -> Framing {
        self.framing().unwrap_or(Framing::None)
    }

    /// How the body of an answer ends that has this head.
    pub(super) fn answer_framing(&self, to_head: bool) -> Framing {
        if to_head || matches!(self.status(), 100..=199 | 204 | 304) {
            return Framing::None;
        }
        self.framing().unwrap_or(Framing::UntilClose)
    }

    fn framing(&self) -> Option<Framing> {
        if self.get("transfer-encoding").is_some() {
            return Some(Framing::Chunked);
        }
        Some(Framing::Length(self.get("content-length")?.parse().ok()?))
    }
}

impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.first)?;
        for (name, value) in &self.lines {
            write!(f, "\n{name}: {value}")?;
        }
        Ok(())
    }
}

/// Bytes as one chunk.
pub(super) fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
    chunk.extend_from_slice(bytes);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

/// What stands for bytes in a comparison: themselves when they are short text, else size and SHA-256.
pub(super) fn digest(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.len() < 2000 => format!("{:?}", text.replace('\n', " | ")),
        _ => {
            let sha256 = Sha256::digest(bytes);
            let hex: String = sha256.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{} bytes {hex}", bytes.len())
        }
    }
}

fn header(line: &str) -> Option<(String, String)> {
    let (name, value) = line.split_once(':')?;
    Some((name.to_ascii_lowercase(), value.trim().to_owned()))
}
