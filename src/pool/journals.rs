//! What the workers tell each other of one pool.
//!
//! In: the others' journals, one by one or merged. Out: this worker's own, and what the others have placed and have open,
//! taken over into the index and the tallies. Journals are untrusted: what cannot be read changes nothing.

use super::{JournalNews, MergedNews, Pool};
use crate::journal::{ClosedRun, Journal, JournalError, MAX_SILENCES, MergedJournals, Silence, Tally};

impl Pool {
    /// Takes over all journals, in the order of their slots; the count of blobs that are no journals.
    ///
    /// Placements that were archived meanwhile are missed; see [`Pool::apply_journal`].
    pub fn apply_journals<'a>(&mut self, blobs: impl Iterator<Item = &'a [u8]>, now_ms: u64) -> u32 {
        let mut rejected = 0;
        for (slot, blob) in (0u8..).zip(blobs) {
            let applied = self.apply_journal(slot, blob, Vec::new, now_ms);
            rejected += u32::from(applied.is_err());
        }
        self.settle_journals(now_ms);
        rejected
    }

    /// Takes over the journal in a slot: its placements at once, its tallies with [`Pool::settle_journals`].
    ///
    /// `archive` reads the closed runs of that slot; it is called when the journal itself no longer holds all that is
    /// new, and the first time.
    ///
    /// # Errors
    /// When the blob is not a journal; what was known stays.
    pub fn apply_journal(
        &mut self,
        slot: u8,
        blob: &[u8],
        archive: impl FnOnce() -> Vec<Vec<u8>>,
        now_ms: u64,
    ) -> Result<JournalNews, JournalError> {
        let journal = Journal::decode(blob)?;
        if journal.worker == self.worker {
            return Ok(JournalNews::default());
        }
        // Without hosts, placements would mean nothing, and be lost.
        let index = (!self.fleet.is_empty()).then_some(&mut self.index);
        Ok(self.peers.take(slot, journal, index, archive, now_ms))
    }

    /// Takes over the journals of all workers as one of them merged them, as [`Pool::apply_journal`] does one; `None`
    /// where they are older than [`MERGED_TTL_MS`], and nothing changed.
    ///
    /// # Errors
    /// When the blob is no such thing; what was known stays.
    pub fn apply_merged(&mut self, blob: &[u8], now_ms: u64) -> Result<Option<MergedNews>, JournalError> {
        let merged = MergedJournals::decode(blob)?;
        if now_ms.abs_diff(merged.merged_ms) > MERGED_TTL_MS {
            return Ok(None);
        }
        let mut result = MergedNews {
            news: JournalNews::default(),
            counts: merged.counts,
            behind: Vec::new(),
        };
        for (slot, journal) in merged.journals {
            if journal.worker == self.worker {
                continue;
            }
            if self.peers.is_behind(slot, &journal) {
                result.behind.push(slot);
                continue;
            }
            let index = (!self.fleet.is_empty()).then_some(&mut self.index);
            let news = self.peers.take(slot, journal, index, Vec::new, now_ms);
            result.news.add(news);
        }
        Ok(Some(result))
    }

    /// Sums what the other workers have open, and takes over which hosts are silent towards them; those whose heartbeat
    /// stopped count for nothing.
    pub fn settle_journals(&mut self, now_ms: u64) {
        let silences = self.peers.silences(self.worker, now_ms);
        self.fleet.set_silences(silences);
        let tallies = self.peers.tallies(self.worker, now_ms);
        let others = tallies
            .iter()
            .map(|tally| (tally.slot, tally.epoch, tally.requests, tally.uncached_tokens));
        self.fleet.set_others(others, now_ms);
    }

    /// Runs of placements that this worker closed since the last call, for its archive. They must be written before
    /// the journal that follows them.
    pub fn take_closed_runs(&mut self) -> Vec<ClosedRun> {
        self.placements.take_closed()
    }

    /// Hosts that are silent towards this worker for far too long, as many as a journal tells.
    pub fn silences(&self, now_ms: u64) -> impl Iterator<Item = Silence> {
        self.fleet.own_silences(now_ms).take(MAX_SILENCES)
    }

    /// This worker's journal, for the others.
    pub fn journal(&mut self, now_ms: u64) -> Journal {
        self.with_journal(now_ms, Journal::clone)
    }

    /// Calls `f` with this worker's journal.
    pub fn with_journal<R>(&mut self, now_ms: u64, f: impl FnOnce(&Journal) -> R) -> R {
        self.journal_sequence = self.journal_sequence.wrapping_add(1);
        let tallies = self.fleet.own_tallies(now_ms);
        let journal = Journal {
            worker: self.worker,
            sequence: self.journal_sequence,
            heartbeat_ms: now_ms,
            silences: self.silences(now_ms).collect(),
            placements: self.placements.lend(),
            tallies: tallies
                .map(|(slot, epoch, requests, uncached_tokens)| Tally {
                    slot,
                    epoch,
                    requests,
                    uncached_tokens,
                })
                .collect(),
        };
        let result = f(&journal);
        self.placements.give_back(journal.placements);
        result
    }
}

/// Merged journals older than this are not believed: whoever merges may have stopped.
pub const MERGED_TTL_MS: u64 = 100;
