//! Token counts and tokens → answer bodies and server-sent events; fields that anything could read are as in answers
//! captured from vLLM 0.32.
//!
//! Every output token is the same word: what is said is never of interest here.

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Endpoint, GenerationRequest};
use crate::engine::TOKEN_BYTES;

/// Token counts of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that the prefix cache held.
    pub cached_tokens: usize,
    /// Prompt tokens that the prefix cache took in: the rest of the full blocks.
    pub created_cache_tokens: usize,
    /// Output tokens.
    pub completion_tokens: usize,
}

impl Usage {
    /// As in chat (`UsageInfo` in `vllm/entrypoints/serve/engine/protocol.py`).
    fn to_chat(self) -> Value {
        let mut usage = self.to_completions();
        usage["prompt_tokens_details"]["created_cache_tokens"] = json!(self.created_cache_tokens);
        usage
    }

    /// As in completions, which do not tell what the cache took in.
    fn to_completions(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }

    /// As in Responses (`ResponseUsage` in `vllm/entrypoints/openai/responses/protocol.py`).
    fn to_responses(self) -> Value {
        json!({
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.created_cache_tokens,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        })
    }

    /// As in Messages (`_build_anthropic_usage` in `vllm/entrypoints/anthropic/serving.py`): the three input counts add up
    /// to the prompt.
    fn to_anthropic(self) -> Value {
        json!({
            "input_tokens": self
                .prompt_tokens
                .saturating_sub(self.cached_tokens + self.created_cache_tokens),
            "output_tokens": self.completion_tokens,
            "cache_creation_input_tokens": self.created_cache_tokens,
            "cache_read_input_tokens": self.cached_tokens,
        })
    }
}

/// Writes the answer to one request.
#[derive(Debug, Clone)]
pub struct AnswerWriter {
    shape: Shape,
    id: String,
    model: String,
    created_s: u64,
    include_usage: bool,
    max_tokens: usize,
    tokens: usize,
    /// Events written so far, which the events of Responses number.
    sequence: u64,
}

impl AnswerWriter {
    /// A writer for the answer with that number. Endpoints that generate nothing are answered as chat.
    pub fn new(request: &GenerationRequest, number: &str, created_s: u64) -> Self {
        let (shape, prefix) = match request.endpoint {
            Endpoint::Completions => (Shape::Completions, "cmpl-"),
            Endpoint::Responses => (Shape::Responses, "resp_"),
            Endpoint::Messages => (Shape::Messages, "chatcmpl-"),
            Endpoint::Chat
            | Endpoint::CountTokens
            | Endpoint::Tokenize
            | Endpoint::RenderChat
            | Endpoint::RenderCompletions => (Shape::Chat, "chatcmpl-"),
        };
        Self {
            shape,
            id: format!("{prefix}{number}"),
            model: request.model.clone(),
            created_s,
            include_usage: request.include_usage,
            max_tokens: request.max_tokens,
            tokens: 0,
            sequence: 0,
        }
    }

    /// What a stream sends before the prefill: only Responses sends anything.
    pub fn opening(&mut self) -> Bytes {
        let mut out = String::new();
        if self.shape == Shape::Responses {
            let response = self.response("in_progress", json!([]), Value::Null);
            self.numbered(&mut out, "response.created", json!({"response": response}));
            self.numbered(&mut out, "response.in_progress", json!({"response": response}));
        }
        Bytes::from(out)
    }

    /// The events of the next token; `usage` holds the counts so far.
    pub fn token(&mut self, usage: Usage) -> Bytes {
        self.tokens += 1;
        let (first, last) = (self.tokens == 1, self.tokens == self.max_tokens);
        let mut out = String::new();
        match self.shape {
            Shape::Chat => {
                let mut delta = json!({"content": TOKEN_TEXT});
                if first {
                    delta["role"] = json!("assistant");
                }
                let choice =
                    json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason(last)});
                data(&mut out, &self.chunk(json!([choice]), Value::Null));
            }
            Shape::Completions => {
                let choice =
                    json!({"index": 0, "text": TOKEN_TEXT, "logprobs": null, "finish_reason": reason(last)});
                data(&mut out, &self.chunk(json!([choice]), Value::Null));
            }
            Shape::Responses => {
                let item_id = self.item_id();
                if first {
                    let item = json!({"id": item_id, "type": "message", "role": "assistant", "content": [],
                        "status": "in_progress"});
                    let added = json!({"output_index": 0, "item": item});
                    self.numbered(&mut out, "response.output_item.added", added);
                    let part = json!({"output_index": 0, "item_id": item_id, "content_index": 0,
                        "part": output_text("")});
                    self.numbered(&mut out, "response.content_part.added", part);
                }
                let delta = json!({"content_index": 0, "output_index": 0, "item_id": item_id, "delta": TOKEN_TEXT,
                    "logprobs": []});
                self.numbered(&mut out, "response.output_text.delta", delta);
            }
            Shape::Messages => {
                if first {
                    let message = json!({"id": self.id, "type": "message", "role": "assistant", "content": [],
                        "model": self.model, "stop_reason": null, "stop_sequence": null,
                        "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": 0}});
                    named(&mut out, "message_start", json!({"message": message}));
                    let block = json!({"index": 0, "content_block": {"type": "text", "text": ""}});
                    named(&mut out, "content_block_start", block);
                }
                let delta = json!({"index": 0, "delta": {"type": "text_delta", "text": TOKEN_TEXT}});
                named(&mut out, "content_block_delta", delta);
            }
        }
        Bytes::from(out)
    }

    /// What ends a stream; chat and completions tell the counts only where the request asked for them.
    pub fn closing(&mut self, usage: Usage) -> Bytes {
        let mut out = String::new();
        match self.shape {
            Shape::Chat | Shape::Completions => {
                if self.include_usage {
                    let counts = match self.shape {
                        Shape::Completions => usage.to_completions(),
                        Shape::Chat | Shape::Responses | Shape::Messages => usage.to_chat(),
                    };
                    data(&mut out, &self.chunk(json!([]), counts));
                }
                out.push_str("data: [DONE]\n\n");
            }
            Shape::Responses => {
                let (item_id, text) = (self.item_id(), TOKEN_TEXT.repeat(usage.completion_tokens));
                let place = json!({"output_index": 0, "item_id": item_id, "content_index": 0});
                let with = |key: &str, value: Value| {
                    let mut fields = place.clone();
                    fields[key] = value;
                    fields
                };
                self.numbered(&mut out, "response.output_text.done", with("text", json!(text)));
                self.numbered(
                    &mut out,
                    "response.content_part.done",
                    with("part", output_text(&text)),
                );
                let item = self.item(&text);
                let done = json!({"output_index": 0, "item": item});
                self.numbered(&mut out, "response.output_item.done", done);
                let response = self.response("incomplete", json!([item]), usage.to_responses());
                self.numbered(&mut out, "response.completed", json!({"response": response}));
            }
            Shape::Messages => {
                named(&mut out, "content_block_stop", json!({"index": 0}));
                let delta = json!({"stop_reason": "max_tokens"});
                let fields = json!({"delta": delta, "usage": usage.to_anthropic()});
                named(&mut out, "message_delta", fields);
                named(&mut out, "message_stop", json!({}));
            }
        }
        Bytes::from(out)
    }

    /// The whole answer when it is not streamed.
    pub fn whole(&self, usage: Usage) -> Bytes {
        let text = TOKEN_TEXT.repeat(usage.completion_tokens);
        let answer = match self.shape {
            Shape::Chat => {
                let choice = json!({"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": null,
                    "finish_reason": "length"});
                self.envelope("chat.completion", json!([choice]), usage.to_chat())
            }
            Shape::Completions => {
                let choice = json!({"index": 0, "text": text, "logprobs": null, "finish_reason": "length"});
                self.envelope("text_completion", json!([choice]), usage.to_completions())
            }
            Shape::Responses => self.response("incomplete", json!([self.item(&text)]), usage.to_responses()),
            Shape::Messages => json!({
                "id": self.id,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                "model": self.model,
                "stop_reason": "max_tokens",
                "usage": usage.to_anthropic(),
            }),
        };
        Bytes::from(answer.to_string())
    }

    fn chunk(&self, choices: Value, usage: Value) -> Value {
        let object = match self.shape {
            Shape::Completions => "text_completion",
            Shape::Chat | Shape::Responses | Shape::Messages => "chat.completion.chunk",
        };
        self.envelope(object, choices, usage)
    }

    fn envelope(&self, object: &str, choices: Value, usage: Value) -> Value {
        let mut envelope = json!({
            "id": self.id,
            "object": object,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        });
        if !usage.is_null() {
            envelope["usage"] = usage;
        }
        envelope
    }

    /// An answer always ends for its length, which Responses calls incomplete.
    fn response(&self, status: &str, output: Value, usage: Value) -> Value {
        let details = match status {
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "incomplete_details": details,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": true,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "background": false,
            "max_output_tokens": self.max_tokens,
            "service_tier": "auto",
            "truncation": "disabled",
            "usage": usage,
        })
    }

    fn item(&self, text: &str) -> Value {
        json!({"id": self.item_id(), "type": "message", "role": "assistant", "status": "completed",
            "content": [output_text(text)]})
    }

    fn item_id(&self) -> String {
        format!("msg_{}", self.id)
    }

    /// An event of Responses.
    fn numbered(&mut self, out: &mut String, name: &str, mut fields: Value) {
        fields["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        named(out, name, fields);
    }
}

/// The answer of `/tokenize`: ids of the tokens that the engine counts, equal for equal text.
pub fn tokenize_body(prompt: &str, max_model_len: usize) -> Bytes {
    let tokens = token_ids(prompt);
    let answer =
        json!({"count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens, "token_strs": null});
    Bytes::from(answer.to_string())
}

/// The answer of `/v1/messages/count_tokens`.
pub fn count_tokens_body(prompt: &str) -> Bytes {
    let tokens = token_ids(prompt).len();
    let answer = json!({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}});
    Bytes::from(answer.to_string())
}

/// The answer of the two `/render` endpoints (`GenerateRequest` in
/// `vllm/entrypoints/scale_out/token_in_token_out/protocol.py`): one for a chat, a list of one for a completion.
pub fn render_body(request: &GenerationRequest, number: &str) -> Bytes {
    let rendered = json!({
        "request_id": number,
        "token_ids": token_ids(&request.prompt),
        "token_offsets": null,
        "features": null,
        "sampling_params": {"max_tokens": request.max_tokens},
        "model": request.model,
        "stream": request.stream,
        "cache_salt": Some(&request.cache_salt).filter(|salt| !salt.is_empty()),
    });
    let answer = match request.endpoint {
        Endpoint::RenderCompletions | Endpoint::Completions => json!([rendered]),
        Endpoint::Chat
        | Endpoint::Responses
        | Endpoint::Messages
        | Endpoint::CountTokens
        | Endpoint::Tokenize
        | Endpoint::RenderChat => rendered,
    };
    Bytes::from(answer.to_string())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Chat,
    Completions,
    Responses,
    Messages,
}

fn token_ids(prompt: &str) -> Vec<u32> {
    let chunks = prompt.as_bytes().chunks(TOKEN_BYTES);
    let id = |chunk: &[u8]| {
        let value = chunk
            .iter()
            .fold(0_u32, |value, byte| value << 8 | u32::from(*byte));
        value.wrapping_mul(ID_FACTOR) % VOCABULARY
    };
    let ids: Vec<u32> = chunks.map(id).collect();
    if ids.is_empty() { vec![0] } else { ids }
}

fn reason(last: bool) -> Value {
    if last { json!("length") } else { Value::Null }
}

fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn data(out: &mut String, value: &Value) {
    out.push_str(&format!("data: {value}\n\n"));
}

fn named(out: &mut String, name: &str, mut fields: Value) {
    fields["type"] = json!(name);
    out.push_str(&format!("event: {name}\ndata: {fields}\n\n"));
}

/// Text of every output token.
const TOKEN_TEXT: &str = "tok ";
/// Tokens of Llama 3's vocabulary.
const VOCABULARY: u32 = 128_256;
/// 2³² ÷ golden ratio, odd: spreads similar texts over the vocabulary.
const ID_FACTOR: u32 = 0x9e37_79b9;

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: Usage = Usage {
        prompt_tokens: 70,
        cached_tokens: 32,
        created_cache_tokens: 32,
        completion_tokens: 2,
    };

    fn writer(endpoint: Endpoint, include_usage: bool) -> AnswerWriter {
        let request = GenerationRequest {
            endpoint,
            model: "m".to_owned(),
            prompt: "p".to_owned(),
            cache_salt: String::new(),
            max_tokens: 2,
            stream: true,
            include_usage,
        };
        AnswerWriter::new(&request, "7", 1)
    }

    fn stream(endpoint: Endpoint, include_usage: bool) -> String {
        let mut writer = writer(endpoint, include_usage);
        let parts = [
            writer.opening(),
            writer.token(USAGE),
            writer.token(USAGE),
            writer.closing(USAGE),
        ];
        parts
            .iter()
            .map(|part| std::str::from_utf8(part).unwrap())
            .collect()
    }

    fn events(text: &str) -> Vec<(Option<&str>, Value)> {
        text.trim_end()
            .split("\n\n")
            .map(|event| {
                let (name, data) = match event.strip_prefix("event: ") {
                    Some(rest) => rest
                        .split_once('\n')
                        .map(|(name, data)| (Some(name), data))
                        .unwrap(),
                    None => (None, event),
                };
                let data = data.strip_prefix("data: ").unwrap();
                (name, serde_json::from_str(data).unwrap_or(Value::Null))
            })
            .collect()
    }

    #[test]
    fn usage_is_in_a_stream_of_chunks_only_where_asked_for() {
        for endpoint in [Endpoint::Chat, Endpoint::Completions] {
            assert!(!stream(endpoint, false).contains("usage"));
            let text = stream(endpoint, true);
            assert!(text.ends_with("data: [DONE]\n\n"));
            let events = events(&text);
            assert_eq!(events.len(), 4);
            let details = &events[2].1["usage"]["prompt_tokens_details"];
            let expected = match endpoint {
                Endpoint::Chat => json!({"cached_tokens": 32, "created_cache_tokens": 32}),
                _ => json!({"cached_tokens": 32}),
            };
            assert_eq!(*details, expected);
        }
    }

    #[test]
    fn a_stream_of_responses_opens_before_the_first_token_and_ends_with_usage() {
        let text = stream(Endpoint::Responses, false);
        let names: Vec<_> = events(&text)
            .iter()
            .map(|(name, _)| name.unwrap().to_owned())
            .collect();
        let expected = [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ];
        assert_eq!(names, expected);
        let events = events(&text);
        for (number, (name, fields)) in events.iter().enumerate() {
            assert_eq!(fields["sequence_number"], number);
            assert_eq!(fields["type"], name.unwrap());
        }
        assert_eq!(events[9].1["response"]["status"], "incomplete");
        let usage = &events[9].1["response"]["usage"];
        assert_eq!(usage["input_tokens"], 70);
        assert_eq!(usage["input_tokens_details"]["cached_tokens"], 32);
        assert!(!writer(Endpoint::Responses, false).opening().is_empty());
        assert!(writer(Endpoint::Chat, false).opening().is_empty());
    }

    #[test]
    fn input_counts_of_messages_add_up_to_the_prompt() {
        let text = stream(Endpoint::Messages, false);
        let events = events(&text);
        let names: Vec<_> = events.iter().map(|(name, _)| name.unwrap()).collect();
        let expected = [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ];
        assert_eq!(names, expected);
        let opening = &events[0].1["message"]["usage"];
        assert_eq!(*opening, json!({"input_tokens": 70, "output_tokens": 0}));
        let whole: Value = serde_json::from_slice(&writer(Endpoint::Messages, false).whole(USAGE)).unwrap();
        for usage in [&events[5].1["usage"], &whole["usage"]] {
            let counts = [
                "input_tokens",
                "cache_creation_input_tokens",
                "cache_read_input_tokens",
            ];
            let counts = counts.map(|key| usage[key].as_u64().unwrap());
            assert_eq!(counts, [6, 32, 32]);
            assert_eq!(usage["output_tokens"], 2);
        }
    }

    #[test]
    fn equal_heads_have_equal_token_ids() {
        let ids = |text: &str| token_ids(text);
        assert_eq!(ids("abcdefgh")[..1], ids("abcdxxxx")[..1]);
        assert_ne!(ids("abcdefgh")[1], ids("abcdxxxx")[1]);
        assert_eq!(ids("").len(), 1);
        let body: Value = serde_json::from_slice(&tokenize_body("abcdefghi", 100)).unwrap();
        assert_eq!(
            (&body["count"], body["tokens"].as_array().unwrap().len()),
            (&json!(3), 3)
        );
    }
}
