//! Faults of Envoy around the filter: configs pushed under load, listeners that come and go, clocks that jump.

use super::Scenario;

pub(super) fn scenarios() -> Vec<Scenario> {
    Vec::new()
}
