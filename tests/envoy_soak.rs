//! The soak in short, on the newest Envoy, and some thousand generated requests with the filter and without on each: the
//! code of `just soak` and `just million`, with less time.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "helpers of tests may fail and report as tests do"
)]

use std::time::Duration;

use warmroute_fleet::envoy::{Envoy, Requirement, find};
use warmroute_fleet::soak::report::Report;
use warmroute_fleet::soak::{churn, twins};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_clients_and_configurations_come_and_go_and_every_request_is_counted_once() {
    let plan = churn::Plan::of(envoy(Requirement::Newest), SOAK, seed());
    assert_holds(&churn::run(&plan).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_the_same_with_the_filter_and_without_on_the_oldest_envoy() {
    answers_are_the_same(Requirement::Oldest).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_the_same_with_the_filter_and_without_on_the_newest_envoy() {
    answers_are_the_same(Requirement::Newest).await;
}

async fn answers_are_the_same(requirement: Requirement) {
    let plan = twins::Plan {
        envoy: envoy(requirement),
        requests: REQUESTS,
        seed: seed(),
        senders: 16,
    };
    assert_holds(&twins::run(&plan).await.unwrap());
}

fn envoy(requirement: Requirement) -> Envoy {
    find(requirement).unwrap_or_else(|error| panic!("{error}"))
}

/// The report names it.
fn seed() -> u64 {
    let replayed = std::env::var("WARMROUTE_SEED").ok();
    replayed.and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn assert_holds(report: &Report) {
    println!("{report}");
    assert!(report.holds(), "{report}");
}

const SOAK: Duration = Duration::from_secs(30);
const REQUESTS: u64 = 3000;
