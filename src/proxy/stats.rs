//! Metrics: closed sets of names, defined when first needed, display only.
//!
//! Envoy never frees a metric and has no labels, so every name is made of constants; `.label.value` tails become
//! Prometheus labels by the `stats_tags` of the shipped bootstrap.

use super::host::{self, MetricKind};
use crate::config::StrategyName;
use crate::decision::Reason;
use crate::exchange::Unkeyed;
use crate::host_table::{HostTable, Load};
use crate::journal::Tallies;

/// The metrics of one VM.
#[derive(Debug)]
pub(super) struct Stats {
    decisions: Vec<PendingCounter>,
    unkeyed: Vec<PendingCounter>,
    counters: Vec<PendingCounter>,
    decision_time: LazyMetric,
    decisions_made: u32,
}

/// Counters without labels, or with one closed label in the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counter {
    /// Bytes of prompts read.
    PromptBytes,
    /// Bytes of those that were believed cached on the chosen host.
    MatchedBytes,
    /// Client-sent steering headers removed.
    SpoofedHeaders,
    /// Requests that waited at their headers without a body because the filter's configuration lacks a flag.
    FlagMissing,
    /// Bodies refused by Envoy while they were held.
    HeldTooLarge,
    /// Requests that ended while they were held.
    EndedWhileHeld,
    /// Attempts that a chosen host failed.
    HostFailures,
    /// Requests served by another host than the first of the list.
    ServedElsewhere,
    /// Answers that told what the engine counted.
    UsageRead,
    /// Answers that were read and did not tell.
    UsageAbsent,
    /// Answers that were not read because they are compressed.
    UsageEncoded,
    /// Answers of which much less was cached than predicted.
    FalseHits,
    /// Shared blobs that were not what they should be.
    BlobsRejected,
    /// Placements of other workers that were overwritten before this one read them.
    PlacementsMissed,
    /// Times that this worker merged the journals of all.
    JournalMerges,
    /// Workers without a journal slot, counted at each attempt.
    JournalSlotMissing,
    /// Scrapes that brought a sample.
    ScrapesOk,
    /// Scrapes without an answer, or with one that is not 200.
    ScrapesFailed,
    /// Scrapes that another host answered.
    ScrapesMisrouted,
    /// Endpoint lists read.
    DiscoveriesOk,
    /// Endpoint lists that could not be read.
    DiscoveriesFailed,
    /// Answers with status 200 that could not be read.
    AnswersUnreadable,
    /// Engines seen to have restarted.
    EngineRestarts,
    /// Times this VM became the one that polls.
    Takeovers,
}

impl Counter {
    const ALL: [Self; 24] = [
        Self::PromptBytes,
        Self::MatchedBytes,
        Self::SpoofedHeaders,
        Self::FlagMissing,
        Self::HeldTooLarge,
        Self::EndedWhileHeld,
        Self::HostFailures,
        Self::ServedElsewhere,
        Self::UsageRead,
        Self::UsageAbsent,
        Self::UsageEncoded,
        Self::FalseHits,
        Self::BlobsRejected,
        Self::PlacementsMissed,
        Self::JournalMerges,
        Self::JournalSlotMissing,
        Self::ScrapesOk,
        Self::ScrapesFailed,
        Self::ScrapesMisrouted,
        Self::DiscoveriesOk,
        Self::DiscoveriesFailed,
        Self::AnswersUnreadable,
        Self::EngineRestarts,
        Self::Takeovers,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::PromptBytes => "warmroute_prompt_bytes_total",
            Self::MatchedBytes => "warmroute_matched_bytes_total",
            Self::SpoofedHeaders => "warmroute_client_steering_headers_removed_total",
            Self::FlagMissing => "warmroute_flag_missing_total",
            Self::HeldTooLarge => "warmroute_held_body_refused_total",
            Self::EndedWhileHeld => "warmroute_ended_while_held_total",
            Self::HostFailures => "warmroute_host_failures_total",
            Self::ServedElsewhere => "warmroute_served_elsewhere_total",
            Self::UsageRead => "warmroute_usage_total.result.read",
            Self::UsageAbsent => "warmroute_usage_total.result.absent",
            Self::UsageEncoded => "warmroute_usage_total.result.encoded",
            Self::FalseHits => "warmroute_false_hits_total",
            Self::BlobsRejected => "warmroute_shared_blobs_rejected_total",
            Self::PlacementsMissed => "warmroute_placements_missed_total",
            Self::JournalMerges => "warmroute_journal_merges_total",
            Self::JournalSlotMissing => "warmroute_journal_slot_missing_total",
            Self::ScrapesOk => "warmroute_scrapes_total.result.ok",
            Self::ScrapesFailed => "warmroute_scrapes_total.result.failed",
            Self::ScrapesMisrouted => "warmroute_scrapes_total.result.misrouted",
            Self::DiscoveriesOk => "warmroute_discoveries_total.result.ok",
            Self::DiscoveriesFailed => "warmroute_discoveries_total.result.failed",
            Self::AnswersUnreadable => "warmroute_answers_unreadable_total",
            Self::EngineRestarts => "warmroute_engine_restarts_total",
            Self::Takeovers => "warmroute_companion_takeovers_total",
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct LazyMetric(Option<u32>);

impl LazyMetric {
    fn id(&mut self, kind: MetricKind, name: impl FnOnce() -> String) -> Option<u32> {
        if self.0.is_none() {
            self.0 = host::define_metric(kind, &name());
        }
        self.0
    }
}

impl Stats {
    pub(super) fn new() -> Self {
        Self {
            decisions: vec![PendingCounter::default(); StrategyName::ALL.len() * Reason::ALL.len()],
            unkeyed: vec![PendingCounter::default(); Unkeyed::ALL.len()],
            counters: vec![PendingCounter::default(); Counter::ALL.len()],
            decision_time: LazyMetric::default(),
            decisions_made: 0,
        }
    }

    /// Counts one decision; true for those whose time is to be taken.
    pub(super) fn decision(&mut self, strategy: StrategyName, reason: Reason) -> bool {
        let row = StrategyName::ALL.iter().position(|name| *name == strategy);
        let column = Reason::ALL.iter().position(|name| *name == reason);
        if let (Some(row), Some(column)) = (row, column)
            && let Some(counter) = self.decisions.get_mut(row * Reason::ALL.len() + column)
        {
            counter.add(1);
        }
        self.decisions_made = self.decisions_made.wrapping_add(1);
        self.decisions_made % TIMED_DECISIONS == 1
    }

    /// Counts one request that was decided without a prefix key, by cause.
    pub(super) fn unkeyed(&mut self, cause: Unkeyed) {
        let index = Unkeyed::ALL.iter().position(|other| *other == cause);
        if let Some(counter) = index.and_then(|index| self.unkeyed.get_mut(index)) {
            counter.add(1);
        }
    }

    /// Adds to a counter.
    pub(super) fn add(&mut self, counter: Counter, amount: u64) {
        let index = Counter::ALL.iter().position(|other| *other == counter);
        if let Some(counter) = index.and_then(|index| self.counters.get_mut(index)) {
            counter.add(amount);
        }
    }

    /// Records how long a decision took, reading and hashing the body included.
    pub(super) fn decision_time(&mut self, microseconds: u64) {
        let name = || String::from("warmroute_decision_us");
        if let Some(id) = self.decision_time.id(MetricKind::Histogram, name) {
            host::record_metric(id, microseconds);
        }
    }

    /// Shows what was counted since the last time. Counting in Envoy would cost every request several host calls.
    pub(super) fn flush(&mut self) {
        let rows = StrategyName::ALL
            .iter()
            .flat_map(|strategy| Reason::ALL.iter().map(move |reason| (strategy, reason)));
        for (counter, (strategy, reason)) in self.decisions.iter_mut().zip(rows) {
            counter.flush(|| {
                format!(
                    "warmroute_decisions_total.strategy.{}.reason.{}",
                    strategy.as_str(),
                    reason.as_str()
                )
            });
        }
        for (counter, cause) in self.unkeyed.iter_mut().zip(Unkeyed::ALL) {
            counter.flush(|| format!("warmroute_unkeyed_total.reason.{}", cause.as_str()));
        }
        for (counter, name) in self.counters.iter_mut().zip(Counter::ALL) {
            counter.flush(|| name.name().into());
        }
    }
}

/// A counter with what Envoy was not told yet.
#[derive(Debug, Clone, Copy, Default)]
struct PendingCounter {
    metric: LazyMetric,
    pending: u64,
}

impl PendingCounter {
    fn add(&mut self, amount: u64) {
        self.pending = self.pending.saturating_add(amount);
    }

    fn flush(&mut self, name: impl FnOnce() -> String) {
        if self.pending == 0 {
            return;
        }
        if let Some(id) = self.metric.id(MetricKind::Counter, name) {
            host::increment_metric(id, i64::try_from(self.pending).unwrap_or(i64::MAX));
            self.pending = 0;
        }
    }
}

/// Every sixteenth decision is timed, the first included: the clock and the histogram cost host calls.
const TIMED_DECISIONS: u32 = 16;

/// What the companion shows of one pool's table.
#[derive(Debug)]
pub(super) struct PoolGauges {
    pool: String,
    hosts: LazyMetric,
    taking_traffic: LazyMetric,
    waiting: LazyMetric,
    running: LazyMetric,
    published_s: LazyMetric,
    in_flight: LazyMetric,
    prefill_tokens: LazyMetric,
}

impl PoolGauges {
    pub(super) fn new(pool: &str) -> Self {
        // Dots part Envoy's metric names, and a cluster's name may be any text.
        let word = |c: char| {
            if c.is_ascii_alphanumeric() || c == '-' {
                c
            } else {
                '_'
            }
        };
        Self {
            pool: pool.chars().map(word).collect(),
            hosts: LazyMetric::default(),
            taking_traffic: LazyMetric::default(),
            waiting: LazyMetric::default(),
            running: LazyMetric::default(),
            published_s: LazyMetric::default(),
            in_flight: LazyMetric::default(),
            prefill_tokens: LazyMetric::default(),
        }
    }

    /// Shows what all workers of this Envoy have open together.
    pub(super) fn show_tallies(&mut self, tallies: &Tallies) {
        let requests = tallies.iter().map(|tally| u64::from(tally.requests)).sum();
        let tokens = tallies.iter().map(|tally| tally.uncached_tokens).sum();
        for (metric, name, value) in [
            (&mut self.in_flight, "warmroute_requests_in_flight", requests),
            (
                &mut self.prefill_tokens,
                "warmroute_prefill_tokens_in_flight",
                tokens,
            ),
        ] {
            if let Some(id) = metric.id(MetricKind::Gauge, || format!("{name}.pool.{}", self.pool)) {
                host::record_metric(id, value);
            }
        }
    }

    /// Shows a table that was just published.
    pub(super) fn show(&mut self, table: &HostTable) {
        let taking = table
            .hosts
            .iter()
            .filter(|host| host.health.takes_traffic())
            .count();
        let sum = |of: fn(&Load) -> Option<u32>| {
            table
                .hosts
                .iter()
                .filter_map(|host| of(&host.load))
                .map(u64::from)
                .sum()
        };
        for (metric, name, value) in [
            (&mut self.hosts, "warmroute_hosts", table.hosts.len() as u64),
            (
                &mut self.taking_traffic,
                "warmroute_hosts_taking_traffic",
                taking as u64,
            ),
            (
                &mut self.waiting,
                "warmroute_engine_requests_waiting",
                sum(|load| load.waiting),
            ),
            (
                &mut self.running,
                "warmroute_engine_requests_running",
                sum(|load| load.running),
            ),
            (
                &mut self.published_s,
                "warmroute_table_published_timestamp_seconds",
                table.published_ms / 1000,
            ),
        ] {
            if let Some(id) = metric.id(MetricKind::Gauge, || format!("{name}.pool.{}", self.pool)) {
                host::record_metric(id, value);
            }
        }
    }
}
