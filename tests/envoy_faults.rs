//! The short form of the fault matrix (`just faults` plays all of it): nothing fails with the filter that Envoy alone would
//! have served, and things are well again in time.

#![cfg(not(target_family = "wasm"))]
#![expect(clippy::panic, reason = "helpers of tests may fail as tests do")]

use warmroute_fleet::envoy::{self, Requirement};
use warmroute_fleet::faults::{Scenario, scenarios};

/// Plays the short form on an Envoy, some scenarios at a time since all of them mostly wait, and tells what did not hold.
async fn broken_rows(requirement: Requirement) -> Vec<String> {
    let envoy = envoy::find(requirement).unwrap_or_else(|error| panic!("{error}"));
    let short: Vec<Scenario> = scenarios()
        .into_iter()
        .filter(|scenario| scenario.is_short)
        .collect();
    assert!(short.len() > AT_A_TIME, "{} scenarios", short.len());
    let lane = async |lane: usize| {
        let mut broken = Vec::new();
        for scenario in short.iter().skip(lane).step_by(AT_A_TIME) {
            for &policy in scenario.policies {
                let name = scenario.name();
                match scenario.row(&envoy, policy, true).await {
                    Ok(row) => broken.extend(row.broken.iter().map(|what| format!("{name}: {what}"))),
                    Err(error) => broken.push(format!("{name} could not be run: {error}")),
                }
            }
        }
        broken
    };
    let (first, second, third) = tokio::join!(lane(0), lane(1), lane(2));
    [first, second, third].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_fails_that_plain_envoy_would_have_served() {
    for requirement in [Requirement::Oldest, Requirement::Newest] {
        assert_eq!(broken_rows(requirement).await, [""; 0], "on {requirement:?}");
    }
}

/// Scenarios that are played side by side.
const AT_A_TIME: usize = 3;
