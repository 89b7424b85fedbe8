//! Outcomes of loads → rows of figures, and the figures of each host; rows → a table and `target/reports/*.json`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use crate::load::{LoadResult, Outcome};

mod charts;
pub mod page;
mod words;

/// What one strategy gave.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Routing strategy.
    pub strategy: String,
    /// One load a phase, in the order of the phases; fewer when it broke off.
    pub phases: Vec<LoadResult>,
    /// Cores that this process and Envoy kept busy meanwhile, where that is known.
    pub busy_cores: Option<f64>,
}

impl Run {
    /// All phases as one load.
    pub fn total(&self) -> LoadResult {
        LoadResult {
            outcomes: self
                .phases
                .iter()
                .flat_map(|phase| phase.outcomes.clone())
                .collect(),
            elapsed_s: self.phases.iter().map(|phase| phase.elapsed_s).sum(),
        }
    }

    /// Seconds that the load generator was late with 99 of 100 requests at most.
    pub fn late_p99_s(&self) -> f64 {
        let outcomes = self.phases.iter().flat_map(|phase| &phase.outcomes);
        let mut late_s: Vec<f64> = outcomes.map(|outcome| outcome.late_s).collect();
        late_s.sort_by(f64::total_cmp);
        percentile(&late_s, 0.99)
    }
}

/// Figures of one host under one load.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HostRow {
    /// Requests that it answered.
    pub requests: usize,
    /// Their prompt tokens.
    pub prompt_tokens: u64,
    /// Those found in its cache.
    pub cached_tokens: u64,
    /// How often each reason led there.
    pub reasons: BTreeMap<String, usize>,
}

impl HostRow {
    /// The hosts `replica-0` and so on, in order.
    pub fn of(result: &LoadResult, replicas: usize) -> Vec<Self> {
        let mut hosts = vec![Self::default(); replicas];
        for outcome in answered(result) {
            let Some(host) = host_number(outcome).and_then(|number| hosts.get_mut(number)) else {
                continue;
            };
            host.requests += 1;
            host.prompt_tokens += outcome.prompt_tokens;
            host.cached_tokens += outcome.cached_tokens;
            *host.reasons.entry(reason(outcome).to_owned()).or_default() += 1;
        }
        hosts
    }

    /// Prompt tokens found in the cache ÷ prompt tokens; `None` without any.
    pub fn hit_share(&self) -> Option<f64> {
        (self.prompt_tokens > 0).then(|| ratio(self.cached_tokens as f64, self.prompt_tokens as f64))
    }
}

/// Requests in flight at each host over time: `result[host][bin]` is the mean over `bin_s` seconds.
pub fn in_flight(result: &LoadResult, replicas: usize, bin_s: f64) -> Vec<Vec<f64>> {
    let bins = (result.elapsed_s / bin_s).ceil().max(1.0) as usize;
    let mut hosts = vec![vec![0.0; bins]; replicas];
    for outcome in answered(result) {
        let Some(host) = host_number(outcome).and_then(|number| hosts.get_mut(number)) else {
            continue;
        };
        let (from_s, to_s) = (outcome.at_s, outcome.at_s + outcome.total_s);
        let first = (from_s / bin_s) as usize;
        for (bin, value) in host.iter_mut().enumerate().skip(first) {
            let (begins_s, ends_s) = (bin as f64 * bin_s, (bin + 1) as f64 * bin_s);
            if begins_s >= to_s {
                break;
            }
            *value += (to_s.min(ends_s) - from_s.max(begins_s)).max(0.0) / bin_s;
        }
    }
    hosts
}

/// Times to first token of the answered requests, seconds, least first.
pub fn sorted_ttft_s(result: &LoadResult) -> Vec<f64> {
    let mut ttft_s: Vec<f64> = answered(result).map(|outcome| outcome.ttft_s).collect();
    ttft_s.sort_by(f64::total_cmp);
    ttft_s
}

fn answered(result: &LoadResult) -> impl Iterator<Item = &Outcome> {
    result.outcomes.iter().filter(|outcome| outcome.error.is_none())
}

/// Replicas of a fleet are named by their numbers.
fn host_number(outcome: &Outcome) -> Option<usize> {
    outcome.replica.rsplit_once('-')?.1.parse().ok()
}

/// Why a request went where it went.
fn reason(outcome: &Outcome) -> &str {
    outcome.debug_header("reason").unwrap_or("not told")
}

/// Figures of one strategy in one phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Routing strategy.
    pub strategy: String,
    /// Phase of the workload.
    pub phase: String,
    /// Requests sent.
    pub requests: usize,
    /// Requests that got no whole answer with status 200.
    pub errors: usize,
    /// Prompt tokens found in a cache ÷ prompt tokens.
    pub hit_share: f64,
    /// Mean time to the first token, seconds, over requests without errors.
    pub ttft_mean_s: f64,
    /// Median of the same.
    pub ttft_p50_s: f64,
    /// 99th percentile of the same.
    pub ttft_p99_s: f64,
    /// Answered requests per second, until the last answer ended.
    pub throughput_rps: f64,
    /// Requests of the replica that served most ÷ the mean over all replicas.
    pub max_mean_load: f64,
    /// Prompt tokens that no replica had to compute.
    pub prefill_tokens_saved: u64,
    /// How often each reason stood in `x-warmroute-reason`.
    pub reasons: BTreeMap<String, usize>,
}

impl Row {
    /// Sums up a load over a fleet of `replicas`.
    pub fn new(strategy: &str, phase: &str, result: &LoadResult, replicas: usize) -> Self {
        let answered: Vec<_> = answered(result).collect();
        let ttft_s = sorted_ttft_s(result);
        let prompt_tokens: u64 = answered.iter().map(|outcome| outcome.prompt_tokens).sum();
        let cached_tokens: u64 = answered.iter().map(|outcome| outcome.cached_tokens).sum();
        let mut served: BTreeMap<&str, usize> = BTreeMap::new();
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        for outcome in &answered {
            *served.entry(&outcome.replica).or_default() += 1;
            if let Some(reason) = outcome.debug_header("reason") {
                *reasons.entry(reason.to_owned()).or_default() += 1;
            }
        }
        let most = served.values().max().copied().unwrap_or_default();
        Self {
            strategy: strategy.to_owned(),
            phase: phase.to_owned(),
            requests: result.outcomes.len(),
            errors: result.outcomes.len() - answered.len(),
            hit_share: ratio(cached_tokens as f64, prompt_tokens as f64),
            ttft_mean_s: ratio(ttft_s.iter().sum(), ttft_s.len() as f64),
            ttft_p50_s: percentile(&ttft_s, 0.50),
            ttft_p99_s: percentile(&ttft_s, 0.99),
            throughput_rps: ratio(answered.len() as f64, result.elapsed_s),
            max_mean_load: ratio((most * replicas) as f64, answered.len() as f64),
            prefill_tokens_saved: cached_tokens,
            reasons,
        }
    }
}

/// The rows as a table for people.
pub fn table(rows: &[Row]) -> String {
    let mut out = format!(
        "{:<18} {:<7} {:>8} {:>6} {:>6} {:>9} {:>9} {:>9} {:>8} {:>14}\n",
        "strategy",
        "phase",
        "requests",
        "errors",
        "hit %",
        "TTFT mean",
        "p50",
        "p99",
        "max/mean",
        "tokens saved"
    );
    let mut phase = None;
    for row in rows {
        if phase.is_some_and(|phase| phase != &row.phase) {
            out.push('\n');
        }
        phase = Some(&row.phase);
        let _ = writeln!(
            out,
            "{:<18} {:<7} {:>8} {:>6} {:>6.1} {:>7.0}ms {:>7.0}ms {:>7.0}ms {:>8.2} {:>14}",
            row.strategy,
            row.phase,
            row.requests,
            row.errors,
            row.hit_share * 100.0,
            row.ttft_mean_s * 1000.0,
            row.ttft_p50_s * 1000.0,
            row.ttft_p99_s * 1000.0,
            row.max_mean_load,
            row.prefill_tokens_saved,
        );
    }
    out
}

/// Writes a report: `facts` are further fields beside `rows`.
///
/// # Errors
/// When the file or its folder cannot be written.
pub fn write(path: &Path, rows: &[Row], facts: serde_json::Value) -> io::Result<()> {
    let mut report = serde_json::json!({"rows": rows});
    if let (Some(report), serde_json::Value::Object(facts)) = (report.as_object_mut(), facts) {
        report.extend(facts);
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, format!("{report:#}\n"))
}

/// The value that a share of sorted values does not exceed (nearest rank), 0 without values.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result() -> LoadResult {
        let ok = |number: u32| Outcome {
            status: Some(200),
            ttft_s: f64::from(number) / 100.0,
            prompt_tokens: 100,
            cached_tokens: 75,
            replica: if number <= 80 {
                "a".to_owned()
            } else {
                "b".to_owned()
            },
            debug_headers: vec![("reason".to_owned(), "home".to_owned())],
            ..Outcome::default()
        };
        let mut outcomes: Vec<Outcome> = (1..=100).map(ok).collect();
        outcomes.push(Outcome {
            error: Some("status 503".to_owned()),
            ttft_s: 99.0,
            ..Outcome::default()
        });
        LoadResult {
            outcomes,
            elapsed_s: 10.0,
        }
    }

    #[test]
    fn figures_follow_from_the_outcomes() {
        let row = Row::new("hybrid", "hot_prompt", &result(), 4);
        assert_eq!((row.requests, row.errors), (101, 1));
        assert_eq!(row.hit_share, 0.75);
        assert_eq!((row.ttft_p50_s, row.ttft_p99_s), (0.5, 0.99));
        assert!((row.ttft_mean_s - 0.505).abs() < 1e-9);
        assert_eq!((row.throughput_rps, row.max_mean_load), (10.0, 3.2));
        assert_eq!(row.prefill_tokens_saved, 7500);
        assert_eq!(row.reasons.get("home"), Some(&100));
    }

    #[test]
    fn hosts_are_told_apart_by_their_names() {
        let answer = |replica: &str, at_s: f64, total_s: f64, cached_tokens: u64| Outcome {
            at_s,
            total_s,
            replica: replica.to_owned(),
            prompt_tokens: 100,
            cached_tokens,
            debug_headers: vec![("reason".to_owned(), "home".to_owned())],
            ..Outcome::default()
        };
        let result = LoadResult {
            outcomes: vec![
                answer("replica-1", 0.0, 1.5, 50),
                answer("replica-1", 1.0, 0.25, 100),
                answer("replica-9", 0.0, 1.0, 0),
                Outcome {
                    error: Some("no".to_owned()),
                    ..answer("replica-0", 0.0, 1.0, 0)
                },
            ],
            elapsed_s: 2.0,
        };
        let hosts = HostRow::of(&result, 2);
        assert_eq!((hosts[0].requests, hosts[0].hit_share()), (0, None));
        assert_eq!((hosts[1].requests, hosts[1].hit_share()), (2, Some(0.75)));
        assert_eq!(hosts[1].reasons.get("home"), Some(&2));
        let flying = in_flight(&result, 2, 0.5);
        assert_eq!(flying, [[0.0; 4], [1.0, 1.0, 1.5, 0.0]]);
    }

    #[test]
    fn a_load_without_answers_gives_zeros() {
        let outcomes = vec![Outcome {
            error: Some("no".to_owned()),
            ..Outcome::default()
        }];
        let row = Row::new(
            "x",
            "y",
            &LoadResult {
                outcomes,
                elapsed_s: 0.0,
            },
            4,
        );
        assert_eq!((row.errors, row.ttft_p99_s, row.max_mean_load), (1, 0.0, 0.0));
    }

    #[test]
    fn tables_have_one_line_a_row_and_a_gap_between_phases() {
        let rows = [
            Row::new("a", "one", &result(), 4),
            Row::new("a", "two", &result(), 4),
        ];
        assert_eq!(table(&rows).lines().count(), 4);
        let path =
            crate::process::workspace_root().join(format!("target/reports/test-{}.json", std::process::id()));
        write(&path, &rows, serde_json::json!({"seed": 1})).unwrap();
        let read: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(
            serde_json::from_value::<Vec<Row>>(read["rows"].clone()).unwrap(),
            rows
        );
        assert_eq!(read["seed"], 1);
    }
}
