//! Exchanges that one of their ends breaks off.

use bytes::Bytes;

use super::{By, chat, chunks, exchange, exchange2, in_race, pause, post, posted, request2, reused, send};
use crate::faults::streams::http1::Do;
use crate::faults::streams::http2::Do2;
use crate::faults::streams::rig::Exchange;
use crate::faults::streams::wire::chunk;

pub(super) fn client_aborts() -> Vec<Exchange> {
    let body = chat(20_000);
    let half = body.slice(..10_000);
    let mut all = Vec::new();
    for (how, end) in [("a reset", Do::Reset), ("a close", Do::Close)] {
        for by in [By::Length, By::Chunks] {
            let length = (by == By::Length).then_some(body.len());
            let framed = |bytes: &Bytes| match by {
                By::Length => Do::Send(bytes.clone()),
                By::Chunks => send(chunk(bytes)),
            };
            let whole = match by {
                By::Length => framed(&body),
                By::Chunks => send(chunks(&body, 5000)),
            };
            let abort = |at: &str, mut steps: Vec<Do>| {
                steps.extend([end.clone(), Do::Rest]);
                exchange(format!("{how} {at}, {by:?}"), "at rest", steps)
            };
            all.extend([
                abort(
                    "in the headers",
                    vec![send("POST /v1/chat/completions HTTP/1.1\r\nhost: te")],
                ),
                abort(
                    "after the headers",
                    vec![posted("echo", "", length), Do::UntilUpstream],
                ),
                abort(
                    "in the body",
                    vec![posted("echo", "", length), framed(&half), Do::UntilUpstream],
                ),
                abort(
                    "after the body",
                    vec![posted("hang", "", length), whole.clone(), Do::Reached],
                ),
                abort(
                    "after the answer's headers",
                    vec![posted("sse 100 50", "", length), whole.clone(), Do::Head],
                ),
                abort(
                    "in the stream",
                    vec![
                        posted("sse 100 50", "", length),
                        whole.clone(),
                        Do::Head,
                        Do::ReadChunks(27),
                    ],
                ),
                abort(
                    "in a large answer",
                    vec![
                        posted("large 8000000", "", length),
                        whole.clone(),
                        Do::Head,
                        Do::Read(10_000),
                    ],
                ),
                abort(
                    "while another try is awaited",
                    vec![
                        posted("slow 5000 9", "x-route: per-try\r\n", length),
                        whole,
                        pause(500),
                    ],
                ),
            ]);
        }
    }
    all.push(exchange(
        "no more is sent in the middle of the body",
        "at rest",
        vec![
            posted("echo", "", Some(body.len())),
            Do::Send(half),
            Do::HalfClose,
            Do::Closed,
            Do::Rest,
        ],
    ));
    all
}

pub(super) fn client_resets() -> Vec<Exchange> {
    let body = chat(20_000);
    let half = body.slice(..10_000);
    let mut all = Vec::new();
    for upstream in ["llm", "http2"] {
        let to = [("x-route", upstream)];
        let request = |play: &str| request2(play, &to);
        let abort = |at: &str, mut steps: Vec<Do2>| {
            steps.extend([Do2::Reset, Do2::Rest]);
            exchange2(format!("reset {at}, to {upstream}"), "at rest", steps)
        };
        let endless = if upstream == "llm" {
            "sse 100 50"
        } else {
            "endless"
        };
        let whole = || vec![Do2::Data(body.clone()), Do2::End];
        let with = |play: &str, mut between: Vec<Do2>, after: Vec<Do2>| {
            let mut steps = vec![request(play)];
            steps.append(&mut between);
            steps.extend(after);
            steps
        };
        all.extend([
            abort(
                "after the headers",
                with("echo", vec![], vec![Do2::UntilUpstream]),
            ),
            abort(
                "in the body",
                with("echo", vec![Do2::Data(half.clone())], vec![Do2::UntilUpstream]),
            ),
            abort("after the body", with("hang", whole(), vec![Do2::Reached])),
            abort(
                "after the answer's headers",
                with(endless, whole(), vec![Do2::Head]),
            ),
            abort(
                "in the stream",
                with(endless, whole(), vec![Do2::Head, Do2::Some]),
            ),
        ]);
    }
    all
}

pub(super) fn upstream_aborts() -> Vec<Exchange> {
    let mut all = Vec::new();
    let dead = [
        ("refuses the connection", "dead", "503"),
        ("closes the connection at once", "closing", "503"),
    ];
    for (what, route, expects) in dead {
        for (bytes, by) in [(500, By::Length), (20_000, By::Chunks), (2 << 20, By::Length)] {
            let mut steps = post("echo", &format!("x-route: {route}\r\n"), &chat(bytes), by);
            in_race(&mut steps);
            all.push(exchange(format!("{what}, {bytes} bytes, {by:?}"), expects, steps));
        }
    }
    let phases = [
        ("head", "503"),
        ("body", "503"),
        ("whole", "503"),
        ("hints", "503"),
        ("answer", "HTTP/1.1 200 OK"),
        ("length", "half of it"),
        ("chunk", "whole"),
        ("between", "whole"),
    ];
    for (phase, expects) in phases {
        for how in ["close", "reset"] {
            for (bytes, by) in [(500, By::Length), (20_000, By::Chunks)] {
                let play = format!("fail 9 {phase} {how}");
                // What a reset overtakes is lost, as much or as little on either side.
                let mut steps = post(&play, "", &chat(bytes), by);
                let what = format!("{how} at {phase}, {bytes} bytes, {by:?}");
                let expects = if how == "reset" { "" } else { expects };
                all.push(if matches!(phase, "head" | "body") {
                    in_race(&mut steps);
                    exchange(what, expects, steps)
                } else {
                    reused(what, expects, steps)
                });
            }
        }
    }
    all
}
