//! Real Envoys route: prefixes stick, hosts overflow, pools and configs stay apart, and what the filter reports is true.
//!
//! Every test runs on the oldest and the newest Envoy under test.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use support::{
    CHAT, Folder, Gateway, POOL, POOL_HEADER, Served, at, chat, chat_of, config, config_of, enough_for,
    envoys, eventually, fleet, fleet_of, routes_by_header, settings, streamed, text,
};
use warmroute_fleet::client::Client;
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy::{self, Envoy, StartError, write_atomically};
use warmroute_fleet::envoy_config::{PoolConfig, RouteConfig, STEERING_HEADER, named_filter};
use warmroute_fleet::fleet::Fleet;
use warmroute_fleet::replica::{Fault, MetricOverrides, RequestRecord};

/// Messages of a conversation up to its nth turn.
fn turns(seed: &str, count: usize) -> String {
    let messages: Vec<String> = (0..2 * count - 1)
        .map(|number| text(&format!("{seed}/{number}"), if number == 0 { 6000 } else { 300 }))
        .collect();
    chat_of(&messages.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Hosts that the steering header of a request named, where replicas get to see it.
fn steered(fleet: &Fleet, served: &Served) -> Vec<String> {
    let records = at(fleet, served.replica()).requests();
    let last: &RequestRecord = records.last().unwrap();
    let header = last.headers.iter().find(|(name, _)| name == STEERING_HEADER);
    let hosts = &header
        .unwrap_or_else(|| panic!("no steering header in {last:?}"))
        .1;
    hosts.split(',').map(str::to_owned).collect()
}

/// A pool whose replicas get to see the steering header.
fn open_pool(cluster: &str, fleet: &Fleet) -> PoolConfig {
    PoolConfig {
        upstream_filters: false,
        ..PoolConfig::new(cluster, fleet.addresses())
    }
}

#[tokio::test]
async fn conversations_stay_on_one_host_and_both_envoys_agree_which() {
    let fleet = fleet(4).await;
    let config = config(&fleet, &settings(&[POOL]));
    let [oldest, newest] = envoys();
    let oldest = Gateway::ready(&oldest, &config, 2, 4).await;
    let newest = Gateway::ready(&newest, &config, 2, 4).await;
    let seeds: Vec<String> = (0..12).map(|number| format!("talk {number}")).collect();
    let mut homes = Vec::new();
    for seed in &seeds {
        let first = oldest.chat(&[], turns(seed, 1)).await.ok();
        assert_eq!(first.reason(), "home");
        homes.push(first.replica().to_owned());
        // The other Envoy has never seen the conversation.
        let agreeing = newest.chat(&[], turns(seed, 1)).await.ok();
        assert_eq!(agreeing.replica(), homes.last().unwrap(), "{seed}");
    }
    let used: BTreeSet<_> = homes.iter().collect();
    assert!(used.len() > 1, "all conversations have the home {used:?}");
    for turn in 2..5 {
        for (seed, home) in seeds.iter().zip(&homes) {
            let gateway = if turn % 2 == 0 { &newest } else { &oldest };
            let served = gateway.chat(&[], turns(seed, turn)).await.ok();
            assert_eq!(served.replica(), home, "turn {turn} of {seed}");
        }
    }

    // Other traffic comes and goes meanwhile.
    let stop = Arc::new(AtomicBool::new(false));
    let others = Arc::new(AtomicU64::new(0));
    let noise: Vec<_> = [&oldest, &newest]
        .into_iter()
        .map(|gateway| {
            let (client, url) = (gateway.client.clone(), format!("{}{CHAT}", gateway.process.url()));
            let (stop, others) = (Arc::clone(&stop), Arc::clone(&others));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let number = others.fetch_add(1, Ordering::Relaxed);
                    let body = chat(&text(&format!("noise {number}"), 2000));
                    assert_eq!(client.post(&url, &[], body).await.unwrap().status, 200);
                }
            })
        })
        .collect();
    let mut turn = 5;
    while turn < 8 || others.load(Ordering::Relaxed) <= 20 {
        assert!(turn < 60, "there is no other traffic");
        for (seed, home) in seeds.iter().zip(&homes) {
            let gateway = if turn % 2 == 0 { &newest } else { &oldest };
            let served = gateway.chat(&[], turns(seed, turn)).await.ok();
            assert_eq!(served.replica(), home, "turn {turn} of {seed} among others");
        }
        turn += 1;
    }
    stop.store(true, Ordering::Relaxed);
    for noise in noise {
        noise.await.unwrap();
    }
}

#[tokio::test]
async fn two_envoys_choose_the_same_home_for_a_prompt_that_is_new_to_both() {
    let fleet = fleet(8).await;
    let mut settings = settings(&[POOL, "in_turn"]);
    settings["pools"]["in_turn"]["strategy"] = json!("round_robin");
    // Two Envoys scrape two pools of eight; a busy machine must not make their tables stale.
    settings["metrics"]["interval_ms"] = json!(300);
    settings["table_fresh_ms"] = json!(30_000);
    let addresses = fleet.addresses();
    let config_in = |pools: [PoolConfig; 2]| {
        let mut config = config_of(&settings, pools.to_vec());
        config.routes = routes_by_header(&["in_turn", POOL]);
        config
    };
    let at_once = config_in([POOL, "in_turn"].map(|pool| PoolConfig::new(pool, addresses.clone())));
    // Hosts get their slots as they are found, those found together in the order of their addresses: every second of them comes
    // later here.
    let mut in_order = addresses.clone();
    in_order.sort_by_key(SocketAddr::to_string);
    let folder = Folder::new().unwrap();
    let one_by_one = async |envoy: &Envoy, concurrency| {
        let pools = [POOL, "in_turn"].map(|pool| PoolConfig {
            eds_path: Some(folder.file(format!("{pool}-{concurrency}.json"))),
            ..PoolConfig::new(pool, Vec::new())
        });
        let find = |addresses: &[SocketAddr]| {
            for pool in &pools {
                write_atomically(pool.eds_path.as_ref().unwrap(), &pool.endpoints_file(addresses)).unwrap();
            }
        };
        find(&[in_order[1], in_order[3], in_order[5], in_order[7]]);
        let gateway = Gateway::ready(envoy, &config_in(pools.clone()), concurrency, 4).await;
        find(&addresses);
        gateway.shows("warmroute_hosts", POOL, 8).await;
        gateway.shows("warmroute_hosts", "in_turn", 8).await;
        gateway
    };
    let [oldest, newest] = envoys();
    let one = Gateway::ready(&oldest, &at_once, 1, 8).await;
    let other = one_by_one(&newest, 4).await;
    let mut orders = Vec::new();
    for gateway in [&one, &other] {
        // One after the other over one connection, so by one worker: its hosts in the order of their slots.
        let mut order = Vec::new();
        for _ in 0..8 {
            let served = gateway.chat(&[(POOL_HEADER, "in_turn")], chat("next")).await.ok();
            order.push(served.replica().to_owned());
        }
        let first = order.iter().position(|name| name == fleet.replicas[0].name());
        order.rotate_left(first.unwrap());
        orders.push(order);
    }
    assert_ne!(orders[0], orders[1], "the slots are the same");

    let mut homes = BTreeSet::new();
    for number in 0..enough_for(8) {
        let bytes = [400, 3_000, 6_000, 24_000][number % 4];
        let body = chat(&text(&format!("new to both: {number}"), bytes));
        let (first, second) = if number % 8 < 4 {
            (&one, &other)
        } else {
            (&other, &one)
        };
        let first = first.chat(&[(POOL_HEADER, POOL)], body.as_str()).await.ok();
        let second = second.chat(&[(POOL_HEADER, POOL)], body.as_str()).await.ok();
        assert_eq!(
            (first.reason(), second.reason()),
            ("home", "home"),
            "prompt {number}"
        );
        assert_eq!(first.host(), second.host(), "prompt {number} of {bytes} bytes");
        assert_eq!(second.header("x-warmroute-matched").split('/').next(), Some("0"));
        homes.insert(first.host().to_owned());
    }
    assert_eq!(homes.len(), 8, "{homes:?}");
}

#[tokio::test]
async fn prefixes_stick_whichever_of_four_workers_decides() {
    // Answers take longer than tallies take from one worker to the other.
    let engine = EngineConfig {
        decode_us_per_token: 5_000,
        ..EngineConfig::instant()
    };
    let fleet = fleet_of(4, engine).await;
    let config = config(&fleet, &settings(&[POOL]));
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 4, 4).await;
        let url = format!("{}{CHAT}", gateway.process.url());
        let mut homes: BTreeMap<usize, String> = BTreeMap::new();
        for round in 0..10 {
            for prefix in 0..6 {
                // A connection of its own: the kernel hands it to any worker.
                let body = turns(&format!("shared {prefix}"), 1 + round % 3);
                let body = body.replace("\"max_tokens\":1", "\"max_tokens\":8");
                let served = Served {
                    answer: Client::new().post(&url, &[], body).await.unwrap(),
                }
                .ok();
                let home = homes.entry(prefix).or_insert_with(|| served.replica().to_owned());
                assert_eq!(
                    served.replica(),
                    home,
                    "prefix {prefix} in round {round}: {:?}",
                    served.answer.headers
                );
            }
        }
        let stats = gateway.process.stats("listener.127.").await.unwrap();
        let workers = stats.iter().filter(|(name, connections)| {
            name.contains(".worker_") && name.ends_with(".downstream_cx_total") && **connections > 0
        });
        assert_eq!(workers.count(), 4, "{stats:?}");
    }
}

#[tokio::test]
async fn a_quick_request_leaves_nothing_behind_at_the_other_workers() {
    let fleet = fleet(2).await;
    let mut settings = settings(&[POOL]);
    settings["overflow"] = json!({"in_flight": 1});
    let config = config(&fleet, &settings);
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 2, 2).await;
        let url = format!("{}{CHAT}", gateway.process.url());
        for round in 0..40 {
            // Any request in flight would make a prompt as short as this leave its home.
            let served = Served {
                answer: Client::new().post(&url, &[], chat("quick")).await.unwrap(),
            }
            .ok();
            assert_eq!(served.reason(), "home", "in round {round}");
            // Workers read the others' tallies when theirs are 20 ms old.
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }
}

/// A prompt that thresholds are scaled down for as far as they go, and one that they are scaled up for: 100 and 8192 tokens.
const SHORT_BYTES: usize = 400;
const LONG_BYTES: usize = 32_768;

#[tokio::test]
async fn a_home_over_a_threshold_is_left_for_the_next_in_order() {
    let fleet = fleet(4).await;
    let mut settings = settings(&["waiting", "kv"]);
    settings["pools"]["waiting"]["overflow"] = json!({"waiting_requests": 4});
    settings["pools"]["kv"]["overflow"] = json!({"kv_cache_usage": 0.8});
    let mut config = config_of(
        &settings,
        vec![open_pool("waiting", &fleet), open_pool("kv", &fleet)],
    );
    config.routes = routes_by_header(&["waiting", "kv"]);
    // A short prompt may find one request waiting or 60 % of the cache in use, a long one 16 and 90 %. The gauge of running
    // requests shows when the table has the new values.
    let busy = |marker: f64| MetricOverrides {
        waiting: Some(3.0),
        kv_usage: Some(0.7),
        running: Some(marker),
    };
    let (short, long) = (chat(&text("short", SHORT_BYTES)), chat(&text("long", LONG_BYTES)));
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 1, 4).await;
        for (pool, reason) in [("waiting", "overflow_waiting"), ("kv", "overflow_kv_usage")] {
            let pick = [(POOL_HEADER, pool)];
            let first = gateway.chat(&pick, short.as_str()).await.ok();
            assert_eq!(first.reason(), "home");
            let order = steered(&fleet, &first);
            assert_eq!(order.len(), 3, "{order:?}");
            assert_eq!(order[0], first.host());
            let long_home = gateway.chat(&pick, long.as_str()).await.ok().host().to_owned();

            // One after the other, the hosts of the order fill up.
            for (filled, next) in [(1, 1), (2, 2)] {
                at(&fleet, &order[filled - 1]).set_metric_overrides(busy(10.0));
                gateway.shows(RUNNING, pool, 10 * filled as u64).await;
                let served = gateway.chat(&pick, short.as_str()).await.ok();
                assert_eq!((served.reason(), served.host()), (reason, order[next].as_str()));
                assert_eq!(at(&fleet, &order[next]).name(), served.replica());
            }
            for replica in &fleet.replicas {
                replica.set_metric_overrides(busy(10.0));
            }
            gateway.shows(RUNNING, pool, 40).await;
            let saturated = gateway.chat(&pick, short.as_str()).await.ok();
            assert_eq!(
                (saturated.reason(), saturated.host()),
                ("all_saturated", order[0].as_str())
            );
            let stays = gateway.chat(&pick, long.as_str()).await.ok();
            assert_eq!(
                (stays.reason(), stays.host()),
                ("home", long_home.as_str()),
                "a long prompt stays"
            );

            for replica in &fleet.replicas {
                replica.set_metric_overrides(MetricOverrides::default());
            }
            gateway.shows(RUNNING, pool, 0).await;
            let back = gateway.chat(&pick, short.as_str()).await.ok();
            assert_eq!((back.reason(), back.host()), ("home", order[0].as_str()));
        }
    }
}

#[tokio::test]
async fn requests_really_in_flight_at_the_home_make_others_leave() {
    let fleet = fleet(3).await;
    let mut settings = settings(&[POOL]);
    settings["overflow"] = json!({"in_flight": 4});
    let config = config_of(&settings, vec![open_pool(POOL, &fleet)]);
    let short = chat(&text("short", SHORT_BYTES));
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 1, 3).await;
        let first = gateway.chat(&[], short.as_str()).await.ok();
        let order = steered(&fleet, &first);
        let mut long = String::new();
        for number in 0.. {
            // A long prompt with the same home; one in three has it.
            long = chat(&text(&format!("long {number}"), LONG_BYTES));
            if gateway.chat(&[], long.as_str()).await.ok().host() == order[0] {
                break;
            }
            assert!(number < 60, "no prompt has the home {}", order[0]);
        }
        let home = at(&fleet, &order[0]);
        home.set_fault(Fault::Pause);
        let before = home.posts_received();
        // A short prompt tolerates one request in flight.
        let mut held = Vec::new();
        for number in 1..3 {
            held.push(gateway.chat_later(&[], streamed(&short)));
            eventually("the request is held at home", async || {
                home.posts_received() == before + number
            })
            .await;
        }
        let leaving = gateway.chat(&[], short.as_str()).await.ok();
        assert_eq!(
            (leaving.reason(), leaving.host()),
            ("overflow_in_flight", order[1].as_str())
        );
        // A long prompt tolerates 16 of them.
        let staying = gateway.chat_later(&[], streamed(&long));
        eventually("the long prompt is held at home", async || {
            home.posts_received() == before + 3
        })
        .await;

        home.set_fault(Fault::None);
        for request in held {
            let served = request.await.unwrap().ok();
            assert_eq!((served.reason(), served.host()), ("home", order[0].as_str()));
        }
        assert_eq!(staying.await.unwrap().ok().reason(), "home");
        let back = gateway.chat(&[], short.as_str()).await.ok();
        assert_eq!(
            (back.reason(), back.host()),
            ("home", order[0].as_str()),
            "the tally was given back"
        );
    }
}

#[tokio::test]
async fn the_cost_rule_leaves_a_home_that_is_busy_with_real_work() {
    // A prompt of 40 000 tokens keeps an engine busy for some seconds.
    let engine = EngineConfig {
        cache_blocks: 1 << 16,
        prefill_tokens_per_s: 10_000,
        decode_us_per_token: 0,
        max_running: 64,
    };
    let fleet = fleet_of(3, engine).await;
    let config = config(&fleet, &settings(&[POOL]));
    for (number, envoy) in envoys().iter().enumerate() {
        let gateway = Gateway::ready(envoy, &config, 1, 3).await;
        let prefix = text(&format!("shared by all {number}"), 8192);
        let follow_up = chat_of(&[&prefix, "noted", "and now?"]);
        let first = gateway.chat(&[], chat_of(&[&prefix])).await.ok();
        let (home, home_host) = (first.replica().to_owned(), first.host().to_owned());
        assert_eq!(gateway.chat(&[], follow_up.as_str()).await.ok().replica(), home);

        let mut long: Value =
            serde_json::from_str(&chat_of(&[&prefix, "noted", &text("long", 160_000)])).unwrap();
        long["stream"] = json!(true);
        let before = at(&fleet, &home).posts_received();
        let mut long = gateway.chat_later(&[], long.to_string());
        eventually("the long prompt is at the home", async || {
            at(&fleet, &home).posts_received() > before
        })
        .await;
        let served = gateway.chat(&[], follow_up.as_str()).await.ok();
        assert_eq!(served.reason(), "overflow_cost");
        assert_ne!(served.replica(), home);
        let still_runs = tokio::time::timeout(Duration::ZERO, &mut long).await.is_err();
        assert!(
            still_runs,
            "the long prompt was over before the follow-up left its home"
        );

        let long = long.await.unwrap().ok();
        assert_eq!((long.reason(), long.host()), ("home", home_host.as_str()));
        let back = gateway.chat(&[], follow_up.as_str()).await.ok();
        assert_eq!((back.reason(), back.replica()), ("home", home.as_str()));
    }
}

#[tokio::test]
async fn each_strategy_does_what_it_says() {
    let fleet = fleet(4).await;
    let names = [
        "round_robin",
        "least_outstanding",
        "prefix_hash",
        "hybrid",
        "cache_aware",
    ];
    let mut settings = settings(&names);
    for name in names {
        settings["pools"][name]["strategy"] = json!(name);
    }
    let pools = names.map(|name| PoolConfig::new(name, fleet.addresses()));
    let mut config = config_of(&settings, pools.to_vec());
    config.routes = routes_by_header(&names);
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 1, 4).await;
        let pick = |name: &'static str| [(POOL_HEADER, name)];

        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for _ in 0..40 {
            let served = gateway.chat(&pick("round_robin"), chat("the same")).await.ok();
            assert_eq!(
                (served.header("x-warmroute-strategy"), served.reason()),
                ("round_robin", "round_robin")
            );
            *counts.entry(served.replica().to_owned()).or_default() += 1;
        }
        assert_eq!(
            counts.values().copied().collect::<Vec<_>>(),
            [10; 4],
            "{counts:?}"
        );

        let (busy, held) = hold_one(&fleet, &gateway, "least_outstanding", &[]).await;
        for number in 0..20 {
            let body = chat(&format!("question {number}"));
            let served = gateway.chat(&pick("least_outstanding"), body).await.ok();
            assert_eq!(served.reason(), "least_outstanding");
            assert_ne!(served.replica(), busy);
        }
        release(&fleet, held).await;

        let body = turns("always home", 1);
        let home = gateway
            .chat(&pick("prefix_hash"), body.as_str())
            .await
            .ok()
            .replica()
            .to_owned();
        at(&fleet, &home).set_metric_overrides(MetricOverrides {
            waiting: Some(500.0),
            running: Some(64.0),
            kv_usage: Some(1.0),
        });
        gateway
            .shows("warmroute_engine_requests_waiting", "prefix_hash", 500)
            .await;
        for _ in 0..10 {
            let served = gateway.chat(&pick("prefix_hash"), body.as_str()).await.ok();
            assert_eq!((served.reason(), served.replica()), ("home", home.as_str()));
        }
        at(&fleet, &home).set_metric_overrides(MetricOverrides::default());

        // What cannot be read has no prefix and goes by load.
        let unreadable = ("content-type", "text/plain");
        for name in ["hybrid", "prefix_hash", "cache_aware"] {
            // Each pool polls by itself, and may have seen the home full.
            gateway.shows("warmroute_engine_requests_waiting", name, 0).await;
            let (busy, held) = hold_one(&fleet, &gateway, name, &[unreadable]).await;
            let mut used = BTreeSet::new();
            for _ in 0..enough_for(3) {
                let served = gateway
                    .chat(&[(POOL_HEADER, name), unreadable], chat("plain"))
                    .await
                    .ok();
                assert_eq!(served.header("x-warmroute-strategy"), name);
                assert_eq!(served.reason(), "least_loaded; unreadable");
                assert_eq!(served.header("x-warmroute-key"), "none");
                assert_ne!(served.replica(), busy);
                used.insert(served.replica().to_owned());
            }
            assert_eq!(used.len(), 3, "the idle hosts share the load: {used:?}");
            release(&fleet, held).await;
        }
    }
}

/// Keeps one request of a pool in flight: name of the replica that holds it, and the request.
async fn hold_one(
    fleet: &Fleet,
    gateway: &Gateway,
    pool: &str,
    headers: &[(&str, &str)],
) -> (String, tokio::task::JoinHandle<Served>) {
    let posts = |fleet: &Fleet| -> Vec<u64> { fleet.replicas.iter().map(|r| r.posts_received()).collect() };
    let before = posts(fleet);
    for replica in &fleet.replicas {
        replica.set_fault(Fault::Pause);
    }
    let headers = [&[(POOL_HEADER, pool)], headers].concat();
    let held = gateway.chat_later(&headers, streamed(&chat("hold this")));
    eventually("the request is held", async || posts(fleet) != before).await;
    let holder = fleet
        .replicas
        .iter()
        .zip(before)
        .find(|(replica, before)| replica.posts_received() > *before)
        .unwrap()
        .0;
    for replica in fleet
        .replicas
        .iter()
        .filter(|replica| replica.name() != holder.name())
    {
        replica.set_fault(Fault::None);
    }
    (holder.name().to_owned(), held)
}

async fn release(fleet: &Fleet, held: tokio::task::JoinHandle<Served>) {
    for replica in &fleet.replicas {
        replica.set_fault(Fault::None);
    }
    held.await.unwrap().ok();
}

#[tokio::test]
async fn pools_and_canaries_are_steered_within_the_cluster_that_the_route_chose() {
    let (stable, canary, plain) = (fleet(3).await, fleet(2).await, fleet(2).await);
    let mut settings = settings(&["stable", "canary"]);
    settings["pools"]["canary"]["strategy"] = json!("prefix_hash");
    let pools = vec![
        PoolConfig::new("stable", stable.addresses()),
        PoolConfig::new("canary", canary.addresses()),
        PoolConfig::new("plain", plain.addresses()),
    ];
    let mut config = config_of(&settings, pools);
    config.routes = vec![
        RouteConfig {
            header: Some((POOL_HEADER.to_owned(), "canary".to_owned())),
            ..RouteConfig::to("canary")
        },
        RouteConfig {
            prefix: "/plain/".to_owned(),
            extra: json!({"prefix_rewrite": "/"}),
            ..RouteConfig::to("plain")
        },
        RouteConfig {
            clusters: vec![("stable".to_owned(), 50), ("canary".to_owned(), 50)],
            ..RouteConfig::to("stable")
        },
    ];
    let hosts =
        |fleet: &Fleet| -> Vec<String> { fleet.addresses().iter().map(ToString::to_string).collect() };
    for envoy in envoys() {
        let gateway = Gateway::start(&envoy, &config, 2).await;
        gateway.shows("warmroute_hosts", "stable", 3).await;
        gateway.shows("warmroute_hosts", "canary", 2).await;

        let served = gateway.chat(&[(POOL_HEADER, "canary")], turns("a", 1)).await.ok();
        assert_eq!(served.header("x-warmroute-strategy"), "prefix_hash");
        assert!(hosts(&canary).contains(&served.host().to_owned()));

        let mut by_strategy: BTreeMap<String, usize> = BTreeMap::new();
        let mut homes: BTreeMap<(String, usize), String> = BTreeMap::new();
        for number in 0..120 {
            let prefix = number % 5;
            let served = gateway
                .chat(&[], turns(&format!("canary {prefix}"), 1))
                .await
                .ok();
            let strategy = served.header("x-warmroute-strategy").to_owned();
            let chosen = if strategy == "hybrid" { &stable } else { &canary };
            assert!(
                hosts(chosen).contains(&served.host().to_owned()),
                "{strategy} chose {}",
                served.host()
            );
            assert_eq!(served.host(), served.header("x-served-by"));
            let home = homes
                .entry((strategy.clone(), prefix))
                .or_insert_with(|| served.host().to_owned());
            assert_eq!(
                served.host(),
                home,
                "prefix {prefix} within the cluster of {strategy}"
            );
            *by_strategy.entry(strategy).or_default() += 1;
        }
        // Five standard deviations: one run in a million misses.
        let share = by_strategy["hybrid"];
        assert!((33..=87).contains(&share), "{by_strategy:?}");

        let decided: u64 = gateway.decisions().await.values().sum();
        let before = plain
            .replicas
            .iter()
            .map(|replica| replica.posts_received())
            .sum::<u64>();
        for _ in 0..10 {
            let url = format!("{}/plain{CHAT}", gateway.process.url());
            let answer = gateway.client.post(&url, &[], chat("hello")).await.unwrap();
            assert_eq!(answer.status, 200);
            assert!(
                !answer
                    .headers
                    .keys()
                    .any(|name| name.as_str().starts_with("x-warmroute-"))
            );
        }
        let after = plain
            .replicas
            .iter()
            .map(|replica| replica.posts_received())
            .sum::<u64>();
        assert_eq!(after - before, 10);
        assert_eq!(
            gateway.decisions().await.values().sum::<u64>(),
            decided,
            "nothing was decided for them"
        );
    }
}

/// Marks every answer with the generation of the config that let it through.
fn generation_mark(generation: &str) -> Value {
    let append = json!({
        "header": {"key": "x-generation", "value": generation},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    });
    let mutations = json!({"mutations": {"response_mutations": [{"append": append}]}});
    named_filter("generation", "header_mutation", "HeaderMutation", mutations)
}

#[tokio::test]
async fn a_config_push_keeps_hosts_tallies_and_every_request() {
    let folder = Folder::new().unwrap();
    let fleet = fleet(3).await;
    for (number, envoy) in envoys().iter().enumerate() {
        let mut settings = settings(&[POOL]);
        settings["overflow"] = json!({"in_flight": 1});
        let mut first = config(&fleet, &settings);
        let lds = folder.file(format!("lds-{number}.json"));
        first.lds_path = Some(lds.clone());
        first.filters_before = vec![generation_mark("1")];
        write_atomically(&lds, &first.listeners_file()).unwrap();
        let mut gateway = Gateway::ready(envoy, &first, 1, 3).await;

        // A long prompt tolerates four requests in flight, a short one none.
        let long: Vec<String> = (0..6)
            .map(|number| chat(&text(&format!("stays {number}"), LONG_BYTES)))
            .collect();
        let mut homes = Vec::new();
        for body in &long {
            homes.push(gateway.chat(&[], body.as_str()).await.ok().replica().to_owned());
        }
        let short = chat("short");
        let home = gateway.chat(&[], short.as_str()).await.ok().replica().to_owned();
        // The held request must not hold up the long ones, so they have other homes.
        let quiet: Vec<usize> = (0..long.len()).filter(|number| homes[*number] != home).collect();
        at(&fleet, &home).set_fault(Fault::Pause);
        let before = at(&fleet, &home).posts_received();
        let held = gateway.chat_later(&[], streamed(&short));
        eventually("the request is held", async || {
            at(&fleet, &home).posts_received() > before
        })
        .await;
        let leaving = gateway.chat(&[], short.as_str()).await.ok();
        assert_eq!(leaving.reason(), "overflow_in_flight");
        let unknown = unknowing(&gateway).await;

        // The push, with requests before, during and after it.
        let mut second = first.clone();
        settings["prefix"] = json!({"bytes_per_token": 5});
        second.plugin.as_mut().unwrap().json = settings.to_string();
        second.filters_before = vec![generation_mark("2")];
        write_atomically(&lds, &second.listeners_file()).unwrap();
        let mut after = 0;
        let mut sent = 0;
        eventually("requests pass the new config", async || {
            for number in &quiet {
                let served = gateway.chat(&[], long[*number].as_str()).await.ok();
                assert_eq!(
                    (served.reason(), served.replica()),
                    ("home", homes[*number].as_str())
                );
                after += usize::from(served.header("x-generation") == "2");
                sent += 1;
            }
            // Also where there is none of these: the generation shows on the short one.
            let served = gateway.chat(&[], short.as_str()).await.ok();
            assert_eq!(
                served.reason(),
                "overflow_in_flight",
                "after {sent} requests the tally is lost"
            );
            after += usize::from(served.header("x-generation") == "2");
            after > 20
        })
        .await;
        gateway.process.refresh_listeners().await.unwrap();
        let fresh = Gateway::chat(&gateway, &[], short.as_str()).await.ok();
        assert_eq!(
            (fresh.reason(), fresh.header("x-generation")),
            ("overflow_in_flight", "2")
        );

        at(&fleet, &home).set_fault(Fault::None);
        let held = held.await.unwrap().ok();
        assert_eq!(
            (held.header("x-generation"), held.replica()),
            ("1", home.as_str())
        );
        let back = gateway.chat(&[], short.as_str()).await.ok();
        assert_eq!(
            (back.reason(), back.replica()),
            ("home", home.as_str()),
            "the old request was given back"
        );
        assert_eq!(unknowing(&gateway).await, unknown, "the table was forgotten");
        let stats = gateway.process.stats("listener_manager.lds.").await.unwrap();
        assert_eq!(
            stats.get("listener_manager.lds.update_rejected"),
            Some(&0),
            "{stats:?}"
        );
    }
}

/// Decisions made without a table.
async fn unknowing(gateway: &Gateway) -> u64 {
    let decisions = gateway.decisions().await;
    ["no_table", "no_hosts", "table_stale"]
        .iter()
        .filter_map(|reason| decisions.get(*reason))
        .sum()
}

/// Settings that have to be refused, and the path that the log has to name.
fn refusals() -> Vec<(Value, &'static str)> {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut settings = settings(&[POOL]);
        change(&mut settings);
        settings
    };
    vec![
        (
            with(&|s| s["pools"][POOL]["overfow"] = json!("auto")),
            "pools.llm.overfow",
        ),
        (with(&|s| s["debug_headers"] = json!("yes")), "debug_headers"),
        (
            with(&|s| s["metrics"]["interval_ms"] = json!(5)),
            "metrics.interval_ms",
        ),
        (
            with(&|s| s["pools"][POOL]["strategy"] = json!("cache_unaware")),
            "pools.llm.strategy",
        ),
        (
            with(&|s| drop(s.as_object_mut().unwrap().remove("discovery"))),
            "pools.llm.discovery",
        ),
    ]
}

#[tokio::test]
async fn envoy_refuses_a_bad_config_and_names_the_key() {
    let fleet = fleet(1).await;
    for envoy in envoys() {
        let good = config(&fleet, &settings(&[POOL])).render();
        envoy::validate(&envoy, &good).unwrap_or_else(|error| panic!("{envoy}: {error}"));
        for (settings, path) in refusals() {
            match envoy::validate(&envoy, &config(&fleet, &settings).render()) {
                Err(StartError::Exited { status, log }) => {
                    assert!(!status.success());
                    let line = log.lines().find(|line| line.contains("configuration refused"));
                    let line = line.unwrap_or_else(|| panic!("{envoy} gave no reason:\n{log}"));
                    assert!(line.contains(path), "{envoy}: {line}");
                }
                other => panic!("{envoy} took {settings}: {other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn a_bad_push_is_rejected_and_the_old_config_works_on() {
    let folder = Folder::new().unwrap();
    let fleet = fleet(2).await;
    for (number, envoy) in envoys().iter().enumerate() {
        let mut pushed = config(&fleet, &settings(&[POOL]));
        let lds = folder.file(format!("lds-{number}.json"));
        pushed.lds_path = Some(lds.clone());
        write_atomically(&lds, &pushed.listeners_file()).unwrap();
        let gateway = Gateway::ready(envoy, &pushed, 2, 2).await;
        let home = gateway
            .chat(&[], turns("before", 1))
            .await
            .ok()
            .replica()
            .to_owned();
        for (rejected, (settings, path)) in (1..).zip(refusals()) {
            pushed.plugin.as_mut().unwrap().json = settings.to_string();
            write_atomically(&lds, &pushed.listeners_file()).unwrap();
            eventually(&format!("the push of a bad {path} is rejected"), async || {
                let stats = gateway
                    .process
                    .stats("listener_manager.lds.update_rejected")
                    .await
                    .unwrap();
                stats.values().sum::<u64>() == rejected
            })
            .await;
            let served = gateway.chat(&[], turns("before", 2)).await.ok();
            assert_eq!((served.reason(), served.replica()), ("home", home.as_str()));
            let log = gateway.process.log();
            assert!(
                log.contains(&format!("configuration refused: {path}")),
                "{path} in\n{log}"
            );
        }
    }
}

#[tokio::test]
async fn debug_headers_tell_the_truth_and_nobody_else_can_write_them() {
    let fleet = fleet(3).await;
    let mut settings = settings(&["shown", "hidden"]);
    settings["pools"]["hidden"]["debug_headers"] = json!(false);
    let pools = ["shown", "hidden"].map(|name| PoolConfig::new(name, fleet.addresses()));
    let mut config = config_of(&settings, pools.to_vec());
    config.routes = routes_by_header(&["shown", "hidden"]);
    let names = ["strategy", "reason", "host", "matched", "key"].map(|name| format!("x-warmroute-{name}"));
    let lies: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "a lie")).collect();
    let append = |name: &String| {
        json!({"append": {
            "header": {"key": name, "value": "a lie"},
            "append_action": "APPEND_IF_EXISTS_OR_ADD",
        }})
    };
    for lying in [false, true] {
        if lying {
            // Answers pass this filter before they pass ours, as those of an upstream that sends such headers.
            let mutations: Vec<Value> = names
                .iter()
                .flat_map(|name| [append(name), append(name)])
                .collect();
            let mutations = json!({"mutations": {"response_mutations": mutations}});
            config.filters_after = vec![named_filter(
                "liar",
                "header_mutation",
                "HeaderMutation",
                mutations,
            )];
        }
        for envoy in envoys() {
            let gateway = Gateway::ready(&envoy, &config, 1, 3).await;
            let headers = [lies.as_slice(), &[(POOL_HEADER, "shown")]].concat();
            let mut keys = BTreeMap::new();
            for (round, seed) in ["one", "two", "one", "two"].iter().enumerate() {
                let body = chat(&text(seed, 5000));
                let served = gateway.chat(&headers, body).await.ok();
                assert_eq!(served.header("x-warmroute-strategy"), "hybrid");
                assert_eq!(served.reason(), "home");
                assert_eq!(served.host(), served.header("x-served-by"));
                assert_eq!(at(&fleet, served.host()).name(), served.replica());
                let (matched, whole) = served.header("x-warmroute-matched").split_once('/').unwrap();
                let (matched, whole): (u32, u32) = (matched.parse().unwrap(), whole.parse().unwrap());
                assert!((5000..5100).contains(&whole), "{whole}");
                assert_eq!(matched, if round < 2 { 0 } else { whole });
                let key = served.header("x-warmroute-key");
                assert!(
                    key.len() == 16 && key.bytes().all(|byte| byte.is_ascii_hexdigit()),
                    "{key}"
                );
                let known: &mut String = keys.entry(*seed).or_insert_with(|| key.to_owned());
                assert_eq!(known, key, "equal prompts have equal keys");
            }
            assert_ne!(keys["one"], keys["two"]);
            let hidden = gateway
                .chat(&[(POOL_HEADER, "hidden")], chat("hidden"))
                .await
                .ok();
            let shown = hidden
                .answer
                .headers
                .keys()
                .filter(|name| name.as_str().starts_with("x-warmroute"));
            assert_eq!(shown.count(), 0, "{:?}", hidden.answer.headers);
        }
    }
}

#[tokio::test]
async fn a_retry_reaches_the_second_host_and_the_failing_one_is_avoided() {
    for envoy in envoys() {
        let fleet = fleet(4).await;
        let mut settings = settings(&["thresholds", "auto"]);
        settings["pools"]["thresholds"]["overflow"] = json!({"waiting_requests": 100});
        let pools = ["thresholds", "auto"].map(|name| open_pool(name, &fleet));
        let mut config = config_of(&settings, pools.to_vec());
        config.routes = routes_by_header(&["thresholds", "auto"]);
        let gateway = Gateway::ready(&envoy, &config, 1, 4).await;
        let body = turns("retried", 1);
        for pool in ["thresholds", "auto"] {
            let first = gateway.chat(&[(POOL_HEADER, pool)], body.as_str()).await.ok();
            assert_eq!(first.reason(), "home");
        }
        let first = gateway.chat(&[(POOL_HEADER, "auto")], body.as_str()).await.ok();
        let order = steered(&fleet, &first);
        // Its metrics go on, so that only requests find out.
        at(&fleet, &order[0]).set_fault(Fault::Reset);
        for (number, (pool, avoiding)) in [("thresholds", "overflow_failing"), ("auto", "overflow_cost")]
            .into_iter()
            .enumerate()
        {
            let pick = [(POOL_HEADER, pool)];
            let retried = gateway.chat(&pick, body.as_str()).await.ok();
            assert_eq!((retried.reason(), retried.host()), ("home", order[0].as_str()));
            let listed = steered(&fleet, &retried);
            assert_eq!(listed[0], order[0]);
            assert_eq!(at(&fleet, &listed[1]).name(), retried.replica());
            let failures = 1 + number as u64;
            eventually("the failure is counted", async || {
                gateway.stat("warmroute_host_failures_total").await == failures
            })
            .await;
            assert_eq!(gateway.stat("warmroute_served_elsewhere_total").await, failures);
            for _ in 0..5 {
                let avoided = gateway.chat(&pick, body.as_str()).await.ok();
                assert_eq!(avoided.reason(), avoiding);
                assert_ne!(avoided.host(), order[0]);
                assert_eq!(at(&fleet, avoided.host()).name(), avoided.replica());
            }
        }
    }
}

#[tokio::test]
async fn metrics_count_every_generation_request_once() {
    let fleet = fleet(2).await;
    let config = config(&fleet, &settings(&[POOL]));
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 2, 2).await;
        for number in 0..7 {
            gateway
                .chat(&[], turns(&format!("counted {}", number % 3), 1))
                .await
                .ok();
        }
        for _ in 0..3 {
            let invalid = gateway.chat(&[], "{\"model\": \"sim\", \"mess").await;
            assert_eq!(invalid.answer.status, 400, "the replica refuses it");
            assert!(
                invalid.reason().starts_with("least_loaded; "),
                "{}",
                invalid.reason()
            );
        }
        for _ in 0..2 {
            gateway
                .chat(&[("content-type", "text/plain")], chat("plain"))
                .await
                .ok();
        }
        // None of these is a generation request.
        let url = gateway.process.url();
        assert_eq!(
            gateway
                .client
                .get(&format!("{url}/v1/models"))
                .await
                .unwrap()
                .status,
            200
        );
        assert_eq!(
            gateway.client.get(&format!("{url}{CHAT}")).await.unwrap().status,
            404
        );
        gateway.post("/tokenize", &[], "{}").await;
        gateway
            .post("/v1/chat/completions/more", &[], chat("elsewhere"))
            .await;

        let (stats, decisions) = (gateway.stats().await, gateway.decisions().await);
        assert_eq!(decisions.values().sum::<u64>(), 12, "{stats:#?}");
        assert_eq!(
            (decisions.get("home"), decisions.get("least_loaded")),
            (Some(&7), Some(&5))
        );
        let unkeyed: Vec<(&str, u64)> = stats
            .iter()
            .filter_map(|(name, count)| Some((name.strip_prefix("warmroute_unkeyed_total.reason.")?, *count)))
            .collect();
        assert_eq!(unkeyed, [("invalid_json", 3), ("unreadable", 2)]);
        assert_eq!(
            stats.get("warmroute_host_failures_total"),
            None,
            "a client's error is no failure of a host"
        );
        let prompt_bytes = stats["warmroute_prompt_bytes_total"];
        assert!(
            stats["warmroute_matched_bytes_total"] < prompt_bytes,
            "{stats:#?}"
        );
    }
}

/// Gauge that shows when a table has the overridden values.
const RUNNING: &str = "warmroute_engine_requests_running";
