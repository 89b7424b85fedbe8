//! What a decision takes natively: the one line whose time is real.

use std::hint::black_box;
use std::time::Instant;

use warmroute::candidate::{Fleet, FleetSettings};
use warmroute::config::StrategyName;
use warmroute::host_table::{Host, HostTable, Load, Slot};
use warmroute::pool::{DecisionInput, Pool};
use warmroute::prompt::{Api, BodyEnd};
use warmroute::recent::{RecentPrefixes, RecentSettings};
use warmroute::strategy::{Query, Rng, StrategySettings, decide};

use super::Verdict;
use super::jobs::JUDGED;
use crate::simulator::setup::{Policy, pool_config};
use crate::simulator::workload::keys_of;

/// Name of the lines.
pub(super) const NAME: &str = "decision";

/// Times decisions on a prompt of 32 KiB: medians over rounds, microseconds.
pub(super) fn measure() -> Vec<Verdict> {
    let line = |what: &str, bar: f64, of: &dyn Fn(StrategyName) -> f64| {
        let figures = JUDGED.iter().map(|policy| {
            let figure = match policy {
                Policy::Core(strategy) => Some(of(*strategy)),
                _ => None,
            };
            (policy.to_string(), figure)
        });
        Verdict {
            scenario: NAME.to_owned(),
            what: what.to_owned(),
            bar,
            is_least: false,
            figures: figures.collect(),
        }
    };
    vec![
        line("µs at 8 hosts, keys given", 3.0, &|strategy| {
            keyed_us(strategy, 8)
        }),
        line("µs at 512 hosts, keys given", 6.0, &|strategy| {
            keyed_us(strategy, 512)
        }),
        line("µs at 8 hosts with hashing", 25.0, &hashed_us),
    ]
}

fn keyed_us(strategy: StrategyName, hosts: u16) -> f64 {
    let Some((mut pool, bodies)) = warm_pool(strategy, hosts) else {
        return f64::INFINITY;
    };
    let options = pool.config().prompt.clone();
    let mut fleet = Fleet::new(FleetSettings::default());
    fleet.update(&table(hosts), NOW_MS);
    let settings = StrategySettings::new(strategy);
    let mut recent = RecentPrefixes::new(RecentSettings::default());
    let keys: Vec<_> = bodies.iter().map(|body| keys_of(body, &options)).collect();
    for keys in &keys {
        let _ = pool.decide_keyed(keys, None, NOW_MS);
    }
    let homes: Vec<_> = keys
        .iter()
        .map(|keys| recent.observe(keys, fleet.traffic(), NOW_MS))
        .collect();
    let mut rng = Rng::new(1);
    median_us(|at| {
        let query = Query {
            matches: pool.index().lookup(&keys[at], NOW_MS),
            ..Query::new(homes[at], keys[at].prompt_bytes, NOW_MS)
        };
        black_box(decide(&settings, &mut fleet, &query, &mut rng));
    })
}

/// The whole of it from the body's bytes on, the placement recorded.
fn hashed_us(strategy: StrategyName) -> f64 {
    let (Some((mut pool, bodies)), Some(api)) = (warm_pool(strategy, 8), Api::from_path(PATH)) else {
        return f64::INFINITY;
    };
    median_us(|at| {
        let input = DecisionInput {
            api,
            path: PATH,
            body: Some((&bodies[at], BodyEnd::EndOfStream)),
            content_length: None,
            tenant: None,
            session: None,
        };
        black_box(pool.decide(&input, NOW_MS));
    })
}

fn median_us(mut round: impl FnMut(usize)) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            (0..PROMPTS).for_each(&mut round);
            began.elapsed().as_secs_f64() * 1e6 / PROMPTS as f64
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn warm_pool(strategy: StrategyName, hosts: u16) -> Option<(Pool, Vec<Vec<u8>>)> {
    let mut pool = Pool::new(pool_config("{}", strategy).ok()?, 1);
    pool.apply_table(&table(hosts).encode(), NOW_MS).ok()?;
    let body = |prompt: usize| {
        let text: String = (0..PROMPT_BYTES / 8)
            .map(|word| format!("{:07x} ", word * 31 + prompt * 7_919))
            .collect();
        let messages = serde_json::json!([{"role": "user", "content": text}]);
        serde_json::json!({"model": "m", "stream": true, "messages": messages})
            .to_string()
            .into_bytes()
    };
    Some((pool, (0..PROMPTS).map(body).collect()))
}

fn table(hosts: u16) -> HostTable {
    let host = |slot: u16| Host {
        slot: Slot(slot),
        epoch: 1,
        address: format!("10.0.{}.{}:8000", slot / 250, slot % 250),
        weight: 1,
        sampled_ms: NOW_MS,
        load: Load {
            waiting: Some(0),
            running: Some(0),
            kv_usage_permille: Some(0),
            kv_capacity_tokens: Some(1_500_000),
            ..Load::default()
        },
        ..Host::default()
    };
    HostTable {
        published_ms: NOW_MS,
        hosts: (0..hosts).map(host).collect(),
    }
}

const PATH: &str = "/v1/chat/completions";
const NOW_MS: u64 = 1_790_000_000_000;
const PROMPT_BYTES: usize = 32 << 10;
const PROMPTS: usize = 64;
const ROUNDS: usize = 301;
