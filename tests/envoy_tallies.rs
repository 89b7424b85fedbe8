//! Real Envoys count: what is in flight comes back to zero, however requests end and whatever dies.
//!
//! Every test runs on the oldest and the newest Envoy under test.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do, and read a clock for their deadlines"
)]

mod support;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::HeaderMap;
use serde_json::{Value, json};
use support::{
    CHAT, DEADLINE, Folder, Gateway, POOL, Served, chat, config, envoys, eventually, fleet_of, settings, text,
};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use warmroute_fleet::client::{Client, full, pieces, post_request};
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy_config::RouteConfig;
use warmroute_fleet::fleet::Fleet;
use warmroute_fleet::patched::trap_in;
use warmroute_fleet::replica::{Fault, MetricOverrides};

/// Ways in which a request of the mix goes, one after the other.
const CASES: [Case; 16] = [
    Case::Whole(CHAT, false),
    Case::Whole(CHAT, true),
    Case::Whole("/v1/completions", true),
    Case::Whole("/v1/completions", false),
    Case::Whole("/v1/responses", false),
    Case::Whole("/v1/responses", true),
    Case::Whole("/v1/messages", true),
    Case::Whole("/v1/messages", false),
    Case::Whole("/api/chat", false),
    Case::Unreadable,
    Case::Invalid,
    Case::LeavesHeld,
    Case::LeavesWaiting,
    Case::LeavesStreaming,
    Case::TimesOut,
    Case::TriesTwice,
];

#[derive(Debug, Clone, Copy)]
enum Case {
    /// A request for that path, streamed or not, and its whole answer.
    Whole(&'static str, bool),
    /// A body that cannot be read.
    Unreadable,
    /// A body that is no JSON.
    Invalid,
    /// The client leaves in the middle of its body.
    LeavesHeld,
    /// The client leaves before the answer begins.
    LeavesWaiting,
    /// The client leaves in the middle of a stream.
    LeavesStreaming,
    /// Envoy gives up on the host.
    TimesOut,
    /// Envoy gives up on the host, and on the next one.
    TriesTwice,
}

/// One request: what became of it, by its status or how it broke off.
async fn send(case: Case, number: usize, client: &Client, address: SocketAddr) -> String {
    let prompt = text(&format!("mixed {}", number % 400), 300 + number % 7 * 500);
    let body = |path: &str, tokens: usize, stream: bool| {
        let mut body = match path {
            "/v1/completions" => json!({"prompt": prompt}),
            "/v1/responses" => json!({"input": prompt}),
            _ => json!({"messages": [{"role": "user", "content": prompt}]}),
        };
        body["model"] = json!("sim");
        body["max_tokens"] = json!(tokens);
        body["max_output_tokens"] = json!(tokens);
        body["stream"] = json!(stream);
        body.to_string()
    };
    let url = |path: &str| format!("http://{address}{path}");
    let status = |answer: Result<warmroute_fleet::client::Answer, _>| match answer {
        Ok(answer) => answer.status.to_string(),
        Err(_) => "broken off".to_owned(),
    };
    match case {
        Case::Whole(path, stream) => status(client.post(&url(path), &[], body(path, 4, stream)).await),
        Case::Unreadable => {
            let headers = [("content-type", "text/plain")];
            status(client.post(&url(CHAT), &headers, body(CHAT, 4, false)).await)
        }
        Case::Invalid => status(client.post(&url(CHAT), &[], &b"{\"messages\": ["[..]).await),
        Case::LeavesHeld => {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let head = format!(
                "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n{prompt}"
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(number as u64 % 8)).await;
            "left while held".to_owned()
        }
        Case::LeavesWaiting => {
            let url = url(CHAT);
            let answer = client.post(&url, &[], body(CHAT, 100, number.is_multiple_of(2)));
            let patience = Duration::from_millis(1 + number as u64 % 16);
            match tokio::time::timeout(patience, answer).await {
                Ok(answer) => status(answer),
                Err(_) => "left while waiting".to_owned(),
            }
        }
        Case::LeavesStreaming => {
            let request = post_request(&url(CHAT), &[], full(body(CHAT, 100, true))).unwrap();
            let Ok(mut answer) = client.send(request).await else {
                return "broken off".to_owned();
            };
            for _ in 0..1 + number % 3 {
                let _ = answer.frame().await;
            }
            "left while streaming".to_owned()
        }
        Case::TimesOut | Case::TriesTwice => {
            let route = if matches!(case, Case::TimesOut) {
                "timeout"
            } else {
                "per-try"
            };
            let headers = [(ROUTE_HEADER, route)];
            let body = body(CHAT, 100, number.is_multiple_of(3));
            status(client.post(&url(CHAT), &headers, body).await)
        }
    }
}

/// Breaks the replicas in turn, and restarts one now and then, until told to stop; the fleet is well then.
async fn disturb(mut fleet: Fleet, stop: Arc<AtomicBool>) -> Fleet {
    let faults = [Fault::Reset, Fault::Status(503), Fault::Hang, Fault::Status(429)];
    for round in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let number = round % fleet.replicas.len();
        let replica = &mut fleet.replicas[number];
        if round % 16 == 15 {
            replica.restart().await.unwrap();
        } else {
            replica.set_fault(faults[(round / 3) % faults.len()]);
        }
        tokio::time::sleep(Duration::from_millis(80)).await;
        fleet.replicas[number].set_fault(Fault::None);
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    fleet
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tallies_return_to_zero_however_requests_end() {
    // An answer of a hundred tokens takes 0.2 s.
    let engine = EngineConfig {
        cache_blocks: 1 << 14,
        prefill_tokens_per_s: 200_000,
        decode_us_per_token: 2_000,
        max_running: 256,
    };
    let mut fleet = fleet_of(4, engine).await;
    let mut config = config(&fleet, &settings(&[POOL]));
    let retrying = |extra: Value| RouteConfig {
        retry_on: "connect-failure,refused-stream,reset,retriable-status-codes".to_owned(),
        extra,
        ..RouteConfig::to(POOL)
    };
    let for_header = |value: &str, route: RouteConfig| RouteConfig {
        header: Some((ROUTE_HEADER.to_owned(), value.to_owned())),
        ..route
    };
    let per_try = json!({
        "timeout": "0.1s",
        "retry_policy": {"retry_on": "reset,5xx", "num_retries": 2, "per_try_timeout": "0.03s"},
    });
    config.routes = vec![
        for_header("timeout", retrying(json!({"timeout": "0.03s"}))),
        for_header("per-try", retrying(per_try)),
        retrying(json!({"timeout": "5s"})),
    ];
    for (envoy, requests) in envoys().iter().zip(REQUESTS) {
        let gateway = Gateway::ready(envoy, &config, 2, 4).await;
        let stop = Arc::new(AtomicBool::new(false));
        let disturber = tokio::spawn(disturb(fleet, Arc::clone(&stop)));
        let address = gateway.process.listener("llm").unwrap();
        let next = Arc::new(AtomicUsize::new(0));
        // On a fast machine the requests are over before an engine restarted and was scraped: then more are sent.
        let has_restarted = Arc::new(AtomicBool::new(false));
        let senders: Vec<_> = (0..SENDERS)
            .map(|sender| {
                let (next, has_restarted) = (Arc::clone(&next), Arc::clone(&has_restarted));
                tokio::spawn(async move {
                    let client = if sender % 2 == 0 {
                        Client::new()
                    } else {
                        Client::http2()
                    };
                    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= requests && has_restarted.load(Ordering::Relaxed) {
                            return ends;
                        }
                        let case = CASES[number % CASES.len()];
                        *ends
                            .entry(send(case, number, &client, address).await)
                            .or_default() += 1;
                    }
                })
            })
            .collect();
        let (mut most_requests, mut most_tokens) = (0, 0);
        let deadline = Instant::now() + DEADLINE;
        while next.load(Ordering::Relaxed) < requests || !has_restarted.load(Ordering::Relaxed) {
            let stats = gateway.stats().await;
            let restarts = stats.get("warmroute_engine_restarts_total");
            let is_late = Instant::now() > deadline && next.load(Ordering::Relaxed) >= requests;
            has_restarted.fetch_or(
                restarts.is_some_and(|count| *count > 0) || is_late,
                Ordering::Relaxed,
            );
            most_requests = most_requests.max(stats.get(IN_FLIGHT).copied().unwrap_or(0));
            most_tokens = most_tokens.max(stats.get(PREFILL).copied().unwrap_or(0));
        }
        let mut ends: BTreeMap<String, usize> = BTreeMap::new();
        for sender in senders {
            for (end, count) in sender.await.unwrap() {
                *ends.entry(end).or_default() += count;
            }
        }
        stop.store(true, Ordering::Relaxed);
        fleet = disturber.await.unwrap();

        // All of it happened.
        let total: usize = ends.values().sum();
        // The number that tells a sender to end is no request.
        assert_eq!(total, next.load(Ordering::Relaxed) - SENDERS);
        assert!(total >= requests, "{total} of {requests}");
        println!("{envoy}: {ends:?}; at most {most_requests} requests and {most_tokens} tokens in flight");
        for (end, least) in [
            ("200", requests / 4),
            ("400", requests / 32),
            ("404", requests / 32),
            ("504", requests / 64),
            ("left while held", requests / 16),
            ("left while waiting", requests / 64),
            ("left while streaming", requests / 64),
        ] {
            let count = ends.get(end).copied().unwrap_or(0);
            assert!(
                count >= least,
                "{count} of at least {least} ended with {end}: {ends:?}"
            );
        }
        let stats = gateway.stats().await;
        for counter in [
            "host_failures",
            "served_elsewhere",
            "ended_while_held",
            "engine_restarts",
        ] {
            let count = stats.get(&format!("warmroute_{counter}_total"));
            assert!(count.is_some_and(|count| *count > 0), "no {counter}: {stats:#?}");
        }
        let decided: u64 = gateway.decisions().await.values().sum();
        assert!(decided > total as u64 * 3 / 4, "{decided} decisions: {ends:?}");
        assert!(most_requests > 0 && most_tokens > 0, "the gauges show nothing");

        // And nothing of it is left.
        eventually("Envoy has ended every request", async || {
            let stats = gateway
                .process
                .stats("http.llm.downstream_rq_active")
                .await
                .unwrap();
            stats.values().all(|active| *active == 0)
        })
        .await;
        eventually("no tally is left", async || {
            let stats = gateway.stats().await;
            stats[IN_FLIGHT] == 0 && stats[PREFILL] == 0
        })
        .await;
        assert!(!gateway.process.log().contains("panicked"));
    }
}

/// Sends a chat over a connection of its own, which the kernel hands to any worker.
async fn anywhere(gateway: &Gateway, body: &str) -> Served {
    let url = format!("{}{CHAT}", gateway.process.url());
    Served {
        answer: Client::new().post(&url, &[], body.to_owned()).await.unwrap(),
    }
    .ok()
}

#[tokio::test]
async fn a_worker_whose_vm_traps_stops_counting_within_2_s() {
    // A stream lasts as long as the test.
    let engine = EngineConfig {
        cache_blocks: 1 << 17,
        prefill_tokens_per_s: 1_000_000,
        decode_us_per_token: 50_000,
        max_running: 512,
    };
    let folder = Folder::new().unwrap();
    for envoy in envoys() {
        let fleet = fleet_of(2, engine.clone()).await;
        let mut settings = settings(&[POOL]);
        // A short prompt tolerates four of them on a host.
        settings["overflow"] = json!({"in_flight": 16});
        let mut config = config(&fleet, &settings);
        let plugin = config.plugin.as_mut().unwrap();
        let trapping = folder.file("trapping.wasm");
        std::fs::write(
            &trapping,
            trap_in(&plugin.wasm, "proxy_on_request_trailers").unwrap(),
        )
        .unwrap();
        plugin.wasm = trapping;
        let gateway = Gateway::ready(&envoy, &config, 2, 2).await;
        // What the engines say of themselves must not stand in for the tallies.
        for replica in &fleet.replicas {
            replica.set_metric_overrides(MetricOverrides {
                waiting: Some(0.0),
                running: Some(0.0),
                kv_usage: Some(0.0),
            });
        }

        // All streams of one HTTP/2 connection are on one worker.
        let client = Client::http2();
        let url = format!("{}{CHAT}", gateway.process.url());
        let mut body: Value = serde_json::from_str(&chat("count to a million")).unwrap();
        body["stream"] = json!(true);
        body["max_tokens"] = json!(1_000_000);
        let mut streams = Vec::new();
        for _ in 0..IN_FLIGHT_AT_TRAP {
            let request = post_request(&url, &[], full(body.to_string())).unwrap();
            let mut answer = client.send(request).await.unwrap();
            assert_eq!(answer.status(), 200);
            assert!(answer.frame().await.unwrap().unwrap().is_data());
            streams.push(answer);
        }
        eventually("all are counted", async || {
            gateway.stat(IN_FLIGHT).await == IN_FLIGHT_AT_TRAP
        })
        .await;
        // Every host has too many, whoever is asked.
        let probe = chat("and you?");
        for _ in 0..PROBES {
            assert_eq!(anywhere(&gateway, &probe).await.reason(), "all_saturated");
        }

        let mut trailers = HeaderMap::new();
        trailers.insert("x-trailer", "trap".parse().unwrap());
        let trap = pieces(vec![Bytes::from(chat("trap"))], Some(trailers));
        let answer = client
            .request(post_request(&url, &[], trap).unwrap())
            .await
            .unwrap();
        let trapped_at = tokio::time::Instant::now();
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(
            answer.header("x-warmroute-reason").is_none(),
            "{:?}",
            answer.headers
        );
        let log = gateway.process.log();
        assert!(log.contains("proxy_on_request_trailers"), "{log}");
        tokio::time::sleep_until(trapped_at + FORGOTTEN_WITHIN).await;
        let mut survivors = 0;
        for _ in 0..PROBES {
            let served = anywhere(&gateway, &probe).await;
            // The worker that trapped lets everything pass.
            if served.answer.header("x-warmroute-reason").is_some() {
                survivors += 1;
                assert_eq!(served.reason(), "home", "{:?}", served.answer.headers);
            }
        }
        assert!(survivors > 0, "all probes went to the worker that trapped");
        eventually("the gauge forgets them, too", async || {
            let stats = gateway.stats().await;
            stats[IN_FLIGHT] == 0 && stats[PREFILL] == 0
        })
        .await;
        // Under the shipped failure policy no stream was cut.
        let running: usize = fleet.replicas.iter().map(|replica| replica.queue().1).sum();
        assert_eq!(running as u64, IN_FLIGHT_AT_TRAP);
    }
}

/// Names the route of a request of the mix.
const ROUTE_HEADER: &str = "x-route";
/// Requests on the oldest and the newest Envoy.
const REQUESTS: [usize; 2] = [2_000, 10_000];
/// Requests under way at once.
const SENDERS: usize = 64;
const IN_FLIGHT_AT_TRAP: u64 = 100;
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(2);
/// Connections of which one worker of two gets all once in a million runs.
const PROBES: usize = 21;
const IN_FLIGHT: &str = "warmroute_requests_in_flight.pool.llm";
const PREFILL: &str = "warmroute_prefill_tokens_in_flight.pool.llm";
