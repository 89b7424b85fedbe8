//! One engine behind a real HTTP server: requests over HTTP/1.1 or h2c go in, vLLM-shaped answers come out.
//!
//! Every answer says what the replica received (`x-body-sha256`, `x-body-bytes`, `x-seen-headers`) and who it is
//! (`x-replica`). Tests steer a replica in process: make it fail, hang, slow down, stop, or show other metrics; most of it
//! goes by `POST /_fleet/fault` as well. What comes over the network is untrusted and must never end the server.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::engine::{EngineCounters, EngineModel};

mod admin;
mod http;
mod reply;
mod state;

use state::State;

/// What a replica is started with.
#[derive(Debug, Clone)]
pub struct ReplicaOptions {
    /// Its name, told in answer header `x-replica`.
    pub name: String,
    /// Model that `/v1/models` lists.
    pub model: String,
    /// What its engine can do.
    pub engine: EngineModel,
    /// Port on 127.0.0.1; 0 for an ephemeral one.
    pub port: u16,
}

/// A way to misbehave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fault {
    /// Behave.
    #[default]
    None,
    /// Answer with that status.
    Status(u16),
    /// Read the request and answer only once the fault is gone.
    Hang,
    /// Read the request and close the connection.
    Reset,
    /// Close the connection after the first token of a streamed answer, and without an answer where it would come whole.
    Cut,
    /// Go on after the first token of a streamed answer only once the fault is gone: busy, and seen to be alive.
    Pause,
}

/// What `/metrics` shows in place of any metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OddMetrics {
    /// This.
    Text(Bytes),
    /// A comment that never ends, a few bytes at a time.
    Drip,
}

/// Values shown in `/metrics` in place of the engine's own.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MetricOverrides {
    /// Shown as `vllm:num_requests_waiting`.
    pub waiting: Option<f64>,
    /// Shown as `vllm:num_requests_running`.
    pub running: Option<f64>,
    /// Shown as `vllm:kv_cache_usage_perc`.
    pub kv_usage: Option<f64>,
}

/// One request that a replica received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestRecord {
    /// Method.
    pub method: String,
    /// Path with query.
    pub path: String,
    /// SHA-256 of the body, hex.
    pub body_sha256: String,
    /// Bytes of the body.
    pub body_bytes: usize,
    /// Field `model` of a generation request, or empty.
    pub model: String,
    /// Names and values of the headers, in the order received.
    pub headers: Vec<(String, String)>,
}

/// A running (or stopped) replica; dropping it stops it for good.
#[derive(Debug)]
pub struct Replica {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// Bound to the address but not listening: while the server is stopped, nobody else's connection gets the port.
    _reserved: TcpSocket,
    server: Option<Server>,
    driver: JoinHandle<()>,
}

impl Replica {
    /// Starts a replica on the current tokio runtime.
    ///
    /// # Errors
    /// When the port cannot be bound.
    pub async fn start(options: ReplicaOptions) -> io::Result<Self> {
        let reserved = reserve(options.port)?;
        let address = reserved.local_addr()?;
        let listener = TcpListener::bind(address).await?;
        let shared = Arc::new(Shared {
            name: options.name,
            model: options.model,
            origin: Instant::now(),
            state: Mutex::new(State::new(options.engine)),
            wake: Notify::new(),
            fault: watch::Sender::new(Fault::None),
            metrics_fault: watch::Sender::new(Fault::None),
            health_fault: watch::Sender::new(Fault::None),
        });
        let driver = tokio::spawn(drive(Arc::clone(&shared)));
        let server = Some(Server::start(listener, &shared));
        Ok(Self {
            shared,
            address,
            _reserved: reserved,
            server,
            driver,
        })
    }

    /// Closes the listener and cuts every connection; the port stays this replica's to [`Replica::restart`] on.
    pub async fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.accept.abort();
            let _ = server.accept.await;
        }
    }

    /// Closes the listener but lets open connections go on.
    pub fn close_listener(&self) {
        if let Some(server) = &self.server {
            server.close.notify_one();
        }
    }

    /// Starts again as a new process would: same port, empty cache, counters at zero, new start time.
    ///
    /// # Errors
    /// When the port cannot be bound again.
    pub async fn restart(&mut self) -> io::Result<()> {
        self.stop().await;
        let listener = TcpListener::bind(self.address).await?;
        self.shared.lock().restart();
        self.server = Some(Server::start(listener, &self.shared));
        Ok(())
    }

    /// Makes generation requests and other posts fail.
    pub fn set_fault(&self, fault: Fault) {
        self.shared.fault.send_replace(fault);
    }

    /// Makes `/metrics` fail.
    pub fn set_metrics_fault(&self, fault: Fault) {
        self.shared.metrics_fault.send_replace(fault);
    }

    /// Makes `/health` fail.
    pub fn set_health_fault(&self, fault: Fault) {
        self.shared.health_fault.send_replace(fault);
    }

    /// Shows other values in `/metrics`.
    pub fn set_metric_overrides(&self, overrides: MetricOverrides) {
        self.shared.lock().overrides = overrides;
    }

    /// Shows something else than metrics, or metrics again.
    pub fn set_odd_metrics(&self, odd: Option<OddMetrics>) {
        self.shared.lock().odd_metrics = odd;
    }

    /// Ends whole answers to generation requests with trailers, which HTTP/2 carries always and HTTP/1.1 if asked to.
    pub fn set_trailers(&self, sends_trailers: bool) {
        self.shared.lock().sends_trailers = sends_trailers;
    }

    /// Lists LoRA adapters as running in `/metrics`.
    pub fn set_adapters(&self, adapters: Vec<String>) {
        self.shared.lock().adapters = adapters;
    }

    /// Makes the engine take `factor` times as long from here on.
    pub fn set_slow_factor(&self, factor: f64) {
        self.shared.slow_down(factor);
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The newest requests other than `GET`s, at most [`MAX_RECORDS`], oldest first.
    pub fn requests(&self) -> Vec<RequestRecord> {
        self.shared.lock().records.iter().cloned().collect()
    }

    /// Forgets the requests recorded so far.
    pub fn clear_requests(&self) {
        self.shared.lock().records.clear();
    }

    /// Posts received since the replica was first started.
    pub fn posts_received(&self) -> u64 {
        self.shared.lock().posts
    }

    /// Times `/metrics` was read since the replica was first started.
    pub fn metrics_reads(&self) -> u64 {
        self.shared.lock().metrics_reads
    }

    /// Counters of the engine.
    pub fn counters(&self) -> EngineCounters {
        self.shared.lock().engine.counters()
    }

    /// Requests that wait and requests that run.
    pub fn queue(&self) -> (usize, usize) {
        let state = self.shared.lock();
        (state.engine.waiting(), state.engine.running())
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.driver.abort();
        if let Some(server) = &self.server {
            server.accept.abort();
        }
    }
}

fn reserve(port: u16) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::LOCALHOST, port).into())?;
    Ok(socket)
}

/// Requests that a replica remembers for its tests.
pub const MAX_RECORDS: usize = 4096;

/// What connections, driver and controls share.
#[derive(Debug)]
struct Shared {
    name: String,
    model: String,
    origin: Instant,
    state: Mutex<State>,
    /// Told whenever the engine's next event may have changed.
    wake: Notify,
    fault: watch::Sender<Fault>,
    metrics_fault: watch::Sender<Fault>,
    health_fault: watch::Sender<Fault>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn now_us(&self) -> u64 {
        self.origin.elapsed().as_micros() as u64
    }

    fn slow_down(&self, factor: f64) {
        self.lock().engine.set_slow_permille((factor * 1000.0) as u64);
    }

    fn record(&self, record: RequestRecord) {
        let records = &mut self.lock().records;
        if records.len() >= MAX_RECORDS {
            records.pop_front();
        }
        records.push_back(record);
    }
}

/// The accept loop of one life of a replica.
#[derive(Debug)]
struct Server {
    accept: JoinHandle<()>,
    close: Arc<Notify>,
}

impl Server {
    fn start(listener: TcpListener, shared: &Arc<Shared>) -> Self {
        let close = Arc::new(Notify::new());
        let accept = tokio::spawn(accept_loop(listener, Arc::clone(shared), Arc::clone(&close)));
        Self { accept, close }
    }
}

/// Serves until told to close, then until the last connection ends; dropped with all its connections when aborted.
async fn accept_loop(listener: TcpListener, shared: Arc<Shared>, close: Arc<Notify>) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = close.notified() => break,
            Some(_) = connections.join_next() => continue,
        };
        let Ok((stream, _)) = accepted else {
            // Out of file descriptors, most likely: connections that end will free some.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(move |request| http::answer(Arc::clone(&shared), request));
            let builder = auto::Builder::new(TokioExecutor::new());
            // An error here is a client that went away or broke the protocol.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Lets the engine's time pass.
async fn drive(shared: Arc<Shared>) {
    loop {
        let next_us = {
            let mut state = shared.lock();
            state.advance(shared.now_us());
            state.engine.next_event_us()
        };
        let Some(next_us) = next_us else {
            shared.wake.notified().await;
            continue;
        };
        let deadline = shared.origin + Duration::from_micros(next_us);
        tokio::select! {
            () = tokio::time::sleep_until(deadline.into()) => {}
            () = shared.wake.notified() => {}
        }
    }
}

fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
