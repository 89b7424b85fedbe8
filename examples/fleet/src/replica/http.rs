//! One HTTP request to a replica → its answer.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, watch};

use super::{Fault, RequestRecord, Shared, unix_now};
use crate::api::{self, AnswerWriter, Endpoint, GenerationRequest, Usage};
use crate::engine::{EngineEvent, EventKind, Prompt, Refusal, RequestId};
use crate::metrics_text::MetricsView;

/// Why a connection is cut.
type Cut = Box<dyn Error + Send + Sync>;
type Reply = Result<Response<ReplyBody>, Cut>;

/// Answers one request; an error closes the connection.
pub(super) async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Reply {
    let (parts, body) = request.into_parts();
    let received = Received::read(body).await?;
    let path = parts.uri.path();
    let mut response = if parts.method == Method::GET {
        get(&shared, path).await?
    } else {
        shared.lock().posts += 1;
        let endpoint = (parts.method == Method::POST)
            .then(|| Endpoint::from_path(path))
            .flatten();
        let parsed = endpoint.map(|endpoint| GenerationRequest::parse(endpoint, &received.bytes));
        shared.record(RequestRecord {
            method: parts.method.to_string(),
            path: parts
                .uri
                .path_and_query()
                .map_or(path, |full| full.as_str())
                .to_owned(),
            body_sha256: received.sha256.clone(),
            body_bytes: received.body_bytes,
            model: parsed
                .as_ref()
                .and_then(|p| p.as_ref().ok())
                .map(|r| r.model.clone())
                .unwrap_or_default(),
            headers: named_headers(&parts.headers),
        });
        match suffer(&shared.fault).await? {
            Some(status) => error(status, "InternalServerError", "made to fail"),
            None if received.too_large => error(
                StatusCode::PAYLOAD_TOO_LARGE,
                "BadRequestError",
                "the body exceeds the replica's limit",
            ),
            None => match parsed {
                None => error(StatusCode::NOT_FOUND, "NotFoundError", "no such endpoint"),
                Some(Err(wrong)) => error(StatusCode::BAD_REQUEST, "BadRequestError", &wrong.to_string()),
                Some(Ok(request)) => generate(&shared, request).await,
            },
        }
    };
    let headers = response.headers_mut();
    set(headers, "x-replica", &shared.name);
    set(headers, "x-body-sha256", &received.sha256);
    set(headers, "x-body-bytes", &received.body_bytes.to_string());
    let seen: Vec<&str> = parts
        .headers
        .keys()
        .map(hyper::header::HeaderName::as_str)
        .collect();
    set(headers, "x-seen-headers", &seen.join(","));
    Ok(response)
}

async fn get(shared: &Arc<Shared>, path: &str) -> Reply {
    let now_s = unix_now().as_secs();
    Ok(match path {
        "/metrics" => {
            shared.lock().metrics_reads += 1;
            match suffer(&shared.metrics_fault).await? {
                Some(status) => error(status, "InternalServerError", "made to fail"),
                None => whole(
                    StatusCode::OK,
                    "text/plain; version=0.0.4; charset=utf-8",
                    metrics(shared),
                ),
            }
        }
        "/health" => match suffer(&shared.health_fault).await? {
            Some(status) => error(status, "InternalServerError", "made to fail"),
            None => whole(StatusCode::OK, "text/plain", Bytes::new()),
        },
        "/version" => json_reply(&json!({"version": "0.32.0"})),
        "/load" => {
            let state = shared.lock();
            json_reply(&json!({"server_load": state.engine.running() + state.engine.waiting()}))
        }
        "/v1/models" => {
            let model =
                json!({"id": shared.model, "object": "model", "created": now_s, "owned_by": "warmroute"});
            json_reply(&json!({"object": "list", "data": [model]}))
        }
        _ => error(StatusCode::NOT_FOUND, "NotFoundError", "no such endpoint"),
    })
}

fn metrics(shared: &Shared) -> Bytes {
    let mut state = shared.lock();
    state.advance(shared.now_us());
    let view = MetricsView {
        model: &shared.model,
        running: state.overrides.running.unwrap_or(state.engine.running() as f64),
        waiting: state.overrides.waiting.unwrap_or(state.engine.waiting() as f64),
        kv_usage: state
            .overrides
            .kv_usage
            .unwrap_or_else(|| state.engine.kv_usage()),
        cache_blocks: state.engine.config().cache_blocks,
        counters: state.engine.counters(),
        started_s: state.started_s,
        adapters: &state.adapters,
    };
    Bytes::from(view.render())
}

async fn generate(shared: &Arc<Shared>, request: GenerationRequest) -> Response<ReplyBody> {
    let prompt = Prompt::new(request.prompt.as_bytes());
    let prompt_tokens = prompt.tokens();
    let (events, listener) = {
        let (sender, events) = mpsc::unbounded_channel();
        let mut state = shared.lock();
        let now_us = shared.now_us();
        let id = match state.engine.submit(now_us, prompt, request.max_tokens) {
            Ok(id) => id,
            Err(Refusal::PromptTooLong {
                tokens,
                capacity_tokens,
            }) => {
                let message = format!("{tokens} tokens are wanted where {capacity_tokens} fit");
                return error(StatusCode::BAD_REQUEST, "BadRequestError", &message);
            }
        };
        state.listeners.insert(id, sender);
        (
            events,
            Listener {
                shared: Arc::clone(shared),
                life: state.life,
                id,
            },
        )
    };
    shared.wake.notify_one();
    let id = format!("{}-{}-{}", shared.name, listener.life, listener.id.0);
    let writer = AnswerWriter::new(&request, id, unix_now().as_secs());
    let mut stream = TokenStream {
        events,
        writer,
        usage: Usage {
            prompt_tokens,
            ..Usage::default()
        },
        max_tokens: request.max_tokens,
        include_usage: request.include_usage,
        ended: false,
        _listener: listener,
    };
    if request.stream {
        let mut response = Response::new(ReplyBody::Tokens(stream));
        set(
            response.headers_mut(),
            CONTENT_TYPE.as_str(),
            "text/event-stream; charset=utf-8",
        );
        return response;
    }
    while let Some(event) = stream.events.recv().await {
        stream.count(event);
    }
    if !stream.ended {
        return error(
            StatusCode::INTERNAL_SERVER_ERROR,
            "InternalServerError",
            "the engine restarted",
        );
    }
    whole(
        StatusCode::OK,
        "application/json",
        stream.writer.whole(stream.usage),
    )
}

/// Misbehaves as the fault says: a status to answer with, an error to cut the connection, or nothing.
async fn suffer(fault: &watch::Sender<Fault>) -> Result<Option<StatusCode>, Cut> {
    let mut changes = fault.subscribe();
    loop {
        let now = *changes.borrow_and_update();
        match now {
            Fault::None => return Ok(None),
            Fault::Status(status) => {
                return Ok(Some(
                    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
                ));
            }
            Fault::Reset => return Err("made to reset".into()),
            Fault::Hang => changes.changed().await?,
        }
    }
}

/// A request body as it was received.
struct Received {
    bytes: Bytes,
    sha256: String,
    body_bytes: usize,
    too_large: bool,
}

impl Received {
    async fn read(mut body: Incoming) -> Result<Self, hyper::Error> {
        let mut hasher = Sha256::new();
        let mut bytes = BytesMut::new();
        let mut body_bytes = 0;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            hasher.update(&data);
            body_bytes += data.len();
            if body_bytes <= MAX_BODY_BYTES {
                bytes.extend_from_slice(&data);
            }
        }
        let sha256 = hasher
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Ok(Self {
            bytes: bytes.freeze(),
            sha256,
            body_bytes,
            too_large: body_bytes > MAX_BODY_BYTES,
        })
    }
}

/// The body of an answer.
pub(super) enum ReplyBody {
    /// Known from the start; `None` once it was sent.
    Whole(Option<Bytes>),
    /// Server-sent events as the engine produces tokens.
    Tokens(TokenStream),
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(
                bytes
                    .take()
                    .filter(|bytes| !bytes.is_empty())
                    .map(|bytes| Ok(Frame::data(bytes))),
            ),
            Self::Tokens(stream) => stream.poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(bytes) if bytes.as_ref().is_none_or(Bytes::is_empty))
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(bytes) => {
                hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Self::Tokens(_) => hyper::body::SizeHint::default(),
        }
    }
}

/// A stream of tokens; dropping it before its end cancels the request in the engine.
pub(super) struct TokenStream {
    events: mpsc::UnboundedReceiver<EngineEvent>,
    writer: AnswerWriter,
    usage: Usage,
    max_tokens: usize,
    include_usage: bool,
    ended: bool,
    _listener: Listener,
}

impl TokenStream {
    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let Some(event) = ready!(self.events.poll_recv(context)) else {
            return Poll::Ready(Some(Err("the engine restarted".into())));
        };
        self.count(event);
        let mut out = BytesMut::new();
        if event.kind == EventKind::Finished {
            if self.include_usage {
                out.extend_from_slice(&self.writer.usage_event(self.usage));
            }
            out.extend_from_slice(&self.writer.done_event());
        } else {
            let tokens = self.usage.completion_tokens;
            out.extend_from_slice(&self.writer.token_event(tokens == 1, tokens == self.max_tokens));
        }
        Poll::Ready(Some(Ok(Frame::data(out.freeze()))))
    }

    fn count(&mut self, event: EngineEvent) {
        match event.kind {
            EventKind::Prefilled { cached_tokens } => {
                self.usage.cached_tokens = cached_tokens;
                self.usage.completion_tokens = 1;
            }
            EventKind::Token => self.usage.completion_tokens += 1,
            EventKind::Finished => self.ended = true,
        }
    }
}

/// Ties a request in the engine to whoever waits for it.
struct Listener {
    shared: Arc<Shared>,
    life: u64,
    id: RequestId,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared
            .lock()
            .cancel(self.shared.now_us(), self.life, self.id);
        self.shared.wake.notify_one();
    }
}

fn json_reply(value: &serde_json::Value) -> Response<ReplyBody> {
    whole(StatusCode::OK, "application/json", Bytes::from(value.to_string()))
}

fn error(status: StatusCode, kind: &str, message: &str) -> Response<ReplyBody> {
    whole(
        status,
        "application/json",
        api::error_body(status.as_u16(), kind, message),
    )
}

fn whole(status: StatusCode, content_type: &str, bytes: Bytes) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::Whole(Some(bytes)));
    *response.status_mut() = status;
    set(response.headers_mut(), CONTENT_TYPE.as_str(), content_type);
    response
}

fn set(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

fn named_headers(headers: &HeaderMap) -> Vec<(String, String)> {
    headers
        .iter()
        .map(|(name, value)| {
            (
                name.to_string(),
                String::from_utf8_lossy(value.as_bytes()).into_owned(),
            )
        })
        .collect()
}

/// Bytes of a body that are kept; what lies beyond is hashed, counted and refused.
const MAX_BODY_BYTES: usize = 64 << 20;
