//! A way to Envoy's admin interface on which answers go wrong.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::client::Client;

/// How answers go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AdminFault {
    /// Not at all.
    None,
    /// They come after three seconds.
    Late,
    /// A byte at a time, and no end.
    Drip,
    /// So many bytes of other clusters come before the one that was asked for.
    Padded(usize),
    /// Bytes that are no text of clusters.
    Garbage,
    /// Another status, and no clusters.
    Status(u16),
    /// The connection closes in the middle.
    Cut,
}

/// A port that leads to the admin interface.
pub(super) struct Relay {
    address: SocketAddr,
    fault: watch::Sender<AdminFault>,
    asked: Arc<AtomicU64>,
    accepting: JoinHandle<()>,
}

impl Relay {
    /// Leads to `target`, which need not listen yet.
    pub(super) async fn to(target: SocketAddr, fault: AdminFault) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let fault = watch::Sender::new(fault);
        let asked = Arc::new(AtomicU64::new(0));
        let (faults, count) = (fault.subscribe(), Arc::clone(&asked));
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (faults, count) = (faults.clone(), Arc::clone(&count));
                tokio::spawn(async move {
                    // An error is a client that went away.
                    let _ = serve(stream, target, faults, &count).await;
                });
            }
        });
        Ok(Self {
            address,
            fault,
            asked,
            accepting,
        })
    }

    /// From here on answers go wrong so.
    pub(super) fn set(&self, fault: AdminFault) {
        self.asked.store(0, Ordering::Relaxed);
        self.fault.send_replace(fault);
    }

    /// Times it was asked since then.
    pub(super) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Where it begins.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Answers one request and closes.
async fn serve(
    mut stream: TcpStream,
    target: SocketAddr,
    faults: watch::Receiver<AdminFault>,
    asked: &AtomicU64,
) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    asked.fetch_add(1, Ordering::Relaxed);
    let fault = *faults.borrow();
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or("/");
    let answer = Client::new().get(&format!("http://{target}{path}")).await;
    let answer = answer.map_err(io::Error::other)?;
    let (mut status, mut body) = (answer.status, answer.body.to_vec());
    match fault {
        AdminFault::None | AdminFault::Cut | AdminFault::Drip => {}
        AdminFault::Late => tokio::time::sleep(Duration::from_secs(3)).await,
        AdminFault::Padded(bytes) => body = padded(&body, bytes),
        AdminFault::Garbage => body = (0..5000u32).map(|n| (n * 7919 % 251) as u8).collect(),
        AdminFault::Status(other) => (status, body) = (other, b"Forbidden, or not found".to_vec()),
    }
    let length = body.len();
    let head = format!("HTTP/1.1 {status} Status\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    match fault {
        AdminFault::Cut => stream.write_all(body.get(..length / 2).unwrap_or(&body)).await?,
        AdminFault::Drip => {
            for byte in body {
                stream.write_all(&[byte]).await?;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        AdminFault::None
        | AdminFault::Late
        | AdminFault::Padded(_)
        | AdminFault::Garbage
        | AdminFault::Status(_) => stream.write_all(&body).await?,
    }
    stream.shutdown().await
}

/// The answer with so many bytes of other clusters before its own.
fn padded(body: &[u8], bytes: usize) -> Vec<u8> {
    let mut padded = Vec::with_capacity(bytes + body.len());
    let mut number = 0;
    while padded.len() < bytes {
        padded.extend_from_slice(format!("other-{number}::added_via_api::false\n").as_bytes());
        for host in 0..8 {
            let host = format!("other-{number}::10.1.2.{host}:8000");
            padded.extend_from_slice(
                format!("{host}::hostname::\n{host}::health_flags::healthy\n{host}::weight::1\n").as_bytes(),
            );
        }
        number += 1;
    }
    padded.extend_from_slice(body);
    padded
}
