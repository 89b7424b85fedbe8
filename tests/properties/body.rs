//! Any body on any path → the facts read of it keep what the documentation of `prompt` and `late_fields` promises.
//!
//! Half of the inputs are bytes as they come, the others a body of the path's API made of the keys that the readers know,
//! with odd types, nesting, escapes, surrogates and keys that come twice. Both are read whole and cut anywhere.

use warmroute::chunk::{ChainPoint, PrefixKeys};
use warmroute::late_fields::LateFields;
use warmroute::prompt::{
    Api, BodyEnd, Extraction, NoPrompt, PromptInput, PromptOptions, SessionField, SessionMode, extract,
    record,
};

use super::choices::{Choices, Seen, shown};
use super::json::{Node, any, shuffle, text};

/// The paths of all APIs, each in several spellings.
pub(crate) const PATHS: [&str; 22] = [
    "/v1/chat/completions",
    "/openai/v1/chat/completions/?a=b#c",
    "/openai/deployments/demo/chat/completions",
    "/v1/completions",
    "/openai/deployments/demo/completions?api-version=1",
    "/openai/v1/completions",
    "/v1/responses",
    "/openai/responses",
    "/v1/messages",
    "/generate",
    "/generate_stream",
    "/",
    "/inference/v1/generate",
    "/api/chat",
    "/api/generate",
    "/v1beta/models/demo:generateContent",
    "/v1/models/demo:streamGenerateContent?alt=sse",
    "/v1beta1/projects/p/locations/l/publishers/google/models/demo:generateContent",
    "/v1/chat",
    "/v2/chat",
    "/openai/v1/responses",
    "/v1beta/models/demo:streamGenerateContent",
];

/// Every key that a reader of a body knows, and some that none knows.
pub(crate) const KEYS: [&str; 105] = [
    "model",
    "messages",
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "cache_salt",
    "extra_key",
    "lora_path",
    "add_special_tokens",
    "prompt",
    "suffix",
    "prompt_embeds",
    "input",
    "instructions",
    "reasoning",
    "max_output_tokens",
    "previous_response_id",
    "conversation",
    "system",
    "text",
    "input_ids",
    "inputs",
    "input_embeds",
    "image_data",
    "parameters",
    "sampling_params",
    "token_ids",
    "think",
    "options",
    "template",
    "raw",
    "context",
    "images",
    "contents",
    "systemInstruction",
    "system_instruction",
    "cachedContent",
    "cached_content",
    "generationConfig",
    "generation_config",
    "message",
    "chat_history",
    "preamble",
    "conversation_id",
    "safety_mode",
    "session_params",
    "session_id",
    "prompt_cache_key",
    "metadata",
    "user",
    "safety_identifier",
    "role",
    "content",
    "parts",
    "tool_plan",
    "tool_calls",
    "function_call",
    "name",
    "type",
    "arguments",
    "output",
    "function",
    "id",
    "user_id",
    "cache_control",
    "thinking",
    "source",
    "data",
    "url",
    "file_data",
    "file_id",
    "fileUri",
    "file_uri",
    "file_url",
    "uri",
    "image_url",
    "input_audio",
    "thought",
    "thoughtSignature",
    "functionCall",
    "functionResponse",
    "function_response",
    "args",
    "response",
    "inlineData",
    "inline_data",
    "fileData",
    "effort",
    "adapter_id",
    "max_new_tokens",
    "maxOutputTokens",
    "num_predict",
    "n",
    "temperature",
    "metadata.user_id",
    "",
    "unknown",
];

/// Words that stand as values of the keys above.
pub(crate) const WORDS: [&str; 34] = [
    "demo",
    "demo:adapter",
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "model",
    "text",
    "input_text",
    "output_text",
    "message",
    "function_call",
    "function_call_output",
    "thinking",
    "tool_use",
    "tool_result",
    "image_url",
    "video_url",
    "input_image",
    "input_audio",
    "input_file",
    "file",
    "image",
    "audio",
    "document",
    "function",
    "reasoning",
    "high",
    "x-anthropic-billing-header: cc",
    "\\ud83d\\ude80",
    "null",
    "true",
    "USER",
];

/// Checks everything on the body that the bytes stand for.
pub(crate) fn check(data: &[u8], seen: &mut Seen) {
    let mut choices = Choices::new(data);
    let mode = choices.byte();
    let path = choices.pick(&PATHS);
    let api = Api::from_path(path).expect("every path of the list has an API");
    let options = options(&mut choices);
    let tenant = [None, None, Some(&b"acme"[..])][choices.below(3)];
    let session_header = [None, None, None, Some(&b"s-1"[..])][choices.below(4)];
    let cut_seed = choices.u32();
    let (body, tree) = if mode.is_multiple_of(2) {
        let tree = body_of(&mut choices, api);
        let body = tree.written(&mut choices);
        (body.into_bytes(), Some(tree))
    } else {
        (choices.rest().to_vec(), None)
    };
    let case = Case {
        input: PromptInput {
            api,
            path,
            body: &body,
            end: BodyEnd::EndOfStream,
            tenant,
            session_header,
        },
        options: &options,
    };
    let whole = case.read(&body, BodyEnd::EndOfStream);
    case.note(&whole, seen);
    case.check_facts(&body, &whole);
    case.check_ends(&body, &whole);
    case.check_cuts(&body, &whole, cut_seed, seen);
    case.check_tenants(&body, &whole, seen);
    let tree = tree
        .filter(|tree| !tree.has_duplicates())
        .and_then(|tree| Node::parse(&tree.plain()))
        .or_else(|| Node::parse(std::str::from_utf8(&body).ok()?));
    // Parts of more keys than any known one has are refused, unless a type that comes first has them ignored.
    if let Some(tree) = tree.filter(|tree| tree.widest() < 60) {
        case.check_rewritten(&body, &whole, &tree, &mut Choices::new(data), seen);
        case.check_continued(&tree, seen);
    }
}

/// One body under one set of options.
struct Case<'a> {
    input: PromptInput<'a>,
    options: &'a PromptOptions,
}

impl Case<'_> {
    fn read(&self, body: &[u8], end: BodyEnd) -> Extraction {
        extract(&self.input_of(body, end), self.options)
    }

    fn input_of<'b>(&'b self, body: &'b [u8], end: BodyEnd) -> PromptInput<'b> {
        PromptInput {
            body,
            end,
            ..self.input
        }
    }

    fn told(&self, body: &[u8]) -> String {
        format!(
            "{} with {:?}, tenant {:?}, session {:?}, body of {}",
            self.input.path,
            self.options,
            self.input.tenant,
            self.input.session_header,
            shown(body)
        )
    }

    fn note(&self, whole: &Extraction, seen: &mut Seen) {
        match &whole.prompt {
            Ok(prompt) => {
                seen.note("prompt");
                seen.note_if(
                    "prompt with keys",
                    !prompt.keys(&prompt.namespace).keys.is_empty(),
                );
                seen.note_if("prompt of many chunks", prompt.chain.len() > 8);
                seen.note_if("prompt with an adapter", whole.adapter.is_some());
                seen.note(self.input.api.as_str());
            }
            Err(cause) => seen.note(cause.as_str()),
        }
        seen.note_if("session", whole.session.is_some());
    }

    /// Bounds of what one body can make, and agreement of the two readers.
    fn check_facts(&self, body: &[u8], whole: &Extraction) {
        let told = || self.told(body);
        assert!(
            whole.model.as_ref().is_none_or(|model| model.len() <= 256),
            "{}",
            told()
        );
        assert!(whole.model.is_none() || whole.model_hash.is_some(), "{}", told());
        assert!(
            whole.session.is_none() || self.options.session_mode != SessionMode::Off,
            "{}",
            told()
        );
        if let Ok(prompt) = &whole.prompt {
            check_chain(
                &prompt.chain,
                prompt.chain_bytes,
                self.options.max_prefix_bytes,
                &told,
            );
            // A comma of a batch counts as a token of four bytes at most.
            let text_bytes = u64::from(prompt.chain_bytes) + u64::from(prompt.namespace.bytes);
            assert!(text_bytes <= 4 * body.len() as u64 + 64, "{}", told());
            assert!(prompt.chain_bytes > 0, "{}", told());
            let model_known = whole.model_hash.is_some();
            assert_eq!(
                prompt.namespace.model_seen,
                model_known && !is_empty_model(whole),
                "{}",
                told()
            );
        }
        for end in [BodyEnd::EndOfStream, BodyEnd::Limit] {
            let hashed = self.read(body, end).prompt.err();
            let recorded = record(&self.input_of(body, end), self.options).err();
            let hashed = hashed.filter(|cause| {
                recorded.is_some() || !matches!(cause, NoPrompt::PromptEmpty | NoPrompt::PromptMissing)
            });
            assert_eq!(hashed, recorded, "{end:?}: {}", told());
        }
    }

    /// What is no JSON has no prompt; what is whole is read the same before the limit; a byte order mark is nothing.
    fn check_ends(&self, body: &[u8], whole: &Extraction) {
        let bare = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
        let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(bare).is_ok();
        assert!(
            is_json || whole.prompt.is_err(),
            "no JSON, yet a prompt: {}",
            self.told(body)
        );
        if is_json && !bare.trim_ascii_end().last().is_some_and(u8::is_ascii_digit) {
            let at_limit = self.read(body, BodyEnd::Limit);
            assert_eq!(&at_limit, whole, "whole, but read as cut: {}", self.told(body));
        }
        if !body.starts_with(b"\xEF\xBB\xBF") {
            let marked = [b"\xEF\xBB\xBF", body].concat();
            let marked_reading = self.read(&marked, BodyEnd::EndOfStream);
            assert_eq!(&marked_reading, whole, "with a mark: {}", self.told(body));
        }
    }

    /// A cut body has a prefix of the whole one's keys, and its late fields are those of the whole one.
    fn check_cuts(&self, body: &[u8], whole: &Extraction, seed: u32, seen: &mut Seen) {
        let seed_bytes = seed.to_le_bytes();
        let mut choices = Choices::new(&seed_bytes);
        let mut cuts = vec![
            body.len().saturating_sub(1),
            body.len() / 2,
            seed as usize % (body.len() + 1),
        ];
        cuts.extend((0..4).map(|_| choices.below(256).min(body.len())));
        for cut in cuts {
            let head = &body[..cut];
            let told = || format!("cut at {cut}: {}", self.told(body));
            let ended = self.read(head, BodyEnd::EndOfStream);
            let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(
                head.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(head),
            )
            .is_ok();
            assert!(is_json || ended.prompt.is_err(), "{}", told());
            let Ok(part) = self.read(head, BodyEnd::Limit).prompt else {
                continue;
            };
            seen.note("cut prompt");
            check_chain(
                &part.chain,
                part.chain_bytes,
                self.options.max_prefix_bytes,
                &told,
            );
            let Ok(all) = &whole.prompt else {
                // A body that is refused as a whole may have a head that is none.
                continue;
            };
            assert!(
                all.chain.starts_with(&part.chain),
                "{:?} of {:?}: {}",
                part.chain,
                all.chain,
                told()
            );
            if part.namespace.complete {
                assert_eq!(part.namespace, all.namespace, "{}", told());
                continue;
            }
            let outer_agrees = part.namespace.identity.outer == all.namespace.identity.outer;
            assert!(outer_agrees, "{}", told());
            if part.chain.is_empty() {
                continue;
            }
            seen.note("cut prompt with points");
            let mut late_fields = LateFields::new(16);
            late_fields.settle(all);
            let recalled = late_fields.settle(&part);
            assert_eq!(recalled, Some(all.namespace), "{}", told());
            let whole_keys = all.keys(&all.namespace).keys;
            let part_keys = part.keys(&all.namespace).keys;
            assert!(whole_keys.starts_with(&part_keys), "{}", told());
            seen.note_if("cut namespace", part.namespace.hash != all.namespace.hash);
            assert!(late_fields.entry_count() <= 16, "{}", told());
        }
    }

    /// No key of one tenant is another's, and neither is a late field.
    fn check_tenants(&self, body: &[u8], whole: &Extraction, seen: &mut Seen) {
        let other_input = PromptInput {
            tenant: Some(b"other"),
            ..self.input
        };
        let other = extract(&other_input, self.options);
        let (Ok(mine), Ok(theirs)) = (&whole.prompt, &other.prompt) else {
            assert_eq!(
                whole.prompt.as_ref().err(),
                other.prompt.as_ref().err(),
                "{}",
                self.told(body)
            );
            return;
        };
        seen.note("two tenants");
        let hashes = |keys: PrefixKeys| -> Vec<u64> { keys.keys.iter().map(|key| key.hash.0).collect() };
        let their_keys = hashes(theirs.keys(&theirs.namespace));
        let mine_keys = hashes(mine.keys(&mine.namespace));
        assert!(
            !mine_keys.iter().any(|key| their_keys.contains(key)),
            "{}",
            self.told(body)
        );
        let mut late_fields = LateFields::new(16);
        late_fields.settle(mine);
        assert_eq!(late_fields.recall(theirs), None, "{}", self.told(body));
        if let (Some(mine), Some(theirs)) = (whole.session, other.session) {
            assert_ne!(mine, theirs, "{}", self.told(body));
        }
    }

    /// Order of keys, white space and escapes leave no trace, but for the order that templates render.
    fn check_rewritten(
        &self,
        body: &[u8],
        whole: &Extraction,
        tree: &Node,
        choices: &mut Choices<'_>,
        seen: &mut Seen,
    ) {
        for is_shuffled in [false, true] {
            let mut tree = tree.clone();
            if is_shuffled {
                shuffle_body(&mut tree, choices);
            }
            let rewritten = tree.written(choices);
            let told = || format!("{} against {}", self.told(body), shown(rewritten.as_bytes()));
            let read = self.read(rewritten.as_bytes(), BodyEnd::EndOfStream);
            match (&whole.prompt, &read.prompt) {
                (Ok(_), Ok(_)) => {
                    seen.note("rewritten prompt");
                    assert_eq!(&read, whole, "{}", told());
                }
                // Of several reasons the first that is met counts, and a text that is no UTF-8 may be in an unread field.
                (Err(_), Err(_)) => {}
                (Ok(_), Err(_)) | (Err(_), Ok(_)) => panic!("{:?}: {}", read.prompt, told()),
            }
        }
    }

    /// A conversation that goes on keeps its points.
    fn check_continued(&self, tree: &Node, seen: &mut Seen) {
        let Node::Object(fields) = tree else { return };
        let before = fields.iter().map(|(key, value)| match value {
            Node::List(items) if !items.is_empty() && MESSAGE_KEYS.contains(&key.as_str()) => {
                (key.clone(), Node::List(items[..items.len() - 1].to_vec()))
            }
            _ => (key.clone(), value.clone()),
        });
        let has_tail = |(key, _): &(String, Node)| {
            matches!(key.as_str(), "suffix" | "images" | "image_data" | "message")
        };
        if fields.iter().any(has_tail) {
            return;
        }
        let shorter = Node::Object(before.collect()).plain();
        let longer = tree.plain();
        let (Ok(before), Ok(after)) = (
            self.read(shorter.as_bytes(), BodyEnd::EndOfStream).prompt,
            self.read(longer.as_bytes(), BodyEnd::EndOfStream).prompt,
        ) else {
            return;
        };
        seen.note_if("continued prompt", before.chain.len() < after.chain.len());
        assert!(
            after.chain.starts_with(&before.chain),
            "{}",
            self.told(longer.as_bytes())
        );
        assert_eq!(
            before.namespace,
            after.namespace,
            "{}",
            self.told(longer.as_bytes())
        );
    }
}

fn is_empty_model(whole: &Extraction) -> bool {
    whole.model.as_deref() == Some("")
}

/// Bounds of a chain: 512 fixed offsets and 256 message ends at most, growing.
fn check_chain(chain: &[ChainPoint], chain_bytes: u32, max_prefix_bytes: u32, told: &dyn Fn() -> String) {
    assert!(chain.len() <= 512 + 256, "{} points: {}", chain.len(), told());
    let offsets = (max_prefix_bytes / 256) as usize;
    assert!(chain.len() <= offsets + 256, "{} points: {}", chain.len(), told());
    for pair in chain.windows(2) {
        assert!(pair[0].end_bytes <= pair[1].end_bytes, "{}", told());
        assert_ne!(pair[0].hash, pair[1].hash, "{}", told());
    }
    assert!(
        chain.last().is_none_or(|last| last.end_bytes <= chain_bytes),
        "{}",
        told()
    );
}

fn options(choices: &mut Choices<'_>) -> PromptOptions {
    let mut options = PromptOptions::default();
    if choices.one_in(4) {
        options.max_prefix_bytes = choices.pick(&[1024, 4096, 40_000, 4 << 20]);
    }
    if choices.one_in(4) {
        options.secret = b"secret".to_vec();
    }
    if choices.one_in(4) {
        options.volatile_heads = vec![
            "a".into(),
            "many words".into(),
            "x-anthropic-billing-header:".into(),
        ];
    }
    if choices.one_in(2) {
        options.session_mode = choices.pick(&[
            SessionMode::Off,
            SessionMode::Fallback,
            SessionMode::Replace,
            SessionMode::Extend,
        ]);
        options.session_fields = SessionField::ALL.to_vec();
    }
    options
}

/// A body as a client of the API may send it, mostly.
fn body_of(choices: &mut Choices<'_>, api: Api) -> Node {
    if choices.one_in(24) {
        return any(choices, &KEYS, 3);
    }
    let prompt_key: &[&str] = match api {
        Api::OpenAiChat | Api::AnthropicMessages | Api::OllamaChat | Api::CohereV2Chat => &["messages"],
        Api::OpenAiCompletions | Api::OllamaGenerate => &["prompt"],
        Api::OpenAiResponses => &["input"],
        Api::Generate => &["text", "input_ids", "inputs"],
        Api::VllmTokensIn => &["token_ids"],
        Api::Gemini => &["contents"],
        Api::CohereV1Chat => &["chat_history", "message"],
    };
    let mut fields = Vec::new();
    if !choices.one_in(12) {
        let key = choices.pick(prompt_key);
        fields.push((key.to_owned(), value_of(choices, key)));
    }
    if !choices.one_in(6) {
        fields.push(("model".to_owned(), value_of(choices, "model")));
    }
    for _ in 0..choices.below(6) {
        let key = choices.pick(&KEYS[..59]);
        // A key that comes twice is refused, so most must not.
        if fields.iter().all(|(known, _)| known != key) || choices.one_in(6) {
            fields.push((key.to_owned(), value_of(choices, key)));
        }
    }
    shuffle(&mut fields, choices);
    Node::Object(fields)
}

/// A value of the type that a key has, mostly.
fn value_of(choices: &mut Choices<'_>, key: &str) -> Node {
    if choices.one_in(24) {
        return any(choices, &KEYS, 3);
    }
    match key {
        "messages" | "contents" | "chat_history" => list(choices, 7, message),
        "input" if choices.one_in(3) => Node::Text(text(choices)),
        "input" => list(choices, 7, item),
        "prompt" | "text" | "inputs" | "input_ids" | "token_ids" => prompt(choices),
        "system" | "instructions" | "preamble" | "systemInstruction" | "system_instruction" => {
            if choices.one_in(3) {
                Node::object([("parts", content(choices))])
            } else {
                content(choices)
            }
        }
        "model" | "reasoning_effort" | "safety_mode" | "chat_template" | "cache_salt" | "extra_key"
        | "template" | "message" | "suffix" => {
            if choices.one_in(2) {
                Node::text(choices.pick(&WORDS))
            } else {
                Node::Text(text(choices))
            }
        }
        "stream" | "raw" | "think" | "add_special_tokens" => Node::Bool(choices.one_in(2)),
        "max_tokens" | "max_completion_tokens" | "max_output_tokens" => Node::number(choices.odd_u64()),
        "lora_path" if choices.one_in(3) => list(choices, 3, |choices| Node::text(choices.pick(&WORDS[..3]))),
        "lora_path" | "session_id" | "conversation" | "prompt_cache_key" | "user" | "safety_identifier" => {
            if choices.one_in(4) {
                Node::object([("id", Node::Text(text(choices)))])
            } else {
                Node::Text(text(choices))
            }
        }
        "tools" | "functions" | "documents" | "context" | "images" | "image_data" => {
            list(choices, 4, |choices| any(choices, &KEYS[59..], 3))
        }
        "parameters" | "sampling_params" | "options" | "generationConfig" | "generation_config" => object(
            choices,
            &[
                "adapter_id",
                "max_new_tokens",
                "max_tokens",
                "maxOutputTokens",
                "num_predict",
                "n",
            ],
        ),
        "metadata" => object(choices, &["user_id", "id"]),
        "previous_response_id"
        | "conversation_id"
        | "cachedContent"
        | "cached_content"
        | "prompt_embeds"
        | "input_embeds"
        | "session_params"
            if !choices.one_in(4) =>
        {
            Node::Null
        }
        _ => object(choices, &KEYS[59..]),
    }
}

fn list(choices: &mut Choices<'_>, below: usize, item: impl Fn(&mut Choices<'_>) -> Node) -> Node {
    Node::List((0..choices.below(below)).map(|_| item(choices)).collect())
}

fn object(choices: &mut Choices<'_>, keys: &[&str]) -> Node {
    let mut fields: Vec<(String, Node)> = Vec::new();
    for _ in 0..choices.below(4) {
        let key = choices.pick(keys).to_owned();
        if fields.iter().all(|(known, _)| *known != key) || choices.one_in(12) {
            fields.push((key, any(choices, &KEYS[59..], 2)));
        }
    }
    Node::Object(fields)
}

/// The prompt of a completion in each of its types.
fn prompt(choices: &mut Choices<'_>) -> Node {
    let token = |choices: &mut Choices<'_>| Node::number(choices.odd_u32());
    match choices.below(5) {
        0 | 1 => Node::Text(text(choices)),
        2 => list(choices, 4, |choices| Node::Text(text(choices))),
        3 => Node::List((0..choices.below(600)).map(|_| token(choices)).collect()),
        _ => list(choices, 4, |choices| list(choices, 9, token)),
    }
}

fn message(choices: &mut Choices<'_>) -> Node {
    if choices.one_in(24) {
        return any(choices, &KEYS[59..], 2);
    }
    let role = choices.pick(&[
        "user",
        "assistant",
        "system",
        "developer",
        "tool",
        "model",
        "USER",
    ]);
    let content_key = choices.pick(&["content", "content", "content", "parts", "message"]);
    let mut fields = vec![
        ("role".to_owned(), Node::text(role)),
        (content_key.to_owned(), content(choices)),
    ];
    if choices.one_in(4) {
        fields.push(("name".to_owned(), Node::Text(text(choices))));
    }
    if choices.one_in(4) {
        fields.push(("tool_calls".to_owned(), list(choices, 3, call)));
    }
    if choices.one_in(8) {
        let key = choices.pick(&[
            "images",
            "tool_plan",
            "function_call",
            "cache_control",
            "unknown",
            "type",
        ]);
        fields.push((key.to_owned(), any(choices, &KEYS[59..], 2)));
    }
    shuffle(&mut fields, choices);
    Node::Object(fields)
}

/// An item of OpenAI responses.
fn item(choices: &mut Choices<'_>) -> Node {
    if choices.one_in(2) {
        return message(choices);
    }
    let kind = choices.pick(&["message", "function_call", "function_call_output", "reasoning"]);
    let mut fields = vec![
        ("type".to_owned(), Node::text(kind)),
        ("output".to_owned(), content(choices)),
        ("name".to_owned(), Node::Text(text(choices))),
        ("arguments".to_owned(), any(choices, &KEYS[59..], 2)),
    ];
    if choices.one_in(4) {
        fields.push(("content".to_owned(), content(choices)));
    }
    shuffle(&mut fields, choices);
    Node::Object(fields)
}

fn call(choices: &mut Choices<'_>) -> Node {
    let function = Node::object([
        ("name", Node::Text(text(choices))),
        ("arguments", any(choices, &KEYS[59..], 2)),
    ]);
    Node::object([
        ("id", Node::Text(text(choices))),
        ("type", Node::text("function")),
        (choices.pick(&["function", "function", "unknown"]), function),
    ])
}

fn content(choices: &mut Choices<'_>) -> Node {
    match choices.below(8) {
        0..=3 => Node::Text(text(choices)),
        4 => Node::Null,
        _ => list(choices, 4, |choices| part(choices, 2)),
    }
}

fn part(choices: &mut Choices<'_>, depth: usize) -> Node {
    let text_field = ("text".to_owned(), Node::Text(text(choices)));
    let mut fields = match choices.below(8) {
        0 | 1 => vec![text_field],
        2 | 3 => vec![("type".to_owned(), Node::text("text")), text_field],
        4 if depth > 0 => vec![
            ("type".to_owned(), Node::text("tool_result")),
            (
                "content".to_owned(),
                list(choices, 3, |choices| part(choices, depth - 1)),
            ),
        ],
        5 => {
            let key = choices.pick(&[
                "data",
                "url",
                "file_data",
                "file_id",
                "fileUri",
                "file_uri",
                "uri",
            ]);
            let other = choices.pick(&["data", "url", "file_id", "mime_type"]);
            let mut media = vec![(key.to_owned(), Node::Text(text(choices)))];
            if key != other {
                media.push((other.to_owned(), any(choices, &KEYS[59..], 1)));
            }
            let kind = choices.pick(&[
                "image_url",
                "input_image",
                "input_audio",
                "image",
                "file",
                "document",
            ]);
            vec![
                ("type".to_owned(), Node::text(kind)),
                (
                    choices.pick(&[kind, "source", "image_url"]).to_owned(),
                    Node::Object(media),
                ),
            ]
        }
        6 => vec![(
            choices
                .pick(&["functionCall", "functionResponse", "inlineData", "file_data"])
                .to_owned(),
            object(choices, &["name", "args", "response", "data", "fileUri"]),
        )],
        _ => vec![
            ("type".to_owned(), Node::text(choices.pick(&WORDS))),
            (choices.pick(&KEYS[59..]).to_owned(), any(choices, &KEYS[59..], 1)),
        ],
    };
    if choices.one_in(4) {
        let key = choices.pick(&KEYS[59..]);
        if fields.iter().all(|(known, _)| known != key) {
            fields.push((key.to_owned(), any(choices, &KEYS[59..], 1)));
        }
    }
    shuffle(&mut fields, choices);
    Node::Object(fields)
}

/// Moves the keys about of every object whose order no template renders.
fn shuffle_body(body: &mut Node, choices: &mut Choices<'_>) {
    let Node::Object(fields) = body else { return };
    for (key, value) in fields.iter_mut() {
        match (key.as_str(), &mut *value) {
            (name, Node::List(items)) if MESSAGE_KEYS.contains(&name) => {
                items
                    .iter_mut()
                    .for_each(|message| shuffle_message(message, choices));
            }
            ("system" | "instructions" | "preamble", parts) => shuffle_parts(parts, choices),
            ("systemInstruction" | "system_instruction", Node::Object(inner)) => {
                inner
                    .iter_mut()
                    .for_each(|(_, parts)| shuffle_parts(parts, choices));
                shuffle(inner, choices);
            }
            ("parameters" | "sampling_params" | "options" | "chat_template_kwargs", Node::Object(inner)) => {
                shuffle(inner, choices);
            }
            _ => {}
        }
    }
    shuffle(fields, choices);
}

fn shuffle_message(message: &mut Node, choices: &mut Choices<'_>) {
    let Node::Object(fields) = message else { return };
    // An item of a kind that no reader knows is JSON, whose inner order counts.
    let kind = fields
        .iter()
        .find(|(key, _)| key == "type")
        .map(|(_, kind)| kind.clone());
    let is_known = kind.is_none_or(|kind| matches!(kind, Node::Text(kind) if kind == "message"));
    for (key, value) in fields.iter_mut().filter(|_| is_known) {
        match (key.as_str(), &mut *value) {
            ("content" | "parts", parts) => shuffle_parts(parts, choices),
            ("tool_calls", Node::List(calls)) => {
                for call in calls {
                    if let Node::Object(call) = call {
                        shuffle(call, choices);
                    }
                }
            }
            _ => {}
        }
    }
    shuffle(fields, choices);
}

fn shuffle_parts(parts: &mut Node, choices: &mut Choices<'_>) {
    let Node::List(parts) = parts else { return };
    for part in parts {
        if let Node::Object(fields) = part {
            shuffle(fields, choices);
        }
    }
}

/// Keys whose lists are conversations.
const MESSAGE_KEYS: [&str; 4] = ["messages", "input", "contents", "chat_history"];
