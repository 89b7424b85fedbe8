//! Holds the crate against the golden vectors; the same on every target.

use serde_json::Value;
use warmroute::chunk::SCHEME_VERSION;
use warmroute::chunk::murmur::Murmur;
use warmroute::prompt::{Api, BodyEnd, PromptInput, PromptOptions, extract};

const VECTORS: &str = include_str!("v1.json");

/// Every raw digest.
pub(crate) fn murmur_vectors() {
    let vectors = parsed();
    let raw = list(&vectors["murmur3_x64_128_low64"]);
    assert!(raw.len() > 100);
    for vector in raw {
        let bytes: Vec<u8> = (0..number(&vector[0]))
            .map(|i| u8::try_from((i * 131 + 7) % 251).unwrap())
            .collect();
        let mut murmur = Murmur::new(u32::try_from(number(&vector[1])).unwrap());
        murmur.update(&bytes);
        assert_eq!(format!("{:016x}", murmur.low64()), vector[2], "{vector}");
    }
}

/// Every prompt: namespace, chain and keys.
pub(crate) fn prompt_vectors() {
    let vectors = parsed();
    assert_eq!(number(&vectors["version"]), u64::from(SCHEME_VERSION));
    let prompts = list(&vectors["prompts"]);
    assert!(prompts.len() > 10);
    for vector in prompts {
        let name = &vector["name"];
        let api = match vector["api"].as_str().unwrap() {
            "openai_chat" => Api::OpenAiChat,
            "openai_completions" => Api::OpenAiCompletions,
            "anthropic_messages" => Api::AnthropicMessages,
            other => panic!("{name}: api {other}"),
        };
        let tenant = vector["tenant"].as_str().filter(|tenant| !tenant.is_empty());
        let options = PromptOptions {
            max_prefix_bytes: u32::try_from(number(&vector["max_prefix_bytes"])).unwrap(),
            secret: vector["secret"].as_str().unwrap().as_bytes().to_vec(),
            ..PromptOptions::default()
        };
        let input = PromptInput {
            api,
            path: "/",
            body: vector["body"].as_str().unwrap().as_bytes(),
            end: BodyEnd::EndOfStream,
            tenant: tenant.map(str::as_bytes),
            session_header: None,
        };
        let prompt = extract(&input, &options)
            .prompt
            .unwrap_or_else(|reason| panic!("{name}: {reason}"));
        assert_eq!(
            format!("{:016x}", prompt.namespace.hash),
            vector["namespace"],
            "{name}: namespace"
        );
        let chain = prompt.chain.iter().map(|point| (point.hash.0, point.end_bytes));
        assert_eq!(spelled(chain), vector["chain"], "{name}: chain");
        let keys = prompt.keys(&prompt.namespace);
        assert_eq!(
            u64::from(keys.prompt_bytes),
            number(&vector["prompt_bytes"]),
            "{name}: prompt bytes"
        );
        let keys = keys.keys.iter().map(|key| (key.hash.0, key.end_bytes));
        assert_eq!(spelled(keys), vector["keys"], "{name}: keys");
    }
}

fn spelled(points: impl Iterator<Item = (u64, u32)>) -> Value {
    points
        .map(|(hash, end_bytes)| serde_json::json!([format!("{hash:016x}"), end_bytes]))
        .collect()
}

fn parsed() -> Value {
    serde_json::from_str(VECTORS).unwrap()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}
