//! A pool → the keys of its values in Envoy's shared data: a fixed set, all under one prefix.
//!
//! In: a pool's name, and numbers of journal slots and archive places, which are bounded. Out: keys. Envoy never removes a
//! key and keeps them for all plugins of one `vm_id`, so nothing of a request, a host or a process may be part of one.

use crate::journal::{ARCHIVED_RUNS, MAX_JOURNALS};

/// Counts the VMs and contexts that asked for an identity; one key for all pools.
pub const NEXT_ID: &str = "warmroute/1/next_id";

/// The keys of one pool.
#[derive(Debug, Clone)]
pub struct PoolKeys {
    /// The host table.
    pub table: String,
    /// Counts the publications of the table, so that readers fetch it only when it changed.
    pub table_sequence: String,
    /// Who polls.
    pub lease: String,
    /// Publications of each journal slot, so that readers fetch only those that changed.
    pub journal_sequences: String,
    /// All journals as one.
    pub merged: String,
    /// When a worker last began to merge them.
    pub merge_began: String,
    journals: String,
}

impl PoolKeys {
    /// The keys of the pool of that name.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        let key = |name: &str| format!("warmroute/1/{pool}/{name}");
        Self {
            table: key("table"),
            table_sequence: key("table_sequence"),
            lease: key("lease"),
            journal_sequences: key("journal_sequences"),
            merged: key("journals_merged"),
            merge_began: key("journals_merge_began"),
            journals: key("journal"),
        }
    }

    /// Key of a journal slot; the last one's for slots of [`MAX_JOURNALS`] and more.
    #[must_use]
    pub fn journal(&self, slot: u8) -> String {
        format!("{}/{}", self.journals, slot.min(MAX_JOURNALS - 1))
    }

    /// Key of a closed run of a journal slot, bounded likewise.
    #[must_use]
    pub fn archived_run(&self, slot: u8, place: u8) -> String {
        let place = place.min(ARCHIVED_RUNS - 1);
        format!("{}/{}/{place}", self.journals, slot.min(MAX_JOURNALS - 1))
    }

    /// All keys that the pool can ever have.
    pub fn all(&self) -> impl Iterator<Item = String> + '_ {
        let single = [
            &self.table,
            &self.table_sequence,
            &self.lease,
            &self.journal_sequences,
            &self.merged,
            &self.merge_began,
        ];
        let of_slot = move |slot: u8| {
            let runs = (0..ARCHIVED_RUNS).map(move |place| self.archived_run(slot, place));
            core::iter::once(self.journal(slot)).chain(runs)
        };
        single
            .into_iter()
            .cloned()
            .chain((0..MAX_JOURNALS).flat_map(of_slot))
    }
}
