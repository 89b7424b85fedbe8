//! The same requests through an Envoy with the filter and through one without: every answer must be the same.
//!
//! Both stand before the same upstreams, whose answers are a function of the request ([`super::upstream`]), so that each
//! answer is held against three others: what the plain Envoy gave, what must come, and what the upstream saw of the
//! headers. A body that the filter changed, cut or reordered gives another answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hyper::Method;
use sha2::{Digest, Sha256};
use tokio::task::JoinSet;

use super::report::{MAX_EXAMPLES, Report, list};
use super::requests::{Mix, Planned};
use super::stand::{self, Failure, POOL};
use super::upstream::{SEEN, Upstreams, hex, reply};
use crate::client::{Answer, Client, ClientError};
use crate::envoy::Envoy;
use crate::envoy_config::{EnvoyConfig, PluginConfig, PoolConfig};
use crate::wasm::build_wasm;

/// How many requests, and which.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The Envoy.
    pub envoy: Envoy,
    /// Requests through each of the two.
    pub requests: u64,
    /// Number from which they are drawn.
    pub seed: u64,
    /// Requests under way at once, through each.
    pub senders: u64,
}

/// Sends them all.
///
/// # Errors
/// When the Envoys cannot be run.
pub async fn run(plan: &Plan) -> Result<Report, Failure> {
    let upstreams = Upstreams::start(UPSTREAMS).await?;
    let pool = PoolConfig::new(POOL, upstreams.addresses().to_vec());
    let plain = stand::start(&plan.envoy, &EnvoyConfig::plain(pool.clone()), WORKERS).await?;
    let plugin = PluginConfig::new(build_wasm()?, stand::settings().to_string());
    let filtered = stand::start(&plan.envoy, &EnvoyConfig::new(plugin, pool), WORKERS).await?;
    stand::wait_for_hosts(&filtered, UPSTREAMS as u64).await?;

    let started = Instant::now();
    let next = Arc::new(AtomicU64::new(0));
    let mix = Mix {
        seed: plan.seed,
        least_bytes: 64,
        most_bytes: 1 << 20,
        for_replicas: false,
    };
    // Most prompts are of a few kilobytes; a twentieth goes up to a megabyte.
    let small = Mix {
        most_bytes: 16 << 10,
        ..mix
    };
    let mut senders = JoinSet::new();
    for _ in 0..plan.senders {
        let (next, requests) = (Arc::clone(&next), plan.requests);
        let urls = [plain.url(), filtered.url()];
        senders.spawn(async move {
            let pair = Pair::new(urls);
            let mut seen = Seen::default();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= requests {
                    return seen;
                }
                let mix = if number.is_multiple_of(20) { mix } else { small };
                pair.send(&mix.request(number), &mut seen).await;
            }
        });
    }
    let mut seen = Seen::default();
    while let Some(one) = senders.join_next().await {
        seen.add(one?);
    }
    let elapsed = started.elapsed();

    let mut report = Report::new(format!(
        "{} requests with the filter and without, {}",
        plan.requests, plan.envoy
    ));
    report.figure("seed", plan.seed);
    report.figure("requests through each", seen.sent);
    report.figure("of them decided by the filter", seen.decided);
    report.figure("seconds", format!("{:.1}", elapsed.as_secs_f64()));
    report.figure(
        "pairs a second",
        format!("{:.0}", seen.sent as f64 / elapsed.as_secs_f64()),
    );
    report.figure("bytes sent through each", seen.sent_bytes);
    report.figure("bytes received through each", seen.received_bytes);
    report.figure("answers by status", format!("{:?}", seen.statuses));
    report.check(
        "every request was answered through the Envoy with the filter",
        seen.failed == [0, 0] && seen.sent == plan.requests,
        format!("{:?} failed or hung without and with the filter", seen.failed),
    );
    report.check(
        "every answer is the same with the filter and without, by status, type and SHA-256",
        seen.unequal == 0,
        format!("{} of {} differ{}", seen.unequal, seen.sent, list(&seen.examples)),
    );
    report.check(
        "every answer is what its request asks for",
        seen.unexpected == 0,
        format!("{} of {} are not", seen.unexpected, seen.sent),
    );
    let counted = stand::wait_for("all decisions are counted", async || {
        let stats = filtered.filter_stats().await?;
        Ok(stand::sum_of(&stats, "warmroute_decisions_total") >= seen.decided)
    })
    .await;
    let stats = filtered.filter_stats().await?;
    let decisions = stand::sum_of(&stats, "warmroute_decisions_total");
    report.check(
        "the filter decided each request that is one for it, once",
        counted.is_ok() && decisions == seen.decided,
        format!("{decisions} decisions, {} such requests", seen.decided),
    );
    Ok(report)
}

/// One client for both Envoys.
struct Pair {
    urls: [String; 2],
    http1: Client,
    http2: Client,
}

impl Pair {
    fn new(urls: [String; 2]) -> Self {
        Self {
            urls,
            http1: Client::new().with_deadline(DEADLINE),
            http2: Client::http2().with_deadline(DEADLINE),
        }
    }

    async fn send(&self, planned: &Planned, seen: &mut Seen) {
        let client = if planned.wire.is_http2() {
            &self.http2
        } else {
            &self.http1
        };
        let [plain_url, filtered_url] = &self.urls;
        let ask = async |url: &str| client.request(planned.to(url)?).await;
        let (plain, filtered) = tokio::join!(ask(plain_url), ask(filtered_url));
        seen.note(planned, plain, filtered);
    }
}

/// What one sender saw.
#[derive(Debug, Default)]
struct Seen {
    sent: u64,
    decided: u64,
    sent_bytes: u64,
    received_bytes: u64,
    statuses: BTreeMap<u16, u64>,
    /// Without and with the filter.
    failed: [u64; 2],
    unequal: u64,
    unexpected: u64,
    examples: Vec<String>,
}

impl Seen {
    fn note(
        &mut self,
        planned: &Planned,
        plain: Result<Answer, ClientError>,
        filtered: Result<Answer, ClientError>,
    ) {
        self.sent += 1;
        self.decided += u64::from(planned.is_decided());
        self.sent_bytes += planned.body.len() as u64;
        for (failed, answer) in self.failed.iter_mut().zip([&plain, &filtered]) {
            *failed += u64::from(answer.is_err());
        }
        let (Ok(plain), Ok(filtered)) = (&plain, &filtered) else {
            let error = |answer: &Result<Answer, ClientError>| match answer {
                Ok(answer) => answer.status.to_string(),
                Err(error) => error.to_string(),
            };
            self.example(
                planned,
                &format!("{} without, {} with the filter", error(&plain), error(&filtered)),
            );
            return;
        };
        self.received_bytes += filtered.body.len() as u64;
        *self.statuses.entry(filtered.status).or_default() += 1;
        let digest = |answer: &Answer| {
            let header = |name: &str| answer.header(name).unwrap_or_default().to_owned();
            (
                answer.status,
                header("content-type"),
                header(SEEN),
                hex(&Sha256::digest(&answer.body)),
            )
        };
        let (one, other) = (digest(plain), digest(filtered));
        if one != other {
            self.unequal += 1;
            self.example(planned, &format!("{one:?} without, {other:?} with the filter"));
        }
        let wanted = reply(&planned.method, &planned.path, &planned.body);
        let body_is_wanted = planned.method == Method::HEAD || filtered.body == wanted.body;
        if filtered.status != wanted.status || !body_is_wanted {
            self.unexpected += 1;
            self.example(
                planned,
                &format!("status {} where {} is wanted", filtered.status, wanted.status),
            );
        }
    }

    fn example(&mut self, planned: &Planned, what: &str) {
        if self.examples.len() < MAX_EXAMPLES {
            self.examples.push(format!("{planned}: {what}"));
        }
    }

    fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.decided += other.decided;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        for (status, count) in other.statuses {
            *self.statuses.entry(status).or_default() += count;
        }
        for (mine, theirs) in self.failed.iter_mut().zip(other.failed) {
            *mine += theirs;
        }
        self.unequal += other.unequal;
        self.unexpected += other.unexpected;
        self.examples.extend(other.examples);
        self.examples.truncate(MAX_EXAMPLES);
    }
}

const UPSTREAMS: usize = 4;
const WORKERS: u32 = 2;
/// An answer that takes longer hangs.
const DEADLINE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use hyper::HeaderMap;

    use super::*;

    fn planned() -> Planned {
        let mix = Mix {
            seed: 3,
            least_bytes: 64,
            most_bytes: 4096,
            for_replicas: false,
        };
        mix.request(0)
    }

    fn answer(status: u16, body: &Bytes) -> Result<Answer, ClientError> {
        Ok(Answer {
            status,
            headers: HeaderMap::new(),
            body: body.clone(),
            trailers: None,
        })
    }

    #[test]
    fn a_changed_byte_another_status_and_an_answer_that_is_missing_are_seen() {
        let planned = planned();
        let wanted = reply(&planned.method, &planned.path, &planned.body);
        let (status, mut bytes) = (wanted.status, wanted.body.to_vec());
        bytes[0] ^= 1;
        let changed = Bytes::from(bytes);
        let note = |plain, filtered| {
            let mut seen = Seen::default();
            seen.note(&planned, plain, filtered);
            (seen.unequal, seen.unexpected, seen.failed, seen.examples.len())
        };
        let good = || answer(status, &wanted.body);
        assert_eq!(note(good(), good()), (0, 0, [0, 0], 0));
        assert_eq!(note(good(), answer(status, &changed)), (1, 1, [0, 0], 2));
        assert_eq!(note(good(), answer(503, &wanted.body)), (1, 1, [0, 0], 2));
        // Equal, and both wrong.
        assert_eq!(
            note(answer(status, &changed), answer(status, &changed)),
            (0, 1, [0, 0], 1)
        );
        let hung = || Err(ClientError::Deadline(DEADLINE));
        assert_eq!(note(good(), hung()), (0, 0, [0, 1], 1));
    }
}
