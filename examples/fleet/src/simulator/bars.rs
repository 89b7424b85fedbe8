//! The scenarios that the defaults are held to, and what is asked of them.
//!
//! In: a directory with the published traces, seeds, which scenarios. Out: one [`Verdict`] a line: figure and bar for
//! `hybrid` and for `cache_aware`. Every (scenario, policy, seed) is one job, and as many run at once as there are cores.
//! A line compares means over the seeds; the oracle of a comparison is the λ whose mean time to first token is least.

mod decision;
mod jobs;
mod lines;
mod scenarios;

use std::fmt::Write as _;

use serde::Serialize;

pub use self::jobs::{Results, RunError, run};
pub use self::scenarios::SCENARIOS;

/// What to run.
#[derive(Debug, Clone)]
pub struct BarsArgs {
    /// Directory with the traces; without it the generated conversation stands in, and lines on other traces are left out.
    pub traces: Option<std::path::PathBuf>,
    /// Only scenarios and lines whose name begins with this.
    pub only: Option<String>,
    /// Seeds 1 to this.
    pub seeds: u64,
}

/// A line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    /// Scenario that it belongs to.
    pub scenario: String,
    /// What is compared.
    pub what: String,
    /// The bar.
    pub bar: f64,
    /// Whether figures must be at least the bar rather than at most.
    pub is_least: bool,
    /// Figure of each policy; nothing where it could not be run.
    pub figures: Vec<(String, Option<f64>)>,
}

impl Verdict {
    /// Whether every figure reaches the bar.
    pub fn holds(&self) -> bool {
        let reaches = |figure: f64| {
            if self.is_least {
                figure >= self.bar
            } else {
                figure <= self.bar
            }
        };
        !self.figures.is_empty() && self.figures.iter().all(|(_, figure)| figure.is_some_and(reaches))
    }
}

/// The verdicts as a table.
pub fn table(verdicts: &[Verdict]) -> String {
    let width = verdicts
        .iter()
        .map(|verdict| verdict.what.len() + verdict.scenario.len())
        .max();
    let width = width.unwrap_or(0) + 2;
    let mut text = String::new();
    for verdict in verdicts {
        let name = format!("{}: {}", verdict.scenario, verdict.what);
        let sign = if verdict.is_least { "≥" } else { "≤" };
        let _ = write!(
            text,
            "{} {name:width$} {sign} {:<6}",
            if verdict.holds() { "ok  " } else { "FAIL" },
            verdict.bar
        );
        for (policy, figure) in &verdict.figures {
            match figure {
                Some(figure) => _ = write!(text, "  {policy} {figure:.3}"),
                None => _ = write!(text, "  {policy} not run"),
            }
        }
        text.push('\n');
    }
    text
}
