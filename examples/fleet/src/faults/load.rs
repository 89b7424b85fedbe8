//! A steady load of chats whose prompts share beginnings, the same on both sides.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::json;
use tokio::task::{JoinHandle, JoinSet};

use super::stand::Gateway;
use crate::client::{Client, full, post_request};
use crate::workload::text;

/// What is sent.
#[derive(Debug, Clone)]
pub struct LoadPlan {
    /// Requests a second.
    pub per_second: u32,
    /// Different beginnings, sent in turn.
    pub prefixes: u64,
    /// Bytes of a beginning.
    pub prefix_bytes: usize,
    /// Tokens of an answer.
    pub max_tokens: u32,
    /// One request in so many asks for a stream.
    pub streams_every: u64,
    /// When a client gives up: from then on the request hangs.
    pub deadline: Duration,
}

impl Default for LoadPlan {
    fn default() -> Self {
        Self {
            per_second: 60,
            prefixes: 24,
            prefix_bytes: 8192,
            max_tokens: 4,
            streams_every: 2,
            deadline: Duration::from_secs(10),
        }
    }
}

/// A load under way.
pub struct Load {
    start: Instant,
    is_over: Arc<AtomicBool>,
    sent: Arc<Mutex<Vec<Sent>>>,
    sender: JoinHandle<()>,
}

impl Load {
    /// Begins to send.
    pub fn start(gateway: &Gateway, plan: LoadPlan) -> Self {
        let start = Instant::now();
        let is_over = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(Mutex::new(Vec::new()));
        // Longer than the plan's, so that what takes too long always ends as hung.
        let client = Client::new().with_deadline(2 * plan.deadline);
        let (over, list, url) = (Arc::clone(&is_over), Arc::clone(&sent), gateway.chat_url());
        let sender = tokio::spawn(async move {
            let mut requests = JoinSet::new();
            let mut number = 0;
            while !over.load(Ordering::Relaxed) {
                let due = start + Duration::from_secs(number) / plan.per_second;
                tokio::time::sleep_until(due.into()).await;
                let (client, list, url, plan) =
                    (client.clone(), Arc::clone(&list), url.clone(), plan.clone());
                requests.spawn(async move {
                    let sent = request(&client, &url, &plan, number, start).await;
                    list.lock().unwrap_or_else(PoisonError::into_inner).push(sent);
                });
                while requests.try_join_next().is_some() {}
                number += 1;
            }
            while requests.join_next().await.is_some() {}
        });
        Self {
            start,
            is_over,
            sent,
            sender,
        }
    }

    /// Time since it began, the clock of [`Sent::at`].
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// The requests that ended so far, in the order of their ends.
    pub fn so_far(&self) -> Vec<Sent> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends no more, waits for what is in flight, and gives all requests in the order they were sent.
    pub async fn stop(self) -> Vec<Sent> {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.sender.await;
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner).clone();
        sent.sort_by_key(|sent| sent.number);
        sent
    }
}

/// One request and how it ended.
#[derive(Debug, Clone)]
pub struct Sent {
    /// Its place in the load.
    pub number: u64,
    /// What kind of request it was.
    pub kind: &'static str,
    /// When it was sent, since the load began.
    pub at: Duration,
    /// How long until its end.
    pub took: Duration,
    /// How it ended.
    pub end: End,
    /// Name of the replica that answered.
    pub replica: Option<String>,
    /// Address that the filter chose, `none` where Envoy had to; `None` without the filter.
    pub host: Option<String>,
    /// Why.
    pub reason: Option<String>,
    /// Bytes of the prompt that the filter believed to be cached there.
    pub matched_bytes: Option<u64>,
    /// Tokens of the prompt that the engine found in its cache, where the answer told.
    pub cached_tokens: Option<u64>,
    /// Whether the engine it was on took it with it, so that neither Envoy could have saved it.
    pub is_lost_with_engine: bool,
}

impl Sent {
    /// A request of a scenario's own that began and ended at these times.
    pub fn new(number: u64, kind: &'static str, at: Duration, took: Duration, end: End) -> Self {
        Self {
            number,
            kind,
            at,
            took,
            end,
            replica: None,
            host: None,
            reason: None,
            matched_bytes: None,
            cached_tokens: None,
            is_lost_with_engine: false,
        }
    }

    /// Whether it failed, other than with the engine it was on.
    pub fn has_failed(&self) -> bool {
        self.end != End::Whole && !self.is_lost_with_engine
    }
}

impl fmt::Display for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, kind, end) = (self.number, self.kind, &self.end);
        let (at, took) = (self.at.as_millis(), self.took.as_millis());
        write!(f, "{kind} {number} at {at} ms, after {took} ms: {end}")?;
        if let Some(host) = &self.host {
            write!(f, ", sent to {host}")?;
        }
        if let Some(replica) = &self.replica {
            write!(f, ", answered by {replica}")?;
        }
        Ok(())
    }
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// With the whole answer that was due.
    Whole,
    /// With another status, and what the answer said.
    Status(u16, String),
    /// Without an answer.
    NoAnswer(String),
    /// In the middle of an answer.
    Cut(String),
    /// With a whole answer, but not the one that was due.
    Wrong(String),
    /// Not at all, until the client gave up.
    Hung,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::Status(status, text) => write!(f, "status {status} {text}"),
            Self::NoAnswer(cause) => write!(f, "no answer: {cause}"),
            Self::Cut(cause) => write!(f, "cut: {cause}"),
            Self::Wrong(what) => write!(f, "wrong answer: {what}"),
            Self::Hung => f.write_str("hung"),
        }
    }
}

async fn request(client: &Client, url: &str, plan: &LoadPlan, number: u64, start: Instant) -> Sent {
    let is_stream = number.is_multiple_of(plan.streams_every);
    let body = chat(
        number % plan.prefixes,
        number,
        plan.prefix_bytes,
        plan.max_tokens,
        is_stream,
    );
    let at = start.elapsed();
    let kind = if is_stream { "stream" } else { "chat" };
    let mut sent = Sent::new(number, kind, at, Duration::ZERO, End::Hung);
    let answer = tokio::time::timeout(plan.deadline, exchange(client, url, body, is_stream, &mut sent)).await;
    sent.end = answer.unwrap_or(End::Hung);
    sent.took = start.elapsed() - at;
    sent
}

pub(super) async fn exchange(
    client: &Client,
    url: &str,
    body: String,
    is_stream: bool,
    sent: &mut Sent,
) -> End {
    let request = match post_request(url, &[], full(body)) {
        Ok(request) => request,
        Err(cause) => return End::NoAnswer(cause.to_string()),
    };
    let response = match client.send(request).await {
        Ok(response) => response,
        Err(cause) => return End::NoAnswer(cause.to_string()),
    };
    let header = |name: &str| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
    sent.replica = header("x-replica");
    sent.host = header("x-warmroute-host");
    sent.reason = header("x-warmroute-reason");
    let matched = header("x-warmroute-matched");
    sent.matched_bytes = matched.and_then(|matched| matched.split('/').next()?.trim().parse().ok());
    let status = response.status().as_u16();
    let body = match response.into_body().collect().await {
        Ok(body) => body.to_bytes(),
        Err(cause) => return End::Cut(cause.to_string()),
    };
    let text = String::from_utf8_lossy(&body);
    if status != 200 {
        return End::Status(status, text.chars().take(80).collect());
    }
    let is_whole = if is_stream {
        text.trim_end().ends_with("data: [DONE]")
    } else {
        let answer: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        sent.cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        answer["choices"].is_array()
    };
    if is_whole {
        End::Whole
    } else {
        End::Cut("the answer lacks its end".to_owned())
    }
}

/// A chat whose system prompt is the beginning of that number.
pub(super) fn chat(
    prefix: u64,
    number: u64,
    prefix_bytes: usize,
    max_tokens: u32,
    is_stream: bool,
) -> String {
    let messages = json!([
        {"role": "system", "content": text(&format!("prefix-{prefix}"), prefix_bytes)},
        {"role": "user", "content": format!("question {number}")},
    ]);
    json!({"model": "sim", "messages": messages, "max_tokens": max_tokens, "stream": is_stream}).to_string()
}
