//! What is asked of which scenario.

use super::Verdict;
use super::jobs::{JUDGED, Results};
use crate::simulator::outcome::Summary;

/// One line: a figure of a policy and its bar.
struct Line {
    scenario: &'static str,
    /// Other scenarios that it compares with.
    also: &'static [&'static str],
    what: &'static str,
    bar: Bar,
    figure: fn(&Results, &str, &str) -> Option<f64>,
}

enum Bar {
    AtMost(f64),
    AtLeast(f64),
}

const fn line(
    scenario: &'static str,
    what: &'static str,
    bar: Bar,
    figure: fn(&Results, &str, &str) -> Option<f64>,
) -> Line {
    Line {
        scenario,
        also: &[],
        what,
        bar,
        figure,
    }
}

/// Names that a scenario has to be run for: its own, and those of lines that compare with it.
pub(super) fn needs(scenario: &'static str) -> impl Iterator<Item = &'static str> {
    let compared = LINES.iter().filter(move |line| line.also.contains(&scenario));
    std::iter::once(scenario).chain(compared.map(|line| line.scenario))
}

/// Judges the lines of the scenarios that are wanted.
pub(super) fn judge(results: &Results, is_wanted: impl Fn(&str) -> bool) -> Vec<Verdict> {
    let lines = LINES.iter().filter(|line| is_wanted(line.scenario));
    let verdict = |line: &Line| {
        let (bar, is_least) = match line.bar {
            Bar::AtMost(bar) => (bar, false),
            Bar::AtLeast(bar) => (bar, true),
        };
        let figures = JUDGED.map(|policy| {
            let name = policy.to_string();
            let figure = (line.figure)(results, line.scenario, &name);
            (name, figure)
        });
        Verdict {
            scenario: line.scenario.to_owned(),
            what: line.what.to_owned(),
            bar,
            is_least,
            figures: figures.to_vec(),
        }
    };
    lines.map(verdict).collect()
}

fn over(
    results: &Results,
    scenario: &str,
    policy: &str,
    base: Option<Summary>,
    of: fn(&Summary) -> f64,
) -> Option<f64> {
    Some(of(&results.mean(scenario, policy)?) / of(&base?))
}

fn over_oracle(results: &Results, scenario: &str, policy: &str, of: fn(&Summary) -> f64) -> Option<f64> {
    over(results, scenario, policy, results.oracle(scenario), of)
}

fn over_row(
    results: &Results,
    scenario: &str,
    policy: &str,
    row: &str,
    of: fn(&Summary) -> f64,
) -> Option<f64> {
    over(results, scenario, policy, results.mean(scenario, row), of)
}

fn over_scenario(
    results: &Results,
    scenario: &str,
    policy: &str,
    other: &str,
    of: fn(&Summary) -> f64,
) -> Option<f64> {
    over(results, scenario, policy, results.mean(other, policy), of)
}

const fn mean(summary: &Summary) -> f64 {
    summary.mean_ms
}

const fn p99(summary: &Summary) -> f64 {
    summary.p99_ms
}

const fn p90(summary: &Summary) -> f64 {
    summary.p90_ms
}

const fn excess(summary: &Summary) -> f64 {
    summary.excess_ms
}

const LOR: &str = "least_outstanding";

const LINES: &[Line] = &[
    line("conv55", "mean ÷ oracle", Bar::AtMost(1.05), |r, s, p| {
        over_oracle(r, s, p, mean)
    }),
    line("conv55", "p99 ÷ oracle", Bar::AtMost(1.08), |r, s, p| {
        over_oracle(r, s, p, p99)
    }),
    line(
        "conv55",
        "mean (TTFT − unloaded) ÷ oracle",
        Bar::AtMost(1.15),
        |r, s, p| over_oracle(r, s, p, excess),
    ),
    line("conv85", "mean ÷ oracle", Bar::AtMost(1.05), |r, s, p| {
        over_oracle(r, s, p, mean)
    }),
    line("conv85", "p99 ÷ oracle", Bar::AtMost(1.08), |r, s, p| {
        over_oracle(r, s, p, p99)
    }),
    line(
        "conv85",
        "mean (TTFT − unloaded) ÷ oracle",
        Bar::AtMost(1.15),
        |r, s, p| over_oracle(r, s, p, excess),
    ),
    line(
        "conv55",
        "mean ÷ least_outstanding",
        Bar::AtMost(0.45),
        |r, s, p| over_row(r, s, p, LOR, mean),
    ),
    line("conv55", "mean ÷ SGLang rule", Bar::AtMost(0.50), |r, s, p| {
        over_row(r, s, p, "sglang", mean)
    }),
    line("conv55-infinite", "hit share", Bar::AtLeast(0.338), |r, s, p| {
        Some(r.mean(s, p)?.hit_share)
    }),
    line(
        "conv55-infinite",
        "max ÷ mean uncached work",
        Bar::AtMost(1.12),
        |r, s, p| Some(r.mean(s, p)?.max_mean_work),
    ),
    line(
        "conv55-infinite-weight4",
        "hit share with λ = 4",
        Bar::AtLeast(0.35),
        |r, s, p| Some(r.mean(s, p)?.hit_share),
    ),
    line(
        "tenants",
        "p90 of round_robin ÷ p90",
        Bar::AtLeast(57.0),
        |r, s, p| over_row(r, s, p, "round_robin", p90).map(|ratio| 1.0 / ratio),
    ),
    line("tenants", "p90 ÷ oracle", Bar::AtMost(1.05), |r, s, p| {
        over_oracle(r, s, p, p90)
    }),
    line("tenants", "hit share ÷ ideal", Bar::AtLeast(0.99), |r, s, p| {
        Some(r.mean(s, p)?.hit_share / r.ideal(s, p)?)
    }),
    line(
        "hot55",
        "p99 ÷ least_outstanding",
        Bar::AtMost(0.55),
        |r, s, p| over_row(r, s, p, LOR, p99),
    ),
    line(
        "hot55",
        "max ÷ mean uncached work",
        Bar::AtMost(1.4),
        |r, s, p| Some(r.mean(s, p)?.max_mean_work),
    ),
    line(
        "hot70",
        "p99 ÷ least_outstanding",
        Bar::AtMost(0.55),
        |r, s, p| over_row(r, s, p, LOR, p99),
    ),
    line(
        "hot70",
        "max ÷ mean uncached work",
        Bar::AtMost(1.4),
        |r, s, p| Some(r.mean(s, p)?.max_mean_work),
    ),
    line(
        "azure25",
        "mean ÷ least_outstanding",
        Bar::AtMost(0.85),
        |r, s, p| over_row(r, s, p, LOR, mean),
    ),
    line(
        "azure25",
        "p99 ÷ least_outstanding",
        Bar::AtMost(0.75),
        |r, s, p| over_row(r, s, p, LOR, p99),
    ),
    line(
        "azure45",
        "mean ÷ least_outstanding",
        Bar::AtMost(0.85),
        |r, s, p| over_row(r, s, p, LOR, mean),
    ),
    line(
        "azure45",
        "p99 ÷ least_outstanding",
        Bar::AtMost(0.75),
        |r, s, p| over_row(r, s, p, LOR, p99),
    ),
    line(
        "azure60",
        "mean ÷ least_outstanding",
        Bar::AtMost(1.0),
        |r, s, p| over_row(r, s, p, LOR, mean),
    ),
    line(
        "azure60",
        "p99 ÷ least_outstanding",
        Bar::AtMost(1.0),
        |r, s, p| over_row(r, s, p, LOR, p99),
    ),
    line(
        "sharegpt45",
        "mean ÷ least_outstanding",
        Bar::AtMost(0.70),
        |r, s, p| over_row(r, s, p, LOR, mean),
    ),
    line(
        "sharegpt45",
        "p99 ÷ least_outstanding",
        Bar::AtMost(0.70),
        |r, s, p| over_row(r, s, p, LOR, p99),
    ),
    line(
        "aibrix",
        "p99 ÷ least_outstanding",
        Bar::AtMost(1.10),
        |r, s, p| over_row(r, s, p, LOR, p99),
    ),
    line(
        "aibrix",
        "mean ÷ least_outstanding",
        Bar::AtMost(0.95),
        |r, s, p| over_row(r, s, p, LOR, mean),
    ),
    line("aibrix", "hit share", Bar::AtLeast(0.80), |r, s, p| {
        Some(r.mean(s, p)?.hit_share)
    }),
    line("8b50", "mean ÷ oracle", Bar::AtMost(1.10), |r, s, p| {
        over_oracle(r, s, p, mean)
    }),
    line("8b50", "mean ÷ SGLang rule", Bar::AtMost(0.55), |r, s, p| {
        over_row(r, s, p, "sglang", mean)
    }),
    Line {
        also: &["hosts2"],
        ..line(
            "hosts64",
            "points of hit share lost from 2 hosts",
            Bar::AtMost(3.5),
            |r, s, p| points_lost(r, "hosts2", s, p),
        )
    },
    Line {
        also: &["hosts8"],
        ..line(
            "hosts64",
            "points of hit share lost from 8 hosts",
            Bar::AtMost(1.5),
            |r, s, p| points_lost(r, "hosts8", s, p),
        )
    },
    Line {
        also: &["hosts2"],
        ..line(
            "hosts64",
            "round_robin's hit share, of that with 2 hosts",
            Bar::AtMost(0.30),
            |r, s, _| Some(r.mean(s, "round_robin")?.hit_share / r.mean("hosts2", "round_robin")?.hit_share),
        )
    },
    Line {
        also: &["hosts8"],
        ..line(
            "gateways8",
            "mean ÷ one gateway, nothing shared",
            Bar::AtMost(1.85),
            |r, s, p| over_scenario(r, s, p, "hosts8", mean),
        )
    },
    line(
        "gateways8",
        "mean ÷ least_outstanding with eight",
        Bar::AtMost(0.62),
        |r, s, p| over_row(r, s, p, LOR, mean),
    ),
    Line {
        also: &["hosts8"],
        ..line(
            "gateways8-shared",
            "mean ÷ one gateway, all shared within 200 ms",
            Bar::AtMost(1.30),
            |r, s, p| over_scenario(r, s, p, "hosts8", mean),
        )
    },
    line(
        "restart",
        "predicted − true hit share, points",
        Bar::AtMost(1.0),
        |r, s, p| r.extra(s, p).map(|gap| gap * 100.0),
    ),
    Line {
        also: &["seven-hosts"],
        ..line("slow", "p99 ÷ seven hosts", Bar::AtMost(1.03), |r, s, p| {
            over_scenario(r, s, p, "seven-hosts", p99)
        })
    },
    Line {
        also: &["seven-hosts"],
        ..line("slow", "mean ÷ seven hosts", Bar::AtMost(1.0), |r, s, p| {
            over_scenario(r, s, p, "seven-hosts", mean)
        })
    },
    line(
        "failing40",
        "% of traffic after 2 s",
        Bar::AtMost(1.0),
        |r, s, p| r.extra(s, p).map(|share| share * 100.0),
    ),
    line(
        "failing70",
        "% of traffic after 2 s",
        Bar::AtMost(1.0),
        |r, s, p| r.extra(s, p).map(|share| share * 100.0),
    ),
    line(
        "small-kv-assumed-large",
        "mean ÷ least_outstanding",
        Bar::AtMost(0.60),
        |r, s, p| over_row(r, s, p, LOR, mean),
    ),
    Line {
        also: &["small-kv-known"],
        ..line(
            "small-kv-assumed-large",
            "mean ÷ told the truth",
            Bar::AtMost(1.10),
            |r, s, p| over_scenario(r, s, p, "small-kv-known", mean),
        )
    },
];

fn points_lost(results: &Results, few: &str, many: &str, policy: &str) -> Option<f64> {
    let hit_share = |scenario| results.mean(scenario, policy).map(|summary| summary.hit_share);
    Some((hit_share(few)? - hit_share(many)?) * 100.0)
}
