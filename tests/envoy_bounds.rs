//! Memory and metric names of real Envoys under many sizes and many pods: the code of `just soak --sizes` and
//! `just soak --pods`, with fewer of both.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "helpers of tests may fail and report as tests do"
)]

use warmroute_fleet::envoy::{Envoy, Requirement, find};
use warmroute_fleet::soak::bounds::{self, Pods, Sizes};
use warmroute_fleet::soak::report::Report;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_up_to_a_megabyte_leave_memory_flat_on_the_oldest_envoy() {
    memory_is_flat(Requirement::Oldest).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_up_to_a_megabyte_leave_memory_flat_on_the_newest_envoy() {
    memory_is_flat(Requirement::Newest).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_pods_add_no_metric_name_and_no_memory() {
    let plan = Pods {
        envoy: envoy(Requirement::Newest),
        addresses: 1200,
        at_a_time: 100,
    };
    assert_holds(&bounds::pods(&plan).await.unwrap());
}

async fn memory_is_flat(requirement: Requirement) {
    let plan = Sizes {
        envoy: envoy(requirement),
        requests: 4000,
        seed: 1,
    };
    assert_holds(&bounds::sizes(&plan).await.unwrap());
}

fn envoy(requirement: Requirement) -> Envoy {
    find(requirement).unwrap_or_else(|error| panic!("{error}"))
}

fn assert_holds(report: &Report) {
    println!("{report}");
    assert!(report.holds(), "{report}");
}
