//! Real Envoys remember which replica holds what: placements travel between workers, die with their engines, and outlive
//! configurations.
//!
//! Every test runs on the oldest and the newest Envoy under test.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use support::{
    CHAT, Folder, Gateway, POOL, Served, chat, config, enough_for, envoys, eventually, fleet, fleet_of,
    settings, text,
};
use warmroute_fleet::client::Client;
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy::write_atomically;
use warmroute_fleet::fleet::Fleet;
use warmroute_fleet::patience::let_run;
use warmroute_fleet::replica::Replica;

/// Prompts that have nothing in common.
fn prompts(kind: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|number| chat(&text(&format!("{kind} {number}"), PROMPT_BYTES)))
        .collect()
}

/// Settings with a strategy.
fn settings_of(strategy: &str) -> Value {
    let mut settings = settings(&[POOL]);
    settings["strategy"] = json!(strategy);
    settings
}

/// Prompt bytes believed cached on the chosen host, and bytes of the prompt.
fn matched(served: &Served) -> (u64, u64) {
    let (matched, prompt) = served.header("x-warmroute-matched").split_once('/').unwrap();
    (matched.parse().unwrap(), prompt.parse().unwrap())
}

/// Nothing of the prompt, or all of it, is believed cached.
fn is_cold(served: &Served) -> bool {
    matched(served).0 == 0
}

fn is_warm(served: &Served) -> bool {
    let (matched, prompt) = matched(served);
    matched == prompt && prompt >= PROMPT_BYTES as u64
}

/// Sends a chat over a connection of its own: the kernel hands it to any worker.
async fn anywhere(gateway: &Gateway, body: &str) -> Served {
    let url = format!("{}{CHAT}", gateway.process.url());
    Served {
        answer: Client::new().post(&url, &[], body.to_owned()).await.unwrap(),
    }
    .ok()
}

/// Connections that each worker accepted, by the worker.
async fn connections(gateway: &Gateway) -> BTreeMap<String, u64> {
    let stats = gateway.process.stats("listener.127.").await.unwrap();
    stats
        .into_iter()
        .filter(|(name, _)| name.contains(".worker_") && name.ends_with(".downstream_cx_total"))
        .collect()
}

/// Workers that accepted a connection since.
async fn workers_since(gateway: &Gateway, before: &BTreeMap<String, u64>) -> Vec<String> {
    let now = connections(gateway).await;
    let is_new = |(name, count): &(&String, &u64)| before.get(*name) != Some(*count);
    now.iter().filter(is_new).map(|(name, _)| name.clone()).collect()
}

#[tokio::test]
async fn a_placement_on_one_worker_is_used_on_another_within_100_ms() {
    let fleet = fleet(4).await;
    for strategy in ["hybrid", "cache_aware"] {
        let config = config(&fleet, &settings_of(strategy));
        for envoy in envoys() {
            let gateway = Gateway::ready(&envoy, &config, WORKERS, 4).await;
            let mut tried = 0;
            let mut crossings = 0;
            for prompt in prompts("crossing", 400) {
                let before = connections(&gateway).await;
                let first = anywhere(&gateway, &prompt).await;
                assert!(is_cold(&first), "{strategy}: {:?}", first.answer.headers);
                let_run(SHARED_WITHIN).await;
                let second = anywhere(&gateway, &prompt).await;
                let workers = workers_since(&gateway, &before).await;
                assert!(
                    is_warm(&second),
                    "{strategy}: not known on all of {workers:?}: {:?}",
                    second.answer.headers
                );
                assert_eq!(second.replica(), first.replica());
                assert_eq!(second.header("x-warmroute-strategy"), strategy);
                tried += 1;
                crossings += usize::from(workers.len() == 2);
                if crossings >= CROSSINGS {
                    break;
                }
            }
            assert!(
                crossings >= CROSSINGS,
                "{crossings} of {tried} went to two workers"
            );
            assert_eq!(gateway.stat("warmroute_placements_missed_total").await, 0);
        }
    }
}

#[tokio::test]
async fn a_restarted_engine_is_believed_to_hold_nothing_within_one_poll() {
    let mut fleet = fleet(2).await;
    let mut settings = settings_of("cache_aware");
    // Long enough for a poll to have its effect before the next one begins.
    settings["metrics"]["interval_ms"] = json!(500);
    let config = config(&fleet, &settings);
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, WORKERS, 2).await;
        let prompts = prompts("restart", enough_for(2));
        let mut hosts = Vec::new();
        for prompt in &prompts {
            let placed = gateway.chat(&[], prompt.as_str()).await.ok();
            assert!(is_cold(&placed), "{:?}", placed.answer.headers);
            hosts.push(placed.replica().to_owned());
        }
        let restarted = fleet.replicas[0].name().to_owned();
        assert!(hosts.contains(&restarted), "{hosts:?}");
        // A connection that is still busy is replaced by another, which any worker may get.
        let_run(SHARED_WITHIN).await;
        for prompt in &prompts {
            let served = gateway.chat(&[], prompt.as_str()).await.ok();
            assert!(is_warm(&served), "{:?}", served.answer.headers);
        }
        fleet.replicas[0].restart().await.unwrap();
        let polls_before = fleet.replicas[0].metrics_reads();
        for (prompt, host) in prompts.iter().zip(&hosts) {
            // Once a second poll has begun, the first one counts.
            let mut polls = fleet.replicas[0].metrics_reads() - polls_before;
            let mut served = gateway.chat(&[], prompt.as_str()).await.ok();
            while *host == restarted && is_warm(&served) && polls < 2 {
                polls = fleet.replicas[0].metrics_reads() - polls_before;
                served = gateway.chat(&[], prompt.as_str()).await.ok();
            }
            let expected = if *host == restarted {
                is_cold(&served)
            } else {
                is_warm(&served)
            };
            assert!(expected, "{host} held it: {:?}", served.answer.headers);
        }
    }
}

#[tokio::test]
async fn a_config_push_keeps_what_the_workers_know_of_the_caches() {
    let folder = Folder::new().unwrap();
    let fleet = fleet(3).await;
    for (number, envoy) in envoys().iter().enumerate() {
        let mut settings = settings_of("cache_aware");
        let mut pushed = config(&fleet, &settings);
        let lds = folder.file(format!("lds-{number}.json"));
        pushed.lds_path = Some(lds.clone());
        write_atomically(&lds, &pushed.listeners_file()).unwrap();
        let gateway = Gateway::ready(envoy, &pushed, WORKERS, 3).await;
        let prompts = prompts("push", 12);
        let mut hosts = Vec::new();
        for prompt in &prompts {
            hosts.push(anywhere(&gateway, prompt).await.replica().to_owned());
        }
        // So long may the other workers be behind.
        let_run(SHARED_WITHIN).await;
        // The strategy shows which of the configurations decided.
        settings["strategy"] = json!("hybrid");
        pushed.plugin.as_mut().unwrap().json = settings.to_string();
        write_atomically(&lds, &pushed.listeners_file()).unwrap();
        let mut decided_by_new = 0;
        eventually("requests pass the new config", async || {
            for (prompt, host) in prompts.iter().zip(&hosts) {
                let served = anywhere(&gateway, prompt).await;
                assert!(is_warm(&served), "{:?}", served.answer.headers);
                assert_eq!(served.replica(), host);
                decided_by_new += usize::from(served.header("x-warmroute-strategy") == "hybrid");
            }
            decided_by_new > 40
        })
        .await;
    }
}

/// Replicas whose engines are at work.
fn running(fleet: &Fleet) -> impl Iterator<Item = &Replica> {
    fleet.replicas.iter().filter(|replica| replica.queue().1 > 0)
}

#[tokio::test]
async fn a_prompt_that_had_to_leave_its_home_returns_to_where_it_is_warm() {
    // A prompt of 160 000 tokens keeps an engine busy for longer than it takes to find some that leave it.
    let engine = EngineConfig {
        cache_blocks: 1 << 16,
        prefill_tokens_per_s: 10_000,
        decode_us_per_token: 0,
        max_running: 64,
    };
    let fleet = fleet_of(3, engine).await;
    for strategy in ["hybrid", "cache_aware"] {
        let config = config(&fleet, &settings_of(strategy));
        for envoy in envoys() {
            let gateway = Gateway::ready(&envoy, &config, 1, 3).await;
            let mut long: Value =
                serde_json::from_str(&chat(&text(&format!("{strategy} {envoy}"), 640_000))).unwrap();
            long["stream"] = json!(true);
            let long = gateway.chat_later(&[], long.to_string());
            eventually("the long prompt is in an engine", async || {
                running(&fleet).count() == 1
            })
            .await;

            let mut moved = Vec::new();
            // One in three has the busy host as its home.
            for prompt in prompts(&format!("{strategy} moved"), enough_for(3)) {
                if moved.len() == MOVED {
                    break;
                }
                let served = gateway.chat(&[], prompt.as_str()).await.ok();
                assert!(is_cold(&served), "{:?}", served.answer.headers);
                if served.reason() == "overflow_cost" {
                    moved.push((prompt, served.replica().to_owned()));
                }
            }
            assert!(!moved.is_empty(), "no prompt had the busy host as its home");
            let at_work: Vec<&str> = running(&fleet).map(Replica::name).collect();
            let [busy] = at_work[..] else {
                panic!("the long prompt was over before the others were placed: {at_work:?}");
            };
            long.abort();
            eventually("the long prompt is given up", async || {
                running(&fleet).count() == 0
            })
            .await;
            for (prompt, host) in &moved {
                assert_ne!(host, busy);
                let served = gateway.chat(&[], prompt.as_str()).await.ok();
                assert_eq!((served.reason(), served.replica()), ("warm_host", host.as_str()));
                assert!(is_warm(&served), "{:?}", served.answer.headers);
            }
        }
    }
}

/// Several times the depth at which prompts part.
const PROMPT_BYTES: usize = 6000;
const WORKERS: u32 = 4;
/// How soon one worker has to know what another placed.
const SHARED_WITHIN: Duration = Duration::from_millis(100);
/// Prompts that have to have met two workers.
const CROSSINGS: usize = 5;
/// Prompts that have to have left their home.
const MOVED: usize = 4;
