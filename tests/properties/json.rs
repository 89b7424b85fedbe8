//! JSON that remembers how it is written: keys in their order and twice, numbers as spelled, any white space and escapes.
//!
//! In: choices or text. Out: a [`Node`], and texts that mean the same as it.

use serde_json::value::RawValue;

use super::choices::Choices;

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    Null,
    Bool(bool),
    /// As spelled. Floats are never printed anew: a parser that is off by one bit would then be called wrong.
    Number(String),
    Text(String),
    List(Vec<Node>),
    Object(Vec<(String, Node)>),
    /// Written as it stands, JSON or not.
    Verbatim(String),
}

impl Node {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    pub(crate) fn number(number: impl ToString) -> Self {
        Self::Number(number.to_string())
    }

    pub(crate) fn object<const N: usize>(fields: [(&str, Self); N]) -> Self {
        Self::Object(fields.map(|(key, value)| (key.to_owned(), value)).into())
    }

    /// The value that a text says, if it is JSON in which no key of an object comes twice.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let raw: &RawValue = serde_json::from_str(text).ok()?;
        Self::of_raw(raw.get(), MAX_PARSED_DEPTH)
    }

    fn of_raw(text: &str, depth: usize) -> Option<Self> {
        let depth = depth.checked_sub(1)?;
        Some(match text.as_bytes().first()? {
            b'n' => Self::Null,
            b't' | b'f' => Self::Bool(text == "true"),
            b'"' => Self::Text(serde_json::from_str(text).ok()?),
            b'[' => {
                let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
                let items = items.into_iter().map(|item| Self::of_raw(item.get(), depth));
                Self::List(items.collect::<Option<_>>()?)
            }
            b'{' => {
                let Fields(fields) = serde_json::from_str(text).ok()?;
                let mut known: Vec<&str> = fields.iter().map(|(key, _)| key.as_str()).collect();
                known.sort_unstable();
                if known.windows(2).any(|pair| pair[0] == pair[1]) {
                    return None;
                }
                let fields = fields
                    .iter()
                    .map(|(key, value)| Some((key.clone(), Self::of_raw(value.get(), depth)?)));
                Self::Object(fields.collect::<Option<_>>()?)
            }
            _ => Self::Number(text.to_owned()),
        })
    }

    /// True where a key of some object comes twice.
    pub(crate) fn has_duplicates(&self) -> bool {
        match self {
            Self::List(items) => items.iter().any(Self::has_duplicates),
            Self::Object(fields) => {
                let mut keys: Vec<&str> = fields.iter().map(|(key, _)| key.as_str()).collect();
                keys.sort_unstable();
                keys.windows(2).any(|pair| pair[0] == pair[1])
                    || fields.iter().any(|(_, value)| value.has_duplicates())
            }
            Self::Null | Self::Bool(_) | Self::Number(_) | Self::Text(_) | Self::Verbatim(_) => false,
        }
    }

    /// Keys of the object that has most.
    pub(crate) fn widest(&self) -> usize {
        match self {
            Self::List(items) => items.iter().map(Self::widest).max().unwrap_or(0),
            Self::Object(fields) => fields
                .iter()
                .map(|(_, value)| value.widest())
                .max()
                .unwrap_or(0)
                .max(fields.len()),
            Self::Null | Self::Bool(_) | Self::Number(_) | Self::Text(_) | Self::Verbatim(_) => 0,
        }
    }

    /// As short as it gets.
    pub(crate) fn plain(&self) -> String {
        self.written(&mut Choices::new(&[]))
    }

    /// With white space and escapes as chosen.
    pub(crate) fn written(&self, choices: &mut Choices<'_>) -> String {
        let mut out = String::new();
        self.write(choices, &mut out);
        out
    }

    fn write(&self, choices: &mut Choices<'_>, out: &mut String) {
        space(choices, out);
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(true) => out.push_str("true"),
            Self::Bool(false) => out.push_str("false"),
            Self::Number(text) | Self::Verbatim(text) => out.push_str(text),
            Self::Text(text) => write_text(text, choices, out),
            Self::List(items) => {
                out.push('[');
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        out.push(',');
                    }
                    item.write(choices, out);
                }
                space(choices, out);
                out.push(']');
            }
            Self::Object(fields) => {
                out.push('{');
                for (at, (key, value)) in fields.iter().enumerate() {
                    if at > 0 {
                        out.push(',');
                    }
                    space(choices, out);
                    write_text(key, choices, out);
                    space(choices, out);
                    out.push(':');
                    value.write(choices, out);
                }
                space(choices, out);
                out.push('}');
            }
        }
        space(choices, out);
    }
}

/// An object's fields as they stand.
struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'de> serde::Deserialize<'de> for Fields<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;
        impl<'de> serde::de::Visitor<'de> for FieldsVisitor {
            type Value = Fields<'de>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(FieldsVisitor)
    }
}

fn space(choices: &mut Choices<'_>, out: &mut String) {
    if choices.one_in(6) {
        out.push_str(choices.pick(&[" ", "\n", "\t", "\r\n", "  \n  "]));
    }
}

/// A JSON string of the text, each character plain, short escape or `\u`, as chosen.
fn write_text(text: &str, choices: &mut Choices<'_>, out: &mut String) {
    let may_escape = choices.one_in(3);
    out.push('"');
    for character in text.chars() {
        let style = if may_escape { choices.below(4) } else { 0 };
        match (character, style) {
            (_, 3) => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let digits = format!("{unit:04x}");
                    out.push_str("\\u");
                    out.push_str(&if choices.one_in(2) {
                        digits.to_uppercase()
                    } else {
                        digits
                    });
                }
            }
            ('"' | '\\', _) | ('/', 1) => {
                out.push('\\');
                out.push(character);
            }
            ('\n', _) => out.push_str("\\n"),
            ('\t', _) => out.push_str("\\t"),
            ('\r', _) => out.push_str("\\r"),
            ('\u{8}', _) => out.push_str("\\b"),
            ('\u{c}', _) => out.push_str("\\f"),
            ('\0'..='\u{1f}', _) => out.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ => out.push(character),
        }
    }
    out.push('"');
}

/// Text of chosen length and kind: mostly short, at times as long as many chunks.
pub(crate) fn text(choices: &mut Choices<'_>) -> String {
    const PIECES: [&str; 22] = [
        "a",
        "word ",
        "\n",
        "\"",
        "\\",
        "/",
        "\u{e9}",
        "\u{4e2d}\u{6587}",
        "\u{1f680}",
        "\u{0}",
        "\u{1f}",
        "\u{7f}",
        "\u{fffd}",
        "{\"text\":\"x\"}",
        "],[",
        "\\ud83d",
        ",",
        ":",
        "system",
        "data:image/png;base64,iVBORw0KGgo",
        "x-anthropic-billing-header: cc_version=2; cch=5f1;\n",
        "x-anthropic-billing-header:",
    ];
    let mut text = String::new();
    for _ in 0..choices.below(6) {
        text.push_str(choices.pick(&PIECES));
    }
    if choices.one_in(4) {
        let unit = choices.pick(&["0123456789", "many words. ", "\u{e9}\n", "\u{1f680}"]);
        let bytes = choices.pick(&[250, 256, 300, 1100, 4096, 5000]);
        text.push_str(&unit.repeat(bytes / unit.len() + 1));
        text.push_str(&choices.byte().to_string());
    }
    text
}

/// Any JSON, also values that no engine expects and some that are no JSON.
pub(crate) fn any(choices: &mut Choices<'_>, keys: &[&str], depth: usize) -> Node {
    const NUMBERS: [&str; 18] = [
        "0",
        "-0",
        "1",
        "64",
        "64.0",
        "-1",
        "1.5",
        "1e3",
        "1E+2",
        "2.5e-3",
        "4294967295",
        "4294967296",
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775809",
        "1e308",
        "123456789012345678901234567890.5",
        "0.1",
    ];
    const VERBATIM: [&str; 12] = [
        "NaN",
        "1e999",
        "\"\\ud800\"",
        "\"\\udc00\\ud800\"",
        "\"\\u12\"",
        "\"\u{1}\"",
        "01",
        "[1,]",
        "{\"a\":1,}",
        "'x'",
        "\"open",
        "",
    ];
    match choices.below(if depth == 0 { 7 } else { 11 }) {
        0 => Node::Null,
        1 => Node::Bool(choices.one_in(2)),
        2 => Node::Number(choices.pick(&NUMBERS).to_owned()),
        3..=5 => Node::Text(text(choices)),
        6 if choices.one_in(8) => Node::Verbatim(choices.pick(&VERBATIM).to_owned()),
        6 if choices.one_in(8) => {
            let depth = 100 + choices.below(60);
            let (open, close) = choices.pick(&[("[", "]"), ("{\"a\":", "}")]);
            Node::Verbatim(format!("{}1{}", open.repeat(depth), close.repeat(depth)))
        }
        6 => Node::Text(String::new()),
        7 | 8 => Node::List(
            (0..choices.below(5))
                .map(|_| any(choices, keys, depth - 1))
                .collect(),
        ),
        _ => Node::Object(
            (0..choices.below(5))
                .map(|_| {
                    let key = if choices.one_in(8) {
                        text(choices)
                    } else {
                        choices.pick(keys).to_owned()
                    };
                    (key, any(choices, keys, depth - 1))
                })
                .collect(),
        ),
    }
}

/// Moves items about.
pub(crate) fn shuffle<T>(items: &mut [T], choices: &mut Choices<'_>) {
    for last in (1..items.len()).rev() {
        items.swap(last, choices.below(last + 1));
    }
}

/// Reading a tree through raw values costs its depth squared.
const MAX_PARSED_DEPTH: usize = 200;
