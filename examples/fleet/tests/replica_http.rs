//! A replica as its clients see it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use sha2::{Digest, Sha256};
use tokio::net::TcpSocket;
use warmroute_fleet::client::{Client, full, post_request};
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::fleet::{Fleet, FleetOptions};
use warmroute_fleet::replica::{Fault, MetricOverrides, Replica};

const CHAT: &str = "/v1/chat/completions";

async fn fleet(engine: EngineConfig) -> Fleet {
    Fleet::start(&FleetOptions {
        replicas: 1,
        engine,
        ..FleetOptions::default()
    })
    .await
    .unwrap()
}

fn url(replica: &Replica, path: &str) -> String {
    format!("http://{}{path}", replica.address())
}

fn chat(text: &str, stream: bool, max_tokens: usize) -> String {
    serde_json::json!({
        "model": "sim",
        "messages": [{"role": "user", "content": text}],
        "stream": stream,
        "stream_options": {"include_usage": true},
        "max_tokens": max_tokens,
    })
    .to_string()
}

async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition().await {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn stream_headers_come_before_the_prefill_and_events_after_it() {
    let fleet = fleet(EngineConfig {
        prefill_tokens_per_s: 1,
        ..EngineConfig::default()
    })
    .await;
    let replica = &fleet.replicas[0];
    let request = post_request(&url(replica, CHAT), &[], full(chat(&"x".repeat(400), true, 3))).unwrap();
    let response = Client::new().send(request).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(
        replica.counters().prompt_tokens,
        0,
        "a prefill of minutes has not ended"
    );
    assert_eq!(replica.queue(), (0, 1));
}

#[tokio::test]
async fn a_stream_holds_tokens_usage_and_done_in_that_order() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    let text = "x".repeat(1000);
    for expected_cached in [0, 240] {
        let answer = Client::new()
            .post(&url(replica, CHAT), &[], chat(&text, true, 3))
            .await
            .unwrap();
        let body = answer.text();
        let events: Vec<_> = body
            .trim_end()
            .split("\n\n")
            .map(|event| event.strip_prefix("data: ").unwrap())
            .collect();
        assert_eq!(events.len(), 5, "{body}");
        let json: Vec<serde_json::Value> = events[..4]
            .iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect();
        assert_eq!(json[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(json[1]["choices"][0]["finish_reason"], serde_json::Value::Null);
        assert_eq!(json[2]["choices"][0]["finish_reason"], "length");
        let usage = &json[3]["usage"];
        assert_eq!(usage["prompt_tokens"], 253);
        assert_eq!(usage["completion_tokens"], 3);
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], expected_cached);
        assert_eq!(events[4], "[DONE]");
    }
}

#[tokio::test]
async fn plain_answers_carry_usage_over_both_protocols() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    for client in [Client::new(), Client::http2()] {
        let body = r#"{"model":"m","prompt":"hello world, hello world","max_tokens":2}"#;
        let answer = client
            .post(&url(replica, "/v1/completions"), &[("x-extra", "1")], body)
            .await
            .unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(answer.json()["object"], "text_completion");
        assert_eq!(answer.json()["choices"][0]["text"], "tok tok ");
        assert_eq!(answer.json()["usage"]["total_tokens"], 8);
        assert_eq!(answer.header("x-replica"), Some("replica-0"));
        assert!(answer.header("x-seen-headers").unwrap().contains("x-extra"));
    }
}

#[tokio::test]
async fn every_body_is_echoed_as_a_hash_whatever_it_holds() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    let upload: Vec<u8> = (0..8_u32 << 20)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let upload = Bytes::from(upload);
    for (path, status) in [("/v1/audio/transcriptions", 404), (CHAT, 400)] {
        let answer = Client::new()
            .post(&url(replica, path), &[], upload.clone())
            .await
            .unwrap();
        assert_eq!(answer.status, status);
        let hex: String = Sha256::digest(&upload)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(answer.header("x-body-sha256"), Some(hex.as_str()));
        assert_eq!(answer.header("x-body-bytes"), Some("8388608"));
        assert!(answer.json()["error"]["message"].is_string());
    }
    let records = replica.requests();
    assert_eq!(records.len(), 2);
    assert_eq!((records[1].path.as_str(), records[1].body_bytes), (CHAT, 8 << 20));
    let whole = Client::new()
        .post(&url(replica, CHAT), &[], chat(&"y".repeat(8 << 20), false, 1))
        .await
        .unwrap();
    assert_eq!(whole.status, 200, "{}", whole.text());
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_queue_and_counters() {
    let fleet = fleet(EngineConfig {
        prefill_tokens_per_s: 1,
        ..EngineConfig::default()
    })
    .await;
    let replica = &fleet.replicas[0];
    let post = |stream| {
        let (url, body) = (url(replica, CHAT), chat("hello there", stream, 3));
        tokio::spawn(async move {
            let request = post_request(&url, &[], full(body)).unwrap();
            let response = Client::new().send(request).await.unwrap();
            response
                .into_body()
                .collect()
                .await
                .map(|_| ())
                .map_err(|error| error.to_string())
        })
    };
    let (streamed, plain) = (post(true), post(false));
    until("both are in the engine", async || replica.queue() == (1, 1)).await;
    streamed.abort();
    plain.abort();
    until("both have left", async || replica.queue() == (0, 0)).await;
    assert_eq!(replica.counters().aborted, 2);
    let metrics = Client::new().get(&url(replica, "/metrics")).await.unwrap().text();
    assert!(
        metrics.contains("vllm:num_requests_running{engine=\"0\",model_name=\"sim\"} 0.0\n"),
        "{metrics}"
    );
    assert!(
        metrics.contains("finished_reason=\"abort\",model_name=\"sim\"} 2.0\n"),
        "{metrics}"
    );
}

#[tokio::test]
async fn metrics_show_overrides_and_a_restart() {
    let mut fleet = fleet(EngineConfig::instant()).await;
    let replica = &mut fleet.replicas[0];
    let client = Client::new();
    client
        .post(&url(replica, CHAT), &[], chat(&"z".repeat(640), false, 1))
        .await
        .unwrap();
    replica.set_metric_overrides(MetricOverrides {
        waiting: Some(7.0),
        kv_usage: Some(0.93),
        running: None,
    });
    replica.set_adapters(vec!["sql".to_owned()]);
    let before = client.get(&url(replica, "/metrics")).await.unwrap().text();
    assert!(before.contains("vllm:num_requests_waiting{engine=\"0\",model_name=\"sim\"} 7.0\n"));
    assert!(before.contains("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"sim\"} 0.93\n"));
    assert!(before.contains("running_lora_adapters=\"sql\""));
    assert!(!before.contains("vllm:prompt_tokens_total{engine=\"0\",model_name=\"sim\"} 0.0\n"));
    let address = replica.address();
    replica.stop().await;
    assert!(client.get(&url(replica, "/health")).await.is_err());
    // Nobody is there, and nobody else's connection can take the port.
    let other = TcpSocket::new_v4().unwrap();
    assert_eq!(
        other.bind(address).unwrap_err().kind(),
        std::io::ErrorKind::AddrInUse
    );
    replica.restart().await.unwrap();
    assert_eq!(replica.address(), address);
    let after = client.get(&url(replica, "/metrics")).await.unwrap().text();
    assert!(after.contains("vllm:prompt_tokens_total{engine=\"0\",model_name=\"sim\"} 0.0\n"));
    let started = |text: &str| -> String {
        text.lines()
            .find(|line| line.starts_with("process_start_time_seconds"))
            .unwrap()
            .to_owned()
    };
    assert_ne!(started(&before), started(&after));
    assert_eq!(replica.metrics_reads(), 2);
}

#[tokio::test]
async fn faults_show_as_status_hang_and_reset_until_they_are_lifted() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    let client = Client::new();
    let (url, body) = (url(replica, CHAT), chat("hi", false, 1));
    replica.set_fault(Fault::Status(503));
    assert_eq!(client.post(&url, &[], body.clone()).await.unwrap().status, 503);
    replica.set_fault(Fault::Reset);
    assert!(client.post(&url, &[], body.clone()).await.is_err());
    replica.set_fault(Fault::Hang);
    let hanging = {
        let (client, url, body) = (client.clone(), url.clone(), body.clone());
        tokio::spawn(async move { client.post(&url, &[], body).await })
    };
    until("the request has arrived", async || replica.posts_received() == 3).await;
    assert!(!hanging.is_finished());
    assert_eq!(replica.queue(), (0, 0));
    replica.set_fault(Fault::None);
    assert_eq!(hanging.await.unwrap().unwrap().status, 200);
}

#[tokio::test]
async fn a_closed_listener_refuses_new_connections_and_keeps_old_ones() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    let old = Client::new();
    assert_eq!(old.get(&url(replica, "/health")).await.unwrap().status, 200);
    replica.close_listener();
    until("new connections are refused", async || {
        Client::new().get(&url(replica, "/health")).await.is_err()
    })
    .await;
    assert_eq!(
        old.get(&url(replica, "/v1/models")).await.unwrap().json()["data"][0]["id"],
        "sim"
    );
}

async fn order(replica: &Replica, body: serde_json::Value) -> u16 {
    let answer = Client::new()
        .post(&url(replica, "/_fleet/fault"), &[], body.to_string())
        .await
        .unwrap();
    answer.status
}

async fn state(replica: &Replica) -> serde_json::Value {
    Client::new()
        .get(&url(replica, "/_fleet/state"))
        .await
        .unwrap()
        .json()
}

#[tokio::test]
async fn every_api_answers_with_its_own_usage() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    let text = "x".repeat(1000);
    let messages = serde_json::json!([{"role": "user", "content": text}]);
    let client = Client::new();
    let post = async |path: &str, body: serde_json::Value| {
        let answer = client
            .post(&url(replica, path), &[], body.to_string())
            .await
            .unwrap();
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    };
    let chat = post(CHAT, serde_json::json!({"messages": messages, "max_tokens": 2})).await;
    let details = &chat["usage"]["prompt_tokens_details"];
    assert_eq!(
        *details,
        serde_json::json!({"cached_tokens": 0, "created_cache_tokens": 240})
    );
    let responses = serde_json::json!({"model": "m", "input": text, "max_output_tokens": 2});
    let usage = &post("/v1/responses", responses).await["usage"];
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 240);
    let anthropic = serde_json::json!({"model": "m", "messages": messages, "max_tokens": 2});
    let usage = post("/v1/messages", anthropic.clone()).await["usage"].take();
    assert_eq!(
        usage,
        serde_json::json!({"input_tokens": 13, "output_tokens": 2, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 240})
    );
    let counted = post("/v1/messages/count_tokens", anthropic).await;
    assert_eq!(counted["input_tokens"], 253);
    let tokens = post("/tokenize", serde_json::json!({"messages": messages})).await;
    let rendered = post(
        "/v1/chat/completions/render",
        serde_json::json!({"messages": messages}),
    )
    .await;
    assert_eq!(tokens["count"], 253);
    assert_eq!(tokens["tokens"], rendered["token_ids"]);
    let rendered = post("/v1/completions/render", serde_json::json!({"prompt": "abcdef"})).await;
    assert_eq!(rendered[0]["token_ids"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn salts_and_adapters_keep_caches_apart() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    replica.set_adapters(vec!["sql".to_owned()]);
    let cached = async |extra: serde_json::Value| {
        let mut body: serde_json::Value = serde_json::from_str(&chat(&"x".repeat(1000), false, 1)).unwrap();
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        let answer = Client::new()
            .post(&url(replica, CHAT), &[], body.to_string())
            .await
            .unwrap();
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    for apart in [
        serde_json::json!({}),
        serde_json::json!({"cache_salt": "a"}),
        serde_json::json!({"cache_salt": "b"}),
        serde_json::json!({"model": "sql"}),
    ] {
        assert_eq!(cached(apart.clone()).await, 0, "{apart}");
        assert_eq!(cached(apart.clone()).await, 240, "{apart}");
    }
    assert_eq!(
        cached(serde_json::json!({"model": "another name"})).await,
        240,
        "a name that is no adapter shares the base model's cache"
    );
}

#[tokio::test]
async fn probes_of_routers_are_answered_as_vllm_answers_them() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    for client in [Client::new(), Client::http2()] {
        for (path, status) in [
            ("/health", 200),
            ("/version", 200),
            ("/load", 200),
            ("/v1/models", 200),
            ("/metrics", 200),
            ("/server_info", 404),
            ("/get_server_info", 404),
            ("/model_info", 404),
            ("/get_model_info", 404),
            ("/v1/loads?include=core,disagg,queues,memory", 404),
            ("/loads?model=sim", 404),
        ] {
            assert_eq!(
                client.get(&url(replica, path)).await.unwrap().status,
                status,
                "{path}"
            );
        }
    }
}

#[tokio::test]
async fn admin_orders_slow_fail_and_restart_a_replica() {
    let fleet = fleet(EngineConfig::instant()).await;
    let replica = &fleet.replicas[0];
    let client = Client::new();
    let body = chat(&"x".repeat(1000), false, 1);
    let post = async || client.post(&url(replica, CHAT), &[], body.clone()).await;
    assert_eq!(post().await.unwrap().status, 200);
    assert_eq!(
        order(replica, serde_json::json!({"kind": "status", "status": 429})).await,
        200
    );
    assert_eq!(post().await.unwrap().status, 429);
    assert_eq!(order(replica, serde_json::json!({"kind": "reset"})).await, 200);
    assert!(post().await.is_err());
    assert_eq!(order(replica, serde_json::json!({"kind": "none"})).await, 200);
    assert_eq!(
        order(replica, serde_json::json!({"kind": "status", "on": "metrics"})).await,
        200
    );
    assert_eq!(client.get(&url(replica, "/metrics")).await.unwrap().status, 503);
    for wrong in [
        serde_json::json!({"kind": "melt"}),
        serde_json::json!({"kind": "slow"}),
        serde_json::json!({"kind": "hang", "on": "tuesdays"}),
        serde_json::json!(3),
    ] {
        assert_eq!(order(replica, wrong.clone()).await, 400, "{wrong}");
    }
    let before = state(replica).await;
    assert_eq!(
        (&before["cached_blocks"], &before["posts"]),
        (&15.into(), &3.into())
    );
    assert_eq!(order(replica, serde_json::json!({"kind": "restart"})).await, 200);
    let after = state(replica).await;
    assert_eq!(
        (&after["cached_blocks"], &after["submitted"]),
        (&0.into(), &0.into())
    );
    assert_eq!(after["life"], 1);
    assert_eq!(replica.requests().len(), 3, "orders are not recorded as requests");
}

#[tokio::test]
async fn a_restart_by_order_cuts_streams_and_a_slow_engine_stretches_its_steps() {
    let fleet = fleet(EngineConfig {
        prefill_tokens_per_s: 1,
        ..EngineConfig::default()
    })
    .await;
    let replica = &fleet.replicas[0];
    assert_eq!(
        order(replica, serde_json::json!({"kind": "slow", "factor": 1000})).await,
        200
    );
    let request = post_request(&url(replica, CHAT), &[], full(chat("hello there", true, 3))).unwrap();
    let response = Client::new().send(request).await.unwrap();
    let busy_us = state(replica).await["busy_us"].as_u64().unwrap();
    assert!(busy_us > 1_000_000_000, "{busy_us}");
    assert_eq!(order(replica, serde_json::json!({"kind": "restart"})).await, 200);
    assert!(response.into_body().collect().await.is_err());
    assert_eq!(replica.queue(), (0, 0));
}
