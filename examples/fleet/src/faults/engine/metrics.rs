//! Engines that serve well and show anything but metrics.

use std::time::Duration;

use bytes::Bytes;

use super::{FaultError, Hit, Load, LoadPlan, PART, Recovery, Scenario, Seen, Sent, Stand, WARM_UP, engine};
use crate::replica::{Fault, OddMetrics};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new(PART, "garbage on /metrics", |stand| {
            let garbage: Vec<u8> = (0..GARBAGE_BYTES).map(|n| (n * 7919 % 251) as u8).collect();
            Box::pin(odd(stand, OddMetrics::Text(garbage.into())))
        }),
        Scenario::new(PART, "50 MB on /metrics", |stand| {
            Box::pin(odd(stand, OddMetrics::Text(huge_metrics(50 << 20))))
        }),
        Scenario::new(PART, "20 MB on /metrics", |stand| {
            Box::pin(odd(stand, OddMetrics::Text(huge_metrics(20 << 20))))
        }),
        Scenario::new(PART, "/metrics drips for ever", |stand| {
            Box::pin(odd(stand, OddMetrics::Drip))
        }),
        Scenario::new(PART, "metrics 404", |stand| Box::pin(absent(stand))),
        Scenario::new(PART, "metrics of all hang", |stand| Box::pin(none_tells(stand))),
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

/// Once the samples are older than `table_fresh_ms`, no decision believes them.
async fn none_tells(stand: &Stand) -> Result<Seen, FaultError> {
    let fleet = stand.fleet(4, engine()).await?;
    let gateway = stand.ready(&stand.config_of(&fleet), 4).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(WARM_UP).await;
    let silent_at = load.elapsed();
    for replica in &fleet.replicas {
        replica.set_metrics_fault(Fault::Hang);
    }
    tokio::time::sleep(TABLE_FRESH + Duration::from_secs(2)).await;
    let sent = load.stop().await;
    let believing = |sent: &&Sent| {
        sent.reason
            .as_deref()
            .is_some_and(|reason| reason != "table_stale")
    };
    let last = sent.iter().filter(believing).map(|sent| sent.at).max();
    let stale = sent
        .iter()
        .filter(|sent| sent.reason.as_deref() == Some("table_stale"))
        .count();
    let mut seen = Seen::of(sent);
    if stand.is_filtered() {
        seen.check(stale > 0, "no decision knew that the samples were old");
        seen.recovery = Some(Recovery {
            until: "no decision believed the old samples",
            took: last.map(|at| at.saturating_sub(silent_at)),
            // A scrape that was answered just before is as fresh as any.
            within: Some(TABLE_FRESH + Duration::from_millis(100)),
        });
    }
    Ok(seen)
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
fn huge_metrics(bytes: usize) -> Bytes {
    let mut text = String::with_capacity(bytes + 64);
    let mut number = 0;
    while text.len() < bytes {
        text.push_str(&format!("some_metric_total{{series=\"{number}\"}} {number}\n"));
        number += 1;
    }
    text.into()
}

/// `table_fresh_ms` as shipped.
const TABLE_FRESH: Duration = Duration::from_secs(3);
const LASTING: Duration = Duration::from_secs(5);
const GARBAGE_BYTES: u32 = 100_000;
const MAX_GROWTH_KB: u64 = 150 << 10;
