//! Warmroute's keys in Envoy's shared data: a fixed set for each pool, all under one prefix.
//!
//! Keys are never removed by Envoy and the namespace is shared with every plugin of the same `vm_id`, so their number
//! is bounded and whatever is read is checked by the codec of its blob.

use super::host::{self, CAS_CREATE, CAS_MISMATCH};
use crate::journal::{ARCHIVED_RUNS, ClosedRun, Journal, JournalClaim, Tallies};

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
    /// Publications of each journal slot, so that readers fetch only those that changed.
    journal_sequences: String,
}

impl PoolKeys {
    pub(super) fn new(pool: &str) -> Self {
        let key = |name: &str| format!("warmroute/1/{pool}/{name}");
        Self {
            table: key("table"),
            table_sequence: key("table_sequence"),
            lease: key("lease"),
            journals: key("journal"),
            journal_sequences: key("journal_sequences"),
        }
    }

    /// Key of journal slot `slot`.
    pub(super) fn journal(&self, slot: u8) -> String {
        format!("{}/{slot}", self.journals)
    }

    fn archived_run(&self, slot: u8, place: u8) -> String {
        format!("{}/{slot}/{place}", self.journals)
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
    claimed: Option<(u8, String)>,
    verified_ms: u64,
}

impl JournalSlot {
    /// Writes this worker's journal, claiming a slot the first time or when another worker took it meanwhile. False
    /// when all slots are taken by live workers: its tallies then stay unknown to the others.
    ///
    /// Runs that were closed go first, so that whoever reads the journal finds what came before it.
    pub(super) fn write(
        &mut self,
        keys: &PoolKeys,
        journal: &Journal,
        closed: &[ClosedRun],
        now_ms: u64,
    ) -> bool {
        let bytes = journal.encode();
        if let Some((slot, key)) = &self.claimed {
            // Nobody takes a slot whose journal is fresh, so a slot seen to be ours a moment ago is ours.
            let is_verified = now_ms.abs_diff(self.verified_ms) < VERIFY_MS;
            let cas = if is_verified {
                Some(0)
            } else {
                match host::shared_data(key) {
                    Some((current, cas)) => Journal::is_by(&current, journal.worker).then_some(cas),
                    None => Some(CAS_CREATE),
                }
            };
            if let Some(cas) = cas {
                archive(keys, *slot, closed);
                if host::set_shared_data(key, &bytes, cas).is_ok() {
                    announce(keys, *slot);
                    if !is_verified {
                        self.verified_ms = now_ms;
                    }
                    return true;
                }
            }
            self.claimed = None;
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
                archive(keys, slot, closed);
                announce(keys, slot);
                self.claimed = Some((slot, key));
                self.verified_ms = now_ms;
                return true;
            }
        }
        false
    }
}

/// Writes closed runs over the oldest of a slot's archive.
fn archive(keys: &PoolKeys, slot: u8, closed: &[ClosedRun]) {
    for run in closed {
        // A run that could not be written is missed, and counted by whoever misses it.
        let _ = host::set_shared_data(&keys.archived_run(slot, run.place), &run.blob, 0);
    }
}

/// Counts a publication.
fn announce(keys: &PoolKeys, slot: u8) {
    // Another worker may announce at the same moment; who loses that often is found by the regular full reading.
    for _ in 0..ANNOUNCE_TRIES {
        let (mut sequences, cas) =
            host::shared_data(&keys.journal_sequences).unwrap_or((Vec::new(), CAS_CREATE));
        sequences.resize(usize::from(MAX_JOURNALS) * SEQUENCE_BYTES, 0);
        let at = usize::from(slot) * SEQUENCE_BYTES;
        if let Some(bytes) = sequences.get_mut(at..at + SEQUENCE_BYTES) {
            let next = bytes.try_into().map_or(0, u32::from_le_bytes).wrapping_add(1);
            bytes.copy_from_slice(&next.to_le_bytes());
        }
        if host::set_shared_data(&keys.journal_sequences, &sequences, cas).is_ok() {
            return;
        }
    }
}

/// What all workers have open together; those whose heartbeat stopped count for nothing.
pub(super) fn open_work(keys: &PoolKeys, now_ms: u64) -> Tallies {
    // Slots are claimed from the lowest up and never vanish, so the first absent one ends the list.
    let blobs = (0..MAX_JOURNALS).map_while(|slot| host::shared_data(&keys.journal(slot)));
    let journals: Vec<Journal> = blobs
        .filter_map(|(blob, _)| Journal::decode(&blob).ok())
        .collect();
    Tallies::sum(&journals, NOBODY, now_ms)
}

/// Which journals were read, as of which publication.
#[derive(Debug, Default)]
pub(super) struct JournalReader {
    seen: Vec<u8>,
}

impl JournalReader {
    /// Calls `f` with each journal that was published since the last call, or with all of them, and a reader of its
    /// archive.
    pub(super) fn read(
        &mut self,
        keys: &PoolKeys,
        all: bool,
        mut f: impl FnMut(u8, &[u8], &dyn Fn() -> Vec<Vec<u8>>),
    ) {
        let (sequences, _) = host::shared_data(&keys.journal_sequences).unwrap_or_default();
        if sequences == self.seen && !all {
            return;
        }
        for slot in 0..MAX_JOURNALS {
            let at = usize::from(slot) * SEQUENCE_BYTES;
            let of_slot = at..at + SEQUENCE_BYTES;
            if !all && sequences.get(of_slot.clone()) == self.seen.get(of_slot) {
                continue;
            }
            let Some((bytes, _)) = host::shared_data(&keys.journal(slot)) else {
                if all {
                    // Slots are claimed from the lowest up and never vanish, so the first absent one ends the list.
                    break;
                }
                continue;
            };
            let archive = || {
                let runs =
                    (0..ARCHIVED_RUNS).map_while(|place| host::shared_data(&keys.archived_run(slot, place)));
                runs.map(|(bytes, _)| bytes).collect()
            };
            f(slot, &bytes, &archive);
        }
        self.seen = sequences;
    }
}

/// A journal without a sign of life for five seconds may be taken over; until well before that it need not be read.
const VERIFY_MS: u64 = 2000;
/// Workers whose tallies are shared; Envoy runs one worker a core by default.
const MAX_JOURNALS: u8 = 64;
/// No worker: their numbers are times.
const NOBODY: u64 = 0;
/// A publication count is a u32.
const SEQUENCE_BYTES: usize = 4;
const ANNOUNCE_TRIES: u32 = 8;
