//! What one engine can do: sizes, and the time of a step as a linear function of what is in it.
//!
//! Presets for two set-ups with GPUs and for the CPU testbed; [`EngineConfig`] is the short form for tests that only care
//! about rates.

use super::prompt::BLOCK_TOKENS;

/// One engine's sizes and speed.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineModel {
    /// KV cache size, blocks; bounds what runs and what is remembered.
    pub cache_blocks: usize,
    /// Tokens in a block; the names in a [`super::Prompt`] stand for blocks of this size. Nearly all the time of a
    /// simulation goes into blocks: a trace that is told in blocks of 512 tokens runs ten times as fast in these.
    pub block_tokens: usize,
    /// Most requests that run at once; `max_num_seqs` in vLLM.
    pub max_running: usize,
    /// Most tokens computed in one step, one for each decoding request and the rest for prefill;
    /// `max_num_batched_tokens` in vLLM.
    pub step_tokens: usize,
    /// How long a step takes.
    pub times: StepTimes,
    /// Divides all times.
    pub speed: f64,
}

impl EngineModel {
    /// Llama 3.3 70B on four H100.
    ///
    /// `a`, `b` and the decode cost per token are the fitted coefficients of `llama-3.3-70b` TP4 in inference-sim's
    /// `defaults.yaml` (12 601 µs, 76.4 µs, 66.8 µs). Their decode coefficient folds the context in; it is split here into
    /// `c` and `d` by KV bytes over HBM bandwidth. `e` is 4 × model width × layers FLOP for a pair at the utilisation of
    /// the linear part. The cache is taken as 1.5 M tokens where theirs is 2.05 M (128 273 blocks), to leave room for
    /// activations of long prompts.
    pub fn llama_70b_h100x4() -> Self {
        Self {
            cache_blocks: 93_750,
            times: StepTimes {
                base_us: 12_600.0,
                prefill_token_us: 76.0,
                prefill_pair_us: 0.001_43,
                decode_us: 25.0,
                decode_context_us: 0.03,
            },
            ..Self::skeleton()
        }
    }

    /// Llama 3.1 8B on one H100.
    ///
    /// From `llama-3.1-8b` TP1 in inference-sim's `defaults.yaml` (5 753 µs, 17.3 µs, 6.0 µs, 29 205 blocks), `b` rounded
    /// up to 50 000 tokens a second; `d` and `e` by the arithmetic given at [`EngineModel::llama_70b_h100x4`].
    pub fn llama_8b_h100x1() -> Self {
        Self {
            cache_blocks: 29_205,
            times: StepTimes {
                base_us: 5_800.0,
                prefill_token_us: 20.0,
                prefill_pair_us: 0.000_67,
                decode_us: 6.0,
                decode_context_us: 0.049,
            },
            ..Self::skeleton()
        }
    }

    /// The small random model of the CPU testbed on one core of a shared virtual machine, in blocks of 32 tokens.
    ///
    /// `just calibrate`, 2026-11-30, against two vLLM 0.32 servers pinned to one core each, medians of three fits. Another
    /// workload was then predicted to 0.9 points of hit share and 12 % of mean time to first token in the worst run, with
    /// a front end of 7.2 ms and 4 µs a prompt token on the same core; `docs/engine-model.md` has the figures.
    pub fn cpu_small() -> Self {
        Self {
            // 512 less the one that vLLM keeps for itself.
            cache_blocks: 511,
            block_tokens: 32,
            max_running: 32,
            step_tokens: 2048,
            times: StepTimes {
                base_us: 16_250.0,
                prefill_token_us: 161.0,
                prefill_pair_us: 0.044_8,
                decode_us: 315.0,
                decode_context_us: 0.77,
            },
            ..Self::skeleton()
        }
    }

    /// The preset of that name.
    pub fn preset(name: &str) -> Option<Self> {
        match name {
            "llama_70b_h100x4" => Some(Self::llama_70b_h100x4()),
            "llama_8b_h100x1" => Some(Self::llama_8b_h100x1()),
            "cpu_small" => Some(Self::cpu_small()),
            _ => None,
        }
    }

    /// The same engine, `speed` times as fast.
    #[must_use]
    pub fn at_speed(mut self, speed: f64) -> Self {
        self.speed = speed;
        self
    }

    /// Tokens that the KV cache holds.
    pub fn capacity_tokens(&self) -> usize {
        self.cache_blocks.saturating_mul(self.block_tokens)
    }

    fn skeleton() -> Self {
        Self {
            cache_blocks: 4096,
            block_tokens: BLOCK_TOKENS,
            max_running: 256,
            step_tokens: STEP_TOKENS,
            times: StepTimes::default(),
            speed: 1.0,
        }
    }
}

/// Coefficients of a step's time, microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTimes {
    /// `a`: every step.
    pub base_us: f64,
    /// `b`: each prefill token computed.
    pub prefill_token_us: f64,
    /// `e`: each pair of a prefill token and a token that it attends to.
    pub prefill_pair_us: f64,
    /// `c`: each decoding request.
    pub decode_us: f64,
    /// `d`: each token of context of each decoding request.
    pub decode_context_us: f64,
}

impl StepTimes {
    /// Time of a step, microseconds: a + b·P + e·Σ(chunk × mean context) + c·D + d·Σ decode context.
    pub fn step_us(&self, load: &StepLoad) -> f64 {
        self.base_us
            + self.prefill_us(load)
            + self.decode_us * load.decodes as f64
            + self.decode_context_us * load.decode_context as f64
    }

    /// The part of it that is due to prefill.
    pub fn prefill_us(&self, load: &StepLoad) -> f64 {
        self.prefill_token_us * load.prefill_tokens as f64 + self.prefill_pair_us * load.prefill_pairs
    }
}

/// What one step computes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepLoad {
    /// `P`: prefill tokens.
    pub prefill_tokens: usize,
    /// Σ over chunks of tokens × mean context.
    pub prefill_pairs: f64,
    /// `D`: requests that decode.
    pub decodes: usize,
    /// Σ of their contexts, tokens.
    pub decode_context: usize,
}

impl StepLoad {
    /// Adds `tokens` of prefill behind `context` tokens that are there already.
    pub fn add_prefill(&mut self, tokens: usize, context: usize) {
        self.prefill_tokens += tokens;
        self.prefill_pairs += tokens as f64 * (context as f64 + tokens as f64 / 2.0);
    }

    /// Adds a request that decodes over `context` tokens.
    pub fn add_decode(&mut self, context: usize) {
        self.decodes += 1;
        self.decode_context += context;
    }

    /// Tokens that count against the budget of a step.
    pub fn tokens(&self) -> usize {
        self.prefill_tokens + self.decodes
    }
}

/// An engine told by its rates alone: no attention terms, and no cost of a step beyond the decode time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// KV cache size, blocks of [`BLOCK_TOKENS`] tokens; bounds what runs and what is remembered.
    pub cache_blocks: usize,
    /// Prefill rate, tokens per second.
    pub prefill_tokens_per_s: u64,
    /// Time of a step without prefill, microseconds: what lies between two output tokens of one request.
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

impl From<EngineConfig> for EngineModel {
    fn from(config: EngineConfig) -> Self {
        Self {
            cache_blocks: config.cache_blocks,
            max_running: config.max_running,
            times: StepTimes {
                base_us: config.decode_us_per_token as f64,
                prefill_token_us: 1e6 / config.prefill_tokens_per_s.max(1) as f64,
                ..StepTimes::default()
            },
            ..Self::skeleton()
        }
    }
}

/// vLLM's default `max_num_batched_tokens` for `vllm serve` on an H100 (0.32, `EngineArgs` in `vllm/engine/arg_utils.py`).
const STEP_TOKENS: usize = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill_s(model: &EngineModel, tokens: usize) -> f64 {
        let (mut load, mut steps) = (StepLoad::default(), 0);
        while load.prefill_tokens < tokens {
            let done = load.prefill_tokens;
            load.add_prefill(model.step_tokens.min(tokens - done), done);
            steps += 1;
        }
        let base_us = f64::from(steps - 1) * model.times.base_us;
        (base_us + model.times.step_us(&load)) / 1e6
    }

    #[test]
    fn presets_prefill_at_the_rates_they_are_taken_from() {
        let (large, small) = (EngineModel::llama_70b_h100x4(), EngineModel::llama_8b_h100x1());
        // An 85 000-token prompt alone: 6.5 s of linear work, 5.2 s of attention, eleven steps.
        assert!((prefill_s(&large, 85_000) - 11.8).abs() < 0.2);
        // Attention costs as much as the linear part where the mean context is 53 000 and 30 000 tokens.
        let parity = |model: &EngineModel| model.times.prefill_token_us / model.times.prefill_pair_us;
        assert!((parity(&large) - 53_000.0).abs() < 500.0);
        assert!((parity(&small) - 30_000.0).abs() < 500.0);
        assert_eq!(small.capacity_tokens(), 467_280);
        let cpu_s = prefill_s(&EngineModel::cpu_small(), 6_000);
        assert!((1.5..2.3).contains(&cpu_s), "{cpu_s}");
    }

    #[test]
    fn presets_are_found_by_name() {
        for name in ["llama_70b_h100x4", "llama_8b_h100x1", "cpu_small"] {
            assert!(EngineModel::preset(name).is_some(), "{name}");
        }
        assert_eq!(EngineModel::preset("abacus"), None);
    }

    #[test]
    fn rates_become_a_model_without_attention() {
        let model = EngineModel::from(EngineConfig::default());
        assert_eq!(prefill_s(&model, 20_000), 1.0 + 3.0 * 0.005);
    }
}
