//! A small HTTP client for tests and load: a request goes in, the whole answer comes out.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::{HeaderMap, Request, Response};
use hyper_util::client::legacy::{Client as Pool, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};

/// Body of a request.
pub type RequestBody = UnsyncBoxBody<Bytes, Infallible>;

/// A client with its own pool of connections.
#[derive(Debug, Clone)]
pub struct Client {
    pool: Pool<HttpConnector, RequestBody>,
    deadline: Duration,
}

impl Client {
    /// A client for HTTP/1.1.
    pub fn new() -> Self {
        Self::with_http2(false)
    }

    /// A client for HTTP/2 without TLS (prior knowledge).
    pub fn http2() -> Self {
        Self::with_http2(true)
    }

    /// Gives up on a whole exchange after this long; one minute by default.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sends a request and returns as soon as the response headers are here.
    ///
    /// # Errors
    /// When the exchange fails or the deadline passes.
    pub async fn send(&self, request: Request<RequestBody>) -> Result<Response<Incoming>, ClientError> {
        match tokio::time::timeout(self.deadline, self.pool.request(request)).await {
            Ok(response) => response.map_err(ClientError::Connection),
            Err(_) => Err(ClientError::Deadline(self.deadline)),
        }
    }

    /// Sends a request and reads the whole answer.
    ///
    /// # Errors
    /// When the exchange fails or the deadline passes.
    pub async fn request(&self, request: Request<RequestBody>) -> Result<Answer, ClientError> {
        let exchange = async {
            let (parts, body) = self
                .pool
                .request(request)
                .await
                .map_err(ClientError::Connection)?
                .into_parts();
            let body = body.collect().await.map_err(ClientError::Body)?;
            let trailers = body.trailers().cloned();
            Ok(Answer {
                status: parts.status.as_u16(),
                headers: parts.headers,
                body: body.to_bytes(),
                trailers,
            })
        };
        match tokio::time::timeout(self.deadline, exchange).await {
            Ok(answer) => answer,
            Err(_) => Err(ClientError::Deadline(self.deadline)),
        }
    }

    /// Gets a URL.
    ///
    /// # Errors
    /// When the URL is bad, the exchange fails or the deadline passes.
    pub async fn get(&self, url: &str) -> Result<Answer, ClientError> {
        self.request(Request::get(url).body(full("")).map_err(ClientError::Request)?)
            .await
    }

    /// Posts JSON to a URL, with more headers.
    ///
    /// # Errors
    /// When URL or headers are bad, the exchange fails or the deadline passes.
    pub async fn post(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Answer, ClientError> {
        self.request(post_request(url, headers, full(body))?).await
    }

    fn with_http2(http2: bool) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .http2_only(http2)
            .build(connector);
        Self {
            pool,
            deadline: DEFAULT_DEADLINE,
        }
    }
}

impl Default for Client {
    fn default() -> Self {
        Self::new()
    }
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
    /// Trailers, if any came.
    pub trailers: Option<HeaderMap>,
}

impl Answer {
    /// First value of a header, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The body as text, with what is no UTF-8 replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON, `Null` if it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub enum ClientError {
    /// URL or headers cannot be sent.
    Request(hyper::http::Error),
    /// Connecting or sending failed.
    Connection(hyper_util::client::legacy::Error),
    /// The answer broke off.
    Body(hyper::Error),
    /// It took too long.
    Deadline(Duration),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(cause) => write!(f, "the request cannot be sent: {cause}"),
            Self::Connection(cause) => match std::error::Error::source(cause) {
                Some(source) => write!(f, "{cause}: {source}"),
                None => write!(f, "{cause}"),
            },
            Self::Body(cause) => write!(f, "the answer broke off: {cause}"),
            Self::Deadline(deadline) => write!(f, "no whole answer within {deadline:?}"),
        }
    }
}

impl std::error::Error for ClientError {}

/// A JSON post with more headers and any body.
///
/// # Errors
/// When URL or headers are bad.
pub fn post_request(
    url: &str,
    headers: &[(&str, &str)],
    body: RequestBody,
) -> Result<Request<RequestBody>, ClientError> {
    let mut builder = Request::post(url);
    if !headers
        .iter()
        .any(|(name, _)| name.eq_ignore_ascii_case("content-type"))
    {
        builder = builder.header("content-type", "application/json");
    }
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(body).map_err(ClientError::Request)
}

/// A body known as a whole: sent with `content-length`.
pub fn full(bytes: impl Into<Bytes>) -> RequestBody {
    Full::new(bytes.into()).boxed_unsync()
}

/// A body sent in pieces and perhaps ended by trailers: chunked over HTTP/1.1, one frame each over HTTP/2.
pub fn pieces(chunks: Vec<Bytes>, trailers: Option<HeaderMap>) -> RequestBody {
    let mut frames: VecDeque<_> = chunks.into_iter().map(Frame::data).collect();
    frames.extend(trailers.map(Frame::trailers));
    Pieces { frames }.boxed_unsync()
}

struct Pieces {
    frames: VecDeque<Frame<Bytes>>,
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.get_mut().frames.pop_front().map(Ok))
    }
}

/// Longer than any exchange of a test or a demo, short enough to end a hang within one run.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);
