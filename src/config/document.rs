//! JSON text → a tree in which no key of an object comes twice.
//!
//! In: the configuration's text. Out: its tree, or where it is no JSON. Of two equal keys serde_json keeps the last, so
//! that one of an operator's statements would be gone without a word; here it is an error. The depth is bounded by the
//! parser's recursion limit.

use core::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::reader::shown;

/// Parses one JSON value, with nothing but white space behind it.
///
/// # Errors
/// With line and column of what is no JSON, or of the second of two equal keys.
pub(super) fn parse(text: &[u8]) -> serde_json::Result<Value> {
    let mut json = serde_json::Deserializer::from_slice(text);
    let value = Node.deserialize(&mut json)?;
    json.end()?;
    Ok(value)
}

struct Node;

impl<'de> DeserializeSeed<'de> for Node {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::Bool(flag))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Value, E> {
        Ok(Value::Number(number.into()))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Number(number.into()))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Value, E> {
        Ok(Number::from_f64(number).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(Value::String(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Node)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(Error::custom(format_args!("`{}` comes twice", shown(&key))));
            }
            let value = entries.next_value_seed(Node)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
