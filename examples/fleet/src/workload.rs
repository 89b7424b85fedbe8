//! Seeds → the requests of a workload with their arrival times, the same on every machine.

use bytes::Bytes;
use serde_json::{Value, json};

/// One request to send.
#[derive(Debug, Clone)]
pub struct PlannedRequest {
    /// When, milliseconds after the workload's start.
    pub at_ms: u64,
    /// Where to.
    pub path: &'static str,
    /// Its JSON body.
    pub body: Bytes,
}

/// How much and how fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WorkloadOptions {
    /// The same seed gives the same requests.
    pub seed: u64,
    /// Requests per second on average; gaps are exponential, as independent users leave them.
    pub rate_per_s: f64,
    /// Seconds of arrivals.
    pub seconds: f64,
    /// Model that the requests name.
    pub model: &'static str,
    /// Output tokens of each request.
    pub max_tokens: usize,
}

/// Documents that many questions are asked about and chats under shared system prompts: many prefixes of 8 to 16 KiB
/// that one replica's cache cannot hold and a fleet's can.
pub fn shared_prefix(options: &WorkloadOptions) -> Vec<PlannedRequest> {
    let mut rng = Rng::new(options.seed);
    let prefixes: Vec<String> = (0..SHARED_PREFIXES)
        .map(|number| {
            let bytes = 8 * 1024 + rng.below(8 * 1024);
            format!("Prefix {number}. {}", rng.text(bytes))
        })
        .collect();
    let mut chats: Vec<Vec<Chat>> = (0..SHARED_PREFIXES).map(|_| Vec::new()).collect();
    arrivals(options, &mut rng)
        .into_iter()
        .map(|at_ms| {
            let group = rng.skewed(SHARED_PREFIXES);
            let system = json!({"role": "system", "content": prefixes[group]});
            let question_bytes = 200 + rng.below(500);
            let question = json!({"role": "user", "content": rng.text(question_bytes)});
            if group.is_multiple_of(2) {
                return planned(options, at_ms, vec![system, question]);
            }
            let chats = &mut chats[group];
            let chat = match chats.iter().position(|chat| chat.next_ms <= at_ms) {
                Some(position) => &mut chats[position],
                None => {
                    chats.push(Chat {
                        next_ms: 0,
                        messages: vec![system],
                    });
                    let last = chats.len() - 1;
                    &mut chats[last]
                }
            };
            chat.messages.push(question);
            let request = planned(options, at_ms, chat.messages.clone());
            let answer_bytes = 100 + rng.below(300);
            chat.messages
                .push(json!({"role": "assistant", "content": rng.text(answer_bytes)}));
            chat.next_ms = at_ms + 1_500 + rng.below(1_500) as u64;
            if chat.messages.len() > 2 * CHAT_TURNS {
                chats.retain(|chat| chat.messages.len() <= 2 * CHAT_TURNS);
            }
            request
        })
        .collect()
}

/// One system prompt of 8 KiB on 70 % of the requests, each with 5 KiB of its own behind it: more prefill than one
/// replica can do. The others have prefixes of their own.
pub fn hot_prompt(options: &WorkloadOptions) -> Vec<PlannedRequest> {
    let mut rng = Rng::new(options.seed ^ 0x5eed);
    let hot = format!(
        "You are the assistant of one large product. {}",
        rng.text(8 * 1024)
    );
    let others: Vec<String> = (0..OTHER_PREFIXES).map(|_| rng.text(8 * 1024)).collect();
    arrivals(options, &mut rng)
        .into_iter()
        .map(|at_ms| {
            let (system, own_bytes) = if rng.below(10) < 7 {
                (&hot, 5 * 1024)
            } else {
                (&others[rng.below(OTHER_PREFIXES)], 300)
            };
            let system = json!({"role": "system", "content": system});
            let own = json!({"role": "user", "content": rng.text(own_bytes)});
            planned(options, at_ms, vec![system, own])
        })
        .collect()
}

/// Deterministic pseudo-random numbers: SplitMix64, <https://prng.di.unimi.it/splitmix64.c>.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, 0 when the bound is.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number from 0 up to, not including, 1.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// An index below `count`, low ones a few times as often as high ones.
    pub fn skewed(&mut self, count: usize) -> usize {
        let harmonic: f64 = (0..count).map(|index| 1.0 / (index as f64 + SKEW_OFFSET)).sum();
        let mut left = self.unit() * harmonic;
        for index in 0..count {
            left -= 1.0 / (index as f64 + SKEW_OFFSET);
            if left < 0.0 {
                return index;
            }
        }
        count.saturating_sub(1)
    }

    /// Words without meaning, exactly so many bytes of ASCII.
    pub fn text(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 8);
        while text.len() < bytes {
            let mut bits = self.next_u64();
            for _ in 0..2 + bits % 4 {
                bits >>= 5;
                text.push(char::from(b"bcdfghjklmnprstv"[(bits & 15) as usize]));
                bits >>= 4;
                text.push(char::from(b"aeiou"[(bits % 5) as usize]));
            }
            text.push(' ');
        }
        text.truncate(bytes);
        text
    }
}

/// A conversation that goes on.
struct Chat {
    /// When its user has read the last answer.
    next_ms: u64,
    messages: Vec<Value>,
}

fn arrivals(options: &WorkloadOptions, rng: &mut Rng) -> Vec<u64> {
    let mut arrivals = Vec::new();
    let mut at_s = 0.0;
    loop {
        at_s -= (1.0 - rng.unit()).ln() / options.rate_per_s;
        if at_s >= options.seconds {
            return arrivals;
        }
        arrivals.push((at_s * 1000.0) as u64);
    }
}

fn planned(options: &WorkloadOptions, at_ms: u64, messages: Vec<Value>) -> PlannedRequest {
    let body = json!({
        "model": options.model,
        "messages": messages,
        "max_tokens": options.max_tokens,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    PlannedRequest {
        at_ms,
        path: "/v1/chat/completions",
        body: Bytes::from(body.to_string()),
    }
}

/// Three times what one of the demo's replicas remembers, a bit more than a third of what eight do.
const SHARED_PREFIXES: usize = 48;
const OTHER_PREFIXES: usize = 24;
/// Questions of one chat.
const CHAT_TURNS: usize = 4;
/// Makes the most frequent of 48 prefixes about seven times as frequent as the rarest.
const SKEW_OFFSET: f64 = 8.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Endpoint, GenerationRequest};

    const OPTIONS: WorkloadOptions = WorkloadOptions {
        seed: 7,
        rate_per_s: 40.0,
        seconds: 15.0,
        model: "sim",
        max_tokens: 8,
    };

    fn prompts(requests: &[PlannedRequest]) -> Vec<String> {
        let parse =
            |request: &PlannedRequest| GenerationRequest::parse(Endpoint::Chat, &request.body).unwrap();
        requests.iter().map(|request| parse(request).prompt).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_requests_and_another_does_not() {
        for generate in [shared_prefix, hot_prompt] {
            let bodies = |seed| -> Vec<Bytes> {
                generate(&WorkloadOptions { seed, ..OPTIONS })
                    .into_iter()
                    .map(|request| request.body)
                    .collect()
            };
            assert_eq!(bodies(7), bodies(7));
            assert_ne!(bodies(7), bodies(8));
        }
    }

    #[test]
    fn arrivals_grow_and_keep_the_rate() {
        let requests = shared_prefix(&OPTIONS);
        assert!(requests.windows(2).all(|pair| pair[0].at_ms <= pair[1].at_ms));
        assert!((480..720).contains(&requests.len()), "{}", requests.len());
    }

    #[test]
    fn shared_prefixes_repeat_and_chats_extend_themselves() {
        let prompts = prompts(&shared_prefix(&OPTIONS));
        let mut heads: Vec<&str> = prompts.iter().map(|prompt| &prompt[..8 * 1024]).collect();
        heads.sort_unstable();
        heads.dedup();
        assert!((30..=SHARED_PREFIXES).contains(&heads.len()), "{}", heads.len());
        let extending = prompts.iter().enumerate().filter(|(number, prompt)| {
            prompts[..*number]
                .iter()
                .any(|earlier| prompt.len() > earlier.len() && prompt.starts_with(earlier.as_str()))
        });
        assert!(extending.count() > prompts.len() / 10);
    }

    #[test]
    fn seven_in_ten_share_the_hot_prompt() {
        let prompts = prompts(&hot_prompt(&OPTIONS));
        let hot = prompts
            .iter()
            .filter(|prompt| prompt.contains("one large product"))
            .count();
        let share = hot as f64 / prompts.len() as f64;
        assert!((0.62..0.78).contains(&share), "{share}");
    }
}
