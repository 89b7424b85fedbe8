//! What another plugin writes, and how.

use std::fs;
use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;
use warmroute::chunk::murmur::Murmur;
use warmroute::host_table::{Host, HostTable, Slot};
use warmroute::journal::{Journal, Tally};
use warmroute::lease::{Lease, Priority};

use super::super::FaultError;
use super::super::stand::{Gateway, POOL, Stand};
use crate::client::Client;
use crate::envoy::Folder;
use crate::envoy_config::EnvoyConfig;
use crate::saboteur;

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
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

/// The other plugin in an Envoy with ours.
pub(super) struct Saboteur {
    pub(super) gateway: Gateway,
    address: SocketAddr,
    client: Client,
}

impl Saboteur {
    pub(super) async fn start(
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
    pub(super) async fn write(&self, what: What, round: usize) -> Result<(), FaultError> {
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
                let hosts = self.hosts().await?;
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
                    tallies: hosts.iter().take(CLAIMED).map(tally).collect(),
                    ..Journal::default()
                };
                self.set("journal/2", journal.encode()).await?;
                self.say_so(JOURNALS).await
            }
        }
    }

    /// Writes a table so that everybody reads it.
    pub(super) async fn publish(&self, table: Vec<u8>) -> Result<(), FaultError> {
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

    /// The hosts of the table, in the order of their slots.
    pub(super) async fn hosts(&self) -> Result<Vec<Host>, FaultError> {
        let table = self.read("table").await?.unwrap_or_default();
        Ok(HostTable::decode(&table)
            .map(|table| table.hosts)
            .unwrap_or_default())
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

pub(super) fn table_of(addresses: &[SocketAddr], published_ms: u64, epoch: u32) -> HostTable {
    let host = |(slot, address): (u16, &SocketAddr)| Host {
        slot: Slot(slot),
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

pub(super) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u64
}

pub(super) const TABLE: &[&str] = &["table"];
/// Those of the two workers with the beginnings of their archives, and one that nobody has.
pub(super) const JOURNALS: &[&str] = &[
    "journal/0",
    "journal/0/0",
    "journal/1",
    "journal/1/0",
    "journal/3",
];
/// Hosts that seem full.
pub(super) const CLAIMED: usize = 2;
/// Kinds of damage.
pub(super) const WAYS: usize = 6;
