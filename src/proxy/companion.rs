//! The companion of one pool in this VM: contends for the lease and, while it holds it, performs the poller's calls and
//! publishes its table. The bootstrap service and the filter's root contexts run the same code.

use core::time::Duration;

use super::host::{self, Buffer, CAS_CREATE, Map};
use super::shared::{self, PoolKeys};
use super::stats::{Counter, PoolGauges};
use super::vm::{new_id, with_vm};
use crate::config::PoolConfig;
use crate::host_table::HostTable;
use crate::lease::{Contender, LEASE_HEARTBEAT_MS, Lease, LeaseStep, Priority, step};
use crate::poller::{Answer, Call, CallToken, Counters, Poller, PollerConfig};

/// One pool's companion.
pub(super) struct Companion {
    pool: String,
    keys: PoolKeys,
    config: PollerConfig,
    contender: Contender,
    is_service: bool,
    /// A filter that stands by for the service leaves it the first lease until then.
    patient_until_ms: Option<u64>,
    /// The lease and its next renewal, while this one holds it.
    held: Option<Lease>,
    renew_at_ms: u64,
    poller: Option<Poller>,
    calls: Vec<(u32, CallToken)>,
    counted: Counters,
    table_sequence: u64,
    gauges: PoolGauges,
    tallies_shown_ms: u64,
}

impl Companion {
    pub(super) fn new(pool: &PoolConfig, is_service: bool, is_patient: bool, now_ms: u64) -> Self {
        Self {
            pool: pool.name.clone(),
            keys: PoolKeys::new(&pool.name),
            config: PollerConfig {
                cluster: pool.name.clone(),
                discovery: pool.discovery.clone(),
                metrics: pool.metrics.clone(),
                steering_header: pool.steering_header.clone(),
            },
            contender: Contender {
                id: new_id(),
                build: BUILD,
                generation: now_ms,
                priority: if is_service {
                    Priority::Service
                } else {
                    Priority::Idle
                },
            },
            is_service,
            patient_until_ms: is_patient.then_some(now_ms.saturating_add(PATIENCE_MS)),
            held: None,
            renew_at_ms: 0,
            poller: None,
            calls: Vec::new(),
            counted: Counters::default(),
            table_sequence: 0,
            gauges: PoolGauges::new(&pool.name),
            tallies_shown_ms: 0,
        }
    }

    /// Name of the pool.
    pub(super) fn pool(&self) -> &str {
        &self.pool
    }

    /// Contends, and polls while the lease is held.
    pub(super) fn tick(&mut self, now_ms: u64) {
        if now_ms >= self.renew_at_ms {
            self.renew_at_ms = now_ms.saturating_add(LEASE_HEARTBEAT_MS);
            self.contend(now_ms);
        }
        self.poll(now_ms);
    }

    /// An answer came for a call of this VM; false when it is not this companion's.
    pub(super) fn on_call_response(
        &mut self,
        token: u32,
        headers: usize,
        body_bytes: usize,
        now_ms: u64,
    ) -> bool {
        let Some(at) = self.calls.iter().position(|(known, _)| *known == token) else {
            return false;
        };
        let (_, call) = self.calls.swap_remove(at);
        let Some(poller) = &mut self.poller else {
            return true;
        };
        let status = host::header(Map::CallResponse, ":status")
            .and_then(|value| core::str::from_utf8(&value).ok()?.parse::<u16>().ok());
        match status {
            // A call that timed out or was reset has no headers.
            Some(status) if headers > 0 => {
                let served_by = host::header(Map::CallResponse, "x-served-by").unwrap_or_default();
                // A VM's memory never shrinks.
                let wanted_bytes = body_bytes.min(poller.wanted_bytes(call));
                let body = host::buffer(Buffer::CallResponseBody, 0, wanted_bytes).unwrap_or_default();
                let answer = Answer {
                    status,
                    served_by: core::str::from_utf8(&served_by)
                        .ok()
                        .filter(|address| !address.is_empty()),
                    body: &body,
                };
                poller.on_answer(call, now_ms, answer);
            }
            _ => poller.on_failure(call, now_ms),
        }
        self.poll(now_ms);
        true
    }

    /// Gives the lease up, so that another contender need not wait for it to age.
    pub(super) fn release(&mut self, now_ms: u64) {
        if let Some(lease) = self.held.take() {
            let current = host::shared_data(&self.keys.lease);
            if let Some((bytes, cas)) = current
                && Lease::decode(&bytes).is_ok_and(|current| current.holder == self.contender.id)
            {
                let _ = host::set_shared_data(&self.keys.lease, &lease.released().encode(), cas);
            }
        }
        self.poller = None;
        self.calls.clear();
        self.renew_at_ms = now_ms;
    }

    fn contend(&mut self, now_ms: u64) {
        if !self.is_service {
            // Only worker threads serve streams, so this keeps the companion on the main thread where it can be.
            let serves = with_vm(|vm| vm.serves_streams()).unwrap_or(false);
            self.contender.priority = if serves { Priority::Serving } else { Priority::Idle };
        }
        let stored = host::shared_data(&self.keys.lease);
        let current = stored.as_ref().and_then(|(bytes, _)| Lease::decode(bytes).ok());
        // While there never was a lease, the service may still be starting.
        if stored.is_none() && self.patient_until_ms.is_some_and(|until_ms| now_ms < until_ms) {
            return self.follow();
        }
        let LeaseStep::Hold(lease) = step(current.as_ref(), &self.contender, now_ms) else {
            return self.follow();
        };
        let cas = stored.map_or(CAS_CREATE, |(_, cas)| cas);
        if host::set_shared_data(&self.keys.lease, &lease.encode(), cas).is_err() {
            return self.follow();
        }
        self.held = Some(lease);
        if self.poller.is_none() {
            self.take_over();
        }
    }

    fn follow(&mut self) {
        self.held = None;
        self.poller = None;
        self.calls.clear();
    }

    fn take_over(&mut self) {
        log::info!(
            "pool {}: this {} polls now",
            self.pool,
            if self.is_service { "service" } else { "filter" }
        );
        let mut poller = Poller::new(self.config.clone());
        // Hosts keep their slots and epochs, or every worker would forget its tallies.
        let known = host::shared_data(&self.keys.table).and_then(|(blob, _)| HostTable::decode(&blob).ok());
        if let Some(table) = known {
            poller.adopt(&table);
        }
        self.table_sequence = shared::table_sequence(&self.keys).unwrap_or(0);
        self.poller = Some(poller);
        self.counted = Counters::default();
        with_vm(|vm| vm.stats.add(Counter::Takeovers, 1));
    }

    /// Makes the calls that are due and publishes what has changed.
    fn poll(&mut self, now_ms: u64) {
        let Some(poller) = &mut self.poller else { return };
        for call in poller.tick(now_ms) {
            match dispatch(&call) {
                Some(token) => self.calls.push((token, call.token)),
                None => poller.on_failure(call.token, now_ms),
            }
        }
        self.publish(now_ms);
        if now_ms.abs_diff(self.tallies_shown_ms) >= SHOW_TALLIES_MS {
            self.tallies_shown_ms = now_ms;
            self.gauges.show_tallies(&shared::open_work(&self.keys, now_ms));
        }
    }

    fn publish(&mut self, now_ms: u64) {
        let Some(poller) = &mut self.poller else { return };
        if let Some(table) = poller.take_publishable(now_ms) {
            self.table_sequence = self.table_sequence.wrapping_add(1);
            shared::publish_table(&self.keys, &table.encode(), self.table_sequence);
            self.gauges.show(&table);
        }
        let new = poller.counters();
        let old = core::mem::replace(&mut self.counted, new);
        with_vm(|vm| {
            for (counter, new, old) in [
                (Counter::ScrapesOk, new.scrapes_ok, old.scrapes_ok),
                (Counter::ScrapesFailed, new.scrape_failures, old.scrape_failures),
                (
                    Counter::ScrapesMisrouted,
                    new.served_by_mismatch,
                    old.served_by_mismatch,
                ),
                (Counter::DiscoveriesOk, new.discoveries_ok, old.discoveries_ok),
                (
                    Counter::DiscoveriesFailed,
                    new.discovery_failures,
                    old.discovery_failures,
                ),
                (Counter::AnswersUnreadable, new.parse_failures, old.parse_failures),
                (Counter::EngineRestarts, new.restarts, old.restarts),
            ] {
                vm.stats.add(counter, new.saturating_sub(old));
            }
        });
    }
}

fn dispatch(call: &Call) -> Option<u32> {
    let mut headers: Vec<(&str, &str)> = Vec::with_capacity(call.headers.len().saturating_add(4));
    headers.push((":method", call.method));
    headers.push((":path", &call.path));
    headers.push((":authority", &call.authority));
    headers.extend(
        call.headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str())),
    );
    host::dispatch(
        &call.cluster,
        headers,
        Duration::from_millis(call.timeout_ms.into()),
    )
    .ok()
}

/// Number of this build for the lease: a newer one takes over from an older one.
const BUILD: u32 = {
    const fn number(text: &str) -> u32 {
        let mut bytes = text.as_bytes();
        let mut value = 0;
        while let [digit, rest @ ..] = bytes {
            value = value * 10 + (*digit - b'0') as u32;
            bytes = rest;
        }
        value
    }
    (number(env!("CARGO_PKG_VERSION_MAJOR")) << 20)
        | (number(env!("CARGO_PKG_VERSION_MINOR")) << 10)
        | number(env!("CARGO_PKG_VERSION_PATCH"))
};
/// Reading the journals of all workers takes up to a millisecond where there are 64.
const SHOW_TALLIES_MS: u64 = 500;
/// A filter leaves the service this long to come up before it polls itself.
const PATIENCE_MS: u64 = 3000;
