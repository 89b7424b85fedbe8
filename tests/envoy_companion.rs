//! Real Envoys keep their tables fresh: who polls, what is believed, and what happens when polling fails.
//!
//! Every test runs on the oldest and the newest Envoy under test.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do, and read a clock for their deadlines"
)]

mod support;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{
    CHAT, Folder, Gateway, POOL, SCRAPE_INTERVAL_MS, SCRAPES_OK, at, chat, config, config_of, enough_for,
    envoys, eventually, fleet, settings, streamed, text,
};
use warmroute_fleet::envoy::{EnvoyOptions, write_atomically};
use warmroute_fleet::envoy_config::{PoolConfig, ToldEndpoint};
use warmroute_fleet::fleet::Fleet;
use warmroute_fleet::odd::{OddEngine, Tunnel, cluster_of, free_port};
use warmroute_fleet::replica::{Fault, MetricOverrides};

/// Prompts with various homes.
fn prompts(count: usize) -> Vec<String> {
    (0..count)
        .map(|number| chat(&text(&format!("prompt {number}"), 5000)))
        .collect()
}

/// Sends each prompt once and gives the names of the replicas that answered.
async fn homes(gateway: &Gateway, prompts: &[String]) -> Vec<String> {
    let mut homes = Vec::new();
    for prompt in prompts {
        let served = gateway.chat(&[], prompt.as_str()).await.ok();
        assert_eq!(served.reason(), "home");
        homes.push(served.replica().to_owned());
    }
    homes
}

/// Sends a prompt again and again until the reason for its host is the wanted one; every answer must be good.
async fn until_reason(gateway: &Gateway, prompt: &str, wanted: &str) {
    eventually(&format!("a decision has the reason {wanted}"), async || {
        gateway.chat(&[], prompt).await.ok().reason() == wanted
    })
    .await;
}

#[tokio::test]
async fn the_service_scrapes_every_replica_and_drops_what_another_host_answered() {
    let fleet = fleet(3).await;
    let addresses = fleet.addresses();
    for envoy in envoys() {
        // Through the pool's own cluster every replica answers for itself.
        let mut settings = settings(&[POOL]);
        settings["metrics"]["require_served_by"] = json!(true);
        let before: Vec<u64> = fleet
            .replicas
            .iter()
            .map(|replica| replica.metrics_reads())
            .collect();
        let gateway = Gateway::ready(&envoy, &config(&fleet, &settings), 2, 3).await;
        for (replica, before) in fleet.replicas.iter().zip(before) {
            assert!(
                replica.metrics_reads() > before,
                "{} was not scraped",
                replica.name()
            );
        }
        assert_eq!(gateway.stat(MISROUTED).await, 0);
        assert!(gateway.process.log().contains("pool llm: this service polls now"));
        assert_eq!(gateway.chat(&[], chat("hello")).await.ok().reason(), "home");
        drop(gateway);

        // A metrics cluster that lacks a host: its fallback policy asks another one.
        settings["metrics"]["cluster"] = json!("llm-metrics");
        let pools = vec![
            PoolConfig::new(POOL, addresses.clone()),
            PoolConfig::new("llm-metrics", addresses[..2].to_vec()),
        ];
        for replica in &fleet.replicas {
            replica.set_metric_overrides(MetricOverrides {
                waiting: Some(5.0),
                ..MetricOverrides::default()
            });
        }
        let lonely = fleet.replicas[2].metrics_reads();
        let gateway = Gateway::ready(&envoy, &config_of(&settings, pools), 2, 3).await;
        eventually("misrouted answers are counted", async || {
            gateway.stat(MISROUTED).await > 2
        })
        .await;
        gateway.shows(WAITING, POOL, 10).await;
        assert_eq!(fleet.replicas[2].metrics_reads(), lonely);
        for replica in &fleet.replicas {
            replica.set_metric_overrides(MetricOverrides::default());
        }
        gateway.shows(WAITING, POOL, 0).await;
        // The host without a sample takes part all the same.
        let prompts = prompts(enough_for(3));
        let served = homes(&gateway, &prompts).await;
        assert!(
            served.iter().any(|name| name == fleet.replicas[2].name()),
            "{served:?}"
        );
    }
}

/// Whether scrapes of a replica come no faster than one poller makes them, and how fast they came.
async fn one_polls(fleet: &Fleet) -> (bool, String) {
    let replica = &fleet.replicas[0];
    let (start, before) = (Instant::now(), replica.metrics_reads());
    eventually("forty scrapes", async || replica.metrics_reads() >= before + 40).await;
    let (scrapes, elapsed) = (replica.metrics_reads() - before, start.elapsed());
    // Two pollers would take half as long; one on a busy machine only takes longer.
    let least = Duration::from_millis((scrapes - 1) * SCRAPE_INTERVAL_MS * 2 / 3);
    (elapsed > least, format!("{scrapes} scrapes within {elapsed:?}"))
}

/// Waits until one companion polls and stays at that for forty scrapes; who loses the lease notices when it would renew
/// it, and a worker that the machine stalls for longer than a lease lives loses it, too.
async fn assert_one_poller(gateway: &Gateway, fleet: &Fleet) {
    eventually("one companion polls", async || {
        let takeovers = gateway.takeovers();
        one_polls(fleet).await.0 && gateway.takeovers() == takeovers
    })
    .await;
}

#[tokio::test]
async fn embedded_companions_elect_exactly_one_that_polls() {
    let fleet = fleet(2).await;
    let mut settings = settings(&[POOL]);
    settings["companion"] = json!({"mode": "embedded"});
    let mut config = config(&fleet, &settings);
    config.plugin.as_mut().unwrap().service = false;
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 2, 2).await;
        assert_one_poller(&gateway, &fleet).await;
        homes(&gateway, &prompts(20)).await;
        assert_one_poller(&gateway, &fleet).await;
        assert!(!gateway.process.log().contains("this service polls now"));
        // Each of main thread and two workers may hold the lease while the others come up; then a worker that serves hands
        // it to one that does not yet, and that one to the main thread.
        let takeovers = gateway.takeovers();
        assert!((1..=5).contains(&takeovers), "{takeovers} takeovers");
    }
}

#[tokio::test]
async fn a_filter_polls_where_the_service_is_missing() {
    let fleet = fleet(2).await;
    let mut config = config(&fleet, &settings(&[POOL]));
    config.plugin.as_mut().unwrap().service = false;
    for envoy in envoys() {
        let gateway = Gateway::start(&envoy, &config, 2).await;
        // Until then Envoy chooses.
        let early = gateway.chat(&[], chat("early")).await.ok();
        assert_eq!((early.reason(), early.host()), ("no_hosts", "none"));
        gateway.shows(HOSTS, POOL, 2).await;
        homes(&gateway, &prompts(8)).await;
        assert_one_poller(&gateway, &fleet).await;
        assert!(gateway.process.log().contains("pool llm: this filter polls now"));
    }
}

#[tokio::test]
async fn a_companion_that_takes_over_leaves_hosts_their_slots_and_tallies() {
    let folder = Folder::new().unwrap();
    let fleet = fleet(3).await;
    for (number, envoy) in envoys().iter().enumerate() {
        let mut settings = settings(&[POOL]);
        settings["companion"] = json!({"mode": "embedded"});
        settings["overflow"] = json!({"in_flight": 1});
        let mut pushed = config(&fleet, &settings);
        pushed.plugin.as_mut().unwrap().service = false;
        let lds = folder.file(format!("lds-{number}.json"));
        pushed.lds_path = Some(lds.clone());
        write_atomically(&lds, &pushed.listeners_file()).unwrap();
        let gateway = Gateway::ready(envoy, &pushed, 1, 3).await;

        let short = chat("short");
        let home = gateway.chat(&[], short.as_str()).await.ok().replica().to_owned();
        at(&fleet, &home).set_fault(Fault::Pause);
        let before = at(&fleet, &home).posts_received();
        let held = gateway.chat_later(&[], streamed(&short));
        eventually("the request is held", async || {
            at(&fleet, &home).posts_received() > before
        })
        .await;
        for round in 1..4 {
            // The holder's root context loses its pool to the new one, on every thread.
            let takeovers = gateway.takeovers();
            settings["table_fresh_ms"] = json!(3000 + round);
            pushed.plugin.as_mut().unwrap().json = settings.to_string();
            write_atomically(&lds, &pushed.listeners_file()).unwrap();
            eventually("another root context polls", async || {
                let served = gateway.chat(&[], short.as_str()).await.ok();
                assert_eq!(served.reason(), "overflow_in_flight", "in round {round}");
                gateway.takeovers() > takeovers
            })
            .await;
            gateway.rescraped().await;
            let served = gateway.chat(&[], short.as_str()).await.ok();
            assert_eq!(served.reason(), "overflow_in_flight", "after takeover {round}");
        }
        assert_one_poller(&gateway, &fleet).await;
        at(&fleet, &home).set_fault(Fault::None);
        assert_eq!(held.await.unwrap().ok().replica(), home);
        let back = gateway.chat(&[], short.as_str()).await.ok();
        assert_eq!((back.reason(), back.replica()), ("home", home.as_str()));
    }
}

/// The content of a listeners file.
fn listeners_file(listeners: &[Value]) -> String {
    let mut listeners = listeners.to_vec();
    for listener in &mut listeners {
        listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
    }
    json!({"resources": listeners}).to_string()
}

#[tokio::test]
async fn when_the_listener_of_the_holder_is_deleted_another_ones_filter_polls() {
    let folder = Folder::new().unwrap();
    let fleet = fleet(2).await;
    let prompts = prompts(6);
    for (number, envoy) in envoys().iter().enumerate() {
        let mut settings = settings(&[POOL]);
        settings["companion"] = json!({"mode": "embedded"});
        let mut config = config(&fleet, &settings);
        config.plugin.as_mut().unwrap().service = false;
        let lds = folder.file(format!("two-{number}.json"));
        config.lds_path = Some(lds.clone());
        let mut first = config.listener();
        first["name"] = json!("first");
        // Another plugin configuration has root contexts of its own, and the newest of them holds the pool.
        settings["table_fresh_ms"] = json!(3001);
        config.plugin.as_mut().unwrap().json = settings.to_string();
        let mut second = config.listener();
        second["name"] = json!("second");
        write_atomically(&lds, &listeners_file(&[first.clone(), second.clone()])).unwrap();
        let options = EnvoyOptions {
            concurrency: 2,
            // A deleted listener's contexts live as long.
            extra_args: vec!["--drain-time-s".to_owned(), "1".to_owned()],
            ..EnvoyOptions::default()
        };
        let gateway = Gateway::start_with(envoy, &config, &options).await;
        gateway.shows(HOSTS, POOL, 2).await;
        let before = homes(&gateway, &prompts).await;
        assert_one_poller(&gateway, &fleet).await;

        let takeovers = gateway.takeovers();
        write_atomically(&lds, &listeners_file(std::slice::from_ref(&first))).unwrap();
        eventually("a filter of the other listener polls", async || {
            assert_eq!(homes(&gateway, &prompts[..1]).await, before[..1]);
            gateway.takeovers() > takeovers
        })
        .await;
        gateway.rescraped().await;
        assert_one_poller(&gateway, &fleet).await;
        assert_eq!(homes(&gateway, &prompts).await, before);

        // A new listener's filter takes over again, and stays the holder when the older listener goes.
        let takeovers = gateway.takeovers();
        write_atomically(&lds, &listeners_file(&[first, second.clone()])).unwrap();
        eventually("a filter of the new listener polls", async || {
            gateway.takeovers() > takeovers
        })
        .await;
        write_atomically(&lds, &listeners_file(&[second])).unwrap();
        eventually("the older listener is gone", async || {
            let stats = gateway.process.stats("listener_manager.total_").await.unwrap();
            stats["listener_manager.total_listeners_active"] == 1
                && stats["listener_manager.total_listeners_draining"] == 0
        })
        .await;
        gateway.rescraped().await;
        assert_one_poller(&gateway, &fleet).await;
    }
}

/// Sends prompts until told to stop; every answer must be good.
struct Traffic {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<usize>>,
}

impl Traffic {
    fn through(gateway: &Gateway, prompts: &[String]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = (0..2)
            .map(|_| {
                let (client, url) = (gateway.client.clone(), format!("{}{CHAT}", gateway.process.url()));
                let (stop, prompts) = (Arc::clone(&stop), prompts.to_vec());
                tokio::spawn(async move {
                    let mut sent = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let body = prompts[sent % prompts.len()].clone();
                        let answer = client.post(&url, &[], body).await.unwrap();
                        assert_eq!(answer.status, 200, "{}", answer.text());
                        sent += 1;
                    }
                    sent
                })
            })
            .collect();
        Self { stop, tasks }
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            assert!(task.await.unwrap() > 0, "there was no traffic");
        }
    }
}

/// An endpoints file in which some hosts have a health status.
fn endpoints_file(pool: &PoolConfig, addresses: &[SocketAddr], statuses: &[(usize, &'static str)]) -> String {
    let mut told: Vec<ToldEndpoint> = addresses.iter().copied().map(ToldEndpoint::healthy).collect();
    for (number, status) in statuses {
        told[*number].health = status;
    }
    pool.told_endpoints_file(&told)
}

#[tokio::test]
async fn hosts_that_leave_or_are_unwell_get_no_traffic_and_return_to_theirs() {
    let folder = Folder::new().unwrap();
    let fleet = fleet(3).await;
    let addresses = fleet.addresses();
    let prompts = prompts(enough_for(3));
    for (number, envoy) in envoys().iter().enumerate() {
        let mut pool = PoolConfig::new(POOL, Vec::new());
        let eds = folder.file(format!("eds-{number}.json"));
        pool.eds_path = Some(eds.clone());
        write_atomically(&eds, &pool.endpoints_file(&addresses)).unwrap();
        let config = config_of(&settings(&[POOL]), vec![pool.clone()]);
        let gateway = Gateway::ready(envoy, &config, 2, 3).await;
        let before = homes(&gateway, &prompts).await;
        let gone = &fleet.replicas[2];
        assert!(before.iter().any(|name| name == gone.name()), "{before:?}");
        let quiet = async |what: &str| {
            let posts = gone.posts_received();
            for (prompt, home) in prompts.iter().zip(&before) {
                let served = gateway.chat(&[], prompt.as_str()).await.ok();
                // Only the prefixes of the host that is out move.
                assert_eq!(served.replica() == home, home != gone.name(), "{what}");
            }
            assert_eq!(gone.posts_received(), posts, "{what}");
        };

        for status in ["DRAINING", "UNHEALTHY"] {
            let traffic = Traffic::through(&gateway, &prompts);
            write_atomically(&eds, &endpoints_file(&pool, &addresses, &[(2, status)])).unwrap();
            gateway.shows(TAKING_TRAFFIC, POOL, 2).await;
            traffic.end().await;
            quiet(status).await;
            assert_eq!(gateway.stat("warmroute_hosts.pool.llm").await, 3);
            write_atomically(&eds, &pool.endpoints_file(&addresses)).unwrap();
            gateway.shows(TAKING_TRAFFIC, POOL, 3).await;
        }
        assert_eq!(homes(&gateway, &prompts).await, before);

        let traffic = Traffic::through(&gateway, &prompts);
        write_atomically(&eds, &pool.endpoints_file(&addresses[..2])).unwrap();
        gateway.shows(HOSTS, POOL, 2).await;
        traffic.end().await;
        quiet("the replica was removed").await;

        let traffic = Traffic::through(&gateway, &prompts);
        write_atomically(&eds, &pool.endpoints_file(&addresses)).unwrap();
        gateway.shows(HOSTS, POOL, 3).await;
        traffic.end().await;
        // What moved is warm where it went and stays there; the host that is back has nothing and gets what is new.
        for (prompt, home) in prompts.iter().zip(&before) {
            let served = gateway.chat(&[], prompt.as_str()).await.ok();
            assert_eq!(served.replica() == home, home != gone.name(), "it is back");
        }
        let fresh: Vec<String> = (0..enough_for(3))
            .map(|new| chat(&text(&format!("new {new}"), 6000)))
            .collect();
        let fresh = homes(&gateway, &fresh).await;
        assert!(fresh.iter().any(|name| name == gone.name()), "{fresh:?}");

        // With nobody well, Envoy decides whether to panic.
        let all = [(0, "UNHEALTHY"), (1, "UNHEALTHY"), (2, "UNHEALTHY")];
        write_atomically(&eds, &endpoints_file(&pool, &addresses, &all)).unwrap();
        gateway.shows(TAKING_TRAFFIC, POOL, 0).await;
        let served = gateway.chat(&[], prompts[0].as_str()).await.ok();
        assert_eq!((served.reason(), served.host()), ("no_eligible_host", "none"));
    }
}

#[tokio::test]
async fn hosts_of_a_lower_priority_stand_by_until_they_are_needed() {
    let folder = Folder::new().unwrap();
    let mut fleet = fleet(4).await;
    let prompts = prompts(enough_for(4));
    // Two of priority 0 and two that stand by.
    let told = |fleet: &Fleet| -> Vec<ToldEndpoint> {
        let of = |(number, address)| ToldEndpoint {
            priority: u32::from(number >= 2),
            ..ToldEndpoint::healthy(address)
        };
        fleet.addresses().into_iter().enumerate().map(of).collect()
    };
    for (number, envoy) in envoys().iter().enumerate() {
        let mut pool = PoolConfig::new(POOL, Vec::new());
        let eds = folder.file(format!("levels-{number}.json"));
        pool.eds_path = Some(eds.clone());
        let mut hosts = told(&fleet);
        write_atomically(&eds, &pool.told_endpoints_file(&hosts)).unwrap();
        let config = config_of(&settings(&[POOL]), vec![pool.clone()]);
        let gateway = Gateway::ready(envoy, &config, 2, 4).await;
        let used = async |prompts: &[String]| -> BTreeSet<String> {
            homes(&gateway, prompts).await.into_iter().collect()
        };
        let names = |numbers: &[usize]| -> BTreeSet<String> {
            numbers.iter().map(|number| format!("replica-{number}")).collect()
        };
        let before = homes(&gateway, &prompts).await;
        assert_eq!(before.iter().cloned().collect::<BTreeSet<_>>(), names(&[0, 1]));
        assert_eq!(gateway.stat("warmroute_hosts_taking_traffic.pool.llm").await, 2);
        let of_first = before.iter().position(|home| home == "replica-0").unwrap();
        let is_at_first = async || {
            let served = gateway.chat(&[], prompts[of_first].as_str()).await.ok();
            served.replica() == "replica-0"
        };

        // With half of them, Envoy's own balancer sends 30 % on, before it takes a degraded one: a host of two is enough.
        let joins = if hosts[2].address.to_string() < hosts[3].address.to_string() {
            2
        } else {
            3
        };
        for health in ["DRAINING", "DEGRADED"] {
            hosts[0].health = health;
            write_atomically(&eds, &pool.told_endpoints_file(&hosts)).unwrap();
            eventually("the first host is left", async || !is_at_first().await).await;
            gateway.rescraped().await;
            let fresh: Vec<String> = (0..enough_for(2))
                .map(|number| chat(&text(&format!("{health} {number}"), 5000)))
                .collect();
            assert_eq!(used(&fresh).await, names(&[1, joins]), "{health}");
            hosts[0].health = "HEALTHY";
            write_atomically(&eds, &pool.told_endpoints_file(&hosts)).unwrap();
            eventually("the first host is back", is_at_first).await;
            gateway.rescraped().await;
            assert_eq!(used(&prompts).await, names(&[0, 1]));
        }

        // What only scrapes know counts as well.
        for replica in &mut fleet.replicas[..2] {
            replica.stop().await;
        }
        // Until then there is nobody else, with the filter or without.
        eventually("prompts go where hosts stood by", async || {
            gateway.chat(&[], prompts[0].as_str()).await.answer.status == 200
        })
        .await;
        gateway.shows(TAKING_TRAFFIC, POOL, 2).await;
        assert_eq!(used(&prompts).await, names(&[2, 3]));
        for replica in &mut fleet.replicas[..2] {
            replica.restart().await.unwrap();
        }
        eventually("prompts come back", async || {
            let served = gateway.chat(&[], prompts[0].as_str()).await.ok();
            names(&[0, 1]).contains(served.replica())
        })
        .await;
        assert_eq!(used(&prompts).await, names(&[0, 1]));
    }
}

#[tokio::test]
async fn an_engine_that_restarts_is_noticed_and_serves_on() {
    let mut fleet = fleet(2).await;
    let prompts = prompts(6);
    for envoy in envoys() {
        let config = config(&fleet, &settings(&[POOL]));
        let gateway = Gateway::ready(&envoy, &config, 2, 2).await;
        let before = homes(&gateway, &prompts).await;
        gateway.rescraped().await;
        assert_eq!(gateway.stat(RESTARTS).await, 0);
        for replica in &mut fleet.replicas {
            replica.restart().await.unwrap();
        }
        eventually("both restarts are counted", async || {
            gateway.stat(RESTARTS).await == 2
        })
        .await;
        gateway.rescraped().await;
        for (prompt, home) in prompts.iter().zip(&before) {
            assert_eq!(gateway.chat(&[], prompt.as_str()).await.ok().replica(), home);
        }
        gateway.rescraped().await;
        assert_eq!(gateway.stat(RESTARTS).await, 2, "a restart is counted once");
    }
}

#[tokio::test]
async fn an_engine_that_is_gone_is_left_before_any_request_found_out() {
    let mut fleet = fleet(3).await;
    let config = config(&fleet, &settings(&[POOL]));
    let prompts = prompts(enough_for(3));
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 2, 3).await;
        let before = homes(&gateway, &prompts).await;
        let gone = &mut fleet.replicas[1];
        let address = gone.address().to_string();
        let pairs = prompts.iter().zip(&before);
        let at_home: Vec<&String> = pairs
            .filter(|(_, home)| *home == gone.name())
            .map(|(prompt, _)| prompt)
            .collect();
        assert!(!at_home.is_empty(), "{before:?}");

        gone.stop().await;
        // Workers read a table when theirs is 20 ms old; the gauges are told later than that.
        gateway.shows(TAKING_TRAFFIC, POOL, 2).await;
        for prompt in &at_home {
            let served = gateway.chat(&[], prompt.as_str()).await.ok();
            assert_ne!(
                served.header("x-warmroute-host"),
                address,
                "{:?}",
                served.answer.headers
            );
        }
        assert_eq!(gateway.stat(HOST_FAILURES).await, 0);

        gone.restart().await.unwrap();
        gateway.shows(TAKING_TRAFFIC, POOL, 3).await;
        let fresh: Vec<String> = (0..enough_for(3))
            .map(|number| chat(&text(&format!("fresh {envoy} {number}"), 5000)))
            .collect();
        let back = homes(&gateway, &fresh).await;
        assert!(back.iter().any(|home| home == gone.name()), "{back:?}");
    }
}

#[tokio::test]
async fn failing_metrics_age_the_table_while_requests_go_on() {
    let fleet = fleet(2).await;
    let mut settings = settings(&[POOL]);
    settings["table_fresh_ms"] = json!(1500);
    let config = config(&fleet, &settings);
    let prompt = chat(&text("aged", 5000));
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 2, 2).await;
        let home = gateway.chat(&[], prompt.as_str()).await.ok().replica().to_owned();
        for fault in [Fault::Status(404), Fault::Status(500), Fault::Hang, Fault::Reset] {
            let (failed, good) = (gateway.stat(FAILED).await, gateway.stat(SCRAPES_OK).await);
            for replica in &fleet.replicas {
                replica.set_metrics_fault(fault);
            }
            until_reason(&gateway, &prompt, "table_stale").await;
            let served = gateway.chat(&[], prompt.as_str()).await.ok();
            assert_eq!(served.replica(), home, "an idle home is kept with a stale table");
            assert!(gateway.stat(FAILED).await > failed, "{fault:?}");
            for replica in &fleet.replicas {
                replica.set_metrics_fault(Fault::None);
            }
            until_reason(&gateway, &prompt, "home").await;
            assert!(gateway.stat(SCRAPES_OK).await > good, "{fault:?}");
        }
    }
}

#[tokio::test]
async fn metrics_that_are_no_metrics_change_nothing() {
    let engines = [0, 1].map(|_| OddEngine::start(GOOD_METRICS).unwrap());
    let pool = PoolConfig::new(POOL, engines.iter().map(OddEngine::address).collect());
    let mut settings = settings(&[POOL]);
    settings["table_fresh_ms"] = json!(1500);
    let config = config_of(&settings, vec![pool]);
    let prompt = chat(&text("odd", 5000));
    let noise: Vec<u8> = (0..65_536u32)
        .map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let huge = b"# a comment that says nothing at all, again and again\n".repeat(160_000);
    let endless_line = vec![b'x'; 3 << 20];
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, 2, 2).await;
        gateway.shows(WAITING, POOL, 6).await;
        let home = gateway.chat(&[], prompt.as_str()).await.ok().host().to_owned();
        for (name, odd) in [
            ("noise", &noise),
            ("huge", &huge),
            ("empty", &Vec::new()),
            ("endless line", &endless_line),
        ] {
            let unread = gateway.stat(UNREADABLE).await + gateway.stat(FAILED).await;
            for engine in &engines {
                engine.set_metrics(odd.clone());
            }
            until_reason(&gateway, &prompt, "table_stale").await;
            assert_eq!(
                gateway.chat(&[], prompt.as_str()).await.ok().host(),
                home,
                "{name}"
            );
            assert!(
                gateway.stat(UNREADABLE).await + gateway.stat(FAILED).await > unread,
                "{name}"
            );
            for engine in &engines {
                engine.set_metrics(GOOD_METRICS);
            }
            until_reason(&gateway, &prompt, "home").await;
        }
        assert!(
            !gateway.process.log().contains("panicked"),
            "{}",
            gateway.process.log()
        );
    }
}

#[tokio::test]
async fn without_discovery_envoy_chooses_and_nothing_fails() {
    let fleet = fleet(2).await;
    for envoy in envoys() {
        for cluster in ["nowhere", "closed"] {
            let mut settings = settings(&[POOL]);
            settings["discovery"]["admin_cluster"] = json!(cluster);
            let mut config = config(&fleet, &settings);
            let closed = SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
            config.extra_clusters = vec![cluster_of("closed", closed)];
            let gateway = Gateway::start(&envoy, &config, 2).await;
            eventually("failed discoveries are counted", async || {
                gateway.stat("warmroute_discoveries_total.result.failed").await > 1
            })
            .await;
            for prompt in prompts(10) {
                let served = gateway.chat(&[], prompt).await.ok();
                assert_eq!((served.reason(), served.host()), ("no_hosts", "none"));
            }
            let decisions = gateway.decisions().await;
            assert_eq!(
                decisions.into_iter().collect::<Vec<_>>(),
                [("no_hosts".to_owned(), 10)]
            );
        }
    }
}

#[tokio::test]
async fn hosts_may_stand_in_the_config() {
    let fleet = fleet(3).await;
    let addresses = fleet.addresses();
    let mut settings = settings(&[POOL]);
    settings["discovery"] = json!({"hosts": [
        {"address": addresses[0]},
        {"address": addresses[1]},
        {"address": addresses[2], "role": "decode"},
    ]});
    let config = config(&fleet, &settings);
    for envoy in envoys() {
        let decoded = fleet.replicas[2].posts_received();
        let gateway = Gateway::ready(&envoy, &config, 2, 3).await;
        let served = homes(&gateway, &prompts(enough_for(2))).await;
        for replica in &fleet.replicas[..2] {
            assert!(served.iter().any(|name| name == replica.name()), "{served:?}");
        }
        assert_eq!(
            fleet.replicas[2].posts_received(),
            decoded,
            "prompts are not for a host that only decodes"
        );
        assert_eq!(gateway.stat("warmroute_discoveries_total.result.ok").await, 0);
    }
}

#[tokio::test]
async fn a_companion_cut_off_from_everything_leaves_a_stale_table_that_serves() {
    let fleet = fleet(3).await;
    let prompts = prompts(6);
    for envoy in envoys() {
        let admin_port = free_port().unwrap();
        let tunnel = Tunnel::to(SocketAddr::from(([127, 0, 0, 1], admin_port))).unwrap();
        let mut settings = settings(&[POOL]);
        settings["discovery"]["admin_cluster"] = json!("tunnel");
        settings["table_fresh_ms"] = json!(1500);
        let mut config = config(&fleet, &settings);
        config.admin_port = Some(admin_port);
        config.extra_clusters = vec![cluster_of("tunnel", tunnel.address())];
        let gateway = Gateway::ready(&envoy, &config, 2, 3).await;
        let before = homes(&gateway, &prompts).await;

        tunnel.cut();
        for replica in &fleet.replicas {
            replica.set_metrics_fault(Fault::Hang);
        }
        let failed = gateway.stat("warmroute_discoveries_total.result.failed").await;
        until_reason(&gateway, &prompts[0], "table_stale").await;
        for (prompt, home) in prompts.iter().zip(&before) {
            let served = gateway.chat(&[], prompt.as_str()).await.ok();
            assert_eq!(
                (served.reason(), served.replica()),
                ("table_stale", home.as_str())
            );
        }
        eventually("failed discoveries are counted", async || {
            gateway.stat("warmroute_discoveries_total.result.failed").await > failed
        })
        .await;

        // The hosts found last stay, and their metrics are believed again.
        for replica in &fleet.replicas {
            replica.set_metrics_fault(Fault::None);
        }
        until_reason(&gateway, &prompts[0], "home").await;
        assert_eq!(homes(&gateway, &prompts).await, before);
    }
}

/// As little as a scrape has to bring.
const GOOD_METRICS: &str = "vllm:num_requests_waiting 3.0\nvllm:num_requests_running 1.0\n";
const HOSTS: &str = "warmroute_hosts";
const TAKING_TRAFFIC: &str = "warmroute_hosts_taking_traffic";
const WAITING: &str = "warmroute_engine_requests_waiting";
const MISROUTED: &str = "warmroute_scrapes_total.result.misrouted";
const FAILED: &str = "warmroute_scrapes_total.result.failed";
const UNREADABLE: &str = "warmroute_answers_unreadable_total";
const HOST_FAILURES: &str = "warmroute_host_failures_total";
const RESTARTS: &str = "warmroute_engine_restarts_total";
