//! Names of session hints and what they are used for.
//!
//! A hint is a name that a client gives to what belongs together. It is only ever compared by its hash. Ids of single
//! requests and traces are no hints and must never be used as such.

/// A body field that may name the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SessionField {
    /// SGLang `session_params.id`: the engine holds the session's head.
    SessionParamsId = 0,
    /// vLLM and SGLang `session_id`.
    SessionId = 1,
    /// OpenAI `conversation`, a string or an object with `id`.
    Conversation = 2,
    /// OpenAI `prompt_cache_key`.
    PromptCacheKey = 3,
    /// OpenAI `previous_response_id`: changes with every turn.
    PreviousResponseId = 4,
    /// Anthropic `metadata.user_id`: a user, who may have many sessions.
    MetadataUserId = 5,
    /// OpenAI `user`.
    User = 6,
    /// OpenAI `safety_identifier`.
    SafetyIdentifier = 7,
}

impl SessionField {
    /// All fields, strongest first.
    pub const ALL: [Self; SESSION_FIELD_COUNT] = [
        Self::SessionParamsId,
        Self::SessionId,
        Self::Conversation,
        Self::PromptCacheKey,
        Self::PreviousResponseId,
        Self::MetadataUserId,
        Self::User,
        Self::SafetyIdentifier,
    ];

    /// The name used in config: the field's path in the body.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SessionParamsId => "session_params.id",
            Self::SessionId => "session_id",
            Self::Conversation => "conversation",
            Self::PromptCacheKey => "prompt_cache_key",
            Self::PreviousResponseId => "previous_response_id",
            Self::MetadataUserId => "metadata.user_id",
            Self::User => "user",
            Self::SafetyIdentifier => "safety_identifier",
        }
    }

    /// The field of a config name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|field| field.as_str() == name)
    }

    /// The field that a top-level key of a body holds.
    pub(crate) fn of_key(key: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|field| field.as_str().split('.').next() == Some(key))
    }

    /// The key inside an object value.
    pub(crate) const fn nested_key(self) -> &'static str {
        match self {
            Self::MetadataUserId => "user_id",
            Self::SessionParamsId
            | Self::SessionId
            | Self::Conversation
            | Self::PromptCacheKey
            | Self::PreviousResponseId
            | Self::User
            | Self::SafetyIdentifier => "id",
        }
    }

    /// True where the value itself may be the name.
    pub(crate) const fn may_be_string(self) -> bool {
        !matches!(self, Self::SessionParamsId | Self::MetadataUserId)
    }
}

/// What session hints do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SessionMode {
    /// Nothing.
    Off,
    /// They stand in where there is no usable prompt.
    #[default]
    Fallback,
    /// They replace the prompt's keys.
    Replace,
    /// They are mixed into the prompt's keys.
    Extend,
}

impl SessionMode {
    /// The name used in config.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Fallback => "fallback",
            Self::Replace => "replace",
            Self::Extend => "extend",
        }
    }
}

/// Number of fields.
pub(crate) const SESSION_FIELD_COUNT: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_names_and_body_keys_find_their_field() {
        for (at, field) in SessionField::ALL.into_iter().enumerate() {
            assert_eq!(field as usize, at);
            assert_eq!(SessionField::from_name(field.as_str()), Some(field));
        }
        assert_eq!(
            SessionField::of_key("metadata"),
            Some(SessionField::MetadataUserId)
        );
        assert_eq!(
            SessionField::of_key("session_params"),
            Some(SessionField::SessionParamsId)
        );
        assert_eq!(SessionField::of_key("x_request_id"), None);
        assert_eq!(SessionField::from_name("session_params"), None);
    }
}
