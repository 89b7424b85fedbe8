//! Admin requests → faults of a replica and what it looks like inside; for people and programs outside the process.
//!
//! `POST /_fleet/fault` takes one object: `{"kind": "slow", "factor": 4}`, `{"kind": "restart"}`, or `status` (with
//! `"status"`, 503 by default), `hang`, `reset` or `none`, these four with `"on"` one of `requests` (the default), `metrics`
//! and `health`. `GET /_fleet/state` tells queue, cache and counters. Neither counts as a request received.

use std::sync::Arc;

use hyper::{Method, Response, StatusCode};
use serde::Deserialize;
use serde_json::json;

use super::http::{error, json_reply};
use super::reply::ReplyBody;
use super::{Fault, Shared};

/// Paths that start like this are answered here.
pub(super) const PREFIX: &str = "/_fleet/";

/// Answers one admin request.
pub(super) fn answer(shared: &Arc<Shared>, method: &Method, path: &str, body: &[u8]) -> Response<ReplyBody> {
    match (method, path) {
        (&Method::POST, "/_fleet/fault") => match serde_json::from_slice(body) {
            Ok(order) => {
                obey(shared, order);
                json_reply(&json!({"ok": true}))
            }
            Err(wrong) => error(StatusCode::BAD_REQUEST, "BadRequestError", &wrong.to_string()),
        },
        (&Method::GET, "/_fleet/state") => state(shared),
        _ => error(StatusCode::NOT_FOUND, "NotFoundError", "no such endpoint"),
    }
}

fn obey(shared: &Shared, order: Order) {
    let set = |on: Target, fault| {
        let target = match on {
            Target::Requests => &shared.fault,
            Target::Metrics => &shared.metrics_fault,
            Target::Health => &shared.health_fault,
        };
        target.send_replace(fault);
    };
    match order {
        Order::None { on } => set(on, Fault::None),
        Order::Status { on, status } => set(on, Fault::Status(status)),
        Order::Hang { on } => set(on, Fault::Hang),
        Order::Reset { on } => set(on, Fault::Reset),
        Order::Slow { factor } => shared.slow_down(factor),
        Order::Restart {} => {
            shared.lock().restart();
            shared.wake.notify_one();
        }
    }
}

fn state(shared: &Shared) -> Response<ReplyBody> {
    let mut state = shared.lock();
    state.advance(shared.now_us());
    let snapshot = state.engine.snapshot();
    let counters = snapshot.counters;
    json_reply(&json!({
        "name": shared.name,
        "model": shared.model,
        "life": state.life,
        "waiting": snapshot.waiting,
        "running": snapshot.running,
        "kv_usage": snapshot.kv_usage,
        "cached_blocks": snapshot.cached_blocks,
        "prefill_backlog_tokens": state.engine.prefill_backlog_tokens(),
        "prefix_query_tokens": counters.prefix_query_tokens,
        "prefix_hit_tokens": counters.prefix_hit_tokens,
        "computed_prefill_tokens": counters.computed_prefill_tokens,
        "generation_tokens": counters.generation_tokens,
        "submitted": counters.submitted,
        "finished": counters.finished,
        "aborted": counters.aborted,
        "preemptions": counters.preemptions,
        "steps": counters.steps,
        "busy_us": counters.busy_us,
        "prefill_busy_us": counters.prefill_busy_us,
        "posts": state.posts,
    }))
}

#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Order {
    None {
        #[serde(default)]
        on: Target,
    },
    Status {
        #[serde(default)]
        on: Target,
        #[serde(default = "unavailable")]
        status: u16,
    },
    Hang {
        #[serde(default)]
        on: Target,
    },
    Reset {
        #[serde(default)]
        on: Target,
    },
    Slow {
        factor: f64,
    },
    Restart {},
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Target {
    #[default]
    Requests,
    Metrics,
    Health,
}

fn unavailable() -> u16 {
    503
}
