//! What a scenario is played on: a fleet and an Envoy, with or without the filter.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::FaultError;
use crate::client::Client;
use crate::engine::EngineConfig;
use crate::envoy::{Envoy, EnvoyOptions, EnvoyProcess};
use crate::envoy_config::{ADMIN_CLUSTER, EnvoyConfig, PluginConfig, PoolConfig, RouteConfig};
use crate::fleet::{Fleet, FleetOptions};
use crate::replica::Replica;
use crate::soak::memory::Memory;
use crate::wasm::build_wasm;

/// Whether there is a filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Envoy alone, balancing by `least_request`.
    Plain,
    /// Envoy with the filter.
    Filtered,
}

/// What Envoy does after a VM died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// `fail_open: true`, as in the shipped configuration.
    Shipped,
    /// `failure_policy: FAIL_OPEN`.
    FailOpen,
    /// `failure_policy: FAIL_RELOAD`.
    FailReload,
    /// `failure_policy: FAIL_CLOSED`.
    FailClosed,
}

impl Policy {
    /// All of them, the shipped one first.
    pub const ALL: &'static [Self] = &[Self::Shipped, Self::FailOpen, Self::FailReload, Self::FailClosed];
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shipped => "shipped",
            Self::FailOpen => "FAIL_OPEN",
            Self::FailReload => "FAIL_RELOAD",
            Self::FailClosed => "FAIL_CLOSED",
        })
    }
}

/// What one run of a scenario is given.
#[derive(Debug, Clone)]
pub struct Stand {
    /// The Envoy to start.
    pub envoy: Envoy,
    /// Whether with the filter.
    pub side: Side,
    /// Failure policy of the filter.
    pub policy: Policy,
    /// Whether the short form is played.
    pub is_short: bool,
    /// The shipped module.
    pub wasm: PathBuf,
}

impl Stand {
    pub(super) fn new(envoy: Envoy, side: Side, policy: Policy, is_short: bool) -> Result<Self, FaultError> {
        Ok(Self {
            envoy,
            side,
            policy,
            is_short,
            wasm: build_wasm()?,
        })
    }

    /// Whether the filter is there.
    pub fn is_filtered(&self) -> bool {
        self.side == Side::Filtered
    }

    /// How long to go on: the first in the long form, the second in the short one.
    pub fn long_or_short(&self, long: Duration, short: Duration) -> Duration {
        if self.is_short { short } else { long }
    }

    /// Replicas with these engines.
    ///
    /// # Errors
    /// When no port can be bound.
    pub async fn fleet(&self, replicas: usize, engine: EngineConfig) -> Result<Fleet, FaultError> {
        let options = FleetOptions {
            replicas,
            engine,
            ..FleetOptions::default()
        };
        Ok(Fleet::start(&options).await?)
    }

    /// The plugin's settings for one pool, as shipped but with debug headers and a companion that asks twice a second.
    pub fn settings(&self) -> Value {
        json!({
            "debug_headers": true,
            "discovery": {"admin_cluster": ADMIN_CLUSTER, "interval_ms": 500},
            "metrics": {"interval_ms": POLL.as_millis(), "timeout_ms": POLL.as_millis()},
            "pools": {POOL: {}},
        })
    }

    /// The shipped Envoy before one pool, with retries as shipped. On the plain side the filter is taken out of it by
    /// [`Stand::start`], so a scenario changes what both sides have in common here.
    pub fn config(&self, pool: PoolConfig, settings: &Value) -> EnvoyConfig {
        let mut plugin = PluginConfig::new(self.wasm.clone(), settings.to_string());
        plugin.failure_policy = match self.policy {
            Policy::Shipped => None,
            policy => Some(policy.to_string()),
        };
        let mut config = EnvoyConfig::new(plugin, pool);
        config.routes = vec![shipped_route()];
        config
    }

    /// The shipped Envoy before this fleet.
    pub fn config_of(&self, fleet: &Fleet) -> EnvoyConfig {
        self.config(PoolConfig::new(POOL, fleet.addresses()), &self.settings())
    }

    /// Starts it with two workers, and waits until the companion has read every replica, if there is one.
    ///
    /// # Errors
    /// When Envoy does not start or the companion never gets ready.
    pub async fn ready(&self, config: &EnvoyConfig, hosts: usize) -> Result<Gateway, FaultError> {
        let gateway = self.start(config, 2).await?;
        if self.is_filtered() {
            gateway.shows("warmroute_hosts", hosts as u64).await?;
            gateway.rescraped(hosts as u64).await?;
        }
        Ok(gateway)
    }

    /// Starts it.
    ///
    /// # Errors
    /// When Envoy does not start.
    pub async fn start(&self, config: &EnvoyConfig, concurrency: u32) -> Result<Gateway, FaultError> {
        let options = EnvoyOptions {
            concurrency,
            ..EnvoyOptions::default()
        };
        self.start_with(config, &options).await
    }

    /// Starts it with other options.
    ///
    /// # Errors
    /// When Envoy does not start.
    pub async fn start_with(
        &self,
        config: &EnvoyConfig,
        options: &EnvoyOptions,
    ) -> Result<Gateway, FaultError> {
        let config = self.sided(config);
        let process = EnvoyProcess::start(&self.envoy, &config.render(), options).await?;
        Ok(Gateway {
            process,
            client: Client::new().with_deadline(DEADLINE),
        })
    }

    /// This config on this side: without filter and steering on the plain one. Files that are pushed go through it too.
    pub fn sided(&self, config: &EnvoyConfig) -> EnvoyConfig {
        let mut config = config.clone();
        if !self.is_filtered() {
            config.plugin = None;
            for pool in &mut config.pools {
                pool.override_host = false;
            }
        }
        config
    }
}

/// The route of the shipped configuration.
fn shipped_route() -> RouteConfig {
    let mut route = RouteConfig::to(POOL);
    route.retries = 0;
    route.extra = json!({"retry_policy": {
        "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 2,
    }});
    route
}

/// A running Envoy.
pub struct Gateway {
    /// Envoy.
    pub process: EnvoyProcess,
    /// A client that keeps its connections.
    pub client: Client,
}

impl Gateway {
    /// Where chats are posted.
    pub fn chat_url(&self) -> String {
        format!("{}{CHAT}", self.process.url())
    }

    /// All counters and gauges of the filter, by their names without Envoy's prefix.
    ///
    /// # Errors
    /// When the admin interface does not answer.
    pub async fn stats(&self) -> Result<BTreeMap<String, u64>, FaultError> {
        Ok(self.process.filter_stats().await?)
    }

    /// One of them; 0 while it does not exist.
    ///
    /// # Errors
    /// When the admin interface does not answer.
    pub async fn stat(&self, name: &str) -> Result<u64, FaultError> {
        Ok(self.stats().await?.get(name).copied().unwrap_or(0))
    }

    /// Memory that Envoy has in use, all of its threads and VMs, kB.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn resident_kb(&self) -> io::Result<u64> {
        Ok(Memory::of(self.process.id())?.resident_kib)
    }

    /// Waits until a gauge of the pool has this value.
    ///
    /// # Errors
    /// When it never has.
    pub async fn shows(&self, gauge: &str, value: u64) -> Result<(), FaultError> {
        let name = format!("{gauge}.pool.{POOL}");
        eventually(&format!("{name} = {value}"), async || {
            Ok(self.stat(&name).await? == value)
        })
        .await
        .map(drop)
    }

    /// Waits until each of so many hosts was scraped once more and the samples may have been read.
    ///
    /// # Errors
    /// When that never happens.
    pub async fn rescraped(&self, hosts: u64) -> Result<(), FaultError> {
        let wanted = self.stat(SCRAPES_OK).await? + 2 * hosts + 2;
        eventually("every host is scraped", async || {
            Ok(self.stat(SCRAPES_OK).await? >= wanted)
        })
        .await
        .map(drop)
    }
}

/// Number of the replica that received the most requests: the one that is missed most, and never one that happens to be
/// nobody's home.
pub(super) fn busiest(fleet: &Fleet) -> usize {
    let posts = fleet.replicas.iter().map(Replica::posts_received).enumerate();
    posts
        .max_by_key(|(_, posts)| *posts)
        .map_or(0, |(number, _)| number)
}

/// Waits for a condition and tells how long that took.
///
/// # Errors
/// When it does not come true in time, or cannot be looked at.
pub(super) async fn eventually(
    what: &str,
    mut condition: impl AsyncFnMut() -> Result<bool, FaultError>,
) -> Result<Duration, FaultError> {
    let start = Instant::now();
    while !condition().await? {
        if start.elapsed() > DEADLINE {
            return Err(FaultError::Never(what.to_owned()));
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(start.elapsed())
}

/// The only pool.
pub(super) const POOL: &str = "llm";
/// Where chats are sent.
pub(super) const CHAT: &str = "/v1/chat/completions";
/// How often each host is scraped; the "poll" of the bars.
pub(super) const POLL: Duration = Duration::from_millis(500);
/// Counter of good scrapes.
pub(super) const SCRAPES_OK: &str = "warmroute_scrapes_total.result.ok";
/// Longer than anything here takes on a busy machine.
pub(super) const DEADLINE: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_millis(20);
