//! How much of a body may be held before the host is chosen.
//!
//! In: the configured threshold, the stream's buffer limit where the configuration states it, a request's
//! `content-length`, and what Envoy refused before. Out: bytes to hold. It
//! must never ask for more than Envoy is believed to buffer: Envoy answers 413 by itself once what is held plus the
//! next read exceeds the stream's buffer limit, and that limit cannot be read from here.
//!
//! After one refusal at `held` bytes the limit L is known to satisfy `held / 2 ≤ L`, since a read is never larger than
//! L itself. A body that fits half of that in whole is therefore safe to hold; any larger one, or one of unknown
//! length, is decided with its first chunk. Where the limit is stated, nothing has to be refused to learn it.

/// The threshold of one worker for one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldLimit {
    configured_bytes: u32,
    stated_bytes: Option<u32>,
    /// A body of this length surely fits; what is stated, until a refusal proves it wrong.
    learned_bytes: Option<u32>,
}

impl HoldLimit {
    /// Starts with the configured threshold and, where it is stated, the stream's buffer limit.
    #[must_use]
    pub const fn new(configured_bytes: u32, stated_bytes: Option<u32>) -> Self {
        Self {
            configured_bytes,
            stated_bytes,
            learned_bytes: stated_bytes,
        }
    }

    /// Envoy refused a body of which `held_bytes` were there while it was held up to `threshold_bytes`; true when this
    /// lowered the threshold.
    ///
    /// Where nothing was held yet, another filter's limit was exceeded, and nothing is learned. A threshold from before
    /// an earlier refusal says nothing against the present one.
    pub fn refused(&mut self, held_bytes: u32, threshold_bytes: u32) -> bool {
        if held_bytes == 0 {
            return false;
        }
        let current = self.current_bytes();
        let doubted = if threshold_bytes > current {
            current
        } else {
            current / 2
        };
        let lower = doubted.min(held_bytes / 2).max(1);
        self.learned_bytes = Some(lower);
        lower < current
    }

    /// Takes over a configuration. What was learned stays, since most pushes do not touch the listener's limits, unless
    /// the threshold or the stated limit changed: that is the operator's answer to the refusals.
    pub fn reconfigure(&mut self, configured_bytes: u32, stated_bytes: Option<u32>) {
        if (configured_bytes, stated_bytes) != (self.configured_bytes, self.stated_bytes) {
            *self = Self::new(configured_bytes, stated_bytes);
        }
    }

    /// Bytes to hold of a body with this `content-length`; 1 means: decide with the first chunk.
    #[must_use]
    pub fn bytes_for(&self, content_length: Option<u64>) -> u32 {
        match (self.learned_bytes, content_length) {
            (None, _) => self.configured_bytes,
            (Some(learned), Some(length)) if length <= u64::from(learned) => {
                learned.min(self.configured_bytes)
            }
            (Some(_), _) => 1,
        }
    }

    /// The threshold in force, for display.
    #[must_use]
    pub fn current_bytes(&self) -> u32 {
        self.learned_bytes
            .unwrap_or(self.configured_bytes)
            .min(self.configured_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_refusal_the_configured_threshold_holds() {
        let limit = HoldLimit::new(768 << 10, None);
        assert_eq!(limit.bytes_for(None), 768 << 10);
        assert_eq!(limit.bytes_for(Some(8 << 20)), 768 << 10);
    }

    #[test]
    fn after_a_refusal_only_bodies_that_surely_fit_are_held() {
        let mut limit = HoldLimit::new(768 << 10, None);
        assert!(limit.refused(60_000, 768 << 10));
        assert_eq!(limit.bytes_for(Some(20_000)), 30_000);
        assert_eq!(limit.bytes_for(Some(40_000)), 1);
        assert_eq!(limit.bytes_for(None), 1);
    }

    #[test]
    fn a_stated_limit_needs_no_refusal() {
        let mut limit = HoldLimit::new(768 << 10, Some(32 << 10));
        assert_eq!(limit.bytes_for(Some(32 << 10)), 32 << 10);
        assert_eq!(limit.bytes_for(Some((32 << 10) + 1)), 1);
        assert_eq!(limit.bytes_for(None), 1);
        assert_eq!(limit.current_bytes(), 32 << 10);
        assert!(limit.refused(20_000, 32 << 10), "it is wrong");
        assert_eq!(limit.bytes_for(Some(10_000)), 10_000);
        limit.reconfigure(768 << 10, Some(32 << 10));
        assert_eq!(limit.bytes_for(Some(10_001)), 1);
        limit.reconfigure(768 << 10, Some(2 << 20));
        assert_eq!(limit.bytes_for(Some(2 << 20)), 768 << 10);
    }

    #[test]
    fn each_refusal_at_least_halves() {
        let mut limit = HoldLimit::new(64 << 10, None);
        assert!(limit.refused(1 << 20, limit.current_bytes()));
        assert_eq!(limit.current_bytes(), 32 << 10);
        assert!(limit.refused(1 << 20, limit.current_bytes()));
        assert_eq!(limit.current_bytes(), 16 << 10);
    }

    #[test]
    fn refusals_of_bodies_held_before_the_first_one_do_not_halve_again() {
        let mut limit = HoldLimit::new(768 << 10, None);
        assert!(limit.refused(60_000, 768 << 10));
        assert!(!limit.refused(70_000, 768 << 10));
        assert_eq!(limit.current_bytes(), 30_000);
        assert!(limit.refused(50_000, 768 << 10));
        assert_eq!(limit.current_bytes(), 25_000);
        assert!(limit.refused(25_000, 25_000));
        assert_eq!(limit.current_bytes(), 12_500);
    }

    #[test]
    fn a_changed_threshold_forgets_what_was_learned_and_the_same_one_does_not() {
        let mut limit = HoldLimit::new(64 << 10, None);
        assert!(limit.refused(20_000, 64 << 10));
        limit.reconfigure(64 << 10, None);
        assert_eq!(limit.bytes_for(None), 1);
        limit.reconfigure(8 << 10, None);
        assert_eq!((limit.bytes_for(None), limit.current_bytes()), (8 << 10, 8 << 10));
    }

    #[test]
    fn a_refusal_before_any_byte_was_held_teaches_nothing() {
        let mut limit = HoldLimit::new(64 << 10, None);
        assert!(!limit.refused(0, 64 << 10));
        assert_eq!(limit.bytes_for(None), 64 << 10);
    }

    #[test]
    fn no_number_of_refusals_reaches_zero() {
        let mut limit = HoldLimit::new(4096, None);
        (0..12).for_each(|i| assert!(limit.refused(4096, limit.current_bytes()), "refusal {i}"));
        assert!(!limit.refused(1, 1));
        for length in [None, Some(0), Some(1), Some(u64::MAX)] {
            assert_eq!(limit.bytes_for(length), 1, "{length:?}");
        }
    }
}
