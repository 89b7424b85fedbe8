//! The companion of one pool as a state machine: it finds the hosts, scrapes them, and gives the table to publish.
//!
//! In: ticks, answers and failures, each with the time. Out: calls to make, the host table, counters. The shell makes the
//! calls, calls [`Poller::tick`] every [`Poller::tick_interval_ms`] and once more after answers (which frees places in
//! flight), and publishes what [`Poller::take_publishable`] gives. Answers are untrusted: no panic, everything is bounded
//! by [`MAX_HOSTS`] and by the calls in flight.
//!
//! Scrapes are paced: each host once an interval, spread evenly over it, never a burst after a stall and never more in
//! flight than configured. They name one exact host in the steering header; an answer that says that another host served
//! it is dropped. A host that does not answer keeps its last sample, which ages, and is asked less and less often, so
//! that dead hosts do not use up the places in flight. One that does not even take a connection is unhealthy until it does.
//! Hosts that left discovery leave the table at once; when discovery itself fails, the last endpoints stay.

mod apply;
mod config;
mod pace;
mod slots;

use self::config::MAX_SCRAPES;
pub use self::config::{Discovery, MetricsConfig, PollerConfig};
use self::pace::Pacer;
use self::slots::{Restart, SlotBook};
use crate::discovery::{self, Endpoint, MAX_ANSWER_BYTES};
use crate::host_table::{HostTable, MAX_HOSTS, Slot};
use crate::load::{self, MAX_METRICS_BYTES};

/// Names one call to its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallToken(pub u64);

/// One HTTP request for the shell to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Name to hand back with the answer.
    pub token: CallToken,
    /// Envoy cluster to send it to.
    pub cluster: String,
    /// Value of `:method`.
    pub method: &'static str,
    /// Value of `:path`.
    pub path: String,
    /// Value of `:authority`.
    pub authority: String,
    /// Further headers, name and value.
    pub headers: Vec<(String, String)>,
    /// When to give up, ms.
    pub timeout_ms: u32,
}

/// What came back for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer<'a> {
    /// HTTP status.
    pub status: u16,
    /// Value of the `x-served-by` response header, which Envoy's upstream filter sets to the address that answered.
    pub served_by: Option<&'a str>,
    /// The body.
    pub body: &'a [u8],
}

/// What happened so far; every number grows but `skipped_addresses` and `hosts_over_limit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Scrapes that gave a load.
    pub scrapes_ok: u64,
    /// Scrapes that failed: refused, reset, timed out, or another status than 200.
    pub scrape_failures: u64,
    /// Scrapes that another host answered, or, if the config requires to know it, an unnamed one.
    pub served_by_mismatch: u64,
    /// Scrapes accepted although nobody said who answered them.
    pub served_by_absent: u64,
    /// Discoveries that gave endpoints.
    pub discoveries_ok: u64,
    /// Discoveries that failed, or did not know the cluster.
    pub discovery_failures: u64,
    /// Answers with status 200 that could not be read, of scrapes and discoveries.
    pub parse_failures: u64,
    /// Engine restarts seen.
    pub restarts: u64,
    /// Addresses that the last discovery had to skip.
    pub skipped_addresses: u64,
    /// Endpoints of the last discovery beyond the bound of the table.
    pub hosts_over_limit: u64,
}

/// The companion of one pool.
#[derive(Debug)]
pub struct Poller {
    config: PollerConfig,
    table: HostTable,
    slots: SlotBook,
    pacer: Pacer,
    in_flight: Vec<InFlight>,
    next_token: u64,
    next_discovery_ms: u64,
    /// Envoy refused the filter expression: ask for all clusters.
    filter_refused: bool,
    last_tick_ms: u64,
    /// Some discovery succeeded, or a table was adopted: before that, an empty table means nothing.
    hosts_known: bool,
    /// Hosts, health or epochs changed since the last publication.
    membership_changed: bool,
    /// A sample changed since the last publication.
    samples_changed: bool,
    last_published_ms: Option<u64>,
    counters: Counters,
}

#[derive(Debug)]
struct InFlight {
    token: CallToken,
    deadline_ms: u64,
    kind: CallKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallKind {
    Discovery,
    Scrape { slot: Slot, epoch: u32 },
}

impl Poller {
    /// A companion that knows no hosts yet.
    pub fn new(config: PollerConfig) -> Self {
        let pacer = Pacer::new(config.metrics.interval_ms);
        Self {
            config,
            table: HostTable::default(),
            slots: SlotBook::default(),
            pacer,
            in_flight: Vec::new(),
            next_token: 0,
            next_discovery_ms: 0,
            filter_refused: false,
            last_tick_ms: 0,
            hosts_known: false,
            membership_changed: false,
            samples_changed: false,
            last_published_ms: None,
            counters: Counters::default(),
        }
    }

    /// Takes over from the holder that published `table`: hosts keep their slots, epochs and samples. To be called
    /// before the first tick.
    pub fn adopt(&mut self, table: &HostTable) {
        self.table = table.clone();
        self.table
            .hosts
            .retain(|host| usize::from(host.slot.0) < MAX_HOSTS);
        self.table.hosts.sort_unstable_by_key(|host| host.slot);
        self.table.hosts.dedup_by_key(|host| host.slot);
        self.slots = SlotBook::adopted(&self.table);
        self.hosts_known = true;
        self.membership_changed = true;
    }

    /// The calls that are due.
    pub fn tick(&mut self, now_ms: u64) -> Vec<Call> {
        if now_ms < self.last_tick_ms {
            self.rebase(now_ms);
        }
        self.last_tick_ms = now_ms;
        self.expire_calls(now_ms);
        let mut calls = Vec::new();
        self.discover(now_ms, &mut calls);
        self.scrape(now_ms, &mut calls);
        calls
    }

    /// Takes the answer to a call; one to a call that is not in flight any more is passed over.
    pub fn on_answer(&mut self, token: CallToken, now_ms: u64, answer: Answer<'_>) {
        match self.take_call(token) {
            Some(CallKind::Discovery) => self.on_discovery_answer(now_ms, answer),
            Some(CallKind::Scrape { slot, epoch }) => self.on_scrape_answer(slot, epoch, now_ms, answer),
            None => {}
        }
    }

    /// How many bytes of an answer's body are read; whatever follows them need not be handed over.
    #[must_use]
    pub fn wanted_bytes(&self, token: CallToken, status: u16) -> usize {
        let call = self.in_flight.iter().find(|call| call.token == token);
        match call.map(|call| call.kind) {
            // One more tells that it is too large.
            Some(CallKind::Discovery) if status == 200 => MAX_ANSWER_BYTES + 1,
            Some(CallKind::Scrape { .. }) if status == 200 => MAX_METRICS_BYTES,
            Some(CallKind::Scrape { .. }) if status == 503 => MAX_REFUSAL_BYTES,
            Some(_) | None => 0,
        }
    }

    /// Takes note that a call was refused, was reset or timed out.
    pub fn on_failure(&mut self, token: CallToken, now_ms: u64) {
        if let Some(kind) = self.take_call(token) {
            self.count_failure(kind, now_ms);
        }
    }

    /// The table to publish now, if one is due and hosts were ever known: at once when hosts, health or epochs changed, within
    /// [`SAMPLE_PUBLISH_GAP_MS`] of the last when samples did, and as a heartbeat after [`HEARTBEAT_MS`].
    pub fn take_publishable(&mut self, now_ms: u64) -> Option<HostTable> {
        let due = self.last_published_ms.is_none_or(|last_ms| {
            let age_ms = now_ms.abs_diff(last_ms);
            self.membership_changed
                || (self.samples_changed && age_ms >= SAMPLE_PUBLISH_GAP_MS)
                || age_ms >= HEARTBEAT_MS
        });
        if !due || !self.hosts_known {
            return None;
        }
        self.membership_changed = false;
        self.samples_changed = false;
        self.last_published_ms = Some(now_ms);
        Some(self.table(now_ms).clone())
    }

    /// The table as it stands.
    pub fn table(&mut self, now_ms: u64) -> &HostTable {
        self.table.published_ms = now_ms;
        &self.table
    }

    /// How often to call [`Poller::tick`], ms: once a scrape, within bounds that keep idle ticks cheap and heartbeats and
    /// discovery in time.
    pub fn tick_interval_ms(&self) -> u64 {
        let hosts = u64::try_from(self.table.hosts.len()).unwrap_or(u64::MAX).max(1);
        let interval_ms = u64::from(self.config.metrics.interval_ms);
        (interval_ms / hosts).clamp(MIN_TICK_MS, MAX_TICK_MS)
    }

    /// What happened so far.
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// The clock jumped back: nothing may wait for the time it jumped from.
    fn rebase(&mut self, now_ms: u64) {
        self.next_discovery_ms = self.next_discovery_ms.min(now_ms);
        for call in &mut self.in_flight {
            call.deadline_ms = call
                .deadline_ms
                .min(now_ms.saturating_add(call_lifetime_ms(&self.config, call.kind)));
        }
        for host in &mut self.table.hosts {
            host.sampled_ms = host.sampled_ms.min(now_ms);
        }
        self.slots.rebase(now_ms);
    }

    /// Forgets calls that got neither answer nor failure, so that they do not hold their places for ever.
    fn expire_calls(&mut self, now_ms: u64) {
        while let Some(index) = self.in_flight.iter().position(|call| call.deadline_ms < now_ms) {
            let call = self.in_flight.swap_remove(index);
            self.count_failure(call.kind, now_ms);
        }
    }

    fn discover(&mut self, now_ms: u64, calls: &mut Vec<Call>) {
        if now_ms < self.next_discovery_ms || self.is_in_flight(CallKind::Discovery) {
            return;
        }
        let (cluster, interval_ms) = match &self.config.discovery {
            Discovery::Static(hosts) => {
                let mut endpoints: Vec<Endpoint> = hosts.iter().map(Endpoint::of_static).collect();
                discovery::put_in_order(&mut endpoints);
                self.apply_endpoints(&endpoints, now_ms);
                self.next_discovery_ms = u64::MAX;
                return;
            }
            Discovery::Admin { cluster, interval_ms } => (cluster.clone(), *interval_ms),
        };
        self.next_discovery_ms = now_ms.saturating_add(u64::from(interval_ms));
        let path = discovery::request_path(!self.filter_refused, &self.config.cluster);
        let token = self.track(CallKind::Discovery, now_ms);
        calls.push(Call {
            token,
            cluster,
            method: "GET",
            path,
            authority: ADMIN_AUTHORITY.to_owned(),
            headers: Vec::new(),
            timeout_ms: DISCOVERY_TIMEOUT_MS,
        });
    }

    fn scrape(&mut self, now_ms: u64, calls: &mut Vec<Call>) {
        if !self.config.metrics.enabled {
            return;
        }
        let hosts = self.table.hosts.len();
        let in_flight = self
            .in_flight
            .iter()
            .filter(|call| call.kind != CallKind::Discovery)
            .count();
        let free = self.config.max_scrapes_in_flight().saturating_sub(in_flight);
        let due = self.pacer.due(hosts, now_ms).min(free);
        let mut started = 0;
        for _ in 0..hosts {
            if started == due {
                break;
            }
            let Some(host) = self.table.hosts.get(self.pacer.next_index(hosts)) else {
                break;
            };
            let busy = self
                .in_flight
                .iter()
                .any(|call| matches!(call.kind, CallKind::Scrape { slot, .. } if slot == host.slot));
            if busy || !self.slots.may_scrape(host.slot, now_ms) {
                continue;
            }
            let kind = CallKind::Scrape {
                slot: host.slot,
                epoch: host.epoch,
            };
            let address = self.config.metrics.address_of(&host.address);
            self.slots
                .on_scrape_start(host.slot, now_ms, self.config.metrics.interval_ms);
            let token = self.track(kind, now_ms);
            calls.push(Call {
                token,
                cluster: self.config.metrics.cluster.clone(),
                method: "GET",
                path: self.config.metrics.path.clone(),
                authority: address.clone(),
                headers: vec![
                    (self.config.steering_header.clone(), address),
                    ("accept".to_owned(), "text/plain".to_owned()),
                ],
                timeout_ms: self.config.metrics.timeout_ms,
            });
            started = started.saturating_add(1);
        }
        self.pacer.spend(started);
    }

    fn on_discovery_answer(&mut self, now_ms: u64, answer: Answer<'_>) {
        if answer.status != 200 {
            // 400 is how Envoy answers an expression that it cannot compile.
            self.filter_refused |= answer.status == 400;
            self.counters.discovery_failures = self.counters.discovery_failures.saturating_add(1);
            return;
        }
        let found = match discovery::endpoints(answer.body, &self.config.cluster) {
            Ok(found) if found.is_known => found,
            Ok(_) => {
                self.counters.discovery_failures = self.counters.discovery_failures.saturating_add(1);
                return;
            }
            Err(_) => {
                self.counters.discovery_failures = self.counters.discovery_failures.saturating_add(1);
                self.counters.parse_failures = self.counters.parse_failures.saturating_add(1);
                return;
            }
        };
        self.counters.discoveries_ok = self.counters.discoveries_ok.saturating_add(1);
        self.counters.skipped_addresses = u64::from(found.skipped_addresses);
        self.counters.hosts_over_limit = u64::from(found.over_limit);
        self.apply_endpoints(&found.endpoints, now_ms);
    }

    fn on_scrape_answer(&mut self, slot: Slot, epoch: u32, now_ms: u64, answer: Answer<'_>) {
        // The host may have left, and its slot may be another's, while the call was out.
        let Some(index) = self.index_of(slot, epoch) else {
            return;
        };
        let Some(host) = self.table.hosts.get(index) else {
            return;
        };
        let asked = self.config.metrics.address_of(&host.address);
        // Metrics behind a port of their own tell nothing of the port that serves; and where no scrape ever succeeded, it may
        // be the way there that is wrong.
        if asked == host.address
            && host.sampled_ms != 0
            && let Some(refuses) = refuses_connections(&answer, &asked)
            && self.slots.on_reached(slot, refuses)
        {
            self.membership_changed |= self.slots.give_healths(&mut self.table.hosts);
        }
        if answer.status != 200 {
            self.count_failure(CallKind::Scrape { slot, epoch }, now_ms);
            return;
        }
        match answer.served_by.map(str::trim) {
            Some(served_by) if served_by == asked => {}
            None if !self.config.metrics.require_served_by => {
                self.counters.served_by_absent = self.counters.served_by_absent.saturating_add(1);
            }
            Some(_) | None => {
                self.counters.served_by_mismatch = self.counters.served_by_mismatch.saturating_add(1);
                self.slots
                    .on_scrape_failed(slot, now_ms, self.config.metrics.interval_ms);
                return;
            }
        }
        let Ok(load) = load::parse(&self.config.metrics.preset, answer.body) else {
            self.counters.parse_failures = self.counters.parse_failures.saturating_add(1);
            self.slots
                .on_scrape_failed(slot, now_ms, self.config.metrics.interval_ms);
            return;
        };
        let Some(host) = self.table.hosts.get_mut(index) else {
            return;
        };
        if self.slots.on_sample(slot, &load) == Restart::Seen {
            host.epoch = self.slots.next_epoch(slot, now_ms);
            self.membership_changed = true;
            self.counters.restarts = self.counters.restarts.saturating_add(1);
        }
        host.load = load;
        host.sampled_ms = now_ms;
        self.samples_changed = true;
        self.counters.scrapes_ok = self.counters.scrapes_ok.saturating_add(1);
    }

    fn count_failure(&mut self, kind: CallKind, now_ms: u64) {
        match kind {
            CallKind::Discovery => {
                self.counters.discovery_failures = self.counters.discovery_failures.saturating_add(1);
            }
            CallKind::Scrape { slot, epoch } => {
                self.counters.scrape_failures = self.counters.scrape_failures.saturating_add(1);
                if self.index_of(slot, epoch).is_some() {
                    self.slots
                        .on_scrape_failed(slot, now_ms, self.config.metrics.interval_ms);
                }
            }
        }
    }

    /// Where the host stands in the table, which is in slot order.
    fn index_of(&self, slot: Slot, epoch: u32) -> Option<usize> {
        let index = self
            .table
            .hosts
            .binary_search_by_key(&slot, |host| host.slot)
            .ok()?;
        self.table
            .hosts
            .get(index)
            .filter(|host| host.epoch == epoch)
            .map(|_| index)
    }

    fn is_in_flight(&self, kind: CallKind) -> bool {
        self.in_flight.iter().any(|call| call.kind == kind)
    }

    fn track(&mut self, kind: CallKind, now_ms: u64) -> CallToken {
        let token = CallToken(self.next_token);
        self.next_token = self.next_token.wrapping_add(1);
        let deadline_ms = now_ms.saturating_add(call_lifetime_ms(&self.config, kind));
        self.in_flight.push(InFlight {
            token,
            deadline_ms,
            kind,
        });
        token
    }

    fn take_call(&mut self, token: CallToken) -> Option<CallKind> {
        let index = self.in_flight.iter().position(|call| call.token == token)?;
        Some(self.in_flight.swap_remove(index).kind)
    }
}

/// Whether a host that was asked takes no connections; `None` where the answer does not tell, because another host gave it
/// or Envoy did for other reasons, such as full circuit breakers (503) or its patience (504).
fn refuses_connections(answer: &Answer<'_>, asked: &str) -> Option<bool> {
    let says_so = |text: &[u8]| text.windows(REFUSED.len()).any(|window| window == REFUSED);
    match answer.served_by.map(str::trim) {
        Some(served_by) => (served_by == asked).then_some(false),
        // What Envoy itself answers names no host, and neither does anything where its config does not ask for names.
        None if answer.status == 503 && says_so(answer.body) => Some(true),
        None => (answer.status == 200).then_some(false),
    }
}

/// How long a call may stay without answer or failure: its timeout and a second for the shell to say so.
fn call_lifetime_ms(config: &PollerConfig, kind: CallKind) -> u64 {
    let timeout_ms = match kind {
        CallKind::Discovery => DISCOVERY_TIMEOUT_MS,
        CallKind::Scrape { .. } => config.metrics.timeout_ms,
    };
    u64::from(timeout_ms).saturating_add(1_000)
}

/// A table is published at least this often: its age is how the filter knows that the companion lives.
pub const HEARTBEAT_MS: u64 = 1_000;

/// New samples are published together when they come closer than this: a table of 1 000 hosts is 80 kB for every worker to
/// read, and a tenth of the scrape interval more age is no loss.
pub const SAMPLE_PUBLISH_GAP_MS: u64 = 50;

/// Shortest tick: an empty 20 ms tick costs 0.2 % of a core.
const MIN_TICK_MS: u64 = 20;

/// Longest tick: a quarter of the heartbeat.
const MAX_TICK_MS: u64 = 250;

/// The admin interface answers from Envoy's main thread; one that takes longer than this is of no use.
const DISCOVERY_TIMEOUT_MS: u32 = 2_000;

/// Calls that a shell has to remember at most: those in flight, and as many that were given up and have not ended yet.
pub const MAX_CALLS: usize = 2 * (MAX_SCRAPES as usize + 1);

/// In Envoy's own 503, the reason for which it has no answer of the host: it did not take the connection. Envoy 1.36 goes on
/// with why, 1.40 does not; a timeout is called otherwise.
const REFUSED: &[u8] = b"reset reason: remote connection failure";

/// Envoy's own 503 is shorter.
const MAX_REFUSAL_BYTES: usize = 512;

/// The admin interface does not look at the authority, but a cluster's name may not be a valid one.
const ADMIN_AUTHORITY: &str = "localhost";

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
