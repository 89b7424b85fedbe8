//! Scenarios → results: every (scenario, policy, seed) once, on all cores.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use warmroute::config::StrategyName;
use warmroute::prompt::PromptOptions;

use super::scenarios::{SCENARIOS, Scenario, Source};
use super::{BarsArgs, Verdict, decision, lines};
use crate::engine::EngineModel;
use crate::simulator::generate::{self, SharedPrefixes};
use crate::simulator::outcome::Summary;
use crate::simulator::setup::{Policy, Setup, SetupError};
use crate::simulator::trace::{Trace, TraceError};
use crate::simulator::utilisation::Scale;
use crate::simulator::workload::Workload;

/// Figures of all runs, by scenario, policy and seed.
#[derive(Debug, Default)]
pub struct Results {
    /// By scenario and policy; one run a seed.
    rows: BTreeMap<(String, String), Vec<Run>>,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    summary: Summary,
    extra: Option<f64>,
    ideal_hit_share: f64,
}

/// Why a run came to nothing.
#[derive(Debug)]
pub enum RunError {
    /// A trace.
    Trace(TraceError),
    /// A setup.
    Setup(SetupError),
    /// The directory lacks the trace and nothing stands in for it.
    NoTraces,
}

/// Rows that every scenario has.
pub(super) const JUDGED: [Policy; 2] = [
    Policy::Core(StrategyName::Hybrid),
    Policy::Core(StrategyName::CacheAware),
];

struct Job<'a> {
    scenario: &'a Scenario,
    policy: Policy,
    seed: u64,
}

/// Results are kept under a lock of their own, so that what two jobs need is made once while others go on.
struct Shared<'a> {
    args: &'a BarsArgs,
    workloads: Slots<(Source, u64), Workload>,
    scales: Slots<String, Scale>,
}

type Slot<T> = OnceLock<Option<T>>;
type Slots<K, T> = Mutex<HashMap<K, Arc<Slot<T>>>>;

/// Runs the scenarios and judges the lines; progress goes to `tell`.
pub fn run(args: &BarsArgs, tell: impl Fn(&str) + Sync) -> (Vec<Verdict>, Results) {
    let is_wanted = |name: &str| {
        args.only
            .as_ref()
            .is_none_or(|only| name.starts_with(only.as_str()))
    };
    let wanted: Vec<&Scenario> = SCENARIOS
        .iter()
        .filter(|scenario| lines::needs(scenario.name).any(is_wanted))
        .collect();
    let mut jobs = Vec::new();
    for scenario in &wanted {
        for seed in 1..=args.seeds {
            for policy in JUDGED.iter().chain(scenario.others) {
                jobs.push(Job {
                    scenario,
                    policy: *policy,
                    seed,
                });
            }
        }
    }
    let shared = Shared {
        args,
        workloads: Mutex::default(),
        scales: Mutex::default(),
    };
    let results = Mutex::new(Results::default());
    let next = AtomicUsize::new(0);
    let began = Instant::now();
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(at) else { return };
                    let outcome = shared.run(job);
                    let Job {
                        scenario,
                        policy,
                        seed,
                    } = job;
                    let label = format!(
                        "{:5.0} s  {}/{} {} {policy} seed {seed}",
                        began.elapsed().as_secs_f64(),
                        at + 1,
                        jobs.len(),
                        scenario.name,
                    );
                    match outcome {
                        Ok(run) => {
                            let summary = &run.summary;
                            tell(&format!(
                                "{label}: mean {:.0} ms, p99 {:.0} ms, hits {:.1} %",
                                summary.mean_ms,
                                summary.p99_ms,
                                summary.hit_share * 100.0
                            ));
                            if let Ok(mut results) = results.lock() {
                                let key = (scenario.name.to_owned(), policy.to_string());
                                results.rows.entry(key).or_default().push(run);
                            }
                        }
                        Err(error) => tell(&format!("{label}: {error}")),
                    }
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_default();
    let mut verdicts = lines::judge(&results, is_wanted);
    if is_wanted(decision::NAME) {
        verdicts.extend(decision::measure(&tell));
    }
    (verdicts, results)
}

impl Shared<'_> {
    fn run(&self, job: &Job<'_>) -> Result<Run, RunError> {
        let scenario = job.scenario;
        let workload = self.workload(scenario.source, job.seed)?;
        let base = scenario.base();
        let scale = self.scale(scenario, &base)?;
        let mut setup = scale.apply(&base);
        (scenario.vary)(&mut setup);
        setup.policy = job.policy;
        setup.seed = job.seed;
        let arrivals = workload.arrivals(scale.arrivals * scenario.arrivals, job.seed);
        let outcome = crate::simulator::run(&workload, &arrivals, &setup, |_| {})?;
        let extra = scenario
            .measure
            .map(|measure| measure(&outcome, &workload, &setup));
        Ok(Run {
            summary: outcome.summary(&workload, &setup),
            extra,
            ideal_hit_share: workload.ideal_hit_share(),
        })
    }

    fn workload(&self, source: Source, seed: u64) -> Result<Workload, RunError> {
        let seed = if matches!(source, Source::Trace(_)) {
            0
        } else {
            seed
        };
        let slot = slot_of(&self.workloads, (source, seed));
        let mut failure = None;
        let made = slot.get_or_init(|| match make(source, seed, self.args.traces.as_deref()) {
            Ok(workload) => Some(workload),
            Err(error) => {
                failure = Some(error);
                None
            }
        });
        made.clone().ok_or(failure.unwrap_or(RunError::NoTraces))
    }

    fn scale(&self, scenario: &Scenario, base: &Setup) -> Result<Scale, RunError> {
        let Some((lever, share)) = scenario.load else {
            return Ok(Scale::ONE);
        };
        let source = scenario.source.whole();
        let key = format!(
            "{source:?} {} {} {share}",
            scenario.is_small_engine, scenario.kv_tokens
        );
        let slot = slot_of(&self.scales, key);
        let workload = self.workload(source, 1)?;
        let found = slot.get_or_init(|| Scale::find(&workload, base, lever, share, Scale::ONE).ok());
        found.ok_or(RunError::Setup(SetupError::Fleet))
    }
}

impl Source {
    fn whole(self) -> Self {
        match self {
            Self::Copies(_) | Self::Part(_) => Self::Trace(Trace::Conversation),
            Self::Trace(_) | Self::Tenants | Self::HotPrefix => self,
        }
    }
}

impl Scenario {
    fn base(&self) -> Setup {
        let engine = if self.is_small_engine {
            EngineModel::llama_8b_h100x1()
        } else {
            EngineModel::llama_70b_h100x4()
        };
        Setup::new(engine, self.kv_tokens, Policy::ORACLES[1])
    }
}

impl Results {
    /// Mean figures of a row; nothing where it was not run.
    pub fn mean(&self, scenario: &str, policy: &str) -> Option<Summary> {
        self.runs(scenario, policy).map(mean_of)
    }

    /// Mean of a scenario's own figure.
    pub fn extra(&self, scenario: &str, policy: &str) -> Option<f64> {
        let runs = self.runs(scenario, policy)?;
        let sum: Option<f64> = runs.iter().map(|run| run.extra).sum();
        sum.map(|sum| sum / runs.len() as f64)
    }

    /// Mean hit share of one cache that forgets nothing, for the workloads of a row.
    pub fn ideal(&self, scenario: &str, policy: &str) -> Option<f64> {
        let runs = self.runs(scenario, policy)?;
        Some(runs.iter().map(|run| run.ideal_hit_share).sum::<f64>() / runs.len() as f64)
    }

    /// The oracle with the λ whose mean time to first token is least.
    pub fn oracle(&self, scenario: &str) -> Option<Summary> {
        let rows = Policy::ORACLES
            .iter()
            .filter_map(|policy| self.mean(scenario, &policy.to_string()));
        rows.min_by(|a, b| a.mean_ms.total_cmp(&b.mean_ms))
    }

    /// Every row's mean, in the order of names.
    pub fn rows(&self) -> impl Iterator<Item = (&str, &str, Summary)> {
        let rows = self.rows.iter();
        rows.map(|((scenario, policy), runs)| (scenario.as_str(), policy.as_str(), mean_of(runs)))
    }

    fn runs(&self, scenario: &str, policy: &str) -> Option<&[Run]> {
        let runs = self.rows.get(&(scenario.to_owned(), policy.to_owned()))?;
        Some(runs.as_slice())
    }
}

impl From<SetupError> for RunError {
    fn from(error: SetupError) -> Self {
        Self::Setup(error)
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trace(error) => write!(f, "{error}"),
            Self::Setup(error) => write!(f, "{error}"),
            Self::NoTraces => f.write_str("not run: the trace is missing; see --traces"),
        }
    }
}

impl std::error::Error for RunError {}

fn slot_of<K: std::hash::Hash + Eq, T>(slots: &Slots<K, T>, key: K) -> Arc<Slot<T>> {
    match slots.lock() {
        Ok(mut slots) => Arc::clone(slots.entry(key).or_default()),
        Err(_) => Arc::default(),
    }
}

fn make(source: Source, seed: u64, traces: Option<&Path>) -> Result<Workload, RunError> {
    let options = PromptOptions::default();
    match (source, traces) {
        (Source::Trace(trace), Some(directory)) => trace.load(directory, &options).map_err(RunError::Trace),
        (Source::Trace(Trace::Conversation), None) => Ok(generate::conversation(12_031, 1, &options)),
        (Source::Trace(_), None) => Err(RunError::NoTraces),
        (Source::Copies(copies), _) => Ok(conversation(traces)?.copied(copies, &options)),
        (Source::Part(parts), _) => Ok(conversation(traces)?.part(parts, seed, &options)),
        (Source::Tenants, _) => Ok(SharedPrefixes::tenants().generate(seed, &options)),
        (Source::HotPrefix, _) => Ok(SharedPrefixes::hot_prefix().generate(seed, &options)),
    }
}

fn conversation(traces: Option<&Path>) -> Result<Workload, RunError> {
    make(Source::Trace(Trace::Conversation), 0, traces)
}

fn mean_of(runs: &[Run]) -> Summary {
    let summaries: Vec<Summary> = runs.iter().map(|run| run.summary).collect();
    Summary::mean(&summaries)
}
