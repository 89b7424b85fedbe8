//! Request path → which API it is.
//!
//! In: the path as the client sent it, query included. Out: the [`Api`], or nothing for every path that does not
//! generate text. Whole paths are compared, so `/v1/chat/completions/render` is not a chat completion.

/// The body format of a generation request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI chat completions.
    OpenAiChat,
    /// OpenAI completions.
    OpenAiCompletions,
    /// OpenAI responses.
    OpenAiResponses,
    /// Anthropic messages.
    AnthropicMessages,
    /// SGLang (`text`, `input_ids`) or TGI (`inputs`), told apart by their keys.
    Generate,
    /// vLLM's token-in, token-out route.
    VllmTokensIn,
    /// Ollama chat.
    OllamaChat,
    /// Ollama generate.
    OllamaGenerate,
    /// Gemini `generateContent` and `streamGenerateContent`.
    Gemini,
    /// Cohere chat, version 1.
    CohereV1Chat,
    /// Cohere chat, version 2.
    CohereV2Chat,
}

impl Api {
    /// The API of a path; `None` where the request does not generate and must pass untouched.
    pub fn from_path(path_with_query: &str) -> Option<Self> {
        let path = without_query(path_with_query);
        if path == "/" {
            return Some(Self::Generate);
        }
        let path = path.strip_suffix('/').unwrap_or(path);
        match path {
            "/v1/chat/completions" | "/openai/v1/chat/completions" => Some(Self::OpenAiChat),
            "/v1/completions" | "/openai/v1/completions" => Some(Self::OpenAiCompletions),
            "/v1/responses" | "/openai/v1/responses" | "/openai/responses" => Some(Self::OpenAiResponses),
            "/v1/messages" => Some(Self::AnthropicMessages),
            "/generate" | "/generate_stream" => Some(Self::Generate),
            "/inference/v1/generate" => Some(Self::VllmTokensIn),
            "/api/chat" => Some(Self::OllamaChat),
            "/api/generate" => Some(Self::OllamaGenerate),
            "/v1/chat" => Some(Self::CohereV1Chat),
            "/v2/chat" => Some(Self::CohereV2Chat),
            _ => azure(path)
                .map(|(api, _)| api)
                .or_else(|| gemini(path).map(|_| Self::Gemini)),
        }
    }

    /// The model that the path names (Azure deployments, Gemini).
    pub(crate) fn model_in_path(path_with_query: &str) -> Option<&str> {
        let path = without_query(path_with_query);
        let path = path.strip_suffix('/').unwrap_or(path);
        azure(path)
            .map(|(_, model)| model)
            .or_else(|| gemini(path).map(|(model, _)| model))
    }

    /// True where the path itself asks for a stream.
    pub(crate) fn path_streams(path_with_query: &str) -> bool {
        let path = without_query(path_with_query);
        let path = path.strip_suffix('/').unwrap_or(path);
        path == "/generate_stream" || gemini(path).is_some_and(|(_, streams)| streams)
    }

    /// Whether the first event of a streamed answer comes with the first token. A Responses stream begins with
    /// `response.created`, which vLLM 0.32 sends before the prefill.
    pub const fn stream_begins_with_token(self) -> bool {
        !matches!(self, Self::OpenAiResponses)
    }

    /// The name used in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OpenAiChat => "openai_chat",
            Self::OpenAiCompletions => "openai_completions",
            Self::OpenAiResponses => "openai_responses",
            Self::AnthropicMessages => "anthropic_messages",
            Self::Generate => "generate",
            Self::VllmTokensIn => "vllm_tokens_in",
            Self::OllamaChat => "ollama_chat",
            Self::OllamaGenerate => "ollama_generate",
            Self::Gemini => "gemini",
            Self::CohereV1Chat => "cohere_v1_chat",
            Self::CohereV2Chat => "cohere_v2_chat",
        }
    }
}

fn without_query(path: &str) -> &str {
    path.split(['?', '#']).next().unwrap_or(path)
}

/// `/openai/deployments/NAME/chat/completions` and `/openai/deployments/NAME/completions`.
fn azure(path: &str) -> Option<(Api, &str)> {
    let (model, rest) = path.strip_prefix("/openai/deployments/")?.split_once('/')?;
    let api = match rest {
        "chat/completions" => Api::OpenAiChat,
        "completions" => Api::OpenAiCompletions,
        _ => return None,
    };
    (!model.is_empty()).then_some((api, model))
}

/// `/VERSION/models/NAME:generateContent`, also below Vertex AI's `projects/…/publishers/…`; true = streams.
fn gemini(path: &str) -> Option<(&str, bool)> {
    let version = path.strip_prefix("/v1")?;
    let rest = version
        .strip_prefix("beta1")
        .or_else(|| version.strip_prefix("beta"))
        .unwrap_or(version);
    let (parent, last) = rest.rsplit_once('/')?;
    if parent != "/models" && !(parent.starts_with("/projects/") && parent.ends_with("/models")) {
        return None;
    }
    let (model, method) = last.split_once(':')?;
    let streams = match method {
        "generateContent" => false,
        "streamGenerateContent" => true,
        _ => return None,
    };
    (!model.is_empty()).then_some((model, streams))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_paths_match_after_cutting_the_query() {
        for (path, api) in [
            ("/v1/chat/completions", Some(Api::OpenAiChat)),
            ("/v1/chat/completions/", Some(Api::OpenAiChat)),
            (
                "/v1/chat/completions?api-version=2024-10-21",
                Some(Api::OpenAiChat),
            ),
            ("/v1/chat/completions/render", None),
            ("/v1/chat", Some(Api::CohereV1Chat)),
            ("/v1/messages", Some(Api::AnthropicMessages)),
            ("/v1/messages/count_tokens", None),
            (
                "/openai/deployments/gpt/chat/completions?api-version=1",
                Some(Api::OpenAiChat),
            ),
            ("/openai/deployments/gpt/embeddings", None),
            ("/openai/deployments//chat/completions", None),
            ("/v1beta/models/demo-pro:generateContent", Some(Api::Gemini)),
            ("/v1beta/models/demo-pro:countTokens", None),
            (
                "/v1/projects/p/locations/l/publishers/google/models/m:streamGenerateContent",
                Some(Api::Gemini),
            ),
            ("/", Some(Api::Generate)),
            ("/generate_stream", Some(Api::Generate)),
            ("", None),
            ("/v1/embeddings", None),
            ("/metrics", None),
        ] {
            assert_eq!(Api::from_path(path), api, "{path}");
        }
    }

    #[test]
    fn the_path_may_name_the_model_and_the_stream() {
        assert_eq!(
            Api::model_in_path("/openai/deployments/gpt/completions?x"),
            Some("gpt")
        );
        assert_eq!(
            Api::model_in_path("/v1beta/models/demo-pro:streamGenerateContent?alt=sse"),
            Some("demo-pro")
        );
        assert_eq!(Api::model_in_path("/v1/completions"), None);
        assert!(Api::path_streams(
            "/v1beta/models/demo-pro:streamGenerateContent?alt=sse"
        ));
        assert!(!Api::path_streams("/v1/completions"));
    }
}
