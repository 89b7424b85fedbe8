//! Cohere chat, versions 1 and 2 → what each top-level key means.
//!
//! Version 1 sends the new message apart from the history, in front of which its preamble stands.

use super::body::{Key, Tail};
use super::message::Format;
use super::sink::Field;

/// Keys of `/v1/chat`.
pub(super) fn v1_key(name: &str) -> Option<Key> {
    Some(match name {
        "message" => Key::Tail(Tail::UserMessage),
        "chat_history" => Key::Messages(Format::CohereV1),
        "preamble" => Key::System,
        "conversation_id" => Key::ServerState,
        _ => return common_key(name),
    })
}

/// Keys of `/v2/chat`.
pub(super) fn v2_key(name: &str) -> Option<Key> {
    Some(match name {
        "messages" => Key::Messages(Format::Chat),
        _ => return common_key(name),
    })
}

fn common_key(name: &str) -> Option<Key> {
    Some(match name {
        "model" => Key::Model,
        "tools" => Key::Json(Field::Tools),
        "documents" => Key::Json(Field::Documents),
        "safety_mode" => Key::Json(Field::SafetyMode),
        "max_tokens" => Key::MaxTokens,
        "stream" => Key::Stream,
        _ => return None,
    })
}
