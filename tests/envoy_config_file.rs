//! The committed `envoy/envoy.yaml`, as an operator runs it: Envoy takes it as it is, and with nothing but its ports
//! changed it makes requests stick.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

use warmroute_fleet::client::Client;
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy::{
    ADMIN_PORT_PLACEHOLDER, ENVOY_VERSIONS, EnvoyOptions, MINIMUM_VERSION, Requirement, find, validate,
};
use warmroute_fleet::fleet::{Fleet, FleetOptions};
use warmroute_fleet::process::workspace_root;
use warmroute_fleet::wasm::build_wasm;
use warmroute_fleet::workload::enough_for;

#[path = "support/bodies.rs"]
mod bodies;

use bodies::{
    CHAT, DEADLINE, RawClient, assert_intact, chat, chat_of, key, reason, show_log_of_failure, start_envoy,
    until,
};

on_both_envoys! {
    envoy_accepts_the_committed_file,
    the_committed_file_makes_requests_stick,
    the_committed_file_ends_an_upload_that_stalls,
}

/// How often each prompt is sent again.
const REPEATS: usize = 2;
/// Where the file expects the module, from the repository's root.
const COMMITTED_WASM: &str = "target/wasm32-wasip1/release/warmroute.wasm";

async fn envoy_accepts_the_committed_file(requirement: Requirement) {
    let envoy = find(requirement).unwrap_or_else(|error| panic!("{error}"));
    validate(&envoy, &committed_file()).unwrap_or_else(|error| panic!("{envoy}: {error}"));
    // What Envoy cannot take it does refuse.
    let broken = committed_file().replace("\"strategy\": \"hybrid\"", "\"strategy\": \"hybird\"");
    assert!(
        validate(&envoy, &broken).is_err(),
        "{envoy} accepts a bad strategy"
    );
}

async fn the_committed_file_makes_requests_stick(requirement: Requirement) {
    let (fleet, config) = fleet_and_file(EngineConfig::instant()).await;
    let envoy = started(requirement, &config).await;
    let client = Client::new().with_deadline(DEADLINE);
    let post = async |body: bytes::Bytes| {
        let answer = client
            .post(&format!("{}{CHAT}", envoy.0.url()), &[], body.clone())
            .await
            .unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_intact(&answer, &body, "the committed file");
        let chosen = fleet.replica(answer.header("x-warmroute-host").unwrap()).unwrap();
        assert_eq!(answer.header("x-replica"), Some(chosen.name()), "who served");
        // The scrapes need it, clients do not.
        assert_eq!(answer.header("x-served-by"), None);
        answer
    };
    until("the first scrapes", async || {
        let name = "wasmcustom.warmroute_scrapes_total";
        let stats = envoy.0.stats(name).await.unwrap();
        let of = |result: &str| {
            stats
                .get(&format!("{name}.result.{result}"))
                .copied()
                .unwrap_or(0)
        };
        assert_eq!((of("misrouted"), of("failed")), (0, 0), "{stats:?}");
        (of("ok") >= 4).then_some(())
    })
    .await;

    let mut hosts = Vec::new();
    for number in 0..enough_for(2) {
        let body = chat(&format!("You are assistant number {number}."));
        let first = post(body.clone()).await;
        assert_eq!(reason(&first), "home");
        for _ in 0..REPEATS {
            let again = post(body.clone()).await;
            assert_eq!(reason(&again), "home");
            assert_eq!(key(&again), key(&first));
            assert_eq!(again.header("x-warmroute-host"), first.header("x-warmroute-host"));
        }
        hosts.push(first.header("x-warmroute-host").unwrap().to_owned());
    }
    hosts.sort_unstable();
    hosts.dedup();
    assert_eq!(hosts.len(), 2, "prompts spread over both replicas");
    let seen = fleet.replicas.iter().flat_map(|replica| replica.requests());
    assert!(
        seen.flat_map(|request| request.headers)
            .all(|(name, _)| name != "x-gateway-destination-endpoint"),
        "the engines do not see the steering header"
    );
    post(chat_of("A long one.", 3 << 20)).await;

    let sent = enough_for(2) * (1 + REPEATS) + 1;
    let wanted = format!("warmroute_decisions_total{{strategy=\"hybrid\",reason=\"home\"}} {sent}");
    let metrics = until("the decisions with their labels", async || {
        let metrics = envoy.0.admin_get("/stats/prometheus").await.unwrap().text();
        metrics.lines().any(|line| line == wanted).then_some(metrics)
    })
    .await;
    for start in [
        "warmroute_hosts{pool=\"llm\"} 2",
        "warmroute_scrapes_total{result=\"ok\"} ",
        "warmroute_decision_us_bucket{le=",
    ] {
        let is_there = metrics.lines().any(|line| line.starts_with(start));
        assert!(is_there, "no {start} in\n{}", ours(&metrics));
    }
}

async fn the_committed_file_ends_an_upload_that_stalls(requirement: Requirement) {
    // Twenty tokens take two seconds.
    let engine = EngineConfig {
        decode_us_per_token: 100_000,
        ..EngineConfig::instant()
    };
    let (_fleet, config) = fleet_and_file(engine).await;
    // Nobody waits for five minutes here.
    let committed = "request_timeout: 300s";
    assert_eq!(config.matches(committed).count(), 1);
    let config = config.replace(committed, "request_timeout: 1s");
    let envoy = started(requirement, &config).await;
    let address = envoy.0.listener("llm").unwrap();
    let body = chat("Half of this never comes.");
    let mut stalled = RawClient::connect(address).await;
    stalled.send_head(CHAT, Some(body.len()), "").await;
    stalled.send(&body[..body.len() / 2]).await;
    assert_eq!(stalled.answer().await.status, 408);
    // Not so one whose answer takes longer.
    let slow = r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":20}"#;
    let mut slowly = RawClient::connect(address).await;
    slowly.send_head(CHAT, Some(slow.len()), "").await;
    slowly.send(slow.as_bytes()).await;
    assert_eq!(slowly.answer().await.status, 200);
}

#[test]
fn the_labels_are_those_that_the_readme_shows() {
    let tags = |path: &str| -> Vec<String> {
        let text = std::fs::read_to_string(workspace_root().join(path)).unwrap();
        let lines = text.lines().filter(|line| line.contains("{tag_name: "));
        lines.map(|line| line.trim().to_owned()).collect()
    };
    assert_eq!(tags("envoy/envoy.yaml"), tags("envoy/README.md"));
    assert_eq!(tags("envoy/envoy.yaml").len(), 4);
}

#[test]
fn the_version_for_func_e_is_the_newest_under_test() {
    let version = std::fs::read_to_string(workspace_root().join("envoy/.envoy-version")).unwrap();
    let version = version.trim();
    assert_eq!(Some(&version), ENVOY_VERSIONS.last());
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap());
    let pair = (numbers.next().unwrap(), numbers.next().unwrap());
    assert!(pair >= MINIMUM_VERSION, "{version}");
    // func-e looks for the file where it is run.
    let at_root = std::fs::read_to_string(workspace_root().join(".envoy-version")).unwrap();
    assert_eq!(at_root.trim(), version);
}

/// Two replicas, and the file with nothing but its ports changed, so that it leads to them.
async fn fleet_and_file(engine: EngineConfig) -> (Fleet, String) {
    let options = FleetOptions {
        replicas: 2,
        engine,
        ..FleetOptions::default()
    };
    let fleet = Fleet::start(&options).await.unwrap();
    let ports: Vec<String> = fleet
        .addresses()
        .iter()
        .map(|address| address.port().to_string())
        .collect();
    let mut config = committed_file();
    for (committed, count, ours) in [
        ("port_value: 9901", 2, ADMIN_PORT_PLACEHOLDER),
        ("port_value: 10000", 1, "0"),
        ("port_value: 8001", 1, ports[0].as_str()),
        ("port_value: 8002", 1, ports[1].as_str()),
    ] {
        assert_eq!(config.matches(committed).count(), count, "{committed}");
        config = config.replace(committed, &format!("port_value: {ours}"));
    }
    (fleet, config)
}

async fn started(requirement: Requirement, config: &str) -> ShownOnFailure {
    let options = EnvoyOptions {
        concurrency: 1,
        ..EnvoyOptions::default()
    };
    ShownOnFailure(start_envoy(requirement, config, &options).await)
}

/// The file with the module that this build made, wherever cargo keeps it.
fn committed_file() -> String {
    let text = std::fs::read_to_string(workspace_root().join("envoy/envoy.yaml")).unwrap();
    assert_eq!(text.matches(&format!("filename: {COMMITTED_WASM}")).count(), 2);
    let wasm = build_wasm().unwrap_or_else(|error| panic!("{error}"));
    assert!(
        wasm.ends_with("wasm32-wasip1/release/warmroute.wasm"),
        "{}",
        wasm.display()
    );
    text.replace(
        &format!("filename: {COMMITTED_WASM}"),
        &format!("filename: {}", wasm.display()),
    )
}

fn ours(metrics: &str) -> String {
    let lines: Vec<&str> = metrics
        .lines()
        .filter(|line| line.contains("warmroute"))
        .collect();
    lines.join("\n")
}

struct ShownOnFailure(warmroute_fleet::envoy::EnvoyProcess);

impl Drop for ShownOnFailure {
    fn drop(&mut self) {
        show_log_of_failure(&self.0);
    }
}
