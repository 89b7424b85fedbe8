//! Header maps as Envoy hands them over → the few lines that the filter looks at, each map in one pass.
//!
//! Names and values are untrusted: what cannot be read counts as absent.

use super::{DEBUG_HEADERS, host};
use crate::config::{Config, PoolConfig};
use crate::exchange::RequestHead;

/// The request headers that matter, found in one pass over one host call's answer.
pub(super) struct Lines<'a> {
    pub(super) method: &'a [u8],
    pub(super) path: &'a str,
    pub(super) content_type: Option<&'a [u8]>,
    pub(super) content_encoding: Option<&'a [u8]>,
    pub(super) content_length: Option<&'a [u8]>,
    pub(super) awaits_upstream: bool,
    pub(super) spoofed: Vec<String>,
}

impl<'a> Lines<'a> {
    pub(super) fn read(headers: &'a host::Headers, config: &Config) -> Self {
        let mut lines = Self {
            method: b"",
            path: "",
            content_type: None,
            content_encoding: None,
            content_length: None,
            awaits_upstream: false,
            spoofed: Vec::new(),
        };
        for (name, value) in headers.iter() {
            match name {
                b":method" => lines.method = value,
                b":path" => lines.path = core::str::from_utf8(value).unwrap_or_default(),
                b"content-type" => lines.content_type = Some(value),
                b"content-encoding" => lines.content_encoding = Some(value),
                b"content-length" => lines.content_length = Some(value),
                b"expect" => lines.awaits_upstream |= value.eq_ignore_ascii_case(b"100-continue"),
                // Envoy has removed it where no upgrade follows.
                b"upgrade" => lines.awaits_upstream = true,
                _ => {
                    let steers = |pool: &&PoolConfig| pool.steering_header.as_bytes() == name;
                    if let Some(pool) = config.pools.iter().find(steers)
                        && !lines.spoofed.contains(&pool.steering_header)
                    {
                        lines.spoofed.push(pool.steering_header.clone());
                    }
                }
            }
        }
        lines
    }

    pub(super) fn request_head(&self, headers: &host::Headers, pool: &PoolConfig) -> RequestHead {
        let text = |value: Option<&[u8]>| value.map(|value| String::from_utf8_lossy(value).into_owned());
        let find = |wanted: &str| {
            let found = headers.iter().find(|(name, _)| *name == wanted.as_bytes());
            found
                .map(|(_, value)| value.to_vec())
                .filter(|value| !value.is_empty())
        };
        // All lines, as HTTP joins them: a line that a client puts before the one of the gateway's authentication makes a
        // name of its own, not the client's choice of one.
        let join = |wanted: &str| {
            let lines = headers.iter().filter(|(name, _)| *name == wanted.as_bytes());
            let values: Vec<&[u8]> = lines.map(|(_, value)| value).collect();
            Some(values.join(&b',')).filter(|value| !value.is_empty())
        };
        RequestHead {
            path: self.path.to_owned(),
            content_type: text(self.content_type),
            content_encoding: text(self.content_encoding),
            content_length: self.content_length.and_then(parse_number),
            awaits_upstream: self.awaits_upstream,
            tenant: pool.tenant_header.as_deref().and_then(join),
            session: pool.session_headers.iter().find_map(|name| find(name)),
        }
    }
}

/// The response headers that matter.
pub(super) struct AnswerLines<'a> {
    pub(super) status: u16,
    pub(super) is_event_stream: bool,
    pub(super) is_encoded: bool,
    pub(super) content_length: Option<u64>,
    pub(super) served_by: Option<&'a [u8]>,
    /// Headers that only Warmroute may write; clients would take them for its own.
    pub(super) spoofed: Vec<&'static str>,
}

impl<'a> AnswerLines<'a> {
    pub(super) fn read(headers: &'a host::Headers) -> Self {
        let mut lines = Self {
            status: 0,
            is_event_stream: false,
            is_encoded: false,
            content_length: None,
            served_by: None,
            spoofed: Vec::new(),
        };
        for (name, value) in headers.iter() {
            match name {
                b":status" => {
                    lines.status = parse_number(value)
                        .and_then(|code| u16::try_from(code).ok())
                        .unwrap_or(0)
                }
                // Ollama streams one JSON object a line.
                b"content-type" => {
                    lines.is_event_stream =
                        value.starts_with(b"text/event-stream") || value.starts_with(b"application/x-ndjson");
                }
                b"content-encoding" => lines.is_encoded = !value.eq_ignore_ascii_case(b"identity"),
                b"content-length" => lines.content_length = parse_number(value),
                b"x-served-by" => lines.served_by = Some(value),
                _ => {
                    let ours = DEBUG_HEADERS.iter().find(|ours| ours.as_bytes() == name);
                    lines.spoofed.extend(ours);
                }
            }
        }
        lines
    }
}

fn parse_number(digits: &[u8]) -> Option<u64> {
    core::str::from_utf8(digits).ok()?.parse().ok()
}
