//! A workload file → phases of requests with their arrival times, the same on every machine.
//!
//! The file describes traffic by seeds, counts, rates, sizes and shares; `workloads/README.md` lists its fields. Prompts are
//! words without meaning, so that a file stands for megabytes of them. Sizes are tokens, as the simulated engine counts
//! them. A file is its user's own: it is checked for sense, not for how much memory it asks for.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::engine::EngineModel;

mod generate;

pub use generate::Rng;

/// The workload that `cargo demo` runs.
pub const DEMO: &str = include_str!("../workloads/demo.json");
/// The short one of `cargo demo --quick`.
pub const QUICK: &str = include_str!("../workloads/quick.json");

/// One request to send.
#[derive(Debug, Clone)]
pub struct PlannedRequest {
    /// When, milliseconds after the phase's start.
    pub at_ms: u64,
    /// Where to.
    pub path: &'static str,
    /// Its JSON body.
    pub body: Bytes,
}

/// A fleet and the traffic for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// What it is, for the report.
    pub about: String,
    /// Equal seeds give equal requests.
    pub seed: u64,
    /// What serves it.
    pub fleet: FleetSpec,
    /// Output tokens of each request.
    pub output_tokens: usize,
    /// What is sent, one after the other; caches stay from one to the next.
    pub phases: Vec<Phase>,
}

/// The replicas that a workload is made for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetSpec {
    /// How many.
    pub replicas: usize,
    /// Name of an [`EngineModel`] preset.
    pub engine: String,
    /// How many times as fast as the preset the engines are.
    pub speed: f64,
}

/// One kind of traffic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Short name, for tables.
    pub name: String,
    /// Name for headings.
    pub title: String,
    /// What it is and why its numbers are what they are, for the report.
    pub about: String,
    /// The traffic.
    pub traffic: Traffic,
}

/// Kinds of traffic with their numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Traffic {
    /// Conversations whose every turn sends all that was said before.
    Chat(Chat),
    /// Questions about documents that many ask about.
    Documents(Documents),
    /// One system prompt on much of the traffic.
    HotPrompt(HotPrompt),
}

/// Numbers of [`Traffic::Chat`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chat {
    /// How many conversations.
    pub conversations: usize,
    /// They start at random moments of the first so many seconds.
    pub start_window_s: f64,
    /// Turns of a conversation.
    pub turns: Span,
    /// Seconds from one turn to the next, least and most.
    pub pause_s: [f64; 2],
    /// Different system prompts; each conversation has one of them.
    pub system_prompts: usize,
    /// Size of a system prompt.
    pub system_tokens: Span,
    /// Size of the first message.
    pub first_tokens: Span,
    /// Size of each later message of the user.
    pub user_tokens: Span,
    /// Size of each answer, as it comes back with the next turn.
    pub answer_tokens: Span,
}

/// Numbers of [`Traffic::Documents`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Documents {
    /// How many questions.
    pub requests: usize,
    /// Questions per second on average; gaps are exponential, as independent users leave them.
    pub rate_per_s: f64,
    /// How many documents.
    pub documents: usize,
    /// Size of a document.
    pub document_tokens: Span,
    /// Document `i` is asked about in proportion to 1 ÷ (`i` + this).
    pub popularity_offset: f64,
    /// Size of the instructions before every document.
    pub system_tokens: Span,
    /// Size of a question.
    pub question_tokens: Span,
}

/// Numbers of [`Traffic::HotPrompt`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotPrompt {
    /// How many requests.
    pub requests: usize,
    /// Requests per second on average; gaps are exponential.
    pub rate_per_s: f64,
    /// Part of the requests that has the hot prompt, 0 to 1.
    pub hot_share: f64,
    /// Size of the hot prompt.
    pub hot_tokens: Span,
    /// Size of what follows the hot prompt, different each time.
    pub hot_own_tokens: Span,
    /// How many other system prompts the rest has.
    pub other_prompts: usize,
    /// Size of each of these.
    pub other_tokens: Span,
    /// Size of what follows one of these.
    pub other_own_tokens: Span,
}

/// A number drawn evenly from the first to the second, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "[usize; 2]", into = "[usize; 2]")]
pub struct Span {
    least: usize,
    most: usize,
}

impl TryFrom<[usize; 2]> for Span {
    type Error = SpanError;

    fn try_from([least, most]: [usize; 2]) -> Result<Self, Self::Error> {
        if least > most {
            return Err(SpanError { least, most });
        }
        Ok(Self { least, most })
    }
}

impl From<Span> for [usize; 2] {
    fn from(span: Span) -> Self {
        [span.least, span.most]
    }
}

impl Workload {
    /// Reads a workload file.
    ///
    /// # Errors
    /// Says what cannot be understood or run.
    pub fn parse(json: &str) -> Result<Self, WorkloadError> {
        let workload: Self = serde_json::from_str(json).map_err(WorkloadError::Json)?;
        let fleet = &workload.fleet;
        if EngineModel::preset(&fleet.engine).is_none() {
            return Err(WorkloadError::UnknownEngine(fleet.engine.clone()));
        }
        let mut numbers = vec![
            ("fleet.speed", fleet.speed),
            ("fleet.replicas", fleet.replicas as f64),
            ("phases", workload.phases.len() as f64),
        ];
        for phase in &workload.phases {
            match &phase.traffic {
                Traffic::Chat(chat) => numbers.extend([
                    ("chat.conversations", chat.conversations as f64),
                    ("chat.start_window_s", chat.start_window_s),
                    ("chat.turns", chat.turns.least as f64),
                    ("chat.pause_s", chat.pause_s[0]),
                    ("chat.pause_s", chat.pause_s[1]),
                    ("chat.system_prompts", chat.system_prompts as f64),
                ]),
                Traffic::Documents(documents) => numbers.extend([
                    ("documents.requests", documents.requests as f64),
                    ("documents.rate_per_s", documents.rate_per_s),
                    ("documents.documents", documents.documents as f64),
                    ("documents.popularity_offset", documents.popularity_offset),
                ]),
                Traffic::HotPrompt(hot) => {
                    numbers.extend([
                        ("hot_prompt.requests", hot.requests as f64),
                        ("hot_prompt.rate_per_s", hot.rate_per_s),
                        ("hot_prompt.other_prompts", hot.other_prompts as f64),
                    ]);
                    if !(0.0..=1.0).contains(&hot.hot_share) {
                        return Err(WorkloadError::Share(hot.hot_share));
                    }
                }
            }
        }
        match numbers
            .into_iter()
            .find(|(_, number)| !(number.is_finite() && *number > 0.0))
        {
            Some((field, _)) => Err(WorkloadError::NotPositive(field)),
            None => Ok(workload),
        }
    }

    /// The same with another seed.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// What each replica's engine is.
    pub fn engine(&self) -> EngineModel {
        EngineModel::preset(&self.fleet.engine)
            .unwrap_or_else(EngineModel::llama_8b_h100x1)
            .at_speed(self.fleet.speed)
    }

    /// The requests of each phase, in order of their arrival.
    pub fn requests(&self) -> Vec<Vec<PlannedRequest>> {
        let phases = self.phases.iter().zip(0..);
        phases
            .map(|(phase, number)| generate::requests(self, &phase.traffic, number))
            .collect()
    }
}

/// Two numbers that are no span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanError {
    least: usize,
    most: usize,
}

impl fmt::Display for SpanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { least, most } = self;
        write!(f, "expected [least, most], got [{least}, {most}]")
    }
}

/// Why a workload file was refused.
#[derive(Debug)]
pub enum WorkloadError {
    /// It is not JSON, or not with these fields.
    Json(serde_json::Error),
    /// There is no such preset.
    UnknownEngine(String),
    /// That field has to be more than 0.
    NotPositive(&'static str),
    /// The share of the hot prompt is none.
    Share(f64),
}

impl fmt::Display for WorkloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => write!(f, "{error}"),
            Self::UnknownEngine(name) => write!(f, "fleet.engine: there is no preset `{name}`"),
            Self::NotPositive(field) => write!(f, "{field}: expected a number above 0"),
            Self::Share(share) => write!(f, "hot_prompt.hot_share: expected 0 to 1, got {share}"),
        }
    }
}

impl std::error::Error for WorkloadError {}

/// Text of so many bytes that nothing else begins with.
pub fn text(seed: &str, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 32);
    let mut number = 0;
    while text.len() < bytes {
        text.push_str(&format!("{seed}-{number} "));
        number += 1;
    }
    text.truncate(bytes);
    text
}

/// So many prompts that each of the hosts is the home of at least one, whatever their addresses hash to, and that each gets
/// one where chance chooses: up to 512 hosts, one is left out less than once in a hundred thousand times; up to eight, less than
/// once in ten million.
pub const fn enough_for(hosts: usize) -> usize {
    hosts * 20
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_prompts_leave_no_host_out() {
        let left_out = |hosts: usize| {
            let missed = 1.0 - 1.0 / hosts as f64;
            hosts as f64 * missed.powi(enough_for(hosts) as i32)
        };
        assert!((2..=8).all(|hosts| left_out(hosts) < 1e-7));
        assert!((2..=512).all(|hosts| left_out(hosts) < 1e-5));
    }

    #[test]
    fn the_committed_files_are_workloads_and_stay_so_when_written() {
        for text in [DEMO, QUICK] {
            let workload = Workload::parse(text).unwrap();
            assert_eq!(workload.fleet.replicas, 8);
            assert_eq!(workload.phases.len(), 3);
            let written = serde_json::to_string(&workload).unwrap();
            assert_eq!(Workload::parse(&written).unwrap(), workload);
        }
    }

    #[test]
    fn every_field_is_explained() {
        let explained = include_str!("../workloads/README.md");
        let mut open = vec![serde_json::from_str::<serde_json::Value>(DEMO).unwrap()];
        while let Some(value) = open.pop() {
            match value {
                serde_json::Value::Object(fields) => {
                    for (name, value) in fields {
                        assert!(explained.contains(&format!("`{name}`")), "{name}");
                        open.push(value);
                    }
                }
                serde_json::Value::Array(items) => open.extend(items),
                _ => {}
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (from, to, needle) in [
            ("llama_8b_h100x1", "gpt", "fleet.engine: there is no preset `gpt`"),
            ("\"hot_share\": 0.7", "\"hot_share\": 7", "hot_prompt.hot_share"),
            (
                "\"speed\": 1.0",
                "\"speed\": 0.0",
                "fleet.speed: expected a number above 0",
            ),
            ("\"seed\"", "\"sead\"", "sead"),
            (
                "\"turns\": [4, 6]",
                "\"turns\": [6, 4]",
                "expected [least, most], got [6, 4]",
            ),
        ] {
            assert!(DEMO.contains(from), "{from}");
            let error = Workload::parse(&DEMO.replacen(from, to, 1)).unwrap_err();
            assert!(error.to_string().contains(needle), "{error}");
        }
    }
}
