//! Rows of figures → whether what Warmroute promises of them holds.

use serde::Serialize;

use crate::report::Row;

/// A promise, and what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Claim {
    /// The promise in words.
    pub promise: String,
    /// What was measured, in words.
    pub measured: String,
    /// Whether it holds; `None` where a strategy or phase that it speaks of was not run.
    pub holds: Option<bool>,
}

/// Checks all promises: `totals` has one row a strategy over all phases, `hot` those of the phase with a hot prompt.
pub fn check(totals: &[Row], hot: &[Row]) -> Vec<Claim> {
    let mut claims = Vec::new();
    for ours in OURS {
        for baseline in BASELINES {
            claims.push(Claim::faster(
                format!("{ours}: mean TTFT at least {MEAN_FACTOR} times lower than {baseline}'s"),
                find(totals, ours).map(|row| row.ttft_mean_s),
                find(totals, baseline).map(|row| row.ttft_mean_s),
                MEAN_FACTOR,
            ));
        }
    }
    for ours in OURS {
        claims.push(Claim::faster(
            format!(
                "{ours}: p99 TTFT at least {P99_FACTOR} times lower than prefix_hash's with a hot prompt"
            ),
            find(hot, ours).map(|row| row.ttft_p99_s),
            find(hot, "prefix_hash").map(|row| row.ttft_p99_s),
            P99_FACTOR,
        ));
    }
    let requests: usize = totals.iter().map(|row| row.requests).sum();
    let errors: usize = totals.iter().map(|row| row.errors).sum();
    claims.push(Claim {
        promise: "no request fails".to_owned(),
        measured: format!("{errors} of {requests} failed"),
        holds: Some(errors == 0),
    });
    claims
}

impl Claim {
    fn faster(promise: String, ours_s: Option<f64>, other_s: Option<f64>, factor: f64) -> Self {
        let (Some(ours_s), Some(other_s)) = (ours_s, other_s) else {
            return Self {
                promise,
                measured: "not run".to_owned(),
                holds: None,
            };
        };
        let measured = other_s / ours_s.max(f64::MIN_POSITIVE);
        Self {
            promise,
            measured: format!(
                "{measured:.1} times ({:.0} ms against {:.0} ms)",
                ours_s * 1000.0,
                other_s * 1000.0
            ),
            holds: Some(ours_s > 0.0 && measured >= factor),
        }
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let mark = match self.holds {
            Some(true) => "holds ",
            Some(false) => "MISSED",
            None => "  -   ",
        };
        format!("{mark}  {}: {}", self.promise, self.measured)
    }
}

fn find<'a>(rows: &'a [Row], strategy: &str) -> Option<&'a Row> {
    rows.iter().find(|row| row.strategy == strategy)
}

/// Strategies that are to be better, and those that they are compared with.
const OURS: [&str; 2] = ["hybrid", "cache_aware"];
const BASELINES: [&str; 2] = ["round_robin", "least_outstanding"];
const MEAN_FACTOR: f64 = 2.0;
const P99_FACTOR: f64 = 3.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::LoadResult;

    fn row(strategy: &str, mean_s: f64, p99_s: f64, errors: usize) -> Row {
        Row {
            ttft_mean_s: mean_s,
            ttft_p99_s: p99_s,
            errors,
            requests: 10,
            ..Row::new(strategy, "x", &LoadResult::default(), 8)
        }
    }

    #[test]
    fn claims_hold_at_their_factor_and_not_below() {
        let totals = [
            row("round_robin", 0.2, 0.0, 0),
            row("least_outstanding", 0.199, 0.0, 0),
            row("hybrid", 0.1, 0.0, 0),
        ];
        let hot = [row("prefix_hash", 0.0, 3.0, 0), row("hybrid", 0.0, 1.0, 0)];
        let claims = check(&totals, &hot);
        let holds = |needle: &str| -> Vec<Option<bool>> {
            let found = claims.iter().filter(|claim| claim.promise.contains(needle));
            found.map(|claim| claim.holds).collect()
        };
        assert_eq!(holds("hybrid: mean"), [Some(true), Some(false)]);
        assert_eq!(holds("hybrid: p99"), [Some(true)]);
        assert_eq!(holds("cache_aware"), [None; 3]);
        assert_eq!(holds("no request fails"), [Some(true)]);
        assert!(
            claims[1].line().starts_with("MISSED  hybrid: mean TTFT"),
            "{}",
            claims[1].line()
        );
    }

    #[test]
    fn a_failed_request_breaks_the_promise_and_so_does_a_time_of_nothing() {
        let claims = check(
            &[row("round_robin", 1.0, 1.0, 1), row("hybrid", 0.0, 0.0, 10)],
            &[],
        );
        assert_eq!(claims[0].holds, Some(false));
        let last = claims.last().unwrap();
        assert_eq!(
            (last.holds, last.measured.as_str()),
            (Some(false), "11 of 20 failed")
        );
    }
}
