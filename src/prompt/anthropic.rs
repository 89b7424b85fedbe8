//! Anthropic messages → what each top-level key means.
//!
//! Documented render order: tools, system, messages. `thinking` changes how earlier reasoning is stripped but not the
//! text of the prompt, and clients vary its budget between turns, so it is left out.

use super::body::Key;
use super::message::Format;
use super::sink::Field;

/// Keys of `types/message_create_params.py` of the Python client, and vLLM's `cache_salt`.
pub(super) fn key(name: &str) -> Option<Key> {
    Some(match name {
        "model" => Key::Model,
        "messages" => Key::Messages(Format::Chat),
        "system" => Key::System,
        "tools" => Key::Json(Field::Tools),
        "cache_salt" => Key::Text(Field::CacheSalt),
        "chat_template_kwargs" => Key::Arguments(Field::ChatTemplateKwargs),
        "max_tokens" => Key::MaxTokens,
        "stream" => Key::Stream,
        _ => return None,
    })
}
