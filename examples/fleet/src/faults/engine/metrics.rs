//! Engines that serve well and show anything but metrics.

use std::time::Duration;

use bytes::Bytes;

use super::{FaultError, Hit, LoadPlan, PART, Scenario, Seen, Stand};
use crate::replica::{Fault, OddMetrics};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new(PART, "garbage on /metrics", |stand| {
            let garbage: Vec<u8> = (0..GARBAGE_BYTES).map(|n| (n * 7919 % 251) as u8).collect();
            Box::pin(odd(stand, OddMetrics::Text(garbage.into())))
        }),
        Scenario::new(PART, "50 MB on /metrics", |stand| {
            Box::pin(odd(stand, OddMetrics::Text(huge_metrics())))
        }),
        Scenario::new(PART, "/metrics drips for ever", |stand| {
            Box::pin(odd(stand, OddMetrics::Drip))
        }),
        Scenario::new(PART, "metrics 404", |stand| Box::pin(absent(stand))),
    ]
}

async fn odd(stand: &Stand, metrics: OddMetrics) -> Result<Seen, FaultError> {
    let hit = Hit::play(stand, LoadPlan::default(), LASTING, async |victim| {
        victim.set_odd_metrics(Some(metrics));
    })
    .await?;
    shown(stand, hit)
}

async fn absent(stand: &Stand) -> Result<Seen, FaultError> {
    let hit = Hit::play(stand, LoadPlan::default(), LASTING, async |victim| {
        victim.set_metrics_fault(Fault::Status(404));
    })
    .await?;
    shown(stand, hit)
}

/// The engine serves as well as the others, so it goes on to get requests, and Envoy does not grow without bound.
fn shown(stand: &Stand, hit: Hit) -> Result<Seen, FaultError> {
    let (share, rss_kb) = (hit.share_of_posts(), hit.grown_kb);
    let mut seen = hit.seen();
    seen.note = format!(
        "{share} % of the requests went to it, Envoy grew by {} MB",
        rss_kb / 1024
    );
    if stand.is_filtered() {
        seen.check(share > 5, "it got hardly any requests");
        seen.check(rss_kb < MAX_GROWTH_KB, "Envoy grew without bound");
    }
    Ok(seen)
}

/// Metrics that nobody asks for, and no end of them.
fn huge_metrics() -> Bytes {
    let mut text = String::with_capacity(HUGE_BYTES + 64);
    let mut number = 0;
    while text.len() < HUGE_BYTES {
        text.push_str(&format!("some_metric_total{{series=\"{number}\"}} {number}\n"));
        number += 1;
    }
    text.into()
}

const LASTING: Duration = Duration::from_secs(5);
const GARBAGE_BYTES: u32 = 100_000;
const HUGE_BYTES: usize = 50 << 20;
const MAX_GROWTH_KB: u64 = 150 << 10;
