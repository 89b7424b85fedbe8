//! Request bodies through real Envoys: whatever a client sends and however it sends it, the engine receives the same
//! bytes, and what can be read of them chooses the host.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{HeaderMap, Method, Request};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warmroute_fleet::client::{Answer, Client, full, pieces, post_request};
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy::Requirement;
use warmroute_fleet::envoy_config::{RouteConfig, STEERING_HEADER};
use warmroute_fleet::replica::{Fault, Replica};

#[path = "support/bodies.rs"]
mod bodies;
#[path = "support/generated.rs"]
mod generated;

use bodies::{
    CHAT, HastyUpstream, RawClient, Rig, THRESHOLD_BYTES, Witness, assert_intact, assert_steered,
    assert_untouched, chat, chat_of, connection_manager, cut, key, reason, sha256, until,
};

on_both_envoys! {
    uploads_of_8_mib_pass_the_shipped_limits,
    bodies_of_every_size_arrive_as_sent,
    trailers_end_a_body_and_reach_the_engine,
    http2_clients_and_engines_are_served,
    requests_without_a_prompt_to_read_pass_untouched,
    unreadable_bodies_are_balanced_by_load,
    malformed_bodies_get_the_engines_own_answer,
    every_indexed_body_arrives_as_sent,
    a_client_cannot_choose_the_host,
    the_guard_holds_when_the_filter_is_absent_or_dead,
    a_missing_flag_delays_only_the_first_requests,
    a_slow_first_client_is_not_taken_for_a_missing_flag,
    a_small_connection_buffer_refuses_at_most_one_body,
    a_stated_connection_buffer_refuses_no_body,
    aborted_requests_leave_no_tally_behind,
    expect_continue_is_answered,
    an_upgrade_by_post_is_not_held,
    an_early_answer_reaches_the_client,
    streamed_answers_are_not_held_back,
}

async fn uploads_of_8_mib_pass_the_shipped_limits(requirement: Requirement) {
    const UPLOADS: usize = 150;
    const CLIENTS: usize = 8;
    let rig = Rig::start(requirement, |shape| shape.concurrency = 2).await;
    // Two heads that go beyond what is held, and for each a few bodies that differ behind it.
    let bodies: Vec<(usize, Bytes, String)> = (0..6)
        .map(|number| {
            let head = number % 2;
            let mut body = chat_of(&format!("Head number {head}."), 8 << 20).to_vec();
            let end = body.len();
            body[end - 20..end - 5].copy_from_slice(format!("body {number:010}").as_bytes());
            let digest = sha256(&body);
            (head, body.into(), digest)
        })
        .collect();
    // The simulated replicas do not serve this API: they hash what they receive and answer 404 without parsing it, which
    // would take most of this test's time.
    let path = "/api/chat";
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (bodies, url, http) = (bodies.clone(), rig.url(path), rig.client.clone());
        clients.spawn(async move {
            let mut keys = Vec::new();
            for upload in (client..UPLOADS).step_by(CLIENTS) {
                let (head, body, digest) = &bodies[upload % bodies.len()];
                let answer = http.post(&url, &[], body.clone()).await.unwrap();
                assert_eq!(
                    answer.status,
                    404,
                    "upload {upload}: {}",
                    answer.text().chars().take(200).collect::<String>()
                );
                assert_eq!(
                    answer.header("x-body-sha256"),
                    Some(digest.as_str()),
                    "upload {upload}"
                );
                assert_steered(&answer, "an upload");
                keys.push((*head, key(&answer)));
            }
            keys
        });
    }
    let mut keys: Vec<(usize, String)> = clients.join_all().await.into_iter().flatten().collect();
    assert_eq!(keys.len(), UPLOADS);
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 2, "one key for each head: {keys:?}");
    assert_ne!(keys[0].1, keys[1].1);
    assert_eq!(rig.stat("warmroute_held_body_refused_total").await, 0);
}

async fn bodies_of_every_size_arrive_as_sent(requirement: Requirement) {
    let rig = Rig::start(requirement, |_| {}).await;
    let sizes = [
        64 << 10,
        THRESHOLD_BYTES - (16 << 10),
        THRESHOLD_BYTES - 1,
        THRESHOLD_BYTES,
        THRESHOLD_BYTES + 1,
        THRESHOLD_BYTES + (16 << 10),
        1 << 20,
        3 << 20,
    ];
    for bytes in sizes {
        let body = chat_of("Sizes differ.", bytes);
        let whole = rig.post(CHAT, &[], body.clone()).await;
        assert_eq!(whole.status, 200, "{bytes} bytes");
        assert_intact(&whole, &body, &format!("{bytes} bytes with their length"));
        assert_steered(&whole, &format!("{bytes} bytes"));
        for piece_bytes in [1 << 20, 64 << 10, 5000] {
            let what = format!("{bytes} bytes in chunks of {piece_bytes}");
            let request = post_request(&rig.url(CHAT), &[], pieces(cut(&body, piece_bytes), None)).unwrap();
            let answer = rig.client.request(request).await.unwrap();
            assert_eq!(answer.status, 200, "{what}");
            assert_intact(&answer, &body, &what);
            assert_eq!(key(&answer), key(&whole), "{what}");
            assert_eq!(
                answer.header("x-warmroute-host"),
                whole.header("x-warmroute-host"),
                "{what}"
            );
        }
    }
    for length in [Some(1), None] {
        let mut client = RawClient::connect(rig.address()).await;
        client.send_head(CHAT, length, "").await;
        match length {
            Some(_) => client.send(b"{").await,
            None => client.send(b"1\r\n{\r\n0\r\n\r\n").await,
        }
        let answer = client.answer().await;
        assert_intact(&answer, b"{", "one byte");
        assert_eq!(answer.status, 400, "the engine's own answer to half an object");
    }
}

async fn trailers_end_a_body_and_reach_the_engine(requirement: Requirement) {
    let witnesses = [
        Witness::start().await,
        Witness::start().await,
        Witness::start().await,
    ];
    let rig = Rig::start(requirement, |shape| {
        shape.config.http1_trailers = true;
        shape.config.pools[0].endpoints = witnesses.iter().map(|witness| witness.address).collect();
        shape.config.pools[0].http2 = true;
        shape.pool()["metrics"] = json!({"enabled": false});
    })
    .await;
    let small = chat("Trailers follow.");
    let large = chat_of("Trailers follow.", 2 << 20);
    for body in [&small, &large] {
        let plain = rig.post(CHAT, &[], body.clone()).await;
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", "abc".parse().unwrap());
        let request = post_request(&rig.url(CHAT), &[], pieces(cut(body, 16 << 10), Some(trailers))).unwrap();
        let over_http2 = Client::http2().request(request).await.unwrap();

        let mut client = RawClient::connect(rig.address()).await;
        client.send_head(CHAT, None, "trailer: x-checksum\r\n").await;
        for piece in cut(body, 100_000) {
            client.send_chunk(&piece).await;
        }
        client.send(b"0\r\nx-checksum: abc\r\n\r\n").await;
        let over_http1 = client.answer().await;

        for (answer, what) in [(&over_http2, "HTTP/2"), (&over_http1, "HTTP/1.1")] {
            assert_eq!(answer.status, 200, "{what}");
            assert_steered(answer, what);
            assert_eq!(key(answer), key(&plain), "{what}");
        }
        let seen: Vec<_> = witnesses.iter().flat_map(Witness::take).collect();
        assert_eq!(seen.len(), 3);
        assert!(seen.iter().all(|request| request.sha256 == sha256(body)));
        let checksums = seen
            .iter()
            .filter_map(|request| request.trailers.as_ref())
            .filter(|trailers| trailers["x-checksum"] == "abc");
        assert_eq!(checksums.count(), 2, "{seen:?}");
    }
}

async fn http2_clients_and_engines_are_served(requirement: Requirement) {
    let rig = Rig::start(requirement, |shape| {
        shape.config.pools[0].http2 = true;
        shape.concurrency = 2;
    })
    .await;
    let client = Client::http2();
    // Many frames of many requests, interleaved on one connection.
    let mut requests = JoinSet::new();
    for number in 0..12 {
        let body = chat_of(
            &format!("Conversation {}.", number % 3),
            [20_000, 300_000, 1 << 20, 4 << 20][number % 4],
        );
        let (client, url) = (client.clone(), rig.url(CHAT));
        requests.spawn(async move {
            let request = post_request(&url, &[], pieces(cut(&body, 1000 + number * 997), None)).unwrap();
            let answer = client.request(request).await.unwrap();
            assert_eq!(answer.status, 200);
            assert_intact(&answer, &body, "an upload in frames");
            assert_steered(&answer, "an upload in frames");
            key(&answer)
        });
    }
    assert_eq!(requests.join_all().await.len(), 12);
    let body = chat_of("Conversation 0.", 64 << 10);
    let over_http2 = client.post(&rig.url(CHAT), &[], body.clone()).await.unwrap();
    let over_http1 = rig.post(CHAT, &[], body).await;
    assert_eq!(key(&over_http2), key(&over_http1));
    let url = rig.url("/v1/models");
    let models = client.get(&url).await.unwrap();
    assert_eq!(models.status, 200);
    assert_untouched(&models, &url);
}

async fn requests_without_a_prompt_to_read_pass_untouched(requirement: Requirement) {
    let rig = Rig::start(requirement, |_| {}).await;
    let bare = [
        (Method::GET, "/v1/models", 200),
        (Method::GET, "/health", 200),
        (Method::GET, CHAT, 404),
        (Method::HEAD, CHAT, 404),
        (Method::OPTIONS, CHAT, 404),
        // No body, so none can be waited for; the engine says what it thinks of that.
        (Method::POST, CHAT, 400),
        (Method::POST, "/unknown", 404),
        (Method::DELETE, "/v1/responses/resp_1", 404),
    ];
    for (method, path, status) in bare {
        let what = format!("{method} {path}");
        let request = Request::builder()
            .method(method)
            .uri(rig.url(path))
            .body(full(""))
            .unwrap();
        let answer = rig.client.request(request).await.unwrap();
        assert_eq!(answer.status, status, "{what}");
        assert!(answer.header("x-replica").is_some(), "{what}");
        assert_untouched(&answer, &what);
    }
    let body = chat("Not for generation.");
    for (path, status) in [
        ("/v1/embeddings", 404),
        ("/tokenize", 200),
        ("/v1/rerank", 404),
        ("/unknown", 404),
        ("/v1/chat/completions/render", 200),
    ] {
        let answer = rig.post(path, &[], body.clone()).await;
        assert_intact(&answer, &body, path);
        assert_eq!(answer.status, status, "{path}");
        assert_untouched(&answer, path);
    }
    let request = Request::put(rig.url(CHAT)).body(full(body.clone())).unwrap();
    let put = rig.client.request(request).await.unwrap();
    assert_intact(&put, &body, "PUT");
    assert_untouched(&put, "PUT");
    assert_eq!(rig.stat_sum("warmroute_decisions_total").await, 0);
    assert_eq!(rig.stat_sum("warmroute_unkeyed_total").await, 0);
}

async fn unreadable_bodies_are_balanced_by_load(requirement: Requirement) {
    let rig = Rig::start(requirement, |_| {}).await;
    let gzip = Bytes::from(std::fs::read(bodies_folder().join("chat_gzip.bin")).unwrap());
    let form = Bytes::from_static(b"model=sim&prompt=hello");
    let multipart =
        Bytes::from_static(b"--b\r\ncontent-disposition: form-data; name=\"x\"\r\n\r\n1\r\n--b--\r\n");
    let cases = [
        ("gzip", ("content-encoding", "gzip"), &gzip),
        ("an unknown coding", ("content-encoding", "zstd"), &gzip),
        (
            "a form",
            ("content-type", "application/x-www-form-urlencoded"),
            &form,
        ),
        (
            "multipart",
            ("content-type", "multipart/form-data; boundary=b"),
            &multipart,
        ),
    ];
    for (done, (what, header, body)) in cases.into_iter().enumerate() {
        let answer = rig.post(CHAT, &[header], body.clone()).await;
        assert_intact(&answer, body, what);
        assert_eq!(answer.status, 400, "{what}: the engine cannot read it either");
        assert_eq!(reason(&answer), "least_loaded; unreadable", "{what}");
        assert_eq!(answer.header("x-warmroute-key"), Some("none"), "{what}");
        assert_steered(&answer, what);
        assert_eq!(
            rig.stat("warmroute_unkeyed_total.reason.unreadable").await,
            done as u64 + 1,
            "{what}"
        );
    }
    let large = chat_of("Compressed, it says.", 3 << 20);
    let answer = rig
        .post(CHAT, &[("content-encoding", "gzip")], large.clone())
        .await;
    assert_intact(&answer, &large, "a large body that is not looked at");
}

async fn malformed_bodies_get_the_engines_own_answer(requirement: Requirement) {
    let rig = Rig::start(requirement, |_| {}).await;
    let whole = chat("Something is wrong with this.");
    let deep = format!(
        r#"{{"model":"sim","tools":{}1{},"messages":[{{"role":"user","content":"hi"}}]}}"#,
        "[".repeat(300),
        "]".repeat(300)
    );
    let cases: [(&str, Bytes, u16, &str); 8] = [
        ("no JSON", Bytes::from_static(b"hello there"), 400, "invalid_json"),
        (
            "no UTF-8",
            Bytes::from_static(b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}"),
            400,
            "invalid_json",
        ),
        ("cut short", whole.slice(..whole.len() - 9), 400, "invalid_json"),
        ("an array", Bytes::from_static(b"[1,2,3]"), 400, "not_an_object"),
        (
            "nothing to answer",
            Bytes::from_static(b"{\"model\":\"sim\"}"),
            400,
            "prompt_missing",
        ),
        (
            "a wrong type",
            Bytes::from_static(b"{\"model\":\"sim\",\"messages\":7}"),
            400,
            "wrong_type",
        ),
        ("deep nesting", deep.into(), 400, "too_deep"),
        (
            "a key twice",
            Bytes::from_static(
                b"{\"model\":\"a\",\"model\":\"b\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
            ),
            200,
            "duplicate_key",
        ),
    ];
    let mut causes: BTreeMap<&str, u64> = BTreeMap::new();
    for (what, body, status, cause) in cases {
        let answer = rig.post(CHAT, &[], body.clone()).await;
        assert_intact(&answer, &body, what);
        assert_eq!(answer.status, status, "{what}");
        assert_eq!(reason(&answer), format!("least_loaded; {cause}"), "{what}");
        assert_steered(&answer, what);
        *causes.entry(cause).or_default() += 1;
    }
    // A body that turns out to be empty: held, for no header said so.
    let mut client = RawClient::connect(rig.address()).await;
    client.send_head(CHAT, None, "").await;
    client.send(b"0\r\n\r\n").await;
    let empty = client.answer().await;
    assert_intact(&empty, b"", "an empty body");
    assert_eq!(empty.status, 400, "an empty body");
    *causes.entry("invalid_json").or_default() += 1;
    for (cause, count) in causes {
        let counted = rig.stat(&format!("warmroute_unkeyed_total.reason.{cause}")).await;
        assert_eq!(counted, count, "{cause}");
    }
}

async fn every_indexed_body_arrives_as_sent(requirement: Requirement) {
    let rig = Rig::start(requirement, |_| {}).await;
    let entries = indexed_bodies();
    assert_eq!(entries.len(), 125);
    let by_id: BTreeMap<&str, &Indexed> = entries.iter().map(|entry| (entry.id(), entry)).collect();
    for entry in &entries {
        let what = entry.id();
        let answer = entry.send(&rig).await;
        assert_intact(&answer, &entry.body, what);
        let is_keyed = answer.header("x-warmroute-key").is_some_and(|key| key != "none");
        if entry.may_only_be("routable-by-prefix") {
            assert!(is_keyed, "{what}: {:?}", answer.header("x-warmroute-reason"));
            assert_steered(&answer, what);
        } else if entry.may_only_be("fallback-to-load-balancing") {
            // Without a body there is nothing to wait for: Envoy itself balances.
            let is_decided = answer.header("x-warmroute-strategy").is_some();
            assert!(!is_keyed && is_decided != entry.body.is_empty(), "{what}");
        } else if entry.may_only_be("pass-through") {
            assert_untouched(&answer, what);
        }
        let Some(other) = entry.facts["same_prefix_as"].as_str() else {
            continue;
        };
        let other = by_id[other].send(&rig).await;
        if !is_keyed {
            assert!(entry.accepts("fallback-to-load-balancing"), "{what}");
            continue;
        }
        assert_eq!(key(&answer), key(&other), "{what}");
        assert_eq!(
            answer.header("x-warmroute-host"),
            other.header("x-warmroute-host"),
            "{what}"
        );
    }
}

async fn a_client_cannot_choose_the_host(requirement: Requirement) {
    // No guard, and no upstream filter that would hide from the replica what reaches it.
    let rig = Rig::start(requirement, |shape| {
        shape.config.guard = false;
        shape.config.pools[0].upstream_filters = false;
        shape.pool()["metrics"] = json!({"enabled": false});
    })
    .await;
    let addresses = rig.fleet.addresses();
    let foreign = "192.0.2.1:80".to_owned();
    let body = chat("Who serves this?");
    let home = rig.post(CHAT, &[], body.clone()).await;
    let home = home.header("x-warmroute-host").unwrap().to_owned();
    let mut spoofed: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    spoofed.retain(|address| *address != home);
    spoofed.push(foreign);
    spoofed.push("not an address".to_owned());
    let mut removed = 0;
    for victim in &spoofed {
        let upper = STEERING_HEADER.to_uppercase();
        let variants: [Vec<&str>; 3] = [
            vec![STEERING_HEADER],
            vec![&upper],
            vec![STEERING_HEADER, &upper, STEERING_HEADER],
        ];
        for names in &variants {
            let lines: String = names.iter().map(|name| format!("{name}: {victim}\r\n")).collect();
            let what = format!("{names:?} naming {victim}");
            rig.fleet.replicas.iter().for_each(Replica::clear_requests);

            let mut client = RawClient::connect(rig.address()).await;
            client.send_head(CHAT, Some(body.len()), &lines).await;
            client.send(&body).await;
            let answer = client.answer().await;
            assert_eq!(answer.status, 200, "{what}");
            assert_eq!(answer.header("x-warmroute-host"), Some(home.as_str()), "{what}");
            let received = rig.received();
            let steering: Vec<&str> = received
                .iter()
                .flat_map(|request| &request.headers)
                .filter(|(name, _)| name == STEERING_HEADER)
                .map(|(_, value)| value.as_str())
                .collect();
            assert_eq!(steering.len(), 1, "{what}: {received:?}");
            assert!(steering[0].starts_with(&home), "{what}: {steering:?}");
            assert_eq!(rig.fleet.replica(&home).unwrap().requests().len(), 1, "{what}");

            // Where Warmroute chooses no host, nothing is left of the header.
            for (method, path, length) in [("GET", "/v1/models", None), ("POST", "/tokenize", Some(2))] {
                let framing =
                    length.map_or_else(String::new, |length| format!("content-length: {length}\r\n"));
                client
                    .send(
                        format!("{method} {path} HTTP/1.1\r\nhost: test\r\n{framing}{lines}\r\n").as_bytes(),
                    )
                    .await;
                if length.is_some() {
                    client.send(b"{}").await;
                }
                let answer = client.answer().await;
                let seen = answer.header("x-seen-headers").unwrap();
                assert!(!seen.contains(STEERING_HEADER), "{what} on {path}: {seen}");
            }
            removed += 3;
        }
    }
    assert_eq!(
        rig.stat("warmroute_client_steering_headers_removed_total").await,
        removed
    );
}

async fn the_guard_holds_when_the_filter_is_absent_or_dead(requirement: Requirement) {
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Filter {
        Absent,
        Dead,
    }
    let crash = warmroute_fleet::process::workspace_root()
        .join("target")
        .join(format!("traps-at-headers-{}.wasm", std::process::id()));
    std::fs::write(&crash, trapping_module()).unwrap();
    for (filter, guard) in [
        (Filter::Absent, true),
        (Filter::Dead, true),
        // Without the guard the client is obeyed: what is tested here does depend on it.
        (Filter::Dead, false),
    ] {
        let rig = Rig::start(requirement, |shape| {
            shape.config.guard = guard;
            shape.config.pools[0].upstream_filters = false;
            match filter {
                Filter::Absent => shape.config.plugin = None,
                Filter::Dead => {
                    shape.plugin().service = false;
                    shape.plugin().wasm.clone_from(&crash);
                }
            }
        })
        .await;
        let victim = rig.fleet.addresses()[0].to_string();
        let headers = [(STEERING_HEADER, victim.as_str())];
        let body = chat("Who serves this?");
        for _ in 0..24 {
            let answer = rig.post(CHAT, &headers, body.clone()).await;
            assert_eq!(answer.status, 200, "{filter:?}");
            assert_intact(&answer, &body, "a request past the filter");
            assert_untouched(&answer, "a request past the filter");
        }
        if filter == Filter::Dead {
            assert!(rig.envoy.log().contains("unreachable"), "the module did not trap");
        }
        let at_victim = rig.fleet.replicas[0].requests().len();
        if guard {
            assert!(at_victim < 24, "{filter:?}: the client chose the host");
            let seen = rig.received();
            assert!(
                seen.iter()
                    .all(|request| request.headers.iter().all(|(name, _)| name != STEERING_HEADER)),
                "{filter:?}"
            );
        } else {
            assert_eq!(at_victim, 24);
        }
    }
    let _ = std::fs::remove_file(&crash);
}

async fn a_missing_flag_delays_only_the_first_requests(requirement: Requirement) {
    const WORKERS: u32 = 2;
    let rig = Rig::start(requirement, |shape| {
        shape.plugin().allow_on_headers_stop_iteration = false;
        shape.concurrency = WORKERS;
    })
    .await;
    let body = chat("Is there a body?");
    let large = chat_of("Is there a body?", 3 << 20);
    // Connections of their own, so that the kernel spreads them over both workers.
    let mut first = JoinSet::new();
    for number in 0..24 {
        let body = if number % 6 == 5 {
            large.clone()
        } else {
            body.clone()
        };
        let address = rig.address();
        first.spawn(async move {
            let mut client = RawClient::connect(address).await;
            client.send_head(CHAT, Some(body.len()), "").await;
            client.send_all_while_reading(&body).await;
            let answer = client.answer().await;
            assert_eq!(answer.status, 200);
            assert_intact(&answer, &body, "a request that waited");
        });
    }
    assert_eq!(first.join_all().await.len(), 24);
    let log = rig.envoy.log();
    let lines = log
        .lines()
        .filter(|line| line.contains("allow_on_headers_stop_iteration"));
    assert_eq!(
        lines.count() as u64,
        u64::from(WORKERS),
        "one line for each worker\n{log}"
    );
    let waited = rig.stat("warmroute_flag_missing_total").await;
    assert!(
        (u64::from(WORKERS)..=24).contains(&waited),
        "{waited} requests waited"
    );

    for number in 0..12 {
        let mut client = RawClient::connect(rig.address()).await;
        let body = if number % 6 == 5 { &large } else { &body };
        client.send_head(CHAT, Some(body.len()), "").await;
        client.send_all_while_reading(body).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, 200);
        assert_intact(&answer, body, "a request decided at its headers");
        assert_eq!(reason(&answer), "least_loaded; flag_missing");
        assert_steered(&answer, "a request decided at its headers");
    }
    assert_eq!(
        rig.stat("warmroute_flag_missing_total").await,
        waited,
        "nothing waits any more"
    );
    let counted = rig.stat("warmroute_unkeyed_total.reason.flag_missing").await;
    assert_eq!(counted, waited + 12);
}

async fn a_slow_first_client_is_not_taken_for_a_missing_flag(requirement: Requirement) {
    // Longer than the filter's self-check waits, which the client cannot see.
    const SLOW: Duration = Duration::from_millis(2500);
    let body = chat_of("Slowly, slowly.", 100_000);

    let rig = Rig::start(requirement, |_| {}).await;
    let mut slow = RawClient::connect(rig.address()).await;
    slow.send_head(CHAT, Some(body.len()), "").await;
    tokio::time::sleep(SLOW).await;
    slow.send(&body).await;
    let answer = slow.answer().await;
    assert_eq!(answer.status, 200);
    assert_intact(&answer, &body, "the first request, which came late");
    assert_eq!(reason(&answer), "home", "it was waited for");
    let next = rig.post(CHAT, &[], body.clone()).await;
    assert_eq!(reason(&next), "home");
    assert_eq!(key(&answer), key(&next));

    // Once a body has come, a slow one is simply waited for.
    let mut slow = RawClient::connect(rig.address()).await;
    slow.send_head(CHAT, None, "").await;
    for piece in cut(&body, body.len() / 10 + 1) {
        tokio::time::sleep(Duration::from_millis(300)).await;
        slow.send_chunk(&piece).await;
    }
    slow.send(b"0\r\n\r\n").await;
    let answer = slow.answer().await;
    assert_intact(&answer, &body, "a body that trickled");
    assert_eq!(reason(&answer), "home");
    assert_eq!(key(&answer), key(&next));
    assert_eq!(rig.stat("warmroute_flag_missing_total").await, 0);
    assert!(!rig.envoy.log().contains("allow_on_headers_stop_iteration"));
}

async fn a_stated_connection_buffer_refuses_no_body(requirement: Requirement) {
    let rig = Rig::start(requirement, |shape| {
        shape.config.connection_buffer_limit_bytes = Some(32 << 10);
        shape.config.request_body_buffer_limit_bytes = None;
        shape.pool()["stream_buffer_bytes"] = json!(32 << 10);
    })
    .await;
    let bodies = [20_000, 32 << 10, (32 << 10) + 1, 60_000, 1 << 20].map(|bytes| chat_of("Stated.", bytes));
    let mut uploads = JoinSet::new();
    for number in 0..30 {
        let (body, url) = (bodies[number % bodies.len()].clone(), rig.url(CHAT));
        uploads.spawn(async move {
            let sent = match number % 2 {
                0 => full(body.clone()),
                _ => pieces(cut(&body, 20_000), None),
            };
            let request = post_request(&url, &[], sent).unwrap();
            let answer = Client::new().request(request).await.unwrap();
            assert_eq!(answer.status, 200, "upload {number}: {}", answer.text());
            assert_intact(&answer, &body, "an upload");
        });
    }
    assert_eq!(uploads.join_all().await.len(), 30);
    assert_eq!(rig.stat("warmroute_held_body_refused_total").await, 0);
}

async fn a_small_connection_buffer_refuses_at_most_one_body(requirement: Requirement) {
    let rig = Rig::start(requirement, |shape| {
        shape.config.connection_buffer_limit_bytes = Some(32 << 10);
        shape.config.request_body_buffer_limit_bytes = None;
    })
    .await;
    let mut refused = 0;
    let bodies = [
        chat_of("Small buffers.", 60_000),
        chat_of("Small buffers.", 1 << 20),
    ];
    for round in 0..6 {
        for body in &bodies {
            for is_chunked in [false, true] {
                let what = format!("round {round}, {} bytes, chunked {is_chunked}", body.len());
                let mut client = RawClient::connect(rig.address()).await;
                client
                    .send_head(CHAT, (!is_chunked).then_some(body.len()), "")
                    .await;
                let mut bytes = Vec::new();
                if is_chunked {
                    for piece in cut(body, 20_000) {
                        bytes.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
                        bytes.extend_from_slice(&piece);
                        bytes.extend_from_slice(b"\r\n");
                    }
                    bytes.extend_from_slice(b"0\r\n\r\n");
                } else {
                    bytes.extend_from_slice(body);
                }
                client.send_all_while_reading(&bytes).await;
                let answer = client.answer().await;
                if answer.status == 413 {
                    refused += 1;
                    continue;
                }
                assert_eq!(answer.status, 200, "{what}");
                assert_intact(&answer, body, &what);
            }
        }
    }
    assert_eq!(refused, 1, "the first body is refused, and no other");
    assert_eq!(rig.stat("warmroute_held_body_refused_total").await, refused);
    let log = rig.envoy.log();
    let warnings = log.lines().filter(|line| line.contains("Envoy refused a body"));
    assert_eq!(warnings.count() as u64, refused, "{log}");
    for bytes in [1000, 8000, 16_000] {
        let body = chat_of("Small bodies are read.", bytes);
        let answer = rig.post(CHAT, &[], body.clone()).await;
        assert_eq!(answer.status, 200, "{bytes} bytes");
        assert_intact(&answer, &body, "a small body");
        key(&answer);
    }
}

async fn aborted_requests_leave_no_tally_behind(requirement: Requirement) {
    // One request in flight at its home sends the next one elsewhere, so a tally that is left behind shows at once.
    let rig = Rig::start(requirement, |shape| {
        shape.engine = EngineConfig {
            decode_us_per_token: 200_000,
            ..EngineConfig::instant()
        };
        shape.pool()["overflow"] = json!({"in_flight": 1});
        shape.pool()["metrics"] = json!({"enabled": false});
        shape.config.routes = vec![RouteConfig {
            retries: 0,
            ..RouteConfig::to("llm")
        }];
    })
    .await;
    let body = chat("Nobody waits for this.");
    let first = rig.post(CHAT, &[], body.clone()).await;
    assert_eq!(reason(&first), "home");
    let home = rig
        .fleet
        .replica(first.header("x-warmroute-host").unwrap())
        .unwrap();

    // While it is held.
    for sent_bytes in [0, 20] {
        let mut client = RawClient::connect(rig.address()).await;
        client.send_head(CHAT, Some(body.len()), "").await;
        client.send(&body[..sent_bytes]).await;
        until("the request to be in flight", async || {
            let stats = rig.envoy.stats("http.llm.downstream_rq_active").await.unwrap();
            (stats.values().sum::<u64>() > 0).then_some(())
        })
        .await;
        drop(client);
        assert_home_is_free(&rig, &body).await;
    }
    until("both to be counted", async || {
        (rig.stat("warmroute_ended_while_held_total").await >= 1).then_some(())
    })
    .await;

    // While it waits for the answer; meanwhile the home is taken.
    for _ in 0..3 {
        home.set_fault(Fault::Hang);
        let posts = home.posts_received();
        let mut client = RawClient::connect(rig.address()).await;
        client.send_head(CHAT, Some(body.len()), "").await;
        client.send(&body).await;
        until("the home to have the request", async || {
            (home.posts_received() > posts).then_some(())
        })
        .await;
        let meanwhile = rig.post(CHAT, &[], body.clone()).await;
        assert_eq!(reason(&meanwhile), "overflow_in_flight");
        drop(client);
        home.set_fault(Fault::None);
        assert_home_is_free(&rig, &body).await;
    }

    // In the middle of a streamed answer.
    let streamed: Bytes = json!({"model": "sim", "max_tokens": 1000, "stream": true, "messages": [
        {"role": "system", "content": "Nobody waits for this."}, {"role": "user", "content": "hello"},
    ]})
    .to_string()
    .into();
    for _ in 0..3 {
        let mut client = RawClient::connect(rig.address()).await;
        client.send_head(CHAT, Some(streamed.len()), "").await;
        client.send(&streamed).await;
        let head = client.head().await.unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(head.contains("x-warmroute-reason: home\r\n"), "{head}");
        drop(client);
        assert_home_is_free(&rig, &body).await;
    }

    // An upload that stalls after its host was chosen.
    let large = chat_of("Nobody waits for this.", 4 << 20);
    let mut client = RawClient::connect(rig.address()).await;
    client.send_head(CHAT, Some(large.len()), "").await;
    client.send(&large[..2 << 20]).await;
    until("the upload to be steered", async || {
        let stats = rig.envoy.stats("cluster.llm.upstream_rq_active").await.unwrap();
        (stats.values().sum::<u64>() > 0).then_some(())
    })
    .await;
    drop(client);
    assert_home_is_free(&rig, &body).await;

    // Upstreams that cut the connection; the home is passed over for a while then, as it failed.
    for replica in &rig.fleet.replicas {
        replica.set_fault(Fault::Reset);
    }
    let answers = [
        rig.post(CHAT, &[], body.clone()).await,
        rig.post(CHAT, &[], body.clone()).await,
    ];
    assert!(answers.iter().all(|answer| answer.status == 503));
    for replica in &rig.fleet.replicas {
        replica.set_fault(Fault::None);
    }
    until("the failure to be forgiven", async || {
        let answer = rig.post(CHAT, &[], body.clone()).await;
        assert_eq!(answer.status, 200);
        assert_ne!(reason(&answer), "overflow_in_flight");
        (reason(&answer) == "home").then_some(())
    })
    .await;
}

/// The next request goes home as soon as Envoy has noticed that the last one is over.
async fn assert_home_is_free(rig: &Rig, body: &Bytes) {
    until("Envoy to end the request", async || {
        let stats = rig.envoy.stats("http.llm.downstream_rq_active").await.unwrap();
        (stats.values().sum::<u64>() == 0).then_some(())
    })
    .await;
    let answer = rig.post(CHAT, &[], body.clone()).await;
    assert_eq!(reason(&answer), "home");
}

async fn expect_continue_is_answered(requirement: Requirement) {
    let body = chat_of("May I?", 100_000);
    for proxied in [false, true] {
        let rig = Rig::start(requirement, |shape| {
            if proxied {
                shape.patch = |bootstrap| connection_manager(bootstrap)["proxy_100_continue"] = json!(true);
            }
        })
        .await;
        let plain = rig.post(CHAT, &[], body.clone()).await;
        for _ in 0..3 {
            let mut client = RawClient::connect(rig.address()).await;
            client
                .send_head(CHAT, Some(body.len()), "expect: 100-continue\r\n")
                .await;
            let go = client.head().await.unwrap();
            assert!(go.starts_with("HTTP/1.1 100"), "{go}");
            client.send(&body).await;
            let answer = client.answer().await;
            assert_eq!(answer.status, 200);
            assert_intact(&answer, &body, "a body that asked first");
            assert_steered(&answer, "a body that asked first");
            if proxied {
                // The body comes only after the engine has spoken, so it cannot choose the engine.
                assert_eq!(reason(&answer), "least_loaded; expect_continue");
            } else {
                assert_eq!(key(&answer), key(&plain));
            }
        }
        let counted = rig.stat("warmroute_unkeyed_total.reason.expect_continue").await;
        assert_eq!(counted, if proxied { 3 } else { 0 });
    }
}

async fn an_upgrade_by_post_is_not_held(requirement: Requirement) {
    let upstream = HastyUpstream::start().await;
    let rig = Rig::start(requirement, |shape| {
        shape.config.pools[0].endpoints = vec![upstream.address];
        shape.pool()["metrics"] = json!({"enabled": false});
        shape.patch = |bootstrap| {
            connection_manager(bootstrap)["upgrade_configs"] = json!([{"upgrade_type": "websocket"}]);
        };
    })
    .await;
    let mut client = RawClient::connect(rig.address()).await;
    // A websocket's client sends nothing before the upstream has agreed, and this one does not.
    client
        .send(
            format!(
                "POST {CHAT} HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
            )
            .as_bytes(),
        )
        .await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.text().as_str()), (400, "hasty"));
    assert_eq!(reason(&answer), "least_loaded; expect_continue");
}

async fn an_early_answer_reaches_the_client(requirement: Requirement) {
    let upstream = HastyUpstream::start().await;
    let rig = Rig::start(requirement, |shape| {
        shape.config.pools[0].endpoints = vec![upstream.address];
        shape.pool()["metrics"] = json!({"enabled": false});
        shape.pool()["overflow"] = json!({"in_flight": 1});
    })
    .await;
    let body = chat_of("Too late already.", 4 << 20);
    for _ in 0..5 {
        let mut client = RawClient::connect(rig.address()).await;
        client.send_head(CHAT, Some(body.len()), "").await;
        client.send_all_while_reading(&body[..2 << 20]).await;
        // The rest never comes.
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text().as_str()), (400, "hasty"));
        assert_eq!(reason(&answer), "home", "the one before gave its charge back");
        key(&answer);
    }
}

async fn streamed_answers_are_not_held_back(requirement: Requirement) {
    let rig = Rig::start(requirement, |shape| {
        shape.engine = EngineConfig {
            decode_us_per_token: 100_000,
            ..EngineConfig::instant()
        };
    })
    .await;
    let body = json!({"model": "sim", "max_tokens": 20, "stream": true, "messages": [
        {"role": "user", "content": "count"},
    ]});
    for client in [Client::new(), Client::http2()] {
        let request = post_request(&rig.url(CHAT), &[], full(body.to_string())).unwrap();
        let answer = client.send(request).await.unwrap();
        let host = answer.headers()["x-warmroute-host"].to_str().unwrap().to_owned();
        let replica = rig.fleet.replica(&host).unwrap();
        let mut stream = answer.into_body();
        let first = stream.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!(first.starts_with(b"data: "), "{first:?}");
        assert_eq!(
            replica.queue().1,
            1,
            "the engine is still at work when the first event is here"
        );
        let rest = stream.collect().await.unwrap().to_bytes();
        let text = String::from_utf8([first, rest].concat()).unwrap();
        assert_eq!(text.matches("\"content\":\"tok \"").count(), 20, "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
}

/// One entry of the committed index with its body.
struct Indexed {
    facts: Value,
    body: Bytes,
}

impl Indexed {
    fn id(&self) -> &str {
        self.facts["id"].as_str().unwrap()
    }

    fn accepts(&self, outcome: &str) -> bool {
        let acceptable = self.facts["acceptable"].as_array().unwrap();
        self.facts["outcome"] == outcome || acceptable.iter().any(|other| other == outcome)
    }

    fn may_only_be(&self, outcome: &str) -> bool {
        self.facts["outcome"] == outcome && self.facts["acceptable"].as_array().unwrap().is_empty()
    }

    async fn send(&self, rig: &Rig) -> Answer {
        let mut request = Request::post(rig.url(self.facts["path"].as_str().unwrap()));
        for (name, fact) in [
            ("content-type", "content_type"),
            ("content-encoding", "content_encoding"),
        ] {
            if let Some(value) = self.facts[fact].as_str() {
                request = request.header(name, value);
            }
        }
        let request = request.body(full(self.body.clone())).unwrap();
        rig.client
            .request(request)
            .await
            .unwrap_or_else(|error| panic!("{}: {error}", self.id()))
    }
}

fn bodies_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/bodies")
}

fn indexed_bodies() -> Vec<Indexed> {
    let index: Value =
        serde_json::from_slice(&std::fs::read(bodies_folder().join("index.json")).unwrap()).unwrap();
    let entries = index["entries"].as_array().unwrap().iter();
    entries
        .map(|facts| Indexed {
            facts: facts.clone(),
            body: match facts["file"].as_str() {
                Some(file) => std::fs::read(bodies_folder().join(file)).unwrap().into(),
                None => generated::generated(&facts["generated"]).into(),
            },
        })
        .collect()
}

/// The smallest filter that Envoy loads and that traps at the first request headers (proxy-wasm ABI 0.2.1).
fn trapping_module() -> Vec<u8> {
    fn named(name: &str, kind: u8, index: u8) -> Vec<u8> {
        let mut export = vec![u8::try_from(name.len()).unwrap()];
        export.extend_from_slice(name.as_bytes());
        export.extend([kind, index]);
        export
    }
    fn section(id: u8, content: &[u8]) -> Vec<u8> {
        let mut section = vec![id, u8::try_from(content.len() & 0x7f).unwrap() | 0x80];
        section.push(u8::try_from(content.len() >> 7).unwrap());
        section.extend_from_slice(content);
        section
    }
    const I32: u8 = 0x7f;
    // Types: (), (i32) → i32, (i32, i32, i32) → i32.
    let types = [
        &[3, 0x60, 0, 0, 0x60, 1, I32, 1, I32][..],
        &[0x60, 3, I32, I32, I32, 1, I32],
    ]
    .concat();
    let exports = [
        vec![4],
        named("memory", 2, 0),
        named("proxy_abi_version_0_2_1", 0, 0),
        named("proxy_on_memory_allocate", 0, 1),
        named("proxy_on_request_headers", 0, 2),
    ]
    .concat();
    // Bodies: nothing; `i32.const 1024`; `unreachable`.
    let code = [3, 2, 0, 0x0b, 5, 0, 0x41, 0x80, 0x08, 0x0b, 3, 0, 0, 0x0b];
    [
        b"\0asm\x01\0\0\0".to_vec(),
        section(1, &types),
        section(3, &[3, 0, 1, 2]),
        section(5, &[1, 0, 1]),
        section(7, &exports),
        section(10, &code),
    ]
    .concat()
}
