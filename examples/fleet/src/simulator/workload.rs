//! Prompts as both sides see them: blocks for the engine, keys for the core.
//!
//! In: requests told as chained block ids or as text. Out: a [`Workload`] whose requests are shared between runs. Block
//! ids become text, the text a JSON body, and the core's own extraction makes the keys of it, so that parsing, hashing
//! and chunking are those of the filter; this happens once for a workload, not once for a run.

use std::collections::HashSet;
use std::sync::Arc;

use warmroute::chunk::{PrefixKeys, mix};
use warmroute::prompt::{Api, BodyEnd, PromptInput, PromptOptions, extract};
use warmroute::strategy::Rng;

use crate::engine::{EngineModel, Prompt, StepLoad, TOKEN_BYTES};

/// Requests in the order of their arrival.
#[derive(Debug, Clone)]
pub struct Workload {
    /// What it is, for tables.
    pub name: String,
    /// Whether it was made up rather than read from a trace.
    pub is_generated: bool,
    /// Tokens in a block of its prompts.
    pub block_tokens: usize,
    /// The requests.
    pub requests: Arc<[Request]>,
    /// When they arrive at the trace's own speed, microseconds; requests with equal times are spread by the seed.
    pub arrivals_us: Arc<[u64]>,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Request {
    /// As the engine sees it.
    pub prompt: Prompt,
    /// As the core sees it.
    pub keys: PrefixKeys,
    /// Tokens of the answer.
    pub output_tokens: usize,
    /// Tokens that one cache which forgets nothing would hold when it arrives: the most that routing can save.
    pub ideal_tokens: usize,
}

impl Workload {
    /// Arrival times at `speedup` times the trace's speed, in growing order.
    ///
    /// Some traces tick every few seconds: what shares a tick is spread evenly at random up to the next one.
    pub fn arrivals(&self, speedup: f64, seed: u64) -> Vec<u64> {
        let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9) ^ 0x51ab_0c11);
        let times = &self.arrivals_us;
        let mut arrivals: Vec<u64> = Vec::with_capacity(times.len());
        let mut start = 0;
        while let Some(tick) = times.get(start) {
            let end = start + times[start..].partition_point(|time| time == tick);
            let gap_us = times.get(end).map_or(0, |next| (next - tick).min(MAX_SPREAD_US));
            let spread = |_| {
                tick + if end - start > 1 {
                    rng.below(gap_us as usize + 1) as u64
                } else {
                    0
                }
            };
            arrivals.extend((start..end).map(spread));
            arrivals[start..end].sort_unstable();
            start = end;
        }
        for time in &mut arrivals {
            *time = (*time as f64 / speedup) as u64;
        }
        arrivals
    }

    /// Share of prompt tokens that one cache which forgets nothing would save.
    pub fn ideal_hit_share(&self) -> f64 {
        let ideal: usize = self.requests.iter().map(|request| request.ideal_tokens).sum();
        ideal as f64 / self.prompt_tokens().max(1) as f64
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> usize {
        self.requests.iter().map(|request| request.prompt.tokens()).sum()
    }

    /// The workload `copies` times at once; beyond the first block, which all share, each copy has texts of its own. For
    /// workloads told as block ids.
    #[must_use]
    pub fn copied(&self, copies: u64, options: &PromptOptions) -> Self {
        let mut builder = WorkloadBuilder::new(&self.name, self.block_tokens, options);
        builder.is_generated = self.is_generated;
        let mut rng = Rng::new(copies);
        let mut start = 0;
        while let Some(tick) = self.arrivals_us.get(start) {
            let end = start + self.arrivals_us[start..].partition_point(|time| time == tick);
            // Within a tick the copies are mixed at random, each in its own order: in step, a rule that counts hosts round
            // would tell them apart.
            let mut places: Vec<(u64, u64, usize)> = Vec::new();
            for copy in 0..copies {
                let mut keys: Vec<u64> = (start..end).map(|_| rng.next_u64()).collect();
                keys.sort_unstable();
                places.extend(keys.into_iter().zip(start..end).map(|(key, at)| (key, copy, at)));
            }
            places.sort_unstable();
            for (_, copy, at) in places {
                let request = &self.requests[at];
                let ids = request.block_ids(|at, id| if at == 0 { id } else { mix(id, copy) });
                builder.push_blocks(*tick, &ids, request.prompt.tokens(), request.output_tokens);
            }
            start = end;
        }
        builder.finish()
    }

    /// The workload `times` times in a row, each time with texts of its own: a trace that is hardly longer than an answer
    /// shows little but the filling of empty engines. For workloads told as block ids.
    #[must_use]
    pub fn repeated(&self, times: u64, options: &PromptOptions) -> Self {
        let mut builder = WorkloadBuilder::new(&self.name, self.block_tokens, options);
        builder.is_generated = self.is_generated;
        let last_us = self.arrivals_us.last().copied().unwrap_or(0);
        let round_us = last_us + last_us / self.requests.len().max(1) as u64;
        for round in 0..times {
            for (request, arrives_us) in self.requests.iter().zip(self.arrivals_us.iter()) {
                let ids = request.block_ids(|_, id| mix(id, round));
                let arrives_us = arrives_us + round * round_us;
                builder.push_blocks(arrives_us, &ids, request.prompt.tokens(), request.output_tokens);
            }
        }
        builder.finish()
    }

    /// About one of `parts` of the requests, with whole conversations: what has the second block in common stays together.
    #[must_use]
    pub fn part(&self, parts: u64, seed: u64, options: &PromptOptions) -> Self {
        let mut builder = WorkloadBuilder::new(&self.name, self.block_tokens, options);
        builder.is_generated = self.is_generated;
        for (request, arrives_us) in self.requests.iter().zip(self.arrivals_us.iter()) {
            let ids = request.block_ids(|_, id| id);
            let root = ids.get(1).or(ids.first()).copied().unwrap_or(0);
            if mix(root, seed).is_multiple_of(parts.max(1)) {
                builder.push_blocks(*arrives_us, &ids, request.prompt.tokens(), request.output_tokens);
            }
        }
        builder.finish()
    }

    /// The first `count` requests.
    #[must_use]
    pub fn truncated(&self, count: usize) -> Self {
        let count = count.min(self.requests.len());
        Self {
            requests: self.requests[..count].into(),
            arrivals_us: self.arrivals_us[..count].into(),
            ..self.clone()
        }
    }
}

impl Request {
    /// Ids of the full blocks, and one that follows from the keys for the rest.
    fn block_ids(&self, of: impl Fn(usize, u64) -> u64) -> Vec<u64> {
        let rest = self
            .keys
            .deepest()
            .map_or(0, |key| mix(key.hash.0, self.prompt.tokens() as u64));
        let ids = self.prompt.blocks().iter().copied().chain([rest]);
        ids.enumerate().map(|(at, id)| of(at, id)).collect()
    }

    /// Time to first token alone on an idle engine which holds all that any earlier request has computed, microseconds:
    /// no router can do better.
    pub fn unloaded_us(&self, model: &EngineModel) -> f64 {
        let (mut context, tokens) = (self.ideal_tokens, self.prompt.tokens());
        let mut time_us = 0.0;
        while context < tokens {
            let chunk = model.step_tokens.max(1).min(tokens - context);
            let mut load = StepLoad::default();
            load.add_prefill(chunk, context);
            time_us += model.times.step_us(&load) / model.speed;
            context += chunk;
        }
        time_us
    }
}

/// Makes a workload request by request.
#[derive(Debug)]
pub struct WorkloadBuilder {
    name: String,
    is_generated: bool,
    block_tokens: usize,
    options: PromptOptions,
    requests: Vec<Request>,
    arrivals_us: Vec<u64>,
    seen: HashSet<u64>,
    body: Vec<u8>,
}

impl WorkloadBuilder {
    /// An empty workload; `options` are the core's, from the pool's configuration.
    pub fn new(name: impl Into<String>, block_tokens: usize, options: &PromptOptions) -> Self {
        Self {
            name: name.into(),
            is_generated: false,
            block_tokens,
            options: options.clone(),
            requests: Vec::new(),
            arrivals_us: Vec::new(),
            seen: HashSet::new(),
            body: Vec::new(),
        }
    }

    /// Marks the workload as made up.
    #[must_use]
    pub fn generated(mut self) -> Self {
        self.is_generated = true;
        self
    }

    /// Adds a request told as chained block ids, the last of which may stand for a part of a block.
    pub fn push_blocks(&mut self, arrives_us: u64, block_ids: &[u64], tokens: usize, output_tokens: usize) {
        self.body.clear();
        self.body.extend_from_slice(BODY_HEAD);
        let block_bytes = self.block_tokens * TOKEN_BYTES;
        let mut left = tokens * TOKEN_BYTES;
        for id in block_ids {
            write_block_text(*id, block_bytes.min(left), &mut self.body);
            left = left.saturating_sub(block_bytes);
        }
        self.body.extend_from_slice(BODY_TAIL);
        let keys = keys_of(CHAT_PATH, &self.body, &self.options);
        let full = tokens / self.block_tokens;
        let blocks = &block_ids[..full.min(block_ids.len())];
        self.push(
            arrives_us,
            Prompt::from_blocks(blocks, tokens),
            keys,
            output_tokens,
        );
    }

    /// Adds a request told as a body for an API's path, and the text that an engine would render of it.
    pub fn push_body(
        &mut self,
        arrives_us: u64,
        path: &str,
        body: &[u8],
        rendered: &str,
        output_tokens: usize,
    ) {
        let keys = keys_of(path, body, &self.options);
        let prompt = Prompt::from_text(rendered.as_bytes(), &[], self.block_tokens);
        self.push(arrives_us, prompt, keys, output_tokens);
    }

    /// The workload, in the order of arrival.
    pub fn finish(self) -> Workload {
        Workload {
            name: self.name,
            is_generated: self.is_generated,
            block_tokens: self.block_tokens,
            requests: self.requests.into(),
            arrivals_us: self.arrivals_us.into(),
        }
    }

    fn push(&mut self, arrives_us: u64, prompt: Prompt, keys: PrefixKeys, output_tokens: usize) {
        let tokens = prompt.tokens();
        let usable = (tokens - 1) / self.block_tokens;
        let blocks = prompt.blocks();
        let known = blocks
            .iter()
            .take(usable)
            .take_while(|name| self.seen.contains(name));
        let ideal_tokens = known.count() * self.block_tokens;
        self.seen.extend(blocks);
        self.arrivals_us.push(arrives_us);
        self.requests.push(Request {
            prompt,
            keys,
            output_tokens: output_tokens.max(1),
            ideal_tokens,
        });
    }
}

/// The keys that the filter would take of a body.
pub fn keys_of(path: &str, body: &[u8], options: &PromptOptions) -> PrefixKeys {
    let input = PromptInput {
        api: Api::from_path(path).unwrap_or(Api::OpenAiChat),
        path,
        body,
        end: BodyEnd::EndOfStream,
        tenant: None,
        session_header: None,
    };
    match &extract(&input, options).prompt {
        Ok(prompt) => prompt.keys(&prompt.namespace),
        Err(_) => PrefixKeys {
            prompt_bytes: u32::try_from(body.len()).unwrap_or(u32::MAX),
            ..PrefixKeys::default()
        },
    }
}

/// Text of a block: hexadecimal digits that follow from its id.
fn write_block_text(id: u64, bytes: usize, out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut rng = Rng::new(id.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let end = out.len() + bytes;
    while out.len() < end {
        let number = rng.next_u64();
        let digits: [u8; 16] = std::array::from_fn(|at| DIGITS[(number >> (4 * at)) as usize & 15]);
        out.extend_from_slice(&digits[..digits.len().min(end - out.len())]);
    }
}

/// Path of a chat request.
pub const CHAT_PATH: &str = "/v1/chat/completions";
const BODY_HEAD: &[u8] = br#"{"model":"m","stream":true,"messages":[{"role":"user","content":""#;
const BODY_TAIL: &[u8] = br#""}]}"#;
/// Ticks of the Mooncake traces are about 3 s apart; what a longer gap means is not known.
const MAX_SPREAD_US: u64 = 3_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn two_turns() -> Workload {
        let mut builder = WorkloadBuilder::new("two turns", 512, &PromptOptions::default());
        builder.push_blocks(0, &[1, 2, 3], 1300, 5);
        builder.push_blocks(0, &[1, 2, 4, 5], 2000, 5);
        builder.push_blocks(9_000_000, &[7], 300, 5);
        builder.finish()
    }

    #[test]
    fn equal_blocks_give_equal_keys_and_ideal_hits() {
        let workload = two_turns();
        let keys = |at: usize| &workload.requests[at].keys;
        let shared = keys(0).keys.iter().zip(&keys(1).keys).take_while(|(a, b)| a == b);
        assert_eq!(keys(1).prompt_bytes, 8000);
        let shared_bytes = shared.last().unwrap().0.end_bytes;
        assert!(
            (3840..=4096).contains(&shared_bytes),
            "two blocks of 2048 bytes: {shared_bytes}"
        );
        let ideal: Vec<_> = workload
            .requests
            .iter()
            .map(|request| request.ideal_tokens)
            .collect();
        assert_eq!(ideal, [0, 1024, 0]);
    }

    #[test]
    fn a_tick_is_spread_within_three_seconds_and_time_is_compressed() {
        let workload = two_turns();
        let arrivals = workload.arrivals(2.0, 1);
        assert!(arrivals.is_sorted() && arrivals[1] <= 1_500_000 && arrivals[2] == 4_500_000);
        assert_ne!(arrivals, workload.arrivals(2.0, 2));
        assert_eq!(arrivals, workload.arrivals(2.0, 1));
    }
}
