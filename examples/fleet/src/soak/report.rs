//! What a long run found: figures, checks that held or not, series over time; as a table, as JSON, as an exit code.

use std::fmt::{self, Display};
use std::fs;
use std::io;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::memory::Memory;
use crate::process::workspace_root;

/// All that one run found.
#[derive(Debug, Default)]
pub struct Report {
    title: String,
    figures: Vec<(String, String)>,
    checks: Vec<Check>,
    samples: Vec<Sample>,
}

/// A claim, whether it held, and the figures by which that was judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// The claim.
    pub claim: String,
    /// Whether it held.
    pub holds: bool,
    /// The figures.
    pub figures: String,
}

/// An Envoy's memory at one moment.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Seconds since the run began.
    pub at_s: f64,
    /// Requests answered by then.
    pub requests: u64,
    /// The memory.
    pub memory: Memory,
}

impl Report {
    /// An empty one.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            ..Self::default()
        }
    }

    /// Adds a figure.
    pub fn figure(&mut self, name: impl Into<String>, value: impl Display) {
        self.figures.push((name.into(), value.to_string()));
    }

    /// Adds a check.
    pub fn check(&mut self, claim: impl Into<String>, holds: bool, figures: impl Display) {
        self.checks.push(Check {
            claim: claim.into(),
            holds,
            figures: figures.to_string(),
        });
    }

    /// Adds the memory over time, and checks that it is flat: over the second half of the run the VMs take at most
    /// `vm_slack_kib` more, and resident memory grows by at most `resident_slack_kib`, by the line of best fit.
    pub fn check_flat(&mut self, samples: Vec<Sample>, vm_slack_kib: u64, resident_slack_kib: u64) {
        let half = &samples[samples.len() / 2..];
        if let (Some(first), Some(last)) = (half.first(), half.last()) {
            let vms = |sample: &Sample| sample.memory.all_vms_kib();
            let grown_kib = vms(last).saturating_sub(vms(first));
            self.check(
                "linear memory of the VMs is flat over the second half",
                grown_kib <= vm_slack_kib && vms(last) > 0,
                format!("{grown_kib} KiB more, of {vm_slack_kib} allowed; {}", last.memory),
            );
            let resident: Vec<(f64, f64)> = half
                .iter()
                .map(|sample| (sample.at_s, sample.memory.resident_kib as f64))
                .collect();
            let grown_kib = growth(&resident);
            self.check(
                "resident memory is flat over the second half",
                grown_kib <= resident_slack_kib as f64,
                format!("{grown_kib:+.0} KiB by the line of best fit, of {resident_slack_kib} allowed"),
            );
        }
        self.samples = samples;
    }

    /// The checks.
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// Whether all checks held.
    pub fn holds(&self) -> bool {
        self.checks.iter().all(|check| check.holds)
    }

    /// Everything as JSON.
    pub fn to_json(&self) -> Value {
        let figures: serde_json::Map<String, Value> = self
            .figures
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        let checks = self
            .checks
            .iter()
            .map(|check| json!({"claim": check.claim, "holds": check.holds, "figures": check.figures}));
        let samples = self.samples.iter().map(|sample| {
            json!({
                "at_s": (sample.at_s * 10.0).round() / 10.0,
                "requests": sample.requests,
                "resident_kib": sample.memory.resident_kib,
                "vms_kib": sample.memory.vms_kib,
            })
        });
        json!({
            "title": self.title,
            "figures": figures,
            "checks": checks.collect::<Vec<_>>(),
            "memory": samples.collect::<Vec<_>>(),
        })
    }

    /// Writes the JSON to `target/reports/NAME.json`; gives the path.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, name: &str) -> io::Result<PathBuf> {
        let folder = workspace_root().join("target/reports");
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{name}.json"));
        fs::write(&path, format!("{:#}\n", self.to_json()))?;
        Ok(path)
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.title)?;
        let width = self.figures.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, value) in &self.figures {
            writeln!(f, "  {name:<width$}  {value}")?;
        }
        if !self.samples.is_empty() {
            writeln!(f, "\n  {:>8} {:>10}  memory", "seconds", "requests")?;
            let step = self.samples.len().div_ceil(SHOWN_SAMPLES).max(1);
            for sample in self.samples.iter().step_by(step) {
                writeln!(
                    f,
                    "  {:>8.0} {:>10}  {}",
                    sample.at_s, sample.requests, sample.memory
                )?;
            }
        }
        writeln!(f)?;
        for check in &self.checks {
            let word = if check.holds { "holds" } else { "FAILS" };
            writeln!(f, "  {word}  {}: {}", check.claim, check.figures)?;
        }
        Ok(())
    }
}

/// Examples of what went wrong, a line each.
pub(super) fn list(examples: &[String]) -> String {
    examples
        .iter()
        .map(|example| format!("\n    {example}"))
        .collect()
}

/// How much a value grows over a series, by the line of best fit.
fn growth(series: &[(f64, f64)]) -> f64 {
    let count = series.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| series.iter().map(of).sum::<f64>() / count;
    let (mean_x, mean_y) = (mean(|point| point.0), mean(|point| point.1));
    let covariance: f64 = series.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let variance: f64 = series.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    match (series.first(), series.last()) {
        (Some(first), Some(last)) if variance > 0.0 => covariance / variance * (last.0 - first.0),
        _ => 0.0,
    }
}

/// Examples that a report gives of what went wrong.
pub(super) const MAX_EXAMPLES: usize = 10;
/// Rows of the table of memory; the JSON has all samples.
const SHOWN_SAMPLES: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_s: f64, resident_kib: u64, vm_kib: u64) -> Sample {
        Sample {
            at_s,
            requests: 0,
            memory: Memory {
                resident_kib,
                vms_kib: vec![vm_kib],
            },
        }
    }

    #[test]
    fn growth_in_the_warm_up_is_allowed_and_later_it_is_not() {
        let run = |late_kib: u64| {
            let mut report = Report::new("");
            let resident = |at: u64| {
                if at < 10 {
                    at * 1000
                } else {
                    10_000 + (at - 10) * late_kib
                }
            };
            let samples = (0..20).map(|at| sample(at as f64, resident(at), 64)).collect();
            report.check_flat(samples, 0, 500);
            report.holds()
        };
        assert!(run(0) && run(50));
        assert!(!run(100));
    }

    #[test]
    fn a_vm_that_grows_late_fails_and_so_does_one_that_is_not_found() {
        for (late_kib, holds) in [(64, true), (128, false)] {
            let mut report = Report::new("");
            let samples = (0..20).map(|at| sample(f64::from(at), 1, if at < 15 { 64 } else { late_kib }));
            report.check_flat(samples.collect(), 0, 500);
            assert_eq!(report.holds(), holds);
        }
        let mut report = Report::new("");
        report.check_flat(vec![sample(0.0, 1, 0), sample(1.0, 1, 0)], 0, 500);
        assert!(!report.holds());
    }

    #[test]
    fn the_table_and_the_file_say_what_failed() {
        let mut report = Report::new("a run");
        report.figure("requests", 7);
        report.check("all is well", false, "it is not");
        assert!(report.to_string().contains("FAILS  all is well: it is not"));
        assert_eq!(report.to_json()["checks"][0]["holds"], json!(false));
        assert_eq!(report.to_json()["figures"]["requests"], json!("7"));
    }
}
