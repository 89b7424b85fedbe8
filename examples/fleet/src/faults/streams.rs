//! Requests and answers that are not what a filter hopes for: aborted, stalled, upgraded, cut into frames.

use super::Scenario;

pub(super) fn scenarios() -> Vec<Scenario> {
    Vec::new()
}
