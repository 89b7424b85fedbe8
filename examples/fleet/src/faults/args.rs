//! Command line of the fault matrix → what to run.

use std::fmt;

use crate::envoy::Requirement;

/// Text of `--help`.
pub const HELP: &str = "\
Breaks things around an Envoy with the filter and around one without, and compares what becomes of the requests.

Usage: just faults [OPTIONS]

Options:
  --envoy <WHICH>  oldest, newest, or both (default)
  --only <TEXT>    only scenarios whose name contains this; may be repeated
  --short          the short form that every test run has
  --jobs <NUMBER>  rows played side by side (default: 3, as the tests do; most of a row is waiting)
  --list           print the names of the scenarios
  --write          put the rows into the table of docs/reliability.md
  --help           print this help

Exits with an error when a row does not hold. Writes target/reports/faults.md.
";

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Args {
    /// Envoys, oldest first.
    pub envoys: Vec<Requirement>,
    /// Parts of names of scenarios; all scenarios when empty.
    pub only: Vec<String>,
    /// Whether to play the short form.
    pub is_short: bool,
    /// Rows played side by side.
    pub jobs: usize,
    /// Whether to write the document.
    pub write: bool,
}

impl Args {
    /// Whether a scenario of this name is asked for.
    pub fn asks_for(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part.as_str()))
    }
}

/// What the command line asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// To print [`HELP`].
    Help,
    /// To print the names of the scenarios.
    List,
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
            envoys: vec![Requirement::Oldest, Requirement::Newest],
            only: Vec::new(),
            is_short: false,
            jobs: 3,
            write: false,
        };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--help" | "-h" => return Ok(Self::Help),
                "--list" => return Ok(Self::List),
                "--short" => args.is_short = true,
                "--write" => args.write = true,
                "--only" => args
                    .only
                    .push(arguments.next().ok_or(ArgsError::MissingValue("--only"))?),
                "--jobs" => {
                    let number = arguments.next().ok_or(ArgsError::MissingValue("--jobs"))?;
                    let jobs = number.parse().ok().filter(|jobs| *jobs > 0);
                    args.jobs = jobs.ok_or(ArgsError::NoNumber(number))?;
                }
                "--envoy" => {
                    let which = arguments.next().ok_or(ArgsError::MissingValue("--envoy"))?;
                    args.envoys = match which.as_str() {
                        "oldest" => vec![Requirement::Oldest],
                        "newest" => vec![Requirement::Newest],
                        "both" => vec![Requirement::Oldest, Requirement::Newest],
                        _ => return Err(ArgsError::UnknownEnvoy(which)),
                    };
                }
                _ => return Err(ArgsError::Unknown(argument)),
            }
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
    /// `--jobs` is not a number above 0.
    NoNumber(String),
    /// `--envoy` is none of its three.
    UnknownEnvoy(String),
}

impl fmt::Display for ArgsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(argument) => write!(f, "unknown argument `{argument}`; --help lists them"),
            Self::MissingValue(argument) => write!(f, "{argument} needs a value"),
            Self::NoNumber(text) => write!(f, "`{text}` is not a number above 0"),
            Self::UnknownEnvoy(which) => write!(f, "`{which}` is none of oldest, newest, both"),
        }
    }
}

impl std::error::Error for ArgsError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_read_and_nonsense_is_named() {
        let parse = |line: &str| Command::parse(line.split_whitespace().map(str::to_owned));
        let run = parse("--envoy newest --only engine --only admin --short --jobs 5 --write").unwrap();
        let Command::Run(args) = run else {
            panic!("{run:?}")
        };
        assert_eq!(args.envoys, [Requirement::Newest]);
        assert!(args.is_short && args.write && args.jobs == 5);
        assert_eq!(parse("--jobs 0"), Err(ArgsError::NoNumber("0".to_owned())));
        assert!(args.asks_for("engine: killed") && !args.asks_for("streams: aborted"));
        assert_eq!(parse("--list"), Ok(Command::List));
        assert_eq!(parse("--envoy"), Err(ArgsError::MissingValue("--envoy")));
        assert_eq!(
            parse("--envoy old"),
            Err(ArgsError::UnknownEnvoy("old".to_owned()))
        );
        assert_eq!(parse("faults"), Err(ArgsError::Unknown("faults".to_owned())));
    }
}
