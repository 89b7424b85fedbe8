//! `least_outstanding`: the host with the fewest requests in flight, this worker's and the other workers'.
//!
//! Equals are ordered by chance, so that an idle fleet is used evenly. Work, cache and polled numbers are not looked
//! at: that is what this strategy is compared for.

use super::{Query, Rng};
use crate::candidate::Fleet;
use crate::config::StrategyName;
use crate::decision::{Decision, Reason};

pub(super) fn decide(fleet: &Fleet, query: &Query, rng: &mut Rng) -> Decision {
    let mut decision = query.decision(StrategyName::LeastOutstanding, Reason::LeastOutstanding);
    for entry in fleet.fewest_requests(rng.next_u64()).as_slice() {
        if let Some(slot) = fleet.slot(entry.host) {
            decision.hosts.push(slot);
        }
    }
    decision
}
