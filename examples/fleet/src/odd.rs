//! Peers that misbehave as no replica does: engines with any metrics text, and a way to Envoy's admin interface that can be cut.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

/// An engine that answers posts with an empty object and `/metrics` with whatever it is told.
pub struct OddEngine {
    address: SocketAddr,
    state: Arc<OddState>,
}

struct OddState {
    metrics: Mutex<Vec<u8>>,
    posts: AtomicU64,
    scrapes: AtomicU64,
    is_over: AtomicBool,
}

impl OddEngine {
    /// Starts one whose metrics are this text.
    ///
    /// # Errors
    /// When no port can be bound.
    pub fn start(metrics: impl Into<Vec<u8>>) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let state = Arc::new(OddState {
            metrics: Mutex::new(metrics.into()),
            posts: AtomicU64::new(0),
            scrapes: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.is_over.load(Ordering::Relaxed) {
                    break;
                }
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || stream.map(|stream| shared.serve(stream)));
            }
        });
        Ok(Self { address, state })
    }

    /// Shows other metrics.
    pub fn set_metrics(&self, metrics: impl Into<Vec<u8>>) {
        *lock(&self.state.metrics) = metrics.into();
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Posts received.
    pub fn posts(&self) -> u64 {
        self.state.posts.load(Ordering::Relaxed)
    }

    /// Times its metrics were asked for.
    pub fn scrapes(&self) -> u64 {
        self.state.scrapes.load(Ordering::Relaxed)
    }
}

impl Drop for OddEngine {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        // Wakes the accept loop.
        let _ = TcpStream::connect(self.address);
    }
}

impl OddState {
    /// One request a connection is enough.
    fn serve(&self, mut stream: TcpStream) {
        let Some(head) = read_request(&mut stream) else {
            return;
        };
        let body = if head.starts_with("GET /metrics") {
            self.scrapes.fetch_add(1, Ordering::Relaxed);
            lock(&self.metrics).clone()
        } else {
            self.posts.fetch_add(1, Ordering::Relaxed);
            b"{}".to_vec()
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.write_all(&body);
    }
}

/// Reads a request with its body and gives its head.
fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            let wanted = end + 4 + length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
            while bytes.len() < wanted {
                let read = stream.read(&mut chunk).ok().filter(|read| *read > 0)?;
                bytes.extend_from_slice(&chunk[..read]);
            }
            return Some(String::from_utf8_lossy(&bytes[..end]).into_owned());
        }
        let read = stream.read(&mut chunk).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&chunk[..read]);
    }
}

/// A port that leads to another one until it is cut.
pub struct Tunnel {
    address: SocketAddr,
    is_cut: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Tunnel {
    /// Leads to `target`, which need not listen yet.
    ///
    /// # Errors
    /// When no port can be bound.
    pub fn to(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let (is_cut, streams) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (cut, open) = (Arc::clone(&is_cut), Arc::clone(&streams));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if cut.load(Ordering::Relaxed) {
                    break;
                }
                let (Ok(near), Ok(far)) = (stream, TcpStream::connect(target)) else {
                    continue;
                };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (Ok(mut from), Ok(mut to), Ok(kept)) =
                        (from.try_clone(), to.try_clone(), from.try_clone())
                    else {
                        continue;
                    };
                    lock(&open).push(kept);
                    std::thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Ok(Self {
            address,
            is_cut,
            streams,
        })
    }

    /// Where it begins.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the port and every connection, for good.
    pub fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        for stream in lock(&self.streams).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.cut();
    }
}

/// A port of this machine that was free a moment ago.
///
/// # Errors
/// When none can be bound.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// What a thread that panicked left behind is whole: every change here is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A cluster with one endpoint, as an Envoy config.
pub fn cluster_of(name: &str, address: SocketAddr) -> Value {
    let socket = json!({"address": address.ip().to_string(), "port_value": address.port()});
    let endpoint = json!({"endpoint": {"address": {"socket_address": socket}}});
    json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    })
}
