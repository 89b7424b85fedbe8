//! What the shell tells an exchange of heads, and what it is told back to count.

/// What the filter needs of a request's headers.
#[derive(Debug, Clone, Default)]
pub struct RequestHead {
    /// `:path` with its query.
    pub path: String,
    /// `content-type`.
    pub content_type: Option<String>,
    /// `content-encoding`.
    pub content_encoding: Option<String>,
    /// `content-length`.
    pub content_length: Option<u64>,
    /// The client sends nothing more before the upstream has spoken: by `100 Continue`, or `101 Switching Protocols`.
    pub awaits_upstream: bool,
    /// Value of the tenant header.
    pub tenant: Option<Vec<u8>>,
    /// Value of the strongest session header present.
    pub session: Option<Vec<u8>>,
}

/// What the filter needs of a response's headers.
#[derive(Debug, Clone, Copy, Default)]
pub struct ResponseHead<'a> {
    /// `:status`.
    pub status: u16,
    /// The upstream sent it, not Envoy itself.
    pub via_upstream: bool,
    /// Envoy refused the request's body as too large for its buffer.
    pub body_too_large: bool,
    /// `upstream.address` of the last attempt.
    pub served_by: Option<&'a str>,
    /// Attempts made.
    pub attempts: u32,
    /// It is an event stream, whose first body byte comes with the first token.
    pub is_event_stream: bool,
    /// Its body is compressed.
    pub is_encoded: bool,
    /// `content-length`.
    pub content_length: Option<u64>,
}

/// What came of a response's headers, for the shell to count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResponseNote {
    /// Attempts that chosen hosts failed.
    pub failed_attempts: u32,
    /// Another host than the first of the list answered.
    pub served_elsewhere: bool,
    /// Envoy refused the body while it was held.
    pub refused_while_held: bool,
    /// That refusal lowered what is held from now on: worth telling the operator, unlike every refusal.
    pub hold_lowered: bool,
    /// What the engine counted cannot be read, because the answer is compressed.
    pub usage_encoded: bool,
}

/// What the end of an answer told, for the shell to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerNote {
    /// It was not read.
    Unread,
    /// It did not tell what the engine counted, or did not come to its end.
    UsageAbsent,
    /// It told what the engine counted.
    UsageRead {
        /// Much less was cached than predicted.
        is_false_hit: bool,
    },
}
