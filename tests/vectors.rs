//! The golden vectors of the hash scheme, natively. `tests/wasm_vectors.rs` runs the same on wasm32.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

#[path = "vectors/check.rs"]
mod check;

#[test]
fn murmur_agrees_with_an_independent_implementation() {
    check::murmur_vectors();
}

#[test]
fn namespaces_chains_and_keys_agree_with_an_independent_implementation() {
    check::prompt_vectors();
}
