//! Exchanges whose requests or answers are framed oddly, large, or many at once.

use bytes::Bytes;

use super::{By, chat, chunks, exchange, exchange2, head, post, posted, request2, reused, send, then};
use crate::envoy_config::STEERING_HEADER;
use crate::faults::stand::CHAT;
use crate::faults::streams::http1::Do;
use crate::faults::streams::http2::Do2;
use crate::faults::streams::rig::Exchange;
use crate::faults::streams::wire::chunk;

pub(super) fn framing() -> Vec<Exchange> {
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

pub(super) fn steering() -> Vec<Exchange> {
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

pub(super) fn header_limits() -> Vec<Exchange> {
    let body = chat(3000);
    let mut all = Vec::new();
    for kib in [40, 58, 59, 60, 64] {
        let more = format!("x-large: {}\r\n", "v".repeat(kib << 10));
        let expects = match kib {
            40 => "200 OK",
            64 => "431",
            _ => "",
        };
        all.push(exchange(format!("a request header of {kib} KiB"), expects, {
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
        let expects = match count {
            80 => "200 OK",
            101 => "502",
            _ => "",
        };
        all.push(reused(
            format!("{count} more answer headers"),
            expects,
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

pub(super) fn pipelining() -> Vec<Exchange> {
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

pub(super) fn odd_answers() -> Vec<Exchange> {
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
/// Bodies of 1 KiB to 4 MiB, each in some framings and several times.
pub(in crate::faults::streams) fn bodies() -> Vec<Exchange> {
    let mut all = Vec::new();
    for round in 0..4 {
        for kib in [1, 10, 14, 20, 40, 60, 100, 300, 800, 1000, 1100, 2048, 4096] {
            let body = chat(kib << 10);
            for by in [By::Length, By::Chunks] {
                let mut steps = post("echo", "", &body, by);
                steps.push(Do::Close);
                all.push(exchange(
                    format!("{kib} KiB, {by:?}, time {round}"),
                    "200 OK",
                    steps,
                ));
            }
            let mut frames = vec![request2("echo", &[])];
            frames.extend(
                (0..body.len())
                    .step_by(200_000)
                    .map(|start| Do2::Data(body.slice(start..body.len().min(start + 200_000)))),
            );
            frames.extend([Do2::End, Do2::Answer]);
            all.push(exchange2(
                format!("{kib} KiB over HTTP/2, time {round}"),
                "200 OK",
                frames,
            ));
        }
    }
    all
}
