//! The head of a cut prompt → the namespace that its late fields would have given.
//!
//! Clients send `model`, `tools` and `system` after the messages, where a body cut at the buffer limit never shows them.
//! In: prompts, whole and cut. Out: for a cut one the last complete namespace that was seen with the same head of
//! messages, deepest head first, so that a conversation which grows past the limit keeps its keys. Memory is bounded by a
//! number of entries. It must never hand a namespace to another tenant, or to a prompt whose model is known to differ.

use std::hash::{BuildHasher, Hasher};

use hashbrown::HashMap;

use crate::chunk::mix;
use crate::prompt::{Namespace, Prompt};

/// Remembers which namespace belongs to which head of messages.
///
/// Two generations of entries: when the young one holds half of the bound, it becomes the old one and the old one is
/// dropped. An entry that is used moves to the young one, so what is in use stays.
#[derive(Debug)]
pub struct LateFields {
    young: HashMap<u64, Namespace, KeyIsHash>,
    old: HashMap<u64, Namespace, KeyIsHash>,
    max_entries: usize,
}

impl LateFields {
    /// An empty memory of at most `max_entries` heads; a prompt takes up to 8 of them.
    pub fn new(max_entries: u32) -> Self {
        Self {
            young: HashMap::with_hasher(KeyIsHash),
            old: HashMap::with_hasher(KeyIsHash),
            max_entries: usize::try_from(max_entries).unwrap_or(usize::MAX),
        }
    }

    /// An empty memory of at most so many bytes.
    pub fn of_bytes(memory_bytes: u32) -> Self {
        Self::new(memory_bytes / ENTRY_BYTES)
    }

    /// The namespace to use for a prompt.
    ///
    /// A complete one is remembered and returned. For a cut prompt it is the one remembered, else what was seen of its own
    /// where that includes the model, else none: then the prompt must not be routed by its text.
    pub fn settle(&mut self, prompt: &Prompt) -> Option<Namespace> {
        if prompt.namespace.complete {
            self.remember(prompt);
            return Some(prompt.namespace);
        }
        self.recall(prompt)
            .or_else(|| prompt.namespace.model_seen.then_some(prompt.namespace))
    }

    /// Remembers the namespace of a whole prompt; of a cut one nothing.
    pub fn remember(&mut self, prompt: &Prompt) {
        if prompt.namespace.complete {
            self.store(prompt, prompt.namespace);
        }
    }

    /// The namespace remembered for the deepest head of a cut prompt; its shallower and deeper heads are refreshed.
    pub fn recall(&mut self, prompt: &Prompt) -> Option<Namespace> {
        let outer = prompt.namespace.identity.outer;
        let found = heads(prompt).rev().find_map(|head| {
            let key = mix(outer, head);
            let known = self.young.get(&key).or_else(|| self.old.get(&key)).copied();
            known.filter(|known| prompt.namespace.identity.agrees_with(&known.identity))
        })?;
        self.store(prompt, found);
        Some(found)
    }

    /// Heads held.
    pub fn entry_count(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Bytes of memory held: none until the first prompt, and never more than the bound.
    pub fn memory_bytes(&self) -> usize {
        self.young.allocation_size() + self.old.allocation_size()
    }

    fn store(&mut self, prompt: &Prompt, namespace: Namespace) {
        for head in heads(prompt) {
            let key = mix(namespace.identity.outer, head);
            if !self.young.contains_key(&key) && self.young.len() >= self.max_entries / 2 {
                self.old = std::mem::take(&mut self.young);
            }
            if self.max_entries >= 2 {
                self.old.remove(&key);
                self.young.insert(key, namespace);
            }
        }
    }
}

/// Chain hashes at the first point and at the first point from each of the fixed depths, shallow to deep.
///
/// A prompt that is continued keeps its points, so it keeps its heads too.
fn heads(prompt: &Prompt) -> impl DoubleEndedIterator<Item = u64> {
    let mut last = None;
    HEAD_DEPTHS_BYTES
        .map(|depth_bytes| {
            let index = prompt
                .chain
                .partition_point(|point| point.end_bytes < depth_bytes);
            if last == Some(index) {
                return None;
            }
            last = Some(index);
            prompt.chain.get(index).map(|point| point.hash.0)
        })
        .into_iter()
        .flatten()
}

/// A head with its namespace takes 97 bytes, in a table of which seven eighths are used at most and seven sixteenths at
/// least.
const ENTRY_BYTES: u32 = 256;

/// Four times deeper each: a conversation soon has a head that no other shares.
const HEAD_DEPTHS_BYTES: [u32; 8] = [0, 256, 1024, 4096, 16_384, 65_536, 262_144, 458_752];

/// A hasher for keys that are hashes already.
#[derive(Debug, Clone, Copy, Default)]
struct KeyIsHash;

impl BuildHasher for KeyIsHash {
    type Hasher = KeyHasher;
    fn build_hasher(&self) -> KeyHasher {
        KeyHasher(0)
    }
}

struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::{Api, BodyEnd, PromptInput, PromptOptions, extract};

    const LIMIT_BYTES: usize = 768 * 1024;

    #[derive(Clone, Copy, PartialEq)]
    enum Order {
        ModelFirst,
        MessagesFirst,
    }

    fn conversation(len: usize, salt: &str) -> String {
        let mut messages = String::new();
        let mut turn = 0;
        while messages.len() < len {
            let role = if turn % 2 == 0 { "user" } else { "assistant" };
            let text = format!("turn {turn} {salt} ").repeat(300);
            messages += &format!(
                "{}{{\"role\":\"{role}\",\"content\":\"{text}\"}}",
                if turn > 0 { "," } else { "" }
            );
            turn += 1;
        }
        messages
    }

    fn body(api: Api, order: Order, messages: &str, model: &str) -> String {
        let tools = r#""tools":[{"name":"look","input_schema":{"type":"object"}}]"#;
        let system = match api {
            Api::AnthropicMessages => r#","system":"You are patient.""#,
            _ => "",
        };
        match order {
            Order::ModelFirst => {
                format!("{{\"model\":\"{model}\",\"messages\":[{messages}],{tools}{system},\"stream\":true}}")
            }
            Order::MessagesFirst => {
                format!(
                    "{{\"messages\":[{messages}],\"max_tokens\":9,\"model\":\"{model}\",{tools}{system}}}"
                )
            }
        }
    }

    fn prompt(api: Api, body: &str, tenant: &str) -> Prompt {
        let held = &body.as_bytes()[..body.len().min(LIMIT_BYTES)];
        let end = if held.len() < body.len() {
            BodyEnd::Limit
        } else {
            BodyEnd::EndOfStream
        };
        let input = PromptInput {
            api,
            path: "/",
            body: held,
            end,
            tenant: Some(tenant.as_bytes()),
            session_header: None,
        };
        extract(&input, &PromptOptions::default()).prompt.unwrap()
    }

    #[test]
    fn a_conversation_that_grows_past_the_limit_keeps_its_keys() {
        for api in [Api::OpenAiChat, Api::AnthropicMessages] {
            for order in [Order::ModelFirst, Order::MessagesFirst] {
                let mut late = LateFields::new(1024);
                let mut before: Option<Vec<_>> = None;
                let full = conversation(900 * 1024, "a");
                let ends: Vec<usize> = full.match_indices("},{").map(|(at, _)| at + 1).collect();
                for kib in (200..900).step_by(50) {
                    let end = ends[ends.partition_point(|end| *end < kib * 1024)];
                    let whole = body(api, order, full.get(..end).unwrap(), "demo");
                    let prompt = prompt(api, &whole, "");
                    assert_eq!(prompt.namespace.complete, whole.len() <= LIMIT_BYTES);
                    let namespace = late.settle(&prompt).expect("a namespace");
                    let keys = prompt.keys(&namespace).keys;
                    if let Some(before) = &before {
                        assert_eq!(keys[..before.len()], before[..], "{api:?} at {kib} KiB");
                    }
                    before = Some(keys);
                }
            }
        }
    }

    #[test]
    fn without_memory_only_a_known_model_gives_a_key() {
        let messages = conversation(900 * 1024, "a");
        for (order, has_key) in [(Order::ModelFirst, true), (Order::MessagesFirst, false)] {
            let cut = prompt(
                Api::OpenAiChat,
                &body(Api::OpenAiChat, order, &messages, "demo"),
                "",
            );
            assert_eq!(LateFields::new(1024).settle(&cut).is_some(), has_key);
        }
    }

    #[test]
    fn another_tenant_or_model_recalls_nothing() {
        let messages = conversation(900 * 1024, "a");
        let ends: Vec<usize> = messages.match_indices("},{").map(|(at, _)| at + 1).collect();
        let short = messages.get(..ends[ends.len() / 4]).unwrap();
        let mut late = LateFields::new(1024);
        let whole = prompt(
            Api::OpenAiChat,
            &body(Api::OpenAiChat, Order::ModelFirst, short, "demo"),
            "one",
        );
        assert!(whole.namespace.complete);
        late.remember(&whole);
        for (order, model, tenant, is_found) in [
            (Order::ModelFirst, "demo", "one", true),
            (Order::ModelFirst, "other", "one", false),
            (Order::MessagesFirst, "other", "one", true),
            (Order::ModelFirst, "demo", "two", false),
        ] {
            let cut = prompt(
                Api::OpenAiChat,
                &body(Api::OpenAiChat, order, &messages, model),
                tenant,
            );
            assert_eq!(late.recall(&cut).is_some(), is_found, "{model} {tenant}");
        }
    }

    #[test]
    fn entries_are_bounded_and_used_ones_stay() {
        let mut late = LateFields::new(64);
        let kept_messages = conversation(900 * 1024, "kept");
        let end = kept_messages.find("},{").unwrap() + 1;
        let whole = body(
            Api::OpenAiChat,
            Order::MessagesFirst,
            kept_messages.get(..end).unwrap(),
            "demo",
        );
        late.remember(&prompt(Api::OpenAiChat, &whole, ""));
        let cut = prompt(
            Api::OpenAiChat,
            &body(Api::OpenAiChat, Order::MessagesFirst, &kept_messages, "demo"),
            "",
        );
        for i in 0..200 {
            let other = conversation(1000, &format!("other {i}"));
            late.remember(&prompt(
                Api::OpenAiChat,
                &body(Api::OpenAiChat, Order::ModelFirst, &other, "demo"),
                "",
            ));
            assert!(late.entry_count() <= 64);
            assert!(late.recall(&cut).is_some(), "after {i}");
        }
    }

    #[test]
    fn a_bound_of_zero_keeps_nothing() {
        let mut late = LateFields::new(0);
        let whole = prompt(
            Api::OpenAiChat,
            &body(Api::OpenAiChat, Order::ModelFirst, &conversation(9, ""), "m"),
            "",
        );
        late.remember(&whole);
        assert_eq!(late.entry_count(), 0);
    }
}
