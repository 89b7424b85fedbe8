//! Warmroute's keys in Envoy's shared data: a fixed set for each pool, all under one prefix.
//!
//! Keys are never removed by Envoy and the namespace is shared with every plugin of the same `vm_id`, so their number
//! is bounded and whatever is read is checked by the codec of its blob.

use super::host::{self, CAS_CREATE, CAS_MISMATCH};
use crate::journal::{Journal, JournalClaim};

/// The keys of one pool.
#[derive(Debug, Clone)]
pub(super) struct PoolKeys {
    /// The host table.
    pub(super) table: String,
    /// Counts the publications of the table, so that readers fetch it only when it changed.
    pub(super) table_sequence: String,
    /// Who polls.
    pub(super) lease: String,
    journals: String,
}

impl PoolKeys {
    pub(super) fn new(pool: &str) -> Self {
        let key = |name: &str| format!("warmroute/1/{pool}/{name}");
        Self {
            table: key("table"),
            table_sequence: key("table_sequence"),
            lease: key("lease"),
            journals: key("journal"),
        }
    }

    /// Key of journal slot `slot`.
    pub(super) fn journal(&self, slot: u8) -> String {
        format!("{}/{slot}", self.journals)
    }
}

/// Publishes a host table.
pub(super) fn publish_table(keys: &PoolKeys, table: &[u8], sequence: u64) {
    // The table first: a reader that sees the new number must find the new table. A failed write leaves the old table,
    // which ages and stops being believed.
    if host::set_shared_data(&keys.table, table, 0).is_ok() {
        let _ = host::set_shared_data(&keys.table_sequence, &sequence.to_le_bytes(), 0);
    }
}

/// Number of the newest published table.
pub(super) fn table_sequence(keys: &PoolKeys) -> Option<u64> {
    let (bytes, _) = host::shared_data(&keys.table_sequence)?;
    Some(u64::from_le_bytes(bytes.as_slice().try_into().ok()?))
}

/// This worker's journal slot.
#[derive(Debug, Default)]
pub(super) struct JournalSlot {
    key: Option<String>,
    verified_ms: u64,
}

impl JournalSlot {
    /// Writes this worker's journal, claiming a slot the first time or when another worker took it meanwhile. False
    /// when all slots are taken by live workers: its tallies then stay unknown to the others.
    pub(super) fn write(&mut self, keys: &PoolKeys, journal: &Journal, now_ms: u64) -> bool {
        let bytes = journal.encode();
        if let Some(key) = &self.key {
            // Nobody takes a slot whose journal is fresh, so a slot seen to be ours a moment ago is ours.
            let is_ours = now_ms.abs_diff(self.verified_ms) < VERIFY_MS;
            let written = if is_ours {
                host::set_shared_data(key, &bytes, 0).is_ok()
            } else {
                match host::shared_data(key) {
                    Some((current, cas)) => {
                        is_written_by(&current, journal.worker)
                            && host::set_shared_data(key, &bytes, cas).is_ok()
                    }
                    None => host::set_shared_data(key, &bytes, CAS_CREATE).is_ok(),
                }
            };
            if written {
                if !is_ours {
                    self.verified_ms = now_ms;
                }
                return true;
            }
            self.key = None;
        }
        for slot in 0..MAX_JOURNALS {
            let key = keys.journal(slot);
            let outcome = match host::shared_data(&key) {
                None => host::set_shared_data(&key, &bytes, CAS_CREATE),
                Some((current, cas)) => match JournalClaim::judge(Some(&current), now_ms) {
                    JournalClaim::Free | JournalClaim::Stale => host::set_shared_data(&key, &bytes, cas),
                    JournalClaim::Taken => Err(CAS_MISMATCH),
                },
            };
            if outcome.is_ok() {
                self.key = Some(key);
                self.verified_ms = now_ms;
                return true;
            }
        }
        false
    }
}

fn is_written_by(blob: &[u8], worker: u64) -> bool {
    Journal::decode(blob).is_ok_and(|journal| journal.worker == worker)
}

/// The journals of all workers, this one's included.
pub(super) fn journals(keys: &PoolKeys) -> impl Iterator<Item = Vec<u8>> {
    // Slots are claimed from the lowest up and never vanish, so the first absent one ends the list.
    (0..MAX_JOURNALS)
        .map_while(|slot| host::shared_data(&keys.journal(slot)))
        .map(|(bytes, _)| bytes)
}

/// A journal without a sign of life for five seconds may be taken over; until well before that it need not be read.
const VERIFY_MS: u64 = 2000;
/// Workers whose tallies are shared; Envoy runs one worker a core by default.
const MAX_JOURNALS: u8 = 64;
