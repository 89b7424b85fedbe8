//! Exchanges over other protocols than plain HTTP/1.1.

use bytes::Bytes;

use super::{By, chat, exchange, exchange2, head, post, request2, reused, send};
use crate::faults::stand::CHAT;
use crate::faults::streams::http1::Do;
use crate::faults::streams::http2::Do2;
use crate::faults::streams::rig::Exchange;

pub(super) fn upgrades() -> Vec<Exchange> {
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
        exchange(
            "websocket by POST on an LLM path",
            "101 Switching",
            say("POST", CHAT),
        ),
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

pub(super) fn http10() -> Vec<Exchange> {
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

pub(super) fn http2() -> Vec<Exchange> {
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

pub(super) fn grpc() -> Vec<Exchange> {
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
                    Do2::Reached,
                    Do2::Reset,
                    Do2::Rest,
                ],
            ),
        ]);
    }
    all
}
