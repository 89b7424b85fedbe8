//! `hybrid` with `auto`, and `cache_aware`: the first host in rendezvous order that costs about as little as the cheapest.
//!
//! In prefill tokens, for a prompt of L tokens of which u are not cached at host x:
//!
//! ```text
//! cost(x) = r · (B + U + λ·V) + 100·in_flight + 0.2·(KV tokens in use beyond half) + penalties
//! U = u·(1 + (L − u/2) / A)     attention makes a long prompt cost more than its length
//! V = U less its hot part       what is used so often that it deserves another copy costs no λ
//! λ = min(6, ρ / (1 − ρ))       ρ: slow mean of the share of hosts with pending prefill
//! ```
//!
//! B is the backlog, r how much slower than the fleet the host is. λ prices what a miss adds for everyone behind it: at
//! low load a miss costs only the one who misses. `hybrid` looks at the top of the rendezvous order and a few least loaded
//! hosts, which have to be cheaper by a quarter of the prompt; `cache_aware` also at the hosts that hold most of the
//! prompt, wherever in the order they are. The choice is the first, in that order, whose cost is at most `slack_tokens`
//! above the least.
//!
//! The index tells what each host holds. The part of a prompt that no host is known to hold gets seven tenths of its length
//! as credit at its home, in the share that other gateways have of the traffic, or in the share of the caches that were
//! filled before the index began, all of it from three quarters on: it may have been placed there, and all gateways then
//! agree. The credit bends the choice only; the charge is the whole of what is taken to be uncached. In the simulator a
//! credit with one gateway costs 10 % of mean TTFT, and without it eight lose 17 %.

use super::{Query, RecomputeWeight, Rng, StrategySettings};
use crate::candidate::{Busy, Entry, Fleet, IDLE, Lowest, RANKED, RUNNING_TOKENS};
use crate::config::StrategyName;
use crate::decision::{Decision, Reason};
use crate::host_table::Slot;
use crate::recent::HomeKey;

pub(super) fn decide(
    settings: &StrategySettings,
    fleet: &mut Fleet,
    query: &Query,
    home: HomeKey,
    rng: &mut Rng,
) -> Decision {
    let mut decision = query.decision(settings.strategy, Reason::Home);
    decision.key = Some(home.key);
    let shortlist = fleet.shortlist(Some(home.key), query.adapter, rng.next_u64());
    let weight_q10 = settings.recompute_weight.q10(fleet, shortlist.pending_hosts);
    let prices = Prices::of(settings, fleet, query, weight_q10);

    let warm = match settings.strategy {
        StrategyName::CacheAware => warmest(fleet, query),
        _ => Lowest::new(),
    };
    let mut costs = [(u64::MAX, Entry::default()); RANKED + WARM + IDLE];
    let mut count = 0;
    let ranked = shortlist.ranked.as_slice();
    for entry in ranked
        .iter()
        .chain(warm.as_slice())
        .chain(shortlist.idle.as_slice())
    {
        let is_new = |(_, known): &(u64, Entry)| known.host != entry.host;
        if !costs.iter().take(count).all(is_new) {
            continue;
        }
        let (Some(busy), Some(slot)) = (
            fleet.busy(entry.host, query.adapter, query.now_ms),
            fleet.slot(entry.host),
        ) else {
            continue;
        };
        if let Some(place) = costs.get_mut(count) {
            // Behind the ranked hosts, where the next prompt like this would not look.
            let is_stray = count >= RANKED && query.matches.bytes_at(slot) == 0;
            let stray_tokens = if is_stray {
                prices.prompt_tokens / STRAY_PART
            } else {
                0
            };
            let cost = prices.cost(query, &busy, slot, count == 0);
            *place = (cost.saturating_add(stray_tokens), *entry);
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
        let held = |slot: Option<Slot>| slot.map_or(0, |slot| query.matches.bytes_at(slot));
        decision.reason = if held(decision.hosts.first()) > held(decision.home) {
            Reason::WarmHost
        } else {
            Reason::OverflowCost
        };
    }
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

/// The hosts that hold something of the prompt and seem to cost least.
fn warmest(fleet: &Fleet, query: &Query) -> Lowest<WARM> {
    let mut lowest = Lowest::new();
    for (slot, bytes) in query.matches.as_slice() {
        let uncached_tokens = query.tokens(query.prompt_bytes.saturating_sub(*bytes));
        if let Some(entry) = fleet.entry_of(*slot, uncached_tokens) {
            lowest.offer(entry);
        }
    }
    lowest
}

/// What the request's own work costs, λ included.
struct Prices {
    prompt_tokens: u64,
    /// Taken to be cached at the home beyond what is known.
    credit_tokens: u64,
    attention_tokens: u64,
    weight_q10: u64,
}

impl Prices {
    fn of(settings: &StrategySettings, fleet: &Fleet, query: &Query, weight_q10: u64) -> Self {
        let prompt_tokens = u64::from(query.prompt_tokens());
        let matches = &query.matches;
        let share_permille = fleet.foreign_permille().max(matches.unseen_permille.into());
        let credit_permille = share_permille
            .max((2 * share_permille).saturating_sub(500))
            .min(1000);
        let known = u64::from(query.tokens(matches.deepest_bytes().min(query.prompt_bytes)));
        Self {
            prompt_tokens,
            credit_tokens: prompt_tokens.saturating_sub(known) * CREDIT_PERCENT / 100 * credit_permille
                / 1000,
            attention_tokens: settings.attention_tokens.into(),
            weight_q10,
        }
    }

    fn cost(&self, query: &Query, busy: &Busy, slot: Slot, is_home: bool) -> u64 {
        let matches = &query.matches;
        let cached = u64::from(query.tokens(matches.bytes_at(slot).min(query.prompt_bytes)));
        let spread = u64::from(query.tokens(matches.spread_bytes.min(query.prompt_bytes)));
        let credit = if is_home { self.credit_tokens } else { 0 };
        let known = cached.saturating_add(credit);
        let work = self.work_tokens(known, spread.saturating_sub(known));
        let scaled = work.saturating_mul(busy.slowness_q10) >> 10;
        scaled.saturating_add(load_tokens(busy))
    }

    /// Work with `cached` tokens there; `hot` of the rest cost no λ.
    fn work_tokens(&self, cached: u64, hot: u64) -> u64 {
        let uncached = self.prompt_tokens.saturating_sub(cached);
        let work = super::work_tokens(uncached, self.prompt_tokens, self.attention_tokens);
        let cold = uncached.saturating_sub(hot);
        let cold_work = work.saturating_mul(cold).checked_div(uncached).unwrap_or(0);
        work + (cold_work.saturating_mul(self.weight_q10) >> 10)
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

/// A host outside the ranked ones that holds nothing of the prompt counts a quarter of it more: what is computed there is
/// seldom found again. With 64 hosts this saves 3 % of mean TTFT and 2 points of hit share in the simulator; from a tenth
/// to all of the prompt does as well.
const STRAY_PART: u64 = 4;
/// Credit of a home where all that is not known may be cached there. With eight gateways that share nothing, half of
/// it costs 9 % of mean TTFT in the simulator, all of it 3 %.
const CREDIT_PERCENT: u64 = 70;
/// Hosts that hold something of the prompt and are looked at for it.
const WARM: usize = 8;
/// A host that has to load the adapter first: about as long as a prompt of 2048 tokens takes.
const ADAPTER_TOKENS: u64 = 2048;
/// Decisions that the mean of pending hosts goes back over.
const MEAN_DECISIONS: u64 = 100;
/// λ is at most 6.
const MAX_WEIGHT_Q10: u64 = 6 << 10;
