//! When to start the next scrape: each host once an interval, evenly spread, no bursts.
//!
//! In: the time and the number of hosts. Out: how many scrapes may start and whose turn it is. Credit grows by one host
//! every `interval / hosts` and is capped at what one late tick brings, so that a stall is not made up for.

/// Round-robin over the hosts at an even rate.
#[derive(Debug)]
pub(super) struct Pacer {
    interval_ms: u64,
    last_ms: Option<u64>,
    /// Scrapes that may start, in units of 1 / interval: one scrape costs `interval_ms` of it.
    credit: u64,
    cursor: usize,
}

impl Pacer {
    pub(super) fn new(interval_ms: u32) -> Self {
        Self {
            interval_ms: u64::from(interval_ms.max(1)),
            last_ms: None,
            credit: 0,
            cursor: 0,
        }
    }

    /// How many scrapes may start now.
    pub(super) fn due(&mut self, hosts: usize, now_ms: u64) -> usize {
        let hosts = u64::try_from(hosts).unwrap_or(u64::MAX);
        if hosts == 0 {
            self.last_ms = None;
            self.credit = 0;
            return 0;
        }
        let earned = match self.last_ms {
            // The first hosts need not wait for an interval to pass.
            None => self.interval_ms,
            Some(last_ms) => now_ms.saturating_sub(last_ms).saturating_mul(hosts),
        };
        self.last_ms = Some(now_ms);
        let cap = MAX_GAP_MS
            .saturating_mul(hosts)
            .max(self.interval_ms.saturating_mul(2));
        self.credit = self.credit.saturating_add(earned).min(cap);
        let due = self.credit.checked_div(self.interval_ms).unwrap_or(0);
        usize::try_from(due).unwrap_or(usize::MAX)
    }

    /// The index whose turn it is; the turn moves on.
    pub(super) fn next_index(&mut self, hosts: usize) -> usize {
        let index = if self.cursor < hosts { self.cursor } else { 0 };
        self.cursor = index.saturating_add(1);
        index
    }

    /// Takes note that scrapes started; credit that could not be used waits, up to the cap.
    pub(super) fn spend(&mut self, started: usize) {
        let cost = u64::try_from(started)
            .unwrap_or(u64::MAX)
            .saturating_mul(self.interval_ms);
        self.credit = self.credit.saturating_sub(cost);
    }
}

/// Gap between ticks that is made up for; two scrapes always are, since the ticks of few hosts are far apart.
const MAX_GAP_MS: u64 = 50;
