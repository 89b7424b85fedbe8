//! Real Envoys with the filter in front of a simulated fleet: what every end-to-end test starts from.
//!
//! In: a fleet, the plugin's settings, an Envoy. Out: a [`Gateway`] that can be asked, waited for and counted. Where a client
//! can see what it waits for, it waits for that, until a deadline that only a hang reaches; elsewhere it lets the machine
//! run for a while.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each test binary compiles all of this and uses a part of it"
)]
#![allow(
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do, and read a clock for their deadlines"
)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warmroute_fleet::client::{Answer, Client};
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy::{self, Envoy, EnvoyOptions, EnvoyProcess, Requirement};
use warmroute_fleet::envoy_config::{ADMIN_CLUSTER, EnvoyConfig, PluginConfig, PoolConfig, RouteConfig};
use warmroute_fleet::fleet::{Fleet, FleetOptions};
use warmroute_fleet::patience::let_run;
use warmroute_fleet::replica::Replica;
use warmroute_fleet::wasm::build_wasm;

pub use warmroute_fleet::envoy::Folder;
pub use warmroute_fleet::workload::{enough_for, text};

/// Name of the pool where a test needs only one.
pub const POOL: &str = "llm";
/// Where chats are sent.
pub const CHAT: &str = "/v1/chat/completions";
/// Request header by which [`routes_by_header`] chooses the cluster.
pub const POOL_HEADER: &str = "x-pool";

/// The Envoys under test, oldest first.
pub fn envoys() -> [Envoy; 2] {
    [Requirement::Oldest, Requirement::Newest]
        .map(|requirement| envoy::find(requirement).unwrap_or_else(|error| panic!("{error}")))
}

/// The filter, built anew if need be.
pub fn wasm() -> PathBuf {
    build_wasm().unwrap_or_else(|error| panic!("{error}"))
}

/// Replicas that answer at once.
pub async fn fleet(replicas: usize) -> Fleet {
    fleet_of(replicas, EngineConfig::instant()).await
}

/// Replicas with engines of a certain speed.
pub async fn fleet_of(replicas: usize, engine: EngineConfig) -> Fleet {
    let options = FleetOptions {
        replicas,
        engine,
        ..FleetOptions::default()
    };
    Fleet::start(&options).await.unwrap()
}

/// The replica at an address.
pub fn at<'a>(fleet: &'a Fleet, address: &str) -> &'a Replica {
    fleet
        .replica(address)
        .unwrap_or_else(|| panic!("no replica at {address}"))
}

/// Settings of the plugin for the pools named, with debug headers and brisk polling, so that tests need not wait long.
pub fn settings(pools: &[&str]) -> Value {
    let pools: serde_json::Map<String, Value> =
        pools.iter().map(|pool| ((*pool).to_owned(), json!({}))).collect();
    json!({
        "debug_headers": true,
        "discovery": {"admin_cluster": ADMIN_CLUSTER, "interval_ms": 500},
        "metrics": {"interval_ms": SCRAPE_INTERVAL_MS, "timeout_ms": 500},
        "pools": pools,
    })
}

/// The shipped Envoy with one pool of all replicas.
pub fn config(fleet: &Fleet, settings: &Value) -> EnvoyConfig {
    config_of(settings, vec![PoolConfig::new(POOL, fleet.addresses())])
}

/// The shipped Envoy with several clusters.
pub fn config_of(settings: &Value, pools: Vec<PoolConfig>) -> EnvoyConfig {
    let plugin = PluginConfig::new(wasm(), settings.to_string());
    EnvoyConfig {
        plugin: Some(plugin),
        pools,
        ..EnvoyConfig::plain(PoolConfig::new("", Vec::new()))
    }
}

/// Routes that send a request to the cluster its [`POOL_HEADER`] names.
pub fn routes_by_header(clusters: &[&str]) -> Vec<RouteConfig> {
    clusters
        .iter()
        .map(|cluster| RouteConfig {
            header: Some((POOL_HEADER.to_owned(), (*cluster).to_owned())),
            ..RouteConfig::to(cluster)
        })
        .collect()
}

/// A running Envoy with the filter; its log's end is printed when a test fails.
pub struct Gateway {
    /// Envoy.
    pub process: EnvoyProcess,
    /// A client that keeps its connections.
    pub client: Client,
    name: String,
}

impl Gateway {
    /// Starts an Envoy and waits until it listens.
    pub async fn start(envoy: &Envoy, config: &EnvoyConfig, concurrency: u32) -> Self {
        let options = EnvoyOptions {
            concurrency,
            ..EnvoyOptions::default()
        };
        Self::start_with(envoy, config, &options).await
    }

    /// The same with other options.
    pub async fn start_with(envoy: &Envoy, config: &EnvoyConfig, options: &EnvoyOptions) -> Self {
        let process = EnvoyProcess::start(envoy, &config.render(), options)
            .await
            .unwrap_or_else(|error| panic!("{error}"));
        Self {
            process,
            client: Client::new().with_deadline(DEADLINE),
            name: envoy.to_string(),
        }
    }

    /// Starts an Envoy and waits until each pool's table has this many hosts, all of them scraped.
    pub async fn ready(envoy: &Envoy, config: &EnvoyConfig, concurrency: u32, hosts: u64) -> Self {
        let gateway = Self::start(envoy, config, concurrency).await;
        let plugin = config.plugin.as_ref().unwrap();
        let settings: Value = serde_json::from_str(&plugin.json).unwrap();
        for pool in settings["pools"].as_object().unwrap().keys() {
            gateway.shows("warmroute_hosts", pool, hosts).await;
        }
        gateway
    }

    /// Waits until a gauge of a pool's table has this value and the workers had the time to read that table.
    pub async fn shows(&self, gauge: &str, pool: &str, value: u64) {
        let name = format!("{gauge}.pool.{pool}");
        eventually(&format!("{}: {name} = {value}", self.name), async || {
            self.stats().await.get(&name) == Some(&value)
        })
        .await;
        self.rescraped().await;
    }

    /// Waits until every host of every pool may have been scraped once more, and the samples published.
    pub async fn rescraped(&self) {
        let before = self.stats().await;
        let hosts: u64 = before
            .iter()
            .filter(|(name, _)| name.starts_with("warmroute_hosts.pool."))
            .map(|(_, hosts)| hosts)
            .sum();
        // Scrapes are counted when their answers come and published 50 ms later at the latest, so two rounds are enough.
        let wanted = before.get(SCRAPES_OK).copied().unwrap_or(0) + 2 * hosts + 2;
        eventually(&format!("{}: {wanted} scrapes", self.name), async || {
            self.stat(SCRAPES_OK).await >= wanted
        })
        .await;
    }

    /// Posts a chat to the first listener.
    pub async fn chat(&self, headers: &[(&str, &str)], body: impl Into<String>) -> Served {
        self.post(CHAT, headers, body).await
    }

    /// Posts a body to a path of the first listener.
    pub async fn post(&self, path: &str, headers: &[(&str, &str)], body: impl Into<String>) -> Served {
        let url = format!("{}{path}", self.process.url());
        let answer = self.client.post(&url, headers, body.into()).await;
        Served {
            answer: answer.unwrap_or_else(|error| panic!("{}: {error}", self.name)),
        }
    }

    /// A chat that goes on in the background.
    pub fn chat_later(&self, headers: &[(&str, &str)], body: String) -> tokio::task::JoinHandle<Served> {
        let client = self.client.clone().with_deadline(HELD_DEADLINE);
        let url = format!("{}{CHAT}", self.process.url());
        let headers: Vec<(String, String)> = headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        tokio::spawn(async move {
            let headers: Vec<(&str, &str)> = headers
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            let answer = client.post(&url, &headers, body).await;
            Served {
                answer: answer.unwrap_or_else(|error| panic!("{error}")),
            }
        })
    }

    /// All counters and gauges of the filter, without Envoy's prefix.
    pub async fn stats(&self) -> BTreeMap<String, u64> {
        // Workers tell Envoy what they counted at their next tick.
        let_run(TICKS).await;
        let stats = self.process.filter_stats().await;
        stats.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// One of them; 0 while it does not exist.
    pub async fn stat(&self, name: &str) -> u64 {
        self.stats().await.get(name).copied().unwrap_or(0)
    }

    /// Decisions by reason, over all strategies.
    pub async fn decisions(&self) -> BTreeMap<String, u64> {
        let mut decisions = BTreeMap::new();
        for (name, count) in self.stats().await {
            let labels = name.strip_prefix("warmroute_decisions_total.strategy.");
            if let Some((_, reason)) = labels.and_then(|labels| labels.split_once(".reason.")) {
                *decisions.entry(reason.to_owned()).or_default() += count;
            }
        }
        decisions
    }

    /// How often a companion of this Envoy began to poll.
    pub fn takeovers(&self) -> usize {
        self.process.log().matches("polls now").count()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.process.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = &lines[lines.len().saturating_sub(TAIL_LINES)..];
            eprintln!("the log of {} ends with\n{}", self.name, tail.join("\n"));
        }
    }
}

/// An answer, and what its headers say of the decision.
#[derive(Debug)]
pub struct Served {
    /// The whole answer.
    pub answer: Answer,
}

impl Served {
    /// The answer's status was 200.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(
            self.answer.status,
            200,
            "{}\n{:?}",
            self.answer.text(),
            self.answer.headers
        );
        self
    }

    /// A header that has to be there, exactly once.
    #[track_caller]
    pub fn header(&self, name: &str) -> &str {
        let values: Vec<_> = self.answer.headers.get_all(name).iter().collect();
        assert_eq!(values.len(), 1, "{name} in {:?}", self.answer.headers);
        values[0].to_str().unwrap()
    }

    /// Name of the replica that answered.
    #[track_caller]
    pub fn replica(&self) -> &str {
        self.header("x-replica")
    }

    /// Address of the replica that was chosen.
    #[track_caller]
    pub fn host(&self) -> &str {
        self.header("x-warmroute-host")
    }

    /// Why it was chosen.
    #[track_caller]
    pub fn reason(&self) -> &str {
        self.header("x-warmroute-reason")
    }
}

/// A chat whose messages are these, from the user and the assistant in turn.
pub fn chat_of(messages: &[&str]) -> String {
    let messages: Vec<Value> = messages
        .iter()
        .zip(["user", "assistant"].iter().cycle())
        .map(|(content, role)| json!({"role": role, "content": content}))
        .collect();
    json!({"model": "sim", "messages": messages, "max_tokens": 1}).to_string()
}

/// A chat of one message.
pub fn chat(message: &str) -> String {
    chat_of(&[message])
}

/// The same chat, answered as a stream.
pub fn streamed(chat: &str) -> String {
    let mut body: Value = serde_json::from_str(chat).unwrap();
    body["stream"] = json!(true);
    body.to_string()
}

/// Waits for a condition.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition().await {
        assert!(Instant::now() < deadline, "never came true: {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Longer than anything a test waits for takes on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(40);
/// The same for a request that a test holds back while it waits for other things.
pub const HELD_DEADLINE: Duration = Duration::from_secs(240);
/// Some ticks of a worker, 100 ms each: nothing that a client sees marks them.
const TICKS: Duration = Duration::from_millis(300);
/// Pause between two looks at a condition.
pub const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// How often each host is scraped under [`settings`], ms.
pub const SCRAPE_INTERVAL_MS: u64 = 100;
/// Counter of good scrapes.
pub const SCRAPES_OK: &str = "warmroute_scrapes_total.result.ok";
const TAIL_LINES: usize = 60;
