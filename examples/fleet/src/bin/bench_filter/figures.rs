//! Runs → figures: one row for an Envoy in a cell, the ratios of its pairs, lines of a table.

use serde_json::{Value, json};

use super::Cell;
use super::load::Run;

/// Figures of one Envoy in one cell.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) requests: u64,
    rps: f64,
    p50_us: u32,
    p99_us: u32,
    cpu_us_per_request: Option<f64>,
    /// Share of a core that Envoy used: below 1, the load was what limited throughput.
    core_share: Option<f64>,
}

impl Row {
    pub(super) fn new(runs: &[Run]) -> Self {
        let mut latencies_us: Vec<u32> = runs.iter().flat_map(|run| &run.latencies_us).copied().collect();
        latencies_us.sort_unstable();
        let percentile = |percent: usize| {
            let rank = (latencies_us.len() * percent).div_ceil(100).saturating_sub(1);
            latencies_us.get(rank).copied().unwrap_or_default()
        };
        let cpu_us: Option<f64> = runs.iter().map(|run| run.cpu_us).sum();
        let elapsed_s: f64 = runs.iter().map(|run| run.elapsed_s).sum();
        Self {
            requests: latencies_us.len() as u64,
            rps: median(runs.iter().map(Run::rps).collect()),
            p50_us: percentile(50),
            p99_us: percentile(99),
            cpu_us_per_request: cpu_us.map(|cpu_us| cpu_us / latencies_us.len() as f64),
            core_share: cpu_us.map(|cpu_us| cpu_us / 1e6 / elapsed_s),
        }
    }

    pub(super) fn to_json(&self, cell: Cell, variant: &str, ratios: Option<&Ratios>) -> Value {
        json!({
            "case": cell.to_string(),
            "body_bytes": cell.body_bytes,
            "concurrency": cell.concurrency,
            "variant": variant,
            "requests": self.requests,
            "throughput_rps": self.rps,
            "ratio_median": ratios.map(|ratios| ratios.median),
            "ratio_min": ratios.map(|ratios| ratios.min),
            "ratio_max": ratios.map(|ratios| ratios.max),
            "p50_us": self.p50_us,
            "p99_us": self.p99_us,
            "cpu_us_per_request": self.cpu_us_per_request,
            "envoy_core_share": self.core_share,
        })
    }
}

/// Throughput with the filter ÷ without, over the pairs.
#[derive(Debug, PartialEq)]
pub(super) struct Ratios {
    min: f64,
    pub(super) median: f64,
    max: f64,
}

impl Ratios {
    pub(super) fn new(ratios: Vec<f64>) -> Self {
        let min = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let max = ratios.iter().copied().fold(0.0, f64::max);
        Self {
            min,
            median: median(ratios),
            max,
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.len() % 2, values.as_slice()) {
        (_, []) => 0.0,
        (0, values) => f64::midpoint(values[middle - 1], values[middle]),
        (_, values) => values[middle],
    }
}

pub(super) fn table_head() -> String {
    format!(
        "{:<13} {:<9} {:>8} {:>8} {:>8} {:>9} {:>6}   {}\n",
        "case", "variant", "req/s", "p50 µs", "p99 µs", "CPU µs", "core", "req/s ÷ plain: min median max"
    )
}

pub(super) fn table_lines(cell: Cell, plain: &Row, filtered: &Row, ratios: &Ratios) -> String {
    let line = |variant: &str, row: &Row| {
        let figure = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "?".to_owned(), |value| format!("{value:.digits$}"))
        };
        format!(
            "{:<13} {:<9} {:>8.0} {:>8} {:>8} {:>9} {:>6}",
            cell.to_string(),
            variant,
            row.rps,
            row.p50_us,
            row.p99_us,
            figure(row.cpu_us_per_request, 1),
            figure(row.core_share, 2),
        )
    };
    let more_cpu = plain.cpu_us_per_request.zip(filtered.cpu_us_per_request);
    let more_cpu = more_cpu.map(|(plain, filtered)| format!(", {:+.1} µs CPU a request", filtered - plain));
    format!(
        "{}\n{}   {:.2} {:.2} {:.2}{}\n",
        line("plain", plain),
        line("warmroute", filtered),
        ratios.min,
        ratios.median,
        ratios.max,
        more_cpu.unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_follow_from_the_runs() {
        let run = |count: u32, cpu_us| Run {
            latencies_us: (1..=count).collect(),
            elapsed_s: 2.0,
            cpu_us: Some(cpu_us),
        };
        let row = Row::new(&[run(100, 1000.0), run(100, 3000.0), run(200, 4000.0)]);
        assert_eq!((row.rps, row.p50_us, row.p99_us), (50.0, 67, 196));
        assert_eq!(row.cpu_us_per_request, Some(20.0));
        let ratios = Ratios::new(vec![0.5, 2.0, 1.0, 0.9]);
        assert_eq!(
            ratios,
            Ratios {
                min: 0.5,
                median: 0.95,
                max: 2.0
            }
        );
    }
}
