//! Faults of the set of endpoints: they leave and return, drain, are all down, restart in turn, are very many.

use super::Scenario;

pub(super) fn scenarios() -> Vec<Scenario> {
    Vec::new()
}
