//! Gemini `generateContent` → what each top-level key means; the model is in the path.
//!
//! Both spellings that the service accepts, camel case and snake case, mean the same.

use super::body::Key;
use super::message::Format;
use super::sink::Field;

/// Keys of the `generateContent` reference.
pub(super) fn key(name: &str) -> Option<Key> {
    Some(match name {
        "contents" => Key::Messages(Format::Gemini),
        "systemInstruction" | "system_instruction" => Key::SystemParts,
        "tools" => Key::Json(Field::Tools),
        "cachedContent" | "cached_content" => Key::ServerState,
        "generationConfig" | "generation_config" => Key::Settings,
        _ => return None,
    })
}
