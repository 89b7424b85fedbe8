//! `hybrid` with `auto`: the first host in rendezvous order that costs about as little as the cheapest.
//!
//! In prefill tokens, for a prompt of L tokens of which u are not cached at host x:
//!
//! ```text
//! cost(x) = r · (B + (1 + λ)·U) + 100·in_flight + 0.2·(KV tokens in use beyond half) + penalties
//! U = u·(1 + (L − u/2) / A)     attention makes a long prompt cost more than its length
//! λ = min(6, ρ / (1 − ρ))       ρ: slow mean of the share of hosts with pending prefill
//! ```
//!
//! B is the backlog, r how much slower than the fleet the host is. λ prices what a miss adds for everyone behind it: at
//! low load a miss costs only the one who misses. All hosts looked at are the top of the rendezvous order and a few
//! least loaded; the choice is the first, in that order, whose cost is at most `slack_tokens` above the least.
//!
//! Without an index per host, what this worker saw before is taken to be cached at the home, the hot part everywhere,
//! and nothing else anywhere. The part of a prompt that was never seen gets half its length as credit at its home, in the
//! share that other workers and gateways have of the traffic: they may have placed it, and all then agree. With one
//! worker the credit would cost 17 % of mean TTFT where nothing is shared; with four, to give none costs 60 % where
//! prefixes are (queueing model of `cargo test --test strategies`, 2026-11-29). The credit bends the choice only; the charge is the whole of what this worker takes to be uncached.

use super::{Query, RecomputeWeight, Rng, StrategySettings};
use crate::candidate::{Busy, Entry, Fleet, IDLE, RANKED, RUNNING_TOKENS};
use crate::config::StrategyName;
use crate::decision::{Decision, Reason};
use crate::recent::HomeKey;

pub(super) fn decide(
    settings: &StrategySettings,
    fleet: &mut Fleet,
    query: &Query,
    home: HomeKey,
    rng: &mut Rng,
) -> Decision {
    let mut decision = query.decision(StrategyName::Hybrid, Reason::Home);
    decision.key = Some(home.key);
    let shortlist = fleet.shortlist(Some(home.key), query.adapter, rng.next_u64());
    let weight_q10 = settings.recompute_weight.q10(fleet, shortlist.pending_hosts);
    let prices = Prices::of(settings, fleet, query, weight_q10);

    let mut costs = [(u64::MAX, Entry::default()); RANKED + IDLE];
    let mut count = 0;
    let ranked = shortlist.ranked.as_slice();
    let unranked = shortlist
        .idle
        .as_slice()
        .iter()
        .filter(|idle| !ranked.iter().any(|r| r.host == idle.host));
    for entry in ranked.iter().chain(unranked) {
        let Some(busy) = fleet.busy(entry.host, query.adapter, query.now_ms) else {
            continue;
        };
        if let Some(place) = costs.get_mut(count) {
            *place = (prices.cost(&busy, count == 0), *entry);
            count += 1;
        }
    }
    let costs = costs.get(..count).unwrap_or(&[]);
    let Some(least) = costs.iter().map(|c| c.0).min() else {
        return decision;
    };
    let limit = least.saturating_add(u64::from(settings.slack_tokens));

    // The chosen host, then those that would be chosen without it.
    decision.home = costs.first().and_then(|c| fleet.slot(c.1.host));
    let good = costs.iter().filter(|c| c.0 <= limit);
    good.filter_map(|c| fleet.slot(c.1.host))
        .for_each(|slot| decision.hosts.push(slot));
    while decision.hosts.len() < costs.len().min(3) {
        let left = costs.iter().filter_map(|c| Some((c.0, fleet.slot(c.1.host)?)));
        let next = left
            .filter(|(_, slot)| !decision.hosts.as_slice().contains(slot))
            .min_by_key(|c| c.0);
        let Some((_, slot)) = next else { break };
        decision.hosts.push(slot);
    }
    if decision.hosts.first() != decision.home {
        decision.reason = Reason::OverflowCost;
    }
    query.fill_in_cached(&mut decision);
    decision
}

/// What a host costs before any work of the request itself, tokens.
pub(super) fn load_tokens(busy: &Busy) -> u64 {
    let backlog = busy.backlog_tokens.saturating_mul(busy.slowness_q10) >> 10;
    let adapter = if busy.has_adapter { 0 } else { ADAPTER_TOKENS };
    backlog
        .saturating_add(u64::from(busy.in_flight) * RUNNING_TOKENS)
        .saturating_add(busy.kv_over_half_tokens / 5)
        .saturating_add(busy.penalty_tokens)
        .saturating_add(adapter)
}

/// The request's own work, at its home and elsewhere, λ included.
struct Prices {
    home_tokens: u64,
    elsewhere_tokens: u64,
}

impl Prices {
    fn of(settings: &StrategySettings, fleet: &Fleet, query: &Query, weight_q10: u64) -> Self {
        let prompt = u64::from(query.prompt_tokens());
        let hot = u64::from(query.tokens(query.hot_bytes));
        let seen = u64::from(query.tokens(query.seen_bytes.min(query.prompt_bytes)));
        let credit = prompt.saturating_sub(seen) / 2 * fleet.others_permille() / 1000;
        let work = |cached: u64| {
            let uncached = prompt.saturating_sub(cached);
            let with_attention = match settings.attention_tokens {
                0 => uncached,
                parity => uncached + uncached * (prompt - uncached / 2) / u64::from(parity),
            };
            with_attention + (with_attention.saturating_mul(weight_q10) >> 10)
        };
        Self {
            home_tokens: work(seen + credit),
            elsewhere_tokens: work(hot),
        }
    }

    fn cost(&self, busy: &Busy, is_home: bool) -> u64 {
        let work = if is_home {
            self.home_tokens
        } else {
            self.elsewhere_tokens
        };
        let scaled = work.saturating_mul(busy.slowness_q10) >> 10;
        scaled.saturating_add(load_tokens(busy))
    }
}

impl RecomputeWeight {
    /// λ in 2⁻¹⁰; takes the share of pending hosts into the mean.
    fn q10(self, fleet: &mut Fleet, pending_hosts: u32) -> u64 {
        let hosts = fleet.eligible_len().max(1) as u64;
        let share_q16 = (u64::from(pending_hosts) << 16) / hosts;
        // A mean over about 128 decisions, rounded so that it reaches both ends.
        let old = u64::from(fleet.pending_q16);
        let mean = if share_q16 >= old {
            old + (share_q16 - old).div_ceil(MEAN_DECISIONS)
        } else {
            old - (old - share_q16).div_ceil(MEAN_DECISIONS)
        };
        fleet.pending_q16 = u32::try_from(mean).unwrap_or(1 << 16);
        match self {
            Self::Fixed { permille } => u64::from(permille) * 1024 / 1000,
            Self::Utilisation => {
                let idle = (1u64 << 16).saturating_sub(mean);
                (mean << 10)
                    .checked_div(idle)
                    .unwrap_or(u64::MAX)
                    .min(MAX_WEIGHT_Q10)
            }
        }
    }
}

/// A host that has to load the adapter first: about as long as a prompt of 2048 tokens takes.
const ADAPTER_TOKENS: u64 = 2048;
/// Decisions that the mean of pending hosts goes back over.
const MEAN_DECISIONS: u64 = 100;
/// λ is at most 6.
const MAX_WEIGHT_Q10: u64 = 6 << 10;
