//! Faults of Envoy's admin interface, from which endpoints are read.

use super::Scenario;

pub(super) fn scenarios() -> Vec<Scenario> {
    Vec::new()
}
