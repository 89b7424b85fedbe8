//! A VM that traps in each of its callbacks, under each failure policy.

use super::Scenario;

pub(super) fn scenarios() -> Vec<Scenario> {
    Vec::new()
}
