//! The demo: a fleet and an Envoy for each strategy in turn, the same traffic through each, one table in the end.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

use serde_json::json;

use crate::client::Client;
use crate::engine::EngineConfig;
use crate::envoy::{self, Envoy, EnvoyOptions, EnvoyProcess, Requirement};
use crate::envoy_config::{ADMIN_CLUSTER, EnvoyConfig, PluginConfig, PoolConfig};
use crate::fleet::{Fleet, FleetOptions};
use crate::load::{self, LoadResult, Pace, Progress};
use crate::process::workspace_root;
use crate::report::{self, Row};
use crate::wasm;
use crate::workload::{self, PlannedRequest, WorkloadOptions};

pub mod args;

use args::{Args, PLAIN_ENVOY};

/// Runs the whole demo; dropping the future ends whatever it has started.
///
/// # Errors
/// When something cannot be started, or a request failed.
pub async fn run(args: Args) -> Result<(), DemoError> {
    let needs_filter = args.strategies.iter().any(|strategy| strategy != PLAIN_ENVOY);
    let prepared = tokio::task::spawn_blocking(move || prepare(needs_filter)).await;
    let (envoy, wasm) =
        prepared.unwrap_or_else(|_| Err(DemoError("the preparation broke off".to_owned())))?;
    let rate = engine().prefill_tokens_per_s;
    say(&format!(
        "{envoy}, {REPLICAS} simulated replicas, {rate} prefill tokens/s each\n"
    ));
    let phases = [
        ("shared_prefix", workload::shared_prefix as Generator),
        ("hot_prompt", workload::hot_prompt),
    ]
    .map(|(name, generate)| Phase {
        name,
        requests: generate(&traffic(args.seed)),
    });
    let mut rows: Vec<Row> = Vec::new();
    let mut failures = Vec::new();
    let mut stand = None;
    for strategy in &args.strategies {
        // The earlier Envoy and fleet end before the next ones start: two cores are few.
        drop(stand.take());
        let running = Stand::start(strategy, &envoy, wasm.as_deref()).await?;
        for phase in &phases {
            let result = phase.send(strategy, &running).await;
            let errors = result.outcomes.iter().filter_map(|outcome| outcome.error.clone());
            failures.extend(
                errors
                    .take(SHOWN_ERRORS)
                    .map(|error| format!("{strategy}, {}: {error}", phase.name)),
            );
            rows.push(Row::new(strategy, phase.name, &result, REPLICAS));
        }
        if rows.iter().any(|row| row.errors > 0 && row.strategy == *strategy) {
            eprintln!("{}", running.envoy.log());
        }
        stand = Some(running);
    }
    rows.sort_by_key(|row| phases.iter().position(|phase| phase.name == row.phase));
    say(&format!("\n{}\n{}", report::table(&rows), comparison(&rows)));
    let path = workspace_root().join("target/reports/demo.json");
    let facts = json!({
        "report": "demo",
        "seed": args.seed,
        "replicas": REPLICAS,
        "prefill_tokens_per_s": engine().prefill_tokens_per_s,
        "cache_blocks": engine().cache_blocks,
        "rate_per_s": RATE_PER_S,
        "envoy": envoy.to_string(),
    });
    report::write(&path, &rows, facts).map_err(|error| DemoError(format!("{}: {error}", path.display())))?;
    say(&format!("written to {}\n", path.display()));
    let failed = DemoError(format!("requests failed:\n  {}", failures.join("\n  ")));
    if let (true, Some(stand)) = (args.keep, &stand) {
        if !failures.is_empty() {
            eprintln!("{failed}");
        }
        say(&stand.invitation().map_err(|error| DemoError(error.to_string()))?);
        std::future::pending::<()>().await;
    }
    if failures.is_empty() { Ok(()) } else { Err(failed) }
}

/// Why the demo did not end well, in words for its user.
#[derive(Debug)]
pub struct DemoError(String);

impl fmt::Display for DemoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DemoError {}

fn prepare(needs_filter: bool) -> Result<(Envoy, Option<PathBuf>), DemoError> {
    let wasm = needs_filter
        .then(wasm::build_wasm)
        .transpose()
        .map_err(|error| DemoError(error.to_string()))?;
    let envoy = envoy::find(Requirement::Any).map_err(|error| DemoError(error.to_string()))?;
    Ok((envoy, wasm))
}

/// A fleet behind an Envoy.
struct Stand {
    strategy: String,
    // Dropped in this order: no request may find its replica gone.
    envoy: EnvoyProcess,
    fleet: Fleet,
}

impl Stand {
    async fn start(strategy: &str, envoy: &Envoy, wasm: Option<&Path>) -> Result<Self, DemoError> {
        let options = FleetOptions {
            replicas: REPLICAS,
            engine: engine(),
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

    /// Says what a user can do with what is left running.
    fn invitation(&self) -> io::Result<String> {
        let sample = workload::shared_prefix(&WorkloadOptions {
            seconds: 2.0,
            ..traffic(0)
        });
        let path = workspace_root().join("target/reports/try.json");
        if let Some(request) = sample.first() {
            fs::write(&path, &request.body)?;
        }
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

type Generator = fn(&WorkloadOptions) -> Vec<PlannedRequest>;

struct Phase {
    name: &'static str,
    requests: Vec<PlannedRequest>,
}

impl Phase {
    /// Sends the phase's requests and shows how far it is.
    async fn send(&self, strategy: &str, stand: &Stand) -> LoadResult {
        let progress = Arc::new(Progress::default());
        let client = Client::new();
        let url = stand.envoy.url();
        let load = load::run(&client, &url, &self.requests, Pace::Open, &progress);
        tokio::pin!(load);
        let terminal = io::stdout().is_terminal();
        let mut ticks = tokio::time::interval(if terminal {
            TERMINAL_INTERVAL
        } else {
            LINE_INTERVAL
        });
        ticks.tick().await;
        loop {
            tokio::select! {
                result = &mut load => {
                    self.show(strategy, &progress, terminal, true);
                    return result;
                }
                _ = ticks.tick() => self.show(strategy, &progress, terminal, false),
            }
        }
    }

    fn show(&self, strategy: &str, progress: &Progress, terminal: bool, last: bool) {
        let done = progress.done.load(Ordering::Relaxed);
        let waiting = progress.sent.load(Ordering::Relaxed) - done.min(progress.sent.load(Ordering::Relaxed));
        let errors = progress.errors.load(Ordering::Relaxed);
        let filled = done * BAR_WIDTH / self.requests.len().max(1);
        let line = format!(
            "{strategy:<18} {:<13} [{}{}] {done:>4}/{} answered, {waiting:>3} in flight, {errors} errors",
            self.name,
            "#".repeat(filled),
            "-".repeat(BAR_WIDTH - filled),
            self.requests.len(),
        );
        say(&match (terminal, last) {
            (true, false) => format!("\r{line}"),
            (true, true) => format!("\r{line}\n"),
            (false, _) => format!("{line}\n"),
        });
    }
}

/// Writes to standard output; a closed pipe must not end a run whose report is still to be written.
fn say(text: &str) {
    let mut out = io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Says in words what the table shows, where both sides of a comparison were run.
fn comparison(rows: &[Row]) -> String {
    let find = |strategy: &str, phase: &str| {
        rows.iter()
            .find(|row| row.strategy == strategy && row.phase == phase)
    };
    let mut lines = String::new();
    for (other, phase) in [
        ("round_robin", "shared_prefix"),
        ("least_outstanding", "shared_prefix"),
    ] {
        if let (Some(hybrid), Some(other_row)) = (find("hybrid", phase), find(other, phase)) {
            let factor = other_row.ttft_mean_s / hybrid.ttft_mean_s.max(f64::MIN_POSITIVE);
            lines.push_str(&format!(
                "{phase}: hybrid's mean TTFT is {factor:.1} times better than {other}'s\n"
            ));
        }
    }
    let phase = "hot_prompt";
    if let (Some(hybrid), Some(hash)) = (find("hybrid", phase), find("prefix_hash", phase)) {
        let factor = hash.ttft_p99_s / hybrid.ttft_p99_s.max(f64::MIN_POSITIVE);
        lines.push_str(&format!(
            "{phase}: hybrid's p99 TTFT is {factor:.1} times better than prefix_hash's\n"
        ));
    }
    lines
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

fn traffic(seed: u64) -> WorkloadOptions {
    WorkloadOptions {
        seed,
        rate_per_s: RATE_PER_S,
        seconds: PHASE_SECONDS,
        model: "sim",
        max_tokens: 16,
    }
}

fn engine() -> EngineConfig {
    EngineConfig {
        cache_blocks: CACHE_BLOCKS,
        prefill_tokens_per_s: 20_000,
        ..EngineConfig::default()
    }
}

const POOL: &str = "llm";
const REPLICAS: usize = 8;
/// Cold prompts of the shared-prefix phase keep the fleet 80 % busy at this rate: 40 × 3 200 ÷ (8 × 20 000).
const RATE_PER_S: f64 = 40.0;
/// Five strategies with two phases each stay under three minutes, queues that have to drain included.
const PHASE_SECONDS: f64 = 12.0;
/// Room for 16 of the 48 shared prefixes of 192 blocks.
const CACHE_BLOCKS: usize = 3072;
/// Compiling the module and some polling intervals.
const COMPANION_DEADLINE: Duration = Duration::from_secs(10);
const TERMINAL_INTERVAL: Duration = Duration::from_millis(200);
const LINE_INTERVAL: Duration = Duration::from_secs(5);
const BAR_WIDTH: usize = 24;
/// Errors of one phase that are told in words.
const SHOWN_ERRORS: usize = 3;
