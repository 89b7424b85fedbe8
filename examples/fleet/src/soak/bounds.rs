//! Many sizes and many pods before one Envoy with the filter: what grows with them, and must not.
//!
//! [`sizes`]: bodies of 1 KiB to 1 MiB, one after the other, and memory after each second. Linear memory of a VM never
//! shrinks, so whatever the filter once holds too much of stays. [`pods`]: endpoints that are replaced by others again
//! and again, and the names of all metrics, which Envoy never frees.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinSet;

use super::memory::Memory;
use super::report::{Report, Sample};
use super::requests::Mix;
use super::stand::{self, Failure, POOL};
use super::upstream::{Upstreams, reply};
use crate::client::Client;
use crate::envoy::{Envoy, EnvoyProcess, Folder, write_atomically};
use crate::envoy_config::{EnvoyConfig, PluginConfig, PoolConfig};
use crate::wasm::build_wasm;

/// What [`sizes`] sends.
#[derive(Debug, Clone)]
pub struct Sizes {
    /// The Envoy.
    pub envoy: Envoy,
    /// Requests.
    pub requests: u64,
    /// Number from which they are drawn.
    pub seed: u64,
}

/// What [`pods`] does.
#[derive(Debug, Clone)]
pub struct Pods {
    /// The Envoy.
    pub envoy: Envoy,
    /// Addresses in all, each used once.
    pub addresses: u32,
    /// Of them at a time.
    pub at_a_time: u32,
}

/// Sends bodies of 1 KiB to 1 MiB and looks at memory.
///
/// # Errors
/// When the Envoy cannot be run.
pub async fn sizes(plan: &Sizes) -> Result<Report, Failure> {
    let upstreams = Upstreams::start(UPSTREAMS).await?;
    let pool = PoolConfig::new(POOL, upstreams.addresses().to_vec());
    let plugin = PluginConfig::new(build_wasm()?, stand::settings().to_string());
    let process = stand::start(&plan.envoy, &EnvoyConfig::new(plugin, pool), WORKERS).await?;
    stand::wait_for_hosts(&process, UPSTREAMS as u64).await?;

    let mix = Mix {
        seed: plan.seed,
        least_bytes: 1 << 10,
        most_bytes: 1 << 20,
        for_replicas: false,
    };
    let (next, bytes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut senders = JoinSet::new();
    for _ in 0..SENDERS {
        let (next, bytes) = (Arc::clone(&next), Arc::clone(&bytes));
        let (url, requests) = (process.url(), plan.requests);
        senders.spawn(async move {
            let (http1, http2) = (Client::new(), Client::http2());
            let mut wrong = 0u64;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= requests {
                    return Ok::<_, Failure>(wrong);
                }
                let planned = mix.request(number);
                bytes.fetch_add(planned.body.len() as u64, Ordering::Relaxed);
                let client = if planned.wire.is_http2() { &http2 } else { &http1 };
                let answer = client.request(planned.to(&url)?).await?;
                let wanted = reply(&planned.method, &planned.path, &planned.body);
                wrong += u64::from(answer.status != wanted.status);
            }
        });
    }
    let samples = sample_until(&process, || {
        let sent = next.load(Ordering::Relaxed);
        (sent < plan.requests).then_some(sent)
    })
    .await?;
    let mut wrong = 0;
    while let Some(one) = senders.join_next().await {
        wrong += one??;
    }
    let mut report = Report::new(format!("bodies of 1 KiB to 1 MiB, {}", plan.envoy));
    report.figure("requests", plan.requests);
    report.figure("bytes of bodies", bytes.load(Ordering::Relaxed));
    report.figure("workers", WORKERS);
    report.check(
        "every answer is the right one",
        wrong == 0,
        format!("{wrong} are not"),
    );
    let vm_slack_kib = if plan.requests < SHORT_REQUESTS {
        2 * VM_SLACK_KIB
    } else {
        VM_SLACK_KIB
    };
    report.check_flat(samples, vm_slack_kib, RESIDENT_SLACK_KIB);
    Ok(report)
}

/// Replaces all endpoints by others, again and again, and looks at metric names and memory.
///
/// # Errors
/// When the Envoy cannot be run.
pub async fn pods(plan: &Pods) -> Result<Report, Failure> {
    let folder = Folder::new()?;
    let eds = folder.file("eds.json");
    let pool = PoolConfig {
        eds_path: Some(eds.clone()),
        ..PoolConfig::new(POOL, Vec::new())
    };
    let push = |round: u32| {
        let first = round * plan.at_a_time;
        let endpoints: Vec<SocketAddr> = (first..first + plan.at_a_time).map(nobody).collect();
        write_atomically(&eds, &pool.endpoints_file(&endpoints))
    };
    push(0)?;
    let mut settings = stand::settings();
    // The index takes its memory as keys come: the smallest is full before there is anything to compare.
    settings["index"] = json!({"memory_bytes": 256 << 10});
    let plugin = PluginConfig::new(build_wasm()?, settings.to_string());
    let process = stand::start(&plan.envoy, &EnvoyConfig::new(plugin, pool.clone()), WORKERS).await?;
    stand::wait_for_hosts(&process, plan.at_a_time.into()).await?;

    let started = Instant::now();
    let rounds = plan.addresses / plan.at_a_time;
    let mix = Mix {
        seed: 1,
        least_bytes: 1 << 10,
        most_bytes: 64 << 10,
        for_replicas: false,
    };
    let (mut samples, mut names_before, mut names) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    let mut asked = 0u64;
    for round in 1..rounds {
        push(round)?;
        // The next list but one was asked for after this push was there to be seen.
        let lists = async || {
            let stats = process.filter_stats().await?;
            Ok::<_, Failure>(stand::sum_of(&stats, "warmroute_discoveries_total.result.ok"))
        };
        let wanted = lists().await? + 2;
        stand::wait_for("the new endpoints are discovered", async || {
            Ok(lists().await? >= wanted)
        })
        .await?;
        // Nobody listens there: every host fails, which fills penalties and tallies of all of them.
        for _ in 0..REQUESTS_A_ROUND {
            let planned = mix.request(asked);
            asked += 1;
            if planned.is_decided() && !planned.wire.is_http2() {
                // A connection of its own, which the kernel hands to any worker.
                Client::new().request(planned.to(&process.url())?).await?;
            }
        }
        names = stat_names(&process).await?;
        if round == rounds / 4 {
            names_before.clone_from(&names);
        }
        samples.push(Sample {
            at_s: started.elapsed().as_secs_f64(),
            requests: asked,
            memory: Memory::of(process.id())?,
        });
    }
    let mut report = Report::new(format!(
        "endpoints replaced, {} at a time, {}",
        plan.at_a_time, plan.envoy
    ));
    report.figure("addresses", rounds * plan.at_a_time);
    report.figure("pushes", rounds);
    report.figure(
        "metric names of the filter",
        names.iter().filter(|name| name.starts_with(OURS)).count(),
    );
    let pods: Vec<&String> = names.iter().filter(|name| name.contains("127.1.")).collect();
    report.check(
        "no metric name has an address in it",
        pods.is_empty(),
        format!("{pods:?}"),
    );
    let ours = |names: &BTreeSet<String>| names.iter().filter(|name| !name.starts_with(OURS)).count();
    report.check(
        "Envoy has no more metric names than after a quarter of the pushes",
        ours(&names) <= ours(&names_before) && !names_before.is_empty(),
        format!("{} then, {} at the end", ours(&names_before), ours(&names)),
    );
    let odd: Vec<&String> = names
        .iter()
        .filter(|name| name.starts_with(OURS) && !is_closed(name))
        .collect();
    report.check(
        "every metric name of the filter is of the closed set",
        odd.is_empty(),
        format!("{odd:?}"),
    );
    report.check_flat(samples, VM_SLACK_KIB, RESIDENT_SLACK_KIB);
    Ok(report)
}

/// An address of this machine at which nobody listens: in 127.1.0.0/16, which no other part of the config uses.
fn nobody(number: u32) -> SocketAddr {
    let [_, high, middle, low] = number.to_be_bytes();
    SocketAddr::from((
        Ipv4Addr::new(127, 1 + high, middle, low.max(1)),
        if low == 0 { 8 } else { 9 },
    ))
}

/// Names of all metrics that Envoy has, used or not.
async fn stat_names(process: &EnvoyProcess) -> Result<BTreeSet<String>, Failure> {
    let text = process.admin_get("/stats").await?.text();
    let names = text
        .lines()
        .filter_map(|line| Some(line.split_once(": ")?.0.to_owned()));
    Ok(names.collect())
}

/// Whether a name is made of words alone, the values of its labels too.
fn is_closed(name: &str) -> bool {
    let name = name.trim_start_matches(OURS);
    let (metric, labels) = name.split_once('.').unwrap_or((name, ""));
    let labels: Vec<&str> = labels.split('.').filter(|label| !label.is_empty()).collect();
    let is_word = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let of_label = |pair: &[&str]| match pair {
        ["pool", pool] => *pool == POOL,
        ["strategy" | "reason" | "result", value] => is_word(value),
        _ => false,
    };
    metric.starts_with("warmroute_") && is_word(metric) && labels.chunks(2).all(of_label)
}

/// Samples the memory each so often while `progress` tells how many requests were sent.
pub(super) async fn sample_until(
    process: &EnvoyProcess,
    progress: impl Fn() -> Option<u64>,
) -> Result<Vec<Sample>, Failure> {
    let started = Instant::now();
    let mut samples = Vec::new();
    while let Some(requests) = progress() {
        samples.push(Sample {
            at_s: started.elapsed().as_secs_f64(),
            requests,
            memory: Memory::of(process.id())?,
        });
        tokio::time::sleep(SAMPLE_EVERY).await;
    }
    Ok(samples)
}

const UPSTREAMS: usize = 4;
const WORKERS: u32 = 2;
const SENDERS: usize = 16;
const REQUESTS_A_ROUND: u64 = 8;
const SAMPLE_EVERY: Duration = Duration::from_millis(250);
const OURS: &str = "wasmcustom.";
/// In a run this short the largest body may come late.
const SHORT_REQUESTS: u64 = 20_000;
/// A held body: one more at a time than ever before is no leak.
const VM_SLACK_KIB: u64 = 1024;
/// Envoy's allocator keeps or gives back a few megabytes as it likes.
const RESIDENT_SLACK_KIB: u64 = 8 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_names_have_words_for_labels() {
        for (name, closed) in [
            ("wasmcustom.warmroute_decision_us", true),
            (
                "wasmcustom.warmroute_decisions_total.strategy.hybrid.reason.home",
                true,
            ),
            ("wasmcustom.warmroute_hosts.pool.llm", true),
            ("wasmcustom.warmroute_hosts.pool.other", false),
            ("wasmcustom.warmroute_hosts.host.10_0_0_1", false),
            ("wasmcustom.warmroute_scrapes_total.result.ok7", false),
        ] {
            assert_eq!(is_closed(name), closed, "{name}");
        }
    }

    #[test]
    fn addresses_of_nobody_are_all_different() {
        let all: BTreeSet<SocketAddr> = (0..20_000).map(nobody).collect();
        assert_eq!(all.len(), 20_000);
    }
}
