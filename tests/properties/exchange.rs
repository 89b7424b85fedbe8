//! Any callbacks in any order → steps that a filter may perform, and tallies that are zero once all requests ended.

use std::collections::BTreeMap;

use warmroute::exchange::{AnswerNote, Exchange, RequestHead, ResponseHead, Step};
use warmroute::host_table::{Health, Host, HostTable, Load, Role, Slot};
use warmroute::pool::Pool;
use warmroute::prompt::{Api, BodyEnd};
use warmroute::recent::{RecentPrefixes, RecentSettings, Traffic};

use super::choices::{Choices, Seen};
use super::journals::{journal, small_pool_config};

/// Checks everything on the callbacks that the bytes stand for.
pub(crate) fn check(data: &[u8], seen: &mut Seen) {
    let mut choices = Choices::new(data);
    if choices.one_in(4) {
        check_pieces(&mut choices, seen);
    } else {
        check_callbacks(&mut choices, seen);
    }
}

/// A request that is under way, and what the shell knows of it.
struct Open {
    exchange: Exchange,
    body: Vec<u8>,
    held_bytes: usize,
    is_held: bool,
    is_answered: bool,
    is_told: bool,
    is_ended: bool,
}

fn check_callbacks(choices: &mut Choices<'_>, seen: &mut Seen) {
    let mut script: Vec<String> = Vec::new();
    let mut pool = Pool::new(small_pool_config(settings(choices)), 1);
    let mut now_ms = 1_700_000_000_000;
    apply_table(&mut pool, choices, now_ms);
    let mut open: Vec<Open> = Vec::new();
    let mut recent = recent_prefixes();
    let mut generation = 1;
    while !choices.is_empty() {
        now_ms = match choices.below(24) {
            0 => choices.odd_u64() / 2,
            1 => now_ms.saturating_sub(u64::from(choices.u16())),
            2..=5 => now_ms + u64::from(choices.u16()),
            _ => now_ms + u64::from(choices.byte()),
        };
        let operation = choices.below(16);
        script.push(format!("{operation} at {now_ms}"));
        match operation {
            0..=2 if open.len() < 12 => {
                let body = body(choices);
                let (exchange, step) = start(&mut pool, choices, body.len(), now_ms);
                assert!(matches!(step, Step::Hold | Step::Steer), "{step:?}: {script:?}");
                assert_eq!(exchange.is_holding(), step == Step::Hold, "{script:?}");
                seen.note_if("decided at the headers", step == Step::Steer);
                open.push(Open {
                    is_held: step == Step::Hold,
                    exchange,
                    body,
                    held_bytes: 0,
                    is_answered: false,
                    is_told: false,
                    is_ended: false,
                });
            }
            3 => apply_table(&mut pool, choices, now_ms),
            4 => {
                let mut journal = journal(choices);
                journal.heartbeat_ms = now_ms;
                let _ = pool.apply_journal(choices.byte() % 8, &journal.encode(), Vec::new, now_ms);
                pool.settle_journals(now_ms);
            }
            5 if choices.one_in(3) => pool.reconfigure(small_pool_config(settings(choices))),
            5 if choices.one_in(8) => {
                // The pool left the configuration and came back: what it charged is gone with it.
                generation += 1;
                pool = Pool::new(small_pool_config(settings(choices)), generation);
                apply_table(&mut pool, choices, now_ms);
                seen.note("pool replaced");
            }
            _ if !open.is_empty() => {
                let at = choices.below(open.len());
                call_back(&mut open[at], &mut pool, choices, now_ms, &script, seen);
                if open[at].is_ended && choices.one_in(2) {
                    open.swap_remove(at);
                }
            }
            _ => {}
        }
        check_tallies(&pool, &open, now_ms, &script);
        if let Some(keys) = open.last().and_then(|last| keys_of(&last.body)) {
            recent.observe(
                &keys,
                Traffic {
                    hosts: 3,
                    in_flight: 5,
                },
                now_ms,
            );
            assert!(recent.memory_bytes() <= 16_384, "{script:?}");
        }
    }
    for open in &mut open {
        open.exchange.on_end(&mut pool, now_ms);
        open.is_ended = true;
    }
    check_tallies(&pool, &open, now_ms, &script);
    assert_eq!(
        pool.fleet().own_tallies(now_ms).count(),
        0,
        "work left over: {script:?}"
    );
    assert!(pool.journal(now_ms).tallies.is_empty(), "{script:?}");
}

/// No more is open than requests are, and the memory is what was configured.
fn check_tallies(pool: &Pool, open: &[Open], now_ms: u64, script: &[String]) {
    let under_way = open.iter().filter(|open| !open.is_ended).count();
    let charged: u64 = pool
        .fleet()
        .own_tallies(now_ms)
        .map(|(_, _, requests, _)| u64::from(requests))
        .sum();
    assert!(
        charged <= under_way as u64,
        "{charged} charged, {under_way} under way: {script:?}"
    );
    let tokens: u64 = pool
        .fleet()
        .own_tallies(now_ms)
        .map(|(_, _, _, tokens)| tokens)
        .sum();
    assert!(tokens < 1 << 40, "{tokens} tokens open: {script:?}");
    assert!(pool.index().memory_bytes() <= 262_144, "{script:?}");
}

fn call_back(
    open: &mut Open,
    pool: &mut Pool,
    choices: &mut Choices<'_>,
    now_ms: u64,
    script: &[String],
    seen: &mut Seen,
) {
    // Half of the callbacks come when Envoy would make them, the others at any time.
    let callback = match (choices.one_in(2), open.is_held, open.is_answered, open.is_told) {
        (false, _, _, _) => choices.below(10),
        (true, true, _, _) => 0,
        (true, false, false, _) => 4,
        (true, false, true, false) => 6,
        (true, false, true, true) => 8,
    };
    let exchange = &mut open.exchange;
    match callback {
        0..=2 => {
            open.held_bytes = (open.held_bytes + choices.below(6000)).min(open.body.len());
            let is_last = open.held_bytes == open.body.len() && choices.one_in(2);
            let step = exchange.on_body(pool, open.held_bytes, is_last);
            perform(open, pool, step, now_ms, script, seen);
        }
        3 => {
            let step = exchange.on_trailers(pool);
            perform(open, pool, step, now_ms, script, seen);
        }
        4 | 5 => {
            let addresses: [Option<String>; 4] = [
                None,
                Some(address(choices.below(8))),
                Some("10.9.9.9:1".into()),
                exchange
                    .decision()
                    .and_then(|decision| decision.hosts.first())
                    .and_then(|slot| pool.address(slot))
                    .map(str::to_owned),
            ];
            let head = ResponseHead {
                status: choices.pick(&[200, 200, 200, 200, 429, 503, 413, 0]),
                via_upstream: !choices.one_in(4),
                body_too_large: choices.one_in(8),
                served_by: addresses[choices.below(4)].as_deref(),
                attempts: u32::from(choices.byte() % 5),
                is_event_stream: choices.one_in(2),
                is_encoded: choices.one_in(8),
                content_length: choices.one_in(2).then(|| u64::from(choices.u16())),
            };
            let note = exchange.on_response_headers(pool, &head, now_ms);
            assert!(note.failed_attempts <= 4, "{note:?}: {script:?}");
            open.is_held = false;
            open.is_answered = true;
            assert!(!exchange.is_holding(), "{script:?}");
            assert_eq!(exchange.on_body(pool, 100_000, true), Step::Pass, "{script:?}");
            seen.note("response headers");
        }
        6 | 7 => {
            open.is_told = true;
            exchange.on_response_body(pool, now_ms);
            let answer = format!(
                "{{\"usage\":{{\"prompt_tokens\":{},\"prompt_tokens_details\":{{\"cached_tokens\":{}}}}}}}",
                choices.u16(),
                choices.u16()
            );
            let wanted = exchange.wants_answer_bytes(answer.len());
            assert!(wanted <= answer.len(), "{script:?}");
            assert!(wanted == 0 || exchange.reads_answer(), "{script:?}");
            exchange.on_answer_bytes(&answer.as_bytes()[answer.len() - wanted..]);
            if choices.one_in(2) {
                let note = exchange.on_answer_end(pool, now_ms);
                seen.note_if("usage told", matches!(note, AnswerNote::UsageRead { .. }));
                let again = exchange.on_answer_end(pool, now_ms);
                assert_eq!(again, AnswerNote::Unread, "{script:?}");
            }
        }
        8 => {
            exchange.on_end(pool, now_ms);
            open.is_ended = true;
            open.is_held = false;
            assert!(!exchange.is_holding(), "{script:?}");
            assert!(!exchange.awaits_first_token(), "{script:?}");
            assert_eq!(exchange.on_body(pool, 100_000, true), Step::Pass, "{script:?}");
            assert!(!exchange.on_end(pool, now_ms), "held after its end: {script:?}");
            seen.note("request ended");
        }
        _ => {
            // A decision that nobody asked for, twice.
            let was_held = exchange.is_holding();
            let before = exchange.decision().cloned();
            exchange.decide(pool, &open.body, BodyEnd::EndOfStream, now_ms);
            if !was_held {
                assert_eq!(exchange.decision(), before.as_ref(), "decided twice: {script:?}");
            }
            open.is_held = false;
            assert!(!exchange.is_holding(), "{script:?}");
        }
    }
}

/// Performs a step as the shell does, if it is one that may come.
fn perform(open: &mut Open, pool: &mut Pool, step: Step, now_ms: u64, script: &[String], seen: &mut Seen) {
    let exchange = &mut open.exchange;
    match step {
        Step::Pass => assert!(!open.is_held, "passed while held: {script:?}"),
        Step::Hold => assert!(open.is_held, "held after it went on: {script:?}"),
        Step::Read { max_bytes, end } => {
            assert!(open.is_held, "read after it went on: {script:?}");
            assert!(
                max_bytes as usize <= open.held_bytes,
                "{step:?} of {}: {script:?}",
                open.held_bytes
            );
            exchange.decide(pool, &open.body[..max_bytes as usize], end, now_ms);
            open.is_held = false;
            let decision = exchange.decision().expect("a decision");
            let live = pool.fleet().eligible_len();
            assert_eq!(decision.hosts.len(), live.min(3), "{script:?}");
            assert!(
                decision.hosts.iter().all(|slot| pool.fleet().is_eligible(slot)),
                "{script:?}"
            );
            assert!(decision.matched_bytes <= decision.prompt_bytes, "{script:?}");
            let value = pool.steering_value(decision);
            assert_eq!(value.is_empty(), decision.hosts.is_empty(), "{script:?}");
            seen.note("decided by the body");
            seen.note_if("decided by a key", decision.key.is_some());
            seen.note_if("decided by a cut body", end == BodyEnd::Limit);
        }
        Step::Steer => panic!("steered by a body: {script:?}"),
    }
    assert_eq!(exchange.is_holding(), open.is_held, "{script:?}");
}

/// However a body comes in pieces, its decision is the same.
fn check_pieces(choices: &mut Choices<'_>, seen: &mut Seen) {
    let body = body(choices);
    let ends = choices.splits(body.len());
    let ends_by_trailers = choices.one_in(3);
    let whole = decide_pieces(&body, &[body.len()], false);
    let pieces = decide_pieces(&body, &ends, ends_by_trailers);
    assert_eq!(whole, pieces, "{} bytes in pieces up to {ends:?}", body.len());
    seen.note_if("pieces with a key", whole.contains("key: Some"));
    seen.note_if("pieces beyond the limit", body.len() > 4096);
}

fn decide_pieces(body: &[u8], ends: &[usize], ends_by_trailers: bool) -> String {
    let now_ms = 1_700_000_000_000;
    let mut pool = Pool::new(small_pool_config(""), 1);
    apply_table(&mut pool, &mut Choices::new(&[]), now_ms);
    let head = RequestHead {
        path: "/v1/chat/completions".into(),
        ..RequestHead::default()
    };
    let (mut exchange, _) = Exchange::start(&mut pool, Api::OpenAiChat, head, true, now_ms);
    let mut reads = 0;
    for (at, held) in ends.iter().enumerate() {
        let is_last = at + 1 == ends.len() && !ends_by_trailers;
        if let Step::Read { max_bytes, end } = exchange.on_body(&pool, *held, is_last) {
            exchange.decide(&mut pool, &body[..max_bytes as usize], end, now_ms);
            reads += 1;
        }
    }
    if let Step::Read { max_bytes, end } = exchange.on_trailers(&pool) {
        exchange.decide(&mut pool, &body[..max_bytes as usize], end, now_ms);
        reads += 1;
    }
    assert_eq!(reads, 1, "{} bytes up to {ends:?}", body.len());
    format!("{:?} {:?}", exchange.decision(), exchange.unkeyed())
}

fn start(pool: &mut Pool, choices: &mut Choices<'_>, body_bytes: usize, now_ms: u64) -> (Exchange, Step) {
    let (path, api) = choices.pick(&[
        ("/v1/chat/completions", Api::OpenAiChat),
        ("/v1/responses", Api::OpenAiResponses),
        ("/v1/messages", Api::AnthropicMessages),
    ]);
    let head = RequestHead {
        path: path.into(),
        content_type: choices.one_in(32).then(|| "text/plain".into()),
        content_encoding: choices.one_in(32).then(|| "gzip".into()),
        content_length: [None, Some(body_bytes as u64), Some(u64::MAX)][choices.below(3)],
        awaits_upstream: choices.one_in(32),
        tenant: choices.one_in(4).then(|| b"acme".to_vec()),
        session: choices.one_in(4).then(|| b"s-1".to_vec()),
    };
    Exchange::start(pool, api, head, !choices.one_in(32), now_ms)
}

fn settings(choices: &mut Choices<'_>) -> &'static str {
    choices.pick(&[
        "",
        r#""strategy":"cache_aware","usage_feedback":"streams","#,
        r#""strategy":"round_robin","#,
        r#""strategy":"least_outstanding","dry_run":true,"#,
        r#""strategy":"prefix_hash","session":{"mode":"replace"},"#,
        r#""overflow":{"in_flight":2,"waiting_requests":3},"session":{"mode":"extend"},"#,
    ])
}

/// A chat of a few of the same sentences, so that prompts meet; at times it is broken or no chat.
fn body(choices: &mut Choices<'_>) -> Vec<u8> {
    let mut messages = String::new();
    for at in 0..1 + choices.below(5) {
        if at > 0 {
            messages.push(',');
        }
        let role = ["system", "user", "assistant"][choices.below(3)];
        let sentence = ["tell me more. ", "why is that so? ", "\u{e9}t\u{e9} "][choices.below(3)];
        let text = sentence.repeat(1 + choices.below(255));
        messages.push_str(&format!(r#"{{"role":"{role}","content":"{text}"}}"#));
    }
    let model = ["demo", "other", "demo:adapter"][choices.below(3)];
    let stream = choices.one_in(2);
    let mut body = if choices.one_in(4) {
        format!(r#"{{"messages":[{messages}],"stream":{stream},"model":"{model}"}}"#)
    } else {
        format!(r#"{{"model":"{model}","stream":{stream},"messages":[{messages}]}}"#)
    };
    if choices.one_in(12) {
        body.push('x');
    }
    body.into_bytes()
}

fn keys_of(body: &[u8]) -> Option<warmroute::chunk::PrefixKeys> {
    let input = warmroute::prompt::PromptInput {
        api: Api::OpenAiChat,
        path: "/v1/chat/completions",
        body,
        end: BodyEnd::EndOfStream,
        tenant: None,
        session_header: None,
    };
    let prompt = warmroute::prompt::extract(&input, &Default::default())
        .prompt
        .ok()?;
    Some(prompt.keys(&prompt.namespace))
}

fn recent_prefixes() -> RecentPrefixes {
    RecentPrefixes::new(RecentSettings {
        memory_bytes: 16_384,
        ..RecentSettings::default()
    })
}

fn address(number: usize) -> String {
    format!("10.0.0.{number}:8000")
}

/// A table of some of eight hosts, in any health and epoch.
fn apply_table(pool: &mut Pool, choices: &mut Choices<'_>, now_ms: u64) {
    let mut hosts: BTreeMap<u16, Host> = BTreeMap::new();
    for number in 0..8 {
        if choices.one_in(4) {
            continue;
        }
        let slot = u16::try_from(number).unwrap_or(0);
        hosts.insert(
            slot,
            Host {
                slot: Slot(slot),
                epoch: u32::from(choices.byte() / 86),
                address: address(number),
                role: choices.pick(&[Role::Both, Role::Both, Role::Both, Role::Decode]),
                health: choices.pick(&[
                    Health::Healthy,
                    Health::Healthy,
                    Health::Degraded,
                    Health::Unhealthy,
                ]),
                weight: u32::from(choices.byte() % 4),
                sampled_ms: now_ms,
                load: Load {
                    waiting: Some(u32::from(choices.byte() % 8)),
                    running: Some(u32::from(choices.byte())),
                    ..Load::default()
                },
            },
        );
    }
    let table = HostTable {
        published_ms: now_ms,
        hosts: hosts.into_values().collect(),
    };
    pool.apply_table(&table.encode(), now_ms).expect("its own blob");
}
