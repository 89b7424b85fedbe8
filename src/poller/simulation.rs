//! A companion, an admin interface and engines in memory, over simulated time.

use std::collections::BTreeMap;

use super::tests::{admin_answer, config};
use super::*;
use crate::blob::tests::Random;
use crate::host_table::{Health, Host};

/// How an engine answers scrapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    Answers,
    /// Envoy resets the call.
    Refuses,
    /// Nothing comes back, not even a failure.
    Silent,
    /// Envoy's fallback picks another host.
    AnsweredByAnother,
}

struct Engine {
    mood: Mood,
    health: Health,
    started_ms: u64,
    queries: u64,
    waiting: u32,
}

struct Simulation {
    now_ms: u64,
    poller: Poller,
    engines: BTreeMap<String, Engine>,
    admin_works: bool,
    /// Answers on their way: (when, token, cluster, address asked).
    pending: Vec<(u64, Call)>,
    random: Random,
    max_scrapes_in_flight: usize,
    /// Times of the scrapes started, per address.
    scrapes: BTreeMap<String, Vec<u64>>,
    published: Vec<HostTable>,
    tick_times: Vec<std::time::Duration>,
    discovery_times: Vec<std::time::Duration>,
}

const START_MS: u64 = 1_700_000_000_000;

impl Simulation {
    fn new(hosts: usize, latency_seed: u64) -> Self {
        let mut simulation = Self {
            now_ms: START_MS,
            poller: Poller::new(config()),
            engines: BTreeMap::new(),
            admin_works: true,
            pending: Vec::new(),
            random: Random::seeded(latency_seed),
            max_scrapes_in_flight: 0,
            scrapes: BTreeMap::new(),
            published: Vec::new(),
            tick_times: Vec::new(),
            discovery_times: Vec::new(),
        };
        for number in 0..hosts {
            simulation.add(number);
        }
        simulation
    }

    fn address(number: usize) -> String {
        format!("10.0.{}.{}:8000", number / 250, number % 250)
    }

    fn add(&mut self, number: usize) {
        let engine = Engine {
            mood: Mood::Answers,
            health: Health::Healthy,
            started_ms: self.now_ms - 60_000,
            queries: 1_000,
            waiting: u32::try_from(number % 7).unwrap(),
        };
        self.engines.insert(Self::address(number), engine);
    }

    fn engine(&mut self, number: usize) -> &mut Engine {
        self.engines.get_mut(&Self::address(number)).unwrap()
    }

    fn host(&mut self, number: usize) -> Option<Host> {
        let now_ms = self.now_ms;
        let address = Self::address(number);
        self.poller
            .table(now_ms)
            .hosts
            .iter()
            .find(|host| host.address == address)
            .cloned()
    }

    /// Runs until `until_ms` after the start, a millisecond at a time.
    fn run_until(&mut self, until_ms: u64) {
        let mut next_tick_ms = self.now_ms;
        while self.now_ms < START_MS + until_ms {
            let mut answered = false;
            while let Some(index) = self.pending.iter().position(|(at_ms, _)| *at_ms <= self.now_ms) {
                let (_, call) = self.pending.swap_remove(index);
                self.answer(&call);
                answered = true;
            }
            if answered || self.now_ms >= next_tick_ms {
                self.tick();
                next_tick_ms = self.now_ms + self.poller.tick_interval_ms();
            }
            let now_ms = self.now_ms;
            self.published.extend(self.poller.take_publishable(now_ms));
            self.now_ms += 1;
        }
    }

    #[expect(clippy::disallowed_methods, reason = "measures the cost of a tick")]
    fn tick(&mut self) {
        let started = std::time::Instant::now();
        let calls = self.poller.tick(self.now_ms);
        self.tick_times.push(started.elapsed());
        for call in calls {
            if call.cluster != "admin" {
                self.scrapes
                    .entry(call.authority.clone())
                    .or_default()
                    .push(self.now_ms);
            }
            let silent = self
                .engines
                .get(&call.authority)
                .is_some_and(|engine| engine.mood == Mood::Silent);
            let latency_ms = if silent {
                u64::MAX / 2
            } else {
                2 + self.random.below(15)
            };
            self.pending.push((self.now_ms + latency_ms, call));
        }
        let in_flight = |call: &&InFlight| call.kind != CallKind::Discovery;
        let scrapes = self.poller.in_flight.iter().filter(in_flight).count();
        self.max_scrapes_in_flight = self.max_scrapes_in_flight.max(scrapes);
    }

    #[expect(clippy::disallowed_methods, reason = "measures the cost of a discovery")]
    fn answer(&mut self, call: &Call) {
        if call.cluster == "admin" {
            if !self.admin_works {
                return self.poller.on_failure(call.token, self.now_ms);
            }
            let hosts: Vec<(String, Health)> = self
                .engines
                .iter()
                .map(|(address, engine)| (address.clone(), engine.health))
                .collect();
            let body = admin_answer("llm", &hosts);
            let answer = Answer {
                status: 200,
                served_by: None,
                body: body.as_bytes(),
            };
            let started = std::time::Instant::now();
            self.poller.on_answer(call.token, self.now_ms, answer);
            self.discovery_times.push(started.elapsed());
            return;
        }
        let (_, steered_to) = call.headers.iter().find(|(name, _)| name == "x-steer").unwrap();
        let Some(engine) = self.engines.get_mut(steered_to) else {
            // The host is gone: Envoy's fallback policy sends the scrape elsewhere.
            let answer = Answer {
                status: 200,
                served_by: Some("10.9.9.9:8000"),
                body: b"vllm:num_requests_waiting 99\n",
            };
            return self.poller.on_answer(call.token, self.now_ms, answer);
        };
        engine.queries += 10;
        let body = format!(
            "process_start_time_seconds {}\nvllm:num_requests_waiting {}\nvllm:prefix_cache_queries_total {}\n",
            engine.started_ms as f64 / 1000.0,
            engine.waiting,
            engine.queries
        );
        let served_by = match engine.mood {
            Mood::Refuses => return self.poller.on_failure(call.token, self.now_ms),
            Mood::Silent => return,
            Mood::Answers => steered_to.as_str(),
            Mood::AnsweredByAnother => "10.9.9.9:8000",
        };
        let answer = Answer {
            status: 200,
            served_by: Some(served_by),
            body: body.as_bytes(),
        };
        self.poller.on_answer(call.token, self.now_ms, answer);
    }

    /// Most scrapes started within any window of `window_ms` after `from_ms`.
    fn busiest_window(&self, window_ms: u64, from_ms: u64) -> usize {
        let mut times: Vec<u64> = self.scrapes.values().flatten().copied().collect();
        times.retain(|time_ms| *time_ms >= START_MS + from_ms);
        times.sort_unstable();
        let mut first = 0;
        let mut most = 0;
        for (index, time_ms) in times.iter().enumerate() {
            while times[first] + window_ms <= *time_ms {
                first += 1;
            }
            most = most.max(index + 1 - first);
        }
        most
    }

    fn scrapes_of(&self, number: usize, from_ms: u64, until_ms: u64) -> usize {
        let window = START_MS + from_ms..START_MS + until_ms;
        let times = self.scrapes.get(&Self::address(number));
        times.map_or(0, |times| {
            times.iter().filter(|time_ms| window.contains(time_ms)).count()
        })
    }
}

fn quantile(times: &mut [std::time::Duration], percent: usize) -> std::time::Duration {
    times.sort_unstable();
    times[times.len() * percent / 100]
}

#[test]
fn a_fleet_that_changes_for_a_minute_is_followed() {
    let mut sim = Simulation::new(20, 10);
    sim.run_until(5_000);
    assert_eq!(sim.poller.table(START_MS).hosts.len(), 20);
    let before: Vec<Host> = (0..20).map(|number| sim.host(number).unwrap()).collect();
    assert!(before.iter().all(|host| host.sampled_ms > 0), "all were sampled");
    assert_eq!(before[5].load.waiting, Some(5));
    // Ten seconds of peace: every host twice a second, evenly.
    sim.run_until(15_000);
    for number in 0..20 {
        let scrapes = sim.scrapes_of(number, 5_000, 15_000);
        assert!(
            (18..=21).contains(&scrapes),
            "host {number} was scraped {scrapes} times in 10 s"
        );
    }
    assert!(
        sim.busiest_window(100, 5_000) <= 6,
        "4 a 100 ms, {} at most",
        sim.busiest_window(100, 5_000)
    );

    // One leaves, two come, one restarts, one lies, one refuses, one falls silent, one is drained, one fails its checks.
    sim.engines.remove(&Simulation::address(0));
    sim.add(20);
    sim.add(21);
    sim.engine(1).started_ms = sim.now_ms;
    sim.engine(1).queries = 0;
    sim.engine(2).mood = Mood::AnsweredByAnother;
    sim.engine(3).mood = Mood::Refuses;
    sim.engine(4).mood = Mood::Silent;
    sim.engine(5).health = Health::Draining;
    sim.engine(6).health = Health::Unhealthy;
    let changed_ms = sim.now_ms;
    sim.run_until(40_000);
    assert_eq!(sim.host(0), None);
    assert_eq!(sim.poller.table(START_MS).hosts.len(), 21);
    let restarted = sim.host(1).unwrap();
    assert_eq!(restarted.slot, before[1].slot);
    assert!(restarted.epoch > before[1].epoch, "a restart starts an epoch");
    for number in [2, 3, 4] {
        let host = sim.host(number).unwrap();
        assert!(
            host.sampled_ms <= changed_ms + 100,
            "host {number} keeps its last sample"
        );
        assert_eq!(host.epoch, before[number].epoch);
        let scrapes = sim.scrapes_of(number, 30_000, 40_000);
        assert!(
            (1..=3).contains(&scrapes),
            "host {number} was asked {scrapes} times in 10 s"
        );
    }
    assert_eq!(sim.host(5).unwrap().health, Health::Draining);
    assert_eq!(sim.host(6).unwrap().health, Health::Unhealthy);
    for (number, before) in before.iter().enumerate().skip(7) {
        let host = sim.host(number).unwrap();
        assert_eq!((host.slot, host.epoch), (before.slot, before.epoch));
        assert!(host.sampled_ms + 1_200 > sim.now_ms, "host {number} is fresh");
    }
    let newcomers = [sim.host(20).unwrap(), sim.host(21).unwrap()];
    assert!(
        newcomers.iter().all(|host| host.slot != before[0].slot),
        "the freed slot rests"
    );
    assert!(newcomers.iter().all(|host| host.sampled_ms > 0));
    let counters = sim.poller.counters();
    assert_eq!(counters.restarts, 1);
    assert!(
        counters.served_by_mismatch >= 3 && counters.scrape_failures >= 4,
        "{counters:?}"
    );

    // They recover; then the admin interface fails and nobody is lost.
    for number in [2, 3, 4] {
        sim.engine(number).mood = Mood::Answers;
    }
    sim.admin_works = false;
    sim.engines.remove(&Simulation::address(7));
    sim.run_until(60_000);
    for number in [2, 3, 4] {
        assert!(
            sim.host(number).unwrap().sampled_ms + 1_200 > sim.now_ms,
            "host {number} is fresh again"
        );
    }
    assert!(sim.host(7).is_some(), "the last endpoints stay");
    assert!(sim.poller.counters().discovery_failures >= 9);
    assert!(sim.max_scrapes_in_flight <= 16);

    // Tables came at least once a second, and every one survives the wire.
    assert!(
        sim.published
            .windows(2)
            .all(|pair| pair[1].published_ms - pair[0].published_ms <= HEARTBEAT_MS)
    );
    let last = sim.published.last().unwrap();
    assert_eq!(HostTable::decode(&last.encode()).as_ref(), Ok(last));
    // After a rest of a minute the freed slot is used again, with a later epoch.
    sim.admin_works = true;
    sim.run_until(80_000);
    sim.add(30);
    sim.run_until(85_000);
    let reused = sim.host(30).unwrap();
    assert_eq!(reused.slot, before[0].slot);
    assert!(reused.epoch > before[0].epoch);
}

#[test]
fn a_thousand_hosts_are_paced_and_bounded() {
    let mut sim = Simulation::new(1_000, 11);
    sim.run_until(60_000);
    assert_eq!(sim.poller.table(START_MS).hosts.len(), 1_000);
    assert!(
        sim.max_scrapes_in_flight <= 16,
        "{} in flight",
        sim.max_scrapes_in_flight
    );
    let counts: Vec<usize> = (0..1_000)
        .map(|number| sim.scrapes_of(number, 10_000, 60_000))
        .collect();
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(
        most - least <= 2,
        "every host has its turn: {least} to {most} scrapes"
    );
    let bytes = sim.published.last().unwrap().encode().len();
    println!(
        "1000 hosts: {least} to {most} scrapes each in 50 s, {} in 20 ms at most, {} in flight at most, {} tables of \
         {bytes} bytes published, 99 % of ticks within {:?}, half of the discoveries within {:?}",
        sim.busiest_window(20, 10_000),
        sim.max_scrapes_in_flight,
        sim.published.len(),
        quantile(&mut sim.tick_times, 99),
        quantile(&mut sim.discovery_times, 50)
    );
    assert!(sim.busiest_window(1, 0) <= 16);
    assert!(
        sim.published
            .windows(2)
            .all(|pair| pair[1].published_ms - pair[0].published_ms <= HEARTBEAT_MS)
    );
}

#[test]
fn a_tenth_of_dead_hosts_does_not_starve_the_living() {
    let mut sim = Simulation::new(300, 12);
    for number in 0..30 {
        sim.engine(number * 10).mood = Mood::Silent;
    }
    sim.run_until(60_000);
    for number in (0..300).filter(|number| number % 10 != 0) {
        let host = sim.host(number).unwrap();
        assert!(
            host.sampled_ms + 2_000 > sim.now_ms,
            "host {number} is {} ms old",
            sim.now_ms - host.sampled_ms
        );
    }
    assert!(sim.max_scrapes_in_flight <= 16);
}

#[test]
fn a_stall_is_not_made_up_for_by_a_burst() {
    let mut sim = Simulation::new(100, 13);
    sim.run_until(10_000);
    sim.now_ms += 5_000;
    sim.pending.clear();
    sim.scrapes.clear();
    sim.tick();
    let started: usize = sim.scrapes.values().map(Vec::len).sum();
    assert!(started <= 10, "{started} scrapes after a stall of 5 s");
}
