//! `just figures`: the charts of `docs/routing.md`, measured anew.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use warmroute::config::StrategyName;
use warmroute::prompt::PromptOptions;
use warmroute_fleet::engine::EngineModel;
use warmroute_fleet::process::workspace_root;
use warmroute_fleet::simulator::args::{self, ArgsError};
use warmroute_fleet::simulator::compare::side_by_side;
use warmroute_fleet::simulator::line_chart::LineChart;
use warmroute_fleet::simulator::trace::Trace;
use warmroute_fleet::simulator::utilisation::{Lever, Scale};
use warmroute_fleet::simulator::{Policy, Setup, Sharing, Summary, Workload};

fn main() -> ExitCode {
    let parsed = args::parse_bars(std::env::args().skip(1));
    let args = match args::or_help(parsed, HELP) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let Some(traces) = &args.traces else {
        eprintln!("no traces: give --traces or WARMROUTE_TRACES\n\n{HELP}");
        return ExitCode::from(2);
    };
    match figures(traces, args.seeds, args.only.as_deref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn figures(traces: &Path, seeds: u64, only: Option<&str>) -> Result<(), Failure> {
    let bench = Bench::new(traces, seeds)?;
    let charts: [(&str, Draw); 3] = [
        ("load", Bench::over_load),
        ("hosts", Bench::over_hosts),
        ("gateways", Bench::over_gateways),
    ];
    for (name, draw) in charts {
        if only.is_some_and(|only| !name.starts_with(only)) {
            continue;
        }
        eprintln!("{name}");
        let chart = draw(&bench)?;
        let path = workspace_root().join("docs/routing").join(format!("{name}.svg"));
        std::fs::write(&path, chart.svg()).map_err(|error| Failure::Write(path.clone(), error))?;
        println!("{}\n\n{}", path.display(), chart.markdown());
    }
    Ok(())
}

type Draw = fn(&Bench) -> Result<LineChart, Failure>;

/// The conversation trace on 70B engines, and how often each figure is measured.
struct Bench {
    conversation: Workload,
    options: PromptOptions,
    seeds: u64,
}

impl Bench {
    fn new(traces: &Path, seeds: u64) -> Result<Self, Failure> {
        let options = PromptOptions::default();
        let conversation = Trace::Conversation
            .load(traces, &options)
            .map_err(ArgsError::Trace)?;
        Ok(Self {
            conversation,
            options,
            seeds,
        })
    }

    fn over_load(&self) -> Result<LineChart, Failure> {
        let mut lines: Vec<(String, Vec<f64>)> = [
            "hybrid",
            "oracle",
            "least_outstanding",
            "round_robin",
            "prefix_hash",
            "SGLang rule",
        ]
        .map(|name| (name.to_owned(), Vec::new()))
        .into();
        for percent in LOADS {
            let scale = self.scale(f64::from(percent) / 100.0)?;
            let setups = [
                HYBRID,
                Policy::Core(StrategyName::LeastOutstanding),
                ROUND_ROBIN,
                Policy::Core(StrategyName::PrefixHash),
                Policy::Sglang,
                Policy::ORACLES[0],
                Policy::ORACLES[1],
                Policy::ORACLES[2],
                Policy::ORACLES[3],
            ]
            .map(eight_hosts);
            let means = self.means(|_| self.conversation.clone(), &setups, scale)?;
            let seconds: Vec<f64> = means.iter().map(|mean| mean.mean_ms / 1000.0).collect();
            let oracle = seconds.iter().skip(5).copied().fold(f64::INFINITY, f64::min);
            let row = [seconds[0], oracle, seconds[1], seconds[2], seconds[3], seconds[4]];
            lines
                .iter_mut()
                .zip(row)
                .for_each(|(line, value)| line.1.push(value));
        }
        Ok(LineChart {
            title: "Mean time to first token over load".to_owned(),
            x_name: "share of the hosts' time that the oracle spends in prefill, %".to_owned(),
            y_name: "s, each line across three times the one below".to_owned(),
            points: LOADS.map(|percent| percent.to_string()).into(),
            y_range: (0.3, 300.0),
            y_marks: vec![0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0],
            is_logarithmic: true,
            lines,
        })
    }

    fn over_hosts(&self) -> Result<LineChart, Failure> {
        let policies = [HYBRID, Policy::Core(StrategyName::CacheAware), ROUND_ROBIN];
        let scale = self.scale(LOAD)?;
        let mut lines: Vec<(String, Vec<f64>)> =
            policies.map(|policy| (policy.to_string(), Vec::new())).into();
        for hosts in HOSTS {
            let setups = policies.map(|policy| Setup {
                hosts,
                ..eight_hosts(policy)
            });
            let workload = |seed| match hosts {
                0..8 => self.conversation.part(8 / hosts as u64, seed, &self.options),
                8 => self.conversation.clone(),
                _ => self.conversation.copied(hosts as u64 / 8, &self.options),
            };
            let means = self.means(workload, &setups, scale)?;
            lines
                .iter_mut()
                .zip(means)
                .for_each(|(line, mean)| line.1.push(mean.hit_share * 100.0));
        }
        Ok(LineChart {
            title: "Prompt tokens found in caches, the load of a host the same".to_owned(),
            x_name: "hosts".to_owned(),
            y_name: "% of routed prompt tokens".to_owned(),
            points: HOSTS.map(|hosts| hosts.to_string()).into(),
            y_range: (0.0, 40.0),
            y_marks: vec![0.0, 10.0, 20.0, 30.0, 40.0],
            is_logarithmic: false,
            lines,
        })
    }

    fn over_gateways(&self) -> Result<LineChart, Failure> {
        let delay_ms = 200;
        let rows = [
            ("all, within 200 ms", HYBRID, Sharing::All { delay_ms }),
            ("placements shared", HYBRID, Sharing::Placements { delay_ms }),
            ("nothing shared", HYBRID, Sharing::Nothing),
            (
                "least_outstanding",
                Policy::Core(StrategyName::LeastOutstanding),
                Sharing::Nothing,
            ),
        ];
        let scale = self.scale(LOAD)?;
        let mut lines: Vec<(String, Vec<f64>)> = rows.map(|row| (row.0.to_owned(), Vec::new())).into();
        for gateways in GATEWAYS {
            let setups = rows.map(|(_, policy, sharing)| Setup {
                gateways,
                sharing,
                ..eight_hosts(policy)
            });
            let means = self.means(|_| self.conversation.clone(), &setups, scale)?;
            lines
                .iter_mut()
                .zip(means)
                .for_each(|(line, mean)| line.1.push(mean.mean_ms / 1000.0));
        }
        Ok(LineChart {
            title: "Mean time to first token over gateways, hybrid, load 55 %".to_owned(),
            x_name: "gateways, requests spread over them at random".to_owned(),
            y_name: "s".to_owned(),
            points: GATEWAYS.map(|gateways| gateways.to_string()).into(),
            y_range: (0.0, 6.0),
            y_marks: vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            is_logarithmic: false,
            lines,
        })
    }

    fn scale(&self, share: f64) -> Result<Scale, Failure> {
        let found = Scale::find(
            &self.conversation,
            &eight_hosts(Policy::ORACLES[1]),
            Lever::PrefillCost,
            share,
            Scale::ONE,
        );
        Ok(found.map_err(ArgsError::Setup)?)
    }

    /// Means over the seeds, one a setup.
    fn means(
        &self,
        workload: impl Fn(u64) -> Workload,
        setups: &[Setup],
        scale: Scale,
    ) -> Result<Vec<Summary>, Failure> {
        let mut runs: Vec<Vec<Summary>> = vec![Vec::new(); setups.len()];
        for seed in 1..=self.seeds {
            let setups: Vec<Setup> = setups
                .iter()
                .map(|setup| Setup {
                    seed,
                    ..scale.apply(setup)
                })
                .collect();
            let summaries = side_by_side(&workload(seed), &setups, scale.arrivals, &|line: &str| {
                eprintln!("  {line}");
            })?;
            runs.iter_mut()
                .zip(summaries)
                .for_each(|(runs, summary)| runs.push(summary));
        }
        Ok(runs.iter().map(|runs| Summary::mean(runs)).collect())
    }
}

/// Why there are no charts.
#[derive(Debug)]
enum Failure {
    Run(ArgsError),
    Write(PathBuf, std::io::Error),
}

impl From<ArgsError> for Failure {
    fn from(error: ArgsError) -> Self {
        Self::Run(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(error) => write!(f, "{error}"),
            Self::Write(path, error) => write!(f, "{}: {error}", path.display()),
        }
    }
}

fn eight_hosts(policy: Policy) -> Setup {
    Setup::new(EngineModel::llama_70b_h100x4(), 1_500_000, policy)
}

const HYBRID: Policy = Policy::Core(StrategyName::Hybrid);
const ROUND_ROBIN: Policy = Policy::Core(StrategyName::RoundRobin);
const LOAD: f64 = 0.55;
const LOADS: [u32; 5] = [25, 40, 55, 70, 85];
const HOSTS: [usize; 6] = [2, 4, 8, 16, 32, 64];
const GATEWAYS: [usize; 4] = [1, 2, 4, 8];
const HELP: &str = "\
Measures the charts of docs/routing.md anew: writes docs/routing/*.svg and prints their figures.

Usage: just figures [OPTIONS]

Options:
  --traces <DIR>    directory with the published conversation trace (or WARMROUTE_TRACES)
  --only <NAME>     load, hosts or gateways
  --seeds <NUMBER>  seeds 1 to this (default: 3)
  --help            print this help
";
