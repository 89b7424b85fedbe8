//! The numbers of a phase → its requests. Must depend on nothing but the workload: no clock, no chance.

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Chat, Documents, HotPrompt, PlannedRequest, Span, Traffic, Workload};
use crate::engine::TOKEN_BYTES;

/// The requests of phase `number`, in order of their arrival.
pub(super) fn requests(workload: &Workload, traffic: &Traffic, number: u64) -> Vec<PlannedRequest> {
    let mut rng = Rng::new(workload.seed ^ (number + 1).wrapping_mul(PHASE_STEP));
    let output_tokens = workload.output_tokens;
    match traffic {
        Traffic::Chat(chat) => conversations(chat, &mut rng, output_tokens),
        Traffic::Documents(documents) => questions(documents, &mut rng, output_tokens),
        Traffic::HotPrompt(hot) => hot_prompts(hot, &mut rng, output_tokens),
    }
}

fn conversations(chat: &Chat, rng: &mut Rng, output_tokens: usize) -> Vec<PlannedRequest> {
    let systems: Vec<Value> = (0..chat.system_prompts)
        .map(|number| {
            message(
                "system",
                rng.tokens(&format!("Assistant {number}."), chat.system_tokens),
            )
        })
        .collect();
    let mut requests = Vec::new();
    for _ in 0..chat.conversations {
        let mut at_s = rng.unit() * chat.start_window_s;
        let mut messages = vec![systems[rng.below(systems.len())].clone()];
        for turn in 0..rng.span(chat.turns) {
            let tokens = if turn == 0 {
                chat.first_tokens
            } else {
                chat.user_tokens
            };
            messages.push(message("user", rng.tokens("", tokens)));
            requests.push(planned(at_s, &messages, output_tokens));
            messages.push(message("assistant", rng.tokens("", chat.answer_tokens)));
            let [least, most] = chat.pause_s;
            at_s += least + rng.unit() * (most - least);
        }
    }
    requests.sort_by_key(|request| request.at_ms);
    requests
}

fn questions(spec: &Documents, rng: &mut Rng, output_tokens: usize) -> Vec<PlannedRequest> {
    let instructions = rng.tokens("Answer from the document.", spec.system_tokens);
    let documents: Vec<Value> = (0..spec.documents)
        .map(|number| {
            let document = rng.tokens(&format!("Document {number}."), spec.document_tokens);
            message("system", format!("{instructions}\n\n{document}"))
        })
        .collect();
    arrivals(spec.requests, spec.rate_per_s, rng)
        .into_iter()
        .map(|at_s| {
            let document = documents[rng.skewed(documents.len(), spec.popularity_offset)].clone();
            let question = message("user", rng.tokens("", spec.question_tokens));
            planned(at_s, &[document, question], output_tokens)
        })
        .collect()
}

fn hot_prompts(spec: &HotPrompt, rng: &mut Rng, output_tokens: usize) -> Vec<PlannedRequest> {
    let hot = message("system", rng.tokens(HOT_HEAD, spec.hot_tokens));
    let others: Vec<Value> = (0..spec.other_prompts)
        .map(|number| {
            message(
                "system",
                rng.tokens(&format!("Product {number}."), spec.other_tokens),
            )
        })
        .collect();
    // Exactly the share, in random order.
    let hot_requests = (spec.requests as f64 * spec.hot_share).round() as usize;
    let mut is_hot: Vec<bool> = (0..spec.requests).map(|number| number < hot_requests).collect();
    for last in (1..is_hot.len()).rev() {
        is_hot.swap(last, rng.below(last + 1));
    }
    arrivals(spec.requests, spec.rate_per_s, rng)
        .into_iter()
        .zip(is_hot)
        .map(|(at_s, is_hot)| {
            let (system, own) = if is_hot {
                (hot.clone(), spec.hot_own_tokens)
            } else {
                (others[rng.below(others.len())].clone(), spec.other_own_tokens)
            };
            planned(
                at_s,
                &[system, message("user", rng.tokens("", own))],
                output_tokens,
            )
        })
        .collect()
}

fn arrivals(requests: usize, rate_per_s: f64, rng: &mut Rng) -> Vec<f64> {
    let mut at_s = 0.0;
    (0..requests)
        .map(|_| {
            at_s -= (1.0 - rng.unit()).ln() / rate_per_s;
            at_s
        })
        .collect()
}

fn message(role: &str, content: String) -> Value {
    json!({"role": role, "content": content})
}

fn planned(at_s: f64, messages: &[Value], output_tokens: usize) -> PlannedRequest {
    let body = json!({
        "model": "sim",
        "messages": messages,
        "max_tokens": output_tokens,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    PlannedRequest {
        at_ms: (at_s * 1000.0) as u64,
        path: "/v1/chat/completions",
        body: Bytes::from(body.to_string()),
    }
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

    /// An index below `count`, index `i` in proportion to 1 ÷ (`i` + `offset`).
    pub fn skewed(&mut self, count: usize, offset: f64) -> usize {
        let harmonic: f64 = (0..count).map(|index| 1.0 / (index as f64 + offset)).sum();
        let mut left = self.unit() * harmonic;
        for index in 0..count {
            left -= 1.0 / (index as f64 + offset);
            if left < 0.0 {
                return index;
            }
        }
        count.saturating_sub(1)
    }

    /// Words without meaning, exactly so many bytes of ASCII.
    pub fn text(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 16);
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

    /// A number of the span.
    fn span(&mut self, span: Span) -> usize {
        span.least + self.below(span.most - span.least + 1)
    }

    /// A text of so many tokens that begins with `head`.
    fn tokens(&mut self, head: &str, span: Span) -> String {
        let bytes = self.span(span) * TOKEN_BYTES;
        let head = if head.is_empty() {
            String::new()
        } else {
            format!("{head} ")
        };
        let rest = self.text(bytes.saturating_sub(head.len()));
        head + &rest
    }
}

/// How the hot prompt begins.
const HOT_HEAD: &str = "You are the assistant of one large product.";
/// An odd number that keeps the seeds of phases apart: from MurmurHash3's finalizer.
const PHASE_STEP: u64 = 0xff51_afd7_ed55_8ccd;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Endpoint, GenerationRequest};
    use crate::workload::DEMO;

    fn demo() -> Workload {
        Workload::parse(DEMO).unwrap()
    }

    fn phase(kind: fn(&Traffic) -> bool) -> (Workload, Vec<PlannedRequest>) {
        let workload = demo();
        let number = workload
            .phases
            .iter()
            .position(|phase| kind(&phase.traffic))
            .unwrap();
        let requests = workload.requests().swap_remove(number);
        (workload, requests)
    }

    fn prompts(requests: &[PlannedRequest]) -> Vec<String> {
        let parse =
            |request: &PlannedRequest| GenerationRequest::parse(Endpoint::Chat, &request.body).unwrap();
        requests.iter().map(|request| parse(request).prompt).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_requests_and_another_does_not() {
        let bodies = |seed| -> Vec<Bytes> {
            let phases = demo().with_seed(seed).requests();
            phases.into_iter().flatten().map(|request| request.body).collect()
        };
        assert_eq!(bodies(7), bodies(7));
        assert_ne!(bodies(7), bodies(8));
    }

    #[test]
    fn arrivals_grow_and_keep_the_rate() {
        for requests in demo().requests() {
            assert!(requests.windows(2).all(|pair| pair[0].at_ms <= pair[1].at_ms));
        }
        let (workload, requests) = phase(|traffic| matches!(traffic, Traffic::Documents(_)));
        let Some(Traffic::Documents(spec)) = workload.phases.get(1).map(|phase| &phase.traffic) else {
            panic!("documents are the second phase");
        };
        assert_eq!(requests.len(), spec.requests);
        let wanted_s = spec.requests as f64 / spec.rate_per_s;
        let took_s = requests[requests.len() - 1].at_ms as f64 / 1000.0;
        assert!((wanted_s * 0.8..wanted_s * 1.25).contains(&took_s), "{took_s}");
    }

    #[test]
    fn every_turn_of_a_chat_extends_the_one_before() {
        let (workload, requests) = phase(|traffic| matches!(traffic, Traffic::Chat(_)));
        let Some(Traffic::Chat(spec)) = workload.phases.first().map(|phase| &phase.traffic) else {
            panic!("chat is the first phase");
        };
        let prompts = prompts(&requests);
        let extending = prompts.iter().enumerate().filter(|(number, prompt)| {
            let mut earlier = prompts[..*number].iter();
            earlier.any(|earlier| prompt.len() > earlier.len() && prompt.starts_with(earlier.as_str()))
        });
        assert_eq!(extending.count(), requests.len() - spec.conversations);
    }

    #[test]
    fn documents_are_shared_and_do_not_fit_one_replica_but_the_fleet() {
        let (workload, requests) = phase(|traffic| matches!(traffic, Traffic::Documents(_)));
        let mut documents: Vec<(String, usize)> = Vec::new();
        for prompt in prompts(&requests) {
            let (_, rest) = prompt.split_once("Document ").unwrap();
            let number = rest.split('.').next().unwrap().to_owned();
            match documents.iter_mut().find(|(known, _)| *known == number) {
                Some((_, bytes)) => *bytes = prompt.len().max(*bytes),
                None => documents.push((number, prompt.len())),
            }
        }
        assert!((40..=48).contains(&documents.len()), "{}", documents.len());
        let tokens = documents
            .iter()
            .map(|(_, bytes)| bytes / TOKEN_BYTES)
            .sum::<usize>();
        let capacity = workload.engine().capacity_tokens();
        assert!(
            (capacity..capacity * 8 / 2).contains(&tokens),
            "{tokens} of {capacity}"
        );
    }

    #[test]
    fn seven_in_ten_share_the_hot_prompt() {
        let (_, requests) = phase(|traffic| matches!(traffic, Traffic::HotPrompt(_)));
        let prompts = prompts(&requests);
        let hot = prompts.iter().filter(|prompt| prompt.contains(HOT_HEAD)).count();
        assert_eq!(hot * 10, prompts.len() * 7);
    }

    #[test]
    fn texts_have_exactly_their_tokens() {
        let mut rng = Rng::new(1);
        for tokens in [0, 1, 7, 500] {
            let span = Span {
                least: tokens,
                most: tokens,
            };
            assert_eq!(rng.tokens("", span).len(), tokens * TOKEN_BYTES);
        }
        assert_eq!(rng.tokens("Head.", Span { least: 5, most: 5 }).len(), 20);
    }
}
