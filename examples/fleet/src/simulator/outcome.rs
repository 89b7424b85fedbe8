//! Records of requests → the figures of a run.

use serde::Serialize;

use super::setup::Setup;
use super::workload::Workload;

/// What became of every request.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// In the order of arrival.
    pub records: Vec<Record>,
    /// What each host's engine did.
    pub machines: Vec<MachineOutcome>,
    /// From the first arrival to the end of the last answer, microseconds.
    pub span_us: u64,
}

/// One request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Record {
    /// When it came.
    pub arrived_us: u64,
    /// Where it was sent.
    pub host: u16,
    /// Time to its first token.
    pub ttft_us: Option<u64>,
    /// Time to its last token.
    pub latency_us: Option<u64>,
    /// Prompt tokens that the engine found in its cache.
    pub cached_tokens: u32,
    /// Prompt tokens that the gateway believed to be there.
    pub predicted_tokens: u32,
    /// It left its home.
    pub is_overflow: bool,
    /// The host refused or lost it.
    pub has_failed: bool,
}

/// One host's engine.
#[derive(Debug, Clone, Copy)]
pub struct MachineOutcome {
    /// Time spent in prefill, microseconds.
    pub prefill_busy_us: u64,
    /// Time spent in steps.
    pub busy_us: u64,
    /// Times that a request lost its blocks.
    pub preemptions: u64,
}

/// The figures of one run. Times are of requests that got a first token; shares are of routed prompt tokens.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Summary {
    /// Requests that ended.
    pub finished: usize,
    /// Requests that were refused or lost.
    pub failed: usize,
    /// Mean time to first token, ms.
    pub mean_ms: f64,
    /// Its median.
    pub p50_ms: f64,
    /// Its 90th percentile.
    pub p90_ms: f64,
    /// Its 99th percentile.
    pub p99_ms: f64,
    /// Mean of TTFT less the time that the prompt would take alone on an idle engine which holds everything that was
    /// computed before, ms.
    pub excess_ms: f64,
    /// Prompt tokens found in caches ÷ prompt tokens.
    pub hit_share: f64,
    /// Prompt tokens believed to be there ÷ prompt tokens.
    pub predicted_share: f64,
    /// Uncached tokens of the host that got most ÷ mean.
    pub max_mean_work: f64,
    /// Decisions that left the home.
    pub overflow_share: f64,
    /// Share of the hosts' time spent in prefill, from the first arrival to the last answer's end.
    pub prefill_share: f64,
    /// Preemptions.
    pub preemptions: u64,
}

impl Outcome {
    /// The figures.
    pub fn summary(&self, workload: &Workload, setup: &Setup) -> Summary {
        let mut ttft_ms: Vec<f64> = Vec::with_capacity(self.records.len());
        let mut excess_ms = 0.0;
        let (mut prompt, mut cached, mut predicted) = (0u64, 0u64, 0u64);
        let mut work = vec![0u64; self.machines.len()];
        for (record, request) in self.records.iter().zip(workload.requests.iter()) {
            let Some(ttft_us) = record.ttft_us else {
                continue;
            };
            ttft_ms.push(ttft_us as f64 / 1000.0);
            excess_ms += (ttft_us as f64 - request.unloaded_us(&setup.engine)) / 1000.0;
            let tokens = request.prompt.tokens() as u64;
            prompt += tokens;
            cached += u64::from(record.cached_tokens);
            predicted += u64::from(record.predicted_tokens);
            work[usize::from(record.host)] += tokens - u64::from(record.cached_tokens);
        }
        ttft_ms.sort_unstable_by(f64::total_cmp);
        let count = ttft_ms.len().max(1) as f64;
        let machines = work.len().max(1) as f64;
        let prefill_us: u64 = self.machines.iter().map(|machine| machine.prefill_busy_us).sum();
        let share = |part: u64| part as f64 / prompt.max(1) as f64;
        let overflows = self.records.iter().filter(|record| record.is_overflow).count();
        Summary {
            finished: self
                .records
                .iter()
                .filter(|record| record.latency_us.is_some())
                .count(),
            failed: self.records.iter().filter(|record| record.has_failed).count(),
            mean_ms: ttft_ms.iter().sum::<f64>() / count,
            p50_ms: quantile(&ttft_ms, 0.50),
            p90_ms: quantile(&ttft_ms, 0.90),
            p99_ms: quantile(&ttft_ms, 0.99),
            excess_ms: excess_ms / count,
            hit_share: share(cached),
            predicted_share: share(predicted),
            max_mean_work: work.iter().copied().max().unwrap_or(0) as f64 * machines
                / work.iter().sum::<u64>().max(1) as f64,
            overflow_share: overflows as f64 / self.records.len().max(1) as f64,
            prefill_share: prefill_us as f64 / (machines * self.span_us.max(1) as f64),
            preemptions: self.machines.iter().map(|machine| machine.preemptions).sum(),
        }
    }

    /// Predicted less true hit share of what one host got from `from_us` until `to_us`, as (predicted, cached, prompt)
    /// tokens, so that several windows can be added.
    pub fn hits_between(&self, workload: &Workload, host: usize, from_us: u64, to_us: u64) -> [u64; 3] {
        let mut sums = [0; 3];
        for (record, request) in self.records.iter().zip(workload.requests.iter()) {
            let is_there = usize::from(record.host) == host && record.ttft_us.is_some();
            if is_there && (from_us..to_us).contains(&record.arrived_us) {
                sums[0] += u64::from(record.predicted_tokens);
                sums[1] += u64::from(record.cached_tokens);
                sums[2] += request.prompt.tokens() as u64;
            }
        }
        sums
    }

    /// Share of the requests from `from_us` until `to_us` that were sent to a host.
    pub fn traffic_share(&self, host: usize, from_us: u64, to_us: u64) -> f64 {
        let within = || {
            let records = self.records.iter();
            records.filter(|record| (from_us..to_us).contains(&record.arrived_us))
        };
        let there = within().filter(|record| usize::from(record.host) == host).count();
        there as f64 / within().count().max(1) as f64
    }
}

impl Summary {
    /// Mean of several runs.
    pub fn mean(runs: &[Self]) -> Self {
        let count = runs.len().max(1);
        let mean = |of: fn(&Self) -> f64| runs.iter().map(of).sum::<f64>() / count as f64;
        Self {
            finished: runs.iter().map(|run| run.finished).sum::<usize>() / count,
            failed: runs.iter().map(|run| run.failed).sum::<usize>() / count,
            mean_ms: mean(|run| run.mean_ms),
            p50_ms: mean(|run| run.p50_ms),
            p90_ms: mean(|run| run.p90_ms),
            p99_ms: mean(|run| run.p99_ms),
            excess_ms: mean(|run| run.excess_ms),
            hit_share: mean(|run| run.hit_share),
            predicted_share: mean(|run| run.predicted_share),
            max_mean_work: mean(|run| run.max_mean_work),
            overflow_share: mean(|run| run.overflow_share),
            prefill_share: mean(|run| run.prefill_share),
            preemptions: runs.iter().map(|run| run.preemptions).sum::<u64>() / count as u64,
        }
    }
}

/// The value that a share of the sorted values does not exceed.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}
