//! Planned requests → what happened to each, through one URL.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::Value;
use tokio::task::JoinSet;

use crate::client::{Client, full, post_request};
use crate::workload::PlannedRequest;

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// At their arrival times, whatever has become of the earlier ones.
    Open,
    /// So many at once, the next as soon as one ends; arrival times do not matter.
    Closed {
        /// Requests in flight.
        concurrency: usize,
    },
}

/// What happened to one request.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Status, if an answer came.
    pub status: Option<u16>,
    /// What went wrong: no answer, a status other than 200, or a stream without its end.
    pub error: Option<String>,
    /// Seconds from the load's start to the planned arrival.
    pub at_s: f64,
    /// Seconds from the planned arrival to the moment when the load generator came to send it: what it was late itself.
    pub late_s: f64,
    /// Seconds from the planned arrival to the first event's first byte.
    pub ttft_s: f64,
    /// Seconds from the planned arrival to the end of the answer.
    pub total_s: f64,
    /// Prompt tokens, as the answer's usage says.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the cache, as the answer's usage says.
    pub cached_tokens: u64,
    /// Answer header `x-replica`.
    pub replica: String,
    /// Answer headers that begin with `x-warmroute-`, by the rest of their names.
    pub debug_headers: Vec<(String, String)>,
}

impl Outcome {
    /// The value of the answer header `x-warmroute-<name>`.
    pub fn debug_header(&self, name: &str) -> Option<&str> {
        self.debug_headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }
}

/// Counts while a load runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests sent.
    pub sent: AtomicUsize,
    /// Requests that ended.
    pub done: AtomicUsize,
    /// Requests that ended with an error.
    pub errors: AtomicUsize,
    /// Sum of the times to first token of those that ended without, microseconds.
    pub ttft_us: AtomicU64,
}

/// What a load gave.
#[derive(Debug, Clone, Default)]
pub struct LoadResult {
    /// One outcome a request, in the order of the plan.
    pub outcomes: Vec<Outcome>,
    /// Seconds from the first planned arrival to the last end.
    pub elapsed_s: f64,
}

/// Sends all requests to `base_url` (scheme and authority) and waits for their ends.
pub async fn run(
    client: &Client,
    base_url: &str,
    requests: &[PlannedRequest],
    pace: Pace,
    progress: &Arc<Progress>,
) -> LoadResult {
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    let mut outcomes = vec![Outcome::default(); requests.len()];
    let mut settle = |joined: Result<(usize, Outcome), tokio::task::JoinError>| {
        if let Ok((number, outcome)) = joined {
            outcomes[number] = outcome;
        }
    };
    for (number, request) in requests.iter().enumerate() {
        let due = match pace {
            Pace::Open => start + Duration::from_millis(request.at_ms),
            Pace::Closed { concurrency } => {
                while tasks.len() >= concurrency.max(1) {
                    tasks.join_next().await.map(&mut settle);
                }
                Instant::now()
            }
        };
        tokio::time::sleep_until(due.into()).await;
        let (client, url) = (client.clone(), format!("{base_url}{}", request.path));
        let (body, progress) = (request.body.clone(), Arc::clone(progress));
        tasks.spawn(async move {
            progress.sent.fetch_add(1, Ordering::Relaxed);
            let late_s = due.elapsed().as_secs_f64();
            let outcome = Outcome {
                at_s: due.duration_since(start).as_secs_f64(),
                late_s,
                ..exchange(&client, &url, body, due).await
            };
            if outcome.error.is_some() {
                progress.errors.fetch_add(1, Ordering::Relaxed);
            } else {
                let ttft_us = (outcome.ttft_s * 1e6) as u64;
                progress.ttft_us.fetch_add(ttft_us, Ordering::Relaxed);
            }
            progress.done.fetch_add(1, Ordering::Relaxed);
            (number, outcome)
        });
    }
    while let Some(joined) = tasks.join_next().await {
        settle(joined);
    }
    LoadResult {
        outcomes,
        elapsed_s: start.elapsed().as_secs_f64(),
    }
}

/// Sends one streaming request and reads its answer to the end.
async fn exchange(client: &Client, url: &str, body: bytes::Bytes, due: Instant) -> Outcome {
    let mut outcome = Outcome::default();
    let stream =
        match tokio::time::timeout(EXCHANGE_DEADLINE, stream(client, url, body, due, &mut outcome)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                outcome.error = Some(error);
                return outcome;
            }
            Err(_) => {
                outcome.error = Some(format!("no end within {EXCHANGE_DEADLINE:?}"));
                return outcome;
            }
        };
    outcome.total_s = due.elapsed().as_secs_f64();
    let text = String::from_utf8_lossy(&stream);
    if outcome.status != Some(200) {
        let head: String = text.chars().take(200).collect();
        outcome.error = Some(format!("status {}: {head}", outcome.status.unwrap_or_default()));
    } else if !text.trim_end().ends_with("data: [DONE]") {
        outcome.error = Some("the stream ended early".to_owned());
    }
    if let Some(usage) = usage(&text) {
        outcome.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or_default();
        outcome.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap_or_default();
    }
    outcome
}

async fn stream(
    client: &Client,
    url: &str,
    body: bytes::Bytes,
    due: Instant,
    outcome: &mut Outcome,
) -> Result<Vec<u8>, String> {
    let request = post_request(url, &[], full(body)).map_err(|error| error.to_string())?;
    let response = client.send(request).await.map_err(|error| error.to_string())?;
    outcome.status = Some(response.status().as_u16());
    for (name, value) in response.headers() {
        let Ok(value) = value.to_str() else { continue };
        if name == "x-replica" {
            value.clone_into(&mut outcome.replica);
        } else if let Some(name) = name.as_str().strip_prefix("x-warmroute-") {
            outcome.debug_headers.push((name.to_owned(), value.to_owned()));
        }
    }
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| error.to_string())?.into_data() else {
            continue;
        };
        if bytes.is_empty() && !data.is_empty() {
            outcome.ttft_s = due.elapsed().as_secs_f64();
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// The last `usage` of a stream's events.
fn usage(text: &str) -> Option<Value> {
    text.lines()
        .rev()
        .filter(|line| line.contains("\"usage\""))
        .find_map(|line| {
            let mut event: Value = serde_json::from_str(line.strip_prefix("data: ")?).ok()?;
            Some(event["usage"].take()).filter(Value::is_object)
        })
}

/// Longer than the worst wait a saturated replica causes in the demo.
const EXCHANGE_DEADLINE: Duration = Duration::from_secs(90);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineConfig;
    use crate::fleet::{Fleet, FleetOptions};
    use crate::replica::Fault;
    use crate::workload::{QUICK, Workload};

    /// Chats, ten times as fast as they are meant.
    fn plan() -> Vec<PlannedRequest> {
        let mut plan = Workload::parse(QUICK).unwrap().requests().swap_remove(0);
        for request in &mut plan {
            request.at_ms /= 10;
        }
        plan
    }

    async fn fleet() -> Fleet {
        let options = FleetOptions {
            replicas: 1,
            engine: EngineConfig::instant(),
            ..FleetOptions::default()
        };
        Fleet::start(&options).await.unwrap()
    }

    #[tokio::test]
    async fn every_request_is_sent_once_at_either_pace() {
        let fleet = fleet().await;
        let (plan, progress) = (plan(), Arc::new(Progress::default()));
        let url = format!("http://{}", fleet.replicas[0].address());
        for (runs, pace) in [(1, Pace::Open), (2, Pace::Closed { concurrency: 3 })] {
            let result = run(&Client::new(), &url, &plan, pace, &progress).await;
            assert_eq!(fleet.replicas[0].posts_received() as usize, runs * plan.len());
            assert_eq!(result.outcomes.len(), plan.len());
            for outcome in &result.outcomes {
                assert_eq!(
                    (outcome.error.as_deref(), outcome.replica.as_str()),
                    (None, "replica-0")
                );
                assert!(outcome.prompt_tokens > 2000 && outcome.ttft_s <= outcome.total_s);
                assert!(outcome.late_s <= outcome.ttft_s);
            }
        }
        assert_eq!(progress.done.load(Ordering::Relaxed), 2 * plan.len());
    }

    #[tokio::test]
    async fn failures_are_counted_and_named() {
        let fleet = fleet().await;
        fleet.replicas[0].set_fault(Fault::Status(500));
        let progress = Arc::new(Progress::default());
        let url = format!("http://{}", fleet.replicas[0].address());
        let result = run(&Client::new(), &url, &plan()[..3], Pace::Open, &progress).await;
        assert_eq!(progress.errors.load(Ordering::Relaxed), 3);
        assert!(
            result.outcomes[0]
                .error
                .as_ref()
                .unwrap()
                .starts_with("status 500")
        );
    }
}
