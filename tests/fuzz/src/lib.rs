//! What the fuzz targets check: the properties of `tests/properties/`, which the normal test run checks as well.
//!
//! In: a fuzzer's bytes. Out: nothing, or a panic that says which property of which generated input is broken.

#[path = "../../properties/admin.rs"]
mod admin;
#[path = "../../properties/body.rs"]
mod body;
#[path = "../../properties/choices.rs"]
mod choices;
#[path = "../../properties/config.rs"]
mod config;
#[path = "../../properties/exchange.rs"]
mod exchange;
#[path = "../../properties/host_table.rs"]
mod host_table;
#[path = "../../properties/journals.rs"]
mod journals;
#[path = "../../properties/json.rs"]
mod json;
#[path = "../../properties/metrics.rs"]
mod metrics;
#[path = "../../properties/usage.rs"]
mod usage;

use choices::Seen;

/// Checks the properties of a target on one input.
///
/// # Panics
/// When one is broken, or when there is no such target.
pub fn check(target: &str, data: &[u8]) {
    let check = match target {
        "body" => body::check,
        "metrics" => metrics::check,
        "admin" => admin::check,
        "host_table" => host_table::check,
        "journals" => journals::check,
        "config" => config::check,
        "usage" => usage::check,
        "exchange" => exchange::check,
        _ => panic!("no target is called {target}"),
    };
    check(data, &mut Seen::default());
}
