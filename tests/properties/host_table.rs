//! Any bytes → no host table, or one that keeps its invariants and is written as the same bytes again.

use std::collections::BTreeMap;

use warmroute::chunk::murmur::Murmur;
use warmroute::host_table::{
    Health, Host, HostTable, HostTableError, Load, MAX_ADAPTERS, MAX_ADDRESS_BYTES, MAX_HOSTS, Role, Slot,
};

use super::choices::{Choices, Seen, shown};

/// Checks everything on the table or the bytes that the bytes stand for.
pub(crate) fn check(data: &[u8], seen: &mut Seen) {
    let mut choices = Choices::new(data);
    match choices.below(5) {
        0 => check_written(&mut choices, seen),
        1 => {
            let _ = check_read(choices.rest(), seen);
        }
        2 | 3 => {
            let blob = tampered(&table(&mut choices).encode(), &mut choices);
            let _ = check_read(&blob, seen);
        }
        _ => {
            // A payload that nobody wrote, under a checksum that is right.
            let version = if choices.one_in(8) { choices.u16() } else { 1 };
            let blob = sealed(*b"WRHT", version, choices.rest());
            let read = check_read(&blob, seen);
            if version != 1 {
                assert_eq!(
                    read,
                    Err(HostTableError::UnsupportedVersion(version)),
                    "{}",
                    shown(&blob)
                );
                seen.note("other version");
            }
        }
    }
}

/// What is read keeps the invariants of a table, and is what these bytes alone say.
fn check_read(blob: &[u8], seen: &mut Seen) -> Result<HostTable, HostTableError> {
    let read = HostTable::decode(blob);
    match &read {
        Ok(table) => {
            seen.note("table read");
            check_invariants(table, blob);
            assert_eq!(table.encode(), blob, "{}", shown(blob));
        }
        Err(error) => {
            seen.note("table refused");
            assert!(!error.to_string().is_empty());
        }
    }
    read
}

fn check_invariants(table: &HostTable, blob: &[u8]) {
    assert!(table.hosts.len() <= MAX_HOSTS, "{}", shown(blob));
    for pair in table.hosts.windows(2) {
        assert!(pair[0].slot < pair[1].slot, "{}", shown(blob));
    }
    for host in &table.hosts {
        assert!(
            !host.address.is_empty() && host.address.len() <= MAX_ADDRESS_BYTES,
            "{}",
            shown(blob)
        );
        // It goes into a header that is a list with commas.
        let is_header_safe = host
            .address
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b',');
        assert!(is_header_safe, "address {:?} in {}", host.address, shown(blob));
        assert!(host.load.adapters.len() <= MAX_ADAPTERS, "{}", shown(blob));
    }
}

/// Every table that is written can be read, says what was written, and is refused with any byte of it changed.
fn check_written(choices: &mut Choices<'_>, seen: &mut Seen) {
    let table = table(choices);
    let blob = table.encode();
    let told = || format!("{table:?}");
    let read = HostTable::decode(&blob);
    let Ok(read) = read else {
        panic!("{read:?}: {}", told());
    };
    seen.note("table written");
    check_invariants(&read, &blob);
    assert_eq!(read.encode(), blob, "{}", told());
    assert_eq!(read, normal(&table), "{}", told());
    seen.note_if("hosts left out", read.hosts.len() < table.hosts.len());
    check_damage(&blob, choices, seen, |bytes| HostTable::decode(bytes).is_err());
}

/// A blob with a bit flipped, cut or prolonged is refused.
pub(super) fn check_damage(
    blob: &[u8],
    choices: &mut Choices<'_>,
    seen: &mut Seen,
    is_refused: impl Fn(&[u8]) -> bool,
) {
    for _ in 0..4 {
        let mut flipped = blob.to_vec();
        let at = choices.below(blob.len());
        flipped[at] ^= 1 << choices.below(8);
        assert!(is_refused(&flipped), "flipped at {at}: {}", shown(blob));
        let cut = choices.below(blob.len());
        assert!(is_refused(&blob[..cut]), "cut at {cut}: {}", shown(blob));
        seen.note("damaged blob");
    }
    let longer = [blob, &[choices.byte()]].concat();
    assert!(is_refused(&longer), "{}", shown(blob));
}

/// A blob some bytes of which were changed, left out or added, its checksum right again.
pub(super) fn tampered(blob: &[u8], choices: &mut Choices<'_>) -> Vec<u8> {
    let (header, payload) = blob.split_at(SEALED_HEADER_BYTES);
    let mut payload = payload.to_vec();
    for _ in 0..choices.below(4) {
        let at = choices.below(payload.len() + 1);
        match choices.below(4) {
            0 => payload.insert(at, choices.byte()),
            1 if at < payload.len() => {
                payload.remove(at);
            }
            _ => {
                if let Some(byte) = payload.get_mut(at) {
                    *byte = choices.byte();
                }
            }
        }
    }
    let magic = [header[0], header[1], header[2], header[3]];
    sealed(magic, 1, &payload)
}

/// A blob around any payload, its checksum right: what a plugin that means harm can write.
pub(crate) fn sealed(magic: [u8; 4], version: u16, payload: &[u8]) -> Vec<u8> {
    let mut sum = Murmur::new(version.into());
    sum.update(payload);
    let length = u32::try_from(payload.len()).expect("a payload of a test is short");
    [
        &magic[..],
        &version.to_le_bytes(),
        &length.to_le_bytes(),
        &sum.low64().to_le_bytes(),
        payload,
    ]
    .concat()
}

/// The table as its blob is documented to keep it: in slot order, of two hosts with one slot the first.
fn normal(table: &HostTable) -> HostTable {
    let mut by_slot: BTreeMap<Slot, Host> = BTreeMap::new();
    for host in &table.hosts {
        let is_kept = !host.address.is_empty()
            && host.address.len() <= MAX_ADDRESS_BYTES
            && host
                .address
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && byte != b',');
        if is_kept {
            by_slot.entry(host.slot).or_insert_with(|| {
                let mut host = host.clone();
                host.load.adapters.truncate(MAX_ADAPTERS);
                host
            });
        }
    }
    HostTable {
        published_ms: table.published_ms,
        hosts: by_slot.into_values().take(MAX_HOSTS).collect(),
    }
}

/// A table in any order, with slots that come twice and fields beyond their bounds.
pub(super) fn table(choices: &mut Choices<'_>) -> HostTable {
    let published_ms = choices.odd_u64();
    let count = match choices.below(16) {
        0 => MAX_HOSTS + choices.below(8),
        1..=4 => 20 + choices.below(60),
        _ => choices.below(8),
    };
    let is_ordered = choices.one_in(2);
    let hosts = (0..count).map(|at| host(choices, at, is_ordered)).collect();
    HostTable { published_ms, hosts }
}

fn host(choices: &mut Choices<'_>, at: usize, is_ordered: bool) -> Host {
    let slot = if is_ordered {
        u16::try_from(at).unwrap_or(u16::MAX)
    } else if choices.one_in(8) {
        choices.odd_u16()
    } else {
        u16::try_from(choices.below(64)).unwrap_or(0)
    };
    let address = match choices.below(24) {
        0..=20 => format!("10.0.{}.{}:8000", at / 256, at % 256),
        21 => format!("[2001:db8::{at:x}]:8000"),
        22 => choices
            .pick(&["", "10.0.0.1:80,10.0.0.2:80", "a\r\nb: c", "\u{e9}:80", " ", "\0"])
            .to_owned(),
        _ => "9".repeat(choices.below(80)),
    };
    Host {
        slot: Slot(slot),
        epoch: choices.odd_u32(),
        address,
        role: choices.pick(&[Role::Both, Role::Prefill, Role::Decode]),
        health: choices.pick(&[
            Health::Healthy,
            Health::Degraded,
            Health::Unhealthy,
            Health::Draining,
        ]),
        weight: choices.odd_u32(),
        sampled_ms: choices.odd_u64(),
        load: if choices.one_in(2) {
            load(choices)
        } else {
            Load::default()
        },
    }
}

fn load(choices: &mut Choices<'_>) -> Load {
    let adapters = if choices.one_in(16) { 70 } else { choices.below(4) };
    Load {
        waiting: choices.one_in(2).then(|| choices.odd_u32()),
        running: choices.one_in(2).then(|| choices.odd_u32()),
        kv_usage_permille: choices.one_in(2).then(|| choices.odd_u16()),
        kv_capacity_tokens: choices.one_in(2).then(|| choices.odd_u64()),
        prefix_queries: choices.one_in(2).then(|| choices.odd_u64()),
        prefix_hits: choices.one_in(2).then(|| choices.odd_u64()),
        started_ms: choices.one_in(2).then(|| choices.odd_u64()),
        adapters: (0..adapters).map(|_| choices.odd_u64()).collect(),
    }
}

/// Magic, version, length, checksum.
const SEALED_HEADER_BYTES: usize = 18;
