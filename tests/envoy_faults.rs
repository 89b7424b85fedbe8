//! The short form of the fault matrix (`just faults` plays all of it): nothing fails with the filter that Envoy alone would
//! have served, and things are well again in time.

#![cfg(not(target_family = "wasm"))]

use warmroute_fleet::envoy::{self, Requirement};
use warmroute_fleet::faults::play::{Plan, play};
use warmroute_fleet::faults::{Scenario, scenarios};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_fails_that_plain_envoy_would_have_served() {
    let short: Vec<Scenario> = scenarios()
        .into_iter()
        .filter(|scenario| scenario.is_short)
        .collect();
    let scenario_count = short.len();
    let plan = Plan {
        envoys: [Requirement::Oldest, Requirement::Newest]
            .map(|requirement| envoy::find(requirement).unwrap_or_else(|error| panic!("{error}")))
            .to_vec(),
        is_short: true,
        at_a_time: 4,
    };
    let played = play(short, &plan, |_| {}).await;
    assert!(scenario_count > 10 && played.len() >= 2 * scenario_count);
    let broken: Vec<String> = played
        .into_iter()
        .filter_map(|played| match played.row {
            Ok(row) if row.broken.is_empty() => None,
            Ok(row) => Some(format!("{} on {:?}: {:?}", played.name, row.envoy, row.broken)),
            Err(error) => Some(format!("{} could not be run: {error}", played.name)),
        })
        .collect();
    assert_eq!(broken, [""; 0]);
}
