//! Policies and seeds → rows, on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::args::{ArgsError, SimulateArgs};
use super::outcome::Summary;
use super::run::run;
use super::setup::{Policy, Setup};
use super::utilisation::{Lever, Scale};
use super::workload::Workload;

/// What `simulate` found.
#[derive(Debug)]
pub struct Comparison {
    /// A row a policy: means over the seeds.
    pub rows: Vec<(String, Summary)>,
    /// What was run, in words.
    pub facts: String,
}

/// Runs every policy with every seed; progress goes to `tell`.
///
/// # Errors
/// When a trace cannot be read or a setup cannot be run.
pub fn compare(args: &SimulateArgs, tell: impl Fn(&str) + Sync) -> Result<Comparison, ArgsError> {
    let workload = args.workload(1)?;
    let lever = if args.is_small_engine || workload.is_generated {
        Lever::Arrivals
    } else {
        Lever::PrefillCost
    };
    let start = Scale {
        arrivals: args.speedup,
        ..Scale::ONE
    };
    let scale = match args.load {
        Some(share) => {
            tell("scaling the load");
            let plain = Setup {
                happenings: Vec::new(),
                ..args.setup.clone()
            };
            Scale::find(&workload, &plain, lever, share, start).map_err(ArgsError::Setup)?
        }
        None => start,
    };
    let mut rows = Vec::new();
    let mut runs: Vec<Vec<Summary>> = vec![Vec::new(); args.policies.len()];
    for seed in 1..=args.seeds {
        let workload = if seed > 1 && workload.is_generated {
            args.workload(seed)?
        } else {
            workload.clone()
        };
        let setups = args.policies.iter().map(|policy| Setup {
            policy: *policy,
            seed,
            ..scale.apply(&args.setup)
        });
        let summaries = side_by_side(&workload, &setups.collect::<Vec<_>>(), scale.arrivals, &tell)?;
        runs.iter_mut()
            .zip(summaries)
            .for_each(|(runs, summary)| runs.push(summary));
    }
    for (policy, runs) in args.policies.iter().zip(&runs) {
        rows.push((policy.to_string(), Summary::mean(runs)));
    }
    Ok(Comparison {
        rows,
        facts: facts(args, &workload, scale),
    })
}

/// One run a setup, in the order of the setups.
///
/// # Errors
/// When a setup cannot be run.
pub fn side_by_side(
    workload: &Workload,
    setups: &[Setup],
    speedup: f64,
    tell: &(impl Fn(&str) + Sync),
) -> Result<Vec<Summary>, ArgsError> {
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<Option<Result<Summary, ArgsError>>>> =
        Mutex::new((0..setups.len()).map(|_| None).collect());
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(setups.len()) {
            scope.spawn(|| {
                while let Some((at, setup)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    setups.get(at).map(|setup| (at, setup))
                } {
                    let arrivals = workload.arrivals(speedup, setup.seed);
                    let name = format!("{} seed {}", setup.policy, setup.seed);
                    let all = arrivals.len();
                    let outcome = run(workload, &arrivals, setup, |done| {
                        if done.is_multiple_of(16_384) {
                            tell(&format!("{name}: {done} of {all}"));
                        }
                    });
                    tell(&format!("{name}: done"));
                    let summary = outcome.map(|outcome| outcome.summary(workload, setup));
                    if let Ok(mut found) = found.lock() {
                        found[at] = Some(summary.map_err(ArgsError::Setup));
                    }
                }
            });
        }
    });
    found
        .into_inner()
        .unwrap_or_default()
        .into_iter()
        .flatten()
        .collect()
}

fn facts(args: &SimulateArgs, workload: &Workload, scale: Scale) -> String {
    let setup = &args.setup;
    let origin = if workload.is_generated {
        "generated"
    } else {
        "published trace"
    };
    format!(
        "{} ({origin}): {} requests, {} prompt tokens, of which one cache that forgets nothing would hold {:.1} %. {} \
         hosts ({}), {} tokens of KV cache each, {} gateways, poll every {} ms. Prefill cost × {:.3}, arrivals × {:.3}.{}",
        workload.name,
        workload.requests.len(),
        workload.prompt_tokens(),
        workload.ideal_hit_share() * 100.0,
        setup.hosts,
        if args.is_small_engine {
            "8B on one H100"
        } else {
            "70B on four H100"
        },
        setup.kv_tokens,
        setup.gateways,
        setup.poll_ms,
        scale.prefill_cost,
        scale.arrivals,
        if args
            .policies
            .iter()
            .any(|policy| matches!(policy, Policy::Oracle(_)))
        {
            " The oracle rows see the engines; the best of them is what to compare with."
        } else {
            ""
        }
    )
}
