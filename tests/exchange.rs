//! Requests as Envoy delivers them, through [`Exchange`] and [`Pool`], without an Envoy.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

#[path = "support/generated.rs"]
mod generated;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;
use warmroute::config::{Config, PoolConfig};
use warmroute::decision::Reason;
use warmroute::exchange::{AnswerNote, Exchange, RequestHead, ResponseHead, ResponseNote, Step, Unkeyed};
use warmroute::host_table::{Health, Host, HostTable, Load, Role, Slot};
use warmroute::journal::Journal;
use warmroute::pool::Pool;
use warmroute::prompt::{Api, BodyEnd, NoPrompt};
use warmroute::strategy::Rng;

const NOW_MS: u64 = 1_700_000_000_000;
const THRESHOLD_BYTES: usize = 4096;
const PATH: &str = "/v1/chat/completions";

fn config(settings: &str) -> PoolConfig {
    let text = format!(
        r#"{{"prefix":{{"memory_bytes":16384}},"late_field_bytes":4096,{settings}
            "pools":{{"llm":{{"discovery":{{"admin_cluster":"admin"}}}}}}}}"#
    );
    Config::parse(text.as_bytes()).unwrap().pools.swap_remove(0)
}

fn host(slot: u16) -> Host {
    Host {
        slot: Slot(slot),
        epoch: 1,
        address: address(slot),
        weight: 1,
        ..Host::default()
    }
}

fn address(slot: u16) -> String {
    format!("10.0.0.{slot}:8000")
}

fn apply(pool: &mut Pool, hosts: &[Host], now_ms: u64) {
    let table = HostTable {
        published_ms: now_ms,
        hosts: hosts.to_vec(),
    };
    pool.apply_table(&table.encode(), now_ms).unwrap();
}

fn pool(settings: &str, host_count: u16) -> Pool {
    let mut pool = Pool::new(config(settings), 1);
    if host_count > 0 {
        let hosts: Vec<Host> = (0..host_count).map(host).collect();
        apply(&mut pool, &hosts, NOW_MS);
    }
    pool
}

fn head() -> RequestHead {
    RequestHead {
        path: PATH.into(),
        content_type: Some("application/json".into()),
        ..RequestHead::default()
    }
}

/// A chat request of exactly so many bytes.
fn chat(len_bytes: usize, stream: bool) -> Vec<u8> {
    let (before, after) = (
        r#"{"model":"demo","messages":[{"role":"user","content":""#,
        format!(r#""}}],"stream":{stream}}}"#),
    );
    let text = len_bytes - before.len() - after.len();
    let words = "one more line of it. ".repeat(text / 20 + 1);
    [before.as_bytes(), &words.as_bytes()[..text], after.as_bytes()].concat()
}

fn start(pool: &mut Pool, head: RequestHead) -> Exchange {
    let (exchange, step) = Exchange::start(pool, Api::OpenAiChat, head, true, NOW_MS);
    assert_eq!(step, Step::Hold);
    exchange
}

/// A decided request whose body came in one piece.
fn decided(pool: &mut Pool, body: &[u8], now_ms: u64) -> Exchange {
    let (mut exchange, _) = Exchange::start(pool, Api::OpenAiChat, head(), true, now_ms);
    deliver(&mut exchange, pool, body, body.len(), true, now_ms);
    exchange
}

/// One body callback; performs a read as the shell does.
fn deliver(
    exchange: &mut Exchange,
    pool: &mut Pool,
    body: &[u8],
    held_bytes: usize,
    end: bool,
    now_ms: u64,
) -> Step {
    let step = exchange.on_body(pool, held_bytes, end);
    read(exchange, pool, body, held_bytes, step, now_ms);
    step
}

fn read(exchange: &mut Exchange, pool: &mut Pool, body: &[u8], held_bytes: usize, step: Step, now_ms: u64) {
    if let Step::Read { max_bytes, end } = step {
        assert!(
            max_bytes as usize <= held_bytes,
            "{max_bytes} of {held_bytes} bytes"
        );
        exchange.decide(pool, &body[..max_bytes as usize], end, now_ms);
        assert!(!exchange.is_holding());
        assert!(exchange.decision().is_some());
    }
}

/// Open work of this worker: slot → requests and prefill tokens.
fn open(pool: &Pool, now_ms: u64) -> BTreeMap<u16, (u32, u64)> {
    let tallies = pool.fleet().own_tallies(now_ms);
    tallies
        .map(|(slot, _, requests, tokens)| (slot.0, (requests, tokens)))
        .collect()
}

fn slots(exchange: &Exchange) -> Vec<u16> {
    let hosts = exchange.decision().map(|decision| decision.hosts).unwrap();
    hosts.iter().map(|slot| slot.0).collect()
}

#[derive(Clone, Copy)]
enum Call {
    Body(usize, bool),
    Trailers,
}
use Call::{Body, Trailers};

const fn whole(max_bytes: u32) -> Step {
    Step::Read {
        max_bytes,
        end: BodyEnd::EndOfStream,
    }
}

const fn cut(max_bytes: u32) -> Step {
    Step::Read {
        max_bytes,
        end: BodyEnd::Limit,
    }
}

const LIMIT: Step = cut(4096);

#[test]
fn every_way_a_body_can_come_has_its_steps() {
    use Step::{Hold, Pass};
    let cases: [(&str, &[Call], &[Step]); 15] = [
        ("one chunk", &[Body(300, true)], &[whole(300)]),
        (
            "many chunks",
            &[Body(100, false), Body(299, false), Body(300, true)],
            &[Hold, Hold, whole(300)],
        ),
        (
            "ended by an empty frame",
            &[Body(300, false), Body(300, true)],
            &[Hold, whole(300)],
        ),
        (
            "ended by trailers",
            &[Body(300, false), Trailers],
            &[Hold, whole(300)],
        ),
        ("trailers alone", &[Trailers], &[whole(0)]),
        ("empty", &[Body(0, true)], &[whole(0)]),
        (
            "empty frame first",
            &[Body(0, false), Body(300, true)],
            &[Hold, whole(300)],
        ),
        ("one below the threshold", &[Body(4095, true)], &[whole(4095)]),
        (
            "one below, and on",
            &[Body(4095, false), Body(9000, false)],
            &[Hold, LIMIT],
        ),
        ("at the threshold, whole", &[Body(4096, true)], &[whole(4096)]),
        (
            "at the threshold, and on",
            &[Body(4096, false), Body(5000, true)],
            &[LIMIT, Pass],
        ),
        ("one above, whole", &[Body(4097, true)], &[LIMIT]),
        (
            "one above, and on",
            &[Body(4097, false), Trailers],
            &[LIMIT, Pass],
        ),
        ("far above in one read", &[Body(9000, false)], &[LIMIT]),
        (
            "above, after a hold",
            &[Body(4000, false), Body(9000, true), Trailers],
            &[Hold, LIMIT, Pass],
        ),
    ];
    for (name, calls, want) in cases {
        let mut pool = pool(r#""max_buffer_bytes":4096,"#, 4);
        let mut exchange = start(&mut pool, head());
        let last = calls.iter().rev().find_map(|call| match call {
            Body(len, _) => Some(*len),
            Trailers => None,
        });
        let body = chat(last.unwrap_or(0).max(200), false);
        let mut held = 0;
        let mut steps = Vec::new();
        for call in calls {
            steps.push(match *call {
                Body(len, end) => {
                    held = len;
                    deliver(&mut exchange, &mut pool, &body, len, end, NOW_MS)
                }
                Trailers => {
                    let step = exchange.on_trailers(&pool);
                    read(&mut exchange, &mut pool, &body, held, step, NOW_MS);
                    step
                }
            });
        }
        assert_eq!(steps, want, "{name}");
        let is_empty = want.contains(&whole(0));
        let unkeyed = is_empty.then_some(Unkeyed::Body(NoPrompt::InvalidJson));
        assert_eq!(exchange.unkeyed(), unkeyed, "{name}");
        assert_eq!(exchange.decision().unwrap().key.is_some(), !is_empty, "{name}");
        assert!(!exchange.on_end(&mut pool, NOW_MS), "{name}");
        assert_eq!(open(&pool, NOW_MS), BTreeMap::new(), "{name}");
    }
}

#[test]
fn a_request_whose_body_cannot_be_waited_for_is_steered_at_its_headers() {
    let cases = [
        (None, Some("gzip"), false, true, Unkeyed::Unreadable),
        (Some("application/grpc"), None, false, true, Unkeyed::Unreadable),
        (Some("text/plain"), None, false, true, Unkeyed::Unreadable),
        (
            Some("multipart/form-data; boundary=x"),
            None,
            false,
            true,
            Unkeyed::Unreadable,
        ),
        (
            Some("application/json; charset=utf-16"),
            None,
            false,
            true,
            Unkeyed::Unreadable,
        ),
        (
            Some("application/json"),
            None,
            true,
            true,
            Unkeyed::ExpectContinue,
        ),
        (Some("application/json"), None, false, false, Unkeyed::FlagMissing),
    ];
    for (content_type, content_encoding, awaits_upstream, body_comes, cause) in cases {
        for session in [None, Some(b"s-17".to_vec())] {
            let mut pool = pool("", 4);
            let head = RequestHead {
                content_type: content_type.map(Into::into),
                content_encoding: content_encoding.map(Into::into),
                content_length: Some(8000),
                awaits_upstream,
                session: session.clone(),
                ..head()
            };
            let (mut exchange, step) = Exchange::start(&mut pool, Api::OpenAiChat, head, body_comes, NOW_MS);
            assert_eq!(step, Step::Steer, "{cause:?}");
            assert_eq!(exchange.unkeyed(), session.is_none().then_some(cause));
            let decision = exchange.decision().unwrap();
            assert_eq!(decision.key.is_some(), session.is_some(), "{cause:?}");
            assert_eq!((decision.prompt_bytes, decision.hosts.len()), (8000, 3));
            // 2000 tokens at a mean context of 1000: attention adds 2000 · 1000 ÷ 53 000.
            assert_eq!(open(&pool, NOW_MS)[&slots(&exchange)[0]], (1, 2037), "{cause:?}");
            assert_eq!(exchange.on_body(&pool, 9000, true), Step::Pass);
            assert_eq!(exchange.on_trailers(&pool), Step::Pass);
            exchange.on_end(&mut pool, NOW_MS);
            assert_eq!(open(&pool, NOW_MS), BTreeMap::new());
        }
    }
}

#[test]
fn only_posts_with_a_body_on_a_generation_path_concern_us() {
    let is_ours = |method: &[u8], path, end| Exchange::concerns(method, path, end) == Some(Api::OpenAiChat);
    assert!(is_ours(b"POST", PATH, false));
    assert!(is_ours(b"POST", "/v1/chat/completions?a=/v1/models#x", false));
    assert!(is_ours(b"POST", "/v1/chat/completions#x", false));
    for method in [b"GET".as_slice(), b"HEAD", b"CONNECT", b"OPTIONS", b"post", b""] {
        assert!(!is_ours(method, PATH, false));
    }
    assert!(!is_ours(b"POST", PATH, true));
    for path in [
        "",
        "*",
        "/v1/chat/completions/render",
        "/v1/models",
        "/x?/v1/chat/completions",
    ] {
        assert!(!is_ours(b"POST", path, false), "{path}");
    }
}

#[test]
fn after_a_413_bodies_that_may_not_fit_are_decided_by_their_first_chunk() {
    let mut pool = pool("", 4);
    let mut refused = start(&mut pool, head());
    assert_eq!(refused.on_body(&pool, 60_000, false), Step::Hold);
    let too_large = ResponseHead {
        status: 413,
        body_too_large: true,
        ..ResponseHead::default()
    };
    let want = ResponseNote {
        refused_while_held: true,
        hold_lowered: true,
        ..ResponseNote::default()
    };
    assert_eq!(refused.on_response_headers(&mut pool, &too_large, NOW_MS), want);
    assert_eq!(refused.on_body(&pool, 90_000, true), Step::Pass);
    assert!(!refused.on_end(&mut pool, NOW_MS), "counted as refused");

    let body = chat(100_000, true);
    type Case<'a> = (Option<u64>, &'a [(usize, bool, Step)]);
    let cases: [Case<'_>; 5] = [
        (None, &[(0, false, Step::Hold), (500, false, cut(500))]),
        (None, &[(300, true, whole(300))]),
        (
            Some(100_000),
            &[(16_384, false, cut(16_384)), (20_000, false, Step::Pass)],
        ),
        (Some(30_001), &[(1, false, cut(1))]),
        (
            Some(20_000),
            &[(16_384, false, Step::Hold), (20_000, true, whole(20_000))],
        ),
    ];
    for (content_length, calls) in cases {
        let mut exchange = start(
            &mut pool,
            RequestHead {
                content_length,
                ..head()
            },
        );
        for (held, end, want) in calls {
            let step = deliver(&mut exchange, &mut pool, &body, *held, *end, NOW_MS);
            assert_eq!(step, *want, "{content_length:?} at {held}");
        }
        exchange.on_end(&mut pool, NOW_MS);
    }
    assert_eq!(open(&pool, NOW_MS), BTreeMap::new());
}

#[test]
fn a_second_refusal_that_lowers_nothing_is_not_worth_a_warning() {
    let mut pool = pool("", 4);
    let too_large = ResponseHead {
        status: 413,
        body_too_large: true,
        ..ResponseHead::default()
    };
    for (held, lowers) in [(60_000, true), (0, false)] {
        let mut exchange = start(
            &mut pool,
            RequestHead {
                content_length: Some(10),
                ..head()
            },
        );
        exchange.on_body(&pool, held, false);
        let note = exchange.on_response_headers(&mut pool, &too_large, NOW_MS);
        assert_eq!(
            (note.refused_while_held, note.hold_lowered),
            (true, lowers),
            "{held}"
        );
    }
}

#[test]
fn a_413_lets_go_what_else_is_held() {
    let mut pool = pool("", 4);
    let body = chat(100_000, true);
    let [mut refused, mut unknown, mut fits] = [None, None, Some(30_000)].map(|content_length| {
        let head = RequestHead {
            content_length,
            ..head()
        };
        start(&mut pool, head)
    });
    for exchange in [&mut refused, &mut unknown, &mut fits] {
        let step = deliver(exchange, &mut pool, &body, 20_000, false, NOW_MS);
        assert_eq!(step, Step::Hold);
    }
    refused.on_body(&pool, 70_000, false);
    let too_large = ResponseHead {
        status: 413,
        body_too_large: true,
        ..ResponseHead::default()
    };
    refused.on_response_headers(&mut pool, &too_large, NOW_MS);
    let step = deliver(&mut unknown, &mut pool, &body, 24_000, false, NOW_MS);
    assert_eq!(step, cut(24_000), "the next read might be one too many");
    assert!(!unknown.is_holding());
    let step = deliver(&mut fits, &mut pool, &body, 24_000, false, NOW_MS);
    assert_eq!(step, Step::Hold, "half of what Envoy held is safe");
}

#[test]
fn a_hold_may_end_without_a_decision() {
    let mut pool = pool("", 4);
    let mut aborted = start(&mut pool, head());
    aborted.on_body(&pool, 10, false);
    assert!(aborted.on_end(&mut pool, NOW_MS));
    assert!(!aborted.on_end(&mut pool, NOW_MS), "counted once");

    let timeout = ResponseHead {
        status: 408,
        ..ResponseHead::default()
    };
    let mut timed_out = start(&mut pool, head());
    let note = timed_out.on_response_headers(&mut pool, &timeout, NOW_MS);
    assert_eq!(note, ResponseNote::default());
    assert_eq!(timed_out.on_body(&pool, 10, true), Step::Pass);
    assert!(timed_out.on_end(&mut pool, NOW_MS));

    let mut let_go = start(&mut pool, head());
    let_go.abandon(Unkeyed::FlagMissing);
    assert_eq!(let_go.unkeyed(), Some(Unkeyed::FlagMissing));
    assert_eq!(let_go.on_body(&pool, 10, true), Step::Pass);
    let_go.decide(&mut pool, &chat(200, true), BodyEnd::EndOfStream, NOW_MS);
    assert!(!let_go.on_end(&mut pool, NOW_MS));

    for exchange in [&mut aborted, &mut timed_out, &mut let_go] {
        exchange.decide(&mut pool, &chat(200, true), BodyEnd::EndOfStream, NOW_MS);
        assert!(exchange.decision().is_none());
    }
    assert_eq!(open(&pool, NOW_MS), BTreeMap::new());
}

#[test]
fn a_request_is_decided_and_charged_once() {
    let mut pool = pool("", 4);
    let body = chat(4000, true);
    let mut exchange = decided(&mut pool, &body, NOW_MS);
    let first = exchange.decision().cloned();
    exchange.decide(&mut pool, &chat(400, true), BodyEnd::EndOfStream, NOW_MS);
    exchange.abandon(Unkeyed::FlagMissing);
    assert_eq!(exchange.decision().cloned(), first);
    assert_eq!(exchange.unkeyed(), None);
    assert_eq!(
        open(&pool, NOW_MS)
            .values()
            .map(|(requests, _)| requests)
            .sum::<u32>(),
        1
    );
    assert!(!exchange.on_end(&mut pool, NOW_MS));
    exchange.decide(&mut pool, &body, BodyEnd::EndOfStream, NOW_MS);
    assert_eq!(open(&pool, NOW_MS), BTreeMap::new());
}

/// Who answers, by the decision's list.
#[derive(Debug, Clone, Copy)]
enum Served {
    Listed(usize),
    /// The one host of four that the list lacks.
    Unlisted,
    /// No host of the table.
    Unknown,
    Nobody,
}

#[test]
fn failures_and_charges_follow_the_hosts_that_were_tried() {
    use Served::{Listed, Nobody, Unknown, Unlisted};
    // Attempts, who served, status, whether it came from there; then: failed attempts, places in the list of those
    // that get a penalty (3 is the unlisted host), served elsewhere, and who has the request, prefill open.
    type Want<'a> = (u32, &'a [usize], bool, Option<usize>, bool);
    let cases: [(u32, Served, u16, bool, Want<'_>); 19] = [
        (1, Listed(0), 200, true, (0, &[], false, Some(0), true)),
        (2, Listed(1), 200, true, (1, &[0], true, Some(1), true)),
        (3, Listed(2), 200, true, (2, &[0, 1], true, Some(2), true)),
        (4, Unlisted, 200, true, (3, &[0, 1, 2], true, Some(3), true)),
        (2, Unlisted, 200, true, (1, &[0], true, Some(3), true)),
        (2, Listed(0), 200, true, (1, &[0], false, Some(0), true)),
        (1, Listed(1), 200, true, (0, &[], true, Some(1), true)),
        (1, Unknown, 200, true, (0, &[], true, None, true)),
        (2, Unknown, 503, true, (1, &[0], true, None, true)),
        (0, Listed(0), 200, true, (0, &[], false, Some(0), true)),
        (u32::MAX, Listed(2), 200, true, (2, &[0, 1], true, Some(2), true)),
        (1, Listed(0), 429, true, (1, &[0], false, Some(0), false)),
        (1, Listed(0), 500, true, (1, &[0], false, Some(0), false)),
        (3, Listed(2), 503, true, (3, &[0, 1, 2], true, Some(2), false)),
        // The engine refused the request: not its fault, and nothing to compute.
        (1, Listed(0), 400, true, (0, &[], false, Some(0), false)),
        // Envoy's own answers: no host to be had, then one that did not answer, also after retries.
        (1, Nobody, 503, false, (0, &[], false, Some(0), false)),
        (1, Listed(0), 504, false, (1, &[0], false, Some(0), false)),
        (3, Listed(2), 503, false, (3, &[0, 1, 2], false, Some(0), false)),
        (1, Unknown, 503, false, (0, &[], false, Some(0), false)),
    ];
    for (attempts, served, status, via_upstream, want) in cases {
        let name = format!("{attempts} attempts, {served:?}, {status}, via upstream {via_upstream}");
        let mut pool = pool("", 4);
        let mut exchange = decided(&mut pool, &chat(4000, true), NOW_MS);
        let mut listed = slots(&exchange);
        listed.extend((0..4).find(|slot| !listed.contains(slot)));
        let served_by = match served {
            Listed(at) => Some(address(listed[at])),
            Unlisted => Some(address(listed[3])),
            Unknown => Some("192.0.2.1:8000".into()),
            Nobody => None,
        };
        let response = ResponseHead {
            status,
            via_upstream,
            served_by: served_by.as_deref(),
            attempts,
            is_event_stream: true,
            ..ResponseHead::default()
        };
        let tokens = u64::from(exchange.decision().unwrap().uncached_tokens);
        assert!(tokens > 256, "{name}");
        let note = exchange.on_response_headers(&mut pool, &response, NOW_MS + 1000);
        let (failed_attempts, failed, served_elsewhere, holder, prefill_open) = want;
        assert_eq!(
            (note.failed_attempts, note.served_elsewhere),
            (failed_attempts, served_elsewhere),
            "{name}"
        );
        let mut left = BTreeMap::new();
        if let Some(at) = holder {
            left.insert(listed[at], (1, if prefill_open { tokens } else { 0 }));
        }
        let placed = pool.fleet().own_tallies(NOW_MS + 1000);
        let got: BTreeMap<u16, (u32, u64)> = placed
            .map(|(slot, _, requests, backlog)| {
                // The head of a queue drains with time, so open is any backlog at all.
                (slot.0, (requests, if backlog > 0 { tokens } else { 0 }))
            })
            .collect();
        assert_eq!(got, left, "{name}");
        let again = exchange.on_response_headers(&mut pool, &response, NOW_MS + 1001);
        assert_eq!(
            again,
            ResponseNote::default(),
            "{name}: only the first headers count"
        );
        exchange.on_end(&mut pool, NOW_MS + 1002);
        assert_eq!(open(&pool, NOW_MS + 1002), BTreeMap::new(), "{name}");
        let avoided = penalised(&mut pool, NOW_MS + 1003);
        let mut failed: Vec<u16> = failed.iter().map(|at| listed[*at]).collect();
        failed.sort_unstable();
        assert_eq!(avoided, failed, "{name}: penalties");
    }
}

/// Hosts of four with a penalty: on an idle fleet, those that requests without a key do not go to.
fn penalised(pool: &mut Pool, now_ms: u64) -> Vec<u16> {
    let mut hits = [0; 4];
    for _ in 0..64 {
        let mut exchange = decided(pool, b"[]", now_ms);
        hits[usize::from(slots(&exchange)[0])] += 1;
        exchange.on_end(pool, now_ms);
    }
    (0..4).filter(|slot| hits[usize::from(*slot)] == 0).collect()
}

fn answer(slot: u16, status: u16, is_event_stream: bool, then: impl FnOnce(&ResponseHead<'_>)) {
    then(&ResponseHead {
        status,
        via_upstream: true,
        served_by: Some(&address(slot)),
        attempts: 1,
        is_event_stream,
        ..ResponseHead::default()
    });
}

#[test]
fn the_first_body_byte_ends_the_prefill_and_only_a_stream_teaches_the_rate() {
    for (status, is_event_stream, learns) in [(200, true, true), (200, false, false), (400, true, false)] {
        let mut pool = pool(r#""strategy":"prefix_hash","#, 2);
        let assumed = pool.fleet().tokens_per_s(Slot(0));
        let mut rates = Vec::new();
        for i in 0..20u64 {
            // 2 000 tokens, cold, in 2 s.
            let text = String::from_utf8(chat(8000, true)).unwrap();
            let body = text.replace("demo", &format!("model {i}")).into_bytes();
            let now_ms = NOW_MS + 10_000 * i;
            let mut exchange = decided(&mut pool, &body, now_ms);
            let slot = slots(&exchange)[0];
            answer(slot, status, is_event_stream, |head| {
                exchange.on_response_headers(&mut pool, head, now_ms + 8);
            });
            let is_open = status == 200;
            assert_eq!(exchange.awaits_first_token(), is_open);
            assert_eq!(open(&pool, now_ms + 8)[&slot].1 > 0, is_open, "{status}");
            exchange.on_response_body(&mut pool, now_ms + 2000);
            assert!(!exchange.awaits_first_token());
            assert_eq!(open(&pool, now_ms + 2000)[&slot], (1, 0), "{status}");
            exchange.on_response_body(&mut pool, now_ms + 9000);
            exchange.on_end(&mut pool, now_ms + 9500);
            rates.push(pool.fleet().tokens_per_s(Slot(slot)));
        }
        assert_eq!(
            rates.iter().any(|rate| *rate != assumed),
            learns,
            "{status} {rates:?}"
        );
        if learns {
            assert!(rates[19].abs_diff(1000) < 100, "{rates:?}");
        }
    }
}

/// vLLM 0.32 sends `response.created` before the prefill.
#[test]
fn the_first_event_of_a_responses_stream_is_no_token() {
    let mut pool = pool(r#""strategy":"prefix_hash","#, 1);
    let assumed = pool.fleet().tokens_per_s(Slot(0));
    for i in 0..20u64 {
        let body = format!(
            r#"{{"model":"m{i}","stream":true,"input":"{}"}}"#,
            "one more line. ".repeat(600)
        );
        let now_ms = NOW_MS + 10_000 * i;
        let (mut exchange, _) = Exchange::start(&mut pool, Api::OpenAiResponses, head(), true, now_ms);
        deliver(
            &mut exchange,
            &mut pool,
            body.as_bytes(),
            body.len(),
            true,
            now_ms,
        );
        answer(0, 200, true, |head| {
            exchange.on_response_headers(&mut pool, head, now_ms + 8);
        });
        assert!(!exchange.awaits_first_token());
        exchange.on_response_body(&mut pool, now_ms + 9);
        assert!(open(&pool, now_ms + 9)[&0].1 > 0, "the engine computes still");
        exchange.on_end(&mut pool, now_ms + 2000);
    }
    assert_eq!(pool.fleet().tokens_per_s(Slot(0)), assumed, "9 ms teach nothing");
}

#[test]
fn an_unstreamed_prefill_ends_by_the_clock_and_a_streamed_one_does_not() {
    for stream in [false, true] {
        let mut pool = pool(r#""strategy":"prefix_hash","#, 1);
        // 1 000 tokens at the 8 000 a second that are assumed: 125 ms.
        let mut exchange = decided(&mut pool, &chat(4000, stream), NOW_MS);
        let tick = |pool: &mut Pool, after_ms| {
            let mut other = decided(pool, b"[]", NOW_MS + after_ms);
            other.on_end(pool, NOW_MS + after_ms);
            open(pool, NOW_MS + after_ms)[&0]
        };
        assert!(tick(&mut pool, 50).1 > 0);
        let (requests, tokens) = tick(&mut pool, 1000);
        assert_eq!((requests, tokens > 0), (1, stream));
        exchange.on_end(&mut pool, NOW_MS + 2000);
        assert_eq!(open(&pool, NOW_MS + 2000), BTreeMap::new());
    }
}

#[test]
fn a_request_without_an_answer_gives_its_charge_back() {
    let mut pool = pool("", 4);
    let mut exchange = decided(&mut pool, &chat(4000, true), NOW_MS);
    assert_eq!(open(&pool, NOW_MS).len(), 1);
    assert!(!exchange.on_end(&mut pool, NOW_MS + 5));
    assert_eq!(open(&pool, NOW_MS + 5), BTreeMap::new());
    answer(0, 200, true, |head| {
        let note = exchange.on_response_headers(&mut pool, head, NOW_MS + 6);
        assert_eq!(note, ResponseNote::default());
    });
    exchange.on_response_body(&mut pool, NOW_MS + 7);
    assert!(!exchange.on_end(&mut pool, NOW_MS + 8));
    assert_eq!(open(&pool, NOW_MS + 8), BTreeMap::new());
}

#[test]
fn without_hosts_or_in_a_dry_run_nothing_is_charged() {
    for (settings, host_count, reason) in [("", 0, Reason::NoHosts), (r#""dry_run":true,"#, 4, Reason::Home)]
    {
        let mut pool = pool(settings, host_count);
        let mut exchange = decided(&mut pool, &chat(4000, true), NOW_MS);
        let decision = exchange.decision().cloned().unwrap();
        assert_eq!(decision.reason, reason);
        assert_eq!(decision.hosts.len(), usize::from(host_count.min(3)));
        assert_eq!(pool.steering_value(&decision).is_empty(), host_count == 0);
        answer(0, 503, false, |head| {
            let note = exchange.on_response_headers(&mut pool, head, NOW_MS);
            assert_eq!(note, ResponseNote::default());
        });
        exchange.on_end(&mut pool, NOW_MS);
        assert_eq!(open(&pool, NOW_MS), BTreeMap::new());
    }
}

#[test]
fn a_later_pool_of_the_same_name_is_not_asked_to_give_back() {
    let body = chat(4000, true);
    let mut before = pool(r#""strategy":"prefix_hash","#, 1);
    let mut exchange = decided(&mut before, &body, NOW_MS);
    let mut after = Pool::new(config(r#""strategy":"prefix_hash","#), 2);
    apply(&mut after, &[host(0)], NOW_MS);
    let mut others = decided(&mut after, &body, NOW_MS);
    let want = open(&after, NOW_MS);
    answer(0, 500, true, |head| {
        exchange.on_response_headers(&mut after, head, NOW_MS);
    });
    exchange.on_response_body(&mut after, NOW_MS);
    exchange.on_end(&mut after, NOW_MS);
    assert_eq!(open(&after, NOW_MS), want);
    others.on_end(&mut after, NOW_MS);
    assert_eq!(open(&after, NOW_MS), BTreeMap::new());
}

#[test]
fn a_session_stands_in_for_a_body_without_a_prompt_by_its_mode() {
    for (mode, keyed, sticks) in [
        ("off", false, false),
        ("fallback", true, false),
        ("extend", false, false),
        ("replace", true, true),
    ] {
        let mut pool = pool(&format!(r#""session":{{"mode":"{mode}"}},"#), 4);
        let mut key_of = |body: &[u8], session: &str| {
            let head = RequestHead {
                session: Some(session.into()),
                ..head()
            };
            let mut exchange = start(&mut pool, head);
            deliver(&mut exchange, &mut pool, body, body.len(), true, NOW_MS);
            exchange.on_end(&mut pool, NOW_MS);
            exchange.decision().unwrap().key
        };
        assert_eq!(key_of(b"[]", "a").is_some(), keyed, "{mode}");
        let (one, other) = (chat(300, true), chat(3000, true));
        assert_eq!(key_of(&one, "a") == key_of(&other, "a"), sticks, "{mode}");
        assert_eq!(
            key_of(&one, "a") == key_of(&one, "b"),
            mode == "off" || mode == "fallback"
        );
    }
}

struct Sample {
    id: String,
    head: RequestHead,
    api: Api,
    body: Vec<u8>,
}

fn samples() -> Vec<Sample> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/bodies");
    let index: Value = serde_json::from_slice(&std::fs::read(dir.join("index.json")).unwrap()).unwrap();
    let entries = index["entries"].as_array().unwrap().iter();
    let samples = entries.filter_map(|facts| {
        let text = |key: &str| facts[key].as_str().map(String::from);
        let path = text("path").unwrap();
        let api = Exchange::concerns(facts["method"].as_str().unwrap().as_bytes(), &path, false)?;
        Some(Sample {
            id: text("id").unwrap(),
            api,
            head: RequestHead {
                path,
                content_type: text("content_type"),
                content_encoding: text("content_encoding"),
                ..RequestHead::default()
            },
            body: match text("file") {
                Some(file) => std::fs::read(dir.join(file)).unwrap(),
                None => generated::generated(&facts["generated"]),
            },
        })
    });
    samples.collect()
}

#[test]
fn every_body_gives_the_same_read_and_key_however_it_is_split() {
    let (seed, mut rng) = seeded();
    let mut checked = 0;
    for sample in samples() {
        for threshold_bytes in [THRESHOLD_BYTES, 768 << 10] {
            let mut whole = None;
            for step_bytes in [usize::MAX, 1, 7, 0] {
                let mut pool = pool(&format!(r#""max_buffer_bytes":{threshold_bytes},"#), 3);
                let (mut exchange, mut step) =
                    Exchange::start(&mut pool, sample.api, sample.head.clone(), true, NOW_MS);
                let mut held = 0usize;
                while step == Step::Hold {
                    let more = match step_bytes {
                        0 => 1 + rng.below(5000),
                        bytes => bytes,
                    };
                    held = held.saturating_add(more).min(sample.body.len());
                    step = deliver(
                        &mut exchange,
                        &mut pool,
                        &sample.body,
                        held,
                        held == sample.body.len(),
                        NOW_MS,
                    );
                }
                let got = (
                    step,
                    exchange.decision().map(|decision| decision.key),
                    exchange.unkeyed(),
                );
                let want = *whole.get_or_insert(got);
                assert_eq!(
                    got, want,
                    "{}: {step_bytes} bytes at a time, threshold {threshold_bytes}, WARMROUTE_SEED={seed}",
                    sample.id
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 800, "only {checked}");
}

fn seeded() -> (u64, Rng) {
    let seed = std::env::var("WARMROUTE_SEED")
        .ok()
        .map(|text| text.parse().unwrap());
    let seed = seed.unwrap_or(20_261_129);
    (seed, Rng::new(seed))
}

/// One exchange of the random runs, with what the test knows of it.
struct Live {
    exchange: Exchange,
    pool_at: usize,
    body: Vec<u8>,
    held: usize,
    /// Worker of the pool that was charged, if one was.
    charged_by: Option<u64>,
    is_abandoned: bool,
    is_refused: bool,
}

/// Two pools with their worlds, and what has been counted.
struct World {
    rng: Rng,
    now_ms: u64,
    pools: Vec<Pool>,
    hosts: Vec<Vec<Host>>,
    dry_run: [bool; 2],
    live: Vec<Live>,
    /// Hosts keep slot, epoch and address, and only known hosts answer.
    is_lossless: bool,
    next_worker: u64,
    started: u64,
    decided: u64,
    by_reason: BTreeMap<&'static str, u64>,
    undecided: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let pools = (0..2).map(|at| Pool::new(config(""), at)).collect();
        let mut world = Self {
            rng: Rng::new(seed),
            now_ms: NOW_MS,
            pools,
            hosts: vec![Vec::new(), Vec::new()],
            dry_run: [false; 2],
            live: Vec::new(),
            is_lossless: seed.is_multiple_of(2),
            next_worker: 2,
            started: 0,
            decided: 0,
            by_reason: BTreeMap::new(),
            undecided: 0,
        };
        for at in 0..2 {
            world.hosts[at] = (0..5).map(|slot| world.host(at, slot, 1)).collect();
            apply(&mut world.pools[at], &world.hosts[at], NOW_MS);
        }
        world
    }

    fn host(&mut self, pool_at: usize, slot: u16, epoch: u32) -> Host {
        let health = [
            Health::Healthy,
            Health::Degraded,
            Health::Unhealthy,
            Health::Draining,
        ];
        let role = [Role::Both, Role::Both, Role::Prefill, Role::Decode];
        Host {
            slot: Slot(slot),
            epoch,
            // Slots are the same in both pools, addresses are not.
            address: format!("10.{pool_at}.{epoch}.{slot}:80"),
            role: role[self.rng.below(4)],
            health: health[self.rng.below(4)],
            weight: 1,
            sampled_ms: self.now_ms - self.rng.below(5000) as u64,
            load: Load {
                waiting: Some(u32::try_from(self.rng.below(9)).unwrap()),
                running: Some(u32::try_from(self.rng.below(9)).unwrap()),
                ..Load::default()
            },
        }
    }

    fn step(&mut self) {
        self.now_ms += self.rng.below(400) as u64;
        match self.rng.below(100) {
            0..=19 => self.start(),
            20..=22 => self.update_table(),
            23 => self.reconfigure(),
            24 if self.rng.below(10) == 0 => self.replace_pool(),
            _ if self.live.is_empty() => {}
            _ => {
                let at = self.rng.below(self.live.len());
                let mut live = self.live.swap_remove(at);
                if !self.call(&mut live) {
                    self.live.push(live);
                }
            }
        }
        self.check();
    }

    fn start(&mut self) {
        self.started += 1;
        let pool_at = self.rng.below(2);
        let body = if self.rng.below(8) == 0 {
            b"{\"messages\":".to_vec()
        } else {
            chat(200 + self.rng.below(20_000), self.rng.below(2) == 0)
        };
        let head = RequestHead {
            content_length: (self.rng.below(2) == 0).then_some(body.len() as u64),
            content_encoding: (self.rng.below(9) == 0).then(|| "gzip".into()),
            awaits_upstream: self.rng.below(20) == 0,
            session: (self.rng.below(4) == 0).then(|| vec![b's'; self.rng.below(70_000)]),
            ..head()
        };
        let body_comes = self.rng.below(20) > 0;
        let pool = &mut self.pools[pool_at];
        let (exchange, step) = Exchange::start(pool, Api::OpenAiChat, head, body_comes, self.now_ms);
        let mut live = Live {
            exchange,
            pool_at,
            body,
            held: 0,
            charged_by: None,
            is_abandoned: false,
            is_refused: false,
        };
        if step == Step::Steer {
            self.note_decision(&mut live);
        }
        self.live.push(live);
    }

    fn note_decision(&mut self, live: &mut Live) {
        let pool = &self.pools[live.pool_at];
        let decision = live.exchange.decision().unwrap();
        self.decided += 1;
        *self.by_reason.entry(decision.reason.as_str()).or_default() += 1;
        for slot in decision.hosts.iter() {
            let listed = self.hosts[live.pool_at].iter().find(|host| host.slot == slot);
            let host = listed.unwrap_or_else(|| panic!("{slot:?} is not in the table"));
            assert!(
                host.health.takes_traffic() && host.role != Role::Decode,
                "{host:?}"
            );
            assert_eq!(pool.address(slot), Some(host.address.as_str()));
        }
        if !decision.hosts.is_empty() && !self.dry_run[live.pool_at] {
            live.charged_by = Some(pool.id());
        }
    }

    /// One callback for an exchange; true when it is over.
    fn call(&mut self, live: &mut Live) -> bool {
        let was_decided = live.exchange.decision().is_some();
        let (now_ms, pool_at) = (self.now_ms, live.pool_at);
        match self.rng.below(12) {
            0..=4 => {
                live.held = (live.held + self.rng.below(9000)).min(live.body.len());
                let end = live.held == live.body.len() && self.rng.below(3) > 0;
                let pool = &mut self.pools[pool_at];
                deliver(&mut live.exchange, pool, &live.body, live.held, end, now_ms);
            }
            5 => {
                let pool = &mut self.pools[pool_at];
                let step = live.exchange.on_trailers(pool);
                read(&mut live.exchange, pool, &live.body, live.held, step, now_ms);
            }
            6 if self.rng.below(8) == 0 => {
                live.is_abandoned |= live.exchange.is_holding();
                live.exchange.abandon(Unkeyed::FlagMissing);
            }
            7 => {
                let pool = &mut self.pools[pool_at];
                live.exchange.decide(pool, &live.body, BodyEnd::Limit, now_ms);
            }
            6 | 8 => self.answer(live),
            9 => live.exchange.on_response_body(&mut self.pools[pool_at], now_ms),
            10 => assert!(!live.exchange.awaits_first_token() || was_decided),
            _ => {
                let was_held = live.exchange.on_end(&mut self.pools[pool_at], now_ms);
                assert!(!live.exchange.on_end(&mut self.pools[pool_at], now_ms));
                if !was_decided {
                    self.undecided += 1;
                    assert_eq!(was_held, !live.is_abandoned && !live.is_refused);
                }
                return true;
            }
        }
        if !was_decided && live.exchange.decision().is_some() {
            self.note_decision(live);
        }
        false
    }

    fn answer(&mut self, live: &mut Live) {
        let other = 1 - live.pool_at;
        let served_by = match self.rng.below(8) {
            0 => None,
            1 if !self.is_lossless => Some(self.hosts[other][0].address.clone()),
            _ => {
                let hosts = &self.hosts[live.pool_at];
                Some(hosts[self.rng.below(hosts.len())].address.clone())
            }
        };
        let body_too_large = self.rng.below(30) == 0;
        let via_upstream = !body_too_large && served_by.is_some() && self.rng.below(4) > 0;
        if live.exchange.is_holding() {
            // What is held has not been sent, so only Envoy can answer.
            live.is_refused |= body_too_large || via_upstream;
        }
        let head = ResponseHead {
            status: [200, 200, 200, 400, 429, 500, 503][self.rng.below(7)],
            via_upstream,
            body_too_large,
            served_by: served_by.as_deref(),
            attempts: u32::try_from(self.rng.below(5)).unwrap(),
            is_event_stream: self.rng.below(2) == 0,
            ..ResponseHead::default()
        };
        let pool = &mut self.pools[live.pool_at];
        let note = live.exchange.on_response_headers(pool, &head, self.now_ms);
        assert!(note.failed_attempts <= 4);
    }

    fn update_table(&mut self) {
        let at = self.rng.below(2);
        let old = self.hosts[at].clone();
        let mut hosts: Vec<Host> = Vec::new();
        for host in old {
            let is_replaced = !self.is_lossless && self.rng.below(6) == 0;
            let epoch = host.epoch + u32::from(is_replaced);
            hosts.push(self.host(at, host.slot.0, epoch));
        }
        if !self.is_lossless && hosts.len() > 1 && self.rng.below(4) == 0 {
            hosts.remove(self.rng.below(hosts.len()));
        } else if hosts.len() < 12 && self.rng.below(3) == 0 {
            let slot = hosts.last().map_or(0, |host| host.slot.0 + 1);
            hosts.push(self.host(at, slot, 1));
        }
        apply(&mut self.pools[at], &hosts, self.now_ms);
        self.hosts[at] = hosts;
    }

    fn reconfigure(&mut self) {
        let at = self.rng.below(2);
        self.dry_run[at] = self.rng.below(4) == 0;
        let strategy = ["round_robin", "least_outstanding", "prefix_hash", "hybrid"][self.rng.below(4)];
        let overflow = [r#""auto""#, r#"{"in_flight":2,"waiting_requests":1}"#][self.rng.below(2)];
        let settings = format!(
            r#""strategy":"{strategy}","overflow":{overflow},"dry_run":{},"max_buffer_bytes":{},"#,
            self.dry_run[at],
            [4096, 10_000, 786_432][self.rng.below(3)]
        );
        self.pools[at].reconfigure(config(&settings));
    }

    fn replace_pool(&mut self) {
        let at = self.rng.below(2);
        self.dry_run[at] = false;
        self.pools[at] = Pool::new(config(""), self.next_worker);
        self.next_worker += 1;
        apply(&mut self.pools[at], &self.hosts[at], self.now_ms);
    }

    fn check(&mut self) {
        for pool in &mut self.pools {
            let journal = pool.journal(self.now_ms);
            let requests: u32 = journal.tallies.iter().map(|tally| tally.requests).sum();
            let id = pool.id();
            let charged = self
                .live
                .iter()
                .filter(|live| live.charged_by == Some(id))
                .count();
            if self.is_lossless {
                assert_eq!(requests as usize, charged, "requests in flight");
            } else {
                assert!(requests as usize <= charged, "{requests} of {charged}");
            }
            let tallies: Vec<_> = journal
                .tallies
                .iter()
                .map(|tally| (tally.slot, tally.epoch, tally.requests, tally.uncached_tokens))
                .collect();
            assert_eq!(tallies, pool.fleet().own_tallies(self.now_ms).collect::<Vec<_>>());
            assert_eq!(Journal::decode(&journal.encode()), Ok(journal));
        }
    }

    fn end_all(&mut self) {
        for mut live in core::mem::take(&mut self.live) {
            live.exchange.on_end(&mut self.pools[live.pool_at], self.now_ms);
            self.undecided += u64::from(live.exchange.decision().is_none());
        }
        self.check();
        for pool in &mut self.pools {
            assert_eq!(pool.journal(self.now_ms).tallies, []);
            assert_eq!(pool.fleet().traffic().in_flight, foreign(pool));
        }
        assert_eq!(self.started, self.decided + self.undecided);
        assert_eq!(self.by_reason.values().sum::<u64>(), self.decided);
    }
}

/// Requests in flight that only the engines' metrics speak of: what is left once every charge is given back.
fn foreign(pool: &mut Pool) -> u32 {
    let with = pool.fleet().traffic().in_flight;
    let none: [&[u8]; 0] = [];
    pool.apply_journals(none.into_iter(), NOW_MS);
    assert_eq!(pool.fleet().traffic().in_flight, with);
    with
}

#[test]
fn whatever_the_order_of_callbacks_every_charge_is_given_back_once() {
    let (seed, mut seeds) = seeded();
    let mut by_reason: BTreeMap<&str, u64> = BTreeMap::new();
    for run in 0..60 {
        let run_seed = if std::env::var_os("WARMROUTE_SEED").is_some() && run == 0 {
            seed
        } else {
            seeds.next_u64()
        };
        let print = Printer(run_seed);
        let mut world = World::new(run_seed);
        for _ in 0..1500 {
            world.step();
        }
        world.end_all();
        for (reason, count) in world.by_reason {
            *by_reason.entry(reason).or_default() += count;
        }
        drop(print);
    }
    assert!(by_reason.len() >= 10, "the runs reach few reasons: {by_reason:?}");
}

/// Names the seed of the run that panics, so that `WARMROUTE_SEED` replays it first.
struct Printer(u64);

impl Drop for Printer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with WARMROUTE_SEED={}", self.0);
        }
    }
}

/// An answer whose text is of about so many bytes.
fn answer_body(text_bytes: usize) -> String {
    let text = "and \\\"so\\\" on ".repeat(text_bytes / 12);
    format!(
        r#"{{"id":"1","choices":[{{"message":{{"content":"{text}"}}}}],"usage":{{"prompt_tokens":4000,"prompt_tokens_details":{{"cached_tokens":1024}}}},"kv_transfer_params":null}}"#
    )
}

/// Shows an answer chunk by chunk as the shell does; bytes that were copied.
fn show_answer(exchange: &mut Exchange, body: &[u8], chunk_bytes: usize) -> usize {
    let mut copied = 0;
    for chunk in body.chunks(chunk_bytes) {
        if exchange.reads_answer() {
            let wanted = exchange.wants_answer_bytes(chunk.len());
            exchange.on_answer_bytes(&chunk[chunk.len() - wanted..]);
            copied += wanted;
        }
    }
    copied
}

#[test]
fn answers_that_come_whole_teach_bytes_per_token_however_they_are_cut() {
    for chunk_bytes in [1, 7, 4096, 1 << 20] {
        for length_known in [true, false] {
            let mut pool = pool("", 2);
            let mut exchange = decided(&mut pool, &chat(4000, false), NOW_MS);
            let body = answer_body(30_000);
            answer(slots(&exchange)[0], 200, false, |head| {
                let head = ResponseHead {
                    content_length: length_known.then_some(body.len() as u64),
                    ..*head
                };
                let note = exchange.on_response_headers(&mut pool, &head, NOW_MS);
                assert!(!note.usage_encoded);
            });
            let copied = show_answer(&mut exchange, body.as_bytes(), chunk_bytes);
            if length_known {
                assert_eq!(copied, 4096);
            }
            let told = AnswerNote::UsageRead { is_false_hit: false };
            assert_eq!(exchange.on_answer_end(&mut pool, NOW_MS), told);
            assert_eq!(
                exchange.on_answer_end(&mut pool, NOW_MS),
                AnswerNote::Unread,
                "once"
            );
            assert!(pool.millibytes_per_token() < 4000);
            exchange.on_end(&mut pool, NOW_MS);
        }
    }
}

#[test]
fn only_answers_that_can_tell_are_read() {
    let body = answer_body(100);
    for (settings, head, copies, encoded) in [
        ("", ResponseHead::default(), true, false),
        (
            r#""usage_feedback":"off","#,
            ResponseHead::default(),
            false,
            false,
        ),
        (
            "",
            ResponseHead {
                is_event_stream: true,
                ..ResponseHead::default()
            },
            false,
            false,
        ),
        (
            "",
            ResponseHead {
                is_encoded: true,
                ..ResponseHead::default()
            },
            false,
            true,
        ),
        (
            "",
            ResponseHead {
                status: 400,
                ..ResponseHead::default()
            },
            false,
            false,
        ),
    ] {
        let mut pool = pool(settings, 2);
        let mut exchange = decided(&mut pool, &chat(4000, false), NOW_MS);
        let address = address(slots(&exchange)[0]);
        let head = ResponseHead {
            status: head.status.max(200),
            via_upstream: true,
            served_by: Some(&address),
            attempts: 1,
            ..head
        };
        let note = exchange.on_response_headers(&mut pool, &head, NOW_MS);
        assert_eq!(note.usage_encoded, encoded, "{head:?}");
        assert_eq!(
            show_answer(&mut exchange, body.as_bytes(), 100) > 0,
            copies,
            "{head:?}"
        );
        let told = exchange.on_answer_end(&mut pool, NOW_MS) != AnswerNote::Unread;
        assert_eq!(told, copies, "{settings} {head:?}");
    }
}

#[test]
fn an_answer_that_was_cut_or_replaced_teaches_nothing() {
    let body = answer_body(100);
    let mut pool = pool("", 2);
    let mut cut = decided(&mut pool, &chat(4000, false), NOW_MS);
    answer(slots(&cut)[0], 200, false, |head| {
        cut.on_response_headers(&mut pool, head, NOW_MS);
    });
    show_answer(&mut cut, &body.as_bytes()[..body.len() - 1], 100);
    assert_eq!(cut.on_answer_end(&mut pool, NOW_MS), AnswerNote::UsageAbsent);
    let mut replaced = decided(&mut pool, &chat(4000, false), NOW_MS);
    answer(slots(&replaced)[0], 200, false, |head| {
        replaced.on_response_headers(&mut pool, head, NOW_MS);
        replaced.on_response_headers(&mut pool, head, NOW_MS);
    });
    assert_eq!(show_answer(&mut replaced, body.as_bytes(), 100), 0);
    assert_eq!(replaced.on_answer_end(&mut pool, NOW_MS), AnswerNote::Unread);
    assert_eq!(pool.millibytes_per_token(), 4000);
}

#[test]
fn a_host_that_is_silent_for_far_too_long_loses_even_what_it_alone_holds() {
    for stream in [true, false] {
        let mut pool = pool("", 4);
        let body = chat(64_000, stream);
        let first = decided(&mut pool, &body, NOW_MS);
        let home = slots(&first)[0];
        let mut served = first;
        for i in 0..20 {
            let now_ms = NOW_MS + 1000 * i;
            answer(home, 200, stream, |head| {
                served.on_response_headers(&mut pool, head, now_ms + 50);
            });
            served.on_response_body(&mut pool, now_ms + 60);
            served.on_end(&mut pool, now_ms + 70);
            served = decided(&mut pool, &body, now_ms + 1000);
            assert_eq!(slots(&served)[0], home, "it is warm");
        }
        // From here on nothing comes back.
        let hung_ms = NOW_MS + 20_000;
        let mut hung = vec![served];
        let mut sent_there = 0;
        for i in 1..100 {
            let now_ms = hung_ms + 50 * i;
            let mut next = decided(&mut pool, &body, now_ms);
            let slot = slots(&next)[0];
            if slot == home {
                assert!(
                    now_ms - hung_ms < 1500,
                    "stream {stream}: still sent there after {} ms",
                    now_ms - hung_ms
                );
                sent_there += 1;
                hung.push(next);
            } else {
                answer(slot, 200, stream, |head| {
                    next.on_response_headers(&mut pool, head, now_ms + 20);
                });
                next.on_response_body(&mut pool, now_ms + 20);
                next.on_end(&mut pool, now_ms + 20);
            }
        }
        assert!(sent_there > 10, "{sent_there}");
        // Clients give up; that is all that the host is known by then, and it is remembered.
        for mut exchange in hung {
            exchange.on_end(&mut pool, hung_ms + 6000);
        }
        assert_eq!(open(&pool, hung_ms + 6000), BTreeMap::new());
        assert_eq!(penalised(&mut pool, hung_ms + 6001), [home]);
    }
}

#[test]
fn a_silence_that_is_due_to_the_work_is_no_failure() {
    let mut pool = pool("", 4);
    // 250 000 tokens at the 8 000 a second that are taken for granted: half a minute without a byte.
    let body = chat(500_000, true);
    let mut long = decided(&mut pool, &body, NOW_MS);
    long.on_end(&mut pool, NOW_MS + 30_000);
    assert_eq!(penalised(&mut pool, NOW_MS + 30_001), [0; 0]);
}

#[test]
fn a_host_that_cuts_answers_is_avoided_and_a_client_that_goes_is_no_failure() {
    for (is_cut, avoided) in [(true, true), (false, false)] {
        let mut pool = pool("", 4);
        let body = chat(4000, true);
        let mut exchange = decided(&mut pool, &body, NOW_MS);
        let slot = slots(&exchange)[0];
        answer(slot, 200, true, |head| {
            exchange.on_response_headers(&mut pool, head, NOW_MS + 8);
        });
        exchange.on_response_body(&mut pool, NOW_MS + 50);
        if is_cut {
            assert!(exchange.on_answer_cut(&mut pool, NOW_MS + 60));
        }
        exchange.on_end(&mut pool, NOW_MS + 60);
        assert_eq!(penalised(&mut pool, NOW_MS + 61) == [slot], avoided);
        let next = decided(&mut pool, &body, NOW_MS + 70);
        assert_eq!(slots(&next)[0] != slot, avoided, "the next of the same");
    }
}
