//! The content of one message → text, pictures, tool calls and results.
//!
//! In: a string or a list of parts of any of the chat formats. Out: part events. A part of a kind that is not known here
//! becomes JSON, its keys sorted, so that prompts with other such parts still differ; none is ever skipped.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::NoPrompt;
use super::read::{Bag, BagSeed, OpenText, Reader, Str, is_null};
use super::sink::{Scope, SegmentSink};

impl<S: SegmentSink> Reader<'_, S> {
    /// The fields of a raw object.
    pub(crate) fn bag<'de, E: Error>(&mut self, raw: &'de RawValue) -> Result<Bag<'de>, E> {
        self.reread(raw, |reader, deserializer| {
            BagSeed(reader).deserialize(deserializer)
        })
    }
}

/// Reads content: null, a string, or parts. A string equals a list of one text part.
pub(crate) struct Content<'x, 'r, S>(pub(crate) &'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for Content<'_, '_, S> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.0.open_text = OpenText::Part;
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for Content<'_, '_, S> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text or parts")
    }
    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.0.open_text = OpenText::Closed;
        Ok(())
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.0.text_part(text);
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<(), A::Error> {
        self.0.open_text = OpenText::Closed;
        while parts.next_element_seed(Part(self.0))?.is_some() {}
        Ok(())
    }
}

struct Part<'x, 'r, S>(&'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for Part<'_, '_, S> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.0.open_text = OpenText::Part;
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for Part<'_, '_, S> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a part")
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.0.text_part(text);
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let reader = self.0;
        reader.open_text = OpenText::Closed;
        let mut is_text = false;
        let mut has_text = false;
        let mut rest = Bag::default();
        while let Some(Str(key)) = map.next_key()? {
            match key.as_ref() {
                "text" if has_text => return Err(reader.fail(NoPrompt::DuplicateKey)),
                // Whatever the type turns out to be, a text is rendered first: then it can be streamed in any key order.
                "text" => {
                    has_text = true;
                    map.next_value_seed(PartText(reader))?;
                }
                "cache_control" => {
                    map.next_value::<IgnoredAny>()?;
                }
                "type" => {
                    let kind = map.next_value()?;
                    is_text = matches!(
                        reader.string(kind)?.as_ref(),
                        "text" | "input_text" | "output_text"
                    );
                    rest.push(key, kind).map_err(|reason| reader.fail(reason))?;
                }
                _ if is_text => {
                    map.next_value::<IgnoredAny>()?;
                }
                _ => {
                    let value = map.next_value()?;
                    rest.push(key, value).map_err(|reason| reader.fail(reason))?;
                }
            }
        }
        if is_text {
            Ok(())
        } else {
            render_part(reader, rest, has_text)
        }
    }
}

/// The `text` of a part: a string or null.
struct PartText<'x, 'r, S>(&'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for PartText<'_, '_, S> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.0.open_text = OpenText::Part;
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for PartText<'_, '_, S> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text")
    }
    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.0.open_text = OpenText::Closed;
        Ok(())
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.0.text_part(text);
        Ok(())
    }
}

/// Renders what a part that is not plain text consists of.
fn render_part<S: SegmentSink, E: Error>(
    reader: &mut Reader<'_, S>,
    mut rest: Bag<'_>,
    has_text: bool,
) -> Result<(), E> {
    let Some(kind) = rest.first_of(&["type"]) else {
        return render_gemini_part(reader, rest, has_text);
    };
    let kind = reader.string(kind)?;
    match kind.as_ref() {
        "thinking" => match rest.first_of(&["thinking"]) {
            Some(text) => reader.scoped_json(Scope::Thinking, text),
            None => Ok(()),
        },
        "tool_use" => tool_call(reader, rest.raw("name"), rest.raw("input")),
        // Results do not nest in any known format; a nested one becomes JSON, whose depth the parser bounds.
        "tool_result" if !reader.in_tool_result => {
            reader.sink.open(Scope::ToolResult);
            if let Some(content) = rest.first_of(&["content"]) {
                reader.in_tool_result = true;
                reader.reread(content, |reader, deserializer| {
                    Content(reader).deserialize(deserializer)
                })?;
                reader.in_tool_result = false;
            }
            reader.sink.close();
            Ok(())
        }
        _ => {
            let keys: &[&str] = match media_kind(&kind) {
                Some(_) => &[
                    &kind,
                    "image_url",
                    "source",
                    "data",
                    "url",
                    "file_id",
                    "file_data",
                ],
                None => &[],
            };
            if let (Some(kind), Some(data)) = (media_kind(&kind), rest.first_of(keys))
                && reader.reread(data, |reader, deserializer| {
                    Media { reader, kind }.deserialize(deserializer)
                })?
            {
                return Ok(());
            }
            rest.remove("cache_control");
            other(reader, &rest)
        }
    }
}

/// A part without a type: Gemini names it by its key.
fn render_gemini_part<S: SegmentSink, E: Error>(
    reader: &mut Reader<'_, S>,
    mut rest: Bag<'_>,
    has_text: bool,
) -> Result<(), E> {
    rest.remove("thought");
    rest.remove("thoughtSignature");
    if rest.is_empty() && has_text {
        return Ok(());
    }
    if let Some(call) = rest.first_of(&["functionCall", "function_call"]) {
        let call = reader.bag(call)?;
        return tool_call(reader, call.raw("name"), call.raw("args"));
    }
    if let Some(response) = rest.first_of(&["functionResponse", "function_response"]) {
        let response = reader.bag(response)?;
        reader.sink.open(Scope::FunctionResponse);
        if let Some(name) = response.first_of(&["name"]) {
            reader.scoped_json(Scope::Name, name)?;
        }
        if let Some(value) = response.first_of(&["response"]) {
            reader.json(value)?;
        }
        reader.sink.close();
        return Ok(());
    }
    let data = rest.first_of(&["inlineData", "inline_data", "fileData", "file_data"]);
    if let Some(data) = data {
        let found = reader.reread(data, |reader, deserializer| {
            Media {
                reader,
                kind: "inlineData",
            }
            .deserialize(deserializer)
        })?;
        if found {
            return Ok(());
        }
    }
    other(reader, &rest)
}

/// A part or item of a kind that is not known here.
pub(crate) fn other<S: SegmentSink, E: Error>(reader: &mut Reader<'_, S>, rest: &Bag<'_>) -> Result<(), E> {
    reader.sink.open(Scope::Other);
    reader.sorted_json(rest)?;
    reader.sink.close();
    Ok(())
}

/// A tool call: its name, then its arguments, which are a string of JSON in some formats and JSON in others.
pub(crate) fn tool_call<S: SegmentSink, E: Error>(
    reader: &mut Reader<'_, S>,
    name: Option<&RawValue>,
    arguments: Option<&RawValue>,
) -> Result<(), E> {
    reader.sink.open(Scope::ToolCall);
    if let Some(name) = name.filter(|raw| !is_null(raw)) {
        reader.scoped_json(Scope::Name, name)?;
    }
    if let Some(arguments) = arguments.filter(|raw| !is_null(raw)) {
        reader.scoped_json(Scope::Arguments, arguments)?;
    }
    reader.sink.close();
    Ok(())
}

/// Reads the `tool_calls` of an assistant message.
pub(crate) struct Calls<'x, 'r, S>(pub(crate) &'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for Calls<'_, '_, S> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for Calls<'_, '_, S> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tool calls")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut calls: A) -> Result<(), A::Error> {
        let reader = self.0;
        while let Some(mut call) = calls.next_element_seed(BagSeed(reader))? {
            if let Some(function) = call.first_of(&["function"]) {
                let function = reader.bag(function)?;
                tool_call(reader, function.raw("name"), function.raw("arguments"))?;
            } else {
                call.remove("id");
                other(reader, &call)?;
            }
        }
        Ok(())
    }
}

/// Finds the URL or base64 text of a picture, clip or file: a string, an object that has it, or a list of either. True
/// where one was found.
pub(crate) struct Media<'x, 'r, S> {
    pub(crate) reader: &'x mut Reader<'r, S>,
    pub(crate) kind: &'static str,
}

impl<'de, S: SegmentSink> DeserializeSeed<'de> for Media<'_, '_, S> {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for Media<'_, '_, S> {
    type Value = bool;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a picture, clip or file")
    }
    fn visit_unit<E: Error>(self) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_str<E: Error>(self, data: &str) -> Result<bool, E> {
        self.reader.sink.media(self.kind, data);
        Ok(true)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<bool, A::Error> {
        let mut found = false;
        while let Some(one) = items.next_element_seed(Media {
            reader: self.reader,
            kind: self.kind,
        })? {
            found |= one;
        }
        Ok(found)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        // Only the value that counts has to be a string: which one that is may be known at the end only.
        let mut data: Option<(usize, &'de RawValue)> = None;
        while let Some(Str(key)) = map.next_key()? {
            let rank = MEDIA_KEYS.iter().position(|known| *known == key);
            match rank.filter(|rank| data.as_ref().is_none_or(|(best, _)| rank < best)) {
                Some(rank) => {
                    let value = map.next_value()?;
                    if !is_null(value) {
                        data = Some((rank, value));
                    }
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let Some((_, value)) = data else {
            return Ok(false);
        };
        let text = self.reader.string(value)?;
        self.reader.sink.media(self.kind, &text);
        Ok(true)
    }
}

fn media_kind(part_type: &str) -> Option<&'static str> {
    MEDIA_KINDS.iter().copied().find(|known| *known == part_type)
}

/// The part types that stand for a picture, clip or file.
const MEDIA_KINDS: [&str; 11] = [
    "image_url",
    "video_url",
    "audio_url",
    "input_image",
    "input_audio",
    "input_file",
    "file",
    "image",
    "audio",
    "video",
    "document",
];

/// Where an object keeps the data; the first in this order counts.
const MEDIA_KEYS: [&str; 8] = [
    "data",
    "url",
    "file_data",
    "file_id",
    "fileUri",
    "file_uri",
    "file_url",
    "uri",
];
