//! OpenAI-shaped requests → prompt text and options; engine events → OpenAI-shaped answers.
//!
//! Request bodies are untrusted: whatever they hold gives a value or an [`ApiError`].

use bytes::Bytes;
use serde_json::{Value, json};
use std::fmt;

/// Which generation endpoint was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl Endpoint {
    /// The endpoint that a path names, query and all.
    pub fn from_path(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            _ => None,
        }
    }
}

/// A generation request as far as the simulated engine cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GenerationRequest {
    /// Which endpoint's answer shape to use.
    pub endpoint: Endpoint,
    /// Model name as given, or empty.
    pub model: String,
    /// What the model would read: for chat, role and text of every message in order.
    pub prompt: String,
    /// Output tokens wanted.
    pub max_tokens: usize,
    /// Whether to answer with server-sent events.
    pub stream: bool,
    /// Whether a stream ends with a usage event.
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
            Endpoint::Chat => {
                let messages = fields.get("messages").and_then(Value::as_array);
                for message in messages.ok_or(ApiError::MissingPrompt("messages"))? {
                    push_message(&mut prompt, message);
                }
            }
            Endpoint::Completions => {
                push_prompt(
                    &mut prompt,
                    fields.get("prompt").ok_or(ApiError::MissingPrompt("prompt"))?,
                );
            }
        }
        let flag = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
        let max_tokens = ["max_completion_tokens", "max_tokens"]
            .iter()
            .find_map(|key| fields.get(*key)?.as_u64());
        Ok(Self {
            endpoint,
            model: fields
                .get("model")
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned(),
            prompt,
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

/// Why a body is not a generation request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApiError {
    /// The body is not JSON.
    InvalidJson,
    /// The body is JSON, but no object.
    NotAnObject,
    /// The named field is missing or of a wrong type.
    MissingPrompt(&'static str),
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidJson => f.write_str("the body is not valid JSON"),
            Self::NotAnObject => f.write_str("the body is not a JSON object"),
            Self::MissingPrompt(field) => write!(f, "field `{field}` is missing or of a wrong type"),
        }
    }
}

impl std::error::Error for ApiError {}

/// Token counts of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that the prefix cache held.
    pub cached_tokens: usize,
    /// Output tokens.
    pub completion_tokens: usize,
}

impl Usage {
    fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "created_cache_tokens": self.prompt_tokens - self.cached_tokens,
            },
        })
    }
}

/// Writes the answer to one request.
#[derive(Debug, Clone)]
pub struct AnswerWriter {
    endpoint: Endpoint,
    id: String,
    model: String,
    created_s: u64,
}

impl AnswerWriter {
    /// A writer for the answer with that id.
    pub fn new(request: &GenerationRequest, id: String, created_s: u64) -> Self {
        Self {
            endpoint: request.endpoint,
            id,
            model: request.model.clone(),
            created_s,
        }
    }

    /// One server-sent event that carries a token; `last` says why the answer ends there.
    pub fn token_event(&self, first: bool, last: bool) -> Bytes {
        let finish_reason = if last { json!("length") } else { Value::Null };
        let choice = match self.endpoint {
            Endpoint::Chat => {
                let mut delta = json!({"content": TOKEN_TEXT});
                if first {
                    delta["role"] = json!("assistant");
                }
                json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason})
            }
            Endpoint::Completions => {
                json!({"index": 0, "text": TOKEN_TEXT, "logprobs": null, "finish_reason": finish_reason})
            }
        };
        self.event(&self.envelope("chat.completion.chunk", json!([choice]), None))
    }

    /// The server-sent event with the token counts.
    pub fn usage_event(&self, usage: Usage) -> Bytes {
        self.event(&self.envelope("chat.completion.chunk", json!([]), Some(usage)))
    }

    /// What ends a stream.
    pub fn done_event(&self) -> Bytes {
        Bytes::from_static(b"data: [DONE]\n\n")
    }

    /// The whole answer when it is not streamed.
    pub fn whole(&self, usage: Usage) -> Bytes {
        let text = TOKEN_TEXT.repeat(usage.completion_tokens);
        let choice = match self.endpoint {
            Endpoint::Chat => json!({
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": null,
                "finish_reason": "length",
            }),
            Endpoint::Completions => {
                json!({"index": 0, "text": text, "logprobs": null, "finish_reason": "length"})
            }
        };
        Bytes::from(
            self.envelope("chat.completion", json!([choice]), Some(usage))
                .to_string(),
        )
    }

    fn envelope(&self, chat_object: &str, choices: Value, usage: Option<Usage>) -> Value {
        let object = match self.endpoint {
            Endpoint::Chat => chat_object,
            Endpoint::Completions => "text_completion",
        };
        let mut envelope = json!({
            "id": self.id,
            "object": object,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        });
        if let Some(usage) = usage {
            envelope["usage"] = usage.to_json();
        }
        envelope
    }

    fn event(&self, value: &Value) -> Bytes {
        Bytes::from(format!("data: {value}\n\n"))
    }
}

/// An error answer in OpenAI's shape.
pub fn error_body(status: u16, kind: &str, message: &str) -> Bytes {
    Bytes::from(
        json!({"error": {"message": message, "type": kind, "param": null, "code": status}}).to_string(),
    )
}

fn push_message(prompt: &mut String, message: &Value) {
    prompt.push_str("<|");
    prompt.push_str(message.get("role").and_then(Value::as_str).unwrap_or("user"));
    prompt.push_str("|>\n");
    match message.get("content") {
        Some(Value::String(text)) => prompt.push_str(text),
        Some(Value::Array(parts)) => {
            for text in parts
                .iter()
                .filter_map(|part| part.get("text").and_then(Value::as_str))
            {
                prompt.push_str(text);
            }
        }
        _ => {}
    }
    prompt.push('\n');
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
/// Text of every output token.
const TOKEN_TEXT: &str = "tok ";

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
