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
    on_seeds(
        3000,
        body::check,
        &[
            ("prompt with keys", 350),
            ("prompt of many chunks", 50),
            ("prompt with an adapter", 15),
            ("rewritten prompt", 700),
            ("continued prompt", 80),
            ("cut prompt with points", 700),
            ("cut namespace", 110),
            ("two tenants", 350),
            ("session", 350),
            ("duplicate_key", 10),
            ("wrong_type", 90),
            ("invalid_json", 700),
            ("openai_chat", 40),
            ("openai_completions", 60),
            ("openai_responses", 35),
            ("anthropic_messages", 15),
            ("generate", 60),
            ("vllm_tokens_in", 15),
            ("ollama_chat", 15),
            ("ollama_generate", 15),
            ("gemini", 25),
            ("cohere_v1_chat", 15),
            ("cohere_v2_chat", 10),
        ],
    );
}

#[test]
fn real_bodies_with_some_bytes_changed_keep_their_properties() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bodies");
    let files = std::fs::read_dir(folder)
        .expect("the bodies")
        .map(|entry| entry.expect("a file").path());
    let mut files: Vec<_> = files.filter(|path| !path.ends_with("index.json")).collect();
    files.sort();
    let mut seen = Seen::default();
    for (at, file) in (0u64..).zip(&files) {
        let body = std::fs::read(file).expect("a body");
        for path in 0..body::PATHS.len() {
            let seed = at * 100 + path as u64;
            let mut rng = Rng::new(seed);
            let mut changed = body.clone();
            // As it is, or with a byte or two of it changed.
            for _ in 0..rng.below(3) {
                if !changed.is_empty() {
                    let at = rng.below(changed.len());
                    changed[at] = b"\"\\{}[],:0nx\xff"[rng.below(12)];
                }
            }
            let path = u8::try_from(path).expect("few paths");
            let data = [
                &[1, path, 0, 0, 0, 0, 0, 0][..],
                &rng.next_u64().to_le_bytes()[..4],
                &changed,
            ]
            .concat();
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                body::check(&data, &mut seen);
            }));
            if let Err(panic) = caught {
                eprintln!("failed with {} under path {path}, seed {seed}", file.display());
                std::panic::resume_unwind(panic);
            }
        }
    }
    eprintln!("{} bodies: {seen:?}", files.len());
    for (outcome, least) in [
        ("prompt with keys", 150),
        ("cut prompt with points", 450),
        ("rewritten prompt", 250),
        ("invalid_json", 500),
    ] {
        let reached = seen.count(outcome);
        assert!(reached >= least, "{outcome}: {reached} of {least} in {seen:?}");
    }
}

#[test]
fn metrics_keep_their_properties() {
    on_seeds(
        3000,
        metrics::check,
        &[
            ("load", 600),
            ("no load", 600),
            ("samples in another order", 600),
            ("cache size", 120),
            ("adapters", 5),
            ("odd value", 1000),
            ("vllm", 100),
            ("sglang", 100),
            ("tensorrt_llm", 100),
            ("tgi", 100),
            ("llama_cpp", 100),
            ("custom", 60),
        ],
    );
}

#[test]
fn admin_answers_keep_their_properties() {
    on_seeds(
        3000,
        admin::check,
        &[
            ("sound answer", 700),
            ("many endpoints", 150),
            ("answer read", 120),
            ("answer refused", 250),
            ("discovery call", 3500),
            ("scrape call", 14_000),
            ("scrape counted", 150),
            ("restart seen", 50),
            ("table adopted", 90),
            ("table published", 10_000),
        ],
    );
}

#[test]
fn host_tables_keep_their_properties() {
    on_seeds(
        3000,
        host_table::check,
        &[
            ("table written", 300),
            ("hosts left out", 110),
            ("table read", 350),
            ("table refused", 750),
            ("other version", 30),
            ("damaged blob", 1200),
        ],
    );
}

#[test]
fn journals_keep_their_properties() {
    on_seeds(
        3000,
        journals::check,
        &[
            ("journal written", 180),
            ("journal read", 90),
            ("run read", 15),
            ("merged journals read", 12),
            ("merged journals", 150),
            ("merged journals applied", 200),
            ("placements replayed", 170),
            ("table applied", 220),
            ("lease taken", 160),
            ("lease left", 20),
            ("other version", 20),
            ("damaged blob", 3000),
        ],
    );
}

#[test]
fn configurations_keep_their_properties() {
    on_seeds(
        3000,
        config::check,
        &[
            ("config accepted", 250),
            ("config refused at a key", 800),
            ("static hosts", 90),
            ("thresholds", 10),
            ("own metric names", 7),
        ],
    );
}

#[test]
fn answers_keep_their_properties() {
    on_seeds(
        3000,
        usage::check,
        &[
            ("usage", 400),
            ("cached tokens", 300),
            ("usage as stated", 300),
            ("answer beyond the tail", 80),
            ("mean moved", 20_000),
        ],
    );
}

#[test]
fn exchanges_keep_their_properties() {
    on_seeds(
        3000,
        exchange::check,
        &[
            ("decided by the body", 2500),
            ("decided by a key", 1200),
            ("decided by a cut body", 1000),
            ("decided at the headers", 500),
            ("response headers", 4500),
            ("request ended", 2200),
            ("usage told", 25),
            ("pool replaced", 200),
            ("pieces with a key", 300),
            ("pieces beyond the limit", 200),
        ],
    );
}
