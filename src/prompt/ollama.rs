//! Ollama chat and generate (`api/types.go`) → what each top-level key means.
//!
//! `context` stands before the prompt but is sent after it, so it is part of the namespace.

use super::body::{Key, Tail};
use super::message::Format;
use super::sink::Field;

/// Keys of `/api/chat`.
pub(super) fn chat_key(name: &str) -> Option<Key> {
    Some(match name {
        "messages" => Key::Messages(Format::Chat),
        "tools" => Key::Json(Field::Tools),
        _ => return common_key(name),
    })
}

/// Keys of `/api/generate`.
pub(super) fn generate_key(name: &str) -> Option<Key> {
    Some(match name {
        "prompt" => Key::Prompt,
        "system" => Key::System,
        "template" => Key::Text(Field::ChatTemplate),
        "raw" => Key::Json(Field::Raw),
        "context" => Key::Json(Field::Context),
        "suffix" => Key::Tail(Tail::Suffix),
        "images" => Key::Tail(Tail::Images),
        _ => return common_key(name),
    })
}

fn common_key(name: &str) -> Option<Key> {
    Some(match name {
        "model" => Key::Model,
        "think" => Key::Json(Field::Think),
        "options" => Key::Settings,
        "stream" => Key::Stream,
        _ => return None,
    })
}
