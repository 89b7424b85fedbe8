//! Engine events → the body of an answer, as it is produced.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::body::{Body, Frame};
use tokio::sync::mpsc;
use tokio::time::Interval;

use super::Shared;
use crate::api::{AnswerWriter, Usage};
use crate::engine::{EngineEvent, EventKind, RequestId};

/// Why a connection is cut.
pub(super) type Cut = Box<dyn Error + Send + Sync>;

/// The end of a pause.
pub(super) type Resumed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The body of an answer.
pub(super) enum ReplyBody {
    /// Known from the start; `None` once it was sent.
    Whole(Option<Bytes>),
    /// Known from the start, with trailers behind it; each is `None` once it was sent.
    WithTrailers(Option<Bytes>, Option<HeaderMap>),
    /// Server-sent events as the engine produces tokens.
    Tokens(TokenStream),
    /// A comment of the metrics format that never ends.
    Drip(Interval),
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
            Self::WithTrailers(bytes, trailers) => {
                let frame = bytes.take().map(Frame::data);
                Poll::Ready(frame.or_else(|| trailers.take().map(Frame::trailers)).map(Ok))
            }
            Self::Tokens(stream) => stream.poll_frame(context),
            Self::Drip(interval) => {
                ready!(interval.poll_tick(context));
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"# drop\n")))))
            }
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
            Self::WithTrailers(..) | Self::Tokens(_) | Self::Drip(_) => hyper::body::SizeHint::default(),
        }
    }
}

/// A stream of tokens; dropping it before its end cancels the request in the engine.
pub(super) struct TokenStream {
    events: mpsc::UnboundedReceiver<EngineEvent>,
    writer: AnswerWriter,
    usage: Usage,
    opened: bool,
    ended: bool,
    /// Whether it breaks off after its first token.
    is_cut: bool,
    /// What it waits for after its first token.
    resumed: Option<Resumed>,
    _listener: Listener,
}

impl TokenStream {
    pub(super) fn new(
        events: mpsc::UnboundedReceiver<EngineEvent>,
        writer: AnswerWriter,
        usage: Usage,
        listener: Listener,
        is_cut: bool,
        resumed: Option<Resumed>,
    ) -> Self {
        Self {
            events,
            writer,
            usage,
            opened: false,
            ended: false,
            is_cut,
            resumed,
            _listener: listener,
        }
    }

    /// Waits for all tokens; `None` when the engine lost the request.
    pub(super) async fn whole(&mut self) -> Option<Bytes> {
        while let Some(event) = self.events.recv().await {
            self.count(event);
        }
        self.ended.then(|| self.writer.whole(self.usage))
    }

    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if !self.opened {
            self.opened = true;
            let opening = self.writer.opening();
            if !opening.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(opening))));
            }
        }
        if self.is_cut && self.usage.completion_tokens > 0 {
            return Poll::Ready(Some(Err("made to cut".into())));
        }
        if self.usage.completion_tokens > 0
            && let Some(resumed) = &mut self.resumed
        {
            ready!(resumed.as_mut().poll(context));
            self.resumed = None;
        }
        loop {
            let Some(event) = ready!(self.events.poll_recv(context)) else {
                return Poll::Ready(Some(Err("the engine restarted".into())));
            };
            self.count(event);
            let out = match event.kind {
                EventKind::Prefilled { .. } | EventKind::Token => self.writer.token(self.usage),
                EventKind::Preempted => continue,
                EventKind::Finished => self.writer.closing(self.usage),
            };
            return Poll::Ready(Some(Ok(Frame::data(out))));
        }
    }

    fn count(&mut self, event: EngineEvent) {
        match event.kind {
            EventKind::Prefilled { cached_tokens } => {
                self.usage.cached_tokens = cached_tokens;
                self.usage.created_cache_tokens =
                    self.usage.created_cache_tokens.saturating_sub(cached_tokens);
                self.usage.completion_tokens = 1;
            }
            EventKind::Token => self.usage.completion_tokens += 1,
            EventKind::Preempted => {}
            EventKind::Finished => self.ended = true,
        }
    }
}

/// Ties a request in the engine to whoever waits for it.
pub(super) struct Listener {
    shared: Arc<Shared>,
    life: u64,
    id: RequestId,
}

impl Listener {
    pub(super) fn new(shared: Arc<Shared>, life: u64, id: RequestId) -> Self {
        Self { shared, life, id }
    }

    /// Names the request among all that the fleet ever gets.
    pub(super) fn name(&self) -> String {
        format!("{}-{}-{}", self.shared.name, self.life, self.id.0)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared
            .lock()
            .cancel(self.shared.now_us(), self.life, self.id);
        self.shared.wake.notify_one();
    }
}
