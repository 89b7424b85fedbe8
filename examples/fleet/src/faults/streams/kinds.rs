//! The odd exchanges, by kind.

use std::time::Duration;

use bytes::Bytes;

use super::http1::Do;
use super::http2::Do2;
use super::rig::{Exchange, Steps};
use super::wire::chunk;
use crate::faults::load;
use crate::faults::stand::CHAT;
use crate::workload::Rng;

mod aborts;
mod messages;
mod protocols;
mod time;

pub(super) use messages::bodies;
pub(super) use time::{never_ending_uploads, proxied_continues};

/// Exchanges of a kind.
pub(super) struct Kind {
    /// What is odd about them.
    pub(super) fault: &'static str,
    pub(super) exchanges: fn() -> Vec<Exchange>,
    /// Which of them a short run has: one in so many.
    pub(super) short_every: usize,
}

/// All kinds that need no Envoy of their own.
pub(super) fn kinds() -> Vec<Kind> {
    let kind = |fault, exchanges: fn() -> Vec<Exchange>, short_every| Kind {
        fault,
        exchanges,
        short_every,
    };
    vec![
        kind(
            "client aborts over HTTP/1.1, at every phase",
            aborts::client_aborts,
            5,
        ),
        kind(
            "client aborts over HTTP/2, at every phase",
            aborts::client_resets,
            2,
        ),
        kind("upstream aborts, at every phase", aborts::upstream_aborts, 5),
        kind("retries, with bodies of up to 3 MiB", time::retries, 7),
        kind("timeouts and hedges", time::timeouts, 5),
        kind("stalled and slow uploads", time::slow_uploads, 7),
        kind(
            "answers before the body ends, and full duplex",
            time::early_answers,
            5,
        ),
        kind("100-continue from Envoy", time::continues, 2),
        kind("upgrade and CONNECT", protocols::upgrades, 2),
        kind("HTTP/1.0", protocols::http10, 3),
        kind("HTTP/2 with and without trailers", protocols::http2, 4),
        kind("gRPC", protocols::grpc, 2),
        kind("framing and methods", messages::framing, 4),
        kind("duplicate steering headers", messages::steering, 4),
        kind("header limits", messages::header_limits, 7),
        kind("pipelining and reuse", messages::pipelining, 3),
        kind("odd answers", messages::odd_answers, 4),
    ]
}

/// So many exchanges drawn from all kinds, except those that do little but wait or move megabytes.
pub(super) fn mixed(count: usize, seed: u64) -> Vec<Exchange> {
    let mut kinds = kinds();
    kinds.retain(|kind| !kind.fault.starts_with("timeouts"));
    let all = kinds.into_iter().flat_map(|kind| (kind.exchanges)());
    let brisk: Vec<Exchange> = all.filter(Exchange::is_brisk).collect();
    let mut rng = Rng::new(seed);
    (0..count)
        .map(|_| brisk[rng.below(brisk.len())].clone())
        .collect()
}

/// How a body is framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Length,
    Chunks,
}

/// A chat of about so many bytes.
pub(super) fn chat(bytes: usize) -> Bytes {
    load::chat(1, 1, bytes, 4, false).into()
}

/// The head of a request, and its more lines.
fn head(method: &str, path: &str, play: &str, more: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nhost: test\r\nx-id: @ID@\r\nx-play: {play}\r\n{more}\r\n")
}

fn posted(play: &str, more: &str, length: Option<usize>) -> Do {
    let framing = match length {
        Some(length) => format!("content-length: {length}\r\n"),
        None => "transfer-encoding: chunked\r\n".to_owned(),
    };
    let more = format!("content-type: application/json\r\n{framing}{more}");
    Do::Send(head("POST", CHAT, play, &more).into())
}

/// One in so many of each kind, for a short run.
pub(super) fn short() -> Vec<Exchange> {
    let some = |kind: Kind| (kind.exchanges)().into_iter().step_by(kind.short_every);
    kinds().into_iter().flat_map(some).collect()
}

fn send(text: impl Into<Bytes>) -> Do {
    Do::Send(text.into())
}

/// Leaves it open whether Envoy keeps the connection: its answer may come before it has read the whole request.
fn in_race(steps: &mut Vec<Do>) {
    for step in &mut *steps {
        if matches!(step, Do::Answer) {
            *step = Do::AnswerInRace;
        }
    }
    steps.extend([Do::Close, Do::Rest]);
}

fn pause(ms: u64) -> Do {
    Do::Pause(Duration::from_millis(ms))
}

/// A chunked body, in chunks of so many bytes.
fn chunks(body: &[u8], bytes: usize) -> Vec<u8> {
    let mut framed: Vec<u8> = body.chunks(bytes).flat_map(chunk).collect();
    framed.extend_from_slice(b"0\r\n\r\n");
    framed
}

/// A whole post that is played, with the answer read.
fn post(play: &str, more: &str, body: &Bytes, by: By) -> Vec<Do> {
    match by {
        By::Length => vec![
            posted(play, more, Some(body.len())),
            Do::Send(body.clone()),
            Do::Answer,
        ],
        By::Chunks => vec![posted(play, more, None), send(chunks(body, 5000)), Do::Answer],
    }
}

/// Another post on the same connection: nothing of what was before may be taken for a part of it.
fn then() -> Vec<Do> {
    post("echo", "x-then: yes\r\n", &chat(3000), By::Length)
}

fn exchange(what: impl Into<String>, expects: &'static str, steps: Vec<Do>) -> Exchange {
    Exchange {
        what: what.into(),
        expects,
        steps: Steps::Http1(steps),
    }
}

/// The same, and the connection must be fit for another post, or closed, as it is without the filter.
fn reused(what: impl Into<String>, expects: &'static str, mut steps: Vec<Do>) -> Exchange {
    steps.extend(then());
    exchange(what, expects, steps)
}

fn exchange2(what: impl Into<String>, expects: &'static str, steps: Vec<Do2>) -> Exchange {
    Exchange {
        what: what.into(),
        expects,
        steps: Steps::Http2(steps),
    }
}

fn request2(play: &str, more: &[(&'static str, &str)]) -> Do2 {
    let mut headers = vec![
        ("x-play", play.to_owned()),
        ("content-type", "application/json".to_owned()),
    ];
    headers.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
    Do2::Request("POST", CHAT, headers, false)
}
