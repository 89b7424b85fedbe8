//! The command line of `soak` → what to run.

use std::time::Duration;

use super::stand::Failure;
use crate::envoy::{self, Envoy, Requirement};

/// A run and its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Args {
    /// Which run.
    pub run: Run,
    /// Which Envoy.
    pub envoy: Wanted,
    /// How long, for [`Run::Churn`].
    pub duration: Duration,
    /// Requests, for [`Run::Twins`] and [`Run::Sizes`]; addresses, for [`Run::Pods`].
    pub count: Option<u64>,
    /// Number from which everything is drawn.
    pub seed: u64,
}

/// The runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// [`super::churn`].
    Churn,
    /// [`super::twins`].
    Twins,
    /// [`super::bounds::sizes`].
    Sizes,
    /// [`super::bounds::pods`].
    Pods,
}

/// Which Envoy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// One of those under test.
    Tested(Requirement),
    /// The binary at that path.
    At(String),
}

impl Args {
    /// Reads the arguments; `None` where [`USAGE`] is asked for.
    ///
    /// # Errors
    /// When one is unknown or has no value that fits.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Self>, Failure> {
        let mut parsed = Self {
            run: Run::Churn,
            envoy: Wanted::Tested(Requirement::Newest),
            duration: Duration::from_secs(600),
            count: None,
            seed: 1,
        };
        while let Some(arg) = args.next() {
            let mut number = || -> Result<u64, Failure> {
                let value = args
                    .next()
                    .ok_or_else(|| format!("{arg} needs a number\n{USAGE}"))?;
                value
                    .parse()
                    .map_err(|_| format!("{arg}: {value} is no number\n{USAGE}").into())
            };
            match arg.as_str() {
                "--help" | "-h" => return Ok(None),
                "--million" => parsed.run = Run::Twins,
                "--sizes" => parsed.run = Run::Sizes,
                "--pods" => parsed.run = Run::Pods,
                "--seconds" => parsed.duration = Duration::from_secs(number()?.max(1)),
                "--requests" | "--addresses" => parsed.count = Some(number()?.max(1)),
                "--seed" => parsed.seed = number()?,
                "--envoy" => {
                    parsed.envoy = match args.next().as_deref() {
                        Some("oldest") => Wanted::Tested(Requirement::Oldest),
                        Some("newest") => Wanted::Tested(Requirement::Newest),
                        Some(path) => Wanted::At(path.to_owned()),
                        None => return Err(format!("--envoy needs a value\n{USAGE}").into()),
                    }
                }
                _ => return Err(format!("unknown argument {arg}\n{USAGE}").into()),
            }
        }
        Ok(Some(parsed))
    }

    /// The Envoy that is wanted.
    ///
    /// # Errors
    /// When there is none.
    pub fn find_envoy(&self) -> Result<Envoy, Failure> {
        match &self.envoy {
            Wanted::Tested(requirement) => Ok(envoy::find(*requirement)?),
            Wanted::At(path) => Ok(envoy::at(path.into())?),
        }
    }
}

/// Text of `--help`.
pub const USAGE: &str = "\
usage: soak [--seconds N]                     hosts, clients and configurations come and go (600 s by default)
       soak --million [--requests N]          equal answers with the filter and without (a million requests)
       soak --sizes [--requests N]            memory under bodies of 1 KiB to 1 MiB (100 000 requests)
       soak --pods [--addresses N]            memory and metric names under replaced endpoints (10 000 addresses)
each also with --envoy oldest|newest|PATH and --seed N";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_taken_or_refused() {
        let parse = |args: &[&str]| Args::parse(args.iter().map(|arg| (*arg).to_owned()));
        assert_eq!(parse(&["--seed", "1", "--help"]).unwrap(), None);
        let args = parse(&["--seconds", "35", "--envoy", "oldest"]).unwrap().unwrap();
        assert_eq!((args.run, args.duration), (Run::Churn, Duration::from_secs(35)));
        assert_eq!(args.envoy, Wanted::Tested(Requirement::Oldest));
        let args = parse(&["--million", "--requests", "5", "--seed", "9", "--envoy", "/e"]);
        let args = args.unwrap().unwrap();
        assert_eq!((args.run, args.count, args.seed), (Run::Twins, Some(5), 9));
        assert_eq!(args.envoy, Wanted::At("/e".to_owned()));
        for wrong in [&["--seconds"][..], &["--seconds", "x"], &["--envoy"], &["--what"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
