//! What a decision takes natively: the one line whose time is real.

use std::hint::black_box;
use std::time::Instant;

use warmroute::candidate::{Fleet, FleetSettings};
use warmroute::chunk::{Chain, HashKey, PrefixKeys};
use warmroute::config::StrategyName;
use warmroute::host_table::{Host, HostTable, Load, Slot};
use warmroute::pool::{DecisionInput, Pool};
use warmroute::prompt::{Api, BodyEnd};
use warmroute::recent::{Homes, RecentPrefixes, RecentSettings};
use warmroute::strategy::{Query, Rng, StrategySettings, decide};

use super::Verdict;
use super::jobs::JUDGED;
use crate::simulator::setup::{Policy, pool_config};
use crate::simulator::workload::{CHAT_PATH, keys_of};

/// Name of the lines.
pub(super) const NAME: &str = "decision";

/// Times decisions on a prompt of 32 KiB: medians over rounds, microseconds.
pub(super) fn measure(tell: impl Fn(&str)) -> Vec<Verdict> {
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
    let parts = JUDGED.map(|policy| match policy {
        Policy::Core(strategy) => format!("{policy} {:.1} µs", whole_us(strategy)),
        _ => String::new(),
    });
    tell(&format!(
        "decision: a body's bytes to a recorded placement, JSON included: {}",
        parts.join(", ")
    ));
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

/// Lookup and ranking.
fn keyed_us(strategy: StrategyName, hosts: u16) -> f64 {
    let Some(mut bench) = Bench::new(strategy, hosts) else {
        return f64::INFINITY;
    };
    median_us(|at| {
        let (keys, homes) = (&bench.keys[at], bench.homes[at]);
        let query = Query {
            matches: bench.pool.index().lookup(keys, NOW_MS),
            ..Query::new(homes, keys.prompt_bytes, NOW_MS)
        };
        black_box(decide(&bench.settings, &mut bench.fleet, &query, &mut bench.rng));
    })
}

/// The same, the keys made of the prompt's text before.
fn hashed_us(strategy: StrategyName) -> f64 {
    let Some(mut bench) = Bench::new(strategy, 8) else {
        return f64::INFINITY;
    };
    median_us(|at| {
        let mut chain = Chain::new(512 << 10, HashKey::OPEN);
        chain.text(bench.texts[at].as_bytes());
        let bytes = chain.text_bytes();
        let keys = PrefixKeys::new(at as u64, 0, &chain.into_points(), bytes);
        let query = Query {
            matches: bench.pool.index().lookup(&keys, NOW_MS),
            ..Query::new(bench.homes[at], keys.prompt_bytes, NOW_MS)
        };
        black_box(decide(&bench.settings, &mut bench.fleet, &query, &mut bench.rng));
    })
}

/// All that a request takes from its body's bytes on, the placement recorded.
fn whole_us(strategy: StrategyName) -> f64 {
    let (Some(mut bench), Some(api)) = (Bench::new(strategy, 8), Api::from_path(CHAT_PATH)) else {
        return f64::INFINITY;
    };
    median_us(|at| {
        let input = DecisionInput {
            api,
            path: CHAT_PATH,
            body: Some((&bench.bodies[at], BodyEnd::EndOfStream)),
            content_length: None,
            tenant: None,
            session: None,
        };
        black_box(bench.pool.decide(&input, NOW_MS));
    })
}

/// A pool that placed every prompt once, and what a decision takes.
struct Bench {
    pool: Pool,
    fleet: Fleet,
    settings: StrategySettings,
    rng: Rng,
    texts: Vec<String>,
    bodies: Vec<Vec<u8>>,
    keys: Vec<PrefixKeys>,
    homes: Vec<Homes>,
}

impl Bench {
    fn new(strategy: StrategyName, hosts: u16) -> Option<Self> {
        let mut pool = Pool::new(pool_config("{}", strategy).ok()?, 1);
        pool.apply_table(&table(hosts).encode(), NOW_MS).ok()?;
        let mut fleet = Fleet::new(FleetSettings::default());
        fleet.update(&table(hosts), NOW_MS);
        let text = |prompt: usize| -> String {
            let words = 0..PROMPT_BYTES / 8;
            words
                .map(|word| format!("{:07x} ", word * 31 + prompt * 7_919))
                .collect()
        };
        let body = |text: &String| {
            let messages = serde_json::json!([{"role": "user", "content": text}]);
            let body = serde_json::json!({"model": "m", "stream": true, "messages": messages});
            body.to_string().into_bytes()
        };
        let texts: Vec<String> = (0..PROMPTS).map(text).collect();
        let bodies: Vec<Vec<u8>> = texts.iter().map(body).collect();
        let options = pool.config().prompt.clone();
        let keys: Vec<_> = bodies
            .iter()
            .map(|body| keys_of(CHAT_PATH, body, &options))
            .collect();
        for keys in &keys {
            let _ = pool.decide_keyed(keys, None, NOW_MS);
        }
        let mut recent = RecentPrefixes::new(RecentSettings::default());
        let homes = keys
            .iter()
            .map(|keys| recent.observe(keys, fleet.traffic(), NOW_MS));
        Some(Self {
            homes: homes.collect(),
            pool,
            fleet,
            settings: StrategySettings::new(strategy),
            rng: Rng::new(1),
            texts,
            bodies,
            keys,
        })
    }
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

const NOW_MS: u64 = 1_790_000_000_000;
const PROMPT_BYTES: usize = 32 << 10;
const PROMPTS: usize = 64;
const ROUNDS: usize = 301;
