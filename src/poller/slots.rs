//! Slot numbers, epochs, and what is remembered of each host's scrapes.
//!
//! In: hosts that come and go, samples, failures. Out: a slot and an epoch for each, whether an engine restarted, and
//! when a host may be scraped again. A slot that was freed rests for [`REST_MS`] if another is to be had: journals and
//! index entries of the old host then have gone by the time the slot means another.
//!
//! Epochs are seconds since the Unix epoch, or one more than the last: they grow also across companions that know nothing
//! of each other, so that a (slot, epoch) pair never means two hosts.

use std::cmp::Ordering;

use crate::host_table::{Health, Host, HostTable, Load, MAX_HOSTS, Slot};

/// Whether a sample shows that the engine restarted since the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Restart {
    NotSeen,
    Seen,
}

/// The slots of one pool.
#[derive(Debug, Default)]
pub(super) struct SlotBook {
    /// `records[i]` is slot i's.
    records: Vec<Record>,
}

#[derive(Debug, Default)]
struct Record {
    epoch: u32,
    /// When its host left; `None` while it has one.
    freed_ms: Option<u64>,
    next_scrape_ms: u64,
    failures: u32,
    /// What discovery says of it.
    discovered: Health,
    priority: u8,
    /// Its last scrape that told whether anybody is there was refused.
    refuses: bool,
    /// `refuses` is only what a holder before may have meant.
    is_assumed: bool,
    baseline: Baseline,
}

/// The last values told of what only a restart can lower or change.
#[derive(Debug, Default)]
struct Baseline {
    started_ms: Option<u64>,
    prefix_queries: Option<u64>,
    prefix_hits: Option<u64>,
}

impl SlotBook {
    /// The book as the holder who published `table` kept it, as far as the table tells. Its slots are below
    /// [`MAX_HOSTS`] and in growing order.
    pub(super) fn adopted(table: &HostTable) -> Self {
        let newest_epoch = table.hosts.iter().map(|host| host.epoch).max().unwrap_or(0);
        let mut book = Self::default();
        for host in &table.hosts {
            while book.records.len() < usize::from(host.slot.0) {
                book.records.push(Record {
                    epoch: newest_epoch,
                    freed_ms: Some(table.published_ms),
                    ..Record::default()
                });
            }
            // Unhealthy may be what discovery said or what a scrape did: whoever tells first, decides.
            let is_assumed = host.health == Health::Unhealthy;
            let mut record = Record {
                epoch: host.epoch,
                discovered: if is_assumed { Health::Healthy } else { host.health },
                refuses: is_assumed,
                is_assumed,
                ..Record::default()
            };
            record.baseline.update(&host.load);
            book.records.push(record);
        }
        book
    }

    /// A slot and epoch for a new host: the lowest that rested, else one never used, else the one that rested longest.
    pub(super) fn take(&mut self, now_ms: u64) -> Option<(Slot, u32)> {
        let rested = |record: &Record| {
            record
                .freed_ms
                .is_some_and(|freed_ms| freed_ms.saturating_add(REST_MS) <= now_ms)
        };
        let index = match self.records.iter().position(rested) {
            Some(index) => index,
            None if self.records.len() < MAX_HOSTS => {
                self.records.push(Record::default());
                self.records.len().saturating_sub(1)
            }
            None => {
                let freed = self.records.iter().enumerate();
                let freed = freed.filter_map(|(index, record)| Some((record.freed_ms?, index)));
                freed.min()?.1
            }
        };
        let slot = Slot(u16::try_from(index).ok()?);
        let epoch = self.next_epoch(slot, now_ms);
        let record = self.records.get_mut(index)?;
        *record = Record {
            epoch,
            ..Record::default()
        };
        Some((slot, epoch))
    }

    /// Its host left.
    pub(super) fn free(&mut self, slot: Slot, now_ms: u64) {
        if let Some(record) = self.record(slot) {
            record.freed_ms = Some(now_ms);
        }
    }

    /// Starts a new epoch of the slot.
    pub(super) fn next_epoch(&mut self, slot: Slot, now_ms: u64) -> u32 {
        let now_seconds = u32::try_from(now_ms / 1_000).unwrap_or(u32::MAX);
        let Some(record) = self.record(slot) else {
            return now_seconds;
        };
        record.epoch = record.epoch.saturating_add(1).max(now_seconds);
        record.epoch
    }

    /// Whether the host's turn has come: not within half an interval of the last start, and later after failures.
    pub(super) fn may_scrape(&self, slot: Slot, now_ms: u64) -> bool {
        self.records
            .get(usize::from(slot.0))
            .is_some_and(|record| record.next_scrape_ms <= now_ms)
    }

    pub(super) fn on_scrape_start(&mut self, slot: Slot, now_ms: u64, interval_ms: u32) {
        if let Some(record) = self.record(slot) {
            record.next_scrape_ms = now_ms.saturating_add(u64::from(interval_ms / 2));
        }
    }

    /// Doubles the host's interval, up to [`MAX_BACKOFF`] times; for one that refuses, [`MAX_REFUSED_BACKOFF`] times.
    pub(super) fn on_scrape_failed(&mut self, slot: Slot, now_ms: u64, interval_ms: u32) {
        if let Some(record) = self.record(slot) {
            let most = if record.refuses {
                MAX_REFUSED_BACKOFF
            } else {
                MAX_BACKOFF
            };
            let factor = 1u64.checked_shl(record.failures).unwrap_or(most).min(most);
            record.failures = record.failures.saturating_add(1);
            let wait_ms = u64::from(interval_ms).saturating_mul(factor);
            // The turn comes round once an interval; half of one less makes it the turn that is meant.
            record.next_scrape_ms = now_ms
                .saturating_add(wait_ms)
                .saturating_sub(u64::from(interval_ms / 2));
        }
    }

    /// Takes note of what discovery says of the host.
    pub(super) fn on_discovered(&mut self, slot: Slot, health: Health, priority: u8) {
        if let Some(record) = self.record(slot) {
            (record.discovered, record.priority) = (health, priority);
            record.refuses &= !std::mem::take(&mut record.is_assumed);
        }
    }

    /// Takes note of whether the host refuses connections; whether that is news.
    pub(super) fn on_reached(&mut self, slot: Slot, refuses: bool) -> bool {
        self.record(slot).is_some_and(|record| {
            record.is_assumed = false;
            std::mem::replace(&mut record.refuses, refuses) != refuses
        })
    }

    /// Gives each host of the table its health; whether any changed.
    ///
    /// Hosts that are not needed stand by. As in Envoy's own balancer ("Priority levels" and "Degraded endpoints", with its
    /// default overprovisioning factor), the healthy hosts of each priority are needed, then the degraded ones of each, until
    /// 1.4 times their shares of all hosts of their priority come to 1. Of the last of them that part is needed which is
    /// still missing, by the order of addresses, which is the same for every gateway.
    pub(super) fn give_healths(&self, hosts: &mut [Host]) -> bool {
        let needed = self.needed(hosts);
        let mut changed = false;
        for host in hosts {
            let Some(record) = self.records.get(usize::from(host.slot.0)) else {
                continue;
            };
            let is_needed = match record.rank().cmp(&needed.last_rank) {
                Ordering::Less => true,
                Ordering::Equal => needed
                    .last_address
                    .as_ref()
                    .is_none_or(|last| host.address <= *last),
                Ordering::Greater => false,
            };
            let health = match record.health() {
                health if health.takes_traffic() && !is_needed => Health::Draining,
                health => health,
            };
            changed |= std::mem::replace(&mut host.health, health) != health;
        }
        changed
    }

    fn needed(&self, hosts: &[Host]) -> Needed {
        let mut levels = [Level::default(); LEVELS];
        for record in hosts
            .iter()
            .filter_map(|host| self.records.get(usize::from(host.slot.0)))
        {
            let Some(level) = levels.get_mut(usize::from(record.priority)) else {
                continue;
            };
            level.hosts = level.hosts.saturating_add(1);
            match record.health() {
                Health::Healthy => level.healthy = level.healthy.saturating_add(1),
                Health::Degraded => level.degraded = level.degraded.saturating_add(1),
                Health::Unhealthy | Health::Draining => {}
            }
        }
        let mut missing_percent = 100u32;
        for is_degraded in [false, true] {
            for (priority, level) in (0u8..).zip(&levels) {
                let count = if is_degraded {
                    level.degraded
                } else {
                    level.healthy
                };
                let share = count.saturating_mul(OVERPROVISIONED_PERCENT);
                let percent = share.checked_div(level.hosts).unwrap_or(0).min(100);
                if percent < missing_percent {
                    missing_percent = missing_percent.saturating_sub(percent);
                    continue;
                }
                let last_rank = (is_degraded, priority);
                let part = count.saturating_mul(missing_percent).div_ceil(percent.max(1));
                let last = usize::try_from(part.saturating_sub(1)).unwrap_or(usize::MAX);
                return Needed {
                    last_rank,
                    last_address: (part < count)
                        .then(|| self.address_in_order(hosts, last_rank, last))
                        .flatten(),
                };
            }
        }
        Needed {
            last_rank: (true, u8::MAX),
            last_address: None,
        }
    }

    /// The nth address, from 0, of the hosts of this rank that may take traffic.
    fn address_in_order(&self, hosts: &[Host], rank: Rank, nth: usize) -> Option<String> {
        let is_of_rank = |record: &Record| record.health().takes_traffic() && record.rank() == rank;
        let mut addresses: Vec<&str> = hosts
            .iter()
            .filter(|host| {
                let record = self.records.get(usize::from(host.slot.0));
                record.is_some_and(is_of_rank)
            })
            .map(|host| host.address.as_str())
            .collect();
        addresses.sort_unstable();
        addresses.get(nth).map(|address| (*address).to_owned())
    }

    /// Takes note of a sample. A restart shows as another start time (by more than a second: exporters round) or as a
    /// counter that went backwards.
    pub(super) fn on_sample(&mut self, slot: Slot, load: &Load) -> Restart {
        let Some(record) = self.record(slot) else {
            return Restart::NotSeen;
        };
        record.failures = 0;
        let known = &record.baseline;
        let fell =
            |known: Option<u64>, now: Option<u64>| known.zip(now).is_some_and(|(known, now)| now < known);
        let started = known.started_ms.zip(load.started_ms);
        let restarted = started.is_some_and(|(known, now)| known.abs_diff(now) > STARTED_TOLERANCE_MS)
            || fell(known.prefix_queries, load.prefix_queries)
            || fell(known.prefix_hits, load.prefix_hits);
        if restarted {
            record.baseline = Baseline::default();
        }
        record.baseline.update(load);
        if restarted {
            Restart::Seen
        } else {
            Restart::NotSeen
        }
    }

    /// The clock jumped back to `now_ms`: nothing may wait for the time it jumped from.
    pub(super) fn rebase(&mut self, now_ms: u64) {
        for record in &mut self.records {
            record.next_scrape_ms = record.next_scrape_ms.min(now_ms);
            record.freed_ms = record.freed_ms.map(|freed_ms| freed_ms.min(now_ms));
        }
    }

    fn record(&mut self, slot: Slot) -> Option<&mut Record> {
        self.records.get_mut(usize::from(slot.0))
    }
}

/// The order in which hosts are needed: by whether they are degraded, then by priority.
type Rank = (bool, u8);

/// Up to where hosts are needed.
struct Needed {
    last_rank: Rank,
    /// The last one needed of that rank; `None` for all of them.
    last_address: Option<String>,
}

/// Hosts of one priority.
#[derive(Debug, Clone, Copy, Default)]
struct Level {
    hosts: u32,
    healthy: u32,
    degraded: u32,
}

impl Record {
    fn rank(&self) -> Rank {
        (self.health() == Health::Degraded, self.priority)
    }

    /// Where nobody listens, no request is served, whatever discovery says.
    const fn health(&self) -> Health {
        if self.refuses && self.discovered.takes_traffic() {
            Health::Unhealthy
        } else {
            self.discovered
        }
    }
}

impl Baseline {
    fn update(&mut self, load: &Load) {
        self.started_ms = load.started_ms.or(self.started_ms);
        self.prefix_queries = load.prefix_queries.or(self.prefix_queries);
        self.prefix_hits = load.prefix_hits.or(self.prefix_hits);
    }
}

/// How long a freed slot is left alone if another is free.
const REST_MS: u64 = 60_000;

/// A host that never answers is asked this many times less often, every 8 s at the default interval.
const MAX_BACKOFF: u64 = 16;
/// A connection that is refused costs next to nothing, and nobody sends anything there until one is not: 2 s at the default
/// interval.
const MAX_REFUSED_BACKOFF: u64 = 4;

const STARTED_TOLERANCE_MS: u64 = 1_000;

/// Priorities that Envoy knows are 0 to 127; more than that is one level more, which is never enough.
const LEVELS: usize = 128;
/// Envoy's default `overprovisioning_factor`.
const OVERPROVISIONED_PERCENT: u32 = 140;
