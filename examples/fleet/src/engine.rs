//! One simulated inference engine: prompts go in, tokens come out at the times a real engine would emit them.
//!
//! The model: requests wait first come, first served for a serial prefill at a stated rate; what the prefix cache holds is
//! not computed again; afterwards each running request emits a token every `decode_us_per_token`, up to `max_running`
//! requests at once. Time comes in as microseconds on any clock that does not go backwards. It must never do I/O, read a
//! clock, or know of HTTP.

use std::collections::VecDeque;

mod block_cache;

pub use block_cache::{BLOCK_TOKENS, TOKEN_BYTES};
use block_cache::{BlockCache, Lease};

/// What one engine can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// KV cache size, blocks of [`BLOCK_TOKENS`] tokens; bounds what runs and what is remembered.
    pub cache_blocks: usize,
    /// Prefill rate, tokens per second.
    pub prefill_tokens_per_s: u64,
    /// Time between two output tokens of one request, microseconds.
    pub decode_us_per_token: u64,
    /// Most requests that run (prefill or decode) at once.
    pub max_running: usize,
}

impl EngineConfig {
    /// An engine that takes any prompt and answers at once, for tests that are not about engines.
    pub fn instant() -> Self {
        Self {
            cache_blocks: 1 << 22,
            prefill_tokens_per_s: 1_000_000_000_000,
            decode_us_per_token: 0,
            max_running: 4096,
        }
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            cache_blocks: 4096,
            prefill_tokens_per_s: 20_000,
            decode_us_per_token: 5_000,
            max_running: 64,
        }
    }
}

/// A prompt as the engine sees it: tokens, and a hash for each full block of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    hashes: Vec<u64>,
    tokens: usize,
}

impl Prompt {
    /// Cuts a rendered prompt into tokens of [`TOKEN_BYTES`] and blocks of [`BLOCK_TOKENS`].
    pub fn new(rendered: &[u8]) -> Self {
        Self {
            hashes: block_cache::block_hashes(rendered),
            tokens: rendered.len().div_ceil(TOKEN_BYTES).max(1),
        }
    }

    /// Tokens, a last partial one counted.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

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

/// Kinds of events, in the order in which one request sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The prefill ended and gave the first token.
    Prefilled {
        /// Prompt tokens found in the prefix cache.
        cached_tokens: usize,
    },
    /// Another token.
    Token,
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
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Prompt tokens found there.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens whose prefill ended, found or computed.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub generation_tokens: u64,
    /// Requests that ran to their end.
    pub finished: u64,
    /// Requests that were cancelled.
    pub aborted: u64,
    /// Microseconds of prefill work done or begun.
    pub prefill_busy_us: u64,
}

/// The engine.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    slow_permille: u64,
    cache: BlockCache,
    next_id: u64,
    waiting: VecDeque<Waiting>,
    prefill: Option<Prefill>,
    decoding: Vec<Decoding>,
    prefill_free_us: u64,
    counters: EngineCounters,
}

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(config: EngineConfig) -> Self {
        Self {
            cache: BlockCache::new(config.cache_blocks),
            config,
            slow_permille: 1000,
            next_id: 0,
            waiting: VecDeque::new(),
            prefill: None,
            decoding: Vec::new(),
            prefill_free_us: 0,
            counters: EngineCounters::default(),
        }
    }

    /// Queues a prompt that wants `max_tokens` (at least one) of output; its events come from [`Engine::advance`].
    ///
    /// # Errors
    /// Refuses what an empty KV cache could not hold.
    pub fn submit(&mut self, now_us: u64, prompt: Prompt, max_tokens: usize) -> Result<RequestId, Refusal> {
        let Prompt {
            hashes,
            tokens: prompt_tokens,
        } = prompt;
        let max_tokens = max_tokens.max(1);
        let blocks = (prompt_tokens + max_tokens).div_ceil(BLOCK_TOKENS);
        if blocks > self.config.cache_blocks {
            return Err(Refusal::PromptTooLong {
                tokens: prompt_tokens + max_tokens,
                capacity_tokens: self.config.cache_blocks * BLOCK_TOKENS,
            });
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Waiting {
            id,
            submitted_us: now_us,
            hashes,
            prompt_tokens,
            max_tokens,
            blocks,
        });
        Ok(id)
    }

    /// Does all work up to `now_us` and returns what happened, in order.
    pub fn advance(&mut self, now_us: u64) -> Vec<EngineEvent> {
        let mut events = Vec::new();
        let mut at_us = self.prefill_free_us;
        loop {
            self.admit(at_us, now_us);
            let Some(next_us) = self.next_event_us() else {
                break;
            };
            if next_us > now_us {
                break;
            }
            at_us = next_us;
            if self
                .prefill
                .as_ref()
                .is_some_and(|prefill| prefill.ends_us == next_us)
            {
                self.end_prefill(&mut events);
            } else {
                self.decode_one(next_us, &mut events);
            }
        }
        events
    }

    /// Forgets a request whose client went away: it leaves queue, batch and cache leases at once. Unknown ids are ignored.
    pub fn cancel(&mut self, now_us: u64, id: RequestId) {
        if let Some(position) = self.waiting.iter().position(|waiting| waiting.id == id) {
            self.waiting.remove(position);
        } else if self.prefill.as_ref().is_some_and(|prefill| prefill.id == id) {
            let Some(prefill) = self.prefill.take() else {
                return;
            };
            self.cache.release(prefill.lease);
        } else if let Some(position) = self.decoding.iter().position(|decoding| decoding.id == id) {
            let decoding = self.decoding.swap_remove(position);
            self.cache.release(decoding.lease);
        } else {
            return;
        }
        if self.prefill.is_none() {
            // What this made room for starts now, not when the prefill last ended.
            self.prefill_free_us = self.prefill_free_us.max(now_us);
        }
        self.counters.aborted += 1;
    }

    /// Makes everything begun from here on take `permille` / 1000 times as long.
    pub fn set_slow_permille(&mut self, permille: u64) {
        self.slow_permille = permille.max(1);
    }

    /// When the next event will happen, if anything runs.
    pub fn next_event_us(&self) -> Option<u64> {
        let prefill = self.prefill.as_ref().map(|prefill| prefill.ends_us);
        let token = self.decoding.iter().map(|decoding| decoding.next_us).min();
        prefill.into_iter().chain(token).min()
    }

    /// Requests waiting for their prefill.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests in prefill or decode.
    pub fn running(&self) -> usize {
        self.decoding.len() + usize::from(self.prefill.is_some())
    }

    /// Share of the KV cache that running requests hold, 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        self.cache.held_blocks() as f64 / self.config.cache_blocks.max(1) as f64
    }

    /// Blocks that the prefix cache could hit, held or not.
    pub fn cached_blocks(&self) -> usize {
        self.cache.cached_blocks()
    }

    /// Counters since the engine began.
    pub fn counters(&self) -> EngineCounters {
        self.counters
    }

    /// What the engine can do.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Moves the head of the queue into the prefill when there is room, at the moment there was.
    fn admit(&mut self, at_us: u64, now_us: u64) {
        if self.prefill.is_some() || self.decoding.len() >= self.config.max_running {
            return;
        }
        let Some(head) = self.waiting.front() else { return };
        let starts_us = at_us.max(self.prefill_free_us).max(head.submitted_us);
        if starts_us > now_us {
            return;
        }
        // An engine computes at least the last token, so a full hit still leaves one block to do.
        let usable = head.prompt_tokens.saturating_sub(1) / BLOCK_TOKENS;
        let Some(lease) = self.cache.acquire(&head.hashes, usable, head.blocks) else {
            return;
        };
        let Some(head) = self.waiting.pop_front() else {
            return;
        };
        let cached_tokens = lease.hit_blocks() * BLOCK_TOKENS;
        let uncached = head.prompt_tokens.saturating_sub(cached_tokens) as u64;
        let work_us =
            self.scaled(uncached.saturating_mul(1_000_000) / self.config.prefill_tokens_per_s.max(1));
        self.counters.prefix_query_tokens += head.prompt_tokens as u64;
        self.counters.prefix_hit_tokens += cached_tokens as u64;
        self.counters.prefill_busy_us += work_us;
        self.prefill = Some(Prefill {
            id: head.id,
            ends_us: starts_us.saturating_add(work_us),
            hashes: head.hashes,
            prompt_tokens: head.prompt_tokens,
            cached_tokens,
            max_tokens: head.max_tokens,
            lease,
        });
    }

    fn end_prefill(&mut self, events: &mut Vec<EngineEvent>) {
        let Some(mut prefill) = self.prefill.take() else {
            return;
        };
        let at_us = prefill.ends_us;
        self.prefill_free_us = at_us;
        self.cache.publish(&mut prefill.lease, &prefill.hashes);
        self.counters.prompt_tokens += prefill.prompt_tokens as u64;
        self.counters.generation_tokens += 1;
        let cached_tokens = prefill.cached_tokens;
        events.push(EngineEvent {
            id: prefill.id,
            at_us,
            kind: EventKind::Prefilled { cached_tokens },
        });
        let tokens_left = prefill.max_tokens - 1;
        if tokens_left == 0 {
            self.finish(prefill.id, at_us, prefill.lease, events);
            return;
        }
        let next_us = at_us.saturating_add(self.scaled(self.config.decode_us_per_token));
        self.decoding.push(Decoding {
            id: prefill.id,
            next_us,
            tokens_left,
            lease: prefill.lease,
        });
    }

    fn decode_one(&mut self, next_us: u64, events: &mut Vec<EngineEvent>) {
        let step_us = self.scaled(self.config.decode_us_per_token).max(1);
        let Some(position) = self
            .decoding
            .iter()
            .position(|decoding| decoding.next_us == next_us)
        else {
            return;
        };
        let Some(decoding) = self.decoding.get_mut(position) else {
            return;
        };
        decoding.tokens_left -= 1;
        decoding.next_us = next_us.saturating_add(step_us);
        self.counters.generation_tokens += 1;
        events.push(EngineEvent {
            id: decoding.id,
            at_us: next_us,
            kind: EventKind::Token,
        });
        if decoding.tokens_left == 0 {
            let done = self.decoding.swap_remove(position);
            self.finish(done.id, next_us, done.lease, events);
        }
    }

    fn finish(&mut self, id: RequestId, at_us: u64, lease: Lease, events: &mut Vec<EngineEvent>) {
        self.cache.release(lease);
        self.counters.finished += 1;
        events.push(EngineEvent {
            id,
            at_us,
            kind: EventKind::Finished,
        });
    }

    fn scaled(&self, time_us: u64) -> u64 {
        time_us.saturating_mul(self.slow_permille) / 1000
    }
}

#[derive(Debug)]
struct Waiting {
    id: RequestId,
    submitted_us: u64,
    hashes: Vec<u64>,
    prompt_tokens: usize,
    max_tokens: usize,
    blocks: usize,
}

#[derive(Debug)]
struct Prefill {
    id: RequestId,
    ends_us: u64,
    hashes: Vec<u64>,
    prompt_tokens: usize,
    cached_tokens: usize,
    max_tokens: usize,
    lease: Lease,
}

#[derive(Debug)]
struct Decoding {
    id: RequestId,
    next_us: u64,
    tokens_left: usize,
    lease: Lease,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(cache_blocks: usize) -> Engine {
        Engine::new(EngineConfig {
            cache_blocks,
            prefill_tokens_per_s: 1_000,
            decode_us_per_token: 10_000,
            max_running: 4,
        })
    }

    fn text(seed: u8, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| seed.wrapping_add((i / 7) as u8)).collect()
    }

    fn cached(events: &[EngineEvent], id: RequestId) -> usize {
        let found = events.iter().find_map(|event| match event.kind {
            EventKind::Prefilled { cached_tokens } if event.id == id => Some(cached_tokens),
            _ => None,
        });
        found.expect("prefilled")
    }

    #[test]
    fn prefill_takes_the_stated_time_and_decode_follows() {
        let mut engine = engine(64);
        let id = engine.submit(0, Prompt::new(&text(1, 400)), 3).unwrap();
        let events = engine.advance(1_000_000);
        let expected = [
            (100_000, EventKind::Prefilled { cached_tokens: 0 }),
            (110_000, EventKind::Token),
            (120_000, EventKind::Token),
            (120_000, EventKind::Finished),
        ];
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(at_us, kind)| EngineEvent { id, at_us, kind })
            .collect();
        assert_eq!(events, expected);
        assert_eq!(
            (engine.running(), engine.waiting(), engine.kv_usage()),
            (0, 0, 0.0)
        );
    }

    #[test]
    fn a_repeated_prompt_hits_all_but_its_last_block() {
        let mut engine = engine(64);
        let prompt = text(1, 64 * 10);
        engine.submit(0, Prompt::new(&prompt), 1).unwrap();
        engine.advance(1_000_000);
        let again = engine.submit(1_000_000, Prompt::new(&prompt), 1).unwrap();
        let events = engine.advance(2_000_000);
        assert_eq!(cached(&events, again), 9 * BLOCK_TOKENS);
        assert_eq!(
            events[0].at_us,
            1_000_000 + 16_000,
            "only the last block is computed"
        );
        assert_eq!(engine.counters().prefix_query_tokens, 320);
        assert_eq!(engine.counters().prefix_hit_tokens, 144);
    }

    #[test]
    fn a_shared_prefix_hits_up_to_the_first_difference() {
        let mut engine = engine(64);
        let mut first = text(1, 640);
        let mut second = first.clone();
        first.extend_from_slice(&[b'a'; 100]);
        second.extend_from_slice(&[b'b'; 100]);
        engine.submit(0, Prompt::new(&first), 1).unwrap();
        let id = engine.submit(0, Prompt::new(&second), 1).unwrap();
        assert_eq!(cached(&engine.advance(9_000_000), id), 160);
    }

    #[test]
    fn the_least_recently_used_prompt_is_forgotten_first() {
        let mut engine = engine(30);
        let (a, b, c) = (text(10, 640), text(90, 640), text(170, 640));
        let mut now_us = 0;
        let mut run = |engine: &mut Engine, prompt: &[u8]| {
            let id = engine.submit(now_us, Prompt::new(prompt), 1).unwrap();
            now_us += 1_000_000;
            cached(&engine.advance(now_us), id)
        };
        assert_eq!(run(&mut engine, &a), 0);
        assert_eq!(run(&mut engine, &b), 0);
        assert_eq!(run(&mut engine, &a), 144, "both fit, and `a` is now the younger");
        assert_eq!(run(&mut engine, &c), 0);
        assert!(run(&mut engine, &a) > 0, "`a` was used after `b`");
        assert!(run(&mut engine, &b) < 144, "`b` had to make room");
        assert!(engine.cached_blocks() <= 30);
    }

    #[test]
    fn cache_never_outgrows_its_blocks() {
        let mut engine = engine(25);
        for round in 0..200_u64 {
            let prompt = text((round * 37 % 251) as u8, 64 * (1 + (round as usize * 7) % 20));
            engine
                .submit(round * 1_000, Prompt::new(&prompt), 1 + (round as usize % 5))
                .unwrap();
            engine.advance(round * 1_000);
            assert!(engine.cached_blocks() <= 25);
            assert!(engine.kv_usage() <= 1.0);
        }
        engine.advance(u64::MAX / 2);
        assert_eq!(engine.counters().finished, 200);
        assert_eq!(engine.kv_usage(), 0.0);
    }

    #[test]
    fn prefill_is_first_come_first_served() {
        let mut engine = engine(256);
        let ids: Vec<_> = (0..3)
            .map(|i| {
                engine
                    .submit(0, Prompt::new(&text(i * 60, 4_000 - 1_000 * i as usize)), 1)
                    .unwrap()
            })
            .collect();
        assert!(engine.advance(500_000).is_empty());
        assert_eq!((engine.running(), engine.waiting()), (1, 2));
        let order: Vec<_> = engine
            .advance(10_000_000)
            .into_iter()
            .filter(|event| event.kind == EventKind::Finished)
            .map(|event| (event.id, event.at_us))
            .collect();
        assert_eq!(
            order,
            vec![(ids[0], 1_000_000), (ids[1], 1_750_000), (ids[2], 2_250_000)]
        );
    }

    #[test]
    fn events_do_not_depend_on_how_often_time_is_told() {
        let feed = |step_us: u64| {
            let mut engine = engine(40);
            for i in 0..20_u8 {
                engine
                    .submit(
                        0,
                        Prompt::new(&text(i / 2 * 20, 64 * (3 + usize::from(i) % 9))),
                        1 + usize::from(i) % 6,
                    )
                    .unwrap();
            }
            let mut events = Vec::new();
            for now_us in (0..=20_000_000).step_by(step_us as usize) {
                events.extend(engine.advance(now_us));
            }
            events
        };
        assert_eq!(feed(1_000), feed(20_000_000));
    }

    #[test]
    fn no_more_than_max_running_run_at_once() {
        let mut engine = engine(256);
        for i in 0..10 {
            engine.submit(0, Prompt::new(&text(i * 20, 40)), 100).unwrap();
        }
        engine.advance(500_000);
        assert_eq!((engine.running(), engine.waiting()), (4, 6));
    }

    #[test]
    fn cancelled_requests_leave_queue_batch_and_cache() {
        let mut engine = engine(256);
        let ids: Vec<_> = (0..3)
            .map(|i| engine.submit(0, Prompt::new(&text(i * 60, 400)), 50).unwrap())
            .collect();
        engine.advance(150_000);
        assert_eq!((engine.running(), engine.waiting()), (2, 1));
        for id in ids {
            engine.cancel(150_000, id);
        }
        assert_eq!(
            (engine.running(), engine.waiting(), engine.kv_usage()),
            (0, 0, 0.0)
        );
        assert_eq!(engine.counters().aborted, 3);
        assert!(engine.advance(10_000_000).is_empty());
        let next = engine.submit(10_000_000, Prompt::new(&text(0, 400)), 1).unwrap();
        assert_eq!(
            cached(&engine.advance(11_000_000), next),
            96,
            "what had been computed stays cached"
        );
    }

    #[test]
    fn a_prompt_that_can_never_fit_is_refused() {
        let refused = engine(10).submit(0, Prompt::new(&text(0, 64 * 10)), 1);
        assert_eq!(
            refused,
            Err(Refusal::PromptTooLong {
                tokens: 161,
                capacity_tokens: 160
            })
        );
    }

    #[test]
    fn a_slow_engine_takes_proportionally_longer() {
        let mut engine = engine(64);
        engine.set_slow_permille(3_000);
        engine.submit(0, Prompt::new(&text(1, 400)), 1).unwrap();
        assert_eq!(engine.advance(1_000_000)[0].at_us, 300_000);
    }
}
