//! Faults of Envoy's admin interface, from which endpoints are read.

use std::time::Duration;

use super::load::{Load, LoadPlan};
use super::stand::{Gateway, POOL, Stand, eventually};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::engine::EngineConfig;
use crate::envoy_config::PoolConfig;
use crate::odd::{cluster_of, free_port};

mod relay;

use relay::{AdminFault, Relay};

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = vec![
        Scenario::new(PART, "absent", |stand| Box::pin(absent(stand))).in_short_form(),
        Scenario::new(PART, "answers garbage at first", |stand| {
            Box::pin(recovers(stand))
        }),
    ];
    let faults = [
        ("answers after 3 s", AdminFault::Late),
        ("drips for ever", AdminFault::Drip),
        ("20 MB of other clusters", AdminFault::Padded(20 << 20)),
        ("50 MB of other clusters", AdminFault::Padded(50 << 20)),
        ("garbage", AdminFault::Garbage),
        ("403", AdminFault::Status(403)),
        ("404", AdminFault::Status(404)),
        ("cut in the middle", AdminFault::Cut),
    ];
    scenarios.extend(
        faults.map(|(name, fault)| Scenario::new(PART, name, move |stand| Box::pin(fails(stand, fault)))),
    );
    scenarios
}

/// Nobody listens where the admin interface should be, from the start.
async fn absent(stand: &Stand) -> Result<Seen, FaultError> {
    let fleet = stand.fleet(4, EngineConfig::default()).await?;
    let mut settings = stand.settings();
    settings["discovery"]["admin_cluster"] = RELAY.into();
    let mut config = stand.config(PoolConfig::new(POOL, fleet.addresses()), &settings);
    config.extra_clusters = vec![cluster_of(RELAY, ([127, 0, 0, 1], free_port()?).into())];
    let gateway = stand.start(&config, 2).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(stand.long_or_short(Duration::from_secs(4), Duration::from_secs(2))).await;
    let mut seen = Seen::of(load.stop().await);
    if stand.is_filtered() {
        let undecided = seen
            .sent
            .iter()
            .filter(|sent| sent.host.as_deref() == Some("none"))
            .count();
        let failed = gateway.stat(FAILURES).await?;
        seen.check(failed > 0, "no discovery failed");
        let all = seen.sent.len();
        seen.check(
            undecided == all,
            format!("only {undecided} of {all} were left to Envoy"),
        );
        seen.note = "all requests are left to Envoy's own balancer".to_owned();
    }
    Ok(seen)
}

/// Bad from the start, and well later.
async fn recovers(stand: &Stand) -> Result<Seen, FaultError> {
    let fleet = stand.fleet(4, EngineConfig::default()).await?;
    let (gateway, relay) = relayed(stand, fleet.addresses(), AdminFault::Garbage).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let hosts = format!("warmroute_hosts.pool.{POOL}");
    let hosts_before = gateway.stat(&hosts).await?;
    relay.set(AdminFault::None);
    let mut took = None;
    if stand.is_filtered() {
        let known = eventually("the hosts are known", async || {
            Ok(gateway.stat(&hosts).await? == 4)
        });
        took = Some(known.await?);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut seen = Seen::of(load.stop().await);
    seen.check(hosts_before == 0, "hosts were known before");
    seen.recovery = stand.is_filtered().then_some(Recovery {
        until: "the hosts were known",
        took,
        within: Some(Duration::from_secs(2)),
    });
    Ok(seen)
}

/// Well at first, then not: the endpoints known last stay, and what is behind them is still scraped.
async fn fails(stand: &Stand, fault: AdminFault) -> Result<Seen, FaultError> {
    let fleet = stand.fleet(4, EngineConfig::default()).await?;
    let (gateway, relay) = relayed(stand, fleet.addresses(), AdminFault::None).await?;
    if stand.is_filtered() {
        gateway.shows("warmroute_hosts", 4).await?;
        gateway.rescraped(4).await?;
    }
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let (resident_kb, failed_before) = (gateway.resident_kb()?, gateway.stat(FAILURES).await?);
    relay.set(fault);
    let struck_at = load.elapsed();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let grown_kb = gateway.resident_kb()?.saturating_sub(resident_kb);
    let failed = gateway.stat(FAILURES).await? - failed_before;
    let asked = relay.asked();
    relay.set(AdminFault::None);
    let healed_at = load.elapsed();
    let ok_before = gateway.stat(OK).await?;
    let mut took = None;
    if stand.is_filtered() {
        let known = eventually("endpoints are read again", async || {
            Ok(gateway.stat(OK).await? > ok_before)
        });
        took = Some(known.await?);
    }
    let mut seen = Seen::of(load.stop().await);
    if !stand.is_filtered() {
        return Ok(seen);
    }
    let meanwhile = seen
        .sent
        .iter()
        .filter(|sent| sent.at > struck_at && sent.at < healed_at);
    let (all, undecided) = meanwhile.fold((0, 0), |(all, undecided), sent| {
        (
            all + 1,
            undecided + u32::from(sent.host.as_deref() == Some("none")),
        )
    });
    seen.check(asked > 0, "nobody asked");
    // Envoy takes no more than 32 MiB of an answer.
    let is_read = matches!(fault, AdminFault::Padded(bytes) if bytes < 32 << 20);
    seen.check((failed == 0) == is_read, format!("{failed} discoveries failed"));
    seen.check(undecided == 0, format!("{undecided} of {all} were left to Envoy"));
    seen.check(grown_kb < MAX_GROWTH_KB, "Envoy grew without bound");
    seen.note = format!(
        "asked {asked} times, of which {failed} failed; Envoy grew by {} MB",
        grown_kb / 1024
    );
    seen.recovery = Some(Recovery {
        until: "endpoints were read again",
        took,
        within: Some(Duration::from_secs(4)),
    });
    Ok(seen)
}

/// An Envoy whose admin interface is reached through a relay.
async fn relayed(
    stand: &Stand,
    endpoints: Vec<std::net::SocketAddr>,
    fault: AdminFault,
) -> Result<(Gateway, Relay), FaultError> {
    let admin_port = free_port()?;
    let relay = Relay::to(([127, 0, 0, 1], admin_port).into(), fault).await?;
    let mut settings = stand.settings();
    settings["discovery"]["admin_cluster"] = RELAY.into();
    let mut config = stand.config(PoolConfig::new(POOL, endpoints), &settings);
    config.admin_port = Some(admin_port);
    config.extra_clusters = vec![cluster_of(RELAY, relay.address())];
    Ok((stand.start(&config, 2).await?, relay))
}

const PART: &str = "admin";
const RELAY: &str = "relayed_admin";
const FAILURES: &str = "warmroute_discoveries_total.result.failed";
const OK: &str = "warmroute_discoveries_total.result.ok";
const MAX_GROWTH_KB: u64 = 250 << 10;
