//! The demo: a fleet and an Envoy for each strategy in turn, the same traffic through each, one table and one page in the
//! end.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fmt, fs};

use serde_json::json;

use crate::client::Client;
use crate::envoy::{self, Envoy, Requirement};
use crate::load::{self, LoadResult, Pace};
use crate::process::workspace_root;
use crate::report::page::Page;
use crate::report::{self, HostRow, Row, Run};
use crate::wasm;
use crate::workload::{self, PlannedRequest, Traffic, Workload};

pub mod args;
pub mod claims;
mod progress;
mod stand;

use args::{Args, PLAIN_ENVOY, WorkloadSource};
use progress::{Bars, say};
use stand::Stand;

/// Runs the whole demo; dropping the future ends whatever it has started.
///
/// # Errors
/// When something cannot be started, a request failed, or a claim that was to be checked does not hold.
pub async fn run(args: Args) -> Result<(), DemoError> {
    let workload = read_workload(&args)?;
    let needs_filter = args.strategies.iter().any(|strategy| strategy != PLAIN_ENVOY);
    let prepared = tokio::task::spawn_blocking(move || prepare(needs_filter)).await;
    let (envoy, wasm) =
        prepared.unwrap_or_else(|_| Err(DemoError("the preparation broke off".to_owned())))?;
    let fleet = &workload.fleet;
    say(&format!(
        "{envoy}, {} simulated replicas of {} at {} times its speed, seed {}\n",
        fleet.replicas, fleet.engine, fleet.speed, workload.seed
    ));
    let begun = Instant::now();
    let plan = workload.requests();
    let mut bars = Bars::new(&args.strategies, plan.iter().map(Vec::len).sum());
    let mut runs: Vec<Run> = Vec::new();
    let mut failures = Vec::new();
    let mut stand = None;
    for (number, strategy) in args.strategies.iter().enumerate() {
        // The earlier Envoy and fleet end before the next ones start: two cores are few.
        drop(stand.take());
        bars.starting(number);
        let running = Stand::start(strategy, &workload, &envoy, wasm.as_deref()).await?;
        let run = send(&running, strategy, &workload, &plan, &mut bars, number).await;
        let failed = failures.len();
        failures.extend(shown_errors(&run, &workload));
        if failures.len() > failed {
            eprintln!("{}", running.envoy.log());
        }
        runs.push(run);
        stand = Some(running);
    }
    let took = begun.elapsed();
    let missed = conclude(&workload, &runs, &envoy, took)?;
    let failed = DemoError(format!("requests failed:\n  {}", failures.join("\n  ")));
    if let (true, Some(stand), Some(sample)) = (args.keep, &stand, plan.iter().flatten().next()) {
        if !failures.is_empty() {
            eprintln!("{failed}");
        }
        let invitation = stand.invitation(sample);
        say(&invitation.map_err(|error| DemoError(error.to_string()))?);
        std::future::pending::<()>().await;
    }
    match (failures.is_empty(), args.check && missed > 0) {
        (false, _) => Err(failed),
        (true, true) => Err(DemoError(format!(
            "{missed} claims do not hold or could not be checked"
        ))),
        (true, false) => Ok(()),
    }
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

fn read_workload(args: &Args) -> Result<Workload, DemoError> {
    let (name, text) = match &args.workload {
        WorkloadSource::Demo => ("demo.json".to_owned(), workload::DEMO.to_owned()),
        WorkloadSource::Quick => ("quick.json".to_owned(), workload::QUICK.to_owned()),
        WorkloadSource::File(path) => {
            let name = path.display().to_string();
            let text = fs::read_to_string(path).map_err(|error| DemoError(format!("{name}: {error}")))?;
            (name, text)
        }
    };
    let workload = Workload::parse(&text).map_err(|error| DemoError(format!("{name}: {error}")))?;
    Ok(match args.seed {
        Some(seed) => workload.with_seed(seed),
        None => workload,
    })
}

fn prepare(needs_filter: bool) -> Result<(Envoy, Option<PathBuf>), DemoError> {
    let wasm = needs_filter
        .then(wasm::build_wasm)
        .transpose()
        .map_err(|error| DemoError(error.to_string()))?;
    let envoy = envoy::find(Requirement::Any).map_err(|error| DemoError(error.to_string()))?;
    Ok((envoy, wasm))
}

/// Sends all phases through one strategy and shows how far it is.
async fn send(
    stand: &Stand,
    strategy: &str,
    workload: &Workload,
    plan: &[Vec<PlannedRequest>],
    bars: &mut Bars,
    number: usize,
) -> Run {
    let (client, url) = (Client::new(), stand.envoy.url());
    let (begun, cpu_before_s) = (Instant::now(), stand.cpu_s());
    let mut phases = Vec::new();
    for (phase, requests) in workload.phases.iter().zip(plan) {
        let progress = bars.phase(number, &phase.name);
        let load = load::run(&client, &url, requests, Pace::Open, &progress);
        tokio::pin!(load);
        let mut ticks = tokio::time::interval(bars.interval());
        ticks.tick().await;
        let result: LoadResult = loop {
            tokio::select! {
                result = &mut load => break result,
                _ = ticks.tick() => bars.show(number),
            }
        };
        phases.push(result);
    }
    bars.done(number);
    let cpu_s = stand
        .cpu_s()
        .zip(cpu_before_s)
        .map(|(after, before)| after - before);
    Run {
        strategy: strategy.to_owned(),
        phases,
        busy_cores: cpu_s.map(|cpu_s| cpu_s / begun.elapsed().as_secs_f64()),
    }
}

fn shown_errors(run: &Run, workload: &Workload) -> Vec<String> {
    let mut shown = Vec::new();
    for (phase, result) in workload.phases.iter().zip(&run.phases) {
        let errors = result
            .outcomes
            .iter()
            .filter_map(|outcome| outcome.error.as_ref());
        let told = errors.map(|error| format!("{}, {}: {error}", run.strategy, phase.name));
        shown.extend(told.take(SHOWN_ERRORS));
    }
    shown
}

/// Prints the table and the claims and writes both reports; returns how many claims do not hold.
fn conclude(workload: &Workload, runs: &[Run], envoy: &Envoy, took: Duration) -> Result<usize, DemoError> {
    let replicas = workload.fleet.replicas;
    let mut rows = Vec::new();
    let mut hot = Vec::new();
    for (number, phase) in workload.phases.iter().enumerate() {
        let of_phase = runs.iter().filter_map(|run| {
            let result = run.phases.get(number)?;
            Some(Row::new(&run.strategy, &phase.name, result, replicas))
        });
        let of_phase: Vec<Row> = of_phase.collect();
        if matches!(phase.traffic, Traffic::HotPrompt(_)) {
            hot.extend(of_phase.clone());
        }
        rows.extend(of_phase);
    }
    let totals: Vec<Row> = runs
        .iter()
        .map(|run| Row::new(&run.strategy, "all", &run.total(), replicas))
        .collect();
    let claims = claims::check(&totals, &hot);
    rows.extend(totals);
    let lines: Vec<String> = claims.iter().map(claims::Claim::line).collect();
    say(&format!("\n{}\n{}\n", report::table(&rows), lines.join("\n")));
    let (major, minor, patch) = envoy.version;
    let page = Page {
        workload,
        runs,
        rows: &rows,
        claims: &claims,
        envoy: format!("Envoy {major}.{minor}.{patch}"),
        written: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        took,
    };
    say(&format!("{}\n", page.conditions()));
    let folder = workspace_root().join("target/reports");
    let (json_path, html_path) = (folder.join("demo.json"), folder.join("demo.html"));
    let written =
        report::write(&json_path, &rows, facts(&page)).and_then(|()| fs::write(&html_path, page.html()));
    written.map_err(|error| DemoError(format!("{}: {error}", folder.display())))?;
    say(&format!(
        "written to {} and {}\n",
        html_path.display(),
        json_path.display()
    ));
    Ok(claims.iter().filter(|claim| claim.holds != Some(true)).count())
}

/// What the JSON report holds beside its rows.
fn facts(page: &Page<'_>) -> serde_json::Value {
    let model = page.workload.engine();
    let times = model.times;
    let runs = page.runs.iter().map(|run| {
        let phases = run
            .phases
            .iter()
            .zip(&page.workload.phases)
            .map(|(result, phase)| {
                json!({
                    "phase": phase.name,
                    "elapsed_s": result.elapsed_s,
                    "hosts": HostRow::of(result, page.workload.fleet.replicas),
                    "sorted_ttft_s": report::sorted_ttft_s(result),
                })
            });
        json!({
            "strategy": run.strategy,
            "busy_cores": run.busy_cores,
            "late_p99_s": run.late_p99_s(),
            "phases": phases.collect::<Vec<_>>(),
        })
    });
    json!({
        "report": "demo",
        "workload": page.workload,
        "engine": {
            "cache_blocks": model.cache_blocks,
            "block_tokens": model.block_tokens,
            "max_running": model.max_running,
            "step_tokens": model.step_tokens,
            "base_us": times.base_us,
            "prefill_token_us": times.prefill_token_us,
            "prefill_pair_us": times.prefill_pair_us,
            "decode_us": times.decode_us,
            "decode_context_us": times.decode_context_us,
            "speed": model.speed,
        },
        "envoy": page.envoy,
        "took_s": page.took.as_secs_f64(),
        "written_unix_s": page.written.as_secs(),
        "claims": page.claims,
        "runs": runs.collect::<Vec<_>>(),
    })
}

/// Errors of one phase that are told in words.
const SHOWN_ERRORS: usize = 3;
