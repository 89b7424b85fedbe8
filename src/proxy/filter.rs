//! The HTTP filter: Envoy's callbacks for one request, translated for its [`Exchange`].

mod lines;

use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use self::lines::{AnswerLines, Lines};
use super::host::{self, Buffer, Map};
use super::stats::{Counter, Stats};
use super::vm::{PoolEntry, with_vm};
use crate::config::Config;
use crate::exchange::{AnswerNote, Exchange, ResponseHead, Step, Unkeyed};

/// One request.
pub(super) struct Filter {
    context_id: u32,
    config: Option<Rc<Config>>,
    /// The pool's name and the request, once it is one that Warmroute decides.
    active: Option<(Rc<str>, Exchange)>,
    /// The request's headers are Envoy's alone.
    is_detached: bool,
    /// An answer began and its end was not seen.
    is_answer_open: bool,
}

impl Filter {
    pub(super) fn new(context_id: u32, config: Option<Rc<Config>>) -> Self {
        Self {
            context_id,
            config,
            active: None,
            is_detached: false,
            is_answer_open: false,
        }
    }

    /// Performs a step; true when the request waits on.
    fn perform(&mut self, step: Step) -> bool {
        match step {
            Step::Hold => true,
            Step::Pass => false,
            Step::Steer => {
                self.steer(host::now_ns());
                false
            }
            Step::Read { max_bytes, end } => {
                let started_ns = host::now_ns();
                let body = host::buffer(Buffer::RequestBody, 0, max_bytes as usize).unwrap_or_default();
                let decided = self.with_exchange(|exchange, entry, stats| {
                    let now_ms = started_ns / 1_000_000;
                    entry.sync_if_due(stats, now_ms);
                    exchange.decide(&mut entry.pool, &body, end, now_ms);
                });
                if decided.is_some() {
                    self.steer(started_ns);
                }
                false
            }
        }
    }

    /// Performs a step, unless the pool went with its configuration while the request was held.
    fn perform_if_any(&mut self, step: Option<Step>) -> bool {
        if step.is_none() {
            self.active = None;
        }
        self.perform(step.unwrap_or(Step::Pass))
    }

    /// Writes the steering header of a decided request and counts the decision.
    fn steer(&mut self, started_ns: u64) {
        let steering = self.with_exchange(|exchange, entry, stats| {
            let decision = exchange.decision()?;
            let is_timed = stats.decision(decision.strategy, decision.reason);
            stats.add(Counter::PromptBytes, decision.prompt_bytes.into());
            stats.add(Counter::MatchedBytes, decision.matched_bytes.into());
            if let Some(cause) = exchange.unkeyed() {
                stats.unkeyed(cause);
            }
            entry.changed(stats, started_ns / 1_000_000);
            let config = entry.pool.config();
            let value = if config.dry_run {
                String::new()
            } else {
                entry.pool.steering_value(decision)
            };
            Some((config.steering_header.clone(), value, is_timed))
        });
        let Some((name, value, is_timed)) = steering.flatten() else {
            return;
        };
        if !value.is_empty() {
            // Should Envoy refuse, the request goes on without the header and its fallback policy chooses.
            let _ = host::set_header(Map::Request, &name, value.as_bytes());
        }
        if is_timed {
            let microseconds = host::now_ns().saturating_sub(started_ns) / 1000;
            with_vm(|vm| vm.stats.decision_time(microseconds));
        }
    }

    fn with_exchange<R>(
        &mut self,
        f: impl FnOnce(&mut Exchange, &mut PoolEntry, &mut Stats) -> R,
    ) -> Option<R> {
        let (name, exchange) = self.active.as_mut()?;
        with_vm(|vm| {
            let (entry, stats) = vm.pool_and_stats(name)?;
            Some(f(exchange, entry, stats))
        })?
    }

    /// A body or trailers came for a request that waits: false when its headers must not be touched any more.
    fn may_touch(&mut self) -> bool {
        if self.is_detached {
            return false;
        }
        let is_holding = self
            .active
            .as_ref()
            .is_some_and(|(_, exchange)| exchange.is_holding());
        if is_holding && let Some(Err(cause)) = with_vm(|vm| vm.body_came(self.context_id)) {
            self.is_detached = true;
            if let Some((_, exchange)) = &mut self.active {
                exchange.abandon(cause);
            }
            with_vm(|vm| {
                vm.stats
                    .add(Counter::FlagMissing, (cause == Unkeyed::FlagMissing).into());
                vm.stats.unkeyed(cause);
            });
            return false;
        }
        true
    }

    /// A response that needs a closer look: who sent it, who tried, and why.
    fn on_other_response(&mut self, answer: &AnswerLines<'_>, now_ms: u64) {
        let details = host::property(b"response\0code_details").unwrap_or_default();
        let address = host::property(b"upstream\0address").unwrap_or_default();
        let attempts = host::number_property(b"upstream\0request_attempt_count").unwrap_or(1);
        let head = ResponseHead {
            status: answer.status,
            via_upstream: details == b"via_upstream",
            body_too_large: details.starts_with(b"request_payload_too_large"),
            // A full circuit breaker of the cluster is nobody's failure.
            served_by: core::str::from_utf8(&address)
                .ok()
                .filter(|address| !address.is_empty() && !details.ends_with(b"{overflow}")),
            attempts: u32::try_from(attempts).unwrap_or(u32::MAX),
            is_event_stream: answer.is_event_stream,
            is_encoded: answer.is_encoded,
            content_length: answer.content_length,
        };
        self.with_exchange(|exchange, entry, stats| {
            let note = exchange.on_response_headers(&mut entry.pool, &head, now_ms);
            stats.add(Counter::HostFailures, note.failed_attempts.into());
            stats.add(Counter::ServedElsewhere, note.served_elsewhere.into());
            stats.add(Counter::HeldTooLarge, note.refused_while_held.into());
            stats.add(Counter::UsageEncoded, note.usage_encoded.into());
            if note.hold_lowered {
                log::warn!(
                    "Envoy refused a body of which {} bytes are held by default: raise the route's \
                     request_body_buffer_limit (1.37 or newer) or the listener's per_connection_buffer_limit_bytes, \
                     or state the limit as stream_buffer_bytes; until then bodies that may not fit are decided by their first chunk",
                    entry.pool.config().max_buffer_bytes
                );
            }
            entry.changed(stats, now_ms);
        });
    }

    /// The answer is over: what it told of the engine's count is learned from, unless that was done before.
    fn answer_ends(&mut self, now_ms: u64) {
        self.with_exchange(
            |exchange, entry, stats| match exchange.on_answer_end(&mut entry.pool, now_ms) {
                AnswerNote::Unread => {}
                AnswerNote::UsageAbsent => stats.add(Counter::UsageAbsent, 1),
                AnswerNote::UsageRead { is_false_hit } => {
                    stats.add(Counter::UsageRead, 1);
                    stats.add(Counter::FalseHits, is_false_hit.into());
                }
            },
        );
    }

    fn add_debug_headers(&mut self) {
        let lines = self.with_exchange(|exchange, entry, _| {
            let decision = exchange
                .decision()
                .filter(|_| entry.pool.config().debug_headers)?;
            let host = decision
                .hosts
                .first()
                .and_then(|slot| entry.pool.address(slot))
                .unwrap_or("none");
            let reason = exchange.unkeyed().map_or_else(
                || decision.reason.as_str().to_owned(),
                |cause| format!("{}; {}", decision.reason.as_str(), cause.as_str()),
            );
            Some([
                decision.strategy.as_str().to_owned(),
                reason,
                host.to_owned(),
                format!("{}/{}", decision.matched_bytes, decision.prompt_bytes),
                decision
                    .key
                    .map_or_else(|| "none".to_owned(), |key| format!("{key:016x}")),
            ])
        });
        for (name, value) in DEBUG_HEADERS.iter().zip(lines.flatten().iter().flatten()) {
            let _ = host::set_header(Map::Response, name, value.as_bytes());
        }
    }
}

impl Context for Filter {}

impl HttpContext for Filter {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        let Some(config) = self.config.clone() else {
            return Action::Continue;
        };
        let headers = host::headers(Map::Request);
        let lines = Lines::read(&headers, &config);
        for name in &lines.spoofed {
            // Each edit makes Envoy choose the route anew, so only what is there is removed.
            let _ = host::remove_header(Map::Request, name);
        }
        if !lines.spoofed.is_empty() {
            with_vm(|vm| vm.stats.add(Counter::SpoofedHeaders, lines.spoofed.len() as u64));
        }
        let Some(api) = Exchange::concerns(lines.method, lines.path, end_of_stream) else {
            return Action::Continue;
        };
        let cluster = host::property(b"xds\0cluster_name").unwrap_or_default();
        let Some(pool) = core::str::from_utf8(&cluster)
            .ok()
            .and_then(|name| config.pool(name))
        else {
            return Action::Continue;
        };
        let head = lines.request_head(&headers, pool);
        let now_ms = host::now_ms();
        let started = with_vm(|vm| {
            vm.note_stream();
            let bodies_come = vm.bodies_come();
            let (entry, stats) = vm.pool_and_stats(&pool.name)?;
            entry.sync_if_due(stats, now_ms);
            let (exchange, step) = Exchange::start(&mut entry.pool, api, head, bodies_come, now_ms);
            if step == Step::Hold {
                vm.wait_begins(self.context_id, now_ms);
            }
            Some((exchange, step))
        });
        let Some(Some((exchange, step))) = started else {
            return Action::Continue;
        };
        self.active = Some((Rc::from(pool.name.as_str()), exchange));
        if self.perform(step) {
            Action::Pause
        } else {
            Action::Continue
        }
    }

    fn on_http_request_body(&mut self, held_bytes: usize, end_of_stream: bool) -> Action {
        if self.active.is_none() || !self.may_touch() {
            return Action::Continue;
        }
        let step =
            self.with_exchange(|exchange, entry, _| exchange.on_body(&entry.pool, held_bytes, end_of_stream));
        if self.perform_if_any(step) {
            Action::Pause
        } else {
            Action::Continue
        }
    }

    fn on_http_request_trailers(&mut self, _count: usize) -> Action {
        if self.active.is_none() || !self.may_touch() {
            return Action::Continue;
        }
        let step = self.with_exchange(|exchange, entry, _| exchange.on_trailers(&entry.pool));
        self.perform_if_any(step);
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        if self.active.is_none() {
            return Action::Continue;
        }
        self.is_answer_open = !end_of_stream;
        let headers = host::headers(Map::Response);
        let answer = AnswerLines::read(&headers);
        for name in &answer.spoofed {
            let _ = host::remove_header(Map::Response, name);
        }
        let served_by = answer
            .served_by
            .and_then(|address| core::str::from_utf8(address).ok());
        let is_first_choice = served_by.is_some_and(|address| {
            self.with_exchange(|exchange, entry, _| exchange.is_first_choice(&entry.pool, address))
                == Some(true)
        });
        let now_ms = host::now_ms();
        if is_first_choice && answer.status == 200 {
            // The common case, without a further host call: Envoy's upstream filter wrote `x-served-by`, so the upstream
            // answered, and it is the host that was chosen.
            let head = ResponseHead {
                status: 200,
                via_upstream: true,
                served_by,
                attempts: 1,
                is_event_stream: answer.is_event_stream,
                is_encoded: answer.is_encoded,
                content_length: answer.content_length,
                ..ResponseHead::default()
            };
            self.with_exchange(|exchange, entry, stats| {
                let note = exchange.on_response_headers(&mut entry.pool, &head, now_ms);
                stats.add(Counter::UsageEncoded, note.usage_encoded.into());
            });
        } else {
            self.on_other_response(&answer, now_ms);
        }
        self.add_debug_headers();
        Action::Continue
    }

    fn on_http_response_trailers(&mut self, _count: usize) -> Action {
        self.is_answer_open = false;
        Action::Continue
    }

    fn on_http_response_body(&mut self, body_bytes: usize, end_of_stream: bool) -> Action {
        self.is_answer_open &= !end_of_stream;
        let awaits = self
            .active
            .as_ref()
            .is_some_and(|(_, exchange)| exchange.awaits_first_token());
        if awaits && body_bytes > 0 {
            let now_ms = host::now_ms();
            self.with_exchange(|exchange, entry, stats| {
                exchange.on_response_body(&mut entry.pool, now_ms);
                entry.changed(stats, now_ms);
            });
        }
        if let Some((_, exchange)) = &mut self.active
            && exchange.reads_answer()
        {
            let wanted = exchange.wants_answer_bytes(body_bytes);
            if wanted > 0 {
                // The bytes stay where they are; a copy of the last ones is read.
                let last = host::buffer(Buffer::ResponseBody, body_bytes - wanted, wanted);
                exchange.on_answer_bytes(&last.unwrap_or_default());
            }
            if end_of_stream {
                self.answer_ends(host::now_ms());
            }
        }
        Action::Continue
    }

    fn on_log(&mut self) {
        if self.active.is_none() {
            return;
        }
        let now_ms = host::now_ms();
        self.answer_ends(now_ms);
        let is_cut = self.is_answer_open
            && host::number_property(b"response\0flags").is_some_and(|flags| flags & UPSTREAM_CUT != 0);
        self.with_exchange(|exchange, entry, stats| {
            if is_cut {
                let has_failed = exchange.on_answer_cut(&mut entry.pool, now_ms);
                stats.add(Counter::HostFailures, has_failed.into());
            }
            let was_held = exchange.on_end(&mut entry.pool, now_ms);
            stats.add(Counter::EndedWhileHeld, was_held.into());
            entry.changed(stats, now_ms);
        });
        with_vm(|vm| vm.context_ends(self.context_id));
        self.active = None;
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        // Envoy logs every stream before it deletes it; should it not, the charge must still be given back.
        let now_ms = if self.active.is_some() {
            host::now_ms()
        } else {
            return;
        };
        self.with_exchange(|exchange, entry, _| exchange.on_end(&mut entry.pool, now_ms));
        with_vm(|vm| vm.context_ends(self.context_id));
    }
}

/// Response flags of an answer that broke off: the upstream reset the stream, closed its connection, or closed it in the
/// middle of a chunk (`UpstreamRemoteReset`, `UpstreamConnectionTermination` and `UpstreamProtocolError` in Envoy's
/// `stream_info.h`, as bits).
const UPSTREAM_CUT: u64 = 1 << 4 | 1 << 6 | 1 << 23;
/// Headers that tell of a decision, in the order in which they are written.
const DEBUG_HEADERS: [&str; 5] = [
    "x-warmroute-strategy",
    "x-warmroute-reason",
    "x-warmroute-host",
    "x-warmroute-matched",
    "x-warmroute-key",
];
