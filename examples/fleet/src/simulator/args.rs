//! Command lines of `simulate` and `bars` → what to run, and where reports go.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use warmroute::config::StrategyName;
use warmroute::prompt::PromptOptions;

use super::bars::BarsArgs;
use super::generate::{self, SharedPrefixes};
use super::setup::{Happening, Policy, Setup, SetupError, Sharing, pool_config};
use super::trace::{Trace, TraceError};
use super::workload::Workload;
use crate::engine::EngineModel;
use crate::process::workspace_root;

/// The arguments of a program, or the exit code that it ends with: it was asked for help, or called wrongly.
///
/// # Errors
/// The exit code, after the help was printed.
pub fn or_help<A>(parsed: Result<Option<A>, impl fmt::Display>, help: &str) -> Result<A, ExitCode> {
    match parsed {
        Ok(Some(args)) => Ok(args),
        Ok(None) => {
            print!("{help}");
            Err(ExitCode::SUCCESS)
        }
        Err(error) => {
            eprintln!("{error}\n\n{help}");
            Err(ExitCode::from(2))
        }
    }
}

/// Text of `bars --help`.
pub const BARS_HELP: &str = "\
Holds the default strategies against their bars, on simulated engines in virtual time.

Usage: just bars [OPTIONS]

Options:
  --traces <DIR>   directory with the published traces (or WARMROUTE_TRACES); without it the conversation is generated
                   with the trace's statistics, and lines on other traces are not run
  --only <NAME>    only scenarios whose name begins so: conv55, conv85, tenants, hot55, azure45, gateways8, ...
  --seeds <NUMBER> seeds 1 to this (default: 3)
  --help           print this help

Writes target/reports/bars.json. Exits with 1 if a figure falls short of its bar.
";

/// Text of `simulate --help`.
pub const SIMULATE_HELP: &str = "\
Runs routing strategies on simulated engines in virtual time and compares them.

Usage: just simulate [OPTIONS]

Load:
  --workload <NAME>       conversation (default), arxiv, sharegpt, azure, aibrix, chats, tenants, hot, generated, or
                          profile:NAME for a profile of synthetic_profiles.json
  --traces <DIR>          directory with the published traces (or WARMROUTE_TRACES); without it the conversation is
                          generated with the trace's statistics
  --repeat <NUMBER>       the workload so often in a row, each time with other texts (block traces)
  --requests <NUMBER>     only the first requests; of a generated conversation, how many
  --load <PERCENT>        scale the load so that the oracle spends this share of the hosts' time in prefill
  --speedup <FACTOR>      let requests come faster
Fleet:
  --engine <NAME>         70b (default) or 8b
  --hosts <NUMBER>        default: 8
  --kv <TOKENS>           KV cache of a host (default: 1500000, or 467000 for 8b)
  --kv-assumed <FACTOR>   what gateways are told of it (default: 1)
  --speeds <A,B,...>      speed of each host; the rest have 1
  --event <EVENT>         at <seconds>:<what>, may be repeated: 600:restart:3, 600:fail:3, 700:recover:3, 600:add,
                          600:remove:3, 600:slow:3:3000 (thousandths of the time of a step)
Gateways:
  --gateways <NUMBER>     default: 1
  --share <WHAT>          nothing (default), placements, all
  --share-delay <MS>      default: 200
  --poll <MS>             default: 500
Policies:
  --policy <NAME>         may be repeated (default: all): round_robin, least_outstanding, least_work, prefix_hash, sglang,
                          smetric, lmetric, hybrid, cache_aware, oracle:0.5, oracle:1, oracle:2, oracle:util
  --config <JSON>         keys of the pool's configuration
  --seeds <NUMBER>        seeds 1 to this (default: 1)
  --help                  print this help

Writes target/reports/simulate.json, .csv and .html.
";

/// What `simulate` runs.
#[derive(Debug, Clone)]
pub struct SimulateArgs {
    /// Directory with the traces.
    pub traces: Option<PathBuf>,
    /// Name of the workload.
    pub workload: String,
    /// Rounds of the workload.
    pub repeat: u64,
    /// Requests at most.
    pub requests: Option<usize>,
    /// Share of time in prefill to scale to.
    pub load: Option<f64>,
    /// Factor for the speed of arrivals.
    pub speedup: f64,
    /// Fleet and gateways.
    pub setup: Setup,
    /// Whether the engine is the 8B one, which is loaded by arrivals rather than by the cost of prefill.
    pub is_small_engine: bool,
    /// Rows.
    pub policies: Vec<Policy>,
    /// Seeds 1 to this.
    pub seeds: u64,
}

/// Why arguments are refused.
#[derive(Debug)]
pub enum ArgsError {
    /// No such option.
    Unknown(String),
    /// An option's value is missing or cannot be read.
    Value(String),
    /// A policy or configuration.
    Setup(SetupError),
    /// No such workload.
    UnknownWorkload(String),
    /// A trace cannot be read.
    Trace(TraceError),
    /// The workload needs a directory with traces.
    NoTraces(String),
    /// A report cannot be written.
    Report(std::io::Error),
}

/// Arguments of `bars`, without the program's name; nothing where help is asked for.
///
/// # Errors
/// Names the first argument that cannot be understood.
pub fn parse_bars(arguments: impl Iterator<Item = String>) -> Result<Option<BarsArgs>, ArgsError> {
    let mut args = BarsArgs {
        traces: traces_of_environment(),
        only: None,
        seeds: 3,
    };
    let mut options = Options(arguments);
    while let Some(option) = options.0.next() {
        match option.as_str() {
            "--help" | "-h" => return Ok(None),
            "--traces" => args.traces = Some(options.value(&option)?),
            "--only" => args.only = Some(options.value(&option)?),
            "--seeds" => args.seeds = options.value(&option)?,
            _ => return Err(ArgsError::Unknown(option)),
        }
    }
    Ok(Some(args))
}

impl SimulateArgs {
    /// Arguments of `simulate`, without the program's name; nothing where help is asked for.
    ///
    /// # Errors
    /// Names the first argument that cannot be understood.
    pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Option<Self>, ArgsError> {
        let engine = EngineModel::llama_70b_h100x4();
        let mut args = Self {
            traces: traces_of_environment(),
            workload: Trace::Conversation.as_str().to_owned(),
            repeat: 1,
            requests: None,
            load: None,
            speedup: 1.0,
            setup: Setup::new(engine, 0, Policy::Core(StrategyName::Hybrid)),
            is_small_engine: false,
            policies: Vec::new(),
            seeds: 1,
        };
        let (mut share, mut delay_ms) = ("nothing".to_owned(), 200);
        let mut options = Options(arguments);
        while let Some(option) = options.0.next() {
            let setup = &mut args.setup;
            match option.as_str() {
                "--help" | "-h" => return Ok(None),
                "--traces" => args.traces = Some(options.value(&option)?),
                "--workload" => args.workload = options.value(&option)?,
                "--repeat" => args.repeat = options.value(&option)?,
                "--requests" => args.requests = Some(options.value(&option)?),
                "--load" => args.load = Some(options.value::<f64>(&option)? / 100.0),
                "--speedup" => args.speedup = options.value(&option)?,
                "--engine" => args.is_small_engine = options.choice(&option, &["70b", "8b"])? == 1,
                "--hosts" => setup.hosts = options.value(&option)?,
                "--kv" => setup.kv_tokens = options.value(&option)?,
                "--kv-assumed" => setup.kv_assumed_factor = options.value(&option)?,
                "--speeds" => {
                    let list: String = options.value(&option)?;
                    let speeds: Result<_, _> = list.split(',').map(str::parse).collect();
                    setup.speeds = speeds.map_err(|_| ArgsError::Value(option))?;
                }
                "--event" => {
                    let event: String = options.value(&option)?;
                    setup
                        .happenings
                        .push(happening(&event).ok_or(ArgsError::Value(option))?);
                }
                "--gateways" => setup.gateways = options.value(&option)?,
                "--share" => share = options.value(&option)?,
                "--share-delay" => delay_ms = options.value(&option)?,
                "--poll" => setup.poll_ms = options.value(&option)?,
                "--policy" => {
                    let name: String = options.value(&option)?;
                    args.policies
                        .push(Policy::parse(&name).map_err(ArgsError::Setup)?);
                }
                "--config" => setup.pool_config = options.value(&option)?,
                "--seeds" => args.seeds = options.value(&option)?,
                _ => return Err(ArgsError::Unknown(option)),
            }
        }
        args.setup.sharing = match share.as_str() {
            "nothing" => Sharing::Nothing,
            "placements" => Sharing::Placements { delay_ms },
            "all" => Sharing::All { delay_ms },
            _ => return Err(ArgsError::Value("--share".to_owned())),
        };
        let mut default_kv = 1_500_000;
        if args.is_small_engine {
            args.setup.engine = EngineModel::llama_8b_h100x1();
            default_kv = 467_000;
        }
        if args.setup.kv_tokens == 0 {
            args.setup.kv_tokens = default_kv;
        }
        if args.policies.is_empty() {
            args.policies = Policy::ALL.to_vec();
        }
        Ok(Some(args))
    }

    /// The workload of a seed; traces are the same for all.
    ///
    /// # Errors
    /// When there is none of that name, or its trace cannot be read.
    pub fn workload(&self, seed: u64) -> Result<Workload, ArgsError> {
        let pool = pool_config(&self.setup.pool_config, StrategyName::Hybrid).map_err(ArgsError::Setup)?;
        let options = &pool.prompt;
        let generated = |seed| generate::conversation(self.requests.unwrap_or(12_031), seed, options);
        let name = self.workload.as_str();
        let trace = Trace::ALL.into_iter().find(|trace| trace.as_str() == name);
        let whole = match (trace, name, &self.traces) {
            (Some(trace), _, Some(directory)) => trace.load(directory, options).map_err(ArgsError::Trace)?,
            (Some(Trace::Conversation), _, None) | (None, "generated", _) => generated(seed),
            (Some(_), _, None) => return Err(ArgsError::NoTraces(name.to_owned())),
            (None, "tenants", _) => SharedPrefixes::tenants().generate(seed, options),
            (None, "hot", _) => SharedPrefixes::hot_prefix().generate(seed, options),
            (None, _, directory) => match name.strip_prefix("profile:") {
                Some(profile) => {
                    let directory = directory
                        .as_ref()
                        .ok_or_else(|| ArgsError::NoTraces(name.to_owned()))?;
                    self.profile(directory, profile, seed, options)?
                }
                None => return Err(ArgsError::UnknownWorkload(name.to_owned())),
            },
        };
        let whole = if self.repeat > 1 {
            whole.repeated(self.repeat, options)
        } else {
            whole
        };
        Ok(self
            .requests
            .map_or_else(|| whole.clone(), |count| whole.truncated(count)))
    }

    fn profile(
        &self,
        directory: &std::path::Path,
        name: &str,
        seed: u64,
        options: &PromptOptions,
    ) -> Result<Workload, ArgsError> {
        let path = directory.join("synthetic_profiles.json");
        let text =
            std::fs::read_to_string(&path).map_err(|error| ArgsError::Trace(TraceError::Io(path, error)))?;
        let document: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let profiles = document["profiles"].as_array().into_iter().flatten();
        let named =
            |profile: &&serde_json::Value| profile["name"].as_str().is_some_and(|full| full.ends_with(name));
        let profile = profiles.clone().find(named).and_then(SharedPrefixes::of_profile);
        let profile = profile.ok_or_else(|| ArgsError::UnknownWorkload(self.workload.clone()))?;
        Ok(profile.generate(seed, options))
    }
}

impl fmt::Display for ArgsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(option) => write!(f, "unknown option {option}"),
            Self::Value(option) => write!(f, "{option}: value missing or not understood"),
            Self::Setup(error) => write!(f, "{error}"),
            Self::UnknownWorkload(name) => write!(f, "there is no workload {name}"),
            Self::Trace(error) => write!(f, "{error}"),
            Self::NoTraces(name) => write!(f, "{name} needs --traces or WARMROUTE_TRACES"),
            Self::Report(error) => write!(f, "target/reports: {error}"),
        }
    }
}

impl std::error::Error for ArgsError {}

/// Writes a file under `target/reports` of the workspace.
///
/// # Errors
/// When it cannot be written.
pub fn write_report(name: &str, text: &str) -> Result<PathBuf, ArgsError> {
    let directory = workspace_root().join("target/reports");
    let path = directory.join(name);
    std::fs::create_dir_all(&directory)
        .and_then(|()| std::fs::write(&path, text))
        .map_err(ArgsError::Report)?;
    Ok(path)
}

/// `<seconds>:<what>[:<host>[:<permille>]]`.
fn happening(text: &str) -> Option<(u64, Happening)> {
    let mut parts = text.split(':');
    let seconds: f64 = parts.next()?.parse().ok()?;
    let what = parts.next()?;
    let mut number = || parts.next()?.parse::<usize>().ok();
    let happening = match what {
        "add" => Happening::Add,
        "restart" => Happening::Restart(number()?),
        "remove" => Happening::Remove(number()?),
        "fail" => Happening::Fail(number()?),
        "recover" => Happening::Recover(number()?),
        "slow" => Happening::Slow(number()?, number()? as u64),
        _ => return None,
    };
    Some(((seconds * 1e6) as u64, happening))
}

fn traces_of_environment() -> Option<PathBuf> {
    std::env::var_os("WARMROUTE_TRACES")
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

struct Options<I>(I);

impl<I: Iterator<Item = String>> Options<I> {
    fn value<T: FromStr>(&mut self, option: &str) -> Result<T, ArgsError> {
        let value = self.0.next().and_then(|text| text.parse().ok());
        value.ok_or_else(|| ArgsError::Value(option.to_owned()))
    }

    fn choice(&mut self, option: &str, names: &[&str]) -> Result<usize, ArgsError> {
        let name: String = self.value(option)?;
        let at = names.iter().position(|known| *known == name);
        at.ok_or_else(|| ArgsError::Value(option.to_owned()))
    }
}
