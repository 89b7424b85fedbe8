//! A JSON object read key by key: every key is asked for once with its type and range, and what nobody asked for is
//! refused with its path.

use core::fmt;

use serde_json::{Map, Value};

/// Why a configuration was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Path of the key, such as `pools.llm.metrics.interval_ms`; empty for the document itself.
    pub path: String,
    /// What is wrong there, with what would be accepted.
    pub problem: String,
}

impl ConfigError {
    pub(crate) fn new(path: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            problem: problem.into(),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            f.write_str(&self.problem)
        } else {
            write!(f, "{}: {}", self.path, self.problem)
        }
    }
}

impl core::error::Error for ConfigError {}

/// One object of the document with the path that leads to it.
pub(crate) struct Reader<'a> {
    path: String,
    map: &'a Map<String, Value>,
    asked: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    /// Opens `value`, which must be an object.
    ///
    /// # Errors
    /// When it is something else.
    pub(crate) fn open(path: impl Into<String>, value: &'a Value) -> Result<Self, ConfigError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self {
                path,
                map,
                asked: Vec::new(),
            }),
            other => Err(ConfigError::new(
                path,
                format!("expected an object, got {}", describe(other)),
            )),
        }
    }

    /// Path of this object.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Full path of `key` in this object.
    pub(crate) fn path_of(&self, key: &str) -> String {
        join(&self.path, key)
    }

    /// The raw value of `key`; `None` when it is absent or `null`.
    pub(crate) fn value(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.push(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A nested object.
    ///
    /// # Errors
    /// When the value is not an object.
    pub(crate) fn object(&mut self, key: &'static str) -> Result<Option<Reader<'a>>, ConfigError> {
        let path = self.path_of(key);
        self.value(key).map(|value| Reader::open(path, value)).transpose()
    }

    /// A boolean.
    ///
    /// # Errors
    /// When the value is something else.
    pub(crate) fn boolean(&mut self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        let path = self.path_of(key);
        self.value(key)
            .map(|value| match value {
                Value::Bool(flag) => Ok(*flag),
                other => Err(ConfigError::new(
                    path,
                    format!("expected true or false, got {}", describe(other)),
                )),
            })
            .transpose()
    }

    /// An integer within `min..=max`.
    ///
    /// # Errors
    /// When the value is no integer or outside the range.
    pub(crate) fn integer(
        &mut self,
        key: &'static str,
        min: u64,
        max: u64,
    ) -> Result<Option<u64>, ConfigError> {
        let path = self.path_of(key);
        self.value(key)
            .map(|value| match value.as_u64() {
                Some(number) if (min..=max).contains(&number) => Ok(number),
                _ => Err(ConfigError::new(
                    path,
                    format!("expected an integer from {min} to {max}, got {}", describe(value)),
                )),
            })
            .transpose()
    }

    /// An integer within `min..=max` that fits 32 bits.
    ///
    /// # Errors
    /// As [`Reader::integer`].
    pub(crate) fn integer32(
        &mut self,
        key: &'static str,
        min: u32,
        max: u32,
    ) -> Result<Option<u32>, ConfigError> {
        // The range check already bounds it; `try_from` keeps that visible to the compiler.
        Ok(self
            .integer(key, min.into(), max.into())?
            .and_then(|number| u32::try_from(number).ok()))
    }

    /// A fraction within `0..=1`, in thousandths.
    ///
    /// # Errors
    /// When the value is no number or outside the range.
    pub(crate) fn permille(&mut self, key: &'static str) -> Result<Option<u16>, ConfigError> {
        let path = self.path_of(key);
        self.value(key)
            .map(|value| match value.as_f64() {
                #[expect(clippy::cast_possible_truncation, reason = "within 0..=1000 by the guard")]
                #[expect(clippy::cast_sign_loss, reason = "not negative by the guard")]
                Some(number) if (0.0..=1.0).contains(&number) => Ok((number * 1000.0 + 0.5) as u16),
                _ => Err(ConfigError::new(
                    path,
                    format!("expected a number from 0 to 1, got {}", describe(value)),
                )),
            })
            .transpose()
    }

    /// `"auto"`, which is `None`, or a number within `0..=max`, in thousandths.
    ///
    /// # Errors
    /// When the value is neither.
    pub(crate) fn auto_or_permille(
        &mut self,
        key: &'static str,
        max: u32,
    ) -> Result<Option<Option<u32>>, ConfigError> {
        let path = self.path_of(key);
        self.value(key)
            .map(|value| match (value.as_str(), value.as_f64()) {
                (Some("auto"), _) => Ok(None),
                #[expect(clippy::cast_possible_truncation, reason = "bounded by the guard")]
                #[expect(clippy::cast_sign_loss, reason = "not negative by the guard")]
                (None, Some(number)) if (0.0..=f64::from(max)).contains(&number) => {
                    Ok(Some((number * 1000.0 + 0.5) as u32))
                }
                _ => Err(ConfigError::new(
                    path,
                    format!(
                        "expected \"auto\" or a number from 0 to {max}, got {}",
                        describe(value)
                    ),
                )),
            })
            .transpose()
    }

    /// A string of `min..=max` bytes.
    ///
    /// # Errors
    /// When the value is no string or has another length.
    pub(crate) fn string(
        &mut self,
        key: &'static str,
        min: usize,
        max: usize,
    ) -> Result<Option<&'a str>, ConfigError> {
        let path = self.path_of(key);
        self.value(key)
            .map(|value| string_of(path, value, min, max))
            .transpose()
    }

    /// One of a closed set of words.
    ///
    /// # Errors
    /// When the value is none of them; the message lists them.
    pub(crate) fn choice<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let path = self.path_of(key);
        self.value(key)
            .map(|value| choice_of(path, value, choices))
            .transpose()
    }

    /// A list of at most `max_items` values, each with its own path.
    ///
    /// # Errors
    /// When the value is no list or too long.
    pub(crate) fn list(
        &mut self,
        key: &'static str,
        max_items: usize,
    ) -> Result<Option<Vec<(String, &'a Value)>>, ConfigError> {
        let path = self.path_of(key);
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        match value {
            Value::Array(items) if items.len() <= max_items => Ok(Some(
                items
                    .iter()
                    .enumerate()
                    .map(|(i, item)| (format!("{path}[{i}]"), item))
                    .collect(),
            )),
            Value::Array(items) => Err(ConfigError::new(
                path,
                format!("expected at most {max_items} items, got {}", items.len()),
            )),
            other => Err(ConfigError::new(
                path,
                format!("expected a list, got {}", describe(other)),
            )),
        }
    }

    /// Every key with its value, for objects whose keys are names chosen by the operator.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    /// Refuses keys that nobody asked for.
    ///
    /// # Errors
    /// With the path of the first such key and the keys that exist there.
    pub(crate) fn finish(self) -> Result<(), ConfigError> {
        match self.map.keys().find(|key| !self.asked.contains(&key.as_str())) {
            None => Ok(()),
            Some(unknown) => Err(ConfigError::new(
                join(&self.path, unknown),
                format!("unknown key; known here: {}", self.asked.join(", ")),
            )),
        }
    }
}

/// A string of `min..=max` bytes out of `value`.
///
/// # Errors
/// When the value is no string or has another length.
pub(crate) fn string_of(path: String, value: &Value, min: usize, max: usize) -> Result<&str, ConfigError> {
    match value {
        Value::String(text) if (min..=max).contains(&text.len()) => Ok(text),
        Value::String(text) => Err(ConfigError::new(
            path,
            format!("expected {min} to {max} bytes of text, got {}", text.len()),
        )),
        other => Err(ConfigError::new(
            path,
            format!("expected a string, got {}", describe(other)),
        )),
    }
}

/// One of a closed set of words out of `value`.
///
/// # Errors
/// When the value is none of them; the message lists them.
pub(crate) fn choice_of<T: Copy>(
    path: String,
    value: &Value,
    choices: &[(&str, T)],
) -> Result<T, ConfigError> {
    let found = value
        .as_str()
        .and_then(|word| choices.iter().find(|(name, _)| *name == word));
    found.map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        ConfigError::new(
            path,
            format!("expected one of {}, got {}", names.join(", "), describe(value)),
        )
    })
}

/// The part of a text that a log line may show: an operator's typo may be any text.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(MAX_SHOWN_CHARS).collect()
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        shown(key)
    } else {
        format!("{path}.{}", shown(key))
    }
}

fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("{:?}", shown(text)),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

const MAX_SHOWN_CHARS: usize = 64;
