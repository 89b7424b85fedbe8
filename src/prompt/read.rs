//! The pieces that every body format is read with: keys, raw values, text, token ids, any JSON.
//!
//! In: a `serde_json` pull parser over untrusted bytes. Out: events on a [`SegmentSink`]. Nothing here builds a tree of
//! values; what cannot be rendered yet (its role is still to come) is kept as a slice of the body. Raw slices are read
//! again by a parser of their own, so the code, not the body, bounds how deep that goes.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize as _;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::NoPrompt;
use super::sink::{Field, Scalar, Scope, SegmentSink};
use crate::chunk::len_u32;

/// What the readers of one body share.
pub(crate) struct Reader<'r, S> {
    pub(crate) sink: &'r mut S,
    /// Why the body yields no prompt, where an error of the parser alone would not say it.
    pub(crate) failure: Option<NoPrompt>,
    /// The text value being read; its head counts where the body is cut inside it.
    pub(crate) open_text: OpenText,
    pub(crate) in_tool_result: bool,
    volatile_heads: &'r [String],
    message_system_text: SystemText,
    field_system_text: SystemText,
    in_system_field: bool,
}

/// Where the text value that is being read belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpenText {
    /// None is being read.
    Closed,
    /// It is the next part of the open message or field.
    Part,
    /// It is a whole message of this role, not yet started.
    Message(&'static str),
}

/// Whether the first system text, the only one with a volatile head, has passed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SystemText {
    Awaited,
    Next,
    Passed,
}

impl<'r, S: SegmentSink> Reader<'r, S> {
    pub(crate) fn new(sink: &'r mut S, volatile_heads: &'r [String]) -> Self {
        Self {
            sink,
            failure: None,
            open_text: OpenText::Closed,
            in_tool_result: false,
            volatile_heads,
            message_system_text: SystemText::Awaited,
            field_system_text: SystemText::Awaited,
            in_system_field: false,
        }
    }

    pub(crate) fn message_start(&mut self, role: &str) {
        if self.message_system_text == SystemText::Awaited && matches!(role, "system" | "developer") {
            self.message_system_text = SystemText::Next;
        }
        self.sink.message_start(role);
    }

    pub(crate) fn message_end(&mut self) {
        if self.message_system_text == SystemText::Next {
            self.message_system_text = SystemText::Passed;
        }
        self.sink.message_end();
    }

    pub(crate) fn field_start(&mut self, field: Field) {
        self.in_system_field = field == Field::System;
        if self.in_system_field && self.field_system_text == SystemText::Awaited {
            self.field_system_text = SystemText::Next;
        }
        self.sink.field_start(field);
    }

    pub(crate) fn field_end(&mut self) {
        self.in_system_field = false;
        self.sink.field_end();
    }

    /// A namespace field that is one string.
    pub(crate) fn text_field(&mut self, field: Field, text: &str) {
        self.field_start(field);
        self.sink.text(text);
        self.field_end();
    }

    /// A text part.
    pub(crate) fn text_part(&mut self, text: &str) {
        self.open_text = OpenText::Closed;
        self.sink.open(Scope::Text);
        self.part_text(text, false);
        self.sink.close();
    }

    /// The head of the text part in which the body was cut.
    pub(crate) fn cut_text_part(&mut self, text: &str) {
        if let OpenText::Message(role) = self.open_text {
            self.message_start(role);
        }
        self.sink.open(Scope::Text);
        self.part_text(text, true);
    }

    /// A further string inside the open scope.
    pub(crate) fn scoped_text(&mut self, scope: Scope, text: &str) {
        self.sink.open(scope);
        self.sink.text(text);
        self.sink.close();
    }

    fn part_text(&mut self, text: &str, is_cut: bool) {
        let state = if self.in_system_field {
            &mut self.field_system_text
        } else {
            &mut self.message_system_text
        };
        if *state != SystemText::Next {
            self.sink.text(text);
            return;
        }
        *state = SystemText::Passed;
        let is_volatile = self
            .volatile_heads
            .iter()
            .any(|head| text.starts_with(head.as_str()) || (is_cut && head.starts_with(text)));
        let head_bytes = match memchr::memchr(b'\n', text.as_bytes()) {
            _ if !is_volatile => 0,
            Some(newline_at) => newline_at + 1,
            None => text.len(),
        };
        let (head, rest) = text.split_at_checked(head_bytes).unwrap_or(("", text));
        if !head.is_empty() {
            self.sink.skipped_text(head);
        }
        self.sink.text(rest);
    }

    /// An error that carries its reason beside it.
    pub(crate) fn fail<E: Error>(&mut self, reason: NoPrompt) -> E {
        self.failure = Some(reason);
        E::custom("")
    }

    /// Reads a raw value again, this time into the sink.
    pub(crate) fn reread<'de, T, E, F>(&mut self, raw: &'de RawValue, read: F) -> Result<T, E>
    where
        E: Error,
        F: FnOnce(&mut Self, &mut SliceDeserializer<'de>) -> Result<T, serde_json::Error>,
    {
        let mut deserializer = serde_json::Deserializer::from_slice(raw.get().as_bytes());
        read(self, &mut deserializer).map_err(|error| {
            let reason = self.failure.unwrap_or_else(|| NoPrompt::from_error(&error));
            self.fail(reason)
        })
    }

    /// Any JSON value, key order kept.
    pub(crate) fn json<E: Error>(&mut self, raw: &RawValue) -> Result<(), E> {
        self.reread(raw, |reader, deserializer| Json(reader).deserialize(deserializer))
    }

    /// Text of a raw string inside `scope`; a raw value of another type as JSON.
    pub(crate) fn scoped_json<E: Error>(&mut self, scope: Scope, raw: &RawValue) -> Result<(), E> {
        self.sink.open(scope);
        if raw.get().starts_with('"') {
            let text = self.string(raw)?;
            self.sink.text(&text);
        } else {
            self.json(raw)?;
        }
        self.sink.close();
        Ok(())
    }

    /// The string that a raw value must be.
    pub(crate) fn string<'de, E: Error>(&mut self, raw: &'de RawValue) -> Result<Cow<'de, str>, E> {
        self.reread(raw, |_, deserializer| {
            Str::deserialize(deserializer).map(|text| text.0)
        })
    }

    /// An object's fields in the order of their keys.
    pub(crate) fn sorted_json<E: Error>(&mut self, fields: &Bag<'_>) -> Result<(), E> {
        self.sink.open(Scope::Object);
        for (key, value) in &fields.0 {
            self.scoped_text(Scope::Key, key);
            self.json(value)?;
        }
        self.sink.close();
        Ok(())
    }
}

/// The one parser type of this crate.
pub(crate) type SliceDeserializer<'de> = serde_json::Deserializer<serde_json::de::SliceRead<'de>>;

/// True for a raw `null`.
pub(crate) fn is_null(raw: &RawValue) -> bool {
    raw.get() == "null"
}

/// A string, borrowed from the body unless it holds escapes.
pub(crate) struct Str<'de>(pub(crate) Cow<'de, str>);

impl<'de> serde::Deserialize<'de> for Str<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StrVisitor;
        impl<'de> Visitor<'de> for StrVisitor {
            type Value = Str<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Str(Cow::Borrowed(text)))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Str(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(StrVisitor)
    }
}

/// Fields put aside until it is known what they are part of, in the order of their keys.
#[derive(Default)]
pub(crate) struct Bag<'de>(Vec<(Cow<'de, str>, &'de RawValue)>);

impl<'de> Bag<'de> {
    /// Puts a field aside.
    ///
    /// # Errors
    /// Refuses a key twice, and more keys than any known part has.
    pub(crate) fn push(&mut self, key: Cow<'de, str>, value: &'de RawValue) -> Result<(), NoPrompt> {
        if self.0.len() >= MAX_BAG_FIELDS {
            return Err(NoPrompt::WrongType);
        }
        let at = self
            .0
            .iter()
            .position(|field| field.0 >= key)
            .unwrap_or(self.0.len());
        if self.0.get(at).is_some_and(|field| field.0 == key) {
            return Err(NoPrompt::DuplicateKey);
        }
        self.0.push((key, value));
        if let Some(after) = self.0.get_mut(at..) {
            after.rotate_right(1);
        }
        Ok(())
    }

    /// The value of a key.
    pub(crate) fn raw(&self, key: &str) -> Option<&'de RawValue> {
        self.0.iter().find(|field| field.0 == key).map(|field| field.1)
    }

    /// The value of the first of `keys` that is there and not null.
    pub(crate) fn first_of(&self, keys: &[&str]) -> Option<&'de RawValue> {
        keys.iter()
            .find_map(|key| self.raw(key).filter(|raw| !is_null(raw)))
    }

    /// Removes the value of a key.
    pub(crate) fn remove(&mut self, key: &str) {
        self.0.retain(|field| field.0 != key);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Reads an object into a bag.
pub(crate) struct BagSeed<'x, 'r, S>(pub(crate) &'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for BagSeed<'_, '_, S> {
    type Value = Bag<'de>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for BagSeed<'_, '_, S> {
    type Value = Bag<'de>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut bag = Bag::default();
        while let Some(key) = map.next_key::<Str<'de>>()? {
            let value = map.next_value()?;
            bag.push(key.0, value).map_err(|reason| self.0.fail(reason))?;
        }
        Ok(bag)
    }
}

/// Reads any JSON value into the sink: white space and escapes leave no trace, the order of keys does.
pub(crate) struct Json<'x, 'r, S>(pub(crate) &'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for Json<'_, '_, S> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for Json<'_, '_, S> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }
    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.0.sink.scalar(Scalar::Null);
        Ok(())
    }
    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        self.0.sink.scalar(Scalar::Bool(value));
        Ok(())
    }
    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.0.sink.scalar(Scalar::Unsigned(value));
        Ok(())
    }
    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.0.sink.scalar(Scalar::Signed(value));
        Ok(())
    }
    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        self.0.sink.scalar(Scalar::Float(value));
        Ok(())
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.0.scoped_text(Scope::Str, text);
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.0.sink.open(Scope::Array);
        while items.next_element_seed(Json(self.0))?.is_some() {}
        self.0.sink.close();
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.0.sink.open(Scope::Object);
        while let Some(key) = map.next_key::<Str<'de>>()? {
            self.0.scoped_text(Scope::Key, &key.0);
            map.next_value_seed(Json(self.0))?;
        }
        self.0.sink.close();
        Ok(())
    }
}

/// Reads the prompt of a completion: a string, strings, token ids, or lists of token ids. True where it was not null.
///
/// Of a batch the first prompt is the key, because all go to one host; the others count as work.
pub(crate) struct PromptSeed<'x, 'r, S>(pub(crate) &'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for PromptSeed<'_, '_, S> {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        self.0.open_text = OpenText::Message(PROMPT_ROLE);
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for PromptSeed<'_, '_, S> {
    type Value = bool;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prompt")
    }
    fn visit_unit<E: Error>(self) -> Result<bool, E> {
        self.0.open_text = OpenText::Closed;
        Ok(false)
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<bool, E> {
        self.0.message_start(PROMPT_ROLE);
        self.0.text_part(text);
        self.0.message_end();
        Ok(true)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<bool, A::Error> {
        let reader = self.0;
        reader.open_text = OpenText::Closed;
        reader.message_start(PROMPT_ROLE);
        let mut batch_bytes: u32 = 0;
        match items.next_element_seed(PromptItem(reader))? {
            None => {}
            Some(FirstItem::Token(first)) => read_tokens(reader, Some(first), items)?,
            Some(FirstItem::Whole) => {
                while let Some(other) = items.next_element::<&RawValue>()? {
                    batch_bytes = batch_bytes.saturating_add(prompt_bytes(reader, other)?);
                }
            }
        }
        reader.message_end();
        reader.sink.batch_bytes(batch_bytes);
        Ok(true)
    }
}

/// Length of a further prompt of a batch: its text, or four bytes for each token id. A list of `IgnoredAny` takes no memory.
fn prompt_bytes<S: SegmentSink, E: Error>(reader: &mut Reader<'_, S>, prompt: &RawValue) -> Result<u32, E> {
    if prompt.get().starts_with('[') {
        let ids: Vec<IgnoredAny> = reader.reread(prompt, |_, deserializer| Vec::deserialize(deserializer))?;
        return Ok(len_u32(ids.len()).saturating_mul(4));
    }
    reader.string(prompt).map(|text| len_u32(text.len()))
}

/// The first item of a prompt list says what the list is.
enum FirstItem {
    /// The list is one prompt of token ids.
    Token(u32),
    /// The item was a prompt of its own.
    Whole,
}

struct PromptItem<'x, 'r, S>(&'x mut Reader<'r, S>);

impl<'de, S: SegmentSink> DeserializeSeed<'de> for PromptItem<'_, '_, S> {
    type Value = FirstItem;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<FirstItem, D::Error> {
        self.0.open_text = OpenText::Part;
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: SegmentSink> Visitor<'de> for PromptItem<'_, '_, S> {
    type Value = FirstItem;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id or token ids")
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<FirstItem, E> {
        self.0.text_part(text);
        Ok(FirstItem::Whole)
    }
    fn visit_u64<E: Error>(self, id: u64) -> Result<FirstItem, E> {
        self.0.open_text = OpenText::Closed;
        match u32::try_from(id) {
            Ok(id) => Ok(FirstItem::Token(id)),
            Err(_) => Err(self.0.fail(NoPrompt::WrongType)),
        }
    }
    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<FirstItem, A::Error> {
        self.0.open_text = OpenText::Closed;
        read_tokens(self.0, None, items)?;
        Ok(FirstItem::Whole)
    }
}

/// Token ids into the sink, each only when its successor or the end is seen: a number cut by the limit looks whole.
fn read_tokens<'de, S: SegmentSink, A: SeqAccess<'de>>(
    reader: &mut Reader<'_, S>,
    first: Option<u32>,
    mut items: A,
) -> Result<(), A::Error> {
    reader.sink.open(Scope::Tokens);
    let mut held = first;
    while let Some(id) = items.next_element::<u32>()? {
        if let Some(whole) = held.replace(id) {
            reader.sink.token(whole);
        }
    }
    if let Some(last) = held {
        reader.sink.token(last);
    }
    reader.sink.close();
    Ok(())
}

const PROMPT_ROLE: &str = "prompt";
/// Far above any known message or part; bounds the search for repeated keys.
const MAX_BAG_FIELDS: usize = 64;
