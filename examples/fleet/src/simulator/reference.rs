//! Published rules to compare with, and the oracle.
//!
//! In: requests, the hosts of the table, first bytes and ends of the gateway's own requests; for the oracle also the
//! machines. Out: where each request goes. The rules know of caches what their own placements tell; each is written from
//! its description, and where a default is not published the choice is stated at the constant.

use std::collections::{HashMap, VecDeque};

use warmroute::host_table::HostTable;
use warmroute::strategy::Rng;

use super::gateway::{Held, Placed};
use super::machine::Machine;
use super::setup::{Lambda, Policy, Setup};
use super::workload::Request;
use crate::engine::Prompt;

/// One gateway's rule with what it remembers.
#[derive(Debug)]
pub struct Rule {
    policy: Policy,
    kv_tokens: u64,
    block_tokens: usize,
    attention_tokens: f64,
    hosts: Vec<Known>,
    /// SGLang's tree: block → the host that was last given it.
    last_host: HashMap<u64, u16>,
    uses: HashMap<u64, Uses>,
    /// Slow mean of the share of hosts with pending prefill.
    utilisation: f64,
    rng: Rng,
}

/// What a rule knows of one host.
#[derive(Debug, Default)]
struct Known {
    is_listed: bool,
    address_hash: u64,
    in_flight: u32,
    /// Prefill work in flight, attention counted.
    pending: f64,
    /// Tokens in the tree of SGLang.
    tree_tokens: u64,
    /// Block → the host's clock when it was last placed.
    placed: HashMap<u64, u64>,
    clock: u64,
    rates: VecDeque<f64>,
}

/// Uses of a block, halved every 20.8 s: 30 s to 1/e.
#[derive(Debug, Clone, Copy)]
struct Uses {
    count: f64,
    at_ms: u64,
}

/// A request's share of a rule's tallies.
#[derive(Debug, Clone, Copy)]
pub struct RuleCharge {
    host: usize,
    work: f64,
    ahead: f64,
    placed_ms: u64,
    prefill_open: bool,
    request_open: bool,
}

struct Choice {
    host: usize,
    cached_tokens: usize,
    is_home: bool,
}

impl Rule {
    /// The rule of a setup's policy.
    pub fn new(setup: &Setup, seed: u64) -> Self {
        let times = &setup.engine.times;
        Self {
            policy: setup.policy,
            kv_tokens: (setup.kv_tokens as f64 * setup.kv_assumed_factor) as u64,
            block_tokens: setup.engine.block_tokens,
            attention_tokens: if times.prefill_pair_us > 0.0 {
                times.prefill_token_us / times.prefill_pair_us
            } else {
                f64::INFINITY
            },
            hosts: Vec::new(),
            last_host: HashMap::new(),
            uses: HashMap::new(),
            utilisation: 0.0,
            rng: Rng::new(seed),
        }
    }

    /// Takes over which hosts there are.
    pub fn apply_table(&mut self, table: &HostTable) {
        self.hosts.iter_mut().for_each(|host| host.is_listed = false);
        for host in &table.hosts {
            let at = usize::from(host.slot.0);
            if self.hosts.len() <= at {
                self.hosts.resize_with(at + 1, Known::default);
            }
            self.hosts[at].is_listed = true;
            self.hosts[at].address_hash = warmroute::chunk::name_hash(host.address.as_bytes());
        }
    }

    /// Chooses and charges.
    pub fn place(&mut self, request: &Request, machines: &[Machine], now_ms: u64) -> Placed {
        let prompt = &request.prompt;
        let choice = match self.policy {
            Policy::Sglang => self.sglang(prompt),
            Policy::Smetric => self.smetric(prompt),
            Policy::Oracle(lambda) => self.oracle(lambda, request, machines, now_ms),
            Policy::Lmetric | Policy::Core(_) | Policy::LeastWork | Policy::Logged => self.lmetric(prompt),
        };
        let Some(choice) = choice else {
            return Placed {
                host: None,
                predicted_tokens: 0,
                is_overflow: false,
                held: Held::Core(None),
            };
        };
        let tokens = prompt.tokens();
        let work = self.work(tokens, tokens - choice.cached_tokens);
        if !matches!(self.policy, Policy::Oracle(_)) {
            self.remember(prompt, &choice);
        }
        let host = &mut self.hosts[choice.host];
        let ahead = host.pending;
        host.pending += work;
        host.in_flight += 1;
        Placed {
            host: Some(choice.host),
            predicted_tokens: choice.cached_tokens,
            is_overflow: !choice.is_home,
            held: Held::Rule(RuleCharge {
                host: choice.host,
                work,
                ahead,
                placed_ms: now_ms,
                prefill_open: true,
                request_open: true,
            }),
        }
    }

    /// The first byte of an answer came.
    pub fn first_token(&mut self, charge: &mut RuleCharge, now_ms: u64) {
        if !std::mem::take(&mut charge.prefill_open) {
            return;
        }
        let host = &mut self.hosts[charge.host];
        host.pending -= charge.work;
        // Sums of floats leave residues, and one of 1e-10 would win every tie.
        if host.pending < 0.5 {
            host.pending = 0.0;
        }
        let time_ms = now_ms.saturating_sub(charge.placed_ms).max(1);
        host.rates
            .push_back((charge.ahead + charge.work) * 1000.0 / time_ms as f64);
        if host.rates.len() > SMETRIC_SAMPLES {
            host.rates.pop_front();
        }
    }

    /// The request is over.
    pub fn finish(&mut self, charge: &mut RuleCharge) {
        let host = &mut self.hosts[charge.host];
        if std::mem::take(&mut charge.prefill_open) {
            host.pending = (host.pending - charge.work).max(0.0);
        }
        if std::mem::take(&mut charge.request_open) {
            host.in_flight -= 1;
        }
    }

    fn listed(&self) -> impl Iterator<Item = (usize, &Known)> {
        self.hosts.iter().enumerate().filter(|(_, host)| host.is_listed)
    }

    /// Prefill work in tokens, attention counted.
    fn work(&self, prompt_tokens: usize, uncached_tokens: usize) -> f64 {
        let (prompt, uncached) = (prompt_tokens as f64, uncached_tokens as f64);
        uncached * (1.0 + (prompt - uncached / 2.0) / self.attention_tokens)
    }

    fn remember(&mut self, prompt: &Prompt, choice: &Choice) {
        let host = &mut self.hosts[choice.host];
        host.clock += (prompt.tokens() - choice.cached_tokens) as u64;
        for block in prompt.blocks() {
            if host.placed.insert(*block, host.clock).is_none() {
                host.tree_tokens += self.block_tokens as u64;
            }
            if self.policy == Policy::Sglang {
                self.last_host.insert(*block, choice.host as u16);
            }
        }
    }

    /// Tokens of a prompt that a host is believed to hold: what was placed there within a cache size of its own clock.
    fn believed_tokens(&self, host: &Known, prompt: &Prompt) -> usize {
        let is_held = |block: &&u64| {
            let stamp = host.placed.get(*block);
            stamp.is_some_and(|stamp| host.clock - stamp < self.kv_tokens)
        };
        let blocks = prompt.blocks().iter().take_while(is_held).count();
        (blocks * self.block_tokens).min(prompt.tokens() - 1)
    }

    /// `cache_aware` of the SGLang router 0.3: unless requests in flight are out of balance, the host that last got the
    /// longest known prefix if that is more than three tenths of the prompt, else the least loaded one.
    fn sglang(&self, prompt: &Prompt) -> Option<Choice> {
        let loads = || self.listed().map(|(_, host)| host.in_flight);
        let (least, most) = (loads().min()?, loads().max()?);
        let is_out_of_balance =
            most - least > SGLANG_BALANCE_ABS && f64::from(most) > SGLANG_BALANCE_REL * f64::from(least);
        let known = prompt
            .blocks()
            .iter()
            .take_while(|block| self.last_host.contains_key(block));
        let matched = known.clone().count() * self.block_tokens;
        let warm = known.last().map(|block| usize::from(self.last_host[block]));
        let rate = matched as f64 / prompt.tokens() as f64;
        if let Some(host) = warm.filter(|host| self.hosts[*host].is_listed)
            && !is_out_of_balance
            && rate > SGLANG_THRESHOLD
        {
            return Some(Choice {
                host,
                cached_tokens: matched.min(prompt.tokens() - 1),
                is_home: true,
            });
        }
        let least = self
            .listed()
            .min_by_key(|(_, host)| (host.in_flight, host.tree_tokens))?;
        Some(Choice {
            host: least.0,
            cached_tokens: self.believed_tokens(least.1, prompt),
            is_home: matched == 0,
        })
    }

    /// `smetric` of the vLLM router: the host with the longest match while it would answer in time or nobody would, else
    /// the least queued work × requests in flight.
    fn smetric(&mut self, prompt: &Prompt) -> Option<Choice> {
        let tokens = prompt.tokens();
        let salt = self.rng.next_u64() | 1;
        let view = |(at, host): (usize, &Known)| {
            let cached = self.believed_tokens(host, prompt);
            let queued = host.pending + self.work(tokens, tokens - cached);
            let whole = self.work(tokens, tokens);
            let meets = host
                .rate()
                .is_none_or(|rate| queued / rate <= SMETRIC_BASE_S + SMETRIC_SLACK * whole / rate);
            let score = queued * f64::from(host.in_flight.max(1));
            (at, cached, meets, score, host.address_hash.wrapping_mul(salt))
        };
        let views: Vec<_> = self.listed().map(view).collect();
        let home = views
            .iter()
            .max_by(|a, b| a.1.cmp(&b.1).then(b.3.total_cmp(&a.3)).then(a.4.cmp(&b.4)))?;
        let least = views
            .iter()
            .min_by(|a, b| a.3.total_cmp(&b.3).then(a.4.cmp(&b.4)))?;
        let is_warm = home.1 > self.block_tokens && home.1 as f64 > SMETRIC_HIT_RATIO * tokens as f64;
        let stays = is_warm && (home.2 || views.iter().all(|view| !view.2));
        let chosen = if stays { home } else { least };
        Some(Choice {
            host: chosen.0,
            cached_tokens: chosen.1,
            is_home: stays || !is_warm,
        })
    }

    /// LMetric: the least (pending + new work) × (requests in flight + 1).
    fn lmetric(&mut self, prompt: &Prompt) -> Option<Choice> {
        let tokens = prompt.tokens();
        let salt = self.rng.next_u64() | 1;
        let view = |(at, host): (usize, &Known)| {
            let cached = self.believed_tokens(host, prompt);
            let work = host.pending + self.work(tokens, tokens - cached);
            let score = work * f64::from(host.in_flight + 1);
            (at, cached, score, host.address_hash.wrapping_mul(salt))
        };
        let views: Vec<_> = self.listed().map(view).collect();
        let least = views
            .iter()
            .min_by(|a, b| a.2.total_cmp(&b.2).then(a.3.cmp(&b.3)))?;
        let most_cached = views.iter().map(|view| view.1).max()?;
        Some(Choice {
            host: least.0,
            cached_tokens: least.1,
            is_home: least.1 == most_cached,
        })
    }

    /// The cost rule on the machines themselves: what their caches hold or will hold of what is queued, their backlog,
    /// speed, requests and KV cache in use.
    fn oracle(
        &mut self,
        lambda: Lambda,
        request: &Request,
        machines: &[Machine],
        now_ms: u64,
    ) -> Option<Choice> {
        let prompt = &request.prompt;
        let tokens = prompt.tokens();
        let listed: Vec<usize> = self.listed().map(|(at, _)| at).collect();
        let pending = listed.iter().filter(|at| machines[**at].has_pending()).count();
        let share = pending as f64 / listed.len().max(1) as f64;
        self.utilisation += (share - self.utilisation) / 100.0;
        let weight = match lambda {
            Lambda::Fixed(weight) => weight,
            Lambda::Utilisation => (self.utilisation / (1.0 - self.utilisation).max(1e-9)).min(6.0),
        };
        let cached: Vec<usize> = listed
            .iter()
            .map(|at| machines[*at].cached_tokens(prompt))
            .collect();
        let hot_tokens = self.hot_tokens(prompt, &cached, now_ms);
        let costs: Vec<f64> = listed
            .iter()
            .zip(&cached)
            .map(|(at, cached)| {
                let machine = &machines[*at];
                let uncached = tokens - cached;
                let work = self.work(tokens, uncached);
                let hot = hot_tokens.saturating_sub(*cached);
                let cold_work = work * (uncached - hot) as f64 / uncached.max(1) as f64;
                let kv_in_use = machine.kv_tokens_in_use() - 0.5 * machine.kv_tokens();
                machine.slowness() * (machine.backlog() + work + weight * cold_work)
                    + 100.0 * machine.requests() as f64
                    + 0.2 * kv_in_use.max(0.0)
            })
            .collect();
        let least = costs.iter().copied().min_by(f64::total_cmp)?;
        let home_key = home_key(request);
        let good = (0..listed.len()).filter(|at| costs[*at] <= least + SLACK_TOKENS);
        let at = good.max_by_key(|at| rendezvous(home_key, self.hosts[listed[*at]].address_hash))?;
        let home =
            (0..listed.len()).max_by_key(|at| rendezvous(home_key, self.hosts[listed[*at]].address_hash));
        Some(Choice {
            host: listed[at],
            cached_tokens: cached[at],
            is_home: home == Some(at) || cached[at] > home.map_or(0, |home| cached[home]),
        })
    }

    /// Counts a use of every block; tokens up to the deepest that some hosts hold, not all, and that is used so often that
    /// it deserves another copy.
    fn hot_tokens(&mut self, prompt: &Prompt, cached: &[usize], now_ms: u64) -> usize {
        let mut hot = 0;
        for (at, block) in prompt.blocks().iter().enumerate() {
            let end = (at + 1) * self.block_tokens;
            let uses = self.uses.entry(*block).or_insert(Uses {
                count: 0.0,
                at_ms: now_ms,
            });
            let age_s = (now_ms - uses.at_ms) as f64 / 1000.0;
            uses.count = uses.count * (-age_s / 30.0).exp() + 1.0;
            uses.at_ms = now_ms;
            let holders = cached.iter().filter(|tokens| **tokens >= end).count();
            if holders > 0 && holders < cached.len() && uses.count >= 3.0 * (holders + 1) as f64 {
                hot = end;
            }
        }
        hot
    }
}

impl Known {
    /// The 90th percentile of the last samples of work ÷ time to first token, once there are eight.
    fn rate(&self) -> Option<f64> {
        if self.rates.len() < 8 {
            return None;
        }
        let mut rates: Vec<f64> = self.rates.iter().copied().collect();
        rates.sort_unstable_by(f64::total_cmp);
        rates.get(rates.len() * 9 / 10).copied()
    }
}

/// The key at about a thousand tokens.
fn home_key(request: &Request) -> u64 {
    let keys = &request.keys.keys;
    let key = keys.iter().find(|key| key.end_bytes >= 4096).or(keys.last());
    key.map_or(0, |key| key.hash.0)
}

fn rendezvous(key: u64, address_hash: u64) -> u64 {
    Rng::new(key ^ address_hash).next_u64()
}

/// Ties of the oracle go to the first in rendezvous order.
const SLACK_TOKENS: f64 = 32.0;
/// Defaults of the command line of sglang-router 0.3.2: `--cache-threshold`, `--balance-abs-threshold`,
/// `--balance-rel-threshold`.
const SGLANG_THRESHOLD: f64 = 0.3;
const SGLANG_BALANCE_ABS: u32 = 64;
const SGLANG_BALANCE_REL: f64 = 1.5;
/// Samples that a rate is learned from.
const SMETRIC_SAMPLES: usize = 64;
/// The target of `smetric` is 1 s and twice the time of the whole prompt; its own defaults are not known here.
const SMETRIC_BASE_S: f64 = 1.0;
const SMETRIC_SLACK: f64 = 2.0;
/// Share of the prompt that makes a host its home.
const SMETRIC_HIT_RATIO: f64 = 0.3;
