//! Fleets, queries and settings that the tests start from.

use warmroute::candidate::{Fleet, FleetSettings};
use warmroute::config::{Overflow, StrategyName, Thresholds};
use warmroute::host_table::{Health, Host, HostTable, Load, Role, Slot};
use warmroute::recent::{HomeKey, Homes};
use warmroute::strategy::{Query, StrategySettings};

/// A moment to start from, ms since the Unix epoch.
pub(super) const T0: u64 = 1_790_000_000_000;

pub(super) const ALL: [StrategyName; 5] = StrategyName::ALL;

/// Host `slot` with an idle engine, scraped at `T0`.
pub(super) fn host(slot: u16) -> Host {
    Host {
        slot: Slot(slot),
        epoch: 1,
        address: format!("10.0.{}.{}:8000", slot / 250, slot % 250 + 1),
        weight: 1,
        sampled_ms: T0,
        load: Load {
            waiting: Some(0),
            running: Some(0),
            kv_usage_permille: Some(0),
            kv_capacity_tokens: Some(400_000),
            ..Load::default()
        },
        ..Host::default()
    }
}

pub(super) fn table(hosts: Vec<Host>) -> HostTable {
    HostTable {
        published_ms: T0,
        hosts,
    }
}

pub(super) fn fleet_of(hosts: Vec<Host>) -> Fleet {
    let mut fleet = Fleet::new(FleetSettings::default());
    fleet.update(&table(hosts), T0);
    fleet
}

pub(super) fn idle_fleet(count: u16) -> Fleet {
    fleet_of((0..count).map(host).collect())
}

/// A prompt of 8 KiB with this home key, unseen.
pub(super) fn query(key: u64) -> Query {
    let home = Some(HomeKey {
        key,
        depth_bytes: 4096,
    });
    let homes = Homes {
        home,
        fixed_home: home,
    };
    Query::new(homes, 8192, T0)
}

pub(super) fn settings(strategy: StrategyName) -> StrategySettings {
    StrategySettings::new(strategy)
}

pub(super) fn with_thresholds(thresholds: Thresholds) -> StrategySettings {
    StrategySettings {
        overflow: Overflow::Thresholds(thresholds),
        ..settings(StrategyName::Hybrid)
    }
}

/// Every strategy, and `hybrid` also with thresholds.
pub(super) fn every_settings() -> Vec<StrategySettings> {
    let thresholds = Thresholds {
        waiting_requests: Some(4),
        kv_usage_permille: Some(900),
        in_flight: Some(16),
    };
    ALL.iter()
        .map(|s| settings(*s))
        .chain([with_thresholds(thresholds)])
        .collect()
}

/// The hosts in rendezvous order, learned by taking the first away again and again.
pub(super) fn rendezvous_order(key: u64, hosts: &[Host]) -> Vec<Slot> {
    let mut left = hosts.to_vec();
    let mut order = Vec::new();
    while !left.is_empty() {
        let mut fleet = fleet_of(left.clone());
        let mut rng = warmroute::strategy::Rng::new(1);
        let first = warmroute::strategy::decide(
            &settings(StrategyName::PrefixHash),
            &mut fleet,
            &query(key),
            &mut rng,
        );
        let slot = first.hosts.first().unwrap();
        order.push(slot);
        left.retain(|h| h.slot != slot);
    }
    order
}

pub(super) fn takes_traffic(host: &Host) -> bool {
    matches!(host.health, Health::Healthy | Health::Degraded) && host.role != Role::Decode
}
