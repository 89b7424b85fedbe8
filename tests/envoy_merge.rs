//! A real Envoy with more workers than read each other's journals one by one: placements travel between all of them.
//!
//! Every test runs on the oldest and the newest Envoy under test.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do, and read a clock for their deadlines"
)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use support::{CHAT, Gateway, POOL, Served, chat, config, envoys, fleet, settings, text};
use warmroute_fleet::client::Client;
use warmroute_fleet::patience::let_run;

/// Prompt bytes believed cached on the chosen host, and bytes of the prompt.
fn matched(served: &Served) -> (u64, u64) {
    let (matched, prompt) = served.header("x-warmroute-matched").split_once('/').unwrap();
    (matched.parse().unwrap(), prompt.parse().unwrap())
}

async fn ask(client: &Client, url: &str, body: String) -> Served {
    let answer = client.post(url, &[], body).await.unwrap();
    Served { answer }.ok()
}

#[tokio::test]
async fn twelve_busy_workers_merge_their_journals_and_lose_no_placement() {
    let fleet = fleet(4).await;
    let mut settings = settings(&[POOL]);
    settings["strategy"] = json!("cache_aware");
    let config = config(&fleet, &settings);
    for envoy in envoys() {
        let gateway = Gateway::ready(&envoy, &config, WORKERS, 4).await;
        let url = format!("{}{CHAT}", gateway.process.url());
        let stop = Arc::new(AtomicBool::new(false));
        // Connections stay with the worker that accepted them, so this many meet nearly all of them.
        let clients = (0..48).map(|client| {
            let (url, stop) = (url.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let connection = Client::new();
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    let prompt = chat(&text(&format!("background {client} {number}"), 200));
                    ask(&connection, &url, prompt).await;
                    number += 1;
                }
            })
        });
        let clients: Vec<_> = clients.collect();
        let started = Instant::now();
        let mut merges = 0;
        while merges < MERGES {
            assert!(started.elapsed() < DEADLINE, "{envoy}: {merges} merges");
            merges = gateway.stat("warmroute_journal_merges_total").await;
        }
        for number in 0..10 {
            let prompt = chat(&text(&format!("crossing {envoy} {number}"), PROMPT_BYTES));
            let placed = ask(&Client::new(), &url, prompt.clone()).await;
            assert_eq!(matched(&placed).0, 0, "{:?}", placed.answer.headers);
            let_run(SHARED_WITHIN).await;
            // A connection of its own: the kernel hands it to any worker.
            for _ in 0..3 {
                let again = ask(&Client::new(), &url, prompt.clone()).await;
                let (known, all) = matched(&again);
                assert!(
                    known == all && all >= PROMPT_BYTES as u64,
                    "{:?}",
                    again.answer.headers
                );
            }
        }
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.await.unwrap();
        }
        for lost in [
            "warmroute_placements_missed_total",
            "warmroute_shared_blobs_rejected_total",
            "warmroute_journal_slot_missing_total",
        ] {
            assert_eq!(gateway.stat(lost).await, 0, "{envoy}: {lost}");
        }
    }
}

const WORKERS: u32 = 12;
/// So much that no queue of the background is worth computing it again elsewhere.
const PROMPT_BYTES: usize = 60_000;
/// Enough that every worker has read merged journals many times.
const MERGES: u64 = 20;
const DEADLINE: Duration = Duration::from_secs(60);
/// Publication, merge and reading take 50 ms at most; the machine that tests has fewer cores than workers.
const SHARED_WITHIN: Duration = Duration::from_millis(400);
