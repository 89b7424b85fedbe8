//! The event loop: arrivals, steps of engines, polls, journals and what happens to hosts, in virtual time.
//!
//! In: a workload, arrival times, a setup. Out: what became of each request. At one microsecond the engines come first,
//! then what happens to hosts, tables, journals and arrivals.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use warmroute::host_table::{Host, HostTable, Load, Slot};
use warmroute::strategy::Rng;

use super::gateway::{Gateway, Held, News, Placed};
use super::machine::{Machine, Queued};
use super::outcome::{MachineOutcome, Outcome, Record};
use super::setup::{Happening, MAX_GATEWAYS, MAX_HOSTS, Policy, Setup, SetupError, Sharing};
use super::workload::Workload;
use crate::engine::{Engine, EngineEvent, EngineModel, EventKind};

/// Runs a workload whose requests arrive at these times; `progress` is called now and then with the requests so far.
///
/// # Errors
/// When the setup cannot be run.
pub fn run(
    workload: &Workload,
    arrivals_us: &[u64],
    setup: &Setup,
    progress: impl FnMut(usize),
) -> Result<Outcome, SetupError> {
    if !(1..=MAX_HOSTS).contains(&setup.hosts) || !(1..=MAX_GATEWAYS).contains(&setup.gateways) {
        return Err(SetupError::Fleet);
    }
    let config = setup.pool_config()?;
    let mut setup = setup.clone();
    setup.engine.block_tokens = workload.block_tokens;
    setup.engine.cache_blocks = setup.kv_tokens / workload.block_tokens.max(1);
    let setup = &setup;
    let gateways = (0..setup.gateways).map(|number| Gateway::new(setup, config.clone(), number));
    let mut simulation = Simulation {
        setup,
        workload,
        arrivals_us,
        machines: Vec::new(),
        gateways: gateways.collect(),
        queue: BinaryHeap::new(),
        number: 0,
        flights: Vec::new(),
        open: 0,
        records: vec![Record::default(); arrivals_us.len()],
        next_arrival: 0,
        rng: Rng::new(setup.seed ^ 0x6a7e),
        engine_events: Vec::new(),
    };
    simulation.run(progress);
    Ok(simulation.finish())
}

/// A request on its way.
#[derive(Debug)]
struct Flight {
    request: u32,
    gateway: u16,
    held: Held,
    queued: Queued,
    is_open: bool,
}

struct Simulation<'a> {
    setup: &'a Setup,
    workload: &'a Workload,
    arrivals_us: &'a [u64],
    machines: Vec<Machine>,
    gateways: Vec<Gateway>,
    queue: BinaryHeap<Reverse<Entry>>,
    number: u64,
    flights: Vec<Flight>,
    open: usize,
    records: Vec<Record>,
    next_arrival: usize,
    rng: Rng,
    engine_events: Vec<EngineEvent>,
}

/// Something that is due; what is due at one time comes in the order of the classes, then of the numbers.
struct Entry {
    at_us: u64,
    class: u8,
    number: u64,
    event: Event,
}

enum Event {
    Step(usize),
    Happens(Happening),
    Table(usize, Box<(HostTable, Vec<u8>)>),
    News { to: usize, from: usize, news: News },
    Poll(usize),
    Share(usize),
}

impl Simulation<'_> {
    fn run(&mut self, mut progress: impl FnMut(usize)) {
        for _ in 0..self.setup.hosts {
            self.add_machine(0);
        }
        let poll_us = self.setup.poll_ms.max(1) * 1000;
        for gateway in 0..self.gateways.len() {
            self.poll(gateway, 0, 0);
            let phase_us = self.rng.below(poll_us as usize) as u64;
            self.push(phase_us.max(1), 4, Event::Poll(gateway));
            if self.setup.sharing != Sharing::Nothing {
                self.push(SHARE_US, 5, Event::Share(gateway));
            }
        }
        for (at_us, happening) in &self.setup.happenings {
            self.push(*at_us, 1, Event::Happens(*happening));
        }
        while self.next_arrival < self.arrivals_us.len() || self.open > 0 {
            let arrival_us = self.arrivals_us.get(self.next_arrival).copied();
            let due_us = self.queue.peek().map(|entry| entry.0.at_us);
            match (arrival_us, due_us) {
                (Some(arrival_us), Some(due_us)) if due_us <= arrival_us => self.next_event(),
                (Some(arrival_us), _) => {
                    self.arrive(arrival_us);
                    if self.next_arrival.is_multiple_of(1024) {
                        progress(self.next_arrival);
                    }
                }
                (None, Some(_)) => self.next_event(),
                (None, None) => return,
            }
        }
    }

    fn next_event(&mut self) {
        let Some(Reverse(entry)) = self.queue.pop() else {
            return;
        };
        let now_us = entry.at_us;
        match entry.event {
            Event::Step(host) => self.step(host, now_us),
            Event::Happens(happening) => self.happen(happening, now_us),
            Event::Table(gateway, table) => {
                self.gateways[gateway].apply_table(&table.0, &table.1, ms(now_us));
            }
            Event::News { to, from, news } => self.gateways[to].hear(from, &news, ms(now_us)),
            Event::Poll(gateway) => {
                self.poll(gateway, now_us, self.setup.poll_delay_ms * 1000);
                self.push(now_us + self.setup.poll_ms.max(1) * 1000, 4, Event::Poll(gateway));
            }
            Event::Share(gateway) => self.share(gateway, now_us),
        }
    }

    fn arrive(&mut self, now_us: u64) {
        let number = self.next_arrival;
        self.next_arrival += 1;
        let request = &self.workload.requests[number];
        // Which gateway gets a request is the same for every policy.
        let spread = Rng::new(self.setup.seed << 32 ^ number as u64).below(self.gateways.len());
        let placed = match self.setup.policy {
            Policy::Logged => Placed::logged(self.setup.logged_hosts.get(number).copied()),
            _ => self.gateways[spread].place(request, &self.machines, ms(now_us)),
        };
        let host = placed.host.unwrap_or_else(|| self.any_listed());
        let mut held = placed.held;
        let record = &mut self.records[number];
        record.arrived_us = now_us;
        record.host = host as u16;
        record.predicted_tokens = placed.predicted_tokens as u32;
        record.is_overflow = placed.is_overflow;
        let machine = &mut self.machines[host];
        if machine.is_failing || !machine.is_listed {
            record.has_failed = true;
            self.gateways[spread].failed(&mut held, ms(now_us));
            return;
        }
        let mut flight = Flight {
            request: number as u32,
            gateway: spread as u16,
            held,
            queued: Queued::default(),
            is_open: true,
        };
        if matches!(self.setup.policy, Policy::Oracle(_)) {
            machine.queue(&mut flight.queued, &request.prompt);
        }
        let taken = machine
            .engine
            .submit(now_us, request.prompt.clone(), request.output_tokens);
        match taken {
            Ok(id) => {
                debug_assert_eq!(id.0 as usize, machine.flights.len());
                machine.flights.push(self.flights.len() as u32);
                self.flights.push(flight);
                self.open += 1;
                self.schedule(host);
            }
            Err(_) => {
                record.has_failed = true;
                machine.unqueue(&mut flight.queued, &request.prompt);
                self.gateways[spread].failed(&mut flight.held, ms(now_us));
            }
        }
    }

    fn step(&mut self, host: usize, now_us: u64) {
        let machine = &mut self.machines[host];
        if machine.scheduled_us != Some(now_us) {
            return;
        }
        machine.scheduled_us = None;
        let mut events = std::mem::take(&mut self.engine_events);
        machine.engine.advance_into(now_us, &mut events);
        for event in events.drain(..) {
            let at = self.machines[host].flights[event.id.0 as usize] as usize;
            let flight = &mut self.flights[at];
            let gateway = &mut self.gateways[usize::from(flight.gateway)];
            let record = &mut self.records[flight.request as usize];
            match event.kind {
                EventKind::Prefilled { cached_tokens } => {
                    record.ttft_us = Some(event.at_us - record.arrived_us);
                    record.cached_tokens = cached_tokens as u32;
                    gateway.first_token(&mut flight.held, ms(event.at_us));
                    let prompt = &self.workload.requests[flight.request as usize].prompt;
                    self.machines[host].unqueue(&mut flight.queued, prompt);
                }
                EventKind::Finished => {
                    flight.is_open = false;
                    self.open -= 1;
                    record.latency_us = Some(event.at_us - record.arrived_us);
                    gateway.finish(&mut flight.held, ms(event.at_us));
                    flight.held = Held::Core(None);
                }
                EventKind::Token | EventKind::Preempted => {}
            }
        }
        self.engine_events = events;
        self.schedule(host);
    }

    fn happen(&mut self, happening: Happening, now_us: u64) {
        match happening {
            Happening::Add => self.add_machine(now_us),
            Happening::Restart(host) => self.restart(host, now_us),
            Happening::Remove(host) => self.machines[host].is_listed = false,
            Happening::Fail(host) => self.machines[host].is_failing = true,
            Happening::Recover(host) => self.machines[host].is_failing = false,
            Happening::Slow(host, permille) => {
                let machine = &mut self.machines[host];
                machine.slow_permille = permille;
                machine.engine.set_slow_permille(permille);
            }
        }
    }

    fn restart(&mut self, host: usize, now_us: u64) {
        let machine = &mut self.machines[host];
        let lost = machine.engine.restart();
        machine.scheduled_us = None;
        machine.epoch += 1;
        machine.started_ms = ms(now_us);
        for id in lost {
            let at = self.machines[host].flights[id.0 as usize] as usize;
            let flight = &mut self.flights[at];
            if std::mem::take(&mut flight.is_open) {
                self.open -= 1;
                self.records[flight.request as usize].has_failed = true;
                self.gateways[usize::from(flight.gateway)].failed(&mut flight.held, ms(now_us));
                let prompt = &self.workload.requests[flight.request as usize].prompt;
                self.machines[host].unqueue(&mut flight.queued, prompt);
            }
        }
    }

    fn add_machine(&mut self, now_us: u64) {
        if self.machines.len() >= MAX_HOSTS {
            return;
        }
        let speed = self.setup.speeds.get(self.machines.len()).copied().unwrap_or(1.0);
        let model = EngineModel {
            speed: self.setup.engine.speed * speed,
            ..self.setup.engine.clone()
        };
        let mut engine = Engine::new(model);
        engine.set_token_events(false);
        self.machines.push(Machine {
            engine,
            speed,
            slow_permille: 1000,
            mean_speed: self.setup.mean_speed(),
            is_listed: true,
            is_failing: false,
            epoch: 1,
            started_ms: ms(now_us),
            scheduled_us: None,
            flights: Vec::new(),
            queued_tokens: 0,
            queued_work: 0.0,
            queued_blocks: HashMap::new(),
        });
    }

    /// Samples every host for one gateway, which learns of it `delay_us` later.
    fn poll(&mut self, gateway: usize, now_us: u64, delay_us: u64) {
        let now_ms = ms(now_us);
        let host = |(at, machine): (usize, &Machine)| {
            let snapshot = machine.engine.counters();
            let capacity = machine.kv_tokens() * self.setup.kv_assumed_factor;
            Host {
                slot: Slot(at as u16),
                epoch: machine.epoch,
                address: format!("10.{}.{}.{}:8000", self.setup.seed % 250, at / 250, at % 250),
                weight: 1,
                sampled_ms: now_ms,
                load: Load {
                    waiting: Some(machine.engine.waiting() as u32),
                    running: Some(machine.engine.running() as u32),
                    kv_usage_permille: Some((machine.engine.kv_usage() * 1000.0) as u16),
                    kv_capacity_tokens: Some(capacity as u64),
                    prefix_queries: Some(snapshot.prefix_query_tokens),
                    prefix_hits: Some(snapshot.prefix_hit_tokens),
                    started_ms: Some(machine.started_ms),
                    ..Load::default()
                },
                ..Host::default()
            }
        };
        let listed = self
            .machines
            .iter()
            .enumerate()
            .filter(|(_, machine)| machine.is_listed);
        let table = HostTable {
            published_ms: now_ms,
            hosts: listed.map(host).collect(),
        };
        let blob = table.encode();
        if delay_us == 0 {
            self.gateways[gateway].apply_table(&table, &blob, now_ms);
        } else {
            self.push(
                now_us + delay_us,
                2,
                Event::Table(gateway, Box::new((table, blob))),
            );
        }
    }

    fn share(&mut self, from: usize, now_us: u64) {
        let delay_us = match self.setup.sharing {
            Sharing::Nothing => return,
            Sharing::Placements { delay_ms } | Sharing::All { delay_ms } => delay_ms * 1000,
        };
        // An idle gateway beats once a second.
        let beats = (now_us / SHARE_US).is_multiple_of(1_000_000 / SHARE_US);
        if (self.gateways[from].has_news || beats)
            && let Some(news) = self.gateways[from].news(self.setup.sharing, ms(now_us))
        {
            for to in (0..self.gateways.len()).filter(|to| *to != from) {
                let news = news.clone();
                self.push(
                    now_us + delay_us.saturating_sub(SHARE_US),
                    3,
                    Event::News { to, from, news },
                );
            }
        }
        self.push(now_us + SHARE_US, 5, Event::Share(from));
    }

    fn schedule(&mut self, host: usize) {
        let machine = &mut self.machines[host];
        let next_us = machine.engine.next_event_us();
        if machine.scheduled_us != next_us {
            machine.scheduled_us = next_us;
            if let Some(next_us) = next_us {
                self.push(next_us, 0, Event::Step(host));
            }
        }
    }

    fn any_listed(&mut self) -> usize {
        let listed: Vec<usize> = (0..self.machines.len())
            .filter(|at| self.machines[*at].is_listed)
            .collect();
        listed.get(self.rng.below(listed.len())).copied().unwrap_or(0)
    }

    fn push(&mut self, at_us: u64, class: u8, event: Event) {
        self.number += 1;
        self.queue.push(Reverse(Entry {
            at_us,
            class,
            number: self.number,
            event,
        }));
    }

    fn finish(self) -> Outcome {
        let machine = |machine: &Machine| {
            let counters = machine.engine.counters();
            MachineOutcome {
                prefill_busy_us: counters.prefill_busy_us,
                busy_us: counters.busy_us,
                preemptions: counters.preemptions,
            }
        };
        let ends = self
            .records
            .iter()
            .map(|record| record.arrived_us + record.latency_us.unwrap_or(0));
        Outcome {
            machines: self.machines.iter().map(machine).collect(),
            span_us: ends.max().unwrap_or(0) - self.arrivals_us.first().unwrap_or(&0),
            records: self.records,
        }
    }
}

impl Entry {
    const fn key(&self) -> (u64, u8, u64) {
        (self.at_us, self.class, self.number)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// Virtual microseconds → the core's clock.
const fn ms(us: u64) -> u64 {
    EPOCH_MS + us / 1000
}

/// When every simulation begins: any time that is not 0.
const EPOCH_MS: u64 = 1_790_000_000_000;
/// Gateways look this often whether they have news for each other, microseconds; it counts towards the delay.
const SHARE_US: u64 = 20_000;

#[cfg(test)]
mod tests {
    use warmroute::config::StrategyName;
    use warmroute::prompt::PromptOptions;

    use super::*;
    use crate::simulator::generate::conversation;
    use crate::simulator::outcome::Summary;

    const HYBRID: Policy = Policy::Core(StrategyName::Hybrid);
    const LEAST_OUTSTANDING: Policy = Policy::Core(StrategyName::LeastOutstanding);

    fn small() -> Workload {
        conversation(600, 7, &PromptOptions::default())
    }

    fn setup(policy: Policy) -> Setup {
        let mut setup = Setup::new(EngineModel::llama_70b_h100x4(), 1_500_000, policy);
        setup.hosts = 4;
        setup
    }

    fn summary(workload: &Workload, setup: &Setup) -> (Outcome, Summary) {
        let arrivals = workload.arrivals(1.0, setup.seed);
        let outcome = run(workload, &arrivals, setup, |_| {}).unwrap();
        let summary = outcome.summary(workload, setup);
        (outcome, summary)
    }

    #[test]
    fn every_request_ends_once_and_equal_seeds_give_equal_runs() {
        let workload = small().truncated(250);
        for policy in Policy::ALL {
            let (first, figures) = summary(&workload, &setup(policy));
            assert_eq!((figures.finished, figures.failed), (250, 0), "{policy}");
            assert!(
                first
                    .records
                    .iter()
                    .all(|r| r.ttft_us <= r.latency_us && r.ttft_us.is_some())
            );
            assert!(figures.hit_share <= workload.ideal_hit_share());
        }
        let times = |setup: &Setup| -> Vec<_> {
            let records = summary(&workload, setup).0.records;
            records.iter().map(|r| (r.host, r.ttft_us)).collect()
        };
        let hybrid = setup(HYBRID);
        assert_eq!(times(&hybrid), times(&hybrid));
        assert_ne!(
            times(&hybrid),
            times(&Setup {
                seed: 2,
                ..hybrid.clone()
            })
        );
    }

    #[test]
    fn knowledge_of_caches_is_worth_something_and_perfect_knowledge_most() {
        let workload = small();
        let mean = |policy| summary(&workload, &setup(policy)).1.mean_ms;
        let oracle = Policy::ORACLES
            .map(mean)
            .into_iter()
            .fold(f64::INFINITY, f64::min);
        let (hybrid, least_outstanding) = (mean(HYBRID), mean(LEAST_OUTSTANDING));
        assert!(hybrid <= least_outstanding, "{hybrid} {least_outstanding}");
        assert!(oracle <= 1.05 * hybrid, "{oracle} {hybrid}");
    }

    #[test]
    fn rules_that_remember_prompts_predict_hits() {
        let workload = small();
        for policy in [
            Policy::Sglang,
            Policy::Smetric,
            Policy::Lmetric,
            HYBRID,
            Policy::ORACLES[0],
        ] {
            let share = summary(&workload, &setup(policy)).1.predicted_share;
            assert!(share > 0.5 * workload.ideal_hit_share(), "{policy} {share}");
        }
    }

    #[test]
    fn a_restart_loses_requests_and_predictions_and_a_failing_host_is_left() {
        let workload = small();
        let mut fleet = setup(HYBRID);
        fleet.happenings = vec![
            (40_000_000, Happening::Restart(1)),
            (60_000_000, Happening::Fail(2)),
            (90_000_000, Happening::Remove(0)),
            (90_000_000, Happening::Add),
        ];
        let (outcome, figures) = summary(&workload, &fleet);
        assert!(figures.failed > 0 && figures.finished + figures.failed == 600);
        let [predicted, cached, prompt] = outcome.hits_between(&workload, 1, 40_600_000, 80_000_000);
        assert!(
            prompt > 0 && predicted <= cached + prompt / 20,
            "{predicted} {cached} of {prompt}"
        );
        assert!(outcome.traffic_share(2, 62_000_000, u64::MAX) < 0.05);
        assert!(outcome.traffic_share(4, 91_000_000, u64::MAX) > 0.1);
        assert!(outcome.traffic_share(0, 91_000_000, u64::MAX) == 0.0);
    }

    #[test]
    fn gateways_that_share_place_better_than_gateways_that_do_not() {
        let workload = small();
        let of = |sharing| {
            let fleet = Setup {
                gateways: 4,
                sharing,
                ..setup(HYBRID)
            };
            summary(&workload, &fleet).1
        };
        let (alone, placements, all) = (
            of(Sharing::Nothing),
            of(Sharing::Placements { delay_ms: 100 }),
            of(Sharing::All { delay_ms: 100 }),
        );
        assert_eq!(all.finished, 600);
        assert!(placements.hit_share > alone.hit_share && all.hit_share > alone.hit_share);
        assert!(all.mean_ms < alone.mean_ms);
    }
}
