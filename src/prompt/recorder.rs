//! The events of a prompt → segments that can be read and compared.
//!
//! In: the events that [`super::HashSink`] hashes. Out: namespace fields and message parts as text, so that a test can
//! hold what is hashed against what a body says, and a replay tool can show it. It must never run in the filter: it keeps
//! the prompt.

use super::sink::{Field, Scalar, Scope, SegmentSink};

/// Keeps all events as text.
#[derive(Debug, Default)]
pub struct SegmentRecorder {
    /// Namespace fields in the order of the body, JSON fields as compact JSON.
    pub fields: Vec<(Field, String)>,
    /// Parts of the system field.
    pub system: Vec<Segment>,
    /// Parts of the messages.
    pub messages: Vec<Segment>,
    /// Text that does not reach the keys.
    pub skipped: String,
    /// Messages begun.
    pub message_count: usize,
    /// Messages that are whole.
    pub whole_message_count: usize,
    field: Option<Field>,
    role: String,
    scopes: Vec<Scope>,
    text: String,
    name: String,
    json: JsonText,
    tokens: Vec<u32>,
}

/// One part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Who speaks.
    pub role: String,
    /// What is said.
    pub value: SegmentValue,
}

/// The content of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SegmentValue {
    /// Text.
    Text(String),
    /// Reasoning text.
    Thinking(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// A picture, clip or file.
    Media {
        /// The part type that names it.
        kind: &'static str,
        /// URL or base64 text.
        data: String,
    },
    /// A tool call with its arguments, as text or compact JSON.
    ToolCall {
        /// The tool's name.
        name: String,
        /// Its arguments.
        arguments: String,
    },
    /// A function's answer.
    FunctionResponse {
        /// The function's name.
        name: String,
        /// Its answer as compact JSON.
        response: String,
    },
    /// Name of the speaker.
    Name(String),
    /// A part of a kind that is not known, as compact JSON with sorted keys.
    Other(String),
}

impl SegmentRecorder {
    /// The text of a namespace field.
    pub fn field(&self, field: Field) -> Option<&str> {
        self.fields
            .iter()
            .find(|(known, _)| *known == field)
            .map(|(_, text)| text.as_str())
    }

    fn push(&mut self, value: SegmentValue) {
        let role = if self.scopes.contains(&Scope::ToolResult) {
            "tool".to_owned()
        } else {
            self.role.clone()
        };
        let segments = if self.field.is_some() {
            &mut self.system
        } else {
            &mut self.messages
        };
        segments.push(Segment { role, value });
    }
}

impl SegmentSink for SegmentRecorder {
    fn field_start(&mut self, field: Field) {
        self.field = Some(field);
        self.role = "system".to_owned();
        self.text.clear();
        self.json = JsonText::default();
    }

    fn field_end(&mut self) {
        let Some(field) = self.field.take() else { return };
        let json = std::mem::take(&mut self.json).text;
        let text = std::mem::take(&mut self.text);
        if field != Field::System {
            self.fields
                .push((field, if json.is_empty() { text } else { json }));
        }
    }

    fn message_start(&mut self, role: &str) {
        self.message_count += 1;
        self.role = role.to_owned();
    }

    fn message_end(&mut self) {
        self.whole_message_count += 1;
    }

    fn open(&mut self, scope: Scope) {
        self.scopes.push(scope);
        match scope {
            Scope::Array => self.json.open('['),
            Scope::Object => self.json.open('{'),
            Scope::Key | Scope::Str | Scope::Text | Scope::Thinking => self.text.clear(),
            Scope::Tokens => self.tokens.clear(),
            Scope::ToolCall | Scope::FunctionResponse => {
                self.name.clear();
                self.text.clear();
                self.json = JsonText::default();
            }
            Scope::Other => self.json = JsonText::default(),
            Scope::Arguments | Scope::Name | Scope::ToolResult => self.text.clear(),
        }
    }

    fn close(&mut self) {
        let Some(scope) = self.scopes.pop() else { return };
        let parent = self.scopes.last().copied();
        match scope {
            Scope::Text => {
                let text = std::mem::take(&mut self.text);
                self.push(SegmentValue::Text(text));
            }
            Scope::Thinking => {
                let text = std::mem::take(&mut self.text);
                self.push(SegmentValue::Thinking(text));
            }
            Scope::Tokens => {
                let tokens = std::mem::take(&mut self.tokens);
                self.push(SegmentValue::Tokens(tokens));
            }
            Scope::Name if matches!(parent, Some(Scope::ToolCall | Scope::FunctionResponse)) => {
                self.name = std::mem::take(&mut self.text);
            }
            Scope::Name => {
                let name = std::mem::take(&mut self.text);
                self.push(SegmentValue::Name(name));
            }
            Scope::ToolCall => {
                let json = std::mem::take(&mut self.json).text;
                let text = std::mem::take(&mut self.text);
                let arguments = if json.is_empty() { text } else { json };
                let name = std::mem::take(&mut self.name);
                self.push(SegmentValue::ToolCall { name, arguments });
            }
            Scope::FunctionResponse => {
                let response = std::mem::take(&mut self.json).text;
                let name = std::mem::take(&mut self.name);
                self.push(SegmentValue::FunctionResponse { name, response });
            }
            Scope::Other => {
                let json = std::mem::take(&mut self.json).text;
                self.push(SegmentValue::Other(json));
            }
            Scope::Array => self.json.close(']'),
            Scope::Object => self.json.close('}'),
            Scope::Key => self.json.key(&self.text),
            Scope::Str => self.json.string(&self.text),
            Scope::Arguments | Scope::ToolResult => {}
        }
    }

    fn text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn skipped_text(&mut self, text: &str) {
        self.skipped.push_str(text);
        self.text.push_str(text);
    }

    fn token(&mut self, id: u32) {
        self.tokens.push(id);
    }

    fn media(&mut self, kind: &'static str, data: &str) {
        self.push(SegmentValue::Media {
            kind,
            data: data.to_owned(),
        });
    }

    fn scalar(&mut self, scalar: Scalar) {
        let text = match scalar {
            Scalar::Null => "null".to_owned(),
            Scalar::Bool(value) => value.to_string(),
            Scalar::Unsigned(value) => value.to_string(),
            Scalar::Signed(value) => value.to_string(),
            Scalar::Float(value) => serde_json::Value::from(value).to_string(),
        };
        self.json.value(&text);
    }

    fn batch_bytes(&mut self, _len_bytes: u32) {}
}

/// Compact JSON as it grows.
#[derive(Debug, Default)]
struct JsonText {
    text: String,
    wants_comma: bool,
}

impl JsonText {
    fn open(&mut self, bracket: char) {
        self.comma();
        self.text.push(bracket);
        self.wants_comma = false;
    }

    fn close(&mut self, bracket: char) {
        self.text.push(bracket);
        self.wants_comma = true;
    }

    fn key(&mut self, key: &str) {
        self.string(key);
        self.text.push(':');
        self.wants_comma = false;
    }

    fn string(&mut self, text: &str) {
        let quoted = serde_json::Value::from(text).to_string();
        self.value(&quoted);
    }

    fn value(&mut self, text: &str) {
        self.comma();
        self.text.push_str(text);
        self.wants_comma = true;
    }

    fn comma(&mut self) {
        if self.wants_comma {
            self.text.push(',');
        }
    }
}
