//! Requests and answers that are not what a filter hopes for: aborted, stalled, upgraded, cut into frames.
//!
//! The side without the filter is the reference: what a client saw there (status lines, headers, bodies by SHA-256,
//! trailers, the fate of the connection, and through the upstream's echo all that reached it) must be seen with the filter,
//! within the same time. Only what the filter serves and Envoy alone does not may differ.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use super::load::{End, Sent};
use super::stand::{Side, Stand};
use super::{Scenario, Seen};
use crate::envoy_config::EnvoyConfig;

mod http1;
mod http2;
mod http2_upstream;
mod kinds;
mod rig;
mod upstream;
mod wire;

use rig::{Exchange, Outcome, Rig};

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut all: Vec<Scenario> = kinds::kinds()
        .into_iter()
        .map(|kind| scenario(kind.fault, kind.exchanges, AT_ONCE, |_| {}))
        .collect();
    let other = |fault, exchanges: fn() -> Vec<Exchange>, change| scenario(fault, exchanges, AT_ONCE, change);
    all.extend([
        other(
            "100-continue from the upstream",
            kinds::proxied_continues,
            |config| {
                config.extra_manager["proxy_100_continue"] = json!(true);
            },
        ),
        other(
            "uploads that never end, `request_timeout`",
            kinds::never_ending_uploads,
            |config| {
                config.extra_manager["request_timeout"] = json!("1s");
            },
        ),
        other(
            "uploads that never end, `stream_idle_timeout`",
            kinds::never_ending_uploads,
            |config| {
                config.extra_manager["stream_idle_timeout"] = json!("1s");
            },
        ),
        sized("bodies of 1 KiB to 4 MiB, shipped buffers", |_| {}),
        sized("bodies of 1 KiB to 4 MiB, stated buffers of 16 KiB", |config| {
            stated(config, 16 << 10);
        }),
        sized("bodies of 1 KiB to 4 MiB, stated buffers of 64 KiB", |config| {
            stated(config, 64 << 10);
        }),
        sized("bodies of 1 KiB to 4 MiB, stated buffers of 1 MiB", |config| {
            stated(config, 1 << 20);
        }),
        sized("bodies of 1 KiB to 4 MiB, buffers of 8 MiB", |config| {
            buffers(config, 8 << 20);
        }),
        scenario(
            "all kinds mixed at random",
            || kinds::mixed(MIXED, SEED),
            64,
            |_| {},
        ),
        scenario("some of each kind", kinds::short, AT_ONCE, |_| {}).in_short_form(),
    ]);
    all
}

/// Bodies of all sizes on an Envoy that is changed so.
fn sized(fault: &'static str, change: fn(&mut EnvoyConfig)) -> Scenario {
    // Few at a time, so that reads are as large as they get.
    scenario(fault, kinds::bodies, 8, change)
}

/// No limit other than the connection's buffer.
fn buffers(config: &mut EnvoyConfig, bytes: u64) {
    config.connection_buffer_limit_bytes = Some(bytes);
    config.request_body_buffer_limit_bytes = None;
}

/// The same, told to the filter: too small for what it would hold.
fn stated(config: &mut EnvoyConfig, bytes: u64) {
    buffers(config, bytes);
    if let Some(plugin) = &mut config.plugin
        && let Ok(mut settings) = serde_json::from_str::<Value>(&plugin.json)
    {
        settings["stream_buffer_bytes"] = json!(bytes);
        plugin.json = settings.to_string();
    }
}

/// Exchanges, so many at a time, on an Envoy that is changed so.
fn scenario(
    fault: &'static str,
    exchanges: fn() -> Vec<Exchange>,
    at_a_time: usize,
    change: fn(&mut EnvoyConfig),
) -> Scenario {
    let reference = Arc::new(Reference::default());
    Scenario::new(PART, fault, move |stand| {
        let reference = Arc::clone(&reference);
        Box::pin(async move {
            let exchanges = exchanges();
            let rig = Rig::start(stand, change).await?;
            let mut outcomes = rig.play(&exchanges, 1, at_a_time.min(exchanges.len())).await;
            if rig.has_logged(SENT_FIN) {
                mark_lost_trailers(&exchanges, &mut outcomes);
            }
            let mut seen = reference.seen(stand, &exchanges, &outcomes);
            rig.check_rest(stand, &mut seen).await?;
            let is_refused = |outcome: &&Outcome| {
                outcome
                    .seen
                    .iter()
                    .any(|line| line.contains("\"Payload Too Large\""))
            };
            let refused = outcomes.iter().filter(is_refused).count();
            if refused > 0 {
                seen.note = format!("{refused} answered 413 by Envoy");
            }
            Ok(seen)
        })
    })
}

/// What was seen without the filter, on each Envoy: a scenario may be played on several at a time.
#[derive(Default)]
struct Reference {
    plain: Mutex<BTreeMap<(u32, u32, u32), Vec<Outcome>>>,
}

impl Reference {
    /// The requests of a side: on the plain one they are as they should be, on the other one they are compared.
    fn seen(&self, stand: &Stand, exchanges: &[Exchange], outcomes: &[Outcome]) -> Seen {
        let mut plain = self.plain.lock().unwrap_or_else(PoisonError::into_inner);
        let plain = plain.entry(stand.envoy.version).or_default();
        if stand.side == Side::Plain {
            *plain = outcomes.to_vec();
        }
        let mut sent = Vec::new();
        let mut broken = Vec::new();
        let mut lost = 0;
        for (number, exchange) in exchanges.iter().enumerate() {
            let (Some(outcome), Some(reference)) = (outcomes.get(number), plain.get(number)) else {
                continue;
            };
            if outcome.is_lost || reference.is_lost {
                lost += 1;
                continue;
            }
            let is_expected = outcome.seen.iter().any(|line| line.contains(exchange.expects));
            if !is_expected {
                broken.push(format!(
                    "{}: nobody saw {:?} in {:?}",
                    exchange.what, exchange.expects, outcome.seen
                ));
            }
            let end = difference(outcome, reference).map_or(End::Whole, |what| {
                End::Wrong(format!("{}: {what}", exchange.what))
            });
            let number = u64::try_from(number).unwrap_or(u64::MAX);
            sent.push(Sent::new(number, "exchange", outcome.at, outcome.took, end));
        }
        let mut seen = Seen::of(sent);
        seen.broken = broken;
        if lost > 0 {
            seen.note = format!("{lost} lost by Envoy itself and not counted");
        }
        seen
    }
}

/// What is worse than without the filter, if anything is.
fn difference(outcome: &Outcome, plain: &Outcome) -> Option<String> {
    let (ours, theirs) = (&outcome.seen, &plain.seen);
    let alike = ours
        .iter()
        .zip(theirs)
        .take_while(|(ours, theirs)| ours == theirs);
    let alike = alike.count();
    let (ours, theirs) = (&ours[alike..], &theirs[alike..]);
    if let (Some(first), Some(reference)) = (ours.first(), theirs.first())
        && is_refused(reference)
        && has_status(first, "200")
    {
        // Saved where Envoy alone had no luck: what follows is of another course.
        return None;
    }
    if (ours, theirs) != (&[], &[]) {
        return Some(format!("{ours:?} instead of {theirs:?}"));
    }
    let is_late = outcome.took > plain.took + LATE;
    is_late.then(|| format!("took {:?} instead of {:?}", outcome.took, plain.took))
}

fn is_refused(line: &str) -> bool {
    has_status(line, "503") || has_status(line, "504")
}

/// Whether a head of HTTP/1.1, or one of HTTP/2, which begins with it, has this status.
fn has_status(head: &str, status: &str) -> bool {
    head.split(' ').take(2).any(|word| word == status)
}

/// Marks what Envoy lost by its own fault, as it says in its log: that of 1.36 now and then ends an HTTP/2 stream before
/// trailers that follow no data, with the filter or without, and the upstream resets it.
fn mark_lost_trailers(exchanges: &[Exchange], outcomes: &mut [Outcome]) {
    for (exchange, outcome) in exchanges.iter().zip(outcomes) {
        let is_reset = outcome.seen.iter().any(|line| line.contains("remote reset"));
        outcome.is_lost = exchange.what == TRAILERS_ALONE && is_reset;
    }
}

const PART: &str = "streams";
const SENT_FIN: &str = "Sent fin; can't send trailers";
const TRAILERS_ALONE: &str = "trailers alone to http2";
/// Exchanges that are mixed.
const MIXED: usize = 10_000;
const SEED: u64 = 5;
/// More than there are of any kind.
const AT_ONCE: usize = 200;
/// More than a busy machine takes longer once than another time.
const LATE: Duration = Duration::from_millis(1500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_read_of_heads_of_both_versions() {
        for head in [
            "HTTP/1.1 503 Service Unavailable | server: envoy",
            "503 Service Unavailable server: envoy",
        ] {
            assert!(is_refused(head) && !has_status(head, "200"), "{head}");
        }
        assert!(!is_refused("HTTP/1.1 200 OK | x-503: 503 "));
    }
}
