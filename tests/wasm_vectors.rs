//! The golden vectors of the hash scheme on wasm32, in node, through `wasm-bindgen-test`.

#![cfg(all(target_arch = "wasm32", target_os = "unknown"))]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

use wasm_bindgen_test::wasm_bindgen_test;

#[path = "vectors/check.rs"]
mod check;

#[wasm_bindgen_test]
fn murmur_agrees_with_an_independent_implementation() {
    check::murmur_vectors();
}

#[wasm_bindgen_test]
fn namespaces_chains_and_keys_agree_with_an_independent_implementation() {
    check::prompt_vectors();
}
