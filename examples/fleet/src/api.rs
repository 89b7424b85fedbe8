//! Requests of the APIs that vLLM serves → prompt text and options; engine events → answers in the same shape.
//!
//! Request bodies are untrusted: whatever they hold gives a value or an [`ApiError`].

use std::fmt;

use bytes::Bytes;
use serde_json::{Map, Value, json};

mod answer;

pub use answer::{AnswerWriter, Usage, count_tokens_body, render_body, tokenize_body};

/// Which endpoint was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`, Anthropic's API.
    Messages,
    /// `/v1/messages/count_tokens`.
    CountTokens,
    /// `/tokenize`, which takes the body of a chat or a completion.
    Tokenize,
    /// `/v1/chat/completions/render`.
    RenderChat,
    /// `/v1/completions/render`.
    RenderCompletions,
}

impl Endpoint {
    /// The endpoint that a path names, query and all.
    pub fn from_path(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            "/v1/responses" => Some(Self::Responses),
            "/v1/messages" => Some(Self::Messages),
            "/v1/messages/count_tokens" => Some(Self::CountTokens),
            "/tokenize" => Some(Self::Tokenize),
            "/v1/chat/completions/render" => Some(Self::RenderChat),
            "/v1/completions/render" => Some(Self::RenderCompletions),
            _ => None,
        }
    }
}

/// A request as far as the simulated engine cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GenerationRequest {
    /// Which endpoint's answer shape to use.
    pub endpoint: Endpoint,
    /// Model name as given, or empty.
    pub model: String,
    /// What the model would read: tools, then role and text of every message in order; for completions the prompt.
    pub prompt: String,
    /// Field `cache_salt`: requests with different salts share no cache.
    pub cache_salt: String,
    /// Output tokens wanted.
    pub max_tokens: usize,
    /// Whether to answer with server-sent events.
    pub stream: bool,
    /// Whether a stream of chunks ends with a usage event.
    pub include_usage: bool,
}

impl GenerationRequest {
    /// Reads a request body.
    ///
    /// # Errors
    /// Says what is wrong with a body that is no such request.
    pub fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Self, ApiError> {
        let body: Value = serde_json::from_slice(body).map_err(|_| ApiError::InvalidJson)?;
        let Value::Object(fields) = &body else {
            return Err(ApiError::NotAnObject);
        };
        let mut prompt = String::new();
        match endpoint {
            Endpoint::Tokenize if fields.contains_key("prompt") => read_completion(&mut prompt, fields)?,
            Endpoint::Chat | Endpoint::RenderChat | Endpoint::Tokenize => read_chat(&mut prompt, fields)?,
            Endpoint::Completions | Endpoint::RenderCompletions => read_completion(&mut prompt, fields)?,
            Endpoint::Responses => read_responses(&mut prompt, fields)?,
            Endpoint::Messages | Endpoint::CountTokens => {
                if let Some(system) = fields.get("system") {
                    push_turn(&mut prompt, "system", Some(system));
                }
                read_chat(&mut prompt, fields)?;
            }
        }
        let flag = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
        let text = |key| {
            fields
                .get(key)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let cache_salt = text("cache_salt");
        if cache_salt.is_empty() && fields.get("cache_salt").is_some_and(|salt| !salt.is_null()) {
            return Err(ApiError::EmptySalt);
        }
        let max_tokens = ["max_completion_tokens", "max_tokens", "max_output_tokens"]
            .iter()
            .find_map(|key| fields.get(*key)?.as_u64());
        Ok(Self {
            endpoint,
            model: text("model"),
            prompt,
            cache_salt,
            max_tokens: max_tokens.map_or(DEFAULT_MAX_TOKENS, |tokens| tokens.clamp(1, MAX_TOKENS) as usize),
            stream: flag(fields.get("stream")),
            include_usage: flag(
                fields
                    .get("stream_options")
                    .and_then(|options| options.get("include_usage")),
            ),
        })
    }
}

/// Why a body is not such a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApiError {
    /// The body is not JSON.
    InvalidJson,
    /// The body is JSON, but no object.
    NotAnObject,
    /// The named field is missing or of a wrong type.
    MissingPrompt(&'static str),
    /// `cache_salt` is there, but no text or an empty one.
    EmptySalt,
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidJson => f.write_str("the body is not valid JSON"),
            Self::NotAnObject => f.write_str("the body is not a JSON object"),
            Self::MissingPrompt(field) => write!(f, "field `{field}` is missing or of a wrong type"),
            Self::EmptySalt => f.write_str("field `cache_salt` must be a text that is not empty"),
        }
    }
}

impl std::error::Error for ApiError {}

/// An error answer in OpenAI's shape.
pub fn error_body(status: u16, kind: &str, message: &str) -> Bytes {
    Bytes::from(
        json!({"error": {"message": message, "type": kind, "param": null, "code": status}}).to_string(),
    )
}

fn read_chat(prompt: &mut String, fields: &Map<String, Value>) -> Result<(), ApiError> {
    push_tools(prompt, fields);
    let messages = fields.get("messages").and_then(Value::as_array);
    for message in messages.ok_or(ApiError::MissingPrompt("messages"))? {
        push_message(prompt, message);
    }
    Ok(())
}

fn read_completion(prompt: &mut String, fields: &Map<String, Value>) -> Result<(), ApiError> {
    push_prompt(
        prompt,
        fields.get("prompt").ok_or(ApiError::MissingPrompt("prompt"))?,
    );
    Ok(())
}

fn read_responses(prompt: &mut String, fields: &Map<String, Value>) -> Result<(), ApiError> {
    push_tools(prompt, fields);
    if let Some(instructions) = fields.get("instructions").filter(|value| value.is_string()) {
        push_turn(prompt, "system", Some(instructions));
    }
    match fields.get("input") {
        Some(text @ Value::String(_)) => push_turn(prompt, "user", Some(text)),
        Some(Value::Array(items)) => items.iter().for_each(|item| push_message(prompt, item)),
        _ => return Err(ApiError::MissingPrompt("input")),
    }
    Ok(())
}

fn push_tools(prompt: &mut String, fields: &Map<String, Value>) {
    if let Some(tools) = fields.get("tools").and_then(Value::as_array)
        && !tools.is_empty()
    {
        push_turn(
            prompt,
            "tools",
            Some(&Value::String(Value::from(tools.clone()).to_string())),
        );
    }
}

/// A chat message, or an item of a Responses input.
fn push_message(prompt: &mut String, message: &Value) {
    let role = message.get("role").and_then(Value::as_str);
    match message.get("type").and_then(Value::as_str) {
        Some("function_call") => push_turn(prompt, "assistant", message.get("arguments")),
        Some("function_call_output") => push_turn(prompt, "tool", message.get("output")),
        _ => push_turn(prompt, role.unwrap_or("user"), message.get("content")),
    }
}

fn push_turn(prompt: &mut String, role: &str, content: Option<&Value>) {
    prompt.push_str("<|");
    prompt.push_str(role);
    prompt.push_str("|>\n");
    push_content(prompt, content);
    prompt.push('\n');
}

/// A text, or the texts of parts and of what parts contain.
fn push_content(prompt: &mut String, content: Option<&Value>) {
    match content {
        Some(Value::String(text)) => prompt.push_str(text),
        Some(Value::Array(parts)) => {
            for part in parts {
                match part.get("text") {
                    Some(Value::String(text)) => prompt.push_str(text),
                    _ => push_content(prompt, part.get("content")),
                }
            }
        }
        _ => {}
    }
}

fn push_prompt(prompt: &mut String, value: &Value) {
    match value {
        Value::String(text) => prompt.push_str(text),
        Value::Number(token) => {
            // A token id stands for one token, whatever its digits.
            let token = token.as_u64().unwrap_or_default();
            prompt.extend((0..4).map(|byte| char::from(b'@' + ((token >> (5 * byte)) & 31) as u8)));
        }
        Value::Array(items) => items.iter().for_each(|item| push_prompt(prompt, item)),
        _ => {}
    }
}

/// Output tokens when a request does not say.
const DEFAULT_MAX_TOKENS: usize = 16;
/// Most output tokens: a simulated answer longer than this helps nobody.
const MAX_TOKENS: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt_of(endpoint: Endpoint, body: Value) -> String {
        GenerationRequest::parse(endpoint, body.to_string().as_bytes())
            .unwrap()
            .prompt
    }

    #[test]
    fn chat_prompt_is_role_and_text_in_order() {
        let body = br#"{"model":"m","messages":[{"role":"system","content":"S"},
            {"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"},{"type":"text","text":"b"}]}],
            "stream":true,"stream_options":{"include_usage":true},"max_tokens":7}"#;
        let request = GenerationRequest::parse(Endpoint::Chat, body).unwrap();
        assert_eq!(request.prompt, "<|system|>\nS\n<|user|>\nab\n");
        assert_eq!((request.model.as_str(), request.max_tokens), ("m", 7));
        assert!(request.stream && request.include_usage);
    }

    #[test]
    fn every_api_renders_one_conversation_alike() {
        let turns = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]);
        let chat = prompt_of(
            Endpoint::Chat,
            json!({"messages": [{"role": "system", "content": "S"}, turns[0], turns[1]]}),
        );
        let messages = json!({"system": [{"type": "text", "text": "S"}], "messages": turns, "max_tokens": 3});
        assert_eq!(prompt_of(Endpoint::Messages, messages.clone()), chat);
        assert_eq!(prompt_of(Endpoint::CountTokens, messages), chat);
        let input = json!([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, turns[1]]);
        assert_eq!(
            prompt_of(Endpoint::Responses, json!({"instructions": "S", "input": input})),
            chat
        );
        assert_eq!(
            prompt_of(Endpoint::Responses, json!({"input": "hi"})),
            prompt_of(Endpoint::RenderChat, json!({"messages": [turns[0]]}))
        );
        assert_eq!(
            prompt_of(Endpoint::Tokenize, json!({"prompt": "raw"})),
            prompt_of(Endpoint::Completions, json!({"prompt": "raw"}))
        );
    }

    #[test]
    fn tools_and_their_results_are_part_of_the_prompt() {
        let body = json!({"tools": [{"name": "t"}], "messages": [
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "42"}]}]}]});
        assert_eq!(
            prompt_of(Endpoint::Messages, body),
            "<|tools|>\n[{\"name\":\"t\"}]\n<|user|>\n42\n"
        );
        let input = json!([{"type": "function_call_output", "call_id": "1", "output": "42"}]);
        assert_eq!(
            prompt_of(Endpoint::Responses, json!({"input": input})),
            "<|tool|>\n42\n"
        );
    }

    #[test]
    fn token_ids_count_one_token_each() {
        let body = br#"{"prompt":[1,2,70000]}"#;
        let request = GenerationRequest::parse(Endpoint::Completions, body).unwrap();
        assert_eq!(request.prompt.len(), 12);
        let other = GenerationRequest::parse(Endpoint::Completions, br#"{"prompt":[1,3,70000]}"#).unwrap();
        assert_ne!(request.prompt, other.prompt);
    }

    #[test]
    fn bad_bodies_say_what_is_wrong() {
        let parse = |body: &[u8]| GenerationRequest::parse(Endpoint::Chat, body).unwrap_err();
        assert_eq!(parse(b"\x1f\x8b"), ApiError::InvalidJson);
        assert_eq!(parse(b"[]"), ApiError::NotAnObject);
        assert_eq!(parse(br#"{"messages":3}"#), ApiError::MissingPrompt("messages"));
        assert_eq!(parse(br#"{"messages":[],"cache_salt":""}"#), ApiError::EmptySalt);
        let parse = |endpoint| GenerationRequest::parse(endpoint, b"{}").unwrap_err();
        assert_eq!(parse(Endpoint::Responses), ApiError::MissingPrompt("input"));
        assert_eq!(parse(Endpoint::Messages), ApiError::MissingPrompt("messages"));
        assert_eq!(
            parse(Endpoint::RenderCompletions),
            ApiError::MissingPrompt("prompt")
        );
    }
}
