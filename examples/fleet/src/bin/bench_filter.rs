//! Plain Envoy against Envoy with the filter, in pairs: what the filter costs in throughput, latency and CPU.
//!
//! Both Envoys run all the time with the same config but for the filter and its companion, one worker each, before the
//! same upstream, which answers at once; load goes to them in turn (A B A B …), so that whatever else the machine does
//! hits both. Load and upstream are one thread of this process. Where `taskset` works, Envoys and load have a core each.
//! The module is built here, so a stale one is never measured. Load is a closed loop on keep-alive connections.

use std::fmt;
use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;
use warmroute_fleet::envoy::{self, Envoy, EnvoyOptions, EnvoyProcess, Requirement};
use warmroute_fleet::envoy_config::{ADMIN_CLUSTER, EnvoyConfig, PluginConfig, PoolConfig};
use warmroute_fleet::process::workspace_root;
use warmroute_fleet::wasm::build_wasm;

use self::cpu::pin;
use self::figures::{Ratios, Row, table_head, table_lines};
use self::load::{Bodies, load};

#[path = "bench_filter/cpu.rs"]
mod cpu;
#[path = "bench_filter/figures.rs"]
mod figures;
#[path = "bench_filter/load.rs"]
mod load;
#[path = "bench_filter/upstream.rs"]
mod upstream;

fn main() -> ExitCode {
    let planned = Plan::from_args(std::env::args().skip(1));
    match planned.and_then(|plan| plan.map_or_else(help, |plan| bench(&plan))) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench-filter: {error}");
            ExitCode::FAILURE
        }
    }
}

fn help() -> Result<bool, Box<dyn std::error::Error>> {
    println!("{USAGE}");
    Ok(true)
}

/// What to measure.
#[derive(Debug, Clone, PartialEq)]
struct Plan {
    requirement: Requirement,
    pairs: usize,
    warm_up: Duration,
    measure: Duration,
}

impl Plan {
    /// `None` where help is asked for.
    fn from_args(mut args: impl Iterator<Item = String>) -> Result<Option<Self>, Box<dyn std::error::Error>> {
        let mut plan = Self {
            requirement: Requirement::Newest,
            pairs: 5,
            warm_up: Duration::from_millis(300),
            measure: Duration::from_secs(2),
        };
        while let Some(arg) = args.next() {
            match (arg.as_str(), &mut args) {
                ("--help" | "-h", _) => return Ok(None),
                ("--quick", _) => {
                    plan.pairs = 3;
                    plan.warm_up = Duration::from_millis(100);
                    plan.measure = Duration::from_millis(450);
                }
                ("--envoy", args) => {
                    plan.requirement = match args.next().as_deref() {
                        Some("oldest") => Requirement::Oldest,
                        Some("newest") => Requirement::Newest,
                        _ => return Err("--envoy takes oldest or newest".into()),
                    }
                }
                _ => return Err(format!("unknown argument {arg}\n{USAGE}").into()),
            }
        }
        Ok(Some(plan))
    }
}

/// One kind of load.
#[derive(Debug, Clone, Copy)]
struct Cell {
    body_bytes: usize,
    concurrency: usize,
}

impl Cell {
    const ALL: [Self; 6] = [
        Self {
            body_bytes: 2 << 10,
            concurrency: 1,
        },
        Self {
            body_bytes: 2 << 10,
            concurrency: 16,
        },
        Self {
            body_bytes: 16 << 10,
            concurrency: 1,
        },
        Self {
            body_bytes: 16 << 10,
            concurrency: 16,
        },
        Self {
            body_bytes: 64 << 10,
            concurrency: 1,
        },
        Self {
            body_bytes: 64 << 10,
            concurrency: 16,
        },
    ];
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KiB × {}", self.body_bytes >> 10, self.concurrency)
    }
}

/// Measures every cell; true if the filter kept enough of plain Envoy's throughput.
fn bench(plan: &Plan) -> Result<bool, Box<dyn std::error::Error>> {
    let wasm = build_wasm()?;
    let envoy = envoy::find(plan.requirement)?;
    let me = std::process::id();
    let two_cores = std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= 2);
    // Before the runtime has threads, so that they inherit it.
    let pinned = two_cores && pin(me, LOAD_CORE);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let upstreams = upstream::start(UPSTREAMS).await?;
        let pool = PoolConfig::new(CLUSTER, upstreams);
        let plain = EnvoyConfig::plain(pool.clone());
        let filtered = EnvoyConfig::new(PluginConfig::new(wasm, plugin_json()), pool);
        let plain = start(&envoy, &plain).await?;
        let filtered = start(&envoy, &filtered).await?;
        let pinned = pinned
            && [&plain, &filtered]
                .iter()
                .all(|process| pin(process.id(), ENVOY_CORE));
        let place = if pinned {
            "Envoys pinned to one core, load and upstream to another"
        } else {
            "not pinned: taskset does not work here, or there is one core"
        };
        println!("{envoy}\n{place}; {} pairs of {:?}\n", plan.pairs, plan.measure);
        wait_for_table(&filtered).await?;
        let mut rows = Vec::new();
        let mut keeps_up = true;
        let mut measured = 0;
        print!("{}", table_head());
        for cell in Cell::ALL {
            let (row_plain, row_filtered, ratios) = measure_cell(plan, cell, &plain, &filtered).await?;
            print!("{}", table_lines(cell, &row_plain, &row_filtered, &ratios));
            keeps_up &= cell.body_bytes > SMALL_BODY_BYTES || ratios.median >= LEAST_RATIO;
            measured += row_filtered.requests;
            rows.push(row_plain.to_json(cell, "plain", None));
            rows.push(row_filtered.to_json(cell, "warmroute", Some(&ratios)));
        }
        let decided = decisions(&filtered).await?;
        println!("\nthe filter decided {decided} requests, warm-up included");
        let report = json!({"rows": rows, "envoy": envoy.version, "pinned": pinned, "decisions": decided});
        let path = workspace_root().join("target/reports/bench-filter.json");
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&path, format!("{report:#}\n"))?;
        println!("written to {}", path.display());
        if decided < measured {
            // A filter that died is bypassed, and fast.
            return Err(format!("{measured} requests were measured, but not all were decided").into());
        }
        if !keeps_up {
            println!("below {LEAST_RATIO} of plain Envoy's throughput with small bodies");
        }
        Ok(keeps_up)
    })
}

async fn start(envoy: &Envoy, config: &EnvoyConfig) -> Result<EnvoyProcess, Box<dyn std::error::Error>> {
    let options = EnvoyOptions {
        concurrency: 1,
        ..EnvoyOptions::default()
    };
    Ok(EnvoyProcess::start(envoy, &config.render(), &options).await?)
}

/// The filter's config: the default strategy, fed by discovery and scrapes as in production.
fn plugin_json() -> String {
    let pool = json!({"discovery": {"admin_cluster": ADMIN_CLUSTER}, "metrics": {"preset": "vllm"}});
    json!({"strategy": "hybrid", "pools": {CLUSTER: pool}}).to_string()
}

/// Waits until the companion has found and scraped the upstreams.
async fn wait_for_table(process: &EnvoyProcess) -> Result<(), Box<dyn std::error::Error>> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let scrapes = process
            .stats("wasmcustom.warmroute_scrapes_total.result.ok")
            .await?;
        if scrapes.values().sum::<u64>() >= UPSTREAMS as u64 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("the companion scraped nothing:\n{}", process.log()).into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Requests for which the filter chose hosts.
async fn decisions(process: &EnvoyProcess) -> Result<u64, Box<dyn std::error::Error>> {
    Ok(process
        .stats("wasmcustom.warmroute_decisions_total")
        .await?
        .values()
        .sum())
}

/// Runs one cell in pairs.
async fn measure_cell(
    plan: &Plan,
    cell: Cell,
    plain: &EnvoyProcess,
    filtered: &EnvoyProcess,
) -> Result<(Row, Row, Ratios), Box<dyn std::error::Error>> {
    let bodies = Bodies::new(cell.body_bytes);
    let (mut runs_plain, mut runs_filtered) = (Vec::new(), Vec::new());
    for _ in 0..plan.pairs {
        for (process, runs) in [(plain, &mut runs_plain), (filtered, &mut runs_filtered)] {
            load(process, &bodies, cell.concurrency, plan.warm_up).await?;
            runs.push(load(process, &bodies, cell.concurrency, plan.measure).await?);
        }
    }
    let pairs = runs_plain.iter().zip(&runs_filtered);
    let ratios = Ratios::new(
        pairs
            .map(|(plain, filtered)| filtered.rps() / plain.rps())
            .collect(),
    );
    Ok((Row::new(&runs_plain), Row::new(&runs_filtered), ratios))
}

const USAGE: &str = "usage: bench-filter [--quick] [--envoy oldest|newest]";
const CLUSTER: &str = "llm";
const UPSTREAMS: usize = 4;
const ENVOY_CORE: &str = "0";
const LOAD_CORE: &str = "1";
/// Up to this size the filter's fixed cost shows most, so here it is bounded.
const SMALL_BODY_BYTES: usize = 2 << 10;
/// Share of plain Envoy's throughput that must remain with small bodies; less is a defect.
const LEAST_RATIO: f64 = 0.6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_taken_or_refused() {
        let plan = |args: &[&str]| Plan::from_args(args.iter().map(|arg| (*arg).to_owned()));
        assert_eq!(
            plan(&["--envoy", "oldest"]).unwrap().unwrap().requirement,
            Requirement::Oldest
        );
        let measure = |args: &[&str]| plan(args).unwrap().unwrap().measure;
        assert!(measure(&["--quick"]) < measure(&[]));
        assert_eq!(plan(&["--help"]).unwrap(), None);
        assert!(plan(&["--envoy"]).is_err());
        assert!(plan(&["--slow"]).is_err());
    }
}
