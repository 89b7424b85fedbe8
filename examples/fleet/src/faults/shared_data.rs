//! Faults of what workers and companion tell each other through Envoy's shared data.

use super::Scenario;

pub(super) fn scenarios() -> Vec<Scenario> {
    Vec::new()
}
