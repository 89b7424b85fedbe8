//! How long it takes to read and hash a body, and to read an answer's end; prints, asserts nothing. Run with
//! `cargo test --release --test prompt_speed -- --ignored --nocapture`.

#![cfg(not(target_family = "wasm"))]

use std::fmt::Write as _;
use std::hint::black_box;

use warmroute::chunk::murmur::Murmur;
use warmroute::prompt::{Api, BodyEnd, PromptInput, PromptOptions, extract};
use warmroute::usage::{AnswerForm, AnswerTail};

/// A conversation of about `len_bytes`: messages of 1 KiB, an escape every 60 bytes where `escapes`.
fn chat_body(len_bytes: usize, parts: bool, escapes: bool) -> String {
    let line = if escapes {
        "A quiet harbour at dawn, with gulls over the breakwater.\\n"
    } else {
        "A quiet harbour at dawn, with gulls over the breakwaters. "
    };
    let text = line.repeat(18);
    let mut body = String::from("{\"model\":\"demo/chat-8b\",\"messages\":[");
    let mut turn = 0;
    while body.len() < len_bytes {
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        let comma = if turn > 0 { "," } else { "" };
        if parts {
            let _ = write!(
                body,
                "{comma}{{\"role\":\"{role}\",\"content\":[{{\"type\":\"text\",\"text\":\"{turn} {text}\"}}]}}"
            );
        } else {
            let _ = write!(
                body,
                "{comma}{{\"role\":\"{role}\",\"content\":\"{turn} {text}\"}}"
            );
        }
        turn += 1;
    }
    body.push_str("],\"temperature\":0.2,\"stream\":true}");
    body
}

fn median_us(mut run: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..400)
        .map(|_| {
            #[expect(clippy::disallowed_methods, reason = "this measures")]
            let start = std::time::Instant::now();
            run();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[test]
#[ignore = "prints measurements, which need a release build"]
fn reading_and_hashing_a_body() {
    let options = PromptOptions::default();
    for kib in [2, 32, 256, 768] {
        for (name, parts, escapes) in [
            ("strings", false, false),
            ("escapes", false, true),
            ("parts", true, true),
        ] {
            let body = chat_body(kib * 1024, parts, escapes);
            let input = PromptInput {
                api: Api::OpenAiChat,
                path: "/v1/chat/completions",
                body: body.as_bytes(),
                end: BodyEnd::EndOfStream,
                tenant: None,
                session_header: None,
            };
            let whole_us = median_us(|| {
                black_box(extract(black_box(&input), &options).prompt.ok());
            });
            let skip_us = median_us(|| {
                let skipped: serde_json::Result<serde::de::IgnoredAny> =
                    serde_json::from_slice(black_box(body.as_bytes()));
                black_box(skipped.ok());
            });
            let hash_us = median_us(|| {
                let mut murmur = Murmur::new(1);
                murmur.update(black_box(body.as_bytes()));
                black_box(murmur.low64());
            });
            println!(
                "{kib:4} KiB {name:8} extract {whole_us:8.1} us, skip alone {skip_us:8.1} us, murmur alone {hash_us:8.1} us"
            );
        }
    }
}

#[test]
#[ignore = "prints measurements, which need a release build"]
fn reading_the_end_of_an_answer() {
    let usage = r#""usage":{"prompt_tokens":3167,"total_tokens":3175,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":3072}},"prompt_logprobs":null,"kv_transfer_params":null}"#;
    let quoted = "\\\"usage\\\":{\\\"prompt_tokens\\\":1} ".repeat(200);
    for (name, text, end) in [
        ("1 KiB", "word ".repeat(205), usage),
        ("64 KiB", "word ".repeat(13_107), usage),
        ("no usage", "word ".repeat(13_107), "\"a\":1}"),
        ("hostile", quoted, "\"a\":1}"),
    ] {
        let body = format!(r#"{{"choices":[{{"message":{{"content":"{text}"}}}}],{end}"#);
        let us = median_us(|| {
            for _ in 0..100 {
                let mut tail = AnswerTail::new(AnswerForm::Whole, Some(body.len() as u64));
                for chunk in body.as_bytes().chunks(16_384) {
                    let wanted = tail.pass(chunk.len());
                    tail.push(chunk.split_at(chunk.len() - wanted).1);
                }
                black_box(tail.usage());
            }
        });
        println!("{name}: {:.0} ns", us * 10.0);
    }
}
