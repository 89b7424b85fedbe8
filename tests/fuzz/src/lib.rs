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

/// A property of one target.
type Check = fn(&[u8], &mut Seen);

/// The targets by name, each with its check and the words that help a fuzzer.
pub(crate) const TARGETS: [(&str, Check, &[&str]); 8] = [
    ("body", body::check, &body::KEYS),
    ("metrics", metrics::check, &metrics::NAMES),
    ("admin", admin::check, &admin::KEYS),
    ("host_table", host_table::check, &[]),
    ("journals", journals::check, &[]),
    ("config", config::check, &config::KEYS),
    ("usage", usage::check, &usage::KEYS),
    ("exchange", exchange::check, &[]),
];

/// Checks the properties of a target on one input.
///
/// # Panics
/// When one is broken.
pub fn check(target: &str, data: &[u8]) {
    for (name, check, _) in TARGETS {
        if name == target {
            check(data, &mut Seen::default());
        }
    }
}
