//! What strategies read of the fleet: bounded shortlists from one pass, and exact figures for the hosts on them.
//!
//! In: members and the time. Out: the top of a key's rendezvous order, the least loaded hosts, and how busy each of
//! them is. It must never read more of a host in the pass than its lane, nor trust a polled number that is not fresh.

use super::member::{Member, Polled};
use super::rendezvous::{self, Entry, Lowest};
use super::{Fleet, Freshness};
use crate::host_table::Slot;

/// The part of a member that every decision reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lane {
    pub(super) address_hash: u64,
    /// Roughly what a new request would wait for, tokens; exact figures are taken for the shortlist only.
    pub(super) load_tokens: u64,
    pub(super) requests: u32,
    pub(super) weight: u32,
    pub(super) host: u16,
    pub(super) pending: bool,
}

/// How busy one host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy {
    /// Prefill work ahead of a new request, tokens.
    pub(crate) backlog_tokens: u64,
    /// Penalty for failures and for silence, tokens.
    pub(crate) penalty_tokens: u64,
    /// Requests in flight of all gateways, as far as known.
    pub(crate) in_flight: u32,
    /// Requests waiting at the engine: the poll, and what was placed since.
    pub(crate) waiting: Option<u32>,
    /// KV cache in use, thousandths.
    pub(crate) kv_usage_permille: Option<u16>,
    /// Tokens of KV cache in use beyond half of it.
    pub(crate) kv_over_half_tokens: u64,
    /// Fleet rate ÷ this host's rate, 2⁻¹⁰; 1024 when they are about equal.
    pub(crate) slowness_q10: u64,
    /// Whether the adapter asked for is loaded, or none was asked for.
    pub(crate) has_adapter: bool,
}

/// The hosts that a decision looks at.
#[derive(Debug)]
pub(crate) struct Shortlist {
    /// In rendezvous order; empty without a key.
    pub(crate) ranked: Lowest<RANKED>,
    /// Least work first.
    pub(crate) idle: Lowest<IDLE>,
    /// Hosts with prefill work pending.
    pub(crate) pending_hosts: u32,
}

impl Fleet {
    /// Ends unstreamed prefills whose time is over; cheap when there are none.
    pub(crate) fn release_overdue(&mut self, now_ms: u64) {
        if now_ms < self.next_due_ms {
            return;
        }
        for at in 0..self.members.len() {
            let rate = self.members.get(at).map_or(1, |m| self.rate_of(m));
            if let Some(member) = self.members.get_mut(at) {
                member.own.release_overdue(rate, now_ms);
            }
        }
        self.rebuild_lanes(now_ms);
    }

    /// One pass over the eligible hosts. `salt` orders hosts that are equally loaded where there is no key.
    pub(crate) fn shortlist(&self, key: Option<u64>, adapter: Option<u64>, salt: u64) -> Shortlist {
        let mut list = Shortlist {
            ranked: Lowest::new(),
            idle: Lowest::new(),
            pending_hosts: 0,
        };
        let adapter = adapter.filter(|a| self.lanes.iter().any(|lane| self.has_adapter(lane.host, *a)));
        for lane in &self.lanes {
            list.pending_hosts += u32::from(lane.pending);
            // Hosts that have the adapter come first, in rendezvous order among themselves.
            let missing = adapter.is_some_and(|a| !self.has_adapter(lane.host, a));
            let score = key.map(|key| {
                if self.weights_are_equal {
                    rendezvous::unweighted_score(key, lane.address_hash)
                } else {
                    rendezvous::score(key, lane.address_hash, lane.weight)
                }
            });
            // Equally loaded hosts stand in the rendezvous order too, so that a prompt comes back to the same ones.
            list.idle
                .offer_with(behind(lane.load_tokens, missing), lane.host, || {
                    score.map_or_else(|| tie(lane.address_hash, salt), high_u32)
                });
            if let Some(score) = score {
                list.ranked
                    .offer_with(behind(score, missing), lane.host, || high_u32(lane.address_hash));
            }
        }
        list
    }

    /// A host that was not found by the pass: what it has to do, and `more_tokens` of new work; `None` where it takes no
    /// traffic.
    pub(crate) fn entry_of(&self, slot: Slot, more_tokens: u32) -> Option<Entry> {
        let at = self.members.binary_search_by_key(&slot, |m| m.slot).ok()?;
        let member = self.members.get(at).filter(|m| m.eligible)?;
        let lane = self.lanes.get(member.lane)?;
        Some(Entry {
            score: lane.load_tokens.saturating_add(more_tokens.into()),
            tie: high_u32(lane.address_hash),
            host: lane.host,
        })
    }

    /// The hosts with the fewest requests of this Envoy in flight, equals in the order of `salt`.
    pub(crate) fn fewest_requests(&self, salt: u64) -> Lowest<3> {
        let mut lowest = Lowest::new();
        for lane in &self.lanes {
            let tie = tie(lane.address_hash, salt);
            lowest.offer(Entry {
                score: u64::from(lane.requests),
                tie,
                host: lane.host,
            });
        }
        lowest
    }

    /// The eligible hosts after `cursor` in slot order, wrapping round; at most three.
    pub(crate) fn next_slots(&self, cursor: Option<Slot>) -> impl Iterator<Item = Slot> + '_ {
        let slot_at = |lane: &Lane| self.slot(lane.host);
        let first = self.lanes.partition_point(|lane| slot_at(lane) <= cursor);
        let (before, after) = self.lanes.split_at_checked(first).unwrap_or((&[], &self.lanes));
        after.iter().chain(before).take(3).filter_map(slot_at)
    }

    /// The nth eligible host, in slot order.
    pub(crate) fn nth_slot(&self, n: usize) -> Option<Slot> {
        self.lanes.get(n).and_then(|lane| self.slot(lane.host))
    }

    /// The slot of a shortlisted host.
    pub(crate) fn slot(&self, host: u16) -> Option<Slot> {
        self.members.get(usize::from(host)).map(|m| m.slot)
    }

    /// How busy a shortlisted host is; polled numbers count only while they are fresh.
    pub(crate) fn busy(&self, host: u16, adapter: Option<u64>, now_ms: u64) -> Option<Busy> {
        let member = self.members.get(usize::from(host))?;
        let polled = self.polled_of(member, now_ms);
        let own = member.own.requests.saturating_add(member.other_requests);
        let foreign = polled.map_or(0, |p| p.foreign_requests);
        let capacity = member.polled.kv_capacity_tokens.unwrap_or(0);
        let kv_usage_permille = polled.and_then(|p| p.kv_usage_permille);
        let kv_polled_tokens = capacity / 1000 * u64::from(kv_usage_permille.unwrap_or(0).min(1000));
        let kv_tokens = member.own.kv_tokens.max(kv_polled_tokens);
        Some(Busy {
            backlog_tokens: self.backlog_tokens(member, now_ms),
            penalty_tokens: self.penalty_tokens(member, now_ms),
            in_flight: own.saturating_add(foreign),
            waiting: polled.and_then(|p| {
                p.waiting
                    .map(|w| w.saturating_add(own.saturating_sub(p.in_flight_at_sample)))
            }),
            kv_usage_permille,
            kv_over_half_tokens: if capacity == 0 {
                0
            } else {
                kv_tokens.saturating_sub(capacity / 2)
            },
            slowness_q10: self.slowness_q10(member),
            has_adapter: adapter.is_none_or(|a| member.polled.adapters.binary_search(&a).is_ok()),
        })
    }
}

impl Fleet {
    pub(super) fn rebuild_lanes(&mut self, now_ms: u64) {
        self.lanes.clear();
        for (host, member) in (0u16..).zip(self.members.iter_mut()) {
            if member.eligible {
                member.lane = self.lanes.len();
                let (address_hash, weight) = (member.address_hash, member.weight);
                self.lanes.push(Lane {
                    address_hash,
                    load_tokens: 0,
                    requests: 0,
                    weight,
                    host,
                    pending: false,
                });
            }
        }
        let first_weight = self.lanes.first().map(|lane| lane.weight);
        self.weights_are_equal = self.lanes.iter().all(|lane| Some(lane.weight) == first_weight);
        self.next_due_ms = u64::MAX;
        for at in 0..self.members.len() {
            self.refresh_lane(at, now_ms);
        }
    }

    /// Recomputes what the pass reads of a member after something about it changed.
    pub(super) fn refresh_lane(&mut self, at: usize, now_ms: u64) {
        let Some(member) = self.members.get(at) else {
            return;
        };
        if let Some(due_ms) = member.own.next_due_ms(self.rate_of(member)) {
            self.next_due_ms = self.next_due_ms.min(due_ms);
        }
        if !member.eligible {
            return;
        }
        let requests = member.own.requests.saturating_add(member.other_requests);
        let polled = self.polled_of(member, now_ms);
        let in_flight = requests.saturating_add(polled.map_or(0, |p| p.foreign_requests));
        let backlog_tokens = (member.own.prefill_tokens)
            .saturating_add(member.other_tokens)
            .saturating_add(self.foreign_tokens(member, now_ms));
        let load_tokens = (backlog_tokens.saturating_mul(self.slowness_q10(member)) >> 10)
            .saturating_add(u64::from(in_flight) * RUNNING_TOKENS)
            .saturating_add(self.penalty_tokens(member, now_ms));
        let queued_elsewhere =
            polled.is_some_and(|p| p.foreign_requests > 0 && p.waiting.is_some_and(|w| w > 0));
        let pending = member.own.prefill_tokens > 0 || member.other_tokens > 0 || queued_elsewhere;
        if let Some(lane) = self.lanes.get_mut(member.lane) {
            lane.load_tokens = load_tokens;
            lane.requests = requests;
            lane.pending = pending;
        }
    }

    fn polled_of<'a>(&self, member: &'a Member, now_ms: u64) -> Option<&'a Polled> {
        let sample_age_ms = now_ms.abs_diff(member.polled.sampled_ms);
        let fresh = member.polled.sampled_ms != 0 && sample_age_ms <= self.settings.fresh_ms;
        (fresh && self.freshness(now_ms) == Freshness::Fresh).then_some(&member.polled)
    }

    pub(super) fn backlog_tokens(&self, member: &Member, now_ms: u64) -> u64 {
        let own = member.own.backlog_tokens(self.rate_of(member), now_ms);
        own.saturating_add(member.other_tokens)
            .saturating_add(self.foreign_tokens(member, now_ms))
    }

    /// Work of other gateways that waits at the engine: their share of the polled queue, at our mean request.
    fn foreign_tokens(&self, member: &Member, now_ms: u64) -> u64 {
        let Some(polled) = self.polled_of(member, now_ms) else {
            return 0;
        };
        let waiting = u64::from(polled.waiting.unwrap_or(0));
        let all = waiting + u64::from(polled.running.unwrap_or(0));
        let foreign = u64::from(polled.foreign_requests);
        let mean_tokens = self.mean_charge_16ths / 16;
        (waiting * foreign)
            .saturating_mul(mean_tokens)
            .checked_div(all)
            .unwrap_or(0)
    }

    fn penalty_tokens(&self, member: &Member, now_ms: u64) -> u64 {
        let failures = member.penalty.tokens_at(now_ms);
        failures.saturating_add(self.silence_tokens(member, now_ms))
    }

    /// What a host costs that took requests and has been silent for far too long, towards this worker or another; 0 for any
    /// other.
    ///
    /// Its queue seems to drain, since time passes, but whoever waited so long in vain has to expect to wait as long again,
    /// and most that are so late never come.
    fn silence_tokens(&self, member: &Member, now_ms: u64) -> u64 {
        // A host that answered this worker since then is not silent, whatever it owes another.
        let others_ms = match member.others_silence_ms {
            0 => 0,
            since_ms if since_ms <= member.own.heard_ms => 0,
            since_ms => now_ms.saturating_sub(since_ms),
        };
        let [streams_ms, wholes_ms] = self.silences_ms(member, now_ms);
        let silent_ms = streams_ms.max(wholes_ms).max(others_ms);
        if silent_ms == 0 {
            return 0;
        }
        silent_ms.saturating_mul(u64::from(self.rate_of(member))) / 1000 * SILENCE_TIMES
    }

    /// How long a host that owes this worker streams, and whole answers, has been silent for, if that is far too long; else 0.
    pub(super) fn silences_ms(&self, member: &Member, now_ms: u64) -> [u64; 2] {
        if !member.own.is_waiting() {
            return [0; 2];
        }
        let rate = self.rate_of(member);
        let others_tokens = member
            .other_tokens
            .saturating_add(self.foreign_tokens(member, now_ms));
        let others_ms = (others_tokens.saturating_mul(1000))
            .checked_div(rate.into())
            .unwrap_or(0);
        member.own.silences_ms(&self.usual_waits, others_ms, rate, now_ms)
    }

    pub(super) fn rate_of(&self, member: &Member) -> u32 {
        member.rate.tokens_per_s().unwrap_or(self.tokens_per_s)
    }

    fn slowness_q10(&self, member: &Member) -> u64 {
        let Some(rate) = member.rate.tokens_per_s() else {
            return 1024;
        };
        let slowness_q10 = u64::from(self.tokens_per_s) * 1024 / u64::from(rate.max(1));
        // Within 0.75…1.33 the difference is noise of the samples.
        if (768..=1365).contains(&slowness_q10) {
            1024
        } else {
            slowness_q10.clamp(128, 16_384)
        }
    }

    fn has_adapter(&self, host: u16, adapter: u64) -> bool {
        self.members
            .get(usize::from(host))
            .is_some_and(|m| m.polled.adapters.binary_search(&adapter).is_ok())
    }
}

/// Puts a score behind all that are not.
const fn behind(score: u64, missing: bool) -> u64 {
    (score >> 1) | ((missing as u64) << 63)
}

fn tie(address_hash: u64, salt: u64) -> u32 {
    high_u32(address_hash.wrapping_mul(salt | 1))
}

const fn high_u32(x: u64) -> u32 {
    (x >> 32) as u32
}

/// How far down the rendezvous order a decision looks. A host beyond it is reached as a least loaded one.
pub(crate) const RANKED: usize = 16;
/// How many of the least loaded hosts a decision looks at.
pub(crate) const IDLE: usize = 4;
/// A host that is silent for far too long costs this many times the work that it could have done meanwhile: a prompt that
/// it alone holds is computed elsewhere as soon as that takes less than eight times as long as was waited already.
const SILENCE_TIMES: u64 = 8;
/// What a request in flight costs the next one, in prefill tokens (`dp100` of the prototype).
pub(crate) const RUNNING_TOKENS: u64 = 100;
