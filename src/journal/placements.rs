//! Placements ↔ bytes: what a worker put where, for the indexes of the others.
//!
//! In: placements as they are made, or the bytes of a run of them. Out: runs of at most [`RUN_BYTES`], the open one for
//! the journal and the closed ones for its archive, and back. Runs are numbered placement by placement, so that a
//! reader applies each once and sees what it missed. The bytes are untrusted: no panic, at most [`MAX_KEYS`] keys a
//! placement.
//!
//! A run, little endian: sequence of its first placement u32, count u16, then for each placement: kind u8, slot u16,
//! epoch u32, uncached tokens u32, prompt tokens u32, renewed keys u8, keys u8, and the keys, u64 each.

use crate::blob::{BlobError, BlobReader, BlobWriter};
use crate::host_table::Slot;

/// One request put on a host, or taken back from it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placement {
    /// What happened.
    pub kind: PlacementKind,
    /// The host.
    pub slot: Slot,
    /// Its epoch; a placement of another epoch means nothing any more.
    pub epoch: u32,
    /// Prompt tokens that the host was believed to have to compute.
    pub uncached_tokens: u32,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u32,
    /// How many of `keys`, from the first, the host was believed to hold already.
    pub renewed: u8,
    /// The keys that were new on the host, or whose stamp had grown old; shallow to deep.
    pub keys: Vec<u64>,
}

/// What happened to a placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlacementKind {
    /// The request was sent there.
    #[default]
    Placed,
    /// It was not served there: what was new of it is not cached.
    Withdrawn,
}

/// Placements in the order in which one worker made them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlacementRun {
    /// Number of the first; they are numbered without gaps, wrapping around.
    pub first_sequence: u32,
    /// The placements.
    pub placements: Vec<Placement>,
}

/// A run that was closed, for the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosedRun {
    /// Its place in the archive, below [`ARCHIVED_RUNS`].
    pub place: u8,
    /// The run as a sealed blob.
    pub blob: Vec<u8>,
}

/// The placements of this worker on their way to the others.
#[derive(Debug, Clone, Default)]
pub struct PlacementLog {
    open: PlacementRun,
    open_bytes: usize,
    closed: Vec<ClosedRun>,
    next_place: u8,
}

impl Placement {
    pub(super) fn encoded_bytes(&self) -> usize {
        FIXED_BYTES.saturating_add(self.keys.len().min(MAX_KEYS).saturating_mul(8))
    }

    fn write(&self, writer: &mut BlobWriter) {
        let keys = self.keys.get(..MAX_KEYS).unwrap_or(&self.keys);
        writer.put_u8(match self.kind {
            PlacementKind::Placed => 0,
            PlacementKind::Withdrawn => 1,
        });
        writer.put_u16(self.slot.0);
        writer.put_u32(self.epoch);
        writer.put_u32(self.uncached_tokens);
        writer.put_u32(self.prompt_tokens);
        writer.put_u8(self.renewed);
        writer.put_u8(u8::try_from(keys.len()).unwrap_or(0));
        keys.iter().for_each(|key| writer.put_u64(*key));
    }

    fn read(reader: &mut BlobReader<'_>) -> Result<Option<Self>, BlobError> {
        let kind = match reader.u8()? {
            0 => PlacementKind::Placed,
            1 => PlacementKind::Withdrawn,
            _ => return Ok(None),
        };
        let mut placement = Self {
            kind,
            slot: Slot(reader.u16()?),
            epoch: reader.u32()?,
            uncached_tokens: reader.u32()?,
            prompt_tokens: reader.u32()?,
            renewed: reader.u8()?,
            keys: Vec::new(),
        };
        let count = usize::from(reader.u8()?);
        if count > MAX_KEYS || usize::from(placement.renewed) > count {
            return Ok(None);
        }
        placement.keys.reserve_exact(count);
        for _ in 0..count {
            placement.keys.push(reader.u64()?);
        }
        Ok(Some(placement))
    }
}

impl PlacementRun {
    /// Number of the placement that will follow the last.
    #[must_use]
    pub fn next_sequence(&self) -> u32 {
        let count = u32::try_from(self.placements.len()).unwrap_or(u32::MAX);
        self.first_sequence.wrapping_add(count)
    }

    /// The run as a sealed blob for the archive, with its writer.
    #[must_use]
    pub fn encode(&self, worker: u64) -> Vec<u8> {
        let mut writer = BlobWriter::new(MAGIC, VERSION, RUN_BYTES.saturating_add(8));
        writer.put_u64(worker);
        self.write(&mut writer);
        writer.seal()
    }

    /// The writer and the run in an archived blob; `None` for anything else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<(u64, Self)> {
        let (version, mut reader) = BlobReader::open(MAGIC, bytes).ok()?;
        if version != VERSION {
            return None;
        }
        let worker = reader.u64().ok()?;
        let run = Self::read(&mut reader).ok()??;
        reader.is_empty().then_some((worker, run))
    }

    /// Drops all but the newest so many.
    pub(super) fn keep_newest(&mut self, count: usize) {
        let surplus = self.placements.len().saturating_sub(count);
        self.placements.drain(..surplus);
        let skipped = u32::try_from(surplus).unwrap_or(u32::MAX);
        self.first_sequence = self.first_sequence.wrapping_add(skipped);
    }

    pub(super) fn encoded_bytes(&self) -> usize {
        let placements = self.placements.iter().map(Placement::encoded_bytes);
        placements.fold(RUN_HEADER_BYTES, usize::saturating_add)
    }

    pub(super) fn write(&self, writer: &mut BlobWriter) {
        writer.put_u32(self.first_sequence);
        writer.put_u16(u16::try_from(self.placements.len()).unwrap_or(u16::MAX));
        self.placements
            .iter()
            .take(usize::from(u16::MAX))
            .for_each(|placement| placement.write(writer));
    }

    pub(super) fn read(reader: &mut BlobReader<'_>) -> Result<Option<Self>, BlobError> {
        let mut run = Self {
            first_sequence: reader.u32()?,
            placements: Vec::new(),
        };
        for _ in 0..reader.u16()? {
            let Some(placement) = Placement::read(reader)? else {
                return Ok(None);
            };
            run.placements.push(placement);
        }
        Ok(Some(run))
    }
}

impl PlacementLog {
    /// The open run, to be given back with [`PlacementLog::give_back`] before anything else: a copy of it would cost
    /// more than all the rest of a publication.
    pub fn lend(&mut self) -> PlacementRun {
        core::mem::take(&mut self.open)
    }

    /// The open run again.
    pub fn give_back(&mut self, run: PlacementRun) {
        self.open = run;
    }

    /// Appends a placement; a full run is closed first.
    pub fn push(&mut self, placement: Placement, worker: u64) {
        let bytes = placement.encoded_bytes();
        if self.open_bytes.saturating_add(bytes) > RUN_BYTES.saturating_sub(RUN_HEADER_BYTES) {
            let run = core::mem::take(&mut self.open);
            self.open.first_sequence = run.next_sequence();
            self.open_bytes = 0;
            if self.closed.len() >= usize::from(ARCHIVED_RUNS) {
                // The oldest is lost; `remove` could panic.
                let mut oldest_first = core::mem::take(&mut self.closed).into_iter();
                oldest_first.next();
                self.closed = oldest_first.collect();
            }
            self.closed.push(ClosedRun {
                place: self.next_place,
                blob: run.encode(worker),
            });
            self.next_place = (self.next_place + 1) % ARCHIVED_RUNS;
        }
        self.open_bytes = self.open_bytes.saturating_add(bytes);
        self.open.placements.push(placement);
    }

    /// The runs closed since the last call, oldest first.
    pub fn take_closed(&mut self) -> Vec<ClosedRun> {
        core::mem::take(&mut self.closed)
    }
}

/// Bytes of a run at most. It is written anew with each publication of the journal, up to a hundred times a second:
/// 8 KiB are some 20 cold prompts or 200 turns, and cost about 10 µs.
pub const RUN_BYTES: usize = 8 << 10;
/// Closed runs that are kept for workers that come late: with the open one 128 KiB a worker, some 15 000 keys.
pub const ARCHIVED_RUNS: u8 = 15;
/// Keys of a placement at most.
pub const MAX_KEYS: usize = 64;

const MAGIC: [u8; 4] = *b"WRPL";
const VERSION: u16 = 1;
const RUN_HEADER_BYTES: usize = 6;
const FIXED_BYTES: usize = 17;

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "random values of every width")]
mod tests {
    use super::*;
    use crate::blob::tests::{Random, assert_damage_is_refused};

    fn random_placement(random: &mut Random, max_keys: u64) -> Placement {
        let keys: Vec<u64> = (0..random.below(max_keys + 1)).map(|_| random.next()).collect();
        Placement {
            kind: [PlacementKind::Placed, PlacementKind::Withdrawn][random.below(2) as usize],
            slot: Slot(random.next() as u16),
            epoch: random.next() as u32,
            uncached_tokens: random.next() as u32,
            prompt_tokens: random.next() as u32,
            renewed: random.below(keys.len() as u64 + 1) as u8,
            keys,
        }
    }

    #[test]
    fn runs_round_trip_and_damage_is_refused() {
        let mut random = Random::seeded(3);
        for _ in 0..50 {
            let run = PlacementRun {
                first_sequence: random.next() as u32,
                placements: (0..random.below(6))
                    .map(|_| random_placement(&mut random, 64))
                    .collect(),
            };
            assert_eq!(PlacementRun::decode(&run.encode(7)), Some((7, run.clone())));
        }
        let run = PlacementRun {
            first_sequence: 1,
            placements: vec![random_placement(&mut random, 4)],
        };
        assert_damage_is_refused(&run.encode(1), |bytes| PlacementRun::decode(bytes).is_none());
    }

    #[test]
    fn runs_follow_each_other_without_gaps_and_stay_within_their_bound() {
        let mut random = Random::seeded(4);
        let mut log = PlacementLog::default();
        log.open.first_sequence = u32::MAX - 40;
        let mut placed = Vec::new();
        let mut read = Vec::new();
        let mut next = log.open.first_sequence;
        let mut take = |run: PlacementRun, read: &mut Vec<Placement>| {
            assert_eq!(run.first_sequence, next);
            assert!(run.encoded_bytes() <= RUN_BYTES, "{}", run.encoded_bytes());
            next = run.next_sequence();
            read.extend(run.placements);
        };
        let mut place = 0;
        for _ in 0..300 {
            let placement = random_placement(&mut random, 64);
            placed.push(placement.clone());
            log.push(placement, 9);
            for closed in log.take_closed() {
                assert_eq!(closed.place, place);
                place = (place + 1) % ARCHIVED_RUNS;
                take(PlacementRun::decode(&closed.blob).unwrap().1, &mut read);
            }
        }
        take(log.lend(), &mut read);
        assert_eq!(read, placed);
    }

    #[test]
    fn runs_that_nobody_fetches_are_bounded() {
        let mut log = PlacementLog::default();
        let placement = Placement {
            keys: vec![1; MAX_KEYS],
            ..Placement::default()
        };
        (0..2000).for_each(|_| log.push(placement.clone(), 1));
        assert_eq!(log.take_closed().len(), usize::from(ARCHIVED_RUNS));
    }
}
