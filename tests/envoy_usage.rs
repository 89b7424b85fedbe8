//! A real Envoy reads what engines count for each request, from answers that come whole and, where it is asked to, from
//! streams, and changes none of them.
//!
//! Every test runs on the oldest and the newest Envoy under test.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

mod support;

use serde_json::{Value, json};
use support::{Gateway, POOL, chat, config, envoys, eventually, fleet, settings, text};

/// A chat whose answer is streamed and tells its usage at the end.
fn streamed(message: &str) -> String {
    let mut body: Value = serde_json::from_str(&chat(message)).unwrap();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body.to_string()
}

#[tokio::test]
async fn answers_are_read_and_streams_only_where_that_is_asked_for() {
    let fleet = fleet(2).await;
    for (whose, answers, streams) in [("off", 0, 0), ("answers", 1, 0), ("streams", 1, 1)] {
        let mut settings = settings(&[POOL]);
        settings["usage_feedback"] = json!(whose);
        let config = config(&fleet, &settings);
        for envoy in envoys() {
            let gateway = Gateway::ready(&envoy, &config, 1, 2).await;
            for number in 0..ROUNDS {
                let prompt = text(&format!("{whose} {envoy} {number}"), 4000);
                let whole = gateway.chat(&[], chat(&prompt)).await.ok();
                let body: Value = serde_json::from_slice(&whole.answer.body).unwrap();
                assert!(body["usage"]["prompt_tokens"].as_u64() > Some(500), "{body}");
                let stream = gateway.chat(&[], streamed(&prompt)).await.ok();
                let events = String::from_utf8(stream.answer.body.to_vec()).unwrap();
                assert!(events.trim_end().ends_with("data: [DONE]"), "{events}");
                assert!(events.contains("\"prompt_tokens\""), "{events}");
            }
            let read = ROUNDS * (answers + streams);
            eventually("all answers are counted", async || {
                gateway.stat("warmroute_usage_total.result.read").await == read
            })
            .await;
            for other in [
                "warmroute_usage_total.result.absent",
                "warmroute_usage_total.result.encoded",
                "warmroute_false_hits_total",
            ] {
                assert_eq!(gateway.stat(other).await, 0, "{other}");
            }
        }
    }
}

#[tokio::test]
async fn an_engine_that_forgot_unnoticed_is_found_out_by_its_answers() {
    let mut fleet = fleet(1).await;
    let mut settings = settings(&[POOL]);
    settings["strategy"] = json!("cache_aware");
    // Nothing else tells that the engine restarts.
    settings["metrics"] = json!({"enabled": false});
    let config = config(&fleet, &settings);
    for envoy in envoys() {
        let gateway = Gateway::start(&envoy, &config, 1).await;
        let prompt = chat(&text(&format!("forgotten {envoy}"), 8000));
        eventually("the host is known", async || {
            gateway
                .chat(&[], prompt.as_str())
                .await
                .ok()
                .header("x-warmroute-host")
                != "none"
        })
        .await;
        for _ in 0..2 {
            gateway.chat(&[], prompt.as_str()).await.ok();
        }
        assert_eq!(gateway.stat("warmroute_false_hits_total").await, 0);
        fleet.replicas[0].restart().await.unwrap();
        gateway.chat(&[], prompt.as_str()).await.ok();
        eventually("the false hit is seen", async || {
            gateway.stat("warmroute_false_hits_total").await == 1
        })
        .await;
        // It was computed again, and so is there.
        gateway.chat(&[], prompt.as_str()).await.ok();
        let matched = gateway.chat(&[], prompt.as_str()).await.ok();
        let (known, all) = matched.header("x-warmroute-matched").split_once('/').unwrap();
        assert_eq!(known, all);
        assert_eq!(gateway.stat("warmroute_false_hits_total").await, 1);
    }
}

const ROUNDS: u64 = 5;
