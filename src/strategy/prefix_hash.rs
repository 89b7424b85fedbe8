//! `prefix_hash`: the first host in the rendezvous order of the prefix at a fixed depth, always.
//!
//! A hot prefix saturates its one host; that is what this strategy is compared for. The same walk serves `hybrid` when
//! the host table is gone.

use super::{Query, Rng, least_work};
use crate::candidate::Fleet;
use crate::config::StrategyName;
use crate::decision::{Decision, Reason};
use crate::recent::HomeKey;

pub(super) fn decide(fleet: &Fleet, query: &Query, rng: &mut Rng) -> Decision {
    match query.fixed_home {
        Some(home) => rendezvous(fleet, query, home, StrategyName::PrefixHash, Reason::Home),
        None => least_work::decide(fleet, query, StrategyName::PrefixHash, Reason::LeastLoaded, rng),
    }
}

/// The first three hosts in rendezvous order.
pub(super) fn rendezvous(
    fleet: &Fleet,
    query: &Query,
    home: HomeKey,
    strategy: StrategyName,
    reason: Reason,
) -> Decision {
    let mut decision = query.decision(strategy, reason);
    let shortlist = fleet.shortlist(Some(home.key), query.adapter, 0);
    for entry in shortlist.ranked.as_slice().iter().take(3) {
        if let Some(slot) = fleet.slot(entry.host) {
            decision.hosts.push(slot);
        }
    }
    decision.home = decision.hosts.first();
    decision.key = Some(home.key);
    decision
}
