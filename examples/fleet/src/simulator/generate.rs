//! Parameters and a seed → workloads that stand for no one's traffic.
//!
//! In: lengths, rates, shares. Out: a [`Workload`] marked as generated. Arrivals are Poisson, all else follows from the
//! seed.

use warmroute::chunk::mix;
use warmroute::prompt::PromptOptions;
use warmroute::strategy::Rng;

use super::workload::{Workload, WorkloadBuilder};

/// Prompts of a shared prefix and a question of their own.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedPrefixes {
    /// Name for tables.
    pub name: String,
    /// Tenants, equally busy; each has a prefix.
    pub tenants: usize,
    /// Tokens of a prefix.
    pub prefix_tokens: usize,
    /// Share of the requests that have one; the others have as many tokens of their own.
    pub shared_share: f64,
    /// Tokens of a question, from a half to three halves of this.
    pub question_tokens: usize,
    /// Tokens of an answer.
    pub output_tokens: usize,
    /// Requests a second.
    pub requests_per_s: f64,
    /// How long they come.
    pub seconds: f64,
}

impl SharedPrefixes {
    /// 150 tenants whose prefixes do not fit into one host's cache of 400 000 tokens, at 14 requests a second: 1.25 times
    /// what `round_robin` bears with eight hosts of the 70B engine.
    pub fn tenants() -> Self {
        Self {
            name: "150 tenants".to_owned(),
            tenants: 150,
            prefix_tokens: 6144,
            shared_share: 1.0,
            question_tokens: 1200,
            output_tokens: 500,
            requests_per_s: 14.0,
            seconds: 600.0,
        }
    }

    /// One prefix on 70 % of the requests.
    pub fn hot_prefix() -> Self {
        Self {
            name: "one hot prefix".to_owned(),
            tenants: 1,
            prefix_tokens: 4096,
            shared_share: 0.7,
            question_tokens: 1024,
            output_tokens: 200,
            requests_per_s: 26.0,
            seconds: 600.0,
        }
    }

    /// A profile of `synthetic_profiles.json` at its highest rate.
    pub fn of_profile(profile: &serde_json::Value) -> Option<Self> {
        let number = |key: &str| profile[key].as_u64().map(|number| number as usize);
        let stages = profile["stages_rps_x_s"].as_array()?;
        let stage = |stage: &serde_json::Value| Some((stage[0].as_f64()?, stage[1].as_f64()?));
        let stages: Vec<(f64, f64)> = stages.iter().filter_map(stage).collect();
        let requests: f64 = stages.iter().map(|(rate, seconds)| rate * seconds).sum();
        let rate = stages.iter().map(|stage| stage.0).fold(0.0, f64::max);
        Some(Self {
            name: profile["name"].as_str()?.to_owned(),
            tenants: number("groups")?,
            prefix_tokens: number("prefix_tokens")?,
            shared_share: 1.0,
            question_tokens: number("question_tokens")?,
            output_tokens: number("output_tokens")?,
            requests_per_s: rate,
            seconds: requests / rate,
        })
    }

    /// The workload.
    pub fn generate(&self, seed: u64, options: &PromptOptions) -> Workload {
        let mut rng = Rng::new(seed);
        let mut builder = WorkloadBuilder::new(&self.name, BLOCK_TOKENS, options).generated();
        let mut time_s = 0.0;
        let prefix_tokens = self.prefix_tokens.next_multiple_of(BLOCK_TOKENS);
        let mut number = 0u64;
        loop {
            time_s += exponential(&mut rng) / self.requests_per_s;
            if time_s > self.seconds {
                return builder.finish();
            }
            number += 1;
            let tenant = rng.below(self.tenants) as u64;
            let is_shared = uniform(&mut rng) < self.shared_share;
            let prefix = if is_shared {
                1 << 32 | tenant
            } else {
                2 << 32 | number
            };
            let question = self.question_tokens / 2 + rng.below(self.question_tokens + 1);
            let mut ids = Vec::new();
            extend(&mut ids, prefix, prefix_tokens / BLOCK_TOKENS);
            extend(&mut ids, 3 << 32 | number, question.div_ceil(BLOCK_TOKENS));
            builder.push_blocks(
                (time_s * 1e6) as u64,
                &ids,
                prefix_tokens + question.max(1),
                self.output_tokens,
            );
        }
    }
}

/// Chats with the statistics of the Mooncake conversation trace: lengths, ticks, the block that all share, how many
/// requests continue an earlier one and how far back that is.
pub fn conversation(requests: usize, seed: u64, options: &PromptOptions) -> Workload {
    let mut rng = Rng::new(seed);
    let mut builder = WorkloadBuilder::new("conversation", CHAT_BLOCK_TOKENS, options).generated();
    let mut chats: Vec<(Vec<u64>, usize)> = Vec::new();
    let (mut number, mut time_s) = (0u64, 0.0);
    while chats.len() < requests {
        time_s += exponential(&mut rng) / CHAT_REQUESTS_PER_S;
        number += 1;
        let back = (exponential(&mut rng) * CHAT_REUSE_DISTANCE) as usize + 1;
        let parent = chats.len().checked_sub(back).and_then(|at| chats.get(at));
        let (mut ids, tokens) = match parent {
            Some((ids, tokens)) if uniform(&mut rng) < CHAT_CONTINUED => {
                let kept = tokens / CHAT_BLOCK_TOKENS;
                let more = lognormal(&mut rng, 1_000.0, 1.0).max(64.0) as usize;
                (ids[..kept].to_vec(), (tokens + more).min(CHAT_MAX_TOKENS))
            }
            Some(_) | None => {
                let tokens = lognormal(&mut rng, 6_500.0, 1.074) as usize;
                (vec![1], tokens.clamp(CHAT_MIN_TOKENS, CHAT_MAX_TOKENS))
            }
        };
        let blocks = tokens.div_ceil(CHAT_BLOCK_TOKENS);
        let more = blocks.saturating_sub(ids.len());
        extend(&mut ids, 4 << 32 | number, more);
        let output = lognormal(&mut rng, 310.0, 0.5).clamp(1.0, 2_000.0) as usize;
        let tick = (time_s / CHAT_TICK_S) as u64;
        builder.push_blocks((tick as f64 * CHAT_TICK_S * 1e6) as u64, &ids, tokens, output);
        chats.push((ids, tokens));
    }
    builder.finish()
}

/// Appends blocks of one text: each is named by the text and all that is before it.
fn extend(ids: &mut Vec<u64>, text: u64, blocks: usize) {
    let mut last = ids.last().copied().unwrap_or(0);
    for block in 0..blocks as u64 {
        last = mix(last, text << 16 | block);
        ids.push(last);
    }
}

fn uniform(rng: &mut Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn exponential(rng: &mut Rng) -> f64 {
    -(1.0 - uniform(rng)).ln()
}

/// By Box and Muller.
fn lognormal(rng: &mut Rng, median: f64, sigma: f64) -> f64 {
    let radius = (-2.0 * (1.0 - uniform(rng)).ln()).sqrt();
    let normal = radius * (std::f64::consts::TAU * uniform(rng)).cos();
    median * (sigma * normal).exp()
}

/// Prefixes are cut at multiples of this.
const BLOCK_TOKENS: usize = 64;
/// Figures of `stats.json` for the conversation trace: 3.4 requests a second in ticks of 3 s, lengths from 891 to 126 195
/// tokens with a median of 6909, 38.7 % of the requests continuing an earlier one. An LRU cache of 10 000 blocks reaches
/// half of the hits and one of 30 000 nine tenths, which is an exponential distance with a mean of 900 requests.
const CHAT_BLOCK_TOKENS: usize = 512;
const CHAT_REQUESTS_PER_S: f64 = 3.4;
const CHAT_TICK_S: f64 = 3.0;
const CHAT_CONTINUED: f64 = 0.42;
const CHAT_REUSE_DISTANCE: f64 = 900.0;
const CHAT_MIN_TOKENS: usize = 891;
const CHAT_MAX_TOKENS: usize = 126_195;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_chats_have_the_statistics_of_the_trace() {
        let workload = conversation(4_000, 1, &PromptOptions::default());
        let mut lengths: Vec<_> = workload.requests.iter().map(|r| r.prompt.tokens()).collect();
        lengths.sort_unstable();
        let mean = workload.prompt_tokens() / lengths.len();
        assert!((10_500..13_500).contains(&mean), "{mean}");
        let median = lengths[lengths.len() / 2];
        assert!((5_900..8_500).contains(&median), "{median}");
        let ideal = workload.ideal_hit_share();
        assert!((0.30..0.41).contains(&ideal), "{ideal}");
        let continuing = workload.requests.iter().filter(|r| r.ideal_tokens > 512).count();
        let share = continuing as f64 / lengths.len() as f64;
        assert!((0.30..0.36).contains(&share), "{share}");
    }

    #[test]
    fn tenants_meet_in_their_prefix_and_nowhere_else() {
        let profile = SharedPrefixes {
            name: "test".into(),
            tenants: 5,
            prefix_tokens: 640,
            shared_share: 1.0,
            question_tokens: 100,
            output_tokens: 4,
            requests_per_s: 10.0,
            seconds: 20.0,
        };
        let workload = profile.generate(3, &PromptOptions::default());
        assert!((150..250).contains(&workload.requests.len()));
        let hits = workload.requests.iter().filter(|r| r.ideal_tokens == 640).count();
        assert_eq!(hits, workload.requests.len() - 5);
    }
}
