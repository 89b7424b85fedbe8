//! An answer's last bytes → how many tokens its prompt had, and how many of them were cached.
//!
//! In: the chunks of an answer's body as they pass, of which only the last [`TAIL_BYTES`] are ever copied. Out: the
//! engine's own count, and a mean of bytes per token learned from it. The bytes are untrusted: no panic, memory bounded
//! by [`TAIL_BYTES`], a bounded number of steps. Where chunks begin and end never matters, and nothing here can change
//! or delay a byte.
//!
//! # Formats
//! `usage` with `prompt_tokens` and `prompt_tokens_details.cached_tokens` (chat and completions of vLLM, SGLang,
//! TensorRT-LLM, llama.cpp), with `input_tokens` and `input_tokens_details.cached_tokens` (Responses), with
//! `input_tokens`, `cache_read_input_tokens` and `cache_creation_input_tokens`, of which the prompt is the sum
//! (Anthropic Messages), and SGLang's `meta_info` with `prompt_tokens` and `cached_tokens`. Counts that are absent or
//! null are unknown, not 0: vLLM and SGLang leave the cached ones out unless started with `--enable-prompt-tokens-details`
//! and `--enable-cache-report`. In vLLM 0.32 `usage` comes after the text in every one of them, followed by a few fields
//! that are null unless the request asks for log probabilities or ids of the prompt, and stands in the last event but one
//! of a stream, or the last (`message_delta` and `response.completed`).

/// What an engine counted for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Of those, tokens found in the cache; `None` where the engine does not tell.
    pub cached_tokens: Option<u32>,
}

/// The end of one answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerTail {
    form: AnswerForm,
    bytes: Vec<u8>,
    seen_bytes: u64,
    /// Where the tail begins, if the answer's length is known.
    tail_start: u64,
}

/// How an answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerForm {
    /// One JSON object; its `usage` counts only where the object is complete and `usage` a field of it.
    Whole,
    /// Events; the last `usage` in them counts.
    Events,
}

impl AnswerTail {
    /// The tail of an answer of which nothing has come yet.
    #[must_use]
    pub const fn new(form: AnswerForm, content_length: Option<u64>) -> Self {
        Self {
            form,
            bytes: Vec::new(),
            seen_bytes: 0,
            tail_start: match content_length {
                Some(length) => length.saturating_sub(TAIL_BYTES as u64),
                None => 0,
            },
        }
    }

    /// A chunk comes by: how many of its last bytes are wanted, to be given to [`AnswerTail::push`] before the next.
    pub fn pass(&mut self, chunk_bytes: usize) -> usize {
        self.seen_bytes = self.seen_bytes.saturating_add(chunk_bytes as u64);
        let in_tail = self.seen_bytes.saturating_sub(self.tail_start);
        usize::try_from(in_tail)
            .unwrap_or(usize::MAX)
            .min(chunk_bytes)
            .min(TAIL_BYTES)
    }

    /// Takes over the last bytes of the chunk that came by.
    pub fn push(&mut self, last: &[u8]) {
        let kept = TAIL_BYTES.saturating_sub(last.len());
        let surplus = self.bytes.len().saturating_sub(kept);
        if surplus > 0 {
            self.bytes.drain(..surplus.min(self.bytes.len()));
        }
        let newest = last.len().saturating_sub(TAIL_BYTES);
        self.bytes.extend_from_slice(last.get(newest..).unwrap_or(last));
    }

    /// What the engine counted, once the answer is complete.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        let mut end = self.bytes.len();
        for _ in 0..MAX_CANDIDATES {
            end = self.last_name(end)?;
            let after_name = self.bytes.get(end.saturating_add(1)..)?;
            if let Some(usage) = self.read(after_name) {
                return Some(usage);
            }
        }
        None
    }

    /// Where the last of the wanted names before `end` is closed by its quote.
    fn last_name(&self, end: usize) -> Option<usize> {
        let bytes = self.bytes.get(..end)?;
        let is_name = |at: usize| {
            let before = bytes.get(..at).unwrap_or(&[]);
            let name = NAMES.iter().find_map(|name| before.strip_suffix(*name));
            // Within a string both quotes would have a backslash before them.
            name.and_then(|before| before.strip_suffix(b"\""))
                .is_some_and(|before| before.last() != Some(&b'\\'))
        };
        let quotes = bytes.iter().enumerate().rev().filter(|(_, byte)| **byte == b'"');
        quotes.map(|(at, _)| at).find(|at| is_name(*at))
    }

    /// The counts in the object that follows a name.
    fn read(&self, after_name: &[u8]) -> Option<Usage> {
        let mut scanner = Scanner {
            rest: after_name,
            depth: 0,
        };
        if scanner.byte()? != b':' || scanner.byte()? != b'{' {
            return None;
        }
        let counts = Counts::read(&mut scanner)?;
        if self.form == AnswerForm::Whole && !scanner.closes_one_object() {
            return None;
        }
        counts.usage()
    }
}

/// The numbers of a usage object that matter.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    prompt: Option<u32>,
    input: Option<u32>,
    cached: Option<u32>,
    cache_read: Option<u32>,
    cache_created: Option<u32>,
}

impl Counts {
    /// Reads up to the end of the object; the scanner stands behind its opening brace.
    fn read(scanner: &mut Scanner<'_>) -> Option<Self> {
        let mut counts = Self::default();
        let mut key: &[u8] = b"";
        let mut outer_key: &[u8] = b"";
        scanner.depth = 1;
        loop {
            match scanner.token()? {
                Token::Text(text) if scanner.peek() == Some(b':') => {
                    key = text;
                    if scanner.depth == 1 {
                        outer_key = text;
                    }
                }
                Token::Text(_) => {}
                Token::Number(number) => counts.note(scanner.depth, outer_key, key, number),
                Token::Closed if scanner.depth == 0 => return Some(counts),
                Token::Closed | Token::Else => {}
            }
        }
    }

    fn note(&mut self, depth: u32, outer_key: &[u8], key: &[u8], number: u32) {
        let place = match (depth, outer_key, key) {
            (1, _, b"prompt_tokens") => &mut self.prompt,
            (1, _, b"input_tokens") => &mut self.input,
            (1, _, b"cache_read_input_tokens") => &mut self.cache_read,
            (1, _, b"cache_creation_input_tokens") => &mut self.cache_created,
            (1, _, b"cached_tokens")
            | (2, b"prompt_tokens_details" | b"input_tokens_details", b"cached_tokens") => &mut self.cached,
            _ => return,
        };
        *place = Some(number);
    }

    fn usage(self) -> Option<Usage> {
        let cached = self.cached.or(self.cache_read);
        let prompt_tokens = match self.prompt {
            Some(prompt) => prompt,
            None => self
                .input?
                .saturating_add(self.cache_read.unwrap_or(0))
                .saturating_add(self.cache_created.unwrap_or(0)),
        };
        (prompt_tokens > 0).then_some(Usage {
            prompt_tokens,
            cached_tokens: cached.map(|cached| cached.min(prompt_tokens)),
        })
    }
}

/// Walks JSON from any place that is not within a string.
#[derive(Debug, Clone, Copy)]
struct Scanner<'a> {
    rest: &'a [u8],
    depth: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token<'a> {
    /// A string or a name, escapes as written.
    Text(&'a [u8]),
    /// A whole number.
    Number(u32),
    /// An object or array was closed.
    Closed,
    /// Anything else.
    Else,
}

impl<'a> Scanner<'a> {
    fn peek(&mut self) -> Option<u8> {
        self.rest = self.rest.trim_ascii_start();
        self.rest.first().copied()
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.rest = self.rest.get(1..)?;
        Some(byte)
    }

    /// The next token; `None` at the end, or where more is closed than was opened.
    fn token(&mut self) -> Option<Token<'a>> {
        match self.byte()? {
            b'"' => self.text().map(Token::Text),
            b'{' | b'[' => {
                self.depth = self.depth.saturating_add(1);
                Some(Token::Else)
            }
            b'}' | b']' => {
                self.depth = self.depth.checked_sub(1)?;
                Some(Token::Closed)
            }
            first @ (b'-' | b'0'..=b'9') => Some(self.number(first)),
            _ => Some(Token::Else),
        }
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let text = self.rest;
        let mut is_escaped = false;
        let end = text.iter().position(|byte| {
            let ends = *byte == b'"' && !is_escaped;
            is_escaped = *byte == b'\\' && !is_escaped;
            ends
        })?;
        self.rest = text.get(end.saturating_add(1)..)?;
        text.get(..end)
    }

    fn number(&mut self, first: u8) -> Token<'a> {
        let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-');
        let len = self.rest.iter().take_while(|byte| is_part(byte)).count();
        let (digits, rest) = self.rest.split_at_checked(len).unwrap_or((self.rest, b""));
        self.rest = rest;
        let mut number = 0u32;
        for byte in core::iter::once(&first).chain(digits) {
            let digit = byte.wrapping_sub(b'0');
            let next = (digit < 10)
                .then(|| number.checked_mul(10)?.checked_add(digit.into()))
                .flatten();
            // A fraction, a negative number or a huge one counts nothing.
            let Some(next) = next else {
                return Token::Else;
            };
            number = next;
        }
        Token::Number(number)
    }

    /// Whether what follows closes one object, and ends there.
    fn closes_one_object(mut self) -> bool {
        self.depth = 1;
        while let Some(token) = self.token() {
            if token == Token::Closed && self.depth == 0 {
                return self.peek().is_none();
            }
        }
        false
    }
}

/// Bytes that make a token, as a pool's engines count them: a slow mean that begins with what is configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BytesPerToken {
    bytes: u64,
    tokens: u64,
}

impl BytesPerToken {
    /// Starts with a whole number of bytes.
    #[must_use]
    pub fn new(bytes_per_token: u32) -> Self {
        Self {
            bytes: START_TOKENS.saturating_mul(bytes_per_token.into()),
            tokens: START_TOKENS,
        }
    }

    /// Learns from a prompt of which both counts are known. Work and text are summed apart, so that long prompts weigh
    /// more: in short ones the chat template has most of the tokens.
    pub fn learn(&mut self, bytes: u32, tokens: u32) {
        if tokens < MIN_SAMPLE_TOKENS || bytes == 0 {
            return;
        }
        let counted = u64::from(tokens).min(MAX_SAMPLE_TOKENS);
        let bytes = u64::from(bytes).saturating_mul(counted) / u64::from(tokens);
        // Not `clamp`, which could panic.
        let bytes = bytes
            .max(counted / 2)
            .min(counted.saturating_mul(MAX_BYTES_PER_TOKEN));
        self.bytes = self.bytes.saturating_add(bytes);
        self.tokens = self.tokens.saturating_add(counted);
        if self.tokens >= MEAN_TOKENS {
            self.bytes /= 2;
            self.tokens /= 2;
        }
    }

    /// The mean, thousandths of a byte; 500 to 16 000.
    #[must_use]
    pub fn millibytes(&self) -> u32 {
        let mean = self.bytes.saturating_mul(1000) / self.tokens.max(1);
        u32::try_from(mean).unwrap_or(u32::MAX)
    }
}

/// Bytes at the end of an answer that are read. `usage` and what follows it take 200 to 900 bytes in the answers of
/// vLLM 0.32, SGLang and llama.cpp.
pub const TAIL_BYTES: usize = 4096;

const NAMES: [&[u8]; 2] = [b"usage", b"meta_info"];
/// Places in a tail that are tried: hostile ones must not make the work quadratic.
const MAX_CANDIDATES: usize = 8;
/// What the configured value weighs, tokens: a few long prompts.
const START_TOKENS: u64 = 16_384;
/// Shorter prompts tell more of the chat template than of the text.
const MIN_SAMPLE_TOKENS: u32 = 64;
/// One prompt weighs no more.
const MAX_SAMPLE_TOKENS: u64 = 8192;
/// The mean is over 64 to 128 Ki tokens.
const MEAN_TOKENS: u64 = 131_072;
/// As the configuration allows.
const MAX_BYTES_PER_TOKEN: u64 = 16;

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "random values of every width")]
mod tests {
    use super::*;
    use crate::blob::tests::Random;

    fn usage(prompt_tokens: u32, cached_tokens: impl Into<Option<u32>>) -> Option<Usage> {
        Some(Usage {
            prompt_tokens,
            cached_tokens: cached_tokens.into(),
        })
    }

    fn read(form: AnswerForm, body: &[u8]) -> Option<Usage> {
        read_in(form, body, None, &[body.len()])
    }

    /// Reads a body in chunks of the lengths given, the last of which is repeated.
    fn read_in(
        form: AnswerForm,
        body: &[u8],
        content_length: Option<u64>,
        chunks: &[usize],
    ) -> Option<Usage> {
        let mut tail = AnswerTail::new(form, content_length);
        let mut rest = body;
        let mut lens = chunks.iter().copied().chain(core::iter::repeat(*chunks.last()?));
        while !rest.is_empty() {
            let (chunk, later) = rest.split_at(lens.next()?.clamp(1, rest.len()));
            let wanted = tail.pass(chunk.len());
            assert!(wanted <= chunk.len() && wanted <= TAIL_BYTES);
            tail.push(&chunk[chunk.len() - wanted..]);
            assert!(tail.bytes.len() <= TAIL_BYTES);
            rest = later;
        }
        tail.usage()
    }

    const CHAT: &str = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"say \"usage\":{\"prompt_tokens\":9} twice"},"finish_reason":"stop"}],"service_tier":null,"usage":{"prompt_tokens":3167,"total_tokens":3175,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":3072,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":{"reasoning_tokens":0}},"prompt_logprobs":null,"prompt_token_ids":null,"kv_transfer_params":null}"#;

    #[test]
    fn answers_of_every_api_are_read() {
        for (body, want) in [
            (CHAT, usage(3167, 3072)),
            // Started without --enable-prompt-tokens-details, or without --enable-cache-report.
            (
                r#"{"choices":[],"usage":{"prompt_tokens":31,"total_tokens":40,"prompt_tokens_details":null}}"#,
                usage(31, None),
            ),
            // Responses.
            (
                r#"{"id":"resp_1","tools":[],"usage":{"input_tokens":80,"input_tokens_details":{"cached_tokens":64,"input_tokens_per_turn":[80],"cached_tokens_per_turn":[64]},"output_tokens":3,"output_tokens_details":{"cached_tokens":1}},"user":null}"#,
                usage(80, 64),
            ),
            // Messages, as Anthropic counts: the prompt is the sum.
            (
                r#"{"type":"message","content":[],"usage":{"input_tokens":20,"output_tokens":5,"cache_creation_input_tokens":30,"cache_read_input_tokens":50}}"#,
                usage(100, 50),
            ),
            (
                r#"{"type":"message","content":[],"usage":{"input_tokens":20,"output_tokens":5}}"#,
                usage(20, None),
            ),
            // SGLang's own.
            (
                r#"{"text":"a","output_ids":[1],"meta_info":{"id":"4","finish_reason":{"type":"length","prompt_tokens":7},"prompt_tokens":5,"cached_tokens":2,"cached_tokens_details":{"device":2},"e2e_latency":0.2}}"#,
                usage(5, 2),
            ),
            // More cached than there is: at most all.
            (
                "{\n \"usage\" : {\n \"prompt_tokens\" : 5,\t\"cached_tokens\": 6 } }\r\n",
                usage(5, 5),
            ),
        ] {
            assert_eq!(read(AnswerForm::Whole, body.as_bytes()), want, "{body}");
        }
    }

    #[test]
    fn streams_are_read_by_their_last_usage() {
        for (body, want) in [
            (
                concat!(
                    "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n",
                    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
                    "data: [DONE]\n\n",
                ),
                usage(9, 4),
            ),
            (
                concat!(
                    "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":1,\"output_tokens\":0}}}\n\n",
                    "event: message_delta\ndata: {\"usage\":{\"input_tokens\":3,\"cache_read_input_tokens\":16,\"output_tokens\":2}}\n\n",
                    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
                ),
                usage(19, 16),
            ),
            (
                "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":8,\"input_tokens_details\":{\"cached_tokens\":0}},\"user\":null}}\n\n",
                usage(8, 0),
            ),
            ("data: {\"choices\":[]}\n\ndata: [DONE]\n\n", None),
        ] {
            assert_eq!(read(AnswerForm::Events, body.as_bytes()), want, "{body}");
        }
    }

    #[test]
    fn where_chunks_end_does_not_matter() {
        let mut random = Random::seeded(21);
        let long = CHAT.replace("twice", &"and more ".repeat(3000));
        for body in [CHAT, &long] {
            let length = body.len() as u64;
            for content_length in [None, Some(length), Some(length - 1), Some(length + 7), Some(0)] {
                for at in 0..body.len().min(1500) {
                    let got = read_in(
                        AnswerForm::Whole,
                        body.as_bytes(),
                        content_length,
                        &[body.len() - at, at],
                    );
                    assert_eq!(got, usage(3167, 3072), "{at} {content_length:?}");
                }
                for _ in 0..200 {
                    let chunks: Vec<usize> = (0..40).map(|_| random.below(6000) as usize).collect();
                    let got = read_in(AnswerForm::Whole, body.as_bytes(), content_length, &chunks);
                    assert_eq!(got, usage(3167, 3072), "{chunks:?}");
                }
            }
            assert_eq!(
                read_in(AnswerForm::Whole, body.as_bytes(), None, &[1]),
                usage(3167, 3072)
            );
        }
    }

    #[test]
    fn only_the_tail_of_an_answer_of_known_length_is_asked_for() {
        let mut tail = AnswerTail::new(AnswerForm::Whole, Some(100_000));
        assert_eq!(tail.pass(90_000), 0);
        assert_eq!(tail.pass(6000), 96);
        tail.push(&[0; 96]);
        assert_eq!(tail.pass(4000), 4000);
        tail.push(&[0; 4000]);
        assert_eq!(tail.bytes.len(), TAIL_BYTES);
    }

    #[test]
    fn what_a_client_can_have_echoed_is_not_taken_for_the_count() {
        for body in [
            // A tool's schema, in an answer that is cut, without a count of its own, or with more after it.
            r#"{"tools":[{"usage":{"prompt_tokens":1}}],"id":"1"}"#,
            r#"{"metadata":{"usage":{"prompt_tokens":1}}}"#,
            r#"{"usage":{"prompt_tokens":1}"#,
            r#"{"usage":{"prompt_tokens":1}}{}"#,
            r#"{"text":"\"usage\":{\"prompt_tokens\":1}"}"#,
            r#"{"a\"usage":{"prompt_tokens":1}}"#,
            r#"{"usage":"usage","prompt_tokens":1}"#,
            r#"{"usage":["prompt_tokens",1]}"#,
            r#"{"usage":{"details":{"prompt_tokens":1}}}"#,
            r#"{"usage":{"prompt_tokens":"1"}}"#,
            r#"{"usage":{"prompt_tokens":1.5}}"#,
            r#"{"usage":{"prompt_tokens":-1}}"#,
            r#"{"usage":{"prompt_tokens":4294967296}}"#,
            r#"{"usage":{"prompt_tokens":0}}"#,
            r#"{"usage""#,
            r#""usage":{"#,
            "",
        ] {
            assert_eq!(read(AnswerForm::Whole, body.as_bytes()), None, "{body}");
        }
        let echoed = r#"{"usage":{"prompt_tokens":7},"metadata":{"usage":{"prompt_tokens":1}}}"#;
        assert_eq!(read(AnswerForm::Whole, echoed.as_bytes()), usage(7, None));
    }

    #[test]
    fn hostile_tails_end_soon_and_do_no_harm() {
        let mut random = Random::seeded(22);
        let words: [&[u8]; 12] = [
            b"\"usage\"",
            b":",
            b"{",
            b"}",
            b"\"prompt_tokens\"",
            b"123",
            b"\\",
            b"\"",
            b",",
            b"[",
            b"]",
            b" ",
        ];
        for _ in 0..3000 {
            let mut body = Vec::new();
            for _ in 0..random.below(400) {
                body.extend_from_slice(words[random.below(12) as usize]);
            }
            for form in [AnswerForm::Whole, AnswerForm::Events] {
                let _ = read(form, &body);
            }
        }
        for body in ["\"usage\":{".repeat(2000), "\"".repeat(9000), "{".repeat(9000)] {
            assert_eq!(read(AnswerForm::Events, body.as_bytes()), None);
        }
    }

    #[test]
    fn bytes_per_token_follow_the_text_slowly_and_within_bounds() {
        let mut mean = BytesPerToken::new(4);
        assert_eq!(mean.millibytes(), 4000);
        mean.learn(2 * 8192, 8192);
        assert!((3000..3500).contains(&mean.millibytes()), "{}", mean.millibytes());
        (0..100).for_each(|_| mean.learn(2 * 3000, 3000));
        assert!(mean.millibytes().abs_diff(2000) < 150, "{}", mean.millibytes());
        let before = mean.millibytes();
        mean.learn(u32::MAX, 10_000_000);
        let after = mean.millibytes();
        assert!(after - before < 2000, "one prompt: {before} to {after}");
        mean.learn(9000, 63);
        mean.learn(0, 9000);
        assert_eq!(
            mean.millibytes(),
            after,
            "what is too short or unread teaches nothing"
        );
        (0..1000).for_each(|_| mean.learn(1, u32::MAX));
        assert!((500..510).contains(&mean.millibytes()), "{}", mean.millibytes());
        (0..1000).for_each(|_| mean.learn(u32::MAX, 4096));
        assert!(
            (15_900..=16_000).contains(&mean.millibytes()),
            "{}",
            mean.millibytes()
        );
    }
}
