//! The engines' own routes → what each top-level key means: SGLang and TGI on `/generate`, vLLM tokens in.
//!
//! SGLang and TGI share a path and no key, so one table serves both.

use super::body::{Key, Tail};
use super::sink::Field;

/// SGLang `srt/managers/io_struct.py` and TGI `router/src/lib.rs`.
pub(super) fn key(name: &str) -> Option<Key> {
    Some(match name {
        "text" | "input_ids" | "inputs" => Key::Prompt,
        "input_embeds" => Key::Opaque,
        "image_data" => Key::Tail(Tail::Images),
        "lora_path" => Key::Adapters,
        "cache_salt" => Key::Text(Field::CacheSalt),
        "extra_key" => Key::Text(Field::ExtraKey),
        "parameters" | "sampling_params" => Key::Settings,
        "stream" => Key::Stream,
        _ => return None,
    })
}

/// vLLM `entrypoints/serve/disagg/protocol.py`.
pub(super) fn tokens_in_key(name: &str) -> Option<Key> {
    Some(match name {
        "model" => Key::Model,
        "token_ids" => Key::Prompt,
        "sampling_params" => Key::Settings,
        "cache_salt" => Key::Text(Field::CacheSalt),
        "stream" => Key::Stream,
        _ => return None,
    })
}
