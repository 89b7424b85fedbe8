//! Closed-loop load: requests over keep-alive connections to an Envoy go out, their latencies come back.
//!
//! Written against the bare socket, so that the load costs little next to the Envoy that it measures.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use warmroute_fleet::envoy::EnvoyProcess;
use warmroute_fleet::envoy_config::LISTENER;
use warmroute_fleet::workload::Rng;

use super::cpu::cpu_us;

/// What one stretch of load brought.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) latencies_us: Vec<u32>,
    pub(super) elapsed_s: f64,
    /// User and system time that Envoy took, if this system tells.
    pub(super) cpu_us: Option<f64>,
}

impl Run {
    pub(super) fn rps(&self) -> f64 {
        self.latencies_us.len() as f64 / self.elapsed_s
    }
}

/// Keeps `concurrency` requests in flight for a while.
pub(super) async fn load(
    process: &EnvoyProcess,
    bodies: &Bodies,
    concurrency: usize,
    duration: Duration,
) -> Result<Run, Box<dyn std::error::Error>> {
    let address = process.listener(LISTENER).ok_or("Envoy has no listener")?;
    let cpu_before = cpu_us(process.id());
    let started = Instant::now();
    let mut connections = JoinSet::new();
    for number in 0..concurrency {
        connections.spawn(connection(address, bodies.clone(), number, started + duration));
    }
    let mut run = Run::default();
    while let Some(latencies_us) = connections.join_next().await {
        run.latencies_us.extend(latencies_us??);
    }
    run.elapsed_s = started.elapsed().as_secs_f64();
    run.cpu_us = cpu_before
        .zip(cpu_us(process.id()))
        .map(|(before, after)| after - before);
    Ok(run)
}

/// One keep-alive connection: requests one after the other until the end, at least one.
async fn connection(
    address: SocketAddr,
    bodies: Bodies,
    number: usize,
    end: Instant,
) -> Result<Vec<u32>, LoadError> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut random = Rng::new(SEED ^ (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let (mut request, mut answer) = (Vec::new(), Vec::new());
    let mut latencies_us = Vec::new();
    loop {
        bodies.write_request(&mut random, &mut request);
        let started = Instant::now();
        stream.write_all(&request).await?;
        read_answer(&mut stream, &mut answer).await?;
        latencies_us.push(u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX));
        if Instant::now() >= end {
            return Ok(latencies_us);
        }
    }
}

/// Why load could not be applied.
#[derive(Debug)]
enum LoadError {
    Io(std::io::Error),
    Refused(String),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(cause) => write!(f, "the connection to Envoy broke: {cause}"),
            Self::Refused(head) => write!(f, "not answered with 200 and a content-length, but:\n{head}"),
        }
    }
}

impl std::error::Error for LoadError {}

impl From<std::io::Error> for LoadError {
    fn from(cause: std::io::Error) -> Self {
        Self::Io(cause)
    }
}

/// Reads one answer to its end into `answer`.
async fn read_answer(stream: &mut TcpStream, answer: &mut Vec<u8>) -> Result<(), LoadError> {
    answer.clear();
    loop {
        if stream.read_buf(answer).await? == 0 {
            return Err(LoadError::Io(std::io::ErrorKind::UnexpectedEof.into()));
        }
        let Some(head_bytes) = answer.windows(4).position(|window| window == b"\r\n\r\n") else {
            continue;
        };
        let head = std::str::from_utf8(&answer[..head_bytes]).unwrap_or_default();
        let length = content_length(head).filter(|_| head.starts_with("HTTP/1.1 200"));
        let Some(body_bytes) = length else {
            return Err(LoadError::Refused(head.to_owned()));
        };
        if answer.len() >= head_bytes + 4 + body_bytes {
            return Ok(());
        }
    }
}

fn content_length(head: &str) -> Option<usize> {
    head.lines()
        .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok())
}

/// Chat requests of one size: [`PREFIXES`] long system prompts, each with a unique question of [`UNIQUE_BYTES`].
#[derive(Debug, Clone)]
pub(super) struct Bodies {
    /// Head and body up to the unique part.
    starts: Arc<Vec<Vec<u8>>>,
}

impl Bodies {
    pub(super) fn new(body_bytes: usize) -> Self {
        let starts = (0..PREFIXES).map(|prefix| {
            let mut system = format!("You are assistant number {prefix}. ");
            let opening = |system: &str| {
                format!(
                    r#"{{"model":"sim","max_tokens":1,"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":""#
                )
            };
            let around_bytes = opening("").len() + UNIQUE_BYTES + BODY_END.len();
            let mut random = Rng::new(SEED + prefix as u64);
            while around_bytes + system.len() < body_bytes {
                let length = 2 + random.next_u64() % 8;
                system.extend((0..length).map(|_| char::from(b'a' + (random.next_u64() % 26) as u8)));
                system.push(' ');
            }
            system.truncate(body_bytes.saturating_sub(around_bytes));
            let start = opening(&system);
            let length = start.len() + UNIQUE_BYTES + BODY_END.len();
            format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: llm\r\ncontent-type: application/json\r\n\
                 content-length: {length}\r\n\r\n{start}"
            )
            .into_bytes()
        });
        Self {
            starts: Arc::new(starts.collect()),
        }
    }

    fn write_request(&self, random: &mut Rng, request: &mut Vec<u8>) {
        let start = &self.starts[(random.next_u64() % PREFIXES as u64) as usize];
        request.clear();
        request.extend_from_slice(start);
        for _ in 0..UNIQUE_BYTES / 16 {
            let word = random.next_u64();
            request.extend((0..16).map(|digit| b'a' + ((word >> (4 * digit)) & 15) as u8));
        }
        request.extend_from_slice(BODY_END.as_bytes());
    }
}

/// Several hot prefixes, as many as a pool of this size would see.
const PREFIXES: usize = 16;
/// End of each body that no other has; a multiple of 16.
const UNIQUE_BYTES: usize = 512;
const BODY_END: &str = r#""}]}"#;
const SEED: u64 = 7;

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn bodies_have_their_size_and_share_only_their_prefix() {
        for body_bytes in [2 << 10, 64 << 10] {
            let bodies = Bodies::new(body_bytes);
            let mut random = Rng::new(SEED);
            let mut seen = Vec::new();
            for _ in 0..64 {
                let mut request = Vec::new();
                bodies.write_request(&mut random, &mut request);
                let text = String::from_utf8(request).unwrap();
                let (head, body) = text.split_once("\r\n\r\n").unwrap();
                assert_eq!(body.len(), body_bytes);
                assert_eq!(content_length(head), Some(body.len()));
                let json: Value = serde_json::from_str(body).unwrap();
                let content = |index: usize| json["messages"][index]["content"].as_str().unwrap().to_owned();
                seen.push((content(0), content(1)));
            }
            let distinct = |mut texts: Vec<&String>| {
                texts.sort();
                texts.dedup();
                texts.len()
            };
            assert!(distinct(seen.iter().map(|(system, _)| system).collect()) <= PREFIXES);
            assert_eq!(distinct(seen.iter().map(|(_, user)| user).collect()), seen.len());
        }
    }
}
