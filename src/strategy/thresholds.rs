//! `hybrid` with explicit thresholds: the first host in rendezvous order that is over none of them.
//!
//! Each threshold is for a prompt of `reference_tokens`; with s = prompt tokens ÷ reference tokens, kept within
//! 0.25…8, a host is over it when
//!
//! * requests waiting > `waiting_requests` · s,
//! * requests in flight > `in_flight` · s,
//! * KV usage > 1 − (1 − `kv_usage`) ÷ s, with s kept within 0.5…2: the spare room asked for is doubled for a short
//!   prompt, which is cheap to compute elsewhere, and halved for a long one. It never reaches 1.
//!
//! So a short prompt leaves its home early, a long one late. A host whose failure penalty is above a quarter of the
//! first penalty counts as over. Where no host looked at is under all thresholds, the request stays home, or at
//! the first that is not failing.

use super::{Query, Rng, StrategySettings};
use crate::candidate::{Busy, Fleet};
use crate::config::{StrategyName, Thresholds};
use crate::decision::{Decision, HostList, Reason};
use crate::recent::HomeKey;

pub(super) fn decide(
    settings: &StrategySettings,
    thresholds: &Thresholds,
    fleet: &Fleet,
    query: &Query,
    home: HomeKey,
    rng: &mut Rng,
) -> Decision {
    let mut decision = query.decision(StrategyName::Hybrid, Reason::Home);
    decision.key = Some(home.key);
    let shortlist = fleet.shortlist(Some(home.key), query.adapter, rng.next_u64());
    let limits = Limits::of(settings, thresholds, query.prompt_tokens());
    let mut home_over = None;
    let mut failing = HostList::default();
    let mut saturated = HostList::default();
    let ranked = shortlist.ranked.as_slice();
    for entry in ranked.iter().chain(shortlist.idle.as_slice()) {
        let (Some(slot), Some(busy)) = (
            fleet.slot(entry.host),
            fleet.busy(entry.host, query.adapter, query.now_ms),
        ) else {
            continue;
        };
        decision.home = decision.home.or(Some(slot));
        let exceeded = limits.exceeded_by(&busy);
        match exceeded {
            None => decision.hosts.push(slot),
            Some(Reason::OverflowFailing) => failing.push(slot),
            Some(_) => saturated.push(slot),
        }
        if decision.home == Some(slot) {
            home_over = exceeded;
        }
    }
    if decision.hosts.is_empty() {
        decision.reason = Reason::AllSaturated;
    } else if let Some(reason) = home_over {
        decision.reason = reason;
    }
    // What is left of the list, the home first, whatever it has to bear; failing hosts last.
    saturated
        .iter()
        .chain(failing.iter())
        .for_each(|slot| decision.hosts.push(slot));
    decision
}

/// Thresholds scaled to one prompt.
struct Limits<'a> {
    thresholds: &'a Thresholds,
    scale_permille: u64,
    kv_usage_permille: Option<u64>,
}

impl<'a> Limits<'a> {
    fn of(settings: &StrategySettings, thresholds: &'a Thresholds, prompt_tokens: u32) -> Self {
        let reference = u64::from(settings.reference_tokens.max(1));
        let scale_permille = (u64::from(prompt_tokens) * 1000 / reference).clamp(250, 8000);
        let kv_usage_permille = thresholds.kv_usage_permille.map(|limit| {
            let room = 1000u64.saturating_sub(u64::from(limit));
            1000u64.saturating_sub(room * 1000 / scale_permille.clamp(500, 2000))
        });
        Self {
            thresholds,
            scale_permille,
            kv_usage_permille,
        }
    }

    fn exceeded_by(&self, busy: &Busy) -> Option<Reason> {
        let over = |value: Option<u32>, limit: Option<u32>| match (value, limit) {
            (Some(value), Some(limit)) => u64::from(value) * 1000 > u64::from(limit) * self.scale_permille,
            (None, _) | (_, None) => false,
        };
        let kv_over = match (busy.kv_usage_permille, self.kv_usage_permille) {
            (Some(usage), Some(limit)) => u64::from(usage) > limit,
            (None, _) | (_, None) => false,
        };
        if busy.penalty_tokens > FAILING_TOKENS {
            Some(Reason::OverflowFailing)
        } else if over(busy.waiting, self.thresholds.waiting_requests) {
            Some(Reason::OverflowWaiting)
        } else if kv_over {
            Some(Reason::OverflowKvUsage)
        } else if over(Some(busy.in_flight), self.thresholds.in_flight) {
            Some(Reason::OverflowInFlight)
        } else {
            None
        }
    }
}

/// A quarter of the first failure penalty: a host is passed over for about 14 s after one failure.
const FAILING_TOKENS: u64 = 1024;
