//! One simulated inference engine: prompts go in, tokens come out at the times a real engine would emit them.
//!
//! The model is vLLM's scheduler in steps. A step holds one token of every request that decodes and, within the rest of
//! its token budget, chunks of prompts, first come first served; it lasts as long as [`StepTimes`] says, and everything in
//! it happens at its end. A request starts when its whole prompt fits beside what others hold. Prompt blocks can be hit
//! as soon as they are scheduled, and are pinned while a request runs; output takes blocks while it grows, and these
//! hold nothing that could be hit afterwards. When a growing request finds no block, the youngest request gives up its
//! own and starts over at the head of the queue. The last token of a prompt is always computed.
//!
//! Time comes in as microseconds on any clock that does not go backwards; real and virtual time give equal results. It
//! must never do I/O, read a clock, or know of HTTP.

use std::collections::VecDeque;

mod fit;
mod front_end;
mod kv_cache;
mod model;
mod prompt;
mod request;
mod schedule;

pub use fit::{Fit, Observation};
use front_end::Desk;
pub use front_end::FrontEnd;
use kv_cache::KvCache;
pub use model::{EngineConfig, EngineModel, StepLoad, StepTimes};
pub use prompt::{BLOCK_TOKENS, Prompt, TOKEN_BYTES};
use request::{Request, Stage};

/// Names one request within one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Something an engine did for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineEvent {
    /// The request.
    pub id: RequestId,
    /// When it happened, microseconds.
    pub at_us: u64,
    /// What happened.
    pub kind: EventKind,
}

/// Kinds of events: `Prefilled` comes once, before `Token`s, and `Finished` last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The prefill ended and gave the first token.
    Prefilled {
        /// Prompt tokens found in the prefix cache.
        cached_tokens: usize,
    },
    /// Another token; left out when [`Engine::set_token_events`] says so.
    Token,
    /// The request lost its blocks and waits to be computed again; what it has emitted stays valid.
    Preempted,
    /// The last token is out and the request has left the engine.
    Finished,
}

/// Why an engine does not take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Prompt and answer would not fit even an empty KV cache.
    PromptTooLong {
        /// Tokens asked for, prompt and answer.
        tokens: usize,
        /// Tokens the KV cache holds.
        capacity_tokens: usize,
    },
}

/// Counters that only grow while the engine lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineCounters {
    /// Prompt tokens looked up in the prefix cache when requests first started.
    pub prefix_query_tokens: u64,
    /// Prompt tokens found there.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens whose prefill ended, found or computed.
    pub prompt_tokens: u64,
    /// Tokens computed in prefill chunks, those computed again after a preemption included.
    pub computed_prefill_tokens: u64,
    /// Output tokens.
    pub generation_tokens: u64,
    /// Requests taken.
    pub submitted: u64,
    /// Requests that ran to their end.
    pub finished: u64,
    /// Requests that were cancelled.
    pub aborted: u64,
    /// Times that a request lost its blocks.
    pub preemptions: u64,
    /// Steps begun.
    pub steps: u64,
    /// Microseconds of steps begun.
    pub busy_us: u64,
    /// The part of them that is due to prefill.
    pub prefill_busy_us: u64,
}

/// What an engine looks like at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Snapshot {
    /// Requests that wait, preempted ones included.
    pub waiting: usize,
    /// Requests that run, in prefill or decode.
    pub running: usize,
    /// Share of the KV cache that running requests hold, 0 to 1.
    pub kv_usage: f64,
    /// Blocks that a prompt could hit, held or not.
    pub cached_blocks: usize,
    /// Counters since the engine began.
    pub counters: EngineCounters,
}

/// The step that an engine is in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// When it began, microseconds.
    pub starts_us: u64,
    /// When it ends.
    pub ends_us: u64,
    /// What it computes.
    pub load: StepLoad,
}

/// The engine.
#[derive(Debug)]
pub struct Engine {
    model: EngineModel,
    slow_permille: u64,
    token_events: bool,
    desk: Desk,
    cache: KvCache,
    next_id: u64,
    /// In order of arrival, preempted requests first.
    waiting: VecDeque<Request>,
    /// In order of start.
    running: Vec<Request>,
    step: Option<Step>,
    /// The head of the queue did not fit, and no block was named or given back since.
    head_is_stuck: bool,
    counters: EngineCounters,
}

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(model: impl Into<EngineModel>) -> Self {
        let model = model.into();
        Self {
            cache: KvCache::new(model.cache_blocks),
            model,
            desk: Desk::default(),
            slow_permille: 1000,
            token_events: true,
            next_id: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            step: None,
            head_is_stuck: false,
            counters: EngineCounters::default(),
        }
    }

    /// An idle engine behind a front end: what is submitted reaches the queue once that has done its work.
    pub fn with_front_end(model: impl Into<EngineModel>, front_end: FrontEnd) -> Self {
        Self {
            desk: Desk::new(front_end),
            ..Self::new(model)
        }
    }

    /// Queues a prompt that will give `output_tokens` (at least one); its events come from [`Engine::advance`]. An idle
    /// engine starts on it at once, or as soon as its front end lets it through.
    ///
    /// # Errors
    /// Refuses what an empty KV cache could not hold.
    pub fn submit(
        &mut self,
        now_us: u64,
        prompt: Prompt,
        output_tokens: usize,
    ) -> Result<RequestId, Refusal> {
        let output_wanted = output_tokens.max(1);
        let tokens = prompt.tokens + output_wanted;
        if tokens.div_ceil(self.model.block_tokens) > self.model.cache_blocks {
            return Err(Refusal::PromptTooLong {
                tokens,
                capacity_tokens: self.model.capacity_tokens(),
            });
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.counters.submitted += 1;
        let work_us = self.scaled_us(self.desk.front_end.work_us(prompt.tokens));
        let step_runs = self.step.is_some_and(|step| step.starts_us <= now_us);
        let taken_in = self.desk.take_in(now_us, work_us, step_runs);
        if let Some(step) = &mut self.step {
            step.ends_us = step.ends_us.saturating_add(taken_in.delay_us);
            self.counters.busy_us += taken_in.delay_us;
        }
        self.waiting
            .push_back(Request::new(id, taken_in.ready_us, prompt, output_wanted));
        if self.step.is_none() {
            // Nothing runs while there is no step, so nothing can be preempted, and there are no events.
            self.start_step(taken_in.ready_us, &mut Vec::new());
        }
        Ok(id)
    }

    /// Does all work up to `now_us` and returns what happened, in order.
    pub fn advance(&mut self, now_us: u64) -> Vec<EngineEvent> {
        let mut events = Vec::new();
        self.advance_into(now_us, &mut events);
        events
    }

    /// As [`Engine::advance`], appending to a list that can be used again.
    pub fn advance_into(&mut self, now_us: u64, events: &mut Vec<EngineEvent>) {
        while let Some(step) = self.step.take_if(|step| step.ends_us <= now_us) {
            self.end_step(step.ends_us, events);
            let starts_us = match self.waiting.front() {
                Some(head) if self.running.is_empty() => step.ends_us.max(head.submitted_us),
                None if self.running.is_empty() => return,
                Some(_) | None => step.ends_us,
            };
            self.start_step(starts_us, events);
        }
    }

    /// Forgets a request whose client went away: it gives up its place and its blocks at once, while the step that it was
    /// part of goes on to its end. Says whether the engine had it.
    ///
    /// Call [`Engine::advance`] with the same time first.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let position = |request: &Request| request.id == id;
        let request = if let Some(position) = self.running.iter().position(position) {
            self.running.remove(position)
        } else if let Some(position) = self.waiting.iter().position(position) {
            let Some(request) = self.waiting.remove(position) else {
                return false;
            };
            request
        } else {
            return false;
        };
        self.cache
            .release(&request.held, request.full_blocks(self.model.block_tokens));
        self.head_is_stuck = false;
        self.counters.aborted += 1;
        true
    }

    /// Loses cache, queue and counters, as a new process would; returns the requests lost, running ones first. Numbers of
    /// requests are not used again.
    pub fn restart(&mut self) -> Vec<RequestId> {
        let lost = self
            .running
            .iter()
            .chain(&self.waiting)
            .map(|request| request.id)
            .collect();
        *self = Self {
            desk: Desk::new(self.desk.front_end),
            slow_permille: self.slow_permille,
            token_events: self.token_events,
            next_id: self.next_id,
            ..Self::new(self.model.clone())
        };
        lost
    }

    /// Makes every step begun from here on take `permille` / 1000 times as long.
    pub fn set_slow_permille(&mut self, permille: u64) {
        self.slow_permille = permille.max(1);
    }

    /// Whether there is an event for each token after the first; a simulation that does not look at them is faster
    /// without.
    pub fn set_token_events(&mut self, wanted: bool) {
        self.token_events = wanted;
    }

    /// When the next step ends, if there is one; before that nothing happens unless something is submitted.
    pub fn next_event_us(&self) -> Option<u64> {
        self.step.map(|step| step.ends_us)
    }

    /// The step that the engine is in.
    pub fn step(&self) -> Option<Step> {
        self.step
    }

    /// All that a scrape shows.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            waiting: self.waiting.len(),
            running: self.running.len(),
            kv_usage: self.kv_usage(),
            cached_blocks: self.cache.named_blocks(),
            counters: self.counters,
        }
    }

    /// Requests that wait, preempted ones included.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests in prefill or decode.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Share of the KV cache that running requests hold, 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        self.cache.held_blocks() as f64 / self.model.cache_blocks.max(1) as f64
    }

    /// Prompt tokens that the cache would save this prompt if it started now; changes nothing.
    pub fn cached_tokens_of(&self, prompt: &Prompt) -> usize {
        let usable = self.usable_blocks(prompt, prompt.tokens);
        self.cache.known(&prompt.blocks[..usable]) * self.model.block_tokens
    }

    /// Prefill tokens still to compute for the requests taken: what running ones lack, and for waiting ones what the cache
    /// does not hold now. The step in progress counts in full.
    pub fn prefill_backlog_tokens(&self) -> usize {
        let running = self.running.iter().map(|request| match request.stage() {
            Stage::Prefill => request.missing_tokens(),
            Stage::Decode => 0,
        });
        let waiting = self
            .waiting
            .iter()
            .map(|request| request.known_tokens() - self.cached_tokens_of(&request.prompt));
        running.chain(waiting).sum()
    }

    /// Counters since the engine began.
    pub fn counters(&self) -> EngineCounters {
        self.counters
    }

    /// What the engine can do.
    pub fn model(&self) -> &EngineModel {
        &self.model
    }

    /// A time of the model at the speed of this engine.
    fn scaled_us(&self, time_us: f64) -> f64 {
        time_us * self.slow_permille as f64 / 1000.0 / self.model.speed.max(f64::MIN_POSITIVE)
    }

    /// Blocks of a prompt that may be hit when `known_tokens` have to be there: at least one token is computed.
    fn usable_blocks(&self, prompt: &Prompt, known_tokens: usize) -> usize {
        let full = prompt
            .tokens
            .min(known_tokens.saturating_sub(1))
            .checked_div(self.model.block_tokens);
        prompt.blocks.len().min(full.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests;
