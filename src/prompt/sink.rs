//! What a body's reader says about a prompt → whoever listens: the hasher in production, a recorder in tests and replay.
//!
//! In: a stream of nested events in the order of the engine's rendering, namespace fields in any order between messages.
//! Out, for [`HashSink`]: a [`Namespace`] and the points of the chain. The byte form of the events is part of the hash
//! scheme ([`crate::chunk::SCHEME_VERSION`]); control bytes are 0xF9 to 0xFF, which never occur in UTF-8, so no text
//! can imitate a boundary.

use crate::chunk::{Chain, ChainPoint, HashKey, KeyedHash, len_u32};

/// Receives the parts of one prompt.
///
/// Namespace fields may come in any order, also between messages. `text`, `token`, `media` and `scalar` belong to the
/// innermost open scope.
pub trait SegmentSink {
    /// A namespace field begins; what follows belongs to it until `field_end`.
    fn field_start(&mut self, field: Field);
    /// The namespace field is whole.
    fn field_end(&mut self);
    /// A message of `role` begins.
    fn message_start(&mut self, role: &str);
    /// The message is whole.
    fn message_end(&mut self);
    /// A part begins.
    fn open(&mut self, scope: Scope);
    /// The innermost part is whole.
    fn close(&mut self);
    /// Text, decoded from its JSON escapes; may be the head of a text that was cut.
    fn text(&mut self, text: &str);
    /// Text that belongs to the prompt but must not reach the key.
    fn skipped_text(&mut self, text: &str);
    /// A token id.
    fn token(&mut self, id: u32);
    /// A picture, clip or file: its URL or base64 text, whole.
    fn media(&mut self, kind: &'static str, data: &str);
    /// A JSON value that is neither text nor a container.
    fn scalar(&mut self, scalar: Scalar);
    /// Text of further prompts of a batch, which count as work but have no keys.
    fn batch_bytes(&mut self, len_bytes: u32);
}

/// What the namespace of a prompt consists of. The numbers are part of the hash scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Field {
    /// The operator's secret.
    Secret = 0,
    /// Value of the tenant header.
    Tenant = 1,
    /// Session hint, where it extends the key.
    Session = 2,
    /// Model name.
    Model = 3,
    /// LoRA adapter.
    Adapter = 4,
    /// vLLM and SGLang `cache_salt`.
    CacheSalt = 5,
    /// SGLang `extra_key`.
    ExtraKey = 6,
    /// Template text sent along.
    ChatTemplate = 7,
    /// Arguments of the template.
    ChatTemplateKwargs = 8,
    /// Documents that the template renders.
    Documents = 9,
    /// Reasoning effort, rendered by some templates.
    ReasoningEffort = 10,
    /// Multi-modal processor arguments: they change the tokens of a picture.
    MmProcessorKwargs = 11,
    /// Media decoding arguments.
    MediaIoKwargs = 12,
    /// Whether special tokens are put in front.
    AddSpecialTokens = 13,
    /// Cohere's safety preamble.
    SafetyMode = 14,
    /// Ollama's thinking switch.
    Think = 15,
    /// Ollama's switch for no template at all.
    Raw = 16,
    /// Ollama's context token ids.
    Context = 17,
    /// Tool definitions.
    Tools = 18,
    /// Legacy function definitions.
    Functions = 19,
    /// System text beside the messages.
    System = 20,
}

impl Field {
    /// True where the field is text (or tokens) of the prompt, so that its length is prefill work.
    const fn is_prompt_text(self) -> bool {
        matches!(
            self,
            Self::Documents | Self::Context | Self::Tools | Self::Functions | Self::System
        )
    }
}

/// A part of a message or a piece of JSON. The numbers are part of the hash scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Scope {
    /// Plain text.
    Text = 1,
    /// Reasoning text.
    Thinking = 2,
    /// Token ids.
    Tokens = 3,
    /// A tool call: a name, then arguments.
    ToolCall = 4,
    /// Arguments of a tool call.
    Arguments = 5,
    /// Result of a tool, itself made of parts.
    ToolResult = 6,
    /// Answer of a function by name (Gemini): a name, then a JSON value.
    FunctionResponse = 7,
    /// A part of a kind that is not known here, as JSON.
    Other = 8,
    /// Name of the speaker.
    Name = 9,
    /// JSON array.
    Array = 10,
    /// JSON object.
    Object = 11,
    /// Key of a JSON object.
    Key = 12,
    /// JSON string.
    Str = 13,
}

/// A JSON value without parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number from zero.
    Unsigned(u64),
    /// A whole number below zero.
    Signed(i64),
    /// Any other number.
    Float(f64),
}

/// What a prompt's keys are kept apart by, beside its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Namespace {
    /// Hash of all fields.
    pub hash: u64,
    /// False where the body was cut, so that further fields may follow.
    pub complete: bool,
    /// Prompt text inside the namespace (tools, system).
    pub bytes: u32,
    /// True where the model is known.
    pub model_seen: bool,
    /// What names the cache rather than the prompt.
    pub identity: Identity,
}

/// The fields of a namespace that say whose cache is meant; `None` = not seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identity {
    /// Hash of secret and tenant, which are known before the body.
    pub outer: u64,
    /// Hash of the model.
    pub model: Option<u64>,
    /// Hash of the adapter.
    pub adapter: Option<u64>,
    /// Hash of the cache salt.
    pub cache_salt: Option<u64>,
    /// Hash of the extra key.
    pub extra_key: Option<u64>,
}

impl Identity {
    /// True unless a field that `self` has seen differs in `other`.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let agree = |mine: Option<u64>, theirs: Option<u64>| mine.is_none() || mine == theirs;
        self.outer == other.outer
            && agree(self.model, other.model)
            && agree(self.adapter, other.adapter)
            && agree(self.cache_salt, other.cache_salt)
            && agree(self.extra_key, other.extra_key)
    }
}

/// Hashes a prompt without keeping any of it.
#[derive(Debug)]
pub struct HashSink {
    key: HashKey,
    chain: Chain,
    message_start_bytes: u32,
    batch_bytes: u32,
    /// The open namespace field with its hash so far.
    open_field: Option<OpenField>,
    fields: [Option<FieldHash>; FIELD_COUNT],
}

impl HashSink {
    /// A sink that stops hashing at `max_prefix_bytes` of messages.
    pub fn new(max_prefix_bytes: u32, key: HashKey) -> Self {
        Self {
            key,
            chain: Chain::new(max_prefix_bytes, key),
            message_start_bytes: 0,
            batch_bytes: 0,
            open_field: None,
            fields: [None; FIELD_COUNT],
        }
    }

    /// The namespace of all fields that were ended; a field cut in its middle counts as not seen.
    pub fn namespace(&self, complete: bool) -> Namespace {
        let mut hash = self.key.start();
        let mut outer = self.key.start();
        let mut len_bytes: u32 = 0;
        for (tag, field) in (0u8..).zip(&self.fields) {
            let Some(field) = field else { continue };
            hash.update(&[tag]);
            hash.update(&field.hash.to_le_bytes());
            if tag <= Field::Tenant as u8 {
                outer.update(&[tag]);
                outer.update(&field.hash.to_le_bytes());
            }
            len_bytes = len_bytes.saturating_add(field.len_bytes);
        }
        let seen = |field: Field| {
            self.fields
                .get(field as usize)
                .copied()
                .flatten()
                .map(|found| found.hash)
        };
        let identity = Identity {
            outer: outer.finish(),
            model: seen(Field::Model),
            adapter: seen(Field::Adapter),
            cache_salt: seen(Field::CacheSalt),
            extra_key: seen(Field::ExtraKey),
        };
        let model_seen = identity.model.is_some();
        Namespace {
            hash: hash.finish(),
            complete,
            bytes: len_bytes,
            model_seen,
            identity,
        }
    }

    /// Bytes of message text seen, those of the further prompts of a batch included.
    pub const fn chain_bytes(&self) -> u32 {
        self.chain.text_bytes().saturating_add(self.batch_bytes)
    }

    /// The points of the chain.
    pub fn into_points(self) -> Vec<ChainPoint> {
        self.chain.into_points()
    }

    fn frame(&mut self, bytes: &[u8]) {
        match &mut self.open_field {
            Some(field) => field.hash.update(bytes),
            None => self.chain.frame(bytes),
        }
    }

    fn content(&mut self, bytes: &[u8]) {
        match &mut self.open_field {
            Some(field) => {
                field.hash.update(bytes);
                field.len_bytes = field.len_bytes.saturating_add(len_u32(bytes.len()));
            }
            None => self.chain.text(bytes),
        }
    }

    fn skip(&mut self, len_bytes: u32) {
        match &mut self.open_field {
            Some(field) => field.len_bytes = field.len_bytes.saturating_add(len_bytes),
            None => {
                self.chain.skip(len_bytes);
                // The length that ends the message covers what is hashed.
                self.message_start_bytes = self.message_start_bytes.saturating_add(len_bytes);
            }
        }
    }
}

impl SegmentSink for HashSink {
    fn field_start(&mut self, field: Field) {
        self.open_field = Some(OpenField {
            field,
            hash: self.key.start(),
            len_bytes: 0,
            has_scalar: false,
        });
    }

    fn field_end(&mut self) {
        let Some(done) = self.open_field.take() else {
            return;
        };
        // `[]`, `{}` and `""` render like an absent field.
        if done.len_bytes == 0 && !done.has_scalar {
            return;
        }
        let len_bytes = if done.field.is_prompt_text() {
            done.len_bytes
        } else {
            0
        };
        if let Some(slot) = self.fields.get_mut(done.field as usize) {
            *slot = Some(FieldHash {
                hash: done.hash.finish(),
                len_bytes,
            });
        }
    }

    fn message_start(&mut self, role: &str) {
        self.message_start_bytes = self.chain.text_bytes();
        self.chain.frame(&[MESSAGE]);
        self.chain.frame(role.as_bytes());
        self.chain.frame(&[ROLE_END]);
    }

    fn message_end(&mut self) {
        let len_bytes = self.chain.text_bytes().saturating_sub(self.message_start_bytes);
        let [a, b, c, d] = len_bytes.to_le_bytes();
        self.chain.frame(&[MESSAGE_END, a, b, c, d]);
        self.chain.message_end();
    }

    fn open(&mut self, scope: Scope) {
        self.frame(&[OPEN, scope as u8]);
    }

    fn close(&mut self) {
        self.frame(&[CLOSE]);
    }

    fn text(&mut self, text: &str) {
        self.content(text.as_bytes());
    }

    fn skipped_text(&mut self, text: &str) {
        self.skip(len_u32(text.len()));
    }

    fn token(&mut self, id: u32) {
        self.content(&id.to_le_bytes());
    }

    fn media(&mut self, _kind: &'static str, data: &str) {
        self.frame(&[MEDIA]);
        sample(data.as_bytes(), |piece| self.content(piece));
        self.frame(&[CLOSE]);
        self.frame(&(data.len() as u64).to_le_bytes());
    }

    fn scalar(&mut self, scalar: Scalar) {
        if let Some(field) = &mut self.open_field {
            field.has_scalar = true;
        }
        let (kind, value) = match scalar {
            Scalar::Null => (0, 0),
            Scalar::Bool(value) => (1, u64::from(value)),
            Scalar::Unsigned(value) => (2, value),
            Scalar::Signed(value) => (3, value.cast_unsigned()),
            Scalar::Float(value) => (4, value.to_bits()),
        };
        self.frame(&[SCALAR, kind]);
        self.frame(&value.to_le_bytes());
    }

    fn batch_bytes(&mut self, len_bytes: u32) {
        self.batch_bytes = self.batch_bytes.saturating_add(len_bytes);
    }
}

#[derive(Debug)]
struct OpenField {
    field: Field,
    hash: KeyedHash,
    len_bytes: u32,
    has_scalar: bool,
}

#[derive(Debug, Clone, Copy)]
struct FieldHash {
    hash: u64,
    len_bytes: u32,
}

/// Passes on all of a short text, else its head, its tail and windows spread evenly between them.
///
/// Two pictures of one size and format share head and often tail; compressed data parts soon, so the windows see it.
fn sample(data: &[u8], mut piece: impl FnMut(&[u8])) {
    if data.len() <= SAMPLE_WHOLE_BYTES {
        piece(data);
        return;
    }
    let tail_at = data.len() - SAMPLE_END_BYTES;
    piece(data.get(..SAMPLE_END_BYTES).unwrap_or_default());
    let stride = (tail_at - SAMPLE_END_BYTES) / (SAMPLE_WINDOWS + 1);
    for window in 1..=SAMPLE_WINDOWS {
        let at = SAMPLE_END_BYTES + window * stride;
        piece(data.get(at..at + SAMPLE_WINDOW_BYTES).unwrap_or_default());
    }
    piece(data.get(tail_at..).unwrap_or_default());
}

const FIELD_COUNT: usize = Field::System as usize + 1;

const CLOSE: u8 = 0xFF;
const OPEN: u8 = 0xFE;
const SCALAR: u8 = 0xFD;
const MESSAGE: u8 = 0xFC;
const ROLE_END: u8 = 0xFB;
const MESSAGE_END: u8 = 0xFA;
const MEDIA: u8 = 0xF9;

const SAMPLE_WHOLE_BYTES: usize = 1024;
const SAMPLE_END_BYTES: usize = 256;
const SAMPLE_WINDOWS: usize = 16;
const SAMPLE_WINDOW_BYTES: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn media_hash(data: &str) -> u64 {
        let mut sink = HashSink::new(1 << 20, HashKey::OPEN);
        sink.message_start("user");
        sink.media("image", data);
        sink.message_end();
        sink.into_points().last().unwrap().hash.0
    }

    #[test]
    fn media_of_any_size_add_a_bounded_sample() {
        for len in [0, 1, 1023, 1024, 1025, 1_000_000] {
            let mut sink = HashSink::new(1 << 20, HashKey::OPEN);
            sink.media("image", &"a".repeat(len));
            assert_eq!(sink.chain_bytes() as usize, len.min(1024), "length {len}");
        }
    }

    #[test]
    fn media_of_other_length_or_content_differ() {
        let picture: String = (0u32..60_000)
            .map(|i| char::from(b'A' + u8::try_from(i % 26).unwrap()))
            .collect();
        let base = media_hash(&picture);
        assert_ne!(base, media_hash(&format!("{picture}A")));
        assert_ne!(base, media_hash(picture.get(1..).unwrap()));
        let mut tail = picture.clone();
        tail.replace_range(59_999.., "-");
        assert_ne!(base, media_hash(&tail));
        let other_middle: String = picture
            .char_indices()
            .map(|(i, c)| if i > 1000 && i < 59_000 { '+' } else { c })
            .collect();
        assert_ne!(base, media_hash(&other_middle));
    }

    #[test]
    fn an_open_field_does_not_count() {
        let mut sink = HashSink::new(1 << 20, HashKey::OPEN);
        let before = sink.namespace(false);
        sink.field_start(Field::Model);
        sink.text("demo");
        assert_eq!(sink.namespace(false), before);
        sink.field_end();
        assert_ne!(sink.namespace(false).hash, before.hash);
        assert!(sink.namespace(false).model_seen);
    }

    #[test]
    fn empty_fields_equal_absent_ones() {
        let mut sink = HashSink::new(1 << 20, HashKey::OPEN);
        let before = sink.namespace(true);
        sink.field_start(Field::Tools);
        sink.open(Scope::Array);
        sink.close();
        sink.field_end();
        assert_eq!(sink.namespace(true), before);
    }
}
