//! Servers whose answer is a function of the request alone: method, path and body go in; status, type, size and every byte
//! follow from their hash. Whoever sends a request knows what must come back, through whatever proxy.
//!
//! They look like idle vLLM engines to a companion. What comes over the network is untrusted and must never end them.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::requests::below;
use crate::client::pieces;
use crate::workload::Rng;

/// What must come back for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Status.
    pub status: u16,
    /// `content-type`.
    pub content_type: &'static str,
    /// Body; of a `HEAD` as it would be for a `GET`.
    pub body: Bytes,
}

/// The answer to a request.
pub fn reply(method: &Method, path: &str, body: &[u8]) -> Reply {
    let mut hash = Sha256::new();
    hash.update(method.as_str());
    hash.update(path);
    hash.update([0]);
    hash.update(body);
    let digest = hex(&hash.finalize());
    let mut random = Rng::new(u64::from_str_radix(&digest[..16], 16).unwrap_or(0));
    let status = match below(&mut random, 100) {
        0 => 429,
        1 => 400,
        2 => 500,
        _ => 200,
    };
    let filler_bytes = 1 << below(&mut random, 17);
    let filler: String = digest.chars().cycle().take(filler_bytes).collect();
    let tokens = body.len() / 4 + 1;
    let usage = format!(
        r#""usage":{{"prompt_tokens":{tokens},"completion_tokens":1,"prompt_tokens_details":{{"cached_tokens":{}}}}}"#,
        below(&mut random, tokens as u64)
    );
    let (content_type, body) = if status == 200 && method == Method::POST && below(&mut random, 2) == 0 {
        let events = filler.as_bytes().chunks(1 << 12).map(|part| {
            let part = String::from_utf8_lossy(part);
            format!("data: {{\"text\":\"{part}\"}}\n\n")
        });
        let text: String = events.collect();
        (
            EVENTS,
            format!("{text}data: {{\"choices\":[],{usage}}}\n\ndata: [DONE]\n\n"),
        )
    } else {
        let sent_bytes = body.len();
        (
            "application/json",
            format!(r#"{{"digest":"{digest}","bytes":{sent_bytes},"text":"{filler}",{usage}}}"#),
        )
    };
    Reply {
        status,
        content_type,
        body: body.into(),
    }
}

/// SHA-256 of the headers that a client chose, in the order of their names: proxies may add others.
pub fn headers_digest(headers: &HeaderMap) -> String {
    let mut lines: Vec<String> = headers
        .iter()
        .filter(|(name, _)| ["content-type", "content-encoding", "x-session-id"].contains(&name.as_str()))
        .map(|(name, value)| format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())))
        .collect();
    lines.sort();
    hex(&Sha256::digest(lines.join("\n")))
}

/// Response header with [`headers_digest`] of what arrived, and whether trailers did.
pub const SEEN: &str = "x-seen";

/// Several of them on ephemeral ports; dropping it ends them.
#[derive(Debug)]
pub struct Upstreams {
    addresses: Vec<SocketAddr>,
    _servers: JoinSet<()>,
}

impl Upstreams {
    /// Starts that many.
    ///
    /// # Errors
    /// When a port cannot be bound.
    pub async fn start(count: usize) -> std::io::Result<Self> {
        let mut addresses = Vec::new();
        let mut servers = JoinSet::new();
        for _ in 0..count {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            addresses.push(listener.local_addr()?);
            servers.spawn(serve(listener));
        }
        Ok(Self {
            addresses,
            _servers: servers,
        })
    }

    /// Where they listen.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }
}

async fn serve(listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok((stream, _)) = listener.accept().await else {
            // Out of file descriptors, most likely: connections that end will free some.
            tokio::task::yield_now().await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        connections.spawn(async move {
            let builder = auto::Builder::new(TokioExecutor::new());
            // An error here is a client that went away or broke the protocol.
            let _ = builder
                .serve_connection(TokioIo::new(stream), service_fn(answer))
                .await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
) -> Result<Response<UnsyncBoxBody<Bytes, Infallible>>, Infallible> {
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    if path == "/metrics" {
        return Ok(response(
            200,
            "text/plain",
            Full::new(Bytes::from_static(METRICS.as_bytes())).boxed_unsync(),
        ));
    }
    let (sent, trailers) = match body.collect().await {
        Ok(body) => {
            let trailers = body.trailers().is_some();
            (body.to_bytes(), trailers)
        }
        Err(_) => return Ok(response(400, "text/plain", Full::default().boxed_unsync())),
    };
    let reply = reply(&head.method, path, &sent);
    let body = if reply.content_type == EVENTS {
        let mut rest = reply.body;
        let mut chunks = Vec::new();
        while !rest.is_empty() {
            chunks.push(rest.split_to(rest.len().min(3000)));
        }
        pieces(chunks, None)
    } else {
        Full::new(reply.body).boxed_unsync()
    };
    let mut response = response(reply.status, reply.content_type, body);
    let seen = format!(
        "{}{}",
        headers_digest(&head.headers),
        if trailers { " trailers" } else { "" }
    );
    if let Ok(seen) = HeaderValue::try_from(seen) {
        response.headers_mut().insert(SEEN, seen);
    }
    Ok(response)
}

fn response(
    status: u16,
    content_type: &'static str,
    body: UnsyncBoxBody<Bytes, Infallible>,
) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const EVENTS: &str = "text/event-stream";
/// An idle engine as vLLM shows it.
const METRICS: &str = "vllm:num_requests_running{engine=\"0\",model_name=\"sim\"} 0.0\n\
                       vllm:num_requests_waiting{engine=\"0\",model_name=\"sim\"} 0.0\n\
                       vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"sim\"} 0.0\n\
                       process_start_time_seconds 1.7e+09\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_request_changes_the_answer() {
        let one = reply(&Method::POST, "/a", b"body");
        assert_eq!(one, reply(&Method::POST, "/a", b"body"));
        for other in [
            reply(&Method::PUT, "/a", b"body"),
            reply(&Method::POST, "/b", b"body"),
            reply(&Method::POST, "/a", b"bodz"),
        ] {
            assert_ne!(one.body, other.body);
        }
    }
}
