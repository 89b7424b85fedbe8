//! A user's own log → what each strategy would have made of it.
//!
//! In: one JSON object a line, in any order of time:
//!
//! | key | type | meaning |
//! |---|---|---|
//! | `time` | number | seconds on any clock |
//! | `host` | string | the host that served it; any name |
//! | `body` | object | the request's JSON body, or instead of it |
//! | `prompt` | string | the prompt's text |
//! | `output_tokens` | number | tokens of the answer; default: 256 |
//! | `path` | string | path of the API; default: `/v1/chat/completions`, for `prompt` `/v1/completions` |
//!
//! Out: the figures of each strategy and of the log's own choices on simulated engines, one for each host of the log. A
//! log is untrusted: a line that is not such an object is an error with its number, and nothing of it is kept but keys and
//! block names. What it cannot tell: how fast the user's engines are, and requests that were never logged.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use warmroute::config::StrategyName;

use super::args::ArgsError;
use super::compare::side_by_side;
use super::outcome::Summary;
use super::setup::{Policy, Setup, pool_config};
use super::workload::{CHAT_PATH, Workload, WorkloadBuilder};
use crate::engine::{BLOCK_TOKENS, EngineModel};

/// Text of `replay --help`.
pub const HELP: &str = "\
Takes a log of requests and tells what each routing strategy would have made of it, on simulated engines.

Usage: just replay <LOG.jsonl> [OPTIONS]

Each line of the log is a JSON object: time (seconds), host (any name), body (the request's JSON) or prompt (its text),
output_tokens (default 256), path (default /v1/chat/completions, for prompt /v1/completions).

Options:
  --engine <NAME>   70b (default), 8b or cpu_small: what the hosts are taken to be
  --kv <TOKENS>     KV cache of a host (default: the engine's)
  --speedup <X>     let requests come faster
  --help            print this help

Writes target/reports/replay.json and .html.
";

/// What `replay` runs.
#[derive(Debug, Clone)]
pub struct ReplayArgs {
    log: PathBuf,
    engine: EngineModel,
    kv_tokens: usize,
    speedup: f64,
}

/// What came of it.
#[derive(Debug)]
pub struct Replayed {
    /// The log's own choices first, then each strategy.
    pub rows: Vec<(String, Summary)>,
    /// What was run, in words.
    pub facts: String,
}

/// Why a log is not replayed.
#[derive(Debug)]
pub enum ReplayError {
    /// An argument.
    Args(ArgsError),
    /// The log cannot be read.
    Io(PathBuf, std::io::Error),
    /// A line is not a request; the first is 1.
    Line(usize),
    /// The log has no lines.
    Empty,
}

#[derive(Deserialize)]
struct Line {
    time: f64,
    host: String,
    body: Option<serde_json::Value>,
    prompt: Option<String>,
    output_tokens: Option<usize>,
    path: Option<String>,
}

/// A log as a workload, and where each request went.
#[derive(Debug)]
pub struct Log {
    /// Its requests.
    pub workload: Workload,
    /// Number of the host of each request, by name.
    pub hosts: Vec<u16>,
    /// Hosts in it.
    pub host_count: usize,
}

impl ReplayArgs {
    /// Arguments without the program's name; nothing where help is asked for.
    ///
    /// # Errors
    /// Names the first argument that cannot be understood.
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, ArgsError> {
        let (mut log, mut kv_tokens, mut speedup) = (None, None, 1.0);
        let mut engine = EngineModel::llama_70b_h100x4();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| ArgsError::Value(argument.clone()));
            match argument.as_str() {
                "--help" | "-h" => return Ok(None),
                "--engine" => {
                    let name = value()?;
                    let preset = match name.as_str() {
                        "70b" => "llama_70b_h100x4",
                        "8b" => "llama_8b_h100x1",
                        other => other,
                    };
                    engine = EngineModel::preset(preset).ok_or(ArgsError::Value(argument))?;
                }
                "--kv" => kv_tokens = Some(value()?.parse().map_err(|_| ArgsError::Value(argument))?),
                "--speedup" => speedup = value()?.parse().map_err(|_| ArgsError::Value(argument))?,
                option if option.starts_with('-') => return Err(ArgsError::Unknown(argument)),
                path => log = Some(PathBuf::from(path)),
            }
        }
        let log = log.ok_or_else(|| ArgsError::Value("the log".to_owned()))?;
        Ok(Some(Self {
            log,
            kv_tokens: kv_tokens.unwrap_or(engine.capacity_tokens()),
            engine,
            speedup,
        }))
    }

    /// Replays the log under every strategy; progress goes to `tell`.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn run(&self, tell: impl Fn(&str) + Sync) -> Result<Replayed, ReplayError> {
        let text =
            std::fs::read_to_string(&self.log).map_err(|error| ReplayError::Io(self.log.clone(), error))?;
        let log = Log::parse(&text)?;
        let core = StrategyName::ALL.map(Policy::Core);
        let policies = [Policy::Logged].into_iter().chain(core).chain(Policy::ORACLES);
        let setup = |policy| Setup {
            hosts: log.host_count,
            logged_hosts: log.hosts.clone().into(),
            ..Setup::new(self.engine.clone(), self.kv_tokens, policy)
        };
        let setups: Vec<Setup> = policies.map(setup).collect();
        let summaries =
            side_by_side(&log.workload, &setups, self.speedup, &tell).map_err(ReplayError::Args)?;
        let named = setups.iter().map(|setup| setup.policy.to_string());
        Ok(Replayed {
            facts: format!(
                "{} requests of a log over {} hosts, {} prompt tokens, of which one cache that forgets nothing would \
                 hold {:.1} %; engines with {} tokens of KV cache. The oracle rows see the engines: they are what \
                 perfect knowledge would reach.",
                log.workload.requests.len(),
                log.host_count,
                log.workload.prompt_tokens(),
                log.workload.ideal_hit_share() * 100.0,
                self.kv_tokens,
            ),
            rows: named.zip(summaries).collect(),
        })
    }
}

impl Log {
    /// Reads a log.
    ///
    /// # Errors
    /// Names the first line that is not a request.
    pub fn parse(text: &str) -> Result<Self, ReplayError> {
        let mut lines = Vec::new();
        for (at, line) in text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty())
        {
            let line: Line = serde_json::from_str(line).map_err(|_| ReplayError::Line(at + 1))?;
            if !line.time.is_finite() || (line.body.is_none() && line.prompt.is_none()) {
                return Err(ReplayError::Line(at + 1));
            }
            lines.push(line);
        }
        lines.sort_by(|a, b| a.time.total_cmp(&b.time));
        let first = lines.first().ok_or(ReplayError::Empty)?.time;
        let mut names: BTreeMap<&str, u16> = lines.iter().map(|line| (line.host.as_str(), 0)).collect();
        names.values_mut().zip(0..).for_each(|(number, at)| *number = at);
        let hosts = lines.iter().map(|line| names[line.host.as_str()]).collect();
        let host_count = names.len();
        let options = pool_config("{}", StrategyName::Hybrid)
            .map_err(|error| ReplayError::Args(ArgsError::Setup(error)))?
            .prompt;
        let mut builder = WorkloadBuilder::new("log", BLOCK_TOKENS, &options);
        for line in &lines {
            let (body, rendered, path) = match (&line.body, &line.prompt) {
                (Some(body), _) => (body.to_string(), rendered(body), CHAT_PATH),
                (None, prompt) => {
                    let prompt = prompt.clone().unwrap_or_default();
                    let body = serde_json::json!({"model": "m", "prompt": prompt});
                    (body.to_string(), prompt, "/v1/completions")
                }
            };
            builder.push_body(
                ((line.time - first) * 1e6) as u64,
                line.path.as_deref().unwrap_or(path),
                body.as_bytes(),
                &rendered,
                line.output_tokens.unwrap_or(256),
            );
        }
        Ok(Self {
            workload: builder.finish(),
            hosts,
            host_count,
        })
    }
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Args(error) => write!(f, "{error}"),
            Self::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Line(line) => write!(f, "line {line} of the log is not a request; see --help"),
            Self::Empty => f.write_str("the log is empty"),
        }
    }
}

impl std::error::Error for ReplayError {}

/// Text that an engine would make of a body: what comes before the messages in a template, then these.
fn rendered(body: &serde_json::Value) -> String {
    let parts = ["tools", "system", "messages", "input", "prompt"].map(|key| &body[key]);
    let texts = parts
        .into_iter()
        .filter(|part| !part.is_null())
        .map(ToString::to_string);
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_sorted_by_time_and_its_hosts_are_numbered() {
        let text = "long shared head ".repeat(40);
        let log = format!(
            "{{\"time\": 7, \"host\": \"b\", \"prompt\": \"{text}1\", \"output_tokens\": 3}}\n\
             {{\"time\": 5.5, \"host\": \"a\", \"prompt\": \"{text}2\"}}\n\n\
             {{\"time\": 9, \"host\": \"b\", \"body\": {{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}]}}}}\n"
        );
        let log = Log::parse(&log).unwrap();
        assert_eq!((log.hosts.as_slice(), log.host_count), ([0, 1, 1].as_slice(), 2));
        assert_eq!(log.workload.arrivals_us.as_ref(), [0, 1_500_000, 3_500_000]);
        assert_eq!(log.workload.requests[1].output_tokens, 3);
        assert!(log.workload.requests[1].ideal_tokens > 100);
    }

    #[test]
    fn a_damaged_line_is_named() {
        let error = |text| Log::parse(text).unwrap_err().to_string();
        assert!(error("{\"time\": 1, \"host\": \"a\", \"prompt\": \"x\"}\n{\"time\": 2}").contains("line 2"));
        assert!(error("{\"time\": 1, \"host\": \"a\"}").contains("line 1"));
        assert_eq!(error("\n"), "the log is empty");
    }
}
