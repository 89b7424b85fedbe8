//! Warmroute's values in Envoy's shared data, under the keys of [`PoolKeys`].
//!
//! The namespace is shared with every plugin of the same `vm_id`, so whatever is read is checked by the codec of its
//! blob.

use super::host::{self, CAS_CREATE, CAS_MISMATCH};
use crate::journal::{
    ARCHIVED_RUNS, ClosedRun, Journal, JournalClaim, MAX_JOURNALS, MergedJournals, Tallies,
    count_publication, merge_is_due,
};
use crate::shared_keys::PoolKeys;

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
        count_publication(&mut sequences, slot);
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

/// How often each journal slot was published.
pub(super) fn publications(keys: &PoolKeys) -> Vec<u8> {
    host::shared_data(&keys.journal_sequences)
        .map(|(counts, _)| counts)
        .unwrap_or_default()
}

/// Calls `f` with the journals in these slots, and a reader of their archives.
pub(super) fn read_journals(
    keys: &PoolKeys,
    slots: &[u8],
    mut f: impl FnMut(u8, &[u8], &dyn Fn() -> Vec<Vec<u8>>),
) {
    for slot in slots.iter().copied() {
        let Some((bytes, _)) = host::shared_data(&keys.journal(slot)) else {
            // Slots are claimed from the lowest up and never vanish, so there is none beyond the first absent one.
            break;
        };
        let archive = || {
            let runs =
                (0..ARCHIVED_RUNS).map_while(|place| host::shared_data(&keys.archived_run(slot, place)));
            runs.map(|(bytes, _)| bytes).collect()
        };
        f(slot, &bytes, &archive);
    }
}

/// What to read where many journals are news.
#[derive(Debug)]
pub(super) enum Merged {
    /// All journals: this worker is the one to merge them.
    Due,
    /// The journals as they were merged last.
    Blob(Vec<u8>),
    /// The journals that are news: nobody has merged them yet.
    Missing,
}

/// Whoever finds that the last merge began a while ago merges next, so that the work goes round and waits for nobody.
pub(super) fn merged(keys: &PoolKeys, now_ms: u64) -> Merged {
    let began = host::shared_data(&keys.merge_began);
    let is_due = merge_is_due(began.as_ref().map(|(bytes, _)| bytes.as_slice()), now_ms);
    let cas = began.map_or(CAS_CREATE, |(_, cas)| cas);
    if is_due && host::set_shared_data(&keys.merge_began, &now_ms.to_le_bytes(), cas).is_ok() {
        return Merged::Due;
    }
    host::shared_data(&keys.merged).map_or(Merged::Missing, |(blob, _)| Merged::Blob(blob))
}

/// Publishes merged journals; where they are too large, everybody goes on reading the journals themselves.
pub(super) fn publish_merged(keys: &PoolKeys, merged: &MergedJournals) {
    if let Some(blob) = merged.encode() {
        let _ = host::set_shared_data(&keys.merged, &blob, 0);
    }
}

/// A journal without a sign of life for five seconds may be taken over; until well before that it need not be read.
const VERIFY_MS: u64 = 2000;
/// No worker: their numbers are times.
const NOBODY: u64 = 0;
const ANNOUNCE_TRIES: u32 = 8;
