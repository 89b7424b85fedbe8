//! The journals of all workers ↔ one blob, for readers to which many journals are news.
//!
//! In: the blobs of all journal slots, and the counts of their publications from before they were read. Out: one blob
//! that holds them with fewer placements each, the newest of all, and back. Every reader takes over from it what it
//! would have taken over from the journals themselves; where its placements do not reach back to what a reader knows,
//! that reader turns to the journal. The bytes are untrusted: no panic, at most [`MERGED_BYTES`].
//!
//! Payload, little endian: merged_ms u64, length of the counts u16, counts, journals u8, then for each: slot u8, length
//! u32, payload of the journal.

use super::{Journal, JournalError, MAX_JOURNALS, VERSION};
use crate::blob::{BlobError, BlobReader, BlobWriter};

/// The journals of all workers as one of them found them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MergedJournals {
    /// When they were read, ms since the Unix epoch.
    pub merged_ms: u64,
    /// Counts of publications that the journals are not older than, as they stand in shared data.
    pub counts: Vec<u8>,
    /// Journals by slot, without those whose heartbeat stopped.
    pub journals: Vec<(u8, Journal)>,
}

impl MergedJournals {
    /// Merges the blobs of journal slots; what is no journal is left out.
    pub fn of<'a>(blobs: impl Iterator<Item = (u8, &'a [u8])>, counts: &[u8], merged_ms: u64) -> Self {
        let decoded = blobs.filter_map(|(slot, blob)| Some((slot, Journal::decode(blob).ok()?)));
        let mut merged = Self {
            merged_ms,
            counts: counts.to_vec(),
            journals: decoded
                .filter(|(_, journal)| !journal.is_stale(merged_ms))
                .collect(),
        };
        merged.keep_newest();
        merged
    }

    /// The blob; `None` where it would be too large.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut writer = BlobWriter::new(MAGIC, VERSION, 2 * MERGED_RUN_BYTES);
        writer.put_u64(self.merged_ms);
        writer.put_u16(u16::try_from(self.counts.len()).ok()?);
        writer.put_bytes(&self.counts);
        writer.put_u8(u8::try_from(self.journals.len()).ok()?);
        for (slot, journal) in &self.journals {
            writer.put_u8(*slot);
            writer.put_u32(u32::try_from(journal.payload_bytes()).ok()?);
            journal.write(&mut writer);
        }
        let blob = writer.seal();
        (blob.len() <= MERGED_BYTES).then_some(blob)
    }

    /// The journals in a blob.
    ///
    /// # Errors
    /// Damaged bytes, another version, a journal that breaks its bounds.
    pub fn decode(bytes: &[u8]) -> Result<Self, JournalError> {
        if bytes.len() > MERGED_BYTES {
            return Err(BlobError::Truncated.into());
        }
        let (version, mut reader) = BlobReader::open(MAGIC, bytes)?;
        if version != VERSION {
            return Err(JournalError::UnsupportedVersion(version));
        }
        let mut merged = Self {
            merged_ms: reader.u64()?,
            ..Self::default()
        };
        for _ in 0..reader.u16()? {
            merged.counts.push(reader.u8()?);
        }
        for _ in 0..reader.u8()? {
            let slot = reader.u8()?;
            if slot >= MAX_JOURNALS {
                return Err(JournalError::InvalidSlot(slot));
            }
            let length = usize::try_from(reader.u32()?).map_err(|_| BlobError::Truncated)?;
            merged
                .journals
                .push((slot, Journal::read(reader.section(length)?)?));
        }
        Ok(merged)
    }

    /// Leaves [`MERGED_RUN_BYTES`] of placements: in rounds, the newest of each worker, then the next of each.
    fn keep_newest(&mut self) {
        let mut kept = vec![0usize; self.journals.len()];
        let mut left_bytes = MERGED_RUN_BYTES;
        let mut is_done = vec![false; self.journals.len()];
        while is_done.iter().any(|done| !done) {
            for ((kept, done), (_, journal)) in kept.iter_mut().zip(&mut is_done).zip(&self.journals) {
                let next = journal.placements.placements.iter().rev().nth(*kept);
                let bytes = next.map(|placement| placement.encoded_bytes());
                match bytes.and_then(|bytes| left_bytes.checked_sub(bytes)) {
                    Some(left) if !*done => {
                        left_bytes = left;
                        *kept += 1;
                    }
                    Some(_) | None => *done = true,
                }
            }
        }
        for (kept, (_, journal)) in kept.iter().zip(&mut self.journals) {
            journal.placements.keep_newest(*kept);
        }
    }
}

/// A merged blob at most: twice what 64 workers with requests on 100 hosts each have.
pub const MERGED_BYTES: usize = 256 << 10;
/// Placements in it: some 40 cold prompts or 300 turns, a tenth of a second of 1000 requests a second.
pub const MERGED_RUN_BYTES: usize = 16 << 10;

const MAGIC: [u8; 4] = *b"WRJM";
