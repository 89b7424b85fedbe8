//! When a worker that changed something may publish its journal at once → so often on average, a few at a time.
//!
//! In: times. Out: yes or no. A strict gap would leave what a quick request placed just after a heartbeat to the next tick,
//! and workers with little to do are those whose next event is far.

/// How often one worker publishes because of what happens to its requests.
#[derive(Debug, Clone, Default)]
pub struct PublicationPace {
    /// Publications until here are paid for, ms.
    paid_ms: u64,
}

impl PublicationPace {
    /// Whether a publication is affordable. A clock that jumped back makes it so.
    #[must_use]
    pub const fn may_publish(&self, now_ms: u64) -> bool {
        self.paid_ms <= now_ms || self.paid_ms - now_ms > PUBLISH_MS
    }

    /// One was made.
    pub fn published(&mut self, now_ms: u64) {
        let saved_from_ms = now_ms.saturating_sub(PUBLISH_MS * BURST);
        self.paid_ms = self
            .paid_ms
            .clamp(saved_from_ms, now_ms)
            .saturating_add(PUBLISH_MS);
    }
}

/// A publication is a few µs: one in so many ms while requests come without a pause; the tick brings the rest.
const PUBLISH_MS: u64 = 10;
/// Publications that a worker saves up while it has little to do.
const BURST: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_790_000_000_000;

    /// Publications of a worker to which something happens each millisecond.
    fn publications(pace: &mut PublicationPace, from_ms: u64, for_ms: u64) -> u64 {
        let is_published = |now_ms: &u64| {
            let may = pace.may_publish(*now_ms);
            if may {
                pace.published(*now_ms);
            }
            may
        };
        (from_ms..from_ms + for_ms).filter(is_published).count() as u64
    }

    #[test]
    fn a_worker_without_pause_publishes_once_in_10_ms_and_one_with_little_to_do_at_once() {
        let mut pace = PublicationPace::default();
        assert_eq!(publications(&mut pace, NOW_MS, 1_000), 100 + BURST);
        assert_eq!(publications(&mut pace, NOW_MS + 1_000, 1_000), 100);
        // A pause of 40 ms saves up four.
        assert_eq!(publications(&mut pace, NOW_MS + 2_040, 5), 5);
        assert_eq!(publications(&mut pace, NOW_MS + 2_045, 5), 0);
        // A long one saves up no more than the burst.
        assert_eq!(publications(&mut pace, NOW_MS + 100_000, 1_000), 100 + BURST);
    }

    #[test]
    fn a_clock_that_jumps_back_silences_nobody() {
        let mut pace = PublicationPace::default();
        publications(&mut pace, NOW_MS, 1_000);
        assert_eq!(publications(&mut pace, NOW_MS - 3_600_000, 1_000), 100);
    }
}
