//! The properties that the fuzz targets check, on inputs of a seeded generator.
//!
//! A fuzzer finds more, but only when somebody runs it; this finds a broken property with every test run. Counts of what
//! was reached are held against minima, so that a generator that reaches nothing any more fails, too. `WARMROUTE_SEED`
//! replays one seed, `WARMROUTE_SEEDS` makes them so many.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::string_slice,
    reason = "helpers of tests may fail as tests do"
)]

#[path = "properties/admin.rs"]
mod admin;
#[path = "properties/body.rs"]
mod body;
#[path = "properties/choices.rs"]
mod choices;
#[path = "properties/config.rs"]
mod config;
#[path = "properties/exchange.rs"]
mod exchange;
#[path = "properties/host_table.rs"]
mod host_table;
#[path = "properties/journals.rs"]
mod journals;
#[path = "properties/json.rs"]
mod json;
#[path = "properties/metrics.rs"]
mod metrics;
#[path = "properties/usage.rs"]
mod usage;

use choices::Seen;
use warmroute::strategy::Rng;

/// Runs a check on so many seeds, or on the one in `WARMROUTE_SEED`; then every outcome must have been reached so often.
fn on_seeds(count: u64, check: fn(&[u8], &mut Seen), minima: &[(&str, u64)]) {
    let replay = std::env::var("WARMROUTE_SEED").ok();
    let replay: Option<u64> = replay.map(|seed| seed.parse().expect("WARMROUTE_SEED is a number"));
    let longer = std::env::var("WARMROUTE_SEEDS").ok();
    let count = longer.map_or(count, |count| count.parse().expect("WARMROUTE_SEEDS is a number"));
    let mut seen = Seen::default();
    for seed in replay.map_or(0..count, |seed| seed..seed + 1) {
        let data = input(seed);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&data, &mut seen)));
        if let Err(panic) = caught {
            eprintln!(
                "failed with WARMROUTE_SEED={seed}, input {}",
                choices::shown(&data)
            );
            std::panic::resume_unwind(panic);
        }
    }
    if replay.is_none() {
        eprintln!("seeds 0 to {count}: {seen:?}");
        for (outcome, least) in minima {
            let reached = seen.count(outcome);
            assert!(reached >= *least, "{outcome}: {reached} of {least} in {seen:?}");
        }
    }
}

/// Bytes of a seed: some hundreds, at times thousands.
fn input(seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let length = [64, 400, 400, 4000][rng.below(4)];
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    bytes
}

#[test]
fn bodies_keep_their_properties() {
    on_seeds(2000, body::check, &[]);
}

#[test]
fn metrics_keep_their_properties() {
    on_seeds(2000, metrics::check, &[]);
}

#[test]
fn admin_answers_keep_their_properties() {
    on_seeds(2000, admin::check, &[]);
}

#[test]
fn host_tables_keep_their_properties() {
    on_seeds(2000, host_table::check, &[]);
}

#[test]
fn journals_keep_their_properties() {
    on_seeds(1000, journals::check, &[]);
}

#[test]
fn configurations_keep_their_properties() {
    on_seeds(2000, config::check, &[]);
}

#[test]
fn answers_keep_their_properties() {
    on_seeds(2000, usage::check, &[]);
}

#[test]
fn exchanges_keep_their_properties() {
    on_seeds(1000, exchange::check, &[]);
}
