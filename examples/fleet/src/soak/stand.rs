//! What every long run stands on: an Envoy that listens, its counters, and files that push configurations to it.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::envoy::{Envoy, EnvoyOptions, EnvoyProcess};
use crate::envoy_config::{ADMIN_CLUSTER, EnvoyConfig, LISTENER};

/// Why a run could not be made.
pub type Failure = Box<dyn Error + Send + Sync>;

/// Name of the one pool.
pub const POOL: &str = "llm";

/// The plugin's settings: as shipped, but that the companion asks so often that a run need not wait for it.
pub fn settings() -> Value {
    json!({
        "debug_headers": true,
        "discovery": {"admin_cluster": ADMIN_CLUSTER, "interval_ms": 500},
        "metrics": {"timeout_ms": 500},
        "pools": {POOL: {}},
    })
}

/// Starts an Envoy with that many workers.
///
/// # Errors
/// When it does not start or has no listener.
pub async fn start(envoy: &Envoy, config: &EnvoyConfig, workers: u32) -> Result<EnvoyProcess, Failure> {
    let options = EnvoyOptions {
        concurrency: workers,
        // What an old configuration leaves behind is gone within the run.
        extra_args: vec!["--drain-time-s".to_owned(), DRAIN_S.to_string()],
        ..EnvoyOptions::default()
    };
    let process = EnvoyProcess::start(envoy, &config.render(), &options).await?;
    process.listener(LISTENER).ok_or("Envoy has no listener")?;
    Ok(process)
}

/// Sum of the counters whose names begin so.
pub fn sum_of(stats: &BTreeMap<String, u64>, prefix: &str) -> u64 {
    let named = stats.iter().filter(|(name, _)| name.starts_with(prefix));
    named.map(|(_, value)| value).sum()
}

/// Waits until the companion's table has this many hosts.
///
/// # Errors
/// When it never does.
pub async fn wait_for_hosts(process: &EnvoyProcess, hosts: u64) -> Result<(), Failure> {
    let gauge = format!("warmroute_hosts.pool.{POOL}");
    wait_for(&format!("{gauge} = {hosts}"), async || {
        Ok(process.filter_stats().await?.get(&gauge) == Some(&hosts))
    })
    .await
}

/// Waits for a condition.
///
/// # Errors
/// When it cannot be judged or never holds.
pub async fn wait_for(
    what: &str,
    mut condition: impl AsyncFnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let deadline = Instant::now() + DEADLINE;
    while !condition().await? {
        if Instant::now() > deadline {
            return Err(format!("never came true: {what}").into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Envoy's default of 600 s would outlast the runs.
const DRAIN_S: u32 = 15;
/// Longer than anything takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);
