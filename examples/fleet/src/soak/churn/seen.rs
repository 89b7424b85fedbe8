//! What clients saw: answers by status, what broke off, and the reasons that debug headers tell.

use std::collections::BTreeMap;

use crate::client::Client;
use crate::soak::report::MAX_EXAMPLES;
use crate::soak::requests::Planned;

/// What the senders saw.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) filtered: Answers,
    pub(super) plain: Answers,
    /// Requests through the filter that their clients left.
    pub(super) left: u64,
    /// Requests through the filter that it lets pass untouched.
    pub(super) passing: u64,
    /// Reasons as the debug headers tell them.
    pub(super) reasons: BTreeMap<String, u64>,
}

impl Seen {
    pub(super) fn add(&mut self, other: Self) {
        self.filtered.add(other.filtered);
        self.plain.add(other.plain);
        self.left += other.left;
        self.passing += other.passing;
        for (reason, count) in other.reasons {
            *self.reasons.entry(reason).or_default() += count;
        }
    }
}

/// What one Envoy answered.
#[derive(Debug, Default)]
pub(super) struct Answers {
    pub(super) sent: u64,
    pub(super) statuses: BTreeMap<u16, u64>,
    broken: u64,
    pub(super) examples: Vec<String>,
}

impl Answers {
    /// Sends a request and notes what came back; gives the reason for its host, if there is one.
    pub(super) async fn send(&mut self, client: &Client, planned: &Planned, url: &str) -> Option<String> {
        let answer = match planned.to(url) {
            Ok(request) => client.request(request).await,
            Err(error) => Err(error),
        };
        match answer {
            Ok(answer) => {
                *self.statuses.entry(answer.status).or_default() += 1;
                if answer.status >= 500 {
                    let text = answer.text();
                    self.example(
                        planned,
                        &format!("{} {}", answer.status, &text[..text.len().min(120)]),
                    );
                }
                let reason = answer.header("x-warmroute-reason")?;
                Some(reason.split(';').next().unwrap_or_default().to_owned())
            }
            Err(error) => {
                self.broken += 1;
                self.example(planned, &error.to_string());
                None
            }
        }
    }

    fn example(&mut self, planned: &Planned, what: &str) {
        if self.examples.len() < MAX_EXAMPLES {
            self.examples.push(format!("{planned}: {what}"));
        }
    }

    /// Answers that broke off, hung, or say that a server failed.
    pub(super) fn failed(&self) -> u64 {
        let errors = self.statuses.iter().filter(|(status, _)| **status >= 500);
        self.broken + errors.map(|(_, count)| count).sum::<u64>()
    }

    /// What the share that failed here is of so many.
    pub(super) fn failed_of(&self, sent: u64) -> u64 {
        (self.failed() * sent).div_ceil(self.sent.max(1))
    }

    pub(super) fn add(&mut self, other: Self) {
        self.sent += other.sent;
        for (status, count) in other.statuses {
            *self.statuses.entry(status).or_default() += count;
        }
        self.broken += other.broken;
        self.examples.extend(other.examples);
        self.examples.truncate(MAX_EXAMPLES);
    }
}
