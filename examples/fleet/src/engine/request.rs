//! One request on its way through the engine.

use super::kv_cache::BlockIndex;
use super::{Prompt, RequestId};

/// A request that waits or runs.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) submitted_us: u64,
    pub(super) prompt: Prompt,
    pub(super) output_wanted: usize,
    pub(super) output_tokens: usize,
    /// What the cache saved when the request first started.
    pub(super) cached_tokens: Option<usize>,
    /// Tokens whose keys and values are in the held blocks.
    pub(super) computed_tokens: usize,
    /// Tokens of it in the step that runs.
    pub(super) scheduled_tokens: usize,
    /// Head first; the blocks of the whole prompt from the start on, those of output as it grows.
    pub(super) held: Vec<BlockIndex>,
    /// The first blocks of `held`, which can be hit by others.
    pub(super) named_blocks: usize,
}

impl Request {
    pub(super) fn new(id: RequestId, submitted_us: u64, prompt: Prompt, output_wanted: usize) -> Self {
        Self {
            id,
            submitted_us,
            prompt,
            output_wanted,
            output_tokens: 0,
            cached_tokens: None,
            computed_tokens: 0,
            scheduled_tokens: 0,
            held: Vec::new(),
            named_blocks: 0,
        }
    }

    /// Prompt and output so far.
    pub(super) fn known_tokens(&self) -> usize {
        self.prompt.tokens + self.output_tokens
    }

    /// What must be computed before the next token of output.
    pub(super) fn missing_tokens(&self) -> usize {
        self.known_tokens() - self.computed_tokens
    }

    pub(super) fn stage(&self) -> Stage {
        if self.output_tokens > 0 && self.missing_tokens() == 1 {
            Stage::Decode
        } else {
            Stage::Prefill
        }
    }

    pub(super) fn full_blocks(&self, block_tokens: usize) -> usize {
        self.computed_tokens / block_tokens
    }

    pub(super) fn is_done(&self) -> bool {
        self.output_tokens >= self.output_wanted
    }
}

/// What a request does with its next tokens.
pub(super) enum Stage {
    Prefill,
    Decode,
}
