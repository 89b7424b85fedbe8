//! The short form of the fault matrix (`just faults` plays all of it): nothing fails with the filter that Envoy alone would
//! have served, and things are well again in time.

#![cfg(not(target_family = "wasm"))]
#![expect(clippy::panic, reason = "helpers of tests may fail as tests do")]

use warmroute_fleet::envoy::{self, Requirement};
use warmroute_fleet::faults::{Scenario, scenarios};

/// Runs these parts of the short form on an Envoy and tells what did not hold.
async fn broken_rows(requirement: Requirement) -> Vec<String> {
    let envoy = envoy::find(requirement).unwrap_or_else(|error| panic!("{error}"));
    let mut broken = Vec::new();
    let short: Vec<Scenario> = scenarios()
        .into_iter()
        .filter(|scenario| scenario.is_short)
        .collect();
    assert!(!short.is_empty());
    for scenario in short {
        for &policy in scenario.policies {
            match scenario.row(&envoy, policy, true).await {
                Ok(row) => broken.extend(
                    row.broken
                        .iter()
                        .map(|what| format!("{}: {what}", scenario.name())),
                ),
                Err(error) => broken.push(format!("{} could not be run: {error}", scenario.name())),
            }
        }
    }
    broken
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_fails_that_plain_envoy_would_have_served() {
    for requirement in [Requirement::Oldest, Requirement::Newest] {
        assert_eq!(broken_rows(requirement).await, [""; 0], "on {requirement:?}");
    }
}
