//! Request body → prompt, its keys' ingredients, and what else a router needs to know of the request.
//!
//! In: the path, the bytes held of the body, and whether the body ends there or was cut at the buffer limit. Out: an
//! [`Extraction`]: the chain of the messages and their namespace, or the reason why there is no prompt; a session hint;
//! model, adapter, length of the answer. The body is untrusted: it is read once by a pull parser whose recursion limit
//! bounds the depth, memory is bounded by a small multiple of the body, nothing panics, and no text is kept but a model
//! name. This must never change a body, and a prompt whose engine would read it otherwise is no prompt.
//!
//! Key order, white space and escapes never matter, except the order of keys inside tool definitions, tool arguments and
//! documents, which templates render as it stands. [`record`] gives the same events as text, for tests and for replay.

mod anthropic;
mod body;
mod cohere;
mod cut;
mod gemini;
mod generate;
mod message;
mod ollama;
mod openai;
mod part;
mod path;
mod read;
mod recorder;
mod session;
mod sink;

use std::fmt;

use serde::de::DeserializeSeed;
use serde_json::error::Category;

pub use path::Api;
pub use recorder::{Segment, SegmentRecorder, SegmentValue};
pub use session::{SessionField, SessionMode};
pub use sink::{Field, HashSink, Identity, Namespace, Scalar, Scope, SegmentSink};

use crate::chunk::{ChainPoint, HashKey, PrefixKeys};
use body::{Body, Facts};
use read::{OpenText, Reader};

/// How the held bytes of a body end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyEnd {
    /// The body is whole: an end of input inside a value means invalid JSON.
    EndOfStream,
    /// The buffer limit was reached: more may follow, an end of input is no error.
    Limit,
}

/// What there is to read of one request.
#[derive(Debug, Clone, Copy)]
pub struct PromptInput<'a> {
    /// The API that [`Api::from_path`] found.
    pub api: Api,
    /// The request path, for the model that some paths name.
    pub path: &'a str,
    /// The bytes held.
    pub body: &'a [u8],
    /// How they end.
    pub end: BodyEnd,
    /// Value of the tenant header.
    pub tenant: Option<&'a [u8]>,
    /// Value of the first session header found.
    pub session_header: Option<&'a [u8]>,
}

/// How prompts are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptOptions {
    /// Rendered bytes of messages beyond which nothing is hashed. 512 KiB by default: 128 KiB would see 32.9 % of a
    /// conversation trace's tokens as cached where 37.4 % are.
    pub max_prefix_bytes: u32,
    /// Where the first system text starts with one of these, its first line does not count for the keys. By default the
    /// billing line that Claude Code puts there: it differs with every request, and vLLM leaves it out of the prompt
    /// (vllm-project/vllm#36829).
    pub volatile_heads: Vec<String>,
    /// Keys every hash, so that nobody without it can tell a prompt's key or make two prompts that share one.
    pub secret: Vec<u8>,
    /// Body fields that count as session hints, strongest first; the session header is stronger than all.
    pub session_fields: Vec<SessionField>,
    /// What session hints are for.
    pub session_mode: SessionMode,
}

impl Default for PromptOptions {
    fn default() -> Self {
        Self {
            max_prefix_bytes: 512 * 1024,
            volatile_heads: vec![CLAUDE_CODE_BILLING_LINE.to_owned()],
            secret: Vec::new(),
            session_fields: vec![
                SessionField::SessionParamsId,
                SessionField::SessionId,
                SessionField::Conversation,
                SessionField::PromptCacheKey,
            ],
            session_mode: SessionMode::Fallback,
        }
    }
}

/// All that was read of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extraction {
    /// The prompt, or why there is none.
    pub prompt: Result<Prompt, NoPrompt>,
    /// Hash of the strongest session hint; `None` under [`SessionMode::Off`].
    pub session: Option<u64>,
    /// Model name, where it is at most 256 bytes.
    pub model: Option<String>,
    /// Hash of the model name ([`crate::chunk::name_hash`]).
    pub model_hash: Option<u64>,
    /// Hash of the adapter name ([`crate::chunk::name_hash`]).
    pub adapter: Option<u64>,
    /// The longest answer asked for, tokens.
    pub max_output_tokens: Option<u32>,
    /// True where the answer is asked for as a stream.
    pub stream: bool,
}

/// The prompt of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Points of the messages, shallow to deep.
    pub chain: Vec<ChainPoint>,
    /// What keeps the keys apart beside the messages.
    pub namespace: Namespace,
    /// Bytes of message text as rendered for hashing, beyond the last point too; the namespace's bytes not counted.
    pub chain_bytes: u32,
}

impl Prompt {
    /// The keys under this prompt's own namespace or under one recalled for it.
    pub fn keys(&self, namespace: &Namespace) -> PrefixKeys {
        PrefixKeys::new(namespace.hash, namespace.bytes, &self.chain, self.chain_bytes)
    }
}

/// Why a body yields no prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NoPrompt {
    /// The body is not JSON, or not UTF-8.
    InvalidJson,
    /// The body nests deeper than the parser follows.
    TooDeep,
    /// The body is JSON but no object.
    NotAnObject,
    /// The field that holds the prompt is absent or null, or did not come before the limit.
    PromptMissing,
    /// There is a prompt without any content.
    PromptEmpty,
    /// A field that matters has a type that the API does not know.
    WrongType,
    /// A field that matters comes twice, and parsers differ in which counts.
    DuplicateKey,
    /// A batch whose members use different adapters.
    MixedAdapters,
    /// The head of the prompt is held by a server, so that the visible text is not its head.
    ServerSideState,
    /// The prompt is sent as embeddings.
    OpaquePrompt,
}

impl NoPrompt {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::InvalidJson,
        Self::TooDeep,
        Self::NotAnObject,
        Self::PromptMissing,
        Self::PromptEmpty,
        Self::WrongType,
        Self::DuplicateKey,
        Self::MixedAdapters,
        Self::ServerSideState,
        Self::OpaquePrompt,
    ];

    /// The name used in metrics and headers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidJson => "invalid_json",
            Self::TooDeep => "too_deep",
            Self::NotAnObject => "not_an_object",
            Self::PromptMissing => "prompt_missing",
            Self::PromptEmpty => "prompt_empty",
            Self::WrongType => "wrong_type",
            Self::DuplicateKey => "duplicate_key",
            Self::MixedAdapters => "mixed_adapters",
            Self::ServerSideState => "server_side_state",
            Self::OpaquePrompt => "opaque_prompt",
        }
    }

    /// The reason that a parser's error stands for.
    fn from_error(error: &serde_json::Error) -> Self {
        match error.classify() {
            Category::Data => Self::WrongType,
            // The parser tells this one apart by its text only.
            Category::Syntax if error.to_string().starts_with("recursion limit") => Self::TooDeep,
            Category::Syntax | Category::Eof | Category::Io => Self::InvalidJson,
        }
    }
}

impl fmt::Display for NoPrompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reads the prompt of a request.
pub fn extract(input: &PromptInput<'_>, options: &PromptOptions) -> Extraction {
    let mut sink = HashSink::new(options.max_prefix_bytes, HashKey::of_secret(&options.secret));
    let Walk { facts, end, session } = walk(input, options, &mut sink);
    let prompt = end.and_then(|complete| {
        let namespace = sink.namespace(complete);
        let chain_bytes = sink.chain_bytes();
        if chain_bytes == 0 {
            return Err(if complete {
                NoPrompt::PromptEmpty
            } else {
                NoPrompt::PromptMissing
            });
        }
        Ok(Prompt {
            chain: sink.into_points(),
            namespace,
            chain_bytes,
        })
    });
    Extraction {
        prompt,
        session,
        model: facts.model,
        model_hash: facts.model_hash,
        adapter: facts.adapter,
        max_output_tokens: facts.max_output_tokens,
        stream: facts.stream,
    }
}

/// Reads the prompt of a request as text: what [`extract`] hashes, for tests and for replay.
///
/// # Errors
/// Says why there is no prompt. An empty prompt is none of the reasons here.
pub fn record(input: &PromptInput<'_>, options: &PromptOptions) -> Result<SegmentRecorder, NoPrompt> {
    let mut recorder = SegmentRecorder::default();
    walk(input, options, &mut recorder).end.map(|_| recorder)
}

/// True where a body with these headers can be read: JSON in UTF-8, not compressed.
pub fn body_is_readable(content_type: Option<&str>, content_encoding: Option<&str>) -> bool {
    let is_plain = content_encoding.is_none_or(|value| {
        value
            .split(',')
            .all(|coding| matches_word(coding, "identity") || coding.trim().is_empty())
    });
    is_plain && content_type.is_none_or(is_utf8_json)
}

fn is_utf8_json(content_type: &str) -> bool {
    let mut parts = content_type.split(';');
    let media_type = parts.next().unwrap_or_default().trim();
    let has_json_suffix = || {
        let suffix_at = media_type.len().checked_sub("+json".len());
        suffix_at
            .and_then(|at| media_type.get(at..))
            .is_some_and(|suffix| suffix.eq_ignore_ascii_case("+json"))
    };
    if !media_type.eq_ignore_ascii_case("application/json") && !has_json_suffix() {
        return false;
    }
    parts.all(|parameter| {
        let Some((name, value)) = parameter.split_once('=') else {
            return true;
        };
        let charset = value.trim().trim_matches('"');
        !matches_word(name, "charset") || matches_word(charset, "utf-8") || matches_word(charset, "utf8")
    })
}

fn matches_word(text: &str, word: &str) -> bool {
    text.trim().eq_ignore_ascii_case(word)
}

/// What one pass over a body came to.
struct Walk {
    facts: Facts,
    /// True where the body is whole.
    end: Result<bool, NoPrompt>,
    session: Option<u64>,
}

/// Reads a body into a sink.
fn walk<S: SegmentSink>(input: &PromptInput<'_>, options: &PromptOptions, sink: &mut S) -> Walk {
    let mut facts = Facts {
        stream: Api::path_streams(input.path),
        ..Facts::default()
    };
    let mut reader = Reader::new(sink, &options.volatile_heads);
    bytes_field(&mut reader, Field::Secret, &options.secret);
    bytes_field(&mut reader, Field::Tenant, input.tenant.unwrap_or_default());
    if let Some(model) = Api::model_in_path(input.path) {
        facts.set_model(&mut reader, model);
    }
    let body = input.body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(input.body);
    let mut parser = serde_json::Deserializer::from_slice(body);
    let session_hash = |value: &str| session_hash(options, input.tenant, value.as_bytes());
    let whole_body = Body {
        reader: &mut reader,
        facts: &mut facts,
        api: input.api,
        session_hash,
    };
    let result = whole_body.deserialize(&mut parser).and_then(|()| parser.end());
    let end = match result {
        Ok(()) => Ok(true),
        Err(error) => after_error(&mut reader, &facts, input.end, body, &error),
    };
    let end = end.and_then(|complete| {
        if facts.has_server_state {
            Err(NoPrompt::ServerSideState)
        } else if facts.is_opaque {
            Err(NoPrompt::OpaquePrompt)
        } else if complete && !facts.has_prompt {
            Err(NoPrompt::PromptMissing)
        } else {
            Ok(complete)
        }
    });
    let session = session(input, options, &facts, end);
    if let (SessionMode::Extend, Some(hash)) = (options.session_mode, session) {
        bytes_field(&mut reader, Field::Session, &hash.to_le_bytes());
    }
    Walk { facts, end, session }
}

/// What an error of the parser means: a cut body keeps what was read before the cut.
fn after_error<S: SegmentSink>(
    reader: &mut Reader<'_, S>,
    facts: &Facts,
    end: BodyEnd,
    body: &[u8],
    error: &serde_json::Error,
) -> Result<bool, NoPrompt> {
    if let Some(reason) = reader.failure {
        return Err(reason);
    }
    let is_cut = end == BodyEnd::Limit
        && match error.classify() {
            Category::Eof => true,
            Category::Syntax => cut::ends_in_number(body),
            Category::Data | Category::Io => false,
        };
    if !is_cut {
        let is_wrong_type = error.classify() == Category::Data;
        return Err(if is_wrong_type && !facts.is_object {
            NoPrompt::NotAnObject
        } else {
            NoPrompt::from_error(error)
        });
    }
    if reader.open_text != OpenText::Closed
        && let Some(text) = cut::open_text(body)
    {
        reader.cut_text_part(&text);
    }
    Ok(false)
}

/// The key of a session header's value, where nothing of the body is known.
pub fn session_key(options: &PromptOptions, tenant: Option<&[u8]>, header: Option<&[u8]>) -> Option<u64> {
    if options.session_mode == SessionMode::Off {
        return None;
    }
    header
        .filter(|value| !value.is_empty())
        .map(|value| session_hash(options, tenant, value))
}

/// The strongest session hint. Of a body that is not valid JSON only the header counts.
fn session(
    input: &PromptInput<'_>,
    options: &PromptOptions,
    facts: &Facts,
    end: Result<bool, NoPrompt>,
) -> Option<u64> {
    if options.session_mode == SessionMode::Off {
        return None;
    }
    let header = session_key(options, input.tenant, input.session_header);
    if header.is_some() {
        return header;
    }
    if matches!(
        end,
        Err(NoPrompt::InvalidJson | NoPrompt::TooDeep | NoPrompt::NotAnObject)
    ) {
        return None;
    }
    options
        .session_fields
        .iter()
        .find_map(|field| facts.sessions.get(*field as usize).copied().flatten())
}

/// Hash of a session's name under the operator's secret and the tenant, each with its length in front.
fn session_hash(options: &PromptOptions, tenant: Option<&[u8]>, value: &[u8]) -> u64 {
    let mut hash = HashKey::of_secret(&options.secret).start();
    for part in [&options.secret, tenant.unwrap_or_default(), value] {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finish()
}

/// A namespace field of bytes that need not be UTF-8: written as hex digits, which no two byte strings share.
fn bytes_field<S: SegmentSink>(reader: &mut Reader<'_, S>, field: Field, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    reader.field_start(field);
    for byte in bytes {
        let digits = [byte >> 4, byte & 15]
            .map(|digit| HEX_DIGITS.get(usize::from(digit)).copied().unwrap_or_default());
        reader.sink.text(std::str::from_utf8(&digits).unwrap_or_default());
    }
    reader.field_end();
}

const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";
const CLAUDE_CODE_BILLING_LINE: &str = "x-anthropic-billing-header:";
/// Longest model name kept as text: it may become a label, and no served name comes near.
const MAX_MODEL_BYTES: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn input(api: Api, body: &str) -> PromptInput<'_> {
        PromptInput {
            api,
            path: "/",
            body: body.as_bytes(),
            end: BodyEnd::EndOfStream,
            tenant: None,
            session_header: None,
        }
    }

    fn read(api: Api, body: &str) -> Extraction {
        extract(&input(api, body), &PromptOptions::default())
    }

    fn prompt(api: Api, body: &str) -> Prompt {
        read(api, body)
            .prompt
            .unwrap_or_else(|reason| panic!("{reason}: {body}"))
    }

    fn chat(messages: &str) -> Prompt {
        prompt(
            Api::OpenAiChat,
            &format!("{{\"model\":\"m\",\"messages\":[{messages}]}}"),
        )
    }

    #[test]
    fn a_moved_boundary_changes_the_chain() {
        let same = [
            r#"{"role":"user","content":"ab"}"#,
            r#"{"content":"ab","role":"user"}"#,
            r#"{"role":"user","content":[{"type":"text","text":"ab"}]}"#,
            r#"{"role":"user","content":[{"text":"ab","type":"text","cache_control":{"type":"ephemeral"}}]}"#,
            r#"{"refusal":null,"role":"user","content":["ab"],"reasoning_content":"x","tool_calls":null}"#,
        ];
        for message in same {
            assert_eq!(chat(message).chain, chat(same[0]).chain, "{message}");
        }
        let all_different = [
            same[0],
            r#"{"role":"system","content":"ab"}"#,
            r#"{"role":"user","content":"a"},{"role":"user","content":"b"}"#,
            r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#,
            r#"{"role":"user","content":[{"type":"text","text":"ab"},{"type":"text","text":""}]}"#,
            r#"{"role":"user","content":[{"type":"thinking","thinking":"ab"}]}"#,
            r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"ab"}}]}"#,
            r#"{"role":"user","content":[{"type":"hologram","hologram":"ab"}]}"#,
            r#"{"role":"user","content":[{"type":"hologram","hologram":"ac"}]}"#,
            r#"{"role":"user","content":[{"type":"hologram","text":"ab"}]}"#,
            r#"{"role":"user","content":"ab","name":"n"}"#,
            r#"{"role":"user","content":"ab","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}"#,
            r#"{"role":"user","content":"ab","tool_calls":[{"function":{"name":"f","arguments":{}}}]}"#,
            r#"{"role":"user","content":[{"type":"tool_result","content":"ab"}]}"#,
            r#"{"role":"user","content":[{"type":"tool_result","content":[{"type":"tool_result","content":"ab"}]}]}"#,
        ];
        for (at, one) in all_different.iter().enumerate() {
            for other in &all_different[at + 1..] {
                assert_ne!(chat(one).chain.last(), chat(other).chain.last(), "{one} {other}");
            }
        }
    }

    #[test]
    fn parts_may_have_their_keys_in_any_order() {
        for (one, other) in [
            (
                r#"{"type":"hologram","text":"ab","x":1}"#,
                r#"{"x":1,"text":"ab","type":"hologram"}"#,
            ),
            (
                r#"{"type":"tool_use","name":"f","input":{"a":1}}"#,
                r#"{"input":{"a":1},"id":"t","name":"f","type":"tool_use"}"#,
            ),
            (
                r#"{"type":"image_url","image_url":{"url":"u"}}"#,
                r#"{"image_url":{"detail":"low","url":"u"},"type":"image_url"}"#,
            ),
            (
                r#"{"type":"image","source":{"type":"base64","data":"u"}}"#,
                r#"{"type":"image_url","image_url":"u"}"#,
            ),
        ] {
            let message = |part: &str| format!("{{\"role\":\"user\",\"content\":[{part}]}}");
            assert_eq!(chat(&message(one)), chat(&message(other)), "{one}");
        }
    }

    #[test]
    fn template_inputs_keep_prompts_apart_and_sampling_does_not() {
        let body = |more: &str| {
            prompt(
                Api::OpenAiChat,
                &format!("{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"hi\"}}]{more}}}"),
            )
        };
        let base = body("");
        for more in [
            r#","cache_salt":"s""#,
            r#","extra_key":"s""#,
            r#","lora_path":"s""#,
            r#","tools":[{"name":"a"}]"#,
            r#","functions":[{"name":"a"}]"#,
            r#","documents":["a"]"#,
            r#","chat_template":"a""#,
            r#","chat_template_kwargs":{"a":false}"#,
            r#","reasoning_effort":"low""#,
            r#","mm_processor_kwargs":{"a":1}"#,
            r#","media_io_kwargs":{"a":1}"#,
            r#","add_special_tokens":false"#,
        ] {
            assert_ne!(body(more).namespace.hash, base.namespace.hash, "{more}");
            assert_eq!(body(more).chain, base.chain, "{more}");
        }
        for more in [
            r#","tools":null,"functions":[],"documents":[],"chat_template":null,"chat_template_kwargs":{},"lora_path":null"#,
            r#","tool_choice":"none","response_format":{"type":"json_object"},"temperature":1e400,"logit_bias":{"1":-100}"#,
            r#","continue_final_message":true,"add_generation_prompt":false,"max_tokens":5,"stream":true,"n":2"#,
            r#","user":"u","prompt_cache_key":"k","metadata":{"user_id":"x"}"#,
        ] {
            assert_eq!(body(more), base, "{more}");
        }
        assert_eq!(
            body(r#","chat_template_kwargs":{"a":1,"b":2}"#),
            body(r#","chat_template_kwargs":{"b":2,"a":1}"#)
        );
        assert_ne!(
            body(r#","tools":[{"a":1,"b":2}]"#),
            body(r#","tools":[{"b":2,"a":1}]"#)
        );
    }

    #[test]
    fn secret_and_tenant_keep_prompts_apart() {
        let body = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
        let key = |tenant: &'static [u8], secret: &[u8]| {
            let input = PromptInput {
                tenant: Some(tenant),
                ..input(Api::OpenAiChat, body)
            };
            let options = PromptOptions {
                secret: secret.to_vec(),
                ..PromptOptions::default()
            };
            let prompt = extract(&input, &options).prompt.unwrap();
            prompt.keys(&prompt.namespace).deepest()
        };
        let keys = [
            key(b"", b""),
            key(b"a", b""),
            key(b"", b"a"),
            key(b"a", b"a"),
            key(b"b\xff", b""),
        ];
        for (at, one) in keys.iter().enumerate() {
            assert!(!keys[at + 1..].contains(one));
        }
    }

    #[test]
    fn whatever_is_no_prompt_says_why() {
        for (api, body, reason) in [
            (Api::OpenAiChat, "", NoPrompt::InvalidJson),
            (Api::OpenAiChat, "{", NoPrompt::InvalidJson),
            (Api::OpenAiChat, "[]", NoPrompt::NotAnObject),
            (Api::OpenAiChat, "7", NoPrompt::NotAnObject),
            (Api::OpenAiChat, "{}", NoPrompt::PromptMissing),
            (Api::OpenAiChat, r#"{"messages":null}"#, NoPrompt::PromptMissing),
            (Api::OpenAiChat, r#"{"messages":[]}"#, NoPrompt::PromptEmpty),
            (Api::OpenAiChat, r#"{"messages":"hi"}"#, NoPrompt::WrongType),
            (
                Api::OpenAiChat,
                r#"{"messages":[{"content":"hi"}]}"#,
                NoPrompt::WrongType,
            ),
            (
                Api::OpenAiChat,
                r#"{"messages":[{"role":"user","content":{"a":1}}]}"#,
                NoPrompt::WrongType,
            ),
            (
                Api::OpenAiChat,
                r#"{"model":5,"messages":[]}"#,
                NoPrompt::WrongType,
            ),
            (
                Api::OpenAiChat,
                r#"{"messages":[{"role":"user","content":"a"}],"messages":[]}"#,
                NoPrompt::DuplicateKey,
            ),
            (
                Api::OpenAiChat,
                r#"{"messages":[{"role":"user","content":"a","content":"b"}]}"#,
                NoPrompt::DuplicateKey,
            ),
            (
                Api::OpenAiChat,
                r#"{"messages":[{"role":"user","content":"a","role":"system"}]}"#,
                NoPrompt::DuplicateKey,
            ),
            (
                Api::OpenAiChat,
                r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]}"#,
                NoPrompt::DuplicateKey,
            ),
            (
                Api::OpenAiChat,
                r#"{"messages":[{"role":"user","content":"a"}]} x"#,
                NoPrompt::InvalidJson,
            ),
            (
                Api::OpenAiCompletions,
                r#"{"prompt":[1,-2]}"#,
                NoPrompt::WrongType,
            ),
            (
                Api::OpenAiCompletions,
                r#"{"prompt":[4294967296]}"#,
                NoPrompt::WrongType,
            ),
            (Api::OpenAiCompletions, r#"{"prompt":[]}"#, NoPrompt::PromptEmpty),
            (
                Api::OpenAiCompletions,
                r#"{"prompt":null,"prompt_embeds":"AA"}"#,
                NoPrompt::OpaquePrompt,
            ),
            (
                Api::Generate,
                r#"{"text":"a","input_ids":[1]}"#,
                NoPrompt::DuplicateKey,
            ),
            (
                Api::Generate,
                r#"{"text":["a","b"],"lora_path":["x",null]}"#,
                NoPrompt::MixedAdapters,
            ),
            (
                Api::Generate,
                r#"{"text":"a","session_params":{"id":"s"}}"#,
                NoPrompt::ServerSideState,
            ),
            (
                Api::OpenAiResponses,
                r#"{"input":"a","previous_response_id":"r"}"#,
                NoPrompt::ServerSideState,
            ),
        ] {
            assert_eq!(read(api, body).prompt, Err(reason), "{body}");
        }
        let deep = format!("{{\"tools\":{}{}}}", "[".repeat(200), "]".repeat(200));
        assert_eq!(read(Api::OpenAiChat, &deep).prompt, Err(NoPrompt::TooDeep));
    }

    #[test]
    fn deep_nesting_ends_early_wherever_it_is() {
        for (open, close) in [
            (r#"{"type":"tool_result","content":["#, "]}"),
            (r#"{"type":"x","y":["#, "]}"),
            (r#"{"type":"image","source":["#, "]}"),
            (r#"{"type":"tool_use","input":["#, "]}"),
        ] {
            let body = format!(
                "{{\"messages\":[{{\"content\":[{}{}],\"role\":\"user\"}}]}}",
                open.repeat(20_000),
                close.repeat(20_000)
            );
            assert!(read(Api::AnthropicMessages, &body).prompt.is_err(), "{open}");
        }
    }

    #[test]
    fn null_beside_a_prompt_is_no_second_prompt() {
        let base = prompt(Api::Generate, r#"{"text":"a"}"#);
        assert_eq!(
            prompt(
                Api::Generate,
                r#"{"text":null,"inputs":null,"input_ids":null,"text":"a"}"#
            ),
            base
        );
        assert_eq!(
            prompt(Api::Generate, r#"{"text":"a","input_ids":null,"inputs":null}"#),
            base
        );
        let ids = prompt(
            Api::Generate,
            r#"{"text":null,"input_ids":[1,2],"lora_path":["x","x"]}"#,
        );
        assert_eq!(
            (ids.chain_bytes, ids.namespace.identity.adapter.is_some()),
            (8, true)
        );
    }

    #[test]
    fn facts_named_in_two_places_do_not_depend_on_the_order_of_keys() {
        let both_orders = |api: Api, one: &str, other: &str| {
            let before = read(api, &format!(r#"{{{one},{other},"prompt":"a","text":"a"}}"#));
            let after = read(api, &format!(r#"{{{other},{one},"prompt":"a","text":"a"}}"#));
            assert_eq!(before.prompt, after.prompt, "{one} and {other}");
            assert!(before.prompt.is_err() || before == after, "{one} and {other}");
            before
        };
        let completions = |one, other| both_orders(Api::OpenAiCompletions, one, other);
        let named = completions(r#""model":"base:one""#, r#""lora_path":"two""#);
        assert_eq!(named.adapter, Some(crate::chunk::name_hash(b"two")));
        let unnamed = completions(r#""model":"base:one""#, r#""lora_path":"""#);
        assert_eq!(unnamed.adapter, Some(crate::chunk::name_hash(b"one")));
        let longest = completions(r#""max_tokens":7"#, r#""max_completion_tokens":9"#);
        assert_eq!(longest.max_output_tokens, Some(9));
        for (one, other) in [
            (r#""lora_path":"x""#, r#""parameters":{"adapter_id":"y"}"#),
            (
                r#""sampling_params":{"adapter_id":"x"}"#,
                r#""parameters":{"adapter_id":"y"}"#,
            ),
        ] {
            let refused = both_orders(Api::Generate, one, other);
            assert_eq!(refused.prompt, Err(NoPrompt::DuplicateKey));
        }
    }

    #[test]
    fn the_data_of_a_picture_count_whatever_stands_beside_them() {
        let picture = |source: &str| {
            chat(&format!(
                r#"{{"role":"user","content":[{{"type":"image","source":{{{source}}}}}]}}"#
            ))
        };
        let base = picture(r#""data":"x""#);
        for source in [r#""data":"x","url":5"#, r#""url":5,"data":"x""#] {
            assert_eq!(picture(source), base, "{source}");
        }
    }

    #[test]
    fn batches_are_keyed_by_their_first_prompt() {
        let one = prompt(Api::OpenAiCompletions, r#"{"prompt":"shared"}"#);
        let batch = prompt(Api::OpenAiCompletions, r#"{"prompt":["shared","other"]}"#);
        assert_eq!(batch.chain, one.chain);
        assert_eq!((one.chain_bytes, batch.chain_bytes), (6, 11));
        let ids = prompt(Api::OpenAiCompletions, r#"{"prompt":[7,8]}"#);
        let id_batch = prompt(Api::OpenAiCompletions, r#"{"prompt":[[7, 8],[9,10,11]]}"#);
        assert_eq!(id_batch.chain, ids.chain);
        assert_eq!((ids.chain_bytes, id_batch.chain_bytes), (8, 20));
        for others in ["[9,10]", "[ 9 , 10 ]"] {
            let batch = prompt(
                Api::OpenAiCompletions,
                &format!(r#"{{"prompt":[[7,8],{others}]}}"#),
            );
            assert_eq!(batch.chain_bytes, 16, "{others}");
        }
        for others in ["[\",\"]", r#"["\u002c"]"#, r#"["x"]"#] {
            let batch = prompt(
                Api::OpenAiCompletions,
                &format!(r#"{{"prompt":[[7,8],{others},[]]}}"#),
            );
            assert_eq!(batch.chain_bytes, 12, "{others}");
        }
    }

    #[test]
    fn what_stands_behind_the_prompt_is_rendered_behind_it() {
        for (api, one, other) in [
            (
                Api::OpenAiCompletions,
                r#"{"prompt":"a","suffix":"b"}"#,
                r#"{"suffix":"b","prompt":"a"}"#,
            ),
            (
                Api::Generate,
                r#"{"text":"a","image_data":["b"]}"#,
                r#"{"image_data":"b","text":"a"}"#,
            ),
            (
                Api::CohereV1Chat,
                r#"{"message":"b","preamble":"p","chat_history":[{"role":"USER","message":"a"}]}"#,
                r#"{"chat_history":[{"message":"a","role":"USER"}],"message":"b","preamble":"p"}"#,
            ),
            (
                Api::Gemini,
                r#"{"contents":[{"parts":[{"text":"a"}]}],"systemInstruction":{"parts":[{"text":"s"}]}}"#,
                r#"{"system_instruction":{"parts":[{"text":"s"}]},"contents":[{"parts":[{"text":"a"}],"role":"user"}]}"#,
            ),
            (
                Api::OllamaGenerate,
                r#"{"model":"m","system":"s","context":[1],"prompt":"a"}"#,
                r#"{"prompt":"a","model":"m","context":[1],"system":"s"}"#,
            ),
        ] {
            assert_eq!(prompt(api, one), prompt(api, other), "{one}");
        }
    }

    #[test]
    fn the_billing_line_of_claude_code_is_volatile_by_default() {
        let keys = |billing: &str| {
            let body = format!(
                r#"{{"system":[{{"type":"text","text":"{billing}"}},{{"type":"text","text":"You are a coding agent."}}],
                "messages":[{{"role":"user","content":"hi"}}]}}"#
            );
            let prompt = extract(&input(Api::AnthropicMessages, &body), &PromptOptions::default())
                .prompt
                .unwrap();
            prompt.keys(&prompt.namespace).deepest()
        };
        let line = |cch: &str| {
            format!("x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch={cch};")
        };
        assert_eq!(keys(&line("eb6c6")), keys(&line("71fea")));
        assert_ne!(keys(&line("eb6c6")), keys("another first block"));
    }

    #[test]
    fn a_volatile_head_counts_as_length_only() {
        let options = PromptOptions {
            volatile_heads: vec!["x-billing:".to_owned()],
            ..PromptOptions::default()
        };
        for (api, before, after) in [
            (
                Api::OpenAiChat,
                r#"{"messages":[{"role":"system","content":""#,
                r#""},{"role":"user","content":"hi"}]}"#,
            ),
            (
                Api::AnthropicMessages,
                r#"{"system":[{"type":"text","text":""#,
                r#""},{"type":"text","text":"rest"}],"messages":[{"role":"user","content":"hi"}]}"#,
            ),
        ] {
            let keys = |text: &str| {
                let body = format!("{before}{text}{after}");
                let prompt = extract(&input(api, &body), &options).prompt.unwrap();
                prompt.keys(&prompt.namespace)
            };
            let hashes = |text: &str| keys(text).keys.iter().map(|key| key.hash).collect::<Vec<_>>();
            assert_eq!(
                hashes(r"x-billing: 1\nBe brief."),
                hashes(r"x-billing: 22\nBe brief.")
            );
            assert_eq!(hashes(r"x-billing: 1"), hashes(r"x-billing: 22"));
            assert_ne!(
                hashes(r"x-billing: 1\nBe brief."),
                hashes(r"x-billing: 1\nBe long.")
            );
            assert_ne!(
                hashes(r"x-other: 1\nBe brief."),
                hashes(r"x-other: 22\nBe brief.")
            );
            assert_eq!(
                keys(r"x-billing: 22\na").prompt_bytes,
                keys(r"x-billing: 1\nab").prompt_bytes
            );
        }
        let second = |n: u32| {
            let body = format!(
                "{{\"messages\":[{{\"role\":\"system\",\"content\":\"a\"}},{{\"role\":\"system\",\"content\":\"x-billing: {n}\"}}]}}"
            );
            extract(&input(Api::OpenAiChat, &body), &options).prompt.unwrap()
        };
        assert_ne!(
            second(1),
            second(2),
            "only the first system text has a volatile head"
        );
    }

    #[test]
    fn a_cut_scalar_never_counts() {
        let whole = r#"{"model":"demo","max_tokens":123,"prompt":[10,20,345],"stream":true}"#;
        for cut in 0..whole.len() {
            let body = whole.get(..cut).unwrap();
            let extraction = extract(
                &PromptInput {
                    end: BodyEnd::Limit,
                    ..input(Api::OpenAiCompletions, body)
                },
                &PromptOptions::default(),
            );
            assert!(
                matches!(extraction.model.as_deref(), None | Some("demo")),
                "{body}"
            );
            assert!(matches!(extraction.max_output_tokens, None | Some(123)), "{body}");
            if let Ok(prompt) = extraction.prompt {
                let ids = prompt.chain_bytes / 4;
                let whole_ids =
                    body.matches(',').count().saturating_sub(2).min(2) + body.matches(']').count();
                assert!(ids as usize <= whole_ids, "{body}: {ids}");
                assert!(!prompt.namespace.complete, "{body}");
            }
        }
    }

    #[test]
    fn a_cut_before_the_prompt_gives_none() {
        let cut = PromptInput {
            end: BodyEnd::Limit,
            ..input(Api::OpenAiChat, r#"{"model":"m","tools":[{"a"#)
        };
        let extraction = extract(&cut, &PromptOptions::default());
        assert_eq!(extraction.prompt, Err(NoPrompt::PromptMissing));
        assert_eq!(extraction.model.as_deref(), Some("m"));
    }

    #[test]
    fn the_strongest_session_hint_counts() {
        let body = r#"{"input":"a","prompt_cache_key":"k","conversation":{"id":"c"},"user":"u","metadata":{"user_id":"m"}}"#;
        let session = |header: Option<&'static [u8]>, fields: &[SessionField], mode: SessionMode| {
            let input = PromptInput {
                session_header: header,
                ..input(Api::OpenAiResponses, body)
            };
            let options = PromptOptions {
                session_fields: fields.to_vec(),
                session_mode: mode,
                ..PromptOptions::default()
            };
            extract(&input, &options).session
        };
        let of = |value: &[u8]| session_hash(&PromptOptions::default(), None, value);
        let defaults = PromptOptions::default().session_fields;
        assert_eq!(
            session(Some(b"h"), &defaults, SessionMode::Fallback),
            Some(of(b"h"))
        );
        assert_eq!(session(None, &defaults, SessionMode::Fallback), Some(of(b"c")));
        assert_eq!(
            session(Some(b""), &[SessionField::User], SessionMode::Replace),
            Some(of(b"u"))
        );
        assert_eq!(
            session(None, &[SessionField::MetadataUserId], SessionMode::Replace),
            Some(of(b"m"))
        );
        assert_eq!(
            session(None, &[SessionField::SessionId], SessionMode::Fallback),
            None
        );
        assert_eq!(session(Some(b"h"), &defaults, SessionMode::Off), None);
    }

    #[test]
    fn an_extending_session_keeps_prompts_apart() {
        let namespace = |key: &str, mode: SessionMode| {
            let body = format!(
                "{{\"messages\":[{{\"role\":\"user\",\"content\":\"a\"}}],\"prompt_cache_key\":\"{key}\"}}"
            );
            let options = PromptOptions {
                session_mode: mode,
                ..PromptOptions::default()
            };
            extract(&input(Api::OpenAiChat, &body), &options)
                .prompt
                .unwrap()
                .namespace
                .hash
        };
        assert_ne!(
            namespace("a", SessionMode::Extend),
            namespace("b", SessionMode::Extend)
        );
        assert_eq!(
            namespace("a", SessionMode::Fallback),
            namespace("b", SessionMode::Fallback)
        );
    }

    #[test]
    fn only_plain_json_in_utf8_is_read() {
        for (content_type, encoding, readable) in [
            (None, None, true),
            (Some("application/json"), None, true),
            (Some("Application/JSON; charset=UTF-8"), Some("identity"), true),
            (Some("application/json; charset=\"utf-8\"; x"), Some(""), true),
            (Some("application/vnd.api+json"), None, true),
            (Some("application/json; charset=utf-16le"), None, false),
            (Some("application/json"), Some("gzip"), false),
            (Some("application/json"), Some("identity, br"), false),
            (Some("application/x-www-form-urlencoded"), None, false),
            (Some("multipart/form-data; boundary=x"), None, false),
            (Some(""), None, false),
            (Some("json"), None, false),
        ] {
            assert_eq!(
                body_is_readable(content_type, encoding),
                readable,
                "{content_type:?} {encoding:?}"
            );
        }
    }

    #[test]
    fn the_length_of_the_answer_is_found() {
        for (api, body, tokens) in [
            (Api::OpenAiChat, r#"{"max_tokens":5}"#, Some(5)),
            (Api::OpenAiChat, r#"{"max_completion_tokens":64.0}"#, Some(64)),
            (Api::OpenAiChat, r#"{"max_tokens":-5}"#, None),
            (Api::OpenAiChat, r#"{"max_tokens":1e400}"#, None),
            (Api::OpenAiChat, r#"{"max_tokens":null}"#, None),
            (
                Api::Generate,
                r#"{"sampling_params":{"max_new_tokens":6}}"#,
                Some(6),
            ),
            (Api::OllamaChat, r#"{"options":{"num_predict":7}}"#, Some(7)),
            (
                Api::Gemini,
                r#"{"generationConfig":{"maxOutputTokens":8}}"#,
                Some(8),
            ),
        ] {
            assert_eq!(read(api, body).max_output_tokens, tokens, "{body}");
        }
    }
}
