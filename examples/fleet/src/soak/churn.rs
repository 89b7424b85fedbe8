//! Days of traffic in minutes: hosts come and go, clients leave, configurations are pushed, and nothing may be lost.
//!
//! Sixteen of twenty-four replicas stand behind an Envoy with the filter and behind a plain one with `least_request`. Each
//! few seconds some leave the endpoints and others join them; who leaves goes on serving what it has, as a pod that is
//! told to stop does, so no request has a reason to fail. A part of the requests goes to the plain Envoy as well, under
//! the same churn and the same pushes: what fails there is not the filter's doing.
//!
//! While it runs, the tallies that Envoy shows are compared with what is under way. At the end each request that Envoy
//! saw must be accounted for once: decided, ended while its body was held, or of the kind that passes untouched.

mod seen;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use self::seen::Seen;
use super::memory::Memory;
use super::report::{Report, Sample, list};
use super::requests::{Mix, Planned, below};
use super::stand::{self, Failure, POOL};
use crate::client::Client;
use crate::engine::EngineConfig;
use crate::envoy::{Envoy, EnvoyProcess, Folder, write_atomically};
use crate::envoy_config::{EnvoyConfig, PluginConfig, PoolConfig};
use crate::fleet::{Fleet, FleetOptions};
use crate::wasm::build_wasm;
use crate::workload::Rng;

/// How long, and how hard.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The Envoy.
    pub envoy: Envoy,
    /// How long requests are sent.
    pub duration: Duration,
    /// How often some hosts are replaced.
    pub churn_every: Duration,
    /// How often a configuration is pushed.
    pub push_every: Duration,
    /// Number from which requests are drawn.
    pub seed: u64,
}

impl Plan {
    /// A run of that length: hosts every 2.5 s, a push each minute, or twice in a short run.
    pub fn of(envoy: Envoy, duration: Duration, seed: u64) -> Self {
        Self {
            envoy,
            duration,
            churn_every: Duration::from_millis(2500),
            push_every: Duration::from_secs(60).min(duration / 3),
            seed,
        }
    }
}

/// Runs it.
///
/// # Errors
/// When fleet or Envoys cannot be run.
pub async fn run(plan: &Plan) -> Result<Report, Failure> {
    let fleet = Fleet::start(&FleetOptions {
        replicas: REPLICAS,
        engine: EngineConfig {
            cache_blocks: 1 << 14,
            prefill_tokens_per_s: 4_000_000,
            decode_us_per_token: 1_000,
            max_running: 256,
        },
        ..FleetOptions::default()
    })
    .await?;
    let folder = Folder::new()?;
    let mut sides = [
        Side::new(&folder, "plain", None),
        Side::new(&folder, "filtered", Some(build_wasm()?)),
    ];
    let mut hosts = Hosts::new(fleet.addresses(), plan.seed);
    for side in &mut sides {
        side.push_hosts(hosts.present())?;
        side.push_config(0)?;
    }
    let plain = stand::start(&plan.envoy, &sides[0].config, WORKERS).await?;
    let filtered = stand::start(&plan.envoy, &sides[1].config, WORKERS).await?;
    stand::wait_for_hosts(&filtered, PRESENT as u64).await?;

    let started = Instant::now();
    let stop = Arc::new(AtomicBool::new(false));
    let next = Arc::new(AtomicU64::new(0));
    let mut senders = JoinSet::new();
    for _ in 0..SENDERS {
        let sender = Sender {
            plain: plain.url(),
            filtered: filtered.url(),
            next: Arc::clone(&next),
            stop: Arc::clone(&stop),
            seed: plan.seed,
        };
        senders.spawn(sender.run());
    }

    let (mut samples, mut watch) = (Vec::new(), Watch::default());
    let (mut next_churn, mut next_push) = (plan.churn_every, plan.push_every);
    let (mut churns, mut pushes) = (0u32, 0u32);
    while started.elapsed() < plan.duration {
        let elapsed = started.elapsed();
        if elapsed >= next_churn {
            next_churn += plan.churn_every;
            churns += 1;
            hosts.replace_some();
            for side in &mut sides {
                side.push_hosts(hosts.present())?;
            }
        }
        if elapsed >= next_push {
            next_push += plan.push_every;
            pushes += 1;
            for side in &mut sides {
                side.push_config(pushes)?;
            }
        }
        samples.push(Sample {
            at_s: elapsed.as_secs_f64(),
            requests: next.load(Ordering::Relaxed),
            memory: Memory::of(filtered.id())?,
        });
        watch.look(&filtered.filter_stats().await?);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut seen = Seen::default();
    while let Some(one) = senders.join_next().await {
        seen.add(one?);
    }

    let mut report = Report::new(format!(
        "hosts, clients and configurations come and go, {}",
        plan.envoy
    ));
    report.figure("seconds", plan.duration.as_secs());
    report.figure("seed", plan.seed);
    report.figure(
        "hosts present, and of them replaced",
        format!("{PRESENT}, {churns} times up to {REPLACED}"),
    );
    report.figure("configurations pushed", pushes);
    report.figure("requests through the filter", seen.filtered.sent);
    report.figure("requests through plain Envoy", seen.plain.sent);
    report.figure("left by their clients", seen.left);
    report.figure(
        "answers by status, with the filter",
        format!("{:?}", seen.filtered.statuses),
    );
    report.figure("answers by status, plain", format!("{:?}", seen.plain.statuses));
    report.check(
        "no request fails that plain Envoy would have served",
        seen.filtered.failed() <= seen.plain.failed_of(seen.filtered.sent),
        format!(
            "{} of {} failed, plain Envoy {} of {}{}",
            seen.filtered.failed(),
            seen.filtered.sent,
            seen.plain.failed(),
            seen.plain.sent,
            list(&seen.filtered.examples)
        ),
    );
    watch.judge(&mut report);
    at_rest(&filtered, &fleet, &seen, &mut report).await?;
    let log = filtered.log();
    report.check("no VM panicked", !log.contains("panicked"), "by Envoy's log");
    // In a short run a worker may meet its largest body late.
    let factor = if plan.duration < SHORT { 4 } else { 1 };
    report.check_flat(samples, factor * VM_SLACK_KIB, factor * RESIDENT_SLACK_KIB);
    Ok(report)
}

/// What must hold once no request is under way.
async fn at_rest(
    process: &EnvoyProcess,
    fleet: &Fleet,
    seen: &Seen,
    report: &mut Report,
) -> Result<(), Failure> {
    let is_idle = stand::wait_for("Envoy has ended every request", async || {
        let active = process.stats("http.llm.downstream_rq_active").await?;
        let fleet_is_idle = fleet.replicas.iter().all(|replica| replica.queue() == (0, 0));
        Ok(active.values().all(|active| *active == 0) && fleet_is_idle)
    })
    .await;
    report.check(
        "no request hangs",
        is_idle.is_ok(),
        "none is under way after the last client left",
    );
    let rests = stand::wait_for("tallies are 0", async || {
        let stats = process.filter_stats().await?;
        Ok(stats.get(IN_FLIGHT) == Some(&0) && stats.get(PREFILL) == Some(&0))
    })
    .await;
    let stats = process.filter_stats().await?;
    let gauge = |name: &str| stats.get(name).copied().unwrap_or(u64::MAX);
    report.check(
        "tallies are 0 at rest",
        rests.is_ok(),
        format!("{} requests, {} tokens", gauge(IN_FLIGHT), gauge(PREFILL)),
    );

    let received = process.stats("http.llm.downstream_rq_total").await?;
    let received: u64 = received.values().sum();
    let count = |name: &str| stand::sum_of(&stats, name);
    let decided = count("warmroute_decisions_total");
    let held = count("warmroute_ended_while_held_total");
    let refused = count("warmroute_held_body_refused_total");
    report.check(
        "every request is counted once",
        received == decided + held + refused + seen.passing,
        format!(
            "{received} received = {decided} decided + {held} ended while held + {refused} refused + {} passed untouched",
            seen.passing
        ),
    );
    let unkeyed = count("warmroute_unkeyed_total");
    report.check(
        "requests without a key are a part of those decided",
        unkeyed <= decided,
        format!("{unkeyed} of {decided}"),
    );
    let told: u64 = seen.reasons.values().sum();
    let short: Vec<&String> = seen
        .reasons
        .iter()
        .filter(|(reason, told)| {
            let suffix = format!(".reason.{reason}");
            let named = stats.iter().filter(|(name, _)| name.ends_with(&suffix));
            named.map(|(_, count)| count).sum::<u64>() < **told
        })
        .map(|(reason, _)| reason)
        .collect();
    report.check(
        "reasons sum to the requests, and clients were told the same",
        short.is_empty() && told <= decided && decided - told <= seen.left,
        format!(
            "{decided} counted, {told} told to clients, {} left before; {:?}",
            seen.left, seen.reasons
        ),
    );
    Ok(())
}

/// The files of one Envoy.
struct Side {
    config: EnvoyConfig,
    eds: PathBuf,
    lds: PathBuf,
}

impl Side {
    fn new(folder: &Folder, name: &str, wasm: Option<PathBuf>) -> Self {
        let (eds, lds) = (
            folder.file(format!("{name}-eds.json")),
            folder.file(format!("{name}-lds.json")),
        );
        let pool = PoolConfig {
            eds_path: Some(eds.clone()),
            override_host: wasm.is_some(),
            ..PoolConfig::new(POOL, Vec::new())
        };
        let config = EnvoyConfig {
            plugin: wasm.map(|wasm| PluginConfig::new(wasm, stand::settings().to_string())),
            lds_path: Some(lds.clone()),
            ..EnvoyConfig::plain(pool)
        };
        Self { config, eds, lds }
    }

    fn push_hosts(&self, hosts: &[SocketAddr]) -> Result<(), Failure> {
        Ok(write_atomically(
            &self.eds,
            &self.config.pools[0].endpoints_file(hosts),
        )?)
    }

    /// Pushes a configuration that differs from the last one.
    fn push_config(&mut self, number: u32) -> Result<(), Failure> {
        match &mut self.config.plugin {
            Some(plugin) => {
                let mut settings = stand::settings();
                settings["table_fresh_ms"] = json!(3000 + number);
                plugin.json = settings.to_string();
            }
            None => self.config.connection_buffer_limit_bytes = Some((16 << 20) + u64::from(number)),
        }
        Ok(write_atomically(&self.lds, &self.config.listeners_file())?)
    }
}

/// Which replicas are endpoints.
struct Hosts {
    /// The first [`PRESENT`] are.
    order: Vec<SocketAddr>,
    random: Rng,
}

impl Hosts {
    fn new(order: Vec<SocketAddr>, seed: u64) -> Self {
        Self {
            order,
            random: Rng::new(seed),
        }
    }

    fn present(&self) -> &[SocketAddr] {
        &self.order[..PRESENT]
    }

    fn replace_some(&mut self) {
        for _ in 0..1 + below(&mut self.random, REPLACED) {
            let leaves = below(&mut self.random, PRESENT as u64) as usize;
            let joins = PRESENT + below(&mut self.random, (REPLICAS - PRESENT) as u64) as usize;
            self.order.swap(leaves, joins);
        }
    }
}

/// The tallies as Envoy showed them.
#[derive(Debug, Default)]
struct Watch {
    looks: u64,
    most_requests: u64,
    most_tokens: u64,
}

impl Watch {
    fn look(&mut self, stats: &BTreeMap<String, u64>) {
        self.looks += 1;
        let gauge = |name: &str| stats.get(name).copied().unwrap_or(0);
        self.most_requests = self.most_requests.max(gauge(IN_FLIGHT));
        self.most_tokens = self.most_tokens.max(gauge(PREFILL));
    }

    /// Below zero a gauge would wrap to 2⁶⁴. Journals are not of one moment, so a request may be seen on the worker that
    /// just ended it and the next one of its sender on another.
    fn judge(&self, report: &mut Report) {
        let most = 2 * SENDERS as u64;
        report.check(
            "tallies are never below 0, and never more than is under way",
            (1..=most).contains(&self.most_requests) && self.most_tokens < most << 20,
            format!(
                "{} looks: at most {} requests of {SENDERS} senders and {} tokens",
                self.looks, self.most_requests, self.most_tokens
            ),
        );
    }
}

/// One client after the other, each with connections of its own.
struct Sender {
    plain: String,
    filtered: String,
    next: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    seed: u64,
}

/// How a client leaves.
#[derive(Debug, Clone, Copy)]
enum Leaves {
    InBody,
    Waiting,
    Streaming,
}

impl Sender {
    async fn run(self) -> Seen {
        let mix = Mix {
            seed: self.seed,
            least_bytes: 1 << 10,
            most_bytes: 1 << 20,
            for_replicas: true,
        };
        let mut seen = Seen::default();
        let mut clients = None;
        while !self.stop.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let planned = mix.request(number);
            let mut random = Rng::new(self.seed ^ !number);
            if clients.is_none() || below(&mut random, CLIENT_LASTS) == 0 {
                clients = Some((Client::new(), Client::http2()));
            }
            let Some((http1, http2)) = &clients else { continue };
            let client = if planned.wire.is_http2() { http2 } else { http1 };
            seen.filtered.sent += 1;
            seen.passing += u64::from(!planned.is_decided());
            let leaves = match below(&mut random, 60) {
                _ if !planned.is_decided() => None,
                0 => Some(Leaves::InBody),
                1 => Some(Leaves::Waiting),
                2 => Some(Leaves::Streaming),
                _ => None,
            };
            match leaves {
                Some(leaves) => {
                    seen.left += 1;
                    self.send_and_leave(leaves, client, &planned, &mut random).await;
                }
                None => {
                    let reason = seen.filtered.send(client, &planned, &self.filtered).await;
                    if let Some(reason) = reason {
                        *seen.reasons.entry(reason).or_default() += 1;
                    }
                }
            }
            if leaves.is_none() && number.is_multiple_of(PLAIN_EVERY) {
                seen.plain.sent += 1;
                seen.plain.send(client, &planned, &self.plain).await;
            }
        }
        seen
    }

    /// Sends a part of an exchange; whatever becomes of it is fine.
    async fn send_and_leave(&self, leaves: Leaves, client: &Client, planned: &Planned, random: &mut Rng) {
        match leaves {
            Leaves::InBody => {
                let address = self.filtered.trim_start_matches("http://");
                let Ok(mut stream) = TcpStream::connect(address).await else {
                    return;
                };
                let head = format!(
                    "POST {} HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                    planned.path,
                    planned.body.len() + 1
                );
                let _ = stream.write_all(head.as_bytes()).await;
                let _ = stream.write_all(&planned.body[..planned.body.len() / 2]).await;
                tokio::time::sleep(Duration::from_millis(below(random, 8))).await;
            }
            Leaves::Waiting => {
                let Ok(request) = planned.to(&self.filtered) else {
                    return;
                };
                let patience = Duration::from_millis(1 + below(random, 16));
                let _ = tokio::time::timeout(patience, client.request(request)).await;
            }
            Leaves::Streaming => {
                let Ok(request) = planned.to(&self.filtered) else {
                    return;
                };
                if let Ok(mut answer) = client.send(request).await {
                    for _ in 0..random.below(3) {
                        let _ = answer.frame().await;
                    }
                }
            }
        }
    }
}

const REPLICAS: usize = 24;
/// Of them endpoints at a time.
const PRESENT: usize = 16;
/// Replaced at a time, at most.
const REPLACED: u64 = 4;
const WORKERS: u32 = 4;
const SENDERS: usize = 32;
/// Requests after which a sender takes new connections, on average.
const CLIENT_LASTS: u64 = 100;
/// Every so many requests go to the plain Envoy, too.
const PLAIN_EVERY: u64 = 4;
const LOOK_EVERY: Duration = Duration::from_millis(250);
const SHORT: Duration = Duration::from_secs(120);
/// A held body: one more at a time than ever before is no leak.
const VM_SLACK_KIB: u64 = 2048;
/// Envoy's allocator keeps or gives back a few megabytes as it likes.
const RESIDENT_SLACK_KIB: u64 = 4096;
const IN_FLIGHT: &str = "warmroute_requests_in_flight.pool.llm";
const PREFILL: &str = "warmroute_prefill_tokens_in_flight.pool.llm";
