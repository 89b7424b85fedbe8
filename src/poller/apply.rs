//! Endpoints found → hosts of the table.

use super::Poller;
use crate::discovery::Endpoint;
use crate::host_table::{Host, Load};

impl Poller {
    /// Brings the table's hosts in line with `endpoints`, which are in growing address order, each address once: who is
    /// not among them leaves at once, who stays keeps slot, epoch and sample, who is new gets a slot.
    pub(super) fn apply_endpoints(&mut self, endpoints: &[Endpoint], now_ms: u64) {
        self.hosts_known = true;
        let mut stayed = vec![false; endpoints.len()];
        let mut changed = false;
        let slots = &mut self.slots;
        self.table.hosts.retain_mut(|host| {
            let found = endpoints
                .binary_search_by(|endpoint| endpoint.address.as_str().cmp(&host.address))
                .ok();
            let found = found.and_then(|index| Some((endpoints.get(index)?, stayed.get_mut(index)?)));
            // A damaged adopted table may hold an address twice: the second is nobody's.
            let Some((endpoint, stayed @ false)) = found else {
                slots.free(host.slot, now_ms);
                changed = true;
                return false;
            };
            *stayed = true;
            slots.on_discovered(host.slot, endpoint.health, endpoint.priority);
            let (weight, role) = (endpoint.weight, endpoint.role);
            changed |= (host.weight, host.role) != (weight, role);
            (host.weight, host.role) = (weight, role);
            true
        });
        for (endpoint, _) in endpoints.iter().zip(&stayed).filter(|(_, stayed)| !**stayed) {
            let Some((slot, epoch)) = slots.take(now_ms) else {
                break;
            };
            changed = true;
            slots.on_discovered(slot, endpoint.health, endpoint.priority);
            self.table.hosts.push(Host {
                slot,
                epoch,
                address: endpoint.address.clone(),
                role: endpoint.role,
                health: endpoint.health,
                weight: endpoint.weight,
                sampled_ms: 0,
                load: Load::default(),
            });
        }
        changed |= slots.give_healths(&mut self.table.hosts);
        self.table.hosts.sort_unstable_by_key(|host| host.slot);
        self.membership_changed |= changed;
    }
}
