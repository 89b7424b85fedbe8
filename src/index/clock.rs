//! What each host computed since → which stamps are still believed.
//!
//! In: the table's hosts with their epochs, cache sizes and counters, and what was placed on them. Out: the age of a
//! stamp in units of the host's own clock, or that it is dead. A host's clock runs by the uncached prompt tokens placed
//! on it, as its engine's cache turns over; what was stamped more than a cache size ago is gone. A new epoch, or
//! leaving the table, kills every stamp at once.
//!
//! A use renews a stamp only when an eighth of a cache size has passed, so that workers need to tell each other no more
//! than that and all hold the same stamps. So a key is forgotten up to an eighth of a cache size early: answers take room
//! too, which the clock does not count, and to believe for that eighth longer cost 3 % of mean TTFT near saturation in
//! the simulator.
//!
//! # Feedback
//! Over a window of queries, a cache size of them, the engine's hit counters are compared with what was predicted for the
//! requests placed there. A quarter of the predictions may be false before the believed size shrinks: to remember too
//! long costs little, to forget too early costs much. It is halved where half are false twice in a row. It grows where there
//! are more hits than predicted, up to 4 times what the engine says, and comes back to that where nearly all
//! predictions are true; the least is a sixteenth. A window in which others placed much is not judged. Windows of an
//! eighth of a cache size were too short: chance alone made the believed size wander.
//!
//! Where answers tell how much of their own prompts was cached, those are compared instead, request by request and with
//! nobody else's in between. An answer that shows much less than was predicted is a false hit; two that show next to
//! nothing, with no answer between them that shows a hit, put the host in doubt: it seems to keep nothing.

use super::table::{Holder, STAMP_MASK};
use crate::host_table::{Host, HostTable, MAX_HOSTS, Slot};

/// The clocks of all slots.
#[derive(Debug, Clone)]
pub(super) struct Clocks {
    hosts: Vec<HostClock>,
    /// What judging a stamp takes, apart so that it stays in the cache.
    limits: Vec<Limit>,
    present: u32,
    unseen_permille: u32,
    default_capacity_tokens: u64,
}

/// A stamp is believed while its age is below `units`; 0 for a host that is gone.
#[derive(Debug, Clone, Copy, Default)]
struct Limit {
    now: u32,
    units: u32,
    renewal_units: u32,
}

/// One host's clock.
#[derive(Debug, Clone, Copy, Default)]
struct HostClock {
    epoch: u32,
    is_present: bool,
    /// Uncached tokens placed, over all epochs of the slot.
    tokens: u64,
    /// The clock when the epoch began, units.
    start_units: u64,
    capacity_tokens: u64,
    /// Size that the engine seems to have ÷ the size that it tells, 2⁻¹⁰.
    factor_q10: u32,
    /// Tokens that the engine had computed before this index began and that have not been placed again.
    unseen_tokens: u64,
    last_counters: Option<Counters>,
    window: Window,
    /// Half of the predictions were false when the size was judged last.
    was_far_off: bool,
    answered: Answered,
    /// False hits since the last hit that an answer showed.
    false_hits: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counters {
    queries: u64,
    hits: u64,
}

/// Sums since the last judgement.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    placed_tokens: u64,
    predicted_tokens: u64,
    queried_tokens: u64,
    hit_tokens: u64,
}

/// Sums of what answers told since the last judgement.
#[derive(Debug, Clone, Copy, Default)]
struct Answered {
    prompt_tokens: u64,
    predicted_tokens: u64,
    cached_tokens: u64,
}

impl Clocks {
    pub(super) fn new(default_capacity_tokens: u64) -> Self {
        Self {
            hosts: vec![HostClock::default(); MAX_HOSTS],
            limits: vec![Limit::default(); MAX_HOSTS],
            present: 0,
            unseen_permille: 0,
            default_capacity_tokens,
        }
    }

    /// Takes over the hosts of a table. Slots of [`MAX_HOSTS`] and more are not followed.
    pub(super) fn update(&mut self, table: &HostTable) {
        let mut listed = [0u64; MAX_HOSTS / 64];
        for host in &table.hosts {
            let at = usize::from(host.slot.0);
            if let Some(word) = listed.get_mut(at / 64) {
                *word |= 1 << (at % 64);
            }
            if let Some(clock) = self.hosts.get_mut(at) {
                clock.take_over(host, self.default_capacity_tokens);
            }
            self.refresh(at);
        }
        self.present = 0;
        let (mut unseen, mut capacity) = (0u64, 0u64);
        for at in 0..self.hosts.len() {
            let is_listed = listed.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1);
            self.present += u32::from(is_listed);
            if let (false, Some(clock)) = (is_listed, self.hosts.get_mut(at))
                && clock.is_present
            {
                clock.is_present = false;
                self.refresh(at);
            }
            if let Some(clock) = self.hosts.get(at).filter(|clock| clock.is_present) {
                unseen = unseen.saturating_add(clock.unseen_tokens);
                capacity = capacity.saturating_add(clock.capacity_tokens);
            }
        }
        let share = unseen.saturating_mul(1000).checked_div(capacity).unwrap_or(0);
        self.unseen_permille = u32::try_from(share).unwrap_or(1000).min(1000);
    }

    /// Hosts in the table.
    pub(super) const fn present(&self) -> u32 {
        self.present
    }

    /// The epoch of a host that is in the table.
    pub(super) fn epoch_of(&self, slot: Slot) -> Option<u32> {
        let clock = self.hosts.get(usize::from(slot.0))?;
        clock.is_present.then_some(clock.epoch)
    }

    /// Units of the host's clock since the stamp; `None` when the engine is taken to have forgotten it.
    #[inline]
    pub(super) fn age(&self, holder: Holder) -> Option<u32> {
        if holder.is_none() {
            return None;
        }
        let limit = self.limits.get(usize::from(holder.slot()))?;
        let age = limit.now.wrapping_sub(holder.stamp()) & STAMP_MASK;
        (age < limit.units).then_some(age)
    }

    /// Lets a host's clock run by what is placed on it; the stamp to write. `None` for a host that is not there.
    pub(super) fn place(&mut self, slot: Slot, uncached_tokens: u32, prompt_tokens: u32) -> Option<Holder> {
        let clock = self.hosts.get_mut(usize::from(slot.0)).filter(|c| c.is_present)?;
        clock.run(uncached_tokens.into());
        let window = &mut clock.window;
        let predicted = prompt_tokens.saturating_sub(uncached_tokens);
        window.placed_tokens = window.placed_tokens.saturating_add(prompt_tokens.into());
        window.predicted_tokens = window.predicted_tokens.saturating_add(predicted.into());
        self.refresh(usize::from(slot.0));
        self.stamp(slot)
    }

    /// Takes over what an answer told of its prompt; what is to be made of the entries that predicted otherwise.
    pub(super) fn answered(&mut self, slot: Slot, predicted: u32, cached: u32, prompt: u32) -> Verdict {
        let at = usize::from(slot.0);
        let Some(clock) = self.hosts.get_mut(at).filter(|clock| clock.is_present) else {
            return Verdict::default();
        };
        let verdict = clock.answered(predicted, cached, prompt);
        self.refresh(at);
        verdict
    }

    /// Whether a use renews a stamp of that age.
    pub(super) fn is_old(&self, holder: Holder, age: u32) -> bool {
        let limit = self.limits.get(usize::from(holder.slot()));
        limit.is_some_and(|limit| age > limit.renewal_units)
    }

    /// Cache size believed of a host, tokens.
    pub(super) fn capacity_tokens(&self, slot: Slot) -> u64 {
        self.hosts
            .get(usize::from(slot.0))
            .map_or(0, HostClock::believed_tokens)
    }

    /// Share of the fleet's cache that was filled before this index began and not since, thousandths, as of the last table.
    pub(super) const fn unseen_permille(&self) -> u32 {
        self.unseen_permille
    }

    /// Bytes of memory held, fixed for life.
    pub(super) const fn memory_bytes() -> usize {
        MAX_HOSTS * (size_of::<HostClock>() + size_of::<Limit>())
    }

    fn stamp(&self, slot: Slot) -> Option<Holder> {
        let limit = self.limits.get(usize::from(slot.0))?;
        // A stamp of 0 would make slot 0's holder look like none; one unit older is nothing.
        let stamp = if limit.now == 0 { STAMP_MASK } else { limit.now };
        Some(Holder::new(slot.0, stamp))
    }

    fn refresh(&mut self, at: usize) {
        if let (Some(clock), Some(limit)) = (self.hosts.get(at), self.limits.get_mut(at)) {
            *limit = clock.limit();
        }
    }
}

impl HostClock {
    fn take_over(&mut self, host: &Host, default_capacity_tokens: u64) {
        let counters = match (host.load.prefix_queries, host.load.prefix_hits) {
            (Some(queries), Some(hits)) => Some(Counters { queries, hits }),
            (None, _) | (_, None) => None,
        };
        if !self.is_present || self.epoch != host.epoch {
            let computed = counters.map_or(0, |c| c.queries.saturating_sub(c.hits));
            *self = Self {
                epoch: host.epoch,
                is_present: true,
                // A unit begins, so that no stamp of the last epoch is of this one.
                tokens: (self.units() + 1).saturating_mul(UNIT_TOKENS),
                factor_q10: ONE_Q10,
                unseen_tokens: computed,
                ..Self::default()
            };
            self.start_units = self.units();
        }
        self.capacity_tokens = host
            .load
            .kv_capacity_tokens
            .filter(|tokens| *tokens > 0)
            .unwrap_or(default_capacity_tokens);
        self.unseen_tokens = self.unseen_tokens.min(self.capacity_tokens);
        if let (Some(now), Some(before)) = (counters, self.last_counters) {
            let window = &mut self.window;
            window.queried_tokens += now.queries.saturating_sub(before.queries);
            window.hit_tokens += now.hits.saturating_sub(before.hits);
            if now != before {
                self.judge();
            }
        }
        // A sample that failed tells nothing; the next one goes on from the last that did.
        self.last_counters = counters.or(self.last_counters);
    }

    fn run(&mut self, tokens: u64) {
        self.tokens = self.tokens.saturating_add(tokens);
        self.unseen_tokens = self.unseen_tokens.saturating_sub(tokens);
    }

    fn answered(&mut self, predicted: u32, cached: u32, prompt: u32) -> Verdict {
        // Keys and blocks end at different places.
        let slack = SLACK_TOKENS.saturating_add(predicted / 8);
        let is_false = predicted > cached.saturating_add(slack);
        let is_surprise = cached > predicted.saturating_add(4 * SLACK_TOKENS + predicted / 8);
        let counted = if is_false || is_surprise {
            cached
        } else {
            predicted
        };
        let mut sums = self.answered;
        sums.prompt_tokens = sums.prompt_tokens.saturating_add(prompt.into());
        sums.predicted_tokens = sums.predicted_tokens.saturating_add(predicted.into());
        sums.cached_tokens = sums.cached_tokens.saturating_add(counted.into());
        self.answered = sums;
        if sums.prompt_tokens >= self.window_tokens() {
            self.step(
                permille(sums.predicted_tokens, sums.prompt_tokens),
                permille(sums.cached_tokens, sums.prompt_tokens),
            );
        }
        if cached >= SLACK_TOKENS {
            self.false_hits = 0;
        } else if is_false {
            self.false_hits = self.false_hits.saturating_add(1);
        }
        Verdict {
            is_false,
            in_doubt: self.false_hits >= DOUBTFUL_FALSE_HITS,
        }
    }

    fn judge(&mut self) {
        let window = self.window;
        if window.queried_tokens < self.window_tokens() {
            return;
        }
        let placed_percent = window.placed_tokens.saturating_mul(100) / window.queried_tokens;
        if !(70..=140).contains(&placed_percent) {
            self.window = Window::default();
            return;
        }
        self.step(
            permille(window.predicted_tokens, window.placed_tokens),
            permille(window.hit_tokens, window.queried_tokens),
        );
    }

    /// Tokens that are judged together.
    fn window_tokens(&self) -> u64 {
        self.believed_tokens().max(MIN_WINDOW_TOKENS)
    }

    /// Corrects the believed size by the hits predicted and found, thousandths. Counters and answers tell of the same
    /// requests, so what either showed begins anew.
    fn step(&mut self, predicted: u64, actual: u64) {
        self.window = Window::default();
        self.answered = Answered::default();
        let factor = self.factor_q10;
        let is_far_off = predicted > actual.saturating_mul(2) + 20;
        let was_far_off = std::mem::replace(&mut self.was_far_off, is_far_off);
        let step = if is_far_off && was_far_off {
            factor / 2
        } else if predicted > actual.saturating_mul(4) / 3 + 10 {
            factor - factor / 8
        } else if actual > predicted.saturating_add(20) {
            factor + factor / 4
        } else if factor < ONE_Q10 && actual.saturating_mul(11) / 10 > predicted {
            (factor + factor / 16).min(ONE_Q10)
        } else {
            factor
        };
        self.factor_q10 = step.clamp(MIN_FACTOR_Q10, MAX_FACTOR_Q10);
    }

    fn believed_tokens(&self) -> u64 {
        self.capacity_tokens.saturating_mul(self.factor_q10.into()) >> 10
    }

    const fn units(&self) -> u64 {
        self.tokens / UNIT_TOKENS
    }

    fn limit(&self) -> Limit {
        let now = u32::try_from(self.units() & u64::from(STAMP_MASK)).unwrap_or(0);
        if !self.is_present {
            return Limit {
                now,
                ..Limit::default()
            };
        }
        let in_epoch = (self.units() - self.start_units).saturating_add(1);
        let capacity = (self.believed_tokens() / UNIT_TOKENS).min(MAX_AGE_UNITS);
        let renewal = capacity / RENEWALS;
        let units = capacity.min(in_epoch);
        Limit {
            now,
            units: u32::try_from(units).unwrap_or(0),
            renewal_units: u32::try_from(renewal).unwrap_or(0),
        }
    }
}

/// What an answer showed of the entries that predicted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verdict {
    /// A false hit: much less was cached than predicted.
    pub is_false: bool,
    /// The host seems to keep nothing of what it computes.
    pub in_doubt: bool,
}

fn permille(part: u64, whole: u64) -> u64 {
    part.saturating_mul(1000).checked_div(whole).unwrap_or(0)
}

/// Tokens of one unit of a clock: 22 bits of them are 268 M tokens before a stamp could be taken for a new one, and a
/// block or four do not matter.
pub(super) const UNIT_TOKENS: u64 = 64;
/// No engine holds more: 134 M tokens.
const MAX_AGE_UNITS: u64 = 1 << 21;
/// Renewals of a stamp within a cache size.
const RENEWALS: u64 = 8;
/// Queries that are judged together at least: fewer are chance.
const MIN_WINDOW_TOKENS: u64 = 32_768;
/// Tokens by which a prediction may be off, beside an eighth of it: blocks have up to 128 tokens, and an engine computes
/// the last one again.
const SLACK_TOKENS: u32 = 256;
/// After a false hit the host has computed the prompt, and holds it; a second one without a hit in between tells that it
/// may not.
const DOUBTFUL_FALSE_HITS: u8 = 2;
/// The size that the engine tells.
const ONE_Q10: u32 = 1 << 10;
const MIN_FACTOR_Q10: u32 = 64;
const MAX_FACTOR_Q10: u32 = 4 << 10;
