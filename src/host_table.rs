//! Bytes ↔ the companion's host table.
//!
//! In: the hosts that the companion knows, with their load. Out: one versioned, checksummed blob for shared data, and
//! back. The bytes are untrusted: no panic, at most [`MAX_HOSTS`] hosts with [`MAX_ADAPTERS`] adapters each, and
//! anything that is not exactly what [`HostTable::encode`] writes is refused.

use std::fmt;

use crate::blob::{BlobError, BlobReader, BlobWriter};

/// Small number of a host within a pool, stable while the host stays; reused with a new epoch after it left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Slot(pub u16);

/// What an endpoint is used for (disaggregated serving).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Prefill and decode.
    #[default]
    Both,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

/// What is known of an endpoint from Envoy and from scrapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Health {
    /// Takes traffic.
    #[default]
    Healthy,
    /// Takes traffic where the healthy ones are not enough.
    Degraded,
    /// Failed health checks, was ejected or refuses connections.
    Unhealthy,
    /// Is being removed, or stands by as long as others are enough: what runs on it goes on.
    Draining,
}

impl Health {
    /// Whether new requests may go there.
    #[must_use]
    pub const fn takes_traffic(self) -> bool {
        match self {
            Self::Healthy | Self::Degraded => true,
            Self::Unhealthy | Self::Draining => false,
        }
    }
}

/// One host of the table.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Host {
    /// Slot number.
    pub slot: Slot,
    /// Grows each time the slot is reused or the engine process restarted.
    pub epoch: u32,
    /// `ip:port`, IPv6 in brackets, as Envoy's host map spells it.
    pub address: String,
    /// Role.
    pub role: Role,
    /// Health.
    pub health: Health,
    /// Load-balancing weight, 1 by default.
    pub weight: u32,
    /// When `load` was scraped, ms since the Unix epoch; 0 = never.
    pub sampled_ms: u64,
    /// What the engine said.
    pub load: Load,
}

/// Load of one engine as its `/metrics` tell it; absent metrics are `None`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Load {
    /// Requests waiting for their prefill.
    pub waiting: Option<u32>,
    /// Requests running.
    pub running: Option<u32>,
    /// KV cache in use, thousandths.
    pub kv_usage_permille: Option<u16>,
    /// KV cache size in tokens.
    pub kv_capacity_tokens: Option<u64>,
    /// Prefix cache: tokens queried, cumulative.
    pub prefix_queries: Option<u64>,
    /// Prefix cache: tokens hit, cumulative.
    pub prefix_hits: Option<u64>,
    /// Process start, ms since the Unix epoch.
    pub started_ms: Option<u64>,
    /// Hashes of the LoRA adapter names loaded or running (at most 64).
    pub adapters: Vec<u64>,
}

/// The table the companion publishes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HostTable {
    /// When it was published, ms since the Unix epoch.
    pub published_ms: u64,
    /// Hosts in growing slot order.
    pub hosts: Vec<Host>,
}

/// Why bytes are not a host table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostTableError {
    /// The blob around the table is damaged or something else.
    Blob(BlobError),
    /// The table was written by a build with another layout; the number is the version found.
    UnsupportedVersion(u16),
    /// The table claims more than [`MAX_HOSTS`] hosts.
    TooManyHosts(u16),
    /// The host at this position is out of slot order, or a field of it is outside its bounds.
    InvalidHost(u16),
    /// Bytes follow the last host.
    TrailingBytes,
}

impl HostTable {
    /// The table as a sealed blob. Hosts are written in slot order; of two hosts with one slot the first is kept, and
    /// hosts beyond [`MAX_HOSTS`], hosts whose address is empty, over [`MAX_ADDRESS_BYTES`] or not to be put into a header,
    /// and adapters beyond [`MAX_ADAPTERS`] are left out, so that every table that was written can be read.
    pub fn encode(&self) -> Vec<u8> {
        let mut hosts: Vec<&Host> = self
            .hosts
            .iter()
            .filter(|host| is_address(&host.address))
            .collect();
        // Where a host stands in the table breaks ties, since an unstable sort is smaller.
        hosts.sort_unstable_by_key(|host| (host.slot, core::ptr::from_ref::<Host>(host)));
        hosts.dedup_by_key(|host| host.slot);
        hosts.truncate(MAX_HOSTS);
        let mut writer = BlobWriter::new(MAGIC, VERSION, hosts.len().saturating_mul(TYPICAL_HOST_BYTES));
        writer.put_u64(self.published_ms);
        writer.put_u16(u16::try_from(hosts.len()).unwrap_or(u16::MAX));
        for host in hosts {
            write_host(&mut writer, host);
        }
        writer.seal()
    }

    /// The table in `bytes`.
    ///
    /// # Errors
    /// Whatever [`HostTable::encode`] of this version could not have written.
    pub fn decode(bytes: &[u8]) -> Result<Self, HostTableError> {
        let (version, mut reader) = BlobReader::open(MAGIC, bytes)?;
        if version != VERSION {
            return Err(HostTableError::UnsupportedVersion(version));
        }
        let published_ms = reader.u64()?;
        let count = reader.u16()?;
        if usize::from(count) > MAX_HOSTS {
            return Err(HostTableError::TooManyHosts(count));
        }
        let mut hosts: Vec<Host> = Vec::with_capacity(usize::from(count));
        for position in 0..count {
            let host = read_host(&mut reader)?.ok_or(HostTableError::InvalidHost(position))?;
            if hosts.last().is_some_and(|last| last.slot >= host.slot) {
                return Err(HostTableError::InvalidHost(position));
            }
            hosts.push(host);
        }
        if !reader.is_empty() {
            return Err(HostTableError::TrailingBytes);
        }
        Ok(Self { published_ms, hosts })
    }
}

impl From<BlobError> for HostTableError {
    fn from(error: BlobError) -> Self {
        Self::Blob(error)
    }
}

impl fmt::Display for HostTableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blob(error) => write!(f, "host table: {error}"),
            Self::UnsupportedVersion(version) => {
                write!(f, "host table has version {version}, this build reads {VERSION}")
            }
            Self::TooManyHosts(count) => {
                write!(f, "host table claims {count} hosts, at most {MAX_HOSTS} are read")
            }
            Self::InvalidHost(position) => write!(f, "host table entry {position} is invalid"),
            Self::TrailingBytes => f.write_str("host table has bytes after its last host"),
        }
    }
}

impl std::error::Error for HostTableError {}

/// Layout of a host: slot u16, epoch u32, address (u8 length + bytes), role u8, health u8, weight u32, sampled_ms u64,
/// presence u8 (bit i = the i-th optional load field follows), then the present fields in their order in [`Load`],
/// adapter count u8, adapters u64 each.
fn write_host(writer: &mut BlobWriter, host: &Host) {
    writer.put_u16(host.slot.0);
    writer.put_u32(host.epoch);
    writer.put_u8(u8::try_from(host.address.len()).unwrap_or(u8::MAX));
    writer.put_bytes(host.address.as_bytes());
    writer.put_u8(host.role.code());
    writer.put_u8(host.health.code());
    writer.put_u32(host.weight);
    writer.put_u64(host.sampled_ms);
    let load = &host.load;
    let presence = [
        (load.waiting.is_some(), HAS_WAITING),
        (load.running.is_some(), HAS_RUNNING),
        (load.kv_usage_permille.is_some(), HAS_KV_USAGE),
        (load.kv_capacity_tokens.is_some(), HAS_KV_CAPACITY),
        (load.prefix_queries.is_some(), HAS_PREFIX_QUERIES),
        (load.prefix_hits.is_some(), HAS_PREFIX_HITS),
        (load.started_ms.is_some(), HAS_STARTED),
    ];
    let presence = presence
        .iter()
        .filter(|(present, _)| *present)
        .fold(0, |bits, (_, field)| bits | field);
    writer.put_u8(presence);
    for value in [load.waiting, load.running].into_iter().flatten() {
        writer.put_u32(value);
    }
    if let Some(value) = load.kv_usage_permille {
        writer.put_u16(value);
    }
    for value in [
        load.kv_capacity_tokens,
        load.prefix_queries,
        load.prefix_hits,
        load.started_ms,
    ]
    .into_iter()
    .flatten()
    {
        writer.put_u64(value);
    }
    let adapters = load.adapters.get(..MAX_ADAPTERS).unwrap_or(&load.adapters);
    writer.put_u8(u8::try_from(adapters.len()).unwrap_or(u8::MAX));
    for adapter in adapters {
        writer.put_u64(*adapter);
    }
}

/// Reads one host; `Ok(None)` when a field is outside its bounds.
fn read_host(reader: &mut BlobReader<'_>) -> Result<Option<Host>, BlobError> {
    let slot = Slot(reader.u16()?);
    let epoch = reader.u32()?;
    let address_bytes = usize::from(reader.u8()?);
    let address = core::str::from_utf8(reader.take(address_bytes)?);
    let (role, health) = (Role::from_code(reader.u8()?), Health::from_code(reader.u8()?));
    let weight = reader.u32()?;
    let sampled_ms = reader.u64()?;
    let presence = reader.u8()?;
    let has = |field: u8| presence & field != 0;
    let mut load = Load {
        waiting: has(HAS_WAITING).then(|| reader.u32()).transpose()?,
        running: has(HAS_RUNNING).then(|| reader.u32()).transpose()?,
        kv_usage_permille: has(HAS_KV_USAGE).then(|| reader.u16()).transpose()?,
        kv_capacity_tokens: has(HAS_KV_CAPACITY).then(|| reader.u64()).transpose()?,
        prefix_queries: has(HAS_PREFIX_QUERIES).then(|| reader.u64()).transpose()?,
        prefix_hits: has(HAS_PREFIX_HITS).then(|| reader.u64()).transpose()?,
        started_ms: has(HAS_STARTED).then(|| reader.u64()).transpose()?,
        adapters: Vec::new(),
    };
    let adapter_count = usize::from(reader.u8()?);
    let (Ok(address), Some(role), Some(health)) = (address, role, health) else {
        return Ok(None);
    };
    let in_bounds = is_address(address) && adapter_count <= MAX_ADAPTERS && presence & !HAS_ALL == 0;
    if !in_bounds {
        return Ok(None);
    }
    load.adapters.reserve_exact(adapter_count);
    for _ in 0..adapter_count {
        load.adapters.push(reader.u64()?);
    }
    Ok(Some(Host {
        slot,
        epoch,
        address: address.to_owned(),
        role,
        health,
        weight,
        sampled_ms,
        load,
    }))
}

/// Whether text may stand as an address in the steering header, a list with commas. Shared data is anybody's to write.
fn is_address(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b',';
    (1..=MAX_ADDRESS_BYTES).contains(&text.len()) && text.bytes().all(is_plain)
}

impl Role {
    const fn code(self) -> u8 {
        match self {
            Self::Both => 0,
            Self::Prefill => 1,
            Self::Decode => 2,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Both),
            1 => Some(Self::Prefill),
            2 => Some(Self::Decode),
            _ => None,
        }
    }
}

impl Health {
    const fn code(self) -> u8 {
        match self {
            Self::Healthy => 0,
            Self::Degraded => 1,
            Self::Unhealthy => 2,
            Self::Draining => 3,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Healthy),
            1 => Some(Self::Degraded),
            2 => Some(Self::Unhealthy),
            3 => Some(Self::Draining),
            _ => None,
        }
    }
}

/// Hosts a table holds at most: 1 000 endpoints is the size that discovery was measured at.
pub const MAX_HOSTS: usize = 1024;

/// Bytes of an address at most; `[ipv6]:port` takes 47.
pub const MAX_ADDRESS_BYTES: usize = 64;

/// Adapters kept for a host at most.
pub const MAX_ADAPTERS: usize = 64;

const MAGIC: [u8; 4] = *b"WRHT";
/// Version of the layout above; a change of it needs a new number and new golden bytes.
const VERSION: u16 = 1;

/// Only a capacity hint: a host with an IPv4 address and every field present but adapters.
const TYPICAL_HOST_BYTES: usize = 90;

const HAS_WAITING: u8 = 1;
const HAS_RUNNING: u8 = 1 << 1;
const HAS_KV_USAGE: u8 = 1 << 2;
const HAS_KV_CAPACITY: u8 = 1 << 3;
const HAS_PREFIX_QUERIES: u8 = 1 << 4;
const HAS_PREFIX_HITS: u8 = 1 << 5;
const HAS_STARTED: u8 = 1 << 6;
const HAS_ALL: u8 = (1 << 7) - 1;

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "random values of every width")]
mod tests {
    use super::*;
    use crate::blob::tests::{Random, assert_damage_is_refused, with_version};

    fn full_host(slot: u16) -> Host {
        Host {
            slot: Slot(slot),
            epoch: 7,
            address: format!("10.0.{}.{}:8000", slot / 250, slot % 250),
            role: Role::Prefill,
            health: Health::Degraded,
            weight: 3,
            sampled_ms: 1_700_000_000_123,
            load: Load {
                waiting: Some(4),
                running: Some(17),
                kv_usage_permille: Some(812),
                kv_capacity_tokens: Some(2_097_152),
                prefix_queries: Some(123_405),
                prefix_hits: Some(79_360),
                started_ms: Some(1_699_999_000_000),
                adapters: vec![11, 12],
            },
        }
    }

    fn random_host(random: &mut Random, slot: u16) -> Host {
        let roles = [Role::Both, Role::Prefill, Role::Decode];
        let healths = [
            Health::Healthy,
            Health::Degraded,
            Health::Unhealthy,
            Health::Draining,
        ];
        let mut maybe = |bits: u32| (random.below(2) == 0).then(|| random.next() >> (64 - bits));
        let load = Load {
            waiting: maybe(32).map(|value| value as u32),
            running: maybe(32).map(|value| value as u32),
            kv_usage_permille: maybe(16).map(|value| value as u16),
            kv_capacity_tokens: maybe(64),
            prefix_queries: maybe(64),
            prefix_hits: maybe(64),
            started_ms: maybe(64),
            adapters: (0..random.below(MAX_ADAPTERS as u64 + 1))
                .map(|_| random.next())
                .collect(),
        };
        Host {
            slot: Slot(slot),
            epoch: random.next() as u32,
            address: "a".repeat(1 + random.below(MAX_ADDRESS_BYTES as u64) as usize),
            role: roles[random.below(3) as usize],
            health: healths[random.below(4) as usize],
            weight: random.next() as u32,
            sampled_ms: random.next(),
            load,
        }
    }

    #[test]
    fn random_tables_round_trip() {
        let mut random = Random::seeded(1);
        for _ in 0..200 {
            let mut hosts = Vec::new();
            for slot in 0..random.below(40) {
                hosts.push(random_host(&mut random, slot as u16 * 3));
            }
            let table = HostTable {
                published_ms: random.next(),
                hosts,
            };
            assert_eq!(HostTable::decode(&table.encode()), Ok(table));
        }
    }

    #[test]
    fn damaged_tables_are_refused() {
        let table = HostTable {
            published_ms: 9,
            hosts: vec![
                full_host(0),
                Host {
                    slot: Slot(1),
                    ..full_host(1)
                },
            ],
        };
        assert_damage_is_refused(&table.encode(), |bytes| HostTable::decode(bytes).is_err());
    }

    #[test]
    fn garbage_is_refused() {
        let mut random = Random::seeded(2);
        for length in 0..600 {
            let bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
            assert!(HostTable::decode(&bytes).is_err());
        }
    }

    #[test]
    fn sealed_garbage_never_panics() {
        let mut random = Random::seeded(3);
        for _ in 0..20_000 {
            let mut writer = BlobWriter::new(MAGIC, VERSION, 0);
            writer.put_u64(0);
            writer.put_u16(random.below(4) as u16);
            for _ in 0..random.below(120) {
                writer.put_u8(random.below(12) as u8);
            }
            let _ = HostTable::decode(&writer.seal());
        }
    }

    #[test]
    fn other_versions_are_refused_by_their_number() {
        let bytes = HostTable::default().encode();
        for version in [0, VERSION + 1, u16::MAX] {
            let other = with_version(&bytes, version);
            assert_eq!(
                HostTable::decode(&other),
                Err(HostTableError::UnsupportedVersion(version))
            );
        }
    }

    #[test]
    fn too_many_hosts_are_refused_and_never_written() {
        let mut writer = BlobWriter::new(MAGIC, VERSION, 0);
        writer.put_u64(0);
        writer.put_u16(1025);
        assert_eq!(
            HostTable::decode(&writer.seal()),
            Err(HostTableError::TooManyHosts(1025))
        );

        let table = HostTable {
            published_ms: 1,
            hosts: (0..1100).map(full_host).collect(),
        };
        assert_eq!(HostTable::decode(&table.encode()).unwrap().hosts.len(), MAX_HOSTS);
    }

    #[test]
    fn hosts_out_of_bounds_are_left_out_when_writing() {
        let hosts = vec![
            full_host(5),
            full_host(2),
            Host {
                address: String::new(),
                ..full_host(3)
            },
            Host {
                address: "x".repeat(65),
                ..full_host(4)
            },
            Host {
                epoch: 99,
                ..full_host(2)
            },
        ];
        let read = HostTable::decode(
            &HostTable {
                published_ms: 1,
                hosts,
            }
            .encode(),
        )
        .unwrap();
        assert_eq!(read.hosts, [full_host(2), full_host(5)]);

        let mut crowded = full_host(1);
        crowded.load.adapters = (0..70).collect();
        let read = HostTable::decode(
            &HostTable {
                published_ms: 1,
                hosts: vec![crowded],
            }
            .encode(),
        )
        .unwrap();
        assert_eq!(read.hosts[0].load.adapters, (0..64).collect::<Vec<u64>>());
    }

    #[test]
    fn the_first_of_many_hosts_with_one_slot_is_written() {
        let hosts = (0..200).map(|at| Host {
            epoch: u32::from(at),
            ..full_host(at * 7 % 50)
        });
        let table = HostTable {
            published_ms: 1,
            hosts: hosts.collect(),
        };
        let read = HostTable::decode(&table.encode()).unwrap();
        assert_eq!(read.hosts.len(), 50);
        for host in read.hosts {
            assert!(host.epoch < 50, "{host:?}");
        }
    }

    #[test]
    fn an_address_that_would_change_the_steering_header_is_refused() {
        for address in [
            "10.0.0.1:80,10.0.0.2:80",
            "a\r\nb:c",
            "10.0.0.1:80 ",
            "\0",
            "\u{e9}:80",
        ] {
            let mut writer = BlobWriter::new(MAGIC, VERSION, 0);
            writer.put_u64(1);
            writer.put_u16(1);
            let host = Host {
                address: address.into(),
                ..full_host(1)
            };
            write_host(&mut writer, &host);
            let refused = HostTable::decode(&writer.seal());
            assert_eq!(refused, Err(HostTableError::InvalidHost(0)), "{address:?}");
            let table = HostTable {
                published_ms: 1,
                hosts: vec![host],
            };
            assert_eq!(HostTable::decode(&table.encode()).unwrap().hosts, []);
        }
    }

    /// The bytes of version 1. The payload was laid out by hand from the layout in the docs; the checksum field was
    /// computed with the Python package mmh3 5.3.1: `mmh3.hash64(payload, 1, signed=False)[0]`.
    #[test]
    fn version_1_has_its_golden_bytes() {
        let table = HostTable {
            published_ms: 0x0102_0304_0506_0708,
            hosts: vec![Host {
                slot: Slot(2),
                epoch: 3,
                address: "[::1]:80".to_owned(),
                role: Role::Decode,
                health: Health::Draining,
                weight: 4,
                sampled_ms: 5,
                load: Load {
                    waiting: Some(6),
                    kv_usage_permille: Some(1000),
                    started_ms: Some(7),
                    adapters: vec![8],
                    ..Load::default()
                },
            }],
        };
        let hex: String = table.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, GOLDEN_1);
    }

    const GOLDEN_1: &str = "5752485401003f0000000f0f7b42bc36564e08070605040302010100020003000000085b3a3a315d3a383002030400000005000000000000004506000000e8030700000000000000010800000000000000";

    #[test]
    fn errors_say_what_is_wrong() {
        assert_eq!(
            HostTableError::UnsupportedVersion(9).to_string(),
            "host table has version 9, this build reads 1"
        );
        assert_eq!(
            HostTableError::Blob(BlobError::WrongMagic).to_string(),
            "host table: blob has the wrong magic"
        );
    }

    /// Prints what decoding costs: `cargo test --release -p warmroute --lib host_table::tests::decoding_cost -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement, not a check"]
    #[expect(clippy::disallowed_methods, reason = "measures itself")]
    fn decoding_cost() {
        let table = HostTable {
            published_ms: 9,
            hosts: (0..512).map(full_host).collect(),
        };
        let bytes = table.encode();
        let least = |run: &dyn Fn()| {
            let times = (0..2_000).map(|_| {
                let start = std::time::Instant::now();
                run();
                start.elapsed()
            });
            times.min().unwrap()
        };
        let decode = least(&|| {
            std::hint::black_box(HostTable::decode(std::hint::black_box(&bytes)).unwrap());
        });
        let encode = least(&|| {
            std::hint::black_box(std::hint::black_box(&table).encode());
        });
        println!(
            "512 hosts, {} bytes, best of 2000: decode {decode:?}, encode {encode:?}",
            bytes.len()
        );
    }
}
