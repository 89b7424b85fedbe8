//! One HTTP request to a replica → its answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, watch};

use super::admin;
use super::reply::{Cut, Listener, ReplyBody, Resumed, TokenStream};
use super::{Fault, OddMetrics, RequestRecord, Shared, unix_now};
use crate::api::{self, AnswerWriter, Endpoint, GenerationRequest, Usage};
use crate::engine::{Prompt, Refusal};
use crate::metrics_text::MetricsView;

type Reply = Result<Response<ReplyBody>, Cut>;

/// Answers one request; an error closes the connection.
pub(super) async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Reply {
    let (parts, body) = request.into_parts();
    let received = Received::read(body).await?;
    let path = parts.uri.path();
    let mut response = if path.starts_with(admin::PREFIX) {
        admin::answer(&shared, &parts.method, path, &received.bytes)
    } else if parts.method == Method::GET {
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
                Some(Ok(request)) if is_cut(&shared) && !request.stream => return Err("made to cut".into()),
                Some(Ok(request)) => serve(&shared, request).await,
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
                None => shown_metrics(shared),
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
            let state = shared.lock();
            let max_model_len = state.engine.model().capacity_tokens();
            let card = |id: &str, parent: Option<&str>| {
                json!({"id": id, "object": "model", "created": now_s, "owned_by": "vllm", "root": id,
                    "parent": parent, "max_model_len": max_model_len, "permission": []})
            };
            let adapters = state.adapters.iter().map(|id| card(id, Some(&shared.model)));
            let cards: Vec<_> = std::iter::once(card(&shared.model, None))
                .chain(adapters)
                .collect();
            json_reply(&json!({"object": "list", "data": cards}))
        }
        // `/server_info`, `/model_info`, `/v1/loads` and the like of other engines are not found, as in vLLM.
        _ => error(StatusCode::NOT_FOUND, "NotFoundError", "no such endpoint"),
    })
}

fn shown_metrics(shared: &Shared) -> Response<ReplyBody> {
    let odd = shared.lock().odd_metrics.clone();
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    match odd {
        None => whole(StatusCode::OK, content_type, metrics(shared)),
        Some(OddMetrics::Text(text)) => whole(StatusCode::OK, content_type, text),
        Some(OddMetrics::Drip) => Response::new(ReplyBody::Drip(tokio::time::interval(DRIP))),
    }
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
        cache_blocks: state.engine.model().cache_blocks,
        block_tokens: state.engine.model().block_tokens,
        counters: state.engine.counters(),
        started_s: state.started_s,
        adapters: &state.adapters,
    };
    Bytes::from(view.render())
}

async fn serve(shared: &Arc<Shared>, request: GenerationRequest) -> Response<ReplyBody> {
    let bytes = match request.endpoint {
        Endpoint::Chat | Endpoint::Completions | Endpoint::Responses | Endpoint::Messages => {
            return generate(shared, request).await;
        }
        Endpoint::Tokenize => {
            let max_model_len = shared.lock().engine.model().capacity_tokens();
            api::tokenize_body(&request.prompt, max_model_len)
        }
        Endpoint::CountTokens => api::count_tokens_body(&request.prompt),
        Endpoint::RenderChat | Endpoint::RenderCompletions => {
            api::render_body(&request, &format!("{}-{}", shared.name, shared.lock().posts))
        }
    };
    whole(StatusCode::OK, "application/json", bytes)
}

async fn generate(shared: &Arc<Shared>, request: GenerationRequest) -> Response<ReplyBody> {
    let (sender, events) = mpsc::unbounded_channel();
    let (listener, prompt_tokens, block_tokens) = {
        let mut state = shared.lock();
        let now_us = shared.now_us();
        state.advance(now_us);
        let block_tokens = state.engine.model().block_tokens;
        let prompt = Prompt::from_text(
            request.prompt.as_bytes(),
            &salt(&request, &state.adapters),
            block_tokens,
        );
        let prompt_tokens = prompt.tokens();
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
        // What takes no time is answered without waiting for the driver.
        state.advance(now_us);
        let listener = Listener::new(Arc::clone(shared), state.life, id);
        (listener, prompt_tokens, block_tokens)
    };
    shared.wake.notify_one();
    let writer = AnswerWriter::new(&request, &listener.name(), unix_now().as_secs());
    let usage = Usage {
        prompt_tokens,
        created_cache_tokens: prompt_tokens / block_tokens.max(1) * block_tokens,
        ..Usage::default()
    };
    let mut stream = TokenStream::new(events, writer, usage, listener, is_cut(shared), pause(shared));
    if request.stream {
        let mut response = Response::new(ReplyBody::Tokens(stream));
        set(
            response.headers_mut(),
            CONTENT_TYPE.as_str(),
            "text/event-stream; charset=utf-8",
        );
        return response;
    }
    match stream.whole().await {
        Some(answer) => {
            let mut response = whole(StatusCode::OK, "application/json", answer.clone());
            if shared.lock().sends_trailers {
                let mut trailers = HeaderMap::new();
                set(&mut trailers, "x-trailer", "1");
                *response.body_mut() = ReplyBody::WithTrailers(Some(answer), Some(trailers));
            }
            response
        }
        None => error(
            StatusCode::INTERNAL_SERVER_ERROR,
            "InternalServerError",
            "the engine restarted",
        ),
    }
}

/// What a request's cache is kept apart by: its salt, and its adapter if it names one.
fn salt(request: &GenerationRequest, adapters: &[String]) -> Vec<u8> {
    let adapter = adapters.iter().find(|adapter| **adapter == request.model);
    let adapter = adapter.map_or("", String::as_str);
    format!("{}\0{adapter}", request.cache_salt).into_bytes()
}

/// Misbehaves as the fault says: a status to answer with, an error to cut the connection, or nothing.
async fn suffer(fault: &watch::Sender<Fault>) -> Result<Option<StatusCode>, Cut> {
    let mut changes = fault.subscribe();
    loop {
        let now = *changes.borrow_and_update();
        match now {
            Fault::None | Fault::Cut | Fault::Pause => return Ok(None),
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

/// Whether answers break off after their first token.
fn is_cut(shared: &Shared) -> bool {
    *shared.fault.borrow() == Fault::Cut
}

/// The end of the pause that answers make after their first token, if they do.
fn pause(shared: &Shared) -> Option<Resumed> {
    let mut changes = shared.fault.subscribe();
    let is_paused = *changes.borrow() == Fault::Pause;
    is_paused.then(|| -> Resumed {
        Box::pin(async move {
            // A replica that is gone goes on as well.
            let _ = changes.wait_for(|fault| *fault != Fault::Pause).await;
        })
    })
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

pub(super) fn json_reply(value: &serde_json::Value) -> Response<ReplyBody> {
    whole(StatusCode::OK, "application/json", Bytes::from(value.to_string()))
}

pub(super) fn error(status: StatusCode, kind: &str, message: &str) -> Response<ReplyBody> {
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

/// How often a drop of what never ends falls.
const DRIP: Duration = Duration::from_millis(20);
/// Bytes of a body that are kept; what lies beyond is hashed, counted and refused.
const MAX_BODY_BYTES: usize = 64 << 20;
