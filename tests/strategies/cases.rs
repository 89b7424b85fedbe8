//! One table: a state of the fleet and a query, and what each strategy must answer.

use warmroute::candidate::Fleet;
use warmroute::config::{StrategyName, Thresholds};
use warmroute::decision::Reason;
use warmroute::host_table::{Health, Host, Role, Slot};
use warmroute::index::Matches;
use warmroute::strategy::{Query, RecomputeWeight, Rng, StrategySettings, decide};

use super::fixture::{
    ALL, T0, fleet_of, host, idle_fleet, query, rendezvous_order, settings, table, takes_traffic,
    with_thresholds,
};

const KEY: u64 = 77;

/// Who must be first.
enum First {
    /// The nth host in rendezvous order.
    Ranked(usize),
    /// Any host but the nth in rendezvous order.
    NotRanked(usize),
    Slot(u16),
    Nobody,
    Anyone,
}

struct Case {
    claim: &'static str,
    settings: StrategySettings,
    /// Changes four idle hosts, given their rendezvous order.
    hosts: fn(&mut Vec<Host>, &[Slot]),
    /// Puts work on the fleet.
    work: fn(&mut Fleet, &[Slot]),
    query: fn() -> Query,
    first: First,
    reason: Reason,
}

fn plain() -> Query {
    query(KEY)
}

fn no_key() -> Query {
    Query {
        home: None,
        fixed_home: None,
        ..query(KEY)
    }
}

fn at(age_ms: u64) -> Query {
    Query {
        now_ms: T0 + age_ms,
        ..query(KEY)
    }
}

/// A prompt that is warm at its home.
fn seen() -> Query {
    held(&[(0, 8000)])
}

fn long_seen() -> Query {
    Query {
        prompt_bytes: 160_000,
        ..held(&[(0, 160_000)])
    }
}

fn short() -> Query {
    Query {
        prompt_bytes: 1000,
        ..query(KEY)
    }
}

/// A prompt of 8 KiB of which the hosts, by their place in rendezvous order, hold so many bytes.
fn held(places: &[(usize, u32)]) -> Query {
    let order = rendezvous_order(KEY, &(0..4).map(host).collect::<Vec<_>>());
    let mut matches = Matches::NONE;
    places
        .iter()
        .for_each(|(place, bytes)| matches.push(order[*place], *bytes));
    Query {
        matches,
        ..query(KEY)
    }
}

fn as_it_is(_: &mut Vec<Host>, _: &[Slot]) {}

fn no_work(_: &mut Fleet, _: &[Slot]) {}

fn busy_home(fleet: &mut Fleet, order: &[Slot]) {
    let _ = fleet.charge(order[0], 50_000, T0);
}

fn requests_at_all_but_second(fleet: &mut Fleet, order: &[Slot]) {
    for slot in [order[0], order[2], order[3]] {
        let _ = fleet.charge(slot, 10, T0);
    }
}

fn named(hosts: &mut [Host], slot: Slot) -> &mut Host {
    hosts.iter_mut().find(|h| h.slot == slot).unwrap()
}

fn waiting(limit: u32) -> StrategySettings {
    with_thresholds(Thresholds {
        waiting_requests: Some(limit),
        ..Thresholds::default()
    })
}

fn kv_usage(permille: u16) -> StrategySettings {
    with_thresholds(Thresholds {
        kv_usage_permille: Some(permille),
        ..Thresholds::default()
    })
}

fn in_flight(limit: u32) -> StrategySettings {
    with_thresholds(Thresholds {
        in_flight: Some(limit),
        ..Thresholds::default()
    })
}

fn cases() -> Vec<Case> {
    use First::{Anyone, Nobody, NotRanked, Ranked, Slot as At};
    let mut cases = Vec::new();
    let mut case = |claim, settings, hosts, work, query, first, reason| {
        cases.push(Case {
            claim,
            settings,
            hosts,
            work,
            query,
            first,
            reason,
        });
    };
    type Hosts = fn(&mut Vec<Host>, &[Slot]);
    type Work = fn(&mut Fleet, &[Slot]);
    let home_waiting_60: Hosts = |hosts, order| named(hosts, order[0]).load.waiting = Some(60);
    let samples_are_old: Hosts = |hosts, _| {
        hosts
            .iter_mut()
            .for_each(|h| (h.sampled_ms, h.load.waiting) = (T0 - 3001, Some(9)));
    };
    let home_waiting_9: Hosts = |hosts, order| named(hosts, order[0]).load.waiting = Some(9);
    let all_waiting_9: Hosts = |hosts, _| hosts.iter_mut().for_each(|h| h.load.waiting = Some(9));
    let home_kv_950: Hosts = |hosts, order| named(hosts, order[0]).load.kv_usage_permille = Some(950);
    let home_unhealthy: Hosts = |hosts, order| named(hosts, order[0]).health = Health::Unhealthy;
    let home_draining: Hosts = |hosts, order| named(hosts, order[0]).health = Health::Draining;
    let home_degraded: Hosts = |hosts, order| named(hosts, order[0]).health = Health::Degraded;
    let home_decodes: Hosts = |hosts, order| named(hosts, order[0]).role = Role::Decode;
    let home_prefills: Hosts = |hosts, order| named(hosts, order[0]).role = Role::Prefill;
    let all_unhealthy: Hosts = |hosts, _| hosts.iter_mut().for_each(|h| h.health = Health::Unhealthy);
    let nobody: Hosts = |hosts, _| hosts.clear();
    let only_slot_2: Hosts = |hosts, _| hosts.retain(|h| h.slot == Slot(2));
    let third_has_adapter: Hosts = |hosts, order| named(hosts, order[2]).load.adapters = vec![9, 5];
    let hybrid = || settings(StrategyName::Hybrid);
    let hash = || settings(StrategyName::PrefixHash);

    case(
        "idle: home",
        hybrid(),
        as_it_is,
        no_work,
        plain,
        Ranked(0),
        Reason::Home,
    );
    case(
        "idle: home by hash",
        hash(),
        as_it_is,
        no_work,
        plain,
        Ranked(0),
        Reason::Home,
    );
    case(
        "hash ignores load",
        hash(),
        home_waiting_9,
        busy_home,
        plain,
        Ranked(0),
        Reason::Home,
    );
    case(
        "a busy home overflows to the next in order",
        hybrid(),
        as_it_is,
        busy_home,
        seen,
        Ranked(1),
        Reason::OverflowCost,
    );
    case(
        "a long cached prompt stays at a busy home",
        hybrid(),
        as_it_is,
        busy_home,
        || Query {
            prompt_bytes: 400_000,
            ..held(&[(0, 400_000)])
        },
        Ranked(0),
        Reason::Home,
    );
    case(
        "a long prompt leaves once waiting costs more",
        hybrid(),
        as_it_is,
        |f, o| {
            for _ in 0..4 {
                busy_home(f, o);
            }
        },
        long_seen,
        Ranked(1),
        Reason::OverflowCost,
    );
    case(
        "polled queues of others count as work",
        hybrid(),
        |hosts, order| {
            let load = &mut named(hosts, order[0]).load;
            (load.waiting, load.running) = (Some(40), Some(20));
        },
        |fleet, order| {
            // A foreign queue counts from its second sample on, at the mean size of our own requests.
            let mut charge = fleet.charge(order[3], 4000, T0);
            fleet.finish(&mut charge, T0);
            let mut again: Vec<Host> = (0..4).map(host).collect();
            again.iter_mut().for_each(|h| h.sampled_ms = T0 + 500);
            (
                named(&mut again, order[0]).load.waiting,
                named(&mut again, order[0]).load.running,
            ) = (Some(40), Some(20));
            fleet.update(&table(again), T0 + 500);
        },
        || at(500),
        NotRanked(0),
        Reason::OverflowCost,
    );
    case(
        "a failing home is left",
        hybrid(),
        as_it_is,
        |f, o| f.failed(o[0], T0),
        seen,
        Ranked(1),
        Reason::OverflowCost,
    );
    case(
        "a failing home is left under thresholds",
        waiting(4),
        as_it_is,
        |f, o| f.failed(o[0], T0),
        plain,
        Ranked(1),
        Reason::OverflowFailing,
    );
    case(
        "a stale table is decided by in-flight work",
        hybrid(),
        home_waiting_9,
        no_work,
        || at(5_000),
        Ranked(0),
        Reason::TableStale,
    );
    case(
        "a table from the future is a stale one",
        hybrid(),
        home_waiting_9,
        no_work,
        || Query {
            now_ms: T0 - 5_000,
            ..seen()
        },
        Ranked(0),
        Reason::TableStale,
    );
    case(
        "a table from far in the future is none",
        hybrid(),
        as_it_is,
        no_work,
        || Query {
            now_ms: T0 - 3_600_000,
            ..seen()
        },
        Ranked(0),
        Reason::NoTable,
    );
    case(
        "a stale table still overflows by own work",
        hybrid(),
        as_it_is,
        |f, o| {
            let _ = f.charge(o[0], 50_000, T0 + 5_000);
        },
        || Query {
            now_ms: T0 + 5_000,
            ..seen()
        },
        Ranked(1),
        Reason::TableStale,
    );
    case(
        "a stale table's waiting is not a threshold",
        waiting(4),
        home_waiting_9,
        no_work,
        || at(5_000),
        Ranked(0),
        Reason::TableStale,
    );
    case(
        "without a table: rendezvous over the last known",
        hybrid(),
        as_it_is,
        busy_home,
        || at(70_000),
        Ranked(0),
        Reason::NoTable,
    );
    case(
        "no key: the only host without work",
        hybrid(),
        as_it_is,
        requests_at_all_but_second,
        no_key,
        Ranked(1),
        Reason::LeastLoaded,
    );
    case(
        "no key for hash either",
        hash(),
        as_it_is,
        requests_at_all_but_second,
        no_key,
        Ranked(1),
        Reason::LeastLoaded,
    );
    case(
        "waiting at its limit stays",
        waiting(9),
        home_waiting_9,
        no_work,
        plain,
        Ranked(0),
        Reason::Home,
    );
    case(
        "waiting over its limit leaves",
        waiting(8),
        home_waiting_9,
        no_work,
        plain,
        Ranked(1),
        Reason::OverflowWaiting,
    );
    case(
        "a long prompt tolerates more waiting",
        waiting(4),
        home_waiting_9,
        no_work,
        long_seen,
        Ranked(0),
        Reason::Home,
    );
    case(
        "a short prompt tolerates less",
        waiting(20),
        home_waiting_9,
        no_work,
        short,
        Ranked(1),
        Reason::OverflowWaiting,
    );
    case(
        "placed since the poll counts as waiting",
        waiting(2),
        as_it_is,
        |f, o| {
            (0..3).for_each(|_| {
                let _ = f.charge(o[0], 10, T0);
            })
        },
        plain,
        Ranked(1),
        Reason::OverflowWaiting,
    );
    case(
        "kv usage over its limit leaves",
        kv_usage(900),
        home_kv_950,
        no_work,
        plain,
        Ranked(1),
        Reason::OverflowKvUsage,
    );
    case(
        "a long prompt tolerates more kv usage",
        kv_usage(900),
        home_kv_950,
        no_work,
        long_seen,
        Ranked(0),
        Reason::Home,
    );
    case(
        "a short prompt tolerates less kv usage",
        kv_usage(960),
        home_kv_950,
        no_work,
        short,
        Ranked(1),
        Reason::OverflowKvUsage,
    );
    case(
        "in flight over its limit leaves",
        in_flight(1),
        as_it_is,
        |f, o| {
            (0..2).for_each(|_| {
                let _ = f.charge(o[0], 10, T0);
            })
        },
        plain,
        Ranked(1),
        Reason::OverflowInFlight,
    );
    case(
        "in flight at its limit stays",
        in_flight(2),
        as_it_is,
        |f, o| {
            (0..2).for_each(|_| {
                let _ = f.charge(o[0], 10, T0);
            })
        },
        plain,
        Ranked(0),
        Reason::Home,
    );
    case(
        "others' requests are in flight too",
        in_flight(1),
        as_it_is,
        |f, o| f.set_others([(o[0], 1, 2, 20)].into_iter(), T0),
        plain,
        Ranked(1),
        Reason::OverflowInFlight,
    );
    case(
        "others' tallies of an old epoch do not count",
        in_flight(1),
        as_it_is,
        |f, o| f.set_others([(o[0], 0, 2, 20)].into_iter(), T0),
        plain,
        Ranked(0),
        Reason::Home,
    );
    case(
        "everyone over a threshold: home",
        waiting(4),
        all_waiting_9,
        no_work,
        plain,
        Ranked(0),
        Reason::AllSaturated,
    );
    case(
        "everyone over a threshold and the home failing: the next",
        waiting(4),
        all_waiting_9,
        |f, o| f.failed(o[0], T0),
        plain,
        Ranked(1),
        Reason::AllSaturated,
    );
    let weight = |permille| StrategySettings {
        recompute_weight: RecomputeWeight::Fixed { permille },
        ..hybrid()
    };
    let work_at_home_5000: Work = |f, o| {
        let _ = f.charge(o[0], 5000, T0);
    };
    let work_at_home_900: Work = |f, o| {
        let _ = f.charge(o[0], 900, T0);
    };
    let work_at_home_900_and_other_workers: Work = |f, o| {
        let _ = f.charge(o[0], 900, T0);
        f.set_others([(o[3], 1, 500, 0)].into_iter(), T0);
    };
    let work_at_home_60_000: Work = |f, o| {
        let _ = f.charge(o[0], 60_000, T0);
    };
    let half_of_long_seen = || Query {
        prompt_bytes: 400_000,
        ..held(&[(0, 200_000)])
    };
    let no_attention = || StrategySettings {
        attention_tokens: 0,
        ..hybrid()
    };
    case(
        "a full cache at the home costs",
        hybrid(),
        home_kv_950,
        no_work,
        seen,
        Ranked(1),
        Reason::OverflowCost,
    );
    case(
        "a miss that is free is taken",
        weight(0),
        as_it_is,
        work_at_home_5000,
        seen,
        Ranked(1),
        Reason::OverflowCost,
    );
    case(
        "a miss that is dear is not",
        weight(6000),
        as_it_is,
        work_at_home_5000,
        seen,
        Ranked(0),
        Reason::Home,
    );
    case(
        "alone, an unseen prompt has no credit at home",
        hybrid(),
        as_it_is,
        work_at_home_900,
        plain,
        Ranked(1),
        Reason::OverflowCost,
    );
    case(
        "attention keeps a long prompt at home",
        hybrid(),
        as_it_is,
        work_at_home_60_000,
        half_of_long_seen,
        Ranked(0),
        Reason::Home,
    );
    case(
        "without attention it leaves",
        no_attention(),
        as_it_is,
        work_at_home_60_000,
        half_of_long_seen,
        Ranked(1),
        Reason::OverflowCost,
    );
    case(
        "a foreign queue seen once does not count",
        hybrid(),
        home_waiting_60,
        no_work,
        seen,
        Ranked(0),
        Reason::Home,
    );
    case(
        "old samples make a new table stale",
        waiting(4),
        samples_are_old,
        no_work,
        plain,
        Ranked(0),
        Reason::TableStale,
    );
    case(
        "hosts with the adapter come first",
        hybrid(),
        third_has_adapter,
        no_work,
        || Query {
            adapter: Some(5),
            ..query(KEY)
        },
        Ranked(2),
        Reason::Home,
    );
    case(
        "an adapter nobody has changes nothing",
        hybrid(),
        third_has_adapter,
        no_work,
        || Query {
            adapter: Some(6),
            ..query(KEY)
        },
        Ranked(0),
        Reason::Home,
    );
    case(
        "an overloaded adapter host is left",
        hybrid(),
        third_has_adapter,
        |f, o| {
            let _ = f.charge(o[2], 90_000, T0);
        },
        || Query {
            adapter: Some(5),
            ..query(KEY)
        },
        Ranked(0),
        Reason::OverflowCost,
    );
    case(
        "others' work counts as backlog",
        hybrid(),
        as_it_is,
        |f, o| f.set_others([(o[0], 1, 3, 60_000)].into_iter(), T0),
        seen,
        Ranked(1),
        Reason::OverflowCost,
    );
    case(
        "hybrid: a prefix that all hold goes where there is less work",
        hybrid(),
        as_it_is,
        |f, o| {
            let _ = f.charge(o[0], 500, T0);
        },
        || held(&[(0, 8000), (1, 8000), (2, 8000), (3, 8000)]),
        NotRanked(0),
        Reason::OverflowCost,
    );
    case(
        "least outstanding counts requests, not work",
        settings(StrategyName::LeastOutstanding),
        as_it_is,
        |f, o| {
            requests_at_all_but_second(f, o);
            for slot in [o[0], o[2], o[3]] {
                let _ = f.charge(slot, 10, T0);
            }
            let _ = f.charge(o[1], 90_000, T0);
        },
        plain,
        Ranked(1),
        Reason::LeastOutstanding,
    );

    for strategy in [StrategyName::Hybrid, StrategyName::CacheAware] {
        let s = || settings(strategy);
        case(
            "the host that holds the prompt is worth leaving the home for",
            s(),
            as_it_is,
            no_work,
            || held(&[(2, 8000)]),
            Ranked(2),
            Reason::WarmHost,
        );
        case(
            "the home is first among hosts that hold as much",
            s(),
            as_it_is,
            no_work,
            || held(&[(3, 8000), (0, 8000), (2, 8000)]),
            Ranked(0),
            Reason::Home,
        );
        case(
            "the deeper match wins",
            s(),
            as_it_is,
            no_work,
            || held(&[(3, 8000), (0, 4000)]),
            Ranked(3),
            Reason::WarmHost,
        );
        case(
            "of two warm hosts the idle one",
            s(),
            as_it_is,
            busy_home,
            || held(&[(0, 8000), (3, 8000)]),
            Ranked(3),
            Reason::OverflowCost,
        );
        case(
            "a warm host that is too busy is left for the next in order",
            s(),
            as_it_is,
            busy_home,
            || held(&[(0, 8000)]),
            Ranked(1),
            Reason::OverflowCost,
        );
        case(
            "a warm host that fails is left",
            s(),
            as_it_is,
            |f, o| f.failed(o[2], T0),
            || held(&[(2, 8000)]),
            Ranked(0),
            Reason::Home,
        );
        case(
            "a warm host that drains is not chosen",
            s(),
            |hosts, order| named(hosts, order[2]).health = Health::Draining,
            no_work,
            || held(&[(2, 8000)]),
            Ranked(0),
            Reason::Home,
        );
        case(
            "λ holds a cold prompt where a hot one spreads",
            StrategySettings {
                recompute_weight: RecomputeWeight::Fixed { permille: 2000 },
                ..s()
            },
            as_it_is,
            work_at_home_5000,
            || held(&[(0, 8000)]),
            Ranked(0),
            Reason::Home,
        );
        case(
            "a hot part costs no λ",
            StrategySettings {
                recompute_weight: RecomputeWeight::Fixed { permille: 2000 },
                ..s()
            },
            as_it_is,
            work_at_home_5000,
            || {
                let mut query = held(&[(0, 8000)]);
                query.matches.spread_bytes = 8000;
                query
            },
            Ranked(1),
            Reason::OverflowCost,
        );
        case(
            "with an index, other workers give no credit",
            s(),
            as_it_is,
            work_at_home_900_and_other_workers,
            || held(&[]),
            Ranked(1),
            Reason::OverflowCost,
        );
        case(
            "caches filled before the index began give credit",
            s(),
            as_it_is,
            work_at_home_900,
            || {
                let mut query = held(&[]);
                query.matches.unseen_permille = 1000;
                query
            },
            Ranked(0),
            Reason::Home,
        );
        case(
            "a warm host without the adapter is behind one that has it",
            s(),
            third_has_adapter,
            no_work,
            || Query {
                adapter: Some(5),
                prompt_bytes: 4096,
                ..held(&[(1, 4096)])
            },
            Ranked(2),
            Reason::Home,
        );
    }
    for strategy in ALL {
        let reason = match strategy {
            StrategyName::RoundRobin => Reason::RoundRobin,
            StrategyName::LeastOutstanding => Reason::LeastOutstanding,
            StrategyName::PrefixHash | StrategyName::Hybrid | StrategyName::CacheAware => Reason::Home,
        };
        let s = || settings(strategy);
        let ranks = reason == Reason::Home;
        let (home, next) = if ranks { (0, 1) } else { (9, 9) };
        let or_anyone = |n| if n == 9 { Anyone } else { Ranked(n) };
        case(
            "an unhealthy home is skipped",
            s(),
            home_unhealthy,
            no_work,
            plain,
            or_anyone(next),
            reason,
        );
        case(
            "a draining home is skipped",
            s(),
            home_draining,
            no_work,
            plain,
            or_anyone(next),
            reason,
        );
        case(
            "a decode-only home is skipped",
            s(),
            home_decodes,
            no_work,
            plain,
            or_anyone(next),
            reason,
        );
        case(
            "a degraded home serves",
            s(),
            home_degraded,
            no_work,
            plain,
            or_anyone(home),
            reason,
        );
        case(
            "a prefill-only home serves",
            s(),
            home_prefills,
            no_work,
            plain,
            or_anyone(home),
            reason,
        );
        case(
            "unhealthy only: nothing is decided",
            s(),
            all_unhealthy,
            no_work,
            plain,
            Nobody,
            Reason::NoEligibleHost,
        );
        case(
            "no hosts: nothing is decided",
            s(),
            nobody,
            no_work,
            plain,
            Nobody,
            Reason::NoHosts,
        );
        case(
            "one host takes all",
            s(),
            only_slot_2,
            no_work,
            plain,
            At(2),
            reason,
        );
    }
    cases
}

#[test]
fn every_case_of_the_table_holds() {
    let order = rendezvous_order(KEY, &(0..4).map(host).collect::<Vec<_>>());
    for case in cases() {
        let Case { claim, settings, .. } = &case;
        for seed in 0..20 {
            let mut hosts: Vec<Host> = (0..4).map(host).collect();
            (case.hosts)(&mut hosts, &order);
            let mut fleet = fleet_of(hosts.clone());
            (case.work)(&mut fleet, &order);
            let decision = decide(settings, &mut fleet, &(case.query)(), &mut Rng::new(seed));
            let got = decision.hosts.first();
            let right = match case.first {
                First::Ranked(n) => got == Some(order[n]),
                First::NotRanked(n) => got.is_some() && got != Some(order[n]),
                First::Slot(slot) => got == Some(Slot(slot)),
                First::Nobody => got.is_none(),
                First::Anyone => got.is_some(),
            };
            let name = settings.strategy.as_str();
            assert!(
                right,
                "{claim} ({name}, seed {seed}): {decision:?}, order {order:?}"
            );
            assert_eq!(
                decision.reason, case.reason,
                "{claim} ({name}, seed {seed}): {decision:?}"
            );
            assert_eq!(decision.strategy, settings.strategy, "{claim}");
            let eligible = hosts.iter().filter(|h| takes_traffic(h)).count();
            assert_eq!(
                decision.hosts.len(),
                eligible.min(3),
                "{claim} ({name}): {decision:?}"
            );
        }
    }
}

#[test]
fn the_rest_of_the_list_follows_rendezvous_order_on_an_idle_fleet() {
    let order = rendezvous_order(KEY, &(0..4).map(host).collect::<Vec<_>>());
    for strategy in [StrategyName::PrefixHash, StrategyName::Hybrid] {
        let mut fleet = idle_fleet(4);
        let decision = decide(&settings(strategy), &mut fleet, &plain(), &mut Rng::new(3));
        let got: Vec<Slot> = decision.hosts.iter().collect();
        assert_eq!(got, order[..3], "{}", strategy.as_str());
    }
}

#[test]
fn cache_aware_finds_the_warm_host_far_down_the_order_and_hybrid_does_not() {
    let hosts: Vec<Host> = (0..64).map(host).collect();
    let far = rendezvous_order(KEY, &hosts)[40];
    let mut matches = Matches::NONE;
    matches.push(far, 7000);
    let query = Query {
        matches,
        ..query(KEY)
    };
    for (strategy, finds) in [(StrategyName::CacheAware, true), (StrategyName::Hybrid, false)] {
        let mut fleet = fleet_of(hosts.clone());
        // Everyone else has a little work, so that the far host is not among the least loaded by chance.
        let _ = fleet.charge(far, 100, T0);
        let decision = decide(&settings(strategy), &mut fleet, &query, &mut Rng::new(1));
        assert_eq!(decision.hosts.first() == Some(far), finds, "{decision:?}");
        let expected = if finds { (7000, 298) } else { (0, 2048) };
        assert_eq!((decision.matched_bytes, decision.uncached_tokens), expected);
    }
}

#[test]
fn every_strategy_charges_what_the_index_says_of_its_host() {
    for strategy in ALL {
        let mut fleet = idle_fleet(4);
        let query = held(&[(0, 8000), (1, 8000), (2, 8000), (3, 8000)]);
        let decision = decide(&settings(strategy), &mut fleet, &query, &mut Rng::new(1));
        assert_eq!((decision.matched_bytes, decision.uncached_tokens), (8000, 48));
    }
}

#[test]
fn round_robin_visits_every_eligible_host_in_turn() {
    let mut hosts: Vec<Host> = (0..5).map(host).collect();
    hosts[1].health = Health::Draining;
    let mut fleet = fleet_of(hosts);
    let mut rng = Rng::new(5);
    let visited: Vec<u16> = (0..8)
        .map(|_| {
            decide(
                &settings(StrategyName::RoundRobin),
                &mut fleet,
                &plain(),
                &mut rng,
            )
            .hosts
            .first()
            .unwrap()
            .0
        })
        .collect();
    let mut round = visited[..4].to_vec();
    round.sort_unstable();
    assert_eq!(round, [0, 2, 3, 4]);
    assert_eq!(visited[..4], visited[4..]);
}

#[test]
fn a_decision_says_what_to_charge() {
    let mut fleet = idle_fleet(4);
    let hybrid = settings(StrategyName::Hybrid);
    let home = decide(&hybrid, &mut fleet, &seen(), &mut Rng::new(1));
    assert_eq!((home.matched_bytes, home.uncached_tokens), (8000, 48));
    let _ = fleet.charge(home.home.unwrap(), 50_000, T0);
    let away = decide(&hybrid, &mut fleet, &seen(), &mut Rng::new(1));
    assert_eq!(
        (away.matched_bytes, away.uncached_tokens, away.home),
        (0, 2048, home.home)
    );
}
