//! Any text → a configuration within its documented ranges, or an error that names a key.

use std::net::SocketAddr;

use warmroute::config::{Config, Overflow, PoolConfig};
use warmroute::load::Preset;
use warmroute::poller::Discovery;
use warmroute::pool::Pool;
use warmroute::strategy::RecomputeWeight;

use super::choices::{Choices, Seen, shown};
use super::json::{Node, any, shuffle, text};

/// Keys of the configuration.
pub(crate) const KEYS: [&str; 64] = [
    "companion",
    "mode",
    "pools",
    "strategy",
    "overflow",
    "waiting_requests",
    "kv_cache_usage",
    "in_flight",
    "recompute_weight",
    "steering_header",
    "debug_headers",
    "dry_run",
    "max_buffer_bytes",
    "stream_buffer_bytes",
    "late_field_bytes",
    "table_fresh_ms",
    "usage_feedback",
    "prefix",
    "max_bytes",
    "home_bytes",
    "memory_bytes",
    "bytes_per_token",
    "secret",
    "tenant_header",
    "volatile_heads",
    "index",
    "session",
    "headers",
    "fields",
    "discovery",
    "admin_cluster",
    "interval_ms",
    "hosts",
    "address",
    "role",
    "metrics",
    "enabled",
    "preset",
    "names",
    "waiting",
    "running",
    "kv_usage",
    "kv_usage_scale",
    "kv_capacity_tokens",
    "prefix_queries",
    "prefix_hits",
    "started_seconds",
    "cluster",
    "path",
    "timeout_ms",
    "max_in_flight",
    "port",
    "require_served_by",
    "service",
    "embedded",
    "auto",
    "hybrid",
    "cache_aware",
    "vllm",
    "sglang",
    "fallback",
    "replace",
    "session_id",
    "unknown",
];

/// Checks everything on the text that the bytes stand for.
pub(crate) fn check(data: &[u8], seen: &mut Seen) {
    let mut choices = Choices::new(data);
    if choices.byte().is_multiple_of(4) {
        check_text(choices.rest(), seen);
    } else {
        let document = document(&mut choices);
        let text = document.written(&mut choices);
        check_text(text.as_bytes(), seen);
        if let (Ok(one), false) = (Config::parse(text.as_bytes()), document.has_duplicates()) {
            let plain = Config::parse(document.plain().as_bytes()).expect("the same document");
            assert_eq!(
                format!("{one:?}"),
                format!("{plain:?}"),
                "{}",
                shown(text.as_bytes())
            );
        }
    }
}

fn check_text(text: &[u8], seen: &mut Seen) {
    match Config::parse(text) {
        Ok(config) => {
            seen.note("config accepted");
            assert!((1..=64).contains(&config.pools.len()), "{}", shown(text));
            for pool in &config.pools {
                check_pool(pool, text, seen);
                assert!(config.pool(&pool.name).is_some(), "{}", shown(text));
            }
            let _ = Pool::new(config.pools[0].clone(), 1);
        }
        Err(error) => {
            seen.note("config refused");
            assert!(!error.problem.is_empty(), "{}", shown(text));
            assert!(error.to_string().len() < 2048, "{error}: {}", shown(text));
            let document = std::str::from_utf8(text).ok().and_then(Node::parse);
            // Too deep, or a number beyond all floats: the document as a whole is what is wrong.
            let is_readable = serde_json::from_slice::<serde_json::Value>(text).is_ok();
            if let Some(Node::Object(fields)) = document.filter(|_| is_readable) {
                seen.note("config refused at a key");
                let starts = |key: &str| {
                    let key: String = key.chars().take(64).collect();
                    error.path.starts_with(&key)
                };
                let is_named = error.path.starts_with("pools") || fields.iter().any(|(key, _)| starts(key));
                assert!(
                    is_named && (!error.path.is_empty() || is_named_empty(&fields)),
                    "{error:?}: {}",
                    shown(text)
                );
            }
        }
    }
}

/// A key of no characters is a path of none.
fn is_named_empty(fields: &[(String, Node)]) -> bool {
    fields.iter().any(|(key, _)| key.is_empty())
}

/// Every value within the range that the README states, and so the memory of a pool within the sum of its bounds.
fn check_pool(pool: &PoolConfig, text: &[u8], seen: &mut Seen) {
    let told = || format!("{pool:?} of {}", shown(text));
    let is_name = |name: &str| (1..=256).contains(&name.len());
    let is_header = |name: &str| {
        is_name(name)
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
            && *name == name.to_lowercase()
    };
    assert!(is_name(&pool.name), "{}", told());
    assert!(is_header(&pool.steering_header), "{}", told());
    assert!(pool.tenant_header.as_deref().is_none_or(is_header), "{}", told());
    assert!(
        pool.session_headers.len() <= 32 && pool.session_headers.iter().all(|name| is_header(name)),
        "{}",
        told()
    );
    assert!((4096..=16 << 20).contains(&pool.max_buffer_bytes), "{}", told());
    assert!(
        pool.stream_buffer_bytes
            .is_none_or(|bytes| (4096..=1 << 30).contains(&bytes)),
        "{}",
        told()
    );
    assert!(
        (1024..=4 << 20).contains(&pool.prompt.max_prefix_bytes),
        "{}",
        told()
    );
    assert!((256..=65_536).contains(&pool.home_bytes), "{}", told());
    assert!(
        (16_384..=64 << 20).contains(&pool.recent_prefix_bytes),
        "{}",
        told()
    );
    assert!(
        (256 << 10..=256 << 20).contains(&pool.index_memory_bytes),
        "{}",
        told()
    );
    assert!((4096..=16 << 20).contains(&pool.late_field_bytes), "{}", told());
    assert!((1500..=60_000).contains(&pool.table_fresh_ms), "{}", told());
    assert!((1..=16).contains(&pool.bytes_per_token), "{}", told());
    assert!(pool.prompt.secret.len() <= 256, "{}", told());
    let heads = &pool.prompt.volatile_heads;
    assert!(
        heads.len() <= 32 && heads.iter().all(|head| is_name(head)),
        "{}",
        told()
    );
    assert!(pool.prompt.session_fields.len() <= 32, "{}", told());
    if let RecomputeWeight::Fixed { permille } = pool.recompute_weight {
        assert!(permille <= 16_000, "{}", told());
    }
    if let Overflow::Thresholds(thresholds) = &pool.overflow {
        seen.note("thresholds");
        let in_range = |count: Option<u32>| count.is_none_or(|count| (1..=100_000).contains(&count));
        assert!(
            in_range(thresholds.waiting_requests) && in_range(thresholds.in_flight),
            "{}",
            told()
        );
        assert!(
            thresholds.kv_usage_permille.is_none_or(|usage| usage <= 1000),
            "{}",
            told()
        );
    }
    match &pool.discovery {
        Discovery::Admin { cluster, interval_ms } => {
            assert!(
                is_name(cluster) && (500..=60_000).contains(interval_ms),
                "{}",
                told()
            );
        }
        Discovery::Static(hosts) => {
            seen.note("static hosts");
            assert!((1..=1024).contains(&hosts.len()), "{}", told());
            for host in hosts {
                let parsed: Result<SocketAddr, _> = host.address().parse();
                assert!(parsed.is_ok_and(|address| address.port() > 0), "{}", told());
                assert!(host.address().len() <= 64, "{}", told());
            }
        }
    }
    let metrics = &pool.metrics;
    assert!(
        is_name(&metrics.cluster) && is_name(&metrics.path) && metrics.path.starts_with('/'),
        "{}",
        told()
    );
    assert!((100..=60_000).contains(&metrics.interval_ms), "{}", told());
    assert!((50..=60_000).contains(&metrics.timeout_ms), "{}", told());
    assert!(
        (1..=16).contains(&metrics.max_in_flight) && metrics.port != Some(0),
        "{}",
        told()
    );
    assert!(
        !metrics.enabled || metrics.interval_ms <= pool.table_fresh_ms,
        "{}",
        told()
    );
    seen.note_if("own metric names", matches!(metrics.preset, Preset::Custom(_)));
}

/// A document that is mostly right.
fn document(choices: &mut Choices<'_>) -> Node {
    if choices.one_in(32) {
        return any(choices, &KEYS, 3);
    }
    let mut fields = settings(choices, 3);
    if choices.one_in(4) {
        let mode = Node::text(choices.pick(&["service", "embedded", "other"]));
        fields.push(("companion".to_owned(), Node::object([("mode", mode)])));
    }
    if !choices.one_in(12) {
        let count = if choices.one_in(16) { 66 } else { choices.below(4) };
        let pools = (0..count).map(|at| {
            let name = if choices.one_in(12) {
                text(choices)
            } else {
                format!("pool{at}")
            };
            let mut own = settings(choices, 4);
            if !choices.one_in(12) {
                own.retain(|(key, _)| key != "discovery");
                own.push(("discovery".to_owned(), value_of(choices, "discovery")));
            }
            (name, Node::Object(own))
        });
        let pools = pools.collect();
        fields.push(("pools".to_owned(), Node::Object(pools)));
    }
    shuffle(&mut fields, choices);
    Node::Object(fields)
}

/// Some settings of a pool, each key once, mostly.
fn settings(choices: &mut Choices<'_>, below: usize) -> Vec<(String, Node)> {
    const POOL_KEYS: [&str; 18] = [
        "strategy",
        "overflow",
        "recompute_weight",
        "steering_header",
        "debug_headers",
        "dry_run",
        "max_buffer_bytes",
        "stream_buffer_bytes",
        "late_field_bytes",
        "table_fresh_ms",
        "usage_feedback",
        "prefix",
        "index",
        "session",
        "discovery",
        "metrics",
        "metrics",
        "prefix",
    ];
    fields_of(choices, &POOL_KEYS, below)
}

fn fields_of(choices: &mut Choices<'_>, keys: &[&str], below: usize) -> Vec<(String, Node)> {
    let mut fields: Vec<(String, Node)> = Vec::new();
    for _ in 0..choices.below(below) {
        let key = if choices.one_in(64) {
            choices.pick(&KEYS)
        } else {
            choices.pick(keys)
        };
        if fields.iter().all(|(known, _)| known != key) || choices.one_in(200) {
            fields.push((key.to_owned(), value_of(choices, key)));
        }
    }
    fields
}

fn value_of(choices: &mut Choices<'_>, key: &str) -> Node {
    if choices.one_in(64) {
        return any(choices, &KEYS, 2);
    }
    let word = |choices: &mut Choices<'_>, words: &[&str]| Node::text(choices.pick(words));
    match key {
        "strategy" => word(
            choices,
            &[
                "hybrid",
                "cache_aware",
                "round_robin",
                "prefix_hash",
                "least_outstanding",
            ],
        ),
        "overflow" if choices.one_in(2) => word(choices, &["auto"]),
        "overflow" => Node::Object(fields_of(
            choices,
            &["waiting_requests", "kv_cache_usage", "in_flight"],
            4,
        )),
        "recompute_weight" | "kv_cache_usage" => Node::Number(
            choices
                .pick(&["0", "0.5", "1", "0.9999", "-0.0", "1.0001", "16"])
                .to_owned(),
        ),
        "debug_headers" | "dry_run" | "enabled" | "require_served_by" => Node::Bool(choices.one_in(2)),
        "usage_feedback" => word(choices, &["off", "answers", "streams"]),
        "prefix" => Node::Object(fields_of(
            choices,
            &[
                "max_bytes",
                "home_bytes",
                "memory_bytes",
                "bytes_per_token",
                "secret",
                "tenant_header",
                "volatile_heads",
            ],
            4,
        )),
        "index" => Node::Object(fields_of(choices, &["memory_bytes"], 2)),
        "session" => Node::Object(fields_of(choices, &["mode", "headers", "fields"], 4)),
        "mode" => word(choices, &["off", "fallback", "replace", "extend"]),
        "discovery" if choices.one_in(3) => Node::object([(
            "hosts",
            Node::List((0..choices.below(4)).map(|_| host(choices)).collect()),
        )]),
        "discovery" => Node::object([("admin_cluster", Node::text("admin"))]),
        "metrics" => Node::Object(fields_of(
            choices,
            &[
                "enabled",
                "preset",
                "names",
                "cluster",
                "path",
                "interval_ms",
                "timeout_ms",
                "max_in_flight",
                "port",
            ],
            5,
        )),
        "preset" => word(choices, &["vllm", "sglang", "tensorrt_llm", "tgi", "llama_cpp"]),
        "names" => Node::Object(fields_of(
            choices,
            &[
                "waiting",
                "running",
                "kv_usage",
                "kv_usage_scale",
                "prefix_hits",
                "started_seconds",
            ],
            4,
        )),
        "path" => word(choices, &["/metrics", "/m", "/", "metrics"]),
        "steering_header" | "tenant_header" if choices.one_in(12) => {
            word(choices, &["host", "x-request-id", "a b", "\u{e9}"])
        }
        "steering_header" | "tenant_header" => word(choices, &["x-tenant", "X-Tenant", "x_y.z"]),
        "headers" => {
            let name = word(choices, &["x-s", "x-t", "x-u", "x-request-id"]);
            Node::List(vec![name; choices.below(3)])
        }
        "fields" => {
            let name = word(choices, &["user", "session_id", "metadata.user_id", "x"]);
            Node::List(vec![name; choices.below(3)])
        }
        "volatile_heads" => Node::List(
            (0..choices.below(3))
                .map(|_| word(choices, &["head", "\u{e9}"]))
                .collect(),
        ),
        "hosts" => Node::List((0..choices.below(4)).map(|_| host(choices)).collect()),
        key if key.ends_with("_bytes") || key.ends_with("_ms") || NUMBER_KEYS.contains(&key) => {
            number(choices, key)
        }
        "waiting" | "running" | "kv_usage" | "kv_capacity_tokens" | "prefix_queries" | "prefix_hits"
        | "started_seconds" | "cluster" | "admin_cluster" => word(choices, &["own_metric", "engines"]),
        _ => Node::Text(text(choices)),
    }
}

fn host(choices: &mut Choices<'_>) -> Node {
    let address = if choices.one_in(16) {
        choices.pick(&["10.0.0.1:0", "a:80", "10.0.0.1", "[::1]", ""])
    } else {
        choices.pick(&["10.0.0.1:8000", "[::1]:8000", "[fe80::1%7]:80"])
    };
    Node::object([
        ("address", Node::text(address)),
        (
            "role",
            Node::text(choices.pick(&["both", "prefill", "decode", "both"])),
        ),
    ])
}

/// A number that the key may have, mostly.
fn number(choices: &mut Choices<'_>, key: &str) -> Node {
    let sound: &[u32] = match key {
        "max_buffer_bytes" | "stream_buffer_bytes" | "late_field_bytes" | "max_bytes" => {
            &[4096, 65_536, 4 << 20]
        }
        "home_bytes" => &[256, 4096, 65_536],
        "memory_bytes" => &[262_144, 1 << 20, 64 << 20],
        "table_fresh_ms" => &[1500, 3000, 60_000],
        "interval_ms" | "timeout_ms" => &[500, 1000, 1500],
        _ => &[1, 2, 16],
    };
    match choices.below(24) {
        0 => Node::number(choices.odd_u64()),
        1 => Node::text("1024"),
        2 => Node::Number("4096.5".to_owned()),
        3 => Node::number(choices.pick(&[1, 100, 1024, 2000, 16_384, 1 << 20, 16 << 20, 256 << 20])),
        _ => Node::number(choices.pick(sound)),
    }
}

const NUMBER_KEYS: [&str; 7] = [
    "bytes_per_token",
    "waiting_requests",
    "in_flight",
    "kv_usage_scale",
    "max_in_flight",
    "port",
    "max_bytes",
];
