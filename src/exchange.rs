//! One request as a state machine: headers, body, trailers and response in, the next [`Step`] out.
//!
//! The shell calls one method for each callback of Envoy and performs what comes back; it holds no state of a request
//! itself. Whatever the order of calls, an exchange charges a host at most once and gives the charge back exactly once,
//! and a request that cannot be decided goes on without a steering header. Input is untrusted; nothing here panics, and
//! nothing of a body is kept.

mod message;

pub use self::message::{AnswerNote, RequestHead, ResponseHead, ResponseNote};

use crate::candidate::Charge;
use crate::decision::Decision;
pub use crate::pool::Unkeyed;
use crate::pool::{DecisionInput, Expectation, Outcome, Pool};
use crate::prompt::{Api, BodyEnd, body_is_readable};
use crate::usage::{AnswerForm, AnswerTail};

/// What the shell is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Let the request go on as it is; nothing more is asked of this exchange's body.
    Pass,
    /// Hold the request and wait for more of it.
    Hold,
    /// Read the first `max_bytes` of the held body and call [`Exchange::decide`].
    Read {
        /// How much to read.
        max_bytes: u32,
        /// Whether that is all there will ever be.
        end: BodyEnd,
    },
    /// A host was chosen without the body; see [`Exchange::decision`].
    Steer,
}

/// One request.
#[derive(Debug)]
pub struct Exchange {
    phase: Phase,
    api: Api,
    head: RequestHead,
    decision: Option<Box<Decision>>,
    unkeyed: Option<Unkeyed>,
    charge: Option<Charge>,
    expected: Option<Box<Expectation>>,
    /// The end of the answer, where it is read.
    tail: Option<AnswerTail>,
    /// The pool that holds the charge: a later pool of the same name must not be asked to give it back.
    charged_by: u64,
    is_streaming: bool,
    was_answered_while_held: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Holding { threshold_bytes: u32, held_bytes: u32 },
    Decided,
    Answering { first_byte: FirstByte },
    Ended,
}

/// What the first byte of a response's body will tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FirstByte {
    /// Nothing, or it was seen.
    Nothing,
    /// The prefill is over, since some time.
    PrefillOver,
    /// The prefill ends with it, so it tells the host's rate.
    PrefillEnds,
}

impl Exchange {
    /// Whether a request is one that Warmroute decides: a POST with a body on a generation path.
    #[must_use]
    pub fn concerns(method: &[u8], path: &str, end_of_stream: bool) -> Option<Api> {
        if end_of_stream || method != b"POST" {
            None
        } else {
            Api::from_path(path)
        }
    }

    /// Starts with the headers of a request for which [`Exchange::concerns`] named the API.
    ///
    /// `body_comes` is false where Envoy cannot deliver the body while the headers wait.
    pub fn start(
        pool: &mut Pool,
        api: Api,
        head: RequestHead,
        body_comes: bool,
        now_ms: u64,
    ) -> (Self, Step) {
        let threshold_bytes = pool.hold_bytes(head.content_length);
        let mut exchange = Self {
            phase: Phase::Holding {
                threshold_bytes,
                held_bytes: 0,
            },
            api,
            head,
            decision: None,
            unkeyed: None,
            charge: None,
            expected: None,
            tail: None,
            charged_by: pool.id(),
            // Only the body tells; a stream's charge is released by its first byte, which is never too early.
            is_streaming: true,
            was_answered_while_held: false,
        };
        let head = &exchange.head;
        let unkeyed = if !body_comes {
            Some(Unkeyed::FlagMissing)
        } else if head.awaits_upstream {
            Some(Unkeyed::ExpectContinue)
        } else if !body_is_readable(head.content_type.as_deref(), head.content_encoding.as_deref()) {
            Some(Unkeyed::Unreadable)
        } else {
            None
        };
        match unkeyed {
            None => (exchange, Step::Hold),
            Some(cause) => {
                exchange.decide_without_body(pool, cause, now_ms);
                (exchange, Step::Steer)
            }
        }
    }

    /// Body so far: `held_bytes` in all, since the request is held.
    ///
    /// A threshold that was lowered meanwhile, because Envoy refused another body, counts for this one too.
    pub fn on_body(&mut self, pool: &Pool, held_bytes: usize, end_of_stream: bool) -> Step {
        let Phase::Holding {
            threshold_bytes,
            held_bytes: held,
        } = &mut self.phase
        else {
            return Step::Pass;
        };
        *held = u32::try_from(held_bytes).unwrap_or(u32::MAX);
        let threshold_bytes = pool.hold_bytes(self.head.content_length).min(*threshold_bytes);
        if end_of_stream && *held <= threshold_bytes {
            Step::Read {
                max_bytes: *held,
                end: BodyEnd::EndOfStream,
            }
        } else if *held >= threshold_bytes {
            // The cut is at the threshold wherever the reads happened to end, so that equal bodies get equal keys; only
            // where the first chunk has to do, all of it is taken that may be held at all.
            let max_bytes = if threshold_bytes == 1 {
                (*held).min(pool.config().max_buffer_bytes)
            } else {
                threshold_bytes
            };
            let end = if end_of_stream && max_bytes == *held {
                BodyEnd::EndOfStream
            } else {
                BodyEnd::Limit
            };
            Step::Read { max_bytes, end }
        } else {
            Step::Hold
        }
    }

    /// Trailers: the body is complete, although no body callback said so.
    pub fn on_trailers(&mut self, pool: &Pool) -> Step {
        match self.phase {
            Phase::Holding { held_bytes, .. } => self.on_body(pool, held_bytes as usize, true),
            Phase::Decided | Phase::Answering { .. } | Phase::Ended => Step::Pass,
        }
    }

    /// Chooses a host by the bytes that a [`Step::Read`] asked for; does nothing unless the request is held.
    pub fn decide(&mut self, pool: &mut Pool, body: &[u8], end: BodyEnd, now_ms: u64) {
        if !self.is_holding() {
            return;
        }
        let input = DecisionInput {
            api: self.api,
            path: &self.head.path,
            body: Some((body, end)),
            content_length: self.head.content_length,
            tenant: self.head.tenant.as_deref(),
            session: self.head.session.as_deref(),
        };
        let outcome = pool.decide(&input, now_ms);
        self.is_streaming = outcome.is_streaming && self.api.stream_begins_with_token();
        self.settle(pool, outcome, now_ms);
    }

    /// The request goes on undecided, because it was let go from outside.
    pub fn abandon(&mut self, cause: Unkeyed) {
        if matches!(self.phase, Phase::Holding { .. }) {
            self.phase = Phase::Decided;
            self.unkeyed = Some(cause);
        }
    }

    fn decide_without_body(&mut self, pool: &mut Pool, cause: Unkeyed, now_ms: u64) {
        let input = DecisionInput {
            api: self.api,
            path: &self.head.path,
            body: None,
            content_length: self.head.content_length,
            tenant: self.head.tenant.as_deref(),
            session: self.head.session.as_deref(),
        };
        let mut outcome = pool.decide(&input, now_ms);
        outcome.unkeyed = outcome.unkeyed.and(Some(cause));
        self.settle(pool, outcome, now_ms);
    }

    fn settle(&mut self, pool: &mut Pool, mut outcome: Outcome, now_ms: u64) {
        self.charge = pool.charge(&mut outcome, now_ms);
        self.charged_by = pool.id();
        self.expected = outcome.expectation.take();
        self.decision = Some(Box::new(outcome.decision));
        self.unkeyed = outcome.unkeyed;
        self.phase = Phase::Decided;
        // Headers may be long, and streams take hours.
        self.head = RequestHead::default();
    }

    /// Whether `address` is the host that the decision names first.
    #[must_use]
    pub fn is_first_choice(&self, pool: &Pool, address: &str) -> bool {
        let first = self.decision.as_ref().and_then(|decision| decision.hosts.first());
        first.and_then(|slot| pool.address(slot)) == Some(address)
    }

    /// Headers of the response. Only the first ones count: another filter may replace a response by one of its own.
    pub fn on_response_headers(
        &mut self,
        pool: &mut Pool,
        head: &ResponseHead<'_>,
        now_ms: u64,
    ) -> ResponseNote {
        match self.phase {
            Phase::Holding {
                threshold_bytes,
                held_bytes,
            } => {
                self.answer_with(FirstByte::Nothing);
                self.was_answered_while_held = !head.via_upstream && !head.body_too_large;
                ResponseNote {
                    refused_while_held: head.body_too_large,
                    hold_lowered: head.body_too_large && pool.hold_refused(held_bytes, threshold_bytes),
                    ..ResponseNote::default()
                }
            }
            Phase::Decided => self.on_first_response_headers(pool, head, now_ms),
            Phase::Answering { .. } => {
                self.answer_with(FirstByte::Nothing);
                self.tail = None;
                if let Some(charge) = self.charge_in(pool) {
                    pool.prefill_over(charge, now_ms);
                }
                ResponseNote::default()
            }
            Phase::Ended => ResponseNote::default(),
        }
    }

    fn on_first_response_headers(
        &mut self,
        pool: &mut Pool,
        head: &ResponseHead<'_>,
        now_ms: u64,
    ) -> ResponseNote {
        self.answer_with(FirstByte::Nothing);
        let mut note = ResponseNote {
            usage_encoded: self.begin_tail(pool, head),
            ..ResponseNote::default()
        };
        let hosts = self.decision.as_ref().map(|decision| decision.hosts);
        let (Some(hosts), Some(charge)) = (hosts, self.charge_in(pool)) else {
            return note;
        };
        let served = head.served_by.and_then(|address| pool.slot_of(address));
        // Envoy walks the list in order, so the first host failed if there was a second attempt, and so did every host
        // before the one that served.
        let retries = usize::try_from(head.attempts.saturating_sub(1)).unwrap_or(usize::MAX);
        for (tried, slot) in hosts.iter().take(retries).enumerate() {
            if tried > 0 && served == Some(slot) {
                break;
            }
            pool.host_failed(slot, now_ms);
            note.failed_attempts += 1;
        }
        let is_failure = !head.via_upstream || is_engine_failure(head.status);
        if let Some(slot) = served
            && is_failure
        {
            pool.host_failed(slot, now_ms);
            note.failed_attempts += 1;
        }
        if head.via_upstream && head.served_by.is_some() {
            note.served_elsewhere = served != Some(charge.slot);
            match served {
                Some(slot) => pool.move_charge(charge, slot, now_ms),
                // The host that works on it is none that is known; the one that was charged has nothing of it.
                None => {
                    pool.prefill_over(charge, now_ms);
                    pool.finish(charge, now_ms);
                }
            }
        }
        if head.via_upstream && head.status == 200 {
            if head.is_event_stream {
                if self.api.stream_begins_with_token() {
                    self.answer_with(FirstByte::PrefillEnds);
                } else if let Some(charge) = self.charge_in(pool) {
                    pool.answer_opened(charge);
                }
            } else if self.is_streaming {
                self.answer_with(FirstByte::PrefillOver);
            } else if let Some(charge) = self.charge_in(pool) {
                // An answer that comes whole begins when the engine is done with it.
                pool.answer_began(charge, now_ms);
            }
        } else {
            // Refused, or answered by Envoy itself: the engine computes nothing of it any more.
            pool.prefill_over(charge, now_ms);
        }
        note
    }

    /// The first bytes of the response's body are there.
    pub fn on_response_body(&mut self, pool: &mut Pool, now_ms: u64) {
        let Phase::Answering { first_byte } = self.phase else {
            return;
        };
        self.answer_with(FirstByte::Nothing);
        let Some(charge) = self.charge_in(pool) else {
            return;
        };
        match first_byte {
            FirstByte::Nothing => {}
            FirstByte::PrefillOver => pool.answer_began(charge, now_ms),
            FirstByte::PrefillEnds => pool.first_token(charge, now_ms),
        }
    }

    /// True until the first bytes of an answer were seen that end a prefill: the shell may skip the call otherwise.
    #[must_use]
    pub fn awaits_first_token(&self) -> bool {
        match self.phase {
            Phase::Answering { first_byte } => first_byte != FirstByte::Nothing,
            Phase::Holding { .. } | Phase::Decided | Phase::Ended => false,
        }
    }

    /// Prepares to read the end of an answer that may tell what the engine counted; true where it cannot be read.
    fn begin_tail(&mut self, pool: &Pool, head: &ResponseHead<'_>) -> bool {
        let is_read = head.via_upstream
            && head.status == 200
            && self.expected.is_some()
            && pool.config().usage_feedback.reads(head.is_event_stream);
        if is_read && !head.is_encoded {
            let form = if head.is_event_stream {
                AnswerForm::Events
            } else {
                AnswerForm::Whole
            };
            self.tail = Some(AnswerTail::new(form, head.content_length));
        }
        is_read && head.is_encoded
    }

    /// Whether chunks of the answer are to be shown to [`Exchange::wants_answer_bytes`].
    #[must_use]
    pub const fn reads_answer(&self) -> bool {
        self.tail.is_some()
    }

    /// A chunk of the answer comes by: how many of its last bytes [`Exchange::on_answer_bytes`] wants, mostly none.
    pub fn wants_answer_bytes(&mut self, chunk_bytes: usize) -> usize {
        self.tail.as_mut().map_or(0, |tail| tail.pass(chunk_bytes))
    }

    /// The last bytes of a chunk of the answer.
    pub fn on_answer_bytes(&mut self, last: &[u8]) {
        if let Some(tail) = &mut self.tail {
            tail.push(last);
        }
    }

    /// The host broke its answer off; true when that is a failure of a known host.
    pub fn on_answer_cut(&mut self, pool: &mut Pool, now_ms: u64) -> bool {
        let is_answering = matches!(self.phase, Phase::Answering { .. });
        let Some(slot) = self
            .charge_in(pool)
            .map(|charge| charge.slot)
            .filter(|_| is_answering)
        else {
            return false;
        };
        pool.host_failed(slot, now_ms);
        true
    }

    /// The answer is complete, or will not be: what it told of the engine's own count goes to the pool, once.
    pub fn on_answer_end(&mut self, pool: &mut Pool, now_ms: u64) -> AnswerNote {
        let served = self.charge_in(pool).map(|charge| charge.slot);
        let (Some(tail), Some(expected)) = (self.tail.take(), self.expected.take()) else {
            return AnswerNote::Unread;
        };
        match tail.usage() {
            Some(usage) if self.charged_by == pool.id() => AnswerNote::UsageRead {
                is_false_hit: pool.answered(&expected, usage, served, now_ms),
            },
            Some(_) | None => AnswerNote::UsageAbsent,
        }
    }

    fn answer_with(&mut self, first_byte: FirstByte) {
        self.phase = Phase::Answering { first_byte };
    }

    fn charge_in(&mut self, pool: &Pool) -> Option<&mut Charge> {
        self.charge.as_mut().filter(|_| self.charged_by == pool.id())
    }

    /// The exchange is over, however it ended. True when it ended while it was held, other than by a body too large.
    pub fn on_end(&mut self, pool: &mut Pool, now_ms: u64) -> bool {
        let was_held = self.is_holding() || core::mem::take(&mut self.was_answered_while_held);
        self.phase = Phase::Ended;
        if let Some(charge) = self.charge_in(pool) {
            pool.finish(charge, now_ms);
        }
        self.charge = None;
        was_held
    }

    /// What was decided, once it was.
    #[must_use]
    pub fn decision(&self) -> Option<&Decision> {
        self.decision.as_deref()
    }

    /// Why no prefix key took part, where none did.
    #[must_use]
    pub fn unkeyed(&self) -> Option<Unkeyed> {
        self.unkeyed
    }

    /// True while the request waits for its body.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        matches!(self.phase, Phase::Holding { .. })
    }
}

/// Statuses by which an engine says that it cannot serve now.
const fn is_engine_failure(status: u16) -> bool {
    status == 429 || status >= 500
}
