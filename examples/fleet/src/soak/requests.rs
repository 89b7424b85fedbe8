//! A seed and a number → one request: method, path, headers, body, and how it is sent.
//!
//! The same pair always gives the same request, so two Envoys can be asked alike and a failure can be sent again. Sizes
//! spread evenly over their orders of magnitude. Half of the prompts begin like others do, most are read by the filter,
//! and the rest is what a gateway meets beside them: bodies that are no JSON, compressed, deep, cut or absent, other
//! paths, other methods.

use std::fmt;
use std::sync::OnceLock;

use bytes::Bytes;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Request};
use serde_json::{Value, json};
use warmroute::exchange::Exchange;

use crate::client::{ClientError, RequestBody, full, pieces};
use crate::workload::Rng;

/// What the mix is made of.
#[derive(Debug, Clone, Copy)]
pub struct Mix {
    /// Number from which everything is drawn.
    pub seed: u64,
    /// Least size of a body with a prompt, bytes.
    pub least_bytes: u64,
    /// Greatest size, bytes.
    pub most_bytes: u64,
    /// Only paths that the simulated replicas serve, with few tokens asked for.
    pub for_replicas: bool,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Planned {
    /// Its number.
    pub number: u64,
    /// Method.
    pub method: Method,
    /// Path with query.
    pub path: String,
    /// Headers, `content-type` among them.
    pub headers: Vec<(&'static str, String)>,
    /// Body; empty for none.
    pub body: Bytes,
    /// How it travels.
    pub wire: Wire,
    /// Whether a streamed answer is asked for.
    pub is_streamed: bool,
}

/// How a request travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// HTTP/1.1 with `content-length`.
    Http1,
    /// HTTP/1.1 in chunks.
    Http1Chunks,
    /// HTTP/2 with `content-length`.
    Http2,
    /// HTTP/2 in frames of unknown number.
    Http2Frames,
    /// HTTP/2, ended by trailers.
    Http2Trailers,
}

impl Wire {
    /// Whether it is HTTP/2.
    pub fn is_http2(self) -> bool {
        match self {
            Self::Http1 | Self::Http1Chunks => false,
            Self::Http2 | Self::Http2Frames | Self::Http2Trailers => true,
        }
    }
}

impl Mix {
    /// The request of that number.
    pub fn request(&self, number: u64) -> Planned {
        let mut random = Rng::new(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut planned = Planned {
            number,
            method: Method::POST,
            path: CHAT.to_owned(),
            headers: vec![("content-type", "application/json".to_owned())],
            body: Bytes::new(),
            wire: [
                Wire::Http1,
                Wire::Http1,
                Wire::Http1Chunks,
                Wire::Http2,
                Wire::Http2Frames,
                Wire::Http2Trailers,
            ][below(&mut random, 6) as usize],
            is_streamed: below(&mut random, 2) == 0,
        };
        let kind = below(&mut random, 100);
        let prompt = self.prompt(&mut random);
        self.fill(&mut planned, kind, prompt, &mut random);
        if planned.wire == Wire::Http2Trailers && planned.body.is_empty() {
            planned.wire = Wire::Http2;
        }
        if below(&mut random, 8) == 0 {
            planned
                .headers
                .push(("x-session-id", format!("session-{}", below(&mut random, 500))));
        }
        planned
    }

    fn fill(&self, planned: &mut Planned, kind: u64, prompt: String, random: &mut Rng) {
        let stream = planned.is_streamed;
        let messages = |prompt: &str| {
            let middle = prompt.len() / 2;
            json!([
                {"role": "system", "content": &prompt[..middle]},
                {"role": "user", "content": &prompt[middle..]},
            ])
        };
        let (path, body): (&str, Value) = match kind {
            0..30 => (
                CHAT,
                json!({"messages": messages(&prompt), "model": "sim", "max_tokens": 2, "stream": stream}),
            ),
            30..40 => (
                "/v1/completions",
                json!({"model": "sim", "prompt": prompt, "max_tokens": 2, "stream": stream}),
            ),
            40..48 => (
                "/v1/responses",
                json!({"model": "sim", "input": prompt, "max_output_tokens": 2, "stream": stream}),
            ),
            48..56 => (
                "/v1/messages?beta=true",
                json!({"model": "sim", "system": "Be brief.", "messages": [{"role": "user", "content": prompt}],
                       "max_tokens": 2, "stream": stream}),
            ),
            56..58 => (
                CHAT,
                json!({"model": "sim", "max_tokens": 2, "tools": [{"type": "function", "function": {"name": "look"}}],
                       "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}], "stream": stream}),
            ),
            58..74 if self.for_replicas => (
                CHAT,
                json!({"messages": messages(&prompt), "model": "sim", "max_tokens": 8}),
            ),
            58..62 => ("/generate", json!({"text": prompt, "stream": stream})),
            62..64 => (
                "/api/chat",
                json!({"model": "sim", "messages": messages(&prompt), "stream": stream}),
            ),
            64..66 => ("/api/generate", json!({"model": "sim", "prompt": prompt})),
            66..69 => (
                "/v1beta/models/sim:generateContent",
                json!({"contents": [{"role": "user", "parts": [{"text": prompt}]}]}),
            ),
            69..71 => ("/v2/chat", json!({"model": "sim", "messages": messages(&prompt)})),
            71..73 => (
                "/openai/deployments/sim/chat/completions?api-version=1",
                json!({"messages": messages(&prompt)}),
            ),
            73..74 => (
                "/inference/v1/generate",
                json!({"token_ids": prompt.bytes().map(u32::from).take(5000).collect::<Vec<_>>()}),
            ),
            _ => return self.fill_odd(planned, kind, prompt, random),
        };
        path.clone_into(&mut planned.path);
        planned.body = body.to_string().into();
    }

    /// Requests that are not read, or not to their end.
    fn fill_odd(&self, planned: &mut Planned, kind: u64, prompt: String, random: &mut Rng) {
        let mut body = json!({"model": "sim", "messages": [{"role": "user", "content": prompt}]}).to_string();
        let content_type = |planned: &mut Planned, value: &str| value.clone_into(&mut planned.headers[0].1);
        let without_body = |planned: &mut Planned, method: Method, path: &str| {
            planned.method = method;
            path.clone_into(&mut planned.path);
            planned.headers.clear();
            planned.wire = if planned.wire.is_http2() {
                Wire::Http2
            } else {
                Wire::Http1
            };
            planned.is_streamed = false;
        };
        planned.is_streamed = false;
        match kind {
            74..77 => content_type(planned, "text/plain"),
            77..79 => planned.headers.push(("content-encoding", "gzip".to_owned())),
            79..81 => body.truncate(body.len() - 1 - below(random, body.len() as u64 / 2) as usize),
            81..82 => body = format!("{}{}", "[".repeat(300), body),
            82..83 => body = "null".to_owned(),
            83..84 => body.insert_str(1, "\"messages\":[],"),
            84..85 => content_type(planned, "multipart/form-data; boundary=b"),
            85..87 => planned.path = "/v1/embeddings".to_owned(),
            87..89 => planned.method = Method::PUT,
            89..90 => planned.path = "/v1/audio/transcriptions".to_owned(),
            90..95 => {
                without_body(
                    planned,
                    Method::GET,
                    ["/v1/models", "/health", "/version"][below(random, 3) as usize],
                );
                return;
            }
            95..96 => return without_body(planned, Method::HEAD, "/v1/models"),
            96..97 => return without_body(planned, Method::DELETE, "/v1/files/7"),
            97..98 => return without_body(planned, Method::OPTIONS, CHAT),
            98..99 => return without_body(planned, Method::GET, CHAT),
            _ => return without_body(planned, Method::POST, CHAT),
        }
        planned.body = body.into();
    }

    fn prompt(&self, random: &mut Rng) -> String {
        let text = text();
        let orders = (self.most_bytes as f64 / self.least_bytes as f64).ln();
        let bytes = (self.least_bytes as f64 * (orders * random.unit()).exp()) as usize;
        // Half of the prompts begin at one of a few places, and so like others.
        let shared = if below(random, 2) == 0 { bytes * 3 / 4 } else { 0 };
        let slice = |start: usize, len: usize| &text[start..start + len];
        let start = below(random, SHARED_PROMPTS) as usize * 4096;
        let own = below(random, (text.len() - bytes) as u64) as usize;
        [slice(start, shared), slice(own, bytes - shared)].concat()
    }
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, method, path) = (self.number, &self.method, &self.path);
        let (wire, bytes) = (self.wire, self.body.len());
        write!(f, "request {number} ({method} {path}, {wire:?}, {bytes} bytes)")
    }
}

impl Planned {
    /// Whether the filter decides it, rather than letting it pass untouched.
    pub fn is_decided(&self) -> bool {
        Exchange::concerns(self.method.as_str().as_bytes(), &self.path, self.body.is_empty()).is_some()
    }

    /// The request for an Envoy at `url`.
    ///
    /// # Errors
    /// When a header cannot be sent.
    pub fn to(&self, url: &str) -> Result<Request<RequestBody>, ClientError> {
        let mut builder = Request::builder()
            .method(self.method.clone())
            .uri(format!("{url}{}", self.path));
        for (name, value) in &self.headers {
            builder = builder.header(*name, value);
        }
        builder.body(self.request_body()).map_err(ClientError::Request)
    }

    fn request_body(&self) -> RequestBody {
        let chunks = || {
            let mut rest = self.body.clone();
            let mut chunks = Vec::new();
            let mut random = Rng::new(self.number);
            while !rest.is_empty() {
                let len = (1 + below(&mut random, 32 << 10) as usize).min(rest.len());
                chunks.push(rest.split_to(len));
            }
            chunks
        };
        match self.wire {
            _ if self.body.is_empty() => full(""),
            Wire::Http1 | Wire::Http2 => full(self.body.clone()),
            Wire::Http1Chunks | Wire::Http2Frames => pieces(chunks(), None),
            Wire::Http2Trailers => {
                let trailer = (
                    HeaderName::from_static("x-trailer"),
                    HeaderValue::from_static("end"),
                );
                pieces(chunks(), Some(HeaderMap::from_iter([trailer])))
            }
        }
    }
}

/// A number below `bound`, which is not 0.
pub(super) fn below(random: &mut Rng, bound: u64) -> u64 {
    random.next_u64() % bound
}

/// Words of which prompts are cut, longer than any prompt.
fn text() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let mut random = Rng::new(1);
        let mut text = String::with_capacity(TEXT_BYTES + 16);
        while text.len() < TEXT_BYTES {
            let letters = 2 + below(&mut random, 8);
            text.extend((0..letters).map(|_| char::from(b'a' + below(&mut random, 26) as u8)));
            text.push(' ');
        }
        text
    })
}

const CHAT: &str = "/v1/chat/completions";
const TEXT_BYTES: usize = 4 << 20;
/// Beginnings that many prompts share.
const SHARED_PROMPTS: u64 = 64;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const MIX: Mix = Mix {
        seed: 7,
        least_bytes: 100,
        most_bytes: 1 << 20,
        for_replicas: false,
    };

    #[test]
    fn a_number_always_gives_the_same_request() {
        for number in 0..200 {
            let (one, two) = (MIX.request(number), MIX.request(number));
            assert_eq!(format!("{one:?}"), format!("{two:?}"));
        }
        assert_ne!(MIX.request(1).body, Mix { seed: 8, ..MIX }.request(1).body);
    }

    #[test]
    fn the_mix_has_everything_and_sizes_spread_over_their_range() {
        let (mut paths, mut decided, mut sizes) = (BTreeMap::new(), 0, Vec::new());
        for number in 0..2000 {
            let planned = MIX.request(number);
            decided += u32::from(planned.is_decided());
            *paths.entry(planned.path).or_insert(0) += 1;
            sizes.push(planned.body.len());
        }
        sizes.sort_unstable();
        assert!((1600..1800).contains(&decided), "{decided}");
        assert_eq!(paths.len(), 17, "{paths:?}");
        assert!(
            sizes[1000] < 40 << 10 && sizes[1990] > 600 << 10,
            "{} {}",
            sizes[1000],
            sizes[1990]
        );
    }
}
