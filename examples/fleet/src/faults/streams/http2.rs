//! An exchange over HTTP/2, written as what the client does → what it saw.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper::ext::Protocol;
use hyper::upgrade::Upgraded;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::http1::is_compared;
use super::rig::Rig;
use super::wire::digest;

/// What a client does.
#[derive(Debug, Clone)]
pub(super) enum Do2 {
    /// Sends HEADERS: method, path, more headers, and whether that is all.
    Request(&'static str, &'static str, Vec<(&'static str, String)>, bool),
    /// Sends an extended CONNECT for this protocol.
    Connect(&'static str, &'static str, Vec<(&'static str, String)>),
    /// Sends DATA.
    Data(Bytes),
    /// Sends trailers, which end the request.
    Trailers(&'static [(&'static str, &'static str)]),
    /// Ends the request.
    End,
    /// Waits for so long.
    Pause(Duration),
    /// Waits until an upstream works on it, if one will.
    UntilUpstream,
    /// Waits until an upstream works on it, which must come to pass.
    Reached,
    /// Waits for the response's HEADERS.
    Head,
    /// Reads some of the answer.
    Some,
    /// Reads the answer to its end, the HEADERS first if they were not read.
    Answer,
    /// Says this through an upgraded stream and reads as much.
    Say(&'static str),
    /// Resets the stream.
    Reset,
    /// Waits until no upstream works on it any more.
    Rest,
}

/// Plays it on a connection of its own and tells all that was seen; the connection must serve another request after it.
pub(super) async fn play(rig: &Rig, id: u64, steps: &[Do2]) -> Vec<String> {
    let Some(mut sender) = connect(rig).await else {
        return vec!["no connection".to_owned()];
    };
    let mut client = Client::default();
    for step in steps {
        client.step(rig, &mut sender, id, step).await;
    }
    drop((client.response, client.body, client.answer, client.upgraded));
    let request = request("GET", "/after", &[], id, None);
    let after = sender.send_request(request.map(|()| Stream::ended())).await;
    client.seen.push(match after {
        Ok(response) => format!("then {}", response.status()),
        Err(_) => "then no more".to_owned(),
    });
    client.seen
}

type Responding = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>>>>;

#[derive(Default)]
struct Client {
    seen: Vec<String>,
    body: Option<mpsc::UnboundedSender<io::Result<Frame<Bytes>>>>,
    response: Option<Responding>,
    answer: Option<Incoming>,
    is_connect: bool,
    upgraded: Option<TokioIo<Upgraded>>,
}

impl Client {
    async fn step(&mut self, rig: &Rig, sender: &mut SendRequest<Stream>, id: u64, step: &Do2) {
        match step {
            Do2::Request(method, path, headers, is_all) => {
                let request = request(method, path, headers, id, None);
                self.begin(sender, request, *is_all);
            }
            Do2::Connect(path, protocol, headers) => {
                let protocol = Some(Protocol::from_static(protocol));
                self.is_connect = true;
                self.begin(sender, request("CONNECT", path, headers, id, protocol), true);
            }
            Do2::Data(bytes) => self.frame(Frame::data(bytes.clone())),
            Do2::Trailers(lines) => {
                let pairs = lines.iter().filter_map(|(name, value)| {
                    Some((hyper::header::HeaderName::from_static(name), value.parse().ok()?))
                });
                self.frame(Frame::trailers(pairs.collect::<HeaderMap>()));
                self.body = None;
            }
            Do2::End => self.body = None,
            Do2::Pause(time) => tokio::time::sleep(*time).await,
            Do2::UntilUpstream => rig.has_come(id).await,
            Do2::Reached => {
                let reached = rig.reached(id).await;
                self.seen.push(reached);
            }
            Do2::Rest => {
                let rest = rig.rests(id).await;
                self.seen.push(rest);
            }
            Do2::Head => self.head().await,
            Do2::Some => {
                if let Some(answer) = &mut self.answer {
                    let frame = answer.frame().await;
                    let got = matches!(frame, Some(Ok(_)));
                    self.seen
                        .push(if got { "some of it" } else { "none of it" }.to_owned());
                }
            }
            Do2::Answer => {
                self.head().await;
                self.rest_of_answer().await;
            }
            Do2::Say(text) => {
                let mut said = vec![0; text.len()];
                if let Some(io) = &mut self.upgraded {
                    let _ = io.write_all(text.as_bytes()).await;
                    let _ = io.read_exact(&mut said).await;
                }
                self.seen.push(digest(&said));
            }
            Do2::Reset => {
                if let Some(body) = self.body.take() {
                    let _ = body.send(Err(io::ErrorKind::ConnectionAborted.into()));
                    // The connection's task takes it from there.
                    tokio::task::yield_now().await;
                }
                self.response = None;
                self.answer = None;
            }
        }
    }

    fn begin(&mut self, sender: &mut SendRequest<Stream>, request: Request<()>, is_all: bool) {
        let (body, frames) = mpsc::unbounded_channel();
        let stream = if is_all {
            Stream::ended()
        } else {
            Stream(Some(frames))
        };
        self.body = (!is_all).then_some(body);
        self.response = Some(Box::pin(sender.send_request(request.map(|()| stream))));
    }

    /// Sends a frame.
    fn frame(&mut self, frame: Frame<Bytes>) {
        if let Some(body) = &self.body {
            let _ = body.send(Ok(frame));
        }
    }

    async fn head(&mut self) {
        if let Some(response) = self.response.take() {
            match response.await {
                Ok(response) => self.responded(response).await,
                Err(error) => self.seen.push(told(&error)),
            }
        }
    }

    async fn responded(&mut self, response: Response<Incoming>) {
        let headers: Vec<String> = response
            .headers()
            .iter()
            .filter(|(name, _)| is_compared(name.as_str()))
            .map(|(name, value)| format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())))
            .collect();
        self.seen
            .push(format!("{} {}", response.status(), headers.join(" | ")));
        if self.is_connect && response.status().is_success() {
            self.upgraded = hyper::upgrade::on(response).await.ok().map(TokioIo::new);
        } else {
            self.answer = Some(response.into_body());
        }
    }

    async fn rest_of_answer(&mut self) {
        let Some(mut answer) = self.answer.take() else {
            return;
        };
        let (mut bytes, mut trailers) = (Vec::new(), String::new());
        while let Some(frame) = answer.frame().await {
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) => bytes.extend_from_slice(&data),
                Ok(Err(frame)) => trailers = format!("{:?}", frame.trailers_ref()),
                Err(error) => {
                    self.seen
                        .push(format!("{}, cut: {}", digest(&bytes), told(&error)));
                    return;
                }
            }
        }
        self.seen.push(format!("{}, trailers {trailers}", digest(&bytes)));
    }
}

async fn connect(rig: &Rig) -> Option<SendRequest<Stream>> {
    let stream = TcpStream::connect(rig.address()).await.ok()?;
    stream.set_nodelay(true).ok()?;
    let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await.ok()?;
    tokio::spawn(connection);
    Some(sender)
}

fn request(
    method: &str,
    path: &str,
    headers: &[(&'static str, String)],
    id: u64,
    protocol: Option<Protocol>,
) -> Request<()> {
    let mut request = Request::builder()
        .method(method)
        .uri(format!("http://test{path}"))
        .header("x-id", id);
    for (name, value) in headers {
        request = request.header(*name, value);
    }
    if let Some(protocol) = protocol {
        request = request.extension(protocol);
    }
    request.body(()).unwrap_or_default()
}

/// What became of a stream: the innermost cause, without its address.
fn told(error: &hyper::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// A request's body whose frames come through a channel.
struct Stream(Option<mpsc::UnboundedReceiver<io::Result<Frame<Bytes>>>>);

impl Stream {
    const fn ended() -> Self {
        Self(None)
    }
}

impl Body for Stream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut self.0 {
            Some(frames) => frames.poll_recv(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}
