//! What docs/security.md says of clients, tenants and engines, with real Envoys; the rest of it is in tests/security.rs.
//!
//! Every test runs on the oldest and the newest Envoy under test.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

mod support;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::{
    CHAT, Folder, Gateway, POOL, POOL_HEADER, at, chat, config, config_of, envoys, eventually, fleet,
    routes_by_header, settings, text,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use warmroute_fleet::client::{Client, full};
use warmroute_fleet::envoy::{EnvoyOptions, write_atomically};
use warmroute_fleet::envoy_config::{PoolConfig, STEERING_HEADER};
use warmroute_fleet::odd::cluster_of;
use warmroute_fleet::patched::trap_in;

#[tokio::test]
async fn a_steering_header_of_a_client_reaches_nobody_in_any_mode() {
    const OWN: &str = "x-own-steering";
    let fleet = fleet(3).await;
    let pools = [POOL, "dry", "own", "in_turn", "unknown_to_warmroute"];
    let mut settings = settings(&pools[..4]);
    settings["pools"]["dry"]["dry_run"] = json!(true);
    settings["pools"]["own"]["steering_header"] = json!(OWN);
    settings["pools"]["in_turn"]["strategy"] = json!("round_robin");
    let open = pools.map(|pool| PoolConfig {
        upstream_filters: false,
        ..PoolConfig::new(pool, fleet.addresses())
    });
    let mut config = config_of(&settings, open.to_vec());
    config.routes = routes_by_header(&pools);
    // The filter alone: the guard in front of it is tested where the filter is dead.
    config.guard = false;
    let victim = fleet.addresses()[0].to_string();
    let foreign = "192.0.2.1:80";
    let list = format!("{foreign},{victim}");
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 1, 3).await;
        for client in [Client::new(), Client::http2()] {
            for pool in pools {
                for name in [STEERING_HEADER, OWN] {
                    for values in [
                        vec![foreign],
                        vec![foreign, foreign],
                        vec![&list],
                        vec!["", foreign],
                    ] {
                        let mut headers: Vec<(&str, &str)> =
                            values.iter().map(|value| (name, *value)).collect();
                        headers.push((POOL_HEADER, pool));
                        fleet.replicas.iter().for_each(|replica| replica.clear_requests());
                        let url = gateway.process.url();
                        let posts = [
                            (CHAT, "application/json", chat("whose?")),
                            (CHAT, "application/json", "{\"model\": \"sim\", \"mess".to_owned()),
                            (CHAT, "text/plain", chat("whose?")),
                            ("/tokenize", "application/json", "{}".to_owned()),
                        ];
                        for (path, kind, body) in posts {
                            let mut headers = headers.clone();
                            headers.push(("content-type", kind));
                            client
                                .post(&format!("{url}{path}"), &headers, body)
                                .await
                                .unwrap();
                        }
                        let mut get = hyper::Request::get(format!("{url}/v1/models"));
                        for (name, value) in &headers {
                            get = get.header(*name, *value);
                        }
                        let got = client.request(get.body(full("")).unwrap()).await.unwrap();
                        let seen = got.header("x-seen-headers").unwrap();
                        assert!(!seen.contains(name), "{name} on a GET in {pool}: {seen}");
                        let received: Vec<_> = fleet
                            .replicas
                            .iter()
                            .flat_map(|replica| replica.requests())
                            .collect();
                        assert_eq!(received.len(), 4);
                        for request in received {
                            let steering = request
                                .headers
                                .iter()
                                .filter(|(sent, _)| sent == STEERING_HEADER || sent == OWN);
                            let steering: Vec<_> = steering.collect();
                            let is_ours =
                                pool != "dry" && pool != "unknown_to_warmroute" && request.path == CHAT;
                            assert_eq!(
                                steering.len(),
                                usize::from(is_ours),
                                "{name} in {pool}: {request:?}"
                            );
                            for (_, value) in steering {
                                assert!(!value.contains(foreign), "{name} in {pool}: {value}");
                                assert_eq!(value.split(',').count(), 3, "{value}");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Something that is nowhere unless a client's text is; in the forms that it might be written in.
const MARKER: &str = "Zq7Vulpecula9Xk";

fn is_shown_in(text: &str) -> Option<String> {
    let hex: String = MARKER.bytes().map(|byte| format!("{byte:02x}")).collect();
    // Base64 of the marker at each of the three places it can have in a group, without the characters that depend on what
    // is around it.
    let base64 = ["WnE3VnVscGVjdWxh", "cTdWdWxwZWN1bGE5", "N1Z1bHBlY3VsYTlY"];
    let text = text.to_lowercase();
    [MARKER.to_owned(), hex]
        .into_iter()
        .chain(base64.map(str::to_owned))
        .find(|form| text.contains(&form.to_lowercase()))
}

/// Path, headers and body of a request.
type Marked = (String, Vec<(&'static str, String)>, String);

/// Requests with the marker in every place that a client can fill.
fn marked_requests() -> Vec<Marked> {
    let tools = json!([{"type": "function", "function": {"name": MARKER, "parameters": {MARKER: MARKER}}}]);
    let message = |content: Value| json!({"role": "user", "content": content});
    let bodies = [
        json!({"model": MARKER, "messages": [{"role": "system", "content": MARKER}, message(json!(MARKER))], "tools": tools,
            "cache_salt": MARKER, "lora_path": MARKER, "user": MARKER, "session_id": MARKER, "prompt_cache_key": MARKER}),
        json!({"model": "sim", "messages": [message(json!([{"type": MARKER, MARKER: MARKER}]))]}),
        json!({"model": "sim", "messages": [message(json!({MARKER: MARKER}))]}),
        json!({"model": {MARKER: MARKER}, "messages": MARKER, MARKER: MARKER}),
    ];
    let mut bodies: Vec<String> = bodies.iter().map(Value::to_string).collect();
    let whole = bodies[0].clone();
    bodies.push(whole.split_at(whole.len() - 9).0.to_owned());
    bodies.push(whole.replace(MARKER, &format!("{MARKER}\\u12")));
    bodies.push(whole.replace("\"sim\"", MARKER));
    bodies.push(format!(
        "{{\"model\":\"{MARKER}\",\"model\":\"{MARKER}\",\"messages\":[]}}"
    ));
    bodies.push(format!(
        "{{\"{MARKER}\":1,\"tools\":{}\"{MARKER}\"{}}}",
        "[".repeat(200),
        "]".repeat(200)
    ));
    bodies.push(chat(&text(MARKER, 900_000)));
    bodies.push(MARKER.to_owned());
    let headers = |path: &str, kind: &str| {
        let mut headers = vec![
            ("x-tenant", MARKER.to_owned()),
            ("x-warmroute-key", MARKER.to_owned()),
            ("x-served-by", MARKER.to_owned()),
            (STEERING_HEADER, MARKER.to_owned()),
            ("content-type", kind.to_owned()),
        ];
        // Where the session is told, it ranks what cannot be read.
        if path.contains('?') {
            headers.push(("x-session-id", MARKER.to_owned()));
        }
        headers
    };
    let mut requests = Vec::new();
    for body in bodies {
        for (path, kind) in [
            (CHAT.to_owned(), "application/json".to_owned()),
            (format!("{CHAT}?{MARKER}={MARKER}"), "application/json".to_owned()),
            ("/v1/completions".to_owned(), "application/json".to_owned()),
            (
                format!("/openai/deployments/{MARKER}/chat/completions"),
                "application/json".to_owned(),
            ),
            (CHAT.to_owned(), format!("text/{MARKER}")),
        ] {
            requests.push((path.clone(), headers(&path, &kind), body.clone()));
        }
    }
    requests
}

#[tokio::test]
async fn what_clients_send_is_in_no_log_no_metric_and_no_answer() {
    let folder = Folder::new().unwrap();
    let fleet = fleet(2).await;
    let mut settings = settings(&[POOL]);
    settings["prefix"] = json!({"tenant_header": "x-tenant"});
    let config = config(&fleet, &settings);
    let options = EnvoyOptions {
        concurrency: 1,
        component_log_level: "wasm:trace".to_owned(),
        ..EnvoyOptions::default()
    };
    assert!(is_shown_in(&format!("a {MARKER} b")).is_some());
    let requests = marked_requests();
    for envoy in envoys() {
        let gateway = Gateway::start_with(&envoy, &config, &options).await;
        gateway.shows("warmroute_hosts", POOL, 2).await;
        fleet.replicas.iter().for_each(|replica| replica.clear_requests());
        for (path, headers, body) in &requests {
            let headers: Vec<(&str, &str)> = headers
                .iter()
                .map(|(name, value)| (*name, value.as_str()))
                .collect();
            let served = gateway.post(path, &headers, body.as_str()).await;
            for (name, value) in &served.answer.headers {
                let line = format!("{name}: {}", String::from_utf8_lossy(value.as_bytes()));
                if name.as_str().starts_with("x-warmroute") {
                    assert_eq!(is_shown_in(&line), None, "{line}");
                }
            }
        }
        // It did get to where it should.
        let received: Vec<_> = fleet
            .replicas
            .iter()
            .flat_map(|replica| replica.requests())
            .collect();
        assert_eq!(received.len(), requests.len());
        let hash = Sha256::digest(requests[0].2.as_bytes());
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(
            received
                .iter()
                .any(|request| request.body_sha256 == hash && request.model == MARKER)
        );
        assert!(
            received
                .iter()
                .all(|request| is_shown_in(&format!("{:?}", request.headers)).is_some())
        );

        // Workers tell what they counted at their next tick.
        assert!(
            gateway
                .stats()
                .await
                .contains_key("warmroute_unkeyed_total.reason.too_deep")
        );
        let log = gateway.process.log();
        assert!(
            log.contains("[trace][wasm]"),
            "the log is not as detailed as it is meant to be"
        );
        let (stats, prometheus) = (
            gateway.process.admin_get("/stats").await.unwrap().text(),
            gateway
                .process
                .admin_get("/stats/prometheus")
                .await
                .unwrap()
                .text(),
        );
        assert!(prometheus.contains("warmroute_decisions_total"));
        for (what, text) in [
            ("log", &log),
            ("/stats", &stats),
            ("/stats/prometheus", &prometheus),
        ] {
            let line = text.lines().find(|line| is_shown_in(line).is_some());
            assert_eq!(line, None, "{what} of {envoy}");
        }
        drop(gateway);

        // A VM that dies with the request in it.
        for export in ["proxy_on_response_headers", "proxy_on_log"] {
            let mut config = config.clone();
            let plugin = config.plugin.as_mut().unwrap();
            plugin.service = false;
            let trapping = folder.file(export);
            std::fs::write(&trapping, trap_in(&plugin.wasm, export).unwrap()).unwrap();
            plugin.wasm = trapping;
            let gateway = Gateway::start_with(&envoy, &config, &options).await;
            let (path, headers, body) = &requests[0];
            let headers: Vec<(&str, &str)> = headers
                .iter()
                .map(|(name, value)| (*name, value.as_str()))
                .collect();
            gateway.post(path, &headers, body.as_str()).await;
            eventually("the VM trapped", async || {
                gateway.process.log().contains("unreachable")
            })
            .await;
            let log = gateway.process.log();
            let line = log.lines().find(|line| is_shown_in(line).is_some());
            assert_eq!(line, None, "{export} on {envoy}");
        }
    }
}

/// A server that writes down the heads of requests and answers each by a function of it.
struct Recorder {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    fn start(answer: impl Fn(&str, SocketAddr, usize) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let heads = Arc::new(Mutex::new(Vec::new()));
        let (written, answer) = (Arc::clone(&heads), Arc::new(answer));
        // Ends with the process of the test: it blocks on nothing else.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (written, answer) = (Arc::clone(&written), Arc::clone(&answer));
                std::thread::spawn(move || {
                    let mut stream = stream;
                    let Some(head) = read_request(&mut stream) else {
                        return;
                    };
                    let number = {
                        let mut written = written.lock().unwrap();
                        written.push(head.clone());
                        written.len()
                    };
                    let _ = stream.write_all(answer(&head, address, number).as_bytes());
                });
            }
        });
        Self { address, heads }
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

/// Reads a request to its end and gives its head.
fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
            let lower = head.to_ascii_lowercase();
            let length = lower
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok());
            if bytes.len() >= end + 4 + length.unwrap_or(0) {
                return Some(head);
            }
        }
        let read = stream.read(&mut chunk).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&chunk[..read]);
    }
}

fn http_ok(headers: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n{body}",
        body.len()
    )
}

#[tokio::test]
async fn the_admin_interface_is_asked_for_clusters_and_nothing_else() {
    let fleet = fleet(2).await;
    for mode in ["service", "embedded"] {
        for envoy in envoys() {
            let mut clusters = format!("{POOL}::added_via_api::false\n");
            for address in fleet.addresses() {
                clusters.push_str(&format!("{POOL}::{address}::health_flags::healthy\n"));
            }
            let admin = Recorder::start(move |_, _, _| http_ok("", &clusters));
            let mut settings = settings(&[POOL]);
            settings["discovery"]["admin_cluster"] = json!("recorder");
            settings["companion"] = json!({"mode": mode});
            let mut config = config(&fleet, &settings);
            config.plugin.as_mut().unwrap().service = mode == "service";
            config.extra_clusters = vec![cluster_of("recorder", admin.address)];
            let gateway = Gateway::ready(&envoy, &config, 2, 2).await;
            gateway.chat(&[], chat("hello")).await.ok();
            eventually("the list is asked for again", async || admin.heads().len() >= 4).await;
            for head in admin.heads() {
                let line = head.lines().next().unwrap();
                assert_eq!(
                    line, "GET /clusters?filter=%5Ellm%24 HTTP/1.1",
                    "{mode} on {envoy}"
                );
            }
        }
    }
}

/// Metrics and answers that no honest engine gives, another one each time.
fn lie(head: &str, own: SocketAddr, number: usize) -> String {
    let forged = "x-served-by: 127.0.0.1:1\r\nx-served-by: 127.0.0.1:2\r\nx-warmroute-host: forged\r\n\
        x-warmroute-host: forged\r\nx-warmroute-key: forged\r\nx-warmroute-matched: 9/9\r\n";
    let absurd = ["0", "NaN", "-1e308", "1e308", "+Inf", "18446744073709551615"][number % 6];
    if head.starts_with("GET /metrics") {
        let falling = if number.is_multiple_of(2) { 1e15 } else { 3.0 };
        return http_ok(
            forged,
            &format!(
                "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc {absurd}\n\
                 vllm:prefix_cache_queries_total {falling}\nvllm:prefix_cache_hits_total 1e300\n\
                 process_start_time_seconds {number}\n"
            ),
        );
    }
    let huge = if number.is_multiple_of(7) {
        "x".repeat(10 << 20)
    } else {
        String::new()
    };
    let usage = format!(
        r#"{{"liar":"{own}","text":"{huge}","usage":{{"prompt_tokens":{absurd},"prompt_tokens_details":{{"cached_tokens":4294967295}}}}}}"#
    );
    http_ok(
        &format!("{forged}content-type: application/json\r\nx-replica: liar\r\n"),
        &usage,
    )
}

#[tokio::test]
async fn an_engine_that_forges_all_it_says_gets_its_share_and_breaks_nobody_elses_figures() {
    const PROMPTS: usize = 160;
    for envoy in envoys() {
        let fleet = fleet(3).await;
        let liar = Recorder::start(lie);
        let mut addresses = fleet.addresses();
        addresses.push(liar.address);
        let config = config_of(&settings(&[POOL]), vec![PoolConfig::new(POOL, addresses)]);
        let gateway = Gateway::ready(&envoy, &config, 1, 4).await;
        let bodies: Vec<String> = (0..PROMPTS)
            .map(|number| chat(&text(&format!("prompt {number}"), 8000)))
            .collect();
        let mut homes = Vec::new();
        for body in &bodies {
            let served = gateway.chat(&[], body.as_str()).await.ok();
            homes.push(served.host().to_owned());
            assert_ne!(served.header("x-warmroute-key"), "forged");
        }
        let at_liar = homes
            .iter()
            .filter(|home| **home == liar.address.to_string())
            .count();
        eprintln!("{envoy}: of {PROMPTS} prompts, {at_liar} went to the one of four engines that lies");
        assert!((1..=PROMPTS / 2).contains(&at_liar), "{at_liar} of {PROMPTS}");
        gateway.rescraped().await;
        for (body, home) in bodies
            .iter()
            .zip(&homes)
            .filter(|(_, home)| **home != liar.address.to_string())
        {
            let served = gateway.chat(&[], body.as_str()).await.ok();
            assert_eq!(served.host(), home);
            assert_eq!(at(&fleet, home).name(), served.replica());
            let (matched, all) = served.header("x-warmroute-matched").split_once('/').unwrap();
            assert_eq!(matched, all, "an honest engine's prompt is forgotten");
        }
        let stats = gateway.stats().await;
        assert_eq!(
            stats
                .get("warmroute_scrapes_total.result.misrouted")
                .copied()
                .unwrap_or(0),
            0,
            "{stats:#?}"
        );
        assert_eq!(
            stats.get("warmroute_host_failures_total").copied().unwrap_or(0),
            0
        );
        assert!(!gateway.process.log().contains("unreachable"));
    }
}

#[tokio::test]
async fn a_client_that_never_finishes_bodies_is_ended_by_request_timeout_and_holds_up_nobody() {
    const UPLOADS: usize = 300;
    let folder = Folder::new().unwrap();
    let fleet = fleet(2).await;
    for (number, envoy) in envoys().iter().enumerate() {
        let mut config = config(&fleet, &settings(&[POOL]));
        let mut listener = config.listener();
        listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
        listener["filter_chains"][0]["filters"][0]["typed_config"]["request_timeout"] = json!("6s");
        let lds = folder.file(format!("lds-{number}.json"));
        write_atomically(&lds, &json!({"resources": [listener]}).to_string()).unwrap();
        config.lds_path = Some(lds);
        let gateway = Gateway::ready(envoy, &config, 2, 2).await;
        let address = gateway.process.url().trim_start_matches("http://").to_owned();
        let started = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: 700000\r\n\r\n{}",
            chat(&text("unfinished", 70_000)).split_at(65_536).0
        );
        let mut uploads = Vec::new();
        for _ in 0..UPLOADS {
            let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
            stream.write_all(started.as_bytes()).await.unwrap();
            uploads.push(stream);
        }
        for number in 0..20 {
            gateway.chat(&[], chat(&format!("meanwhile {number}"))).await.ok();
        }
        for stream in &mut uploads {
            let mut answer = vec![0; 12];
            stream.read_exact(&mut answer).await.unwrap();
            assert_eq!(answer, b"HTTP/1.1 408");
        }
        assert_eq!(
            gateway.stat("warmroute_ended_while_held_total").await,
            UPLOADS as u64
        );
        assert_eq!(
            gateway
                .stat(&format!("warmroute_requests_in_flight.pool.{POOL}"))
                .await,
            0
        );
        assert_eq!(gateway.decisions().await.values().sum::<u64>(), 20);
    }
}

#[tokio::test]
async fn names_that_clients_invent_make_no_metric_and_tenants_cannot_be_chosen() {
    const NAMES: usize = 1500;
    let fleet = fleet(2).await;
    let mut settings = settings(&[POOL]);
    settings["prefix"] = json!({"tenant_header": "x-tenant"});
    let config = config(&fleet, &settings);
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 1, 2).await;
        let key = async |tenants: &[&str]| {
            let headers: Vec<(&str, &str)> = tenants.iter().map(|tenant| ("x-tenant", *tenant)).collect();
            let served = gateway
                .chat(&headers, chat(&text("shared by all", 6000)))
                .await
                .ok();
            let header = |name| served.header(name).to_owned();
            (header("x-warmroute-key"), header("x-warmroute-matched"))
        };
        // The gateway's own line is the last: a client's before it must make neither another tenant nor none of it.
        let (of_a, _) = key(&["a"]).await;
        let mut seen = BTreeSet::from([of_a]);
        for tenants in [vec!["b"], vec!["a", "b"], vec!["", "b"], vec!["b", "a"], vec![]] {
            let (key, matched) = key(&tenants).await;
            assert!(seen.insert(key), "{tenants:?} is taken for another");
            assert!(
                matched.starts_with("0/"),
                "{tenants:?} sees what others sent: {matched}"
            );
        }

        let names = async || {
            let stats = gateway.process.stats("").await.unwrap();
            stats.into_keys().collect::<BTreeSet<_>>()
        };
        let before = names().await;
        for number in 0..NAMES {
            let body = json!({"model": format!("m{number}"), "lora_path": format!("l{number}"), "cache_salt": format!("c{number}"),
                "session_id": format!("s{number}"), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
            let name = format!("n{number}");
            gateway
                .chat(&[("x-tenant", &name), ("x-session-id", &name)], body.to_string())
                .await;
        }
        let new: Vec<String> = names()
            .await
            .difference(&before)
            .filter(|name| name.contains("warmroute"))
            .cloned()
            .collect();
        // A reason may come up for the first time; a name of a client's never.
        let is_known = |name: &String| !name.bytes().any(|byte| byte.is_ascii_digit());
        assert!(new.len() < 8 && new.iter().all(is_known), "{new:?}");
    }
}
