//! One gateway: the core, or a published rule in its place.
//!
//! In: requests, host tables, the other gateways' journals, first bytes, ends and failures of its own requests. Out:
//! where each request goes, and its journal. The core sees nothing else; the machines are handed through to the oracle
//! alone.

use std::rc::Rc;

use warmroute::candidate::Charge;
use warmroute::chunk::PrefixKeys;
use warmroute::config::PoolConfig;
use warmroute::host_table::HostTable;
use warmroute::journal::ClosedRun;
use warmroute::pool::Pool;

use super::machine::Machine;
use super::reference::{Rule, RuleCharge};
use super::setup::{Policy, Setup, Sharing};
use super::workload::Request;

/// A gateway.
#[derive(Debug)]
pub struct Gateway {
    brain: Brain,
    archive: Vec<ClosedRun>,
    archive_told: Rc<[Vec<u8>]>,
    /// Whether something changed that the others should know.
    pub has_news: bool,
}

#[derive(Debug)]
enum Brain {
    Core { pool: Box<Pool>, uses_keys: bool },
    Rule(Box<Rule>),
}

/// Where a request went.
#[derive(Debug)]
pub struct Placed {
    /// The host; `None` where the gateway leaves it to Envoy's own balancer.
    pub host: Option<usize>,
    /// Prompt tokens believed to be cached there.
    pub predicted_tokens: usize,
    /// Whether the prompt left its home.
    pub is_overflow: bool,
    /// What it holds of the host's tally.
    pub held: Held,
}

impl Placed {
    /// Where a log says that a request went.
    pub fn logged(host: Option<u16>) -> Self {
        Self {
            host: host.map(usize::from),
            predicted_tokens: 0,
            is_overflow: false,
            held: Held::Core(None),
        }
    }
}

/// A request's share of a tally.
#[derive(Debug)]
pub enum Held {
    /// The core's.
    Core(Option<Charge>),
    /// A rule's.
    Rule(RuleCharge),
}

/// What one gateway tells another.
#[derive(Debug, Clone)]
pub struct News {
    journal: Rc<[u8]>,
    archive: Rc<[Vec<u8>]>,
}

impl Gateway {
    /// Gateway `number` of a setup, without hosts.
    pub fn new(setup: &Setup, config: PoolConfig, number: usize) -> Self {
        let worker = setup.seed * 1000 + number as u64 + 1;
        let core = |uses_keys| Brain::Core {
            pool: Box::new(Pool::new(config.clone(), worker)),
            uses_keys,
        };
        let brain = match setup.policy {
            Policy::Core(_) => core(true),
            Policy::LeastWork | Policy::Logged => core(false),
            Policy::Sglang | Policy::Smetric | Policy::Lmetric | Policy::Oracle(_) => {
                Brain::Rule(Box::new(Rule::new(setup, worker)))
            }
        };
        Self {
            brain,
            archive: Vec::new(),
            archive_told: Rc::default(),
            has_news: true,
        }
    }

    /// Takes over a host table.
    pub fn apply_table(&mut self, table: &HostTable, blob: &[u8], now_ms: u64) {
        match &mut self.brain {
            Brain::Core { pool, .. } => {
                let applied = pool.apply_table(blob, now_ms);
                debug_assert!(applied.is_ok());
            }
            Brain::Rule(rule) => rule.apply_table(table),
        }
    }

    /// Chooses a host and charges it.
    pub fn place(&mut self, request: &Request, machines: &[Machine], now_ms: u64) -> Placed {
        self.has_news = true;
        match &mut self.brain {
            Brain::Core { pool, uses_keys } => {
                let mut outcome = if *uses_keys {
                    pool.decide_keyed(&request.keys, None, now_ms)
                } else {
                    let size = PrefixKeys {
                        prompt_bytes: request.keys.prompt_bytes,
                        ..PrefixKeys::default()
                    };
                    pool.decide_keyed(&size, None, now_ms)
                };
                let charge = pool.charge(&mut outcome, now_ms);
                let decision = outcome.decision;
                let bytes = u64::from(decision.matched_bytes);
                let share = bytes as f64 / f64::from(decision.prompt_bytes.max(1));
                Placed {
                    host: decision.hosts.first().map(|slot| usize::from(slot.0)),
                    predicted_tokens: (share * request.prompt.tokens() as f64).round() as usize,
                    is_overflow: decision.reason.is_overflow(),
                    held: Held::Core(charge),
                }
            }
            Brain::Rule(rule) => rule.place(request, machines, now_ms),
        }
    }

    /// The first byte of an answer came.
    pub fn first_token(&mut self, held: &mut Held, now_ms: u64) {
        self.has_news = true;
        match (&mut self.brain, held) {
            (Brain::Core { pool, .. }, Held::Core(Some(charge))) => pool.first_token(charge, now_ms),
            (Brain::Rule(rule), Held::Rule(charge)) => rule.first_token(charge, now_ms),
            (Brain::Core { .. } | Brain::Rule(_), _) => {}
        }
    }

    /// An answer ended.
    pub fn finish(&mut self, held: &mut Held, now_ms: u64) {
        self.has_news = true;
        match (&mut self.brain, held) {
            (Brain::Core { pool, .. }, Held::Core(Some(charge))) => pool.finish(charge, now_ms),
            (Brain::Rule(rule), Held::Rule(charge)) => rule.finish(charge),
            (Brain::Core { .. } | Brain::Rule(_), _) => {}
        }
    }

    /// The host refused the request or lost it: a 503, or a reset before the answer's end.
    pub fn failed(&mut self, held: &mut Held, now_ms: u64) {
        self.has_news = true;
        match (&mut self.brain, held) {
            (Brain::Core { pool, .. }, Held::Core(Some(charge))) => {
                pool.host_failed(charge.slot, now_ms);
                pool.prefill_over(charge, now_ms);
                pool.finish(charge, now_ms);
            }
            (Brain::Rule(rule), Held::Rule(charge)) => rule.finish(charge),
            (Brain::Core { .. } | Brain::Rule(_), _) => {}
        }
    }

    /// What the other gateways are told; `None` where they are told nothing.
    pub fn news(&mut self, sharing: Sharing, now_ms: u64) -> Option<News> {
        let Brain::Core { pool, .. } = &mut self.brain else {
            return None;
        };
        let closed = pool.take_closed_runs();
        if !closed.is_empty() {
            self.archive
                .retain(|old| closed.iter().all(|run| run.place != old.place));
            self.archive.extend(closed);
            self.archive_told = self.archive.iter().map(|run| run.blob.clone()).collect();
        }
        let mut journal = pool.journal(now_ms);
        match sharing {
            Sharing::Nothing => return None,
            Sharing::Placements { .. } => {
                journal.tallies.clear();
                journal.silences.clear();
            }
            Sharing::All { .. } => {}
        }
        self.has_news = false;
        Some(News {
            journal: journal.encode().into(),
            archive: Rc::clone(&self.archive_told),
        })
    }

    /// Hears what another gateway told.
    pub fn hear(&mut self, from: usize, news: &News, now_ms: u64) {
        if let Brain::Core { pool, .. } = &mut self.brain {
            let slot = u8::try_from(from).unwrap_or(u8::MAX);
            let applied = pool.apply_journal(slot, &news.journal, || news.archive.to_vec(), now_ms);
            debug_assert!(applied.is_ok());
            pool.settle_journals(now_ms);
        }
    }
}
