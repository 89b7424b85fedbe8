//! The decision that `docs/routing.md` goes through, in its numbers.

use warmroute::candidate::{Fleet, Work};
use warmroute::config::StrategyName;
use warmroute::decision::{Decision, Reason};
use warmroute::host_table::{Host, Load, Slot};
use warmroute::index::Matches;
use warmroute::strategy::{Query, RecomputeWeight, Rng, StrategySettings, decide};

use super::fixture::{T0, fleet_of, host, query, rendezvous_order};

const KEY: u64 = 1;
const PAGE: &str = include_str!("../../docs/routing.md");

#[test]
fn a_host_that_holds_more_is_worth_leaving_home_for() {
    let decision = decide_with(1000, 5000, true);
    let [home, _, warm] = order();
    assert_eq!(decision.hosts.first(), Some(warm));
    assert_eq!(decision.home, Some(home));
    assert_eq!(decision.reason, Reason::WarmHost);
    assert_eq!(decision.matched_bytes, 28_000);
    assert_eq!((decision.uncached_tokens, decision.prefill_tokens), (1000, 1141));
}

#[test]
fn without_it_the_home_keeps_the_prompt_as_long_as_the_page_says() {
    let [home, cold, _] = order();
    for (weight_permille, limit) in [(1000, 12_510), (0, 6171)] {
        let stays = decide_with(weight_permille, limit, false);
        assert_eq!((stays.hosts.first(), stays.reason), (Some(home), Reason::Home));
        let leaves = decide_with(weight_permille, limit + 1, false);
        assert_eq!(
            (leaves.hosts.first(), leaves.reason),
            (Some(cold), Reason::OverflowCost)
        );
        let shown = format!("{} {:03}", limit / 1000, limit % 1000);
        assert!(PAGE.contains(&shown), "{shown}");
    }
}

#[test]
fn the_page_adds_up() {
    let rows = PAGE.lines().skip_while(|line| !line.starts_with("| tokens | a"));
    let rows: Vec<Vec<u32>> = rows
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells = line.trim_matches(['|', ' ']).split('|').skip(1);
            let digits = cells.map(|cell| cell.chars().filter(char::is_ascii_digit).collect::<String>());
            digits.map(|number| number.parse().unwrap()).collect()
        })
        .collect();
    let (sums, parts) = rows.split_last().unwrap();
    assert_eq!(parts.len(), 5);
    assert_eq!(*sums, [9828, 17_306, 4582]);
    for (at, sum) in sums.iter().enumerate() {
        assert_eq!(parts.iter().map(|row| row[at]).sum::<u32>(), *sum);
    }
}

/// A prompt of 8000 tokens: its home holds 6000 of them and has `home_backlog` tokens and three requests to do, the next
/// host holds nothing and has one request, the third, if it is there, 7000, 1500 and two.
fn decide_with(weight_permille: u32, home_backlog: u32, with_third: bool) -> Decision {
    let [home, cold, warm] = order();
    let mut hosts = hosts();
    hosts.retain(|host| with_third || host.slot != warm);
    if let Some(third) = hosts.iter_mut().find(|host| host.slot == warm) {
        third.load.kv_usage_permille = Some(502);
    }
    let mut fleet = fleet_of(hosts);
    busy_with(&mut fleet, home, home_backlog, 3);
    busy_with(&mut fleet, cold, 0, 1);
    let mut matches = Matches::NONE;
    if with_third {
        busy_with(&mut fleet, warm, 1500, 2);
        matches.push(warm, 28_000);
    }
    matches.push(home, 24_000);
    let query = Query {
        matches,
        prompt_bytes: 32_000,
        ..query(KEY)
    };
    let settings = StrategySettings {
        recompute_weight: RecomputeWeight::Fixed {
            permille: weight_permille,
        },
        ..StrategySettings::new(StrategyName::Hybrid)
    };
    decide(&settings, &mut fleet, &query, &mut Rng::new(1))
}

fn busy_with(fleet: &mut Fleet, slot: Slot, backlog: u32, requests: u32) {
    for request in 0..requests {
        let work = Work {
            uncached_tokens: 0,
            prefill_tokens: if request == 0 { backlog } else { 0 },
        };
        fleet.charge(slot, work, T0);
    }
}

fn hosts() -> Vec<Host> {
    let capacity = |host: Host| Host {
        load: Load {
            kv_capacity_tokens: Some(1_500_000),
            ..host.load.clone()
        },
        ..host
    };
    (0..3).map(|slot| capacity(host(slot))).collect()
}

fn order() -> [Slot; 3] {
    rendezvous_order(KEY, &hosts()).try_into().unwrap()
}
