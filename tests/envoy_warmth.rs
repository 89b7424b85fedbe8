//! Real Envoys stay warm: what part of the prompts engines find in their caches before and after something is replaced.
//!
//! Traffic is steady: questions about shared documents and chats of several turns, each over a connection of its own, at
//! a load at which prompts now and then have to leave their home. The hit share is what the engines counted themselves.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests may fail and report as tests do"
)]

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use support::{CHAT, DEADLINE, Folder, Gateway, POOL, config, envoys, fleet_of, settings, text};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::MissedTickBehavior;
use warmroute_fleet::client::Client;
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy::{Envoy, write_atomically};
use warmroute_fleet::envoy_config::{EnvoyConfig, named_filter};
use warmroute_fleet::fleet::Fleet;
use warmroute_fleet::patched::another_build;

/// Engines whose caches hold one and a half times a fair part of the documents and chats.
fn engine(prefixes: usize) -> EngineConfig {
    EngineConfig {
        cache_blocks: 72 * prefixes,
        prefill_tokens_per_s: 20_000,
        decode_us_per_token: 1_000,
        max_running: 64,
    }
}

/// The nth request: each cycle asks once about every document, in an order of its own, and goes one turn on with every
/// chat.
fn request(number: usize, prefixes: usize) -> String {
    let cycle = number / prefixes;
    // A multiplier without a common factor walks through all of them.
    let prefix = (number % prefixes * [7, 11, 13, 17][cycle % 4] + cycle) % prefixes;
    let mut messages =
        vec![json!({"role": "system", "content": text(&format!("prefix {prefix}"), PREFIX_BYTES)})];
    let say = |messages: &mut Vec<Value>, role: &str, what: String| {
        messages.push(json!({"role": role, "content": text(&what, TURN_BYTES)}));
    };
    if prefix.is_multiple_of(2) {
        say(&mut messages, "user", format!("question {number} "));
    } else {
        let (chat, turns) = (cycle / TURNS, cycle % TURNS);
        for turn in 0..=turns {
            say(&mut messages, "user", format!("asks {prefix} {chat} {turn}"));
            if turn < turns {
                say(
                    &mut messages,
                    "assistant",
                    format!("answers {prefix} {chat} {turn}"),
                );
            }
        }
    }
    json!({"model": "sim", "messages": messages, "max_tokens": 8}).to_string()
}

/// Requests at a steady pace until told to stop; every answer must be good.
struct Traffic {
    stop: Arc<AtomicBool>,
    /// The push that the newest answer's config came with.
    mark: watch::Receiver<String>,
    sender: JoinHandle<()>,
}

impl Traffic {
    fn start(address: SocketAddr, prefixes: usize, from: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (marks, mark) = watch::channel(String::new());
        let (ended, marks) = (Arc::clone(&stop), Arc::new(marks));
        let sender = tokio::spawn(async move {
            let mut exchanges = JoinSet::new();
            let mut ticks = tokio::time::interval(Duration::from_millis(1000 / RATE_PER_S));
            // A machine that stalls must not make a burst of what it missed.
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut number = from;
            while !ended.load(Ordering::Relaxed) {
                ticks.tick().await;
                let (marks, url) = (Arc::clone(&marks), format!("http://{address}{CHAT}"));
                exchanges.spawn(async move {
                    let answer = Client::new()
                        .post(&url, &[], request(number, prefixes))
                        .await
                        .unwrap();
                    assert_eq!(answer.status, 200, "{}", answer.text());
                    if let Some(mark) = answer.header(MARK) {
                        marks.send_replace(mark.to_owned());
                    }
                });
                number += 1;
                while let Some(ended) = exchanges.try_join_next() {
                    ended.unwrap();
                }
            }
            while let Some(ended) = exchanges.join_next().await {
                ended.unwrap();
            }
        });
        Self { stop, mark, sender }
    }

    /// Waits until a request passes the config that came with this push.
    async fn passes(&self, push: &str) {
        let mut mark = self.mark.clone();
        let passed = tokio::time::timeout(DEADLINE, mark.wait_for(|mark| mark == push));
        passed.await.unwrap().unwrap();
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.sender.await.unwrap();
    }
}

/// Part of the prompt tokens that engines find in their caches while this time passes.
async fn hit_share(fleet: &Fleet, time: Duration) -> f64 {
    let counted = || {
        let counters = fleet.replicas.iter().map(|replica| replica.counters());
        counters.fold((0, 0), |(hits, queries), counters| {
            (
                hits + counters.prefix_hit_tokens,
                queries + counters.prefix_query_tokens,
            )
        })
    };
    let before = counted();
    tokio::time::sleep(time).await;
    let after = counted();
    (after.0 - before.0) as f64 / (after.1 - before.1) as f64
}

/// A busy machine must not look like a host that does not answer.
fn patient(mut config: EnvoyConfig) -> EnvoyConfig {
    config.pools[0].extra = json!({"connect_timeout": "20s"});
    config
}

/// Marks every answer with the push that its config came with.
fn mark(push: &str) -> Value {
    let append = json!({
        "header": {"key": MARK, "value": push},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    });
    let mutations = json!({"mutations": {"response_mutations": [{"append": append}]}});
    named_filter("mark", "header_mutation", "HeaderMutation", mutations)
}

/// Hit shares by when they were taken.
type Shares = Vec<(&'static str, f64)>;

/// Runs a course on both Envoys, with one worker and with four, one after the other: Envoys that compile modules at the
/// same time would stall each other. After each, the shares named must be at least this part of the one before.
///
/// A machine that stalls makes prompts miss; what the course itself costs, it costs in each attempt.
async fn assert_kept(limits: &[(&str, f64)], course: impl AsyncFn(&Envoy, u32) -> Shares) {
    let [oldest, newest] = envoys();
    for (envoy, concurrency) in [(&oldest, 4), (&newest, 1), (&newest, 4)] {
        for attempt in 1.. {
            let shares = course(envoy, concurrency).await;
            println!("{envoy}, {concurrency} workers: hit share {shares:.3?}");
            let share = |wanted: &str| shares.iter().find(|(label, _)| *label == wanted).unwrap().1;
            let is_lost = |(after, least): &&(&str, f64)| share(after) < least * share("before");
            let lost = limits.iter().find(is_lost);
            let is_warm = share("before") > 0.85;
            if lost.is_none() && is_warm {
                break;
            }
            assert!(
                attempt < ATTEMPTS,
                "{envoy}, {concurrency} workers: warm before: {is_warm}, then less than {lost:?} of it: {shares:.3?}"
            );
        }
    }
}

/// Pushes a setting, then another build of the module; the hit shares around each.
async fn push(envoy: &Envoy, concurrency: u32, window: Duration) -> Shares {
    let folder = Folder::new().unwrap();
    let fleet = fleet_of(HOSTS, engine(PREFIXES)).await;
    let mut pushed = patient(config(&fleet, &settings(&[POOL])));
    let lds = folder.file("lds.json");
    pushed.lds_path = Some(lds.clone());
    write_atomically(&lds, &pushed.listeners_file()).unwrap();
    let gateway = Gateway::ready(envoy, &pushed, concurrency, HOSTS as u64).await;
    let traffic = Traffic::start(gateway.process.listener("llm").unwrap(), PREFIXES, 0);
    hit_share(&fleet, WARM_UP).await;
    let mut shares = vec![("before", hit_share(&fleet, window).await)];

    let plugin = pushed.plugin.as_mut().unwrap();
    let mut settings: Value = serde_json::from_str(&plugin.json).unwrap();
    settings["table_fresh_ms"] = json!(3_001);
    plugin.json = settings.to_string();
    pushed.filters_before = vec![mark("config")];
    write_atomically(&lds, &pushed.listeners_file()).unwrap();
    traffic.passes("config").await;
    shares.push(("after a setting", hit_share(&fleet, window).await));

    let plugin = pushed.plugin.as_mut().unwrap();
    let build = another_build(&plugin.wasm, "another").unwrap();
    plugin.wasm = folder.file("another.wasm");
    std::fs::write(&plugin.wasm, build).unwrap();
    pushed.filters_before = vec![mark("build")];
    write_atomically(&lds, &pushed.listeners_file()).unwrap();
    traffic.passes("build").await;
    shares.push((
        "in the first second of a build",
        hit_share(&fleet, Duration::from_secs(1)).await,
    ));
    shares.push(("then", hit_share(&fleet, window).await));
    traffic.end().await;
    shares
}

const KEPT_BY_PUSHES: [(&str, f64); 3] = [
    ("after a setting", 0.98),
    ("in the first second of a build", 0.9),
    ("then", 0.98),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pushed_setting_or_build_costs_no_hits() {
    assert_kept(&KEPT_BY_PUSHES, async |envoy, concurrency| {
        push(envoy, concurrency, WINDOW).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes five minutes: the same over the 30 s that are promised"]
async fn a_pushed_setting_or_build_costs_no_hits_within_30_s() {
    let window = Duration::from_secs(30);
    assert_kept(&KEPT_BY_PUSHES, async |envoy, concurrency| {
        push(envoy, concurrency, window).await
    })
    .await;
}

/// Starts Envoy anew before engines that are warm: nothing is left to tell what they hold. There are so many prefixes that
/// hardly one comes a second time within the time looked at.
async fn restart(envoy: &Envoy, concurrency: u32) -> Shares {
    let prefixes = 4 * PREFIXES;
    let cycle = Duration::from_millis(prefixes as u64 * 1000 / RATE_PER_S);
    // Fast enough to compute every prompt anew: an overloaded fleet would show what overload does.
    let engine = EngineConfig {
        prefill_tokens_per_s: 50_000,
        ..engine(prefixes)
    };
    let fleet = fleet_of(HOSTS, engine).await;
    let config = patient(config(&fleet, &settings(&[POOL])));
    let gateway = Gateway::ready(envoy, &config, concurrency, HOSTS as u64).await;
    let traffic = Traffic::start(gateway.process.listener("llm").unwrap(), prefixes, 0);
    hit_share(&fleet, cycle * 3 / 2).await;
    let before = hit_share(&fleet, cycle).await;
    traffic.end().await;
    drop(gateway);
    let gateway = Gateway::start(envoy, &config, concurrency).await;
    // The chats that were begun go on.
    let traffic = Traffic::start(gateway.process.listener("llm").unwrap(), prefixes, 3 * prefixes);
    let shares = vec![
        ("before", before),
        (
            "in the first second",
            hit_share(&fleet, Duration::from_secs(1)).await,
        ),
        ("in the next two", hit_share(&fleet, Duration::from_secs(2)).await),
    ];
    traffic.end().await;
    shares
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "not reached, 0.3 of 0.9: a restarted Envoy finds only what is at home until each prefix has come once"]
async fn an_envoy_that_restarts_before_warm_engines_finds_what_they_hold_within_a_second() {
    let kept = [("in the next two", 0.9)];
    assert_kept(&kept, async |envoy, concurrency| {
        restart(envoy, concurrency).await
    })
    .await;
}

const HOSTS: usize = 4;
/// Documents, and chats, in turn.
const PREFIXES: usize = 32;
const PREFIX_BYTES: usize = 8_192;
const TURN_BYTES: usize = 600;
/// Turns of a chat before it begins anew.
const TURNS: usize = 6;
const RATE_PER_S: u64 = 40;
const WARM_UP: Duration = Duration::from_secs(3);
/// Four cycles.
const WINDOW: Duration = Duration::from_millis(3200);
const MARK: &str = "x-mark";
/// Courses that may go wrong for reasons of the machine, and one more.
const ATTEMPTS: u32 = 3;
