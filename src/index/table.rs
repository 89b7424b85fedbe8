//! Key → the hosts that hold it, in a table of fixed size.
//!
//! In: keys with a host and a stamp. Out: the holders of a key and how often it was used lately. A bucket has eight
//! ways, a way five holders; a key that more hosts hold takes further ways of its bucket, up to four. In a full bucket
//! what is empty goes first, then what no host holds any more, then what was used longest ago. It must never grow.

use super::clock::Clocks;

/// One host's claim to a key: 10 bits of slot, 22 bits of stamp; 0 for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Holder(u32);

impl Holder {
    /// `stamp` is in units of the host's clock, wrapped to 22 bits, and never 0.
    pub(super) const fn new(slot: u16, stamp: u32) -> Self {
        Self((slot as u32) << STAMP_BITS | (stamp & STAMP_MASK))
    }

    pub(super) const fn is_none(self) -> bool {
        self.0 == 0
    }

    pub(super) const fn slot(self) -> u16 {
        (self.0 >> STAMP_BITS) as u16
    }

    pub(super) const fn stamp(self) -> u32 {
        self.0 & STAMP_MASK
    }
}

/// When a key was last used, and how often lately: 20 bits of ticks, 12 bits of sixteenths. A count of 0 marks a way
/// that is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Uses(u32);

impl Uses {
    /// A key that was heard of, but not used here.
    const fn heard_of(tick: u32) -> Self {
        Self((tick & TICK_MASK) << COUNT_BITS | 1)
    }

    const fn is_empty(self) -> bool {
        self.0 & COUNT_MASK == 0
    }

    /// Ticks since the last use; a clock that went backwards counts as none.
    const fn idle_ticks(self, now: u32) -> u32 {
        let idle = now.wrapping_sub(self.0 >> COUNT_BITS) & TICK_MASK;
        if idle > TICK_MASK / 2 { 0 } else { idle }
    }

    /// Uses in sixteenths, halved every 21 s, joined by straight lines: a window of 30 s.
    pub(super) fn decayed_16ths(self, now: u32) -> u32 {
        let idle = self.idle_ticks(now);
        let from = (self.0 & COUNT_MASK)
            .checked_shr(idle / HALF_LIFE_TICKS)
            .unwrap_or(0);
        from - from * (idle % HALF_LIFE_TICKS) / (2 * HALF_LIFE_TICKS)
    }

    fn touch(&mut self, now: u32, uses_16ths: u32) {
        let count = (self.decayed_16ths(now) + uses_16ths).clamp(1, COUNT_MASK);
        *self = Self((now & TICK_MASK) << COUNT_BITS | count);
    }
}

/// What [`Table::hold`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    /// The host was not believed to hold the key.
    New,
    /// It was, and its stamp had grown old.
    Renewed,
    /// It was, and its stamp stays.
    Kept,
}

#[derive(Debug, Clone)]
pub(super) struct Table {
    /// Empty until the first key: a worker without traffic holds no memory.
    segments: Vec<Segment>,
    bucket_count: usize,
}

/// Some buckets, whose memory is taken with their first key. To take all of the table's at once would keep the request
/// that brings the first key waiting: 16 MiB take a worker more than 10 ms.
#[derive(Debug, Clone, Default)]
struct Segment {
    /// A byte of each way's key, 0 where it is empty: a sixteenth of the size of the keys, so that most lookups of what
    /// is not there end in the processor's cache.
    tags: Vec<u64>,
    buckets: Vec<Bucket>,
}

/// The keys are one cache line; the rest is read only for a key that is there.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket {
    keys: [u64; WAYS],
    uses: [Uses; WAYS],
    holders: [[Holder; HOLDERS]; WAYS],
}

impl Table {
    /// As many buckets as fit.
    pub(super) const fn new(memory_bytes: usize) -> Self {
        let last = (memory_bytes % SEGMENT_BYTES).saturating_sub(size_of::<Segment>());
        Self {
            segments: Vec::new(),
            bucket_count: memory_bytes / SEGMENT_BYTES * SEGMENT_BUCKETS + last / BUCKET_BYTES,
        }
    }

    /// Records that a host holds a key; `uses_16ths` is how much of a use that is.
    #[inline(never)]
    pub(super) fn hold(
        &mut self,
        key: u64,
        holder: Holder,
        clocks: &Clocks,
        tick: u32,
        uses_16ths: u32,
    ) -> Held {
        let Some((tags, bucket)) = self.bucket_to_fill(key) else {
            return Held::New;
        };
        let mut ways_of_key = 0;
        let mut free: Option<&mut Holder> = None;
        let mut oldest: Option<(u32, &mut Holder)> = None;
        let mut uses_left = uses_16ths;
        for ((way_key, uses), holders) in bucket.keys.iter().zip(&mut bucket.uses).zip(&mut bucket.holders) {
            if *way_key != key || uses.is_empty() {
                continue;
            }
            ways_of_key += 1;
            // Counted on the first way; the others are only kept from looking idle.
            uses.touch(tick, core::mem::take(&mut uses_left));
            for place in holders {
                let age = clocks.age(*place);
                if !place.is_none() && place.slot() == holder.slot() {
                    let held = match age {
                        None => Held::New,
                        Some(age) if clocks.is_old(holder, age) => Held::Renewed,
                        Some(_) => return Held::Kept,
                    };
                    *place = holder;
                    return held;
                }
                match age {
                    None if free.is_none() => free = Some(place),
                    Some(age) if oldest.as_ref().is_none_or(|(most, _)| age > *most) => {
                        oldest = Some((age, place));
                    }
                    None | Some(_) => {}
                }
            }
        }
        if let Some(place) = free {
            *place = holder;
        } else if ways_of_key < MAX_WAYS_OF_KEY {
            let way = bucket.replace(key, holder, clocks, tick, uses_left);
            *tags = *tags & !(0xff << (8 * way)) | tag_of(key) << (8 * way);
        } else if let Some((_, place)) = oldest {
            *place = holder;
        }
        Held::New
    }

    /// The host does not hold the key.
    pub(super) fn forget(&mut self, key: u64, slot: u16) {
        let (segment, at) = self.place_of(key);
        let segment = self.segments.get_mut(segment);
        let Some(bucket) = segment.and_then(|segment| segment.buckets.get_mut(at)) else {
            return;
        };
        for ((way_key, uses), holders) in bucket.keys.iter().zip(&bucket.uses).zip(&mut bucket.holders) {
            if *way_key == key && !uses.is_empty() {
                holders
                    .iter_mut()
                    .filter(|place| place.slot() == slot)
                    .for_each(|place| *place = Holder::default());
            }
        }
    }

    /// The ways of a key: its uses and holders, dead ones among them.
    #[inline]
    pub(super) fn ways(&self, key: u64) -> impl Iterator<Item = (Uses, &[Holder; HOLDERS])> {
        let (segment, at) = self.place_of(key);
        let is_there = |segment: &&Segment| {
            let tags = segment.tags.get(at);
            tags.is_some_and(|tags| has_byte(*tags, tag_of(key)))
        };
        let segment = self.segments.get(segment).filter(is_there);
        let bucket = segment.and_then(|segment| segment.buckets.get(at));
        bucket.into_iter().flat_map(move |bucket| {
            let ways = bucket.keys.iter().zip(&bucket.uses).zip(&bucket.holders);
            ways.filter(move |((way_key, uses), _)| **way_key == key && !uses.is_empty())
                .map(|((_, uses), holders)| (*uses, holders))
        })
    }

    /// Bytes of memory that the table takes once there were keys for all its buckets, fixed for life.
    pub(super) const fn memory_bytes(&self) -> usize {
        self.bucket_count * BUCKET_BYTES + self.segment_count() * size_of::<Segment>()
    }

    /// Bytes of memory allocated now.
    #[cfg(test)]
    pub(super) fn allocated_bytes(&self) -> usize {
        let buckets = |segment: &Segment| {
            segment.buckets.capacity() * size_of::<Bucket>() + segment.tags.capacity() * size_of::<u64>()
        };
        self.segments.capacity() * size_of::<Segment>() + self.segments.iter().map(buckets).sum::<usize>()
    }

    const fn segment_count(&self) -> usize {
        self.bucket_count.div_ceil(SEGMENT_BUCKETS)
    }

    /// The bucket of a key with its tags, in memory that is taken now if it was not before.
    fn bucket_to_fill(&mut self, key: u64) -> Option<(&mut u64, &mut Bucket)> {
        if self.segments.is_empty() {
            let count = self.segment_count();
            self.segments.reserve_exact(count);
            self.segments.resize_with(count, Segment::default);
        }
        let (number, at) = self.place_of(key);
        let segment = self.segments.get_mut(number)?;
        if segment.buckets.is_empty() {
            let left = self.bucket_count.saturating_sub(number * SEGMENT_BUCKETS);
            let count = left.min(SEGMENT_BUCKETS);
            segment.tags.reserve_exact(count);
            segment.tags.resize(count, 0);
            segment.buckets.reserve_exact(count);
            segment.buckets.resize(count, Bucket::default());
        }
        Some((segment.tags.get_mut(at)?, segment.buckets.get_mut(at)?))
    }

    /// The segment of a key's bucket, and the bucket's number in it.
    fn place_of(&self, key: u64) -> (usize, usize) {
        // Keys are hashes already; the product maps 32 bits of one evenly to any number of buckets.
        let low = key & 0xffff_ffff;
        let bucket = usize::try_from((low * self.bucket_count as u64) >> 32).unwrap_or(0);
        (bucket / SEGMENT_BUCKETS, bucket % SEGMENT_BUCKETS)
    }
}

impl Bucket {
    /// Gives the least useful way to a key; its number.
    fn replace(&mut self, key: u64, holder: Holder, clocks: &Clocks, tick: u32, uses_16ths: u32) -> usize {
        let ways = self
            .keys
            .iter_mut()
            .zip(&mut self.uses)
            .zip(&mut self.holders)
            .enumerate()
            .filter(|(_, ((way_key, uses), _))| **way_key != key || uses.is_empty());
        let least_useful = ways.max_by_key(|(_, ((_, uses), holders))| {
            if uses.is_empty() {
                u32::MAX
            } else if holders.iter().all(|place| clocks.age(*place).is_none()) {
                u32::MAX - 1
            } else {
                uses.idle_ticks(tick)
            }
        });
        let Some((way, ((way_key, uses), holders))) = least_useful else {
            return 0;
        };
        *way_key = key;
        *uses = Uses::heard_of(tick);
        uses.touch(tick, uses_16ths);
        *holders = [Holder::default(); HOLDERS];
        if let Some(place) = holders.first_mut() {
            *place = holder;
        }
        way
    }
}

/// The byte of a key that is kept apart; buckets are chosen by other bits.
const fn tag_of(key: u64) -> u64 {
    let tag = key >> 56;
    if tag == 0 { 1 } else { tag }
}

/// Whether one of the eight bytes of `word` is `byte`.
const fn has_byte(word: u64, byte: u64) -> bool {
    let zero_where_equal = word ^ (byte * 0x0101_0101_0101_0101);
    zero_where_equal.wrapping_sub(0x0101_0101_0101_0101) & !zero_where_equal & 0x8080_8080_8080_8080 != 0
}

/// With its tags.
const BUCKET_BYTES: usize = size_of::<Bucket>() + size_of::<u64>();
/// 17 kB: the first requests of a worker ask for a segment for nearly every key that they bring.
const SEGMENT_BUCKETS: usize = 64;
const SEGMENT_BYTES: usize = SEGMENT_BUCKETS * BUCKET_BYTES + size_of::<Segment>();
const WAYS: usize = 8;
const HOLDERS: usize = 5;
/// Twenty holders of one key are known, which is more hosts than a decision looks at.
const MAX_WAYS_OF_KEY: usize = 4;
/// One use, in the units of the counts.
pub(super) const ONE_USE: u32 = 16;
/// Width of a stamp.
const STAMP_BITS: u32 = 22;
/// Stamps wrap at this.
pub(super) const STAMP_MASK: u32 = (1 << STAMP_BITS) - 1;
const COUNT_BITS: u32 = 12;
const COUNT_MASK: u32 = (1 << COUNT_BITS) - 1;
const TICK_MASK: u32 = (1 << 20) - 1;
/// Ticks of 512 ms: 21 s, the half-life of a window of 30 s.
const HALF_LIFE_TICKS: u32 = 41;
