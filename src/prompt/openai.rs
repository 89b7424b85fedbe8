//! OpenAI's APIs as vLLM, SGLang, llama.cpp and hosted services serve them → what each top-level key means.
//!
//! Fields that constrain decoding without being rendered (`tool_choice`, `response_format`, sampling) are left out, as
//! are `add_generation_prompt` and `continue_final_message`: they act after the last message, and a conversation must
//! keep its keys between turns.

use super::body::{Key, Tail};
use super::message::Format;
use super::path::Api;
use super::sink::Field;

/// Keys of chat completions: vLLM `entrypoints/openai/chat_completion/protocol.py` and SGLang's `lora_path`.
pub(super) fn chat_key(name: &str) -> Option<Key> {
    Some(match name {
        "messages" => Key::Messages(Format::Chat),
        "tools" => Key::Json(Field::Tools),
        "functions" => Key::Json(Field::Functions),
        "documents" => Key::Json(Field::Documents),
        "chat_template" => Key::Text(Field::ChatTemplate),
        "chat_template_kwargs" => Key::Arguments(Field::ChatTemplateKwargs),
        "reasoning_effort" => Key::Json(Field::ReasoningEffort),
        "mm_processor_kwargs" => Key::Arguments(Field::MmProcessorKwargs),
        "media_io_kwargs" => Key::Arguments(Field::MediaIoKwargs),
        _ => return common_key(name),
    })
}

/// Keys of completions: vLLM `entrypoints/openai/completion/protocol.py`.
pub(super) fn completions_key(name: &str) -> Option<Key> {
    Some(match name {
        "prompt" => Key::Prompt,
        "suffix" => Key::Tail(Tail::Suffix),
        "prompt_embeds" => Key::Opaque,
        _ => return common_key(name),
    })
}

/// Keys of responses: `types/responses/response_create_params.py` of the Python client.
pub(super) fn responses_key(name: &str) -> Option<Key> {
    Some(match name {
        "input" => Key::Messages(Format::Responses),
        "instructions" => Key::System,
        "tools" => Key::Json(Field::Tools),
        "reasoning" => Key::Reasoning,
        "max_output_tokens" => Key::MaxTokens,
        "previous_response_id" | "conversation" => Key::ServerState,
        _ => return common_key(name),
    })
}

/// True where `base:adapter` in `model` names an adapter (SGLang); Ollama's colons mean a tag.
pub(super) fn names_adapters(api: Api) -> bool {
    matches!(api, Api::OpenAiChat | Api::OpenAiCompletions)
}

fn common_key(name: &str) -> Option<Key> {
    Some(match name {
        "model" => Key::Model,
        "stream" => Key::Stream,
        "max_tokens" | "max_completion_tokens" => Key::MaxTokens,
        "cache_salt" => Key::Text(Field::CacheSalt),
        "extra_key" => Key::Text(Field::ExtraKey),
        "lora_path" => Key::Adapters,
        "add_special_tokens" => Key::Json(Field::AddSpecialTokens),
        _ => return None,
    })
}
