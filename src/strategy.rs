//! Fleet × query → decision: the one seam behind which every strategy sits, one file each.
//!
//! In: settings, the fleet as this worker knows it, what is known of the prompt, the time, a seeded generator. Out: a
//! [`Decision`] with its reason. Equal inputs give equal decisions. A decision never names a host that takes no
//! traffic, and never fails: where there is nothing to decide on, it is empty, and Envoy's own balancer chooses.
//!
//! How far the table can be believed decides how: while it is fresh, polled numbers count; when it is stale, requests
//! in flight alone; when it is gone, `hybrid` and `cache_aware` fall back to the plain rendezvous order of the last known
//! hosts.

mod cost;
mod least_outstanding;
mod least_work;
mod prefix_hash;
mod rng;
mod round_robin;
mod thresholds;

use crate::candidate::{Fleet, Freshness};
use crate::config::{Overflow, StrategyName};
use crate::decision::{Decision, HostList, Reason};
use crate::index::Matches;
use crate::recent::{HomeKey, Homes};

pub use self::rng::Rng;

/// Decides where a request goes; the caller then charges its work to the first host.
pub fn decide(settings: &StrategySettings, fleet: &mut Fleet, query: &Query, rng: &mut Rng) -> Decision {
    if fleet.eligible_len() == 0 {
        let reason = if fleet.is_empty() {
            Reason::NoHosts
        } else {
            Reason::NoEligibleHost
        };
        return query.decision(settings.strategy, reason);
    }
    fleet.release_overdue(query.now_ms);
    let mut decision = match settings.strategy {
        StrategyName::RoundRobin => round_robin::decide(fleet, query, rng),
        StrategyName::LeastOutstanding => least_outstanding::decide(fleet, query, rng),
        StrategyName::PrefixHash => prefix_hash::decide(fleet, query, rng),
        StrategyName::Hybrid | StrategyName::CacheAware => by_cost(settings, fleet, query, rng),
    };
    if let Some(slot) = decision.hosts.first() {
        decision.matched_bytes = query.matches.bytes_at(slot).min(query.prompt_bytes);
        decision.uncached_tokens = query.tokens(query.prompt_bytes - decision.matched_bytes);
        let work = work_tokens(
            decision.uncached_tokens.into(),
            query.prompt_tokens().into(),
            settings.attention_tokens.into(),
        );
        decision.prefill_tokens = u32::try_from(work).unwrap_or(u32::MAX);
    }
    decision
}

/// The time that `uncached` tokens at the end of a prompt take, in tokens of a short prompt.
fn work_tokens(uncached: u64, prompt: u64, attention: u64) -> u64 {
    let context = prompt.saturating_sub(uncached / 2);
    let attention = (uncached * context).checked_div(attention);
    uncached.saturating_add(attention.unwrap_or(0))
}

fn by_cost(settings: &StrategySettings, fleet: &mut Fleet, query: &Query, rng: &mut Rng) -> Decision {
    let freshness = fleet.freshness(query.now_ms);
    let Some(home) = query.home else {
        let reason = match freshness {
            Freshness::Fresh => Reason::LeastLoaded,
            Freshness::Stale => Reason::TableStale,
            Freshness::NoTable => Reason::NoTable,
        };
        return least_work::decide(fleet, query, settings.strategy, reason, rng);
    };
    if freshness == Freshness::NoTable {
        return prefix_hash::rendezvous(fleet, query, home, settings.strategy, Reason::NoTable);
    }
    let mut decision = match (settings.strategy, &settings.overflow) {
        (StrategyName::Hybrid, Overflow::Thresholds(thresholds)) => {
            thresholds::decide(settings, thresholds, fleet, query, home, rng)
        }
        _ => cost::decide(settings, fleet, query, home, rng),
    };
    if freshness == Freshness::Stale {
        decision.reason = Reason::TableStale;
    }
    decision
}

/// Which strategy, and its knobs.
#[derive(Debug, Clone, PartialEq)]
pub struct StrategySettings {
    /// The strategy.
    pub strategy: StrategyName,
    /// When `hybrid` leaves the home.
    pub overflow: Overflow,
    /// Prompt length that thresholds are stated for, tokens. Default 2048.
    pub reference_tokens: u32,
    /// λ of the cost rule.
    pub recompute_weight: RecomputeWeight,
    /// Mean context at which attention costs as much as all the rest of prefill, tokens; 0 leaves it out. Default
    /// 53 000: a 70B model on four H100 (30 000 for an 8B model on one).
    pub attention_tokens: u32,
    /// How much dearer than the cheapest host an earlier one in rendezvous order may be, tokens. Default 32: more
    /// gained nothing in the prototype.
    pub slack_tokens: u32,
}

/// λ: how much recomputing a token counts beyond the time it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RecomputeWeight {
    /// Follows utilisation, from 0 to 6.
    #[default]
    Utilisation,
    /// Stays the same.
    Fixed {
        /// Thousandths.
        permille: u32,
    },
}

impl StrategySettings {
    /// The default knobs for a strategy.
    pub const fn new(strategy: StrategyName) -> Self {
        Self {
            strategy,
            overflow: Overflow::Auto,
            reference_tokens: 2048,
            recompute_weight: RecomputeWeight::Utilisation,
            attention_tokens: 53_000,
            slack_tokens: 32,
        }
    }
}

/// What is known of a request before it is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// The home key; `None` where the request has no prefix.
    pub home: Option<HomeKey>,
    /// The key that `prefix_hash` uses.
    pub fixed_home: Option<HomeKey>,
    /// What the index says that the hosts hold.
    pub matches: Matches,
    /// Bytes of the whole prompt.
    pub prompt_bytes: u32,
    /// Thousandths of a byte that a token has on average; [`DEFAULT_MILLIBYTES_PER_TOKEN`] by default.
    pub millibytes_per_token: u32,
    /// Hash of the LoRA adapter's name.
    pub adapter: Option<u64>,
    /// The time, ms since the Unix epoch.
    pub now_ms: u64,
}

impl Query {
    /// A query for a prompt of that length, of which no host holds anything.
    pub const fn new(homes: Homes, prompt_bytes: u32, now_ms: u64) -> Self {
        Self {
            home: homes.home,
            fixed_home: homes.fixed_home,
            matches: Matches::NONE,
            prompt_bytes,
            millibytes_per_token: DEFAULT_MILLIBYTES_PER_TOKEN,
            adapter: None,
            now_ms,
        }
    }

    /// Tokens in so many bytes of this prompt.
    fn tokens(&self, bytes: u32) -> u32 {
        let tokens = u64::from(bytes) * 1000 / u64::from(self.millibytes_per_token.max(1));
        u32::try_from(tokens).unwrap_or(u32::MAX)
    }

    pub(crate) fn prompt_tokens(&self) -> u32 {
        self.tokens(self.prompt_bytes)
    }

    /// A decision without hosts yet.
    fn decision(&self, strategy: StrategyName, reason: Reason) -> Decision {
        Decision {
            strategy,
            reason,
            hosts: HostList::default(),
            home: None,
            matched_bytes: 0,
            prompt_bytes: self.prompt_bytes,
            uncached_tokens: 0,
            prefill_tokens: 0,
            key: None,
        }
    }
}

/// Four bytes a token: English text in the tokenizers of current models.
pub const DEFAULT_MILLIBYTES_PER_TOKEN: u32 = 4000;
