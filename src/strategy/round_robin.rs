//! `round_robin`: the next eligible host in slot order.
//!
//! Each worker starts at a host of its own, so that several workers do not walk in step. It looks at nothing else.

use super::{Query, Rng};
use crate::candidate::Fleet;
use crate::config::StrategyName;
use crate::decision::{Decision, Reason};

pub(super) fn decide(fleet: &mut Fleet, query: &Query, rng: &mut Rng) -> Decision {
    let mut decision = query.decision(StrategyName::RoundRobin, Reason::RoundRobin);
    if fleet.cursor.is_none() {
        fleet.cursor = fleet.nth_slot(rng.below(fleet.eligible_len()));
    }
    fleet
        .next_slots(fleet.cursor)
        .for_each(|slot| decision.hosts.push(slot));
    fleet.cursor = decision.hosts.first();
    decision
}
