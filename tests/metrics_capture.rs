//! Real and committed `/metrics` bodies are read as what they say.
//!
//! `WARMROUTE_METRICS` may name a folder with captures of real engines (`vllm-0.32.txt`); the committed fixture, which
//! has the same names and invented values, is read in any case.

use std::path::Path;

use warmroute::chunk::name_hash;
use warmroute::host_table::Load;
use warmroute::load::{Preset, parse};

#[test]
fn the_committed_vllm_fixture_is_read_in_full() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/metrics/vllm.txt");
    let body = std::fs::read(&path).unwrap();
    let mut adapters: Vec<u64> = ["sql", "legal", "chat"]
        .iter()
        .map(|name| name_hash(name.as_bytes()))
        .collect();
    adapters.sort_unstable();
    let expected = Load {
        waiting: Some(7),
        running: Some(24),
        kv_usage_permille: Some(625),
        kv_capacity_tokens: Some(640_000),
        prefix_queries: Some(10_000),
        prefix_hits: Some(4_000),
        started_ms: Some(1_700_000_001_250),
        adapters,
    };
    assert_eq!(parse(&Preset::Vllm, &body), Ok(expected));
}

#[test]
fn a_real_vllm_capture_is_read_in_full() {
    let Some(folder) = std::env::var_os("WARMROUTE_METRICS") else {
        println!("WARMROUTE_METRICS is not set: only the committed fixture is read");
        return;
    };
    let body = std::fs::read(Path::new(&folder).join("vllm-0.32.txt")).unwrap();
    let expected = Load {
        waiting: Some(0),
        running: Some(0),
        kv_usage_permille: Some(0),
        kv_capacity_tokens: Some(128 * 16_384),
        prefix_queries: Some(123_405),
        prefix_hits: Some(79_360),
        started_ms: Some(1_795_986_143_340),
        adapters: Vec::new(),
    };
    assert_eq!(parse(&Preset::Vllm, &body), Ok(expected));
    assert!(
        parse(&Preset::Sglang, &body).is_err(),
        "another engine's names are not found in it"
    );
}
