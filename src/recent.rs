//! Prefix keys → which key chooses a prompt's home.
//!
//! In: a prompt's keys, how many hosts there are and how busy they are, and the time. Out: the home keys. Memory is fixed
//! at construction; a prompt touches at most 64 keys. The keys are hashes of untrusted text: whatever they are, nothing
//! panics and nothing grows. It must never know which host holds what.
//!
//! # Anchors
//! Of the keys of a prompt only the anchors are counted: the first key in each cell of a grid over the depth (64 B
//! wide up to 1 KiB, 256 B up to 4 KiB, 1 KiB up to 16 KiB, 4 KiB up to 64 KiB, 128 KiB beyond), the first key at
//! `home_bytes` or deeper, and the last key. Which keys are anchors depends on the depth alone (but for the last), so
//! the turns of a conversation share them.
//!
//! # The home key
//! The home key is the shallowest anchor at `home_bytes` or deeper that is not hot; in a shorter prompt the shallowest
//! anchor that is not hot; where all are hot, the deepest. So a cold system prompt sticks as a whole, a hot one
//! splits by what follows it, and the turns of a short chat agree, because the shallow anchors of a turn are
//! anchors of the next turn. A chat that grows past `home_bytes` may change its home then, once.
//!
//! A key is hot when it brings more traffic than a host should carry: its share of this worker's recent requests is
//! more than 1.5 ÷ hosts, on at least eight requests, and that share of the requests in flight is at least four. It
//! stays hot until one of the three is below 1 ÷ hosts, four and two. So one prompt sent again and again on an idle
//! fleet sticks to one host, however large its share. Counts are halved every 32.8 s for all keys at once, so shares
//! are exact.

use crate::chunk::{PrefixKey, PrefixKeys};

/// How often this worker saw prefix keys lately.
#[derive(Debug, Clone)]
pub struct RecentPrefixes {
    settings: RecentSettings,
    buckets: Vec<[Entry; WAYS]>,
    started_ms: u64,
    /// All requests with keys, counted and halved like a key's uses.
    all: Uses,
    /// Slow mean of the requests in flight on the fleet, 1/64.
    in_flight_64ths: u32,
}

/// Bounds of the memory of recent prefixes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecentSettings {
    /// Memory for keys, bytes; the next lower power of two is used. Default 1 MiB: a thousand prompts of the
    /// greatest length, many more shorter ones.
    pub memory_bytes: u32,
    /// Depth at which the search for the home key starts, bytes. Default 4096, about a thousand tokens: less in common
    /// is not worth sharing a host for.
    pub home_bytes: u32,
}

impl Default for RecentSettings {
    fn default() -> Self {
        Self {
            memory_bytes: 1 << 20,
            home_bytes: 4096,
        }
    }
}

/// How many hosts share the requests, and how many requests are in flight on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Hosts that take traffic.
    pub hosts: u32,
    /// Requests in flight on all of them.
    pub in_flight: u32,
}

/// The key that ranks the hosts for a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HomeKey {
    /// The key.
    pub key: u64,
    /// Prompt bytes that it covers.
    pub depth_bytes: u32,
}

/// The keys that rank the hosts for a prompt; `None` for a prompt without keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Homes {
    /// The shallowest that is not hot.
    pub home: Option<HomeKey>,
    /// The first key at `home_bytes` or deeper, else the deepest: what `prefix_hash` uses.
    pub fixed_home: Option<HomeKey>,
}

impl RecentPrefixes {
    /// An empty memory; its size is settled here.
    pub fn new(settings: RecentSettings) -> Self {
        let bucket_bytes = size_of::<[Entry; WAYS]>();
        let count = (settings.memory_bytes as usize / bucket_bytes).max(1);
        let count = 1usize << count.ilog2();
        Self {
            settings,
            buckets: vec![[Entry::default(); WAYS]; count],
            started_ms: 0,
            all: Uses::default(),
            in_flight_64ths: 0,
        }
    }

    /// Counts a prompt that is about to be placed, and names its home keys.
    pub fn observe(&mut self, keys: &PrefixKeys, traffic: Traffic, now_ms: u64) -> Homes {
        let (Some(first), Some(last)) = (keys.keys.first(), keys.keys.last()) else {
            return Homes::default();
        };
        if self.started_ms == 0 {
            self.started_ms = now_ms;
        }
        let now = self.ticks(now_ms);
        self.all.count(now);
        self.in_flight_64ths = (self.in_flight_64ths - self.in_flight_64ths / 64)
            .saturating_add(traffic.in_flight.min(MAX_IN_FLIGHT));
        let limits = Limits {
            all: self.all.sixteenths(),
            hosts: traffic.hosts,
            in_flight_64ths: self.in_flight_64ths,
        };
        let home_start = keys.keys.iter().find(|k| k.end_bytes >= self.settings.home_bytes);
        let start_bytes = home_start.unwrap_or(first).end_bytes;

        let mut home = None;
        let (mut cell, mut anchors) = (None, 0);
        for (at, key) in keys.keys.iter().enumerate() {
            let is_last = at + 1 == keys.keys.len();
            let here = Some(cell_of(key.end_bytes));
            if !is_last && (anchors >= MAX_ANCHORS || (here == cell && Some(key) != home_start)) {
                continue;
            }
            cell = here;
            anchors += 1;
            let is_hot = self.touch(key, &limits, now);
            if key.end_bytes >= start_bytes && !is_hot && home.is_none() {
                home = Some(home_of(key));
            }
        }
        Homes {
            home: home.or_else(|| Some(home_of(last))),
            fixed_home: Some(home_of(home_start.unwrap_or(last))),
        }
    }

    /// Bytes of memory held, fixed for life.
    pub fn memory_bytes(&self) -> usize {
        self.buckets.len() * size_of::<[Entry; WAYS]>()
    }

    /// Counts a use of the key: whether it is hot.
    fn touch(&mut self, key: &PrefixKey, limits: &Limits, now: u32) -> bool {
        let at = self.bucket_of(key);
        let Some(bucket) = self.buckets.get_mut(at) else {
            return false;
        };
        let known = bucket
            .iter_mut()
            .find(|e| e.key == key.hash.0 && e.uses.sixteenths() > 0);
        if let Some(entry) = known {
            entry.uses.count(now);
            return entry.uses.judge(limits);
        }
        if let Some(oldest) = bucket.iter_mut().min_by_key(|e| {
            if e.uses.sixteenths() == 0 {
                0
            } else {
                !now.wrapping_sub(e.uses.last)
            }
        }) {
            *oldest = Entry {
                key: key.hash.0,
                uses: Uses {
                    last: now,
                    packed: ONE_USE,
                },
            };
        }
        false
    }

    fn bucket_of(&self, key: &PrefixKey) -> usize {
        // Keys are hashes already; the number of buckets is a power of two.
        let mask = self.buckets.len().saturating_sub(1);
        usize::try_from(key.hash.0 >> 33).unwrap_or(0) & mask
    }

    fn ticks(&self, now_ms: u64) -> u32 {
        let ticks = now_ms.wrapping_sub(self.started_ms) >> TICK_SHIFT;
        u32::try_from(ticks & u64::from(u32::MAX)).unwrap_or(0)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    key: u64,
    /// A count of zero marks an empty entry.
    uses: Uses,
}

/// Uses with a half-life of one period, all halved at the same moments.
#[derive(Debug, Clone, Copy, Default)]
struct Uses {
    /// Ticks of 64 ms since the start, wrapping round.
    last: u32,
    /// Sixteenths of a use, and in the top bit whether the key is hot: four entries then fill a cache line.
    packed: u32,
}

impl Uses {
    /// Adds a use at `now`.
    fn count(&mut self, now: u32) {
        let periods = (now >> PERIOD_SHIFT).wrapping_sub(self.last >> PERIOD_SHIFT) & PERIOD_MASK;
        // A clock that went backwards counts as none.
        let periods = if periods > PERIOD_MASK / 2 { 0 } else { periods };
        let kept = self.sixteenths().checked_shr(periods).unwrap_or(0);
        self.packed = (self.packed & HOT) | (kept + ONE_USE).min(!HOT);
        self.last = now;
    }

    /// Whether the uses are more than one host should carry.
    fn judge(&mut self, limits: &Limits) -> bool {
        let count = u64::from(self.sixteenths());
        let all = u64::from(limits.all);
        let was_hot = self.packed & HOT != 0;
        let (least_uses, least_hosts_halves, least_in_flight) = if was_hot { (4, 2, 2) } else { (8, 3, 4) };
        let is_hot = count >= least_uses * u64::from(ONE_USE)
            && 2 * count * u64::from(limits.hosts) >= least_hosts_halves * all
            && count * u64::from(limits.in_flight_64ths) >= 64 * least_in_flight * all;
        self.packed = if is_hot {
            self.packed | HOT
        } else {
            self.packed & !HOT
        };
        is_hot
    }

    const fn sixteenths(self) -> u32 {
        self.packed & !HOT
    }
}

/// What a key's uses are judged by.
#[derive(Debug, Clone, Copy)]
struct Limits {
    all: u32,
    hosts: u32,
    in_flight_64ths: u32,
}

fn home_of(key: &PrefixKey) -> HomeKey {
    HomeKey {
        key: key.hash.0,
        depth_bytes: key.end_bytes,
    }
}

/// The cell of the grid that a depth lies in.
const fn cell_of(end_bytes: u32) -> u32 {
    match end_bytes {
        0..1024 => end_bytes >> 6,
        1024..4096 => 1 << 16 | end_bytes >> 8,
        4096..16_384 => 2 << 16 | end_bytes >> 10,
        16_384..65_536 => 3 << 16 | end_bytes >> 12,
        _ => 4 << 16 | end_bytes >> 17,
    }
}

/// Entries of a bucket: the oldest of four goes.
const WAYS: usize = 4;
/// Keys touched for a prompt, the last key not counted.
const MAX_ANCHORS: usize = 63;
/// A tick is 64 ms: 32 bits wrap after eight years.
const TICK_SHIFT: u32 = 6;
/// A period is 512 ticks, 32.8 s.
const PERIOD_SHIFT: u32 = 9;
const PERIOD_MASK: u32 = u32::MAX >> PERIOD_SHIFT;
/// Counts are in sixteenths, so that halving does not lose small ones.
const ONE_USE: u32 = 16;
/// Marks a hot key in [`Uses::packed`].
const HOT: u32 = 1 << 31;
/// Keeps the mean within 32 bits; nothing is decided by more.
const MAX_IN_FLIGHT: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::ChunkHash;

    const BUSY: Traffic = Traffic {
        hosts: 8,
        in_flight: 100,
    };

    /// Any mixing will do.
    fn mix64(x: u64) -> u64 {
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
    }

    /// A prompt of parts: (text id, bytes), keys every 256 B up to 4 KiB, then every 1 KiB, and at the parts' ends.
    fn prompt(parts: &[(u64, u32)]) -> PrefixKeys {
        let total: u32 = parts.iter().map(|p| p.1).sum();
        let (mut keys, mut chain, mut start) = (Vec::new(), 1u64, 0u32);
        for &(id, bytes) in parts {
            let end = start + bytes;
            let mut at = start;
            while at < end {
                let step = if at < 4096 { 256 } else { 1024 };
                at = (at / step * step + step).min(end);
                chain = mix64(chain ^ mix64(id) ^ u64::from(at - start));
                keys.push(PrefixKey {
                    hash: ChunkHash(chain),
                    end_bytes: at,
                });
            }
            start = end;
        }
        PrefixKeys {
            keys,
            prompt_bytes: total,
        }
    }

    fn recent() -> RecentPrefixes {
        RecentPrefixes::new(RecentSettings::default())
    }

    const T0: u64 = 1_790_000_000_000;

    #[test]
    fn uses_go_on_fading_after_the_clock_jumped() {
        const HOUR_MS: u64 = 3_600_000;
        let uses_after = |jumped_ms: u64| {
            let mut recent = recent();
            let keys = prompt(&[(1, 512)]);
            recent.observe(&keys, BUSY, T0);
            for second in 0..1_000 {
                recent.observe(&keys, BUSY, jumped_ms + 1_000 * second);
            }
            recent.all.sixteenths()
        };
        let without = uses_after(T0);
        for jumped_ms in [T0 - HOUR_MS, T0 + HOUR_MS, T0 + 10 * 365 * 24 * HOUR_MS, 1] {
            let with = uses_after(jumped_ms);
            assert!(
                with.abs_diff(without) <= 16 * ONE_USE,
                "{with} for {without} at {jumped_ms}"
            );
        }
    }

    #[test]
    fn entry_takes_16_bytes_and_memory_is_fixed() {
        assert_eq!(size_of::<Entry>(), 16);
        let settings = RecentSettings {
            memory_bytes: 10_000,
            ..RecentSettings::default()
        };
        let mut recent = RecentPrefixes::new(settings);
        let before = recent.memory_bytes();
        assert!(before <= 10_000 && before > 4_000);
        for i in 0..2_000 {
            recent.observe(&prompt(&[(i, 9000)]), BUSY, T0 + i);
        }
        assert_eq!(recent.memory_bytes(), before);
    }

    #[test]
    fn turns_of_a_short_chat_share_their_home() {
        let mut recent = recent();
        // A system prompt that everyone has, so that it is hot.
        for user in 0..50 {
            recent.observe(&prompt(&[(1, 28), (1000 + user, 150)]), BUSY, T0 + user);
        }
        let one = recent.observe(&prompt(&[(1, 28), (5, 150)]), BUSY, T0 + 100);
        let two = recent.observe(&prompt(&[(1, 28), (5, 150), (6, 700)]), BUSY, T0 + 101);
        let three = recent.observe(&prompt(&[(1, 28), (5, 150), (6, 700), (7, 800)]), BUSY, T0 + 102);
        assert_eq!(one.home.unwrap().depth_bytes, 178);
        assert_eq!(one.home, two.home);
        assert_eq!(two.home, three.home);
    }

    #[test]
    fn a_cold_system_prompt_sticks_as_a_whole() {
        let mut recent = recent();
        let mut all = Vec::new();
        for i in 0..640u64 {
            let homes = recent.observe(&prompt(&[(i % 64, 12_288), (1000 + i, 300)]), BUSY, T0 + i * 20);
            if i % 64 == 3 {
                all.push(homes.home);
            }
        }
        assert!(
            all.iter().all(|h| h == &all[0] && h.unwrap().depth_bytes == 4096),
            "{all:?}"
        );
    }

    #[test]
    fn a_hot_prefix_splits_by_what_follows_it_and_joins_again_when_it_cools() {
        let mut recent = recent();
        for i in 0..100 {
            recent.observe(&prompt(&[(1, 8192), (1000 + i, 600)]), BUSY, T0 + i * 20);
        }
        let homes = recent.observe(&prompt(&[(1, 8192), (7, 600)]), BUSY, T0 + 2000);
        assert_eq!(homes.home.unwrap().depth_bytes, 8792);
        for i in 0..2000 {
            recent.observe(
                &prompt(&[(50 + i % 400, 8192), (5000 + i, 600)]),
                BUSY,
                T0 + 3000 + i * 20,
            );
        }
        let homes = recent.observe(&prompt(&[(1, 8192), (8, 600)]), BUSY, T0 + 50_000);
        assert_eq!(homes.home.unwrap().depth_bytes, 4096);
    }

    #[test]
    fn between_the_limits_a_key_stays_what_it_was() {
        let limits = |in_flight: u32| Limits {
            all: 100 * ONE_USE,
            hosts: 8,
            in_flight_64ths: in_flight * 64,
        };
        let uses = |count: u32, hot: bool| Uses {
            last: 0,
            packed: (count * ONE_USE) | if hot { HOT } else { 0 },
        };
        // 1.2 hosts' worth, then 0.96.
        assert!(!uses(15, false).judge(&limits(100)));
        assert!(uses(15, true).judge(&limits(100)));
        assert!(!uses(12, true).judge(&limits(100)));
        // 3 requests in flight, then 1.8.
        assert!(!uses(30, false).judge(&limits(10)));
        assert!(uses(30, true).judge(&limits(10)));
        assert!(!uses(30, true).judge(&limits(6)));
    }

    #[test]
    fn one_prompt_again_and_again_on_an_idle_fleet_keeps_its_home() {
        let mut recent = recent();
        let idle = Traffic {
            hosts: 8,
            in_flight: 1,
        };
        let homes: Vec<_> = (0..200)
            .map(|i| recent.observe(&prompt(&[(1, 9000)]), idle, T0 + i * 100))
            .collect();
        assert!(
            homes
                .iter()
                .all(|s| s.home == homes[0].home && s.home == s.fixed_home)
        );
    }

    #[test]
    fn one_host_has_no_hot_prefix() {
        let mut recent = recent();
        let mut homes = Homes::default();
        for i in 0..100 {
            homes = recent.observe(
                &prompt(&[(1, 8192)]),
                Traffic {
                    hosts: 1,
                    in_flight: 100,
                },
                T0 + i,
            );
        }
        assert_eq!(homes.home.unwrap().depth_bytes, 4096);
    }

    #[test]
    fn prefix_hash_keeps_its_depth_however_hot() {
        let mut recent = recent();
        let mut fixed = Vec::new();
        for i in 0..60 {
            fixed.push(
                recent
                    .observe(&prompt(&[(1, 8192), (1000 + i, 600)]), BUSY, T0 + i)
                    .fixed_home,
            );
        }
        assert!(
            fixed
                .iter()
                .all(|f| f == &fixed[0] && f.unwrap().depth_bytes == 4096)
        );
    }

    #[test]
    fn no_keys_means_no_home() {
        assert_eq!(
            recent().observe(&PrefixKeys::default(), BUSY, T0),
            Homes::default()
        );
    }
}
