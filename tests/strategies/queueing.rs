//! The strategies compared on a small queueing model in virtual time.
//!
//! Eight hosts, each a FIFO prefill of 10 000 tokens a second with 5 ms for every request, an LRU cache of prefix
//! blocks, and a decode of one second that slows nobody. Arrivals are Poisson. One to four workers share their tallies
//! and placements every 20 ms, and the table is polled every 500 ms. No engine is that simple: the model is here to rank
//! strategies, not to foretell times.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use warmroute::candidate::{Charge, Fleet};
use warmroute::chunk::{ChunkHash, PrefixKey, PrefixKeys};
use warmroute::config::{StrategyName, Thresholds};
use warmroute::host_table::{Host, Load, Slot};
use warmroute::index::{IndexSettings, NewPlacement, PrefixIndex};
use warmroute::journal::{ARCHIVED_RUNS, Placement, RUN_BYTES};
use warmroute::recent::{Homes, RecentPrefixes, RecentSettings};
use warmroute::strategy::{Query, RecomputeWeight, Rng, StrategySettings, decide};

use super::fixture::{ALL, T0, fleet_of, host, settings, table, with_thresholds};

const HOSTS: u16 = 8;
const TOKENS_PER_S: u64 = 10_000;
const REQUEST_US: u64 = 5_000;
const DECODE_US: u64 = 1_000_000;
const SECONDS: u64 = 60;
const SEEDS: u64 = 3;

/// The texts of a prompt: (id, bytes).
type Parts = Vec<(u64, u32)>;

struct Scenario {
    name: &'static str,
    requests_per_s: u64,
    cache_bytes: u64,
    prompt: fn(&mut Rng, u64) -> Parts,
}

const SCENARIOS: [Scenario; 4] = [
    Scenario {
        name: "64 shared prefixes of 12 KiB",
        requests_per_s: 20,
        cache_bytes: 320 << 10,
        prompt: |rng, n| vec![(rng.below(64) as u64, 12 << 10), (1 << 32 | n, 1 << 10)],
    },
    Scenario {
        name: "one hot prefix of 8 KiB on 70 %",
        requests_per_s: 60,
        cache_bytes: 1 << 20,
        prompt: |rng, n| {
            let hot = rng.below(10) < 7;
            vec![
                (if hot { 1 } else { 2 << 32 | n }, 8 << 10),
                (1 << 32 | n, 1 << 10),
            ]
        },
    },
    Scenario {
        name: "no sharing, 0.3 to 30 KiB",
        requests_per_s: 24,
        cache_bytes: 1 << 20,
        prompt: |rng, n| {
            // Three of four are short, the rest up to 30 KiB: mean 2000 tokens.
            let bytes = if rng.below(4) < 3 {
                300 + rng.below(9_000)
            } else {
                6_000 + rng.below(24_000)
            };
            vec![(1 << 32 | n, u32::try_from(bytes).unwrap())]
        },
    },
    Scenario {
        name: "96 conversations that grow by 2 KiB a turn",
        requests_per_s: 30,
        cache_bytes: 4 << 20,
        prompt: |rng, n| {
            // The turn of a conversation follows from the time, so that the prompt needs no state.
            let chat = rng.below(96) as u64;
            let turn = n / 96;
            let turns = (0..=turn % 12).map(|t| (3 << 32 | chat << 20 | (turn / 12) << 8 | t, 2 << 10));
            [(7, 600)].into_iter().chain(turns).collect()
        },
    },
];

fn keys_of(parts: &Parts) -> PrefixKeys {
    let (mut keys, mut chain, mut start) = (Vec::new(), 0u64, 0u32);
    for &(id, bytes) in parts {
        let end = start + bytes;
        let mut at = start;
        while at < end {
            let step = if at < 4096 { 256 } else { 1024 };
            at = (at / step * step + step).min(end);
            chain = Rng::new(chain ^ Rng::new(id << 16 | u64::from(at - start)).next_u64()).next_u64();
            keys.push(PrefixKey {
                hash: ChunkHash(chain),
                end_bytes: at,
            });
        }
        start = end;
    }
    PrefixKeys {
        keys,
        prompt_bytes: start,
    }
}

#[derive(Default)]
struct Engine {
    free_us: u64,
    /// Key → (last use, bytes), and back.
    cached: BTreeMap<u64, (u64, u32)>,
    by_use: BTreeMap<u64, u64>,
    cached_bytes: u64,
    uses: u64,
    waiting: u32,
    running: u32,
    worked_us: u64,
    queried_tokens: u64,
    hit_tokens: u64,
}

impl Engine {
    /// Takes a request; returns when its first token is out, and the bytes found in the cache.
    fn take(&mut self, keys: &PrefixKeys, capacity_bytes: u64, now_us: u64) -> (u64, u32) {
        let matched = keys
            .keys
            .iter()
            .take_while(|k| self.cached.contains_key(&k.hash.0))
            .last();
        let matched_bytes = matched.map_or(0, |k| k.end_bytes);
        // Deepest first, so that the tail of a prompt is the first to go.
        let mut ends = keys.keys.iter().rev().peekable();
        while let Some(key) = ends.next() {
            self.uses += 1;
            let bytes = key.end_bytes - ends.peek().map_or(0, |k| k.end_bytes);
            if let Some((old, _)) = self.cached.insert(key.hash.0, (self.uses, bytes)) {
                self.by_use.remove(&old);
            } else {
                self.cached_bytes += u64::from(bytes);
            }
            self.by_use.insert(self.uses, key.hash.0);
        }
        while self.cached_bytes > capacity_bytes {
            let (_, key) = self.by_use.pop_first().unwrap();
            self.cached_bytes -= u64::from(self.cached.remove(&key).unwrap().1);
        }
        let work_us =
            REQUEST_US + u64::from(keys.prompt_bytes - matched_bytes) / 4 * 1_000_000 / TOKENS_PER_S;
        self.worked_us += work_us;
        self.queried_tokens += u64::from(keys.prompt_bytes / 4);
        self.hit_tokens += u64::from(matched_bytes / 4);
        self.free_us = self.free_us.max(now_us) + work_us;
        (self.free_us, matched_bytes)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Outcome {
    mean_ms: f64,
    p99_ms: f64,
    hit_share: f64,
    /// In the five seconds that begin a second after the middle.
    middle_hit_share: f64,
    /// Work of the busiest host ÷ mean.
    max_mean_load: f64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    FirstToken(usize),
    End(usize),
    Poll,
    Arrival,
}

struct Worker {
    fleet: Fleet,
    recent: RecentPrefixes,
    rng: Rng,
    synced_us: u64,
    index: PrefixIndex,
    /// Placements of others replayed so far.
    replayed: usize,
}

/// What the workers know of the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Knows {
    /// Nothing but homes: what the index is weighed against.
    Homes,
    /// What each host holds.
    Index,
    /// The same, but half-way all workers are replaced by new ones that find nothing but the journals.
    IndexUntilLost,
}

/// What a variant changes of what the worker knows.
type Adjust = fn(&mut Homes);

fn run(
    scenario: &Scenario,
    strategy: &StrategySettings,
    workers: usize,
    knows: Knows,
    adjust: Adjust,
) -> Outcome {
    let outcomes: Vec<Outcome> = (1..=SEEDS)
        .map(|seed| run_seed(scenario, strategy, workers, knows, adjust, seed))
        .collect();
    let mean = |of: fn(&Outcome) -> f64| outcomes.iter().map(of).sum::<f64>() / outcomes.len() as f64;
    Outcome {
        mean_ms: mean(|o| o.mean_ms),
        p99_ms: mean(|o| o.p99_ms),
        hit_share: mean(|o| o.hit_share),
        middle_hit_share: mean(|o| o.middle_hit_share),
        max_mean_load: mean(|o| o.max_mean_load),
    }
}

fn run_seed(
    scenario: &Scenario,
    strategy: &StrategySettings,
    workers: usize,
    knows: Knows,
    adjust: Adjust,
    seed: u64,
) -> Outcome {
    let mut traffic = Rng::new(seed);
    let mut engines: Vec<Engine> = (0..HOSTS).map(|_| Engine::default()).collect();
    let new_worker = |n: usize| Worker {
        fleet: fleet_of(hosts_of(scenario)),
        recent: RecentPrefixes::new(RecentSettings::default()),
        rng: Rng::new(seed * 100 + n as u64),
        synced_us: 0,
        index: PrefixIndex::new(IndexSettings::default()),
        replayed: 0,
    };
    let mut workers: Vec<Worker> = (0..workers).map(new_worker).collect();
    let mut is_lost = false;
    let mut middle_bytes = (0u64, 0u64);
    let mut placements: Vec<(usize, Placement)> = Vec::new();
    let mut events = BinaryHeap::from([Reverse((0, Event::Poll)), Reverse((1000, Event::Arrival))]);
    let mut requests: Vec<(usize, Charge)> = Vec::new();
    let (mut ttft_us, mut prompt_bytes, mut hit_bytes) = (Vec::new(), 0u64, 0u64);
    while let Some(Reverse((now_us, event))) = events.pop() {
        let now_ms = T0 + now_us / 1000;
        match event {
            Event::FirstToken(n) => {
                let (worker, charge) = &mut requests[n];
                let engine = &mut engines[usize::from(charge.slot.0)];
                engine.waiting -= 1;
                engine.running += 1;
                let fleet = &mut workers[*worker].fleet;
                fleet.learn_prefill(charge, now_ms);
                fleet.prefill_done(charge, now_ms);
                fleet.succeeded(charge.slot, now_ms);
                events.push(Reverse((now_us + DECODE_US, Event::End(n))));
            }
            Event::End(n) => {
                let (worker, charge) = &mut requests[n];
                engines[usize::from(charge.slot.0)].running -= 1;
                workers[*worker].fleet.finish(charge, now_ms);
            }
            Event::Poll => {
                if knows == Knows::IndexUntilLost && !is_lost && now_us >= SECONDS * 500_000 {
                    is_lost = true;
                    for (n, worker) in workers.iter_mut().enumerate() {
                        *worker = new_worker(n);
                        worker.index.update_hosts(&table(hosts_of(scenario)));
                        let journaled = newest_in_journals(&placements);
                        journaled.iter().for_each(|(_, placement)| {
                            worker.index.replay(placement, now_ms);
                        });
                        worker.replayed = placements.len();
                    }
                }
                let mut hosts = hosts_of(scenario);
                for (host, engine) in hosts.iter_mut().zip(&engines) {
                    host.sampled_ms = now_ms;
                    host.load = Load {
                        waiting: Some(engine.waiting.saturating_sub(1)),
                        running: Some(engine.running + engine.waiting.min(1)),
                        prefix_queries: Some(engine.queried_tokens),
                        prefix_hits: Some(engine.hit_tokens),
                        ..host.load.clone()
                    };
                }
                let mut polled = table(hosts);
                polled.published_ms = now_ms;
                for worker in &mut workers {
                    worker.fleet.update(&polled, now_ms);
                    worker.index.update_hosts(&polled);
                }
                if now_us < SECONDS * 1_000_000 {
                    events.push(Reverse((now_us + 500_000, Event::Poll)));
                }
            }
            Event::Arrival => {
                let at = traffic.below(workers.len());
                if workers.len() > 1 && now_us >= workers[at].synced_us + 20_000 {
                    let tallies: Vec<(Slot, u32, u32, u64)> = workers
                        .iter()
                        .enumerate()
                        .filter(|(n, _)| *n != at)
                        .flat_map(|(_, w)| w.fleet.own_tallies(now_ms).collect::<Vec<_>>())
                        .collect();
                    workers[at].fleet.set_others(tallies.into_iter(), now_ms);
                    workers[at].synced_us = now_us;
                    let worker = &mut workers[at];
                    for (from, placement) in &placements[worker.replayed..] {
                        if *from != at {
                            worker.index.replay(placement, now_ms);
                        }
                    }
                    worker.replayed = placements.len();
                }
                let n = requests.len();
                let keys = keys_of(&(scenario.prompt)(&mut traffic, n as u64));
                let worker = &mut workers[at];
                let mut homes = worker.recent.observe(&keys, worker.fleet.traffic(), now_ms);
                adjust(&mut homes);
                let mut query = Query::new(homes, keys.prompt_bytes, now_ms);
                if knows != Knows::Homes {
                    query.matches = worker.index.lookup(&keys, now_ms);
                }
                let decision = decide(strategy, &mut worker.fleet, &query, &mut worker.rng);
                let slot = decision.hosts.first().unwrap();
                let charge = worker.fleet.charge(slot, decision.uncached_tokens, now_ms);
                let placed = NewPlacement {
                    slot,
                    uncached_tokens: decision.uncached_tokens,
                    prompt_tokens: keys.prompt_bytes / 4,
                };
                if let Some(placement) = worker.index.place(&keys, placed, now_ms) {
                    placements.push((at, placement));
                }
                let engine = &mut engines[usize::from(slot.0)];
                let (first_us, matched_bytes) = engine.take(&keys, scenario.cache_bytes, now_us);
                engine.waiting += 1;
                events.push(Reverse((first_us, Event::FirstToken(n))));
                requests.push((at, charge));
                let since_middle_us = now_us.saturating_sub(SECONDS * 500_000);
                if (1_000_000..6_000_000).contains(&since_middle_us) {
                    middle_bytes.0 += u64::from(keys.prompt_bytes);
                    middle_bytes.1 += u64::from(matched_bytes);
                }
                // The first ten seconds warm up.
                if now_us > 10_000_000 {
                    ttft_us.push(first_us - now_us);
                    prompt_bytes += u64::from(keys.prompt_bytes);
                    hit_bytes += u64::from(matched_bytes);
                }
                let uniform = (traffic.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
                let gap_s = -(1.0 - uniform).ln() / scenario.requests_per_s as f64;
                let gap_us = u64::try_from(Duration::from_secs_f64(gap_s).as_micros()).unwrap();
                if now_us < SECONDS * 1_000_000 {
                    events.push(Reverse((now_us + gap_us, Event::Arrival)));
                }
            }
        }
    }
    ttft_us.sort_unstable();
    let works: Vec<f64> = engines.iter().map(|e| e.worked_us as f64).collect();
    Outcome {
        mean_ms: ttft_us.iter().sum::<u64>() as f64 / ttft_us.len() as f64 / 1000.0,
        p99_ms: ttft_us[ttft_us.len() * 99 / 100] as f64 / 1000.0,
        hit_share: hit_bytes as f64 / prompt_bytes as f64,
        middle_hit_share: middle_bytes.1 as f64 / middle_bytes.0 as f64,
        max_mean_load: works.iter().copied().fold(0.0, f64::max) * works.len() as f64
            / works.iter().sum::<f64>(),
    }
}

/// What one worker's journal and its archive hold: the newest of 120 KiB.
fn newest_in_journals(placements: &[(usize, Placement)]) -> &[(usize, Placement)] {
    let mut bytes = 0;
    let is_held = |(_, placement): &&(usize, Placement)| {
        bytes += 17 + 8 * placement.keys.len();
        bytes <= RUN_BYTES * usize::from(ARCHIVED_RUNS)
    };
    let count = placements.iter().rev().take_while(is_held).count();
    &placements[placements.len() - count..]
}

fn hosts_of(scenario: &Scenario) -> Vec<Host> {
    let mut hosts: Vec<Host> = (0..HOSTS).map(host).collect();
    for host in &mut hosts {
        host.load.kv_capacity_tokens = Some(scenario.cache_bytes / 4);
    }
    hosts
}

fn report(scenario: &Scenario, name: &str, workers: usize, o: Outcome) {
    println!(
        "{:<43} {workers} workers  {name:<24} mean {:7.1} ms  p99 {:8.1} ms  hits {:4.1} %  load {:4.2}",
        scenario.name,
        o.mean_ms,
        o.p99_ms,
        o.hit_share * 100.0,
        o.max_mean_load
    );
}

fn as_it_is(_: &mut Homes) {}

#[test]
fn hybrid_beats_the_others_where_each_is_weak() {
    for workers in [1, 4] {
        let mut rows = Vec::new();
        for scenario in &SCENARIOS {
            let of = |strategy| {
                let outcome = run(scenario, &settings(strategy), workers, Knows::Index, as_it_is);
                report(scenario, strategy.as_str(), workers, outcome);
                outcome
            };
            let hybrid = settings(StrategyName::Hybrid);
            let without_index = run(scenario, &hybrid, workers, Knows::Homes, as_it_is);
            report(scenario, "hybrid without index", workers, without_index);
            rows.push((ALL.map(of), without_index));
        }
        for cost in [3, 4] {
            let row = |n: usize| {
                let (outcomes, without_index) = rows[n];
                (outcomes, outcomes[cost], without_index)
            };
            let ([round_robin, least_outstanding, ..], chosen, without_index) = row(0);
            assert!(chosen.mean_ms < round_robin.mean_ms && chosen.mean_ms < least_outstanding.mean_ms);
            assert!(chosen.mean_ms < without_index.mean_ms);
            let ([_, _, prefix_hash, ..], chosen, without_index) = row(1);
            assert!(chosen.p99_ms * 3.0 <= prefix_hash.p99_ms);
            assert!(chosen.mean_ms <= 1.05 * without_index.mean_ms);
            let ([_, least_outstanding, ..], chosen, without_index) = row(2);
            assert!(chosen.mean_ms <= least_outstanding.mean_ms);
            assert!(chosen.mean_ms <= 1.02 * without_index.mean_ms);
            let ([_, least_outstanding, ..], chosen, without_index) = row(3);
            assert!(chosen.mean_ms < least_outstanding.mean_ms && chosen.mean_ms < without_index.mean_ms);
        }
    }
}

#[test]
fn hybrid_keeps_its_hits_when_only_the_journals_survive() {
    for scenario in [&SCENARIOS[0], &SCENARIOS[3]] {
        let hybrid = settings(StrategyName::Hybrid);
        let [kept, lost] = [Knows::Index, Knows::IndexUntilLost].map(|knows| {
            let outcome = run(scenario, &hybrid, 1, knows, as_it_is);
            report(scenario, &format!("hybrid, {knows:?}"), 1, outcome);
            outcome.middle_hit_share
        });
        println!("{}: {lost:.3} of {kept:.3}", scenario.name);
        assert!(lost >= 0.9 * kept, "{}: {lost} of {kept}", scenario.name);
    }
}

#[test]
fn the_defaults_are_no_worse_than_what_was_weighed_against_them() {
    let hybrid = settings(StrategyName::Hybrid);
    let fixed = |permille| StrategySettings {
        recompute_weight: RecomputeWeight::Fixed { permille },
        ..hybrid.clone()
    };
    let waiting = with_thresholds(Thresholds {
        waiting_requests: Some(2),
        ..Thresholds::default()
    });
    let in_flight = with_thresholds(Thresholds {
        in_flight: Some(12),
        ..Thresholds::default()
    });
    let variants: [(&str, StrategySettings, Adjust); 6] = [
        ("hybrid", hybrid.clone(), as_it_is),
        ("fixed depth", hybrid.clone(), |homes| {
            homes.home = homes.fixed_home
        }),
        ("weight 0", fixed(0), as_it_is),
        ("weight 1", fixed(1000), as_it_is),
        ("waiting 2", waiting, as_it_is),
        ("in flight 12", in_flight, as_it_is),
    ];
    for scenario in &SCENARIOS {
        let means = variants.clone().map(|(name, strategy, adjust)| {
            let outcome = run(scenario, &strategy, 1, Knows::Index, adjust);
            report(scenario, name, 1, outcome);
            outcome.mean_ms
        });
        let [chosen, rest @ ..] = means;
        for (mean, (name, ..)) in rest.iter().zip(&variants[1..]) {
            // A third covers where prompts are few and the queue is empty: there, leaving home is never worth it.
            assert!(
                chosen <= 1.33 * mean,
                "{}: {name} {mean} against {chosen}",
                scenario.name
            );
        }
    }
}
