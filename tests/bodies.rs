//! The 125 request bodies of `tests/bodies/` against what their index says of them.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

#[path = "support/generated.rs"]
mod generated;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use warmroute::chunk::{ChainPoint, name_hash};
use warmroute::prompt::{
    Api, BodyEnd, Extraction, Field, PromptInput, PromptOptions, Segment, SegmentRecorder, SegmentValue,
    body_is_readable, extract, record,
};

const ROUTABLE: &str = "routable-by-prefix";
const FALLBACK: &str = "fallback-to-load-balancing";
const PASS_THROUGH: &str = "pass-through";
/// Longest text that the index keeps literally.
const INLINE_BYTES: usize = 160;

struct Entry {
    id: String,
    facts: Value,
    body: Vec<u8>,
}

impl Entry {
    fn text(&self, key: &str) -> Option<&str> {
        self.facts[key].as_str()
    }

    fn path(&self) -> &str {
        self.text("path").unwrap()
    }

    fn api(&self) -> Option<Api> {
        (self.text("method") == Some("POST"))
            .then(|| Api::from_path(self.path()))
            .flatten()
    }

    fn input<'a>(&'a self, body: &'a [u8], end: BodyEnd) -> Option<PromptInput<'a>> {
        let api = self.api()?;
        body_is_readable(self.text("content_type"), self.text("content_encoding")).then_some(PromptInput {
            api,
            path: self.path(),
            body,
            end,
            tenant: None,
            session_header: None,
        })
    }

    fn extract(&self) -> Option<Extraction> {
        let input = self.input(&self.body, BodyEnd::EndOfStream)?;
        Some(extract(&input, &PromptOptions::default()))
    }

    fn record(&self) -> SegmentRecorder {
        let input = self.input(&self.body, BodyEnd::EndOfStream).unwrap();
        record(&input, &PromptOptions::default()).unwrap_or_else(|reason| panic!("{}: {reason}", self.id))
    }

    fn outcome(&self) -> &'static str {
        if self.api().is_none() {
            return PASS_THROUGH;
        }
        match self.extract() {
            Some(Extraction { prompt: Ok(_), .. }) => ROUTABLE,
            _ => FALLBACK,
        }
    }

    fn chain(&self) -> Vec<ChainPoint> {
        self.extract()
            .and_then(|extraction| extraction.prompt.ok())
            .map(|prompt| prompt.chain)
            .unwrap_or_default()
    }

    fn keys(&self) -> Vec<u64> {
        let extraction = self
            .extract()
            .unwrap_or_else(|| panic!("{}: not readable", self.id));
        let prompt = extraction
            .prompt
            .unwrap_or_else(|reason| panic!("{}: {reason}", self.id));
        prompt
            .keys(&prompt.namespace)
            .keys
            .iter()
            .map(|key| key.hash.0)
            .collect()
    }
}

fn entries() -> Vec<Entry> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/bodies");
    let index: Value = serde_json::from_slice(&std::fs::read(dir.join("index.json")).unwrap()).unwrap();
    let entries = index["entries"].as_array().unwrap().iter();
    let entries: Vec<Entry> = entries
        .map(|facts| {
            let body = match facts["file"].as_str() {
                Some(file) => std::fs::read(dir.join(file)).unwrap(),
                None => generated::generated(&facts["generated"]),
            };
            Entry {
                id: facts["id"].as_str().unwrap().to_owned(),
                facts: facts.clone(),
                body,
            }
        })
        .collect();
    assert_eq!(entries.len(), 125);
    assert_eq!(
        entries
            .iter()
            .filter(|entry| entry.facts["file"].is_string())
            .count(),
        113
    );
    entries
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn short(text: &str) -> Value {
    if text.len() <= INLINE_BYTES {
        json!(text)
    } else {
        json!({"text_sha256": sha256(text.as_bytes()), "bytes": text.len()})
    }
}

/// A recorded prompt in the form of the index: tools, system, messages.
fn segments(recorder: &SegmentRecorder, body: &Value) -> Value {
    let mut out = Vec::new();
    if let Some(tools) = recorder
        .field(Field::Tools)
        .or_else(|| recorder.field(Field::Functions))
    {
        let items: Vec<Value> = serde_json::from_str(tools).unwrap();
        let declared = items
            .iter()
            .flat_map(|tool| tool["functionDeclarations"].as_array().into_iter().flatten());
        let mut names: Vec<&Value> = declared.map(|tool| &tool["name"]).collect();
        if names.is_empty() {
            names = items.iter().filter_map(tool_name).collect();
        }
        out.push(json!(["tools", {"names": names, "sha256": sha256(tools.as_bytes())}]));
    }
    for segment in recorder.system.iter().chain(&recorder.messages) {
        if let SegmentValue::ToolCall { name, arguments } = &segment.value {
            let calls = out
                .last_mut()
                .filter(|last| last[0] == segment.role)
                .and_then(|last| last[1].get_mut("tool_calls"));
            match calls.and_then(Value::as_array_mut) {
                Some(calls) => calls.push(json!([name, arguments])),
                None => out.push(json!([segment.role, {"tool_calls": [[name, arguments]]}])),
            }
            continue;
        }
        if let Some(value) = segment_value(segment, body) {
            let is_tokens = matches!(segment.value, SegmentValue::Tokens(_));
            out.push(json!([if is_tokens { "tokens" } else { &segment.role }, value]));
        }
    }
    Value::Array(out)
}

fn tool_name(tool: &Value) -> Option<&Value> {
    [&tool["name"], &tool["function"]["name"], &tool["type"]]
        .into_iter()
        .find(|name| name.is_string())
}

fn segment_value(segment: &Segment, body: &Value) -> Option<Value> {
    Some(match &segment.value {
        SegmentValue::Text(text) => short(text),
        SegmentValue::Thinking(text) => json!({"thinking": text}),
        SegmentValue::Tokens(ids) if ids.len() <= 16 => json!(ids),
        SegmentValue::Tokens(ids) => {
            let text: Vec<String> = ids.iter().map(u32::to_string).collect();
            json!({"count": ids.len(), "sha256": sha256(text.join(",").as_bytes())})
        }
        SegmentValue::Media { kind, data } => {
            json!({"media": kind, "sha256": sha256(data.as_bytes()), "bytes": data.len()})
        }
        SegmentValue::FunctionResponse { name, response } => json!({"function_response": [name, response]}),
        // Not among the segments of the index.
        SegmentValue::Name(_) => return None,
        SegmentValue::ToolCall { .. } => panic!("tool calls are joined by the caller"),
        // The index has the digest in the order of the body, the recorder sorts keys: hold both against the body.
        SegmentValue::Other(text) => {
            let recorded: Value = serde_json::from_str(text).unwrap();
            let is_in_body = body["input"]
                .as_array()
                .is_some_and(|items| items.contains(&recorded));
            assert!(is_in_body, "not in the body: {text}");
            json!({"reasoning_sha256": Value::Null})
        }
    })
}

#[test]
fn bodies_are_the_ones_of_the_index() {
    for entry in entries() {
        assert_eq!(json!(entry.body.len()), entry.facts["bytes"], "{}", entry.id);
        assert_eq!(json!(sha256(&entry.body)), entry.facts["sha256"], "{}", entry.id);
    }
}

#[test]
fn every_outcome_is_one_of_the_sound_ones() {
    let mut recommended = 0;
    for entry in entries() {
        let outcome = json!(entry.outcome());
        let acceptable = entry.facts["acceptable"].as_array().unwrap();
        recommended += usize::from(outcome == entry.facts["outcome"]);
        assert!(
            outcome == entry.facts["outcome"] || acceptable.contains(&outcome),
            "{}: {outcome} {:?}",
            entry.id,
            entry.extract().map(|extraction| extraction.prompt.err())
        );
    }
    assert!(
        recommended >= 120,
        "only {recommended} outcomes are the recommended ones"
    );
}

#[test]
fn every_fact_is_read_as_the_index_states_it() {
    let mut checked = 0;
    for entry in entries() {
        let Some(extraction) = entry.extract() else {
            continue;
        };
        if extraction.prompt.is_err() {
            continue;
        }
        checked += 1;
        let id = &entry.id;
        let facts = &entry.facts;
        let model = match &extraction.model {
            Some(model) => short(model),
            None => Value::Null,
        };
        if facts["model"].is_object() {
            assert_eq!(
                (model, extraction.model_hash.is_some()),
                (Value::Null, true),
                "{id}: long model"
            );
        } else {
            assert_eq!(model, facts["model"], "{id}: model");
        }
        let adapter = facts["lora"].as_str().map(|name| name_hash(name.as_bytes()));
        assert_eq!(extraction.adapter, adapter, "{id}: adapter");
        assert_eq!(extraction.stream, facts["stream"] == json!(true), "{id}: stream");
        let recorder = entry.record();
        assert_eq!(
            recorder.message_count, recorder.whole_message_count,
            "{id}: message ends"
        );
        // The index counts an empty salt as none.
        let salt = recorder.field(Field::CacheSalt).filter(|salt| !salt.is_empty());
        assert_eq!(salt, facts["cache_salt"].as_str(), "{id}: salt");
        assert_eq!(
            recorder.field(Field::ExtraKey),
            facts["extra_key"].as_str(),
            "{id}: extra key"
        );
        if let Some(rule) = facts.get("segments_rule") {
            let want: Vec<Segment> = (0..rule["count"].as_u64().unwrap())
                .map(|i| Segment {
                    role: rule["role"].as_str().unwrap().to_owned(),
                    value: SegmentValue::Text(rule["text"].as_str().unwrap().replace("{i}", &i.to_string())),
                })
                .collect();
            assert_eq!(recorder.messages, want, "{id}: segments");
            continue;
        }
        let start = if entry.body.starts_with(b"\xEF\xBB\xBF") {
            3
        } else {
            0
        };
        let body: Value = serde_json::from_slice(&entry.body[start..]).unwrap_or_default();
        let mut want = facts["segments"].clone();
        for segment in want
            .as_array_mut()
            .unwrap_or_else(|| panic!("{id}: routable, yet no segments"))
        {
            if let Some(digest) = segment[1].get_mut("reasoning_sha256") {
                *digest = Value::Null;
            }
        }
        assert_eq!(segments(&recorder, &body), want, "{id}: segments");
    }
    assert!(checked >= 70, "only {checked} bodies gave a prompt");
}

#[test]
fn every_relation_holds_on_the_keys() {
    let entries = entries();
    let by_id: BTreeMap<&str, &Entry> = entries.iter().map(|entry| (entry.id.as_str(), entry)).collect();
    let mut counts = [0; 4];
    for entry in &entries {
        let id = &entry.id;
        // Where the router may fall back, the relation binds it only when it does route.
        let is_routed = |entry: &Entry| entry.outcome() == ROUTABLE;
        if !is_routed(entry) {
            continue;
        }
        if let Some(other) = entry.text("same_prefix_as") {
            counts[0] += 1;
            assert_eq!(entry.keys(), by_id[other].keys(), "{id} and {other}");
        }
        if let Some(other) = entry.text("extends") {
            counts[1] += 1;
            let (keys, shorter) = (entry.keys(), by_id[other].keys());
            assert!(
                keys.len() > shorter.len() && keys.starts_with(&shorter),
                "{id} extends {other}"
            );
        }
        if let Some(other) = entry.text("differs_from") {
            counts[2] += 1;
            let others = by_id[other].keys();
            let shared = entry.keys().iter().filter(|key| others.contains(key)).count();
            assert_eq!(shared, 0, "{id} differs from {other}");
        }
        if let Some(shared) = entry.facts.get("shares_first_segments") {
            counts[3] += 1;
            let other = by_id[shared["with"].as_str().unwrap()];
            let (keys, others) = (entry.keys(), other.keys());
            let common = keys.iter().zip(&others).take_while(|(a, b)| a == b).count();
            // Each segment of these bodies is a message of its own, shorter than a chunk.
            assert_eq!(json!(common), shared["count"], "{id} shares with {}", other.id);
        }
    }
    assert_eq!(counts, [18, 4, 5, 1], "relations tested");
}

#[test]
fn reassembled_bodies_give_the_same_result() {
    let mut random = Random::from_env();
    for entry in entries() {
        let Some(want) = entry.extract() else { continue };
        for split in ["1 byte", "7 bytes", "random"] {
            let mut held = Vec::new();
            let mut rest = entry.body.as_slice();
            while !rest.is_empty() {
                let len = match split {
                    "1 byte" => 1,
                    "7 bytes" => 7,
                    _ => 1 + random.below(5000),
                };
                let (piece, after) = rest.split_at(len.min(rest.len()));
                held.extend_from_slice(piece);
                rest = after;
            }
            let input = entry.input(&held, BodyEnd::EndOfStream).unwrap();
            assert_eq!(
                extract(&input, &PromptOptions::default()),
                want,
                "{}, {split}, {random:?}",
                entry.id
            );
        }
    }
}

#[test]
fn a_cut_body_gives_a_head_of_the_whole_chain() {
    let mut random = Random::from_env();
    for entry in entries() {
        if entry.input(&entry.body, BodyEnd::Limit).is_none() {
            continue;
        }
        let whole = entry.chain();
        let cuts: Vec<usize> = if entry.body.len() <= 2000 {
            (0..=entry.body.len()).collect()
        } else {
            (0..12).map(|_| random.below(entry.body.len())).collect()
        };
        for cut in cuts {
            let input = entry.input(&entry.body[..cut], BodyEnd::Limit).unwrap();
            let Ok(prompt) = extract(&input, &PromptOptions::default()).prompt else {
                continue;
            };
            if entry.outcome() == ROUTABLE {
                assert!(whole.starts_with(&prompt.chain), "{} cut at {cut}", entry.id);
                assert!(
                    !prompt.namespace.complete
                        || cut == entry.body.len()
                        || entry.body[cut..].trim_ascii().is_empty()
                );
            }
        }
    }
}

#[test]
fn one_long_string_may_be_cut_anywhere() {
    for unit in [
        r"\n",
        r"\u00e9",
        r"\ud83d\ude80",
        "\u{1f680}",
        r"\\",
        r#"\""#,
        "\u{65e5}",
    ] {
        let filler = "Rule: keep left. ".repeat(400_000 / 17);
        let head = format!("{{\"model\":\"m\",\"messages\":[{{\"role\":\"system\",\"content\":\"{filler}");
        let body = format!("{head}{unit}{filler}\"}}]}}").into_bytes();
        let chain = |held: &[u8], end| {
            let input = PromptInput {
                api: Api::OpenAiChat,
                path: "/v1/chat/completions",
                body: held,
                end,
                tenant: None,
                session_header: None,
            };
            extract(&input, &PromptOptions::default()).prompt.unwrap()
        };
        let whole = chain(&body, BodyEnd::EndOfStream);
        for cut in head.len() - 1..=head.len() + unit.len() + 1 {
            let prompt = chain(&body[..cut], BodyEnd::Limit);
            assert!(whole.chain.starts_with(&prompt.chain), "{unit} cut at {cut}");
            assert!(
                prompt.chain.last().unwrap().end_bytes > 390_000,
                "{unit} cut at {cut}"
            );
            let text_bytes = prompt.chain_bytes as usize - (filler.len() - 1);
            assert!(text_bytes <= unit.len() + 2, "{unit} cut at {cut}: {text_bytes}");
        }
    }
}

#[test]
fn other_spelling_of_the_same_body_keeps_the_keys() {
    let mut random = Random::from_env();
    let mut checked = 0;
    for entry in entries() {
        if entry.outcome() != ROUTABLE || entry.body.len() > 200_000 {
            continue;
        }
        let Ok(body) = serde_json::from_slice::<Value>(&entry.body) else {
            continue;
        };
        for _ in 0..20 {
            checked += 1;
            let mut text = String::new();
            respell(&body, "", true, &mut random, &mut text);
            let input = entry.input(text.as_bytes(), BodyEnd::EndOfStream).unwrap();
            let prompt = extract(&input, &PromptOptions::default())
                .prompt
                .unwrap_or_else(|reason| panic!("{}: {reason}: {text}, {random:?}", entry.id));
            // `Value` sorts keys, so bodies whose key order matters are compared with their sorted form.
            let mut sorted = String::new();
            respell(&body, "", false, &mut random, &mut sorted);
            let sorted = entry.input(sorted.as_bytes(), BodyEnd::EndOfStream).unwrap();
            let want = extract(&sorted, &PromptOptions::default()).prompt.unwrap();
            assert_eq!(prompt, want, "{}: {text}, {random:?}", entry.id);
        }
    }
    assert!(checked > 1000, "only {checked} spellings");
}

#[test]
fn damaged_bodies_neither_panic_nor_outgrow_their_head() {
    let mut random = Random::from_env();
    for entry in entries() {
        if entry.body.is_empty() || entry.body.len() > 3000 {
            continue;
        }
        for _ in 0..200 {
            let mut body = entry.body.clone();
            for _ in 0..=random.below(3) {
                let at = random.below(body.len());
                let other = random.below(entry.body.len());
                match random.below(4) {
                    0 => body[at] = u8::try_from(random.below(256)).unwrap(),
                    1 => body[at] = b"{}[]\",:\\0n"[random.below(10)],
                    2 => body.insert(at, entry.body[other]),
                    _ => drop(body.drain(at..body.len().min(at + 1 + random.below(40)))),
                }
                if body.is_empty() {
                    break;
                }
            }
            let cut = random.below(body.len() + 1);
            let Some(whole) = entry.input(&body, BodyEnd::EndOfStream) else {
                continue;
            };
            let whole = extract(&whole, &PromptOptions::default()).prompt;
            let held = entry.input(&body[..cut], BodyEnd::Limit).unwrap();
            let held = extract(&held, &PromptOptions::default()).prompt;
            if let (Ok(whole), Ok(held)) = (whole, held) {
                assert!(
                    whole.chain.starts_with(&held.chain),
                    "{}: cut at {cut}: {}, {random:?}",
                    entry.id,
                    String::from_utf8_lossy(&body)
                );
            }
        }
    }
}

/// Keys below which templates render an object as it stands, so that its order counts.
const ORDER_MATTERS: [&str; 10] = [
    "tools",
    "functions",
    "documents",
    "arguments",
    "input",
    "args",
    "response",
    "json_schema",
    "summary",
    "data",
];

/// Writes a value with other white space, escapes and, where it must not matter, key order.
fn respell(value: &Value, key: &str, shuffles: bool, random: &mut Random, out: &mut String) {
    let blank = |random: &mut Random, out: &mut String| {
        if shuffles {
            out.push_str(["", "", " ", "\n", "\t\r\n  "][random.below(5)]);
        }
    };
    let quote = |text: &str, random: &mut Random, out: &mut String| {
        out.push('"');
        for c in text.chars() {
            if matches!(c, '"' | '\\') || c < ' ' || (shuffles && random.below(6) == 0) {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&if random.below(2) == 0 {
                        format!("\\u{unit:04x}")
                    } else {
                        format!("\\u{unit:04X}")
                    });
                }
            } else if shuffles && c == '/' {
                out.push_str("\\/");
            } else {
                out.push(c);
            }
        }
        out.push('"');
    };
    blank(random, out);
    match value {
        Value::Object(map) => {
            let mut fields: Vec<(&String, &Value)> = map.iter().collect();
            if shuffles && !ORDER_MATTERS.contains(&key) {
                for at in (1..fields.len()).rev() {
                    fields.swap(at, random.below(at + 1));
                }
            }
            out.push('{');
            for (at, (name, value)) in fields.into_iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                blank(random, out);
                quote(name, random, out);
                blank(random, out);
                out.push(':');
                // Inside an object whose order matters, everything below matters too. `input` is also the list of items
                // of a response, which are messages.
                let below = if ORDER_MATTERS.contains(&key) && key != "input" {
                    key
                } else {
                    name
                };
                respell(value, below, shuffles, random, out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            let key = if key == "input" { "" } else { key };
            out.push('[');
            for (at, item) in items.iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                respell(item, key, shuffles, random, out);
            }
            out.push(']');
        }
        Value::String(text) => quote(text, random, out),
        Value::Null | Value::Bool(_) | Value::Number(_) => out.push_str(&value.to_string()),
    }
    blank(random, out);
}

/// Seeded numbers (SplitMix64); `WARMROUTE_TEST_SEED` replays a failure.
#[derive(Debug)]
struct Random {
    /// Printed by `Debug` when an assertion fails.
    #[expect(dead_code, reason = "read by Debug")]
    seed: u64,
    state: u64,
}

impl Random {
    fn from_env() -> Self {
        let seed = std::env::var("WARMROUTE_TEST_SEED")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(20_260_101);
        Self { seed, state: seed }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound as u64).unwrap()
    }
}
