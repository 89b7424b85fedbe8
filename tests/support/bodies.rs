//! Rigs for tests about bodies: an Envoy with the filter before a simulated fleet, upstreams that tell what reached
//! them, and a client that decides byte by byte what it sends and when.
//!
//! Every wait has a deadline and says what it waited for; a rig that is dropped by a failing test shows Envoy's log.

#![allow(dead_code, reason = "each test file uses its own part of this")]
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::string_slice,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use warmroute_fleet::client::{Answer, Client};
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy::{self, EnvoyOptions, EnvoyProcess, Requirement};
use warmroute_fleet::envoy_config::{ADMIN_CLUSTER, EnvoyConfig, PluginConfig, PoolConfig};
use warmroute_fleet::fleet::{Fleet, FleetOptions};
use warmroute_fleet::patience::let_run;
use warmroute_fleet::replica::RequestRecord;
use warmroute_fleet::wasm::build_wasm;

/// Path of the requests that most tests send.
pub(crate) const CHAT: &str = "/v1/chat/completions";
/// Bytes that the shipped configuration holds before it decides.
pub(crate) const THRESHOLD_BYTES: usize = 768 << 10;
/// Some ticks of a worker, 100 ms each: nothing that a client sees marks them.
const TICKS: Duration = Duration::from_millis(300);
/// Longest wait for anything; machines under load are slow.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Runs async functions of one [`Requirement`] as tests on the oldest and on the newest Envoy.
#[macro_export]
macro_rules! on_both_envoys {
    ($($test:ident),* $(,)?) => {
        mod on_the_oldest_envoy {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(warmroute_fleet::envoy::Requirement::Oldest).await;
            })*
        }
        mod on_the_newest_envoy {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(warmroute_fleet::envoy::Requirement::Newest).await;
            })*
        }
    };
}

/// What a rig is made of; the defaults are what is shipped.
pub(crate) struct Shape {
    pub(crate) replicas: usize,
    pub(crate) engine: EngineConfig,
    /// The plugin's configuration.
    pub(crate) settings: Value,
    pub(crate) concurrency: u32,
    /// Endpoints that are filled in are kept, else they are the fleet's.
    pub(crate) config: EnvoyConfig,
    /// Last changes to the bootstrap.
    pub(crate) patch: fn(&mut Value),
}

impl Shape {
    /// The configuration of the one pool in [`Shape::settings`].
    pub(crate) fn pool(&mut self) -> &mut Value {
        &mut self.settings["pools"]["llm"]
    }

    /// The filter's plugin.
    pub(crate) fn plugin(&mut self) -> &mut PluginConfig {
        self.config.plugin.as_mut().unwrap()
    }
}

/// The connection manager in a bootstrap.
pub(crate) fn connection_manager(bootstrap: &mut Value) -> &mut Value {
    &mut bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
}

/// A running Envoy before a running fleet.
pub(crate) struct Rig {
    pub(crate) envoy: EnvoyProcess,
    pub(crate) fleet: Fleet,
    pub(crate) client: Client,
}

impl Rig {
    /// Starts what the shape says and waits until the companion has published all endpoints.
    pub(crate) async fn start(requirement: Requirement, shape: impl FnOnce(&mut Shape)) -> Self {
        let wasm = build_wasm().unwrap_or_else(|error| panic!("{error}"));
        let mut wanted = Shape {
            replicas: 3,
            engine: EngineConfig::instant(),
            settings: json!({
                "debug_headers": true,
                "pools": {"llm": {"discovery": {"admin_cluster": ADMIN_CLUSTER, "interval_ms": 500}}},
            }),
            concurrency: 1,
            config: EnvoyConfig {
                request_body_buffer_limit_bytes: Some(33_554_432),
                connection_buffer_limit_bytes: Some(16_777_216),
                ..EnvoyConfig::new(PluginConfig::new(wasm, ""), PoolConfig::new("llm", Vec::new()))
            },
            patch: |_| {},
        };
        shape(&mut wanted);
        let fleet = Fleet::start(&FleetOptions {
            replicas: wanted.replicas,
            engine: wanted.engine,
            ..FleetOptions::default()
        })
        .await
        .unwrap();
        for pool in &mut wanted.config.pools {
            if pool.endpoints.is_empty() {
                pool.endpoints = fleet.addresses();
            }
        }
        let hosts = wanted.config.pools[0].endpoints.len();
        let has_companion = wanted.config.plugin.as_ref().is_some_and(|plugin| plugin.service);
        if let Some(plugin) = &mut wanted.config.plugin {
            plugin.json = wanted.settings.to_string();
        }
        let mut bootstrap = wanted.config.bootstrap();
        (wanted.patch)(&mut bootstrap);
        let options = EnvoyOptions {
            concurrency: wanted.concurrency,
            ..EnvoyOptions::default()
        };
        let rig = Self {
            envoy: start_envoy(requirement, &bootstrap.to_string(), &options).await,
            fleet,
            client: Client::new().with_deadline(DEADLINE),
        };
        if has_companion {
            until("the companion to publish all hosts", async || {
                (rig.stat("warmroute_hosts.pool.llm").await == hosts as u64).then_some(())
            })
            .await;
            // A worker reads the table anew for a decision when it last did so 20 ms ago or more, which none can tell.
            let_run(Duration::from_millis(50)).await;
        }
        rig
    }

    /// URL of a path at the listener.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.envoy.url())
    }

    /// The listener's address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.envoy.url()["http://".len()..].parse().unwrap()
    }

    /// Posts to a path with a client that keeps its connections.
    pub(crate) async fn post(&self, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
        self.client
            .post(&self.url(path), headers, body)
            .await
            .unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// One of Warmroute's metrics, 0 where it does not exist yet.
    pub(crate) async fn stat(&self, name: &str) -> u64 {
        let name = format!("wasmcustom.{name}");
        // Workers tell Envoy what they counted at their next tick.
        let_run(TICKS).await;
        let stats = self.envoy.stats(&name).await.unwrap();
        stats.get(&name).copied().unwrap_or(0)
    }

    /// Sum of the metrics whose names begin so.
    pub(crate) async fn stat_sum(&self, prefix: &str) -> u64 {
        let_run(TICKS).await;
        let stats = self.envoy.stats(&format!("wasmcustom.{prefix}")).await.unwrap();
        stats.values().sum()
    }

    /// All requests other than GETs that replicas received, in no order.
    pub(crate) fn received(&self) -> Vec<RequestRecord> {
        self.fleet
            .replicas
            .iter()
            .flat_map(warmroute_fleet::replica::Replica::requests)
            .collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        show_log_of_failure(&self.envoy);
    }
}

/// Prints the end of Envoy's log when the test that drops it is failing.
pub(crate) fn show_log_of_failure(envoy: &EnvoyProcess) {
    if std::thread::panicking() {
        let log = envoy.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(40)..];
        eprintln!("Envoy's log ends with\n{}", tail.join("\n"));
    }
}

/// Starts an Envoy of the version under test.
pub(crate) async fn start_envoy(
    requirement: Requirement,
    config: &str,
    options: &EnvoyOptions,
) -> EnvoyProcess {
    let envoy = envoy::find(requirement).unwrap_or_else(|error| panic!("{error}"));
    EnvoyProcess::start(&envoy, config, options)
        .await
        .unwrap_or_else(|error| panic!("{envoy}: {error}"))
}

/// Probes until there is an answer.
pub(crate) async fn until<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = probe().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, found)
        .await
        .unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

/// SHA-256, hex.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// A chat of exactly so many bytes: a system prompt, then a message that is filled up.
pub(crate) fn chat_of(system: &str, bytes: usize) -> Bytes {
    let head = format!(
        "{{\"model\":\"sim\",\"max_tokens\":1,\"messages\":[{{\"role\":\"system\",\"content\":\"{system}\"}},{{\"role\":\
         \"user\",\"content\":\"go on "
    );
    let mut body = head.into_bytes();
    let tail = b"\"}]}";
    assert!(
        body.len() + tail.len() <= bytes,
        "no chat of {bytes} bytes with this system prompt"
    );
    let filled_bytes = bytes - tail.len() - body.len();
    // Text that does not repeat itself, so that a part lost or doubled cannot go unnoticed.
    let filler = (0u32..)
        .flat_map(|n| format!("word {n} ").into_bytes())
        .take(filled_bytes);
    body.extend(filler);
    body.extend_from_slice(tail);
    body.into()
}

/// A short chat.
pub(crate) fn chat(system: &str) -> Bytes {
    json!({"model": "sim", "max_tokens": 1, "messages": [
        {"role": "system", "content": system}, {"role": "user", "content": "hello"},
    ]})
    .to_string()
    .into()
}

/// Cuts a body into pieces.
pub(crate) fn cut(body: &Bytes, piece_bytes: usize) -> Vec<Bytes> {
    (0..body.len())
        .step_by(piece_bytes)
        .map(|start| body.slice(start..body.len().min(start + piece_bytes)))
        .collect()
}

/// Asserts that an answer is a replica's and says that it received these bytes.
#[track_caller]
pub(crate) fn assert_intact(answer: &Answer, body: &[u8], what: &str) {
    assert_eq!(
        answer.header("x-body-bytes"),
        Some(body.len().to_string().as_str()),
        "{what}: {} {}",
        answer.status,
        answer.text()
    );
    assert_eq!(
        answer.header("x-body-sha256"),
        Some(sha256(body).as_str()),
        "{what}"
    );
}

/// Asserts that the host of the decision is the one that served.
#[track_caller]
pub(crate) fn assert_steered(answer: &Answer, what: &str) {
    let host = answer
        .header("x-warmroute-host")
        .unwrap_or_else(|| panic!("{what}: no decision"));
    assert_eq!(answer.header("x-served-by"), Some(host), "{what}");
}

/// Asserts that a request was not Warmroute's to decide.
#[track_caller]
pub(crate) fn assert_untouched(answer: &Answer, what: &str) {
    assert_eq!(answer.header("x-warmroute-strategy"), None, "{what}");
    assert_eq!(answer.header("x-warmroute-host"), None, "{what}");
}

/// The deepest key of an answer's decision.
#[track_caller]
pub(crate) fn key(answer: &Answer) -> String {
    let key = answer.header("x-warmroute-key").unwrap_or_else(|| {
        panic!(
            "no decision: {} {}",
            answer.status,
            answer.text().chars().take(200).collect::<String>()
        )
    });
    assert_ne!(key, "none", "reason {:?}", answer.header("x-warmroute-reason"));
    key.to_owned()
}

/// The reason of an answer's decision.
#[track_caller]
pub(crate) fn reason(answer: &Answer) -> &str {
    answer.header("x-warmroute-reason").unwrap_or_else(|| {
        panic!(
            "no decision: {} {}",
            answer.status,
            answer.text().chars().take(200).collect::<String>()
        )
    })
}

/// What reached a [`Witness`].
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) headers: HeaderMap,
    pub(crate) sha256: String,
    pub(crate) trailers: Option<HeaderMap>,
}

/// An upstream for HTTP/1.1 and HTTP/2 that answers 200 and notes trailers too, which a simulated replica does not.
pub(crate) struct Witness {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    accept: JoinHandle<()>,
}

impl Witness {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&seen);
        let accept = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let notes = Arc::clone(&notes);
                connections.spawn(async move {
                    let service = service_fn(move |request| testify(Arc::clone(&notes), request));
                    let builder = auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self {
            address,
            seen,
            accept,
        }
    }

    /// Takes what was noted so far.
    pub(crate) fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn testify(
    notes: Arc<Mutex<Vec<Seen>>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    if let Ok(body) = body.collect().await {
        let trailers = body.trailers().cloned();
        let sha256 = sha256(&body.to_bytes());
        notes.lock().unwrap().push(Seen {
            headers: parts.headers,
            sha256,
            trailers,
        });
    }
    Ok(Response::new(Full::default()))
}

/// An upstream that answers 400 as soon as it has read the headers of a request, and takes no notice of the body.
pub(crate) struct HastyUpstream {
    pub(crate) address: SocketAddr,
    accept: JoinHandle<()>,
}

impl HastyUpstream {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let accept = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(async move {
                    let mut client = RawClient::new(stream);
                    if client.head().await.is_some() {
                        client
                            .send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\nhasty")
                            .await;
                        while client.fill().await {
                            client.unread.clear();
                        }
                    }
                });
            }
        });
        Self { address, accept }
    }
}

impl Drop for HastyUpstream {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

/// A client that speaks HTTP/1.1 byte by byte.
pub(crate) struct RawClient {
    stream: TcpStream,
    unread: Vec<u8>,
}

impl RawClient {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::new(TcpStream::connect(address).await.unwrap())
    }

    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            unread: Vec::new(),
        }
    }

    /// Sends bytes; a peer that has closed is noticed when its answer is read.
    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).await;
    }

    /// Sends the head of a JSON post with `content-length` or, without one, in chunks.
    pub(crate) async fn send_head(&mut self, path: &str, length: Option<usize>, more: &str) {
        let framing = length.map_or_else(
            || "transfer-encoding: chunked".to_owned(),
            |length| format!("content-length: {length}"),
        );
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n{framing}\r\n{more}\r\n"
        );
        self.send(head.as_bytes()).await;
    }

    /// Sends bytes as one chunk.
    pub(crate) async fn send_chunk(&mut self, bytes: &[u8]) {
        let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
        chunk.extend_from_slice(bytes);
        chunk.extend_from_slice(b"\r\n");
        self.send(&chunk).await;
    }

    /// Sends bytes while whatever comes back is read, as a peer that refuses a body may answer before it is sent.
    pub(crate) async fn send_all_while_reading(&mut self, bytes: &[u8]) {
        let (mut reader, mut writer) = self.stream.split();
        let unread = &mut self.unread;
        let write = async {
            let _ = writer.write_all(bytes).await;
        };
        let read = async {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut piece).await {
                unread.extend_from_slice(&piece[..count]);
            }
        };
        tokio::select! {
            () = write => {}
            () = read => {}
        }
    }

    /// Reads the next head: status line and headers, as text.
    pub(crate) async fn head(&mut self) -> Option<String> {
        let end = loop {
            if let Some(at) = self.unread.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.fill().await {
                return None;
            }
        };
        let rest = self.unread.split_off(end);
        let head = std::mem::replace(&mut self.unread, rest);
        Some(String::from_utf8_lossy(&head).into_owned())
    }

    /// Reads a whole answer that has a `content-length` or chunks.
    pub(crate) async fn answer(&mut self) -> Answer {
        let head = self.head().await.expect("an answer before the connection closes");
        let mut lines = head.lines();
        let status = lines
            .next()
            .and_then(|line| line.split(' ').nth(1))
            .unwrap()
            .parse()
            .unwrap();
        let mut headers = HeaderMap::new();
        for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
            let name: hyper::header::HeaderName = name.parse().unwrap();
            headers.append(name, value.parse().unwrap());
        }
        let length = headers
            .get("content-length")
            .map(|value| value.to_str().unwrap().parse::<usize>().unwrap());
        let body = match length {
            Some(length) => self.take(length).await,
            None => self.chunks().await,
        };
        Answer {
            status,
            headers,
            body: body.into(),
            trailers: None,
        }
    }

    async fn chunks(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let line = self.line().await;
            let length = usize::from_str_radix(line.trim(), 16).unwrap();
            body.extend(self.take(length).await);
            self.take(2).await;
            if length == 0 {
                return body;
            }
        }
    }

    async fn line(&mut self) -> String {
        while !self.unread.contains(&b'\n') {
            assert!(self.fill().await, "the answer broke off");
        }
        let end = self.unread.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        let line: Vec<u8> = self.unread.drain(..end).collect();
        String::from_utf8(line).unwrap()
    }

    async fn take(&mut self, length: usize) -> Vec<u8> {
        while self.unread.len() < length {
            assert!(self.fill().await, "the answer broke off");
        }
        self.unread.drain(..length).collect()
    }

    /// Reads more; false at the end of the connection.
    async fn fill(&mut self) -> bool {
        let read = self.stream.read_buf(&mut self.unread);
        match tokio::time::timeout(DEADLINE, read).await {
            Ok(count) => count.is_ok_and(|count| count > 0),
            Err(_) => panic!("nothing to read within {DEADLINE:?}"),
        }
    }
}
