//! What one VM knows, whichever root context asks.
//!
//! Linear memory survives a configuration push: the new root context finds the pools that the old one filled, and
//! takes them over. The old one keeps ticking for Envoy's drain time, so pools belong to the newest root that
//! configured them and the others let go.

use core::cell::RefCell;

use super::host::{self, CAS_CREATE};
use super::shared::{self, JournalSlot, Merged};
use super::stats::{Counter, Stats};
use crate::chunk::mix;
use crate::config::PoolConfig;
use crate::exchange::Unkeyed;
use crate::journal::{JournalsSeen, MAX_JOURNALS, MERGE_ABOVE, MergedJournals, PublicationPace};
use crate::pool::Pool;
use crate::shared_keys::{NEXT_ID, PoolKeys};

thread_local! {
    static VM: RefCell<Vm> = RefCell::new(Vm::new());
}

/// Calls `f` with this VM's state. `None` only if it were called while it runs, which no caller does.
pub(super) fn with_vm<R>(f: impl FnOnce(&mut Vm) -> R) -> Option<R> {
    VM.try_with(|vm| vm.try_borrow_mut().ok().map(|mut vm| f(&mut vm)))
        .ok()
        .flatten()
}

/// State of one VM.
pub(super) struct Vm {
    pub(super) stats: Stats,
    pools: Vec<PoolEntry>,
    flag: BodyFlag,
    /// Requests that wait at their headers while it is unknown whether their bodies can come.
    waiting: Vec<Waiting>,
    /// Contexts let go by the self-check; their headers must not be touched any more.
    detached: Vec<u32>,
    /// The one of them whose body Envoy delivers next if the flag is missing.
    resuming: Option<u32>,
    served_streams: bool,
}

/// Whether Envoy delivers bodies while headers wait (`allow_on_headers_stop_iteration`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyFlag {
    Unknown,
    Present,
    Missing,
}

/// A request that waits at its headers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub(super) context: u32,
    since_ms: u64,
    /// Bytes that Envoy had received of it when it began to wait.
    received_bytes: u64,
}

impl Waiting {
    /// Whether Envoy has received more of the effective context's request since, or its end: a body that was not
    /// delivered.
    pub(super) fn has_undelivered_body(&self) -> bool {
        received_bytes() > self.received_bytes || host::property(b"request\0duration").is_some()
    }
}

/// Bytes of headers and body that Envoy has received of the effective context's request.
fn received_bytes() -> u64 {
    host::number_property(b"request\0total_size").unwrap_or(0)
}

/// One pool of this VM.
pub(super) struct PoolEntry {
    pub(super) name: String,
    pub(super) pool: Pool,
    pub(super) keys: PoolKeys,
    /// Root contexts that configured it, the newest last.
    owners: Vec<u32>,
    slot: JournalSlot,
    journals: JournalsSeen,
    all_read_ms: u64,
    has_journal: bool,
    is_dirty: bool,
    /// The journal as published shows requests in flight.
    shows_requests: bool,
    /// How many hosts it shows to be silent.
    shown_silences: usize,
    synced_ms: u64,
    published_ms: u64,
    pace: PublicationPace,
    table_sequence: Option<u64>,
}

impl Vm {
    fn new() -> Self {
        Self {
            stats: Stats::new(),
            pools: Vec::new(),
            flag: BodyFlag::Unknown,
            waiting: Vec::new(),
            detached: Vec::new(),
            resuming: None,
            served_streams: false,
        }
    }

    /// Gives the pools of a configuration to a root context; pools that exist keep what they know.
    pub(super) fn configure(&mut self, root: u32, pools: &[PoolConfig]) {
        // The operator may just have added the flag.
        self.flag = if self.flag == BodyFlag::Missing {
            BodyFlag::Unknown
        } else {
            self.flag
        };
        for config in pools {
            match self.pools.iter_mut().find(|entry| entry.name == config.name) {
                Some(entry) => {
                    entry.owners.retain(|owner| *owner != root);
                    entry.owners.push(root);
                    entry.pool.reconfigure(config.clone());
                }
                None => self.pools.push(PoolEntry::new(config.clone(), root)),
            }
        }
    }

    /// A root context is gone, and with it the pools that no other configured.
    pub(super) fn forget_root(&mut self, root: u32) {
        self.pools.retain_mut(|entry| {
            entry.owners.retain(|owner| *owner != root);
            !entry.owners.is_empty()
        });
    }

    /// The pool of a cluster, together with the metrics.
    pub(super) fn pool_and_stats(&mut self, name: &str) -> Option<(&mut PoolEntry, &mut Stats)> {
        let entry = self.pools.iter_mut().find(|entry| entry.name == name)?;
        Some((entry, &mut self.stats))
    }

    /// Whether a root context owns a pool of that name.
    pub(super) fn owns(&self, root: u32, name: &str) -> bool {
        self.pools
            .iter()
            .any(|entry| entry.is_owned_by(root) && entry.name == name)
    }

    /// Whether a root context still owns anything.
    pub(super) fn owns_any(&self, root: u32) -> bool {
        self.pools.iter().any(|entry| entry.is_owned_by(root))
    }

    /// Regular work for the pools of a root context.
    pub(super) fn tick(&mut self, root: u32, now_ms: u64) {
        let serves_streams = self.served_streams;
        for entry in self.pools.iter_mut().filter(|entry| entry.is_owned_by(root)) {
            // A VM without streams, as the main thread's is, would fill an index that nobody asks.
            if serves_streams && now_ms.abs_diff(entry.synced_ms) >= IDLE_SYNC_MS {
                entry.sync(&mut self.stats, now_ms);
            }
            entry.heartbeat(&mut self.stats, now_ms);
        }
    }

    /// A stream of a pool came through this VM.
    pub(super) fn note_stream(&mut self) {
        self.served_streams = true;
    }

    /// Whether this VM serves streams, which the main thread's never does.
    pub(super) fn serves_streams(&self) -> bool {
        self.served_streams
    }

    /// Whether a body comes while its headers wait, as far as this VM knows.
    pub(super) fn bodies_come(&self) -> bool {
        self.flag != BodyFlag::Missing
    }

    /// The request of the current context begins to wait at its headers.
    pub(super) fn wait_begins(&mut self, context: u32, now_ms: u64) {
        self.resuming = None;
        if self.flag == BodyFlag::Unknown && self.waiting.len() < MAX_WATCHED {
            self.waiting.push(Waiting {
                context,
                since_ms: now_ms,
                received_bytes: received_bytes(),
            });
        }
    }

    /// A body callback came for a request that waits.
    ///
    /// # Errors
    /// When the self-check had let the request go: its headers are gone, and it goes on undecided for this cause.
    pub(super) fn body_came(&mut self, context: u32) -> Result<(), Unkeyed> {
        if !self.detached.contains(&context) {
            if self.flag == BodyFlag::Unknown {
                self.flag = BodyFlag::Present;
                self.waiting.clear();
            }
            return Ok(());
        }
        // The body had been there and came at once when the headers were let go: that is what held it back.
        if self.resuming == Some(context) && self.flag == BodyFlag::Unknown {
            self.flag = BodyFlag::Missing;
            log::warn!(
                "requests cannot be read: set `allow_on_headers_stop_iteration: true` in the Wasm filter's \
                 configuration (Envoy 1.35 or newer); until then hosts are chosen by load alone"
            );
        }
        Err(if self.flag == BodyFlag::Missing {
            Unkeyed::FlagMissing
        } else {
            Unkeyed::NothingHeld
        })
    }

    /// Requests that have waited for so long that the self-check should look at them; once the flag is known to be
    /// missing, all that wait.
    pub(super) fn overdue(&mut self, now_ms: u64) -> Vec<Waiting> {
        self.resuming = None;
        let is_missing = self.flag == BodyFlag::Missing;
        let is_overdue =
            |waiting: &&Waiting| is_missing || now_ms.abs_diff(waiting.since_ms) >= SELF_CHECK_MS;
        self.waiting.iter().filter(is_overdue).copied().collect()
    }

    /// Whether to let an overdue request go; it counts as detached then.
    ///
    /// A client that is slow to send its body is waited for. Where the body was not delivered, one request is let go at
    /// a time, until what Envoy does then has told why.
    pub(super) fn lets_go(&mut self, waiting: &Waiting, has_undelivered_body: bool) -> bool {
        let goes = match self.flag {
            BodyFlag::Missing => true,
            BodyFlag::Unknown => has_undelivered_body && self.resuming.is_none(),
            BodyFlag::Present => false,
        };
        if goes {
            self.waiting.retain(|other| other.context != waiting.context);
            self.detached.push(waiting.context);
            self.resuming = Some(waiting.context);
        }
        goes
    }

    /// A request is over.
    pub(super) fn context_ends(&mut self, context: u32) {
        self.waiting.retain(|waiting| waiting.context != context);
        self.detached.retain(|detached| *detached != context);
    }
}

impl PoolEntry {
    fn new(config: PoolConfig, owner: u32) -> Self {
        let keys = PoolKeys::new(&config.name);
        let name = config.name.clone();
        Self {
            pool: Pool::new(config, new_id()),
            name,
            keys,
            owners: vec![owner],
            slot: JournalSlot::default(),
            journals: JournalsSeen::default(),
            all_read_ms: 0,
            has_journal: false,
            is_dirty: false,
            shows_requests: false,
            shown_silences: 0,
            synced_ms: 0,
            published_ms: 0,
            pace: PublicationPace::default(),
            table_sequence: None,
        }
    }

    /// Whether a root context is the newest of those that configured this pool.
    fn is_owned_by(&self, root: u32) -> bool {
        self.owners.last() == Some(&root)
    }

    /// Reads what others published, if the last time is a while ago.
    pub(super) fn sync_if_due(&mut self, stats: &mut Stats, now_ms: u64) {
        // A clock that went backwards counts as due.
        if now_ms.abs_diff(self.synced_ms) >= SYNC_MS {
            self.sync(stats, now_ms);
        }
    }

    fn sync(&mut self, stats: &mut Stats, now_ms: u64) {
        self.synced_ms = now_ms;
        let sequence = shared::table_sequence(&self.keys);
        if sequence.is_some() && sequence != self.table_sequence {
            self.table_sequence = sequence;
            if let Some((blob, _)) = host::shared_data(&self.keys.table)
                && self.pool.apply_table(&blob, now_ms).is_err()
            {
                stats.add(Counter::BlobsRejected, 1);
            }
        }
        let all = now_ms.abs_diff(self.all_read_ms) >= IDLE_SYNC_MS;
        if all {
            self.all_read_ms = now_ms;
        }
        self.read_journals(all, stats, now_ms);
        self.pool.settle_journals(now_ms);
    }

    fn read_journals(&mut self, all: bool, stats: &mut Stats, now_ms: u64) {
        let (pool, keys) = (&mut self.pool, &self.keys);
        let counts = shared::publications(keys);
        let mut slots = self.journals.moved(&counts, all);
        let mut to_merge = None;
        if !all && slots.len() > MERGE_ABOVE {
            match shared::merged(keys, now_ms) {
                Merged::Due => {
                    slots = (0..MAX_JOURNALS).collect();
                    to_merge = Some(Vec::new());
                }
                Merged::Blob(blob) => match pool.apply_merged(&blob, now_ms) {
                    Ok(Some(merged)) => {
                        stats.add(Counter::PlacementsMissed, merged.news.missed.into());
                        self.journals.saw_all(&merged.counts);
                        slots = merged.behind;
                    }
                    Ok(None) => {}
                    Err(_) => stats.add(Counter::BlobsRejected, 1),
                },
                Merged::Missing => {}
            }
        }
        let journals = &mut self.journals;
        shared::read_journals(keys, &slots, |slot, journal, archive| {
            journals.saw(slot, &counts);
            match pool.apply_journal(slot, journal, archive, now_ms) {
                Ok(news) => stats.add(Counter::PlacementsMissed, news.missed.into()),
                Err(_) => stats.add(Counter::BlobsRejected, 1),
            }
            if let Some(blobs) = &mut to_merge {
                blobs.push((slot, journal.to_vec()));
            }
        });
        if let Some(blobs) = to_merge {
            stats.add(Counter::JournalMerges, 1);
            let blobs = blobs.iter().map(|(slot, blob)| (*slot, blob.as_slice()));
            shared::publish_merged(keys, &MergedJournals::of(blobs, &counts, now_ms));
        }
    }

    /// This worker's tallies changed.
    pub(super) fn changed(&mut self, stats: &mut Stats, now_ms: u64) {
        self.is_dirty = true;
        // A worker that falls idle says so at once: nothing might come for a while that would, and the others would send
        // requests away from hosts that are free.
        let falls_idle = self.shows_requests && self.pool.fleet().is_idle();
        if falls_idle || self.pace.may_publish(now_ms) {
            self.pace.published(now_ms);
            self.publish(stats, now_ms);
        }
    }

    /// Publishes what changed, be it only that a host is silent for too long by now, and at least a sign of life each second,
    /// more often while requests are in flight. A VM that never decided has no journal.
    fn heartbeat(&mut self, stats: &mut Stats, now_ms: u64) {
        self.is_dirty |= self.shows_requests && self.pool.silences(now_ms).count() != self.shown_silences;
        let beat_ms = if self.shows_requests {
            BUSY_HEARTBEAT_MS
        } else {
            HEARTBEAT_MS
        };
        if self.is_dirty || (self.has_journal && now_ms.abs_diff(self.published_ms) >= beat_ms) {
            self.publish(stats, now_ms);
        }
    }

    fn publish(&mut self, stats: &mut Stats, now_ms: u64) {
        let closed = self.pool.take_closed_runs();
        self.published_ms = now_ms;
        self.is_dirty = false;
        let (keys, slot) = (&self.keys, &mut self.slot);
        (self.shows_requests, self.shown_silences, self.has_journal) =
            self.pool.with_journal(now_ms, |journal| {
                let has_journal = slot.write(keys, journal, &closed, now_ms);
                (!journal.tallies.is_empty(), journal.silences.len(), has_journal)
            });
        if !self.has_journal {
            stats.add(Counter::JournalSlotMissing, 1);
        }
    }
}

/// A number that nobody else has, in this process or a later one.
///
/// Time alone would not do: Envoy's clock has microseconds, and a configuration reaches all threads at once. Two
/// companions of one number both hold the lease, and two workers of one number write the same journal.
pub(super) fn new_id() -> u64 {
    mix(host::now_ns(), next_number())
}

/// A number that nobody else of this process has, unless another plugin writes our keys.
fn next_number() -> u64 {
    for _ in 0..MAX_TRIES {
        let stored = host::shared_data(NEXT_ID);
        let number = stored
            .as_ref()
            .and_then(|(bytes, _)| bytes.as_slice().try_into().ok());
        let number = number.map_or(0, u64::from_le_bytes);
        let cas = stored.map_or(CAS_CREATE, |(_, cas)| cas);
        if host::set_shared_data(NEXT_ID, &number.wrapping_add(1).to_le_bytes(), cas).is_ok() {
            return number;
        }
    }
    0
}

/// Each try that fails is another's success, and there are not so many contexts.
const MAX_TRIES: u32 = 1024;
/// Age at which a decision reads the others' tallies anew: reading them costs a few µs a worker.
const SYNC_MS: u64 = 20;
/// The same for a VM without traffic; and all journals are read that often, whether or not they say that they changed.
const IDLE_SYNC_MS: u64 = 1000;
/// The slot of a journal without a sign of life may be taken after five of these.
const HEARTBEAT_MS: u64 = 1000;
/// Tallies without a sign of life stop counting after four of these.
const BUSY_HEARTBEAT_MS: u64 = 400;
/// A request whose body was not delivered by then is looked at, while it is unknown whether bodies come at all.
const SELF_CHECK_MS: u64 = 1000;
/// Requests watched at once: one would be enough to learn what there is to learn, but none may hang.
const MAX_WATCHED: usize = 65_536;
