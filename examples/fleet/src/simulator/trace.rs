//! Published trace files → workloads.
//!
//! In: a directory with other people's traces; they are no part of this repository. Out: a [`Workload`] each. Files are
//! believed to be what their authors say, but nothing in them panics: a line that cannot be read is an error with its
//! number.
//!
//! | trace | file | source |
//! |---|---|---|
//! | `conversation` | `mooncake_conversation.jsonl` | kvcache-ai/Mooncake, `FAST25-release/traces/conversation_trace.jsonl` |
//! | `arxiv` | `mooncake_arxiv_window93.jsonl` | the same, a window of the arXiv trace |
//! | `sharegpt` | `sharegpt300_blk16.jsonl` | casys-kaist/LLMServingSim, block ids of its ShareGPT workload |
//! | `azure` | `azure_llm_2023_conv.csv` | Azure/AzurePublicDataset, lengths and times alone |
//! | `aibrix` | `aibrix_prefix_share_p1024_s128_rps5.jsonl.gz` | vllm-project/aibrix, `benchmarks/routing/prefix-workload` |
//! | `chats` | `inference_perf_otel_*.json` | kubernetes-sigs/inference-perf, `examples/otel/test_traces/advanced` |

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;
use warmroute::prompt::PromptOptions;

use super::workload::{CHAT_PATH, Workload, WorkloadBuilder};
use crate::engine::BLOCK_TOKENS;

/// A published trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Trace {
    /// An hour of chats with long prompts that all begin with the same 512 tokens.
    Conversation,
    /// Twelve seconds of tools and agents.
    Arxiv,
    /// Half a minute of short chats that share next to nothing.
    Sharegpt,
    /// An hour of lengths and times; prompts share nothing.
    Azure,
    /// Ten prefixes, one after the other.
    Aibrix,
    /// Three small agent traces with full messages.
    Chats,
}

/// Why there is no workload.
#[derive(Debug)]
pub enum TraceError {
    /// The file cannot be read.
    Io(PathBuf, std::io::Error),
    /// A line is not what it should be; the first is 1.
    Line(PathBuf, usize),
}

impl Trace {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Conversation,
        Self::Arxiv,
        Self::Sharegpt,
        Self::Azure,
        Self::Aibrix,
        Self::Chats,
    ];

    /// Its name on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Conversation => "conversation",
            Self::Arxiv => "arxiv",
            Self::Sharegpt => "sharegpt",
            Self::Azure => "azure",
            Self::Aibrix => "aibrix",
            Self::Chats => "chats",
        }
    }

    /// Reads it from a directory.
    ///
    /// # Errors
    /// When a file is missing or damaged.
    pub fn load(self, directory: &Path, options: &PromptOptions) -> Result<Workload, TraceError> {
        let file = |name: &str| directory.join(name);
        match self {
            Self::Conversation => blocks(self, &file("mooncake_conversation.jsonl"), 512, options),
            Self::Arxiv => blocks(self, &file("mooncake_arxiv_window93.jsonl"), 512, options),
            Self::Sharegpt => blocks(self, &file("sharegpt300_blk16.jsonl"), 16, options),
            Self::Azure => azure(&file("azure_llm_2023_conv.csv"), options),
            Self::Aibrix => aibrix(&file("aibrix_prefix_share_p1024_s128_rps5.jsonl.gz"), options),
            Self::Chats => chats(directory, options),
        }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Line(path, line) => write!(f, "{}:{line}: not a request", path.display()),
        }
    }
}

impl std::error::Error for TraceError {}

#[derive(Deserialize)]
struct BlockLine {
    timestamp: u64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u64>,
}

#[derive(Deserialize)]
struct AibrixLine {
    timestamp: u64,
    requests: Vec<AibrixRequest>,
}

#[derive(Deserialize)]
struct AibrixRequest {
    #[serde(rename = "Output Length")]
    output_length: usize,
    prompt: String,
}

fn blocks(
    trace: Trace,
    path: &Path,
    block_tokens: usize,
    options: &PromptOptions,
) -> Result<Workload, TraceError> {
    let mut builder = WorkloadBuilder::new(trace.as_str(), block_tokens, options);
    for (at, line) in read(path)?.lines().enumerate() {
        let line: BlockLine =
            serde_json::from_str(line).map_err(|_| TraceError::Line(path.to_owned(), at + 1))?;
        builder.push_blocks(
            line.timestamp * 1000,
            &line.hash_ids,
            line.input_length.max(1),
            line.output_length,
        );
    }
    Ok(builder.finish())
}

fn azure(path: &Path, options: &PromptOptions) -> Result<Workload, TraceError> {
    let mut builder = WorkloadBuilder::new(Trace::Azure.as_str(), UNIQUE_BLOCK_TOKENS, options);
    let mut first_us = None;
    for (at, line) in read(path)?.lines().enumerate().skip(1) {
        let parsed = || {
            let mut fields = line.split(',');
            let time_us = time_of_day_us(fields.next()?.split_once(' ')?.1)?;
            Some((
                time_us,
                fields.next()?.parse::<usize>().ok()?,
                fields.next()?.parse().ok()?,
            ))
        };
        let (time_us, tokens, output) = parsed().ok_or_else(|| TraceError::Line(path.to_owned(), at + 1))?;
        let first_us = *first_us.get_or_insert(time_us);
        let ids = (0..tokens.div_ceil(UNIQUE_BLOCK_TOKENS) as u64).map(|block| (at as u64) << 20 | block);
        let ids: Vec<u64> = ids.collect();
        builder.push_blocks(time_us.saturating_sub(first_us), &ids, tokens.max(1), output);
    }
    Ok(builder.finish())
}

fn aibrix(path: &Path, options: &PromptOptions) -> Result<Workload, TraceError> {
    let mut builder = WorkloadBuilder::new(Trace::Aibrix.as_str(), BLOCK_TOKENS, options);
    for (at, line) in read(path)?.lines().enumerate() {
        let line: AibrixLine =
            serde_json::from_str(line).map_err(|_| TraceError::Line(path.to_owned(), at + 1))?;
        for request in line.requests {
            let messages = serde_json::json!([{"role": "user", "content": request.prompt}]);
            let body = serde_json::json!({"model": "m", "stream": true, "messages": messages}).to_string();
            builder.push_body(
                line.timestamp * 1000,
                CHAT_PATH,
                body.as_bytes(),
                &request.prompt,
                request.output_length,
            );
        }
    }
    Ok(builder.finish())
}

fn chats(directory: &Path, options: &PromptOptions) -> Result<Workload, TraceError> {
    let mut calls = Vec::new();
    for name in [
        "prefix_sharing_example",
        "multi_agent_research",
        "code_review_workflow",
    ] {
        let path = directory.join(format!("inference_perf_otel_{name}.json"));
        let trace: Value =
            serde_json::from_str(&read(&path)?).map_err(|_| TraceError::Line(path.clone(), 1))?;
        for (at, span) in trace["spans"].as_array().into_iter().flatten().enumerate() {
            let call = chat_of(span).ok_or_else(|| TraceError::Line(path.clone(), at + 1))?;
            calls.extend(call);
        }
    }
    calls.sort_by_key(|call| call.0);
    let mut builder = WorkloadBuilder::new(Trace::Chats.as_str(), BLOCK_TOKENS, options);
    let first_us = calls.first().map_or(0, |call| call.0);
    for (time_us, messages, output) in calls {
        let body = serde_json::json!({"model": "m", "stream": true, "messages": messages}).to_string();
        builder.push_body(
            time_us - first_us,
            CHAT_PATH,
            body.as_bytes(),
            &messages.to_string(),
            output,
        );
    }
    Ok(builder.finish())
}

/// Start, messages and output tokens of a span; nothing for a span that is no chat.
#[expect(clippy::option_option, reason = "damaged, no chat, chat")]
fn chat_of(span: &Value) -> Option<Option<(u64, Value, usize)>> {
    let attributes = &span["attributes"];
    let Some(messages) = attributes["gen_ai.input.messages"].as_str() else {
        return Some(None);
    };
    let messages = serde_json::from_str(messages).ok()?;
    let time = span["start_time"].as_str()?.split_once('T')?.1;
    let time_us = time_of_day_us(time.split(['+', 'Z']).next()?)?;
    let output = attributes["gen_ai.usage.completion_tokens"]
        .as_u64()
        .unwrap_or(64);
    Some(Some((time_us, messages, output as usize)))
}

/// `hh:mm:ss.fraction` → microseconds.
fn time_of_day_us(text: &str) -> Option<u64> {
    let mut parts = text.split(':');
    let (hours, minutes) = (
        parts.next()?.parse::<u64>().ok()?,
        parts.next()?.parse::<u64>().ok()?,
    );
    let seconds: f64 = parts.next()?.parse().ok()?;
    Some((hours * 60 + minutes) * 60_000_000 + (seconds * 1e6) as u64)
}

fn read(path: &Path) -> Result<String, TraceError> {
    let failed = |error| TraceError::Io(path.to_owned(), error);
    if path.extension().is_some_and(|extension| extension == "gz") {
        let output = Command::new("gzip")
            .arg("-dc")
            .arg(path)
            .output()
            .map_err(failed)?;
        let is_whole = output.status.success();
        let text = String::from_utf8(output.stdout).ok().filter(|_| is_whole);
        return text.ok_or_else(|| failed(std::io::ErrorKind::InvalidData.into()));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// Prompts that share nothing need no fine blocks.
const UNIQUE_BLOCK_TOKENS: usize = 128;
