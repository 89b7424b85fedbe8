//! An exchange over HTTP/1.1, written as what the client does → what it saw.

use std::time::Duration;

use bytes::Bytes;

use super::rig::Rig;
use super::wire::{Body, Head, Wire, digest};

/// What a client does.
#[derive(Debug, Clone)]
pub(super) enum Do {
    /// Sends bytes.
    Send(Bytes),
    /// Sends bytes one at a time.
    Drip(Bytes),
    /// Waits for so long.
    Pause(Duration),
    /// Waits until an upstream works on it; where the filter holds the request that will not be before its body is there.
    UntilUpstream,
    /// Waits until an upstream works on it, which must come to pass.
    Reached,
    /// Reads one head, interim or not.
    Head,
    /// Reads interim heads and one whole answer.
    Answer,
    /// The same where Envoy closes the connection or not depending on how much of the request it has read by then.
    AnswerInRace,
    /// The same for an answer to HEAD.
    AnswerToHead,
    /// Reads so many bytes.
    Read(usize),
    /// Reads chunks until they make up so many bytes at least, and tells of no more.
    ReadChunks(usize),
    /// Ends the connection by a reset.
    Reset,
    /// Ends the connection in order.
    Close,
    /// Sends no more but still reads.
    HalfClose,
    /// Waits until no upstream works on it any more.
    Rest,
    /// Waits for the end of the connection.
    Closed,
}

/// Plays it and tells all that was seen.
pub(super) async fn play(rig: &Rig, id: u64, steps: &[Do]) -> Vec<String> {
    let mut seen = Vec::new();
    let Ok(wire) = Wire::connect(rig.address()).await else {
        return vec!["no connection".to_owned()];
    };
    let mut wire = Some(wire);
    for step in steps {
        let open = wire.as_mut();
        match (step, open) {
            (Do::Send(bytes), Some(wire)) => drop(wire.send(bytes).await),
            (Do::Drip(bytes), Some(wire)) => {
                for byte in bytes {
                    let _ = wire.send(&[*byte]).await;
                    tokio::task::yield_now().await;
                }
            }
            (Do::Head, Some(wire)) => seen.push(match wire.head().await {
                Ok(Some(head)) => told(&head),
                Ok(None) => "closed".to_owned(),
                Err(error) => error.kind().to_string(),
            }),
            (Do::Answer, Some(wire)) => answer(wire, false, &mut seen).await,
            (Do::AnswerInRace, Some(wire)) => {
                let mut answer_seen = Vec::new();
                answer(wire, false, &mut answer_seen).await;
                let without = |line: String| line.replace(" | connection: close", "");
                seen.extend(answer_seen.into_iter().map(without));
            }
            (Do::ReadChunks(count), Some(wire)) => {
                let mut bytes = Vec::new();
                while bytes.len() < *count && matches!(wire.chunk(&mut bytes).await, Some(1..)) {}
                bytes.truncate(*count);
                seen.push(digest(&bytes));
            }
            (Do::AnswerToHead, Some(wire)) => answer(wire, true, &mut seen).await,
            (Do::Read(count), Some(wire)) => {
                let mut bytes = Vec::new();
                let end = wire
                    .take(*count, &mut bytes)
                    .await
                    .map_or(" and the end", |()| "");
                seen.push(format!("{}{end}", digest(&bytes)));
            }
            (Do::HalfClose, Some(wire)) => drop(wire.half_close().await),
            (Do::Closed, Some(wire)) => {
                let is_closed = wire.ends_within(PATIENCE).await;
                seen.push(if is_closed { "closed" } else { "still open" }.to_owned());
            }
            (Do::Reset, _) => {
                if let Some(wire) = wire.take() {
                    wire.reset();
                }
            }
            (Do::Close, _) => wire = None,
            (Do::Pause(time), _) => tokio::time::sleep(*time).await,
            (Do::UntilUpstream, _) => rig.has_come(id).await,
            (Do::Reached, _) => seen.push(rig.reached(id).await),
            (Do::Rest, _) => seen.push(rig.rests(id).await),
            (_, None) => seen.push("not connected any more".to_owned()),
        }
    }
    seen
}

async fn answer(wire: &mut Wire, to_head: bool, seen: &mut Vec<String>) {
    loop {
        let head = match wire.head().await {
            Ok(Some(head)) => head,
            Ok(None) => return seen.push("closed".to_owned()),
            Err(error) => return seen.push(error.kind().to_string()),
        };
        seen.push(told(&head));
        if !matches!(head.status(), 100 | 102..=199) {
            let body = wire.body(head.answer_framing(to_head)).await;
            seen.push(told_of(&body));
            return;
        }
    }
}

fn told_of(body: &Body) -> String {
    let (bytes, trailers) = (digest(&body.bytes), &body.trailers);
    let end = if body.is_cut { ", cut" } else { "" };
    format!("{bytes}, trailers {trailers:?}{end}")
}

/// A head without what differs from time to time and what the filter may say.
fn told(head: &Head) -> String {
    let mut lines = head.lines.clone();
    lines.retain(|(name, _)| is_compared(name));
    let first = head.first.clone();
    Head { first, lines }.to_string().replace('\n', " | ")
}

/// Whether a header of an answer must be the same without the filter.
pub(super) fn is_compared(name: &str) -> bool {
    // Which upstream answered is the filter's to choose.
    !matches!(name, "date" | "x-envoy-upstream-service-time" | "x-served-by")
        && !name.starts_with("x-warmroute-")
}

/// Longer than any timeout of the rig.
const PATIENCE: Duration = Duration::from_secs(4);
