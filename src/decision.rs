//! What was decided, why, and the value of the steering header.
//!
//! In: a strategy's choice. Out: one value that logs, metrics, headers and tests read. It must never name a host
//! twice, nor more than three.

use crate::candidate::Fleet;
use crate::config::StrategyName;
use crate::host_table::Slot;

/// Where a request goes and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The strategy that decided.
    pub strategy: StrategyName,
    /// Why these hosts.
    pub reason: Reason,
    /// The hosts to try, best first; empty where Envoy's own load balancer has to choose.
    pub hosts: HostList,
    /// The first host in rendezvous order, for strategies that have one.
    pub home: Option<Slot>,
    /// Prompt bytes believed to be cached at the first host.
    pub matched_bytes: u32,
    /// Bytes of the whole prompt.
    pub prompt_bytes: u32,
    /// Tokens that the first host is believed to have to compute: what to charge it with.
    pub uncached_tokens: u32,
    /// The time that they take, in tokens of a short prompt.
    pub prefill_tokens: u32,
    /// The key that ranked the hosts.
    pub key: Option<u64>,
}

/// Up to three distinct hosts, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostList {
    slots: [Slot; 3],
    len: usize,
}

/// Why a decision is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The prefix's home host.
    Home,
    /// Too many requests wait at the home.
    OverflowWaiting,
    /// Too much of the home's KV cache is in use.
    OverflowKvUsage,
    /// Too many requests are in flight at the home.
    OverflowInFlight,
    /// The home failed lately.
    OverflowFailing,
    /// The home does not have the adapter, or another host costs less than the home.
    OverflowCost,
    /// A host that is not the home holds more of the prompt than the home.
    WarmHost,
    /// Every host is over a threshold: the home again.
    AllSaturated,
    /// No prefix key: the host with the least work.
    LeastLoaded,
    /// The host with the fewest requests in flight.
    LeastOutstanding,
    /// The next host.
    RoundRobin,
    /// The host table is old: decided by requests in flight alone.
    TableStale,
    /// The host table is gone: rendezvous over the last known hosts, or the least own work without a key.
    NoTable,
    /// No host is known: nothing was decided.
    NoHosts,
    /// No known host takes traffic: nothing was decided.
    NoEligibleHost,
}

impl Decision {
    /// Appends the steering header's value: the addresses, best first, separated by commas.
    pub fn write_header(&self, fleet: &Fleet, out: &mut String) {
        let mut separator = "";
        for address in self.hosts.iter().filter_map(|slot| fleet.address(slot)) {
            out.push_str(separator);
            out.push_str(address);
            separator = ",";
        }
    }
}

impl HostList {
    /// Appends a host, unless it is there already or the list is full.
    pub fn push(&mut self, slot: Slot) {
        if self.as_slice().contains(&slot) {
            return;
        }
        if let Some(free) = self.slots.get_mut(self.len) {
            *free = slot;
            self.len += 1;
        }
    }

    /// The hosts, best first.
    pub fn as_slice(&self) -> &[Slot] {
        self.slots.get(..self.len).unwrap_or(&[])
    }

    /// The hosts, best first.
    pub fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        self.as_slice().iter().copied()
    }

    /// The host that the request goes to.
    pub fn first(&self) -> Option<Slot> {
        self.as_slice().first().copied()
    }

    /// Number of hosts.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was decided.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Reason {
    /// Every reason, for metrics.
    pub const ALL: [Self; 15] = [
        Self::Home,
        Self::OverflowWaiting,
        Self::OverflowKvUsage,
        Self::OverflowInFlight,
        Self::OverflowFailing,
        Self::OverflowCost,
        Self::WarmHost,
        Self::AllSaturated,
        Self::LeastLoaded,
        Self::LeastOutstanding,
        Self::RoundRobin,
        Self::TableStale,
        Self::NoTable,
        Self::NoHosts,
        Self::NoEligibleHost,
    ];

    /// The name used in headers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Home => "home",
            Self::OverflowWaiting => "overflow_waiting",
            Self::OverflowKvUsage => "overflow_kv_usage",
            Self::OverflowInFlight => "overflow_in_flight",
            Self::OverflowFailing => "overflow_failing",
            Self::OverflowCost => "overflow_cost",
            Self::WarmHost => "warm_host",
            Self::AllSaturated => "all_saturated",
            Self::LeastLoaded => "least_loaded",
            Self::LeastOutstanding => "least_outstanding",
            Self::RoundRobin => "round_robin",
            Self::TableStale => "table_stale",
            Self::NoTable => "no_table",
            Self::NoHosts => "no_hosts",
            Self::NoEligibleHost => "no_eligible_host",
        }
    }

    /// Whether the request left its home.
    pub const fn is_overflow(self) -> bool {
        match self {
            Self::OverflowWaiting
            | Self::OverflowKvUsage
            | Self::OverflowInFlight
            | Self::OverflowFailing
            | Self::OverflowCost => true,
            Self::Home
            | Self::WarmHost
            | Self::AllSaturated
            | Self::LeastLoaded
            | Self::LeastOutstanding
            | Self::RoundRobin
            | Self::TableStale
            | Self::NoTable
            | Self::NoHosts
            | Self::NoEligibleHost => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::FleetSettings;
    use crate::host_table::{Host, HostTable};

    #[test]
    fn a_list_holds_three_distinct_hosts() {
        let mut list = HostList::default();
        for slot in [4, 4, 2, 4, 9, 7] {
            list.push(Slot(slot));
        }
        assert_eq!(list.as_slice(), [Slot(4), Slot(2), Slot(9)]);
        assert_eq!(list.first(), Some(Slot(4)));
    }

    #[test]
    fn reasons_have_distinct_names_and_are_all_listed() {
        let mut names: Vec<_> = Reason::ALL.iter().map(|r| r.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
        assert_eq!(Reason::ALL.last(), Some(&Reason::NoEligibleHost));
        assert_eq!(Reason::ALL.len(), Reason::NoEligibleHost as usize + 1);
    }

    #[test]
    fn header_lists_addresses_best_first() {
        let host = |slot, address: &str| Host {
            slot: Slot(slot),
            address: address.into(),
            ..Host::default()
        };
        let mut fleet = Fleet::new(FleetSettings::default());
        let hosts = vec![host(0, "10.0.0.1:80"), host(5, "[2001:db8::1]:80")];
        fleet.update(
            &HostTable {
                published_ms: 1,
                hosts,
            },
            1,
        );
        let mut hosts = HostList::default();
        hosts.push(Slot(5));
        hosts.push(Slot(0));
        let decision = Decision {
            strategy: StrategyName::Hybrid,
            reason: Reason::Home,
            hosts,
            home: None,
            matched_bytes: 0,
            prompt_bytes: 0,
            uncached_tokens: 0,
            prefill_tokens: 0,
            key: None,
        };
        let mut header = String::new();
        decision.write_header(&fleet, &mut header);
        assert_eq!(header, "[2001:db8::1]:80,10.0.0.1:80");
    }
}
