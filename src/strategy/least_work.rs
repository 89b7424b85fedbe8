//! No prefix key → the host with the least work, equals ordered by chance.

use super::{Query, Rng, cost};
use crate::candidate::{Fleet, Lowest};
use crate::config::StrategyName;
use crate::decision::{Decision, Reason};

pub(super) fn decide(
    fleet: &Fleet,
    query: &Query,
    strategy: StrategyName,
    reason: Reason,
    rng: &mut Rng,
) -> Decision {
    let mut decision = query.decision(strategy, reason);
    let shortlist = fleet.shortlist(None, query.adapter, rng.next_u64());
    let mut by_load = Lowest::<3>::new();
    for entry in shortlist.idle.as_slice() {
        if let Some(busy) = fleet.busy(entry.host, query.adapter, query.now_ms) {
            let mut exact = *entry;
            exact.score = cost::load_tokens(&busy);
            by_load.offer(exact);
        }
    }
    for entry in by_load.as_slice() {
        if let Some(slot) = fleet.slot(entry.host) {
            decision.hosts.push(slot);
        }
    }
    decision
}
