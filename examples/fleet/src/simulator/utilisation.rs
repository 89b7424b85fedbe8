//! Finds the scale at which the oracle spends a given share of the hosts' time in prefill.
//!
//! In: a workload, a setup, a share. Out: a factor for the cost of a prefill token and of a pair (`b` and `e`), or for
//! the speed of the trace. Decode keeps engines busy all the time, so the share of time spent in prefill says more of a
//! load than utilisation does; 85 % is the edge of stability.

use super::outcome::Summary;
use super::run::run;
use super::setup::{Policy, Setup, SetupError};
use super::workload::Workload;
use crate::engine::EngineModel;

/// What is scaled to reach a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lever {
    /// The cost of prefill.
    PrefillCost,
    /// The speed at which requests come.
    Arrivals,
}

/// A scale that was found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// Factor for `b` and `e`.
    pub prefill_cost: f64,
    /// Factor for the speed of arrivals.
    pub arrivals: f64,
}

impl Scale {
    /// Nothing scaled.
    pub const ONE: Self = Self {
        prefill_cost: 1.0,
        arrivals: 1.0,
    };

    /// The scale at which the oracle with λ = 1 spends `share` of the time in prefill, within half a hundredth of it.
    ///
    /// # Errors
    /// When the setup cannot be run.
    pub fn find(
        workload: &Workload,
        setup: &Setup,
        lever: Lever,
        share: f64,
        start: Self,
    ) -> Result<Self, SetupError> {
        let mut scale = start;
        for _ in 0..MAX_RUNS {
            let mut trial = scale.apply(setup);
            trial.policy = Policy::ORACLES[1];
            let arrivals = workload.arrivals(scale.arrivals, setup.seed);
            let summary: Summary = run(workload, &arrivals, &trial, |_| {})?.summary(workload, &trial);
            let ratio = share / summary.prefill_share.max(1e-6);
            if (ratio - 1.0).abs() < TOLERANCE {
                break;
            }
            match lever {
                Lever::PrefillCost => scale.prefill_cost *= ratio,
                Lever::Arrivals => scale.arrivals *= ratio,
            }
        }
        Ok(scale)
    }

    /// The setup with its engine scaled.
    #[must_use]
    pub fn apply(&self, setup: &Setup) -> Setup {
        let mut times = setup.engine.times;
        times.prefill_token_us *= self.prefill_cost;
        times.prefill_pair_us *= self.prefill_cost;
        Setup {
            engine: EngineModel {
                times,
                ..setup.engine.clone()
            },
            ..setup.clone()
        }
    }
}

const MAX_RUNS: usize = 5;
const TOLERANCE: f64 = 0.005;
