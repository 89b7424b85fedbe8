//! Bytes ↔ one worker's journal: its tallies per host, its newest placements and its heartbeat.
//!
//! In: what a worker placed, or the bytes of the others' journals. Out: a versioned, checksummed blob for the worker's
//! journal slot in shared data, whether a slot may be claimed, and the sum of what the others hold. The bytes are
//! untrusted: no panic, at most [`MAX_TALLIES`] tallies a journal.
//!
//! Payload, little endian: worker u64, sequence u32, heartbeat_ms u64, then sections (tag u16, length u32, bytes).
//! These first fields stay where they are in every version, so that a claim can be judged across builds; sections with
//! an unknown tag are skipped, so that a section can be added within a version.

mod merged;
mod pace;
mod placements;
mod seen;

use std::fmt;

use crate::blob::{BlobError, BlobReader, BlobWriter, heartbeat_is_stale};
use crate::host_table::{MAX_HOSTS, Slot};

pub use self::merged::{MERGED_BYTES, MERGED_RUN_BYTES, MergedJournals};
pub use self::pace::PublicationPace;
pub use self::placements::{
    ARCHIVED_RUNS, ClosedRun, MAX_KEYS, Placement, PlacementKind, PlacementLog, PlacementRun, RUN_BYTES,
};
pub use self::seen::{JournalsSeen, MAX_JOURNALS, MERGE_ABOVE, MERGE_MS, count_publication, merge_is_due};

/// What one worker has open, published under its journal slot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Journal {
    /// Identity of the worker that writes it.
    pub worker: u64,
    /// Grows with each publication, wraps around.
    pub sequence: u32,
    /// When it was published, ms since the Unix epoch; 0 = released.
    pub heartbeat_ms: u64,
    /// Open work per host.
    pub tallies: Vec<Tally>,
    /// Hosts that are silent towards it for far too long.
    pub silences: Vec<Silence>,
    /// The newest placements.
    pub placements: PlacementRun,
}

/// Open work of one worker on one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// The host's slot.
    pub slot: Slot,
    /// The host's epoch; a tally of another epoch belongs to a host that is gone.
    pub epoch: u32,
    /// Requests placed and not ended.
    pub requests: u32,
    /// Prompt tokens placed, believed uncached and not yet prefilled.
    pub uncached_tokens: u64,
}

/// A host of which one worker heard nothing for far too long, though it owes answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Silence {
    /// The host's slot.
    pub slot: Slot,
    /// The host's epoch.
    pub epoch: u32,
    /// Since when, ms since the Unix epoch.
    pub since_ms: u64,
    /// It owes a stream, whose first byte says little but that the host lives; how long whole answers take differs too much
    /// for others to go by one worker's.
    pub owes_stream: bool,
}

/// Whether a journal slot may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalClaim {
    /// Nothing is there: create it if absent.
    Free,
    /// Its writer stopped, or the bytes are no journal: overwrite it with the cas that came with the bytes.
    Stale,
    /// A live worker writes it.
    Taken,
}

/// Why bytes are not a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalError {
    /// The blob around the journal is damaged or something else.
    Blob(BlobError),
    /// The journal was written by a build with another layout; the number is the version found.
    UnsupportedVersion(u16),
    /// The tally section is not a whole number of tallies, or holds more than [`MAX_TALLIES`].
    InvalidTallies,
    /// The same of the section of silences, and [`MAX_SILENCES`].
    InvalidSilences,
    /// The section of placements breaks its bounds.
    InvalidPlacements,
    /// A merged blob names a journal slot that there is not.
    InvalidSlot(u8),
}

impl Journal {
    /// The journal as a sealed blob; tallies beyond [`MAX_TALLIES`] and silences beyond [`MAX_SILENCES`] are left out.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = BlobWriter::new(MAGIC, VERSION, self.payload_bytes());
        self.write(&mut writer);
        writer.seal()
    }

    /// The journal in `bytes`.
    ///
    /// # Errors
    /// Damaged bytes, another version, a tally section that breaks its bounds.
    pub fn decode(bytes: &[u8]) -> Result<Self, JournalError> {
        let (version, reader) = BlobReader::open(MAGIC, bytes)?;
        if version != VERSION {
            return Err(JournalError::UnsupportedVersion(version));
        }
        Self::read(reader)
    }

    fn payload_bytes(&self) -> usize {
        let run_bytes = if self.has_run() {
            SECTION_HEADER_BYTES.saturating_add(self.placements.encoded_bytes())
        } else {
            0
        };
        let silences_bytes = match self.silences.len().min(MAX_SILENCES) {
            0 => 0,
            silences => SECTION_HEADER_BYTES.saturating_add(silences.saturating_mul(SILENCE_BYTES)),
        };
        FIXED_BYTES
            .saturating_add(self.tallies.len().min(MAX_TALLIES).saturating_mul(TALLY_BYTES))
            .saturating_add(silences_bytes)
            .saturating_add(run_bytes)
    }

    /// A worker that placed nothing yet has no run to tell of.
    fn has_run(&self) -> bool {
        !self.placements.placements.is_empty() || self.placements.first_sequence != 0
    }

    fn write(&self, writer: &mut BlobWriter) {
        let tallies = self.tallies.get(..MAX_TALLIES).unwrap_or(&self.tallies);
        let section_bytes = tallies.len().saturating_mul(TALLY_BYTES);
        writer.put_u64(self.worker);
        writer.put_u32(self.sequence);
        writer.put_u64(self.heartbeat_ms);
        writer.put_u16(TAG_TALLIES);
        writer.put_u32(u32::try_from(section_bytes).unwrap_or(u32::MAX));
        for tally in tallies {
            writer.put_u16(tally.slot.0);
            writer.put_u32(tally.epoch);
            writer.put_u32(tally.requests);
            writer.put_u64(tally.uncached_tokens);
        }
        let silences = self.silences.get(..MAX_SILENCES).unwrap_or(&self.silences);
        if !silences.is_empty() {
            let section_bytes = silences.len().saturating_mul(SILENCE_BYTES);
            writer.put_u16(TAG_SILENCES);
            writer.put_u32(u32::try_from(section_bytes).unwrap_or(u32::MAX));
            for silence in silences {
                writer.put_u16(silence.slot.0);
                writer.put_u32(silence.epoch);
                writer.put_u64(silence.since_ms);
                writer.put_u8(silence.owes_stream.into());
            }
        }
        if self.has_run() {
            writer.put_u16(TAG_PLACEMENTS);
            writer.put_u32(u32::try_from(self.placements.encoded_bytes()).unwrap_or(u32::MAX));
            self.placements.write(writer);
        }
    }

    fn read(mut reader: BlobReader<'_>) -> Result<Self, JournalError> {
        let mut journal = Self {
            worker: reader.u64()?,
            sequence: reader.u32()?,
            heartbeat_ms: reader.u64()?,
            ..Self::default()
        };
        while !reader.is_empty() {
            let tag = reader.u16()?;
            let length = usize::try_from(reader.u32()?).map_err(|_| BlobError::Truncated)?;
            let mut section = reader.section(length)?;
            match tag {
                TAG_TALLIES => {
                    let invalid = JournalError::InvalidTallies;
                    journal.tallies =
                        read_records(section, length, TALLY_BYTES, MAX_TALLIES, invalid, read_tally)?;
                }
                TAG_SILENCES => {
                    let invalid = JournalError::InvalidSilences;
                    journal.silences = read_records(
                        section,
                        length,
                        SILENCE_BYTES,
                        MAX_SILENCES,
                        invalid,
                        read_silence,
                    )?;
                }
                TAG_PLACEMENTS => {
                    let run = PlacementRun::read(&mut section)?.filter(|_| section.is_empty());
                    journal.placements = run.ok_or(JournalError::InvalidPlacements)?;
                }
                _ => {}
            }
        }
        Ok(journal)
    }

    /// Whether bytes look like a journal of that worker, told by its identity alone: a worker asks this of its own slot
    /// before each publication.
    #[must_use]
    pub fn is_by(bytes: &[u8], worker: u64) -> bool {
        bytes.starts_with(&MAGIC) && bytes.get(WORKER_AT..WORKER_AT + 8) == Some(&worker.to_le_bytes())
    }

    /// True when its tallies count no longer: see [`TALLY_TTL_MS`].
    pub fn is_stale(&self, now_ms: u64) -> bool {
        heartbeat_is_stale(self.heartbeat_ms, now_ms, TALLY_TTL_MS)
    }
}

impl JournalClaim {
    /// Judges the bytes of a journal slot. A journal of another version is judged by its heartbeat, too: a worker of
    /// the build before or after this one must not lose its slot.
    pub fn judge(current: Option<&[u8]>, now_ms: u64) -> Self {
        let Some(bytes) = current else {
            return Self::Free;
        };
        match heartbeat_of(bytes) {
            Ok(heartbeat_ms) if !heartbeat_is_stale(heartbeat_ms, now_ms, JOURNAL_TTL_MS) => Self::Taken,
            Ok(_) | Err(_) => Self::Stale,
        }
    }
}

/// Sum of the others' open work per (slot, epoch).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tallies {
    /// In growing (slot, epoch) order, one entry each.
    sums: Vec<Tally>,
}

impl Tallies {
    /// Adds up the journals of all workers but `own_worker`; journals whose heartbeat stopped count for nothing.
    pub fn sum<'a>(journals: impl IntoIterator<Item = &'a Journal>, own_worker: u64, now_ms: u64) -> Self {
        let mut sums: Vec<Tally> = Vec::new();
        for journal in journals {
            if journal.worker != own_worker && !journal.is_stale(now_ms) {
                sums.extend_from_slice(&journal.tallies);
            }
        }
        sums.sort_unstable_by_key(Tally::key);
        sums.dedup_by(|next, kept| {
            let same = next.key() == kept.key();
            if same {
                kept.requests = kept.requests.saturating_add(next.requests);
                kept.uncached_tokens = kept.uncached_tokens.saturating_add(next.uncached_tokens);
            }
            same
        });
        Self { sums }
    }

    /// The others' open work on this host; zeros when there is none.
    pub fn of(&self, slot: Slot, epoch: u32) -> Tally {
        let found = self.sums.binary_search_by_key(&(slot, epoch), Tally::key);
        let tally = found.ok().and_then(|index| self.sums.get(index)).copied();
        tally.unwrap_or(Tally {
            slot,
            epoch,
            ..Tally::default()
        })
    }

    /// All sums in growing (slot, epoch) order.
    pub fn iter(&self) -> impl Iterator<Item = &Tally> {
        self.sums.iter()
    }
}

impl Tally {
    const fn key(&self) -> (Slot, u32) {
        (self.slot, self.epoch)
    }
}

impl From<BlobError> for JournalError {
    fn from(error: BlobError) -> Self {
        Self::Blob(error)
    }
}

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blob(error) => write!(f, "journal: {error}"),
            Self::UnsupportedVersion(version) => {
                write!(f, "journal has version {version}, this build reads {VERSION}")
            }
            Self::InvalidTallies => f.write_str("journal has an invalid tally section"),
            Self::InvalidSilences => f.write_str("journal has an invalid section of silences"),
            Self::InvalidPlacements => f.write_str("journal has an invalid section of placements"),
            Self::InvalidSlot(slot) => {
                write!(f, "merged journals name slot {slot} of {MAX_JOURNALS}")
            }
        }
    }
}

impl std::error::Error for JournalError {}

fn heartbeat_of(bytes: &[u8]) -> Result<u64, BlobError> {
    let (_any_version, mut reader) = BlobReader::open(MAGIC, bytes)?;
    reader.u64()?;
    reader.u32()?;
    reader.u64()
}

/// The records of a section of this many bytes; `invalid` where they are no whole number, or more than `most`.
fn read_records<T>(
    mut section: BlobReader<'_>,
    length: usize,
    record_bytes: usize,
    most: usize,
    invalid: JournalError,
    read: impl Fn(&mut BlobReader<'_>) -> Result<T, BlobError>,
) -> Result<Vec<T>, JournalError> {
    let count = length / record_bytes;
    if !length.is_multiple_of(record_bytes) || count > most {
        return Err(invalid);
    }
    let mut records = Vec::with_capacity(count);
    for _ in 0..count {
        records.push(read(&mut section)?);
    }
    Ok(records)
}

fn read_tally(section: &mut BlobReader<'_>) -> Result<Tally, BlobError> {
    Ok(Tally {
        slot: Slot(section.u16()?),
        epoch: section.u32()?,
        requests: section.u32()?,
        uncached_tokens: section.u64()?,
    })
}

fn read_silence(section: &mut BlobReader<'_>) -> Result<Silence, BlobError> {
    Ok(Silence {
        slot: Slot(section.u16()?),
        epoch: section.u32()?,
        since_ms: section.u64()?,
        owes_stream: section.u8()? != 0,
    })
}

/// A journal whose heartbeat is older than this, or further ahead, belongs to a worker that stopped, and its slot may be
/// taken: an idle worker publishes once a second, and five missed beats are no scheduling hiccup.
pub const JOURNAL_TTL_MS: u64 = 5_000;

/// Tallies of a journal whose heartbeat is older than this, or further ahead, count for nothing: a worker whose VM
/// trapped never takes them back. A worker with requests in flight publishes every 0.4 s at least, so it has missed four
/// beats; one that was only slow counts again with its next.
pub const TALLY_TTL_MS: u64 = 1_600;

/// Tallies of a journal at most: one for every host a table can hold.
pub const MAX_TALLIES: usize = MAX_HOSTS;
/// Silences of a journal at most: where more hosts are silent at once, the fault is hardly theirs.
pub const MAX_SILENCES: usize = 64;

const MAGIC: [u8; 4] = *b"WRJN";
/// Version of the layout above; a change of it needs a new number and new golden bytes.
const VERSION: u16 = 1;
const TAG_TALLIES: u16 = 1;
const TAG_PLACEMENTS: u16 = 2;
const TAG_SILENCES: u16 = 3;
const TALLY_BYTES: usize = 18;
const SILENCE_BYTES: usize = 15;
/// Where the payload begins, and with it the writer's identity.
const WORKER_AT: usize = 18;
/// Worker, sequence, heartbeat and the header of the tallies.
const FIXED_BYTES: usize = 26;
const SECTION_HEADER_BYTES: usize = 6;

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "random values of every width")]
mod tests {
    use super::*;
    use crate::blob::tests::{Random, assert_damage_is_refused, with_version};

    const NOW_MS: u64 = 1_700_000_000_000;

    fn tally(slot: u16, epoch: u32, requests: u32, uncached_tokens: u64) -> Tally {
        Tally {
            slot: Slot(slot),
            epoch,
            requests,
            uncached_tokens,
        }
    }

    fn journal(worker: u64, heartbeat_ms: u64, tallies: &[Tally]) -> Journal {
        Journal {
            worker,
            sequence: 3,
            heartbeat_ms,
            tallies: tallies.to_vec(),
            ..Journal::default()
        }
    }

    #[test]
    fn random_journals_round_trip() {
        let mut random = Random::seeded(4);
        for _ in 0..300 {
            let tallies = (0..random.below(60))
                .map(|_| {
                    tally(
                        random.next() as u16,
                        random.next() as u32,
                        random.next() as u32,
                        random.next(),
                    )
                })
                .collect();
            let journal = Journal {
                worker: random.next(),
                sequence: random.next() as u32,
                heartbeat_ms: random.next(),
                tallies,
                silences: (0..random.below(4))
                    .map(|_| Silence {
                        slot: Slot(random.next() as u16),
                        epoch: random.next() as u32,
                        since_ms: random.next(),
                        owes_stream: random.below(2) == 1,
                    })
                    .collect(),
                placements: PlacementRun {
                    first_sequence: random.next() as u32,
                    placements: vec![Placement {
                        slot: Slot(random.next() as u16),
                        renewed: 1,
                        keys: vec![random.next(), random.next()],
                        ..Placement::default()
                    }],
                },
            };
            assert_eq!(Journal::decode(&journal.encode()), Ok(journal));
        }
    }

    #[test]
    fn damaged_journals_are_refused() {
        let bytes = journal(1, NOW_MS, &[tally(1, 2, 3, 4), tally(5, 6, 7, 8)]).encode();
        assert_damage_is_refused(&bytes, |bytes| Journal::decode(bytes).is_err());
    }

    #[test]
    fn garbage_is_refused() {
        let mut random = Random::seeded(5);
        for length in 0..300 {
            let bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
            assert!(Journal::decode(&bytes).is_err());
        }
    }

    #[test]
    fn other_versions_are_refused_by_their_number() {
        let bytes = journal(1, NOW_MS, &[]).encode();
        for version in [0, VERSION + 1, u16::MAX] {
            let other = with_version(&bytes, version);
            assert_eq!(
                Journal::decode(&other),
                Err(JournalError::UnsupportedVersion(version))
            );
        }
    }

    #[test]
    fn unknown_sections_are_skipped() {
        let mut writer = BlobWriter::new(MAGIC, VERSION, 0);
        writer.put_u64(9);
        writer.put_u32(3);
        writer.put_u64(NOW_MS);
        writer.put_u16(77);
        writer.put_u32(5);
        writer.put_bytes(b"later");
        writer.put_u16(TAG_TALLIES);
        writer.put_u32(18);
        writer.put_u16(1);
        writer.put_u32(2);
        writer.put_u32(3);
        writer.put_u64(4);
        let expected = journal(9, NOW_MS, &[tally(1, 2, 3, 4)]);
        assert_eq!(Journal::decode(&writer.seal()), Ok(expected));
    }

    #[test]
    fn broken_placements_are_refused() {
        let sealed = |section: &[u8]| {
            let mut writer = BlobWriter::new(MAGIC, VERSION, 0);
            writer.put_u64(9);
            writer.put_u32(3);
            writer.put_u64(NOW_MS);
            writer.put_u16(TAG_PLACEMENTS);
            writer.put_u32(u32::try_from(section.len()).unwrap());
            writer.put_bytes(section);
            Journal::decode(&writer.seal())
        };
        let mut run = vec![4, 0, 0, 0, 1, 0];
        run.extend([0; 17]);
        assert!(sealed(&run).is_ok());
        for (at, byte) in [(6, 2), (21, 1), (22, 65)] {
            let mut broken = run.clone();
            broken[at] = byte;
            broken.resize(run.len() + 8 * usize::from(broken[22]), 0);
            assert_eq!(sealed(&broken), Err(JournalError::InvalidPlacements), "byte {at}");
        }
        assert_eq!(
            sealed(&[&run[..], &[0]].concat()),
            Err(JournalError::InvalidPlacements)
        );
        assert_eq!(sealed(&run[..22]), Err(JournalError::Blob(BlobError::Truncated)));
    }

    #[test]
    fn broken_sections_are_refused() {
        let section = |tag: u16, length: u32, bytes: usize| {
            let mut writer = BlobWriter::new(MAGIC, VERSION, 0);
            writer.put_u64(9);
            writer.put_u32(3);
            writer.put_u64(NOW_MS);
            writer.put_u16(tag);
            writer.put_u32(length);
            writer.put_bytes(&vec![0; bytes]);
            Journal::decode(&writer.seal())
        };
        let sealed = |length: u32, bytes: usize| section(TAG_TALLIES, length, bytes);
        let silences = |length: u32, bytes: usize| section(TAG_SILENCES, length, bytes);
        assert_eq!(silences(14, 14), Err(JournalError::InvalidSilences));
        assert_eq!(silences(15 * 65, 15 * 65), Err(JournalError::InvalidSilences));
        assert!(silences(15 * 64, 15 * 64).is_ok());
        assert_eq!(sealed(17, 17), Err(JournalError::InvalidTallies));
        assert_eq!(sealed(18 * 1025, 18 * 1025), Err(JournalError::InvalidTallies));
        assert_eq!(
            sealed(u32::MAX, 18),
            Err(JournalError::Blob(BlobError::Truncated))
        );
        assert!(sealed(18 * 1024, 18 * 1024).is_ok());
    }

    #[test]
    fn a_journal_that_grew_too_long_is_written_up_to_the_bound() {
        let tallies: Vec<Tally> = (0..1100).map(|slot| tally(slot, 1, 1, 1)).collect();
        let read = Journal::decode(&journal(1, NOW_MS, &tallies).encode()).unwrap();
        assert_eq!(read.tallies, tallies[..MAX_TALLIES]);
    }

    /// The bytes of version 1, laid out by hand; the checksum came from the Python package mmh3 5.3.1:
    /// `mmh3.hash64(payload, 1, signed=False)[0]`.
    #[test]
    fn version_1_has_its_golden_bytes() {
        let journal = Journal {
            worker: 0x0102_0304_0506_0708,
            sequence: 9,
            heartbeat_ms: 10,
            tallies: vec![tally(1, 2, 3, 4)],
            ..Journal::default()
        };
        let hex: String = journal
            .encode()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(hex, GOLDEN_1);
    }

    const GOLDEN_1: &str = "57524a4e01002c0000005f92e892ba1f569f0807060504030201090000000a00000000000000010012000000010002000000030000000400000000000000";

    /// The same with one placement, and the archived run of it; bytes by Python's `struct`, checksums as above.
    #[test]
    fn placements_have_their_golden_bytes() {
        let journal = Journal {
            worker: 0x0102_0304_0506_0708,
            sequence: 9,
            heartbeat_ms: 10,
            tallies: vec![tally(1, 2, 3, 4)],
            silences: Vec::new(),
            placements: PlacementRun {
                first_sequence: 4,
                placements: vec![Placement {
                    kind: PlacementKind::Withdrawn,
                    slot: Slot(5),
                    epoch: 6,
                    uncached_tokens: 7,
                    prompt_tokens: 8,
                    renewed: 1,
                    keys: vec![0x1112_1314_1516_1718, 9],
                }],
            },
        };
        let hex = |bytes: Vec<u8>| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
        assert_eq!(hex(journal.encode()), GOLDEN_1_PLACEMENTS);
        assert_eq!(hex(journal.placements.encode(journal.worker)), GOLDEN_1_RUN);
        assert_eq!(Journal::decode(&journal.encode()), Ok(journal));
    }

    const GOLDEN_1_PLACEMENTS: &str = "57524a4e0100590000004d704160a12909020807060504030201090000000a00000000000000010012000000010002000000030000000400000000000000020027000000040000000100010500060000000700000008000000010218171615141312110900000000000000";
    const GOLDEN_1_RUN: &str = "5752504c01002f0000002ccb7ecf454b2af40807060504030201040000000100010500060000000700000008000000010218171615141312110900000000000000";

    #[test]
    fn a_worker_knows_its_own_journal_by_its_head() {
        let bytes = journal(7, NOW_MS, &[]).encode();
        assert!(Journal::is_by(&bytes, 7));
        assert!(!Journal::is_by(&bytes, 8));
        assert!(!Journal::is_by(&bytes[..20], 7));
        assert!(!Journal::is_by(b"", 7));
    }

    #[test]
    fn a_slot_is_claimed_only_when_nobody_lives_there() {
        let written = journal(1, NOW_MS, &[]).encode();
        let judge = |now_ms| JournalClaim::judge(Some(&written), now_ms);
        assert_eq!(JournalClaim::judge(None, NOW_MS), JournalClaim::Free);
        assert_eq!(judge(NOW_MS), JournalClaim::Taken);
        assert_eq!(judge(NOW_MS + JOURNAL_TTL_MS), JournalClaim::Taken);
        assert_eq!(judge(NOW_MS + JOURNAL_TTL_MS + 1), JournalClaim::Stale);
        assert_eq!(
            judge(NOW_MS - JOURNAL_TTL_MS - 1),
            JournalClaim::Stale,
            "clock jumped back"
        );
        assert_eq!(
            JournalClaim::judge(Some(b"not a journal"), NOW_MS),
            JournalClaim::Stale
        );
        assert_eq!(
            JournalClaim::judge(Some(&journal(1, 0, &[]).encode()), NOW_MS),
            JournalClaim::Stale
        );
    }

    #[test]
    fn a_live_worker_of_another_version_keeps_its_slot() {
        let mut writer = BlobWriter::new(MAGIC, VERSION + 1, 0);
        writer.put_u64(1);
        writer.put_u32(2);
        writer.put_u64(NOW_MS);
        writer.put_bytes(b"something new");
        let bytes = writer.seal();
        assert_eq!(JournalClaim::judge(Some(&bytes), NOW_MS + 1), JournalClaim::Taken);
        assert_eq!(
            JournalClaim::judge(Some(&bytes), NOW_MS + 10_000),
            JournalClaim::Stale
        );
    }

    #[test]
    fn others_are_summed_and_own_and_stale_journals_are_not() {
        let journals = [
            journal(1, NOW_MS, &[tally(2, 1, 1, 100), tally(0, 1, 5, 50)]),
            journal(2, NOW_MS - 1_000, &[tally(2, 1, 2, 200), tally(2, 2, 9, 900)]),
            journal(3, NOW_MS, &[tally(2, 1, 40, 4_000)]),
            journal(4, NOW_MS - TALLY_TTL_MS - 1, &[tally(2, 1, 500, 5_000)]),
            journal(5, NOW_MS - TALLY_TTL_MS, &[tally(2, 1, 0, 1)]),
        ];
        let tallies = Tallies::sum(&journals, 3, NOW_MS);
        assert_eq!(tallies.of(Slot(2), 1), tally(2, 1, 3, 301));
        assert_eq!(tallies.of(Slot(2), 2), tally(2, 2, 9, 900));
        assert_eq!(tallies.of(Slot(0), 1), tally(0, 1, 5, 50));
        assert_eq!(tallies.of(Slot(7), 1), tally(7, 1, 0, 0));
        assert_eq!(tallies.iter().count(), 3);
    }

    #[test]
    fn sums_saturate() {
        let journals = [
            journal(1, NOW_MS, &[tally(0, 1, u32::MAX, u64::MAX)]),
            journal(2, NOW_MS, &[tally(0, 1, 1, 1)]),
        ];
        assert_eq!(
            Tallies::sum(&journals, 9, NOW_MS).of(Slot(0), 1),
            tally(0, 1, u32::MAX, u64::MAX)
        );
    }
}
