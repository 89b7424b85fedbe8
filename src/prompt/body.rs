//! The top level of a request body → namespace fields, messages, and what else a router needs to know.
//!
//! In: an object of any of the APIs, keys in any order. Out: events on the sink and [`Facts`]. Which key means what is
//! said by one table for each API family; a key that no table names is skipped without being looked at.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::message::{Format, Messages};
use super::part::{Content, Media};
use super::path::Api;
use super::read::{Bag, Json, PromptSeed, Reader, Str, is_null};
use super::session::{SESSION_FIELD_COUNT, SessionField};
use super::sink::{Field, SegmentSink};
use super::{MAX_MODEL_BYTES, NoPrompt};
use super::{anthropic, cohere, gemini, generate, ollama, openai};
use crate::chunk::name_hash;

/// What a key at the top level of a body means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    /// Model name.
    Model,
    /// A namespace field that is a string.
    Text(Field),
    /// A namespace field of any type, key order kept: the engine renders it as it stands.
    Json(Field),
    /// A namespace field that is an object of arguments, whose order does not matter.
    Arguments(Field),
    /// System text beside the messages.
    System,
    /// System text inside an object with `parts`.
    SystemParts,
    /// An object with the reasoning `effort`.
    Reasoning,
    /// The messages.
    Messages(Format),
    /// The prompt of a completion.
    Prompt,
    /// Something that is rendered after the prompt, whatever the order of keys.
    Tail(Tail),
    /// Adapter name, or a list of them for a batch.
    Adapters,
    /// An object with sampling settings, in which an adapter or the longest answer may be named.
    Settings,
    /// Longest answer.
    MaxTokens,
    /// Whether the answer is streamed.
    Stream,
    /// The head of the prompt is held by a server.
    ServerState,
    /// The prompt is there but not as text.
    Opaque,
}

/// What follows the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tail {
    /// Text behind the gap that the model fills.
    Suffix = 0,
    /// Pictures of a completion.
    Images = 1,
    /// The new message of Cohere v1.
    UserMessage = 2,
}

/// What a body says beside its prompt.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    pub(crate) model: Option<String>,
    pub(crate) model_hash: Option<u64>,
    pub(crate) adapter: Option<u64>,
    pub(crate) has_adapter_key: bool,
    pub(crate) max_output_tokens: Option<u32>,
    pub(crate) stream: bool,
    pub(crate) sessions: [Option<u64>; SESSION_FIELD_COUNT],
    pub(crate) has_server_state: bool,
    pub(crate) has_prompt: bool,
    pub(crate) is_opaque: bool,
    pub(crate) is_object: bool,
}

/// Reads a whole body.
pub(crate) struct Body<'x, 'r, S, H> {
    pub(crate) reader: &'x mut Reader<'r, S>,
    pub(crate) facts: &'x mut Facts,
    pub(crate) api: Api,
    /// Hashes a session value.
    pub(crate) session_hash: H,
}

impl<'de, S: SegmentSink, H: Fn(&str) -> u64> DeserializeSeed<'de> for Body<'_, '_, S, H> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, S: SegmentSink, H: Fn(&str) -> u64> Visitor<'de> for Body<'_, '_, S, H> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        self.facts.is_object = true;
        let path_names_model = self.facts.model_hash.is_some();
        let mut seen: u64 = 0;
        let mut tails: [Option<&'de RawValue>; 3] = [None; 3];
        // A number cut by the limit looks whole, so it counts only when another key or the end follows.
        let mut held_max_tokens = None;
        while let Some(Str(name)) = map.next_key()? {
            self.facts.max_output_tokens = held_max_tokens.max(self.facts.max_output_tokens);
            let session = SessionField::of_key(&name);
            let Some(key) = self.key(&name) else {
                match session {
                    Some(field) => self.session(field, map.next_value()?)?,
                    None => {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                continue;
            };
            let bit = key.bit();
            if seen & bit != 0 {
                // A prompt has several names, and clients send those that they do not use as null.
                if key == Key::Prompt && is_null(map.next_value()?) {
                    continue;
                }
                return Err(self.reader.fail(NoPrompt::DuplicateKey));
            }
            seen |= bit;
            match key {
                Key::Model if path_names_model => {
                    map.next_value::<IgnoredAny>()?;
                }
                Key::Model => {
                    if let Some(Str(model)) = map.next_value::<Option<Str<'de>>>()? {
                        self.facts.set_model(self.reader, &model);
                        // An adapter with a key of its own is stronger, wherever it stands.
                        if let Some((_, adapter)) = model
                            .split_once(':')
                            .filter(|_| openai::names_adapters(self.api) && !self.facts.has_adapter_key)
                        {
                            self.facts.adapter = Some(name_hash(adapter.as_bytes()));
                        }
                    }
                }
                Key::Text(field) => {
                    if let Some(Str(text)) = map.next_value::<Option<Str<'de>>>()? {
                        self.reader.text_field(field, &text);
                    }
                }
                Key::Json(field) => {
                    self.reader.field_start(field);
                    map.next_value_seed(OptionalJson(self.reader))?;
                    self.reader.field_end();
                }
                Key::Arguments(field) => {
                    let raw: &'de RawValue = map.next_value()?;
                    self.reader.field_start(field);
                    if raw.get().starts_with('{') {
                        let arguments = self.reader.bag(raw)?;
                        self.reader.sorted_json(&arguments)?;
                    } else if !is_null(raw) {
                        self.reader.json(raw)?;
                    }
                    self.reader.field_end();
                }
                Key::System => {
                    self.reader.field_start(Field::System);
                    map.next_value_seed(Content(self.reader))?;
                    self.reader.field_end();
                }
                Key::SystemParts => {
                    let raw: &'de RawValue = map.next_value()?;
                    self.reader.field_start(Field::System);
                    let parts = if raw.get().starts_with('{') {
                        self.reader.bag(raw)?.raw("parts")
                    } else {
                        Some(raw)
                    };
                    if let Some(parts) = parts {
                        self.reader.reread(parts, |reader, deserializer| {
                            Content(reader).deserialize(deserializer)
                        })?;
                    }
                    self.reader.field_end();
                }
                Key::Reasoning => {
                    let raw: &'de RawValue = map.next_value()?;
                    if !is_null(raw) {
                        let reasoning = self.reader.bag(raw)?;
                        if let Some(effort) = reasoning.first_of(&["effort"]) {
                            self.reader.field_start(Field::ReasoningEffort);
                            self.reader.json(effort)?;
                            self.reader.field_end();
                        }
                    }
                }
                Key::Messages(format) => {
                    let has_messages = map.next_value_seed(Messages(self.reader, format))?;
                    self.facts.has_prompt |= has_messages;
                }
                Key::Prompt => {
                    if map.next_value_seed(PromptSeed(self.reader))? {
                        self.facts.has_prompt = true;
                    } else {
                        seen &= !bit;
                    }
                }
                Key::Tail(tail) => {
                    if let Some(slot) = tails.get_mut(tail as usize) {
                        *slot = Some(map.next_value()?);
                    }
                }
                Key::Adapters => self.adapters(map.next_value()?)?,
                Key::Settings => {
                    let raw: &'de RawValue = map.next_value()?;
                    if raw.get().starts_with('{') {
                        let settings = self.reader.bag(raw)?;
                        self.settings(&settings)?;
                    }
                }
                Key::MaxTokens => held_max_tokens = whole_number(map.next_value()?),
                Key::Stream => {
                    let raw: &'de RawValue = map.next_value()?;
                    self.facts.stream |= raw.get() == "true";
                }
                Key::ServerState => {
                    let raw: &'de RawValue = map.next_value()?;
                    self.facts.has_server_state |= !is_null(raw);
                    if let Some(field) = session {
                        self.session(field, raw)?;
                    }
                }
                Key::Opaque => {
                    let raw: &'de RawValue = map.next_value()?;
                    self.facts.is_opaque |= !is_null(raw);
                }
            }
        }
        self.facts.max_output_tokens = held_max_tokens.max(self.facts.max_output_tokens);
        self.render_tails(tails)
    }
}

impl<S: SegmentSink, H: Fn(&str) -> u64> Body<'_, '_, S, H> {
    fn key(&self, name: &str) -> Option<Key> {
        match self.api {
            Api::OpenAiChat => openai::chat_key(name),
            Api::OpenAiCompletions => openai::completions_key(name),
            Api::OpenAiResponses => openai::responses_key(name),
            Api::AnthropicMessages => anthropic::key(name),
            Api::Generate => generate::key(name),
            Api::VllmTokensIn => generate::tokens_in_key(name),
            Api::OllamaChat => ollama::chat_key(name),
            Api::OllamaGenerate => ollama::generate_key(name),
            Api::Gemini => gemini::key(name),
            Api::CohereV1Chat => cohere::v1_key(name),
            Api::CohereV2Chat => cohere::v2_key(name),
        }
    }

    /// Takes a session hint; an unusable one is no reason to lose the prompt.
    fn session<E: Error>(&mut self, field: SessionField, raw: &RawValue) -> Result<(), E> {
        let value = if raw.get().starts_with('{') {
            self.reader.reread(raw, |_, deserializer| {
                Nested(field.nested_key()).deserialize(deserializer)
            })?
        } else {
            field.may_be_string().then_some(raw)
        };
        if let Some(value) = value.filter(|raw| raw.get().starts_with('"')) {
            let value = self.reader.string(value)?;
            if let (false, Some(slot)) = (value.is_empty(), self.facts.sessions.get_mut(field as usize)) {
                *slot = Some((self.session_hash)(&value));
            }
        }
        if field == SessionField::SessionParamsId && !is_null(raw) {
            self.facts.has_server_state = true;
        }
        Ok(())
    }

    /// One adapter for the whole request, or a list for a batch that must agree.
    fn adapters<E: Error>(&mut self, raw: &RawValue) -> Result<(), E> {
        if is_null(raw) {
            return Ok(());
        }
        if !raw.get().starts_with('[') {
            let name = self.reader.string(raw)?;
            return self.adapter(&name);
        }
        let (first, is_mixed) = self
            .reader
            .reread(raw, |_, deserializer| deserializer.deserialize_seq(AdapterNames))?;
        if is_mixed {
            return Err(self.reader.fail(NoPrompt::MixedAdapters));
        }
        first.map_or(Ok(()), |name| self.adapter(&name.0))
    }

    /// The adapter that a key of its own names; an empty name is none.
    fn adapter<E: Error>(&mut self, name: &str) -> Result<(), E> {
        if name.is_empty() {
            return Ok(());
        }
        if self.facts.has_adapter_key {
            return Err(self.reader.fail(NoPrompt::DuplicateKey));
        }
        self.facts.has_adapter_key = true;
        self.reader.text_field(Field::Adapter, name);
        self.facts.adapter = Some(name_hash(name.as_bytes()));
        Ok(())
    }

    fn settings<E: Error>(&mut self, settings: &Bag<'_>) -> Result<(), E> {
        if let Some(name) = settings.first_of(&["adapter_id"]) {
            let name = self.reader.string(name)?;
            self.adapter(&name)?;
        }
        let longest = settings
            .first_of(&["max_new_tokens", "max_tokens", "maxOutputTokens", "num_predict"])
            .and_then(whole_number);
        self.facts.max_output_tokens = longest.max(self.facts.max_output_tokens);
        Ok(())
    }

    fn render_tails<E: Error>(&mut self, tails: [Option<&RawValue>; 3]) -> Result<(), E> {
        let [suffix, images, user_message] = tails.map(|tail| tail.filter(|raw| !is_null(raw)));
        if let Some(suffix) = suffix {
            let text = self.reader.string(suffix)?;
            if !text.is_empty() {
                self.reader.message_start("suffix");
                self.reader.text_part(&text);
                self.reader.message_end();
            }
        }
        if let Some(images) = images {
            self.reader.message_start("prompt");
            self.reader.reread(images, |reader, deserializer| {
                Media {
                    reader,
                    kind: "image_data",
                }
                .deserialize(deserializer)
            })?;
            self.reader.message_end();
        }
        if let Some(message) = user_message {
            self.facts.has_prompt = true;
            self.reader.message_start("user");
            let text = self.reader.string(message)?;
            self.reader.text_part(&text);
            self.reader.message_end();
        }
        Ok(())
    }
}

impl Facts {
    /// Takes the model's name, of which a long one is kept as a hash only.
    pub(crate) fn set_model<S: SegmentSink>(&mut self, reader: &mut Reader<'_, S>, model: &str) {
        self.model = (model.len() <= MAX_MODEL_BYTES).then(|| model.to_owned());
        self.model_hash = Some(name_hash(model.as_bytes()));
        reader.text_field(Field::Model, model);
    }
}

/// Reads a list of adapter names: the first, and whether another differs. Only the first is kept, since the list may be as
/// long as the body.
struct AdapterNames;

impl<'de> Visitor<'de> for AdapterNames {
    type Value = (Option<Str<'de>>, bool);
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of names")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<Self::Value, A::Error> {
        let first: Option<Str<'de>> = names.next_element()?.flatten();
        let mut is_mixed = false;
        while let Some(name) = names.next_element::<Option<Str<'de>>>()? {
            is_mixed |= name.as_ref().map(|name| &name.0) != first.as_ref().map(|first| &first.0);
        }
        Ok((first, is_mixed))
    }
}

impl Key {
    /// A bit of its own for every key that must not come twice, else zero.
    const fn bit(self) -> u64 {
        match self {
            Self::Text(field) | Self::Json(field) | Self::Arguments(field) => 1 << (field as u8),
            Self::Model => 1 << 32,
            Self::System | Self::SystemParts => 1 << 33,
            Self::Reasoning => 1 << 34,
            Self::Messages(_) => 1 << 35,
            Self::Prompt => 1 << 36,
            Self::Tail(Tail::Suffix) => 1 << 37,
            Self::Tail(Tail::Images) => 1 << 38,
            Self::Tail(Tail::UserMessage) => 1 << 39,
            Self::Adapters => 1 << 40,
            Self::Stream => 1 << 41,
            Self::Settings | Self::MaxTokens | Self::ServerState | Self::Opaque => 0,
        }
    }
}

/// Any JSON value; null leaves the field empty.
struct OptionalJson<'x, 'r, S>(&'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for OptionalJson<'_, '_, S> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for OptionalJson<'_, '_, S> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }
    fn visit_none<E: Error>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        Json(self.0).deserialize(deserializer)
    }
}

/// The value of one key of an object, the last where it comes twice.
struct Nested(&'static str);

impl<'de> DeserializeSeed<'de> for Nested {
    type Value = Option<&'de RawValue>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Nested {
    type Value = Option<&'de RawValue>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut value = None;
        while let Some(Str(key)) = map.next_key()? {
            if key == self.0 {
                value = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(value)
    }
}

/// A count as JSON spells it, also as `64.0`; `None` for anything else.
fn whole_number(raw: &RawValue) -> Option<u32> {
    let (digits, fraction) = raw.get().split_once('.').unwrap_or((raw.get(), ""));
    fraction
        .bytes()
        .all(|digit| digit == b'0')
        .then(|| digits.parse().ok())
        .flatten()
}
