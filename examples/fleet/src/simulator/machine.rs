//! One host with its engine, and what the oracle sees of it.
//!
//! In: prompts as they come and get their first token. Out: what the engine holds or will hold, and the work ahead of a
//! new request. Nothing but the oracle may read that.

use std::collections::HashMap;

use crate::engine::{Engine, Prompt};

/// One host of the fleet with its engine.
#[derive(Debug)]
pub struct Machine {
    pub(super) engine: Engine,
    pub(super) speed: f64,
    pub(super) slow_permille: u64,
    pub(super) mean_speed: f64,
    pub(super) is_listed: bool,
    pub(super) is_failing: bool,
    pub(super) epoch: u32,
    pub(super) started_ms: u64,
    pub(super) scheduled_us: Option<u64>,
    /// Flight of each request of the engine, by its number.
    pub(super) flights: Vec<u32>,
    /// Requests without a first token, counted for the oracle: tokens to compute, the same with attention, and blocks.
    pub(super) queued_tokens: u64,
    pub(super) queued_work: f64,
    pub(super) queued_blocks: HashMap<u64, u32>,
}

/// What a machine counted for a request that has no first token yet.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Queued {
    tokens: u32,
    work: f32,
    is_queued: bool,
}

impl Machine {
    /// Prompt tokens that it holds, or will when it comes to a request that arrives now.
    pub fn cached_tokens(&self, prompt: &Prompt) -> usize {
        let now = self.engine.cached_tokens_of(prompt);
        let block_tokens = self.engine.model().block_tokens;
        let usable = (prompt.tokens() - 1) / block_tokens;
        let blocks = prompt.blocks().iter().take(usable).skip(now / block_tokens);
        let soon = blocks
            .take_while(|block| self.queued_blocks.contains_key(block))
            .count();
        now + soon * block_tokens
    }

    /// Whether some request has no first token yet.
    pub fn has_pending(&self) -> bool {
        self.queued_tokens > 0
    }

    /// Prefill work ahead of a request that arrives now, tokens, attention counted.
    pub fn backlog(&self) -> f64 {
        if self.queued_tokens == 0 {
            return 0.0;
        }
        let left = self.engine.prefill_backlog_tokens() as f64 / self.queued_tokens as f64;
        self.queued_work * left.min(1.0)
    }

    /// Requests that it has.
    pub fn requests(&self) -> usize {
        self.engine.waiting() + self.engine.running()
    }

    /// Time of a token against the fleet's mean.
    pub fn slowness(&self) -> f64 {
        self.mean_speed / self.speed * self.slow_permille as f64 / 1000.0
    }

    /// Size of its KV cache.
    pub fn kv_tokens(&self) -> f64 {
        self.engine.model().capacity_tokens() as f64
    }

    /// The part that requests hold.
    pub fn kv_tokens_in_use(&self) -> f64 {
        self.engine.kv_usage() * self.kv_tokens()
    }
}

impl Machine {
    /// Counts a request that comes.
    pub(super) fn queue(&mut self, queued: &mut Queued, prompt: &Prompt) {
        let times = self.engine.model().times;
        let uncached = (prompt.tokens() - self.cached_tokens(prompt)) as f64;
        let pairs = times.prefill_pair_us / times.prefill_token_us.max(f64::MIN_POSITIVE);
        queued.is_queued = true;
        queued.tokens = uncached as u32;
        queued.work = (uncached * (1.0 + (prompt.tokens() as f64 - uncached / 2.0) * pairs)) as f32;
        self.queued_tokens += u64::from(queued.tokens);
        self.queued_work += f64::from(queued.work);
        for block in prompt.blocks() {
            *self.queued_blocks.entry(*block).or_insert(0) += 1;
        }
    }

    /// Takes it off when its first token is out or will never be; the second time does nothing.
    pub(super) fn unqueue(&mut self, queued: &mut Queued, prompt: &Prompt) {
        if !std::mem::take(&mut queued.is_queued) {
            return;
        }
        self.queued_tokens -= u64::from(queued.tokens);
        self.queued_work = (self.queued_work - f64::from(queued.work)).max(0.0);
        for block in prompt.blocks() {
            if let Some(count) = self.queued_blocks.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    self.queued_blocks.remove(block);
                }
            }
        }
    }
}
