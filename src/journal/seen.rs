//! How often each journal slot was published → whose journals a reader has to read.
//!
//! In: the counts of publications as they stand in shared data, and what a reader has read. Out: the slots that are
//! news to it, and whether they should be read one by one or as one. The bytes are untrusted: counts that are missing
//! are 0, and whatever they are, at most [`MAX_JOURNALS`] slots are named.

/// Which journals one reader has read, as of which publication.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JournalsSeen {
    counts: Vec<u8>,
}

impl JournalsSeen {
    /// The slots that were published since they were read, or all slots.
    #[must_use]
    pub fn moved(&self, counts: &[u8], all: bool) -> Vec<u8> {
        if counts == self.counts && !all {
            return Vec::new();
        }
        let moved = |slot: &u8| all || count_of(counts, *slot) != count_of(&self.counts, *slot);
        (0..MAX_JOURNALS).filter(moved).collect()
    }

    /// One journal was read; the counts are from before that.
    pub fn saw(&mut self, slot: u8, counts: &[u8]) {
        set_count(&mut self.counts, slot, count_of(counts, slot));
    }

    /// All journals are known as of these counts, or from later.
    pub fn saw_all(&mut self, counts: &[u8]) {
        for slot in 0..MAX_JOURNALS {
            let (new, old) = (count_of(counts, slot), count_of(&self.counts, slot));
            if new.wrapping_sub(old).cast_signed() > 0 {
                self.saw(slot, counts);
            }
        }
    }
}

/// Counts one more publication of a slot.
pub fn count_publication(counts: &mut Vec<u8>, slot: u8) {
    let next = count_of(counts, slot).wrapping_add(1);
    set_count(counts, slot, next);
}

/// Whether a worker to which many journals are news is to merge them: when nobody began to for a while.
#[must_use]
pub fn merge_is_due(began: Option<&[u8]>, now_ms: u64) -> bool {
    let began_ms = began.and_then(|bytes| bytes.try_into().ok());
    let began_ms = began_ms.map_or(0, u64::from_le_bytes);
    now_ms.abs_diff(began_ms) >= MERGE_MS
}

fn count_of(counts: &[u8], slot: u8) -> u32 {
    let at = usize::from(slot) * COUNT_BYTES;
    let bytes = counts.get(at..at + COUNT_BYTES);
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u32::from_le_bytes)
}

fn set_count(counts: &mut Vec<u8>, slot: u8, count: u32) {
    counts.resize(usize::from(MAX_JOURNALS) * COUNT_BYTES, 0);
    let at = usize::from(slot) * COUNT_BYTES;
    if let Some(bytes) = counts.get_mut(at..at + COUNT_BYTES) {
        bytes.copy_from_slice(&count.to_le_bytes());
    }
}

/// Workers whose tallies are shared; Envoy runs one worker a core by default.
pub const MAX_JOURNALS: u8 = 64;
/// Journals that are read one by one: what is new in more than so many is read as one blob.
pub const MERGE_ABOVE: usize = 8;
/// How often journals are merged while many of them change: as often as a worker reads them.
pub const MERGE_MS: u64 = 20;

/// A publication count is a u32.
const COUNT_BYTES: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_published_since_it_was_read_is_news() {
        let (mut seen, mut counts) = (JournalsSeen::default(), Vec::new());
        assert!(seen.moved(&counts, false).is_empty());
        for slot in [3, 63, 3] {
            count_publication(&mut counts, slot);
        }
        assert_eq!(counts.len(), 256);
        assert_eq!(seen.moved(&counts, false), [3, 63]);
        seen.saw(3, &counts);
        assert_eq!(seen.moved(&counts, false), [63]);
        assert_eq!(seen.moved(&counts, true).len(), 64);
        count_publication(&mut counts, 3);
        assert_eq!(seen.moved(&counts, false), [3, 63]);
    }

    #[test]
    fn older_counts_take_nothing_back_and_counts_wrap() {
        let mut seen = JournalsSeen::default();
        let (mut old, mut new) = (Vec::new(), Vec::new());
        set_count(&mut old, 1, u32::MAX);
        set_count(&mut new, 1, 2);
        set_count(&mut seen.counts, 1, u32::MAX - 1);
        seen.saw_all(&old);
        seen.saw_all(&new);
        seen.saw_all(&old);
        assert!(seen.moved(&new, false).is_empty());
    }

    #[test]
    fn damaged_counts_do_no_harm() {
        let mut seen = JournalsSeen::default();
        for counts in [&[][..], &[1], &[255; 255], &[7; 4000]] {
            assert!(seen.moved(counts, false).len() <= usize::from(MAX_JOURNALS));
            seen.saw_all(counts);
            count_publication(&mut counts.to_vec(), 200);
        }
    }

    #[test]
    fn one_worker_merges_at_a_time_and_a_dead_one_is_replaced() {
        assert!(merge_is_due(None, 1_000_000));
        let began = 1_000_000u64.to_le_bytes();
        assert!(!merge_is_due(Some(&began), 1_000_019));
        assert!(merge_is_due(Some(&began), 1_000_020));
        assert!(
            merge_is_due(Some(&began), 900_000),
            "a clock that went backwards blocks nobody"
        );
        assert!(merge_is_due(Some(b"damaged"), 1_000_000));
    }
}
