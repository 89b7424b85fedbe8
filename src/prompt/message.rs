//! One message or item of a conversation → its role and parts.
//!
//! In: an object of any of the chat formats, keys in any order. Out: message events in a fixed order: role, content,
//! pictures, plan, tool calls, name. Content is streamed as soon as the role is known and kept as a slice until then.
//! Fields that templates do not render in later turns (reasoning text, refusals, annotations, ids of tool calls) and
//! marks that move between turns (`cache_control`) leave no trace.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::NoPrompt;
use super::part::{Calls, Content, Media, other, tool_call};
use super::read::{Bag, OpenText, Reader, Str, is_null};
use super::sink::{Scope, SegmentSink};

/// Which format the messages of a body have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// `role` and `content`: OpenAI, Anthropic, Ollama, Cohere v2.
    Chat,
    /// The items of OpenAI responses.
    Responses,
    /// `role` and `parts`; a missing role is the user's.
    Gemini,
    /// `role` and `message`.
    CohereV1,
}

impl Format {
    const fn content_key(self) -> &'static str {
        match self {
            Self::Chat | Self::Responses => "content",
            Self::Gemini => "parts",
            Self::CohereV1 => "message",
        }
    }

    /// True for fields that are rendered beside the content.
    fn keeps(self, key: &str) -> bool {
        match self {
            Self::Chat | Self::CohereV1 => {
                matches!(
                    key,
                    "images" | "tool_plan" | "tool_calls" | "function_call" | "name"
                )
            }
            Self::Responses => true,
            Self::Gemini => false,
        }
    }
}

/// Reads a list of messages. True where it was not null.
pub(crate) struct Messages<'x, 'r, S>(pub(crate) &'x mut Reader<'r, S>, pub(crate) Format);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for Messages<'_, '_, S> {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        if self.1 == Format::Responses {
            self.0.open_text = OpenText::Message(USER_ROLE);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for Messages<'_, '_, S> {
    type Value = bool;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("messages")
    }
    fn visit_unit<E: Error>(self) -> Result<bool, E> {
        self.0.open_text = OpenText::Closed;
        Ok(false)
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<bool, E> {
        if self.1 != Format::Responses {
            return Err(self.0.fail(NoPrompt::WrongType));
        }
        self.0.message_start(USER_ROLE);
        self.0.text_part(text);
        self.0.message_end();
        Ok(true)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<bool, A::Error> {
        self.0.open_text = OpenText::Closed;
        while items
            .next_element_seed(Message {
                reader: self.0,
                format: self.1,
            })?
            .is_some()
        {}
        Ok(true)
    }
}

struct Message<'x, 'r, S> {
    reader: &'x mut Reader<'r, S>,
    format: Format,
}

impl<'de, S: SegmentSink> DeserializeSeed<'de> for Message<'_, '_, S> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for Message<'_, '_, S> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { reader, format } = self;
        let mut has_role = false;
        let mut has_content = false;
        let mut early_content: Option<&'de RawValue> = None;
        let mut rest = Bag::default();
        while let Some(Str(key)) = map.next_key()? {
            if key == "role" {
                if has_role {
                    return Err(reader.fail(NoPrompt::DuplicateKey));
                }
                has_role = true;
                let role: Str<'de> = map.next_value()?;
                reader.message_start(&role.0);
                if let Some(content) = early_content.take() {
                    reread_content(reader, content)?;
                }
            } else if key == format.content_key() {
                if has_content {
                    return Err(reader.fail(NoPrompt::DuplicateKey));
                }
                has_content = true;
                if has_role {
                    map.next_value_seed(Content(reader))?;
                } else {
                    early_content = Some(map.next_value()?);
                }
            } else if format.keeps(&key) {
                let value = map.next_value()?;
                rest.push(key, value).map_err(|reason| reader.fail(reason))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if format == Format::Responses {
            return finish_item(reader, has_role, early_content, rest);
        }
        if !has_role {
            if format != Format::Gemini {
                return Err(reader.fail(NoPrompt::WrongType));
            }
            reader.message_start(USER_ROLE);
            if let Some(content) = early_content {
                reread_content(reader, content)?;
            }
        }
        render_rest(reader, &rest)?;
        reader.message_end();
        Ok(())
    }
}

fn reread_content<S: SegmentSink, E: Error>(reader: &mut Reader<'_, S>, content: &RawValue) -> Result<(), E> {
    reader.reread(content, |reader, deserializer| {
        Content(reader).deserialize(deserializer)
    })
}

/// What a chat message has beside its content, in a fixed order.
fn render_rest<S: SegmentSink, E: Error>(reader: &mut Reader<'_, S>, rest: &Bag<'_>) -> Result<(), E> {
    if rest.is_empty() {
        return Ok(());
    }
    if let Some(images) = rest.first_of(&["images"]) {
        reader.reread(images, |reader, deserializer| {
            Media {
                reader,
                kind: "images",
            }
            .deserialize(deserializer)
        })?;
    }
    if let Some(plan) = rest.first_of(&["tool_plan"]) {
        reader.scoped_json(Scope::Thinking, plan)?;
    }
    if let Some(calls) = rest.first_of(&["tool_calls"]) {
        reader.reread(calls, |reader, deserializer| {
            Calls(reader).deserialize(deserializer)
        })?;
    }
    if let Some(call) = rest.first_of(&["function_call"]) {
        let call = reader.bag(call)?;
        tool_call(reader, call.raw("name"), call.raw("arguments"))?;
    }
    if let Some(name) = rest.first_of(&["name"]) {
        reader.scoped_json(Scope::Name, name)?;
    }
    Ok(())
}

/// Ends an item of OpenAI responses, of which only its type says what it is.
fn finish_item<'de, S: SegmentSink, E: Error>(
    reader: &mut Reader<'_, S>,
    has_role: bool,
    early_content: Option<&'de RawValue>,
    mut rest: Bag<'de>,
) -> Result<(), E> {
    let kind = match rest.first_of(&["type"]) {
        Some(raw) => reader.string(raw)?,
        None => Cow::Borrowed("message"),
    };
    match kind.as_ref() {
        "message" if !has_role => return Err(reader.fail(NoPrompt::WrongType)),
        "message" => {}
        "function_call" => {
            if !has_role {
                reader.message_start("assistant");
            }
            tool_call(reader, rest.raw("name"), rest.raw("arguments"))?;
        }
        "function_call_output" => {
            if !has_role {
                reader.message_start("tool");
            }
            if let Some(output) = rest.first_of(&["output"]) {
                reread_content(reader, output)?;
            }
        }
        _ => {
            if !has_role {
                reader.message_start("assistant");
            }
            if let Some(content) = early_content.filter(|raw| !has_role && !is_null(raw)) {
                rest.push(Cow::Borrowed("content"), content)
                    .map_err(|reason| reader.fail(reason))?;
            }
            other(reader, &rest)?;
        }
    }
    reader.message_end();
    Ok(())
}

const USER_ROLE: &str = "user";
