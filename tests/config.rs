//! The plugin's configuration: what an absent key means, how pools inherit, and what every refusal says.

#![cfg(not(target_family = "wasm"))]
#![expect(clippy::panic, reason = "helpers of tests may fail as tests do")]

use serde_json::{Value, json};
use warmroute::config::{
    CompanionMode, Config, ConfigError, Overflow, PoolConfig, StrategyName, Thresholds, UsageFeedback,
};
use warmroute::host_table::Role;
use warmroute::load::Preset;
use warmroute::poller::Discovery;
use warmroute::prompt::{SessionField, SessionMode};
use warmroute::strategy::RecomputeWeight;

#[test]
fn absent_keys_have_their_defaults() {
    let config = Config::parse(br#"{"pools": {"llm": {"discovery": {"admin_cluster": "admin"}}}}"#).unwrap();
    assert_eq!(config.companion, CompanionMode::Service);
    let pool = config.pool("llm").unwrap();
    assert_eq!(pool.name, "llm");
    assert_eq!(pool.strategy, StrategyName::Hybrid);
    assert_eq!(pool.overflow, Overflow::Auto);
    assert_eq!(pool.recompute_weight, RecomputeWeight::Utilisation);
    assert_eq!(pool.steering_header, "x-gateway-destination-endpoint");
    assert!(!pool.debug_headers && !pool.dry_run);
    assert_eq!(
        (pool.max_buffer_bytes, pool.stream_buffer_bytes),
        (768 * 1024, None)
    );
    assert_eq!(pool.prompt.max_prefix_bytes, 512 * 1024);
    assert!(pool.prompt.secret.is_empty());
    assert_eq!(pool.prompt.volatile_heads, ["x-anthropic-billing-header:"]);
    assert_eq!(pool.prompt.session_mode, SessionMode::Fallback);
    assert_eq!(pool.tenant_header, None);
    assert_eq!(pool.session_headers, ["x-session-id"]);
    assert_eq!((pool.home_bytes, pool.bytes_per_token), (4096, 4));
    assert_eq!(
        (pool.recent_prefix_bytes, pool.late_field_bytes),
        (1 << 20, 256 << 10)
    );
    assert_eq!(pool.table_fresh_ms, 3000);
    assert_eq!(pool.usage_feedback, UsageFeedback::Answers);
    assert_eq!(
        pool.discovery,
        Discovery::Admin {
            cluster: "admin".into(),
            interval_ms: 2000
        }
    );
    let metrics = &pool.metrics;
    assert!(metrics.enabled && !metrics.require_served_by);
    assert_eq!(metrics.preset, Preset::Vllm);
    assert_eq!(
        (metrics.cluster.as_str(), metrics.path.as_str(), metrics.port),
        ("llm", "/metrics", None)
    );
    assert_eq!(
        (metrics.interval_ms, metrics.timeout_ms, metrics.max_in_flight),
        (500, 1000, 16)
    );
}

#[test]
fn every_key_reaches_its_field() {
    let config = accept(&json!({
        "companion": {"mode": "embedded"},
        "pools": {"llm": {
            "strategy": "prefix_hash",
            "overflow": {"waiting_requests": 4, "kv_cache_usage": 0.9, "in_flight": 32},
            "recompute_weight": 2.5,
            "steering_header": "X-Pick",
            "debug_headers": true,
            "dry_run": true,
            "max_buffer_bytes": 5000,
            "stream_buffer_bytes": 50_000,
            "late_field_bytes": 5001,
            "table_fresh_ms": 5002,
            "prefix": {
                "max_bytes": 5003, "home_bytes": 5004, "memory_bytes": 50_050, "bytes_per_token": 2,
                "secret": "s", "tenant_header": "X-Tenant", "volatile_heads": ["Date: "]
            },
            "index": {"memory_bytes": 500_500},
            "usage_feedback": "streams",
            "session": {"mode": "replace", "headers": ["X-Chat", "x-user"], "fields": ["user", "session_id"]},
            "discovery": {"admin_cluster": "a", "interval_ms": 5006},
            "metrics": {
                "enabled": false, "preset": "sglang", "cluster": "m", "path": "/x", "port": 9090, "interval_ms": 5007,
                "timeout_ms": 5008, "max_in_flight": 3, "require_served_by": true
            }
        }}
    }));
    assert_eq!(config.companion, CompanionMode::Embedded);
    let pool = config.pool("llm").unwrap();
    assert_eq!(pool.strategy, StrategyName::PrefixHash);
    let thresholds = Thresholds {
        waiting_requests: Some(4),
        kv_usage_permille: Some(900),
        in_flight: Some(32),
    };
    assert_eq!(pool.overflow, Overflow::Thresholds(thresholds));
    assert_eq!(pool.recompute_weight, RecomputeWeight::Fixed { permille: 2500 });
    assert_eq!(pool.steering_header, "x-pick");
    assert!(pool.debug_headers && pool.dry_run);
    assert_eq!(
        (pool.max_buffer_bytes, pool.late_field_bytes, pool.table_fresh_ms),
        (5000, 5001, 5002)
    );
    assert_eq!(pool.stream_buffer_bytes, Some(50_000));
    assert_eq!((pool.prompt.max_prefix_bytes, pool.home_bytes), (5003, 5004));
    assert_eq!((pool.recent_prefix_bytes, pool.bytes_per_token), (50_050, 2));
    assert_eq!(pool.index_memory_bytes, 500_500);
    assert_eq!(pool.usage_feedback, UsageFeedback::Streams);
    assert_eq!(
        (
            pool.prompt.secret.as_slice(),
            pool.prompt.volatile_heads.as_slice()
        ),
        (&b"s"[..], &["Date: ".to_owned()][..])
    );
    assert_eq!(pool.tenant_header.as_deref(), Some("x-tenant"));
    assert_eq!(pool.prompt.session_mode, SessionMode::Replace);
    assert_eq!(pool.session_headers, ["x-chat", "x-user"]);
    assert_eq!(
        pool.prompt.session_fields,
        [SessionField::User, SessionField::SessionId]
    );
    assert_eq!(
        pool.discovery,
        Discovery::Admin {
            cluster: "a".into(),
            interval_ms: 5006
        }
    );
    let metrics = &pool.metrics;
    assert!(!metrics.enabled && metrics.require_served_by);
    assert_eq!(metrics.preset, Preset::Sglang);
    assert_eq!(
        (metrics.cluster.as_str(), metrics.path.as_str(), metrics.port),
        ("m", "/x", Some(9090))
    );
    assert_eq!(
        (metrics.interval_ms, metrics.timeout_ms, metrics.max_in_flight),
        (5007, 5008, 3)
    );
}

#[test]
fn static_hosts_and_own_metric_names_are_read() {
    let config = accept(&json!({"pools": {"llm": {
        "discovery": {"hosts": [
            {"address": "10.0.0.1:80"},
            {"address": "[2001:DB8:0::1]:80", "role": "decode"},
            {"address": "10.0.0.2:80", "role": "prefill"}
        ]},
        "metrics": {"names": {
            "waiting": "w", "running": "r", "kv_usage": "k", "kv_usage_scale": 100, "kv_capacity_tokens": "c",
            "prefix_queries": "q", "prefix_hits": "h", "started_seconds": "s"
        }}
    }}}));
    let pool = config.pool("llm").unwrap();
    let Discovery::Static(hosts) = &pool.discovery else {
        panic!("{:?}", pool.discovery)
    };
    let hosts: Vec<_> = hosts.iter().map(|host| (host.address(), host.role())).collect();
    let expected = [
        ("10.0.0.1:80", Role::Both),
        ("[2001:db8::1]:80", Role::Decode),
        ("10.0.0.2:80", Role::Prefill),
    ];
    assert_eq!(hosts, expected);
    let Preset::Custom(names) = &pool.metrics.preset else {
        panic!("{:?}", pool.metrics.preset)
    };
    let read = [
        &names.waiting,
        &names.running,
        &names.kv_usage,
        &names.kv_capacity_tokens,
        &names.prefix_queries,
        &names.prefix_hits,
        &names.started_seconds,
    ];
    assert_eq!(
        read.map(|name| name.as_deref().unwrap()),
        ["w", "r", "k", "c", "q", "h", "s"]
    );
    assert_eq!(names.kv_usage_scale.get(), 100);
}

#[test]
fn pools_inherit_from_the_top_and_say_otherwise_key_by_key() {
    let config = accept(&json!({
        "strategy": "prefix_hash",
        "overflow": {"waiting_requests": 4, "in_flight": 32},
        "prefix": {"home_bytes": 1024, "bytes_per_token": 2},
        "session": {"headers": ["x-top"], "mode": "off"},
        "discovery": {"admin_cluster": "top", "interval_ms": 4000},
        "metrics": {"preset": "tensorrt_llm", "interval_ms": 700, "max_in_flight": 4},
        "pools": {
            "b": {},
            "a": {
                "strategy": "hybrid",
                "overflow": {"in_flight": 8},
                "prefix": {"home_bytes": 2048},
                "session": {"mode": "extend"},
                "discovery": {"admin_cluster": "own"},
                "metrics": {"interval_ms": 900}
            },
            "c": {"overflow": "auto", "metrics": {"preset": "vllm"}, "discovery": {"hosts": [{"address": "10.0.0.1:80"}]}}
        }
    }));
    let names: Vec<&str> = config.pools.iter().map(|pool| pool.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    let [a, b, c] = ["a", "b", "c"].map(|name| config.pool(name).unwrap());
    assert_eq!(
        (a.strategy, b.strategy, c.strategy),
        (
            StrategyName::Hybrid,
            StrategyName::PrefixHash,
            StrategyName::PrefixHash
        )
    );
    let in_flight = |pool: &PoolConfig| match &pool.overflow {
        Overflow::Thresholds(limits) => (limits.waiting_requests, limits.in_flight),
        Overflow::Auto => (None, None),
    };
    assert_eq!(
        [a, b, c].map(in_flight),
        [(None, Some(8)), (Some(4), Some(32)), (None, None)]
    );
    assert_eq!(
        [a, b, c].map(|pool| (pool.home_bytes, pool.bytes_per_token)),
        [(2048, 2), (1024, 2), (1024, 2)]
    );
    let mode = |pool: &PoolConfig| pool.prompt.session_mode;
    assert_eq!(
        [a, b, c].map(mode),
        [SessionMode::Extend, SessionMode::Off, SessionMode::Off]
    );
    assert!([a, b, c].iter().all(|pool| pool.session_headers == ["x-top"]));
    let admin = |cluster: &str, interval_ms| Discovery::Admin {
        cluster: cluster.into(),
        interval_ms,
    };
    // Discovery is one statement: a pool that makes its own takes nothing of the other's.
    assert_eq!(
        (&a.discovery, &b.discovery),
        (&admin("own", 2000), &admin("top", 4000))
    );
    assert!(matches!(&c.discovery, Discovery::Static(hosts) if hosts.len() == 1));
    assert_eq!([a, b, c].map(|pool| pool.metrics.interval_ms), [900, 700, 700]);
    assert_eq!([a, b, c].map(|pool| pool.metrics.max_in_flight), [4, 4, 4]);
    assert_eq!(
        [a, b, c].map(|pool| pool.metrics.cluster.as_str()),
        ["a", "b", "c"]
    );
    // The path follows the preset in force, not the one above it.
    let paths = [a, b, c].map(|pool| pool.metrics.path.as_str());
    assert_eq!(paths, ["/prometheus/metrics", "/prometheus/metrics", "/metrics"]);
}

#[test]
fn a_path_and_a_cluster_at_the_top_hold_for_all_pools() {
    let config = accept(&json!({
        "discovery": {"admin_cluster": "admin"},
        "metrics": {"cluster": "scrape", "path": "/m"},
        "pools": {"a": {"metrics": {"preset": "tensorrt_llm"}}, "b": {"metrics": {"cluster": "own"}}}
    }));
    let metrics = |name: &str| &config.pool(name).unwrap().metrics;
    assert_eq!(
        (metrics("a").cluster.as_str(), metrics("a").path.as_str()),
        ("scrape", "/m")
    );
    assert_eq!(
        (metrics("b").cluster.as_str(), metrics("b").path.as_str()),
        ("own", "/m")
    );
}

#[test]
fn null_counts_as_absent() {
    let config = accept(&json!({
        "strategy": null, "overflow": null, "prefix": null, "companion": null, "debug_headers": null,
        "pools": {"llm": {"discovery": {"admin_cluster": "admin", "hosts": null, "interval_ms": null}, "metrics": {"port": null}}}
    }));
    assert_eq!(config.pool("llm").unwrap().strategy, StrategyName::Hybrid);
    refuse(
        &json!({"pools": {"llm": null}}),
        "pools.llm",
        "expected an object, got null",
    );
}

#[test]
fn unknown_keys_are_refused_at_every_level_with_the_known_ones() {
    for (path, known) in [
        ("strategie", "companion"),
        ("companion.modus", "mode"),
        ("prefix.size", "memory_bytes"),
        ("session.header", "headers"),
        ("discovery.cluster", "admin_cluster"),
        ("metrics.period", "interval_ms"),
        ("pools.llm.strategie", "strategy"),
        ("pools.llm.companion", "strategy"),
        ("pools.llm.pools", "strategy"),
        ("pools.llm.overflow.kv", "kv_cache_usage"),
        ("pools.llm.prefix.size", "memory_bytes"),
        ("pools.llm.session.header", "headers"),
        ("pools.llm.discovery.cluster", "admin_cluster"),
        ("pools.llm.metrics.period", "interval_ms"),
        ("pools.llm.metrics.names.queue", "waiting"),
    ] {
        let mut document = document();
        put(&mut document, path, json!(1));
        let error = refuse(&document, path, "unknown key; known here: ");
        let (_, names) = error.problem.rsplit_once(": ").unwrap();
        assert!(names.split(", ").any(|name| name == known), "{error}");
    }
    let mut document = document();
    document["pools"]["llm"]["discovery"] =
        json!({"hosts": [{"address": "10.0.0.1:80"}, {"address": "10.0.0.2:80", "port": 1}]});
    refuse(
        &document,
        "pools.llm.discovery.hosts[1].port",
        "unknown key; known here: address, role",
    );
}

#[test]
fn an_unknown_key_is_shown_in_part_when_it_is_long() {
    let mut document = document();
    document["x".repeat(5000)] = json!(1);
    let error = parse(&document).unwrap_err();
    assert_eq!(error.path, "x".repeat(64));
}

#[test]
fn wrong_types_are_refused_with_what_is_expected() {
    for (path, value, expected) in [
        (
            "strategy",
            json!(1),
            "expected one of round_robin, least_outstanding, prefix_hash, hybrid, cache_aware, got 1",
        ),
        ("strategy", json!("Hybrid"), "hybrid, cache_aware, got \"Hybrid\""),
        ("overflow", json!("Auto"), "expected one of auto, got \"Auto\""),
        ("overflow", json!(true), "expected an object, got true"),
        (
            "recompute_weight",
            json!("high"),
            "expected \"auto\" or a number from 0 to 16, got \"high\"",
        ),
        (
            "recompute_weight",
            json!(16.5),
            "expected \"auto\" or a number from 0 to 16, got 16.5",
        ),
        (
            "overflow.in_flight",
            json!(1.5),
            "expected an integer from 1 to 100000, got 1.5",
        ),
        (
            "overflow.in_flight",
            json!("4"),
            "expected an integer from 1 to 100000, got \"4\"",
        ),
        (
            "overflow.kv_cache_usage",
            json!("90%"),
            "expected a number from 0 to 1, got \"90%\"",
        ),
        (
            "debug_headers",
            json!("yes"),
            "expected true or false, got \"yes\"",
        ),
        ("dry_run", json!(0), "expected true or false, got 0"),
        ("steering_header", json!(["x"]), "expected a string, got a list"),
        ("prefix", json!([]), "expected an object, got a list"),
        (
            "prefix.tenant_header",
            json!({}),
            "expected a string, got an object",
        ),
        (
            "session",
            json!("x-session-id"),
            "expected an object, got \"x-session-id\"",
        ),
        (
            "session.headers",
            json!("x-session-id"),
            "expected a list, got \"x-session-id\"",
        ),
        ("discovery", json!("admin"), "expected an object, got \"admin\""),
        (
            "discovery.hosts",
            json!("10.0.0.1:80"),
            "expected a list, got \"10.0.0.1:80\"",
        ),
        ("metrics", json!(false), "expected an object, got false"),
        ("metrics.names", json!("vllm"), "expected an object, got \"vllm\""),
        (
            "metrics.preset",
            json!("custom"),
            "expected one of vllm, sglang, tensorrt_llm, tgi, llama_cpp, got \"custom\"",
        ),
    ] {
        for prefix in ["", "pools.llm."] {
            let path = format!("{prefix}{path}");
            let mut document = document();
            put(&mut document, &path, value.clone());
            refuse(&document, &path, expected);
        }
    }
    let mut document = document();
    document["companion"] = json!("embedded");
    refuse(&document, "companion", "expected an object, got \"embedded\"");
    document["companion"] = json!({"mode": "leader"});
    refuse(
        &document,
        "companion.mode",
        "expected one of service, embedded, got \"leader\"",
    );
    document["companion"] = json!({});
    accept(&document);
    document["pools"]["llm"] = json!("admin");
    refuse(&document, "pools.llm", "expected an object, got \"admin\"");
    document["pools"] = json!(["llm"]);
    refuse(&document, "pools", "expected an object, got a list");
}

#[test]
fn list_items_are_refused_by_their_place() {
    for (path, value, at, expected) in [
        (
            "session.headers",
            json!(["x-a", 7]),
            "session.headers[1]",
            "expected a string, got 7",
        ),
        (
            "session.fields",
            json!(["user", "users"]),
            "session.fields[1]",
            "expected one of session_params.id, ",
        ),
        (
            "prefix.volatile_heads",
            json!(["", "a"]),
            "prefix.volatile_heads[0]",
            "expected 1 to 256 bytes of text, got 0",
        ),
        (
            "discovery",
            json!({"hosts": [{"address": "10.0.0.1:80"}, 7]}),
            "discovery.hosts[1]",
            "expected an object, got 7",
        ),
    ] {
        let mut document = document();
        put(&mut document, path, value);
        refuse(&document, at, expected);
    }
    for (path, max) in [
        ("session.headers", 32),
        ("session.fields", 32),
        ("prefix.volatile_heads", 32),
    ] {
        let mut document = document();
        put(&mut document, path, json!(vec!["user"; max + 1]));
        refuse(&document, path, "expected at most 32 items, got 33");
    }
}

#[test]
fn overflow_needs_a_threshold() {
    let mut document = document();
    document["overflow"] = json!({});
    refuse(
        &document,
        "overflow",
        "expected \"auto\" or at least one of waiting_requests, kv_cache_usage, in_flight",
    );
    for (value, permille) in [
        (json!(0), 0),
        (json!(0.9), 900),
        (json!(0.8996), 900),
        (json!(1), 1000),
    ] {
        document["overflow"] = json!({"kv_cache_usage": value});
        let config = accept(&document);
        let Overflow::Thresholds(limits) = &config.pool("llm").unwrap().overflow else {
            panic!("{config:?}")
        };
        assert_eq!(limits.kv_usage_permille, Some(permille));
    }
}

#[test]
fn index_memory_is_a_key_of_every_pool_and_pools_win() {
    let mut document = document();
    assert_eq!(accept(&document).pools[0].index_memory_bytes, 16 << 20);
    document["index"] = json!({"memory_bytes": 1 << 20});
    assert_eq!(accept(&document).pools[0].index_memory_bytes, 1 << 20);
    document["pools"]["llm"]["index"] = json!({"memory_bytes": 2 << 20});
    assert_eq!(accept(&document).pools[0].index_memory_bytes, 2 << 20);
    document["index"] = json!({"bytes": 1});
    refuse(&document, "index.bytes", "unknown key; known here: memory_bytes");
}

#[test]
fn pools_that_together_want_more_memory_than_a_vm_should_hold_are_refused() {
    let pools = |count: usize, index_bytes: u64| {
        let named = (0..count).map(|number| {
            let pool =
                json!({"discovery": {"admin_cluster": "admin"}, "index": {"memory_bytes": index_bytes}});
            (format!("pool-{number}"), pool)
        });
        json!({"pools": named.collect::<serde_json::Map<_, _>>()})
    };
    for (count, index_bytes) in [(64, 16 << 20), (5, 256 << 20)] {
        let text = pools(count, index_bytes).to_string();
        assert!(Config::parse(text.as_bytes()).is_ok(), "{count} of {index_bytes}");
    }
    refuse(
        &pools(6, 256 << 20),
        "pools",
        "expected index.memory_bytes, prefix.memory_bytes and late_field_bytes of all pools to be at most 1610612736 \
         together, got 1618477056",
    );
}

#[test]
fn a_configuration_without_pools_is_refused() {
    refuse(
        &json!({}),
        "pools",
        "missing; expected an object with one entry for each cluster",
    );
    refuse(&json!({"pools": null}), "pools", "missing");
    refuse(&json!({"pools": {}}), "pools", "expected 1 to 64 pools, got 0");
    let discovery = json!({"admin_cluster": "admin"});
    for (name, is_accepted) in [
        ("x".repeat(256), true),
        ("x".repeat(257), false),
        (String::new(), false),
    ] {
        let document = json!({"discovery": discovery, "pools": {name: {}}});
        assert_eq!(parse(&document).is_ok(), is_accepted);
    }
    refuse(
        &json!({"discovery": discovery, "pools": {"": {}}}),
        "pools.",
        "expected the name of a cluster, 1 to 256 bytes",
    );
}

#[test]
fn names_of_istio_clusters_are_taken_as_they_are() {
    let name = "outbound|8000||vllm.default.svc.cluster.local";
    let config = accept(&json!({"discovery": {"admin_cluster": "prometheus_stats"}, "pools": {name: {}}}));
    assert_eq!(config.pool(name).unwrap().metrics.cluster, name);
    assert!(config.pool("outbound").is_none());
}

#[test]
fn a_pool_needs_exactly_one_kind_of_discovery() {
    refuse(
        &json!({"pools": {"llm": {}}}),
        "pools.llm.discovery",
        "missing; expected {\"admin_cluster\"",
    );
    for discovery in [
        json!({}),
        json!({"interval_ms": 1000}),
        json!({"hosts": []}),
        json!({"admin_cluster": "admin", "hosts": [{"address": "10.0.0.1:80"}]}),
    ] {
        refuse(
            &json!({"pools": {"llm": {"discovery": discovery}}}),
            "pools.llm.discovery",
            "expected either admin_cluster, the cluster that leads to Envoy's admin interface, or a list of hosts",
        );
    }
}

#[test]
fn an_interval_belongs_to_the_admin_interface() {
    let discovery = json!({"hosts": [{"address": "10.0.0.1:80"}], "interval_ms": 1000});
    refuse(
        &json!({"pools": {"llm": {"discovery": discovery}}}),
        "pools.llm.discovery.interval_ms",
        "admin_cluster",
    );
}

#[test]
fn samples_may_not_be_stale_before_the_next_ones_come() {
    let with = |top: Value, pool: Value| {
        let mut document = json!({"discovery": {"admin_cluster": "admin"}, "pools": {"llm": pool}});
        let fields = document.as_object_mut().unwrap();
        fields.extend(top.as_object().unwrap().clone());
        document
    };
    let message =
        "expected at most table_fresh_ms, 3000, or a sample is stale before the next one comes; got 3001";
    let slow = json!({"metrics": {"interval_ms": 3001}});
    for document in [with(slow.clone(), json!({})), with(json!({}), slow.clone())] {
        refuse(&document, "pools.llm.metrics.interval_ms", message);
    }
    // Pool and top level may say one half each.
    refuse(
        &with(
            json!({"metrics": {"interval_ms": 5000}}),
            json!({"table_fresh_ms": 4999}),
        ),
        "pools.llm.metrics.interval_ms",
        "4999",
    );
    accept(&with(slow, json!({"table_fresh_ms": 3001})));
    accept(&with(
        json!({"metrics": {"interval_ms": 3001, "enabled": false}}),
        json!({}),
    ));
}

#[test]
fn addresses_that_no_header_can_name_are_refused() {
    for address in [
        "replica:80",
        "10.0.0.1",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "2001:db8::1:80x",
        "[2001:db8::1]",
        " 10.0.0.1:80",
    ] {
        let document = json!({"pools": {"llm": {"discovery": {"hosts": [{"address": address}]}}}});
        refuse(
            &document,
            "pools.llm.discovery.hosts[0].address",
            "expected ip:port, IPv6 in brackets, with a port above 0",
        );
    }
    let document = json!({"pools": {"llm": {"discovery": {"hosts": [{"role": "both"}]}}}});
    refuse(
        &document,
        "pools.llm.discovery.hosts[0].address",
        "missing; expected ip:port",
    );
}

#[test]
fn headers_of_one_request_are_no_session_and_no_tenant() {
    for name in [
        "x-request-id",
        "X-Request-Id",
        "request-id",
        "x-correlation-id",
        "x-trace-id",
        "traceparent",
        "x-b3-traceid",
        "x-amzn-trace-id",
        "x-cloud-trace-context",
    ] {
        let mut document = document();
        document["session"] = json!({"headers": ["x-session-id", name]});
        refuse(
            &document,
            "session.headers[1]",
            "names one request, not a session",
        );
        document["session"] = json!(null);
        document["prefix"] = json!({"tenant_header": name});
        refuse(
            &document,
            "prefix.tenant_header",
            "names one request, not a tenant",
        );
    }
}

#[test]
fn headers_that_http_gives_a_meaning_to_are_refused() {
    let names = [
        "host",
        "Connection",
        "content-length",
        "content-type",
        "content-encoding",
        "transfer-encoding",
        "expect",
        "upgrade",
        ":path",
        ":authority",
        "x tenant",
        "x-tenant:",
        "x-größe",
    ];
    for name in names {
        for path in ["steering_header", "prefix.tenant_header"] {
            let mut document = document();
            put(&mut document, path, json!(name));
            refuse(
                &document,
                path,
                "expected the name of a header of your own: letters, digits, - _ and .",
            );
        }
        let mut document = document();
        document["session"] = json!({"headers": [name]});
        refuse(
            &document,
            "session.headers[0]",
            "expected the name of a header of your own",
        );
    }
}

#[test]
fn metrics_are_named_by_preset_or_by_names() {
    let mut document = document();
    document["metrics"] = json!({"preset": "vllm", "names": {"waiting": "w"}});
    refuse(
        &document,
        "metrics.names",
        "expected either a preset or names of your own, not both",
    );
    document["metrics"] = json!({"names": {}});
    refuse(
        &document,
        "metrics.names",
        "expected at least one of waiting, running, ",
    );
    document["metrics"] = json!({"names": {"kv_usage_scale": 100, "started_seconds": "s"}});
    refuse(
        &document,
        "metrics.names",
        "expected at least one of waiting, running, ",
    );
    document["metrics"] = json!({"path": "metrics"});
    refuse(&document, "metrics.path", "expected a path that starts with /");
    // A pool may leave a preset for names, and names for a preset.
    document["metrics"] = json!({"preset": "sglang"});
    document["pools"]["llm"]["metrics"] = json!({"names": {"waiting": "w"}});
    assert!(matches!(
        accept(&document).pool("llm").unwrap().metrics.preset,
        Preset::Custom(_)
    ));
    document["metrics"] = json!({"names": {"waiting": "w"}});
    document["pools"]["llm"]["metrics"] = json!({"preset": "tgi"});
    assert_eq!(accept(&document).pool("llm").unwrap().metrics.preset, Preset::Tgi);
}

#[test]
fn text_that_is_not_one_json_object_is_refused() {
    for (text, problem) in [
        ("", "expected one JSON object: EOF"),
        ("{", "expected one JSON object: EOF"),
        ("pools: {}", "expected one JSON object: expected value"),
        ("[]", "expected an object, got a list"),
        ("null", "expected an object, got null"),
        ("\"pools\"", "expected an object, got \"pools\""),
        ("{} {}", "expected one JSON object: trailing characters"),
        (
            "{\"pools\": {\"llm\": {},}}",
            "expected one JSON object: trailing comma",
        ),
    ] {
        let error = Config::parse(text.as_bytes()).unwrap_err();
        assert_eq!(error.path, "", "{text}");
        assert!(error.problem.starts_with(problem), "{text}: {error}");
        assert_eq!(error.to_string(), error.problem);
    }
    assert!(Config::parse(b"\xff").is_err());
    let deep = format!("{{\"pools\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    assert!(Config::parse(deep.as_bytes()).is_err());
}

#[test]
fn a_key_that_comes_twice_is_refused() {
    let discovery = r#""discovery": {"admin_cluster": "admin"}"#;
    for (text, key) in [
        (
            format!(r#"{{"pools": {{"llm": {{{discovery}}}, "llm": {{{discovery}}}}}}}"#),
            "llm",
        ),
        (
            format!(
                r#"{{{discovery}, "strategy": "hybrid", "strategy": "hybrid", "pools": {{"llm": {{}}}}}}"#
            ),
            "strategy",
        ),
        (
            format!(r#"{{{discovery}, "pools": {{"llm": {{"metrics": {{"port": 1, "port": 1}}}}}}}}"#),
            "port",
        ),
    ] {
        let error = Config::parse(text.as_bytes()).unwrap_err();
        assert!(error.problem.contains(&format!("`{key}` comes twice")), "{error}");
    }
}

#[test]
fn a_configuration_beyond_one_mebibyte_is_refused_unread() {
    let mut text = document().to_string();
    text.push_str(&" ".repeat((1 << 20) - text.len()));
    assert!(Config::parse(text.as_bytes()).is_ok());
    text.push(' ');
    let error = Config::parse(text.as_bytes()).unwrap_err();
    assert_eq!(error.to_string(), "expected at most 1048576 bytes of JSON");
}

#[test]
fn errors_name_the_key_first() {
    let mut document = document();
    document["pools"]["llm"]["metrics"] = json!({"interval_ms": 5});
    let error = parse(&document).unwrap_err();
    assert_eq!(
        error.to_string(),
        "pools.llm.metrics.interval_ms: expected an integer from 100 to 60000, got 5"
    );
}

/// The least document that is accepted.
fn document() -> Value {
    json!({"discovery": {"admin_cluster": "admin"}, "pools": {"llm": {"discovery": {"admin_cluster": "admin"}}}})
}

/// Sets the value at a path of keys.
fn put(document: &mut Value, path: &str, value: Value) {
    *path.split('.').fold(document, |object, key| &mut object[key]) = value;
}

fn parse(document: &Value) -> Result<Config, ConfigError> {
    Config::parse(document.to_string().as_bytes())
}

fn accept(document: &Value) -> Config {
    parse(document).unwrap_or_else(|error| panic!("{error}\n{document}"))
}

/// Expects a refusal at a path, with this in what it says.
fn refuse(document: &Value, path: &str, problem: &str) -> ConfigError {
    let Err(error) = parse(document) else {
        panic!("accepted: {document}")
    };
    assert_eq!(error.path, path, "{error}");
    assert!(error.problem.contains(problem), "{error}\nexpected: {problem}");
    error
}
