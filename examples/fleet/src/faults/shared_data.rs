//! Another plugin under the same `vm_id` writes over our shared data: damaged, of other versions, huge, and valid lies.

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;
use warmroute::chunk::murmur::Murmur;
use warmroute::host_table::{Host, HostTable};
use warmroute::journal::{Journal, Tally};
use warmroute::lease::{Lease, Priority};

use super::load::{Load, LoadPlan, Sent};
use super::stand::{Folder, Gateway, POLL, POOL, Stand, eventually};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::client::Client;
use crate::engine::EngineConfig;
use crate::envoy_config::EnvoyConfig;
use crate::fleet::Fleet;
use crate::saboteur;

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// These keys: truncated, a bit flipped, of an older and a later version, empty, garbage.
    Damage(&'static [&'static str]),
    /// These keys: 10 MB of zeros.
    Zeros(&'static [&'static str]),
    /// A valid table with addresses where nobody is.
    PhantomHosts,
    /// A valid lease of the best priority.
    GhostLease,
    /// A valid journal of a worker that has thousands of requests on two hosts.
    ForgedTallies,
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
        (Duration::from_secs(1), plan.within.min(Duration::from_secs(2)))
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
    let is_worse = |sent: &&Sent| is_worse(sent, plan.what, &fleet);
    let worse = seen.sent.iter().filter(is_worse).count();
    let last = seen.sent.iter().filter(is_worse).map(|sent| sent.at).max();
    seen.recovery = Some(Recovery {
        until: "every decision was as good as before",
        took: Some(last.unwrap_or_default().saturating_sub(ended)),
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

/// The other plugin in an Envoy with ours.
struct Saboteur {
    gateway: Gateway,
    address: SocketAddr,
    client: Client,
}

impl Saboteur {
    async fn start(
        stand: &Stand,
        config: &mut EnvoyConfig,
        folder: &Folder,
        workers: u32,
    ) -> Result<Self, FaultError> {
        let wasm = folder.file("saboteur.wasm");
        let module = saboteur::module().map_err(|error| FaultError::Never(error.to_string()))?;
        fs::write(&wasm, module)?;
        let vm_id = config.plugin.as_ref().map_or("", |plugin| plugin.vm_id.as_str());
        let listener = saboteur::listener(&wasm, vm_id);
        let mut resources = config.bootstrap()["static_resources"].clone();
        if let Some(listeners) = resources["listeners"].as_array_mut() {
            listeners.push(listener);
        }
        config.extra = json!({"static_resources": resources});
        let gateway = stand.start(config, workers).await?;
        let address = gateway.process.listener(saboteur::LISTENER);
        let address = address.ok_or_else(|| FaultError::Never("the other plugin listens".to_owned()))?;
        Ok(Self {
            gateway,
            address,
            client: Client::new(),
        })
    }

    /// One round of it.
    async fn write(&self, what: What, round: usize) -> Result<(), FaultError> {
        match what {
            What::Damage(keys) => {
                for name in keys {
                    let value = self.read(name).await?.unwrap_or_default();
                    self.set(name, damaged(&value, round)).await?;
                }
                self.say_so(keys).await
            }
            What::Zeros(keys) => {
                for name in keys {
                    self.set(name, vec![0; 10_000_000]).await?;
                }
                self.say_so(keys).await
            }
            What::PhantomHosts => {
                let phantoms: Vec<SocketAddr> = (1..=4)
                    .map(|port| SocketAddr::from(([127, 0, 0, 9], port)))
                    .collect();
                self.publish(table_of(&phantoms, now_ms(), 7).encode()).await
            }
            What::GhostLease => {
                let lease = Lease {
                    holder: 1,
                    build: u32::MAX,
                    generation: u64::MAX,
                    priority: Priority::Service,
                    heartbeat_ms: now_ms(),
                };
                self.set("lease", lease.encode()).await
            }
            What::ForgedTallies => {
                let table = self.read("table").await?.unwrap_or_default();
                let hosts = HostTable::decode(&table)
                    .map(|table| table.hosts)
                    .unwrap_or_default();
                let tally = |host: &Host| Tally {
                    slot: host.slot,
                    epoch: host.epoch,
                    requests: 60_000,
                    uncached_tokens: 1 << 40,
                };
                let journal = Journal {
                    worker: 1,
                    sequence: round as u32,
                    heartbeat_ms: now_ms(),
                    tallies: hosts.iter().take(2).map(tally).collect(),
                    ..Journal::default()
                };
                self.set("journal/2", journal.encode()).await?;
                self.say_so(JOURNALS).await
            }
        }
    }

    /// Writes a table so that everybody reads it.
    async fn publish(&self, table: Vec<u8>) -> Result<(), FaultError> {
        self.set("table", table).await?;
        self.say_so(TABLE).await
    }

    /// Readers fetch a table or a journal only when its count moved.
    async fn say_so(&self, keys: &[&str]) -> Result<(), FaultError> {
        if keys == TABLE {
            let sequence = self.read("table_sequence").await?;
            let sequence = sequence
                .and_then(|bytes| bytes.try_into().ok())
                .map_or(0, u64::from_le_bytes);
            let next = sequence.wrapping_add(1).to_le_bytes();
            self.set("table_sequence", next.to_vec()).await?;
        }
        if keys == JOURNALS {
            let mut counts = self.read("journal_sequences").await?.unwrap_or_default();
            for slot in 0..4 {
                warmroute::journal::count_publication(&mut counts, slot);
            }
            self.set("journal_sequences", counts).await?;
        }
        Ok(())
    }

    async fn read(&self, name: &str) -> Result<Option<Vec<u8>>, FaultError> {
        Ok(saboteur::read(&self.client, self.address, &key(name)).await?)
    }

    async fn set(&self, name: &str, value: Vec<u8>) -> Result<(), FaultError> {
        let answer = saboteur::write(&self.client, self.address, &key(name), value).await?;
        if answer.status != 200 {
            return Err(FaultError::Never(format!("{name} is written: {}", answer.status)));
        }
        Ok(())
    }
}

fn key(name: &str) -> String {
    format!("warmroute/1/{POOL}/{name}")
}

/// The bytes damaged in one of so many ways.
fn damaged(bytes: &[u8], round: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    match round % WAYS {
        0 => bytes.truncate(bytes.len() / 2),
        1 => {
            let middle = bytes.len() / 2;
            if let Some(byte) = bytes.get_mut(middle) {
                *byte ^= 0x10;
            }
        }
        2 => seal_as(&mut bytes, 0),
        3 => seal_as(&mut bytes, 77),
        4 => bytes.clear(),
        _ => bytes = (0..500u32).map(|number| (number * 37) as u8).collect(),
    }
    bytes
}

/// As another version would have sealed it: the version is part of the checksum.
fn seal_as(bytes: &mut [u8], version: u16) {
    if let Some((header, payload)) = bytes.split_at_mut_checked(18) {
        let mut checksum = Murmur::new(version.into());
        checksum.update(payload);
        header[4..6].copy_from_slice(&version.to_le_bytes());
        header[10..18].copy_from_slice(&checksum.low64().to_le_bytes());
    }
}

fn table_of(addresses: &[SocketAddr], published_ms: u64, epoch: u32) -> HostTable {
    let host = |(slot, address): (u16, &SocketAddr)| Host {
        slot: warmroute::host_table::Slot(slot),
        epoch,
        address: address.to_string(),
        weight: 1,
        sampled_ms: published_ms,
        ..Host::default()
    };
    HostTable {
        published_ms,
        hosts: (0..).zip(addresses).map(host).collect(),
    }
}

/// Decided without what the table or the journals would have told, or by lies.
fn is_worse(sent: &Sent, what: What, fleet: &Fleet) -> bool {
    let reason = sent.reason.as_deref().unwrap_or_default();
    let host = sent.host.as_deref().unwrap_or_default();
    let is_pushed_away = what == What::ForgedTallies && reason == "overflow_cost";
    let is_bridged = matches!(reason, "table_stale" | "no_table" | "no_hosts");
    is_pushed_away || is_bridged || fleet.replica(host).is_none()
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u64
}

const PART: &str = "shared data";
const TABLE: &[&str] = &["table"];
const LEASE: &[&str] = &["lease"];
/// Those of the two workers with the beginnings of their archives, and one that nobody has.
const JOURNALS: &[&str] = &[
    "journal/0",
    "journal/0/0",
    "journal/1",
    "journal/1/0",
    "journal/3",
];
const COUNTS: &[&str] = &["journal_sequences", "journals_merge_began"];
const MERGED: &[&str] = &["journals_merged"];
const REJECTED: &str = "warmroute_shared_blobs_rejected_total";
const IN_FLIGHT: &str = "warmroute_requests_in_flight.pool.llm";
/// Kinds of damage.
const WAYS: usize = 6;
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_ONCE: Duration = Duration::from_millis(200);
/// `table_fresh_ms` by default.
const FRESH: Duration = Duration::from_secs(3);
