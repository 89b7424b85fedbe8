//! Scenarios and Envoys in, rows out, some of them played at a time: most of what a scenario does is wait.

use std::rc::Rc;

use tokio::task::{JoinSet, LocalSet};

use super::{FaultError, Policy, Row, Scenario};
use crate::envoy::Envoy;

/// What to play.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Envoys on which each scenario is played, in the order of the rows.
    pub envoys: Vec<Envoy>,
    /// Whether scenarios take their short form.
    pub is_short: bool,
    /// How many rows are played side by side.
    pub at_a_time: usize,
}

/// One row that was played, or why it could not be.
#[derive(Debug)]
pub struct Played {
    /// Name of its scenario.
    pub name: String,
    /// Its failure policy.
    pub policy: Policy,
    /// The row.
    pub row: Result<Row, FaultError>,
}

/// Plays each scenario under each of its policies on each Envoy; `tell` hears of every row as it ends. Rows come back in the
/// order of the scenarios.
pub async fn play(scenarios: Vec<Scenario>, plan: &Plan, mut tell: impl FnMut(&Played)) -> Vec<Played> {
    let scenarios = Rc::new(scenarios);
    let turns: Vec<(usize, Policy, Envoy)> = scenarios
        .iter()
        .enumerate()
        .flat_map(|(at, scenario)| scenario.policies.iter().map(move |policy| (at, *policy)))
        .flat_map(|(at, policy)| plan.envoys.iter().map(move |envoy| (at, policy, envoy.clone())))
        .collect();
    let is_short = plan.is_short;
    let mut played: Vec<(usize, Played)> = Vec::with_capacity(turns.len());
    let mut left = turns.into_iter().enumerate();
    LocalSet::new()
        .run_until(async {
            let mut playing = JoinSet::new();
            loop {
                while playing.len() < plan.at_a_time.max(1)
                    && let Some((turn, (at, policy, envoy))) = left.next()
                {
                    let scenarios = Rc::clone(&scenarios);
                    playing.spawn_local(async move {
                        let scenario = scenarios.get(at)?;
                        let row = scenario.row(&envoy, policy, is_short).await;
                        let name = scenario.name();
                        Some((turn, Played { name, policy, row }))
                    });
                }
                match playing.join_next().await {
                    Some(Ok(Some((turn, row)))) => {
                        tell(&row);
                        played.push((turn, row));
                    }
                    Some(Ok(None)) => {}
                    Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
                    None => break,
                }
            }
        })
        .await;
    played.sort_by_key(|(turn, _)| *turn);
    played.into_iter().map(|(_, row)| row).collect()
}
