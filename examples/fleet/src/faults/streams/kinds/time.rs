//! Exchanges that wait for something: another try, a timeout, the rest of a body, leave to go on.

use std::time::Duration;

use bytes::Bytes;

use super::{
    By, chat, chunks, exchange, exchange2, in_race, pause, post, posted, request2, reused, send, then,
};
use crate::faults::stand::CHAT;
use crate::faults::streams::http1::Do;
use crate::faults::streams::http2::Do2;
use crate::faults::streams::rig::Exchange;
use crate::faults::streams::wire::chunk;

pub(super) fn retries() -> Vec<Exchange> {
    let mut all = Vec::new();
    for (bytes, by) in [
        (500, By::Length),
        (20_000, By::Chunks),
        (700_000, By::Chunks),
        (1 << 20, By::Length),
        (3 << 20, By::Length),
    ] {
        let body = chat(bytes);
        let mut add = |what: &str, play: &str, route: &str, expects| {
            let steps = post(play, &format!("x-route: {route}\r\n"), &body, by);
            all.push(reused(format!("{what}, {bytes} bytes, {by:?}"), expects, steps));
        };
        add("a dead host among two", "echo", "half-dead", "");
        add("a closing host among two", "echo", "half-closing", "");
        add("503 once", "status 503 1", "llm", "200 OK");
        add("503 twice", "status 503 2", "llm", "200 OK");
        add("503 for ever", "status 503 9", "llm", "503");
        add("500 once, not retried", "status 500 1", "llm", "500");
        add("503 once, not retried", "status 503 1", "no-retry", "503");
        add(
            "reset after the body once, retried",
            "fail 1 whole close",
            "retry-reset",
            "200 OK",
        );
        add(
            "reset after the body twice, retried",
            "fail 2 whole reset",
            "retry-reset",
            "200 OK",
        );
        add(
            "reset after the body for ever, retried",
            "fail 9 whole close",
            "retry-reset",
            "503",
        );
    }
    all
}

pub(super) fn timeouts() -> Vec<Exchange> {
    let body = chat(20_000);
    let posts = |what: &str, play: &str, route: &str, expects| {
        let steps = post(play, &format!("x-route: {route}\r\n"), &body, By::Length);
        reused(what, expects, steps)
    };
    let stalled = |what: &str, route: &str, expects| {
        let steps = vec![
            posted("echo", &format!("x-route: {route}\r\n"), Some(body.len())),
            Do::Send(body.slice(..9000)),
            Do::Answer,
            Do::Closed,
        ];
        exchange(what, expects, steps)
    };
    vec![
        posts("the first try takes too long", "slow 3000 1", "per-try", "200 OK"),
        posts("every try takes too long", "slow 3000 9", "per-try", "504"),
        posts(
            "the first try takes too long, hedged",
            "slow 3000 1",
            "hedge",
            "200 OK",
        ),
        posts(
            "the first try wins after a hedge",
            "slow 600 1",
            "hedge",
            "200 OK",
        ),
        posts(
            "every try takes too long, hedged",
            "slow 3000 9",
            "hedge",
            "200 OK",
        ),
        posts(
            "the route's timeout passes while waiting",
            "slow 3000 9",
            "timeout",
            "504",
        ),
        posts(
            "the route's timeout passes in the stream",
            "sse 100 100",
            "timeout",
            "data: 0",
        ),
        posts(
            "the stream is idle for too long while waiting",
            "slow 3000 9",
            "idle",
            "504",
        ),
        posts(
            "the stream is idle for too long in the answer",
            "sse 2 3000",
            "idle",
            "data: 0",
        ),
        stalled("the stream is idle for too long in the body", "idle", "408"),
    ]
}

pub(super) fn slow_uploads() -> Vec<Exchange> {
    let body = chat(30_000);
    let short = chat(200);
    let (one, two) = (body.slice(..15_000), body.slice(15_000..));
    let mut dripped = vec![
        posted("echo", "", Some(short.len())),
        Do::Drip(short.clone()),
        Do::Answer,
    ];
    dripped.extend(then());
    let mut dripped_chunks = vec![
        posted("echo", "", None),
        Do::Drip(chunks(&short, 50).into()),
        Do::Answer,
    ];
    dripped_chunks.extend(then());
    let mut dripped_head = vec![
        Do::Drip(Bytes::from(format!(
            "POST {CHAT} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n",
            short.len()
        ))),
        Do::Send(short),
        Do::Answer,
    ];
    dripped_head.extend(then());
    let large = chat(1 << 20);
    vec![
        reused(
            "half a body, two seconds, the other half",
            "200 OK",
            vec![
                posted("echo", "", Some(body.len())),
                Do::Send(one.clone()),
                pause(2000),
                Do::Send(two.clone()),
                Do::Answer,
            ],
        ),
        reused(
            "half a body, two seconds, the other half, in chunks",
            "200 OK",
            vec![
                posted("echo", "", None),
                send(chunk(&one)),
                pause(2000),
                send(chunk(&two)),
                pause(300),
                send("0\r\n\r\n"),
                Do::Answer,
            ],
        ),
        reused(
            "the headers, two seconds, the body",
            "200 OK",
            vec![
                posted("echo", "", Some(body.len())),
                pause(2000),
                Do::Send(body.clone()),
                Do::Answer,
            ],
        ),
        reused(
            "most of what is held, a second, the rest",
            "200 OK",
            vec![
                posted("echo", "", Some(large.len())),
                Do::Send(large.slice(..780_000)),
                pause(1000),
                Do::Send(large.slice(780_000..)),
                Do::Answer,
            ],
        ),
        exchange("byte by byte", "200 OK", dripped),
        exchange("byte by byte, in chunks", "200 OK", dripped_chunks),
        exchange("the headers byte by byte", "200 OK", dripped_head),
        exchange2(
            "half a body, two seconds, the other half, over HTTP/2",
            "200 OK",
            vec![
                request2("echo", &[]),
                Do2::Data(one),
                Do2::Pause(Duration::from_secs(2)),
                Do2::Data(two),
                Do2::Pause(Duration::from_millis(300)),
                Do2::End,
                Do2::Answer,
            ],
        ),
    ]
}

/// Exchanges for an Envoy with a `request_timeout` and a `stream_idle_timeout`.
pub(in crate::faults::streams) fn never_ending_uploads() -> Vec<Exchange> {
    let body = chat(30_000);
    let half = body.slice(..15_000);
    let stalled = |what: &str, steps: Vec<Do>| {
        let mut steps = steps;
        steps.extend([Do::Answer, Do::Closed, Do::Rest]);
        exchange(what, "408", steps)
    };
    vec![
        stalled("no body", vec![posted("echo", "", Some(body.len()))]),
        stalled(
            "half a body",
            vec![posted("echo", "", Some(body.len())), Do::Send(half.clone())],
        ),
        stalled(
            "half a body in chunks",
            vec![posted("echo", "", None), send(chunk(&half))],
        ),
        stalled(
            "a megabyte of more",
            vec![posted("echo", "", Some(3 << 20)), Do::Send(chat(1 << 20))],
        ),
        exchange2(
            "half a body over HTTP/2",
            "408",
            vec![request2("echo", &[]), Do2::Data(half), Do2::Answer, Do2::Rest],
        ),
    ]
}

pub(super) fn early_answers() -> Vec<Exchange> {
    let mut all = Vec::new();
    for status in ["200", "401", "413"] {
        for end in ["keep", "close"] {
            let play = format!("early {status} {end}");
            for (bytes, by) in [
                (500, By::Length),
                (30_000, By::Chunks),
                (1 << 20, By::Length),
                (3 << 20, By::Length),
            ] {
                let body = chat(bytes);
                let mut steps = post(&play, "", &body, by);
                in_race(&mut steps);
                all.push(exchange(
                    format!("{status} {end}, {bytes} bytes, {by:?}"),
                    "at rest",
                    steps,
                ));
            }
        }
    }
    // What is held is let go at 768 KiB: from there on both ways flow at once.
    let large = chat(900_000);
    let duplex = vec![
        posted("duplex", "", None),
        send(chunk(&large)),
        Do::Head,
        Do::ReadChunks(large.len()),
        send(chunk(b"more")),
        Do::ReadChunks(4),
        send("0\r\n\r\n"),
        Do::Closed,
    ];
    all.push(exchange("full duplex after what is held", "200 OK", duplex));
    all.push(exchange2(
        "full duplex where the body is none that is read, over HTTP/2",
        "200 OK",
        vec![
            Do2::Request(
                "POST",
                CHAT,
                vec![
                    ("x-play", "duplex".to_owned()),
                    ("x-route", "http2".to_owned()),
                    ("content-type", "application/grpc".to_owned()),
                ],
                false,
            ),
            Do2::Data("ping".into()),
            Do2::Head,
            Do2::Some,
            Do2::Data("pong".into()),
            Do2::Some,
            Do2::End,
            Do2::Answer,
        ],
    ));
    all
}

pub(super) fn continues() -> Vec<Exchange> {
    let body = chat(30_000);
    let expect = "expect: 100-continue\r\n";
    let patient = |more: &str| {
        vec![
            posted("echo", more, Some(body.len())),
            Do::Head,
            Do::Send(body.clone()),
            Do::Answer,
        ]
    };
    vec![
        reused("waits for it", "100 Continue", patient(expect)),
        reused("odd casing", "", {
            let mut steps = post("echo", "Expect: 100-Continue\r\n", &body, By::Length);
            steps.truncate(3);
            steps
        }),
        reused(
            "does not wait for it",
            "200 OK",
            post("echo", expect, &body, By::Length),
        ),
        exchange(
            "is refused before the body",
            "",
            vec![
                posted("early 401 close", expect, Some(body.len())),
                Do::Head,
                Do::Close,
                Do::Rest,
            ],
        ),
        reused(
            "expects something else",
            "",
            post("echo", "expect: 200-ok\r\n", &body, By::Length),
        ),
    ]
}

/// Exchanges for an Envoy that leaves `Expect` to the upstream.
pub(in crate::faults::streams) fn proxied_continues() -> Vec<Exchange> {
    let body = chat(30_000);
    let expect = "expect: 100-continue\r\n";
    let patient = |play: &str| {
        vec![
            posted(play, expect, Some(body.len())),
            Do::Head,
            Do::Send(body.clone()),
            Do::Answer,
        ]
    };
    vec![
        reused("the upstream says to go on", "100 Continue", patient("hundred")),
        exchange(
            "the upstream refuses",
            "417",
            vec![
                posted("expectation-failed", expect, Some(body.len())),
                Do::Answer,
                Do::Close,
                Do::Rest,
            ],
        ),
        reused(
            "the client does not wait",
            "200 OK",
            post("hundred", expect, &body, By::Length),
        ),
        reused(
            "nobody expects anything",
            "200 OK",
            post("hundred", "", &body, By::Chunks),
        ),
    ]
}
