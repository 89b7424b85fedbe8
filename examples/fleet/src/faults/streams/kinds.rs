//! The odd exchanges, by kind.

use std::time::Duration;

use bytes::Bytes;

use super::http1::Do;
use super::http2::Do2;
use super::rig::{Exchange, Steps};
use super::wire::chunk;
use crate::envoy_config::STEERING_HEADER;
use crate::faults::load;
use crate::faults::stand::CHAT;

/// Exchanges of a kind.
pub(super) struct Kind {
    /// What is odd about them.
    pub(super) fault: &'static str,
    pub(super) exchanges: Vec<Exchange>,
}

/// All kinds that need no Envoy of their own.
pub(super) fn kinds() -> Vec<Kind> {
    vec![
        kind("client aborts over HTTP/1.1, at every phase", client_aborts()),
        kind("client aborts over HTTP/2, at every phase", client_resets()),
        kind("upstream aborts, at every phase", upstream_aborts()),
        kind("retries, with bodies of up to 3 MiB", retries()),
        kind("timeouts and hedges", timeouts()),
        kind("stalled and slow uploads", slow_uploads()),
        kind("answers before the body ends, and full duplex", early_answers()),
        kind("100-continue from Envoy", continues()),
        kind("upgrade and CONNECT", upgrades()),
        kind("HTTP/1.0", http10()),
        kind("HTTP/2 with and without trailers", http2()),
        kind("gRPC", grpc()),
        kind("framing and methods", framing()),
        kind("duplicate steering headers", steering()),
        kind("header limits", header_limits()),
        kind("pipelining and reuse", pipelining()),
        kind("odd answers", odd_answers()),
    ]
}

fn kind(fault: &'static str, exchanges: Vec<Exchange>) -> Kind {
    Kind { fault, exchanges }
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

fn client_aborts() -> Vec<Exchange> {
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
                    vec![posted("hang", "", length), whole.clone(), Do::UntilUpstream],
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
                        Do::Read(40),
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

fn request2(play: &str, more: &[(&'static str, &str)]) -> Do2 {
    let mut headers = vec![
        ("x-play", play.to_owned()),
        ("content-type", "application/json".to_owned()),
    ];
    headers.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
    Do2::Request("POST", CHAT, headers, false)
}

fn client_resets() -> Vec<Exchange> {
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
            abort("after the body", with("hang", whole(), vec![Do2::UntilUpstream])),
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

fn upstream_aborts() -> Vec<Exchange> {
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

fn retries() -> Vec<Exchange> {
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

fn timeouts() -> Vec<Exchange> {
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

fn slow_uploads() -> Vec<Exchange> {
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

fn early_answers() -> Vec<Exchange> {
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

fn continues() -> Vec<Exchange> {
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
pub(super) fn proxied_continues() -> Vec<Exchange> {
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

/// Exchanges for an Envoy with a `request_timeout` and a `stream_idle_timeout`.
pub(super) fn never_ending_uploads() -> Vec<Exchange> {
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

fn upgrades() -> Vec<Exchange> {
    let websocket = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                     sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
    let h2c =
        "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n";
    let body = chat(5000);
    let say = |method: &str, path: &str| {
        vec![
            send(head(method, path, "upgrade", websocket)),
            Do::Head,
            send("hello"),
            Do::Read(5),
            Do::Close,
            Do::Rest,
        ]
    };
    let connect = "CONNECT llm.test:443 HTTP/1.1\r\nhost: llm.test:443\r\nx-id: @ID@\r\n\r\n";
    vec![
        exchange(
            "websocket by GET",
            "101 Switching Protocols",
            say("GET", "/v1/realtime"),
        ),
        exchange(
            "websocket by GET on an LLM path",
            "101 Switching Protocols",
            say("GET", CHAT),
        ),
        exchange("websocket by POST on an LLM path", "", say("POST", CHAT)),
        exchange("websocket by POST with a body", "", {
            let more = format!(
                "{websocket}content-type: application/json\r\ncontent-length: {}\r\n",
                body.len()
            );
            vec![
                send(head("POST", CHAT, "echo", &more)),
                Do::Send(body.clone()),
                Do::Head,
                Do::Close,
                Do::Rest,
            ]
        }),
        exchange("websocket refused", "403", {
            let request = head("GET", CHAT, "early 403 close", websocket);
            vec![send(request), Do::Answer, Do::Close, Do::Rest]
        }),
        reused(
            "h2c offered with a post",
            "200 OK",
            post("echo", h2c, &body, By::Length),
        ),
        reused("an unknown upgrade offered with a post", "", {
            post(
                "echo",
                "connection: upgrade\r\nupgrade: foo/2\r\n",
                &body,
                By::Length,
            )
        }),
        exchange(
            "CONNECT",
            "200",
            vec![send(connect), Do::Head, Do::Close, Do::Rest],
        ),
        exchange2(
            "websocket by extended CONNECT on an LLM path",
            "",
            vec![
                Do2::Connect(
                    CHAT,
                    "websocket",
                    vec![
                        ("x-play", "upgrade".to_owned()),
                        ("sec-websocket-version", "13".to_owned()),
                    ],
                ),
                Do2::Head,
                Do2::Say("hello"),
                Do2::Rest,
            ],
        ),
    ]
}

fn http10() -> Vec<Exchange> {
    let body = chat(5000);
    let request = |more: &str| {
        format!(
            "POST {CHAT} HTTP/1.0\r\nx-id: @ID@\r\nx-play: echo\r\ncontent-type: application/json\r\n{more}\r\n"
        )
    };
    let length = format!("content-length: {}\r\n", body.len());
    let keep = format!("{length}connection: keep-alive\r\n");
    vec![
        exchange(
            "with length",
            "200 OK",
            vec![
                send(request(&length)),
                Do::Send(body.clone()),
                Do::Answer,
                Do::Closed,
            ],
        ),
        exchange("kept alive", "200 OK", {
            let mut steps = vec![send(request(&keep)), Do::Send(body.clone()), Do::Answer];
            steps.extend([
                send(request(&length)),
                Do::Send(body.clone()),
                Do::Answer,
                Do::Closed,
            ]);
            steps
        }),
        exchange(
            "without length",
            "200 OK",
            vec![send(request("")), Do::Answer, Do::Closed],
        ),
        exchange(
            "an answer in chunks",
            "200 OK",
            vec![
                send(request(&length).replace("echo", "sse 2 10")),
                Do::Send(body),
                Do::Answer,
                Do::Closed,
            ],
        ),
        exchange(
            "GET",
            "200 OK",
            vec![
                send(format!(
                    "GET {CHAT} HTTP/1.0\r\nx-id: @ID@\r\nx-play: echo\r\n\r\n"
                )),
                Do::Answer,
                Do::Closed,
            ],
        ),
    ]
}

fn http2() -> Vec<Exchange> {
    let mut all = Vec::new();
    for upstream in ["llm", "http2"] {
        let to = [("x-route", upstream)];
        for bytes in [500, 30_000, 2 << 20] {
            let body = chat(bytes);
            let what = |what: &str| format!("{what}, {bytes} bytes to {upstream}");
            all.push(exchange2(
                what("whole"),
                "200 OK",
                vec![
                    request2("echo", &to),
                    Do2::Data(body.clone()),
                    Do2::End,
                    Do2::Answer,
                ],
            ));
            all.push(exchange2(
                what("trailers both ways"),
                "200 OK",
                vec![
                    request2("trailers", &to),
                    Do2::Data(body.clone()),
                    Do2::Trailers(&[("x-checksum", "abc"), ("x-second", "d")]),
                    Do2::Answer,
                ],
            ));
            let mut frames = vec![request2("echo", &to)];
            frames.extend(
                body.chunks(3001)
                    .map(|piece| Do2::Data(Bytes::copy_from_slice(piece))),
            );
            frames.extend([Do2::Data(Bytes::new()), Do2::End, Do2::Answer]);
            all.push(exchange2(what("many frames"), "200 OK", frames));
        }
        let bare = |method| {
            let headers = vec![("x-play", "echo".to_owned()), ("x-route", upstream.to_owned())];
            vec![Do2::Request(method, CHAT, headers, true), Do2::Answer]
        };
        all.push(exchange2(
            format!("POST without body to {upstream}"),
            "200 OK",
            bare("POST"),
        ));
        all.push(exchange2(format!("GET to {upstream}"), "200 OK", bare("GET")));
        all.push(exchange2(
            format!("an empty body to {upstream}"),
            "200 OK",
            vec![request2("echo", &to), Do2::End, Do2::Answer],
        ));
        all.push(exchange2(
            format!("trailers alone to {upstream}"),
            "200 OK",
            vec![
                request2("echo", &to),
                Do2::Trailers(&[("x-checksum", "abc")]),
                Do2::Answer,
            ],
        ));
    }
    all
}

fn grpc() -> Vec<Exchange> {
    let message = Bytes::from_static(b"\0\0\0\0\x05hello");
    let call = |path: &'static str, play: &str| {
        let headers = vec![
            ("x-play", play.to_owned()),
            ("x-route", "http2".to_owned()),
            ("content-type", "application/grpc".to_owned()),
            ("te", "trailers".to_owned()),
        ];
        Do2::Request("POST", path, headers, false)
    };
    let mut all = Vec::new();
    for path in [CHAT, "/llm.Service/Generate"] {
        let unary = |what: &str, play: &str, expects| {
            let steps = vec![
                call(path, play),
                Do2::Data(message.clone()),
                Do2::End,
                Do2::Answer,
            ];
            exchange2(format!("{what} on {path}"), expects, steps)
        };
        all.extend([
            unary("unary", "grpc", "grpc-status"),
            unary("trailers only", "grpc-only 7", "grpc-status: 7"),
            unary("a reset", "fail 9 head", "grpc-status"),
            exchange2(
                format!("both ways at once on {path}"),
                "200 OK",
                vec![
                    call(path, "duplex"),
                    Do2::Data(message.clone()),
                    Do2::Head,
                    Do2::Some,
                    Do2::Data(message.clone()),
                    Do2::Some,
                    Do2::End,
                    Do2::Answer,
                ],
            ),
            exchange2(
                format!("a reset by the client on {path}"),
                "at rest",
                vec![
                    call(path, "hang"),
                    Do2::Data(message.clone()),
                    Do2::UntilUpstream,
                    Do2::Reset,
                    Do2::Rest,
                ],
            ),
        ]);
    }
    all
}

fn framing() -> Vec<Exchange> {
    let body = chat(30_000);
    let mut all = vec![
        reused(
            "content-length: 0",
            "200 OK",
            post("echo", "", &Bytes::new(), By::Length),
        ),
        reused(
            "chunks without any",
            "200 OK",
            post("echo", "", &Bytes::new(), By::Chunks),
        ),
        reused("no body and no length", "200 OK", {
            vec![send(head("POST", CHAT, "echo", "")), Do::Answer]
        }),
        reused(
            "one byte",
            "200 OK",
            post("echo", "", &Bytes::from_static(b"{"), By::Length),
        ),
        reused("chunk extensions", "200 OK", {
            let mut framed = format!("{:x};a=b;c=\"d\"\r\n", body.len()).into_bytes();
            framed.extend_from_slice(&body);
            framed.extend_from_slice(b"\r\n0;last\r\n\r\n");
            vec![posted("echo", "", None), send(framed), Do::Answer]
        }),
        reused("trailers", "200 OK", {
            let mut framed = chunk(&body);
            framed.extend_from_slice(b"0\r\nx-checksum: abc\r\nx-second: d\r\n\r\n");
            vec![
                posted("echo", "trailer: x-checksum\r\n", None),
                send(framed),
                Do::Answer,
            ]
        }),
        reused("trailers after nothing", "", {
            vec![
                posted("echo", "", None),
                send("0\r\nx-checksum: abc\r\n\r\n"),
                Do::Answer,
            ]
        }),
        reused("chunks of one byte", "200 OK", {
            vec![
                posted("echo", "", None),
                send(chunks(&body.slice(..2000), 1)),
                Do::Answer,
            ]
        }),
        exchange("a bad chunk size", "400", {
            vec![
                posted("echo", "", None),
                send("zz\r\nab\r\n0\r\n\r\n"),
                Do::Answer,
                Do::Closed,
            ]
        }),
        exchange("a bad chunk size after a good chunk", "", {
            let mut framed = chunk(&body);
            framed.extend_from_slice(b"zz\r\n");
            vec![
                posted("echo", "", None),
                send(framed),
                Do::Answer,
                Do::Closed,
                Do::Rest,
            ]
        }),
        exchange("both length and chunks", "", {
            let both = "content-length: 5\r\n";
            vec![
                posted("echo", both, None),
                send(chunks(&body, 5000)),
                Do::Answer,
                Do::Close,
                Do::Rest,
            ]
        }),
        exchange("two lengths", "", {
            vec![
                posted("echo", "content-length: 7\r\n", Some(5)),
                send("{    }}"),
                Do::Answer,
                Do::Close,
            ]
        }),
        reused("a body that is compressed, it says", "200 OK", {
            post("echo", "content-encoding: gzip\r\n", &body, By::Chunks)
        }),
        reused(
            "a body of 3 MiB",
            "200 OK",
            post("echo", "", &chat(3 << 20), By::Length),
        ),
        reused(
            "a body of 3 MiB in chunks",
            "200 OK",
            post("echo", "", &chat(3 << 20), By::Chunks),
        ),
    ];
    for method in ["GET", "PUT", "DELETE", "OPTIONS", "PATCH", "PROPFIND"] {
        let more = format!(
            "content-type: application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        let steps = vec![
            send(head(method, CHAT, "echo", &more)),
            Do::Send(body.clone()),
            Do::Answer,
        ];
        all.push(reused(format!("{method} with a body"), "", steps));
        if method != "PROPFIND" {
            let steps = vec![send(head(method, CHAT, "echo", "")), Do::Answer];
            all.push(reused(format!("{method} without a body"), "200 OK", steps));
        }
    }
    all.push(reused("HEAD", "200 OK", {
        vec![send(head("HEAD", CHAT, "head", "")), Do::AnswerToHead]
    }));
    all
}

fn steering() -> Vec<Exchange> {
    let body = chat(3000);
    let upper = STEERING_HEADER.to_uppercase();
    let many = "192.0.2.1:80,".repeat(500);
    let lines = [
        (
            "two lines",
            format!("{STEERING_HEADER}: 192.0.2.1:80\r\n{STEERING_HEADER}: 192.0.2.2:80\r\n"),
        ),
        (
            "a list",
            format!("{STEERING_HEADER}: 192.0.2.1:80, 192.0.2.2:80,,\r\n"),
        ),
        (
            "odd casing",
            format!("{upper}: 192.0.2.1:80\r\n{STEERING_HEADER}: x\r\n"),
        ),
        ("an empty one", format!("{STEERING_HEADER}:\r\n")),
        ("a very long one", format!("{STEERING_HEADER}: {many}\r\n")),
        (
            "no address",
            format!("{STEERING_HEADER}: \u{1f600} not an address\r\n"),
        ),
    ];
    let mut all = Vec::new();
    for (what, lines) in &lines {
        all.push(reused(*what, "200 OK", post("echo", lines, &body, By::Length)));
        let get = vec![send(head("GET", "/v1/models", "echo", lines)), Do::Answer];
        all.push(reused(format!("{what} on another path"), "200 OK", get));
    }
    all.push(reused("debug headers of a client", "200 OK", {
        post(
            "echo",
            "x-warmroute-host: a\r\nx-warmroute-key: b\r\n",
            &body,
            By::Length,
        )
    }));
    all
}

fn header_limits() -> Vec<Exchange> {
    let body = chat(3000);
    let mut all = Vec::new();
    for kib in [40, 58, 59, 60, 64] {
        let more = format!("x-large: {}\r\n", "v".repeat(kib << 10));
        all.push(exchange(format!("a request header of {kib} KiB"), "", {
            let mut steps = post("echo", &more, &body, By::Length);
            steps.extend([Do::Close, Do::Rest]);
            steps
        }));
    }
    // Up to Envoy's limit to the byte, with and without room for a steering header.
    for spare in [0, 20, 40, 60, 80, 120, 200] {
        let more = format!("x-large: {}\r\n", "v".repeat((60 << 10) - 150 - spare));
        let mut steps = post("echo", &more, &body, By::Length);
        steps.extend([Do::Close, Do::Rest]);
        all.push(exchange(format!("about {spare} bytes below 60 KiB"), "", steps));
    }
    for count in [80, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 100, 101] {
        let more: String = (0..count)
            .map(|number| format!("x-line-{number}: v\r\n"))
            .collect();
        let mut steps = post("echo", &more, &body, By::Length);
        steps.extend([Do::Close, Do::Rest]);
        all.push(exchange(format!("{count} more request headers"), "", steps));
    }
    let answers = |count: u64, bytes: u64| format!("headers {count} {bytes}");
    for count in [80, 88, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101] {
        all.push(reused(
            format!("{count} more answer headers"),
            "",
            post(&answers(count, 1), "", &body, By::Length),
        ));
        all.push(exchange2(
            format!("{count} more answer headers over HTTP/2"),
            "",
            vec![
                request2(&answers(count, 1), &[]),
                Do2::Data(body.clone()),
                Do2::End,
                Do2::Answer,
            ],
        ));
    }
    for bytes in [
        30 << 10,
        59 << 10,
        (60 << 10) - 300,
        (60 << 10) - 150,
        (60 << 10) - 100,
        60 << 10,
        64 << 10,
    ] {
        all.push(reused(
            format!("an answer header of {bytes} bytes"),
            "",
            post(&answers(1, bytes), "", &body, By::Length),
        ));
    }
    all
}

fn pipelining() -> Vec<Exchange> {
    let whole = |play: &str, body: &[u8]| {
        let more = format!(
            "content-type: application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        let mut bytes = head("POST", CHAT, play, &more).replace("@ID@", "0").into_bytes();
        bytes.extend_from_slice(body);
        bytes
    };
    let get = head("GET", "/v1/models", "echo", "")
        .replace("@ID@", "0")
        .into_bytes();
    let framed = |body: &[u8]| {
        let more = "content-type: application/json\r\ntransfer-encoding: chunked\r\n";
        let mut bytes = head("POST", CHAT, "echo", more).replace("@ID@", "0").into_bytes();
        bytes.extend(chunks(body, 700));
        bytes
    };
    let (small, large) = (chat(500), chat(900_000));
    let sets: [(&str, Vec<Vec<u8>>); 5] = [
        (
            "three posts at once",
            vec![
                whole("echo", &small),
                whole("slow 100", &small),
                whole("echo", &small),
            ],
        ),
        (
            "posts and gets",
            vec![
                get.clone(),
                whole("echo", &small),
                get.clone(),
                framed(&small),
                get.clone(),
            ],
        ),
        (
            "chunks, length, chunks",
            vec![framed(&small), whole("echo", &small), framed(&small)],
        ),
        (
            "large before small",
            vec![whole("echo", &large), whole("echo", &small), get.clone()],
        ),
        (
            "empty before small",
            vec![whole("echo", b""), whole("echo", &small), framed(b""), get],
        ),
    ];
    let mut all = Vec::new();
    for (what, requests) in sets {
        let answers = vec![Do::Answer; requests.len()];
        let together: Vec<u8> = requests.concat();
        let mut steps = vec![send(together.clone())];
        steps.extend(answers.clone());
        all.push(reused(what, "200 OK", steps));
        if together.len() < 10_000 {
            let mut steps = vec![Do::Drip(together.into())];
            steps.extend(answers);
            all.push(reused(format!("{what}, byte by byte"), "200 OK", steps));
        }
    }
    all.push(exchange("what looks like a request in a body", "200 OK", {
        let inner = whole("echo", &small);
        let mut steps = post("echo", "", &inner.clone().into(), By::Length);
        steps.extend(post("echo", "", &inner.into(), By::Chunks));
        steps.extend(then());
        steps
    }));
    all
}

fn odd_answers() -> Vec<Exchange> {
    let body = chat(3000);
    let plays = [
        ("103 before the answer", "hints", "200 OK"),
        ("204", "empty 204", "204"),
        ("304", "empty 304", "304"),
        ("compressed", "gzip", "content-encoding: gzip"),
        ("three cookies", "cookies", "set-cookie: a=3"),
        ("trailers", "trailers", "x-sum"),
        ("chunk extensions", "extensions", "200 OK"),
        ("until the connection closes", "until-close", "200 OK"),
        ("an event stream", "sse 5 5", "[DONE]"),
        ("400", "status 400 9", "400"),
        ("429", "status 429 9", "429"),
        ("500", "status 500 9", "500"),
        ("302", "status 302 9", "302"),
        ("two megabytes", "large 2000000", "2000000 bytes"),
    ];
    let mut all = Vec::new();
    for (what, play, expects) in plays {
        all.push(reused(what, expects, post(play, "", &body, By::Length)));
        all.push(exchange2(
            format!("{what} over HTTP/2"),
            "",
            vec![
                request2(play, &[]),
                Do2::Data(body.clone()),
                Do2::End,
                Do2::Answer,
            ],
        ));
    }
    all
}
