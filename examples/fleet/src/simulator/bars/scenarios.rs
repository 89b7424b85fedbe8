//! Which runs there are.

use warmroute::config::StrategyName;

use crate::simulator::outcome::Outcome;
use crate::simulator::setup::{Happening, Policy, Setup, Sharing};
use crate::simulator::trace::Trace;
use crate::simulator::utilisation::Lever;
use crate::simulator::workload::Workload;

/// Runs that a line compares.
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// Where requests come from.
    pub source: Source,
    /// Whether the engine is the 8B one.
    pub is_small_engine: bool,
    /// KV cache of a host, tokens.
    pub kv_tokens: usize,
    /// Share of the hosts' time that the oracle spends in prefill, and what is scaled to reach it; copies and parts of a
    /// trace take the scale of the whole on eight hosts.
    pub load: Option<(Lever, f64)>,
    /// Factor for the speed of arrivals after that.
    pub arrivals: f64,
    /// Rows beside `hybrid` and `cache_aware`.
    pub others: &'static [Policy],
    /// What differs from eight hosts behind one gateway; not part of what the load is scaled with.
    pub vary: fn(&mut Setup),
    /// A figure beyond the summary.
    pub measure: Option<fn(&Outcome, &Workload, &Setup) -> f64>,
}

/// Where requests come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// A published trace.
    Trace(Trace),
    /// The conversation trace so many times at once, each with texts of its own behind the block that all share.
    Copies(u64),
    /// One of so many parts of it, each with whole conversations.
    Part(u64),
    /// 150 tenants with a prefix of 6144 tokens each, 14 requests a second for 600 s.
    Tenants,
    /// One prefix of 4096 tokens on 70 % of the requests.
    HotPrefix,
}

const fn conversation(name: &'static str, share: f64) -> Scenario {
    Scenario {
        name,
        source: Source::Trace(Trace::Conversation),
        is_small_engine: false,
        kv_tokens: 1_500_000,
        load: Some((Lever::PrefillCost, share)),
        arrivals: 1.0,
        others: &[],
        vary: |_| {},
        measure: None,
    }
}

/// Moment from which a host fails, and the restarts, microseconds.
const FAILS_US: u64 = 600_000_000;
const FAILING_HOST: usize = 3;
const RESTARTS: u64 = 24;

const fn restart(number: u64) -> (u64, usize) {
    (300_000_000 + number * 120_000_000, number as usize % 8)
}

fn fails(setup: &mut Setup) {
    setup.happenings.push((FAILS_US, Happening::Fail(FAILING_HOST)));
}

fn failing_share(outcome: &Outcome, _: &Workload, _: &Setup) -> f64 {
    outcome.traffic_share(FAILING_HOST, FAILS_US + 2_000_000, u64::MAX)
}

/// Predicted less true hit share of the restarted hosts, from one poll after each restart for 30 s.
fn restart_gap(outcome: &Outcome, workload: &Workload, setup: &Setup) -> f64 {
    let mut sums = [0i64; 3];
    for number in 0..RESTARTS {
        let (at_us, host) = restart(number);
        let from_us = at_us + (setup.poll_ms + setup.poll_delay_ms) * 1000;
        let hits = outcome.hits_between(workload, host, from_us, at_us + 30_000_000);
        sums.iter_mut()
            .zip(hits)
            .for_each(|(sum, tokens)| *sum += tokens as i64);
    }
    (sums[0] - sums[1]) as f64 / sums[2].max(1) as f64
}

const ROUND_ROBIN: Policy = Policy::Core(StrategyName::RoundRobin);
const LEAST_OUTSTANDING: Policy = Policy::Core(StrategyName::LeastOutstanding);
const ORACLES_AND: [Policy; 6] = [
    Policy::ORACLES[0],
    Policy::ORACLES[1],
    Policy::ORACLES[2],
    Policy::ORACLES[3],
    LEAST_OUTSTANDING,
    Policy::Sglang,
];
const ORACLES_AND_ROUND_ROBIN: [Policy; 5] = [
    Policy::ORACLES[0],
    Policy::ORACLES[1],
    Policy::ORACLES[2],
    Policy::ORACLES[3],
    ROUND_ROBIN,
];

/// All of them; those that take long come first within the order of the table.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        others: &ORACLES_AND,
        ..conversation("conv55", 0.55)
    },
    Scenario {
        others: &Policy::ORACLES,
        ..conversation("conv85", 0.85)
    },
    Scenario {
        kv_tokens: 1 << 30,
        ..conversation("conv55-infinite", 0.55)
    },
    Scenario {
        kv_tokens: 1 << 30,
        vary: |setup| setup.pool_config = r#"{"recompute_weight": 4}"#.to_owned(),
        ..conversation("conv55-infinite-weight4", 0.55)
    },
    Scenario {
        source: Source::Tenants,
        kv_tokens: 400_000,
        load: None,
        others: &ORACLES_AND_ROUND_ROBIN,
        ..conversation("tenants", 0.0)
    },
    Scenario {
        source: Source::HotPrefix,
        load: Some((Lever::Arrivals, 0.55)),
        others: &[LEAST_OUTSTANDING],
        ..conversation("hot55", 0.55)
    },
    Scenario {
        source: Source::HotPrefix,
        load: Some((Lever::Arrivals, 0.70)),
        others: &[LEAST_OUTSTANDING],
        ..conversation("hot70", 0.70)
    },
    Scenario {
        source: Source::Trace(Trace::Azure),
        others: &[LEAST_OUTSTANDING],
        ..conversation("azure25", 0.25)
    },
    Scenario {
        source: Source::Trace(Trace::Azure),
        others: &[LEAST_OUTSTANDING],
        ..conversation("azure45", 0.45)
    },
    Scenario {
        source: Source::Trace(Trace::Azure),
        others: &[LEAST_OUTSTANDING],
        ..conversation("azure60", 0.60)
    },
    Scenario {
        source: Source::Trace(Trace::Sharegpt),
        others: &[LEAST_OUTSTANDING],
        ..conversation("sharegpt45", 0.45)
    },
    Scenario {
        source: Source::Trace(Trace::Aibrix),
        load: None,
        arrivals: 4.0,
        others: &[LEAST_OUTSTANDING],
        ..conversation("aibrix", 0.0)
    },
    Scenario {
        is_small_engine: true,
        kv_tokens: 467_000,
        load: Some((Lever::Arrivals, 0.50)),
        others: &ORACLES_AND,
        ..conversation("8b50", 0.50)
    },
    Scenario {
        source: Source::Part(4),
        others: &[ROUND_ROBIN],
        vary: |setup| setup.hosts = 2,
        ..conversation("hosts2", 0.55)
    },
    Scenario {
        others: &[ROUND_ROBIN],
        ..conversation("hosts8", 0.55)
    },
    Scenario {
        source: Source::Copies(8),
        others: &[ROUND_ROBIN],
        vary: |setup| setup.hosts = 64,
        ..conversation("hosts64", 0.55)
    },
    Scenario {
        others: &[LEAST_OUTSTANDING],
        vary: |setup| setup.gateways = 8,
        ..conversation("gateways8", 0.55)
    },
    Scenario {
        vary: |setup| {
            setup.gateways = 8;
            setup.sharing = Sharing::All { delay_ms: 200 };
        },
        ..conversation("gateways8-shared", 0.55)
    },
    Scenario {
        vary: |setup| {
            let restarts = (0..RESTARTS).map(restart);
            setup.happenings = restarts
                .map(|(at_us, host)| (at_us, Happening::Restart(host)))
                .collect();
        },
        measure: Some(restart_gap),
        ..conversation("restart", 0.55)
    },
    Scenario {
        vary: |setup| setup.happenings.push((0, Happening::Slow(FAILING_HOST, 3000))),
        ..conversation("slow", 0.55)
    },
    Scenario {
        vary: |setup| setup.hosts = 7,
        ..conversation("seven-hosts", 0.55)
    },
    Scenario {
        vary: fails,
        measure: Some(failing_share),
        ..conversation("failing40", 0.40)
    },
    Scenario {
        vary: fails,
        measure: Some(failing_share),
        ..conversation("failing70", 0.70)
    },
    Scenario {
        kv_tokens: 150_000,
        others: &[LEAST_OUTSTANDING],
        vary: |setup| setup.kv_assumed_factor = 10.0,
        ..conversation("small-kv-assumed-large", 0.55)
    },
    Scenario {
        kv_tokens: 150_000,
        ..conversation("small-kv-known", 0.55)
    },
];
