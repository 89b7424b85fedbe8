//! One host of the table, with what this worker adds to it.
//!
//! In: the host as the companion publishes it, update by update. Out: the member that the fleet keeps, its tallies
//! untouched. The companion's numbers are believed as they are; nothing here can fail or grow beyond the table.

use super::rendezvous;
use super::tally::{OwnWork, Penalty, PrefillRate};
use crate::host_table::{Host, Role, Slot};

#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) slot: Slot,
    pub(super) epoch: u32,
    pub(super) address: String,
    pub(super) address_hash: u64,
    pub(super) weight: u32,
    pub(super) eligible: bool,
    /// Index in `Fleet::lanes`; meaningful when `eligible`.
    pub(super) lane: usize,
    pub(super) own: OwnWork,
    pub(super) other_requests: u32,
    pub(super) other_tokens: u64,
    /// Since when it is silent for far too long towards other workers that are to be believed, ms; 0 = towards none.
    pub(super) others_silence_ms: u64,
    /// The same for one that is to be believed once another says so, too.
    pub(super) doubted_silence_ms: u64,
    pub(super) rate: PrefillRate,
    pub(super) penalty: Penalty,
    pub(super) polled: Polled,
}

/// What the table says of a host's engine.
#[derive(Debug, Clone, Default)]
pub(super) struct Polled {
    pub(super) sampled_ms: u64,
    pub(super) waiting: Option<u32>,
    pub(super) running: Option<u32>,
    pub(super) kv_usage_permille: Option<u16>,
    pub(super) kv_capacity_tokens: Option<u64>,
    /// Sorted.
    pub(super) adapters: Vec<u64>,
    /// Requests of this Envoy in flight there when the sample arrived.
    pub(super) in_flight_at_sample: u32,
    /// Requests at the engine beyond those; the lower of the last two samples, since one alone also sees requests
    /// that ended on the way.
    pub(super) foreign_requests: u32,
    pub(super) foreign_last: u32,
}

impl Member {
    pub(super) fn new(host: &Host) -> Self {
        let address = host.address.clone();
        let address_hash = rendezvous::address_hash(&address);
        Self {
            slot: host.slot,
            epoch: host.epoch,
            address,
            address_hash,
            ..Self::vacant()
        }
    }

    pub(super) fn vacant() -> Self {
        Self {
            slot: Slot(u16::MAX),
            epoch: 0,
            address: String::new(),
            address_hash: 0,
            weight: 1,
            eligible: false,
            lane: 0,
            own: OwnWork::default(),
            other_requests: 0,
            other_tokens: 0,
            others_silence_ms: 0,
            doubted_silence_ms: 0,
            rate: PrefillRate::default(),
            penalty: Penalty::default(),
            polled: Polled::default(),
        }
    }

    pub(super) fn take_over(&mut self, host: &Host) {
        self.weight = host.weight.max(1);
        let takes_traffic = host.health.takes_traffic();
        self.eligible = takes_traffic && matches!(host.role, Role::Both | Role::Prefill);
        let polled = &mut self.polled;
        if host.sampled_ms != polled.sampled_ms {
            polled.sampled_ms = host.sampled_ms;
            polled.in_flight_at_sample = self.own.requests.saturating_add(self.other_requests);
            let at_engine = host
                .load
                .waiting
                .unwrap_or(0)
                .saturating_add(host.load.running.unwrap_or(0));
            let foreign = at_engine.saturating_sub(polled.in_flight_at_sample);
            polled.foreign_requests = foreign.min(polled.foreign_last);
            polled.foreign_last = foreign;
        }
        polled.waiting = host.load.waiting;
        polled.running = host.load.running;
        polled.kv_usage_permille = host.load.kv_usage_permille;
        polled.kv_capacity_tokens = host.load.kv_capacity_tokens;
        polled.adapters.clone_from(&host.load.adapters);
        polled.adapters.sort_unstable();
    }
}
