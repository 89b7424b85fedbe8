//! One strategy's set-up: a fleet of simulated replicas behind a real Envoy.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use serde_json::json;

use super::DemoError;
use super::args::PLAIN_ENVOY;
use crate::envoy::{Envoy, EnvoyOptions, EnvoyProcess};
use crate::envoy_config::{ADMIN_CLUSTER, EnvoyConfig, PluginConfig, PoolConfig};
use crate::fleet::{Fleet, FleetOptions};
use crate::process::workspace_root;
use crate::workload::{PlannedRequest, Workload};

/// A fleet behind an Envoy.
pub(super) struct Stand {
    strategy: String,
    // Dropped in this order: no request may find its replica gone.
    pub(super) envoy: EnvoyProcess,
    fleet: Fleet,
}

impl Stand {
    pub(super) async fn start(
        strategy: &str,
        workload: &Workload,
        envoy: &Envoy,
        wasm: Option<&Path>,
    ) -> Result<Self, DemoError> {
        let options = FleetOptions {
            replicas: workload.fleet.replicas,
            engine_model: Some(workload.engine()),
            ..FleetOptions::default()
        };
        let fleet = Fleet::start(&options)
            .await
            .map_err(|error| DemoError(format!("the fleet does not start: {error}")))?;
        let pool = PoolConfig::new(POOL, fleet.addresses());
        let filter = wasm.filter(|_| strategy != PLAIN_ENVOY);
        let config = match filter {
            Some(wasm) => EnvoyConfig::new(PluginConfig::new(wasm.to_owned(), plugin_json(strategy)), pool),
            None => EnvoyConfig::plain(pool),
        };
        let options = EnvoyOptions {
            concurrency: 2,
            ..EnvoyOptions::default()
        };
        let envoy = EnvoyProcess::start(envoy, &config.render(), &options)
            .await
            .map_err(|error| DemoError(error.to_string()))?;
        let stand = Self {
            strategy: strategy.to_owned(),
            envoy,
            fleet,
        };
        if filter.is_some() {
            stand.wait_for_companion().await;
        }
        Ok(stand)
    }

    /// Waits until every replica's metrics were read, which is when the load table is whole.
    async fn wait_for_companion(&self) {
        let deadline = Instant::now() + COMPANION_DEADLINE;
        while self
            .fleet
            .replicas
            .iter()
            .any(|replica| replica.metrics_reads() == 0)
        {
            if Instant::now() > deadline {
                eprintln!(
                    "{}: the companion has not read every replica's metrics; its log:",
                    self.strategy
                );
                eprintln!("{}", self.envoy.log());
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Processor time that Envoy and this process have used so far, seconds.
    pub(super) fn cpu_s(&self) -> Option<f64> {
        Some(cpu_s(self.envoy.id())? + cpu_s(std::process::id())?)
    }

    /// Says what a user can do with what is left running, given a request to try.
    pub(super) fn invitation(&self, sample: &PlannedRequest) -> io::Result<String> {
        let path = workspace_root().join("target/reports/try.json");
        fs::write(&path, &sample.body)?;
        let (url, admin) = (self.envoy.url(), self.envoy.admin());
        let mut text = format!(
            "\n`{strategy}` keeps running until Ctrl-C. Send the same prompt twice:\n\n  \
             curl -si {url}/v1/chat/completions -H 'content-type: application/json' --data-binary @{path}\n\n\
             and look at the response headers\n  \
             x-warmroute-host     where it went: the same host both times\n  \
             x-warmroute-reason   why\n  \
             x-warmroute-matched  bytes believed cached / prompt bytes\n  \
             x-warmroute-key      equal prompts, equal keys\n\
             and at cached_tokens in the event before the last.\n\n  \
             Envoy's admin        http://{admin}/\n  \
             filter's statistics  http://{admin}/stats?filter=warmroute\n  \
             Envoy's view of it   http://{admin}/clusters\n",
            strategy = self.strategy,
            path = path.display(),
        );
        for replica in &self.fleet.replicas {
            text.push_str(&format!(
                "  {:<20} http://{}/metrics\n",
                replica.name(),
                replica.address()
            ));
        }
        Ok(text)
    }
}

fn plugin_json(strategy: &str) -> String {
    let pool = json!({
        "discovery": {"admin_cluster": ADMIN_CLUSTER},
        "metrics": {"preset": "vllm", "interval_ms": 500},
    });
    json!({
        "strategy": strategy,
        "debug_headers": true,
        "pools": {POOL: pool},
        "companion": {"mode": "service"},
    })
    .to_string()
}

/// User and system time of a process so far, seconds, where Linux tells it.
fn cpu_s(process: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Fields 14 and 15 of proc(5), in hundredths of a second; the name in brackets may hold anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    let mut next = || fields.next()?.parse::<f64>().ok();
    Some((next()? + next()?) / 100.0)
}

const POOL: &str = "llm";
/// Compiling the module and some polling intervals.
const COMPANION_DEADLINE: Duration = Duration::from_secs(10);
