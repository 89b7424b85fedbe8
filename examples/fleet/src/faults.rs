//! The fault matrix: a list of scenarios and an Envoy in, one row a scenario, Envoy and failure policy out.
//!
//! Each scenario runs twice with the same requests: through an Envoy that balances by `least_request` without the filter, and
//! through one with the filter as shipped. What fails with the filter and would not have failed without is the filter's
//! fault; so is what takes longer than a scenario allows to recover. The rows become the table of `docs/reliability.md`.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use crate::client::ClientError;
use crate::envoy::{Envoy, FindError, StartError};
use crate::patched::PatchError;
use crate::wasm::BuildError;

mod admin;
pub mod args;
mod companion;
mod endpoints;
mod engine;
mod gateway;
mod load;
mod network;
pub mod play;
mod shared_data;
mod stand;
mod streams;
mod table;
mod traps;

pub use load::{End, Load, LoadPlan, Sent};
pub use stand::{Gateway, Policy, Side, Stand};
pub use table::{in_document, table, with_rows};

/// All scenarios, in the order of the table.
pub fn scenarios() -> Vec<Scenario> {
    let parts = [
        engine::scenarios(),
        endpoints::scenarios(),
        admin::scenarios(),
        companion::scenarios(),
        shared_data::scenarios(),
        network::scenarios(),
        gateway::scenarios(),
        traps::scenarios(),
        streams::scenarios(),
    ];
    parts.into_iter().flatten().collect()
}

/// Something that goes wrong while requests run.
pub struct Scenario {
    /// What it happens to, such as `engine`; the table is ordered by it.
    pub part: &'static str,
    /// What happens, in a few words.
    pub fault: String,
    /// Failure policies under which to run it.
    pub policies: &'static [Policy],
    /// Whether it belongs to the short form that every test run has.
    pub is_short: bool,
    run: Run,
}

impl Scenario {
    /// A scenario under the shipped failure policy, in the long form only.
    pub fn new(
        part: &'static str,
        fault: impl Into<String>,
        run: impl for<'a> Fn(&'a Stand) -> Running<'a> + 'static,
    ) -> Self {
        Self {
            part,
            fault: fault.into(),
            policies: &[Policy::Shipped],
            is_short: false,
            run: Box::new(run),
        }
    }

    /// The same under these failure policies.
    #[must_use]
    pub fn under(mut self, policies: &'static [Policy]) -> Self {
        self.policies = policies;
        self
    }

    /// The same, in the short form too.
    #[must_use]
    pub fn in_short_form(mut self) -> Self {
        self.is_short = true;
        self
    }

    /// Name by which it can be chosen.
    pub fn name(&self) -> String {
        format!("{}: {}", self.part, self.fault)
    }

    /// Runs it without and with the filter and compares. Where nothing but the time to recover is amiss, which a machine
    /// that stalls can cause, two more runs decide: the time in the middle counts.
    ///
    /// # Errors
    /// When the scenario could not be run at all; what merely went wrong in it stands in the row.
    pub async fn row(&self, envoy: &Envoy, policy: Policy, is_short: bool) -> Result<Row, FaultError> {
        let first = self.row_once(envoy, policy, is_short).await?;
        if !first.is_only_late() {
            return Ok(first);
        }
        let mut rows = vec![first.clone()];
        for _ in 0..2 {
            rows.push(self.row_once(envoy, policy, is_short).await?);
        }
        Ok(Row::middle_of(rows).unwrap_or(first))
    }

    async fn row_once(&self, envoy: &Envoy, policy: Policy, is_short: bool) -> Result<Row, FaultError> {
        let plain = self.seen(envoy, Side::Plain, policy, is_short).await?;
        let filtered = self.seen(envoy, Side::Filtered, policy, is_short).await?;
        Ok(self.compare(envoy, policy, &plain, filtered))
    }

    async fn seen(
        &self,
        envoy: &Envoy,
        side: Side,
        policy: Policy,
        is_short: bool,
    ) -> Result<Seen, FaultError> {
        let stand = Stand::new(envoy.clone(), side, policy, is_short)?;
        (self.run)(&stand).await
    }

    fn compare(&self, envoy: &Envoy, policy: Policy, plain: &Seen, filtered: Seen) -> Row {
        let failed = |seen: &Seen| seen.sent.iter().filter(|sent| sent.has_failed()).count();
        let slowest = |seen: &Seen| {
            let answered = seen.sent.iter().filter(|sent| !sent.has_failed());
            answered.map(|sent| sent.took).max().unwrap_or_default()
        };
        let because_of_us = failed(&filtered).saturating_sub(failed(plain));
        let mut broken = filtered.broken.clone();
        broken.extend(
            plain
                .broken
                .iter()
                .map(|broken| format!("without the filter: {broken}")),
        );
        // A trap is what the other failure policies are there to show; with the shipped one nothing may fail.
        if because_of_us > 0 && policy == Policy::Shipped {
            let first = filtered.sent.iter().find(|sent| sent.has_failed());
            let first = first.map(ToString::to_string).unwrap_or_default();
            broken.push(format!(
                "{because_of_us} requests failed that plain Envoy served; the first: {first}"
            ));
        }
        let overdue = filtered.recovery.iter().filter(|recovery| recovery.is_overdue());
        broken.extend(overdue.map(Recovery::to_string));
        let mut note = filtered.note.clone();
        if !plain.note.is_empty() && plain.note != note {
            add_note(&mut note, &format!("without the filter: {}", plain.note));
        }
        Row {
            part: self.part,
            fault: self.fault.clone(),
            envoy: envoy.version,
            policy,
            sent: filtered.sent.len(),
            answered: filtered.sent.len() - failed(&filtered),
            failed_plain: failed(plain),
            because_of_us,
            slowest: slowest(&filtered),
            worst_added: slowest(&filtered).saturating_sub(slowest(plain)),
            recovery: filtered.recovery,
            note,
            broken,
        }
    }
}

/// A scenario under way.
pub type Running<'a> = Pin<Box<dyn Future<Output = Result<Seen, FaultError>> + 'a>>;
type Run = Box<dyn for<'a> Fn(&'a Stand) -> Running<'a>>;

/// What a scenario gave on one side.
#[derive(Debug, Default)]
pub struct Seen {
    /// Every request of it, in the same order on both sides.
    pub sent: Vec<Sent>,
    /// When things were well again; only the filter's side says.
    pub recovery: Option<Recovery>,
    /// What the table should say besides.
    pub note: String,
    /// What did not hold.
    pub broken: Vec<String>,
}

impl Seen {
    /// These requests and nothing else.
    pub fn of(sent: Vec<Sent>) -> Self {
        Self {
            sent,
            ..Self::default()
        }
    }

    /// Notes that something did not hold.
    pub fn check(&mut self, holds: bool, what: impl Into<String>) {
        if !holds {
            self.broken.push(what.into());
        }
    }
}

/// How long it took until things were well again.
#[derive(Debug, Clone)]
pub struct Recovery {
    /// What had to come true, in words that end the sentence "time until …".
    pub until: &'static str,
    /// How long that took; `None` if it never came true.
    pub took: Option<Duration>,
    /// How long it may take, where there is a bar.
    pub within: Option<Duration>,
}

impl Recovery {
    /// Whether it never came true, or later than it may.
    fn is_overdue(&self) -> bool {
        let is_late = |took| self.within.is_some_and(|within| took > within);
        self.took.is_none_or(is_late)
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.took {
            Some(took) => write!(f, "{} ms until {}", took.as_millis(), self.until)?,
            None => write!(f, "never: {}", self.until)?,
        }
        match self.within {
            Some(within) => write!(f, " (at most {} ms)", within.as_millis()),
            None => Ok(()),
        }
    }
}

/// One row of the matrix.
#[derive(Debug, Clone)]
pub struct Row {
    /// What the fault happens to.
    pub part: &'static str,
    /// What happens.
    pub fault: String,
    /// Version of the Envoy.
    pub envoy: (u32, u32, u32),
    /// Failure policy of the filter.
    pub policy: Policy,
    /// Requests sent on each side.
    pub sent: usize,
    /// Requests answered in full with the filter.
    pub answered: usize,
    /// Requests that failed without the filter.
    pub failed_plain: usize,
    /// Requests by which more failed with the filter.
    pub because_of_us: usize,
    /// The slowest answer with the filter.
    pub slowest: Duration,
    /// By how much it was slower than the slowest without.
    pub worst_added: Duration,
    /// When things were well again.
    pub recovery: Option<Recovery>,
    /// What else there is to say.
    pub note: String,
    /// What did not hold; empty when all is well.
    pub broken: Vec<String>,
}

impl Row {
    /// Whether all is well but for the time that recovery took.
    fn is_only_late(&self) -> bool {
        let is_overdue = |recovery: &Recovery| recovery.took.is_some() && recovery.is_overdue();
        self.broken.len() == 1 && self.recovery.as_ref().is_some_and(is_overdue)
    }

    /// The one in the middle by the time that recovery took, which says what all of them took. A row in which something
    /// else does not hold comes before any other.
    fn middle_of(mut rows: Vec<Self>) -> Option<Self> {
        let is_otherwise_broken = |row: &Self| !row.broken.is_empty() && !row.is_only_late();
        if let Some(at) = rows.iter().position(is_otherwise_broken) {
            return Some(rows.swap_remove(at));
        }
        let took = |row: &Self| row.recovery.as_ref().and_then(|recovery| recovery.took);
        let all: Vec<String> = rows
            .iter()
            .filter_map(took)
            .map(|took| took.as_millis().to_string())
            .collect();
        rows.sort_by_key(took);
        let mut row = rows.swap_remove(rows.len().checked_sub(1)? / 2);
        let times = format!("late once, so played {} times: {} ms", all.len(), all.join(", "));
        add_note(&mut row.note, &times);
        Some(row)
    }
}

fn add_note(note: &mut String, more: &str) {
    if !note.is_empty() {
        note.push_str("; ");
    }
    note.push_str(more);
}

/// Why a scenario could not be run.
#[derive(Debug)]
pub enum FaultError {
    /// There is no Envoy.
    Find(FindError),
    /// The filter cannot be built.
    Build(&'static BuildError),
    /// Envoy does not start.
    Start(StartError),
    /// An exchange of the scenario's own failed.
    Client(ClientError),
    /// A file or socket operation failed.
    Io(io::Error),
    /// The module cannot be patched.
    Patch(PatchError),
    /// Something that the scenario waits for never came true.
    Never(String),
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Find(cause) => write!(f, "{cause}"),
            Self::Build(cause) => write!(f, "{cause}"),
            Self::Start(cause) => write!(f, "{cause}"),
            Self::Client(cause) => write!(f, "{cause}"),
            Self::Io(cause) => write!(f, "{cause}"),
            Self::Patch(cause) => write!(f, "{cause}"),
            Self::Never(what) => write!(f, "never came true: {what}"),
        }
    }
}

impl std::error::Error for FaultError {}

impl From<FindError> for FaultError {
    fn from(cause: FindError) -> Self {
        Self::Find(cause)
    }
}

impl From<&'static BuildError> for FaultError {
    fn from(cause: &'static BuildError) -> Self {
        Self::Build(cause)
    }
}

impl From<StartError> for FaultError {
    fn from(cause: StartError) -> Self {
        Self::Start(cause)
    }
}

impl From<ClientError> for FaultError {
    fn from(cause: ClientError) -> Self {
        Self::Client(cause)
    }
}

impl From<io::Error> for FaultError {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

impl From<PatchError> for FaultError {
    fn from(cause: PatchError) -> Self {
        Self::Patch(cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row that recovered after so long of 1 500 ms, with what else did not hold.
    fn row(took_ms: u64, otherwise: &[&str]) -> Row {
        let recovery = Recovery {
            until: "all is well",
            took: Some(Duration::from_millis(took_ms)),
            within: Some(Duration::from_millis(1_500)),
        };
        let mut broken: Vec<String> = otherwise.iter().map(|what| (*what).to_owned()).collect();
        broken.extend(recovery.is_overdue().then(|| recovery.to_string()));
        Row {
            part: "engine",
            fault: "killed".to_owned(),
            envoy: (1, 36, 2),
            policy: Policy::Shipped,
            sent: 1,
            answered: 1,
            failed_plain: 0,
            because_of_us: 0,
            slowest: Duration::ZERO,
            worst_added: Duration::ZERO,
            recovery: Some(recovery),
            note: "noted".to_owned(),
            broken,
        }
    }

    #[test]
    fn the_time_in_the_middle_decides_and_all_are_told() {
        let held = Row::middle_of(vec![row(1_530, &[]), row(900, &[]), row(700, &[])]).unwrap();
        assert_eq!(held.broken, [""; 0]);
        assert_eq!(
            held.note,
            "noted; late once, so played 3 times: 1530, 900, 700 ms"
        );
        let late = Row::middle_of(vec![row(1_530, &[]), row(900, &[]), row(1_501, &[])]).unwrap();
        assert_eq!(late.broken, ["1501 ms until all is well (at most 1500 ms)"]);
    }

    #[test]
    fn only_lateness_is_played_again_and_nothing_else_is_outvoted() {
        assert!(!row(1_500, &[]).is_only_late());
        assert!(row(1_501, &[]).is_only_late());
        assert!(!row(1_501, &["a request failed"]).is_only_late());
        assert!(!row(900, &["a request failed"]).is_only_late());
        let mut never = row(1_501, &[]);
        never.recovery.as_mut().unwrap().took = None;
        assert!(!never.is_only_late());
        let rows = vec![row(1_530, &[]), row(900, &[]), row(700, &["a request failed"])];
        assert_eq!(Row::middle_of(rows).unwrap().broken, ["a request failed"]);
    }
}
