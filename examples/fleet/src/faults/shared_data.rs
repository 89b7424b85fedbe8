//! Another plugin under the same `vm_id` writes over our shared data: damaged, of other versions, huge, and valid lies.

use std::time::{Duration, Instant};

use serde_json::json;

use super::load::{Load, LoadPlan, Sent};
use super::stand::{POLL, Stand, eventually};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::engine::EngineConfig;
use crate::envoy::Folder;
use crate::fleet::Fleet;

mod writes;

use writes::{CLAIMED, JOURNALS, Saboteur, TABLE, WAYS, What, now_ms, table_of};

pub(super) fn scenarios() -> Vec<Scenario> {
    let plan = |fault: &str, plan: Plan| {
        let fault = fault.to_owned();
        Scenario::new(PART, fault, move |stand| Box::pin(sabotage(stand, plan)))
    };
    let damage = |keys| Plan::of(What::Damage(keys));
    vec![
        plan("host table damaged, once each way", damage(TABLE).once()).in_short_form(),
        plan("host table damaged, over and over", damage(TABLE)),
        plan(
            "host table of 10 MB zeros, over and over",
            Plan::of(What::Zeros(TABLE)),
        ),
        plan(
            "host table of hosts that do not exist",
            Plan::of(What::PhantomHosts),
        ),
        trust("host table that nobody renews", 0),
        trust("host table from the future", 3_600_000),
        plan(
            "table sequence damaged, over and over",
            damage(&["table_sequence"]),
        ),
        plan(
            "table sequence of 10 MB zeros",
            Plan::of(What::Zeros(&["table_sequence"])),
        ),
        plan("lease damaged, over and over", damage(LEASE)),
        plan(
            "lease of 10 MB zeros, over and over",
            Plan::of(What::Zeros(LEASE)),
        ),
        plan(
            "lease of somebody who does not poll",
            Plan {
                lasts: Duration::from_secs(4),
                within: Duration::from_secs(3),
                ..Plan::of(What::GhostLease)
            },
        ),
        plan("journals damaged, once each way", damage(JOURNALS).once()).in_short_form(),
        plan("journals damaged, over and over", damage(JOURNALS)),
        plan(
            "journals of 10 MB zeros, over and over",
            Plan::of(What::Zeros(JOURNALS)),
        ),
        plan(
            "a journal that claims two hosts are full",
            Plan {
                within: Duration::from_secs(3),
                ..Plan::of(What::ForgedTallies)
            },
        ),
        plan("journal counts damaged, over and over", damage(COUNTS)),
        plan(
            "merged journals damaged, 10 workers",
            Plan {
                workers: 10,
                per_second: 300,
                ..damage(MERGED)
            },
        ),
    ]
}

/// What is written and for how long.
#[derive(Debug, Clone, Copy)]
struct Plan {
    what: What,
    /// Each way once, with a pause in which everybody reads it.
    is_once: bool,
    lasts: Duration,
    workers: u32,
    /// Requests.
    per_second: u32,
    /// How long things may stay worse after the last write.
    within: Duration,
}

impl Plan {
    const fn of(what: What) -> Self {
        Self {
            what,
            is_once: false,
            lasts: Duration::from_millis(2500),
            workers: 2,
            per_second: 60,
            within: POLL.saturating_add(Duration::from_secs(1)),
        }
    }

    const fn once(self) -> Self {
        Self {
            is_once: true,
            ..self
        }
    }
}

async fn sabotage(stand: &Stand, plan: Plan) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, stand.fleet(4, EngineConfig::default()).await?);
    let mut config = stand.config_of(&fleet);
    let load_plan = LoadPlan {
        per_second: plan.per_second,
        ..LoadPlan::default()
    };
    let (before, after) = if stand.is_short {
        (Duration::from_millis(600), Duration::from_millis(600))
    } else {
        (Duration::from_secs(1), plan.within + Duration::from_secs(1))
    };
    let lasts = if plan.is_once {
        PAUSE_ONCE * WAYS as u32
    } else {
        plan.lasts
    };
    if !stand.is_filtered() {
        let gateway = stand.start(&config, plan.workers).await?;
        let load = Load::start(&gateway, load_plan);
        tokio::time::sleep(before + lasts + after).await;
        return Ok(Seen::of(load.stop().await));
    }
    let saboteur = Saboteur::start(stand, &mut config, &folder, plan.workers).await?;
    let gateway = &saboteur.gateway;
    gateway.shows("warmroute_hosts", 4).await?;
    gateway.rescraped(4).await?;
    let load = Load::start(gateway, load_plan);
    tokio::time::sleep(before).await;
    let rejected_before = gateway.stat(REJECTED).await?;
    let claimed = saboteur.hosts().await?.into_iter().take(CLAIMED);
    let claimed: Vec<String> = claimed.map(|host| host.address).collect();
    let began_at = load.elapsed();
    let (began, mut rounds) = (Instant::now(), 0);
    while if plan.is_once {
        rounds < WAYS
    } else {
        began.elapsed() < lasts
    } {
        saboteur.write(plan.what, rounds).await?;
        rounds += 1;
        tokio::time::sleep(if plan.is_once { PAUSE_ONCE } else { PAUSE }).await;
    }
    let ended = load.elapsed();
    tokio::time::sleep(after).await;
    let rejected = gateway.stat(REJECTED).await? - rejected_before;
    let mut seen = Seen::of(load.stop().await);
    let is_worse = |sent: &&Sent| is_worse(sent, &fleet);
    let mut worse = seen.sent.iter().filter(is_worse).count();
    let last = seen.sent.iter().filter(is_worse).map(|sent| sent.at).max();
    let is_worse_still = seen.sent.iter().rev().take(LAST).any(|sent| is_worse(&sent));
    let mut took = (!is_worse_still).then(|| last.unwrap_or_default().saturating_sub(ended));
    if plan.what == What::ForgedTallies {
        // Things are well when the hosts that seemed full are chosen again.
        let is_there = |sent: &&Sent| sent.host.as_ref().is_some_and(|host| claimed.contains(host));
        let between = |from, to| {
            let sent = seen.sent.iter();
            sent.filter(move |sent| sent.at >= from && sent.at < to)
        };
        let before = between(Duration::ZERO, began_at).filter(is_there).count();
        let during = between(began_at, ended).filter(is_there).count();
        worse = between(began_at, ended).count() - during;
        took = between(ended, Duration::MAX)
            .find(is_there)
            .map(|sent| sent.at - ended);
        seen.check(
            before > 10,
            "the hosts were hardly chosen before they seemed full",
        );
        seen.check(
            during * 5 < worse,
            format!("{during} requests went to hosts that seemed full"),
        );
    }
    seen.recovery = Some(Recovery {
        until: "every decision was as good as before",
        took,
        within: Some(plan.within),
    });
    seen.note = format!("written {rounds} times, refused {rejected} times; {worse} decisions worse for it");
    let is_noticed = match plan.what {
        What::Damage(keys) | What::Zeros(keys) => {
            // Nobody counts a lease or a sequence that cannot be read.
            rejected > 0 || !(keys == TABLE || keys == JOURNALS || keys == MERGED)
        }
        What::PhantomHosts | What::GhostLease | What::ForgedTallies => worse > 0,
    };
    seen.check(is_noticed, "nobody read what was written");
    let undecided = seen.sent.iter().filter(|sent| sent.reason.is_none()).count();
    seen.check(undecided == 0, format!("{undecided} requests were not decided"));
    seen.check(!gateway.process.log().contains("panicked"), "a VM panicked");
    eventually("no tally is left", async || {
        Ok(gateway.stat(IN_FLIGHT).await? == 0)
    })
    .await?;
    Ok(seen)
}

/// A table that was published so far ahead of its time, and never again: how long it is trusted.
fn trust(fault: &str, ahead_ms: u64) -> Scenario {
    Scenario::new(PART, fault, move |stand| Box::pin(trusted(stand, ahead_ms)))
}

async fn trusted(stand: &Stand, ahead_ms: u64) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, stand.fleet(4, EngineConfig::default()).await?);
    let mut config = stand.config_of(&fleet);
    let lasts = FRESH + Duration::from_secs(2);
    if !stand.is_filtered() {
        let gateway = stand.start(&config, 2).await?;
        let load = Load::start(&gateway, LoadPlan::default());
        tokio::time::sleep(lasts).await;
        return Ok(Seen::of(load.stop().await));
    }
    if let Some(plugin) = &mut config.plugin {
        // Who polls finds no hosts, and so publishes none.
        let mut settings = stand.settings();
        settings["discovery"]["admin_cluster"] = json!("nowhere");
        plugin.json = settings.to_string();
    }
    let saboteur = Saboteur::start(stand, &mut config, &folder, 2).await?;
    eventually("somebody polls", async || {
        Ok(saboteur.gateway.process.log().contains("polls now"))
    })
    .await?;
    let load = Load::start(&saboteur.gateway, LoadPlan::default());
    let published_ms = now_ms() + ahead_ms;
    let table = table_of(&fleet.addresses(), published_ms, 1);
    saboteur.publish(table.encode()).await?;
    let written = load.elapsed();
    tokio::time::sleep(lasts).await;
    let mut seen = Seen::of(load.stop().await);
    let trusting = |sent: &&Sent| {
        let reason = sent.reason.as_deref().unwrap_or_default();
        !matches!(reason, "no_hosts" | "table_stale" | "no_table")
    };
    let trusted: Vec<Duration> = seen.sent.iter().filter(trusting).map(|sent| sent.at).collect();
    let read = seen.sent.iter().filter(|sent| sent.at > written);
    let read = read
        .filter(|sent| sent.reason.as_deref() != Some("no_hosts"))
        .count();
    seen.check(read > 0, "nobody read the table");
    if ahead_ms == 0 {
        seen.check(!trusted.is_empty(), "nobody trusted the table while it was fresh");
    } else {
        let count = trusted.len();
        seen.check(
            count == 0,
            format!("{count} decisions trusted a table from the future"),
        );
    }
    let last = trusted.into_iter().max().unwrap_or_default();
    seen.recovery = Some(Recovery {
        until: "the table was not trusted any more",
        took: Some(last.saturating_sub(written)),
        within: Some(FRESH + Duration::from_millis(100)),
    });
    Ok(seen)
}

/// Decided without what the table or the journals would have told, or by lies.
fn is_worse(sent: &Sent, fleet: &Fleet) -> bool {
    let reason = sent.reason.as_deref().unwrap_or_default();
    let host = sent.host.as_deref().unwrap_or_default();
    let is_bridged = matches!(reason, "table_stale" | "no_table" | "no_hosts");
    is_bridged || fleet.replica(host).is_none()
}

const PART: &str = "shared data";
const LEASE: &[&str] = &["lease"];
const COUNTS: &[&str] = &["journal_sequences", "journals_merge_began"];
const MERGED: &[&str] = &["journals_merged"];
const REJECTED: &str = "warmroute_shared_blobs_rejected_total";
const IN_FLIGHT: &str = "warmroute_requests_in_flight.pool.llm";
/// Requests at the end that have to be as before.
const LAST: usize = 5;
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_ONCE: Duration = Duration::from_millis(200);
/// `table_fresh_ms` by default.
const FRESH: Duration = Duration::from_secs(3);
