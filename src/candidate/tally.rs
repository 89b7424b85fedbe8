//! Own placements on one host → requests and prefill work in flight, learned prefill rate, failure penalty.
//!
//! In: charges as they are placed, released, moved and ended, with the time. Out: exact integer sums. Every charge is
//! counted down exactly once, whatever the order of calls; sums saturate and never go below zero (a residue on an idle
//! host would let it win or lose every tie). Nothing here knows of other hosts.

use std::collections::VecDeque;

use crate::host_table::Slot;
use crate::journal::Placement;

/// One request's share of a host's tally; it is not `Clone`, so that it is given back once.
#[derive(Debug, PartialEq, Eq)]
pub struct Charge {
    /// Host that carries the charge.
    pub slot: Slot,
    /// Epoch of that host when it was charged; a charge of an older epoch counts for nothing.
    pub epoch: u32,
    /// What the host has to compute.
    pub work: Work,
    /// When the charge was placed, ms since the Unix epoch.
    pub placed_ms: u64,
    /// Whether the prefill is still believed to be under way.
    pub prefill_open: bool,
    pub(super) request_open: bool,
    /// Whether its answer has not begun.
    pub(super) awaited: bool,
    /// Whether the charge entered the host's queue of open prefills, and its number there.
    pub(super) queued: bool,
    pub(super) sequence: u32,
    /// Backlog of the host just before this charge, tokens.
    pub(super) ahead_tokens: u64,
    pub(super) streamed: bool,
    pub(super) moved: bool,
    /// What the index was told of the request, until it is known that the host serves it.
    pub(crate) placement: Option<Box<Placement>>,
}

/// What one prompt gives a host to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Prompt tokens that are not cached there: what the prompt adds to the KV cache.
    pub uncached_tokens: u32,
    /// The time that they take, in tokens of a short prompt: attention makes those of a long one dearer.
    pub prefill_tokens: u32,
}

impl From<u32> for Work {
    /// Tokens of a short prompt.
    fn from(tokens: u32) -> Self {
        Self {
            uncached_tokens: tokens,
            prefill_tokens: tokens,
        }
    }
}

/// This worker's own work in flight on one host.
#[derive(Debug, Clone, Default)]
pub(super) struct OwnWork {
    /// Requests in flight.
    pub(super) requests: u32,
    /// Work of the prefills under way.
    pub(super) prefill_tokens: u64,
    /// Uncached tokens of all requests in flight: what they add to the KV cache.
    pub(super) kv_tokens: u64,
    queue: VecDeque<OpenPrefill>,
    /// When the first of `queue` became the first.
    head_since_ms: u64,
    /// Requests of which nothing has come back, those for a stream apart from those for a whole answer.
    streams: Waiting,
    wholes: Waiting,
    /// When an answer last began.
    pub(super) heard_ms: u64,
}

/// Requests that wait for the first byte of their answer.
#[derive(Debug, Clone, Default)]
struct Waiting {
    requests: u32,
    /// When the first of them was sent, or the host was last heard of.
    since_ms: u64,
}

/// How long a first byte usually takes in the fleet.
#[derive(Debug, Clone, Default)]
pub(super) struct UsualWaits {
    streams: SlowMean,
    wholes: SlowMean,
}

/// Mean that goes back over about 16 values, in 1/16; `None` before the first.
#[derive(Debug, Clone, Default)]
struct SlowMean(Option<u64>);

#[derive(Debug, Clone, Copy)]
struct OpenPrefill {
    sequence: u32,
    tokens: u32,
    streamed: bool,
}

impl OwnWork {
    /// Adds a charge; fills in its place in the queue.
    pub(super) fn place(&mut self, charge: &mut Charge, now_ms: u64) {
        self.requests = self.requests.saturating_add(1);
        self.kv_tokens = self.kv_tokens.saturating_add(charge.work.uncached_tokens.into());
        charge.request_open = true;
        charge.queued = false;
        if !charge.prefill_open {
            return;
        }
        if charge.awaited {
            let waiting = self.waiting(charge.streamed);
            if waiting.requests == 0 {
                waiting.since_ms = now_ms;
            }
            waiting.requests = waiting.requests.saturating_add(1);
        }
        self.prefill_tokens = self
            .prefill_tokens
            .saturating_add(charge.work.prefill_tokens.into());
        if self.queue.len() < MAX_OPEN_PREFILLS {
            if self.queue.is_empty() {
                self.head_since_ms = now_ms;
            }
            charge.queued = true;
            let (sequence, tokens, streamed) = (charge.sequence, charge.work.prefill_tokens, charge.streamed);
            self.queue.push_back(OpenPrefill {
                sequence,
                tokens,
                streamed,
            });
        }
    }

    /// Takes a charge's prefill work off, unless [`release_overdue`](Self::release_overdue) did before.
    pub(super) fn end_prefill(&mut self, charge: &Charge, now_ms: u64) {
        if charge.queued {
            let Some(at) = self
                .queue
                .iter()
                .position(|open| open.sequence == charge.sequence)
            else {
                return;
            };
            self.queue.remove(at);
            if at == 0 {
                self.head_since_ms = now_ms;
            }
        }
        self.prefill_tokens = self
            .prefill_tokens
            .saturating_sub(charge.work.prefill_tokens.into());
    }

    /// Takes a charge's request off.
    pub(super) fn end_request(&mut self, charge: &Charge) {
        self.requests = self.requests.saturating_sub(1);
        self.kv_tokens = self.kv_tokens.saturating_sub(charge.work.uncached_tokens.into());
    }

    /// Nothing more tells when the answer of a charge begins.
    pub(super) fn end_wait(&mut self, charge: &Charge) {
        let waiting = self.waiting(charge.streamed);
        waiting.requests = waiting.requests.saturating_sub(1);
    }

    /// An answer began.
    pub(super) fn heard(&mut self, now_ms: u64) {
        self.streams.since_ms = now_ms;
        self.wholes.since_ms = now_ms;
        self.heard_ms = now_ms;
    }

    /// Whether the host owes the beginning of an answer.
    pub(super) fn is_waiting(&self) -> bool {
        self.streams.requests > 0 || self.wholes.requests > 0
    }

    /// How long nothing came back from the host, if that is far longer than usual; else 0: by those that wait for a stream,
    /// and by those that wait for a whole answer.
    ///
    /// `others_ms` is what the work of others there takes. Whole answers are judged only once it is known how long they
    /// take.
    pub(super) fn silences_ms(
        &self,
        usual: &UsualWaits,
        others_ms: u64,
        tokens_per_s: u32,
        now_ms: u64,
    ) -> [u64; 2] {
        let head_tokens = self.queue.front().map_or(0, |head| u64::from(head.tokens));
        let head_ms = (head_tokens * 1000)
            .checked_div(u64::from(tokens_per_s))
            .unwrap_or(0);
        let ahead_ms = others_ms.saturating_add(head_ms);
        let streams = (&self.streams, Some(usual.streams.value().unwrap_or(0)));
        [streams, (&self.wholes, usual.wholes.value())].map(|(waiting, usual_ms)| match usual_ms {
            Some(usual_ms) if waiting.requests > 0 => {
                let silent_ms = now_ms.saturating_sub(waiting.since_ms);
                let usual_ms = usual_ms.saturating_add(ahead_ms);
                let allowed_ms = usual_ms.saturating_mul(USUAL_TIMES).saturating_add(HICCUP_MS);
                if silent_ms > allowed_ms { silent_ms } else { 0 }
            }
            Some(_) | None => 0,
        })
    }

    fn waiting(&mut self, streamed: bool) -> &mut Waiting {
        if streamed {
            &mut self.streams
        } else {
            &mut self.wholes
        }
    }

    /// Prefill tokens still to do: the head of the queue falls with time, down to a tenth of it.
    ///
    /// Not below, since its first token has not been seen; without the drain the mean TTFT near saturation is 10 %
    /// higher in the simulator.
    pub(super) fn backlog_tokens(&self, tokens_per_s: u32, now_ms: u64) -> u64 {
        let Some(head) = self.queue.front() else {
            return self.prefill_tokens;
        };
        let elapsed_ms = now_ms.saturating_sub(self.head_since_ms);
        let done = elapsed_ms.saturating_mul(u64::from(tokens_per_s)) / 1000;
        self.prefill_tokens
            .saturating_sub(done.min(u64::from(head.tokens) * 9 / 10))
    }

    /// Takes off the prefills of answers that are not streamed and whose time is over: no first body byte tells.
    pub(super) fn release_overdue(&mut self, tokens_per_s: u32, now_ms: u64) {
        while let Some(due_ms) = self.next_due_ms(tokens_per_s)
            && due_ms <= now_ms
        {
            let Some(head) = self.queue.pop_front() else {
                return;
            };
            self.prefill_tokens = self.prefill_tokens.saturating_sub(u64::from(head.tokens));
            self.head_since_ms = due_ms;
        }
    }

    /// When the head of the queue is over by the clock, if no first body byte will tell.
    pub(super) fn next_due_ms(&self, tokens_per_s: u32) -> Option<u64> {
        let head = self.queue.front().filter(|head| !head.streamed)?;
        let work_ms = (u64::from(head.tokens) * 1000)
            .checked_div(u64::from(tokens_per_s))
            .unwrap_or(0);
        Some(self.head_since_ms.saturating_add(work_ms))
    }
}

impl UsualWaits {
    /// Adds one answer that began.
    pub(super) fn learn(&mut self, charge: &Charge, now_ms: u64) {
        let wait_ms = now_ms.saturating_sub(charge.placed_ms);
        if charge.streamed {
            self.streams.learn(wait_ms);
        } else {
            self.wholes.learn(wait_ms);
        }
    }
}

impl SlowMean {
    fn learn(&mut self, value: u64) {
        let sum = self.0.map_or(value.saturating_mul(16), |sum| {
            (sum - sum / 16).saturating_add(value)
        });
        self.0 = Some(sum);
    }

    fn value(&self) -> Option<u64> {
        self.0.map(|sum| sum / 16)
    }
}

/// How fast a host computes prompts, learned from streamed answers.
#[derive(Debug, Clone, Default)]
pub(super) struct PrefillRate {
    tokens: u64,
    time_ms: u64,
    samples: u32,
}

impl PrefillRate {
    /// Adds one answer: `tokens` of work, its own and what was ahead of it, took `time_ms` to the first body byte.
    ///
    /// Work and time are summed apart, so that long prompts weigh more: a short one measures the network.
    pub(super) fn learn(&mut self, tokens: u64, time_ms: u64) {
        if tokens < MIN_RATE_TOKENS || time_ms == 0 || time_ms > MAX_PREFILL_MS {
            return;
        }
        // Exact for any sum: 16 samples are remembered.
        self.tokens = (self.tokens - self.tokens / 16).saturating_add(tokens.min(u64::from(u32::MAX)));
        self.time_ms = (self.time_ms - self.time_ms / 16).saturating_add(time_ms.min(u64::from(u32::MAX)));
        self.samples = self.samples.saturating_add(1);
    }

    /// Tokens a second, once there are enough samples to go by.
    pub(super) fn tokens_per_s(&self) -> Option<u32> {
        if self.samples < MIN_RATE_SAMPLES {
            return None;
        }
        let rate = (self.tokens.saturating_mul(1000)).checked_div(self.time_ms)?;
        Some(u32::try_from(rate).unwrap_or(u32::MAX).max(1))
    }
}

/// Penalty of a host for failures: it doubles with each and fades.
#[derive(Debug, Clone, Default)]
pub(super) struct Penalty {
    tokens: u64,
    doublings: u32,
    failed_ms: u64,
}

impl Penalty {
    /// Counts a failure. A crash that resets every stream at once counts as one.
    pub(super) fn failed(&mut self, now_ms: u64) {
        // A clock that jumped back makes a failure old, rather than lasting until the time comes again.
        if self.tokens > 0 && now_ms.abs_diff(self.failed_ms) < SAME_FAILURE_MS {
            return;
        }
        if now_ms.abs_diff(self.failed_ms) > FORGET_FAILURES_MS {
            self.doublings = 0;
        }
        self.tokens = FIRST_PENALTY_TOKENS << self.doublings;
        self.doublings = (self.doublings + 1).min(MAX_DOUBLINGS);
        self.failed_ms = now_ms;
    }

    /// Counts a success: it clears what has faded, so that an answer sent before the failure does not.
    pub(super) fn succeeded(&mut self, now_ms: u64) {
        if self.tokens > 0 && self.tokens_at(now_ms) <= FIRST_PENALTY_TOKENS / 4 {
            *self = Self::default();
        }
    }

    /// The penalty now: it falls to 1/e in 10 s, in halves each 7 s joined by straight lines.
    pub(super) fn tokens_at(&self, now_ms: u64) -> u64 {
        if self.tokens == 0 {
            return 0;
        }
        let age_ms = now_ms.abs_diff(self.failed_ms);
        let Ok(halvings) = u32::try_from(age_ms / HALF_LIFE_MS) else {
            return 0;
        };
        let Some(from) = self.tokens.checked_shr(halvings) else {
            return 0;
        };
        from - from * (age_ms % HALF_LIFE_MS) / (2 * HALF_LIFE_MS)
    }
}

/// Open prefills remembered one by one for each host; more are only summed. A host with that many is full anyway.
const MAX_OPEN_PREFILLS: usize = 256;
/// A host that is silent for this many times as long as answers usually take to begin is not just late.
const USUAL_TIMES: u64 = 4;
/// Any host may be silent for this long: pauses of collectors, compilers and networks.
const HICCUP_MS: u64 = 750;
/// Work below this says more of the network than of the engine.
const MIN_RATE_TOKENS: u64 = 256;
/// What seems to have taken longer was a jump of the clock.
const MAX_PREFILL_MS: u64 = 600_000;
/// Answers before a rate is believed.
const MIN_RATE_SAMPLES: u32 = 8;
/// First penalty: a prompt of middling length, so that even an idle failing host is behind a busy one.
const FIRST_PENALTY_TOKENS: u64 = 4096;
/// Failures closer together than this have one cause.
const SAME_FAILURE_MS: u64 = 100;
/// 4096 · 2¹² tokens are minutes of prefill: more changes nothing.
const MAX_DOUBLINGS: u32 = 12;
/// 10 s · ln 2.
const HALF_LIFE_MS: u64 = 6_931;
/// A host that did not fail for this long starts again at the first penalty.
const FORGET_FAILURES_MS: u64 = 300_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(sequence: u32, tokens: u32, streamed: bool) -> Charge {
        Charge {
            slot: Slot(0),
            epoch: 0,
            work: tokens.into(),
            placed_ms: 0,
            prefill_open: true,
            request_open: true,
            awaited: true,
            queued: false,
            sequence,
            ahead_tokens: 0,
            streamed,
            moved: false,
            placement: None,
        }
    }

    #[test]
    fn only_the_head_drains_and_never_below_a_tenth() {
        let mut work = OwnWork::default();
        work.place(&mut charge(1, 1000, true), 100);
        work.place(&mut charge(2, 500, true), 100);
        assert_eq!(work.backlog_tokens(1000, 100), 1500);
        assert_eq!(work.backlog_tokens(1000, 500), 1100);
        assert_eq!(work.backlog_tokens(1000, 1_000_000), 600);
    }

    #[test]
    fn the_next_in_the_queue_drains_from_when_it_became_the_first() {
        let mut work = OwnWork::default();
        let (mut first, mut second) = (charge(1, 1000, true), charge(2, 500, true));
        work.place(&mut first, 0);
        work.place(&mut second, 0);
        work.end_prefill(&first, 900);
        assert_eq!(work.backlog_tokens(1000, 900), 500);
        assert_eq!(work.backlog_tokens(1000, 1000), 400);
    }

    #[test]
    fn unstreamed_prefills_end_by_the_clock_and_once() {
        let mut work = OwnWork::default();
        let (mut first, mut second) = (charge(1, 1000, false), charge(2, 500, false));
        work.place(&mut first, 0);
        work.place(&mut second, 0);
        work.release_overdue(1000, 999);
        assert_eq!(work.prefill_tokens, 1500);
        work.release_overdue(1000, 1000);
        assert_eq!(work.prefill_tokens, 500);
        work.end_prefill(&first, 1100);
        assert_eq!(work.prefill_tokens, 500);
        work.release_overdue(1000, 1500);
        assert_eq!(work.prefill_tokens, 0);
    }

    #[test]
    fn more_open_prefills_than_remembered_still_sum_to_zero() {
        let mut work = OwnWork::default();
        let mut charges: Vec<Charge> = (0..600).map(|i| charge(i, 10, true)).collect();
        charges.iter_mut().for_each(|c| work.place(c, 0));
        assert_eq!(work.prefill_tokens, 6000);
        for c in &charges {
            work.end_prefill(c, 1);
            work.end_request(c);
        }
        assert_eq!((work.prefill_tokens, work.requests, work.kv_tokens), (0, 0, 0));
    }

    #[test]
    fn rate_needs_eight_samples_and_ignores_short_work() {
        let mut rate = PrefillRate::default();
        (0..100).for_each(|_| rate.learn(10, 100));
        (0..7).for_each(|_| rate.learn(5000, 1000));
        assert_eq!(rate.tokens_per_s(), None);
        rate.learn(5000, 1000);
        let got = rate.tokens_per_s().unwrap();
        assert!(got.abs_diff(5000) <= 5, "{got}");
        (0..100).for_each(|_| rate.learn(2000, 1000));
        let got = rate.tokens_per_s().unwrap();
        assert!(got.abs_diff(2000) <= 40, "{got}");
    }

    #[test]
    fn a_clock_that_jumps_neither_teaches_a_rate_nor_keeps_a_penalty() {
        let mut rate = PrefillRate::default();
        (0..8).for_each(|_| rate.learn(5000, 1000));
        let before = rate.tokens_per_s();
        rate.learn(5000, 3_600_000);
        assert_eq!(rate.tokens_per_s(), before);
        let mut penalty = Penalty::default();
        penalty.failed(10_000_000);
        assert_eq!(penalty.tokens_at(10_000_000 - 3_600_000), 0);
    }

    #[test]
    fn penalty_doubles_fades_and_is_cleared_only_when_faded() {
        let mut penalty = Penalty::default();
        assert_eq!(penalty.tokens_at(5), 0);
        penalty.failed(1_000_000);
        assert_eq!(penalty.tokens_at(1_000_000), 4096);
        penalty.failed(1_000_050);
        assert_eq!(penalty.tokens_at(1_000_050), 4096 - 4096 * 50 / (2 * 6931));
        penalty.failed(1_002_000);
        assert_eq!(penalty.tokens_at(1_002_000), 8192);
        penalty.failed(1_003_000);
        assert_eq!(penalty.tokens_at(1_003_000), 16_384);
        let after_10_s = penalty.tokens_at(1_013_000);
        assert!(
            after_10_s.abs_diff(16_384 * 368 / 1000) < 16_384 / 30,
            "{after_10_s}"
        );
        penalty.succeeded(1_003_500);
        assert!(penalty.tokens_at(1_003_500) > 15_000);
        penalty.succeeded(1_043_000);
        assert_eq!(penalty.tokens_at(1_043_000), 0);
        penalty.failed(1_044_000);
        assert_eq!(penalty.tokens_at(1_044_000), 4096);
        assert_eq!(penalty.tokens_at(u64::MAX), 0);
    }
}
