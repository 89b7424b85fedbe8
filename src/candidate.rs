//! Host table × tallies → candidates: one pool's hosts as one worker knows them.
//!
//! In: the companion's host table, the other workers' tallies, this worker's own charges, failures and measured first
//! tokens, and the time. Out: bounded shortlists of eligible hosts and how busy each is, in prefill tokens. It must
//! never offer a host that is unhealthy, draining, decode-only or gone, never let a slot number or the order of the
//! table decide, and never do more than one pass over the hosts for a decision.
//!
//! The tallies follow (slot, epoch): a host that left or started a new epoch takes its tallies with it, and charges
//! of the old epoch then count for nothing.

mod member;
mod rendezvous;
mod tally;
mod view;

use crate::host_table::{HostTable, Slot};
use crate::journal::Silence;
use crate::recent::Traffic;

pub use self::tally::{Charge, Work};

use self::member::Member;
pub(crate) use self::rendezvous::{Entry, Lowest};
use self::tally::UsualWaits;
use self::view::Lane;
pub(crate) use self::view::{Busy, IDLE, RANKED, RUNNING_TOKENS};

/// The hosts of one pool as one worker knows them.
#[derive(Debug, Clone)]
pub struct Fleet {
    settings: FleetSettings,
    /// In growing slot order.
    members: Vec<Member>,
    /// The eligible members, dense for the pass of a decision.
    lanes: Vec<Lane>,
    /// All lanes have the same weight, so that ranking them needs no logarithm.
    weights_are_equal: bool,
    published_ms: Option<u64>,
    newest_sample_ms: u64,
    next_sequence: u32,
    /// Mean learned rate, or the default.
    tokens_per_s: u32,
    /// Slow mean of the uncached tokens of a request, in 1/16 tokens.
    mean_charge_16ths: u64,
    pub(crate) cursor: Option<Slot>,
    /// Slow mean of the share of hosts with pending prefill, 2⁻¹⁶.
    pub(crate) pending_q16: u32,
    own_requests: u64,
    other_requests: u64,
    foreign_requests: u64,
    usual_waits: UsualWaits,
    /// No unstreamed prefill is over before this.
    next_due_ms: u64,
}

/// How old the numbers may be, and what to assume before any are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetSettings {
    /// Age up to which a table and a sample are believed, ms. Default 3000: six polls at the default interval.
    pub fresh_ms: u64,
    /// Age beyond which the table counts as absent, ms. Default 60 000: the companion is then not just late.
    pub gone_ms: u64,
    /// Prefill rate assumed until one is learned, tokens a second. Default 8000: between a 70B model on four H100
    /// (13 000) and small machines; only the speed at which the head of a queue drains depends on it.
    pub default_tokens_per_s: u32,
}

impl Default for FleetSettings {
    fn default() -> Self {
        Self {
            fresh_ms: 3000,
            gone_ms: 60_000,
            default_tokens_per_s: 8000,
        }
    }
}

/// How far the host table can be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// Polled numbers count.
    Fresh,
    /// Only requests in flight count.
    Stale,
    /// Only the last known hosts count.
    NoTable,
}

impl Fleet {
    /// A fleet without hosts.
    pub fn new(settings: FleetSettings) -> Self {
        Self {
            tokens_per_s: settings.default_tokens_per_s.max(1),
            settings,
            members: Vec::new(),
            lanes: Vec::new(),
            weights_are_equal: true,
            published_ms: None,
            newest_sample_ms: 0,
            next_sequence: 0,
            mean_charge_16ths: 0,
            cursor: None,
            pending_q16: 0,
            own_requests: 0,
            other_requests: 0,
            foreign_requests: 0,
            usual_waits: UsualWaits::default(),
            next_due_ms: u64::MAX,
        }
    }

    /// Takes over other settings; hosts, tallies and learned rates stay.
    pub fn reconfigure(&mut self, settings: FleetSettings) {
        self.settings = settings;
    }

    /// Takes over a table: tallies stay with every host whose slot, epoch and address stay.
    ///
    /// At most 65 535 hosts are taken, which is what slots can name; a second host with the same slot is ignored.
    pub fn update(&mut self, table: &HostTable, now_ms: u64) {
        self.published_ms = Some(table.published_ms);
        let mut old = std::mem::take(&mut self.members);
        self.members.reserve(table.hosts.len());
        for host in &table.hosts {
            let same = |m: &Member| m.slot == host.slot && m.epoch == host.epoch && m.address == host.address;
            let kept = old
                .binary_search_by_key(&host.slot, |m| m.slot)
                .ok()
                .and_then(|at| old.get_mut(at));
            let mut member = match kept {
                // What is left keeps its slot, so that `old` stays sorted, and has no address, so that it is not taken twice.
                Some(kept) if same(kept) => std::mem::replace(
                    kept,
                    Member {
                        slot: host.slot,
                        ..Member::vacant()
                    },
                ),
                Some(_) | None => Member::new(host),
            };
            member.take_over(host);
            self.members.push(member);
        }
        self.members.sort_by_key(|m| m.slot);
        self.members.dedup_by_key(|m| m.slot);
        self.members.truncate(usize::from(u16::MAX));
        self.newest_sample_ms = self
            .members
            .iter()
            .map(|m| m.polled.sampled_ms)
            .max()
            .unwrap_or(0);
        self.own_requests = self.members.iter().map(|m| u64::from(m.own.requests)).sum();
        self.foreign_requests = self
            .members
            .iter()
            .map(|m| u64::from(m.polled.foreign_requests))
            .sum();
        self.learn_fleet_rate();
        self.rebuild_lanes(now_ms);
    }

    /// Replaces the other workers' tallies by (slot, epoch, requests, tokens); several for one host are summed, and
    /// those of another epoch are ignored.
    pub fn set_others(&mut self, others: impl Iterator<Item = (Slot, u32, u32, u64)>, now_ms: u64) {
        for member in &mut self.members {
            member.other_requests = 0;
            member.other_tokens = 0;
        }
        self.other_requests = 0;
        for (slot, epoch, requests, tokens) in others {
            let Some(member) = self.member_mut(slot, epoch) else {
                continue;
            };
            member.other_requests = member.other_requests.saturating_add(requests);
            member.other_tokens = member.other_tokens.saturating_add(tokens);
            self.other_requests = self.other_requests.saturating_add(u64::from(requests));
        }
        for at in 0..self.members.len() {
            self.refresh_lane(at, now_ms);
        }
    }

    /// Replaces the other workers' silences; of several for one host the longest counts, and those of another epoch are
    /// ignored. A worker that waits for whole answers only is believed where another says the same. To be called before
    /// [`set_others`](Self::set_others).
    pub fn set_silences<'a>(&mut self, silences: impl Iterator<Item = &'a Silence>) {
        for member in &mut self.members {
            (member.others_silence_ms, member.doubted_silence_ms) = (0, 0);
        }
        for silence in silences {
            let Some(member) = self.member_mut(silence.slot, silence.epoch) else {
                continue;
            };
            let believed_ms = match member.doubted_silence_ms {
                _ if silence.owes_stream => silence.since_ms,
                0 => {
                    member.doubted_silence_ms = silence.since_ms;
                    continue;
                }
                doubted_ms => doubted_ms.max(silence.since_ms),
            };
            member.others_silence_ms = match member.others_silence_ms {
                0 => believed_ms,
                longest_ms => longest_ms.min(believed_ms),
            };
        }
    }

    /// Charges a request whose answer is streamed: its first body byte ends the prefill.
    pub fn charge(&mut self, slot: Slot, work: impl Into<Work>, now_ms: u64) -> Charge {
        self.place(slot, work.into(), true, now_ms)
    }

    /// Charges a request whose answer comes whole: its prefill ends by the clock, at the host's learned rate.
    pub fn charge_unstreamed(&mut self, slot: Slot, work: impl Into<Work>, now_ms: u64) -> Charge {
        self.place(slot, work.into(), false, now_ms)
    }

    /// Takes the prefill work off; the second time does nothing.
    pub fn prefill_done(&mut self, charge: &mut Charge, now_ms: u64) {
        self.end_wait(charge);
        if !std::mem::take(&mut charge.prefill_open) {
            return;
        }
        let Some(at) = self.position(charge.slot, charge.epoch) else {
            return;
        };
        if let Some(member) = self.members.get_mut(at) {
            member.own.end_prefill(charge, now_ms);
        }
        self.refresh_lane(at, now_ms);
    }

    /// The answer began: the host lives, and so long does it take. Call it before [`prefill_done`](Self::prefill_done).
    pub fn heard(&mut self, charge: &mut Charge, now_ms: u64) {
        if charge.awaited && !charge.moved {
            self.usual_waits.learn(charge, now_ms);
        }
        self.end_wait(charge);
        if let Some(member) = self.member_mut(charge.slot, charge.epoch) {
            member.own.heard(now_ms);
        }
    }

    /// Nothing more tells when the answer begins, so silence says nothing from here on.
    pub fn end_wait(&mut self, charge: &mut Charge) {
        if std::mem::take(&mut charge.awaited)
            && let Some(member) = self.member_mut(charge.slot, charge.epoch)
        {
            member.own.end_wait(charge);
        }
    }

    /// Takes the request off, and its prefill work if that is still open; the second time does nothing. One that ends
    /// unanswered on a host that is silent for far too long counts as a failure of the host.
    pub fn finish(&mut self, charge: &mut Charge, now_ms: u64) {
        if charge.awaited
            && let Some(at) = self.position(charge.slot, charge.epoch)
            && self
                .members
                .get(at)
                .is_some_and(|m| self.silences_ms(m, now_ms) != [0; 2])
        {
            self.failed(charge.slot, now_ms);
        }
        self.prefill_done(charge, now_ms);
        if !std::mem::take(&mut charge.request_open) {
            return;
        }
        let Some(at) = self.position(charge.slot, charge.epoch) else {
            return;
        };
        if let Some(member) = self.members.get_mut(at) {
            member.own.end_request(charge);
            self.own_requests = self.own_requests.saturating_sub(1);
        }
        self.refresh_lane(at, now_ms);
    }

    /// Moves what is still open of a charge to the host that serves it; a host that is not known keeps nothing.
    pub fn move_charge(&mut self, charge: &mut Charge, to: Slot, now_ms: u64) {
        if charge.slot == to || !charge.request_open {
            return;
        }
        let (prefill_open, awaited) = (charge.prefill_open, charge.awaited);
        self.finish(charge, now_ms);
        charge.slot = to;
        charge.placed_ms = now_ms;
        charge.prefill_open = prefill_open;
        charge.awaited = awaited;
        charge.moved = true;
        self.enter(charge, now_ms);
    }

    /// Learns the host's prefill rate from the first body byte of a streamed 200; call it before
    /// [`prefill_done`](Self::prefill_done). A charge that was moved teaches nothing: when it reached its host is not
    /// known.
    pub fn learn_prefill(&mut self, charge: &Charge, now_ms: u64) {
        if !charge.prefill_open || !charge.request_open || charge.moved {
            return;
        }
        let work_tokens = charge
            .ahead_tokens
            .saturating_add(u64::from(charge.work.prefill_tokens));
        let time_ms = now_ms.saturating_sub(charge.placed_ms);
        if let Some(member) = self.member_mut(charge.slot, charge.epoch) {
            member.rate.learn(work_tokens, time_ms);
        }
    }

    /// Counts a failure of the host: connection refused, reset before an answer, 5xx.
    pub fn failed(&mut self, slot: Slot, now_ms: u64) {
        let Ok(at) = self.members.binary_search_by_key(&slot, |m| m.slot) else {
            return;
        };
        if let Some(member) = self.members.get_mut(at) {
            member.penalty.failed(now_ms);
        }
        self.refresh_lane(at, now_ms);
    }

    /// Counts a success of the host; it clears a penalty that has faded to a quarter of the first one.
    pub fn succeeded(&mut self, slot: Slot, now_ms: u64) {
        let Ok(at) = self.members.binary_search_by_key(&slot, |m| m.slot) else {
            return;
        };
        let Some(member) = self.members.get_mut(at) else {
            return;
        };
        if member.penalty.tokens_at(now_ms) > 0 {
            member.penalty.succeeded(now_ms);
            self.refresh_lane(at, now_ms);
        }
    }

    /// Takes over what feedback made of the cache sizes that the table tells.
    pub fn believe_capacities(&mut self, tokens_of: impl Fn(Slot) -> u64) {
        for member in &mut self.members {
            if let Some(tokens) = &mut member.polled.kv_capacity_tokens {
                *tokens = tokens_of(member.slot);
            }
        }
    }

    /// How far the table can be believed at this time.
    pub fn freshness(&self, now_ms: u64) -> Freshness {
        let Some(published_ms) = self.published_ms else {
            return Freshness::NoTable;
        };
        // A table from the future was written before the clock jumped back, or by somebody else.
        let age_ms = now_ms.abs_diff(published_ms);
        if age_ms > self.settings.gone_ms {
            Freshness::NoTable
        } else if age_ms > self.settings.fresh_ms || self.samples_are_old(now_ms) {
            Freshness::Stale
        } else {
            Freshness::Fresh
        }
    }

    /// Hosts known, also those that take no traffic.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether no host is known.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Hosts that take prefill traffic: healthy or degraded, and not for decode only.
    pub fn eligible_len(&self) -> usize {
        self.lanes.len()
    }

    /// How many hosts take traffic, and how many requests of all gateways are in flight, as far as known.
    pub fn traffic(&self) -> Traffic {
        let in_flight = self
            .own_requests
            .saturating_add(self.other_requests)
            .saturating_add(self.foreign_requests);
        Traffic {
            hosts: u32::try_from(self.lanes.len()).unwrap_or(u32::MAX),
            in_flight: u32::try_from(in_flight).unwrap_or(u32::MAX),
        }
    }

    /// The address of a host, as Envoy spells it.
    pub fn address(&self, slot: Slot) -> Option<&str> {
        let at = self.members.binary_search_by_key(&slot, |m| m.slot).ok()?;
        self.members.get(at).map(|m| m.address.as_str())
    }

    /// The host with that address.
    pub fn slot_of(&self, address: &str) -> Option<Slot> {
        let hash = rendezvous::address_hash(address);
        self.members
            .iter()
            .find(|m| m.address_hash == hash && m.address == address)
            .map(|m| m.slot)
    }

    /// Whether a host takes prefill traffic.
    pub fn is_eligible(&self, slot: Slot) -> bool {
        self.members
            .binary_search_by_key(&slot, |m| m.slot)
            .ok()
            .and_then(|at| self.members.get(at))
            .is_some_and(|m| m.eligible)
    }

    /// Whether this worker has no request in flight on any host of the table.
    pub fn is_idle(&self) -> bool {
        self.own_requests == 0
    }

    /// This worker's tallies for its journal: (slot, epoch, requests, prefill tokens left), hosts with nothing left
    /// out, in growing slot order.
    pub fn own_tallies(&self, now_ms: u64) -> impl Iterator<Item = (Slot, u32, u32, u64)> + '_ {
        self.members
            .iter()
            .filter(|m| m.own.requests > 0 || m.own.prefill_tokens > 0)
            .map(move |m| {
                (
                    m.slot,
                    m.epoch,
                    m.own.requests,
                    m.own.backlog_tokens(self.rate_of(m), now_ms),
                )
            })
    }

    /// Hosts that are silent towards this worker for far too long, in growing slot order.
    pub fn own_silences(&self, now_ms: u64) -> impl Iterator<Item = Silence> + '_ {
        self.members.iter().filter_map(move |m| {
            let [streams_ms, wholes_ms] = self.silences_ms(m, now_ms);
            let silent_ms = streams_ms.max(wholes_ms);
            (silent_ms > 0).then(|| Silence {
                slot: m.slot,
                epoch: m.epoch,
                since_ms: now_ms.saturating_sub(silent_ms),
                owes_stream: streams_ms > 0,
            })
        })
    }

    /// Prefill rate believed of a host, tokens a second.
    pub fn tokens_per_s(&self, slot: Slot) -> u32 {
        let at = self.members.binary_search_by_key(&slot, |m| m.slot).ok();
        at.and_then(|at| self.members.get(at))
            .map_or(self.tokens_per_s, |m| self.rate_of(m))
    }

    /// Share of the requests in flight that no worker of this Envoy placed, thousandths.
    pub(crate) fn foreign_permille(&self) -> u64 {
        let own = self.own_requests.saturating_add(self.other_requests);
        self.foreign_requests
            .saturating_mul(1000)
            .checked_div(own.saturating_add(self.foreign_requests))
            .unwrap_or(0)
    }
}

impl Fleet {
    fn place(&mut self, slot: Slot, work: Work, streamed: bool, now_ms: u64) -> Charge {
        let mut charge = Charge {
            slot,
            epoch: 0,
            work,
            placed_ms: now_ms,
            prefill_open: true,
            request_open: false,
            awaited: true,
            queued: false,
            sequence: 0,
            ahead_tokens: 0,
            streamed,
            moved: false,
            placement: None,
        };
        self.mean_charge_16ths =
            (self.mean_charge_16ths - self.mean_charge_16ths / 16).saturating_add(work.prefill_tokens.into());
        self.enter(&mut charge, now_ms);
        charge
    }

    /// Puts a charge on the host that its slot names now.
    fn enter(&mut self, charge: &mut Charge, now_ms: u64) {
        charge.sequence = self.next_sequence;
        self.next_sequence = self.next_sequence.wrapping_add(1);
        let Ok(at) = self.members.binary_search_by_key(&charge.slot, |m| m.slot) else {
            charge.prefill_open = false;
            charge.request_open = false;
            charge.awaited = false;
            return;
        };
        let ahead_tokens = self.members.get(at).map_or(0, |m| self.backlog_tokens(m, now_ms));
        if let Some(member) = self.members.get_mut(at) {
            charge.epoch = member.epoch;
            charge.ahead_tokens = ahead_tokens;
            member.own.place(charge, now_ms);
            self.own_requests = self.own_requests.saturating_add(1);
        }
        self.refresh_lane(at, now_ms);
    }

    fn learn_fleet_rate(&mut self) {
        let (mut sum, mut count) = (0u64, 0u64);
        for rate in self.members.iter().filter_map(|m| m.rate.tokens_per_s()) {
            sum += u64::from(rate);
            count += 1;
        }
        if let Some(mean) = sum.checked_div(count) {
            self.tokens_per_s = u32::try_from(mean).unwrap_or(u32::MAX).max(1);
        }
    }

    fn samples_are_old(&self, now_ms: u64) -> bool {
        // Nothing was ever scraped where the operator turned scraping off: then there is nothing to be stale.
        self.newest_sample_ms != 0 && now_ms.abs_diff(self.newest_sample_ms) > self.settings.fresh_ms
    }

    fn position(&self, slot: Slot, epoch: u32) -> Option<usize> {
        let at = self.members.binary_search_by_key(&slot, |m| m.slot).ok()?;
        self.members.get(at).filter(|m| m.epoch == epoch).map(|_| at)
    }

    fn member_mut(&mut self, slot: Slot, epoch: u32) -> Option<&mut Member> {
        let at = self.position(slot, epoch)?;
        self.members.get_mut(at)
    }
}
