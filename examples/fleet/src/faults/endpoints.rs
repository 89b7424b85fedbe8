//! Faults of the set of endpoints: they leave and return, drain, are all down, restart in turn, are very many.

use std::time::Duration;

use super::load::{Load, LoadPlan, Sent};
use super::stand::{Gateway, POOL, Stand, busiest, eventually};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::engine::EngineConfig;
use crate::envoy::{Folder, write_atomically};
use crate::envoy_config::{PoolConfig, ToldEndpoint};
use crate::fleet::Fleet;
use crate::workload::enough_for;

mod crowd;

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = vec![
        Scenario::new(PART, "removed, restarted and back at its address", |stand| {
            Box::pin(removed(stand))
        }),
        Scenario::new(PART, "draining", |stand| Box::pin(draining(stand))),
        Scenario::new(
            PART,
            "two of priority 1 stand by while those of priority 0 go and return",
            |stand| Box::pin(failover(stand)),
        ),
        Scenario::new(PART, "all down, then all back", |stand| Box::pin(all_down(stand))),
        Scenario::new(PART, "restarted in turn", |stand| Box::pin(rolling(stand))).in_short_form(),
    ];
    scenarios.extend(crowd::scenarios());
    scenarios
}

async fn removed(stand: &Stand) -> Result<Seen, FaultError> {
    let mut set = EndpointSet::start(stand, 4, 0).await?;
    let plan = LoadPlan {
        streams_every: u64::MAX,
        ..LoadPlan::default()
    };
    let load = Load::start(&set.gateway, plan.clone());
    tokio::time::sleep(WARM_UP).await;
    let gone = busiest(&set.fleet);
    let address = set.fleet.replicas[gone].address();
    let gone_at = load.elapsed();
    set.announce(|number| (number != gone).then_some("HEALTHY"))?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    set.fleet.replicas[gone].restart().await?;
    let posts = set.fleet.replicas[gone].posts_received();
    let mut sent = load.stop().await;
    set.announce(|_| Some("HEALTHY"))?;
    // The beginnings that it had, which are elsewhere now, and enough new ones for it to get its part of them.
    let plan = LoadPlan {
        prefixes: plan.prefixes + enough_for(set.fleet.replicas.len()) as u64,
        ..plan
    };
    let load = Load::start(&set.gateway, plan);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let posts = set.fleet.replicas[gone].posts_received() - posts;
    let after = load.stop().await;

    let chosen = |sent: &&Sent| sent.host.as_deref() == Some(&address.to_string());
    let while_gone = sent.iter().filter(chosen).filter(|sent| sent.at > gone_at);
    let last = while_gone.map(|sent| sent.at).max();
    let false_claims = after
        .iter()
        .filter(chosen)
        .filter(|sent| sent.matched_bytes > Some(0) && sent.cached_tokens == Some(0))
        .count();
    sent.extend(after);
    let mut seen = Seen::of(sent);
    seen.check(posts > 0, "it got nothing once it was back");
    if stand.is_filtered() {
        seen.check(
            false_claims == 0,
            format!("{false_claims} requests sent to it for what it had lost"),
        );
        seen.note = format!("{posts} requests went to it once it was back");
        seen.recovery = Some(Recovery {
            until: "it was chosen no more after it left",
            took: Some(last.unwrap_or(gone_at) - gone_at),
            within: Some(DISCOVERY + Duration::from_secs(1)),
        });
    }
    Ok(seen)
}

async fn draining(stand: &Stand) -> Result<Seen, FaultError> {
    let set = EndpointSet::start(stand, 4, 0).await?;
    let load = Load::start(&set.gateway, LoadPlan::default());
    tokio::time::sleep(WARM_UP).await;
    let drained = busiest(&set.fleet);
    let victim = &set.fleet.replicas[drained];
    let drained_at = load.elapsed();
    set.announce(|number| Some(if number == drained { "DRAINING" } else { "HEALTHY" }))?;
    let (mut posts, mut last) = (victim.posts_received(), Duration::ZERO);
    while load.elapsed() < drained_at + Duration::from_secs(4) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let now = victim.posts_received();
        if now > posts {
            (posts, last) = (now, load.elapsed() - drained_at);
        }
    }
    let mut seen = Seen::of(load.stop().await);
    seen.recovery = stand.is_filtered().then_some(Recovery {
        until: "nothing was sent to it any more",
        took: Some(last),
        within: Some(DISCOVERY + Duration::from_secs(1)),
    });
    Ok(seen)
}

/// A region that stands by gets nothing while it is not needed, all of it while the first is gone, and nothing afterwards.
async fn failover(stand: &Stand) -> Result<Seen, FaultError> {
    let set = EndpointSet::start(stand, 4, 2).await?;
    if stand.is_filtered() {
        set.gateway.shows("warmroute_hosts_taking_traffic", 2).await?;
    }
    let standby: Vec<String> = set.fleet.replicas[2..]
        .iter()
        .map(|r| r.name().to_owned())
        .collect();
    let load = Load::start(&set.gateway, LoadPlan::default());
    tokio::time::sleep(WARM_UP).await;
    let gone_at = load.elapsed();
    set.announce(|number| Some(if number < 2 { "UNHEALTHY" } else { "HEALTHY" }))?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let back_at = load.elapsed();
    set.announce(|_| Some("HEALTHY"))?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut seen = Seen::of(load.stop().await);
    let is_standby = |sent: &&Sent| sent.replica.as_ref().is_some_and(|name| standby.contains(name));
    let early = seen
        .sent
        .iter()
        .filter(is_standby)
        .filter(|sent| sent.at + sent.took < gone_at);
    let early = early.count();
    let gone = seen
        .sent
        .iter()
        .filter(|sent| sent.at >= gone_at && sent.at < back_at);
    let (there, all) = gone.fold((0, 0), |(there, all), sent| {
        (there + u32::from(is_standby(&sent)), all + 1)
    });
    let last = seen.sent.iter().filter(is_standby).map(|sent| sent.at).max();
    seen.check(
        early == 0,
        format!("{early} requests went to hosts that stand by"),
    );
    seen.check(
        there > all / 2,
        format!("{there} of {all} requests went to hosts that stood by"),
    );
    seen.note = format!("{there} of {all} requests were served by them while they were needed");
    seen.recovery = stand.is_filtered().then_some(Recovery {
        until: "they stood by again",
        took: last.map(|last| last.saturating_sub(back_at)),
        within: Some(DISCOVERY + Duration::from_secs(1)),
    });
    Ok(seen)
}

async fn all_down(stand: &Stand) -> Result<Seen, FaultError> {
    let mut set = EndpointSet::start(stand, 4, 0).await?;
    let load = Load::start(&set.gateway, LoadPlan::default());
    tokio::time::sleep(WARM_UP).await;
    let down_at = load.elapsed();
    for replica in &mut set.fleet.replicas {
        replica.stop().await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    for replica in &mut set.fleet.replicas {
        replica.restart().await?;
    }
    let up_at = load.elapsed();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut sent = load.stop().await;
    let lost = |sent: &Sent| sent.at + sent.took >= down_at && sent.at <= up_at && sent.has_failed();
    let count = sent.iter().filter(|sent| lost(sent)).count();
    for sent in &mut sent {
        // Nobody could have served it.
        sent.is_lost_with_engine = lost(sent);
    }
    let answered = sent.iter().filter(|sent| sent.at > up_at && !sent.has_failed());
    let first = answered.map(|sent| sent.at + sent.took - up_at).min();
    let mut seen = Seen::of(sent);
    seen.check(count > 50, format!("{count} requests failed while all were down"));
    seen.note = format!("{count} requests failed while all were down");
    seen.recovery = stand.is_filtered().then_some(Recovery {
        until: "requests were answered again",
        took: first,
        within: Some(Duration::from_secs(1)),
    });
    Ok(seen)
}

/// As an orchestrator rolls out a new version: out of the endpoints, time to finish what runs, a new process, in again.
async fn rolling(stand: &Stand) -> Result<Seen, FaultError> {
    let replicas = if stand.is_short { 3 } else { 5 };
    let mut set = EndpointSet::start(stand, replicas, 0).await?;
    let load = Load::start(&set.gateway, LoadPlan::default());
    tokio::time::sleep(stand.long_or_short(WARM_UP, Duration::from_millis(500))).await;
    for turn in 0..replicas {
        set.announce(|number| (number != turn).then_some("HEALTHY"))?;
        tokio::time::sleep(stand.long_or_short(Duration::from_millis(700), Duration::from_millis(400))).await;
        let victim = &set.fleet.replicas[turn];
        eventually("what runs on it ends", async || Ok(victim.queue() == (0, 0))).await?;
        // Answers that are complete may still be on their way.
        tokio::time::sleep(Duration::from_millis(100)).await;
        set.fleet.replicas[turn].restart().await?;
        set.announce(|_| Some("HEALTHY"))?;
        tokio::time::sleep(stand.long_or_short(Duration::from_millis(600), Duration::from_millis(300))).await;
    }
    let mut seen = Seen::of(load.stop().await);
    let failed = seen.sent.iter().filter(|sent| sent.has_failed()).count();
    if stand.is_filtered() {
        seen.check(failed == 0, format!("{failed} requests failed"));
    }
    seen.note = format!("{replicas} engines");
    Ok(seen)
}

/// A fleet whose endpoints Envoy reads from a file.
struct EndpointSet {
    fleet: Fleet,
    gateway: Gateway,
    pool: PoolConfig,
    /// How many of the last ones have the lower priority.
    standby: usize,
    /// Kept until the end, since the file is in it.
    _folder: Folder,
}

impl EndpointSet {
    /// `standby` of the replicas, the last ones, have the lower priority.
    async fn start(stand: &Stand, replicas: usize, standby: usize) -> Result<Self, FaultError> {
        let fleet = stand.fleet(replicas, EngineConfig::default()).await?;
        let folder = Folder::new()?;
        let mut pool = PoolConfig::new(POOL, Vec::new());
        let path = folder.file("endpoints.json");
        let told = told(&fleet, standby, |_| Some("HEALTHY"));
        write_atomically(&path, &pool.told_endpoints_file(&told))?;
        pool.eds_path = Some(path);
        let config = stand.config(pool.clone(), &stand.settings());
        let gateway = stand.ready(&config, replicas).await?;
        Ok(Self {
            fleet,
            gateway,
            pool,
            standby,
            _folder: folder,
        })
    }

    /// Tells Envoy of the replicas, each by its number with the health given, or not at all.
    fn announce(&self, health: impl Fn(usize) -> Option<&'static str>) -> Result<(), FaultError> {
        if let Some(path) = &self.pool.eds_path {
            let told = told(&self.fleet, self.standby, health);
            write_atomically(path, &self.pool.told_endpoints_file(&told))?;
        }
        Ok(())
    }
}

fn told(fleet: &Fleet, standby: usize, health: impl Fn(usize) -> Option<&'static str>) -> Vec<ToldEndpoint> {
    let addresses = fleet.addresses();
    let first_standby = addresses.len() - standby;
    let told = |(number, address)| {
        Some(ToldEndpoint {
            address,
            health: health(number)?,
            priority: u32::from(number >= first_standby),
        })
    };
    addresses.into_iter().enumerate().filter_map(told).collect()
}

const PART: &str = "endpoints";
const WARM_UP: Duration = Duration::from_secs(2);
/// How often the companion asks for endpoints.
const DISCOVERY: Duration = Duration::from_millis(500);
