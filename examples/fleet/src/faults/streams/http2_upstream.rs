//! An engine over HTTP/2 that does what the header `x-play` of a request says.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

use super::upstream::{Attempt, Notes, Play, echo};
use super::wire;

/// A running upstream; gone when it is dropped.
pub(super) struct Http2Upstream {
    pub(super) address: SocketAddr,
    accept: JoinHandle<()>,
}

impl Http2Upstream {
    pub(super) async fn start(notes: &Arc<Notes>) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let notes = Arc::clone(notes);
        let accept = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let notes = Arc::clone(&notes);
                connections.spawn(async move {
                    let service = service_fn(move |request| answer(Arc::clone(&notes), request));
                    let builder = http2::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Ok(Self { address, accept })
    }
}

impl Drop for Http2Upstream {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn answer(notes: Arc<Notes>, request: Request<Incoming>) -> Result<Response<Answer>, io::Error> {
    let (parts, mut incoming) = request.into_parts();
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let id = header("x-id").and_then(|id| id.parse().ok()).unwrap_or(0);
    let (attempt, under_way) = notes.begin(id);
    let play = Play::of(header("x-play"));
    let mut answer = Answer {
        frames: Vec::new(),
        echo: None,
        is_endless: false,
        _under_way: under_way,
    };
    match play.word(0) {
        // Resets the stream.
        "fail" if u64::from(attempt) <= play.number(1) => {
            if play.word(2) != "head" {
                let _ = incoming.collect().await;
            }
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        "early" => {
            let mut response = Response::new(answer);
            *response.status_mut() = play.word(1).parse().unwrap_or_default();
            return Ok(response);
        }
        "duplex" => {
            answer.echo = Some(incoming);
            return Ok(Response::new(answer));
        }
        "hang" => {
            // The stream's end drops this.
            std::future::pending::<()>().await;
        }
        _ => {}
    }
    let mut body = wire::Body::default();
    while let Some(frame) = incoming.frame().await {
        match frame.map_err(|_| io::ErrorKind::ConnectionReset)?.into_data() {
            Ok(data) => body.bytes.extend_from_slice(&data),
            Err(frame) => {
                let trailers = frame.trailers_ref().cloned().unwrap_or_default();
                body.trailers = text(&trailers);
            }
        }
    }
    let head = wire::Head {
        first: format!("{} {}", parts.method, parts.uri.path()),
        lines: text(&parts.headers),
    };
    let mut response = Response::builder();
    match play.word(0) {
        "grpc" => {
            response = response.header("content-type", "application/grpc");
            answer.frames.push(Frame::trailers(headers(&[
                ("grpc-status", "0"),
                ("grpc-message", "well"),
            ])));
        }
        // The whole answer is its HEADERS.
        "grpc-only" => {
            let response = response
                .header("content-type", "application/grpc")
                .header("grpc-status", play.word(1));
            return response.body(answer).map_err(io::Error::other);
        }
        "trailers" => answer
            .frames
            .push(Frame::trailers(headers(&[("x-sum", "1"), ("x-more", "2")]))),
        "endless" => answer.is_endless = true,
        _ => {}
    }
    answer.frames.push(Frame::data(echo(&head, &body).into()));
    response.body(answer).map_err(io::Error::other)
}

fn text(headers: &HeaderMap) -> Vec<(String, String)> {
    let line = |(name, value): (&hyper::header::HeaderName, &hyper::header::HeaderValue)| {
        (
            name.to_string(),
            String::from_utf8_lossy(value.as_bytes()).into_owned(),
        )
    };
    headers.iter().map(line).collect()
}

fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
    let line = |(name, value): &(&'static str, &'static str)| {
        let name = hyper::header::HeaderName::from_static(name);
        (name, hyper::header::HeaderValue::from_static(value))
    };
    lines.iter().map(line).collect()
}

/// What is sent back.
struct Answer {
    /// Frames, the last one first.
    frames: Vec<Frame<Bytes>>,
    /// A request whose frames are sent back as they come.
    echo: Option<Incoming>,
    /// Whether it never ends.
    is_endless: bool,
    _under_way: Attempt,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(frame) = self.frames.pop() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let is_endless = self.is_endless;
        match &mut self.echo {
            Some(echo) => Pin::new(echo)
                .poll_frame(context)
                .map(|frame| frame?.ok().map(Ok)),
            None if is_endless => Poll::Pending,
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.echo.is_none() && !self.is_endless
    }
}
