//! Faults of engines: they die, restart, freeze, crawl, break answers off, refuse, and show nonsense as metrics.

use std::time::{Duration, Instant};

use super::load::{Load, LoadPlan, Sent};
use super::stand::{POLL, Stand};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::engine::EngineConfig;
use crate::replica::Fault;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new(PART, "killed", |stand| Box::pin(killed(stand))).in_short_form(),
        Scenario::new(PART, "frozen: accepts and never answers", |stand| {
            Box::pin(frozen(stand))
        }),
    ]
}

async fn killed(stand: &Stand) -> Result<Seen, FaultError> {
    let mut fleet = stand.fleet(4, EngineConfig::default()).await?;
    let gateway = stand.ready(&stand.config_of(&fleet), 4).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(WARM_UP).await;
    let victim = &mut fleet.replicas[1];
    let address = victim.address().to_string();
    let killed_at = load.elapsed();
    victim.stop().await;
    tokio::time::sleep(stand.long_or_short(Duration::from_secs(6), Duration::from_secs(4))).await;
    let mut sent = load.stop().await;
    lost_with_engine(&mut sent, killed_at);
    let last = last_chosen(&sent, &address, killed_at);
    let mut seen = Seen::of(sent);
    if stand.is_filtered() {
        seen.recovery = Some(Recovery {
            until: "nothing was sent to it any more",
            took: Some(last),
            within: Some(POLL + Duration::from_secs(1)),
        });
    }
    Ok(seen)
}

async fn frozen(stand: &Stand) -> Result<Seen, FaultError> {
    let fleet = stand.fleet(4, EngineConfig::default()).await?;
    let gateway = stand.ready(&stand.config_of(&fleet), 4).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(WARM_UP).await;
    let victim = &fleet.replicas[1];
    let frozen_at = load.elapsed();
    victim.set_fault(Fault::Hang);
    victim.set_metrics_fault(Fault::Hang);
    victim.set_health_fault(Fault::Hang);
    tokio::time::sleep(stand.long_or_short(Duration::from_secs(8), Duration::from_secs(4))).await;
    let before = (victim.posts_received(), Instant::now());
    tokio::time::sleep(Duration::from_secs(1)).await;
    let late = victim.posts_received() - before.0;
    let mut sent = load.stop().await;
    lost_with_engine(&mut sent, frozen_at);
    let mut seen = Seen::of(sent);
    seen.note = format!("{late} requests sent to it in the last second");
    Ok(seen)
}

/// Marks what was in flight when an engine went away and failed: on that engine, nothing could have saved it.
fn lost_with_engine(sent: &mut [Sent], at: Duration) {
    for sent in sent {
        sent.is_lost_with_engine = sent.at < at && sent.at + sent.took >= at && sent.has_failed();
    }
}

/// When, after a moment, the filter last chose a host first.
fn last_chosen(sent: &[Sent], address: &str, after: Duration) -> Duration {
    let chosen = sent
        .iter()
        .filter(|sent| sent.host.as_deref() == Some(address) && sent.at > after);
    chosen.map(|sent| sent.at - after).max().unwrap_or_default()
}

const PART: &str = "engine";
/// Long enough for every beginning to be in a cache.
const WARM_UP: Duration = Duration::from_secs(2);
